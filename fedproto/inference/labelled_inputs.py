"""Files to classify: where they lie, the ids of their rows, and true classes where they are stated.

A true class is the name of the folder that a file lies in, the array `y` of an .npz file, or a
column of a table or of texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedproto.core.class_names import normalise_name
from fedproto.data import list_folders
from fedproto.data.shared.feature_encoding import Columns
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.data.shared.tables import LABEL_COLUMNS, find_column
from fedproto.errors import DataError, unknown
from fedproto.inference.input_files import Input, list_visible_files, read_file


class InputFile(NamedTuple):
    """A file to classify, and the class whose folder it lies in, if it lies in one."""

    path: Path
    label: str | None = None


class LabelledInput(NamedTuple):
    """An input with its id, and its true class if that is stated."""

    id: str
    label: str | None
    input: Input


class LabelledFile(NamedTuple):
    """The inputs of one file, and the column that says their true classes, if one does."""

    inputs: list[LabelledInput]
    label_column: str | None = None


# --- finding files


def find_input_files(paths: Sequence[Path], classes: Sequence[str]) -> list[InputFile]:
    """Return the files that the paths name: themselves, or those of folders.

    Files of a folder are sorted by name. If one of its folders is called like a class, all files
    anywhere in its folders belong to the class that their folder names. Other folders inside a
    folder are not searched. Raises DataError for a path that does not exist, or a folder without
    files.
    """
    found: list[InputFile] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist")
        found += _search_folder(path, classes) if path.is_dir() else [InputFile(path)]
    return found


def _search_folder(folder: Path, classes: Sequence[str]) -> list[InputFile]:
    found = [InputFile(path) for path in list_visible_files(folder.iterdir())]
    folders = list_folders(folder)
    names = [normalise_name(inner.name) for inner in folders]
    if any(name in classes for name in names):
        for inner, name in zip(folders, names, strict=True):
            found += [InputFile(path, name) for path in list_visible_files(inner.rglob("*"))]
    if not found:
        raise DataError(
            f"{folder} holds no file to classify; folders inside it are searched only if they "
            "are called like classes"
        )
    return found


# --- reading a file


def read_labelled_file(
    file: InputFile,
    preprocessing: Preprocessing,
    classes: Sequence[str],
    *,
    label_column: str | None = None,
    id_column: str | None = None,
) -> LabelledFile:
    """Return the inputs of a file, with their ids and true classes.

    Args:
        file: what to read.
        preprocessing: that of the client.
        classes: the names of all classes.
        label_column: the column of true classes in a table or in rows of texts; None: one with a
            usual name, or the only other column all of whose values are names of classes.
        id_column: the column of ids in a table or in rows of texts; None: ids are places.

    Raises DataError if the file cannot be read, and ConfigError if it lacks a column.
    """
    inputs, columns = read_file(file.path, preprocessing, with_columns=True)
    ids = [each.name for each in inputs]
    labels: list[str | None] = [file.label] * len(inputs)
    if columns is None:
        for option, wanted in (("label", label_column), ("id", id_column)):
            if wanted is not None:
                raise DataError(f"{file.path} has no columns, so --{option} {wanted} names nothing")
        stated = _read_array_labels(file.path, len(inputs))
        return LabelledFile(_join(ids, stated or labels, inputs))
    for column in (label_column, id_column):
        if column is not None and column not in columns:
            raise unknown(f"column of {file.path}", column, columns)
    if id_column is not None:
        ids = columns[id_column]
    used: tuple[str, ...] = ()
    if isinstance(preprocessing.encoding, Columns):
        used = tuple(column.name for column in preprocessing.encoding.columns)
    chosen = label_column or _find_label_column(columns, used, classes)
    if chosen is not None:
        labels = [normalise_name(text) or None for text in columns[chosen]]
    return LabelledFile(_join(ids, labels, inputs), chosen)


def _join(
    ids: Sequence[str], labels: Sequence[str | None], inputs: Sequence[Input]
) -> list[LabelledInput]:
    joined = zip(ids, labels, inputs, strict=True)
    return [LabelledInput(id, label, each) for id, label, each in joined]


def _find_label_column(
    columns: dict[str, list[str]], used: Sequence[str], classes: Sequence[str]
) -> str | None:
    """Return the column of true classes, if exactly one column can be it."""
    others = {name: values for name, values in columns.items() if name not in used}
    known = set(classes)
    candidates = []
    for name, values in others.items():
        stated = {normalise_name(text) for text in values if text.strip()}
        if stated and stated <= known:
            candidates.append(name)
    usual = find_column(candidates, LABEL_COLUMNS)
    if usual is not None:
        return usual
    return candidates[0] if len(candidates) == 1 else None


def _read_array_labels(path: Path, rows: int) -> list[str | None] | None:
    """Return the array `y` of an .npz file as names of classes, if it has one per row."""
    if path.suffix.lower() != ".npz":
        return None
    try:
        stored = np.load(path, allow_pickle=False)
        y = stored["y"] if "y" in stored.files else None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: its array `y` cannot be read: {error}") from error
    if y is None or y.shape != (rows,) or y.dtype.kind not in "iuU":
        return None
    return [normalise_name(str(label)) for label in y.tolist()]
