"""From a spec, one readable TOML file, to the runs it asks for.

Each row (a method) in each column (a setting) with each seed is one federation, a cell of a sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedproto.config.config_file import read_tables
from fedproto.config.settings import configure
from fedproto.data import DataFolders
from fedproto.errors import ConfigError, unknown
from fedproto.runs.sweep import Cell

SPECS = Path(__file__).parent / "specs"
#: The beginning of a path that is looked for in the data folders.
DATA_PREFIX = "data:"
#: What a row may hold besides settings of its runs.
ROW_KEYS = ("columns", "seeds")

Settings = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A method of a spec, with the columns and seeds it is run in."""

    name: str
    settings: Settings
    columns: list[str]
    seeds: list[int]

    @property
    def score(self) -> str:
        """The accuracy that stands for the method: what it predicts with."""
        algorithm = str(self.settings["algorithm"])
        if algorithm.startswith("closed-form"):
            return "teacher"
        return "prototype" if algorithm.startswith("fedproto") else "head"


@dataclass(frozen=True)
class Spec:
    """A table, figure or study: what is run, and what is made of it.

    paper     the data set in paper.json whose numbers it is compared with, if any
    settings  those that all rows share
    columns   the settings of each column, by its name
    after     the probes (probes.py) that are made of the trained models
    note      what a reader of the page should know
    """

    name: str
    title: str
    paper: str | None
    settings: Settings
    columns: dict[str, Settings]
    rows: list[Row]
    after: dict[str, bool]
    quick: bool = False
    note: str = ""


@dataclass(frozen=True)
class Request:
    """The part of a spec that is asked for, and how it is computed.

    quick     the small version that needs no data
    seeds     how many; None for the spec's own
    rounds    of every run; None for the spec's own
    methods   names of rows or algorithms; all if empty
    settings  keys and values that say how the runs are computed: device, data_dir
    """

    quick: bool = False
    seeds: int | None = None
    rounds: int | None = None
    methods: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class PlannedRun:
    """A federation of a spec."""

    row: Row
    column: str
    seed: int
    cell: Cell


def targets() -> list[str]:
    """Return the names of all specs, sorted."""
    return sorted(path.stem for path in SPECS.glob("*.toml"))


# --- reading a spec


def read_spec(name: str, request: Request) -> Spec:
    """Return the part of the spec `name` that is asked for.

    Raises ConfigError where there is no such spec, or no such method in it.
    """
    if name not in targets():
        raise unknown("target", name, [*targets(), "verdicts", "all"])
    tables = read_tables(SPECS / f"{name}.toml")
    quick = tables.get("quick", {}) if request.quick else {}
    without = quick.get("without", ())
    settings = {key: value for key, value in tables["settings"].items() if key not in without}
    settings |= quick.get("settings", {})
    settings |= dict(request.settings)
    column_names = quick.get("columns", tables["columns"])
    columns = {column: tables["columns"][column] for column in column_names}
    seeds = _choose_seeds(tables["seeds"], request.seeds, quick.get("seeds"))
    rounds = request.rounds or quick.get("rounds")
    rows = [
        _read_row(tables, row_name, settings, columns, seeds, rounds)
        for row_name in quick.get("rows", tables["rows"])
    ]
    title = tables["title"]
    if quick:
        title = f"{name}, quick version on {settings['dataset']}: not the paper's setting"
    if rounds is not None:
        settings["rounds"] = rounds
    return Spec(
        name=name,
        title=title,
        paper=None if request.quick else tables.get("paper"),
        settings=settings,
        columns=columns,
        rows=_select_rows(rows, request.methods),
        after=tables.get("after", {}),
        quick=request.quick,
        note=tables.get("note", ""),
    )


def _choose_seeds(seeds: list[int], wanted: int | None, quick: int | None) -> list[int]:
    """Return the first seeds of a spec, as many as are wanted; 0, 1, 2, ... if it has fewer."""
    if wanted is None:
        return seeds[:quick]
    if wanted > len(seeds):
        return list(range(wanted))
    return seeds[:wanted]


