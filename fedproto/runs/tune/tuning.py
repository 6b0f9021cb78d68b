"""`fedproto.tune`: hyper-parameters by accuracy on validation rows, from Python."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from fedproto.config import plugins
from fedproto.engines.distributed.torchrun import refuse_torchrun
from fedproto.errors import FedProtoError
from fedproto.runs.announcements import LOGGER, announce_rounds
from fedproto.runs.execution import OnRound
from fedproto.runs.keywords import RunKeywords
from fedproto.runs.sweep import Cell
from fedproto.runs.tune.halving import HALVING
from fedproto.runs.tune.search import Search, SearchOptions


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    best        the chosen values, by setting
    validation  the mean accuracy over clients and seeds that they reached on validation rows
    default     the same of the default settings; None if their training failed
    tried       how many settings were tried
    data        the content of tune.json
    folder      where tune.json and best.toml are
    """

    best: dict[str, Any]
    validation: float
    default: float | None
    tried: int
    data: dict[str, Any]
    folder: Path

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value}" for key, value in self.best.items())
        return f"<{values}: {self.validation:.2%} on validation rows, of {self.tried} settings>"


def tune(
    search: str | Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    algorithm: str = "fedproto",
    dataset: str = "mnist5k",
    model: str | None = None,
    budget: int = 16,
    seeds: int = 2,
    strategy: str = HALVING,
    halve_after: int | None = None,
    progress: bool = False,
    **options: Unpack[RunKeywords],
) -> Tuned:
    """Choose hyper-parameters by accuracy on validation rows, and return what was found.

    Test rows are never looked at. Called again, it continues what is not finished.

    Args:
        search: what is searched: `"lam=0.1..10:log,tau=0.1|0.3|1"`, or by setting,
            `{"lam": "0.1..10:log", "tau": [0.1, 0.3, 1]}`; None for the algorithm's default space.
        out: the folder of the search.
        algorithm, dataset, model: names, as for `fedproto.run`.
        budget: how many settings are tried, the default among them.
        seeds: federations per candidate, with the seeds from `seed` on.
        strategy: `halving`, or `random`: everybody is trained to the end.
        halve_after: the round after which the worse half is stopped first; a quarter of all.
        progress: print a line to stderr for each judged round.
        options: all other settings, as for `fedproto.run`; `rounds`, 20 if it is not given, are
            those of the last candidates, and best.toml has the default's.
    """
    refuse_torchrun("tune")
    settings: dict[str, Any] = {"algorithm": algorithm, "dataset": dataset, "model": model}
    settings |= options
    rounds = settings.pop("rounds", SearchOptions.rounds)
    plugins.trust_chosen(settings)
    prepared = Search.prepare(
        settings, {}, SearchOptions(search, budget, rounds, seeds, strategy, halve_after)
    )
    folder = Path(out)
    announcer = _Announcer(progress)
    content = prepared.run(folder, announcer.open)
    chosen = content["candidates"][content["best"]]
    default = content["candidates"][content["default"]]
    return Tuned(
        best=chosen["settings"],
        validation=chosen["validation"],
        default=default["validation"],
        tried=content["tried"],
        data=content,
        folder=folder,
    )


class _Announcer:
    """Announces federations that are trained together, and their rounds."""

    def __init__(self, progress: bool) -> None:
        self.progress = progress

    @contextmanager
    def open(self) -> Iterator[_Announcer]:
        """Yield itself: nothing has to be closed."""
        yield self

    def batch(self, cells: Sequence[Cell], done: int, notices: Sequence[str]) -> OnRound:
        """Say the notices; return what is called after each round."""
        for notice in notices:
            warnings.warn(notice, stacklevel=2)
        return announce_rounds(cells[0].config.algorithm.name, progress=self.progress)

    def broken(self, cell: Cell, error: FedProtoError) -> None:
        """Log that a candidate broke down, which is no error of the search."""
        LOGGER.warning("%s broke down: %s", cell.name, error)

    def rung(self, candidates: int, until: int, rounds_left: int) -> None:
        """Say how many candidates are trained up to a round."""
        line = f"{candidates} candidates up to round {until}"
        LOGGER.info(line)
        if self.progress:
            print(line, file=sys.stderr, flush=True)
