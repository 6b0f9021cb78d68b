"""Writes a trained client as a folder of its own."""

from __future__ import annotations

import json
import math
import platform
import sys
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from fedproto.core.files import write_atomically, write_tensors
from fedproto.data.shared.feature_encoding import ENCODING, to_json
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, DataError, FedProtoError, RunFolderError
from fedproto.inference.calibration import (
    compute_threshold,
    count_rows_needed,
    explain_too_few_rows,
)
from fedproto.inference.export.graph import OnnxGraph, build_onnx
from fedproto.inference.export.manifest import (
    CALIBRATION,
    CALIBRATION_FORMAT,
    FILES,
    KIND,
    MANIFEST,
    ONNX,
    VERSION,
    WEIGHTS,
    WEIGHTS_FORMAT,
    check_manifest,
    sha256,
)
from fedproto.inference.judgement import name_client
from fedproto.inference.model_building import build_model, drop_file_options, names_files
from fedproto.inference.trained_client import TrainedClient
from fedproto.inference.ways import TEACHER_WAYS
from fedproto.models import Fit
from fedproto.runs.folder import is_taken, whole_folder
from fedproto.runs.held_out import Outputs
from fedproto.runs.prototype_files import PROTOTYPES, write_prototypes
from fedproto.runs.teacher_files import TEACHER_FILE, write_teacher

MANIFEST_REJECT_FRACTION = 0.05  # of known inputs, for which the manifest states thresholds


def export_client(trained: TrainedClient, folder: Path, onnx: bool = True) -> list[str]:
    """Write a client as a folder, which appears with everything in it or not at all.

    Returns a sentence for each thing that cannot be written and is left out.
    """
    if is_taken(folder):
        raise RunFolderError(f"{folder} is not empty: name another folder with --to")
    notices = []
    if trained.teacher is not None and names_files("feature_map", trained.teacher.feature_map):
        trained = _leave_teacher_out(trained)
        notices.append(
            f"{folder} leaves the teacher out, because its feature map needs a file of this machine"
        )
    rebuilt = trained if trained.is_from_python else _rebuild_from_text(trained)
    if trained.is_from_python:
        _refuse_infinite(trained, trained.probe_outputs())
    graph = build_onnx(rebuilt) if onnx else None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as temporary:
            _fill(temporary, rebuilt, graph)
    except OSError as error:
        raise RunFolderError(
            f"{folder} cannot be made: {error}; name another folder with --to"
        ) from error
    if graph is not None and graph.teacher_obstacle is not None:
        notices.append(f"{folder / ONNX} leaves the teacher out: {graph.teacher_obstacle}")
    return notices


def _leave_teacher_out(trained: TrainedClient) -> TrainedClient:
    """Return the client as if its run had no teacher; refused if it has nothing else."""
    assert trained.teacher is not None, "that is what is left out"
    if trained.teacher.is_alone:
        raise ConfigError(
            f"the client cannot be exported: it classifies by its teacher alone, whose feature map "
            f"{trained.teacher.feature_map} needs a file of this machine"
        )
    calibration = dict(trained.calibration)
    temperatures = dict(trained.temperatures)
    for way in TEACHER_WAYS:
        calibration.pop(way, None)
        temperatures.pop(way, None)
    return replace(
        trained,
        teacher=None,
        feature_map=None,
        calibration=calibration,
        temperatures=temperatures,
    )


def explain_missing_thresholds(trained: TrainedClient) -> str | None:
    """Return why the manifest states no thresholds: too few rows were held out; else None."""
    counts = [len(values) for values in trained.calibration.values()]
    rows = min(counts, default=0)
    if rows >= count_rows_needed(MANIFEST_REJECT_FRACTION):
        return None
    return explain_too_few_rows(name_client(trained), rows, MANIFEST_REJECT_FRACTION)


def _rebuild_from_text(trained: TrainedClient) -> TrainedClient:
    """Return the client with its model built from its text alone, as whoever reads it will."""
    text = str(trained.about.get("model"))
    outputs = trained.probe_outputs()
    _refuse_infinite(trained, outputs)
    try:
        portable_text = drop_file_options(text)
        dim = outputs.features.shape[1]
        fit = Fit(trained.preprocessing.shape, len(trained.classes), dim)
        module = build_model(portable_text, fit, trained.module.state_dict())
        rebuilt = replace(trained, module=module)
        is_same = _are_close(rebuilt.probe_outputs(), outputs)
    except FedProtoError as error:
        raise ConfigError(
            f"the model {text!r} cannot be exported, because it cannot be built from its name "
            f"(a module that was passed from Python cannot): {error}"
        ) from error
    if not is_same:
        raise ConfigError(
            f"the model {text!r} cannot be exported: built from its name, it gives other outputs"
        )
    about = trained.about | {"model": portable_text}
    if "dataset" in about:
        about["dataset"] = _drop_folder(str(about["dataset"]))
    return replace(rebuilt, about=about)


