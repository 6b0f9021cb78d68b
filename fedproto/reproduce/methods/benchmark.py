"""The benchmark of all methods: what methods.toml asks for, as federations in running order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedproto.config.config_file import read_tables
from fedproto.config.settings import Config, configure
from fedproto.errors import ConfigError, unknown
from fedproto.reproduce.plan import Request, Settings, cell_name, find_data_files
from fedproto.runs.sweep import Cell

TARGET = "table-methods"
SPEC = Path(__file__).parent / "methods.toml"
EQUAL = "equal"
MIXED = "mixed"
ARCHITECTURES = (EQUAL, MIXED)
#: What `--only` restricts, in the order in which names of columns have it.
AXES = ("dataset", "partition", "architecture", "k")

#: What a method's line may hold besides settings of its runs.
METHOD_KEYS = ("score", "search")

Table = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A method of the benchmark: see methods.toml."""

    name: str
    settings: Settings  # the algorithm and the options that make it this method
    score: str
    search: str | None


@dataclass(frozen=True)
class Column:
    """A setting in which methods are compared.

    seeds     how many of the benchmark's
    is_alone  whether it is trained by itself, and not together with other partitions
    """

    dataset: str
    partition: str
    architecture: str
    k: int
    settings: Settings
    seeds: int
    is_alone: bool

    @property
    def name(self) -> str:
        """The name of the column in JSON files and of its run folders."""
        return f"{self.dataset}, {self.partition}, {self.architecture}, k = {self.k}"

    @property
    def group(self) -> tuple[Any, ...]:
        """What columns share that are trained together."""
        partition = self.partition if self.is_alone else None
        return (self.architecture, self.k, self.dataset, partition)

    def values(self) -> dict[str, str]:
        """Return the column's value on each axis, as text."""
        return {
            "dataset": self.dataset,
            "partition": self.partition,
            "architecture": self.architecture,
            "k": str(self.k),
        }


@dataclass(frozen=True)
class BenchmarkRun:
    """A federation of the benchmark."""

    method: Method
    column: Column
    seed: int
    cell: Cell


@dataclass(frozen=True)
class Benchmark:
    """What methods.toml asks for, and the part of it that is wanted.

    tables  the file's content, for titles and for tuning
    """

    tables: Table
    methods: list[Method]
    columns: list[Column]
    seeds: list[int]
    settings: Settings
    quick: bool = False
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def title_of(self, axis: str, name: str) -> str:
        """Return what pages call a data set (`datasets`) or a partition (`partitions`)."""
        return self.tables[axis][name]["title"]


# --- reading


def read_only(text: str | None) -> dict[str, list[str]]:
    """Return the values that `--only` names for each axis: `dataset=mnist|cifar10,k=20`."""
    wanted: dict[str, list[str]] = {}
    if not text:
        return wanted
    for part in text.split(","):
        axis, equals, values = part.partition("=")
        axis = axis.strip()
        if axis not in AXES:
            raise unknown("axis of --only", axis, AXES)
        if not equals or not values.strip():
            raise ConfigError(f"--only takes AXIS=VALUE, as in dataset=mnist,k=20, not {part!r}")
        wanted[axis] = [value.strip() for value in values.split("|")]
    return wanted


def read_benchmark(request: Request, only: Mapping[str, Sequence[str]] | None = None) -> Benchmark:
    """Return the benchmark, or the part of it that is asked for.

    Raises ConfigError for a method, or a value of an axis, that it does not have.
    """
    tables = read_tables(SPEC)
    quick = tables["quick"] if request.quick else {}
    settings = tables["settings"] | quick.get("settings", {}) | dict(request.settings)
    if request.rounds is not None:
        settings["rounds"] = request.rounds
    datasets = quick.get("datasets")
    if datasets is None:
        datasets = [name for name in tables["datasets"] if name not in tables["quick"]["datasets"]]
    columns = []
    has_own_rounds = request.rounds is None and not request.quick
    for architecture in ARCHITECTURES:
        for k in tables["quick_shots"] if quick else tables["shots"]:
            for dataset in datasets:
                for partition in quick.get("partitions", tables["partitions"]):
                    column = make_column(
                        tables, dataset, partition, architecture, k, has_own_rounds
                    )
                    columns.append(column)
    names = quick.get("methods", tables["methods"])
    methods = [_read_method(name, tables["methods"][name]) for name in names]
    seeds = tables["seeds"][: quick.get("seeds")]
    if request.seeds is not None:
        seeds = list(range(request.seeds))
    return Benchmark(
        tables=tables,
        methods=_select_methods(methods, request.methods),
        columns=_select_columns(columns, only or {}),
        seeds=seeds,
        settings=settings,
        quick=request.quick,
        only=only or {},
    )


def _read_method(name: str, table: Table) -> Method:
    settings = {key: value for key, value in table.items() if key not in METHOD_KEYS}
    return Method(
        name=name,
        settings=settings,
        score=table.get("score", "head"),
        search=table.get("search"),
    )


