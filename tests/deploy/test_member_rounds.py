"""What a member does with requests: good ones, repeated ones, and bad ones."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deployment import (
    DAMAGES,
    DIM,
    RECEIVED,
    damage_file,
    set_value,
    state_file_of,
    with_array,
    with_header,
)

from fedproto.core.files import read_tensors, write_tensors
from fedproto.deploy.member import evaluate_member, train_round
from fedproto.deploy.member_checkpoint import STATE_FILE as MEMBER_FILE
from fedproto.deploy.member_checkpoint import STATE_FORMAT, MemberCheckpoint
from fedproto.deploy.member_record import MemberRecord, read_told_metrics
from fedproto.deploy.messages import Message
from fedproto.deploy.status import make_rows
from fedproto.errors import FedProtoError, RunFolderError, TrainingError


def test_a_repeated_request_is_answered_from_the_file(
    after_two_rounds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, state = after_two_rounds
    invitation = state.make_request("a")
    first = train_round(invitation, deployment.members["a"])
    content = state_file_of(deployment).read_bytes()
    monkeypatch.setattr(
        "fedproto.deploy.member.train", lambda *_: pytest.fail("it was trained again")
    )
    second = train_round(invitation, deployment.members["a"])
    assert json.dumps(first.header, sort_keys=True) == json.dumps(second.header, sort_keys=True)
    assert set(first.arrays) == set(second.arrays)
    for name, value in first.arrays.items():
        assert value.dtype == second.arrays[name].dtype and np.array_equal(
            value, second.arrays[name]
        )
    assert state_file_of(deployment).read_bytes() == content


def test_evaluation_does_not_change_the_file(after_two_rounds: Any) -> None:
    deployment, state = after_two_rounds
    before = state_file_of(deployment).read_bytes()
    told = evaluate_member(state.make_request("a", all_classes=True), deployment.members["a"])
    assert told.arrays == {} and {"accuracy.head", "accuracy.prototype"} <= set(told.header)
    metrics = read_told_metrics(told.header)
    assert list(metrics) == ["head", "prototype", "both"]
    assert {"balanced_accuracy", "macro_f1", "brier", "ece"} <= set(metrics["head"])
    assert state_file_of(deployment).read_bytes() == before


def test_a_member_can_keep_its_accuracy_to_itself(after_two_rounds: Any) -> None:
    deployment, state = after_two_rounds
    quiet = replace(deployment.members["a"], tell_accuracy=False)
    for reply in (
        evaluate_member(state.make_request("a"), quiet),
        train_round(state.make_request("a"), quiet),
    ):
        assert not [key for key in reply.header if key.startswith(("accuracy", "metric"))]


def test_an_older_round_is_refused(after_two_rounds: Any) -> None:
    deployment, state = after_two_rounds
    old = with_header(round=1)(state.make_request("a"))
    before = state_file_of(deployment).read_bytes()
    with pytest.raises(RunFolderError, match=r"round 2.*round 1"):
        train_round(old, deployment.members["a"])
    assert state_file_of(deployment).read_bytes() == before


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "z"), ("model", "mlp(hidden=9)"), ("classes", "0,1"), ("data", "digits")],
)
def test_a_state_of_other_settings_is_refused_by_their_name(
    key: str, value: str, after_two_rounds: Any
) -> None:
    deployment, state = after_two_rounds
    own = deployment.members["a"]
    before = getattr(own, key)
    for act in (train_round, evaluate_member):
        with pytest.raises(RunFolderError) as caught:
            act(state.make_request("a"), replace(own, **{key: value}))
        assert f"({key} was {before!r} and is {value!r} now)" in str(caught.value)
        assert "name another `state`" in str(caught.value)


def test_a_state_that_does_not_tell_its_settings_is_refused(after_two_rounds: Any) -> None:
    """As one of an earlier version, which stored their fingerprint only."""
    deployment, state = after_two_rounds
    path = state_file_of(deployment)
    tensors, header = read_tensors(path, STATE_FORMAT)
    header.pop("identity")
    write_tensors(path, tensors, STATE_FORMAT, header, private=True)
    own = deployment.members["a"]
    train_round(state.make_request("a"), own)
    write_tensors(path, tensors, STATE_FORMAT, header, private=True)
    with pytest.raises(RunFolderError, match="name, data, model or classes are not the same"):
        train_round(state.make_request("a"), replace(own, classes="0,1"))


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_state_of_a_member_is_refused(how: str, after_two_rounds: Any) -> None:
    deployment, state = after_two_rounds
    damage_file(state_file_of(deployment), how)
    with pytest.raises(FedProtoError, match=MEMBER_FILE):
        train_round(state.make_request("a"), deployment.members["a"])


def test_rows_of_a_head_stay_with_their_classes(after_two_rounds: Any) -> None:
    """The server's classes grow and change their order; the member's rows follow the names."""
    from fedproto.deploy.member import _prepare, _read_terms

    deployment, state = after_two_rounds
    own = deployment.members["a"]
    kept = MemberCheckpoint.load(own)
    assert kept is not None and kept.classes == tuple("012345")
    invitation = with_header(classes=["6", *"543210"])(state.make_request("a", all_classes=True))
    record = _prepare(invitation, own, _read_terms(invitation.header), kept)
    heads = [name for name in kept.state if name.startswith("head.")]
    assert heads and record.federation.classes == ("6", *"543210")
    for name in heads:
        assert torch.equal(record.state[name][1:], kept.state[name].flip(0))
        assert torch.equal(record.state[name][0], record.client.initial[name][0])
    for name, value in kept.state.items():
        assert name in heads or torch.equal(record.state[name], value)
    assert torch.equal(record.received["prototypes"][1:], state.server["prototypes"].flip(0))


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
    "another array": lambda p: Message(p.header, {"other": p.arrays[RECEIVED]}),
    "NaN": with_array(RECEIVED, set_value((0, 0), np.nan)),
    "infinite": with_array(RECEIVED, set_value((0, 0), np.inf)),
    "too wide": with_array(RECEIVED, lambda v: np.ones((len(v), DIM + 1), np.float32)),
    "flat": with_array(RECEIVED, lambda v: v.reshape(-1)),
    "one number": with_array(RECEIVED, lambda v: np.array(1.0, np.float32)),
    "an axis too many": with_array(RECEIVED, lambda v: v[None]),
    "texts": with_array(RECEIVED, lambda v: v.astype("U8")),
    "objects": with_array(RECEIVED, lambda v: v.astype(object)),
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
def test_a_bad_request_is_refused_and_changes_nothing(bad: str, after_two_rounds: Any) -> None:
    deployment, state = after_two_rounds
    before = state_file_of(deployment).read_bytes()
    with pytest.raises(FedProtoError):
        train_round(BAD_MESSAGES[bad](state.make_request("a")), deployment.members["a"])
    assert state_file_of(deployment).read_bytes() == before


@pytest.mark.parametrize("change", ["flat", "missing", "NaN", "texts"])
def test_bad_weights_from_the_server_are_refused(change: str, make_deployment: Any) -> None:
    deployment = make_deployment("fedavg", rounds=1)
    invitation = deployment.serve().make_request("a")
    name = next(iter(invitation.arrays))
    bad = {
        "flat": with_array(name, lambda v: v.reshape(-1)),
        "missing": lambda p: Message(p.header, {n: v for n, v in p.arrays.items() if n != name}),
        "NaN": with_array(name, set_value(..., np.nan)),
        "texts": with_array(name, lambda v: v.astype("U8")),
    }[change]
    with pytest.raises(FedProtoError):
        train_round(bad(invitation), deployment.members["a"])


def test_a_member_imports_no_module_that_the_server_names(
    after_two_rounds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method of somebody's own is named by a module, whose code runs where it is named."""
    deployment, state = after_two_rounds
    trace = tmp_path / "it ran"
    (tmp_path / "strange_module.py").write_text(
        f"from pathlib import Path\nPath({str(trace)!r}).touch()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FedProtoError):
        train_round(
            with_header(algorithm="strange_module:run")(state.make_request("a")),
            deployment.members["a"],
        )
    assert not trace.exists()


def test_training_that_diverges_is_reported_and_not_saved(make_deployment: Any) -> None:
    deployment = make_deployment(rounds=1)
    state = deployment.state()
    wild = with_header(lr=1e30)(state.make_request("a"))
    with pytest.raises(TrainingError, match="not finite"):
        train_round(wild, deployment.members["a"])
    assert not state_file_of(deployment).exists()


def test_a_server_takes_only_metrics_that_can_be() -> None:
    header = {
        "metric.auroc.head": 0.75,
        "metric.brier.head": 1.5,
        "metric.ece.head": float("nan"),
        "metric.macro_f1.head": 1.01,
        "metric.balanced_accuracy.head": "1.0",
        "metric.accuracy.head": 0.5,
        "metric.auroc.someone": 0.5,
        "metric.auroc.prototype": -0.1,
    }
    record = MemberRecord(0)
    record.note_accuracy(Message(header, {}))
    assert record.metrics == {"head": {"auroc": 0.75, "brier": 1.5}}
    record.note_accuracy(Message({}, {}))
    assert record.metrics == {"head": {"auroc": 0.75, "brier": 1.5}}


def test_a_status_shows_metrics_and_files_without_them() -> None:
    record = vars(MemberRecord(0, metrics={"head": {"auroc": 0.75, "balanced_accuracy": 0.5}}))
    older = {key: value for key, value in vars(MemberRecord(1)).items() if key != "metrics"}
    first, second = make_rows({"members": {"a": record, "b": older}})
    assert first[5] == "balanced 50.0%, AUROC 75.0%" and second[5] == ""
