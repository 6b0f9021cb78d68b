"""The manifest of an exported client: what it must hold, and the files it vouches for."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

from fedproto.core.class_names import are_plain_names
from fedproto.core.entries import Entry, find_wrong_entry
from fedproto.core.files import TensorFormat, read_json
from fedproto.data.shared.channel_order import ORDERS
from fedproto.data.shared.dicom import is_window
from fedproto.data.shared.feature_encoding import ENCODING, is_count
from fedproto.errors import DataError, shown
from fedproto.inference.ways import ALL_WAYS
from fedproto.runs.prototype_files import PROTOTYPES
from fedproto.runs.teacher_files import TEACHER_FILE

MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
CALIBRATION = "calibration.safetensors"
ONNX = "model.onnx"
FILES = (WEIGHTS, PROTOTYPES, TEACHER_FILE, CALIBRATION, ENCODING, ONNX)
KIND = "member"
VERSION = 1
WEIGHTS_FORMAT = TensorFormat("model", 1, DataError)
CALIBRATION_FORMAT = TensorFormat("calibration", 1, DataError)
MAX_SHOWN_CHARACTERS = 80  # of a wrong value, in a sentence


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of a manifest, every key that is used checked."""
    if not path.exists():
        raise DataError(
            f"{path.parent} is not an exported client: it holds no {MANIFEST}, "
            "which `fedproto export` writes"
        )
    manifest = read_json(path, DataError)
    if not isinstance(manifest, dict) or manifest.get("fedproto") != KIND:
        raise DataError(
            f"{path} is not the manifest of an exported client: its 'fedproto' must be {KIND!r}"
        )
    version = manifest.get("version")
    if version != VERSION:
        found = shown(version, MAX_SHOWN_CHARACTERS)
        raise DataError(f"{path} has version {found}; this fedproto reads version {VERSION}")
    return check_manifest(manifest, str(path))


def check_files(folder: Path, hashes: dict[str, str]) -> None:
    """Refuse a file whose SHA-256 is not the one in the manifest."""
    for name, stated in hashes.items():
        path = folder / name
        try:
            found = sha256(path)
        except OSError as error:
            raise DataError(
                f"{path}, which {MANIFEST} names, cannot be read: {error.strerror}"
            ) from error
        if found != stated:
            raise DataError(
                f"{path} is corrupted or from another export: "
                f"its SHA-256 is not the one in {MANIFEST}"
            )


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_manifest(manifest: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the manifest if every key that reading uses is valid; `where` names it in errors."""
    key = find_wrong_entry(manifest, _ENTRIES)
    if key is not None:
        wanted = _ENTRIES[key].description
        if key not in manifest:
            raise DataError(f"{where} lacks {key!r}: {wanted}")
        found = shown(manifest[key], MAX_SHOWN_CHARACTERS)
        raise DataError(f"{where}: {key!r} must be {wanted}, not {found}")
    if "tau" in manifest and not _is_positive(manifest["tau"]):
        found = shown(manifest["tau"], MAX_SHOWN_CHARACTERS)
        raise DataError(f"{where}: 'tau' must be a positive number, not {found}")
    if "teacher_weight" in manifest and not _is_weight(manifest["teacher_weight"]):
        found = shown(manifest["teacher_weight"], MAX_SHOWN_CHARACTERS)
        raise DataError(f"{where}: 'teacher_weight' must be a number of 0 or more, not {found}")
    unknown = set(manifest["own"]) - set(manifest["classes"])
    if unknown:
        name = shown(min(unknown), MAX_SHOWN_CHARACTERS)
        raise DataError(f"{where}: 'own' names {name}, which is not among its classes")
    return manifest


# --- what is valid


def _is_model_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and "\n" not in value


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < sys.float_info.max


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_weight(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_input(value: Any) -> bool:
    """Return whether these are a `shape`, a `scale`, and a `mean` and `std` that fit the shape."""
    if not isinstance(value, dict):
        return False
    shape = value.get("shape")
    mean = value.get("mean")
    std = value.get("std")
    if not isinstance(shape, list) or not isinstance(mean, list) or not isinstance(std, list):
        return False
    if not shape or not all(is_count(size) for size in shape):
        return False
    lengths = (1, shape[0])  # one number, or one per channel
    if len(mean) not in lengths or len(std) not in lengths:
        return False
    if value.get("channel_order", "first") not in ORDERS or not is_window(value.get("window")):
        return False
    mean_is_valid = all(_is_number(each) for each in mean)
    std_is_valid = all(_is_positive(each) for each in std)
    return mean_is_valid and std_is_valid and _is_positive(value.get("scale"))


def _is_l2(value: Any) -> bool:
    return value == "l2"


def _are_temperatures(value: Any) -> bool:
    """Return whether these are positive numbers by way to classify."""
    if not isinstance(value, dict) or not set(value) <= set(ALL_WAYS):
        return False
    return all(_is_positive(each) for each in value.values())


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_hashes(value: Any) -> bool:
    """Return whether these are SHA-256 by file name, at least of the weights."""
    if not isinstance(value, dict):
        return False
    for digest in value.values():
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            return False
    return WEIGHTS in value and set(value) <= set(FILES)


#: The keys that `read_exported` uses; the others are for people.
_ENTRIES = {
    "classes": Entry(are_plain_names, "a list of different names of one line each"),
    "own": Entry(are_plain_names, "a list of some of the classes"),
    "model": Entry(_is_model_text, "a model's name and options, such as 'cnn(channels=18)'"),
    "input": Entry(
        _is_input,
        "the `shape` of the inputs, and the `mean`, `std` and `scale` that turn x into "
        "(x / scale - mean) / std, perhaps with a `channel_order` of first or last "
        "and a `window` of centre and width",
    ),
    "dim": Entry(is_count, "the number of features"),
    "distance": Entry(_is_l2, "'l2'"),
    "temperatures": Entry(
        _are_temperatures, f"positive numbers, each for one of {', '.join(ALL_WAYS)}"
    ),
    "about": Entry(_is_object, "an object"),
    "files": Entry(
        _are_hashes,
        f"the SHA-256 of {WEIGHTS} and of those of {', '.join(FILES[1:])} that are there",
    ),
}
