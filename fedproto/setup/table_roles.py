"""What the columns of somebody's table are, by their names and contents."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedproto.data.csv import csv
from fedproto.data.shared.stored_tables import EXCEL_ENDINGS, PARQUET_ENDINGS
from fedproto.data.shared.tables import Table

#: The kinds of data set that read tables, and the endings of their files in a folder.
TABLE_ENDINGS = {
    csv.__name__: (".csv", ".csv.gz"),
    "parquet": PARQUET_ENDINGS,
    "excel": EXCEL_ENDINGS,
}
#: The last words of names of columns that say whose a row is.
CLIENT_WORDS = (
    "bank",
    "branch",
    "center",
    "centre",
    "client",
    "clinic",
    "hospital",
    "institute",
    "institution",
    "member",
    "organisation",
    "organization",
    "site",
)
#: The words of names of columns that say which rows belong together.
GROUP_WORDS = ("case", "group", "participant", "patient", "person", "subject")
#: Clients that a column may name, and the fewest rows of each.
MAX_CLIENTS = 100
MIN_ROWS_PER_CLIENT = 10
#: Usual names of a column of free texts.
TEXT_COLUMNS = ("text", "review", "comment", "message", "sentence", "description", "content")
#: A column of free texts has at least so many words per row on average.
MIN_WORDS = 4


class Roles(NamedTuple):
    """The columns that are not inputs, as far as names and contents tell."""

    client: str | None
    group: str | None


def read_table(kind: str, path: Path) -> Table:
    """Return a table of one of the kinds of `TABLE_ENDINGS` as columns of text."""
    return Table.read(path, endings=TABLE_ENDINGS[kind])


def find_roles(table: Table, taken: Collection[str]) -> Roles:
    """Return which columns name clients and groups; `taken` are columns that are something else."""
    free = {name: values for name, values in table.columns.items() if name not in taken}
    client = None
    for name, values in free.items():
        if _has_word(name, CLIENT_WORDS) and _names_clients(values):
            client = name
            break
    for name, values in free.items():
        if name == client or not _has_word(name, GROUP_WORDS) or not _names_groups(values):
            continue
        clients = None if client is None else free[client]
        if clients is None or _stays_with_one_client(values, clients):
            return Roles(client, name)
    return Roles(client, None)


def find_text_column(columns: dict[str, np.ndarray]) -> str | None:
    """Return a column with one of the usual names that holds sentences rather than categories."""
    for usual_name in TEXT_COLUMNS:
        for name, values in columns.items():
            if name.lower() != usual_name:
                continue
            words = [len(value.split()) for value in values.tolist()]
            if words and sum(words) / len(words) >= MIN_WORDS:
                return name
    return None


def count_missing(columns: dict[str, np.ndarray]) -> dict[str, int]:
    """Return the number of missing values of each column that has some."""
    counts = {name: int((values == "").sum()) for name, values in columns.items()}
    return {name: count for name, count in counts.items() if count}


def _has_word(name: str, words: Collection[str]) -> bool:
    """Return whether a name has one of the words, as `patient_id` and `PatientID` have patient."""
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    found = re.split(r"[^a-z]+", spaced.lower())
    return not set(words).isdisjoint(found)


def _names_clients(values: np.ndarray) -> bool:
    names, counts = np.unique(values, return_counts=True)
    is_complete = "" not in names
    return is_complete and 2 <= len(names) <= MAX_CLIENTS and counts.min() >= MIN_ROWS_PER_CLIENT


def _names_groups(values: np.ndarray) -> bool:
    """Return whether every row has a group, and groups have more than one row on average."""
    names = np.unique(values)
    return "" not in names and 2 <= len(names) <= len(values) / 1.5


def _stays_with_one_client(groups: np.ndarray, clients: np.ndarray) -> bool:
    pairs = set(zip(groups.tolist(), clients.tolist(), strict=True))
    return len(pairs) == len(set(groups.tolist()))
