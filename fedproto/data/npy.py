from pathlib import Path

import numpy as np

from fedproto.config.options import PositiveFloat
from fedproto.data import DataFolders, Source
from fedproto.data.npz import from_named
from fedproto.errors import DataError

INPUTS, OTHERS = ("x", "x_test"), ("y", "y_test", "client", "classes")


def npy(
    places: DataFolders,
    path: str,
    *,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """A folder with the arrays of `npz` as files, `x.npy`, `y.npy` and so on; inputs stay on disk until used.

    For data larger than memory: `x.npy` and `x_test.npy` are memory-mapped.
    """
    arrays = {name: _read(Path(path) / f"{name}.npy", name) for name in _there(Path(path))}
    return from_named("npy", path, arrays, ".npy", mean=mean, std=std, augment=augment)


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
