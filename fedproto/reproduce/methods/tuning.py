"""Chooses the settings of each method on each data set, by validation rows only.

They are kept in one file, `table-methods-tuned.json`, which the table is made with from then on.
Every method gets the same number of trials, on the same federations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedproto.config.settings import configure
from fedproto.core.files import read_json, write_atomically
from fedproto.errors import RunFolderError
from fedproto.reproduce.methods.benchmark import (
    EQUAL,
    TARGET,
    Benchmark,
    Column,
    Method,
    make_column,
    settings_of,
)
from fedproto.reproduce.plan import Settings, cell_name, find_data_files
from fedproto.runs.tune.search import OpenReporter, Search, SearchOptions

TUNED = f"{TARGET}-tuned.json"
#: The folder of the searches, beside those of the runs.
SEARCHES = f"{TARGET}-tuning"

#: By data set and method.
TunedSettings = dict[str, dict[str, Settings]]


def read_tuned(out: Path) -> TunedSettings:
    """Return the chosen settings by data set and method; none if nothing was tuned yet."""
    content = _read_file(out)
    chosen: TunedSettings = {}
    try:
        for dataset, methods in content["datasets"].items():
            chosen[dataset] = {name: found["settings"] for name, found in methods.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{out / TUNED} is damaged: {error!r}") from error
    return chosen


def count_trials(out: Path) -> int:
    """Return how many settings were tried for all methods and data sets together."""
    datasets = _read_file(out)["datasets"].values()
    return sum(found["tried"] for methods in datasets for found in methods.values())


def _read_file(out: Path) -> dict[str, Any]:
    path = out / TUNED
    if not path.exists():
        return {"command": f"fedproto reproduce {TARGET} --tune", "datasets": {}}
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("datasets"), dict):
        raise RunFolderError(f"{path} is damaged: it must hold an object, 'datasets'")
    return content


def tune_methods(
    benchmark: Benchmark, out: Path, open_reporter: OpenReporter, is_over: Callable[[], bool]
) -> Iterator[tuple[str, str]]:
    """Tune what is not tuned yet; yield the data set and the method after each search.

    Searches are not begun any more once `is_over` says so; one that was stopped goes on where it
    was, as long as its folder is there.
    """
    for dataset in dict.fromkeys(column.dataset for column in benchmark.columns):
        for method in benchmark.methods:
            if method.name in _read_file(out)["datasets"].get(dataset, {}):
                continue
            if is_over():
                return
            search, options = prepare_search(benchmark, method, dataset)
            name = cell_name(method.name, dataset, options.seeds)
            content = search.run(out / "runs" / SEARCHES / name, open_reporter)
            _keep(out, dataset, method, content)
            yield dataset, method.name


def prepare_search(
    benchmark: Benchmark, method: Method, dataset: str
) -> tuple[Search, SearchOptions]:
    """Return the search for a method's settings on a data set, and how it is done."""
    table = benchmark.tables["tuning"]
    columns = _columns_of_tuning(benchmark, dataset)
    settings = find_data_files(settings_of(benchmark, method, columns[0]))
    settings = settings | {"seed": table["seed"]}
    settings.pop("report_last", None)
    partitions = []
    for column in columns:
        (config,) = configure(find_data_files(settings_of(benchmark, method, column)))
        partitions.append(config.partition)
    options = SearchOptions(
        search=method.search, budget=table["budget"], rounds=table["rounds"], seeds=1
    )
    return Search.prepare(settings, {}, options, partitions), options


def _columns_of_tuning(benchmark: Benchmark, dataset: str) -> list[Column]:
    """Return the columns with equal architectures by which settings are chosen."""
    tables = benchmark.tables
    columns = []
    for partition, k in tables["tuning"]["federations"]:
        columns.append(make_column(tables, dataset, partition, EQUAL, k))
    return columns


def _keep(out: Path, dataset: str, method: Method, content: dict[str, Any]) -> None:
    """Add what a search found to the file."""
    best = content["candidates"][content["best"]]
    default = content["candidates"][content["default"]]
    stored = _read_file(out)
    stored["datasets"].setdefault(dataset, {})[method.name] = {
        "settings": best["settings"],
        "validation": best["validation"],
        "default": default["settings"],
        "default_validation": default["validation"],
        "tried": content["tried"],
        "search": content["search"],
        "rungs": content["rungs"],
    }
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / TUNED, (json.dumps(stored, indent=1) + "\n").encode())
