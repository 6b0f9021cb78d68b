"""Uploads of several groups, groups that are sent once, and state that is kept, deployed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.deployment import Deployment, LocalTransport, check_all, trees_equal
from torch import Tensor

from fedproto.algorithms import by_head, samples, supervised, travelling
from fedproto.core import codec
from fedproto.core.tensors import flatten_state, flatten_upload, make_group, weighted_mean
from fedproto.core.types import (
    Algorithm,
    Group,
    GroupLayout,
    Recipient,
    State,
    Step,
    Task,
    Tree,
    Upload,
    everything,
)
from fedproto.deploy.member import _prepare, _read_terms, train_round
from fedproto.deploy.member_checkpoint import MemberCheckpoint
from fedproto.deploy.messages import Message, pack_upload, place_rows, unpack_upload
from fedproto.deploy.round_protocol import serve
from fedproto.deploy.settings import TrainingTerms
from fedproto.errors import Refused, TrainingError

CLASSES = tuple("012345")
LAYOUTS = {
    "model": GroupLayout({"w": (2, 3), "b": ()}, relative=True),
    "prototypes": GroupLayout({"prototypes": (4,)}, "class", 3, ("holders",)),
}


# --- an algorithm with two groups, nested state, and state of the client


def count_classes(step: Step, classes: int) -> Tensor:
    return F.one_hot(step.batch.y, classes).to(step.batch.mask) * step.batch.mask[:, None]


def both() -> Algorithm:
    """Return an algorithm that averages weights and class means; clients count their rounds."""

    def init(params: Tree, task: Task) -> State:
        known = torch.zeros(task.classes)
        means = {"mean": torch.zeros(task.classes, task.dim), "known": known}
        return {
            "model": travelling(params, everything),
            "means": means,
            "rounds": torch.tensor(0.0),
        }

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        values = travelling(params, everything)
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        return {
            "model": GroupLayout(shapes),
            "means": GroupLayout({"mean": (task.dim,)}, "class", task.classes),
        }

    def send(server: State, recipient: Recipient) -> State:
        known = server["means"]["known"] * recipient.classes
        return {"model": server["model"], "means": server["means"] | {"known": known}}

    def upload(step: Step) -> Upload:
        members = count_classes(step, step.logits.shape[1])
        means = Group({"mean": members.T @ step.features}, members.sum(0))
        model = make_group(travelling(step.params, everything), samples(step))
        return {"model": model, "means": means}

    def aggregate(server: State, uploads: Upload) -> State:
        spoken = uploads["means"].weight.sum(0) > 0
        means = weighted_mean(server["means"], uploads["means"])
        known = torch.where(spoken, 1.0, server["means"]["known"])
        return {
            "model": weighted_mean(server["model"], uploads["model"]),
            "means": means | {"known": known},
            "rounds": server["rounds"] + 1,
        }

    def client_init(params: Tree, task: Task) -> State:
        anchor = {name: torch.zeros_like(value) for name, value in params.items()}
        return {"anchor": anchor, "counts": {"visits": torch.tensor(0.0)}}

    def client_update(step: Step) -> State:
        visits = step.state["counts"]["visits"] + 1
        return {"anchor": dict(step.params), "counts": {"visits": visits}}

    return Algorithm(
        name="both",
        shared=everything,
        init=init,
        declare=declare,
        send=send,
        adopt=lambda own, received: own | received["model"],
        loss=supervised,
        upload=upload,
        aggregate=aggregate,
        predict=by_head,
        collects="after",
        client_init=client_init,
        client_update=client_update,
        additive=False,
    )


def deploy(
    algorithm: Algorithm, make_deployment: Any, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Deployment:
    """Return a federation of this algorithm, as if it were built in."""
    monkeypatch.setattr(TrainingTerms, "build", lambda terms: algorithm)
    deployment = make_deployment("fedavg", **options)
    for name, own in deployment.members.items():
        deployment.members[name] = replace(own, sends="weights,prototypes,counts")
    return deployment


def record_replies(replies: dict[tuple[str, int], Message]) -> Any:
    def keep(name: str, reply: Message, round: int) -> list[Message]:
        replies[name, round] = reply
        return [reply]

    return keep


# --- messages


def make_upload() -> Upload:
    weight = torch.tensor([2.0, 0.0, 5.0])
    rows = torch.arange(12.0).reshape(3, 4) * (weight > 0)[:, None]
    model = Group({"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0)}, torch.tensor(3.0))
    prototypes = Group({"prototypes": rows}, weight, {"holders": (weight > 0).float()})
    return {"model": model, "prototypes": prototypes}


def test_two_groups_are_packed_as_one_message_each_and_come_back() -> None:
    upload = make_upload()
    sent = pack_upload(upload, ("x", "y", "z"), LAYOUTS)
    assert sent.header == {"spoken": ["x", "z"]}
    assert set(sent.arrays) == {
        "model/value.w",
        "model/value.b",
        "model/extra.weight",
        "prototypes/value.prototypes",
        "prototypes/extra.weight",
        "prototypes/extra.holders",
        "prototypes/extra.rows",
    }
    assert sent.payloads() == codec.encode_upload(upload)
    assert sent.count_bytes() == codec.upload_size(upload).bytes
    placed = place_rows(unpack_upload(sent), ["x", "z"], ("x", "y", "z"), LAYOUTS)
    assert trees_equal(flatten_upload(placed), flatten_upload(upload))
    elsewhere = place_rows(unpack_upload(sent), ["x", "z"], ("z", "new", "x"), LAYOUTS)
    assert elsewhere["prototypes"].weight.tolist() == [5, 0, 2]
    assert trees_equal(elsewhere["model"].sums, upload["model"].sums)


def test_groups_that_speak_of_different_classes_are_refused_by_the_sender() -> None:
    group = make_upload()["prototypes"]
    other = Group({"prototypes": group.sums["prototypes"]}, torch.ones(3), {})
    layouts = {"prototypes": LAYOUTS["prototypes"], "more": LAYOUTS["prototypes"]}
    with pytest.raises(TrainingError, match="different classes"):
        pack_upload({"prototypes": group, "more": other}, ("x", "y", "z"), layouts)


# --- a server's round


def test_a_reply_of_two_groups_is_checked_group_by_group(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = deploy(both(), make_deployment, monkeypatch)
    state = deployment.state()
    good = train_round(state.make_request("a"), deployment.members["a"])
    expected = state.expect_replies(frozenset("a"))
    check_all("a", good, expected)
    assert good.header["spoken"] == ["0", "1", "2"]
    parameter = next(name for name in good.arrays if name.startswith("model/value."))
    wrong = {
        "means/value.mean": good.arrays["means/value.mean"][:, 1:],
        "means/extra.weight": -good.arrays["means/extra.weight"],
        "means/extra.rows": np.zeros_like(good.arrays["means/extra.rows"]),
        "model/extra.weight": np.array(0, np.float32),
        "model/extra.rows": good.arrays["means/extra.rows"],
        parameter: good.arrays[parameter][None],
    }
    for name, value in wrong.items():
        with pytest.raises(Refused):
            check_all("a", Message(good.header, good.arrays | {name: value}), expected)
    for group in ("means", "model"):
        rest = {name: v for name, v in good.arrays.items() if not name.startswith(f"{group}/")}
        with pytest.raises(Refused, match=f"'{group}' is missing or unknown"):
            state.accept_reply("a", Message(good.header, rest), expected)
    assert state.replies == {}


def test_rounds_of_two_groups_with_nested_state(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group is divided by its own weights; the file continues where the server was."""
    deployment = deploy(both(), make_deployment, monkeypatch, rounds=2)
    replies: dict[tuple[str, int], Message] = {}
    state = deployment.serve(rewrite=record_replies(replies))
    assert state.round == 2 and state.server["rounds"] == 2
    assert not any(member.refused for member in state.members.values())
    last = {name: unpack_upload(replies[name, 2]) for name in "abc"}
    weights = torch.stack([upload["model"].weight for upload in last.values()])
    for name, value in state.server["model"].items():
        sums = torch.stack([upload["model"].sums[name] for upload in last.values()])
        torch.testing.assert_close(value, sums.sum(0) / weights.sum())
    three = last["b"]["means"]  # only b holds class 3, the second of its own
    row = replies["b", 2].header["spoken"].index("3")
    torch.testing.assert_close(
        state.server["means"]["mean"][3], three.sums["mean"][row] / three.weight[row]
    )
    assert state.server["means"]["known"].tolist() == [1] * 6
    again = deployment.state()
    assert set(again.server) == {"model", "means", "rounds"} and again.round == 2
    assert trees_equal(flatten_state(again.server), flatten_state(state.server))


