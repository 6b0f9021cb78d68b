"""A user's own arrays, in one npz file."""

from pathlib import Path
from typing import Any

import numpy as np

from fedproto.config.options import PositiveFloat
from fedproto.data import DataFolders, Source, Split, from_arrays
from fedproto.data.shared.channel_order import OrderOption
from fedproto.errors import DataError

#: Classes without names: a single wrong label must not create a billion of them.
MAX_UNNAMED_CLASSES = 100_000


def npz(
    data_folders: DataFolders,
    path: str,
    *,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
    channel_order: OrderOption = "auto",
) -> Source:
    """Arrays of your own in an npz file: `x` and `y`, and optional ones.

    Optional are `x_test`, `y_test`, `client` (for `natural`) and `classes` (their names). Bytes are
    divided by 255; then (x − mean) / std, per channel. Without a test set, a seeded fifth of each
    class is held out. `channel_order` says whether the channels of images are `first`, behind the
    rows, or `last`; `auto` finds an axis of 1, 3 or 4 entries.
    """
    arrays = read_npz(Path(path), ("x", "y"))
    return from_named_arrays(
        "npz", path, arrays, mean=mean, std=std, augment=augment, channel_order=channel_order
    )


def from_named_arrays(
    kind: str, path: str, arrays: dict[str, np.ndarray], ending: str = "", **options: Any
) -> Source:
    """Return a source made of arrays by name.

    Errors name an array with `ending` behind it, as it is called in the file or folder.
    """
    y, classes = _read_labels(path, arrays)
    splits = [Split(arrays["x"], y, arrays.get("client"))]
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path} must hold both x_test{ending} and y_test{ending}, or neither")
    if "x_test" in arrays:
        y_test = to_whole_numbers(path, "y_test", arrays["y_test"])
        splits.append(Split(arrays["x_test"], y_test))
    return from_arrays(f"{kind}:{path}", classes, splits, **options)


def read_npz(path: Path, required: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return all arrays of an npz file; raises DataError if a required one is missing."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{path} is not a valid npz file (or is damaged): {error}") from error
    missing = [name for name in required if name not in arrays]
    if missing:
        raise DataError(
            f"{path} holds no array {missing[0]!r}: it needs {', '.join(required)}, "
            f"it has {', '.join(arrays)}"
        )
    return arrays


def to_whole_numbers(path: str, name: str, values: np.ndarray) -> np.ndarray:
    """Return labels, or other ids, as int64, or raise DataError."""
    if values.dtype.kind not in "iu" or values.ndim != 1:
        found = f"{values.dtype} of shape {values.shape}"
        raise DataError(
            f"{path}: {name} must be a list of whole numbers, not {found}; names go in `classes`"
        )
    return values.astype(np.int64)


def _read_labels(path: str, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the labels and the names of the classes."""
    y = to_whole_numbers(path, "y", arrays["y"])
    if "classes" in arrays:
        return y, tuple(str(name) for name in arrays["classes"].reshape(-1))
    highest = int(y.max(initial=0))
    if highest >= MAX_UNNAMED_CLASSES:
        raise DataError(
            f"{path} has a label {highest}, out of range: labels count from 0, "
            "or `classes` names them"
        )
    return y, tuple(str(label) for label in range(highest + 1))
