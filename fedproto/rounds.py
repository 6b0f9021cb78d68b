"""The only round loop, as a generator of results: sampling, faults, ledger, memory of the absent, evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedproto import randomness, wire
from fedproto.engines import Chunk, Engine
from fedproto.federation import Federation
from fedproto.trees import total
from fedproto.types import Algorithm, Tree, Upload


@dataclass(frozen=True)
class Schedule:
    rounds: int
    participation: float = 1.0  # share of the clients sampled each round
    dropout: float = 0.0  # share of the uploads lost on their way
    straggle: float = 0.0  # share of the sampled clients that does half its steps
    eval_every: int = 10
    seed: int = 0


@dataclass(frozen=True)
class RoundResult:
    """What one round gave; a line of metrics.jsonl."""

    round: int
    loss: dict[str, float]
    accuracy: dict[str, dict[str, float]] | None  # None where this round was not evaluated
    bytes_up: int
    bytes_down: int
    participants: list[int]  # whose uploads arrived
    seconds: float
    notes: list[str]
    clients: list[dict[str, float]] | None = field(repr=False, default=None)  # each client's accuracies

    def line(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "clients"}


class Ledger:
    """What each client really sent and received: numbers of values, and bytes of the messages that carry them."""

    COLUMNS = ("values_up", "bytes_up", "values_down", "bytes_down")

    def __init__(self, clients: int) -> None:
        self.counts = torch.zeros(clients, len(self.COLUMNS), dtype=torch.int64)

    def up(self, client: int, size: wire.Size) -> None:
        self.counts[client, :2] += torch.tensor(size)

    def down(self, client: int, size: wire.Size) -> None:
        self.counts[client, 2:] += torch.tensor(size)

    def of(self, client: int) -> dict[str, int]:
        return dict(zip(self.COLUMNS, self.counts[client].tolist(), strict=True))

    def total(self) -> dict[str, int]:
        return dict(zip(self.COLUMNS, self.counts.sum(0).tolist(), strict=True))


class Memory:
    """The last upload of every client and the round it came in, for algorithms in which the absent still count."""

    def __init__(self, clients: int) -> None:
        self.last = torch.zeros(clients, dtype=torch.int64)  # round of the last upload, 0 = never
        self.uploads: Upload | None = None

    def store(self, clients: list[int], uploads: Upload, round: int) -> None:
        if self.uploads is None:
            rows = len(self.last)
            sums, weights = ({n: v.new_zeros(rows, *v.shape[1:]) for n, v in tree.items()} for tree in uploads)
            self.uploads = Upload(sums, weights)
        for kept, new in zip(self.uploads, uploads, strict=True):
            for name, value in new.items():
                kept[name][clients] = value
        self.last[clients] = round

    def recall(self) -> Upload | None:
        """The last uploads of all who ever spoke."""
        if self.uploads is None:
            return None
        return _rows(self.uploads, self.last.nonzero().flatten())


@dataclass
class Progress:
    """All that a run is, apart from the clients' own states: kept in a checkpoint, continued from one."""

    server: Tree
    ledger: Ledger
    memory: Memory
    round: int = 0

    @classmethod
    def start(cls, federation: Federation, algorithm: Algorithm) -> Progress:
        clients = len(federation.members)
        server = algorithm.init(federation.members[0].initial, federation.task)
        return cls(server, Ledger(clients), Memory(clients))

    def export(self) -> Tree:
        tree = {f"server.{name}": value for name, value in self.server.items()}
        tree |= {"ledger": self.ledger.counts, "last": self.memory.last}
        if self.memory.uploads is not None:
            tree |= {f"sums.{name}": value for name, value in self.memory.uploads.sums.items()}
            tree |= {f"weights.{name}": value for name, value in self.memory.uploads.weights.items()}
        return tree

    def restore(self, tree: Tree, round: int) -> None:
        parts: dict[str, Tree] = {"server": {}, "sums": {}, "weights": {}}
        for key, value in tree.items():
            group, _, name = key.partition(".")
            if group in parts:
                parts[group][name] = value
        self.server = {name: value.to(self.server[name].device) for name, value in parts["server"].items()}
        self.ledger.counts, self.memory.last, self.round = tree["ledger"], tree["last"], round
        device = next((value.device for value in self.server.values()), torch.device("cpu"))
        sums, weights = ({n: v.to(device) for n, v in parts[group].items()} for group in ("sums", "weights"))
        self.memory.uploads = Upload(sums, weights) if sums else None


