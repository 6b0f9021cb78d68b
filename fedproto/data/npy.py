"""A user's own arrays, in npy files that may be larger than memory."""

from pathlib import Path
from typing import Literal

import numpy as np

from fedproto.config.options import PositiveFloat
from fedproto.data import DataFolders, Source
from fedproto.data.npz import from_named_arrays
from fedproto.data.shared.channel_order import OrderOption
from fedproto.errors import DataError

INPUT_NAMES = ("x", "x_test", "x_val")
OTHER_NAMES = ("y", "y_test", "y_val", "client", "classes")


def npy(
    data_folders: DataFolders,
    path: str,
    *,
    group: str | None = None,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
    channel_order: OrderOption = "auto",
) -> Source:
    """A folder with the arrays of `npz` as files, `x.npy`, `y.npy` and so on.

    For data larger than memory: `x.npy`, `x_test.npy` and `x_val.npy` are memory-mapped and stay on
    disk until used.
    """
    folder = Path(path)
    arrays = {}
    for name in _find_arrays(folder, group):
        mmap_mode: Literal["r"] | None = "r" if name in INPUT_NAMES else None
        arrays[name] = _read_array(folder / f"{name}.npy", mmap_mode)
    return from_named_arrays(
        "npy",
        path,
        arrays,
        ".npy",
        group=group,
        mean=mean,
        std=std,
        augment=augment,
        channel_order=channel_order,
    )


def _find_arrays(folder: Path, group: str | None) -> list[str]:
    """Return the names of the arrays in a folder, or raise DataError if x or y is missing."""
    known = [*INPUT_NAMES, *OTHER_NAMES]
    if group is not None:
        known += [group, f"{group}_test", f"{group}_val"]
    names = [name for name in known if (folder / f"{name}.npy").is_file()]
    if "x" not in names or "y" not in names:
        found = ", ".join(f"{name}.npy" for name in names) or "neither"
        raise DataError(f"{folder} must be a folder with x.npy and y.npy, but holds {found}")
    return names


def _read_array(path: Path, mmap_mode: Literal["r"] | None) -> np.ndarray:
    """Read an array, or raise DataError; with `mmap_mode` it stays on disk."""
    try:
        return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{path} is not a valid npy file (or is damaged): {error}") from error
