from pathlib import Path

import numpy as np

from fedproto.data import Places, Source, Split, from_arrays
from fedproto.data.npz import _labels, whole
from fedproto.errors import DataError
from fedproto.options import Positive

INPUTS, OTHERS = ("x", "x_test"), ("y", "y_test", "client", "classes")


def npy(
    places: Places,
    path: str,
    *,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[Positive, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """A folder with the arrays of `npz` as files, `x.npy`, `y.npy` and so on; inputs stay on disk until used.

    For data larger than memory: `x.npy` and `x_test.npy` are memory-mapped.
    """
    arrays = {name: _read(Path(path) / f"{name}.npy", name) for name in _there(Path(path))}
    y, classes = _labels(path, arrays)
    splits = [Split(arrays["x"], y, arrays.get("client"))]
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path} must hold both x_test.npy and y_test.npy, or neither")
    if "x_test" in arrays:
        splits.append(Split(arrays["x_test"], whole(path, "y_test", arrays["y_test"])))
    return from_arrays(f"npy:{path}", classes, splits, mean=mean, std=std, augment=augment)


def _there(folder: Path) -> list[str]:
    there = [name for name in INPUTS + OTHERS if (folder / f"{name}.npy").is_file()]
    if not {"x", "y"} <= set(there):
        found = ", ".join(f"{name}.npy" for name in there) or "neither"
        raise DataError(f"{folder} must be a folder with x.npy and y.npy, and holds {found}")
    return there


def _read(path: Path, name: str) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r" if name in INPUTS else None, allow_pickle=False)
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{path} is damaged or no npy file: {error}") from error
