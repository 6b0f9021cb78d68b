"""Tables of numbers and categories, in Parquet files."""

from __future__ import annotations

from pathlib import Path

from fedproto.config.options import File
from fedproto.data import DataFolders, Source
from fedproto.data.shared.feature_encoding import Notation
from fedproto.data.shared.stored_tables import PARQUET_ENDINGS, check_ending
from fedproto.data.shared.table_source import TableOptions, from_table
from fedproto.data.shared.tables import Table


def parquet(
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
    encoding: File | None = None,
) -> Source:
    """A table of your own in a Parquet file, or a folder with train.parquet and test.parquet.

    Its columns become inputs as those of the CSV that pandas would write of it, and the options are
    those of `csv`. Needs the extra `tables`.
    """
    check_ending(path, "parquet", PARQUET_ENDINGS)
    notation = Notation(missing)
    table = Table.read(Path(path), ignore, notation=notation, endings=PARQUET_ENDINGS)
    options = TableOptions(label, client, keep, encoding, notation, group, split)
    return from_table(f"parquet:{path}", table, options)
