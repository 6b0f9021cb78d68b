"""The only round loop, as a generator of results: sampling, faults, ledger, memory of the absent, evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedproto.core import codec
from fedproto.core.engine import Chunk, Cohort, Engine, errors_named
from fedproto.core.federation import Federation
from fedproto.core.metrics import summary
from fedproto.core.sampling import Schedule, draw
from fedproto.core.server import Progress, _tree
from fedproto.core.tensors import join, moved, rows_of, total
from fedproto.core.types import Algorithm, Tree, Upload
from fedproto.errors import DivergedError

#: A supervised loss above this has exploded: guessing among 1000 classes costs 7.
EXPLODED = 1e4
#: Other terms, as lambda times a distance, may be as large from the start: they have also grown so many times.
GROWN = 1e3


@dataclass(frozen=True)
class RoundResult:
    """What one round gave; a line of metrics.jsonl."""

    round: int
    loss: dict[str, float]
    loss_std: dict[str, float]  # over the clients that trained
    accuracy: dict[str, dict[str, float]] | None  # None where this round was not evaluated
    bytes_up: int
    bytes_down: int
    participants: list[int]  # whose uploads arrived
    seconds: float
    notes: list[str]
    diverged: list[int] = field(default_factory=list)  # clients whose loss exploded for the first time
    clients: Tree | None = field(repr=False, default=None)  # each accuracy, a value a client

    def line(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "clients"}


@dataclass
class FederationRun:
    """A federation on its way through the rounds."""

    federation: Federation
    schedule: Schedule
    progress: Progress


def run_rounds(algorithm: Algorithm, engine: Engine, courses: Sequence[FederationRun]) -> Iterator[list[RoundResult]]:
    """From the round after the courses' progress to the last, a result a course; all are trained together.

    Their rounds, and how far they have come, are the same. The courses' progress and the engine's states move along.
    """
    rounds, every = courses[0].schedule.rounds, courses[0].schedule.eval_every
    for round in range(courses[0].progress.round + 1, rounds + 1):
        started = time.perf_counter()
        lots = [draw(len(course.federation.members), course.schedule, round) for course in courses]
        tallies = [RoundAccumulator(algorithm, course, round, lot) for course, lot in zip(courses, lots, strict=True)]
        for chunk in engine.train(round, [course.progress.server for course in courses], lots):
            tallies[chunk.federation].take(chunk)
        for tally in tallies:
            tally.aggregate()
        due = round % every == 0 or round == rounds
        found = engine.evaluate([course.progress.server for course in courses]) if due else [None] * len(courses)
        seconds = (time.perf_counter() - started) / len(courses)
        yield [tally.result(clients, seconds) for tally, clients in zip(tallies, found, strict=True)]


class RoundAccumulator:
    """What a course's round amounts to. Sums stay on the device until the round is over: nobody waits for them."""

    def __init__(self, algorithm: Algorithm, course: FederationRun, round: int, lot: Cohort) -> None:
        self.algorithm, self.course, self.round, self.lot = algorithm, course, round, lot
        self.chunks: list[Chunk] = []
        self.uploads: Upload | None = None
        self.down = self._downloads()

    def _downloads(self) -> Tensor:
        """A client downloads what it needs to train: of prototypes, those of its own classes."""
        own, picked = self.course.federation.own_classes, self.lot.picked
        mine = own if len(picked) == len(own) else own[moved(picked, own.device)]
        with errors_named(f"round {self.round}, sending"):
            sent = vmap(self.algorithm.send, in_dims=(None, 0))(self.course.progress.server, mine)
            return codec.download_sizes(sent, len(picked))

    def take(self, chunk: Chunk) -> None:
        """Add a chunk's uploads to those so far, or append them, or remember them."""
        self.chunks.append(chunk._replace(uploads=Upload({}, {})))
        if not len(chunk.speakers) or not chunk.uploads.sums:
            return
        if self.algorithm.remembers:
            self.course.progress.memory.store(chunk.speakers, chunk.uploads, self.round)
            return
        joined = chunk.uploads if self.uploads is None else join([self.uploads, chunk.uploads])
        self.uploads = total(joined) if self.algorithm.additive else joined

    def aggregate(self) -> None:
        """Give the server what arrived, or what it remembers."""
        progress = self.course.progress
        uploads = progress.memory.recall() if self.algorithm.remembers else self.uploads
        if uploads is not None and not (self.algorithm.additive or self.algorithm.remembers):
            # In the order of the clients, whatever order they were trained in: FeSEM draws seeds among them.
            uploads = rows_of(uploads, torch.cat([chunk.speakers for chunk in self.chunks]).argsort())
        if uploads is not None:
            with errors_named(f"round {self.round}, the server of {self.algorithm.name}"):
                progress.server = _tree(self.algorithm.aggregate(progress.server, uploads), "aggregate")
        progress.round = self.round

    def result(self, clients: Tree | None, seconds: float) -> RoundResult:
        """The one place in a round that waits for the device."""
        trained = torch.cat([chunk.clients for chunk in self.chunks])
        columns, down = self._read()
        if not columns["sound"].all():
            self._refuse_divergence(trained, columns)
        up = torch.stack([columns.pop("values"), columns.pop("bytes")], 1).long()
        self.course.progress.ledger.up(trained, up)
        self.course.progress.ledger.down(self.lot.picked, down)
        del columns["sound"]
        none = {"supervised": 0.0, "regulariser": 0.0}
        diverged, warnings = self._notice_explosion(trained, columns)
        return RoundResult(
            round=self.round,
            loss=none | {n: float(v.mean()) for n, v in columns.items()},
            loss_std=none | {n: float(v.std(correction=0)) for n, v in columns.items()},
            accuracy=summary(clients) if clients else None,
            bytes_up=int(up[:, 1].sum()),
            bytes_down=int(down[:, 1].sum()),
            participants=self.lot.picked[~torch.isin(self.lot.picked, self.lot.lost)].tolist(),
            seconds=seconds,
            notes=self.algorithm.notes(self.course.progress.server) + warnings,
            diverged=diverged,
            clients=clients,
        )

    def _read(self) -> tuple[Tree, Tensor]:
        """What the chunks tell of each client, as columns on the CPU, and the sizes of the downloads."""
        parts = [{"values": c.sizes[:, 0], "bytes": c.sizes[:, 1], "sound": c.sound, **c.loss} for c in self.chunks]
        device = self.chunks[0].sound.device  # sizes of nothing are on the CPU
        columns = [torch.cat([part[name].to(device).double() for part in parts]) for name in parts[0]]
        return dict(zip(parts[0], torch.stack(columns).cpu(), strict=True)), self.down.cpu()

    def _notice_explosion(self, trained: Tensor, losses: Tree) -> tuple[list[int], list[str]]:
        """The clients whose loss exploded in this round for the first time, and a sentence about them."""
        progress = self.course.progress
        progress.note_losses({name: float(values.mean()) for name, values in losses.items()})
        worst = torch.zeros(len(trained), dtype=torch.float64)
        for name, values in losses.items():
            grown = GROWN * progress.smallest_loss.get(name, math.inf)
            bound = EXPLODED if name == "supervised" else max(EXPLODED, grown)
            worst = torch.maximum(worst, torch.where(values > bound, values, 0))
        losses_by_client = dict(zip(trained.tolist(), worst.tolist(), strict=True))
        found = sorted(c for c, loss in losses_by_client.items() if loss > 0 and c not in progress.diverged)
        if not found:
            return [], []
        progress.diverged |= dict.fromkeys(found, self.round)
        largest = max(losses_by_client[client] for client in found)
        who = f"client {found[0]}" if len(found) == 1 else f"{len(found)} clients, client {found[0]} among them,"
        return found, [f"the loss of {who} has exploded (up to {largest:.2g}); the lr may be too high"]

    def _refuse_divergence(self, trained: Tensor, columns: Tree) -> None:
        """The loss tells of every step but the last; what came of that one is in the parameters and the upload."""
        position = int((columns["sound"] == 0).nonzero()[0])
        values = {name: float(value[position]) for name, value in columns.items() if name != "sound"}
        wrong = [f"the {name} loss is {value}" for name, value in values.items() if not math.isfinite(value)]
        what, client = wrong[0] if wrong else "its parameters or its upload are not finite", int(trained[position])
        message = f"round {self.round}, client {client}, training: {what}; the lr may be too high"
        raise DivergedError(message, self.round, client)
