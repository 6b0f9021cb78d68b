"""A trained member as a folder of its own, which needs neither the run nor its data.

manifest.json            what the member is, what it takes and gives, and the SHA-256 of the other files
model.safetensors        its parameters and buffers, by name
prototypes.safetensors   the federation's prototypes, where its method has any; in the form of a run's
calibration.safetensors  how far held-out images lie, for "none of these"; where some were held out
encoding.json            how rows of a table, or texts, become numbers; where it was trained on such
model.onnx               x, as the data set stores it -> features, logits and, where there are prototypes, distances

Files of the machine that wrote it are not named: not the data set's folder, nor weights that training began with.
"""

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
from torch import Tensor

from fedproto.config import plugins
from fedproto.core.files import TensorFormat, read_tensors, write_atomically, write_tensors
from fedproto.data.shared.feature_encoding import ENCODING, Encoding, read_encoding, to_json
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, DataError, FedProtoError, RunFolderError
from fedproto.inference.export.graph import near, onnx_of
from fedproto.inference.export.manifest import (
    CALIBRATION,
    FILES,
    KIND,
    MANIFEST,
    ONNX,
    VERSION,
    WEIGHTS,
    check_files,
    checked,
    read_manifest,
    sha256,
)
from fedproto.inference.export.models import built, close, tried, without_files
from fedproto.inference.trained_client import (
    WAYS,
    Trained,
    rows_needed,
    threshold,
    why_not_rejecting,
)
from fedproto.models import Fit
from fedproto.runs.folder import is_taken, whole_folder
from fedproto.runs.prototype_files import PROTOTYPES, read_prototypes, write_prototypes

WEIGHTS_FORMAT = TensorFormat("model", 1, DataError)
CALIBRATION_FORMAT = TensorFormat("calibration", 1, DataError)
SHOWN_REJECT = 0.05  # the share of known images for which the manifest states thresholds


# --- writing


def write_member(member: Trained, folder: Path, onnx: bool = True) -> None:
    """The folder appears with everything in it, or not at all."""
    if is_taken(folder):
        raise RunFolderError(f"{folder} is not empty: name another folder with --to")
    rebuilt = _rebuilt_from_name(member)
    graph = onnx_of(rebuilt) if onnx else None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as temporary:
            _fill(temporary, rebuilt, graph)
    except OSError as error:
        raise RunFolderError(
            f"{folder} cannot be made: {error}; name another folder with --to"
        ) from error


