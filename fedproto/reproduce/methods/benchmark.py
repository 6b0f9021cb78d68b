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
#: The sizes of the benchmark: all of methods.toml, or what its table of this name has.
FULL = "full"
CPU = "cpu"
QUICK = "quick"
#: What `--size` takes.
SIZES = (FULL, CPU)
SPEC = Path(__file__).parent / "methods.toml"
EQUAL = "equal"
MIXED = "mixed"
ARCHITECTURES = (EQUAL, MIXED)
#: What `--only` restricts, in the order in which names of columns have it.
AXES = ("dataset", "partition", "architecture", "k")

#: The algorithm that is nothing but a teacher.
CLOSED_FORM = "closed-form"

#: What a method's line may hold besides settings of its runs.
METHOD_KEYS = ("score", "search", "shares_weights")

Table = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A method of the benchmark: see methods.toml."""

    name: str
    settings: Settings  # the algorithm and the options that make it this method
    score: str
    search: str | None
    shares_weights: bool = False

    @property
    def has_closed_form(self) -> bool:
        """Whether it classifies by sums over fixed features, alone or beside a model."""
        return "teacher" in self.settings or self.settings["algorithm"] == CLOSED_FORM


@dataclass(frozen=True)
class Column:
    """A setting in which methods are compared.

    teacher_settings  those of methods with a closed form
    seeds     how many of the benchmark's
    is_alone  whether it is trained by itself, and not together with other partitions
    """

    dataset: str
    partition: str
    architecture: str
    k: int
    settings: Settings
    teacher_settings: Settings
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

    tables  the file's content, for titles
    tuning  how methods are tuned
    size    which form of the benchmark it is
    """

    tables: Table
    methods: list[Method]
    columns: list[Column]
    seeds: list[int]
    settings: Settings
    tuning: Table
    size: str = FULL
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """What the names of its files begin with."""
        return name_files(self.size)

    @property
    def is_tuned(self) -> bool:
        """Whether its methods have settings that were chosen for it."""
        return self.size != QUICK

    def title_of(self, axis: str, name: str) -> str:
        """Return what pages call a data set (`datasets`) or a partition (`partitions`)."""
        title = self.tables[axis][name]["title"]
        if axis == "datasets":
            form = self.tables["sizes"].get(self.size, {})
            title = form.get("titles", {}).get(name, title)
        return title


def name_files(size: str) -> str:
    """Return what the names of the files of a size begin with."""
    return f"{TARGET}-{size}" if size == CPU else TARGET


# --- reading


def choose_size(size: str | None, quick: bool) -> str:
    """Return the size that `--size` and `--quick` ask for.

    Raises ConfigError for a size that there is not, and for both at once.
    """
    if size is not None and quick:
        raise ConfigError("--size and --quick exclude each other: --quick is a size of its own")
    if size is not None and size not in SIZES:
        raise unknown("size", size, SIZES)
    return QUICK if quick else size or FULL


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


def read_benchmark(
    request: Request, only: Mapping[str, Sequence[str]] | None = None, size: str | None = None
) -> Benchmark:
    """Return the benchmark in a size, or the part of it that is asked for.

    Without a size, it is the quick one if the request is for that, else all of it.
    Raises ConfigError for a method, or a value of an axis, that it does not have.
    """
    tables = read_tables(SPEC)
    size = size or (QUICK if request.quick else FULL)
    form = tables["sizes"].get(size, {})
    settings = tables["settings"] | form.get("settings", {}) | dict(request.settings)
    if request.rounds is not None:
        settings["rounds"] = request.rounds
    columns = []
    for architecture in form.get("architectures", ARCHITECTURES):
        for k in form.get("shots", tables["shots"]):
            for dataset in form.get("datasets", _list_datasets(tables)):
                for partition in form.get("partitions", tables["partitions"]):
                    column = make_column(tables, dataset, partition, architecture, k, size)
                    if request.rounds is not None:
                        column.settings.pop("rounds", None)
                    columns.append(column)
    names = form.get("methods", tables["methods"])
    methods = [_read_method(name, tables["methods"][name]) for name in names]
    seeds = tables["seeds"][: form.get("seeds")]
    if request.seeds is not None:
        seeds = list(range(request.seeds))
    return Benchmark(
        tables=tables,
        methods=_select_methods(methods, request.methods),
        columns=_select_columns(columns, only or {}),
        seeds=seeds,
        settings=settings,
        tuning=tables["tuning"] | form.get("tuning", {}),
        size=size,
        only=only or {},
    )


def _list_datasets(tables: Table) -> list[str]:
    """Return the data sets of the whole benchmark: all but that of the quick version."""
    of_quick = tables["sizes"][QUICK]["datasets"]
    return [name for name in tables["datasets"] if name not in of_quick]


def _read_method(name: str, table: Table) -> Method:
    settings = {key: value for key, value in table.items() if key not in METHOD_KEYS}
    return Method(
        name=name,
        settings=settings,
        score=table.get("score", "head"),
        search=table.get("search"),
        shares_weights=table.get("shares_weights", False),
    )


def make_column(
    tables: Table, dataset: str, partition: str, architecture: str, k: int, size: str
) -> Column:
    """Return a column.

    The settings that a size has for a data set replace the data set's own; those that it has for
    every run win over them.
    """
    of_dataset = tables["datasets"][dataset]
    of_partition = tables["partitions"][partition]
    form = tables["sizes"].get(size, {})
    of_form = form.get("dataset_settings", {}).get(dataset)
    settings = _without(of_dataset["settings"], form.get("settings", {}))
    if of_form is not None:
        settings = dict(of_form)
    settings |= of_partition["settings"]
    seeds = of_dataset.get("seeds", len(tables["seeds"]))
    seeds = form.get("dataset_seeds", {}).get(dataset, seeds)
    teacher_settings = of_dataset.get("teacher_settings", {})
    teacher_settings = form.get("teacher_settings", {}).get(dataset, teacher_settings)
    for key, factor in of_partition["shots"].items():
        settings[key] = factor * k
    if architecture == MIXED:
        settings["model"] = form.get("mixed", {}).get(dataset, of_dataset["mixed"])
    return Column(
        dataset=dataset,
        partition=partition,
        architecture=architecture,
        k=k,
        settings=settings,
        teacher_settings=teacher_settings,
        seeds=seeds,
        is_alone=of_dataset.get("alone", False),
    )


def _without(settings: Settings, others: Settings) -> Settings:
    """Return settings without those that others have, too."""
    return {key: value for key, value in settings.items() if key not in others}


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
    if finished or not benchmark.is_tuned:
        return {}
    flag = "" if benchmark.size == FULL else f" --size {benchmark.size}"
    raise ConfigError(
        f"{method.name} has no chosen settings on {column.dataset}: run `fedproto reproduce "
        f"{TARGET}{flag} --tune --only dataset={column.dataset} --methods '{method.name}'` first"
    )


def settings_of(benchmark: Benchmark, method: Method, column: Column) -> Settings:
    """Return the settings of a method in a column, before anything is tuned."""
    of_column = dict(column.settings)
    if method.has_closed_form:
        of_column |= column.teacher_settings
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
