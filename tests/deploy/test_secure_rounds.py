"""Secure sums in deployed rounds: parity, dropouts at every stage, restarts, and refusals."""

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deployment import EQUAL, MIXED, WEIGHTS, LocalTransport, simulate

from fedproto.core.files import read_tensors
from fedproto.core.tensors import flatten_state
from fedproto.deploy import secure_rounds
from fedproto.deploy.member import train_round
from fedproto.deploy.member_checkpoint import MemberCheckpoint
from fedproto.deploy.messages import SECURE_SUM, Message
from fedproto.deploy.secure_stages import STAGE_FILE, STAGE_FORMAT, make_dense, take_stage
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.errors import (
    ConfigError,
    MessageError,
    RefusedByMember,
    ServerBehind,
    TrainingError,
)
from fedproto.privacy.secure_sum.server import STAGES

SECURE = "secure-sum(error=1e-9,largest=1e5)"
LENIENT = "secure-sum(error=1e-9,largest=1e5,threshold=0.5)"
FEDPROTO = "fedproto(absent=drop)"
FOUR = {"names": "abcd", "combiner": LENIENT, "classes": "0,1,2,3,4,5,6"}


def stage_of(request: Message) -> str:
    return request.header[SECURE_SUM]["stage"]


def stored_stage(deployment: Any, name: str) -> dict[str, Any]:
    path = Path(deployment.members[name].state) / STAGE_FILE
    return read_tensors(path, STAGE_FORMAT)[1]


class Losing(LocalTransport):
    """Members of which some are silent from a stage on, in some round."""

    silent: dict[str, tuple[int, str]]  # by member: round and stage

    def exchange(self, kind, requests, timeout):
        reached = {}
        for name, request in requests.items():
            round, stage = self.silent.get(name, (0, ""))
            is_stage = kind == "train" and request.header["round"] == round
            if is_stage and STAGES.index(stage_of(request)) >= STAGES.index(stage):
                continue
            reached[name] = request
        yield from super().exchange(kind, reached, timeout)


def serve_with(deployment, transport_class=LocalTransport, state=None, **attributes):
    from fedproto.deploy.round_protocol import serve

    state = state or deployment.state()
    transport = transport_class(deployment.members, state)
    for key, value in attributes.items():
        setattr(transport, key, value)
    serve(state, transport, deployment.said.append)
    return state, transport


