"""Image files in one folder per class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedproto.config.options import PositiveFloat, PositiveInt
from fedproto.core.class_names import class_name
from fedproto.data import DataFolders, Source, list_folders
from fedproto.data.shared.dicom import is_dicom
from fedproto.data.shared.image_sources import (
    Broken,
    ImageOptions,
    LabelledFiles,
    from_image_files,
)
from fedproto.data.shared.images import IMAGE_ENDINGS
from fedproto.errors import ConfigError, DataError

#: The first that exists is the test set; one beside `test` is for validation.
TEST_FOLDERS = ("test", "val", "valid", "validation")
LEVELS = ("class", "client", "group")  # what a level of folders can be
MIN_GROUPS_PER_CLASS = 2  # with fewer folders per class, none could be held out


def folder(
    data_folders: DataFolders,
    path: str,
    *,
    levels: str | None = None,
    size: PositiveInt | None = None,
    grey: bool | None = None,
    window: tuple[float, ...] | None = None,
    broken: Broken = "refuse",
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """Image files in one folder per class, inside `train` and `test` if these exist.

    Images stay on disk until used. Classes are the folders' names, sorted; folders inside them are
    read, too. `levels` says what the levels of folders are, such as `client/class` or
    `class/group`; by default, folders inside the classes are groups (patients) if every image is in
    one. `val`, `valid` or `validation` beside `test` is for validation; without `test`, it is the
    test set. Without any of them, a seeded fifth of each class is held out. `size` resizes all
    images to size x size. `grey` makes them grey or coloured; by default they are grey if all files
    are. `window` is the centre and the width for DICOM files, instead of their own. `broken=skip`
    leaves out files that cannot be read. Bytes are divided by 255, 16 bits by 65535; then
    (x − mean) / std, per channel.
    """
    parts = _find_parts(Path(path))
    listings = {name: _list_tree(part) for name, part in parts.items()}
    notices = []
    if levels is not None:
        chosen = _parse_levels(levels)
    elif all(_has_groups(listing) for listing in listings.values()):
        chosen = ("class", "group")
        notices.append(_describe_groups(path, listings))
    else:
        chosen = ("class",)
    sets = {name: _label(parts[name], listing, chosen) for name, listing in listings.items()}
    _refuse_unknown_classes(parts, sets)
    if levels is None:
        _refuse_shared_groups(parts, sets)
    options = ImageOptions(size, grey, window, broken, mean, std, augment)
    return from_image_files(f"folder:{path}", sets, options, notices)


# --- what lies where


class _Found(NamedTuple):
    """An image file, and the folders in which it lies, from that of the set on."""

    path: str  # as text, since paths take much memory
    folders: tuple[str, ...]


def _find_parts(root: Path) -> dict[str, Path]:
    """Return the folder itself as `train`, or its folders of training, test and validation.

    Without a folder of test images, that of validation is the test set.
    """
    others = [root / name for name in TEST_FOLDERS if (root / name).is_dir()]
    if (root / "train").is_dir():
        parts = {"train": root / "train"}
        if others:
            parts["test"] = others[0]
        if len(others) > 1 and others[0].name == "test":
            parts["validation"] = others[1]
        return parts
    for other in others:
        if _holds_class_folders(other):
            raise DataError(
                f"{other} holds one folder per class, but there is no {root / 'train'} "
                "to train with"
            )
    return {"train": root}


def _holds_class_folders(path: Path) -> bool:
    """Return whether a folder holds folders of images, and no image itself."""
    if _holds_images(path):
        return False
    return any(_holds_images(each) for each in list_folders(path))


def _holds_images(folder: Path) -> bool:
    return any(_is_image(file) for file in folder.iterdir())


def _list_tree(root: Path) -> list[_Found]:
    """Return the image files in the folders of a set, however deep; refused if there are none."""
    try:
        found: list[_Found] = []
        for folder in list_folders(root):
            found.extend(_walk(folder, (folder.name,), (_identify(folder),)))
        if not found:
            raise _no_classes_error(root)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read as a folder: {error.strerror}") from error
    return found


def _walk(
    folder: Path, folders: tuple[str, ...], seen: tuple[tuple[int, int], ...]
) -> Iterator[_Found]:
    """Yield the image files in a folder and in the folders inside it.

    `seen` are the folders around it: a link that leads back to one of them is not followed.
    """
    for file in folder.iterdir():
        if _is_image(file):
            yield _Found(str(file), folders)
    for inner in list_folders(folder):
        identity = _identify(inner)
        if identity not in seen:
            yield from _walk(inner, (*folders, inner.name), (*seen, identity))


def _identify(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _is_image(file: Path) -> bool:
    """Return whether a file is an image by its name; hidden files are not.

    Scanners give DICOM files no ending, or the last number of an identifier: these are opened.
    """
    if file.name.startswith("."):
        return False
    if file.name.lower().endswith(IMAGE_ENDINGS):
        return True
    ending = file.suffix[1:]
    if ending and not ending.isdigit():
        return False
    try:
        return file.is_file() and is_dicom(file)
    except OSError:
        return False


def _no_classes_error(root: Path) -> DataError:
    """Return why a folder has no classes: no images, or no folders around them."""
    if not _holds_images(root):
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


# --- what the folders mean


def _parse_levels(text: str) -> tuple[str, ...]:
    """Return what each level of folders is, or raise ConfigError."""
    names = tuple(name.strip() for name in text.split("/"))
    is_valid = set(names) <= set(LEVELS) and len(set(names)) == len(names)
    if not is_valid or "class" not in names:
        raise ConfigError(
            f"levels must name what each level of folders is, such as class, class/group, "
            f"client/class or client/class/group, not {text!r}"
        )
    return names


def _has_groups(listing: list[_Found]) -> bool:
    """Return whether the folders inside the classes can be groups of images.

    Every image must be in one, and every class must have some of them, so that one can be held out.
    """
    groups_by_class: dict[str, set[str]] = {}
    for found in listing:
        if len(found.folders) < 2:
            return False
        groups_by_class.setdefault(found.folders[0], set()).add(found.folders[1])
    return all(len(groups) >= MIN_GROUPS_PER_CLASS for groups in groups_by_class.values())


def _describe_groups(path: str, listings: dict[str, list[_Found]]) -> str:
    groups: set[str] = set()
    for listing in listings.values():
        groups.update(found.folders[1] for found in listing)
    return (
        f"folder:{path} has folders inside those of its classes: each of these {len(groups):,} is "
        "taken for a group, such as a patient, whose images stay together (levels=class ignores "
        "them)"
    )


def _label(root: Path, listing: list[_Found], levels: tuple[str, ...]) -> LabelledFiles:
    """Return the files of a set with what their folders say, by class and then by name."""
    names: dict[str, str] = {}  # two spellings of one name are one class
    labelled = []
    for found in listing:
        if len(found.folders) < len(levels):
            missing = levels[len(found.folders)]
            raise DataError(
                f"{found.path} is in no folder of a {missing}, but levels={'/'.join(levels)} says "
                f"that images are in {root}/{'/'.join(level.upper() for level in levels)}"
            )
        folder_name = found.folders[levels.index("class")]
        if folder_name not in names:
            names[folder_name] = class_name(folder_name, f"{root} has a class")
        labelled.append((names[folder_name], found))
    labelled.sort(key=lambda pair: (pair[0], _sort_key(pair[1], levels)))
    return LabelledFiles(
        [found.path for _, found in labelled],
        [name for name, _ in labelled],
        _take_level(labelled, levels, "client"),
        _take_level(labelled, levels, "group"),
    )


def _sort_key(found: _Found, levels: tuple[str, ...]) -> tuple[str, str]:
    """Return what images of one class are sorted by: the class's folder, then their paths."""
    return found.folders[levels.index("class")], found.path


