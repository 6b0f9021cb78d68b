"""Many federations at once: all combinations of some settings, stacked where that is possible.

    rounds = 100                      # settings of all federations, as for `fedproto run`
    dataset = "mnist"
    [sweep]
    algorithm = ["local", "fedproto"]
    seed = [0, 1, 2, 3, 4]
    ways = [3, 4, 5]

Federations that differ only in STACKED_SETTINGS are trained as one stack of the engine;
algorithms, their options and models come one after the other. Each federation draws (partition,
initial weights, shuffles, crops, dropout, samples) what it draws alone, and has its own run folder;
its numbers are those it gives alone up to the order in which floating-point sums are added.
Running a sweep again skips what is finished and continues what is not.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedproto.config import plugin_trust, plugins
from fedproto.config.choices import AUTO, has_own_data
from fedproto.config.config_file import (
    drop_values_from_data,
    flatten_tables,
    read_run_toml,
    read_tables,
)
from fedproto.config.options import Part
from fedproto.config.settings import Config, configure
from fedproto.errors import ConfigError, RunFolderError, TrainingError
from fedproto.partitions.file import read_partition
from fedproto.runs.assemble import deal
from fedproto.runs.devices import device_of
from fedproto.runs.execution import OnRound, execute, hold_all
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder
from fedproto.runs.relayed_reports import ReceivedReports, SentReports
from fedproto.runs.row_counts import describe_rows
from fedproto.runs.sweep_data import SweepData
from fedproto.runs.workers import Task, Worker, run_tasks

#: How a run is computed. These settings may change when a sweep is continued.
COMPUTE_SETTINGS = (
    "engine",
    "device",
    "compile",
    "workers",
    "stack",
    "states",
    "checkpoint_every",
    "data_dir",
)
#: The settings in which the federations of one stack may differ.
STACKED_SETTINGS = (
    "seed",
    "partition",
    "clients",
    "lr",
    "momentum",
    "participation",
    "lost_uploads",
    "stragglers",
    "concurrency",
    "staleness",
    "speed_spread",
)


class Cell(NamedTuple):
    """One federation of a sweep."""

    name: str  # of its run folder
    varied: dict[str, Any]  # its values of what the sweep lists
    config: Config


class CellRun(NamedTuple):
    """A federation to be trained, with its run folder where it was begun before."""

    cell: Cell
    folder: RunFolder | None


#: Federations to be trained together.
Batch = list[CellRun]
#: Is called before a batch with its cells, the rounds already done and notices for the user.
OnBatch = Callable[[Sequence[Cell], int, Sequence[str]], OnRound]
OnBroken = Callable[[Cell, TrainingError], None]
#: Is called with cells that were trained together, once they have ended.
OnEnded = Callable[[Sequence[Cell]], None]


def do_nothing(cells: Sequence[Cell]) -> None:
    """Take no notice of cells that have ended."""


# --- the sweep file


def read_sweep(path: Path) -> list[Cell]:
    """Return the cells of a sweep file in the order of its lists, the last one changing fastest."""
    tables = drop_values_from_data(read_tables(path))
    lists = _read_lists(tables.pop("sweep", {}), path)
    settings = flatten_tables(tables, str(path))
    plugins.refuse_plugins(settings, path)
    plugins.refuse_plugins(lists, path)
    return make_cells(settings, lists, f"[sweep] of {path}")


def make_cells(settings: dict[str, Any], lists: dict[str, list[Any]], where: str) -> list[Cell]:
    """Return all combinations of lists of values, the last list changing fastest.

    `settings` are those of all cells; `where` begins the sentences of errors.
    """
    _refuse_bad_lists(lists, where)
    cells = []
    for values in itertools.product(*lists.values()):
        varied = dict(zip(lists, values, strict=True))
        cells.append(_build_cell(settings, varied))
    _refuse_equal_cells(cells, where)
    return cells


def _read_lists(table: Any, path: Path) -> dict[str, list[Any]]:
    """Return the lists of the table [sweep] by setting."""
    if not isinstance(table, dict):
        raise ConfigError(f"sweep in {path} must be a table of lists, [sweep], not {table!r}")
    if not table:
        raise ConfigError(
            f"{path} has no table [sweep] of lists, such as seed = [0, 1]: use `fedproto run` for "
            "one run"
        )
    lists = flatten_tables(table, f"[sweep] of {path}")
    _refuse_bad_lists(lists, f"[sweep] of {path}")
    return lists


def _refuse_bad_lists(lists: dict[str, Any], where: str) -> None:
    """Refuse what is not a list of values for each setting."""
    if not lists:
        raise ConfigError(f"{where} has no list of values, such as seed = [0, 1]")
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"{where}: {key} must be a list of values, such as [1, 2], not {values!r}"
            )


def _build_cell(settings: dict[str, Any], varied: dict[str, Any]) -> Cell:
    """Return the cell with these values of what the sweep lists."""
    try:
        configs = configure(settings | varied)
    except ConfigError as error:
        cell = ", ".join(f"{key} = {value}" for key, value in varied.items())
        raise ConfigError(f"the cell {cell}: {error}") from error
    if len(configs) != 1:
        raise ConfigError(
            "a sweep takes one algorithm in each entry of its list, not several with commas"
        )
    return Cell(_name_cell(varied), varied, configs[0])


def _name_cell(varied: dict[str, Any]) -> str:
    """Return the name of a cell's folder, such as `fedproto-seed=0`."""
    words = []
    for key, value in varied.items():
        option = key.rpartition(".")[2]
        words.append(str(value) if key == "algorithm" else f"{option}={value}")
    name = "-".join(words)
    return "".join(letter if letter.isalnum() or letter in "-_=.+" else "_" for letter in name)


