"""Tables of numbers and categories, in delimited text files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fedproto.config.options import File
from fedproto.data import DataFolders, Source
from fedproto.data.shared.delimited import UTF_8, check_text_encoding
from fedproto.data.shared.feature_encoding import Notation
from fedproto.data.shared.stored_tables import EXCEL_ENDINGS, PARQUET_ENDINGS
from fedproto.data.shared.table_source import TableOptions, from_table
from fedproto.data.shared.tables import Table
from fedproto.errors import DataError


def csv(
    data_folders: DataFolders,
    path: str,
    *,
    label: str | None = None,
    client: str | None = None,
    group: str | None = None,
    split: str | None = None,
    ignore: tuple[str, ...] = (),
    keep: tuple[str, ...] = (),
    missing: tuple[str, ...] = (),
    decimal: Literal[".", ","] = ".",
    text_encoding: str = UTF_8,
    encoding: File | None = None,
) -> Source:
    """A table of your own: a file with a header, or a folder with train.csv, test.csv and val.csv.

    Files may be gzipped (.gz). `label` names the column of classes (default: one called label,
    class, target or y, else the last). `client` names the column of clients, for `natural`
    (default: one called client, if there is one). `group` names the column of what must stay
    together, such as the rows of one patient. `split` names a column that says train, val or test.
    val.csv is optional; without `split`, a seeded fifth of each class of a single file is held out
    as the test set.

    Numbers are standardised and texts become one input per value, both by the training rows. A
    missing value (empty, NA, ? or a mark named in `missing`) becomes the mean, or a value of its
    own. `ignore` names columns to leave out. A column of texts that differ in nearly every row,
    such as names, ids or dates, is refused unless it is named in `ignore`, or in `keep`. `encoding`
    names a file of an exported member that says how columns become inputs.

    `decimal` is "," for numbers such as 1,5; `text_encoding` is that of the file, such as latin-1.
    """
    _refuse_other_formats(path)
    notation = Notation(missing, decimal, check_text_encoding(text_encoding))
    table = Table.read(Path(path), ignore, notation=notation)
    options = TableOptions(label, client, keep, encoding, notation, group, split)
    return from_table(f"csv:{path}", table, options)


def _refuse_other_formats(path: str) -> None:
    """Raise DataError for a file that another data set reads, naming that one."""
    for name, endings in (("parquet", PARQUET_ENDINGS), ("excel", EXCEL_ENDINGS)):
        if path.lower().endswith(endings):
            raise DataError(f"{path} is not a text file: name it with {name}:{path}")
