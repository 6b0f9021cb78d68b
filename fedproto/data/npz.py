"""A user's own arrays, in one npz file."""

from pathlib import Path
from typing import Any

import numpy as np

from fedproto.config.options import PositiveFloat
from fedproto.data import DataFolders, Source, Split, from_arrays
from fedproto.data.shared.channel_order import OrderOption
from fedproto.errors import DataError, unknown

#: Classes without names: a single wrong label must not create a billion of them.
MAX_UNNAMED_CLASSES = 100_000


def npz(
    data_folders: DataFolders,
    path: str,
    *,
    group: str | None = None,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
    channel_order: OrderOption = "auto",
) -> Source:
    """Arrays of your own in an npz file: `x` and `y`, and optional ones.

    Optional are `x_test` and `y_test`, `x_val` and `y_val`, `client` (for `natural`) and `classes`
    (their names). `group` names an array of what must stay together, such as `patient`; its name
    with _test or _val behind it is that of the other sets. Bytes are divided by 255; then
    (x − mean) / std, per channel. Without a test set, a seeded fifth of each class is held out.
    `channel_order` says whether the channels of images are `first`, behind the
    rows, or `last`; `auto` finds an axis of 1, 3 or 4 entries.
    """
    arrays = read_npz(Path(path), ("x", "y"))
    return from_named_arrays(
        "npz",
        path,
        arrays,
        group=group,
        mean=mean,
        std=std,
        augment=augment,
        channel_order=channel_order,
    )


def from_named_arrays(
    kind: str,
    path: str,
    arrays: dict[str, np.ndarray],
    ending: str = "",
    group: str | None = None,
    **options: Any,
) -> Source:
    """Return a source made of arrays by name.

    Errors name an array with `ending` behind it, as it is called in the file or folder.
    """
    y, classes = _read_labels(path, arrays)
    if group is not None and group not in arrays:
        raise unknown(f"array of {path}", group, arrays)
    groups = None if group is None else arrays[group]
    splits = [Split(arrays["x"], y, arrays.get("client"), groups)]
    others = {}
    for part in ("test", "val"):
        if (f"x_{part}" in arrays) != (f"y_{part}" in arrays):
            pair = f"both x_{part}{ending} and y_{part}{ending}"
            raise DataError(f"{path} must hold {pair}, or neither")
        if f"x_{part}" in arrays:
            others[part] = _make_split(path, arrays, part, ending, group)
    if "test" not in others and "val" in others:
        others["test"] = others.pop("val")
    splits += [split for part, split in others.items() if part == "test"]
    validation = others.get("val")
    return from_arrays(f"{kind}:{path}", classes, splits, validation=validation, **options)


def _make_split(
    path: str, arrays: dict[str, np.ndarray], part: str, ending: str, group: str | None
) -> Split:
    """Return the test set or the validation set; with groups, it must have them, too."""
    y = to_whole_numbers(path, f"y_{part}", arrays[f"y_{part}"])
    if group is None:
        return Split(arrays[f"x_{part}"], y)
    name = f"{group}_{part}"
    if name not in arrays:
        raise DataError(f"{path} must hold {name}{ending}, since group is {group!r}")
    return Split(arrays[f"x_{part}"], y, group=arrays[name])


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
