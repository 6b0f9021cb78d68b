"""What somebody's data holds, and how it must be named so that it can be read."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.config import plugins
from fedproto.config.choices import parse_choice
from fedproto.config.options import Part, check_options, options_of
from fedproto.config.own_files import suggest_dataset
from fedproto.core.class_names import list_names
from fedproto.data import DataFolders, Source
from fedproto.data.shared.tables import LABEL_COLUMNS, Table, find_column
from fedproto.errors import ColumnsError, ConfigError, FedProtoError, ImageSizesError
from fedproto.setup.table_roles import (
    TABLE_ENDINGS,
    count_missing,
    find_roles,
    find_text_column,
    read_table,
)

#: The longest side to which images of several sizes are brought, in pixels.
MAX_COMMON_SIDE = 64
#: Classes, columns and clients that a sentence lists.
MAX_LISTED = 8


@dataclass
class Survey:
    """Somebody's data, as it can be read."""

    #: The data set with the options that it needs.
    part: Part
    source: Source
    #: Why an option of the data set has its value, in a sentence.
    reasons: dict[str, str] = field(default_factory=dict)
    #: What its owner should know.
    remarks: list[str] = field(default_factory=list)

    def describe(self) -> list[str]:
        """Return sentences on what the data holds."""
        return [*_describe_rows(self.source), *self.remarks]


def survey(text: str, wishes: Mapping[str, Any], data_dir: str | None = None) -> Survey:
    """Return what a path or a named data set holds.

    Options that the data needs and that have one obvious value are set: columns that tell rows
    apart are left out, images of several sizes are resized, broken files are skipped.

    Args:
        text: a path, or a data set such as `csv:visits.csv(label=finding)`.
        wishes: options of the data set by name; None is not given.
        data_dir: where data files may lie.
    """
    part = name_data(text)
    given = {name: value for name, value in wishes.items() if value}
    base, _, path = part.name.partition(":")
    function = plugins.find("dataset", part.name)
    known = options_of(function)
    for name in given:
        if name not in known:
            raise ConfigError(f"{base} has no option {name!r}: leave --{name} out")
    checked = check_options(function, dict(part.options) | given, f"dataset {base}")
    is_set = {name: value != known[name].default for name, value in checked.items()}
    options = {name: value for name, value in checked.items() if is_set[name]}
    reasons: dict[str, str] = {}
    remarks: list[str] = []
    if base in TABLE_ENDINGS:
        remarks += _choose_columns(base, path, options, reasons)
    elif base == "text" and suggest_dataset(path) == f"csv:{path}" and Path(path).is_file():
        _choose_text_columns(path, options, reasons)
    source = _read_in_spite_of_problems(part.name, options, reasons, DataFolders(data_dir))
    return Survey(Part(part.name, options), source, reasons, [*remarks, *source.notices])


def name_data(text: str) -> Part:
    """Return the data set that a path or a text such as `csv:PATH(label=x)` means."""
    is_plugin = text.partition(":")[0].partition("(")[0] in plugins.names("dataset")
    if not is_plugin:
        if not Path(text).expanduser().exists():
            raise ConfigError(f"{text} does not exist, and is not the name of a data set")
        suggested = suggest_dataset(text)
        if suggested is None:
            raise ConfigError(
                f"{text} is not a kind of file that is known: name it with its kind, such as "
                f"'csv:{text}'"
            )
        kind, _, path = suggested.partition(":")
        if kind == "csv" and _holds_texts(path):
            kind = "text"
        text = str(Part(f"{kind}:{path}"))
    return parse_choice("dataset", text)


def _holds_texts(path: str) -> bool:
    """Return whether a delimited file holds texts to classify, rather than a table of values."""
    if Path(path).is_dir():
        return False
    columns = read_table("csv", Path(path)).columns
    return find_text_column(columns) is not None


def _choose_columns(
    kind: str, path: str, options: dict[str, Any], reasons: dict[str, str]
) -> list[str]:
    """Set the columns of labels, clients and groups, with reasons; return remarks on the table."""
    table = read_table(kind, Path(path))
    named = [options.get(role) for role in ("label", "client", "group", "split")]
    taken = {*options.get("ignore", ()), *(name for name in named if name)}
    if "label" not in options:
        label = find_column(table.columns, LABEL_COLUMNS)
        if label is not None:
            reasons["label"] = "the column of classes"
        else:
            label = _guess_label(table, taken)
            reasons["label"] = "the last column, taken for the classes; --label names another"
        if label is not None:
            options["label"] = label
            taken.add(label)
    roles = find_roles(table, taken)
    if "client" not in options and roles.client is not None:
        options["client"] = roles.client
        reasons["client"] = "each value of this column becomes a client"
    if "group" not in options and roles.group is not None:
        options["group"] = roles.group
        reasons["group"] = "rows with one value of this column stay on one side of every split"
    missing = count_missing(table.columns)
    if not missing:
        return []
    listed = list_names([f"{name} {count:,}" for name, count in missing.items()], MAX_LISTED)
    return [f"missing values: {listed}; they become the mean, or a value of their own"]


