"""A deployed federation without its transport: the same numbers as the simulator, and nothing believed unseen."""

import io
import json
import os
import shutil
import threading
import time
import tomllib
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from safetensors.torch import save as save_tensors
from sklearn.datasets import load_digits

from fedproto.core import codec
from fedproto.core.files import write_tensors
from fedproto.core.tensors import stack_uploads
from fedproto.core.types import Tree
from fedproto.deploy import round_protocol, scaffold
from fedproto.deploy.error_codes import code_of
from fedproto.deploy.member import STATE as MEMBER_STATE
from fedproto.deploy.member import answer, scored
from fedproto.deploy.messages import Message, of_server, of_upload, over, to_server, to_upload
from fedproto.deploy.round_protocol import serve
from fedproto.deploy.server_state import FORMAT, STATE, MemberRecord, ServerState, read_state
from fedproto.deploy.settings import (
    MemberSettings,
    ServerSettings,
    TrainingTerms,
    divided,
    read_member,
)
from fedproto.deploy.validation import check
from fedproto.errors import ConfigError, FedProtoError, Refused, RunFolderError, TrainingError
from fedproto.runs.api import _begin
from fedproto.runs.experiment import proceed

HELD = {"a": "012", "b": "234", "c": "450", "d": "16"}
MIXED = {"a": "mlp(hidden=30)", "b": "mlp(hidden=20)", "c": "mlp(hidden=25)", "d": "mlp(hidden=10)"}
EQUAL = dict.fromkeys(HELD, "mlp(hidden=20)")
WEIGHTS = ("fedavg", "fedprox", "fedper", "fedrep")
DIM = 12
SUMS, WEIGHT, ROWS, HOLDERS = "value.prototypes", "extra.weight", "extra.rows", "extra.holders"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each member's images as a file in which its classes are numbered backwards, and as the simulator's arrays."""
    folder = tmp_path_factory.mktemp("data")
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8).astype(np.uint8) * 15
    arrays = {}
    for place, (name, held) in enumerate(HELD.items()):
        classes = sorted(map(int, held), reverse=True)
        mine = np.isin(y, classes)
        xs, ys = x[mine][place::4], y[mine][place::4]
        arrays[name] = (xs[:40], ys[:40], xs[40:60], ys[40:60])
        label = {value: number for number, value in enumerate(classes)}
        own = [[label[value] for value in part] for part in (ys[:40], ys[40:60])]
        np.savez(
            folder / f"{name}.npz",
            x=xs[:40],
            y=own[0],
            x_test=xs[40:60],
            y_test=own[1],
            classes=list(map(str, classes)),
        )
    return {"folder": folder, "arrays": arrays}


@dataclass
class World:
    """A hall and its members in a folder of their own; the post between them as a test wants it."""

    folder: Path
    data: Path
    algorithm: str = "fedproto"
    names: str = "abc"
    options: dict[str, Any] = field(default_factory=dict)
    terms: TrainingTerms = field(init=False)
    members: dict[str, MemberSettings] = field(init=False)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        by_weight = self.algorithm.partition("(")[0] in WEIGHTS
        models = EQUAL if by_weight else MIXED
        self.terms = TrainingTerms(algorithm=self.algorithm, dim=DIM)
        defaults: dict[str, Any] = {
            "rounds": 4,
            "classes": "0,1,2,3,4,5",
            "quorum": 3,
            "state": str(self.folder / "server"),
        }
        defaults |= {"timeout": 5.0, "patience": 1.0}
        defaults |= {"model": models["a"], "shape": "1,8,8"} if by_weight else {}
        self.settings = ServerSettings(**(defaults | self.options))
        sends = "weights,counts" if by_weight else "prototypes,counts"
        self.members = {
            name: MemberSettings(
                name,
                f"npz:{self.data}/{name}.npz",
                str(self.folder / name),
                models[name],
                classes=",".join(HELD[name]),
                sends=sends,
            )
            for name in self.names
        }

    def hall(self, **changes: Any) -> ServerState:
        hall = ServerState(replace(self.settings, **changes), self.terms)
        hall.load()
        return hall

    def serve(self, hall: ServerState | None = None, **post: Any) -> ServerState:
        hall = hall or self.hall()
        serve(hall, Transport(self.members, hall, **post), self.said.append)
        return hall


Rewrite = Callable[[str, Message, int], Any]


@dataclass
class Transport:
    """Members in this process. `there`: who can be reached; `heard`: whose answers come; `rewrite`: as what."""

    members: dict[str, MemberSettings]
    hall: ServerState
    there: Callable[[str, int], bool] = lambda name, round: True
    heard: Callable[[str, int], bool] = lambda name, round: True
    rewrite: Rewrite = lambda name, reply, round: [reply]
    after: Callable[[str, int], None] = lambda name, round: None
    invitations: list[tuple[str, Message]] = field(default_factory=list)
    _sent: dict[str, int] = field(default_factory=dict)

    def present(self) -> list[str]:
        return [name for name in self.members if self.there(name, self.hall.round + 1)]

    def sent(self) -> dict[str, int]:
        return self._sent

    def exchange(
        self, kind: str, parcels: dict[str, Message], timeout: float
    ) -> Iterator[tuple[str, Any, int]]:
        self._sent = {name: weighed(parcel) for name, parcel in parcels.items()}
        for name, parcel in parcels.items():
            round = parcel.header["round"]
            self.invitations.append((name, parcel))
            try:
                reply = (answer if kind == "train" else scored)(parcel, self.members[name])
            except FedProtoError as error:
                reply = Message({"error": code_of(error)}, {})
            if kind == "train" and not self.heard(name, round):
                continue
            for each in self.rewrite(name, reply, round) if kind == "train" else [reply]:
                yield name, each, weighed(each) if isinstance(each, Message) else 100
            self.after(name, round)


def weighed(parcel: Message) -> int:
    """The bytes of a message whose header is one text."""
    return len(json.dumps(parcel.header)) + len(parcel.payload())


@pytest.fixture
def world(tmp_path: Path, files: dict[str, Any]) -> Callable[..., World]:
    def made(
        algorithm: str = "fedproto", names: str = "abc", where: str = "w", **options: Any
    ) -> World:
        return World(tmp_path / where, files["folder"], algorithm, names, options)

    return made


def clone(server: Tree) -> Tree:
    return {name: value.clone() for name, value in server.items()}


def equal(one: Tree, other: Tree) -> bool:
    return set(one) == set(other) and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )


def simulated(
    files: dict[str, Any],
    algorithm: str,
    models: dict[str, str],
    names: str = "abc",
    count: int = 4,
) -> Any:
    """The simulator's server after each round, its result, and its classes."""
    data = [files["arrays"][name] for name in names]
    options = {"rounds": count, "dim": DIM, "engine": "reference"}
    experiment, _ = _begin(
        algorithm, data, ",".join(f"{models[n]}*1" for n in names), None, options
    )
    servers, result = [], None
    for (found,) in proceed([experiment], [None], threading.Event()):
        servers.append(clone(experiment.progress.server))
        result = found
    return servers[:count], result, experiment.federation.classes


# --- parity


@pytest.mark.parametrize(
    "algorithm",
    [
        "fedproto",
        "fedproto(weighting=uniform)",
        "fedproto(weighting=eq6)",
        "fedproto(absent=drop)",
        "fedproto(collect=during,regularise=class)",
        "fedavg",
        "fedprox",
        "fedper",
        "fedrep",
    ],
)
def test_every_round_is_the_simulators(algorithm: str, world: Any, files: dict[str, Any]) -> None:
    place = world(algorithm)
    models = EQUAL if algorithm in WEIGHTS else MIXED
    servers, result, classes = simulated(files, algorithm, models)
    assert classes == tuple("012345")
    for number, expected in enumerate(servers, 1):
        hall = place.hall(rounds=number)
        place.serve(hall)
        assert hall.round == number and set(hall.server) == set(expected)
        for name, value in expected.items():
            assert hall.server[name].dtype == value.dtype
            torch.testing.assert_close(hall.server[name], value, rtol=0, atol=1e-7)
    for name, client in zip("abc", result.clients, strict=True):
        assert hall.seats[name].accuracy == pytest.approx(client["accuracy"])