def _refuse_infinite(trained: TrainedClient, outputs: Outputs) -> None:
    """Refuse the numbers of a training that diverged, which could not be read again."""
    values = [outputs.features.numpy(), outputs.logits.numpy(), *trained.calibration.values()]
    if trained.prototypes is not None:
        values.append(trained.prototypes.values.float().numpy())
    if not all(bool(np.isfinite(each).all()) for each in values):
        raise DataError(
            "the client's outputs or prototypes are not finite: its training diverged, so export "
            "another client"
        )


def _are_close(a: Outputs, b: Outputs) -> bool:
    """Compare outputs up to the order of sums, which may change with the layout of weights."""
    pairs = ((a.features, b.features), (a.logits, b.logits))
    for one, other in pairs:
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
            return False
    return True


def _drop_folder(dataset: str) -> str:
    """Return `csv:flowers.csv` for `csv:/home/me/flowers.csv`."""
    base, colon, path = dataset.partition(":")
    if colon and PurePath(path).is_absolute():
        return f"{base}:{PurePath(path).name}"
    return dataset


def _fill(folder: Path, trained: TrainedClient, graph: OnnxGraph | None) -> None:
    """Write all files of the folder; the manifest comes last, with the hashes of the others."""
    state = trained.module.state_dict()
    write_tensors(folder / WEIGHTS, state, WEIGHTS_FORMAT, {})
    shared = trained.prototypes
    if shared is not None:
        tensors = {"prototypes": shared.values, "known": shared.known}
        write_prototypes(folder / PROTOTYPES, tensors, shared.classes)
    if trained.teacher is not None:
        write_teacher(folder / TEACHER_FILE, replace(trained.teacher, left=()))
    if trained.calibration:
        calibration = {way: torch.tensor(values) for way, values in trained.calibration.items()}
        write_tensors(folder / CALIBRATION, calibration, CALIBRATION_FORMAT, {})
    if trained.preprocessing.encoding is not None:
        _write_json(folder / ENCODING, to_json(trained.preprocessing.encoding))
    if graph is not None:
        write_atomically(folder / ONNX, graph.content)
    hashes = {name: sha256(folder / name) for name in FILES if (folder / name).exists()}
    manifest = _make_manifest(trained, hashes, graph)
    _write_json(folder / MANIFEST, check_manifest(manifest, "the client"))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1) + "\n"
    write_atomically(path, text.encode())


def _make_manifest(
    trained: TrainedClient, hashes: dict[str, str], graph: OnnxGraph | None
) -> dict[str, Any]:
    """Return the content of manifest.json; `hashes` are those of the other files."""
    held_out_rows = {way: len(values) for way, values in trained.calibration.items()}
    manifest: dict[str, Any] = {
        "fedproto": KIND,
        "version": VERSION,
        "classes": list(trained.classes),
        "own": list(trained.own),
        "model": trained.about["model"],
        "input": _describe_input(trained.preprocessing),
        "dim": trained.probe_outputs().features.shape[1],
        "distance": "l2",
        "calibration": held_out_rows,
        "thresholds": _compute_thresholds(trained),
        "temperatures": trained.temperatures,
    }
    if trained.prototypes is not None:
        manifest["tau"] = float(trained.measure_tau())
    if trained.teacher is not None:
        manifest["teacher_weight"] = trained.teacher_weight
    obstacle = explain_missing_thresholds(trained)
    if obstacle is not None:
        manifest["cannot_reject"] = obstacle
    if graph is not None:
        manifest["onnx"] = graph.columns
    if trained.is_from_python:
        manifest["is_from_python"] = True
    manifest["about"] = trained.about
    manifest["versions"] = {
        "fedproto": sys.modules["fedproto"].__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    manifest["files"] = hashes
    return manifest


def _describe_input(preprocessing: Preprocessing) -> dict[str, Any]:
    """Return the shape of an input, and what turns x into (x / scale − mean) / std."""
    mean = [float(value) for value in preprocessing.mean]
    std = [float(value) for value in preprocessing.std]
    shape = list(preprocessing.shape)
    described: dict[str, Any] = {"shape": shape, "mean": mean, "std": std}
    described["scale"] = float(preprocessing.scale)
    if preprocessing.channel_order != "first":
        described["channel_order"] = preprocessing.channel_order
    if preprocessing.window is not None:
        described["window"] = list(preprocessing.window)
    return described


def _compute_thresholds(trained: TrainedClient) -> dict[str, float | None]:
    """Return a threshold per way to classify; None for infinity, which JSON does not have."""
    thresholds: dict[str, float | None] = {}
    for way, calibration in trained.calibration.items():
        threshold = compute_threshold(calibration, MANIFEST_REJECT_FRACTION)
        thresholds[way] = threshold if math.isfinite(threshold) else None
    return thresholds
