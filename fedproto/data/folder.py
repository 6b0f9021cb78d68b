from pathlib import Path

import numpy as np

from fedproto.config.options import PositiveFloat, PositiveInt
from fedproto.core.class_names import class_name
from fedproto.data import DataFolders, Source, Split, folders_in, from_arrays
from fedproto.data.shared.lazy_images import Images, agreed
from fedproto.errors import DataError

TESTS = (
    "test",
    "val",
    "valid",
    "validation",
)  # what a test set may be called; the first that is there is taken
ENDS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def folder(
    places: DataFolders,
    path: str,
    *,
    size: PositiveInt | None = None,
    grey: bool | None = None,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """Image files, one folder a class, in `train` and `test` where these are there; they stay on disk until used.

    Classes are the folders' names, sorted. Without `test`, `val`, `valid` or `validation` is the test set, or else a
    seeded fifth of each class is held out. `size` resizes all images to size x size; `grey` makes them grey or
    coloured: left open, they are grey if all files are. Bytes are divided by 255; then (x − mean) / std, per channel.
    """
    parts = _parts(Path(path))
    found = [_classes(part) for part in parts]
    names = tuple(sorted(found[0]))
    for name in found[-1]:
        if name not in found[0]:
            raise DataError(
                f"{parts[-1] / name} holds a class that {parts[0]} has no image of: add some, or remove it"
            )
    files = [[file for name in names for file in classes.get(name, ())] for classes in found]
    labels = [
        np.repeat(np.arange(len(names)), [len(classes.get(name, ())) for name in names])
        for classes in found
    ]
    shape, mode = agreed(((file, file) for part in files for file in part), size, grey)
    splits = [
        Split(Images(part, shape, mode, size is not None), y)
        for part, y in zip(files, labels, strict=True)
    ]
    return from_arrays(f"folder:{path}", names, splits, mean=mean, std=std, augment=augment)


def _parts(root: Path) -> list[Path]:
    """The whole, or training and test."""
    tests = [root / name for name in TESTS if (root / name).is_dir()]
    if not (root / "train").is_dir():
        for part in tests:
            if not _images_in(part) and any(_images_in(each) for each in folders_in(part)):
                raise DataError(
                    f"{part} holds a folder a class, but there is no {root / 'train'} to train with"
                )
        return [root]
    return [root / "train", *tests[:1]]


def _classes(root: Path) -> dict[str, list[str]]:
    """The image files of each class, sorted; as text, since a million paths are large objects."""
    try:
        files = {entry.name: sorted(_images_in(entry)) for entry in folders_in(root)}
        if not any(files.values()):
            raise _without_classes(root)
    except OSError as error:
        raise DataError(
            f"{error.filename} is no folder that can be read: {error.strerror}"
        ) from error
    found: dict[str, list[str]] = {}
    for name, images in files.items():
        if images:  # two spellings of one name are one class
            found.setdefault(class_name(name, f"{root} has a class"), []).extend(images)
    return found


def _without_classes(root: Path) -> DataError:
    if not _images_in(root):
        return DataError(
            f"{root} holds no images: it needs a folder a class with files that end in {', '.join(ENDS)}"
        )
    hint = (
        f", and call no class {root.name!r}, which names a set"
        if root.name in ("train", *TESTS)
        else ""
    )
    return DataError(
        f"{root} holds images, but no folder a class: put them in {root / 'CLASS'}{hint}"
    )


def _images_in(folder: Path) -> list[str]:
    return [str(file) for file in folder.iterdir() if _is_image(file)]


def _is_image(file: Path) -> bool:
    return file.name.lower().endswith(ENDS) and not file.name.startswith(".")
