"""What the server keeps: round, classes, members, prototypes or weights, everybody's last upload, and what it refused.

All of it is one file, replaced atomically after every round, from which a killed server goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch

from fedproto.config.choices import complete, parse_choice
from fedproto.config.options import PositiveInt, convert, words
from fedproto.core.class_names import merge_names
from fedproto.core.files import TensorFormat, hold_lock, read_tensors, write_tensors
from fedproto.core.tensors import flatten_groups, pad_rows, split_groups, stack_uploads
from fedproto.core.types import Algorithm, Batch, Step, Task, Tree, Upload, nothing
from fedproto.deploy.messages import Message, of_server, over, printable, to_upload
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.deploy.validation import (
    Amounts,
    Expected,
    Limits,
    accuracies,
    check,
    check_new_classes,
    find_outliers,
    shapes_of,
)
from fedproto.errors import ConfigError, Refused, RunFolderError
from fedproto.models import Fit
from fedproto.runs.client_modules import copy_state, draw_model

STATE = "server.safetensors"
FORMAT = TensorFormat("server state", 1)


@dataclass
class MemberRecord:
    """One member, as the server knows it."""

    number: int  # by which its shuffles are drawn
    last_round: int = 0  # in which its answer counted
    last_seen: float = 0.0
    spoken: list[str] = field(default_factory=list)
    brought: list[str] = field(default_factory=list)  # classes of which it was the first to speak
    bytes_up: int = 0  # of payload, as the simulator's ledger counts them
    bytes_down: int = 0
    beside_up: int = 0  # of headers, of what Flower adds, and of messages that no round needs
    beside_down: int = 0
    refused: int = 0  # answers that the rules did not let pass
    failed: int = 0  # rounds it could not answer, by its own word or Flower's
    reason: str = ""  # of the last of either, until an answer counts
    accuracy: dict[str, float] = field(default_factory=dict)


class Answer(NamedTuple):
    """What a member said in the round that is not closed yet."""

    upload: Upload
    spoken: list[str]  # the classes of its rows; none where weights travel
    brought: list[str]  # those of them that the federation did not have


class ServerState:
    def __init__(self, settings: ServerSettings, terms: TrainingTerms) -> None:
        self.settings, self.terms = settings, terms
        self.algorithm = terms.build()
        self.id = token_hex(
            8
        )  # tells this federation from another that the same members take part in
        self.round = 0
        self.classes, _ = merge_names(words(settings.classes), "the server's settings name a class")
        self.seats: dict[str, MemberRecord] = {}
        self.registered: set[str] = set()  # names of keys: who has none cannot say them
        self.uploads: dict[
            str, Upload
        ] = {}  # as they were sent; rows are of the seat's `spoken` classes
        self.answers: dict[str, Answer] = {}  # of the round that is not closed yet
        self.path = Path(settings.state) / STATE
        self.server, self.shapes = _beginning(self.algorithm, terms, settings, self.classes)

    # --- a round

    def invite(self, name: str, whole: bool = False) -> Message:
        """What a member is sent: where the federation stands, and by what it trains.

        To train it gets what the algorithm sends to a client of its classes. Of a member that has not been heard yet
        the classes are not known: it gets everything, as does who is to measure over all classes (`whole`).
        """
        seat = self.seats.setdefault(name, MemberRecord(len(self.seats)))
        own = [float(whole or not seat.spoken or each in seat.spoken) for each in self.classes]
        state = of_server(self.algorithm.send(self.server, torch.tensor(own)), self.classes)
        told = {"refused": seat.reason} if seat.reason else {}
        header = {
            "round": self.round + 1,
            "number": seat.number,
            "classes": list(self.classes),
            "member": name,
        }
        header |= {"federation": self.id}
        return Message({**header, **vars(self.terms), **state.header, **told}, state.arrays)

    def expected(self, asked: frozenset[str]) -> Expected:
        once = self.terms.part().options.get("weighting") == "uniform"
        return Expected(self.round + 1, asked, self.classes, *self.shapes, self._limits(), once)

    def _limits(self) -> Limits:
        s = self.settings
        return Limits(
            bytes=s.max_bytes,
            classes=s.max_classes,
            classes_of_one=s.max_new_classes,
            count=s.max_count,
            norm=s.max_norm,
            new_classes=s.new_classes,
            norm_ratio=s.max_norm_ratio,
            count_ratio=s.max_count_ratio,
        )

    def take(self, name: str, parcel: Message, expected: Expected) -> None:
        """Keep a member's answer until the round is closed, or say in its seat why not, and raise that."""
        try:
            check(name, parcel, expected)
            spoken = list(parcel.header["spoken"]) if expected.by_class else []
            brought = check_new_classes(
                spoken, self._known(), set(self.seats[name].brought), expected.limits
            )
        except Refused as error:
            self.refuse(name, str(error))
            raise
        self.answers[name] = Answer(to_upload(parcel), spoken, brought)
        self.seats[name].reason = ""
        self.note_accuracy(name, parcel)

    def judge(self) -> dict[str, str]:
        """Refuse the answers of this round that are out of line with the others'; gives who that is, and why."""
        answers = {
            name: Amounts.of(answer.upload, answer.spoken) for name, answer in self.answers.items()
        }
        before = {
            name: upload
            for name, upload in self.uploads.items()
            if name not in answers and self.admits(name)
        }
        remembered = {
            name: Amounts.of(upload, self.seats[name].spoken) for name, upload in before.items()
        }
        reasons = find_outliers(answers, remembered, self._limits())
        for name, reason in reasons.items():
            del self.answers[name]
            self.refuse(name, reason)
        return reasons

    def _known(self) -> set[str]:
        """The federation's classes, with those that answers of this round bring."""
        coming = {name for answer in self.answers.values() for name in answer.brought}
        return coming.union(self.classes)

    def heard(self, name: str, payload: int, beside: int) -> None:
        """Note that a member answered, with so many bytes of payload and beside it."""
        seat = self.seats[name]
        seat.last_seen = time.time()
        seat.bytes_up += payload
        seat.beside_up += beside

    def sent(self, name: str, payload: int, beside: int) -> None:
        """Note what was sent to a member."""
        seat = self.seats[name]
        seat.bytes_down += payload
        seat.beside_down += beside

    def note_accuracy(self, name: str, parcel: Message) -> None:
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
        """Make the server's new state of what was said; `save` keeps it."""
        self.round += 1
        for name in sorted(self.answers, key=self._number):  # in whatever order they came
            seat, answer = self.seats[name], self.answers[name]
            seat.last_round = self.round
            seat.spoken = answer.spoken
            seat.brought += answer.brought
            self.classes = tuple(dict.fromkeys((*self.classes, *answer.spoken)))
            self.uploads[name] = answer.upload
        self.answers = {}
        self._strike_leavers()
        spoke = set(self.uploads)
        counts = (
            spoke
            if self.algorithm.remembers
            else {n for n in spoke if self.seats[n].last_round == self.round}
        )
        uploads = [self._placed(n) for n in sorted(counts, key=self._number)]
        if uploads and uploads[0].sums:
            together = stack_uploads(uploads)
            self.server = self.algorithm.aggregate(self._before(together), together)

    def _number(self, name: str) -> int:
        return self.seats[name].number

    def _strike_leavers(self) -> None:
        """Drop what those said who are no members any more, and the classes that were only theirs.

        Their seats stay, so that nobody else gets their numbers. Classes that the settings name stay, too.
        """
        gone: set[str] = set()
        held = set(words(self.settings.classes))
        for name, seat in self.seats.items():
            if self.admits(name):
                held.update(seat.spoken)
                continue
            gone.update(seat.spoken, seat.brought)
            seat.spoken, seat.brought = [], []
            self.uploads.pop(name, None)
        stays = [name not in gone - held for name in self.classes]
        if "known" in self.server:
            rows = torch.tensor(stays[: len(self.server["known"])]).nonzero().flatten()
            self.server = {name: value[rows] for name, value in self.server.items()}
        self.classes = tuple(name for name, stay in zip(self.classes, stays, strict=True) if stay)

    def _placed(self, name: str) -> Upload:
        upload = self.uploads[name]
        return (
            over(upload, self.seats[name].spoken, self.classes)
            if self.seats[name].spoken
            else upload
        )

    def _before(self, uploads: Upload) -> Tree:
        """The server's state over the classes there are now; zeros where it has none yet."""
        weight = uploads.weights["weight"]
        fresh = {name: torch.zeros_like(value[0]) for name, value in uploads.sums.items()}
        if weight.dim() > 1:
            fresh["known"] = torch.zeros_like(weight[0])
        if (
            self.algorithm.remembers
        ):  # all that anybody who is still a member ever said is in the uploads
            return fresh
        return {name: self._kept(name, value) for name, value in fresh.items()}

    def _kept(self, name: str, fresh: torch.Tensor) -> torch.Tensor:
        if name not in self.server:
            return fresh
        return pad_rows(self.server[name], len(fresh)) if fresh.dim() else self.server[name]

    # --- on disk

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody else works on this state: Flower may start a second run when the first one is not quite dead."""
        folder = self.path.parent
        with ExitStack() as stack:
            try:
                self._make_folder()
                stack.enter_context(hold_lock(folder, wait_seconds=self.settings.patience))
            except OSError as error:
                raise RunFolderError(
                    f"{folder} cannot be written: {error.strerror or error}"
                ) from error
            yield

    def save(self) -> None:
        """Replace the file, or raise a sentence that names it; what was there before then stays as it was.

        What people and `fedproto deploy status` read is in the file's header.
        """
        remembered = self.uploads if self.algorithm.remembers else {}  # else nobody asks for them
        uploads = {
            str(self.seats[name].number): flatten_groups(upload._asdict())
            for name, upload in remembered.items()
        }
        tensors = flatten_groups({"server": self.server} | uploads)
        header = {
            "id": self.id,
            "round": self.round,
            "classes": list(self.classes),
            "algorithm": str(self.terms.part()),
            "registered": sorted(self.registered),
            "seats": {name: vars(seat) for name, seat in self.seats.items()},
        }
        try:
            self._make_folder()
            write_tensors(self.path, tensors, FORMAT, header, private=True)
        except OSError as error:
            raise RunFolderError(
                f"{self.path} cannot be written: {error.strerror or error}"
            ) from error

    def _make_folder(self) -> None:
        """Make the state's folder, for its owner only; one that is there keeps the permissions it has."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _refuse_other(self, server: Tree) -> None:
        """A state of other prototypes or another architecture than the settings speak of."""
        by_class = "known" in self.server
        mine, theirs = (
            {n: _row(v, by_class) for n, v in tree.items()} for tree in (self.server, server)
        )
        if mine != theirs:
            odd = next(
                n for n in sorted(mine.keys() | theirs.keys()) if mine.get(n) != theirs.get(n)
            )
            raise RunFolderError(
                f"{self.path} holds a state of another dim, model, shape or number of classes ({odd})"
            )

    def load(self) -> None:
        """Go on from what was kept, if anything was."""
        if not self.path.exists():
            return
        tensors, of = read_state(self.path)
        if of["algorithm"] != str(self.terms.part()):
            raise RunFolderError(
                f"{self.path} is of {of['algorithm']}, not of {self.terms.part()}: name another state"
            )
        parts = split_groups(tensors)
        server = parts.get("server", {})
        try:
            self.id, self.round = str(of["id"]), int(of["round"])
            self.classes = tuple(dict.fromkeys((*of["classes"], *self.classes)))
            self.registered |= set(of["registered"])
            self.seats = {name: MemberRecord(**seat) for name, seat in of["seats"].items()}
            stored = {
                name: parts[str(seat.number)]
                for name, seat in self.seats.items()
                if str(seat.number) in parts
            }
            self.uploads = {name: Upload(**split_groups(tree)) for name, tree in stored.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFolderError(f"{self.path} is damaged: {error}") from error
        self._refuse_other(server)
        if "known" in server:  # of classes that the settings name since, there is no prototype yet
            server = {name: pad_rows(value, len(self.classes)) for name, value in server.items()}
        self.server = server


def _beginning(
    algorithm: Algorithm, terms: TrainingTerms, settings: ServerSettings, classes: tuple[str, ...]
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
    upload = algorithm.upload(
        Step(params, seen, seen, batch, algorithm.send(server, torch.ones(task.classes)))
    )
    if not upload.sums:
        raise ConfigError(f"{algorithm.name} sends nothing, so there is nothing to deploy")
    return {
        name: value[: len(classes)] if "known" in server else value
        for name, value in server.items()
    }, shapes_of(upload)


def _architecture(terms: TrainingTerms, settings: ServerSettings, classes: int) -> Tree:
    """The initial weights that all members have drawn, where weights travel."""
    if not settings.model or not settings.shape:
        raise ConfigError(
            f"{terms.algorithm} averages weights: the server must know `model` and `shape`, such as '1,28,28'"
        )
    part = parse_choice("model", settings.model)
    shape = tuple(convert("shape", settings.shape, tuple[PositiveInt, ...]))
    return copy_state(
        draw_model(
            complete("model", part, {}, {}), Fit(shape, classes, terms.dim or None), terms.seed
        )
    )


def read_state(path: Path) -> tuple[Tree, dict[str, Any]]:
    """The tensors and the header of a server's file, checked."""
    tensors, header = read_tensors(path, FORMAT)
    missing = {"id", "round", "classes", "algorithm", "registered", "seats"} - header.keys()
    if missing:
        raise RunFolderError(f"{path} is not a server's state: it lacks {min(missing)!r}")
    return tensors, header


def _row(value: torch.Tensor, by_class: bool) -> torch.Size:
    return value.shape[1:] if by_class and value.dim() else value.shape
