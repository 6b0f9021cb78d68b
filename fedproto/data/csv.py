from __future__ import annotations

import csv as delimited
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from fedproto.config.options import File
from fedproto.core.class_names import class_name
from fedproto.data import DataFolders, Source, Split, few, hold_out
from fedproto.data.shared.feature_encoding import (
    ENCODING,
    Category,
    Columns,
    Number,
    numbers,
    read_encoding,
)
from fedproto.errors import DataError, unknown

LABELS = ("label", "class", "target", "y")  # what a column of classes is usually called
DELIMITERS = ",;\t"
TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
NA = ("NA", "?")  # missing, as an empty value is
MOST_CATEGORIES = 1000  # of a column: each becomes an input
FEW_TEXTS = (
    10  # of a column: so many may be categories of a small table, however few rows hold each
)
LONGEST = 1000  # characters of a value: every value of a column takes as much room as its longest
CHUNK = (
    10_000  # rows that are Python's own texts at a time, which take ten times the room of an array
)

delimited.field_size_limit(
    2**31 - 1
)  # Python's own is 131,072 characters, and a text may be longer


def csv(
    places: DataFolders,
    path: str,
    *,
    label: str | None = None,
    client: str | None = None,
    ignore: tuple[str, ...] = (),
    keep: tuple[str, ...] = (),
    encoding: File | None = None,
) -> Source:
    """A table of your own: a file with a header, or a folder with train.csv and test.csv; .gz is accepted.

    `label` names the column of classes (else it is called label, class, target or y, or is the last), `client` that of
    the clients, for `natural` (else it is called client, if it is there), `ignore` columns to leave out. Numbers are
    standardised, texts become one input a value, both by the training rows; where something is missing (empty, NA or ?)
    stands the mean, or a value of its own. A column of texts of which nearly every row holds another, such as names,
    ids or dates, is refused unless it is named in `ignore`, or in `keep`. `encoding` names a file of an exported
    member that says all this instead.
    Of a single file a seeded fifth of each class is held out.
    """
    table = Table.read(Path(path), ignore)
    whose = table.named(client) if client else usual(table.columns, ("client",))
    inputs = {name: values for name, values in table.columns.items() if name != whose}
    chosen = table.named(label) if label else usual(inputs, LABELS) or next(reversed(inputs), None)
    if chosen not in inputs or len(inputs) < 2:
        found = ", ".join(table.columns) or "none"
        raise DataError(
            f"{path} needs a column of classes and another of inputs, beside any of clients: it has {found}"
        )
    names, y, rows = labelled(path, inputs.pop(chosen).tolist(), table.cut, table.place)
    columns = (
        _given(Path(encoding), inputs, path) if encoding else _fitted(table, inputs, rows[0], keep)
    )
    x = columns(inputs, table.place)
    writer = table.clients(whose) if whose else None
    train, test = (Split(x, y, writer).rows(part) for part in rows)
    return Source(
        f"csv:{path}",
        names,
        train,
        test,
        scale=1.0,
        model="mlp",
        mixed_model="mlp-mh",
        shots=few(train.y),
        encoding=columns,
    )


