"""Tables as columns of text, however they are stored; text.py needs their labels, too.

A Parquet file, an Excel sheet or a DataFrame is read as the CSV that pandas would write of it, so
that the encoding of its rows is the same to the bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedproto.data.shared.delimited import INDEX_HEADER, LEFT_OUT, Rows, read_rows
from fedproto.data.shared.feature_encoding import USUAL_NOTATION, Notation
from fedproto.data.shared.stored_tables import (
    EXCEL_ENDINGS,
    PARQUET_ENDINGS,
    list_frame_rows,
    read_excel_rows,
    read_parquet_rows,
)
from fedproto.errors import DataError, unknown

LABEL_COLUMNS = ("label", "class", "target", "y")  # usual names of the column of classes
#: What the parts of a table are for, in their order.
SETS = ("train", "test", "validation")
VALIDATION_STEMS = ("val", "valid", "validation")  # of files and folders
MISSING_VALUES = ("NA", "?")  # besides the empty value
#: Characters of a value: every value of a column takes as much memory as its longest one.
MAX_VALUE_CHARACTERS = 1000
#: Rows that are Python strings at a time: these take ten times the memory of an array.
ROWS_PER_CHUNK = 10_000
#: A number with a decimal comma, and one with a point that is therefore no decimal one.
DECIMAL_COMMA = re.compile(r"[+-]?(\d+,\d*|,\d+)([eE][+-]?\d+)?")
POINT_IN_NUMBER = re.compile(r"[+-]?\d*\.\d+(,\d+)?|[+-]?\d{1,3}(\.\d{3})+(,\d*)?")


# --- where tables lie


def find_parts(path: Path, endings: Sequence[str]) -> list[Path]:
    """Return the file itself or, of a folder, the files `train`, `test` and perhaps `val` in it.

    They have one of the endings, the first that exists; `val` may also be called `valid` or
    `validation`. Raises DataError if `train` or `test` is missing.
    """
    if not path.is_dir():
        return [path]
    parts = []
    for stem in ("train", "test"):
        parts += _find_files(path, [stem], endings)
    if len(parts) < 2:
        raise DataError(
            f"{path} is a folder that does not hold train{endings[0]} and test{endings[0]}: "
            "put them there, or name a file"
        )
    return parts + _find_files(path, VALIDATION_STEMS, endings)


def _find_files(path: Path, stems: Sequence[str], endings: Sequence[str]) -> list[Path]:
    """Return the first file in a folder with one of the stems and endings, or nothing."""
    candidates = [path / f"{stem}{ending}" for stem in stems for ending in endings]
    return [candidate for candidate in candidates if candidate.exists()][:1]


def name_sets(sizes: Sequence[int]) -> np.ndarray | None:
    """Return what each row is for, from the number of rows of each part that `find_parts` names.

    None if there is one part, which nobody has divided.
    """
    if len(sizes) == 1:
        return None
    return np.repeat(SETS[: len(sizes)], sizes)


def find_column(names: Collection[str], usual_names: Sequence[str]) -> str | None:
    """Return the column with one of the usual names, in their order, however it is capitalised."""
    for usual_name in usual_names:
        for name in names:
            if name.lower() == usual_name:
                return name
    return None


# --- tables


class TablePart(NamedTuple):
    """The training or the test rows of a table, or all of them."""

    name: str  # of the file or the DataFrame, for errors
    columns: dict[str, np.ndarray]
    unit: str  # what a number of a row counts: a line or a row
    numbers: Sequence[int]  # of the rows
    has_index: bool  # whether a first column without a name was left out
    #: Columns that are not wanted as inputs, as they are written, where a caller asks for them.
    others: dict[str, list[str]]


class Table(NamedTuple):
    """Columns of text by name: the training rows, then the test rows, then validation rows."""

    columns: dict[str, np.ndarray]
    parts: list[TablePart]
    sets: np.ndarray | None  # what each row is for, where there are several files

    @classmethod
    def read(
        cls,
        path: Path,
        ignore: Sequence[str] = (),
        only: Sequence[str] | None = None,
        notation: Notation = USUAL_NOTATION,
        sheet: str | None = None,
        endings: Sequence[str] = (".csv", ".csv.gz"),
        keep_others: bool = False,
    ) -> Table:
        """Read all columns but those to `ignore`, or `only` these, as far as they are there.

        `path` is a file, or a folder with files as `find_parts` names them. `sheet` is that of an
        Excel file. With `keep_others`, the parts keep their other columns, too, whatever these
        hold. Raises DataError if a file has no rows, or if the test file lacks a column of the
        training file.
        """
        parts = []
        for part_path in find_parts(path, endings):
            rows, unit = _open_rows(part_path, notation, sheet)
            part = _read_part(
                str(part_path), rows, unit, ignore, only, notation, keep_others=keep_others
            )
            parts.append(part)
        return cls.join(parts)

    @classmethod
    def from_frames(
        cls,
        frames: Sequence[Any],
        names: Sequence[str],
        ignore: Sequence[str] = (),
        only: Sequence[str] | None = None,
        notation: Notation = USUAL_NOTATION,
    ) -> Table:
        """Return one DataFrame as a table, or the training rows and the test rows of two.

        `names` are those of the frames, for errors.
        """
        parts = []
        for frame, name in zip(frames, names, strict=True):
            rows = list_frame_rows(frame, name)
            parts.append(_read_part(name, rows, "row", ignore, only, notation))
        return cls.join(parts)

    @classmethod
    def join(cls, parts: list[TablePart]) -> Table:
        """Return the parts as one table: the only one, or training, test and validation rows."""
        first = parts[0]
        for part in parts:
            missing = [name for name in first.columns if name not in part.columns]
            if missing:
                raise DataError(f"{part.name} has no column {missing[0]!r}, which {first.name} has")
        joined = {}
        for name in first.columns:
            joined[name] = np.concatenate([part.columns[name] for part in parts])
        return cls(joined, parts, name_sets([len(part.numbers) for part in parts]))

    @property
    def name(self) -> str:
        """The name of the training file, or of the only one."""
        return self.parts[0].name

    @property
    def notices(self) -> list[str]:
        """What the user should know about how the table was read."""
        return [
            f"{part.name}: the first column has no name and is left out, as the index that pandas "
            "writes"
            for part in self.parts
            if part.has_index
        ]

    def check_name(self, name: str) -> str:
        """Return the name of a column, or raise ConfigError if there is no such column."""
        if name not in self.columns:
            raise unknown(f"column of {self.name}", name, self.columns)
        return name

    def clients(self, name: str) -> np.ndarray:
        """Return the column of the clients, or raise DataError if a row has none."""
        return self._full_column(name, "client", "or name it in `ignore`")

    def groups(self, name: str) -> np.ndarray:
        """Return the column of the groups, or raise DataError if a row has none."""
        return self._full_column(name, "group", "or leave out the option group")

    def _full_column(self, name: str, what: str, remedy: str) -> np.ndarray:
        """Return a column in which every row must have a value."""
        values = self.columns[name]
        missing = np.flatnonzero(values == "")
        if len(missing):
            place = self.place(missing[0])
            raise DataError(f"{place} has no {what}: fill in column {name!r}, {remedy}")
        return values

    def place(self, row: int) -> str:
        """Return the file and line of a row, for errors."""
        return self.places()(row)

    def places(self) -> Callable[[int], str]:
        """Return a function that gives the file and line of a row, and needs no columns."""
        parts = [(part.name, part.unit, part.numbers) for part in self.parts]

        def place(row: int) -> str:
            for name, unit, numbers in parts:
                if row < len(numbers):
                    return f"{name}, {unit} {numbers[row]}"
                row -= len(numbers)
            raise IndexError(row)

        return place


def _open_rows(path: Path, notation: Notation, sheet: str | None) -> tuple[Rows, str]:
    """Return the rows of a file by its ending, and what their numbers count."""
    name = path.name.lower()
    if name.endswith(PARQUET_ENDINGS):
        return read_parquet_rows(path), "row"
    if name.endswith(EXCEL_ENDINGS):
        return read_excel_rows(path, sheet), "row"
    return read_rows(path, notation.text_encoding), "line"


def _read_part(
    where: str,
    rows: Rows,
    unit: str,
    ignore: Iterable[str],
    only: Sequence[str] | None,
    notation: Notation,
    *,
    keep_others: bool = False,
) -> TablePart:
    """Return the wanted columns of one file or DataFrame; refused if it has no rows."""
    _, header = next(rows)
    ignored = {name for name in ignore if name}
    for name in sorted(ignored):
        if name not in header and not INDEX_HEADER.fullmatch(name):
            raise unknown(f"column of {where}", name, header)
    chunks: dict[str, list[np.ndarray]] = {}
    for name in header:
        if name != LEFT_OUT and name not in ignored and (only is None or name in only):
            chunks[name] = [np.zeros(0, "U1")]
    others: dict[str, list[str]] = {}
    if keep_others:
        others = {name: [] for name in header if name != LEFT_OUT and name not in chunks}
    numbers: list[int] = []
    for chunk in _in_chunks(rows):
        numbers.extend(number for number, _ in chunk)
        values_by_column = zip(*(row for _, row in chunk), strict=True)
        for name, values in zip(header, values_by_column, strict=True):
            if name in chunks:
                chunks[name].append(_to_text_array(f"{where}: column {name!r}", values, notation))
            elif name in others:
                others[name].extend(values)
    if not numbers:
        raise DataError(f"{where} holds no row below its header")
    columns = {}
    for name in list(chunks):
        columns[name] = np.concatenate(chunks.pop(name))  # `pop` frees the memory of the chunks
    return TablePart(where, columns, unit, numbers, LEFT_OUT in header, others)


def _in_chunks(rows: Rows) -> Iterator[list[tuple[int, list[str]]]]:
    while chunk := list(islice(rows, ROWS_PER_CHUNK)):
        yield chunk


def _to_text_array(where: str, values: Sequence[str], notation: Notation) -> np.ndarray:
    """Return values as an array, without blanks around them; missing values become empty."""
    longest = max(len(value) for value in values)
    if longest > MAX_VALUE_CHARACTERS:
        raise DataError(
            f"{where} holds a value of {longest:,} characters, more than "
            f"{MAX_VALUE_CHARACTERS:,}: name it in `ignore`, or read it with text:PATH"
        )
    texts = np.char.strip(np.array(values))
    if notation.decimal == ",":
        texts = _replace_decimal_commas(where, texts)
    is_missing = np.isin(texts, (*MISSING_VALUES, *notation.missing))
    for mark in _list_numbers(notation.missing):
        is_missing |= _equals_number(texts, mark)
    return np.where(is_missing, "", texts)


def _list_numbers(texts: Iterable[str]) -> list[float]:
    """Return those of some texts that are numbers."""
    numbers = []
    for text in texts:
        try:
            numbers.append(float(text.replace(",", ".")))
        except ValueError:
            continue
    return numbers


def _equals_number(texts: np.ndarray, number: float) -> np.ndarray:
    """Return where a text is this number, however it is written: -9, -9.0 or -9.00."""
    values, positions = np.unique(texts, return_inverse=True)
    is_equal = [number in _list_numbers([value]) for value in values.tolist()]
    return np.array(is_equal, bool)[positions]


def _replace_decimal_commas(where: str, texts: np.ndarray) -> np.ndarray:
    """Return numbers with a decimal comma as numbers with a point; other texts stay.

    Raises DataError for a number with a point, which could mean thousands.
    """
    values, positions = np.unique(texts, return_inverse=True)
    with_points = []
    for value in values.tolist():
        if POINT_IN_NUMBER.fullmatch(value):
            raise DataError(
                f"{where} holds {value!r}, but with decimal=',' a number may hold no point: write "
                "it without, or leave the option out"
            )
        with_points.append(value.replace(",", ".") if DECIMAL_COMMA.fullmatch(value) else value)
    return np.array(with_points)[positions]