def test_trees_with_known_travel_by_their_own_rows(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = deploy(both(), make_deployment, monkeypatch, rounds=1)
    state = deployment.serve()
    request = state.make_request("a")
    assert request.header["known.means"] == ["0", "1", "2"]
    assert request.arrays["means/value.mean"].shape[0] == 3
    own = deployment.members["a"]
    saved = MemberCheckpoint.load(own)
    received = _prepare(request, own, _read_terms(request.header), saved).received
    assert received["means"]["known"].tolist() == [1, 1, 1, 0, 0, 0]
    assert torch.equal(received["means"]["mean"][:3], state.server["means"]["mean"][:3])
    assert trees_equal(received["model"], state.server["model"])
    for bad in ("5", [["0"]], ["0", "1", "w"], ["0", "0", "1"]):
        changed = Message(request.header | {"known.means": bad}, request.arrays)
        with pytest.raises(Exception, match="the server's message"):
            train_round(changed, own)


# --- what a member keeps


def test_a_member_keeps_its_state_across_rounds(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays with the member, which keeps it also over a round in which it was absent."""
    deployment = deploy(both(), make_deployment, monkeypatch, rounds=3, quorum=2)
    state = deployment.state()
    transport = LocalTransport(
        deployment.members, state, there=lambda name, round: name != "b" or round != 2
    )
    serve(state, transport, deployment.said.append)
    visits = {}
    for name, own in deployment.members.items():
        saved = MemberCheckpoint.load(own)
        assert saved is not None
        visits[name] = float(saved.state["client/counts/visits"])
        weights = [key for key in saved.state if not key.startswith("client/")]
        for key in weights:
            assert torch.equal(saved.state[f"client/anchor/{key}"], saved.state[key])
        assert not [key for key in saved.reply.arrays if "visits" in key or "anchor" in key]
    assert visits == {"a": 3, "b": 2, "c": 3}


def test_a_round_that_is_requested_twice_updates_the_state_once(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = deploy(both(), make_deployment, monkeypatch)
    request = deployment.state().make_request("a")
    own = deployment.members["a"]
    first = train_round(request, own)
    second = train_round(request, own)
    saved = MemberCheckpoint.load(own)
    assert saved is not None and saved.state["client/counts/visits"] == 1
    assert all(np.array_equal(first.arrays[name], second.arrays[name]) for name in first.arrays)


def test_kept_trees_are_rearranged_like_the_head(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server lists its classes in another order; what belongs to a class follows its name."""
    deployment = deploy(both(), make_deployment, monkeypatch)
    request = deployment.state().make_request("a")
    own = deployment.members["a"]
    train_round(request, own)
    kept = MemberCheckpoint.load(own)
    assert kept is not None
    turned = Message(request.header | {"classes": list(reversed(CLASSES))}, request.arrays)
    found = _prepare(turned, own, _read_terms(turned.header), kept).state
    heads = [name for name in kept.state if name.startswith("head.")]
    assert heads and found["client/counts/visits"] == 1
    for name in heads:
        assert torch.equal(found[name], kept.state[name].flip(0))
        assert torch.equal(
            found[f"client/anchor/{name}"], kept.state[f"client/anchor/{name}"].flip(0)
        )


# --- groups that are sent once


@pytest.mark.parametrize("once", ["means", "model"])
def test_a_group_is_sent_once(
    once: str, make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = deploy(replace(both(), once=(once,)), make_deployment, monkeypatch, rounds=3)
    replies: dict[tuple[str, int], Message] = {}
    state = deployment.state()
    transport = LocalTransport(deployment.members, state, rewrite=record_replies(replies))
    serve(state, transport, deployment.said.append)
    assert state.round == 3 and not any(member.refused for member in state.members.values())
    groups = {key: set(reply.groups()) for key, reply in replies.items()}
    for name in "abc":
        assert groups[name, 1] == {"means", "model"}
        assert groups[name, 2] == groups[name, 3] == {"means", "model"} - {once}
    asked = {(name, request.header["round"]): request for name, request in transport.invitations}
    assert "delivered" not in asked["a", 1].header
    assert asked["a", 2].header["delivered"] == [once]
    assert state.members["a"].spoken == ["0", "1", "2"], "its classes are still known"
    first = state.once_uploads.get(0)[once]
    sent = place_rows(unpack_upload(replies["a", 1]), ["0", "1", "2"], CLASSES, state.layouts)
    assert trees_equal(flatten_upload({"": first}), flatten_upload({"": sent[once]}))
    again = deployment.state()
    assert again.make_request("a").header["delivered"] == [once]
    assert trees_equal(
        flatten_upload(again.once_uploads.uploads or {}),
        flatten_upload(state.once_uploads.uploads or {}),
    )


def test_a_group_is_sent_again_if_the_first_reply_was_refused(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = replace(both(), once=("means",))
    deployment = deploy(algorithm, make_deployment, monkeypatch, rounds=3, quorum=2)
    replies: dict[tuple[str, int], Message] = {}

    def spoil(name: str, reply: Message, round: int) -> list[Message]:
        replies[name, round] = reply
        if (name, round) != ("b", 1):
            return [reply]
        bad = {"means/value.mean": reply.arrays["means/value.mean"] * np.float32(np.nan)}
        return [Message(reply.header, reply.arrays | bad)]

    state = deployment.serve(rewrite=spoil)
    sent = {key: "means" in reply.groups() for key, reply in replies.items()}
    assert [sent["a", round] for round in (1, 2, 3)] == [True, False, False]
    assert [sent["b", round] for round in (1, 2, 3)] == [True, True, False]
    assert state.members["b"].refused == 1 and state.once_uploads.last_round.tolist() == [1, 2, 1]


def test_a_group_that_has_arrived_is_refused_the_second_time(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a member could replace what the server remembers."""
    algorithm = replace(both(), once=("means",))
    deployment = deploy(algorithm, make_deployment, monkeypatch, rounds=2, quorum=2)
    replies: dict[tuple[str, int], Message] = {}

    def repeat(name: str, reply: Message, round: int) -> list[Message]:
        replies[name, round] = reply
        if (name, round) != ("b", 2):
            return [reply]
        return [Message(reply.header, replies["b", 1].arrays)]

    state = deployment.serve(rewrite=repeat)
    assert state.members["b"].refused == 1 and "'means'" in state.members["b"].reason
    assert state.once_uploads.last_round.tolist() == [1, 1, 1]


def test_replies_without_any_group_are_accepted_once_everything_has_arrived(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = replace(both(), once=("means", "model"))
    deployment = deploy(algorithm, make_deployment, monkeypatch, rounds=2)
    replies: dict[tuple[str, int], Message] = {}
    state = deployment.serve(rewrite=record_replies(replies))
    assert state.round == 2 and replies["a", 2].arrays == {}
    assert not any(member.refused for member in state.members.values())
    assert [member.last_round for member in state.members.values()] == [2, 2, 2]


def test_a_former_members_group_is_forgotten(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    algorithm = replace(both(), once=("means",))
    deployment = deploy(algorithm, make_deployment, monkeypatch, rounds=1)
    deployment.serve()
    state = deployment.state(rounds=2, members="a,c", quorum=2)
    serve(state, LocalTransport(deployment.members, state), deployment.said.append)
    assert state.once_uploads.last_round.tolist() == [1, 0, 1]
    remembered = state.once_uploads.recall()
    assert remembered is not None and len(remembered["means"].weight) == 2
