"""Rows of Parquet files, Excel sheets and DataFrames, as texts that pandas would write to a CSV."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.data.shared.delimited import Rows, check_header
from fedproto.errors import DataError, need, unknown

PARQUET_ENDINGS = (".parquet", ".pq")
EXCEL_ENDINGS = (".xlsx", ".xlsm")
EXTRA = "'.[tables]'"
#: Rows of a DataFrame that are written as text at a time.
ROWS_PER_CHUNK = 10_000
#: Values of a cell that no column of a CSV can hold.
NESTED = (list, tuple, dict, set, bytes, bytearray, np.ndarray)


def check_ending(path: str, name: str, endings: tuple[str, ...]) -> None:
    """Raise DataError unless a path is a folder or a file of the data set `name`, by its ending."""
    if not path.lower().endswith(endings) and not Path(path).is_dir():
        accepted = " or ".join(endings)
        raise DataError(f"dataset {name} reads files that end in {accepted}, not {path}")


# --- DataFrames


def list_frame_rows(frame: Any, where: str) -> Rows:
    """Yield the header and the rows of a DataFrame; rows are numbered from 0.

    A named index is a column, as in the CSV; one without a name is left out.
    """
    frame = _with_named_index(frame, where)
    if frame.columns.nlevels > 1:
        raise DataError(f"{where} names its columns on {frame.columns.nlevels} levels, not on one")
    header = check_header(where, [str(name) for name in frame.columns], takes_numbers=True)
    _refuse_nested(frame, where)
    yield 0, header
    for start in range(0, len(frame), ROWS_PER_CHUNK):
        text = frame.iloc[start : start + ROWS_PER_CHUNK].to_csv(index=False, header=False)
        rows = csv.reader(io.StringIO(text, newline=""))
        yield from enumerate(rows, start)


def _with_named_index(frame: Any, where: str) -> Any:
    """Return the frame with the named levels of its index as columns, before the others."""
    named = [name for name in frame.index.names if name is not None]
    if not named:
        return frame
    try:
        return frame.reset_index(level=named)
    except ValueError as error:
        raise DataError(f"{where} has an index and a column of one name: {error}") from error


def _refuse_nested(frame: Any, where: str) -> None:
    """Refuse a column whose cells hold lists, arrays or bytes."""
    for position in range(frame.shape[1]):
        column = frame.iloc[:, position]
        if column.dtype != object:
            continue
        for value in column:
            if isinstance(value, NESTED):
                kind = type(value).__name__
                raise DataError(
                    f"{where}: column {str(column.name)!r} holds values of type {kind}: name it "
                    "in `ignore`"
                )


# --- Parquet


def read_parquet_rows(path: Path) -> Rows:
    """Yield the header and the rows of a Parquet file; rows are numbered from 0."""
    need("pyarrow", EXTRA, f"{path}, a Parquet file,")
    pandas = need("pandas", EXTRA, f"{path}, a Parquet file,")
    with _explain_damage(path, "Parquet"):
        frame = pandas.read_parquet(path, engine="pyarrow")
    return list_frame_rows(frame, str(path))


# --- Excel


def read_excel_rows(path: Path, sheet: str | None) -> Rows:
    """Yield the header and the rows of a sheet, the first one if none is named.

    Rows are numbered as Excel shows them. Rows and columns that hold nothing are skipped.
    """
    openpyxl = need("openpyxl", EXTRA, f"{path}, an Excel file,")
    with _explain_damage(path, "Excel"):
        workbook = openpyxl.load_workbook(path, read_only=True, data_only=True)
        names = list(workbook.sheetnames)
    try:
        if sheet is not None and sheet not in names:
            raise unknown(f"sheet of {path}", sheet, names)
        with _explain_damage(path, "Excel"):
            cells = list(workbook[sheet or names[0]].iter_rows(values_only=True))
    finally:
        workbook.close()
    yield from _list_sheet_rows(cells, str(path))


def list_sheets(path: Path) -> list[str]:
    """Return the names of the sheets of an Excel file."""
    openpyxl = need("openpyxl", EXTRA, f"{path}, an Excel file,")
    with _explain_damage(path, "Excel"):
        workbook = openpyxl.load_workbook(path, read_only=True)
        names = list(workbook.sheetnames)
        workbook.close()
    return names


def _list_sheet_rows(cells: list[tuple[Any, ...]], where: str) -> Rows:
    """Yield the header and the rows of a sheet as texts, all of the header's width."""
    texts = [[_cell_text(value) for value in row] for row in cells]
    filled = [(number, row) for number, row in enumerate(texts, 1) if any(row)]
    if not filled:
        raise DataError(f"{where} has no header: its first line must name every column")
    width = max(_filled_width(row) for _, row in filled)
    header_row = _fit(filled[0][1], width)
    yield filled[0][0], check_header(where, header_row, takes_numbers=False)
    for number, row in filled[1:]:
        yield number, _fit(row, width)


def _filled_width(row: list[str]) -> int:
    """Return the number of cells up to the last one that holds something."""
    filled = [position for position, text in enumerate(row, 1) if text]
    return filled[-1] if filled else 0


def _fit(row: list[str], width: int) -> list[str]:
    return (row + [""] * width)[:width]


def _cell_text(value: Any) -> str:
    """Return the value of a cell as pandas writes it to a CSV; an error such as #N/A is missing."""
    if value is None or value == "#N/A":
        return ""
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return str(value.date())
    return str(value)


# --- damaged files


@contextmanager
def _explain_damage(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever goes wrong in reading a file into one sentence."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    try:
        yield
    except Exception as error:  # a damaged file can fail in any way
        message = " ".join(str(error).split())
        raise DataError(
            f"{path} is not a valid {kind} file (or is corrupted): {message}"
        ) from error
