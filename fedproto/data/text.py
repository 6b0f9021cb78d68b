"""Texts, in folders of plain text files, tables or JSON lines."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from fedproto.config.options import Bounds, File, PositiveInt
from fedproto.core.files import parse_json
from fedproto.data import DataFolders, Source, Split, default_shots, list_folders
from fedproto.data.shared.data_notices import describe_duplicates
from fedproto.data.shared.delimited import (
    LEFT_OUT,
    TABLE_ENDINGS,
    UTF_8,
    check_text_encoding,
    open_text,
    read_rows,
)
from fedproto.data.shared.feature_encoding import TEXT, Words, read_encoding
from fedproto.data.shared.labels import Labels, divide_rows, number_labels, read_sets
from fedproto.data.shared.tables import (
    LABEL_COLUMNS,
    VALIDATION_STEMS,
    find_column,
    find_parts,
    name_sets,
)
from fedproto.errors import ConfigError, DataError, unknown

Vocabulary = Annotated[int, Bounds(1, 2**24 - 2)]  # inputs travel as float32, which counts to 2^24
JSON_LINES_ENDINGS = (".jsonl", ".jsonl.gz")
ROW_FILE_ENDINGS = (*JSON_LINES_ENDINGS, *TABLE_ENDINGS)  # one text per row
PLAIN_TEXT_ENDINGS = (".txt", ".txt.gz")  # one text per file
FILTERS_OF_MIXED_MODELS = (40, 50, 60)

Row = dict[str, str]  # the values of a row by the names of their columns


class Document(NamedTuple):
    """A text with its label and, if known, its client, its group and the set it is for."""

    text: str
    label: str
    place: str  # its file and line, for errors
    client: str | None = None
    group: str | None = None
    split: str | None = None


class DocumentColumns(NamedTuple):
    """The names of the columns that make up a document, or those that a user names."""

    text: str | None
    label: str | None
    client: str | None
    group: str | None
    split: str | None


def text(
    data_folders: DataFolders,
    path: str,
    *,
    vocabulary: Vocabulary = 5000,
    length: PositiveInt = 100,
    text: str | None = None,
    label: str | None = None,
    client: str | None = None,
    group: str | None = None,
    split: str | None = None,
    text_encoding: str = UTF_8,
    encoding: File | None = None,
) -> Source:
    """Texts of your own: one folder of .txt files per class, or a jsonl or csv file.

    The options `text`, `label` and `client` (for `natural`) name columns of a jsonl or csv file
    that are not called text; label, class, target or y; and client. `group` names the column of
    what must stay together, such as the texts of one author, and `split` one that says train, val
    or test. `text_encoding` is that of the files, such as latin-1.
    Texts are cut or padded to `length` words in lower case. A word becomes its rank among the
    `vocabulary` most frequent ones of the training texts, from 2 on; 1 is any other word, 0 is
    padding. `encoding` names a file of an exported member that says words and length instead.
    The test set is a folder or file `test` beside `train`, and a validation set is `val`; without
    them, a seeded fifth of each class is held out for testing.
    """
    named = DocumentColumns(text, label, client, group, split)
    check_text_encoding(text_encoding)
    part_paths = _find_parts(Path(path))
    parts = [_read_documents(part_path, named, text_encoding) for part_path in part_paths]
    if not all(parts):
        raise DataError(
            f"{path} holds no text: a folder must hold one folder of .txt files per class, or "
            "train and test, each of which is such a folder or a file"
        )
    documents = [document for part in parts for document in part]
    labels = _number_documents(path, parts, split)
    if encoding is not None:
        words = _read_words(Path(encoding), path)
    else:
        train_texts = (documents[row].text for row in labels.train_rows)
        words = Words.fit(train_texts, vocabulary, length, text or TEXT, text_encoding)
    if not words.words:
        raise DataError(f"{path} holds no word in its training texts")
    return _to_source(f"text:{path}", documents, labels, words)


def from_rows(
    name: str,
    parts: list[list[Row]],
    *,
    text: str | None = None,
    label: str | None = None,
    client: str | None = None,
    group: str | None = None,
    split: str | None = None,
    vocabulary: int = 5000,
    length: int = 100,
) -> Source:
    """Return rows with a text and a label as a source.

    `parts` are all rows, or those for training, for testing and perhaps for validation.
    """
    named = DocumentColumns(text, label, client, group, split)
    documents_of_parts = [_to_documents(Path(name), iter(enumerate(rows)), named) for rows in parts]
    if not all(documents_of_parts):
        raise DataError(f"{name} holds no text")
    documents = [document for part in documents_of_parts for document in part]
    labels = _number_documents(name, documents_of_parts, split)
    train_texts = (documents[row].text for row in labels.train_rows)
    words = Words.fit(train_texts, vocabulary, length, text or TEXT)
    if not words.words:
        raise DataError(f"{name} holds no word in its training texts")
    return _to_source(name, documents, labels, words)


def _number_documents(where: str, parts: list[list[Document]], split: str | None) -> Labels:
    """Return the classes of all documents, and what they are for.

    The parts are for training, testing and validation, if there are several; the column `split`
    says so otherwise.
    """
    documents = [document for part in parts for document in part]
    sets = name_sets([len(part) for part in parts])

    def place(row: int) -> str:
        return documents[row].place

    if split is not None and sets is not None:
        raise ConfigError(
            f"split names column {split!r}, but {where} holds several files, which already say "
            "what their texts are for: leave it out"
        )
    if split is not None:
        words = [document.split or "" for document in documents]
        sets = read_sets(where, words, split, place)
    label_texts = [document.label for document in documents]
    return number_labels(where, label_texts, sets, place, _read_groups(documents))


def _read_groups(documents: list[Document]) -> np.ndarray | None:
    """Return the group of each document, if they have any."""
    if documents[0].group is None:
        return None
    return np.array([document.group for document in documents])


def _to_source(name: str, documents: list[Document], labels: Labels, words: Words) -> Source:
    """Return the documents as a source, with the text models that fit the vocabulary."""
    x = words([document.text for document in documents])
    writer = None
    if documents[0].client is not None:
        writer = np.array([document.client for document in documents])
    places = [document.place for document in documents]  # without the texts themselves
    everything = Split(x, labels.y, writer, _read_groups(documents), places.__getitem__)
    train, test, validation = divide_rows(everything, labels)
    size = len(words.words)
    mixed_models = [
        f"textcnn(words={size}, filters={filters})" for filters in FILTERS_OF_MIXED_MODELS
    ]
    return Source(
        name,
        labels.names,
        train,
        test,
        scale=1.0,
        model=f"textcnn(words={size})",
        mixed_model=",".join(mixed_models),
        adaptive_model=f"textmean(words={size})",
        shots=default_shots(train.y),
        encoding=words,
        validation=validation,
        notices=tuple(describe_duplicates(name, train, test)),
    )


def _read_words(file: Path, path: str) -> Words:
    """Read a vocabulary that was agreed on or kept."""
    encoding = read_encoding(file)
    if not isinstance(encoding, Words):
        raise DataError(f"{file} is the encoding of a table, but {path} holds texts")
    return encoding


class FoundText(NamedTuple):
    """A text that was read from a file."""

    text: str
    place: str
    row: Row | None  # all columns of its row; None: the file has no columns


def read_texts(path: Path, words: Words) -> Iterator[FoundText]:
    """Yield the texts of one file; labels are not needed.

    In a table they are in the column that the encoding names.
    """
    if path.name.lower().endswith(PLAIN_TEXT_ENDINGS):
        with open_text(path, words.text_encoding) as file:
            yield FoundText(file.read(), str(path), None)
        return
    for line, row in _read_rows(path, words.text_encoding):
        column = _find_text(row, words.column)
        if column is None:
            found = ", ".join(row) or "nothing"
            raise DataError(f"{path}, line {line} has no {words.column!r}: it has {found}")
        yield FoundText(row[column], f"{path}, line {line}", row)


# --- where the texts lie


def _find_parts(path: Path) -> list[Path]:
    """Return the file or folder itself, or its training, test and validation parts."""
    if not path.is_dir():
        return [path]
    names_of_sets = ("train", "test", *VALIDATION_STEMS)
    if any(folder.name not in names_of_sets for folder in list_folders(path)):
        return [path]
    return find_parts(path, ("", *ROW_FILE_ENDINGS))


def _read_documents(path: Path, named: DocumentColumns, text_encoding: str) -> list[Document]:
    """Return the documents of a folder or file."""
    if path.is_dir():
        _refuse_columns(path, named)
        return _read_class_folders(path, text_encoding)
    return _to_documents(path, _read_rows(path, text_encoding), named)


def _refuse_columns(path: Path, named: DocumentColumns) -> None:
    """Raise ConfigError if a column is named although a folder of text files has none."""
    for option, name in named._asdict().items():
        if name is not None:
            raise ConfigError(
                f"{option} names column {name!r}, but {path} is a folder of text files, which has "
                "no columns"
            )


def _read_class_folders(path: Path, text_encoding: str) -> list[Document]:
    """Read one folder per class, with one text per file."""
    documents = []
    for folder in list_folders(path):
        for text_path in sorted(folder.glob("*.txt")):
            with open_text(text_path, text_encoding) as file:
                documents.append(Document(file.read(), folder.name, str(text_path)))
    return documents


def _read_rows(path: Path, text_encoding: str) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a table or of JSON lines, each with its line number."""
    if path.name.lower().endswith(JSON_LINES_ENDINGS):
        return _read_json_lines(path, text_encoding)
    return _read_table(path, text_encoding)