def _refuse_equal_cells(cells: Sequence[Cell], where: str) -> None:
    """Refuse a sweep of which two cells have the same settings, such as `lr = [1, 1.0]`."""
    names: dict[str, str] = {}
    for cell in cells:
        settings = cell.config.toml()
        if settings in names:
            raise ConfigError(
                f"{where} lists a federation twice: {names[settings]} and {cell.name}"
            )
        names[settings] = cell.name


# --- what is left to train


def batches(cells: Sequence[Cell], out: Path) -> list[Batch]:
    """Group the unfinished cells by what can be trained together.

    The cells of a batch differ only in STACKED_SETTINGS and have completed the same rounds.
    """
    found: dict[tuple[str, int], Batch] = {}
    for cell in cells:
        folder = _find_folder(cell, out)
        completed = 0
        if folder is not None:
            _refuse_other_run(cell, folder)
            if folder.result() is not None:
                continue
            completed = folder.checkpoint_round()
        key = (_stack_key(_config_to_continue(cell, folder)), completed)
        found.setdefault(key, []).append(CellRun(cell, folder))
    return list(found.values())


def _stack_key(config: Config) -> str:
    """Return the settings as text, the same for all federations that can be stacked."""
    neutral: dict[str, Any] = {}
    for name in STACKED_SETTINGS:
        if name == "participation" and config.client_sampling == "poisson":
            continue  # it decides the noise of all
        is_choice = isinstance(getattr(config, name), Part)
        neutral[name] = Part("any") if is_choice else 0
    return str(replace(config, **neutral))


def _find_folder(cell: Cell, out: Path) -> RunFolder | None:
    """Return the run folder of a cell that was begun before."""
    path = out / cell.name
    return RunFolder.open(path) if (path / "config.toml").exists() else None


def _refuse_other_run(cell: Cell, folder: RunFolder) -> None:
    """Refuse a folder that holds another run than the sweep's; COMPUTE_SETTINGS do not matter."""
    settings = read_run_toml(folder.path / "config.toml")
    for kind, name in plugins.outside_names(settings):
        if not plugin_trust.is_trusted(name):  # the sweep itself does not use it
            raise RunFolderError(
                f"{folder.path} holds a run with the {kind} {name!r}: name another folder with "
                "--out"
            )
    stored = configure(settings)[0]
    compared = {field.name for field in fields(Config)} - set(COMPUTE_SETTINGS)
    compared -= _find_settled(cell.config, stored)
    for name in sorted(compared):
        old = getattr(stored, name)
        new = getattr(cell.config, name)
        if old != new:
            raise RunFolderError(
                f"{folder.path} holds a run with {name} {old}, not {new}: name another folder with "
                "--out"
            )


def _find_settled(config: Config, stored: Config) -> set[str]:
    """Return the settings that a cell leaves open, where its run has what they were settled to."""
    settled = set()
    is_auto = config.partition.name == AUTO and stored.partition.name in ("iid", "natural")
    if is_auto and config.partition.options == stored.partition.options:
        settled.add("partition")
    if config.clients is None:
        settled.add("clients")
        names = [replace(part, count=None) for part in config.dataset]
        stored_names = [replace(part, count=None) for part in stored.dataset]
        if names == stored_names:
            settled.add("dataset")
    if any(part.name == AUTO for part in config.model):
        settled.add("model")
    has_counts = any(part.count is not None for part in config.model)
    if stored.clients is not None and not has_counts:
        models = deal(config.model, stored.clients, "model")
        if models == deal(stored.model, stored.clients, "model"):
            settled.add("model")
    return settled


