"""Many federations in one go: all combinations of some settings, those that can be trained together in one stack.

    rounds = 100                      # settings of all of them, as for `fedproto run`
    dataset = "mnist"
    [sweep]
    algorithm = ["local", "fedproto"]
    seed = [0, 1, 2, 3, 4]
    ways = [3, 4, 5]

Federations that differ only in what is listed in STACKED are one stack for the engine; methods, their options and
models come one after the other. Each federation draws (partition, initial weights, shuffles, crops, dropout, samples)
what it draws alone, and goes to its own run folder; its numbers are those it gives alone up to the order in which
floating-point sums are added. A sweep that is run again skips what is finished and continues what is not.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedproto.config import plugin_trust, plugins
from fedproto.config.choices import AUTO
from fedproto.config.config_file import (
    drop_values_from_data,
    flatten_tables,
    read_run_toml,
    read_tables,
)
from fedproto.config.options import Part
from fedproto.config.settings import Config, configure
from fedproto.data import Source
from fedproto.errors import ConfigError, RunFolderError, TrainingError
from fedproto.partitions.file import read_partition
from fedproto.runs.assemble import deal
from fedproto.runs.devices import device_of
from fedproto.runs.experiment import Experiment, OnRound, execute, hold_all
from fedproto.runs.folder import RunFolder

#: How a run is computed, which may change between two goes at a sweep.
COMPUTED = (
    "engine",
    "device",
    "compile",
    "workers",
    "stack",
    "states",
    "checkpoint_every",
    "data_dir",
)
#: In what federations of one stack may differ.
STACKED = (
    "seed",
    "partition",
    "clients",
    "lr",
    "momentum",
    "participation",
    "lost_uploads",
    "stragglers",
)


class Cell(NamedTuple):
    """One federation of a sweep."""

    name: str  # of its run folder
    varied: dict[str, Any]
    config: Config


Batch = list[
    tuple[Cell, RunFolder | None]
]  # cells to be trained together, with the folders of those begun before


class _Data(NamedTuple):
    """What federations of one sweep share."""

    loaded: dict[str, Source]  # the data sets read so far, by name
    labels: dict[str, str]  # the hash of each one's labels


OnBatch = Callable[
    [Sequence[Cell], int, Sequence[str]], OnRound
]  # cells trained together, rounds done, notices
OnBroken = Callable[[Cell, TrainingError], None]


def read_sweep(path: Path) -> list[Cell]:
    """The cells of a sweep file, in the order of its lists, the last one changing fastest."""
    tables = drop_values_from_data(read_tables(path))
    listed = tables.pop("sweep", {})
    if not isinstance(listed, dict):
        raise ConfigError(f"sweep in {path} must be a table of lists, [sweep], not {listed!r}")
    if not listed:
        raise ConfigError(
            f"{path} has no table [sweep] of lists, such as seed = [0, 1]: use `fedproto run` for one run"
        )
    varied = flatten_tables(listed, f"[sweep] of {path}")
    for key, values in varied.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"[sweep] of {path}: {key} must be a list of values, such as [1, 2], not {values!r}"
            )
    settings = flatten_tables(tables, str(path))
    plugins.refuse_plugins(settings, path)
    plugins.refuse_plugins(varied, path)
    cells = [
        _cell(settings, dict(zip(varied, values, strict=True)))
        for values in itertools.product(*varied.values())
    ]
    seen: dict[str, str] = {}
    for cell in cells:
        settings_of_it = cell.config.toml()
        if settings_of_it in seen:
            raise ConfigError(
                f"[sweep] of {path} lists a federation twice: {seen[settings_of_it]} and {cell.name}"
            )
        seen[settings_of_it] = cell.name
    return cells


def _cell(settings: dict[str, Any], chosen: dict[str, Any]) -> Cell:
    try:
        configs = configure(settings | chosen)
    except ConfigError as error:
        cell = ", ".join(f"{key} = {value}" for key, value in chosen.items())
        raise ConfigError(f"the cell {cell}: {error}") from error
    if len(configs) != 1:
        raise ConfigError(
            "a sweep takes one algorithm in each entry of its list, not several with commas"
        )
    name = "-".join(
        str(v) if k == "algorithm" else f"{k.rpartition('.')[2]}={v}" for k, v in chosen.items()
    )
    return Cell(
        "".join(c if c.isalnum() or c in "-_=.+" else "_" for c in name), chosen, configs[0]
    )


def batches(cells: Sequence[Cell], out: Path) -> list[Batch]:
    """Unfinished cells, by what can be trained together: equal but for what stacks, and equally far."""
    found: dict[tuple[Any, int], Batch] = {}
    for cell in cells:
        folder = _begun(cell, out)
        if folder is not None:
            _refuse_other(cell, folder)
            if folder.result() is not None:
                continue
        config = _as_begun(cell, folder)
        key = str(replace(config, **_neutral(config))), folder.checkpoint_round() if folder else 0
        found.setdefault(key, []).append((cell, folder))
    return list(found.values())


def _neutral(config: Config) -> dict[str, Any]:
    """The same value for all, in each setting in which federations of a stack may differ."""
    return {name: Part("any") if isinstance(getattr(config, name), Part) else 0 for name in STACKED}


def _begun(cell: Cell, out: Path) -> RunFolder | None:
    path = out / cell.name
    return RunFolder.open(path) if (path / "config.toml").exists() else None


def _refuse_other(cell: Cell, folder: RunFolder) -> None:
    """A folder of this sweep holds the run that the sweep means; how it was computed does not matter."""
    settings = read_run_toml(folder.path / "config.toml")
    for kind, name in plugins.outside_names(settings):
        if not plugin_trust.is_trusted(name):  # it is not the sweep's own
            raise RunFolderError(
                f"{folder.path} holds a run with the {kind} {name!r}: name another folder with --out"
            )
    stored = configure(settings)[0]
    meant = {field.name for field in fields(Config)} - set(COMPUTED)
    if any(part.name == AUTO for part in cell.config.model):
        meant -= {"model"}
    for name in sorted(meant):
        old, new = getattr(stored, name), getattr(cell.config, name)
        if old != new:
            raise RunFolderError(
                f"{folder.path} holds a run with {name} {old}, not {new}: name another folder with --out"
            )


def _stored(folder: RunFolder) -> Config:
    return configure(read_run_toml(folder.path / "config.toml"))[0]


def _as_begun(cell: Cell, folder: RunFolder | None) -> Config:
    """The cell's settings, with the stack that its run was begun with on this kind of device.

    A stack that the sweep itself names wins, as where the GPU has less memory than the one before.
    """
    if folder is None or cell.config.stack is not None:
        return cell.config
    stored = _stored(folder)
    same_device = stored.device == device_of(cell.config.device).type
    return replace(cell.config, stack=stored.stack) if same_device else cell.config


def run_sweep(
    cells: Sequence[Cell],
    out: Path,
    on_batch: OnBatch,
    on_broken: OnBroken | None = None,
    beside: Sequence[Cell] = (),
) -> list[dict[str, Any] | None]:
    """Run what is not finished; the contents of all cells' result.json, in order, None for those that broke down.

    `beside` are cells of the same folder that are run at another time: all must have the same data.
    """
    data = _Data({}, _labels_begun([*cells, *beside], out))
    for cell in cells:
        if _begun(cell, out) is None:
            RunFolder.refuse_used(out / cell.name)
    for batch in batches(cells, out):
        _run_or_halve(batch, out, data, on_batch, on_broken)
    begun = [_begun(cell, out) for cell in cells]
    return [None if folder is None else folder.result() for folder in begun]


def _run_or_halve(
    batch: Batch,
    out: Path,
    data: _Data,
    on_batch: OnBatch,
    on_broken: OnBroken | None,
    notices: Sequence[str] = (),
) -> None:
    """A batch; where it breaks down, its halves."""
    try:
        _run_batch(batch, out, data, on_batch, notices)
        return
    except TrainingError as error:
        if on_broken is None:
            raise
        if len(batch) == 1:
            on_broken(batch[0][0], error)
            return
        why = f"{error}: {len(batch)} federations together broke down, so half of them are tried at a time"
    _release_memory()  # after the handler, in which the error held on to all of it
    cells, middle = [cell for cell, _ in batch], len(batch) // 2
    for half, said in (
        (cells[:middle], [why]),
        (cells[middle:], []),
    ):  # in the end only what fails alone is lost
        for each in batches(half, out):
            _run_or_halve(each, out, data, on_batch, on_broken, said)


def _run_batch(
    batch: Batch, out: Path, data: _Data, on_batch: OnBatch, notices: Sequence[str]
) -> None:
    try:
        _train_together(batch, out, data, on_batch, notices)
    except (
        torch.OutOfMemoryError
    ) as error:  # in training it has its name already; data and states need room, too
        raise TrainingError(
            "the GPU's memory is full outside of training, as when data is brought there"
        ) from error


def _train_together(
    batch: Batch, out: Path, data: _Data, on_batch: OnBatch, notices: Sequence[str]
) -> None:
    configs = [_as_begun(cell, folder) for cell, folder in batch]
    experiments = Experiment.prepare_together(configs, data.loaded)
    cells = [cell for cell, _ in batch]
    begun = [folder for _, folder in batch if folder is not None]
    with hold_all(begun):
        for experiment, (_, folder) in zip(experiments, batch, strict=True):
            if folder is not None:
                experiment.restore(folder)
        round = experiments[0].progress.round
        if any(experiment.progress.round != round for experiment in experiments):
            raise RunFolderError(
                f"another process has trained federations of {out} meanwhile: run the sweep again"
            )
        for experiment, cell in zip(experiments, cells, strict=True):
            _refuse_other_labels(experiment, cell, out, data.labels)
        folders = [
            folder or experiment.new_folder(out / cell.name)
            for experiment, (cell, folder) in zip(experiments, batch, strict=True)
        ]
        execute(experiments, folders, on_batch(cells, round, [*notices, *experiments[0].notices]))


def _refuse_other_labels(
    experiment: Experiment, cell: Cell, out: Path, labels: dict[str, str]
) -> None:
    """A federation that begins now must have the data of those beside it that were begun before."""
    for name, mark in _labels_of(cell, experiment.federation.partition).items():
        if labels.setdefault(name, mark) != mark:
            raise RunFolderError(
                f"the labels of {name} are not those that federations in {out} were begun with: put the data back, or "
                "name another folder with --out"
            )


def _labels_begun(cells: Sequence[Cell], out: Path) -> dict[str, str]:
    """By data set, the hash of its labels in the partitions of the cells that were begun before."""
    labels: dict[str, str] = {}
    for cell in cells:
        folder = _begun(cell, out)
        names = {str(part) for part in _datasets(cell)}
        if folder is None or names <= labels.keys():
            continue
        found = _labels_of(cell, read_partition(folder.path / "partition.json"))
        labels = found | labels
    return labels


def _labels_of(cell: Cell, partition: dict[str, Any]) -> dict[str, str]:
    """By data set, the hash of its labels in a partition; a number behind it tells equal sources apart."""
    pairs = zip(_datasets(cell), partition["clients"], strict=False)
    return {str(part): client["labels"].partition("-")[0] for part, client in pairs}


def _datasets(cell: Cell) -> list[Part]:
    """The data set of each client."""
    return deal(cell.config.dataset, cell.config.clients, "dataset")


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
