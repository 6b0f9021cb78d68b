"""Tables of numbers and categories, in sheets of Excel files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedproto.config.options import File
from fedproto.data import DataFolders, Source
from fedproto.data.shared.feature_encoding import Notation
from fedproto.data.shared.stored_tables import EXCEL_ENDINGS, check_ending, list_sheets
from fedproto.data.shared.table_source import TableOptions, from_table
from fedproto.data.shared.tables import Table, find_parts


def excel(
    data_folders: DataFolders,
    path: str,
    *,
    sheet: str | None = None,
    label: str | None = None,
    client: str | None = None,
    group: str | None = None,
    split: str | None = None,
    ignore: tuple[str, ...] = (),
    keep: tuple[str, ...] = (),
    missing: tuple[str, ...] = (),
    encoding: File | None = None,
) -> Source:
    """A table of your own in an Excel file (.xlsx), or a folder with train.xlsx and test.xlsx.

    `sheet` names the sheet (default: the first), whose first row names the columns. They become
    inputs as those of the CSV that pandas would write of them, and the other options are those of
    `csv`. Needs the extra `tables`.
    """
    check_ending(path, "excel", EXCEL_ENDINGS)
    notation = Notation(missing)
    table = Table.read(Path(path), ignore, notation=notation, sheet=sheet, endings=EXCEL_ENDINGS)
    options = TableOptions(label, client, keep, encoding, notation, group, split)
    source = from_table(f"excel:{path}", table, options)
    if sheet is not None:
        return source
    return replace(source, notices=(*_describe_other_sheets(Path(path)), *source.notices))


def _describe_other_sheets(path: Path) -> list[str]:
    """Return a notice for each file of which only the first of several sheets was read."""
    notices = []
    for part in find_parts(path, EXCEL_ENDINGS):
        first, *others = list_sheets(part)
        if others:
            notices.append(
                f"{part}: only the first sheet, {first!r}, is read, not {', '.join(others)}: "
                "name another with sheet=NAME"
            )
    return notices