@pytest.mark.parametrize("algorithm", ["local", "fesem"])
def test_what_cannot_be_deployed_is_refused(algorithm: str, world: Any) -> None:
    with pytest.raises(ConfigError, match=algorithm):
        world(algorithm, model="mlp", shape="1,8,8").hall()


def test_prototypes_given_for_good_are_refused_or_work(world: Any) -> None:
    """`fixed` is a newcomer's option: its server has a tensor more, which no answer carries."""
    place = world("fedproto(fixed=true)")
    try:
        hall = place.hall()
    except ConfigError:
        return
    place.serve(hall)


def test_weights_need_architecture_and_shape(world: Any) -> None:
    for missing in ("model", "shape"):
        with pytest.raises(ConfigError, match="model"):
            world("fedavg", **{missing: ""}).hall()


def test_a_size_of_prototypes_is_needed(world: Any) -> None:
    place = world()
    with pytest.raises(ConfigError, match="dim"):
        ServerState(place.settings, replace(place.terms, dim=0))


def test_classes_may_all_come_with_the_members(world: Any, files: dict[str, Any]) -> None:
    """Nothing named beforehand: the classes come with those who have them."""
    hall = world(classes="", new_classes=True, rounds=1).serve()
    _, _, classes = simulated(files, "fedproto", MIXED, count=1)
    assert sorted(hall.classes) == sorted(classes)
    assert hall.server["prototypes"].shape == (6, DIM)


def test_a_member_leaves_out_classes_where_weights_travel(world: Any) -> None:
    """Of its data's classes it takes part with two; the third is none of the federation's."""
    place = world("fedavg", classes="0,2,3,4,5", rounds=1)
    place.members["a"] = replace(place.members["a"], classes="0,2")
    hall = place.serve()
    assert [seat.refused for seat in hall.seats.values()] == [0, 0, 0], "\n".join(place.said)


# --- rules: parcels made by hand, over three classes and prototypes of four values


def small(folder: Path, algorithm: str = "fedproto", **options: Any) -> ServerState:
    given: dict[str, Any] = {"state": str(folder), "classes": "x,y,z", "quorum": 1} | options
    hall = ServerState(ServerSettings(**given), TrainingTerms(algorithm=algorithm, dim=4))
    for name in ("a", "b", "c"):
        hall.invite(name)
    return hall


def parcel(
    name: str, round: int = 1, spoken: tuple[str, ...] = ("x", "y"), eq6: bool = False
) -> Message:
    draw = np.random.default_rng([ord(name[0]), round])
    counts = draw.integers(1, 9, len(spoken)).astype(np.float32)
    values = draw.normal(size=(len(spoken), 4)).astype(np.float32)
    arrays = {
        SUMS: values * counts[:, None],
        WEIGHT: counts,
        ROWS: np.arange(len(spoken), dtype=np.int32),
    }
    arrays |= {HOLDERS: np.ones(len(spoken), np.float32)} if eq6 else {}
    return Message({"member": name, "round": round, "spoken": list(spoken)}, arrays)


def with_header(**changes: Any) -> Callable[[Message], Message]:
    return lambda p: Message(
        {k: v for k, v in (p.header | changes).items() if v is not None}, p.arrays
    )


def with_array(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Message], Message]:
    return lambda p: Message(p.header, p.arrays | {name: change(p.arrays[name])})


