from pathlib import Path
from typing import Any

import numpy as np

from fedproto.config.options import PositiveFloat
from fedproto.data import DataFolders, Source, Split, from_arrays
from fedproto.errors import DataError

MOST_CLASSES = 100_000  # without names; one wild label must not make a billion of them


def npz(
    places: DataFolders,
    path: str,
    *,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """Arrays of your own: `x` and `y`; optionally `x_test`, `y_test`, `client` (for `natural`), `classes` (names).

    Bytes are divided by 255; then (x − mean) / std, per channel. Without a test set, a seeded fifth of each class is
    held out.
    """
    arrays = read_npz(Path(path), ("x", "y"))
    return from_named("npz", path, arrays, mean=mean, std=std, augment=augment)


def from_named(
    kind: str, path: str, arrays: dict[str, np.ndarray], end: str = "", **options: Any
) -> Source:
    """A source of arrays by their names, which stand with `end` in the file or folder."""
    y, classes = _labels(path, arrays)
    splits = [Split(arrays["x"], y, arrays.get("client"))]
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path} must hold both x_test{end} and y_test{end}, or neither")
    if "x_test" in arrays:
        splits.append(Split(arrays["x_test"], whole(path, "y_test", arrays["y_test"])))
    return from_arrays(f"{kind}:{path}", classes, splits, **options)


def read_npz(path: Path, wanted: tuple[str, ...]) -> dict[str, np.ndarray]:
    """All arrays of an npz file, which must hold the wanted ones."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{path} is damaged or no npz file: {error}") from error
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise DataError(
            f"{path} holds no array {missing[0]!r}: it needs {', '.join(wanted)}, it has {', '.join(arrays)}"
        )
    return arrays


def whole(path: str, name: str, y: np.ndarray) -> np.ndarray:
    """Labels, or other ids, as int64."""
    if y.dtype.kind not in "iu" or y.ndim != 1:
        found = f"{y.dtype} of shape {y.shape}"
        raise DataError(
            f"{path}: {name} must be a list of whole numbers, not {found}; names go in `classes`"
        )
    return y.astype(np.int64)


def _labels(path: str, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, tuple[str, ...]]:
    y = whole(path, "y", arrays["y"])
    if "classes" in arrays:
        return y, tuple(str(name) for name in arrays["classes"].reshape(-1))
    highest = int(y.max(initial=0))
    if highest >= MOST_CLASSES:
        raise DataError(
            f"{path} has a label {highest}, out of range: labels count from 0, or `classes` names them"
        )
    return y, tuple(str(label) for label in range(highest + 1))
