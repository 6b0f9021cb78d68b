"""What a manifest must hold, and the files it vouches for."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedproto.core.class_names import is_plain
from fedproto.core.files import read_json
from fedproto.data.shared.feature_encoding import ENCODING, is_count
from fedproto.errors import DataError, shown
from fedproto.runs.prototype_files import PROTOTYPES

MANIFEST, WEIGHTS, CALIBRATION, ONNX = (
    "manifest.json",
    "model.safetensors",
    "calibration.safetensors",
    "model.onnx",
)
FILES = (WEIGHTS, PROTOTYPES, CALIBRATION, ENCODING, ONNX)
KIND, VERSION = "member", 1


def read_manifest(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise DataError(
            f"{path.parent} is no exported member: it holds no {MANIFEST}, as `fedproto export` writes it"
        )
    manifest = read_json(path, DataError)
    if not isinstance(manifest, dict) or manifest.get("fedproto") != KIND:
        raise DataError(
            f"{path} is not the manifest of an exported member: its 'fedproto' must be {KIND!r}"
        )
    version = manifest.get("version")
    if version != VERSION:
        raise DataError(
            f"{path} is of version {_shown(version)}, and this fedproto reads version {VERSION} only"
        )
    return checked(manifest, str(path))


def check_files(folder: Path, files: dict[str, str]) -> None:
    for name, digest in files.items():
        try:
            found = sha256(folder / name)
        except OSError as error:
            raise DataError(
                f"{folder / name}, which {MANIFEST} names, cannot be read: {error.strerror}"
            ) from error
        if found != digest:
            raise DataError(
                f"{folder / name} is damaged or of another export: its SHA-256 is not that in {MANIFEST}"
            )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_name(value: Any) -> bool:
    return (
        isinstance(value, str) and value != "" and "\n" not in value
    )  # prototypes.safetensors has one a line


def _is_class(value: Any) -> bool:
    return isinstance(value, str) and is_plain(value)


def _is_names(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(map(_is_class, value))
        and len(set(value)) == len(value)
    )


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) < sys.float_info.max
    )


def _is_input(value: Any) -> bool:
    if not isinstance(value, dict) or not all(
        isinstance(value.get(key), list) for key in ("shape", "mean", "std")
    ):
        return False
    shape, sides = value["shape"], (value["mean"], value["std"])
    return (
        bool(shape)
        and all(map(is_count, shape))
        and all(len(side) in (1, shape[0]) and all(map(_is_number, side)) for side in sides)
        and all(each > 0 for each in value["std"])
        and _is_number(value.get("scale"))
        and value["scale"] > 0
    )


def _is_files(value: Any) -> bool:
    digests = isinstance(value, dict) and all(
        isinstance(each, str) and re.fullmatch("[0-9a-f]{64}", each) for each in value.values()
    )
    return digests and {WEIGHTS} <= value.keys() <= set(FILES)


#: What `read_member` looks at; the other keys are for people.
_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "classes": (_is_names, "a list of different names of one line each"),
    "own": (_is_names, "a list of some of the classes"),
    "model": (_is_name, "a model's name and options, such as 'cnn(channels=18)'"),
    "input": (
        _is_input,
        "the inputs' `shape`, and `mean`, `std` and `scale`, which make x (x / scale - mean) / std",
    ),
    "dim": (is_count, "the number of features"),
    "distance": (lambda value: value == "l2", "'l2'"),
    "about": (lambda value: isinstance(value, dict), "an object"),
    "files": (
        _is_files,
        f"the SHA-256 of {WEIGHTS} and of what else there is of {', '.join(FILES[1:])}",
    ),
}


def checked(manifest: dict[str, Any], where: str) -> dict[str, Any]:
    for key, (accepts, wanted) in _WANTED.items():
        if key not in manifest:
            raise DataError(f"{where} lacks {key!r}: {wanted}")
        if not accepts(manifest[key]):
            raise DataError(f"{where}: {key!r} must be {wanted}, not {_shown(manifest[key])}")
    strangers = set(manifest["own"]) - set(manifest["classes"])
    if strangers:
        raise DataError(
            f"{where}: 'own' names {_shown(min(strangers))}, which is none of its classes"
        )
    return manifest


def _shown(value: Any) -> str:
    return shown(value, 80)