def _take_level(
    labelled: list[tuple[str, _Found]], levels: tuple[str, ...], level: str
) -> list[str] | None:
    """Return the folder of each file at a level, if there is such a level."""
    if level not in levels:
        return None
    place = levels.index(level)
    return [found.folders[place] for _, found in labelled]


def _refuse_unknown_classes(parts: dict[str, Path], sets: dict[str, LabelledFiles]) -> None:
    """Refuse a class of which there are no training images."""
    known = set(sets["train"].labels)
    for part, files in sets.items():
        for name in dict.fromkeys(files.labels):
            if name not in known:
                raise DataError(
                    f"{parts[part] / name} holds a class of which {parts['train']} has no image: "
                    "add some, or remove it"
                )


def _refuse_shared_groups(parts: dict[str, Path], sets: dict[str, LabelledFiles]) -> None:
    """Refuse groups that nobody asked for, if two sets share one."""
    first_part: dict[str, str] = {}
    for part, files in sets.items():
        for group in dict.fromkeys(files.groups or []):
            other = first_part.setdefault(group, part)
            if other != part:
                raise DataError(
                    f"{parts[other]} and {parts[part]} both have images in a folder {group!r}: if "
                    "it is a patient, keep it in one of them, and if it is no group of images, "
                    "set levels=class"
                )