def _guess_label(table: Table, taken: Collection[str]) -> str | None:
    """Return the last column that says neither whose a row is nor which rows belong together."""
    roles = find_roles(table, taken)
    free = [name for name in table.columns if name not in taken and name not in roles]
    return free[-1] if free else None


def _choose_text_columns(path: str, options: dict[str, Any], reasons: dict[str, str]) -> None:
    """Set the columns of texts and labels of a delimited file that have no usual name."""
    columns = read_table("csv", Path(path)).columns
    text = find_text_column(columns)
    if text is not None and text != "text" and "text" not in options:
        options["text"] = text
        reasons["text"] = "the column of texts"
    others = [name for name in columns if name != text]
    if "label" not in options and find_column(columns, LABEL_COLUMNS) is None and others:
        options["label"] = others[-1]
        reasons["label"] = "the column of classes"


def _read_in_spite_of_problems(
    name: str, options: dict[str, Any], reasons: dict[str, str], data_folders: DataFolders
) -> Source:
    """Return a data set; set those options without which it could not be read."""
    can_skip = "broken" in options_of(plugins.find("dataset", name))
    if can_skip and "broken" not in options:
        options["broken"] = "skip"
        source = _read_in_spite_of_problems(name, options, reasons, data_folders)
        if _count_files(source) == _count_listed(name, options, data_folders):
            del options["broken"]
        else:
            reasons["broken"] = "files that cannot be read are left out"
        return source
    while True:
        try:
            return plugins.build("dataset", Part(name, options), data_folders)
        except ColumnsError as error:
            ignored = (*options.get("ignore", ()), *error.columns)
            if len(set(ignored)) < len(ignored):
                raise
            options["ignore"] = ignored
            reasons["ignore"] = "columns of names, ids or dates tell rows apart; `keep` keeps one"
        except ImageSizesError as error:
            if "size" in options:
                raise
            shorter_sides = [min(size) for size in error.sizes]
            side = min(MAX_COMMON_SIDE, round(statistics.median(shorter_sides)))
            options["size"] = side
            reasons["size"] = f"images have {len(set(error.sizes))} sizes: all become {side}x{side}"


def _count_files(source: Source) -> int:
    validation = 0 if source.validation is None else len(source.validation.y)
    return len(source.train.y) + len(source.test.y) + validation


def _count_listed(name: str, options: dict[str, Any], data_folders: DataFolders) -> int | None:
    """Return how many files there are, broken ones included; None if broken ones are refused."""
    refusing = options | {"broken": "refuse"}
    try:
        return _count_files(plugins.build("dataset", Part(name, refusing), data_folders))
    except FedProtoError:  # reading without the broken files went well
        return None


def _describe_rows(source: Source) -> list[str]:
    """Return what a data set holds: rows, shape of the inputs, classes and clients."""
    rows = f"{len(source.train.y):,} training and {len(source.test.y):,} test rows"
    if source.validation is not None:
        rows += f" and {len(source.validation.y):,} for validation"
    shape = "x".join(str(size) for size in source.train.x.shape[1:])
    sentences = [f"{rows}, inputs of {shape} values, {len(source.classes)} classes"]
    counts = np.bincount(source.train.y, minlength=len(source.classes)).tolist()
    pairs = sorted(zip(source.classes, counts, strict=True), key=lambda pair: -pair[1])
    listed = list_names([f"{name} {count:,}" for name, count in pairs], MAX_LISTED)
    sentences.append(f"training rows per class: {listed}")
    if source.train.writer is not None:
        names, sizes = np.unique(source.train.writer, return_counts=True)
        named = [f"{name} {size:,}" for name, size in zip(names, sizes.tolist(), strict=True)]
        listed = list_names(named, MAX_LISTED)
        sentences.append(f"training rows per client, {len(names)} clients: {listed}")
    return sentences