def _read_table(path: Path, text_encoding: str) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a delimited file, without the index that pandas writes."""
    rows = read_rows(path, text_encoding)
    _, header = next(rows)
    for line, values in rows:
        row = dict(zip(header, values, strict=True))
        row.pop(LEFT_OUT, None)
        yield line, row


def _read_json_lines(path: Path, text_encoding: str) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file with one JSON object per line."""
    with open_text(path, text_encoding) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _parse_json_object(f"{path}, line {number}", line)


def _parse_json_object(place: str, line: str) -> Row:
    """Return the texts and whole numbers of a JSON object as text: labels may be either."""
    content = parse_json(line, place, DataError)
    if not isinstance(content, dict):
        raise DataError(f'{place} is not a JSON object like {{"text": "...", "label": "..."}}')
    row = {}
    for key, value in content.items():
        if type(value) in (str, int):  # not true or false, which are instances of int
            row[key] = str(value)
    return row


# --- from rows to documents


def _to_documents(
    path: Path, rows: Iterator[tuple[int, Row]], named: DocumentColumns
) -> list[Document]:
    """Return text, label and client of each row, from the columns that the first row has."""
    documents = []
    columns: DocumentColumns | None = None
    for line, row in rows:
        place = f"{path}, line {line}"
        if columns is None:
            columns = _find_columns(path, list(row), named)
        for name in columns:
            if name is not None and name not in row:
                raise DataError(f"{place} has no {name!r} that is a text or a whole number")
        client = _take_value(row, columns.client, "client", place)
        group = _take_value(row, columns.group, "group", place)
        split = None if columns.split is None else row[columns.split]
        assert columns.text is not None and columns.label is not None, "both were found"
        label = row[columns.label].strip()
        documents.append(Document(row[columns.text], label, place, client, group, split))
    return documents


