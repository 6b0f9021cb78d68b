"""What the server keeps: round, classes, members, prototypes or weights, everybody's last upload, and what it refused.

All of it is one file, replaced atomically after every round, from which a killed server goes on.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, TextIO

import torch
from safetensors.torch import save

from fedproto.bank import read_tensors
from fedproto.config import complete, one_part
from fedproto.deploy.parcels import Parcel, of_server, over, printable, to_upload
from fedproto.deploy.rules import Expected, Limits, accuracies, check, shapes_of
from fedproto.deploy.settings import ServerSettings, Terms
from fedproto.errors import ConfigError, Refused, RunFolderError
from fedproto.federation import draw_model, state_of
from fedproto.files import write_atomically
from fedproto.models import Fit
from fedproto.options import Count, convert, words
from fedproto.trees import flat, parted, stack, widened
from fedproto.types import Algorithm, Batch, Step, Task, Tree, Upload, nothing
from fedproto.vocabulary import merge_names

STATE = "server.safetensors"


@dataclass
class Seat:
    """One member, as the server knows it."""

    number: int  # by which its shuffles are drawn
    last_round: int = 0  # in which its answer counted
    last_seen: float = 0.0
    spoken: list[str] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0
    refused: int = 0  # answers that the rules did not let pass
    failed: int = 0  # rounds it could not answer, by its own word or Flower's
    reason: str = ""  # of the last of either, until an answer counts
    accuracy: dict[str, float] = field(default_factory=dict)


class Hall:
    def __init__(self, settings: ServerSettings, terms: Terms) -> None:
        self.settings, self.terms = settings, terms
        self.algorithm = terms.build()
        self.id = token_hex(8)  # tells this federation from another that the same members take part in
        self.round = 0
        self.classes, _ = merge_names(words(settings.classes), "the server's settings name a class")
        self.seats: dict[str, Seat] = {}
        self.uploads: dict[str, Upload] = {}  # as they were sent; rows are of the seat's `spoken` classes
        self.path = Path(settings.state) / STATE
        self.server, self.shapes = _beginning(self.algorithm, terms, settings, self.classes)

    # --- a round

    def invite(self, name: str) -> Parcel:
        """What a member is sent: where the federation stands, and by what it trains."""
        seat = self.seats.setdefault(name, Seat(len(self.seats)))
        state = of_server(self.server, self.classes)
        told = {"refused": seat.reason} if seat.reason else {}
        header = {"round": self.round + 1, "number": seat.number, "classes": list(self.classes), "member": name}
        header |= {"federation": self.id}
        return Parcel({**header, **vars(self.terms), **state.header, **told}, state.arrays)

    def expected(self, asked: frozenset[str]) -> Expected:
        s = self.settings
        limits = Limits(s.max_bytes, s.max_classes, s.max_count, s.max_norm, s.new_classes)
        once = self.terms.part().options.get("weighting") == "uniform"
        return Expected(self.round + 1, asked, self.classes, *self.shapes, limits, once)

    def take(self, name: str, parcel: Parcel, expected: Expected) -> None:
        """Keep a member's upload, or say in its seat why not, and raise that."""
        try:
            check(name, parcel, expected)
        except Refused as error:
            self.refuse(name, str(error))
            raise
        upload, seat = to_upload(parcel), self.seats[name]
        seat.last_round, seat.reason = self.round + 1, ""
        seat.spoken = list(parcel.header.get("spoken", []))
        self.note_accuracy(name, parcel)
        self.uploads[name] = upload

    def heard(self, name: str, size: int) -> None:
        seat = self.seats[name]
        seat.last_seen, seat.bytes_up = time.time(), seat.bytes_up + size

    def note_accuracy(self, name: str, parcel: Parcel) -> None:
        self.seats[name].accuracy = accuracies(parcel.header) or self.seats[name].accuracy

    def refuse(self, name: str, reason: str) -> None:
        if name in self.seats:
            self.seats[name].refused += 1
            self.seats[name].reason = printable(reason)

    def fail(self, name: str, reason: str) -> None:
        self.seats[name].failed += 1
        self.seats[name].reason = printable(reason)

    def admits(self, name: str) -> bool:
        """Whether somebody is a member; where nobody is listed, whoever Flower lets in."""
        listed = words(self.settings.members)
        return not listed or name in listed

    def close_round(self) -> None:
        """Make the server's new state of what was said, and keep it."""
        self.round += 1
        self.uploads = {name: upload for name, upload in self.uploads.items() if self.admits(name)}  # who left is gone
        spoke = set(self.uploads)
        counts = spoke if self.algorithm.remembers else {n for n in spoke if self.seats[n].last_round == self.round}
        new = [name for seat in self.seats.values() for name in seat.spoken if name not in self.classes]
        self.classes += tuple(dict.fromkeys(new))
        uploads = [self._placed(n) for n in sorted(counts, key=lambda name: self.seats[name].number)]
        if uploads and uploads[0].sums:
            together = stack(uploads)
            self.server = self.algorithm.aggregate(self._before(together), together)
        self.save()

    def _placed(self, name: str) -> Upload:
        upload = self.uploads[name]
        return over(upload, self.seats[name].spoken, self.classes) if self.seats[name].spoken else upload

    def _before(self, uploads: Upload) -> Tree:
        """The server's state over the classes there are now; zeros where it has none yet."""
        weight = uploads.weights["weight"]
        fresh = {name: torch.zeros_like(value[0]) for name, value in uploads.sums.items()}
        if weight.dim() > 1:
            fresh["known"] = torch.zeros_like(weight[0])
        if self.algorithm.remembers:  # all that anybody who is still a member ever said is in the uploads
            return fresh
        return {name: self._kept(name, value) for name, value in fresh.items()}

    def _kept(self, name: str, fresh: torch.Tensor) -> torch.Tensor:
        if name not in self.server:
            return fresh
        return widened(self.server[name], len(fresh)) if fresh.dim() else self.server[name]

    # --- on disk

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody else works on this state: Flower may start a second run when the first one is not quite dead."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        ends = time.monotonic() + self.settings.patience
        with (self.path.parent / "lock").open("w") as file:
            while not _locked(file):
                if time.monotonic() > ends:
                    raise RunFolderError(f"another run works on {self.path.parent}: stop it with `flwr stop`, or wait")
                time.sleep(0.5)
            yield

    def save(self) -> None:
        """One file; what Flower's people and `fedproto deploy status` read of it is in its metadata."""
        remembered = self.uploads if self.algorithm.remembers else {}  # else nobody asks for them
        uploads = {str(self.seats[name].number): flat(upload._asdict()) for name, upload in remembered.items()}
        tensors = flat({"server": self.server} | uploads)
        of = {
            "id": self.id,
            "round": self.round,
            "classes": list(self.classes),
            "algorithm": str(self.terms.part()),
            "seats": {name: vars(seat) for name, seat in self.seats.items()},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, save({n: v.contiguous() for n, v in tensors.items()}, {"of": json.dumps(of)}))

    def _refuse_other(self, server: Tree) -> None:
        """A state of other prototypes or another architecture than the settings speak of."""
        by_class = "known" in self.server
        mine, theirs = ({n: _row(v, by_class) for n, v in tree.items()} for tree in (self.server, server))
        if mine != theirs:
            odd = next(n for n in sorted(mine.keys() | theirs.keys()) if mine.get(n) != theirs.get(n))
            raise RunFolderError(f"{self.path} holds a state of another dim, model, shape or number of classes ({odd})")

    def load(self) -> None:
        """Go on from what was kept, if anything was."""
        if not self.path.exists():
            return
        tensors, of = read_state(self.path)
        if of["algorithm"] != str(self.terms.part()):
            raise RunFolderError(f"{self.path} is of {of['algorithm']}, not of {self.terms.part()}: name another state")
        try:
            self.id, self.round = str(of["id"]), int(of["round"])
            self.classes = tuple(dict.fromkeys((*of["classes"], *self.classes)))
            self.seats = {name: Seat(**seat) for name, seat in of["seats"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFolderError(f"{self.path} is damaged: {error}") from error
        parts = parted(tensors)
        self._refuse_other(parts.get("server", {}))
        self.server = parts.get("server", {})
        stored = {name: parts[str(seat.number)] for name, seat in self.seats.items() if str(seat.number) in parts}
        self.uploads = {name: Upload(**parted(tree)) for name, tree in stored.items()}


def _beginning(
    algorithm: Algorithm, terms: Terms, settings: ServerSettings, classes: tuple[str, ...]
) -> tuple[Tree, tuple[dict[str, tuple[int, ...]], bool]]:
    """The server's state before anybody spoke, and what an answer looks like."""
    if algorithm.shared is nothing:
        if not terms.dim:
            raise ConfigError(
                "dim, the number of values of a prototype, must be set: the server takes nobody's word for it"
            )
        task, params = Task(max(1, len(classes)), terms.dim, 1, terms.seed), {"any": torch.zeros(1)}
    else:
        task = Task(len(classes), terms.dim, 1, terms.seed)
        params = _architecture(terms, settings, len(classes))
    server = algorithm.init(params, task)
    seen = torch.zeros(1, task.dim)
    batch = Batch(torch.empty(0), torch.zeros(1, dtype=torch.long), torch.ones(1))
    upload = algorithm.upload(Step(params, seen, seen, batch, algorithm.send(server, torch.ones(task.classes))))
    if not upload.sums:
        raise ConfigError(f"{algorithm.name} sends nothing, so there is nothing to deploy")
    return {name: value[: len(classes)] if "known" in server else value for name, value in server.items()}, shapes_of(
        upload
    )


def _architecture(terms: Terms, settings: ServerSettings, classes: int) -> Tree:
    """The initial weights that all members have drawn, where weights travel."""
    if not settings.model or not settings.shape:
        raise ConfigError(
            f"{terms.algorithm} averages weights: the server must know `model` and `shape`, such as '1,28,28'"
        )
    part = one_part("model", settings.model)
    shape = tuple(convert("shape", settings.shape, tuple[Count, ...]))
    return state_of(draw_model(complete("model", part, {}, {}), Fit(shape, classes, terms.dim or None), terms.seed))


def read_state(path: Path) -> tuple[Tree, dict[str, Any]]:
    tensors, metadata = read_tensors(path, "a server's state")
    try:
        of = json.loads(metadata["of"])
        if not {"id", "round", "classes", "algorithm", "seats"} <= of.keys():
            raise ValueError("it lacks what a server keeps")
    except (KeyError, ValueError, AttributeError) as error:
        raise RunFolderError(f"{path} is no server's state: {error}") from error
    return tensors, of


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which ends with the process, however that ends
    except BlockingIOError:
        return False
    return True


def _row(value: torch.Tensor, by_class: bool) -> torch.Size:
    return value.shape[1:] if by_class and value.dim() else value.shape