def run_rounds(
    federation: Federation, algorithm: Algorithm, engine: Engine, schedule: Schedule, progress: Progress
) -> Iterator[RoundResult]:
    """From the round after `progress` to the last; `progress` and the engine's states move along."""
    for round in range(progress.round + 1, schedule.rounds + 1):
        started = time.perf_counter()
        before = progress.ledger.total()
        picked, lost, slow = draw(len(federation.members), schedule, round)
        _count_downloads(federation, algorithm, progress, picked)
        loss = _train_and_aggregate(algorithm, engine, progress, round, picked, lost, slow)
        progress.round = round
        due = round % schedule.eval_every == 0 or round == schedule.rounds
        clients = engine.evaluate(progress.server) if due else None
        after = progress.ledger.total()
        yield RoundResult(
            round=round,
            loss=loss,
            accuracy=summary(clients) if clients else None,
            bytes_up=after["bytes_up"] - before["bytes_up"],
            bytes_down=after["bytes_down"] - before["bytes_down"],
            participants=[client for client in picked if client not in lost],
            seconds=time.perf_counter() - started,
            notes=algorithm.notes(progress.server),
            clients=clients,
        )


def draw(clients: int, schedule: Schedule, round: int) -> tuple[list[int], set[int], set[int]]:
    """Who takes part in a round, whose upload is lost, and who does half its steps."""

    def some(purpose: str, of: list[int], share: float, at_least: int) -> list[int]:
        order = randomness.permutation(randomness.key(schedule.seed, purpose, round), len(of))
        return sorted(of[position] for position in order[: max(at_least, _nearest(share * len(of)))].tolist())

    picked = some("sample", list(range(clients)), schedule.participation, at_least=1)
    lost = some("lost uploads", picked, schedule.dropout, at_least=0)
    slow = some("stragglers", picked, schedule.straggle, at_least=0)
    return picked, set(lost), set(slow)


def _nearest(number: float) -> int:
    """Rounded, halves up: python's round(0.5) is 0."""
    return int(number + 0.5)


def _count_downloads(federation: Federation, algorithm: Algorithm, progress: Progress, picked: list[int]) -> None:
    """A client downloads what it needs to train: of prototypes, those of its own classes."""
    for client in picked:
        received = algorithm.send(progress.server, federation.own_classes[client])
        progress.ledger.down(client, wire.download_size(received))


def _train_and_aggregate(
    algorithm: Algorithm,
    engine: Engine,
    progress: Progress,
    round: int,
    picked: list[int],
    lost: set[int],
    slow: set[int],
) -> dict[str, float]:
    """Train who was picked, give the server what arrived (and what it remembers), and return the mean losses."""
    uploads, loss = None, []
    for chunk in engine.train(round, progress.server, picked, slow):
        loss.append(chunk.loss)
        uploads = _take(uploads, chunk, lost, algorithm, progress, round)
    if algorithm.remembers:
        uploads = progress.memory.recall()
    if uploads is not None:
        progress.server = algorithm.aggregate(progress.server, uploads)
    return _mean_loss(loss)


def _take(
    so_far: Upload | None, chunk: Chunk, lost: set[int], algorithm: Algorithm, progress: Progress, round: int
) -> Upload | None:
    """Count a chunk's uploads, drop the lost ones, and add or append the others to those so far."""
    for position, client in enumerate(chunk.clients):
        single = Upload(*({n: v[position] for n, v in tree.items()} for tree in chunk.uploads))
        progress.ledger.up(client, wire.upload_size(single))
    arrived = [position for position, client in enumerate(chunk.clients) if client not in lost]
    if not arrived or not chunk.uploads.sums:
        return so_far
    uploads = _rows(chunk.uploads, torch.tensor(arrived))
    if algorithm.remembers:
        progress.memory.store([chunk.clients[position] for position in arrived], uploads, round)
        return None
    joined = uploads if so_far is None else _join(so_far, uploads)
    return total(joined) if algorithm.additive else joined


def _rows(uploads: Upload, rows: Tensor) -> Upload:
    return Upload(*({name: value[rows.to(value.device)] for name, value in tree.items()} for tree in uploads))


def _join(first: Upload, second: Upload) -> Upload:
    return Upload(*({n: torch.cat([a[n], b[n]]) for n in a} for a, b in zip(first, second, strict=True)))


def _mean_loss(chunks: list[dict[str, list[float]]]) -> dict[str, float]:
    """Each term's mean over the clients that trained."""
    values: dict[str, list[float]] = {"supervised": [], "regulariser": []}
    for chunk in chunks:
        for name, numbers in chunk.items():
            values.setdefault(name, []).extend(numbers)
    return {name: sum(numbers) / len(numbers) if numbers else 0.0 for name, numbers in values.items()}


def summary(clients: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and (population) standard deviation over clients of each accuracy."""
    table = {key: torch.tensor([client[key] for client in clients], dtype=torch.float64) for key in clients[0]}
    return {key: {"mean": float(v.mean()), "std": float(v.std(correction=0))} for key, v in table.items()}