def _read_row(
    tables: dict[str, Any],
    name: str,
    shared: Settings,
    columns: dict[str, Settings],
    seeds: list[int],
    rounds: int | None,
) -> Row:
    """Return a row of a spec.

    shared   the settings of all rows
    columns  those that are run, of which the row may choose some
    seeds    those that are run, of which the row may take the first few
    rounds   of every run, if given, instead of the spec's
    """
    table = tables["rows"][name]
    own = {key: value for key, value in table.items() if key not in ROW_KEYS}
    settings = shared | own
    if rounds is not None:
        settings["rounds"] = rounds
    needs_checkpoint = any(tables.get("after", {}).values())
    if needs_checkpoint:  # that of the last round
        settings["checkpoint_every"] = settings["rounds"]
    own_columns = [column for column in table.get("columns", columns) if column in columns]
    return Row(name, settings, own_columns, seeds[: table.get("seeds")])


def _select_rows(rows: list[Row], methods: Sequence[str]) -> list[Row]:
    """Return the rows of these methods, each the name of a row or of its algorithm."""
    if not methods:
        return rows
    known = set()
    for row in rows:
        known.add(row.name.lower())
        known.add(row.settings["algorithm"])
    asked = _join_names([method.strip().lower() for method in methods], known)
    return [row for row in rows if row.name.lower() in asked or row.settings["algorithm"] in asked]


def _join_names(parts: Sequence[str], known: set[str]) -> set[str]:
    """Return the names in a list that was split at commas.

    A row's name may itself hold commas, so the longest name that fits is taken at each position.
    """
    names = set()
    rest = parts
    while rest:
        length = _count_parts(rest, known)
        if length == 0:
            raise unknown("method", rest[0], known)
        names.add(", ".join(rest[:length]))
        rest = rest[length:]
    return names


def _count_parts(parts: Sequence[str], known: set[str]) -> int:
    """Return how many of the first parts make up the longest known name; 0 if none do."""
    for length in range(len(parts), 0, -1):
        if ", ".join(parts[:length]) in known:
            return length
    return 0


# --- planning its runs


def plan(spec: Spec, finished: bool = False) -> list[PlannedRun]:
    """Return all federations of a spec, in the order in which they are run.

    Data files that their settings name must exist, unless all runs are `finished` already.
    """
    planned = []
    for row in spec.rows:
        for column in row.columns:
            for seed in row.seeds:
                cell = _plan_cell(spec, row, column, seed, finished)
                planned.append(PlannedRun(row, column, seed, cell))
    return planned


def _plan_cell(spec: Spec, row: Row, column: str, seed: int, finished: bool) -> Cell:
    """Return one federation of a spec.

    Raises ConfigError with the row and the column if its settings cannot be used.
    """
    settings = row.settings | spec.columns[column] | {"seed": seed}
    if not finished:
        settings = find_data_files(settings)
    try:
        (config,) = configure(settings)
    except ConfigError as error:
        raise ConfigError(f"{spec.name}, row {row.name}, column {column}: {error}") from error
    chosen = {"method": row.name, "setting": column, "seed": seed}
    return Cell(cell_name(row.name, column, seed), chosen, config)


def find_data_files(settings: Settings) -> Settings:
    """Return settings in which `data:PATH` is replaced by where the file is.

    A data set may be such a file, too: `npz:data:PATH`. Raises DataError if it is in none of the
    data folders.
    """
    data_folders = DataFolders(settings.get("data_dir"))
    found = {}
    for key, value in settings.items():
        if not isinstance(value, str):
            continue
        kind, prefix, path = value.partition(DATA_PREFIX)
        if prefix and kind in ("", "npz:"):
            found[key] = f"{kind}{data_folders.find(path)}"
    return settings | found


def cell_name(row: str, column: str, seed: int) -> str:
    """Return the name of a cell's run folder."""
    name = f"{row}-{column}-seed={seed}"
    name = name.replace(" = ", "=")
    name = name.replace(" ", "_")
    name = name.replace(",", "")
    characters = [_safe_character(character) for character in name]
    return "".join(characters)


def _safe_character(character: str) -> str:
    if character.isalnum() or character in "-_=.+":
        return character
    return "_"