def _config_to_continue(cell: Cell, folder: RunFolder | None) -> Config:
    """Return the cell's settings, with the `stack` that its run began with on this kind of device.

    A `stack` that the sweep itself names wins, as when this GPU has less memory than the last one.
    """
    if folder is None or cell.config.stack is not None:
        return cell.config
    stored = configure(read_run_toml(folder.path / "config.toml"))[0]
    if stored.device != device_of(cell.config.device).type:
        return cell.config
    return replace(cell.config, stack=stored.stack)


# --- training


def run_sweep(
    cells: Sequence[Cell],
    out: Path,
    on_batch: OnBatch,
    on_broken: OnBroken | None = None,
    jobs: int = 1,
) -> list[dict[str, Any] | None]:
    """Run what is not finished; return the content of each cell's result.json, in order.

    It is None for a cell that broke down.

    Args:
        cells: the federations.
        out: the folder of their run folders.
        on_batch: is called before federations are trained together, and returns their `on_round`.
        on_broken: is called with a cell whose training failed; without it, the error ends the
            sweep.
        jobs: how many processes share the work.
    """
    run_groups([cells], out, on_batch, on_broken, jobs)
    results = []
    for cell in cells:
        folder = _find_folder(cell, out)
        results.append(None if folder is None else folder.result())
    return results