# --- reading, which text.py does too


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """A text file in UTF-8, gzipped or not; whatever is wrong with it is one sentence."""
    try:
        open_text = gzip.open if path.suffix == ".gz" else open
        with open_text(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in UTF-8: {error}") from error
    except (OSError, EOFError, zlib.error, delimited.Error) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The header, then the rows, each with the number of its last line; blank lines are passed over."""
    with opened(path) as file:
        first = file.readline()
        delimiter = max(
            DELIMITERS, key=lambda mark: len(next(delimited.reader([first], delimiter=mark), []))
        )
        rows = delimited.reader(chain([first], file), delimiter=delimiter, strict=True)
        header = _header(path, next(rows, []))
        yield rows.line_num, header
        for row in rows:
            if row and len(row) != len(header):
                raise DataError(
                    f"{path}, line {rows.line_num} has {len(row)} values, but the header names {len(header)} columns"
                )
            if row:
                yield rows.line_num, row


def _header(path: Path, names: list[str]) -> list[str]:
    names = [name.strip() for name in names]
    wrong = [name for name in names if not name or _is_number(name)]
    if not names or wrong:
        found = f"{wrong[0]!r}" if wrong else "nothing"
        raise DataError(
            f"{path} has no header: its first line must name every column in words, and holds {found}"
        )
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(f"{path} names two columns {twice[0]!r}")
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def parts_of(path: Path, stems: Sequence[str], ends: Sequence[str]) -> list[Path]:
    """The file itself, or those of training and test in a folder."""
    if not path.is_dir():
        return [path]
    found = [
        next((path / (stem + end) for end in ends if (path / (stem + end)).exists()), None)
        for stem in stems
    ]
    wanted = " and ".join(stem + ends[0] for stem in stems)
    if None in found:
        raise DataError(
            f"{path} is a folder that does not hold {wanted}: put them there, or name a file"
        )
    return [each for each in found if each is not None]


def usual(names: Sequence[str] | dict[str, np.ndarray], wanted: Sequence[str]) -> str | None:
    """The column that has one of the wanted names, in their order, however it is capitalised."""
    lower = {name.lower(): name for name in reversed(list(names))}
    return next((lower[name] for name in wanted if name in lower), None)


class Table(NamedTuple):
    """Columns of text by name, the rows of training before those of test."""

    columns: dict[str, np.ndarray]
    files: list[tuple[Path, list[int]]]  # each with the lines of its rows
    cut: int | None  # where the test rows begin, if they are told

    @classmethod
    def read(
        cls, path: Path, ignore: Sequence[str] = (), only: Sequence[str] | None = None
    ) -> Table:
        """All columns but those to `ignore`, or `only` some, as far as they are there."""
        paths = parts_of(path, ("train", "test"), (".csv", ".csv.gz"))
        read = [_columns(each, [name for name in ignore if name], only) for each in paths]
        for each, (columns, lines) in zip(paths, read, strict=True):
            if not lines:
                raise DataError(f"{each} holds no row below its header")
            missing = [name for name in read[0][0] if name not in columns]
            if missing:
                raise DataError(f"{each} has no column {missing[0]!r}, which {paths[0]} has")
        columns = {
            name: np.concatenate([columns[name] for columns, _ in read]) for name in read[0][0]
        }
        files = [(each, lines) for each, (_, lines) in zip(paths, read, strict=True)]
        return cls(columns, files, len(read[0][1]) if len(read) > 1 else None)

    def named(self, name: str) -> str:
        if name not in self.columns:
            raise unknown(f"column of {self.files[0][0]}", name, self.columns)
        return name

    def clients(self, name: str) -> np.ndarray:
        missing = np.flatnonzero(self.columns[name] == "")
        if len(missing):
            raise DataError(
                f"{self.place(missing[0])} has no client: fill in column {name!r}, or name it in `ignore`"
            )
        return self.columns[name]

    def place(self, row: int) -> str:
        """Where a row stands, for people."""
        for path, lines in self.files:
            if row < len(lines):
                return f"{path}, line {lines[row]}"
            row -= len(lines)
        raise IndexError(row)


def _columns(
    path: Path, ignore: Sequence[str], only: Sequence[str] | None
) -> tuple[dict[str, np.ndarray], list[int]]:
    """The columns of one file as arrays of text, without blanks around it, and the line of each row."""
    rows = read_rows(path)
    _, header = next(rows)
    for name in ignore:
        if name not in header:
            raise unknown(f"column of {path}", name, header)
    kept = [name for name in header if name not in ignore and (only is None or name in only)]
    chunks: dict[str, list[np.ndarray]] = {name: [np.zeros(0, "U1")] for name in kept}
    lines: list[int] = []
    while chunk := list(islice(rows, CHUNK)):
        lines += [line for line, _ in chunk]
        for name, values in zip(header, zip(*(row for _, row in chunk), strict=True), strict=True):
            if name in chunks:
                chunks[name].append(_text(path, name, values))
    return {name: np.concatenate(chunks.pop(name)) for name in list(chunks)}, lines


def _text(path: Path, name: str, values: Sequence[str]) -> np.ndarray:
    longest = max(map(len, values))
    if longest > LONGEST:
        raise DataError(
            f"{path}: column {name!r} holds a value of {longest:,} characters, more than {LONGEST:,}: "
            "name it in `ignore`, or read it with text:PATH"
        )
    found = np.char.strip(np.array(values))
    return np.where(np.isin(found, NA), "", found)


def labelled(
    where: str, labels: Sequence[str], cut: int | None, place: Callable[[int], str]
) -> tuple[tuple[str, ...], np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """The classes' names, the number of each row's class, and the rows of training and of test."""
    labels = _spelled(labels, place)
    names = tuple(sorted(set(labels[:cut]), key=lambda name: (len(name), name)))
    number = {name: position for position, name in enumerate(names)}
    foreign = next((row for row, label in enumerate(labels) if label not in number), None)
    if foreign is not None:
        raise DataError(
            f"{place(foreign)} has the label {labels[foreign]!r}, which no training row has"
        )
    y = np.array([number[label] for label in labels], np.int64)
    if cut is not None:
        return names, y, (np.arange(cut), np.arange(cut, len(y)))
    single = np.flatnonzero(np.bincount(y) == 1)
    if len(single):
        raise DataError(
            f"{where}: class {names[single[0]]!r} has one row, but two are needed, one to train and one to test with"
        )
    return names, y, hold_out(y)


def _spelled(labels: Sequence[str], place: Callable[[int], str]) -> list[str]:
    """The labels as everybody spells them."""
    first_row: dict[str, int] = {}
    for row, label in enumerate(labels):
        first_row.setdefault(label, row)
    names: dict[str, str] = {}
    for label, row in first_row.items():
        if not label.strip():
            raise DataError(f"{place(row)} has no label")
        names[label] = class_name(label, f"{place(row)} has the label")
    return [names[label] for label in labels]


# --- columns as inputs


def _given(file: Path, inputs: dict[str, np.ndarray], path: str) -> Columns:
    """An encoding that others agreed on, or that was kept."""
    found = read_encoding(file)
    if not isinstance(found, Columns):
        raise DataError(f"{file} is the encoding of texts, and {path} is a table")
    missing = found.missing(inputs)
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}, which {file} speaks of: it has {', '.join(inputs)}"
        )
    return found


def _fitted(
    table: Table, inputs: dict[str, np.ndarray], train: np.ndarray, keep: Sequence[str]
) -> Columns:
    kept = {table.named(name) for name in keep if name}
    columns = []
    for name, texts in inputs.items():
        columns.append(_fitted_column(table, name, texts, train, name in kept))
    return Columns(tuple(columns))


def _fitted_column(
    table: Table, name: str, texts: np.ndarray, train: np.ndarray, is_kept: bool
) -> Number | Category:
    """How a column becomes inputs, by its training rows."""
    known = numbers(texts[train])
    if known is not None:
        return _standardised(table, name, known[np.isfinite(known)])
    _refuse_spoilt_numbers(table, name, texts, train)
    values = np.unique(texts[train])
    if len(values) > MOST_CATEGORIES:
        raise DataError(
            f"{table.files[0][0]}: column {name!r} holds {len(values):,} different texts, more than "
            f"{MOST_CATEGORIES:,}: name it in `ignore`, or read it with text:PATH"
        )
    if not is_kept and _identifies_rows(texts[train]):
        raise DataError(
            f"{table.files[0][0]}: column {name!r} holds {len(values):,} different texts in {len(train):,} training "
            f"rows, as names, ids and dates do: each would become an input and be listed in {ENCODING}, so name it in "
            "`ignore`, or in `keep` if they are categories"
        )
    return Category(name, tuple(values.tolist()))


def _identifies_rows(texts: np.ndarray) -> bool:
    """Whether nearly every row holds a text of its own: more than `FEW_TEXTS`, in fewer than two rows each.

    What is missing and the commonest text say nothing about that: "none" may stand in most rows of free remarks.
    """
    _, counts = np.unique(texts[texts != ""], return_counts=True)
    others = np.sort(counts)[:-1]
    return len(others) > FEW_TEXTS and 2 * len(others) > others.sum()


def _standardised(table: Table, name: str, known: np.ndarray) -> Number:
    """To mean 0 and deviation 1; a column that never changes is 0."""
    changes = (
        len(np.unique(known)) > 1
    )  # asked of the numbers: rounding gives equal ones a tiny deviation
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = known.mean() if changes else known[:1].sum(), known.std() if changes else 1.0
    if not np.isfinite(std):
        raise DataError(
            f"{table.files[0][0]}: column {name!r} holds numbers too large to be squared"
        )
    return Number(name, float(mean), float(std))


def _refuse_spoilt_numbers(table: Table, name: str, texts: np.ndarray, train: np.ndarray) -> None:
    """A column of numbers with a stray word, or with decimal commas, would else become an input for each number."""
    values = np.unique(texts[train])
    read = [
        value
        for value in values
        if value and numbers(np.char.replace(values[values == value], ",", ".")) is not None
    ]
    if len(read) <= 10 or len(read) < 0.8 * np.count_nonzero(values != ""):
        return
    row = next(row for row in train if numbers(texts[row : row + 1]) is None)
    raise DataError(
        f"{table.place(row)}: column {name!r} holds {str(texts[row])!r}, but most of it are numbers: leave empty what "
        "is missing, or write NA or ?, and write decimals with a point"
    )
