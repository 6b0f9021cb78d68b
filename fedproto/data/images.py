"""Image files that are listed in a table, with their labels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from fedproto.config.options import PositiveFloat, PositiveInt
from fedproto.core.class_names import class_name
from fedproto.data import DataFolders, Source
from fedproto.data.shared.delimited import UTF_8, check_text_encoding, read_rows
from fedproto.data.shared.image_sources import (
    Broken,
    ImageOptions,
    LabelledFiles,
    from_image_files,
)
from fedproto.data.shared.tables import LABEL_COLUMNS, find_column
from fedproto.errors import DataError, unknown

#: Usual names of columns; the first that exists is taken.
USUAL_NAMES = {
    "image": ("path", "file", "filename", "image", "image_path", "filepath", "file_path"),
    "label": LABEL_COLUMNS,
    "client": ("client",),
    "group": ("group", "patient", "patient_id"),
    "split": ("split", "set"),
}
#: What a row may say about its set, in any case of letters.
SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
}


def images(
    data_folders: DataFolders,
    path: str,
    *,
    image: str | None = None,
    label: str | None = None,
    client: str | None = None,
    group: str | None = None,
    split: str | None = None,
    outside: bool = False,
    text_encoding: str = UTF_8,
    size: PositiveInt | None = None,
    grey: bool | None = None,
    window: tuple[float, ...] | None = None,
    broken: Broken = "refuse",
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """Image files listed in a csv file with a header, one row per image.

    `image` names the column of paths, `label` that of classes, `client` that of clients (for
    `natural`), `group` that of patients, whose images stay together, and `split` that of the words
    train, test and val; by default they are found by usual names, and the last three may be
    missing. Paths are relative to the list's folder, and refused outside of it unless `outside`
    allows them. Without test rows, a seeded fifth of each class is held out. `text_encoding` is
    that of the list. The other options are as in `folder`.
    """
    wanted = _Columns(image, label, client, group, split)
    rows = _read_list(Path(path), wanted, outside, check_text_encoding(text_encoding))
    sets = _divide(rows)
    if "train" not in sets:
        raise DataError(f"{path} lists no image for training")
    options = ImageOptions(size, grey, window, broken, mean, std, augment)
    return from_image_files(f"images:{path}", sets, options)


class _Columns(NamedTuple):
    """The columns that the options name."""

    image: str | None
    label: str | None
    client: str | None
    group: str | None
    split: str | None


class _Row(NamedTuple):
    """An image of a list; the last three are empty if the list has no such column."""

    path: str
    label: str
    client: str | None
    group: str | None
    split: str


def _read_list(path: Path, wanted: _Columns, outside: bool, text_encoding: str) -> list[_Row]:
    """Return the rows of a list, every value checked."""
    lines = read_rows(path, text_encoding)
    _, header = next(lines)
    columns = _find_columns(path, header, wanted)
    names: dict[str, str] = {}
    line_of: dict[str, int] = {}
    rows = []
    for line, values in lines:
        place = f"{path}, line {line}"
        given = {}
        for kind, name in columns.items():
            value = values[header.index(name)].strip()
            if not value:
                raise DataError(f"{place} has no {kind}: fill in column {name!r}")
            given[kind] = value
        label = given["label"]
        if label not in names:
            names[label] = class_name(label, f"{place} has the label")
        file = _locate(path.parent, given["image"], outside, place)
        if line_of.setdefault(file, line) != line:
            raise DataError(
                f"{place} names {given['image']!r}, which line {line_of[file]} names, too: an "
                "image must be listed once, or it could be in training and test"
            )
        rows.append(
            _Row(
                file,
                names[label],
                given.get("client"),
                given.get("group"),
                _read_split(given.get("split", "train"), place),
            )
        )
    if not rows:
        raise DataError(f"{path} holds no row below its header")
    return rows


def _find_columns(path: Path, header: list[str], wanted: _Columns) -> dict[str, str]:
    """Return the name of each column that there is; those of images and labels must be there."""
    columns = {}
    for kind, name in wanted._asdict().items():
        if name is not None and name not in header:
            raise unknown(f"column of {path}", name, header)
        found = name or find_column(header, USUAL_NAMES[kind])
        if found is not None:
            columns[kind] = found
    for kind in ("image", "label"):
        if kind not in columns:
            raise DataError(
                f"{path} has no column of {kind}s: call it {USUAL_NAMES[kind][0]!r}, or name it "
                f"with {kind}=COLUMN; it has {', '.join(header)}"
            )
    return columns


def _locate(folder: Path, written: str, outside: bool, place: str) -> str:
    """Return the path of an image; refused if it leads out of the list's folder."""
    root = os.path.abspath(folder)
    path = os.path.normpath(os.path.join(root, written))
    is_inside = path.startswith(root.rstrip(os.sep) + os.sep)
    if not is_inside and not outside:
        raise DataError(
            f"{place} names {written!r}, which is outside of the list's folder {root}: put it "
            "there, or allow it with outside=true"
        )
    return path


def _read_split(written: str, place: str) -> str:
    """Return the set of a row: train, test or validation."""
    name = SPLITS.get(written.lower())
    if name is None:
        raise DataError(f"{place} has the split {written!r}, but train, test or val is needed")
    return name


def _divide(rows: list[_Row]) -> dict[str, LabelledFiles]:
    """Return the rows of each set, by class; within a class they stay in the list's order."""
    ordered = sorted(rows, key=lambda row: row.label)
    sets = {}
    for part in ("train", "test", "validation"):
        chosen = [row for row in ordered if row.split == part]
        if not chosen:
            continue
        clients = [row.client for row in chosen if row.client is not None]
        groups = [row.group for row in chosen if row.group is not None]
        sets[part] = LabelledFiles(
            [row.path for row in chosen],
            [row.label for row in chosen],
            clients or None,
            groups or None,
        )
    return sets
