"""`fedproto.sweep`: all combinations of some settings, from Python."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from fedproto.config import plugins
from fedproto.engines.distributed.torchrun import refuse_torchrun
from fedproto.errors import TrainingError
from fedproto.runs.announcements import LOGGER, announce_rounds
from fedproto.runs.execution import OnRound
from fedproto.runs.folder import RunFolder
from fedproto.runs.keywords import RunKeywords
from fedproto.runs.result import Result
from fedproto.runs.resuming import read_result
from fedproto.runs.sweep import Cell, make_cells, run_sweep


class SweptRun(NamedTuple):
    """One federation of a sweep."""

    name: str  # of its run folder
    varied: dict[str, Any]  # its values of what the sweep lists
    result: Result | None  # None if its training broke down

    def __repr__(self) -> str:
        return f"<{self.name}: {self.result!r}>"


def sweep(
    over: Mapping[str, Sequence[Any]],
    *,
    out: str | Path,
    algorithm: str = "fedproto",
    dataset: str = "mnist5k",
    model: str | None = None,
    progress: bool = False,
    **options: Unpack[RunKeywords],
) -> list[SweptRun]:
    """Run all combinations of some settings and return them in order, the last changing fastest.

    Federations that differ only in seed, partition, learning rate and the like are trained
    together. Called again, it skips what is finished and continues what is not.

    Args:
        over: lists of values by setting: `{"seed": [0, 1, 2], "ways": [3, 5]}`.
        out: the folder for the run folders.
        algorithm, dataset, model: names, as for `fedproto.run`; `over` may list them instead.
        progress: print a line to stderr for each evaluated round.
        options: all other settings, as for `fedproto.run`.
    """
    refuse_torchrun("sweep")
    settings: dict[str, Any] = {"algorithm": algorithm, "dataset": dataset, "model": model}
    settings |= options
    lists: dict[str, Any] = {}
    for key, values in over.items():
        lists[key] = list(values) if isinstance(values, tuple) else values
        settings.pop(key, None)
    plugins.trust_chosen(settings)
    plugins.trust_chosen(lists)
    cells = make_cells(settings, lists, "fedproto.sweep")
    folder = Path(out)
    run_sweep(cells, folder, _Announcer(progress), _note_broken)
    swept = []
    for cell in cells:
        path = folder / cell.name
        run = RunFolder.open(path) if path.exists() else None
        is_finished = run is not None and run.result() is not None
        result = read_result(run) if run is not None and is_finished else None
        swept.append(SweptRun(cell.name, cell.varied, result))
    return swept


class _Announcer:
    """Announces federations that are trained together, and their rounds."""

    def __init__(self, progress: bool) -> None:
        self.progress = progress

    def __call__(self, cells: Sequence[Cell], done: int, notices: Sequence[str]) -> OnRound:
        names = ", ".join(cell.name for cell in cells)
        line = f"{names}: from round {done + 1}"
        LOGGER.info(line)
        if self.progress:
            print(line, file=sys.stderr, flush=True)
        for notice in notices:
            warnings.warn(notice, stacklevel=2)
        return announce_rounds(cells[0].config.algorithm.name, progress=self.progress)


def _note_broken(cell: Cell, error: TrainingError) -> None:
    LOGGER.warning("%s broke down: %s", cell.name, error)
    warnings.warn(f"{cell.name} broke down: {error}", stacklevel=2)