def at(place: Any, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[place] = value
        return array

    return change


def of_names(names: list[Any]) -> Callable[[Message], Message]:
    """Rows for all of them, so that nothing but the names is wrong."""
    rows = len(names)
    arrays = {SUMS: np.ones((rows, 4), np.float32), WEIGHT: np.ones(rows, np.float32)}
    arrays |= {ROWS: np.arange(rows, dtype=np.int32)}
    return lambda p: Message(p.header | {"spoken": names}, arrays)


WRONG: dict[str, Callable[[Message], Message]] = {
    "NaN": with_array(SUMS, at((0, 0), np.nan)),
    "infinite": with_array(SUMS, at((1, 2), np.inf)),
    "minus infinite": with_array(SUMS, at((1, 2), -np.inf)),
    "1e30": with_array(SUMS, at((0, 0), 1e30)),
    "largest float": with_array(SUMS, at((0, 0), 3.4e38)),
    "a row too few": with_array(SUMS, lambda v: v[:1]),
    "a column too many": with_array(SUMS, lambda v: np.ones((2, 5), np.float32)),
    "flat": with_array(SUMS, lambda v: v.reshape(-1)),
    "an axis too many": with_array(SUMS, lambda v: v[None]),
    "a scalar": with_array(SUMS, lambda v: np.float32(1).reshape(())),
    "nothing": with_array(SUMS, lambda v: v[:0]),
    "whole numbers": with_array(SUMS, lambda v: v.astype(np.int64)),
    "truths": with_array(SUMS, lambda v: v > 0),
    "complex": with_array(SUMS, lambda v: v.astype(np.complex64)),
    "texts": with_array(SUMS, lambda v: v.astype("U8")),
    "bytes": with_array(SUMS, lambda v: v.astype("S8")),
    "objects": with_array(SUMS, lambda v: v.astype(object)),
    "times": with_array(SUMS, lambda v: v.astype("M8[s]")),
    "long doubles of 1e300": with_array(SUMS, lambda v: v.astype(np.float64) * 1e300),
    "zero weight": with_array(WEIGHT, at(0, 0.0)),
    "negative weight": with_array(WEIGHT, at(0, -1.0)),
    "negative weights and sums": lambda p: Message(
        p.header, p.arrays | {n: -p.arrays[n] for n in (SUMS, WEIGHT)}
    ),
    "huge weight": with_array(WEIGHT, at(0, 1e9)),
    "tiny weight": with_array(WEIGHT, at(0, 1e-30)),
    "NaN weight": with_array(WEIGHT, at(0, np.nan)),
    "weights of two axes": with_array(WEIGHT, lambda v: v[:, None]),
    "no sums": lambda p: Message(p.header, {n: v for n, v in p.arrays.items() if n != SUMS}),
    "no weights": lambda p: Message(p.header, {n: v for n, v in p.arrays.items() if n != WEIGHT}),
    "no rows": lambda p: Message(p.header, {n: v for n, v in p.arrays.items() if n != ROWS}),
    "long row numbers": with_array(ROWS, lambda v: v.astype(np.int64)),
    "a row number too few": with_array(ROWS, lambda v: v[:1]),
    "a row below 0": with_array(ROWS, at(0, -1)),
    "a row twice": with_array(ROWS, np.zeros_like),
    "no arrays": lambda p: Message(p.header, {}),
    "an array too many": lambda p: Message(p.header, p.arrays | {"value.more": p.arrays[SUMS]}),
    "an odd name of an array": lambda p: Message(
        p.header, p.arrays | {"\ud800" * 999: p.arrays[SUMS]}
    ),
    "next round": with_header(round=2),
    "round before": with_header(round=0),
    "no round": with_header(round=None),
    "round as text": with_header(round="1"),
    "round as list": with_header(round=[1] * 10_000),
    "another's name": with_header(member="c"),
    "no name": with_header(member=None),
    "name as number": with_header(member=7),
    "unknown class": with_header(spoken=["x", "w"]),
    "a class twice": with_header(spoken=["x", "x"]),
    "too few names": with_header(spoken=["x"]),
    "no names": with_header(spoken=None),
    "no classes": of_names([]),
    "names as text": with_header(spoken="xy"),
    "names as numbers": with_header(spoken=[0, 1]),
    "names as lists": with_header(spoken=[["x"], ["y"]]),
    "a name with a line break": with_header(spoken=["x", "y\n"]),
    "a name that is not composed": with_header(spoken=["x", "cafe\u0301"]),
    "a million classes": of_names([str(number) for number in range(1_000_000)]),
}

BAD_NAMES = {
    "empty": "",
    "blank": "  ",
    "huge": "w" * 201,
    "new line": "w\nv",
    "escape": "\x1b[2J",
    "half a letter": "\ud800",
    "nothing to see": "\u200b",
    "null": "w\0",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused_and_changes_no_bit(wrong: str, tmp_path: Path) -> None:
    hall, without = small(tmp_path / "1"), small(tmp_path / "2")
    asked = hall.expected(frozenset("abc"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        bad = WRONG[wrong](parcel("b"))
    hall.take("a", parcel("a"), asked)
    with pytest.raises(Refused) as refused:
        hall.take("b", bad, asked)
    hall.take("c", parcel("c", spoken=("y", "z")), asked)
    for name, spoken in (("a", ("x", "y")), ("c", ("y", "z"))):
        without.take(name, parcel(name, spoken=spoken), asked)
    for each in (hall, without):
        each.close_round()
    assert equal(hall.server, without.server) and hall.classes == without.classes
    assert "b" not in hall.uploads and hall.seats["b"].last_round == 0
    assert hall.seats["b"].refused == 1 and hall.invite("b").header["refused"] == str(refused.value)
    assert "refused" not in hall.invite("a").header
    assert len(str(refused.value)) < 400 and str(refused.value).isprintable()


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("bad", BAD_NAMES)
def test_bad_names_are_refused_where_new_classes_are_welcome_too(
    bad: str, allowed: bool, tmp_path: Path
) -> None:
    hall = small(tmp_path, new_classes=allowed)
    with pytest.raises(Refused):
        hall.take("a", of_names(["x", BAD_NAMES[bad]])(parcel("a")), hall.expected(frozenset("a")))


def test_a_refusal_is_told_until_an_answer_counts(tmp_path: Path) -> None:
    hall = small(tmp_path)
    for number in (1, 2):
        with pytest.raises(Refused):
            hall.take("a", WRONG["NaN"](parcel("a", number)), hall.expected(frozenset("a")))
        hall.take("b", parcel("b", number), hall.expected(frozenset("b")))
        hall.close_round()
        hall.save()
        assert hall.seats["a"].refused == number and "finite" in hall.invite("a").header["refused"]
    hall.load()
    assert "finite" in hall.invite("a").header["refused"]
    hall.take("a", parcel("a", 3), hall.expected(frozenset("a")))
    assert "refused" not in hall.invite("a").header and hall.seats["a"].refused == 2


def test_strangers_and_second_answers_are_refused(tmp_path: Path) -> None:
    hall = small(tmp_path)
    hall.take("a", parcel("a"), hall.expected(frozenset("ab")))
    kept = hall.answers["a"]
    for name, asked in (("a", "b"), ("stranger", "ab"), ("c", "ab")):
        with pytest.raises(Refused, match="not asked"):
            hall.take(
                name,
                Message(parcel("a").header | {"member": name}, parcel("b").arrays),
                hall.expected(frozenset(asked)),
            )
    assert hall.answers == {"a": kept} and "stranger" not in hall.seats


def test_too_many_bytes_are_refused(tmp_path: Path) -> None:
    fits = sum(value.nbytes for value in parcel("a").arrays.values())
    small(tmp_path, max_bytes=fits).take(
        "a", parcel("a"), small(tmp_path, max_bytes=fits).expected(frozenset("a"))
    )
    hall = small(tmp_path, max_bytes=fits - 1)
    with pytest.raises(Refused, match="bytes"):
        hall.take("a", parcel("a"), hall.expected(frozenset("a")))


def test_limits_are_where_they_are_said_to_be(tmp_path: Path) -> None:
    hall = small(tmp_path, max_count=8.0, max_norm=2.0, max_classes=2)
    expected = hall.expected(frozenset("a"))
    arrays = {SUMS: np.full((2, 4), 16, np.float32), WEIGHT: np.full(2, 8, np.float32)}
    good = Message(parcel("a").header, parcel("a").arrays | arrays)
    check("a", good, expected)
    for name, array in ((SUMS, at((0, 0), 16.1)), (WEIGHT, at(0, 8.1))):
        with pytest.raises(Refused):
            check("a", with_array(name, array)(good), expected)
    with pytest.raises(Refused, match="3 classes"):
        check("a", of_names(["x", "y", "z"])(good), expected)


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", ">f4", "longdouble"])
def test_floats_of_every_kind_are_refused_or_become_ours(kind: str, tmp_path: Path) -> None:
    """Neither an exception, nor a server whose numbers are of another kind from then on."""
    hall, plain = small(tmp_path / "1"), small(tmp_path / "2")
    sent = {
        name: value if name == ROWS else value.astype(kind)
        for name, value in parcel("a").arrays.items()
    }
    try:
        hall.take("a", Message(parcel("a").header, sent), hall.expected(frozenset("a")))
        equals = {
            name: value if name == ROWS else value.astype(np.float32)
            for name, value in sent.items()
        }
        plain.take("a", Message(parcel("a").header, equals), plain.expected(frozenset("a")))
    except Refused:
        assert "a" not in hall.answers
    for each in (hall, plain):
        each.take("b", parcel("b"), each.expected(frozenset("b")))
        each.close_round()
    assert equal(hall.server, plain.server)


def test_small_floats_of_all_members_cannot_overflow(tmp_path: Path) -> None:
    hall = small(tmp_path, new_classes=False)
    for name in "abc":
        arrays = {SUMS: np.full((2, 4), 60_000, np.float16), WEIGHT: np.full(2, 60, np.float16)}
        try:
            hall.take(name, Message(parcel(name).header, arrays), hall.expected(frozenset(name)))
        except Refused:
            hall.take(name, parcel(name), hall.expected(frozenset(name)))
    hall.close_round()
    assert torch.isfinite(hall.server["prototypes"]).all()


@pytest.mark.parametrize("holders", [-5.0, 0.0, 1e30, 2.0, 0.25])
def test_the_holders_of_eq6_are_counted_not_believed(holders: float, tmp_path: Path) -> None:
    """Each speaker is one holder of a class: another number would shrink or blow up everybody's prototype."""
    hall = small(tmp_path, "fedproto(weighting=eq6)")
    hall.take("a", parcel("a", eq6=True), hall.expected(frozenset("a")))
    with pytest.raises(Refused):
        bad = with_array(HOLDERS, lambda v: v * np.float32(holders))(parcel("b", eq6=True))
        hall.take("b", bad, hall.expected(frozenset("b")))


def test_where_every_member_counts_once_nobody_counts_more(tmp_path: Path) -> None:
    hall = small(tmp_path, "fedproto(weighting=uniform)")
    ones = with_array(WEIGHT, np.ones_like)
    hall.take("a", ones(parcel("a")), hall.expected(frozenset("a")))
    with pytest.raises(Refused):
        hall.take("b", parcel("b"), hall.expected(frozenset("b")))


@pytest.mark.parametrize(
    "told",
    [10**400, -(10**400), "1", None, [1.0], float("nan"), float("inf"), {}, 1e308],
    ids=lambda value: str(value)[:8],
)
def test_whatever_is_said_of_accuracy_ends_nothing(told: Any, tmp_path: Path) -> None:
    hall = small(tmp_path)
    hall.take(
        "a", with_header(**{"accuracy.head": told})(parcel("a")), hall.expected(frozenset("a"))
    )
    hall.close_round()
    hall.save()
    hall.load()
    assert all(0 <= value <= 1 for value in hall.seats["a"].accuracy.values())


def test_accuracies_do_not_fill_the_state(tmp_path: Path) -> None:
    hall = small(tmp_path)
    told = {f"accuracy.{'w' * 1000}{number}": 0.5 for number in range(2000)}
    hall.take("a", with_header(**told)(parcel("a")), hall.expected(frozenset("a")))
    hall.close_round()
    hall.save()
    assert hall.path.stat().st_size < 100_000


def test_new_classes_have_an_end(tmp_path: Path) -> None:
    """One member must not make the vocabulary grow by as many classes as it may speak of in every round."""
    hall = small(tmp_path, new_classes=True, max_classes=50)
    for number in range(1, 11):
        try:
            names = [f"{number}-{each}" for each in range(50)]
            sent = of_names(names)(parcel("a", number))
            hall.take("a", sent, hall.expected(frozenset("a")))
        except Refused:
            hall.take("b", parcel("b", number), hall.expected(frozenset("b")))
        hall.close_round()
    assert len(hall.classes) <= 3 + 3 * 50


@pytest.mark.parametrize("by_weight", ["fedavg", "fedper"])
def test_weights_are_checked_like_prototypes(by_weight: str, world: Any) -> None:
    place = world(by_weight, names="ab", quorum=2, rounds=1)
    hall = place.hall()
    good = answer(hall.invite("a"), place.members["a"])
    expected = hall.expected(frozenset("a"))
    check("a", good, expected)
    first = next(name for name in good.arrays if name.startswith("value."))
    wrong: dict[str, Callable[[np.ndarray], Any]] = {
        first: lambda v: v.reshape(-1),
        WEIGHT: lambda v: v[None],
    }
    for name, change in wrong.items():
        with pytest.raises(Refused):
            check("a", with_array(name, change)(good), expected)
    for value in (np.nan, np.inf, 1e30):
        with pytest.raises(Refused):
            check("a", with_array(first, at(..., value))(good), expected)
        with pytest.raises(Refused):
            check("a", with_array(WEIGHT, at(..., value))(good), expected)
    for value in (0, -1, 1e9):
        with pytest.raises(Refused):
            check("a", with_array(WEIGHT, at(..., value))(good), expected)
    with pytest.raises(Refused):
        check(
            "a",
            Message(good.header, {n: v for n, v in good.arrays.items() if n != first}),
            expected,
        )


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(
        st.one_of(
            st.none(),
            st.integers(0, 3),
            st.sampled_from(["x", "y", "z", "w", ""]),
            st.text(max_size=3),
        ),
        max_size=4,
    ),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
NUMBERS = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1e-45, 1e-38, 1.0, 3e38]))
KINDS = st.sampled_from(
    ["f2", "f4", "f8", ">f4", ">f8", "longdouble", "i4", "u1", "?", "c8", "U3", "O"]
)


@st.composite
def corruptions(draw: st.DrawFn) -> Callable[[Message], Message]:
    what = draw(st.sampled_from(["header", "value", "kind", "shape", "drop", "extra"]))
    if what == "header":
        key = draw(
            st.sampled_from(["member", "round", "spoken", "error?", "accuracy.head", "loss.x"])
        )
        value = draw(ANY)
        return lambda p: Message(p.header | {key: value}, p.arrays)
    name = draw(st.sampled_from([SUMS, WEIGHT]))
    if what == "value":
        number, place = draw(NUMBERS), draw(st.integers(0, 1))
        return with_array(name, at(place, number))
    if what == "kind":
        kind = draw(KINDS)
        return with_array(name, lambda v: v.astype(kind))
    if what == "shape":
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        return with_array(
            name,
            lambda v: (
                np.resize(v, shape) if np.prod(shape, dtype=int) else np.zeros(shape, v.dtype)
            ),
        )
    if what == "drop":
        return lambda p: Message(p.header, {n: v for n, v in p.arrays.items() if n != name})
    extra = draw(st.text(max_size=8))
    return lambda p: Message(p.header, p.arrays | {extra: p.arrays[name]})


@settings(max_examples=150)
@given(corruptions(), st.booleans())
def test_one_field_changed_is_refused_or_counts_as_what_it_says(
    tmp_path_factory: pytest.TempPathFactory, change: Callable[[Message], Message], new: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "corrupted"
    hall, other = small(folder, new_classes=new), small(folder, new_classes=new)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bad = change(parcel("b"))
        try:
            hall.take("b", bad, hall.expected(frozenset("abc")))
            plain = {
                n: v if n == ROWS else np.ascontiguousarray(v, np.float32)
                for n, v in bad.arrays.items()
            }
            other.take("b", Message(bad.header, plain), other.expected(frozenset("abc")))
        except Refused:
            assert "b" not in hall.answers
    for each in (hall, other):
        each.take("a", parcel("a"), each.expected(frozenset("a")))
        each.close_round()
    assert equal(hall.server, other.server) and hall.classes == other.classes
    assert all(torch.isfinite(value).all() for value in hall.server.values())


# --- the rounds as a whole: who is bad, silent, late or new


def test_a_bad_member_changes_no_bit_of_a_federation(world: Any) -> None:
    """a and c among answers of b's that are refused in many ways are as if b had been asked and said nothing."""
    kinds = iter(["NaN", "1e30", "negative weight", "another's name"])

    def spoilt(name: str, reply: Message, round: int) -> list[Any]:
        if name != "b":
            return [reply]
        return [
            WRONG[next(kinds)](Message(reply.header, reply.arrays)),
            reply,
            "no parcel",
            Message({"error": "x"}, {}),
        ]

    one, other = world(where="1", quorum=2), world(where="2", quorum=2)
    bad = one.serve(rewrite=spoilt)
    silent = other.serve(heard=lambda name, round: name != "b")
    assert equal(bad.server, silent.server)
    assert (bad.seats["b"].refused, bad.seats["b"].failed, bad.seats["b"].last_round) == (12, 4, 0)
    assert (silent.seats["b"].refused, silent.seats["b"].failed) == (0, 0)


def test_an_answer_of_nobody_we_know_ends_nothing(world: Any) -> None:
    class Odd(Transport):
        def exchange(
            self, kind: str, parcels: dict[str, Message], timeout: float
        ) -> Iterator[tuple[str, Any, int]]:
            yield "stranger", parcel("stranger"), 10
            yield from super().exchange(kind, parcels, timeout)

    place = world(rounds=1)
    hall = place.hall()
    serve(hall, Odd(place.members, hall), place.said.append)
    assert hall.round == 1 and "stranger" not in hall.seats


def test_a_round_without_answers_is_not_counted_and_can_be_had_again(world: Any) -> None:
    place, whole = world(rounds=2), world(rounds=2, where="whole")
    with pytest.raises(
        TrainingError, match="round 2: 0 answers counted; a, b, c did not answer, and 3 are wanted"
    ):
        place.serve(heard=lambda name, round: round == 1)
    assert place.hall().round == 1
    assert equal(place.serve().server, whole.serve().server)


def test_without_a_quorum_no_round_begins(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    place = world(patience=0.01)
    hall = place.hall()
    with pytest.raises(TrainingError, match="2 members are there, and 3 are wanted"):
        place.serve(hall, there=lambda name, round: name != "b")
    assert hall.round == 0 and not hall.seats


def test_one_member_that_is_there_twice_is_no_quorum_of_two(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    place = world(names="a", quorum=2, patience=0.01)
    hall = place.hall()
    post = Transport(place.members, hall)
    post.present = lambda: ["a", "a"]  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="1 members"):
        serve(hall, post, place.said.append)


def test_a_quorum_is_waited_for(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    monkeypatch.setattr(round_protocol.time, "sleep", looks.append)
    hall = world(rounds=1).serve(there=lambda name, round: name != "b" or len(looks) >= 2)
    assert hall.round == 1 and len(looks) >= 2 and set(hall.seats) == set("abc")


def test_only_the_members_named_take_part(world: Any) -> None:
    place = world(members="a, c", quorum=2, rounds=2)
    hall = place.serve()
    assert set(hall.seats) == {"a", "c"} and set(hall.uploads) == {"a", "c"}


def test_who_is_no_member_any_more_is_sent_nothing(world: Any) -> None:
    place = world(rounds=1)
    place.serve()
    hall = place.hall(rounds=2, members="a,c", quorum=2)
    post = Transport(place.members, hall)
    serve(hall, post, place.said.append)
    assert {name for name, _ in post.invitations} == {"a", "c"}


@pytest.mark.parametrize("absent", ["remember", "drop"])
def test_who_is_silent_counts_with_its_last_upload_or_not(absent: str, world: Any) -> None:
    """b alone speaks of 3; a and c of 2 and 4, too, of which b's word counts only where it is remembered."""
    place = world(f"fedproto(absent={absent})", rounds=2, quorum=2)
    hall = place.serve(heard=lambda name, round: name != "b" or round == 1)
    assert hall.seats["b"].last_round == 1 and hall.seats["a"].last_round == 2
    uploads = {
        name: over(hall.uploads[name], hall.seats[name].spoken, hall.classes) for name in "abc"
    }
    speakers = "abc" if absent == "remember" else "ac"
    sums = torch.stack([uploads[name].sums["prototypes"] for name in speakers]).sum(0)
    weight = torch.stack([uploads[name].weights["weight"] for name in speakers]).sum(0)
    for row in (0, 1, 2, 4, 5):
        torch.testing.assert_close(hall.server["prototypes"][row], sums[row] / weight[row])
    three = uploads["b"].sums["prototypes"][3] / uploads["b"].weights["weight"][3]
    torch.testing.assert_close(hall.server["prototypes"][3], three)
    assert hall.server["known"].all()


@pytest.mark.parametrize("absent", ["remember", "drop"])
def test_who_comes_back_goes_on_from_where_it_was(absent: str, world: Any) -> None:
    place = world(f"fedproto(absent={absent})", rounds=4, quorum=2)
    hall = place.serve(there=lambda name, round: name != "b" or round in (1, 4))
    assert [hall.seats[n].last_round for n in "abc"] == [4, 4, 4]
    assert [hall.seats[n].number for n in "abc"] == [0, 1, 2]
    assert all(seat.refused == 0 for seat in hall.seats.values())


def test_who_answered_too_late_counts_in_the_next_round(world: Any) -> None:
    hall = world(rounds=3, quorum=2).serve(heard=lambda name, round: name != "b" or round != 2)
    assert hall.seats["b"].last_round == 3 and hall.seats["b"].refused == 0


def test_a_newcomer_brings_a_class_where_new_ones_are_welcome(world: Any) -> None:
    place = world(names="abcd", rounds=4, new_classes=True)
    hall = place.serve(there=lambda name, round: name != "d" or round >= 3)
    assert (
        hall.classes == tuple("0123456")
        and hall.server["known"].all()
        and hall.seats["d"].number == 3
    )
    assert hall.seats["d"].last_round == 4 and hall.server["prototypes"].shape == (7, DIM)
    heads = load_file(Path(place.members["a"].state) / MEMBER_STATE)
    assert any(name.startswith("state.head.") and len(value) == 7 for name, value in heads.items())


def test_a_newcomer_with_a_new_class_is_refused_where_they_are_not_welcome(world: Any) -> None:
    place, without = world(names="abcd", rounds=4), world(rounds=4, where="without")
    hall = place.serve(there=lambda name, round: name != "d" or round >= 3)
    assert (
        hall.classes == tuple("012345")
        and hall.seats["d"].refused == 2
        and "'6'" in hall.seats["d"].reason
    )
    assert equal(hall.server, without.serve().server)


# --- the hall's file


@pytest.mark.parametrize(
    "algorithm", ["fedproto", "fedproto(weighting=eq6,absent=drop)", "fedavg", "fedrep"]
)
def test_a_server_started_anew_after_every_round_is_the_same(algorithm: str, world: Any) -> None:
    place, whole = world(algorithm, rounds=3), world(algorithm, rounds=3, where="whole")
    for number in (1, 2, 3):
        hall = place.serve(place.hall(rounds=number))
        again = place.hall()
        assert (
            equal(hall.server, again.server)
            and hall.classes == again.classes
            and hall.round == again.round
        )
        kept = (
            hall.uploads if hall.algorithm.remembers else {}
        )  # what nobody asks for again is not kept
        assert hall.seats == again.seats and set(kept) == set(again.uploads)
        for name, upload in kept.items():
            assert all(
                equal(mine, theirs)
                for mine, theirs in zip(upload, again.uploads[name], strict=True)
            )
    uninterrupted = whole.serve()
    assert equal(again.server, uninterrupted.server)
    assert {n: s.accuracy for n, s in again.seats.items()} == {
        n: s.accuracy for n, s in uninterrupted.seats.items()
    }


@pytest.mark.parametrize("killed_after", ["b", "c"])
def test_a_server_killed_before_it_kept_the_answers_asks_again(
    killed_after: str, world: Any
) -> None:
    class Killed(BaseException):
        pass

    def kill(name: str, round: int) -> None:
        if (name, round) == (killed_after, 2):
            raise Killed

    place, whole = world(rounds=3), world(rounds=3, where="whole")
    with pytest.raises(Killed):
        place.serve(after=kill)
    assert place.hall().round == 1
    trained = [name for name in "abc" if name <= killed_after]
    before = {
        name: (file_of(place, name).read_bytes(), file_of(place, name).stat().st_mtime_ns)
        for name in trained
    }
    hall, post = place.hall(), Transport(place.members, place.hall())
    round_protocol._round(hall, post, place.said.append)
    for name, found in before.items():
        assert (file_of(place, name).read_bytes(), file_of(place, name).stat().st_mtime_ns) == found
    hall = place.serve()
    assert hall.round == 3 and equal(hall.server, whole.serve().server)


def damaged(path: Path, how: str) -> None:
    tensors = load_file(path)
    if how == "cut off":
        path.write_bytes(path.read_bytes()[:-10])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("hello")
    else:
        of = {"no metadata": None, "no JSON": "{", "a list": "[]", "an empty object": "{}"}[how]
        save_file(tensors, path, None if of is None else {"of": of})


HOW = ["cut off", "empty", "text", "no metadata", "no JSON", "a list", "an empty object"]


def after_a_round(tmp_path: Path) -> ServerState:
    """In which one member spoke."""
    hall = small(tmp_path)
    hall.take("a", parcel("a"), hall.expected(frozenset("a")))
    hall.close_round()
    hall.save()
    return hall


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_state_of_the_server_is_told(how: str, tmp_path: Path) -> None:
    hall = after_a_round(tmp_path)
    damaged(hall.path, how)
    with pytest.raises(FedProtoError, match=STATE):
        small(tmp_path).load()


def test_a_state_with_seats_it_should_not_have_is_told(tmp_path: Path) -> None:
    hall = after_a_round(tmp_path)
    tensors, header = read_state(hall.path)
    write_tensors(hall.path, tensors, FORMAT, header | {"seats": {"a": {"nonsense": 1}}})
    with pytest.raises(FedProtoError, match=f"{STATE} is damaged"):
        small(tmp_path).load()


def test_a_state_of_another_algorithm_is_told(tmp_path: Path) -> None:
    after_a_round(tmp_path)
    for other in ("fedproto(lam=0.5)", "fedproto(absent=drop)"):
        with pytest.raises(RunFolderError, match="name another state"):
            small(tmp_path, other).load()


def test_a_state_with_prototypes_of_another_size_is_told(tmp_path: Path) -> None:
    hall = after_a_round(tmp_path)
    with pytest.raises(FedProtoError, match=STATE):
        ServerState(hall.settings, replace(hall.terms, dim=5)).load()


@pytest.mark.parametrize(
    "change", [{"model": "mlp(hidden=9)"}, {"classes": "0,1,2,3,4,5,6"}, {"shape": "1,9,9"}]
)
def test_a_state_of_another_architecture_is_told(change: dict[str, Any], world: Any) -> None:
    world("fedavg", rounds=1).serve()
    with pytest.raises(FedProtoError, match=STATE):
        world("fedavg", rounds=2, **change).hall()


def test_a_class_may_be_added_to_prototypes_that_are_there(world: Any) -> None:
    world(rounds=1).serve()
    hall = world(rounds=2, names="abcd", classes="6,0,1,2,3,4,5").serve()
    assert hall.classes == tuple("0123456") and hall.server["known"].all()


# --- a member


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("two rounds") / "w"
    World(folder, files["folder"], options={"rounds": 2}).serve()
    return folder


@pytest.fixture
def asked(two_rounds: Path, world: Any) -> tuple[World, ServerState]:
    """After two rounds, with a hall that asks for the third."""
    place = world(rounds=2)
    shutil.copytree(two_rounds, place.folder)
    return place, place.hall()


def file_of(place: World, name: str = "a") -> Path:
    return Path(place.members[name].state) / MEMBER_STATE


def test_the_same_round_is_answered_from_the_file(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, hall = asked
    invitation = hall.invite("a")
    first = answer(invitation, place.members["a"])
    content = file_of(place).read_bytes()
    monkeypatch.setattr(
        "fedproto.deploy.member.train", lambda *_: pytest.fail("it was trained again")
    )
    second = answer(invitation, place.members["a"])
    assert json.dumps(first.header, sort_keys=True) == json.dumps(second.header, sort_keys=True)
    assert set(first.arrays) == set(second.arrays)
    for name, value in first.arrays.items():
        assert value.dtype == second.arrays[name].dtype and np.array_equal(
            value, second.arrays[name]
        )
    assert file_of(place).read_bytes() == content


def test_scoring_changes_nothing(asked: Any) -> None:
    place, hall = asked
    before = file_of(place).read_bytes()
    told = scored(hall.invite("a", whole=True), place.members["a"])
    assert told.arrays == {} and {"accuracy.head", "accuracy.prototype"} <= set(told.header)
    assert file_of(place).read_bytes() == before


def test_who_does_not_tell_its_accuracy_does_not(asked: Any) -> None:
    place, hall = asked
    quiet = replace(place.members["a"], tell_accuracy=False)
    for reply in (scored(hall.invite("a"), quiet), answer(hall.invite("a"), quiet)):
        assert not [key for key in reply.header if key.startswith("accuracy")]


def test_an_older_round_is_refused(asked: Any) -> None:
    place, hall = asked
    old = with_header(round=1)(hall.invite("a"))
    before = file_of(place).read_bytes()
    with pytest.raises(RunFolderError, match=r"round 2.*round 1"):
        answer(old, place.members["a"])
    assert file_of(place).read_bytes() == before


@pytest.mark.parametrize(
    "change", [{"name": "z"}, {"model": "mlp(hidden=9)"}, {"classes": "0,1"}, {"data": "digits"}]
)
def test_a_member_that_is_another_is_refused(change: dict[str, str], asked: Any) -> None:
    place, hall = asked
    for act in (answer, scored):
        with pytest.raises(RunFolderError, match="another member"):
            act(hall.invite("a"), replace(place.members["a"], **change))


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_state_of_a_member_is_told(how: str, asked: Any) -> None:
    place, hall = asked
    damaged(file_of(place), how)
    with pytest.raises(FedProtoError, match=MEMBER_STATE):
        answer(hall.invite("a"), place.members["a"])


def test_rows_of_a_head_stay_with_their_names(asked: Any) -> None:
    """The server's classes grow, and come in another order: the member's own rows are where their names are now."""
    from fedproto.deploy.member import MemberCheckpoint, _seated, _terms

    place, hall = asked
    own = place.members["a"]
    kept = MemberCheckpoint.load(file_of(place), own.fingerprint())
    assert kept is not None and kept.classes == tuple("012345")
    invitation = with_header(classes=["6", *"543210"])(hall.invite("a", whole=True))
    seat = _seated(invitation, own, _terms(invitation.header), kept)
    heads = [name for name in kept.state if name.startswith("head.")]
    assert heads and seat.federation.classes == ("6", *"543210")
    for name in heads:
        assert torch.equal(seat.state[name][1:], kept.state[name].flip(0))
        assert torch.equal(seat.state[name][0], seat.member.initial[name][0])
    for name, value in kept.state.items():
        assert name in heads or torch.equal(seat.state[name], value)
    assert torch.equal(seat.server["prototypes"][1:], hall.server["prototypes"].flip(0))


BAD_MESSAGES: dict[str, Callable[[Message], Message]] = {
    **{
        f"no {key}": with_header(**{key: None})
        for key in ("round", "number", "classes", "algorithm", "dim", "lr", "seed")
    },
    "round as text": with_header(round="3"),
    "round as truth": with_header(round=True),
    "round below 0": with_header(round=-4),
    "number below 0": with_header(number=-1),
    "number of many digits": with_header(number=10**30),
    "round of many digits": with_header(round=10**30),
    "classes as text": with_header(classes="012345"),
    "classes as numbers": with_header(classes=[0, 1, 2]),
    "classes as lists": with_header(classes=[["0"], ["1"]]),
    "a class with a control character": with_header(classes=[*"012345", "\x1b[2J"], known=[]),
    "a class twice": with_header(classes=[*"012345", "0"]),
    "fewer classes than before": with_header(classes=["0"], known=["0"]),
    "known that is no class": with_header(known=["0", "1", "w"]),
    "known twice": with_header(known=["0", "1", "0"]),
    "known too few": with_header(known=["0"]),
    "known missing": with_header(known=None),
    "known as number": with_header(known=5),
    "known as lists": with_header(known=[["0"]] * 3),
    "no arrays": lambda p: Message(p.header, {}),
    "another array": lambda p: Message(p.header, {"other": p.arrays[SUMS]}),
    "NaN": with_array(SUMS, at((0, 0), np.nan)),
    "infinite": with_array(SUMS, at((0, 0), np.inf)),
    "too wide": with_array(SUMS, lambda v: np.ones((len(v), DIM + 1), np.float32)),
    "flat": with_array(SUMS, lambda v: v.reshape(-1)),
    "one number": with_array(SUMS, lambda v: np.array(1.0, np.float32)),
    "an axis too many": with_array(SUMS, lambda v: v[None]),
    "texts": with_array(SUMS, lambda v: v.astype("U8")),
    "objects": with_array(SUMS, lambda v: v.astype(object)),
    "negative lr": with_header(lr=-1.0),
    "batch as text": with_header(batch="many"),
    "unknown algorithm": with_header(algorithm="fedprot"),
    "algorithm as number": with_header(algorithm=5),
    "two algorithms": with_header(algorithm="fedproto,fedavg"),
    "an algorithm of whole federations": with_header(algorithm="fesem"),
    "other dim": with_header(dim=DIM + 1),
    "no dim": with_header(dim=-1),
}


@pytest.mark.parametrize("bad", BAD_MESSAGES)
def test_a_bad_message_is_an_error_for_people_and_changes_nothing(bad: str, asked: Any) -> None:
    place, hall = asked
    before = file_of(place).read_bytes()
    with pytest.raises(FedProtoError):
        answer(BAD_MESSAGES[bad](hall.invite("a")), place.members["a"])
    assert file_of(place).read_bytes() == before


@pytest.mark.parametrize("change", ["flat", "missing", "NaN", "texts"])
def test_bad_weights_from_the_server_are_an_error_for_people(change: str, world: Any) -> None:
    place = world("fedavg", rounds=1)
    invitation = place.serve().invite("a")
    name = next(iter(invitation.arrays))
    bad = {
        "flat": with_array(name, lambda v: v.reshape(-1)),
        "missing": lambda p: Message(p.header, {n: v for n, v in p.arrays.items() if n != name}),
        "NaN": with_array(name, at(..., np.nan)),
        "texts": with_array(name, lambda v: v.astype("U8")),
    }[change]
    with pytest.raises(FedProtoError):
        answer(bad(invitation), place.members["a"])


def test_a_member_imports_nothing_because_a_server_says_so(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method of somebody's own is named by a module, whose code runs where it is named."""
    place, hall = asked
    trace = tmp_path / "it ran"
    (tmp_path / "strange_module.py").write_text(
        f"from pathlib import Path\nPath({str(trace)!r}).touch()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FedProtoError):
        answer(with_header(algorithm="strange_module:run")(hall.invite("a")), place.members["a"])
    assert not trace.exists()


def test_training_that_breaks_down_is_told_and_not_kept(world: Any) -> None:
    place = world(rounds=1)
    hall = place.hall()
    wild = with_header(lr=1e30)(hall.invite("a"))
    with pytest.raises(TrainingError, match="not finite"):
        answer(wild, place.members["a"])
    assert not file_of(place).exists()


# --- a member's file


MEMBER = 'name = "a"\ndata = "npz:a.npz"\nstate = "mine"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "a.toml"
    path.write_text(text)
    return path


def test_paths_of_a_member_are_seen_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = read_member(
        written(tmp_path, MEMBER + 'weights = "w.safetensors"\ndata_dir = "/data"\n')
    )
    assert (found.state, found.weights, found.data_dir) == (
        str(tmp_path / "mine"),
        str(tmp_path / "w.safetensors"),
        "/data",
    )
    monkeypatch.chdir(tmp_path)
    assert read_member(Path("a.toml")).state == str(tmp_path / "mine")


def test_a_hyphen_in_a_key_is_seen_from_its_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_member(written(tmp_path, MEMBER + 'data-dir = "d"\n')).data_dir == str(
        tmp_path / "d"
    )


def test_data_of_a_member_is_seen_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Any], world: Any
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a.npz").write_bytes((files["folder"] / "a.npz").read_bytes())
    monkeypatch.chdir(tmp_path / "elsewhere")
    own = read_member(written(tmp_path, MEMBER + 'model = "mlp(hidden=5)"\n'))
    assert answer(world().hall().invite("a"), own).header["spoken"] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MEMBER + 'modle = "mlp"\n', "model"),
        ('name = "a"\ndata = "digits"\n', "state"),
        ('data = "digits"\nstate = "s"\n', "name"),
        (MEMBER + "threads = 0\n", "threads"),
        (MEMBER + 'device = "tpu"\n', "device"),
        (MEMBER + "tell_accuracy = 3\n", "tell_accuracy"),
        (MEMBER.replace('"mine"', "5"), "state"),
        (MEMBER.replace('"a"', "5"), "name"),
        (MEMBER.replace('"a"', '""'), "name"),
        (MEMBER + "[table]\nx = 1\n", "table"),
        ("name = ", "TOML"),
    ],
)
def test_a_member_file_that_is_wrong_is_told(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        read_member(written(tmp_path, text))


def test_a_member_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_member(tmp_path / "a.toml")


def test_settings_are_divided_and_checked() -> None:
    mine, theirs = divided(
        {"new-classes": True, "rounds": 3, "last-batch": "drop", "lr": 0.1}, "here"
    )
    assert (
        mine.new_classes and mine.rounds == 3 and theirs.last_batch == "drop" and theirs.lr == 0.1
    )
    for bad, says in (
        ({"round": 3}, "rounds"),
        ({"rounds": 0}, "rounds"),
        ({"lr": 0}, "lr"),
        ({"quorum": "x"}, "quorum"),
    ):
        with pytest.raises(ConfigError, match=says):
            divided(bad, "here")


# --- parcels, and Flower's records


def test_a_servers_state_comes_back_as_it_was(asked: Any) -> None:
    _, hall = asked
    like = {name: torch.zeros_like(value) for name, value in hall.server.items()}
    assert equal(to_server(of_server(hall.server, hall.classes), hall.classes, like), hall.server)
    nobody = {name: torch.zeros_like(value) for name, value in hall.server.items()}
    assert of_server(nobody, hall.classes).arrays == {}, "what holds nothing is not sent"
    assert equal(to_server(of_server(nobody, hall.classes), hall.classes, like), nobody)


def test_an_upload_comes_back_as_it_was() -> None:
    sent = parcel("a", spoken=("z", "x"))
    placed = over(to_upload(sent), ["z", "x"], ("x", "y", "z"))
    assert placed.weights["weight"].tolist() == [sent.arrays[WEIGHT][1], 0, sent.arrays[WEIGHT][0]]
    back = of_upload(placed, ("x", "y", "z"))
    assert back.header["spoken"] == ["x", "z"]
    assert np.array_equal(back.arrays[SUMS], sent.arrays[SUMS][::-1])


@pytest.mark.parametrize(
    "sent",
    [
        Message({}, {}),
        Message(
            {"known": [], "n": 1, "x": 1.5, "word": "Äß\n", "none": None, "yes": True},
            {"empty": np.zeros((0, 4), np.float32)},
        ),
        Message(
            {"spoken": ["a", ""]},
            {"one": np.array(3.0, np.float32), "f8": np.ones((2, 3)), "f2": np.ones(2, "f2")},
        ),
    ],
)
def test_records_carry_parcels(sent: Message) -> None:
    pytest.importorskip("flwr")
    from fedproto.deploy.flower_transport import from_record, size, to_record

    back = from_record(to_record(sent))
    assert back.header == sent.header and set(back.arrays) == set(sent.arrays)
    for name, value in sent.arrays.items():
        assert back.arrays[name].dtype == value.dtype and back.arrays[name].shape == value.shape
        assert np.array_equal(back.arrays[name], value)
    assert size(to_record(sent)) >= sum(value.nbytes for value in sent.arrays.values())


def hostile_records() -> dict[str, Any]:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from fedproto.deploy.flower_transport import LONGEST_HEADER

    def record(text: Any = "{}", arrays: Any = None) -> Any:
        found = {"header": ConfigRecord({"json": text})} if text is not None else {}
        return RecordDict(found | {"arrays": ArrayRecord() if arrays is None else arrays})

    def array(data: bytes, kind: str = "safetensors") -> Any:
        return ArrayRecord({"payload": Array("uint8", (len(data),), kind, data)})

    good = codec.encode({"x": np.ones(4, np.float32)})
    half = save_tensors({"x": torch.ones(4, dtype=torch.bfloat16)})
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    long = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}' + b" " * 2**20 + b"}"
    one = Array("uint8", (len(good),), "safetensors", good)
    return {
        "no header": record(None),
        "nothing": RecordDict({}),
        "no arrays": RecordDict({"header": ConfigRecord({"json": "{}"})}),
        "header of another name": RecordDict(
            {"header": ConfigRecord({"text": "{}"}), "arrays": ArrayRecord()}
        ),
        "header as arrays": RecordDict({"header": ArrayRecord(), "arrays": ArrayRecord()}),
        "arrays as header": RecordDict(
            {"header": ConfigRecord({"json": "{}"}), "arrays": ConfigRecord({"x": 1})}
        ),
        "no JSON": record("{"),
        "a list": record("[]"),
        "a number": record("1"),
        "bytes": record(b"{}"),
        "a number for a text": record(1),
        "huge": record('{"x": "' + "w" * LONGEST_HEADER + '"}'),
        "deep": record('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        "a number of many digits": record('{"x": 1' + "0" * 5000 + "}"),
        "no array": record(arrays=array(b"")),
        "noise": record(arrays=array(b"\x00" * 100)),
        "cut off": record(arrays=array(good[:-4])),
        "more than it says": record(arrays=array(good + b"1234")),
        "half floats": record(arrays=array(half)),
        "a long description": record(
            arrays=array(len(long).to_bytes(8, "little") + long + b"1234")
        ),
        "a description without end": record(arrays=array(b"\xff" * 8 + good[8:])),
        "pickled": record(arrays=array(pickled.getvalue())),
        "two payloads": record(arrays=ArrayRecord({"payload": one, "more": one})),
        "another name": record(arrays=ArrayRecord({"x": one})),
        "another kind": record(arrays=array(good, "numpy.ndarray")),
    }


def test_hostile_records_are_refused() -> None:
    pytest.importorskip("flwr")
    from fedproto.deploy.flower_transport import from_record

    believed, raised = [], {}
    for name, record in hostile_records().items():
        try:
            from_record(record)
            believed.append(name)
        except Refused:
            pass
        except BaseException as error:
            raised[name] = repr(error)
    assert (believed, raised) == ([], {})


# --- the server's mail


def as_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only where it has started the app."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(f"flwr.supercore.task_identity.TaskIdentity.{name}", 1)


def flower_post(members: dict[int, tuple[str, str]], registered: set[str] | None = None) -> Any:
    """FlowerPost over a grid in this process. `members`: node -> the name it is registered as, and the one it says."""
    from types import SimpleNamespace

    from fedproto.deploy.flower_transport import FlowerTransport, from_record, to_record

    class Grid:
        def __init__(self) -> None:
            self.said: dict[str, Any] = {}

        def get_nodes(self) -> list[Any]:
            return [
                SimpleNamespace(node_id=n, name=r, status="online") for n, (r, _) in members.items()
            ]

        def push_messages(self, messages: list[Any]) -> list[str]:
            ids = []
            for message in messages:
                ids.append(f"m{len(self.said)}")
                node = message.metadata.dst_node_id
                told = Message(
                    {"member": members[node][1]} | from_record(message.content).header, {}
                )
                metadata = SimpleNamespace(reply_to_message_id=ids[-1], src_node_id=node)
                self.said[ids[-1]] = SimpleNamespace(
                    metadata=metadata,
                    content=to_record(told),
                    has_content=lambda: True,
                    has_error=lambda: False,
                )
            return ids

        def pull_messages(self, ids: list[str]) -> list[Any]:
            return [self.said[each] for each in ids]

    return FlowerTransport(Grid(), registered)  # type: ignore[arg-type]


def test_members_are_called_what_they_are_registered_as(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    as_a_task(monkeypatch)
    post = flower_post({1: ("a", "liar"), 2: ("", "b"), 3: ("", "a"), 4: ("", "b"), 5: ("", "")})
    assert sorted(post.present()) == ["a", "b"]
    found = {
        name: reply.header["x"]
        for name, reply, _ in post.exchange("train", {n: Message({"x": n}, {}) for n in "ab"}, 1)
    }
    assert (
        found == {"a": "a", "b": "b"}
        and set(post.sent()) == {"a", "b"}
        and min(post.sent().values()) > 0
    )


def test_a_member_without_a_key_that_was_started_anew_is_known_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flower gives it another number; the one it had is gone."""
    pytest.importorskip("flwr")
    as_a_task(monkeypatch)
    nodes = {1: ("", "a"), 2: ("", "b")}
    post = flower_post(nodes)
    assert sorted(post.present()) == ["a", "b"]
    del nodes[1]
    assert post.present() == ["b"]
    nodes[9] = ("", "a")
    assert sorted(post.present()) == ["a", "b"]
    assert [name for name, _, _ in post.exchange("train", {"a": Message({}, {})}, 1)] == ["a"]


# --- a folder to start from


def test_init_writes_a_federation_that_passes_its_own_checks(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "fed"
    scaffold.init(folder, ["a", "b-1", "c.d"], "digits", list("0123456789"))
    assert {path.name for path in folder.iterdir()} == {
        *(
            "admit.sh",
            "env.sh",
            "keys.py",
            "member.sh",
            "run.sh",
            "server.sh",
            "pyproject.toml",
            ".gitignore",
            "README.md",
        ),
        *("a.toml", "b-1.toml", "c.d.toml"),
    }
    for path in filter(Path.is_file, folder.rglob("*")):
        assert os.access(path, os.X_OK) == (path.suffix == ".sh") or path.name == "env.sh", path
        assert "@" not in path.read_text().replace('"$@"', "").replace("@app", ""), path
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    mine, theirs = divided(config, "here")
    assert (
        mine.members == "a,b-1,c.d"
        and mine.state == str(folder / "server")
        and theirs == TrainingTerms()
    )
    hall = ServerState(mine, theirs)
    assert hall.classes == tuple("0123456789")
    own = [read_member(folder / f"{name}.toml") for name in ("a", "b-1", "c.d")]
    assert [each.name for each in own] == ["a", "b-1", "c.d"]
    assert {name for each in own for name in each.classes.split(",")} == set("0123456789")
    assert all(each.state == str(folder / f"state-{each.name}") for each in own)


def test_a_federation_from_the_template_trains(tmp_path: Path) -> None:
    scaffold.init(tmp_path / "fed", ["a", "b"], "digits", list("0123456789"))
    config = tomllib.loads((tmp_path / "fed" / "pyproject.toml").read_text())["tool"]["flwr"][
        "app"
    ]["config"]
    hall = ServerState(*divided(config | {"rounds": 1}, "here"))
    own = {name: read_member(tmp_path / "fed" / f"{name}.toml") for name in "ab"}
    serve(hall, Transport(own, hall), lambda sentence: None)
    assert hall.round == 1 and hall.server["known"].all()


@pytest.mark.parametrize(
    "members",
    [
        [],
        ["a"],
        ["a", "a"],
        ["a", ""],
        ["a", ".b"],
        ["a", "b/c"],
        ["a", "b c"],
        ["a", "b\n"],
        ["a", "ä"],
        ["a", "b" * 65],
    ],
)
def test_init_refuses_members(members: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        scaffold.init(tmp_path / "fed", members, "digits", ["0", "1"])
    assert not (tmp_path / "fed").exists() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["ca.crt", "server.key", "server.pem", "a.pub"])
def test_init_refuses_names_of_keys_that_are_others(name: str, tmp_path: Path) -> None:
    """`keys/ca.crt` would be its key."""
    with pytest.raises(ConfigError):
        scaffold.init(tmp_path / "fed", ["a", name], "digits", ["0", "1"])


def test_init_leaves_a_folder_that_is_in_use_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="not empty"):
            scaffold.init(folder, ["a", "b"], "digits", ["0", "1"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    scaffold.init(tmp_path / "empty", ["a", "b"], "digits", ["0", "1"])


def test_init_in_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/fed cannot be made: .*; name another folder"):
        scaffold.init(tmp_path / "file" / "fed", ["a", "b"], "digits", ["0", "1"])


@pytest.mark.parametrize(
    ("folder", "data", "name"),
    [
        ("f", 'csv:my "own".csv', "0"),
        ("f", "folder:C:\\new\\scans", "0"),
        ("f", "digits", 'a"b'),
        ("f", "digits", "a\\b"),
        ("f", "digits", "a,b"),
        ("f", "digits", "@CLASSES@"),
        ('f"', "digits", "0"),
        ("f\\1", "digits", "0"),
    ],
)
def test_init_writes_any_path_and_class_or_refuses_it(
    folder: str, data: str, name: str, tmp_path: Path
) -> None:
    made = tmp_path / folder
    try:
        scaffold.init(made, ["a", "b"], data, [name, "1", "2"])
    except ConfigError:
        return
    config = tomllib.loads((made / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert divided(config, "here")[0].classes.split(",") == [name, "1", "2"]
    assert read_member(made / "a.toml").data == data
    assert config["state"] == str(made / "server")


def test_a_seat_is_plain_values() -> None:
    """So that it is one object in the state's metadata."""
    assert MemberRecord(**json.loads(json.dumps(vars(MemberRecord(3))))) == MemberRecord(3)


def test_two_runs_do_not_work_on_one_state(world: Any) -> None:
    place = world(patience=0.01)
    first, second = place.hall(), place.hall()
    with (
        first.alone(),
        pytest.raises(RunFolderError, match=f"in use by process {os.getpid()} on "),
        second.alone(),
    ):
        pass
    with second.alone():
        pass


@pytest.mark.parametrize("weighting", ["samples", "uniform", "eq6"])
def test_who_is_struck_off_the_members_leaves_exactly(world: Any, weighting: str) -> None:
    """The prototypes are those of the uploads that remain, and a class that nobody else holds has none."""
    place = world(f"fedproto(weighting={weighting})", rounds=2, quorum=2)
    of_c = set(place.serve().seats["c"].spoken)
    hall = place.hall(rounds=3, members="a, b")
    place.serve(hall)
    rest = [over(hall.uploads[name], hall.seats[name].spoken, hall.classes) for name in "ab"]
    before = {
        "prototypes": torch.zeros_like(hall.server["prototypes"]),
        "known": torch.zeros(len(hall.classes)),
    }
    assert equal(hall.server, hall.algorithm.aggregate(before, stack_uploads(rest)))
    alone = of_c - {name for each in "ab" for name in hall.seats[each].spoken}
    assert alone and all(hall.server["known"][hall.classes.index(name)] == 0 for name in alone)


def test_flower_is_handed_nothing_but_the_settings(tmp_path: Path) -> None:
    """Not the members' files, nor keys, which lie in the same folder."""
    build = pytest.importorskip("flwr.cli.build")
    folder = tmp_path / "fed"
    scaffold.init(folder, ["a", "b"], "digits", ["0", "1"])
    (folder / "keys").mkdir()
    for name in ("keys/secret.json", "notes.md", "state-a.json"):
        (folder / name).write_text("secret")
    packed = build.build_fab_from_disk(folder)
    names = zipfile.ZipFile(io.BytesIO(packed)).namelist()
    assert "pyproject.toml" in names and all(
        name == "pyproject.toml" or name.startswith(".info") for name in names
    )
