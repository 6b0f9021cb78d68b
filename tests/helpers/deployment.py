"""Deployed federations without Flower: a server's state, members in this process, odd replies."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedproto.core.tensors import flatten_state, unflatten_state
from fedproto.core.types import State, Tree
from fedproto.deploy.error_codes import describe_error
from fedproto.deploy.member import evaluate_member, train_round
from fedproto.deploy.member_checkpoint import STATE_FILE as MEMBER_FILE
from fedproto.deploy.messages import SECURE_SUM, Message, unpack_upload
from fedproto.deploy.round_protocol import serve
from fedproto.deploy.secure_stages import take_stage
from fedproto.deploy.server_actions import Reply
from fedproto.deploy.server_state import (
    ServerState,
)
from fedproto.deploy.settings import (
    MemberSettings,
    ServerSettings,
    TrainingTerms,
)
from fedproto.deploy.validation import ExpectedReply, check_reply, check_upload
from fedproto.errors import FedProtoError
from fedproto.runs.api import _begin
from fedproto.runs.execution import proceed

HELD = {"a": "012", "b": "234", "c": "450", "d": "16"}


MIXED = {"a": "mlp(hidden=30)", "b": "mlp(hidden=20)", "c": "mlp(hidden=25)", "d": "mlp(hidden=10)"}


EQUAL = dict.fromkeys(HELD, "mlp(hidden=20)")


WEIGHTS = (
    "fedavg",
    "fedprox",
    "fedper",
    "fedrep",
    "lg-fedavg",
    "fedavgm",
    "fedadam",
    "scaffold",
    "ditto",
    "moon",
    "feddyn",
    "fednh",
    "fedgh",
    "fedre",
    "fedblend",
)
#: What members must be willing to send, where that is not weights or prototypes alone.
SENT_KINDS = {
    "fednh": "weights,prototypes,counts",
    "fedblend": "weights,prototypes,counts",
    "fedgh": "prototypes,counts",
}


DIM = 12


SUMS = "prototypes/value.prototypes"
WEIGHT = "prototypes/extra.weight"
ROWS = "prototypes/extra.rows"
HOLDERS = "prototypes/extra.holders"
MODEL_WEIGHT = "model/extra.weight"
RECEIVED = "value.prototypes"  # in a request


@dataclass
class Deployment:
    """A server and its members in a folder; a test chooses the transport between them."""

    folder: Path
    data: Path
    algorithm: str = "fedproto"
    names: str = "abc"
    options: dict[str, Any] = field(default_factory=dict)
    terms: TrainingTerms = field(init=False)
    members: dict[str, MemberSettings] = field(init=False)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        name = self.algorithm.partition("(")[0]
        by_weight = name in WEIGHTS
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
        sends = SENT_KINDS.get(name, "weights,counts" if by_weight else "prototypes,counts")
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

    def state(self, **changes: Any) -> ServerState:
        state = ServerState(replace(self.settings, **changes), self.terms)
        state.load()
        return state

    def serve(self, state: ServerState | None = None, **transport: Any) -> ServerState:
        state = state or self.state()
        serve(state, LocalTransport(self.members, state, **transport), self.said.append)
        return state


Rewrite = Callable[[str, Message, int], Any]


@dataclass
class LocalTransport:
    """Members in this process: who is `there`, whose reply is `heard`, and how to `rewrite` it."""

    members: dict[str, MemberSettings]
    state: ServerState
    there: Callable[[str, int], bool] = lambda name, round: True
    heard: Callable[[str, int], bool] = lambda name, round: True
    rewrite: Rewrite = lambda name, reply, round: [reply]
    after: Callable[[str, int], None] = lambda name, round: None
    invitations: list[tuple[str, Message]] = field(default_factory=list)
    lateness: dict[str, float] = field(default_factory=dict)
    _sent: dict[str, int] = field(default_factory=dict)

    def take_lateness(self) -> dict[str, float]:
        taken = self.lateness
        self.lateness = {}
        return taken

    def find_members(self) -> list[str]:
        return [name for name in self.members if self.there(name, self.state.round + 1)]

    def sent_bytes(self) -> dict[str, int]:
        return self._sent

    def exchange(self, kind: str, requests: dict[str, Message], timeout: float) -> Iterator[Reply]:
        self._sent = {name: count_message_bytes(request) for name, request in requests.items()}
        for name, request in requests.items():
            round = request.header["round"]
            self.invitations.append((name, request))
            try:
                act = train_round if kind == "train" else evaluate_member
                act = take_stage if SECURE_SUM in request.header else act
                reply = act(request, self.members[name])
            except FedProtoError as error:
                reply = Message(describe_error(error), {})
            if kind == "train" and not self.heard(name, round):
                continue
            for each in self.rewrite(name, reply, round) if kind == "train" else [reply]:
                size = count_message_bytes(each) if isinstance(each, Message) else 100
                yield Reply(name, each, size)
            self.after(name, round)


def count_message_bytes(message: Message) -> int:
    """The bytes of a message whose header is one text."""
    return len(json.dumps(message.header)) + message.count_bytes()


def serve_to(deployment: Deployment, rounds: int, **transport: Any) -> ServerState:
    """Return the state after this many rounds in all."""
    return deployment.serve(deployment.state(rounds=rounds), **transport)


def without_changes(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a history but for changed settings: tests change `rounds` often."""
    return [event for event in history if event["event"] != "settings changed"]


