from pathlib import Path

import numpy as np

from fedproto.data import Places, Source, Split, from_arrays
from fedproto.data._lazy import Images, agreed
from fedproto.errors import DataError
from fedproto.options import Count, Positive

ENDS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def folder(
    places: Places,
    path: str,
    *,
    size: Count | None = None,
    grey: bool | None = None,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[Positive, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """Image files, one folder a class, in `train` and `test` where these are there; they stay on disk until used.

    Classes are the folders' names, sorted. Without `test`, a seeded fifth of each class is held out. `size` resizes all
    images to size x size; `grey` makes them grey or coloured: left open, they are grey if all files are. Bytes are
    divided by 255; then (x − mean) / std, per channel.
    """
    root = Path(path)
    parts = [root / part for part in ("train", "test") if (root / "train").is_dir() and (root / part).is_dir()]
    found = [_classes(part) for part in parts or [root]]
    names = tuple(sorted({name for classes in found for name in classes}))
    files = [[file for name in names for file in classes.get(name, ())] for classes in found]
    labels = [np.repeat(np.arange(len(names)), [len(classes.get(name, ())) for name in names]) for classes in found]
    shape, mode = agreed(((file, file) for part in files for file in part), size, grey)
    splits = [Split(Images(part, shape, mode, size is not None), y) for part, y in zip(files, labels, strict=True)]
    return from_arrays(f"folder:{path}", names, splits, mean=mean, std=std, augment=augment)


def _classes(root: Path) -> dict[str, list[str]]:
    """The image files of each class, sorted; as text, since a million paths are large objects."""
    try:
        folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{root} is no folder that can be read: {error.strerror}") from error
    files = {entry.name: sorted(str(file) for file in entry.iterdir() if _is_image(file)) for entry in folders}
    if not any(files.values()):
        raise DataError(f"{root} holds no images: it needs a folder a class with files that end in {', '.join(ENDS)}")
    return {name: images for name, images in files.items() if images}


def _is_image(file: Path) -> bool:
    return file.name.lower().endswith(ENDS) and not file.name.startswith(".")