def add_uploads(deployment: Any, names: str, classes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the plain sum of what these members trained last, which only their own files hold."""
    total: dict[str, torch.Tensor] = {}
    for name in names:
        saved = MemberCheckpoint.load(deployment.members[name])
        assert saved is not None
        for group, value in make_dense(saved.reply, classes).items():
            parts = {f"{group}/weight": value.weight}
            parts |= {f"{group}/{key}": each for key, each in value.sums.items()}
            for key, each in parts.items():
                total[key] = total.get(key, 0) + each.double()
    return total


@pytest.mark.parametrize("algorithm", [FEDPROTO, "fedavg", "scaffold", "fednh"])
def test_every_round_gives_the_simulators_numbers(algorithm, make_deployment, member_files):
    deployment = make_deployment(algorithm, combiner=SECURE, rounds=2)
    models = EQUAL if algorithm in WEIGHTS else MIXED
    servers, result, _ = simulate(member_files, algorithm, models, count=2, combiner=SECURE)
    state, _ = serve_with(deployment)
    assert state.round == 2
    served = flatten_state(state.server)
    for name, value in flatten_state(servers[-1]).items():
        torch.testing.assert_close(served[name], value, rtol=0, atol=1e-5)
    for name, client in zip("abc", result.clients, strict=True):
        assert state.members[name].accuracy == pytest.approx(client["accuracy"])
        assert state.members[name].last_round == 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_member_that_is_gone_from_a_stage_on_does_not_spoil_the_round(stage, make_deployment):
    deployment = make_deployment(FEDPROTO, **FOUR, rounds=1)
    state, _ = serve_with(deployment, Losing, silent={"b": (1, stage)})
    assert state.round == 1
    in_sum = "abcd" if stage == "unmasking" else "acd"
    plain = add_uploads(deployment, in_sum, state.classes)
    weight = plain["prototypes/weight"]
    expected = plain["prototypes/prototypes"] / weight.clamp(min=1)[:, None]
    found = state.server["prototypes"].double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert state.server["known"].tolist() == (weight > 0).float().tolist()
    assert any("did not send" in sentence for sentence in deployment.said)


def test_a_member_that_was_gone_takes_part_in_the_next_round(make_deployment):
    deployment = make_deployment(FEDPROTO, **FOUR, rounds=2)
    state, _ = serve_with(deployment, Losing, silent={"b": (1, "masked")})
    assert state.round == 2
    assert state.members["b"].last_round == 2


@pytest.mark.parametrize("stage", STAGES)
def test_above_the_threshold_nothing_is_added(stage, make_deployment):
    """Before unmasking the round is tried again until patience ends; from then on it is over."""
    deployment = make_deployment(FEDPROTO, combiner=SECURE, rounds=1)
    gone = {"a": (1, stage), "b": (1, stage)}
    if stage == "unmasking":
        state, _ = serve_with(deployment, Losing, silent=gone)
        assert state.round == 1
        assert state.server["known"].sum() == 0  # no update
        assert any("ends without an update" in sentence for sentence in deployment.said)
        return
    state = deployment.state()
    with pytest.raises(TrainingError, match=r"only 1 of 3 members .* needs 3.*run this again"):
        serve_with(deployment, Losing, state=state, silent=gone)
    assert state.round == 0
    assert state.server["known"].sum() == 0


# --- what travels, and what is kept


def test_no_message_holds_an_upload_or_names_a_members_classes(make_deployment):
    deployment = make_deployment(FEDPROTO, combiner=SECURE, rounds=1)
    seen = []

    def look(name, reply, round):
        seen.append(reply)
        return [reply]

    state, _ = serve_with(deployment, rewrite=look)
    assert [reply.header["stage"] for reply in seen] == [s for s in STAGES for _ in "abc"]
    for reply in seen:
        assert set(reply.arrays) == {SECURE_SUM}
        assert "spoken" not in reply.header
    by_stage = {}
    for reply in seen:
        by_stage.setdefault(reply.header["stage"], set()).add(reply.arrays[SECURE_SUM].size)
    assert all(len(sizes) == 1 for sizes in by_stage.values())  # whoever has how many classes
    assert state.members["a"].spoken == []
    saved = MemberCheckpoint.load(deployment.members["a"])
    upload = saved.reply.arrays["prototypes/value.prototypes"].tobytes()
    for reply in seen:
        assert upload[:32] not in reply.arrays[SECURE_SUM].tobytes()


def test_secrets_are_for_the_owner_only_and_deleted_when_they_are_used(make_deployment):
    deployment = make_deployment(FEDPROTO, combiner=SECURE, rounds=1)
    seen: dict[str, set[str]] = {}

    def look(name, reply, round):
        stored = stored_stage(deployment, name)
        path = Path(deployment.members[name].state) / STAGE_FILE
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        seen[reply.header["stage"]] = set(stored["stage"] or {})
        return [reply]

    serve_with(deployment, rewrite=look)
    always = {"terms", "number"}
    assert seen["keys"] == always | {"sharing_private", "masking_seed"}
    assert seen["shares"] == seen["keys"] | {"own_seed", "kept", "keys"}
    assert seen["masked"] == always | {"shares"}  # none of its own secrets
    assert seen["unmasking"] == set()
    assert stored_stage(deployment, "a")["added"] == 1


# --- restarts


def collect_requests(deployment, state):
    """Return the requests of every stage of one round, by stage and member."""
    requests: dict[str, dict[str, Message]] = {}

    class Recording(LocalTransport):
        def exchange(self, kind, asked, timeout):
            if kind == "train":
                requests[stage_of(next(iter(asked.values())))] = asked
            yield from super().exchange(kind, asked, timeout)

    serve_with(deployment, Recording, state=state)
    return requests


def test_a_stage_is_answered_once(make_deployment):
    """Neither shares nor masked values leave a member twice, whoever asks."""
    deployment = make_deployment(FEDPROTO, combiner=SECURE, rounds=1)
    requests = collect_requests(deployment, deployment.state())
    for stage in STAGES[1:]:
        with pytest.raises(MessageError, match="not part of"):
            take_stage(requests[stage]["a"], deployment.members["a"])
    with pytest.raises(ServerBehind, match="round 1 has been added in a secure sum"):
        take_stage(requests["keys"]["a"], deployment.members["a"])


def test_a_round_that_was_trained_for_a_secure_sum_is_not_sent_in_the_clear(make_deployment):
    deployment = make_deployment(FEDPROTO, combiner=SECURE, rounds=1)
    requests = collect_requests(deployment, deployment.state())
    header = {k: v for k, v in requests["masked"]["a"].header.items() if k != SECURE_SUM}
    arrays = {k: v for k, v in requests["masked"]["a"].arrays.items() if k != SECURE_SUM}
    with pytest.raises(RefusedByMember, match="for a secure sum, and does not send it otherwise"):
        train_round(Message(header, arrays), deployment.members["a"])


class Killed(Exception):
    """As if the server's process had ended."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_server_killed_in_a_round_goes_on_and_never_asks_for_both_shares(
    stage, make_deployment, monkeypatch
):
    """Before unmasking it adds the same round again, with new keys; afterwards the next one."""
    deployment = make_deployment(FEDPROTO, combiner=SECURE, rounds=2)
    trained = []
    original = secure_rounds._SecureRound._exchange

    def end(self, now, requests):
        silent = original(self, now, requests)
        if now == stage and not trained:
            trained.append(self.number)
            raise Killed
        return silent

    monkeypatch.setattr(secure_rounds._SecureRound, "_exchange", end)
    with pytest.raises(Killed):
        serve_with(deployment)
    state = deployment.state()  # from its file
    assert state.round == (1 if stage == "unmasking" else 0)
    unmasked: list[tuple[str, int]] = []

    def note(name, reply, round):
        if reply.header.get("stage") == "unmasking":
            unmasked.append((name, round))
        return [reply]

    state, _ = serve_with(deployment, state=state, rewrite=note)
    assert state.round == 2
    assert len(set(unmasked)) == len(unmasked)
    if stage == "unmasking":
        assert unmasked == [(name, 2) for name in "abc"]
    else:
        assert unmasked == [(name, round) for round in (1, 2) for name in "abc"]
    plain = add_uploads(deployment, "abc", state.classes)
    expected = plain["prototypes/prototypes"] / plain["prototypes/weight"][:, None]
    torch.testing.assert_close(state.server["prototypes"].double(), expected, rtol=0, atol=1e-6)