def write_member(own: MemberSettings, path: Path, **changes: str) -> Path:
    """Write a member's TOML file."""
    keys = ("name", "data", "state", "model", "classes", "sends")
    values = {key: getattr(own, key) for key in keys} | changes
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return path


def make_private_deployment(folder: Path, member_files: dict[str, Any]) -> Deployment:
    """A federation of two members that train with private steps."""
    options = {"quorum": 2, "classes": "0,1,2,3,4"}
    deployment = Deployment(folder, member_files["folder"], "fedavg", "ab", options)
    deployment.terms = TrainingTerms(
        algorithm="fedavg", dim=DIM, privacy="training", step_noise=1.5, gradient_clip=0.5
    )
    return deployment


def clone_tree(server: State) -> State:
    flat = {name: value.clone() for name, value in flatten_state(server).items()}
    return unflatten_state(flat)


def trees_equal(one: Tree, other: Tree) -> bool:
    return set(one) == set(other) and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )


def simulate(
    member_files: dict[str, Any],
    algorithm: str,
    models: dict[str, str],
    names: str = "abc",
    count: int = 4,
    **settings: Any,
) -> Any:
    """The simulator's server after each round, its result, and its classes."""
    data = [member_files["arrays"][name] for name in names]
    options = {"rounds": count, "dim": DIM, "engine": "reference", **settings}
    experiment, _ = _begin(
        algorithm, data, ",".join(f"{models[n]}*1" for n in names), None, options
    )
    servers, result = [], None
    for (found,) in proceed([experiment], [None], threading.Event()):
        servers.append(clone_tree(experiment.progress.server))
        result = found
    return servers[:count], result, experiment.federation.classes


def small_state(folder: Path, algorithm: str = "fedproto", **options: Any) -> ServerState:
    given: dict[str, Any] = {"state": str(folder), "classes": "x,y,z", "quorum": 1} | options
    state = ServerState(ServerSettings(**given), TrainingTerms(algorithm=algorithm, dim=4))
    for name in ("a", "b", "c"):
        state.make_request(name)
    return state


def make_reply(
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


def check_all(member: str, reply: Message, expected: ExpectedReply) -> None:
    """Check a reply as the server does: its form, then its values."""
    check_reply(member, reply, expected)
    check_upload(unpack_upload(reply), expected)


def with_header(**changes: Any) -> Callable[[Message], Message]:
    return lambda p: Message(
        {k: v for k, v in (p.header | changes).items() if v is not None}, p.arrays
    )


def with_array(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Message], Message]:
    return lambda p: Message(p.header, p.arrays | {name: change(p.arrays[name])})


