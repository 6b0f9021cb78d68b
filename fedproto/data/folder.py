"""Image files in one folder per class."""

from pathlib import Path

import numpy as np

from fedproto.config.options import PositiveFloat, PositiveInt
from fedproto.core.class_names import class_name
from fedproto.data import DataFolders, Source, Split, from_arrays, list_folders
from fedproto.data.shared.images import ImageFile, LazyImages, agree_on_format
from fedproto.errors import DataError

TEST_FOLDERS = ("test", "val", "valid", "validation")  # the first that exists is taken
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def folder(
    data_folders: DataFolders,
    path: str,
    *,
    size: PositiveInt | None = None,
    grey: bool | None = None,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """Image files in one folder per class, inside `train` and `test` if these exist.

    Images stay on disk until used. Classes are the folders' names, sorted. Without `test`, the test
    set is `val`, `valid` or `validation`, or else a seeded fifth of each class is held out. `size`
    resizes all images to size x size. `grey` makes them grey or coloured; by default they are grey
    if all files are. Bytes are divided by 255; then (x − mean) / std, per channel.
    """
    parts = _find_parts(Path(path))
    files_by_class = [_find_images(part) for part in parts]
    names = tuple(sorted(files_by_class[0]))
    for name in files_by_class[-1]:
        if name not in names:
            raise DataError(
                f"{parts[-1] / name} holds a class of which {parts[0]} has no image: "
                "add some, or remove it"
            )
    labelled_files = [_join_classes(by_class, names) for by_class in files_by_class]
    all_files = (ImageFile(file, file) for files, _ in labelled_files for file in files)
    pixels, mode = agree_on_format(all_files, size, grey)
    splits = []
    for files, y in labelled_files:
        x = LazyImages(files, pixels, mode, resize=size is not None)
        splits.append(Split(x, y))
    return from_arrays(f"folder:{path}", names, splits, mean=mean, std=std, augment=augment)


def _join_classes(
    files_by_class: dict[str, list[str]], names: tuple[str, ...]
) -> tuple[list[str], np.ndarray]:
    """Return the files of all classes, and their labels."""
    files: list[str] = []
    counts = []
    for name in names:
        class_files = files_by_class.get(name, [])
        files.extend(class_files)
        counts.append(len(class_files))
    return files, np.repeat(np.arange(len(names)), counts)


def _find_parts(root: Path) -> list[Path]:
    """Return the folder itself, or its folders of training and test."""
    test_folders = [root / name for name in TEST_FOLDERS if (root / name).is_dir()]
    if (root / "train").is_dir():
        return [root / "train", *test_folders[:1]]
    for test_folder in test_folders:
        if _holds_class_folders(test_folder):
            raise DataError(
                f"{test_folder} holds one folder per class, but there is no {root / 'train'} "
                "to train with"
            )
    return [root]


def _holds_class_folders(path: Path) -> bool:
    """Return whether a folder holds folders of images, and no image itself."""
    if _list_images(path):
        return False
    return any(_list_images(each) for each in list_folders(path))


def _find_images(root: Path) -> dict[str, list[str]]:
    """Return the image files of each class, sorted; as text, since paths take much memory."""
    try:
        images_by_folder = {entry.name: _list_images(entry) for entry in list_folders(root)}
        if not any(images_by_folder.values()):
            raise _no_classes_error(root)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read as a folder: {error.strerror}") from error
    images_by_class: dict[str, list[str]] = {}
    for folder_name, images in images_by_folder.items():
        if images:  # two spellings of one name are one class
            name = class_name(folder_name, f"{root} has a class")
            images_by_class.setdefault(name, []).extend(images)
    return images_by_class


def _no_classes_error(root: Path) -> DataError:
    """Return why a folder has no classes: no images, or no folders around them."""
    if not _list_images(root):
        endings = ", ".join(IMAGE_ENDINGS)
        return DataError(
            f"{root} holds no images: it needs one folder per class with files that end in "
            f"{endings}"
        )
    hint = ""
    if root.name in ("train", *TEST_FOLDERS):
        hint = f", and do not call a class {root.name!r}, which is the name of a set"
    return DataError(
        f"{root} holds images, but no folder per class: put them in {root / 'CLASS'}{hint}"
    )


def _list_images(folder: Path) -> list[str]:
    """Return the image files in a folder, sorted."""
    return sorted(str(file) for file in folder.iterdir() if _is_image(file))


def _is_image(file: Path) -> bool:
    """Return whether a file is an image by its name; hidden files are not."""
    return file.name.lower().endswith(IMAGE_ENDINGS) and not file.name.startswith(".")