def run_groups(
    groups: Sequence[Sequence[Cell]],
    out: Path,
    on_batch: OnBatch,
    on_broken: OnBroken | None = None,
    jobs: int = 1,
    on_ended: OnEnded = do_nothing,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Run what is not finished of groups of cells; only cells of one group are trained together.

    Args:
        groups: the federations, in the order in which they are begun.
        out, on_batch, on_broken, jobs: as for `run_sweep`.
        on_ended: is called with cells that were trained together, once they have ended.
        is_over: whether nothing further may begin.
    """
    every_cell = [cell for group in groups for cell in group]
    data = _read_data_of(every_cell, out)
    waiting: list[Batch] = []
    for group in groups:
        waiting += batches(group, out)
    if jobs == 1 or len(waiting) < 2:
        for batch in waiting:
            if is_over():
                return
            _run_or_halve(batch, out, data, on_batch, on_broken)
            on_ended([run.cell for run in batch])
        return
    tasks = []
    for batch in waiting:
        cells = [run.cell for run in batch]
        tasks.append(Task(_run_in_worker, (cells, out, data.label_hashes, on_broken is not None)))
    methods: dict[str, Any] = {"batch": on_batch, "broken": on_broken}
    for number, label_hashes in run_tasks(tasks, jobs, ReceivedReports(methods), is_over):
        data.add_label_hashes(label_hashes, out)
        on_ended([run.cell for run in waiting[number]])


def _run_in_worker(
    worker: Worker,
    cells: Sequence[Cell],
    out: Path,
    label_hashes: dict[str, str],
    goes_on: bool,
) -> dict[str, str]:
    """Run cells that are trained together; return the labels of all data that was read so far.

    `goes_on` says whether a cell that breaks down is only reported.
    """
    reports = SentReports(worker)
    worker.data.add_label_hashes(label_hashes, out)
    for batch in batches(cells, out):
        _run_or_halve(batch, out, worker.data, reports.batch, reports.broken if goes_on else None)
    return worker.data.label_hashes


def train_until(
    cells: Sequence[Cell],
    out: Path,
    until: int,
    on_batch: OnBatch,
    on_broken: OnBroken | None = None,
    data: SweepData | None = None,
) -> None:
    """Train cells up to a round, from their checkpoints, and leave checkpoints of that round.

    Nothing is measured on test rows, even after the last round, and no cell gets a result. `data`
    holds what an earlier call has read; the others are as for `run_sweep`.
    """
    data = data or SweepData()
    data.label_hashes |= _read_data_of(cells, out).label_hashes
    unfinished = []
    for cell in cells:
        folder = _find_folder(cell, out)
        if folder is None or folder.checkpoint_round() < until:
            unfinished.append(cell)
    for batch in batches(unfinished, out):
        _run_or_halve(batch, out, data, on_batch, on_broken, until)


def _read_data_of(cells: Sequence[Cell], out: Path) -> SweepData:
    """Return the labels that cells were begun with; refuse folders that hold something else."""
    data = SweepData()
    for cell in cells:
        folder = _find_folder(cell, out)
        if folder is not None and not data.has_labels(cell.config):
            data.note_labels(cell.config, read_partition(folder.path / "partition.json"))
    for cell in cells:
        if _find_folder(cell, out) is None:
            RunFolder.refuse_used(out / cell.name)
    return data


def rank_by_validation(results: Sequence[dict[str, Any] | None]) -> list[int] | None:
    """Return the positions of the results, the best by validation first, broken ones last.

    Equal scores stay in order. None if a result has no validation, so that nothing but test rows
    could rank it.
    """
    finished = [result for result in results if result is not None]
    if not finished or any("validation" not in result for result in finished):
        return None

    def loss(position: int) -> float:
        result = results[position]
        return math.inf if result is None else -result["validation"]["score"]

    return sorted(range(len(results)), key=loss)


def _run_or_halve(
    batch: Batch,
    out: Path,
    data: SweepData,
    on_batch: OnBatch,
    on_broken: OnBroken | None,
    until: int | None = None,
    notices: Sequence[str] = (),
) -> None:
    """Run a batch; if it breaks down, run its halves, so that only what fails alone is lost."""
    try:
        _run_batch(batch, out, data, on_batch, until, notices)
        return
    except TrainingError as error:
        if on_broken is None:
            raise
        if len(batch) == 1:
            on_broken(batch[0].cell, error)
            return
        reason = (
            f"{error}: {len(batch)} federations together broke down, so half of them are tried "
            "at a time"
        )
    _release_memory()  # after the handler, in which the error held on to all of it
    cells = [run.cell for run in batch]
    middle = len(batch) // 2
    for half in batches(cells[:middle], out):
        _run_or_halve(half, out, data, on_batch, on_broken, until, [reason])
    for half in batches(cells[middle:], out):
        _run_or_halve(half, out, data, on_batch, on_broken, until)


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _run_batch(
    batch: Batch,
    out: Path,
    data: SweepData,
    on_batch: OnBatch,
    until: int | None,
    notices: Sequence[str],
) -> None:
    try:
        _train_together(batch, out, data, on_batch, until, notices)
    except torch.OutOfMemoryError as error:
        # In training it is a TrainingError already; data and states need memory, too.
        raise TrainingError(
            "the GPU's memory is full outside of training, as when data is brought there"
        ) from error


def _train_together(
    batch: Batch,
    out: Path,
    data: SweepData,
    on_batch: OnBatch,
    until: int | None,
    notices: Sequence[str],
) -> None:
    """Prepare the federations of a batch, restore those that were begun before, and run all."""
    cells = [run.cell for run in batch]
    configs = [_config_to_continue(run.cell, run.folder) for run in batch]
    experiments = Experiment.prepare_together(configs, data.loaded)
    with hold_all([run.folder for run in batch]):
        completed = _restore_all(experiments, batch, out)
        for experiment in experiments:
            experiment.keeps_best = until is None
        for experiment, cell in zip(experiments, cells, strict=True):
            data.refuse_other_labels(cell.config, experiment.federation.partition, out)
        folders = []
        for experiment, (cell, folder) in zip(experiments, batch, strict=True):
            folders.append(folder or experiment.new_folder(out / cell.name))
        own_notices = [*experiments[0].notices, *_describe_own_rows(experiments)]
        on_round = on_batch(cells, completed, [*notices, *own_notices])
        execute(experiments, folders, on_round, until)


def _describe_own_rows(experiments: Sequence[Experiment]) -> list[str]:
    """Return the different lines that say how many rows of a user's own data are used."""
    own = [each for each in experiments if has_own_data(each.config.dataset)]
    return list(dict.fromkeys(describe_rows(each.federation) for each in own))


def _restore_all(experiments: Sequence[Experiment], batch: Batch, out: Path) -> int:
    """Continue the federations that were begun before; return the rounds that all completed."""
    for experiment, run in zip(experiments, batch, strict=True):
        if run.folder is not None:
            experiment.restore(run.folder)
    completed = {experiment.progress.round for experiment in experiments}
    if len(completed) > 1:
        raise RunFolderError(
            f"another process has trained federations of {out} meanwhile: run the sweep again"
        )
    return completed.pop()