def _fill(folder: Path, member: Trained, graph: bytes | None) -> None:
    write_tensors(folder / WEIGHTS, member.module.state_dict(), WEIGHTS_FORMAT, {})
    if member.prototypes is not None:
        tensors = {"prototypes": member.prototypes.values, "known": member.prototypes.known}
        write_prototypes(folder / PROTOTYPES, tensors, member.prototypes.classes)
    if member.calibration:
        calibration = {way: torch.tensor(values) for way, values in member.calibration.items()}
        write_tensors(folder / CALIBRATION, calibration, CALIBRATION_FORMAT, TENSORS_VERSION, {})
    if member.preprocessing.encoding is not None:
        _write_json(folder / ENCODING, to_json(member.preprocessing.encoding))
    if graph is not None:
        write_atomically(folder / ONNX, graph)
    files = {name: sha256(folder / name) for name in FILES if (folder / name).exists()}
    _write_json(folder / MANIFEST, checked(_manifest(member, files), "the member"))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def _manifest(member: Trained, files: dict[str, str]) -> dict[str, Any]:
    prepared = member.preprocessing
    thresholds = {
        way: threshold(values, SHOWN_REJECT) for way, values in member.calibration.items()
    }
    obstacle = why_not_rejecting_of(member)
    return {
        "fedproto": KIND,
        "version": VERSION,
        "classes": list(member.classes),
        "own": list(member.own),
        "model": member.about["model"],
        "input": {
            "shape": list(prepared.shape),
            "mean": [float(value) for value in prepared.mean],
            "std": [float(value) for value in prepared.std],
            "scale": float(prepared.scale),
        },
        "dim": tried(member)[0].shape[1],
        "distance": "l2",
        "calibration": {
            way: len(values) for way, values in member.calibration.items()
        },  # held-out images
        "thresholds": {
            way: v if math.isfinite(v) else None for way, v in thresholds.items()
        },  # JSON has no infinity
        **({"cannot_reject": obstacle} if obstacle else {}),
        **(
            {"onnx": {"logits": list(member.classes), "distances": list(near(member))}}
            if ONNX in files
            else {}
        ),
        "about": member.about,
        "versions": {
            "fedproto": sys.modules["fedproto"].__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "files": files,
    }


def why_not_rejecting_of(member: Trained) -> str | None:
    """A sentence where the calibration is too small for the manifest to state thresholds; else None."""
    rows = min((len(values) for values in member.calibration.values()), default=0)
    if rows >= rows_needed(SHOWN_REJECT):
        return None
    return why_not_rejecting(
        f"client {member.about.get('client', 'of this folder')}", rows, SHOWN_REJECT
    )


def _rebuilt_from_name(member: Trained) -> Trained:
    """The member with its architecture built anew from its name alone, as it will be where the folder is read."""
    name, seen = str(member.about.get("model")), tried(member)
    _refuse_broken(member, seen)
    try:
        model = without_files(name)
        fit = Fit(member.preprocessing.shape, len(member.classes), seen[0].shape[1])
        again = replace(member, module=built(model, fit, member.module.state_dict()))
        same = all(map(close, tried(again), seen))
    except FedProtoError as error:
        raise ConfigError(
            f"the model {name!r} cannot be built again from its name, as one that was given as a module cannot, so it "
            f"cannot be exported: {error}"
        ) from error
    if not same:
        raise ConfigError(
            f"the model {name!r}, built again from its name, gives other outputs: it cannot be exported"
        )
    dataset = (
        {"dataset": _without_folder(str(member.about["dataset"]))}
        if "dataset" in member.about
        else {}
    )
    return replace(again, about=member.about | {"model": model} | dataset)


def _refuse_broken(member: Trained, seen: tuple[Tensor, Tensor]) -> None:
    """What `read_member` would refuse is not written: numbers of a training that diverged."""
    shared = [] if member.prototypes is None else [member.prototypes.values]
    finite = [bool(torch.isfinite(each).all()) for each in (*seen, *shared)]
    if not all(finite) or not all(np.isfinite(each).all() for each in member.calibration.values()):
        raise DataError(
            "the member's outputs or prototypes are not finite: its training diverged, export another"
        )


def _without_folder(dataset: str) -> str:
    """`csv:/home/me/flowers.csv` is `csv:flowers.csv` to others."""
    base, colon, path = dataset.partition(":")
    return f"{base}:{PurePath(path).name}" if colon and PurePath(path).is_absolute() else dataset


# --- reading


def read_member(folder: Path) -> Trained:
    """A member that `write_member` wrote; refused where a file is not the one that was written.

    No file of the folder is code. A model of the form `package.module:function` is imported only if it is trusted.
    """
    manifest = read_manifest(folder / MANIFEST)
    plugins.refuse_plugins({"model": manifest["model"]}, folder / MANIFEST)
    check_files(folder, manifest["files"])
    shared = read_prototypes(folder / PROTOTYPES) if PROTOTYPES in manifest["files"] else None
    calibration = (
        _read_calibration(folder / CALIBRATION) if CALIBRATION in manifest["files"] else {}
    )
    encoding = read_encoding(folder / ENCODING) if ENCODING in manifest["files"] else None
    classes, own = tuple(manifest["classes"]), tuple(manifest["own"])
    state, _ = read_tensors(folder / WEIGHTS, WEIGHTS_FORMAT)
    try:
        preprocessing = _preprocessing(manifest["input"], encoding)
        module = built(
            manifest["model"], Fit(preprocessing.shape, len(classes), manifest["dim"]), state
        )
        member = Trained(
            module, preprocessing, classes, own, shared, calibration, manifest["about"]
        )
        _refuse_other_sizes(member, manifest["dim"])
    except FedProtoError as error:
        raise DataError(
            f"{folder / MANIFEST} and the files beside it do not go together: {error}"
        ) from error
    return member


def _preprocessing(given: dict[str, Any], encoding: Encoding | None) -> Preprocessing:
    if encoding is not None and given["shape"] != [encoding.width]:
        raise DataError(
            f"{ENCODING} makes inputs of shape ({encoding.width},), where {tuple(given['shape'])} is wanted"
        )
    return Preprocessing(
        tuple(given["shape"]), tuple(given["mean"]), tuple(given["std"]), given["scale"], encoding
    )


def _read_calibration(path: Path) -> dict[str, np.ndarray]:
    tensors, _ = read_tensors(path, CALIBRATION_FORMAT)
    for way, values in tensors.items():
        if (
            way not in WAYS
            or values.dim() != 1
            or not (values.is_floating_point() and torch.isfinite(values).all())
        ):
            raise DataError(
                f"{path}: {way!r} must be one of {', '.join(WAYS)}, and a row of finite numbers"
            )
    return {way: tensors[way].numpy() for way in WAYS if way in tensors}


def _refuse_other_sizes(member: Trained, dim: int) -> None:
    """A manifest may be wrong about its files, and a model from outside may have changed since."""
    seen = tried(member)
    if not all(torch.isfinite(each).all() for each in seen):
        raise DataError("the model gives outputs that are not finite")
    features, logits = (each.shape[1] for each in seen)
    if (features, logits) != (dim, len(member.classes)):
        wanted = f"{dim} and {len(member.classes)}"
        raise DataError(
            f"the model gives {features} features and {logits} logits, where {wanted} are wanted"
        )
    if member.prototypes is not None and member.prototypes.values.shape[1] != dim:
        raise DataError(
            f"the prototypes have {member.prototypes.values.shape[1]} values, and the features {dim}"
        )
