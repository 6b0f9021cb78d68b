"""A spec, one readable TOML file, as the cells of a sweep: each row in each column with each seed is a federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedproto.config.config_file import read_tables
from fedproto.config.settings import configure
from fedproto.data import DataFolders
from fedproto.errors import ConfigError, unknown
from fedproto.runs.sweep import Cell

SPECS = Path(__file__).parent / "specs"
DATA = "data:"  # begins a path that is looked for where data lies
#: What a row may say besides settings of its runs.
ROW_KEYS = ("columns", "seeds")


@dataclass(frozen=True)
class Row:
    name: str
    settings: dict[str, Any]
    columns: list[str]
    seeds: list[int]

    @property
    def score(self) -> str:
        """The accuracy that stands for the method: what it predicts by."""
        return "prototype" if str(self.settings["algorithm"]).startswith("fedproto") else "head"


@dataclass(frozen=True)
class Spec:
    name: str
    title: str
    paper: str | None  # the data set in paper.json
    settings: dict[str, Any]
    columns: dict[str, dict[str, Any]]
    rows: list[Row]
    after: dict[str, bool]  # what is done with the trained models
    quick: bool = False
    note: str = ""  # what a reader of the table should know


@dataclass(frozen=True)
class Narrowed:
    """What a person wants less of, or otherwise."""

    quick: bool = False
    seeds: int | None = None
    rounds: int | None = None
    methods: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()  # how it is computed: device, data_dir


@dataclass(frozen=True)
class Planned:
    """A federation of a spec."""

    row: Row
    column: str
    seed: int
    cell: Cell


def targets() -> list[str]:
    return sorted(path.stem for path in SPECS.glob("*.toml"))


def read_spec(name: str, narrowed: Narrowed) -> Spec:
    if name not in targets():
        raise unknown("target", name, [*targets(), "verdicts", "all"])
    tables = read_tables(SPECS / f"{name}.toml")
    quick = tables.get("quick", {}) if narrowed.quick else {}
    settings = {k: v for k, v in tables["settings"].items() if k not in quick.get("without", ())}
    settings |= quick.get("settings", {}) | dict(narrowed.settings)
    columns = {name: tables["columns"][name] for name in quick.get("columns", tables["columns"])}
    seeds = tables["seeds"][: narrowed.seeds or quick.get("seeds")]
    if narrowed.seeds and narrowed.seeds > len(tables["seeds"]):
        seeds = list(range(narrowed.seeds))
    rows = [
        _row(n, t, settings, columns, seeds)
        for n, t in tables["rows"].items()
        if n in quick.get("rows", [n])
    ]
    rounds = narrowed.rounds or quick.get("rounds")
    if rounds:
        rows = [replace(row, settings=row.settings | {"rounds": rounds}) for row in rows]
    if any(tables.get("after", {}).values()):  # the last round's checkpoint
        rows = [
            replace(row, settings=row.settings | {"checkpoint_every": row.settings["rounds"]})
            for row in rows
        ]
    return Spec(
        name,
        f"{name}, quick version on {settings['dataset']}: not the paper's setting"
        if quick
        else tables["title"],
        None if narrowed.quick else tables.get("paper"),
        settings | ({"rounds": rounds} if rounds else {}),
        columns,
        _wanted(rows, narrowed.methods),
        tables.get("after", {}),
        narrowed.quick,
        tables.get("note", ""),
    )


def _row(
    name: str,
    table: dict[str, Any],
    settings: dict[str, Any],
    columns: dict[str, Any],
    seeds: list[int],
) -> Row:
    own = {key: value for key, value in table.items() if key not in ROW_KEYS}
    named = [column for column in table.get("columns", columns) if column in columns]
    return Row(name, settings | own, named, seeds[: table.get("seeds")])


def _wanted(rows: list[Row], methods: Sequence[str]) -> list[Row]:
    """The rows of these methods, as the row or the algorithm is called."""
    if not methods:
        return rows
    known = {row.name.lower() for row in rows} | {row.settings["algorithm"] for row in rows}
    asked, rest = set(), [method.strip().lower() for method in methods]
    while rest:  # a row's name may hold commas, at which a list of names is split
        joined = [", ".join(rest[:length]) for length in range(1, len(rest) + 1)]
        fitting = [length for length, name in enumerate(joined, 1) if name in known]
        if not fitting:
            raise unknown("method", rest[0], known)
        asked.add(joined[fitting[-1] - 1])
        rest = rest[fitting[-1] :]
    return [row for row in rows if row.name.lower() in asked or row.settings["algorithm"] in asked]


def plan(spec: Spec, finished: bool = False) -> list[Planned]:
    """All federations of a spec, in the order in which they are run; what is `finished` needs no files any more."""
    return [
        Planned(row, column, seed, _cell(spec, row, column, seed, finished))
        for row in spec.rows
        for column in row.columns
        for seed in row.seeds
    ]


def _cell(spec: Spec, row: Row, column: str, seed: int, finished: bool) -> Cell:
    settings = row.settings | spec.columns[column] | {"seed": seed}
    places = DataFolders(settings.get("data_dir"))
    for key, value in settings.items():
        if isinstance(value, str) and value.startswith(DATA) and not finished:
            settings[key] = str(places.find(value.removeprefix(DATA)))
    try:
        (config,) = configure(settings)
    except ConfigError as error:
        raise ConfigError(f"{spec.name}, row {row.name}, column {column}: {error}") from error
    return Cell(
        cell_name(row.name, column, seed),
        {"method": row.name, "setting": column, "seed": seed},
        config,
    )


def cell_name(row: str, column: str, seed: int) -> str:
    """Of its run folder."""
    name = f"{row}-{column}-seed={seed}".replace(" = ", "=").replace(" ", "_").replace(",", "")
    return "".join(c if c.isalnum() or c in "-_=.+" else "_" for c in name)
