"""Runs experiments round by round, and writes their folders; Ctrl-C leaves a run to resume."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedproto.config.settings import Config
from fedproto.core.engine import Engine
from fedproto.core.federation import Federation
from fedproto.core.interrupts import finish_round_on_interrupt
from fedproto.core.measurement import MeasuredClient, collect_accuracies
from fedproto.core.rounds import RoundResult, run_rounds
from fedproto.core.types import Algorithm, Tree
from fedproto.errors import DivergedError, LostProcessError
from fedproto.runs.announcements import describe_round
from fedproto.runs.baselines import RunFederation, train_baselines
from fedproto.runs.devices import torch_settings
from fedproto.runs.folder import DIVERGED, LAST, RunFolder
from fedproto.runs.result import Result
from fedproto.runs.result_contents import describe_last_round

if TYPE_CHECKING:
    from fedproto.runs.experiment import Experiment

OnRound = Callable[[RoundResult], None]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, once the round is finished and, unless `checkpoint_every` is 0, a checkpoint written.

    Its cause is a LostProcessError where processes of the run ended before that could be done.
    """


def execute(
    experiments: Sequence[Experiment],
    folders: Sequence[RunFolder | None],
    on_round: OnRound | None = None,
    until: int | None = None,
) -> list[Result]:
    """Run experiments that share an engine from their current round, the same for all, to the last.

    Args:
        experiments: those of one `Experiment.prepare_together`.
        folders: the run folder of each, or None.
        on_round: is called with the result of each round of each experiment.
        until: a round after which to stop with a checkpoint, also if it is the last one: nothing
            is measured on test rows then, and there are no results.

    Raises Interrupted after Ctrl-C or SIGTERM.
    """
    interrupted = threading.Event()
    results: list[Any] = []
    try:
        with (
            during_rounds(experiments[0].config, interrupted),
            closing(proceed(experiments, folders, interrupted, on_round)) as steps,
        ):
            for step in steps:
                if until is not None and experiments[0].progress.round >= until:
                    break
                results = step
    except LostProcessError as error:
        if not interrupted.is_set():
            raise
        # The processes were told to end, too: this is neither an error nor a lack of memory.
        raise Interrupted from error
    if interrupted.is_set():  # too late to stop this run, but the caller may have more to do
        raise Interrupted
    return results if until is None else []


def proceed(
    experiments: Sequence[Experiment],
    folders: Sequence[RunFolder | None],
    interrupted: threading.Event,
    on_round: OnRound | None = None,
) -> Generator[list[Any]]:
    """Run round by round: yield the `RoundResult` of each experiment, at the end each `Result`.

    An interrupt, or a caller that closes the generator, leaves a checkpoint of the last round.
    """
    records = []
    for experiment, folder in zip(experiments, folders, strict=True):
        records.append(_RunRecord(experiment, folder))
    algorithm = experiments[0].algorithm
    engine = experiments[0].engine
    federation_runs = [experiment.federation_run() for experiment in experiments]
    with closing(engine), hold_all(folders), _divergence_recorded(records):
        for record in records:
            record.read_earlier_rounds()
        for results in run_rounds(algorithm, engine, federation_runs):
            for record, result in zip(records, results, strict=True):
                if result is None:  # it is over already
                    continue
                record.add(result)
                if on_round is not None:
                    on_round(result)
            with _checkpoint_if_left(records):
                yield results
                if interrupted.is_set():
                    raise Interrupted
        if experiments[0].config.report_last and experiments[0].best_state is not None:
            _measure_last_round(records, engine)
        for record in records:
            record.experiment.restore_best(record.folder)
        servers = [experiment.progress.server for experiment in experiments]
        finished = []
        for record, measured in zip(records, engine.measure(servers), strict=True):
            experiment = record.experiment
            if record.accuracies is None:
                # With validation the test rows are looked at once, here. Without it, a run killed
                # between its last checkpoint and its result has no round left.
                record.accuracies = collect_accuracies(measured)
            baselines = {}
            if experiment.config.baselines:
                run_alone = _alone_in_process(experiments[0], interrupted)
                baselines = train_baselines(experiment.config, experiment.federation, run_alone)
            finished.append(record.finish(measured, baselines))
    yield finished