# --- hostile servers and members


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"threshold": 1}, "from 2 to 65535 as 'threshold'"),
        ({"threshold": True}, "as 'threshold'"),
        ({"members": 10**6}, "as 'members'"),
        ({"length": 0}, "as 'length'"),
        ({"bits": 48}, "allow an overflow"),
        ({"fraction_bits": 52, "bits": 32}, "allow an overflow"),
        ({"largest": float("nan")}, "as 'largest'"),
        ({"largest": "1"}, "as 'largest'"),
        ({"session": "zz"}, "hexadecimal"),
        ({"session": 7}, "hexadecimal"),
        ({"position": 3}, "position"),
        ({"position": None}, "position"),
        ({"stage": "both"}, "a stage that a secure sum does not have"),
    ],
)
def test_a_member_refuses_terms_that_are_not_safe(change, sentence, make_deployment):
    deployment = make_deployment(FEDPROTO, combiner=SECURE, rounds=1)
    state = deployment.state()
    attempt = secure_rounds._SecureRound(
        state, state.algorithm.summation, LocalTransport({}, state), print, list("abc")
    )
    request = attempt._make_request("keys", 0, b"")
    asked = request.header[SECURE_SUM] | change
    bad = Message(request.header | {SECURE_SUM: asked}, {})
    with pytest.raises(MessageError, match=sentence):
        take_stage(bad, deployment.members["a"])
    assert not (Path(deployment.members["a"].state) / STAGE_FILE).exists()


def test_a_member_refuses_a_threshold_without_a_majority(make_deployment):
    deployment = make_deployment(FEDPROTO, names="abcd", combiner=SECURE, rounds=1)
    state = deployment.state()
    attempt = secure_rounds._SecureRound(
        state, state.algorithm.summation, LocalTransport({}, state), print, list("abcd")
    )
    request = attempt._make_request("keys", 0, b"")
    asked = request.header[SECURE_SUM] | {"threshold": 2}
    with pytest.raises(ConfigError, match="must be a majority"):
        take_stage(Message(request.header | {SECURE_SUM: asked}, {}), deployment.members["a"])


