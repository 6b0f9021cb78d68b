"""The round loop, which every simulated run goes through, and the bookkeeping of one round."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from fedproto.core import codec
from fedproto.core.additivity import AdditivityCheck
from fedproto.core.asynchronous import Version, iterate_versions
from fedproto.core.best_round import BestRound, main_accuracy
from fedproto.core.delivery import Delivery
from fedproto.core.engine import NOBODY, Chunk, Cohort, Engine, errors_named
from fedproto.core.federation import EvaluatedPart, Federation
from fedproto.core.measurement import MeasuredClient, summarise_values
from fedproto.core.metrics import summarise
from fedproto.core.sampling import Schedule, sample_cohort
from fedproto.core.server import Progress, RoundUploads
from fedproto.core.summation import Summation
from fedproto.core.tensors import split_group_name, take_one
from fedproto.core.types import OVER_RECIPIENTS, Algorithm, State, Tree, Upload
from fedproto.core.uploads import find_layout_mismatch
from fedproto.errors import DivergedError, TrainingError

#: A supervised loss above this has exploded: guessing among 1000 classes costs 7.
EXPLODED_LOSS = 1e4
#: Other terms, such as lambda times a distance, may be that large from the start. They have
#: exploded only if they are also this many times larger than their smallest mean so far.
EXPLODED_GROWTH = 1e3


@dataclass(frozen=True)
class RoundResult:
    """The outcome of one round; a line of metrics.jsonl."""

    round: int
    #: The mean of each term over the clients that trained; empty if nobody did.
    loss: dict[str, float]
    loss_std: dict[str, float]  # the standard deviation over the same clients
    #: On test rows; None if this round was not evaluated, or only on validation rows.
    accuracy: dict[str, dict[str, float]] | None
    bytes_up: int
    bytes_down: int
    participants: list[int]  # the clients whose uploads arrived
    seconds: float
    notes: list[str]
    #: Clients whose loss exploded for the first time.
    diverged: list[int] = field(default_factory=list)
    #: Each accuracy, one value per client.
    clients: Tree | None = field(repr=False, default=None)
    #: The accuracies on validation rows, over the clients that have some, in place of `accuracy`.
    validation: dict[str, dict[str, float]] | None = None
    #: What the algorithm or its transforms measure at the server.
    server: dict[str, float] = field(default_factory=dict)
    #: In asynchronous rounds: the simulated time at the end, where 1 is the median client's local
    #: training, and the mean number of rounds since the arrived uploads started.
    clock: float | None = None
    staleness: float | None = None
    #: In private runs: the epsilon that each client has spent so far.
    epsilon: list[float] | None = None

    def __repr__(self) -> str:
        values = [f"loss {sum(self.loss.values()):.3f}"]
        for name, value in (self.accuracy or {}).items():
            values.append(f"{name} {value['mean']:.2%}")
        return f"<round {self.round}: {', '.join(values)}>"

    def line(self) -> dict[str, Any]:
        """Return what metrics.jsonl holds of this round: everything but the values per client.

        `validation` is there only in rounds that were evaluated on validation rows, and `server`
        only if something is measured there. `clock` and `staleness` are of asynchronous rounds,
        `epsilon` is of private runs.
        """
        line = {name: value for name, value in vars(self).items() if name != "clients"}
        if self.validation is None:
            del line["validation"]
        if not self.server:
            del line["server"]
        if self.clock is None:
            del line["clock"]
            del line["staleness"]
        if self.epsilon is None:
            del line["epsilon"]
        return line


class Budget(Protocol):
    """What clients may spend on taking part; see privacy/budget.py."""

    def affords(self, clients: Tensor, once_due: Tensor) -> bool:
        """Return whether these clients can take part; `once_due` is one flag each."""
        ...

    def charge(self, clients: Tensor, once_due: Tensor) -> None:
        """Count a round of these clients, before it begins."""
        ...

    def epsilons(self) -> list[float]:
        """Return what every client has spent."""
        ...


@dataclass
class FederationRun:
    """A federation, the schedule of its rounds, and how far it has come."""

    federation: Federation
    schedule: Schedule
    progress: Progress
    #: What the validation rows say; None: there are none, and rounds are evaluated on test rows.
    best: BestRound | None = None
    #: (clients,) the local steps of each client, which asynchronous rounds are timed by.
    local_steps: Tensor | None = None
    #: What the clients may spend; None: there is no limit, and nothing is counted.
    budget: Budget | None = None
    _versions: Iterator[Version] | None = field(init=False, repr=False, default=None)
    _planned: tuple[int, Cohort] | None = field(init=False, repr=False, default=None)

    def plan_round(self, round: int) -> tuple[Cohort, Version | None]:
        """Return who takes part and, in an asynchronous round, what happens; in order of rounds."""
        if not self.schedule.buffer:
            if self._planned is None or self._planned[0] != round:
                cohort = sample_cohort(len(self.federation.members), self.schedule, round)
                self._planned = (round, cohort)  # a secret sample must not be drawn twice
            return self._planned[1], None
        assert self.local_steps is not None, "asynchronous rounds are timed by local steps"
        if self._versions is None:
            versions = iterate_versions(self.local_steps, self.schedule)
            self._versions = islice(versions, round - 1, None)
        version = next(self._versions)
        return version.cohort, version

    @property
    def is_over(self) -> bool:
        """Whether the federation ends before its last round."""
        if self.best is not None and self.best.is_over:
            return True
        return not self.affords(self.progress.round + 1)

    def affords(self, round: int) -> bool:
        """Return whether those who would take part in a round can still afford it."""
        if self.budget is None or round > self.schedule.rounds:
            return True
        cohort, _ = self.plan_round(round)
        payers = self._list_payers(cohort)
        return self.budget.affords(payers, self._once_due(payers))

    def charge(self, cohort: Cohort) -> None:
        """Count a round for those who pay for it."""
        if self.budget is not None:
            payers = self._list_payers(cohort)
            self.budget.charge(payers, self._once_due(payers))

    def _list_payers(self, cohort: Cohort) -> Tensor:
        """Return the clients that a round costs something: its cohort, or all if that is secret."""
        if self.schedule.secret is not None:
            return torch.arange(len(self.federation.members))
        return cohort.sampled

    def _once_due(self, clients: Tensor) -> Tensor:
        """Return which of these clients have not sent the groups that are sent once."""
        return self.progress.once_uploads.last_round[clients] == 0


def run_rounds(
    algorithm: Algorithm, engine: Engine, federation_runs: Sequence[FederationRun]
) -> Iterator[list[RoundResult | None]]:
    """Yield the results of each remaining round, one per federation; all are trained together.

    The federations have the same number of rounds and have completed the same number of them, and
    all or none have validation rows. Each round updates their progress and the client states that
    the engine keeps. A federation that is over has no result; when all are, there are no rounds.
    """
    schedule = federation_runs[0].schedule
    completed = federation_runs[0].progress.round
    part: EvaluatedPart = "test" if federation_runs[0].best is None else "validation"
    for round in range(completed + 1, schedule.rounds + 1):
        started = time.perf_counter()
        accumulators: dict[int, RoundAccumulator] = {}
        for number, federation_run in enumerate(federation_runs):
            if not federation_run.is_over:
                cohort, version = federation_run.plan_round(round)
                federation_run.charge(cohort)
                accumulators[number] = RoundAccumulator(
                    algorithm, federation_run, round, cohort, version
                )
        if not accumulators:
            return
        servers = [federation_run.progress.server for federation_run in federation_runs]
        cohorts = [NOBODY] * len(federation_runs)
        for number, accumulator in accumulators.items():
            cohorts[number] = accumulator.cohort
        for chunk in engine.train(round, servers, cohorts):
            if chunk.federation in accumulators:
                accumulators[chunk.federation].add(chunk)
        for accumulator in accumulators.values():
            accumulator.aggregate()
        evaluations: Sequence[Tree | None] = [None] * len(federation_runs)
        is_last = round == schedule.rounds
        for number in accumulators:
            is_last = is_last or not federation_runs[number].affords(round + 1)
        if round % schedule.eval_every == 0 or is_last:
            servers = [federation_run.progress.server for federation_run in federation_runs]
            evaluations = engine.evaluate(servers, part)
        seconds = (time.perf_counter() - started) / len(accumulators)
        results: list[RoundResult | None] = [None] * len(federation_runs)
        for number, accumulator in accumulators.items():
            result = accumulator.result(evaluations[number], seconds, part)
            budget = federation_runs[number].budget
            if budget is not None:
                result = replace(result, epsilon=budget.epsilons())
            results[number] = result
        if any(result is not None and result.validation for result in results):
            _note_validation(engine, federation_runs, results)
        yield results


def _note_validation(
    engine: Engine,
    federation_runs: Sequence[FederationRun],
    results: Sequence[RoundResult | None],
) -> None:
    """Take an evaluated round into account; add the metric to its results, if one decides."""
    measured: Sequence[dict[int, MeasuredClient]] = [{}] * len(federation_runs)
    first = federation_runs[0].best
    if first is not None and first.needs_metric:
        servers = [federation_run.progress.server for federation_run in federation_runs]
        measured = engine.measure(servers, "validation")
    for number, (federation_run, result) in enumerate(zip(federation_runs, results, strict=True)):
        best = federation_run.best
        if best is None or result is None or result.validation is None:
            continue
        if best.needs_metric:
            way = main_accuracy(result.validation)
            clients = measured[number].values()
            ways = [client.ways[way] for client in clients if way in client.ways]
            summary = summarise_values([each.values[best.select_by] for each in ways])
            result.validation[best.select_by] = {
                "mean": float(summary["mean"] or 0),  # 0 if it is defined for no client
                "std": float(summary["std"] or 0),
            }
        best.note(result.round, result.validation)


def _leave_out_idle(accuracies: Tree, federation: Federation) -> Tree:
    """Return the accuracies of the clients that have validation rows."""
    has_rows = [len(member.examples_of("validation")) > 0 for member in federation.members]
    chosen = torch.tensor(has_rows)
    return {name: values[chosen] for name, values in accuracies.items()}


def _list_groups(names: Iterable[str]) -> list[str]:
    """Return the groups that one client sends, of those that clients of any architecture send."""
    return list(dict.fromkeys(split_group_name(name)[0] for name in names))


class RoundAccumulator:
    """Collects what the clients of one federation do in one round.

    Sums stay on the device until `result` reads them, so that nothing waits for the device before.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        federation_run: FederationRun,
        round: int,
        cohort: Cohort,
        version: Version | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.federation = federation_run.federation
        self.progress = federation_run.progress
        self.round = round
        self.cohort = cohort._replace(
            heard=self.progress.last_heard.clone() if version is None else None,
            once_due=version is not None or self.progress.is_once_due(cohort.sampled),
        )
        self.chunks: list[Chunk] = []  # without their uploads
        self.is_declared = False  # whether uploads were found to be what the algorithm declares
        self.uploads = RoundUploads(
            algorithm,
            self.progress.latest_uploads,
            self.progress.once_uploads,
            round,
            AdditivityCheck(algorithm, self.progress.server, round),
            members=len(cohort.sampled),
        )
        self.version = version
        self.delivery = None
        if version is not None:
            self.delivery = Delivery(
                version,
                self.progress.in_flight,
                self.progress.layouts,
                algorithm.once,
                federation_run.schedule.staleness,
                self._send_to,
            )
        self.download_sizes = self._measure_downloads()

    def _measure_downloads(self) -> Tensor:
        """Return the sizes of what the sampled clients download: (clients, 2), values and bytes.

        A client downloads what it needs to train; of prototypes, those of its own classes.
        """
        sampled = self.cohort.sampled
        if not len(sampled):
            return torch.zeros(0, 2, dtype=torch.int64)
        with errors_named(f"round {self.round}, sending"):
            if not self.federation.architectures:
                return codec.download_sizes(self._send_to(sampled), len(sampled))
            sizes = torch.zeros(len(sampled), 2, dtype=torch.int64)
            for name, members in self.federation.architectures.items():
                is_own = torch.isin(sampled, torch.tensor([member.id for member in members]))
                clients = sampled[is_own]
                received = self._send_architecture(clients, name)
                sizes[is_own] = codec.download_sizes(received, len(clients)).cpu()
            return sizes

    def _send_to(self, clients: Tensor) -> State:
        """Return what the server sends these clients to train, with a leading axis over them.

        If there are several architectures, it is what all of them would be sent, side by side.
        """
        received: State = {}
        for name in self.federation.architectures or [""]:
            received |= self._send_architecture(clients, name)
        return received

    def _send_architecture(self, clients: Tensor, architecture: str) -> State:
        """Return what the server sends clients of an architecture."""
        send_to_all = vmap(self.algorithm.send, in_dims=(None, OVER_RECIPIENTS))
        recipients = self.federation.recipients(clients, architecture, self.cohort.heard)
        if self.algorithm.summation is not None:
            # The server does not know who has which classes, so it sends all of them.
            recipients = recipients._replace(classes=torch.ones_like(recipients.classes))
        return send_to_all(self.progress.server, recipients)

    def add(self, chunk: Chunk) -> None:
        """Take what a chunk's clients did, and those of their uploads that arrive in this round."""
        uploads = chunk.uploads
        chunk = chunk._replace(uploads={}, sizes=self._leave_out_delivered(chunk, list(uploads)))
        self.chunks.append(chunk)
        if not len(chunk.speakers) or not uploads:
            return
        self._check_declaration(uploads)
        speakers = chunk.speakers
        if self.delivery is not None:
            speakers, uploads = self.delivery.hold_back(speakers, uploads)
        self.uploads.receive(speakers, uploads)

    def _check_declaration(self, uploads: Upload) -> None:
        """Raise TrainingError unless the first uploads are what the algorithm declares."""
        if self.round > 1 or self.is_declared:
            return
        self.is_declared = True
        layouts = self.progress.layouts
        where = f"round {self.round}, the upload of {self.algorithm.name}"
        found_groups = _list_groups(uploads)
        declared_groups = _list_groups(layouts)
        if found_groups != declared_groups:
            found = ", ".join(found_groups)
            declared = ", ".join(declared_groups) or "none"
            raise TrainingError(f"{where} has the groups {found}, but it declares {declared}")
        for name, group in take_one(uploads, 0).items():
            mismatch = find_layout_mismatch(name, group, layouts)
            if mismatch is not None:
                raise TrainingError(f"{where}: {mismatch}")

    def _leave_out_delivered(self, chunk: Chunk, groups: list[str]) -> Tensor:
        """Return the sizes of what the clients send: (clients, 2).

        A group that is sent once is left out for clients whose group has arrived before.
        """
        sizes = chunk.sizes
        once = _list_groups(self.algorithm.once)
        for place, name in enumerate(_list_groups(groups)):
            if name in once and sizes.shape[1]:
                is_due = self.progress.once_uploads.last_round[chunk.clients] == 0
                sizes = sizes.clone()
                sizes[:, place] *= is_due.to(sizes.device)[:, None]
        return sizes.sum(1)

    def aggregate(self) -> None:
        """Update the server from the uploads that arrived, or from everybody's latest ones."""
        if self.delivery is not None:
            self.uploads.receive(*self.delivery.deliver_late())
        uploads = self.uploads.combine()
        self.progress.server = self.uploads.aggregate(self.progress.server, uploads)
        self.progress.round = self.round
        if self.version is None:
            self.progress.last_heard[self._list_participants()] = self.round

    def result(
        self, accuracies: Tree | None, seconds: float, part: EvaluatedPart = "test"
    ) -> RoundResult:
        """Return the round's result; raise DivergedError if a client's values are not finite.

        `accuracies` are those on a part of the clients' rows, None if they were not evaluated. This
        is the one place in a round that waits for the device.
        """
        trained = torch.cat([NOBODY.sampled, *(chunk.clients for chunk in self.chunks)])
        columns = self._read_chunks()
        download_sizes = self.download_sizes.cpu()
        if not columns["sound"].all():
            self._refuse_divergence(trained, columns)
        del columns["sound"]
        upload_sizes = torch.stack([columns.pop("values"), columns.pop("bytes")], 1).long()
        if self.algorithm.summation is not None:
            hidden_sizes, further_sizes = self._measure_hidden(self.algorithm.summation)
            upload_sizes = hidden_sizes[torch.searchsorted(self.cohort.sampled, trained)]
            download_sizes = download_sizes + further_sizes
        self.progress.ledger.up(trained, upload_sizes)
        self.progress.ledger.down(self.cohort.sampled, download_sizes)
        losses = columns if len(trained) else {}
        diverged, warnings = self._find_explosions(trained, losses)
        no_loss = {"supervised": 0.0, "regulariser": 0.0} if len(trained) else {}
        means = {name: float(values.mean()) for name, values in losses.items()}
        stds = {name: float(values.std(correction=0)) for name, values in losses.items()}
        accuracy = None
        validation = None
        if accuracies and part == "test":
            accuracy = summarise(accuracies)
        elif accuracies:
            validation = summarise(_leave_out_idle(accuracies, self.federation))
        return RoundResult(
            round=self.round,
            loss=no_loss | means,
            loss_std=no_loss | stds,
            accuracy=accuracy,
            bytes_up=int(upload_sizes[:, 1].sum()),
            bytes_down=int(download_sizes[:, 1].sum()),
            participants=self._list_participants(),
            seconds=seconds,
            notes=self.algorithm.notes(self.progress.server) + warnings,
            diverged=diverged,
            clients=accuracies if part == "test" else None,
            validation=validation,
            server=self.algorithm.metrics(self.progress.server),
            clock=None if self.version is None else self.version.clock,
            staleness=None if self.version is None else self.version.mean_staleness,
        )

    def _measure_hidden(self, summation: Summation) -> tuple[Tensor, Tensor]:
        """Return what the sampled clients send and further receive to add what they hide."""
        sampled = self.cohort.sampled
        layouts = {name: self.progress.layouts[name] for name in self.uploads.added}
        lost = torch.searchsorted(sampled, self.cohort.lost)
        return summation.count_traffic(layouts, len(sampled), lost)

    def _list_participants(self) -> list[int]:
        """Return the clients whose uploads arrived in this round."""
        if self.version is not None:
            return self.version.arrived.tolist()
        arrived = ~torch.isin(self.cohort.sampled, self.cohort.lost)
        return self.cohort.sampled[arrived].tolist()

    def _read_chunks(self) -> Tree:
        """Return columns on the CPU, each with one float64 value per client that trained.

        `values` and `bytes` are the sizes of the uploads, `sound` says whether all is finite, and
        the others are the terms of the loss, of which there are none if nobody trained.
        """
        if not self.chunks:
            return {name: torch.zeros(0).double() for name in ("values", "bytes", "sound")}
        parts: list[Tree] = []
        for chunk in self.chunks:
            sizes = {"values": chunk.sizes[:, 0], "bytes": chunk.sizes[:, 1]}
            parts.append(sizes | {"sound": chunk.sound} | chunk.loss)
        device = self.chunks[0].sound.device  # sizes of empty uploads are on the CPU
        columns = []
        for name in parts[0]:
            pieces = [part[name].to(device).double() for part in parts]
            columns.append(torch.cat(pieces))
        on_cpu = torch.stack(columns).cpu()  # one transfer for all columns
        return dict(zip(parts[0], on_cpu, strict=True))

    def _find_explosions(self, trained: Tensor, losses: Tree) -> tuple[list[int], list[str]]:
        """Return the clients whose loss exploded for the first time, and a warning about them."""
        progress = self.progress
        progress.note_losses({name: float(values.mean()) for name, values in losses.items()})
        worst = torch.zeros(len(trained), dtype=torch.float64)  # 0: has not exploded
        for name, values in losses.items():
            bound = EXPLODED_LOSS
            if name != "supervised":
                smallest = progress.smallest_loss.get(name, math.inf)
                bound = max(bound, EXPLODED_GROWTH * smallest)
            worst = torch.maximum(worst, torch.where(values > bound, values, 0))
        exploded = {
            client: loss
            for client, loss in zip(trained.tolist(), worst.tolist(), strict=True)
            if loss > 0 and client not in progress.diverged
        }
        if not exploded:
            return [], []
        clients = sorted(exploded)
        progress.diverged |= dict.fromkeys(clients, self.round)
        who = f"client {self._name(clients[0])}"
        if len(clients) > 1:
            who = f"{len(clients)} clients, client {self._name(clients[0])} among them,"
        largest = max(exploded.values())
        warning = f"the loss of {who} has exploded (up to {largest:.2g}); the lr may be too high"
        return clients, [warning]

    def _name(self, client: int) -> str:
        """Return what a client is called in a sentence."""
        return self.federation.members[client].name

    def _refuse_divergence(self, trained: Tensor, columns: Tree) -> None:
        """Raise DivergedError about the first client with a value that is not finite.

        The loss shows every step but the last; the effect of that one is in the parameters and
        the upload.
        """
        position = int((columns["sound"] == 0).nonzero()[0])
        client = int(trained[position])
        problem = "its parameters or its upload are not finite"
        for name, values in columns.items():
            value = float(values[position])
            if not math.isfinite(value):
                problem = f"the {name} loss is {value}"
                break
        where = f"round {self.round}, client {self._name(client)}, training"
        raise DivergedError(f"{where}: {problem}; the lr may be too high", self.round, client)
