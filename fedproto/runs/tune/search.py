"""Trains the candidates of a search, rung by rung, and ranks them on validation rows.

The run folders hold everything that is needed to go on: after an interruption the same search
takes the scores of finished rungs from them, and continues from their checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from fedproto.config.options import Part, PositiveInt, convert
from fedproto.config.settings import Config
from fedproto.core.best_round import BestRound
from fedproto.errors import ConfigError, FedProtoError, TrainingError, unknown
from fedproto.runs.execution import OnRound
from fedproto.runs.folder import DIVERGED, RunFolder
from fedproto.runs.own_data import load_source
from fedproto.runs.sweep import COMPUTE_SETTINGS, Cell, train_until
from fedproto.runs.sweep_data import SweepData
from fedproto.runs.tune.candidates import Candidate, draw_candidates
from fedproto.runs.tune.default_spaces import default_space
from fedproto.runs.tune.halving import (
    HALVING,
    STRATEGIES,
    choose_survivors,
    count_rounds,
    plan_rungs,
)
from fedproto.runs.tune.record import Trial, refuse_other_search, write_record
from fedproto.runs.tune.space import Space, describe_space, read_search

#: Of each client's training rows where neither the settings nor the data name validation rows.
DEFAULT_VALIDATION = 0.2
#: The folder of the candidates' runs.
RUNS = "runs"


class SearchReporter(Protocol):
    """Tells a person how a search proceeds."""

    def batch(self, cells: Sequence[Cell], done: int, notices: Sequence[str]) -> OnRound:
        """Announce cells that are trained together; return what is called after each round."""
        ...

    def broken(self, cell: Cell, error: FedProtoError) -> None:
        """Report that the training of a cell failed."""
        ...

    def rung(self, candidates: int, until: int, rounds_left: int) -> None:
        """Announce that so many candidates are trained up to a round.

        `rounds_left` is how many rounds of all federations are left at most, later rungs included.
        """
        ...


OpenReporter = Callable[[], AbstractContextManager[SearchReporter]]


@dataclass(frozen=True)
class SearchOptions:
    """How a search is done.

    search       what is searched, as text or by setting; None for the algorithm's default space
    budget       how many settings are tried, the default among them
    rounds       that the last candidates are trained for
    seeds        federations per candidate, with the seeds from the run's on
    strategy     `halving` or `random`
    halve_after  the round after which the worse half is stopped first
    """

    search: str | Mapping[str, Any] | None = None
    budget: int = 16
    rounds: int = 20
    seeds: int = 2
    strategy: str = HALVING
    halve_after: int | None = None

    def check(self) -> None:
        """Refuse numbers that are no counts, and an unknown strategy."""
        for name in ("budget", "rounds", "seeds"):
            convert(name, getattr(self, name), PositiveInt)
        if self.strategy not in STRATEGIES:
            raise unknown("strategy", self.strategy, STRATEGIES)


@dataclass
class Search:
    """A search that is ready to run."""

    options: SearchOptions
    space: Space
    rungs: list[int]
    seeds: list[int]
    validation: float | None
    trials: list[Trial]
    data: SweepData
    partitions: Sequence[Part]

    @classmethod
    def prepare(
        cls,
        settings: Mapping[str, Any],
        assigned: Mapping[str, Any],
        options: SearchOptions,
        partitions: Sequence[Part] = (),
    ) -> Search:
        """Draw the candidates and refuse whatever can be refused before anything is trained.

        `settings` and `assigned` are those of `configure`. With `partitions`, a candidate is
        trained and judged on all of these instead of on that of the settings.
        """
        options.check()
        rungs = plan_rungs(options.strategy, options.rounds, options.halve_after)
        space = None if options.search is None else read_search(options.search)
        default = draw_candidates(settings, assigned, {}, 1, 0)[0].config
        space = space or default_space(default.algorithm)
        candidates = draw_candidates(settings, assigned, space, options.budget, default.seed)
        data = SweepData()
        validation = _choose_validation(default, data)
        seeds = list(range(default.seed, default.seed + options.seeds))
        search = cls(
            options=options,
            space=space,
            rungs=rungs,
            seeds=seeds,
            validation=validation,
            trials=[Trial(candidate) for candidate in candidates],
            data=data,
            partitions=partitions or [default.partition],
        )
        for candidate in candidates:
            search.cells_of(candidate)  # refuses what these rounds do not fit
        return search

    @property
    def config(self) -> Config:
        """The settings without the search."""
        return self.trials[0].candidate.config

    def plan(self) -> dict[str, Any]:
        """Return what makes the search the one it is, for tune.json."""
        return {
            "algorithm": self.config.algorithm.name,
            "dataset": ",".join(str(part) for part in self.config.dataset),
            "config": _without_compute_settings(self.config).toml(),
            "search": describe_space(self.space),
            "strategy": self.options.strategy,
            "budget": self.options.budget,
            "rungs": self.rungs,
            "seeds": self.seeds,
            "partitions": [str(partition) for partition in self.partitions],
            "validation_fraction": self.validation,
            "select_by": self.config.select_by,
        }

    def cells_of(self, candidate: Candidate) -> list[Cell]:
        """Return the federations of a candidate, one per partition and seed."""
        cells = []
        for number, partition in enumerate(self.partitions):
            for seed in self.seeds:
                cell = candidate.cell(seed, self.rungs[-1], self.rungs[0], self.validation)
                config = replace(cell.config, partition=partition)
                name = cell.name if number == 0 else f"{cell.name}-partition={number}"
                cells.append(cell._replace(name=name, config=config))
        return cells

    def run(self, folder: Path, open_reporter: OpenReporter) -> dict[str, Any]:
        """Train what is not trained yet; return the content of tune.json.

        Raises ConfigError where `select_by` names no score of the algorithm, and TrainingError
        where every candidate breaks down.
        """
        refuse_other_search(folder, self.plan())
        folder.mkdir(parents=True, exist_ok=True)
        runs = folder / RUNS
        write_record(folder, self.plan(), self.trials, is_complete=False)
        alive = list(self.trials)
        with open_reporter() as reporter:
            for rung in self.rungs:
                self._train(alive, rung, runs, reporter)
                for trial in alive:
                    self._judge(trial, rung, runs)
                if all(trial.broken for trial in self.trials):
                    raise TrainingError(f"every candidate broke down: {self.trials[0].broken}")
                scores = {trial.candidate.number: trial.mean(rung) for trial in alive}
                survivors = set(choose_survivors(scores))
                is_last = rung == self.rungs[-1]
                for trial in alive:
                    if is_last or trial.candidate.number not in survivors:
                        self._drop_states(trial, runs)
                alive = [trial for trial in alive if trial.candidate.number in survivors]
                content = write_record(folder, self.plan(), self.trials, is_last)
        return content

    # --- one rung

    def _train(
        self, trials: Sequence[Trial], rung: int, runs: Path, reporter: SearchReporter
    ) -> None:
        """Train candidates up to a round; those that have a score, or broke down, are left out."""
        waiting = []
        rounds_left = 0
        for trial in trials:
            for cell in self.cells_of(trial.candidate):
                if _read_broken(cell, runs) or self._read_score(cell, rung, runs) is not None:
                    continue
                waiting.append(cell)
                rounds_left += rung - _completed(cell, runs)
        if not waiting:
            return
        later_rungs = [each for each in self.rungs if each >= rung]
        federations = len(self.seeds) * len(self.partitions)
        rounds_left += federations * count_rounds(len(trials), later_rungs)
        reporter.rung(len(trials), rung, rounds_left)
        train_until(waiting, runs, rung, reporter.batch, reporter.broken, self.data)

    def _judge(self, trial: Trial, rung: int, runs: Path) -> None:
        """Take the scores of a candidate from its run folders."""
        scores = []
        for cell in self.cells_of(trial.candidate):
            score = self._read_score(cell, rung, runs)
            if score is None:
                trial.broken = _read_broken(cell, runs) or "its training failed"
                return
            scores.append(score)
        trial.scores[rung] = scores

    def _read_score(self, cell: Cell, rung: int, runs: Path) -> float | None:
        """Return the score of a federation on its validation rows after a round, if it has one."""
        for line in _read_lines(cell, runs):
            if line["round"] == rung and line.get("validation"):
                name = BestRound(self.config.select_by).find_name(line["validation"])
                return float(line["validation"][name]["mean"])
        return None

    def _drop_states(self, trial: Trial, runs: Path) -> None:
        """Delete the models of a candidate that is not trained any further."""
        for cell in self.cells_of(trial.candidate):
            if not (runs / cell.name / "config.toml").exists():
                continue
            folder = RunFolder(runs / cell.name)
            with folder.hold():
                folder.drop_checkpoints()
                folder.drop_best()


def _without_compute_settings(config: Config) -> Config:
    """Return settings without how they are computed, which may change when a search goes on."""
    defaults: dict[str, Any] = {}
    for setting in fields(Config):
        if setting.name in COMPUTE_SETTINGS:
            defaults[setting.name] = setting.default
    return replace(config, **defaults)


def _choose_validation(config: Config, data: SweepData) -> float | None:
    """Return the fraction of rows to judge by; None where the data has a validation set.

    The data that is read for that is kept in `data`.
    """
    if config.validation == 0:
        raise ConfigError(
            "validation is 0, but settings are chosen by validation rows: leave it out, which "
            f"takes {DEFAULT_VALIDATION:g} of the training rows, or set another fraction"
        )
    if config.validation is not None:
        return config.validation
    sources = [load_source(part, config.data_dir, data.loaded) for part in config.dataset]
    has_own_sets = all(source.validation is not None for source in sources)
    return None if has_own_sets else DEFAULT_VALIDATION


def _read_lines(cell: Cell, runs: Path) -> list[dict[str, Any]]:
    """Return the lines of a federation's rounds; none if it was not begun yet."""
    path = runs / cell.name
    return RunFolder(path).metrics() if (path / "config.toml").exists() else []


def _completed(cell: Cell, runs: Path) -> int:
    """Return the round that a federation goes on from."""
    path = runs / cell.name
    return RunFolder(path).checkpoint_round() if path.exists() else 0


def _read_broken(cell: Cell, runs: Path) -> str | None:
    """Return why a federation's training diverged, if it did."""
    folder = RunFolder(runs / cell.name)
    if not (folder.path / DIVERGED).exists():
        return None
    return str(folder.read_json(DIVERGED).get("error"))
