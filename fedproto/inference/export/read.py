"""Reads a client that was exported, perhaps by a stranger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedproto.config import plugins
from fedproto.core.files import read_tensors
from fedproto.core.prototypes import Tau
from fedproto.core.types import Tree
from fedproto.data.shared.feature_encoding import ENCODING, Encoding, read_encoding
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, DataError, FedProtoError
from fedproto.inference.export.manifest import (
    CALIBRATION,
    CALIBRATION_FORMAT,
    MANIFEST,
    WEIGHTS,
    WEIGHTS_FORMAT,
    check_files,
    read_manifest,
)
from fedproto.inference.model_building import build_model, load_into_copy
from fedproto.inference.trained_client import TrainedClient, build_teacher_map
from fedproto.inference.training_rows import EXPORTED, no_training_rows
from fedproto.inference.ways import ALL_WAYS
from fedproto.models import Fit
from fedproto.runs.prototype_files import PROTOTYPES, read_prototypes
from fedproto.runs.teacher_files import TEACHER_FILE, read_teacher


def read_exported(folder: Path, module: nn.Module | None = None) -> TrainedClient:
    """Return a client that `export_client` wrote; refused if a file is not the one written.

    No file of the folder is code. A model of the form `package.module:function` is imported only
    if it is trusted; one that was passed from Python must be passed again, as `module`.
    """
    manifest = read_manifest(folder / MANIFEST)
    is_from_python = bool(manifest.get("is_from_python"))
    if is_from_python and module is None:
        raise ConfigError(
            f"the client in {folder} has a module that was passed from Python "
            f"({manifest['model']}), whose code no file holds: pass the module again, as in "
            f"fedproto.Classifier.load({folder.name!r}, module=...)"
        )
    if module is None:
        plugins.refuse_plugins({"model": manifest["model"]}, folder / MANIFEST)
    files = manifest["files"]
    check_files(folder, files)
    shared = read_prototypes(folder / PROTOTYPES) if PROTOTYPES in files else None
    if shared is not None and "tau" in manifest:
        shared = replace(shared, tau=Tau(manifest["tau"], "absolute"))
    teacher = read_teacher(folder / TEACHER_FILE) if TEACHER_FILE in files else None
    calibration = _read_calibration(folder / CALIBRATION) if CALIBRATION in files else {}
    encoding = read_encoding(folder / ENCODING) if ENCODING in files else None
    state, _ = read_tensors(folder / WEIGHTS, WEIGHTS_FORMAT)
    classes = tuple(manifest["classes"])
    try:
        preprocessing = _make_preprocessing(manifest["input"], encoding)
        fit = Fit(preprocessing.shape, len(classes), manifest["dim"])
        trained = TrainedClient(
            classes=classes,
            own=tuple(manifest["own"]),
            prototypes=shared,
            about=manifest["about"],
            module=_restore_module(manifest["model"], module, fit, state),
            preprocessing=preprocessing,
            calibration=calibration,
            temperatures={way: float(value) for way, value in manifest["temperatures"].items()},
            is_from_python=is_from_python,
            teacher=teacher,
            teacher_weight=float(manifest.get("teacher_weight", 1.0)),
            feature_map=build_teacher_map(teacher, preprocessing),
            training=no_training_rows(EXPORTED),
        )
        trained.refuse_other_sizes(manifest["dim"])
        _refuse_infinite_outputs(trained)
    except FedProtoError as error:
        raise DataError(
            f"{folder / MANIFEST} and the files beside it do not go together: {error}"
        ) from error
    return trained


def _restore_module(text: str, module: nn.Module | None, fit: Fit, state: Tree) -> nn.Module:
    """Return the client's model with its weights: the module given, or else built from its text."""
    if module is not None:
        return load_into_copy(module, state, fit)
    return build_model(text, fit, state)


def _make_preprocessing(given: dict[str, Any], encoding: Encoding | None) -> Preprocessing:
    """Return the preprocessing that a manifest's `input` and encoding.json describe."""
    shape = tuple(given["shape"])
    if encoding is not None and shape != (encoding.width,):
        raise DataError(
            f"{ENCODING} makes inputs of shape ({encoding.width},), where {shape} is wanted"
        )
    mean = tuple(given["mean"])
    std = tuple(given["std"])
    channel_order = given.get("channel_order", "first")
    window = given.get("window")
    return Preprocessing(
        shape,
        mean,
        std,
        given["scale"],
        encoding,
        channel_order,
        None if window is None else (window[0], window[1]),
    )


def _read_calibration(path: Path) -> dict[str, np.ndarray]:
    """Return the novelty of held-out rows per way to classify."""
    tensors, _ = read_tensors(path, CALIBRATION_FORMAT)
    for way, values in tensors.items():
        is_row_of_numbers = values.dim() == 1 and values.is_floating_point()
        if way not in ALL_WAYS or not is_row_of_numbers or not torch.isfinite(values).all():
            raise DataError(
                f"{path}: {way!r} must be one of {', '.join(ALL_WAYS)}, and a row of finite numbers"
            )
    return {way: tensors[way].numpy() for way in ALL_WAYS if way in tensors}


def _refuse_infinite_outputs(trained: TrainedClient) -> None:
    outputs = trained.probe_outputs()
    found = [each for each in outputs if each is not None]
    if not all(bool(torch.isfinite(each).all()) for each in found):
        raise DataError("the model gives outputs that are not finite")
