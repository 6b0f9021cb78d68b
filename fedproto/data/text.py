"""Texts, in folders of plain text files, tables or JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from fedproto.config.options import Bounds, File, PositiveInt
from fedproto.core.files import parse_json
from fedproto.data import DataFolders, Source, Split, default_shots, list_folders
from fedproto.data.shared.feature_encoding import Words, read_encoding
from fedproto.data.shared.tables import (
    LABEL_COLUMNS,
    TABLE_ENDINGS,
    Labels,
    find_column,
    find_parts,
    number_labels,
    open_text,
    read_rows,
)
from fedproto.errors import DataError, unknown

Vocabulary = Annotated[int, Bounds(1, 2**24 - 2)]  # inputs travel as float32, which counts to 2^24
JSON_LINES_ENDINGS = (".jsonl", ".jsonl.gz")
ROW_FILE_ENDINGS = (*JSON_LINES_ENDINGS, *TABLE_ENDINGS)  # one text per row
PLAIN_TEXT_ENDINGS = (".txt", ".txt.gz")  # one text per file
FILTERS_OF_MIXED_MODELS = (40, 50, 60)

Row = dict[str, str]  # the values of a row by the names of their columns


class Document(NamedTuple):
    """A text with its label and, if known, its client."""

    text: str
    label: str
    client: str | None
    place: str  # its file and line, for errors


class DocumentColumns(NamedTuple):
    """The names of the columns that make up a document."""

    text: str
    label: str
    client: str | None


def text(
    data_folders: DataFolders,
    path: str,
    *,
    vocabulary: Vocabulary = 5000,
    length: PositiveInt = 100,
    label: str | None = None,
    encoding: File | None = None,
) -> Source:
    """Texts of your own: one folder of .txt files per class, or a jsonl or csv file.

    A jsonl or csv file has columns `text` and `label`; the option `label` names the column of
    classes if it is not called label, class, target or y; a column `client` serves `natural`.
    Texts are cut or padded to `length` words in lower case. A word becomes its rank among the
    `vocabulary` most frequent ones of the training texts, from 2 on; 1 is any other word, 0 is
    padding. `encoding` names a file of an exported member that says words and length instead.
    The test set is a folder or file `test` beside `train`; without them, a seeded fifth of each
    class is held out.
    """
    parts = [_read_documents(part, label) for part in _find_parts(Path(path))]
    if not all(parts):
        raise DataError(
            f"{path} holds no text: a folder must hold one folder of .txt files per class, or "
            "train and test, each of which is such a folder or a file"
        )
    documents = [document for part in parts for document in part]
    test_start = len(parts[0]) if len(parts) > 1 else None

    def place(row: int) -> str:
        return documents[row].place

    label_texts = [document.label for document in documents]
    labels = number_labels(path, label_texts, test_start, place)
    if encoding is not None:
        words = _read_words(Path(encoding), path)
    else:
        train_texts = (documents[row].text for row in labels.train_rows)
        words = Words.fit(train_texts, vocabulary, length)
    if not words.words:
        raise DataError(f"{path} holds no word in its training texts")
    return _to_source(path, documents, labels, words)


def _to_source(path: str, documents: list[Document], labels: Labels, words: Words) -> Source:
    """Return the documents as a source, with the text models that fit the vocabulary."""
    x = words([document.text for document in documents])
    writer = None
    if documents[0].client is not None:
        writer = np.array([document.client for document in documents])
    everything = Split(x, labels.y, writer)
    train = everything.select_rows(labels.train_rows)
    test = everything.select_rows(labels.test_rows)
    size = len(words.words)
    mixed_models = [
        f"textcnn(words={size}, filters={filters})" for filters in FILTERS_OF_MIXED_MODELS
    ]
    return Source(
        f"text:{path}",
        labels.names,
        train,
        test,
        scale=1.0,
        model=f"textcnn(words={size})",
        mixed_model=",".join(mixed_models),
        shots=default_shots(train.y),
        encoding=words,
    )


def _read_words(file: Path, path: str) -> Words:
    """Read a vocabulary that was agreed on or kept."""
    encoding = read_encoding(file)
    if not isinstance(encoding, Words):
        raise DataError(f"{file} is the encoding of a table, but {path} holds texts")
    return encoding


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the texts of one file, each with its place; labels are not needed."""
    if path.name.lower().endswith(PLAIN_TEXT_ENDINGS):
        with open_text(path) as file:
            yield file.read(), str(path)
        return
    for line, row in _read_rows(path):
        column = find_column(row, ("text",))
        if column is None:
            found = ", ".join(row) or "nothing"
            raise DataError(f"{path}, line {line} has no 'text': it has {found}")
        yield row[column], f"{path}, line {line}"


# --- where the texts lie


def _find_parts(path: Path) -> list[Path]:
    """Return the file or folder itself, or its training and test parts."""
    if not path.is_dir():
        return [path]
    if any(folder.name not in ("train", "test") for folder in list_folders(path)):
        return [path]
    return find_parts(path, ("", *ROW_FILE_ENDINGS))


def _read_documents(path: Path, label: str | None) -> list[Document]:
    """Return the documents of a folder or file."""
    if path.is_dir():
        return _read_class_folders(path)
    return _to_documents(path, _read_rows(path), label)


def _read_class_folders(path: Path) -> list[Document]:
    """Read one folder per class, with one text per file."""
    documents = []
    for folder in list_folders(path):
        for text_path in sorted(folder.glob("*.txt")):
            with open_text(text_path) as file:
                documents.append(Document(file.read(), folder.name, None, str(text_path)))
    return documents


def _read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a table or of JSON lines, each with its line number."""
    if path.name.lower().endswith(JSON_LINES_ENDINGS):
        return _read_json_lines(path)
    return _read_table(path)


def _read_table(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a delimited file."""
    rows = read_rows(path)
    _, header = next(rows)
    for line, row in rows:
        yield line, dict(zip(header, row, strict=True))


def _read_json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file with one JSON object per line."""
    with open_text(path) as file:
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


def _to_documents(path: Path, rows: Iterator[tuple[int, Row]], label: str | None) -> list[Document]:
    """Return text, label and client of each row, from the columns that the first row has."""
    documents = []
    columns: DocumentColumns | None = None
    for line, row in rows:
        place = f"{path}, line {line}"
        if columns is None:
            columns = _find_columns(path, list(row), label)
        for name in columns:
            if name is not None and name not in row:
                raise DataError(f"{place} has no {name!r} that is a text or a whole number")
        client = None
        if columns.client is not None:
            client = row[columns.client].strip()
            if not client:
                raise DataError(
                    f"{place} has no client: fill in {columns.client!r}, "
                    "or leave it out of every line"
                )
        documents.append(Document(row[columns.text], row[columns.label].strip(), client, place))
    return documents


def _find_columns(path: Path, names: list[str], label: str | None) -> DocumentColumns:
    """Return the columns of text, label and client, or raise an error if one is missing."""
    if label is not None and label not in names:
        raise unknown(f"column of {path}", label, names)
    text_column = find_column(names, ("text",))
    label_column = label or find_column(names, LABEL_COLUMNS)
    found = ", ".join(names) or "none"
    if text_column is None:
        raise DataError(f"{path} has no column 'text': it has {found}")
    if label_column is None:
        raise DataError(f"{path} has no column 'label', 'class', 'target' or 'y': it has {found}")
    return DocumentColumns(text_column, label_column, find_column(names, ("client",)))
