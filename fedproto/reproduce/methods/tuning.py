"""Chooses the settings of each method on each data set, by validation rows only.

They are kept in one file, `table-methods-tuned.json` for the whole benchmark, which the table is
made with from then on.
Every method gets the same number of trials, on the same federations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
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
from fedproto.runs.relayed_reports import ReceivedReports, SentReports
from fedproto.runs.tune.search import OpenReporter, Search, SearchOptions
from fedproto.runs.workers import Task, Worker, run_tasks

#: By data set and method.
TunedSettings = dict[str, dict[str, Settings]]


def name_tuned(stem: str = TARGET) -> str:
    """Return the name of the file of chosen settings; `stem` begins those of all files."""
    return f"{stem}-tuned.json"


def read_tuned(out: Path, stem: str = TARGET) -> TunedSettings:
    """Return the chosen settings by data set and method; none if nothing was tuned yet."""
    content = _read_file(out, stem)
    chosen: TunedSettings = {}
    try:
        for dataset, methods in content["datasets"].items():
            chosen[dataset] = {name: found["settings"] for name, found in methods.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{out / name_tuned(stem)} is damaged: {error!r}") from error
    return chosen


def count_trials(out: Path, stem: str = TARGET) -> int:
    """Return how many settings were tried for all methods and data sets together."""
    datasets = _read_file(out, stem)["datasets"].values()
    return sum(found["tried"] for methods in datasets for found in methods.values())


def _read_file(out: Path, stem: str) -> dict[str, Any]:
    path = out / name_tuned(stem)
    if not path.exists():
        return {"command": f"fedproto reproduce {TARGET} --tune", "datasets": {}}
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("datasets"), dict):
        raise RunFolderError(f"{path} is damaged: it must hold an object, 'datasets'")
    return content


def tune_methods(
    benchmark: Benchmark,
    out: Path,
    open_reporter: OpenReporter,
    is_over: Callable[[], bool],
    jobs: int = 1,
) -> Iterator[tuple[str, str]]:
    """Tune what is not tuned yet; yield the data set and the method after each search.

    `jobs` processes share the searches. None begins any more once `is_over` says so; one that was
    stopped goes on where it was, as long as its folder is there.
    """
    waiting = []
    for dataset in dict.fromkeys(column.dataset for column in benchmark.columns):
        tuned = _read_file(out, benchmark.stem)["datasets"].get(dataset, {})
        missing = [method for method in benchmark.methods if method.name not in tuned]
        waiting += [(dataset, method) for method in missing]
    if jobs == 1:
        for dataset, method in waiting:
            if is_over():
                return
            content = _search(benchmark, out, dataset, method, open_reporter)
            _keep(out, benchmark.stem, dataset, method, content)
            yield dataset, method.name
        return
    tasks = [
        Task(_search_in_worker, (benchmark, out, dataset, method)) for dataset, method in waiting
    ]
    with open_reporter() as reporter:
        methods: dict[str, Any] = {
            "batch": reporter.batch,
            "broken": reporter.broken,
            "rung": reporter.rung,
        }
        for number, content in run_tasks(tasks, jobs, ReceivedReports(methods), is_over):
            dataset, method = waiting[number]
            _keep(out, benchmark.stem, dataset, method, content)
            yield dataset, method.name


def _search(
    benchmark: Benchmark, out: Path, dataset: str, method: Method, open_reporter: OpenReporter
) -> dict[str, Any]:
    """Return what is found for a method on a data set."""
    search, options = prepare_search(benchmark, method, dataset)
    name = cell_name(method.name, dataset, options.seeds)
    return search.run(out / "runs" / f"{benchmark.stem}-tuning" / name, open_reporter)


def _search_in_worker(
    worker: Worker, benchmark: Benchmark, out: Path, dataset: str, method: Method
) -> dict[str, Any]:
    """Return what is found for a method on a data set, in a process of several."""
    reports = SentReports(worker)
    return _search(benchmark, out, dataset, method, lambda: nullcontext(reports))


def prepare_search(
    benchmark: Benchmark, method: Method, dataset: str
) -> tuple[Search, SearchOptions]:
    """Return the search for a method's settings on a data set, and how it is done."""
    table = benchmark.tuning
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
    for partition, k in benchmark.tuning["federations"]:
        columns.append(make_column(tables, dataset, partition, EQUAL, k, benchmark.size))
    return columns


def _keep(out: Path, stem: str, dataset: str, method: Method, content: dict[str, Any]) -> None:
    """Add what a search found to the file."""
    best = content["candidates"][content["best"]]
    default = content["candidates"][content["default"]]
    stored = _read_file(out, stem)
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
    write_atomically(out / name_tuned(stem), (json.dumps(stored, indent=1) + "\n").encode())
