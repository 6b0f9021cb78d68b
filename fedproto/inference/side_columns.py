"""All columns of a table or of rows of texts, as text: for ids and true classes."""

from __future__ import annotations

from pathlib import Path

from fedproto.data.shared.feature_encoding import Columns, Encoding, Words
from fedproto.data.shared.tables import Table
from fedproto.data.text import ROW_FILE_ENDINGS, read_document_rows

ARRAY_ENDINGS = (".npy", ".npz")


def read_side_columns(path: Path, encoding: Encoding | None) -> dict[str, list[str]] | None:
    """Return the columns of a file, one text per row; None for a file without columns.

    `encoding` is that of the client, which says what kind of file this is. A row of texts that
    lacks a column has an empty text there.
    """
    name = path.name.lower()
    if name.endswith(ARRAY_ENDINGS):
        return None
    if isinstance(encoding, Columns):
        table = Table.read(path, notation=encoding.notation)
        return {column: values.tolist() for column, values in table.columns.items()}
    if not isinstance(encoding, Words) or not name.endswith(ROW_FILE_ENDINGS):
        return None
    rows = [row for _, row in read_document_rows(path, encoding.text_encoding)]
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return {column: [row.get(column, "") for row in rows] for column in names}