WRONG = {
    "no bytes": lambda reply: Message(reply.header, {}),
    "another type": lambda reply: Message(
        reply.header, {SECURE_SUM: reply.arrays[SECURE_SUM].astype(np.float32)}
    ),
    "two axes": lambda reply: Message(reply.header, {SECURE_SUM: reply.arrays[SECURE_SUM][None]}),
    "cut off": lambda reply: Message(reply.header, {SECURE_SUM: reply.arrays[SECURE_SUM][:-1]}),
    "an array too many": lambda reply: Message(
        reply.header, reply.arrays | {"more": np.zeros(3, np.uint8)}
    ),
    "another stage": lambda reply: Message(reply.header | {"stage": "masks"}, reply.arrays),
    "another round": lambda reply: Message(reply.header | {"round": 7}, reply.arrays),
    "another's name": lambda reply: Message(reply.header | {"member": "a"}, reply.arrays),
    "a site of two lines": lambda reply: Message(reply.header | {"site": "x\ny"}, reply.arrays),
}


@pytest.mark.parametrize(
    ("wrong", "stage"),
    [*((wrong, "masked") for wrong in WRONG), *(("cut off", stage) for stage in STAGES)],
)
def test_a_wrong_reply_costs_its_sender_the_round_and_nobody_else(wrong, stage, make_deployment):
    deployment = make_deployment(FEDPROTO, **FOUR, rounds=1)

    def spoil(name, reply, round):
        is_wrong = name == "d" and reply.header.get("stage") == stage
        return [WRONG[wrong](reply)] if is_wrong else [reply]

    state, _ = serve_with(deployment, rewrite=spoil)
    assert state.round == 1
    assert state.members["d"].refused == 1
    in_sum = "abcd" if stage == "unmasking" else "abc"
    plain = add_uploads(deployment, in_sum, state.classes)
    expected = plain["prototypes/prototypes"] / plain["prototypes/weight"].clamp(min=1)[:, None]
    torch.testing.assert_close(state.server["prototypes"].double(), expected, rtol=0, atol=1e-6)


def test_a_reply_that_comes_twice_counts_once(make_deployment):
    deployment = make_deployment(FEDPROTO, combiner=SECURE, rounds=1)
    state, _ = serve_with(deployment, rewrite=lambda name, reply, round: [reply, reply])
    assert state.round == 1
    plain = add_uploads(deployment, "abc", state.classes)
    expected = plain["prototypes/prototypes"] / plain["prototypes/weight"][:, None]
    torch.testing.assert_close(state.server["prototypes"].double(), expected, rtol=0, atol=1e-6)


# --- settings


def test_a_member_that_demands_secure_sums_takes_part_in_nothing_else(make_deployment):
    secure = make_deployment(FEDPROTO, combiner=SECURE, rounds=1, where="secure")
    plain = make_deployment(FEDPROTO, rounds=1, where="plain")
    for deployment in (secure, plain):
        own = deployment.members["a"]
        deployment.members["a"] = replace(own, secure_aggregation="required")
    state, _ = serve_with(secure)
    assert state.members["a"].last_round == 1
    assert state.members["a"].accuracy  # it is evaluated, too
    with pytest.raises(TrainingError, match="2 replies accepted"):
        serve_with(plain)


def test_a_member_with_a_class_of_its_own_is_left_out(make_deployment):
    deployment = make_deployment(FEDPROTO, names="abcd", combiner=LENIENT, rounds=1)
    state, _ = serve_with(deployment)  # d has 6
    assert state.members["d"].last_round == 0
    assert "refused-by-member" in state.members["d"].reason


@pytest.mark.parametrize(
    ("algorithm", "changes", "sentence"),
    [
        ("fedproto", {}, "set absent=drop"),
        (FEDPROTO, {"buffer": 2}, "asynchronous rounds take them one by one"),
        (FEDPROTO, {"new_classes": True}, "needs all classes from the start"),
        (FEDPROTO, {"classes": ""}, "needs all classes from the start"),
        (FEDPROTO, {"max_norm": 5.0}, "max-norm is a limit of single uploads"),
        (FEDPROTO, {"max_count_ratio": 5.0}, "max-count-ratio is a limit of single uploads"),
        (FEDPROTO, {"quorum": 2}, "secure-sum needs at least 3 replies"),
        (FEDPROTO, {"max_bytes": 200}, "has up to 624 bytes, but max-bytes is 200"),
        ("fedgh", {}, "needs single uploads, which secure-sum hides"),
        ("fedavg", {"model": "mlp(hidden=20),mlp(hidden=10)"}, "needs members of one model"),
    ],
)
def test_what_secure_sums_do_not_allow_is_refused(algorithm, changes, sentence, make_deployment):
    options = {"combiner": "secure-sum"} | changes
    with pytest.raises(ConfigError, match=sentence):
        make_deployment(algorithm, **options).state()


