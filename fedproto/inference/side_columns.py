"""All columns of a table or of rows of texts, as text: for ids and true classes."""

from __future__ import annotations

from pathlib import Path

from fedproto.data.shared.tables import TABLE_ENDINGS, Table
from fedproto.data.text import ROW_FILE_ENDINGS, read_document_rows


def read_side_columns(path: Path) -> dict[str, list[str]] | None:
    """Return the columns of a file, one text per row; None for a file without columns.

    A row of texts that lacks a column has an empty text there.
    """
    name = path.name.lower()
    if name.endswith(TABLE_ENDINGS):
        table = Table.read(path)
        return {column: values.tolist() for column, values in table.columns.items()}
    if not name.endswith(ROW_FILE_ENDINGS):
        return None
    rows = [row for _, row in read_document_rows(path)]
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return {column: [row.get(column, "") for row in rows] for column in names}