def _take_value(row: Row, column: str | None, what: str, place: str) -> str | None:
    """Return what a row has in a column in which all rows must have something."""
    if column is None:
        return None
    value = row[column].strip()
    if not value:
        raise DataError(f"{place} has no {what}: fill in {column!r}, or leave it out of every line")
    return value


def _find_columns(path: Path, names: list[str], named: DocumentColumns) -> DocumentColumns:
    """Return the columns of text, label and client, or raise an error if one is missing."""
    for name in named:
        if name is not None and name not in names:
            raise unknown(f"column of {path}", name, names)
    text_column = named.text or _find_text(names, TEXT)
    label_column = named.label or find_column(names, LABEL_COLUMNS)
    client_column = named.client or find_column(names, ("client",))
    found = ", ".join(names) or "none"
    if text_column is None:
        raise DataError(
            f"{path} has no column 'text': it has {found}; name the column with text=COLUMN"
        )
    if label_column is None:
        raise DataError(
            f"{path} has no column 'label', 'class', 'target' or 'y': it has {found}; name the "
            "column with label=COLUMN"
        )
    columns = DocumentColumns(text_column, label_column, client_column, named.group, named.split)
    chosen = [name for name in columns[:3] if name is not None]
    if len(set(chosen)) < len(chosen):
        raise ConfigError(
            f"text, label and client of {path} must be different columns, not {', '.join(chosen)}"
        )
    return columns


def _find_text(names: Collection[str], wanted: str) -> str | None:
    """Return the column of texts; the usual one however it is capitalised."""
    if wanted in names:
        return wanted
    return find_column(names, (TEXT,)) if wanted == TEXT else None