@pytest.mark.parametrize(
    ("terms", "sentence"),
    [
        ({"transform": "quantise(bits=8)"}, "transform quantise sends codes"),
    ],
)
def test_terms_that_secure_sums_do_not_allow_are_refused(terms, sentence, make_deployment):
    deployment = make_deployment(FEDPROTO, combiner="secure-sum")
    deployment.terms = replace(deployment.terms, **terms)
    with pytest.raises(ConfigError, match=sentence):
        deployment.state()


SMALL_MAP = "random-conv(filters=3,kernel=3,pool=2)"


def deploy_with_teacher(make_deployment, algorithm, terms, **options):
    deployment = make_deployment(algorithm, **options)
    deployment.terms = replace(deployment.terms, **terms)
    sends = "prototypes,weights,counts"
    for name, own in deployment.members.items():
        deployment.members[name] = replace(own, sends=sends)
    return deployment


@pytest.mark.parametrize(
    ("algorithm", "terms"),
    [
        ("closed-form", {"feature_map": SMALL_MAP}),
        (FEDPROTO, {"feature_map": SMALL_MAP, "teacher": "lda"}),
    ],
)
def test_a_closed_form_is_solved_from_one_secure_sum(
    algorithm, terms, make_deployment, member_files
):
    deployment = deploy_with_teacher(make_deployment, algorithm, terms, combiner=SECURE, rounds=2)
    servers, _, _ = simulate(member_files, algorithm, MIXED, count=2, combiner=SECURE, **terms)
    state, _ = serve_with(deployment)
    assert state.round == 2
    served = flatten_state(state.server)
    for name, value in flatten_state(servers[-1]).items():
        torch.testing.assert_close(served[name], value, rtol=1e-5, atol=1e-5, msg=name)
    again = deployment.state()  # from its file
    assert again.once_uploads.last_round.tolist() == [1, 1, 1]
    weights = again.once_uploads.uploads["class_features"].weight
    assert weights[1:].sum() == 0  # the sum of all, and nothing of single members


def test_a_latecomer_is_left_out_of_what_is_sent_once(make_deployment):
    """A sum over one latecomer would be its own upload."""
    terms = {"feature_map": SMALL_MAP, "teacher": "lda"}
    deployment = deploy_with_teacher(make_deployment, FEDPROTO, terms, **FOUR, rounds=2)
    state, _ = serve_with(deployment, there=lambda name, round: name != "d" or round > 1)
    assert state.round == 2
    assert state.members["d"].last_round == 2
    assert state.once_uploads.last_round.tolist() == [1, 1, 1, 0]
    assert state.server["teacher"]["counts"][6] == 0  # only d has this class
    assert state.server["known"][6] == 1


def test_clipped_uploads_are_added_as_they_are_decoded(make_deployment, member_files):
    deployment = make_deployment("fedavg", combiner=SECURE, rounds=1)
    deployment.terms = replace(deployment.terms, transform="clip(norm=0.1)")
    servers, _, _ = simulate(
        member_files, "fedavg", EQUAL, count=1, combiner=SECURE, transform="clip(norm=0.1)"
    )
    state, _ = serve_with(deployment)
    served = flatten_state(state.server)
    for name, value in flatten_state(servers[-1]).items():
        torch.testing.assert_close(served[name], value, rtol=0, atol=1e-5)


def test_an_overflow_keeps_the_upload_at_the_member(make_deployment):
    deployment = make_deployment(FEDPROTO, combiner="secure-sum(largest=0.01)", rounds=1)
    state = deployment.state()
    with pytest.raises(TrainingError, match="only 0 of 3 members sent masked values"):
        serve_with(deployment, state=state)
    assert "training-failed" in state.members["a"].reason
    assert json.dumps(stored_stage(deployment, "a")["stage"]) == "null"


def test_the_settings_are_those_of_the_server_and_no_term_of_training():
    assert ServerSettings(combiner=SECURE).combiner == SECURE
    assert not hasattr(TrainingTerms(), "combiner")
