from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from fedproto.config.options import Bounds, File, PositiveInt
from fedproto.core.files import parse_json
from fedproto.data import DataFolders, Source, Split, few, folders_in
from fedproto.data.csv import LABELS, TABLES, labelled, opened, parts_of, read_rows, usual
from fedproto.data.shared.feature_encoding import Words, read_encoding
from fedproto.errors import DataError, unknown

Vocabulary = Annotated[int, Bounds(1, 2**24 - 2)]  # inputs travel as float32, which counts to 2^24
JSON_LINES = (".jsonl", ".jsonl.gz")
ENDS = (*JSON_LINES, *TABLES)  # a text a row
PLAIN = (".txt", ".txt.gz")  # a text a file


class Document(NamedTuple):
    text: str
    label: str
    client: str | None
    place: str


def text(
    places: DataFolders,
    path: str,
    *,
    vocabulary: Vocabulary = 5000,
    length: PositiveInt = 100,
    label: str | None = None,
    encoding: File | None = None,
) -> Source:
    """Texts of your own: a folder with a folder of .txt a class, a jsonl or a csv with `text` and `label`.

    Texts are cut or padded to `length` words in small letters; a word is its rank among the `vocabulary` most frequent
    ones of the training texts, from 2 on; 1 is any other, 0 padding; `encoding` names a file of an exported member that
    says words and length instead. `label` names the column of classes where it is
    not called label, class, target or y; a column `client` serves `natural`. The test set is a folder or file `test`
    beside `train`; without them, a seeded fifth of each class is held out.
    """
    parts = [list(_documents(part, label)) for part in _parts(Path(path))]
    documents = [document for part in parts for document in part]
    if not all(parts):
        raise DataError(f"{path} holds no text: {_WANTED}")
    cut = len(parts[0]) if len(parts) > 1 else None
    names, y, rows = labelled(
        path, [d.label for d in documents], cut, lambda row: documents[row].place
    )
    trained_on = (documents[row].text for row in rows[0])
    words = _given(Path(encoding), path) if encoding else Words.of(trained_on, vocabulary, length)
    if not words.words:
        raise DataError(f"{path} holds no word in its training texts")
    x = words([document.text for document in documents])
    writer = np.array([d.client for d in documents]) if documents[0].client is not None else None
    train, test = (Split(x, y, writer).rows(part) for part in rows)
    size = len(words.words)
    mix = ",".join(f"textcnn(words={size}, filters={filters})" for filters in (40, 50, 60))
    return Source(
        f"text:{path}",
        names,
        train,
        test,
        scale=1.0,
        model=f"textcnn(words={size})",
        mixed_model=mix,
        shots=few(train.y),
        encoding=words,
    )


def _given(file: Path, path: str) -> Words:
    """A vocabulary that others agreed on, or that was kept."""
    found = read_encoding(file)
    if not isinstance(found, Words):
        raise DataError(f"{file} is the encoding of a table, and {path} holds texts")
    return found


def texts_in(path: Path) -> Iterator[tuple[str, str]]:
    """The texts of one file, each with where it stands; labels do not matter."""
    if path.name.lower().endswith(PLAIN):
        with opened(path) as lines:
            yield lines.read(), str(path)
        return
    for line, row in _rows(path):
        name = usual(list(row), ("text",))
        if name is None:
            raise DataError(
                f"{path}, line {line} has no 'text': it has {', '.join(row) or 'nothing'}"
            )
        yield row[name], f"{path}, line {line}"


# --- where the texts lie

_WANTED = "a folder must hold one folder of .txt files a class, or train and test, each such a folder or a file"


def _parts(path: Path) -> list[Path]:
    """The whole, or training and test."""
    if not path.is_dir() or any(each.name not in ("train", "test") for each in folders_in(path)):
        return [path]
    return parts_of(path, ("train", "test"), ("", *ENDS))


def _documents(path: Path, label: str | None) -> Iterator[Document]:
    if path.is_dir():
        return _folder(path)
    return _chosen(path, _rows(path), label)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    return (_json_lines if path.name.lower().endswith(JSON_LINES) else _table)(path)


def _folder(path: Path) -> Iterator[Document]:
    """A class a folder, a text a file."""
    for folder in folders_in(path):
        for file in sorted(folder.glob("*.txt")):
            with opened(file) as lines:
                yield Document(lines.read(), folder.name, None, str(file))


def _table(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    rows = read_rows(path)
    _, header = next(rows)
    for line, row in rows:
        yield line, dict(zip(header, row, strict=True))


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """An object a line; labels and clients may be whole numbers."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _json_object(f"{path}, line {number}", line)


def _json_object(place: str, line: str) -> dict[str, str]:
    found = parse_json(line, place, DataError)
    if not isinstance(found, dict):
        raise DataError(f'{place} is no JSON object, such as {{"text": "...", "label": "..."}}')
    plain = {
        key: value for key, value in found.items() if type(value) in (str, int)
    }  # true and false are no names
    return {key: str(value) for key, value in plain.items()}


def _chosen(
    path: Path, rows: Iterator[tuple[int, dict[str, str]]], label: str | None
) -> Iterator[Document]:
    """Text, label and client of each row, in whichever columns the first row has them."""
    of: tuple[str, str, str | None] | None = None
    for line, row in rows:
        of = of or _keys(path, list(row), label)
        missing = [name for name in of if name is not None and name not in row]
        if missing:
            raise DataError(
                f"{path}, line {line} has no {missing[0]!r} that is a text or a whole number"
            )
        client = row[of[2]].strip() if of[2] is not None else None
        if client == "":
            raise DataError(
                f"{path}, line {line} has no client: fill in {of[2]!r}, or leave it out of every line"
            )
        yield Document(row[of[0]], row[of[1]].strip(), client, f"{path}, line {line}")


def _keys(path: Path, names: list[str], label: str | None) -> tuple[str, str, str | None]:
    """What the text, the label and the client are called."""
    if label is not None and label not in names:
        raise unknown(f"column of {path}", label, names)
    texts, labels = usual(names, ("text",)), label or usual(names, LABELS)
    if texts is None or labels is None:
        wanted = "'text'" if texts is None else "'label', 'class', 'target' or 'y'"
        raise DataError(f"{path} has no column {wanted}: it has {', '.join(names) or 'none'}")
    return texts, labels, usual(names, ("client",))
