"""Progress of a federation: what a checkpoint holds, and what is refused when one is restored."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.tiny import build

from fedproto.core.server import Progress, RoundUploads, check_server_state
from fedproto.core.tensors import flatten_upload
from fedproto.core.traffic import Ledger
from fedproto.core.types import Group, SentOnce, Task, Tree, per_class
from fedproto.core.uploads import LatestUploads
from fedproto.errors import TrainingError

CLIENTS = 3
SUMS = "uploads.prototypes/sums/prototypes"
WEIGHT = "uploads.prototypes/weight"


def fresh_progress() -> Progress:
    """Progress before round 1 of three clients: two classes, prototypes of four values."""
    server = {"prototypes": torch.zeros(2, 4), "known": torch.zeros(2)}
    layouts = per_class(Task(2, 4, CLIENTS, 0), prototypes=(4,))
    return Progress(server, Ledger(CLIENTS), LatestUploads(CLIENTS), layouts)


def later_progress() -> Progress:
    """The same after round 5, in which clients 0 and 2 uploaded."""
    progress = fresh_progress()
    progress.server = {"prototypes": torch.arange(8.0).view(2, 4), "known": torch.ones(2)}
    clients = torch.tensor([0, 2])
    sums = {"prototypes": torch.arange(16.0).view(2, 2, 4)}
    uploads = {"prototypes": Group(sums, torch.tensor([[1.0, 2], [3, 0]]))}
    progress.latest_uploads.store(clients, uploads, round=5)
    progress.ledger.up(clients, torch.tensor([[8, 100], [4, 60]]))
    progress.round = 5
    return progress


def restored(tree: Tree, round: int = 5) -> Progress:
    progress = fresh_progress()
    progress.restore(tree, round)
    return progress


def test_what_is_restored_is_what_was_exported() -> None:
    before = later_progress()
    after = restored(before.export())
    assert after.round == 5
    assert after.server.keys() == before.server.keys()
    for name, value in before.server.items():
        assert torch.equal(after.server[name], value)
    assert after.ledger.of(0) == {
        "values_up": 8,
        "bytes_up": 100,
        "values_down": 0,
        "bytes_down": 0,
    }
    assert after.latest_uploads.last_round.tolist() == [5, 0, 5]
    assert before.latest_uploads.uploads is not None and after.latest_uploads.uploads is not None
    stored = flatten_upload(after.latest_uploads.uploads)
    kept = flatten_upload(before.latest_uploads.uploads)
    assert stored.keys() == kept.keys()
    for name, value in kept.items():
        assert torch.equal(stored[name], value)


def test_a_checkpoint_without_uploads_forgets_those_of_the_present() -> None:
    progress = later_progress()
    progress.restore(fresh_progress().export(), round=2)
    assert progress.round == 2
    assert progress.latest_uploads.uploads is None
    assert progress.latest_uploads.last_round.tolist() == [0, 0, 0]


def test_states_of_clients_in_the_same_tree_are_left_to_the_engine() -> None:
    tree = later_progress().export() | {"client.0.weight": torch.ones(7)}
    assert restored(tree).round == 5


def test_a_restored_server_has_its_tensors_in_the_order_of_a_fresh_one() -> None:
    """Files sort tensors by name; an algorithm that adds them up would round in another way."""
    tree = later_progress().export()
    after = restored(dict(sorted(tree.items())))
    assert list(after.server) == ["prototypes", "known"]


def test_a_new_state_has_its_tensors_in_the_order_of_the_one_before() -> None:
    before = {"b": torch.zeros(1), "inner": {"y": torch.zeros(1), "x": torch.zeros(1)}}
    state = {"more": torch.ones(2), "inner": {"x": torch.ones(1), "y": torch.ones(1)}}
    ordered = check_server_state(state | {"b": torch.ones(1)}, "aggregate", before)
    assert list(ordered) == ["b", "inner", "more"]
    assert list(ordered["inner"]) == ["y", "x"]


def test_a_server_that_keeps_nothing_is_restored() -> None:
    """The method `local` has no server state, so its tree has no such group."""
    empty = Progress({}, Ledger(CLIENTS), LatestUploads(CLIENTS), {})
    empty.restore(empty.export(), round=4)
    assert empty.server == {}
    assert empty.round == 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unexpected group": ({"extra.x": torch.zeros(1)}, "it has no 'extra'"),
    "the first unexpected group by name": (
        {"b.x": torch.zeros(1), "a.x": torch.zeros(1)},
        "it has no 'a'",
    ),
    "a server tensor that is missing": ({"server.known": None}, "there is no known"),
    "a server tensor that this server does not have": (
        {"server.extra": torch.ones(1)},
        "it has no 'extra'",
    ),
    "a server tensor with a long name": (
        {f"server.{'x' * 90}": torch.ones(1)},
        f"it has no '{'x' * 76}...",
    ),
    "a server tensor of another shape": (
        {"server.known": torch.ones(3)},
        "known is (3,) of torch.float32, where (2,) of torch.float32 is wanted",
    ),
    "no ledger": ({"ledger": None}, "there is no ledger"),
    "a ledger of another federation": (
        {"ledger": torch.zeros(4, 4, dtype=torch.int64)},
        "ledger is (4, 4) of torch.int64, where (3, 4) of torch.int64 is wanted",
    ),
    "rounds as floats": (
        {"last": torch.zeros(3)},
        "last is (3,) of torch.float32, where (3,) of torch.int64 is wanted",
    ),
    "rounds of another number of clients": (
        {"last": torch.zeros(4, dtype=torch.int64)},
        "last is (4,) of torch.int64, where (3,) of torch.int64 is wanted",
    ),
    "uploads without a weight": ({WEIGHT: None}, "there is no 'prototypes'/weight"),
    "a weight without sums but of other clients": (
        {SUMS: None, WEIGHT: torch.ones(4, 2)},
        "'prototypes/weight' is (4, 2) of torch.float32",
    ),
    "sums of other clients": (
        {SUMS: torch.ones(4, 2, 4)},
        "'prototypes/sums/prototypes' is (4, 2, 4) of torch.float32",
    ),
    "sums of another number of classes than their weight": (
        {"uploads.prototypes/sums/other": torch.ones(3, 5, 4)},
        "'prototypes/sums/other' is (3, 5, 4) of torch.float32",
    ),
    "sums whose rows are not the declared ones": (
        {SUMS: torch.ones(3, 2, 5)},
        "prototypes/sums/prototypes is (2, 5), where (2, 4) is declared",
    ),
    "a group that is not declared": (
        {"uploads.other/weight": torch.ones(3)},
        "there is a group 'other', where the declared ones are: prototypes",
    ),
    "a part of a group that does not exist": (
        {"uploads.prototypes/means/a": torch.ones(3)},
        "'prototypes/means/a' is not a part of an upload",
    ),
    "sums that are not floats": (
        {SUMS: torch.ones(3, 2, 4, dtype=torch.int64)},
        "'prototypes/sums/prototypes' is (3, 2, 4) of torch.int64",
    ),
}


@pytest.mark.parametrize("changes, sentence", REFUSED.values(), ids=REFUSED.keys())
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(
    changes: dict[str, Any], sentence: str
) -> None:
    tree = later_progress().export() | changes
    tree = {name: value for name, value in tree.items() if value is not None}
    progress = fresh_progress()
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        progress.restore(tree, round=5)
    assert progress.round == 0
    assert float(progress.server["known"].sum()) == 0
    assert progress.latest_uploads.uploads is None


def test_long_names_from_a_file_are_cut_at_80_characters() -> None:
    name = "x" * 200
    tree = later_progress().export()
    with pytest.raises(ValueError, match=r"^it has no 'x{76}\.\.\.$"):
        restored(tree | {f"{name}.y": torch.zeros(1)})
    with pytest.raises(
        ValueError, match=r"^'prototypes/sums/x{60}\.\.\. is \(1,\) of torch\.float32$"
    ):
        restored(tree | {f"uploads.prototypes/sums/{name}": torch.zeros(1)})


def test_looking_back_finds_the_smallest_positive_losses_and_the_first_divergence() -> None:
    progress = later_progress()
    progress.smallest_loss = {"stale": 0.1}
    lines = [
        {"round": 1, "loss": {"supervised": 2.0, "regulariser": 0.0}},
        {"round": 2, "loss": {"supervised": 0.5, "regulariser": 0.3}, "diverged": [2]},
        {"round": 3, "loss": {"supervised": 1.0, "regulariser": -1.0}, "diverged": [2, 1]},
    ]
    progress.look_back(lines)
    assert progress.smallest_loss == {"supervised": 0.5, "regulariser": 0.3}
    assert progress.diverged == {2: 2, 1: 3}


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ([], "not list"),
        (None, "not NoneType"),
        ({"a": 1.0}, "but 'a' is float"),
        ({"a": torch.ones(1), "b": {"c": "text"}}, "but 'b/c' is str"),
    ],
)
def test_a_server_state_is_a_dict_of_tensors(state: Any, found: str) -> None:
    with pytest.raises(TypeError, match=f"^init must return a dict of tensors by name, {found}$"):
        check_server_state(state, "init")


def test_a_server_state_of_tensors_is_returned_as_it_is() -> None:
    state = {"a": torch.ones(1)}
    assert check_server_state(state, "init") is state
    assert check_server_state({}, "init") == {}


def test_local_prototypes_are_the_sums_divided_by_their_weights() -> None:
    """Client 1 never uploaded, and client 2 has no sample of class 1."""
    local = later_progress().latest_uploads.local_prototypes()
    assert local.keys() == {"local", "held"}
    assert local["held"].tolist() == [[1, 2], [0, 0], [3, 0]]
    assert local["local"][0].tolist() == [[0, 1, 2, 3], [2, 2.5, 3, 3.5]]
    assert local["local"][1].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]]
    assert torch.allclose(local["local"][2, 0], torch.tensor([8, 9, 10, 11]) / 3)
    assert local["local"][2, 1].tolist() == [0, 0, 0, 0]


def test_a_weight_below_one_still_counts_as_a_prototype() -> None:
    latest = LatestUploads(1)
    sums = {"prototypes": torch.tensor([[[0.25, 0.5]]])}
    latest.store(torch.tensor([0]), {"prototypes": Group(sums, torch.tensor([[0.5]]))}, round=1)
    assert latest.local_prototypes()["local"].tolist() == [[[0.5, 1.0]]]


def store_one(sums: Tree, weight: torch.Tensor) -> LatestUploads:
    latest = LatestUploads(1)
    latest.store(torch.tensor([0]), {"prototypes": Group(sums, weight)}, round=1)
    return latest


def test_uploads_without_prototypes_have_no_local_prototypes() -> None:
    assert LatestUploads(1).local_prototypes() == {}
    assert store_one({"weight": torch.ones(1, 3)}, torch.ones(1)).local_prototypes() == {}
    prototypes = {"prototypes": torch.ones(1, 2, 4)}
    assert store_one(prototypes, torch.ones(1)).local_prototypes() == {}
    latest = LatestUploads(1)
    other = {"other": Group(prototypes, torch.ones(1, 2))}
    latest.store(torch.tensor([0]), other, round=1)
    assert latest.local_prototypes() == {}


@pytest.mark.parametrize("most, is_saved", [(8, True), (7, False)])
def test_too_many_local_prototypes_are_not_saved(
    most: int, is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedproto.core.uploads.LARGEST_LOCAL_VALUES", most)
    latest = store_one({"prototypes": torch.ones(1, 2, 4)}, torch.ones(1, 2))
    assert bool(latest.local_prototypes()) == is_saved


def test_a_checkpoint_names_its_groups() -> None:
    """These names are in every checkpoint file; older files could not be read without them."""
    names = {"server.prototypes", "server.known", "ledger", "last"}
    assert fresh_progress().export().keys() == names
    assert later_progress().export().keys() == names | {SUMS, WEIGHT}


@pytest.mark.parametrize(
    ("returns", "sentence"),
    [
        (ValueError("on purpose"), "on purpose$"),
        ([1], r"init must return a dict of tensors by name, not list$"),
    ],
    ids=["fails", "returns a list"],
)
def test_an_error_before_round_1_names_the_server_and_the_function(
    returns: Any, sentence: str
) -> None:
    def init(params: Tree, task: Any) -> Any:
        if isinstance(returns, Exception):
            raise returns
        return returns

    federation: Any = SimpleNamespace(members=[None], initial={}, task=None)
    algorithm = replace(build("fedavg"), init=init)
    where = r"^the server of fedavg, before round 1\b.*: "
    with pytest.raises(TrainingError, match=where + sentence):
        Progress.start(federation, algorithm)


# --- groups that are sent once


def once_upload(*values: float) -> dict[str, Group]:
    """Return the uploads of some clients: a model, and a group that is sent once."""
    rows = torch.tensor(values)
    return {"model": Group({"w": rows}, torch.ones(len(rows))), "sum": Group({"s": rows}, rows)}


class Recorder:
    """An algorithm whose server notes what its functions are called with."""

    def __init__(self) -> None:
        self.aggregated: list[dict[str, list[float]]] = []
        self.sent: list[tuple[int, list[int], list[float]]] = []
        self.algorithm = replace(
            build("fedavg"),
            aggregate=self.aggregate,
            aggregate_once=self.aggregate_once,
            once=("sum",),
        )

    def aggregate(self, server: Tree, uploads: dict[str, Group]) -> Tree:
        self.aggregated.append({name: group.weight.tolist() for name, group in uploads.items()})
        return server

    def aggregate_once(self, server: Tree, sent_once: SentOnce) -> Tree:
        values = sent_once.groups["sum"].sums["s"].tolist()
        self.sent.append((sent_once.round, sent_once.clients.tolist(), values))
        return server


def close_round(
    recorder: Recorder, once: LatestUploads, round: int, clients: list[int], leaver: int = -1
) -> None:
    arriving = RoundUploads(recorder.algorithm, LatestUploads(4), once, round)
    if clients:
        values = [10.0 * round + client for client in clients]
        arriving.receive(torch.tensor(clients), once_upload(*values))
    if leaver >= 0:
        once.remove(leaver)
    arriving.aggregate({}, arriving.combine())


def test_groups_that_are_sent_once_are_aggregated_when_they_come_or_go() -> None:
    recorder = Recorder()
    once = LatestUploads(4)
    close_round(recorder, once, 1, [2, 0])
    close_round(recorder, once, 2, [0, 2])  # have sent theirs
    close_round(recorder, once, 3, [3, 2])
    close_round(recorder, once, 4, [])
    close_round(recorder, once, 5, [], leaver=0)
    close_round(recorder, once, 6, [], leaver=0)  # has left before
    assert recorder.sent == [
        (1, [0, 2], [10.0, 12.0]),
        (3, [0, 2, 3], [10.0, 12.0, 33.0]),
        (5, [2, 3], [12.0, 33.0]),
    ]
    assert recorder.aggregated == [{"model": [2.0]}] * 3, "summed, without what is sent once"


def test_a_server_whose_last_client_leaves_is_told() -> None:
    recorder = Recorder()
    once = LatestUploads(4)
    close_round(recorder, once, 1, [1])
    close_round(recorder, once, 2, [], leaver=1)
    assert recorder.sent == [(1, [1], [11.0]), (2, [], [])]


def test_a_server_that_keeps_less_after_what_is_sent_once_is_refused() -> None:
    recorder = Recorder()
    wrong = replace(recorder.algorithm, aggregate_once=lambda server, sent_once: {})
    arriving = RoundUploads(wrong, LatestUploads(2), LatestUploads(2), 1)
    arriving.receive(torch.tensor([0, 1]), once_upload(1.0, 2.0))
    sentence = "aggregate_once must return a state like the one it is given: there is no w"
    with pytest.raises(TrainingError, match=sentence):
        arriving.aggregate({"w": torch.zeros(2)}, arriving.combine())