@dataclass
class _RunRecord:
    """What is known of a run while it goes on: its lines of metrics and its latest accuracies."""

    experiment: Experiment
    folder: RunFolder | None
    lines: list[dict[str, Any]] = field(default_factory=list)
    accuracies: Tree | None = None  # one value per client; None if the last round has none
    last_round: dict[str, Any] | None = None  # what it is worth on test rows, if that is asked for

    def read_earlier_rounds(self) -> None:
        progress = self.experiment.progress
        if self.folder is not None:
            self.lines = self.folder.keep_metrics(progress.round)
            self.folder.log(_describe_start(self.experiment))
            for notice in self.experiment.notices:
                self.folder.log(f"notice: {notice}")
        if self.experiment.budget is not None:
            self.experiment.budget.on_charge = self.write_claim
        progress.look_back(self.lines)
        if self.experiment.best_state is not None:
            self.experiment.best_state.continue_after(self.lines)

    def write_claim(self) -> None:
        if self.folder is not None:
            self.experiment.write_claim(self.folder)

    def add(self, result: RoundResult) -> None:
        self.accuracies = result.clients
        self.lines.append(result.line())
        if self.folder is not None:
            self.experiment.write_round(self.folder, result)
            self.folder.log(describe_round(self.experiment.algorithm.name, "round", result))
            for note in result.notes:
                self.folder.log(f"round {result.round}: {note}")
        else:
            self.experiment.keep_best(None)

    def finish(
        self, measured: dict[int, MeasuredClient], baselines: dict[str, dict[str, Any]]
    ) -> Result:
        assert self.accuracies is not None
        result = self.experiment.finish(
            self.folder, self.lines, self.accuracies, measured, baselines, self.last_round
        )
        if self.folder is not None:
            self.folder.log("finished")
        return result


def _describe_start(experiment: Experiment) -> str:
    """Return what a run begins or continues with, for its log."""
    config = experiment.config
    first = experiment.progress.round + 1
    return (
        f"{experiment.algorithm.name} from round {first} of {config.rounds}, "
        f"{len(experiment.federation.members)} clients, engine {config.engine} on "
        f"{config.device}, process {os.getpid()}"
    )


def _measure_last_round(records: Sequence[_RunRecord], engine: Engine) -> None:
    """Measure all federations on test rows before they go back to their best rounds.

    What is found lies in the run folder until the run has its result: a run that is killed after
    it went back cannot measure its last round again.
    """
    if all(record.folder is not None and record.folder.has_last() for record in records):
        for record in records:
            assert record.folder is not None
            record.last_round = record.folder.read_json(LAST)
        return
    servers = [record.experiment.progress.server for record in records]
    for record, measured in zip(records, engine.measure(servers), strict=True):
        federation = record.experiment.federation
        found = describe_last_round(federation, collect_accuracies(measured), measured)
        record.last_round = found
        if record.folder is not None:
            record.folder.write_json(LAST, found)


def _alone_in_process(first: Experiment, interrupted: threading.Event) -> RunFederation:
    """Return a function that runs one federation, which an interrupt ends after its round."""

    def run(config: Config, algorithm: Algorithm, federation: Federation) -> Result:
        (experiment,) = first.share_engine([config], algorithm, [federation])
        results: list[Any] = []
        for step in proceed([experiment], [None], interrupted):
            results = step
        return results[0]

    return run


def follow(experiments: Sequence[Experiment]) -> None:
    """Train a share of the clients on request, in a process that torchrun started as a worker."""
    for experiment in experiments:
        with torch_settings(experiment.config.threads, experiment.config.precision):
            experiment.engine.serve()  # type: ignore[attr-defined]


@contextmanager
def hold_all(folders: Sequence[RunFolder | None]) -> Iterator[None]:
    """Be the only writer of some run folders."""
    with ExitStack() as stack:
        for folder in folders:
            if folder is not None:
                stack.enter_context(folder.hold())
        yield


@contextmanager
def during_rounds(config: Config, interrupted: threading.Event) -> Iterator[None]:
    """Use the run's settings of torch, and finish the round on Ctrl-C or SIGTERM."""
    with (
        torch_settings(config.threads, config.precision),
        finish_round_on_interrupt(interrupted),
    ):
        yield


@contextmanager
def _checkpoint_if_left(records: Sequence[_RunRecord]) -> Iterator[None]:
    """Write checkpoints where the caller leaves the loop between two rounds."""
    try:
        yield
    except BaseException as error:
        for record in records:
            experiment = record.experiment
            if record.folder is None:
                continue
            record.folder.log(
                f"stopped after round {experiment.progress.round}: {type(error).__name__}"
            )
            if record.folder.checkpoint_round() < experiment.progress.round:
                experiment.write_checkpoint(record.folder)
        raise


@contextmanager
def _divergence_recorded(records: Sequence[_RunRecord]) -> Iterator[None]:
    """Leave diverged.json in the folder of a run that ends because its numbers are not finite.

    Where several runs are trained together the error does not say which one it was; a sweep then
    tries them alone.
    """
    for record in records:
        if record.folder is not None:
            (record.folder.path / DIVERGED).unlink(missing_ok=True)
    try:
        yield
    except DivergedError as error:
        config = records[0].experiment.config
        folder = records[0].folder
        if len(records) == 1 and folder is not None:
            name = records[0].experiment.federation.members[error.client].name
            content = {
                "seed": config.seed,
                "rounds": config.rounds,
                "error": str(error),
                "diverged": [{"client": error.client, "name": name, "round": error.round}],
            }
            folder.write_json(DIVERGED, content)
        raise
