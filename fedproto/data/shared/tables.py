"""Reading delimited text files with a header, and the labels in them; text.py needs both, too."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from fedproto.core.class_names import class_name
from fedproto.data import hold_out
from fedproto.errors import DataError, unknown

TABLE_ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
LABEL_COLUMNS = ("label", "class", "target", "y")  # usual names of the column of classes
DELIMITERS = ",;\t"
MISSING_VALUES = ("NA", "?")  # besides the empty value
#: Characters of a value: every value of a column takes as much memory as its longest one.
MAX_VALUE_CHARACTERS = 1000
#: Rows that are Python strings at a time: these take ten times the memory of an array.
ROWS_PER_CHUNK = 10_000
#: Characters of a field; Python's own limit is 131,072, and a text may be longer.
MAX_FIELD_CHARACTERS = 2**31 - 1

csv.field_size_limit(MAX_FIELD_CHARACTERS)


# --- files


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Open a text file in UTF-8, gzipped or not; whatever is wrong with it becomes a DataError."""
    try:
        open_file = gzip.open if path.suffix == ".gz" else open
        with open_file(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in UTF-8: {error}") from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the header, then the rows, each with the number of its last line.

    Blank lines are skipped. Raises DataError if the header is unusable or a row does not fit it.
    """
    with open_text(path) as file:
        first_line = file.readline()
        delimiter = _find_delimiter(first_line)
        rows = csv.reader(chain([first_line], file), delimiter=delimiter, strict=True)
        header = _check_header(path, next(rows, []))
        yield rows.line_num, header
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{path}, line {rows.line_num} has {len(row)} values, "
                    f"but the header names {len(header)} columns"
                )
            yield rows.line_num, row


def _find_delimiter(line: str) -> str:
    """Return the delimiter that divides a line into the most values."""

    def count_values(delimiter: str) -> int:
        reader = csv.reader([line], delimiter=delimiter)
        return len(next(reader, []))

    return max(DELIMITERS, key=count_values)


def _check_header(path: Path, header: list[str]) -> list[str]:
    """Return the names of the columns without blanks around them, or raise DataError."""
    names = [name.strip() for name in header]
    wrong = [name for name in names if not name or _is_number(name)]
    if not names or wrong:
        found = repr(wrong[0]) if wrong else "nothing"
        raise DataError(
            f"{path} has no header: its first line must name every column in words, but it holds "
            f"{found}"
        )
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise DataError(f"{path} names two columns {repeated[0]!r}")
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def find_parts(path: Path, endings: Sequence[str]) -> list[Path]:
    """Return the file itself or, of a folder, the files `train` and `test` inside it.

    They have one of the endings, the first that exists. Raises DataError if one is missing.
    """
    if not path.is_dir():
        return [path]
    parts = []
    for stem in ("train", "test"):
        candidates = [path / f"{stem}{ending}" for ending in endings]
        parts.extend([candidate for candidate in candidates if candidate.exists()][:1])
    if len(parts) < 2:
        raise DataError(
            f"{path} is a folder that does not hold train{endings[0]} and test{endings[0]}: "
            "put them there, or name a file"
        )
    return parts


def find_column(names: Collection[str], usual_names: Sequence[str]) -> str | None:
    """Return the column with one of the usual names, in their order, however it is capitalised."""
    for usual_name in usual_names:
        for name in names:
            if name.lower() == usual_name:
                return name
    return None


# --- tables


class Table(NamedTuple):
    """Columns of text by name, the training rows before the test rows."""

    columns: dict[str, np.ndarray]
    files: list[tuple[Path, list[int]]]  # each with the line numbers of its rows
    test_start: int | None  # the first test row, if there is a test file

    @classmethod
    def read(
        cls, path: Path, ignore: Sequence[str] = (), only: Sequence[str] | None = None
    ) -> Table:
        """Read all columns but those to `ignore`, or `only` these, as far as they are there.

        `path` is a file, or a folder with train.csv and test.csv. Raises DataError if a file has no
        rows, or if the test file lacks a column of the training file.
        """
        paths = find_parts(path, (".csv", ".csv.gz"))
        ignored = [name for name in ignore if name]
        parts = []
        files = []
        for part_path in paths:
            columns, lines = _read_columns(part_path, ignored, only)
            if not lines:
                raise DataError(f"{part_path} holds no row below its header")
            parts.append(columns)
            files.append((part_path, lines))
        for part_path, columns in zip(paths, parts, strict=True):
            missing = [name for name in parts[0] if name not in columns]
            if missing:
                raise DataError(f"{part_path} has no column {missing[0]!r}, which {paths[0]} has")
        joined = {}
        for name in parts[0]:
            joined[name] = np.concatenate([columns[name] for columns in parts])
        test_start = len(files[0][1]) if len(files) > 1 else None
        return cls(joined, files, test_start)

    @property
    def path(self) -> Path:
        """The training file, or the only one."""
        return self.files[0][0]

    def check_name(self, name: str) -> str:
        """Return the name of a column, or raise ConfigError if there is no such column."""
        if name not in self.columns:
            raise unknown(f"column of {self.path}", name, self.columns)
        return name

    def clients(self, name: str) -> np.ndarray:
        """Return the column of the clients, or raise DataError if a row has none."""
        clients = self.columns[name]
        missing = np.flatnonzero(clients == "")
        if len(missing):
            raise DataError(
                f"{self.place(missing[0])} has no client: fill in column {name!r}, "
                "or name it in `ignore`"
            )
        return clients

    def place(self, row: int) -> str:
        """Return the file and line of a row, for errors."""
        for path, lines in self.files:
            if row < len(lines):
                return f"{path}, line {lines[row]}"
            row -= len(lines)
        raise IndexError(row)


def _read_columns(
    path: Path, ignore: Sequence[str], only: Sequence[str] | None
) -> tuple[dict[str, np.ndarray], list[int]]:
    """Return the columns of one file as arrays of text, and the line number of each row."""
    rows = read_rows(path)
    _, header = next(rows)
    for name in ignore:
        if name not in header:
            raise unknown(f"column of {path}", name, header)
    chunks: dict[str, list[np.ndarray]] = {}
    for name in header:
        if name not in ignore and (only is None or name in only):
            chunks[name] = [np.zeros(0, "U1")]
    lines: list[int] = []
    while chunk := list(islice(rows, ROWS_PER_CHUNK)):
        lines.extend(line for line, _ in chunk)
        values_by_column = zip(*(row for _, row in chunk), strict=True)
        for name, values in zip(header, values_by_column, strict=True):
            if name in chunks:
                chunks[name].append(_to_text_array(path, name, values))
    columns = {}
    for name in list(chunks):
        columns[name] = np.concatenate(chunks.pop(name))  # `pop` frees the memory of the chunks
    return columns, lines


def _to_text_array(path: Path, name: str, values: Sequence[str]) -> np.ndarray:
    """Return values as an array, without blanks around them; missing values become empty."""
    longest = max(len(value) for value in values)
    if longest > MAX_VALUE_CHARACTERS:
        raise DataError(
            f"{path}: column {name!r} holds a value of {longest:,} characters, more than "
            f"{MAX_VALUE_CHARACTERS:,}: name it in `ignore`, or read it with text:PATH"
        )
    texts = np.char.strip(np.array(values))
    return np.where(np.isin(texts, MISSING_VALUES), "", texts)


# --- labels


class Labels(NamedTuple):
    """The classes of the rows, and which rows are for training and for testing."""

    names: tuple[str, ...]
    y: np.ndarray  # the number of each row's class
    train_rows: np.ndarray
    test_rows: np.ndarray


def number_labels(
    where: str, labels: Sequence[str], test_start: int | None, place: Callable[[int], str]
) -> Labels:
    """Return the classes of the rows; without a test set, some rows of each class are held out.

    `place` names a row in an error. Raises DataError if a label is missing or unusable, if a test
    label is not among the training labels, or if a class has too few rows to hold one out.
    """
    spelled = _normalise_labels(labels, place)
    names = tuple(sorted(set(spelled[:test_start]), key=lambda name: (len(name), name)))
    number_of = {name: number for number, name in enumerate(names)}
    for row, label in enumerate(spelled):
        if label not in number_of:
            raise DataError(f"{place(row)} has the label {label!r}, which no training row has")
    y = np.array([number_of[label] for label in spelled], np.int64)
    if test_start is not None:
        return Labels(names, y, np.arange(test_start), np.arange(test_start, len(y)))
    single = np.flatnonzero(np.bincount(y) == 1)
    if len(single):
        raise DataError(
            f"{where}: class {names[single[0]]!r} has one row, but two are needed: "
            "one for training and one for testing"
        )
    return Labels(names, y, *hold_out(y))


def _normalise_labels(labels: Sequence[str], place: Callable[[int], str]) -> list[str]:
    """Return the labels as normalised names of classes."""
    first_row: dict[str, int] = {}
    for row, label in enumerate(labels):
        first_row.setdefault(label, row)
    names: dict[str, str] = {}
    for label, row in first_row.items():
        if not label.strip():
            raise DataError(f"{place(row)} has no label")
        names[label] = class_name(label, f"{place(row)} has the label")
    return [names[label] for label in labels]