def set_value(place: Any, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[place] = value
        return array

    return change


def with_classes(names: list[Any]) -> Callable[[Message], Message]:
    """Rows for all of them, so that nothing but the names is wrong."""
    rows = len(names)
    arrays = {SUMS: np.ones((rows, 4), np.float32), WEIGHT: np.ones(rows, np.float32)}
    arrays |= {ROWS: np.arange(rows, dtype=np.int32)}
    return lambda p: Message(p.header | {"spoken": names}, arrays)


WRONG_REPLIES: dict[str, Callable[[Message], Message]] = {
    "NaN": with_array(SUMS, set_value((0, 0), np.nan)),
    "infinite": with_array(SUMS, set_value((1, 2), np.inf)),
    "minus infinite": with_array(SUMS, set_value((1, 2), -np.inf)),
    "1e30": with_array(SUMS, set_value((0, 0), 1e30)),
    "largest float": with_array(SUMS, set_value((0, 0), 3.4e38)),
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
    "zero weight": with_array(WEIGHT, set_value(0, 0.0)),
    "negative weight": with_array(WEIGHT, set_value(0, -1.0)),
    "negative weights and sums": lambda p: Message(
        p.header, p.arrays | {n: -p.arrays[n] for n in (SUMS, WEIGHT)}
    ),
    "huge weight": with_array(WEIGHT, set_value(0, 1e9)),
    "tiny weight": with_array(WEIGHT, set_value(0, 1e-30)),
    "NaN weight": with_array(WEIGHT, set_value(0, np.nan)),
    "weights of two axes": with_array(WEIGHT, lambda v: v[:, None]),
    "no sums": lambda p: Message(p.header, {n: v for n, v in p.arrays.items() if n != SUMS}),
    "no weights": lambda p: Message(p.header, {n: v for n, v in p.arrays.items() if n != WEIGHT}),
    "no rows": lambda p: Message(p.header, {n: v for n, v in p.arrays.items() if n != ROWS}),
    "long row numbers": with_array(ROWS, lambda v: v.astype(np.int64)),
    "a row number too few": with_array(ROWS, lambda v: v[:1]),
    "a row below 0": with_array(ROWS, set_value(0, -1)),
    "a row twice": with_array(ROWS, np.zeros_like),
    "no arrays": lambda p: Message(p.header, {}),
    "an array too many": lambda p: Message(
        p.header, p.arrays | {"prototypes/value.more": p.arrays[SUMS]}
    ),
    "an array of no group": lambda p: Message(
        p.header, p.arrays | {"value.prototypes": p.arrays[SUMS]}
    ),
    "a group too many": lambda p: Message(
        p.header, p.arrays | {"more/extra.weight": p.arrays[WEIGHT]}
    ),
    "another group": lambda p: Message(
        p.header, {name.replace("prototypes/", "model/"): v for name, v in p.arrays.items()}
    ),
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
    "no classes": with_classes([]),
    "names as text": with_header(spoken="xy"),
    "names as numbers": with_header(spoken=[0, 1]),
    "names as lists": with_header(spoken=[["x"], ["y"]]),
    "a name with a line break": with_header(spoken=["x", "y\n"]),
    "a name that is not composed": with_header(spoken=["x", "cafe\u0301"]),
    "a million classes": with_classes([str(number) for number in range(1_000_000)]),
}


def damage_file(path: Path, how: str) -> None:
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


DAMAGES = ["cut off", "empty", "text", "no metadata", "no JSON", "a list", "an empty object"]


def state_after_a_round(tmp_path: Path) -> ServerState:
    """In which one member spoke."""
    state = small_state(tmp_path)
    state.accept_reply("a", make_reply("a"), state.expect_replies(frozenset("a")))
    state.close_round()
    state.save()
    return state


def state_file_of(deployment: Deployment, name: str = "a") -> Path:
    return Path(deployment.members[name].state) / MEMBER_FILE


def pretend_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only where it has started the app."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(f"flwr.supercore.task_identity.TaskIdentity.{name}", 1)


def make_flower_transport(
    members: dict[int, tuple[str, str]], registered: set[str] | None = None
) -> Any:
    """Return a transport over a grid in this process; nodes have (registered, stated) names."""
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


def accept_classes(state: ServerState, name: str, classes: list[str], number: int = 1) -> None:
    state.accept_reply(
        name, with_classes(classes)(make_reply(name, number)), state.expect_replies(frozenset(name))
    )