def make_column(
    tables: Table,
    dataset: str,
    partition: str,
    architecture: str,
    k: int,
    has_own_rounds: bool = True,
) -> Column:
    """Return a column; without `has_own_rounds`, the data set does not say how many rounds."""
    of_dataset = tables["datasets"][dataset]
    of_partition = tables["partitions"][partition]
    settings = of_dataset["settings"] | of_partition["settings"]
    if not has_own_rounds:
        settings.pop("rounds", None)
    for key, factor in of_partition["shots"].items():
        settings[key] = factor * k
    if architecture == MIXED:
        settings["model"] = of_dataset["mixed"]
    return Column(
        dataset=dataset,
        partition=partition,
        architecture=architecture,
        k=k,
        settings=settings,
        seeds=of_dataset.get("seeds", len(tables["seeds"])),
        is_alone=of_dataset.get("alone", False),
    )


def _select_methods(methods: list[Method], wanted: Sequence[str]) -> list[Method]:
    """Return the methods with these names, or with these algorithms."""
    asked = {name.strip().lower() for name in wanted if name.strip()}
    known: set[str] = set()
    for method in methods:
        known |= {method.name.lower(), method.settings["algorithm"]}
    for name in asked:
        if name not in known:
            raise unknown("method", name, known)
    if not asked:
        return methods
    return [
        method
        for method in methods
        if method.name.lower() in asked or method.settings["algorithm"] in asked
    ]


def _select_columns(columns: list[Column], only: Mapping[str, Sequence[str]]) -> list[Column]:
    """Return the columns that have one of the wanted values on every axis."""
    selected = columns
    for axis, values in only.items():
        known = list(dict.fromkeys(column.values()[axis] for column in columns))
        for value in values:
            if value not in known:
                raise unknown(f"value of {axis}", value, known)
        selected = [column for column in selected if column.values()[axis] in values]
    return selected


# --- planning


def plan_groups(
    benchmark: Benchmark, tuned: Mapping[str, Mapping[str, Settings]], finished: bool = False
) -> list[list[BenchmarkRun]]:
    """Return the federations in the order in which they are run, in groups that share their time.

    A group is one method on one data set with one architecture and k. Equal architectures come
    first, then the smaller k, then the data sets in their order, and then the methods, so that
    whatever is finished compares all methods in as many settings as there was time for.

    Args:
        benchmark: what is run.
        tuned: the chosen settings by data set and method; the quick version has none.
        finished: whether nothing is run, so that data files need not be there.
    """
    groups: dict[tuple[Any, ...], list[BenchmarkRun]] = {}
    places = dict.fromkeys(column.group for column in benchmark.columns)
    for place in places:
        for method in benchmark.methods:
            columns = [column for column in benchmark.columns if column.group == place]
            for column in columns:
                chosen = _find_tuned(benchmark, tuned, method, column, finished)
                config = _configure(benchmark, method, column, chosen, finished)
                group = groups.setdefault((*place, method.name), [])
                for seed in benchmark.seeds[: column.seeds]:
                    group.append(_plan_run(method, column, seed, config))
    return list(groups.values())


def _find_tuned(
    benchmark: Benchmark,
    tuned: Mapping[str, Mapping[str, Settings]],
    method: Method,
    column: Column,
    finished: bool,
) -> Settings:
    """Return the settings that were chosen for a method on a data set; refuse to do without."""
    chosen = tuned.get(column.dataset, {}).get(method.name)
    if chosen is not None:
        return chosen
    if benchmark.quick or finished:
        return {}
    raise ConfigError(
        f"{method.name} has no chosen settings on {column.dataset}: run `fedproto reproduce "
        f"{TARGET} --tune --only dataset={column.dataset} --methods {method.name}` first"
    )


def settings_of(benchmark: Benchmark, method: Method, column: Column) -> Settings:
    """Return the settings of a method in a column, before anything is tuned."""
    of_column = dict(column.settings)
    settings = benchmark.settings | of_column | method.settings
    return settings | {"select_by": f"{method.score}_own"}


def _configure(
    benchmark: Benchmark, method: Method, column: Column, chosen: Settings, finished: bool
) -> Config:
    """Return the configuration of a method in a column, with the benchmark's default seed.

    Raises ConfigError with its place if its settings cannot be used.
    """
    settings = settings_of(benchmark, method, column)
    if not finished:
        settings = find_data_files(settings)
    try:
        (config,) = configure(settings, chosen)
    except ConfigError as error:
        raise ConfigError(f"{TARGET}, {method.name}, {column.name}: {error}") from error
    return config


def _plan_run(method: Method, column: Column, seed: int, config: Config) -> BenchmarkRun:
    """Return one federation."""
    varied = {"method": method.name, "setting": column.name, "seed": seed}
    cell = Cell(cell_name(method.name, column.name, seed), varied, replace(config, seed=seed))
    return BenchmarkRun(method, column, seed, cell)
