"""A deployed server that adds noise to the sum: parity, bounds, budgets, restarts and refusals."""

import json
from dataclasses import replace

import pytest
import torch
from helpers.command_line import fedproto
from helpers.deployment import EQUAL, MIXED, LocalTransport, serve_to, simulate

from fedproto.core.tensors import flatten_state
from fedproto.deploy.contributions import read_contribution, write_contribution
from fedproto.deploy.member_privacy import refuse_weak_protection
from fedproto.deploy.member_record import MemberRecord
from fedproto.deploy.messages import Message
from fedproto.deploy.privacy_ledger import PrivacyLedger
from fedproto.deploy.rebuilding import rebuild_state
from fedproto.deploy.server_backup import back_up_server, restore_server
from fedproto.deploy.server_privacy import SumPrivacy
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.settings import ServerSettings, TrainingTerms, split_run_config
from fedproto.deploy.status import read_status
from fedproto.errors import ConfigError, ProtectionTooWeak, RunFolderError
from fedproto.privacy.accounting import Release, compute_epsilon
from fedproto.privacy.noisy_uploads import Protection

FEDPROTO = "fedproto(absent=drop)"
SECURE = "secure-sum(error=1e-9,largest=1e5)"
QUIET = 1e-9  # noise that no digit shows


@pytest.fixture
def make_noisy(make_deployment):
    def made(algorithm="fedavg", noise=2.0, clip=0.5, **options):
        deployment = make_deployment(algorithm, **options)
        deployment.terms = replace(
            deployment.terms, privacy="client", noise_multiplier=noise, clip=clip
        )
        return deployment

    return made


def flat_server(state):
    return {
        name: value
        for name, value in flatten_state(state.server).items()
        if not name.startswith("privacy/")
    }


# --- what the server makes of the replies


@pytest.mark.parametrize("combiner", ["sum", SECURE])
@pytest.mark.parametrize("algorithm", ["fedavg", FEDPROTO])
def test_with_next_to_no_noise_every_round_gives_the_simulators_numbers(
    algorithm, combiner, make_noisy, member_files
):
    models = EQUAL if algorithm == "fedavg" else MIXED
    servers, _, _ = simulate(
        member_files,
        algorithm,
        models,
        count=2,
        combiner=combiner,
        privacy="client",
        noise_multiplier=QUIET,
        clip=0.5,
    )
    deployment = make_noisy(algorithm, QUIET, combiner=combiner, rounds=2)
    state = deployment.serve()
    assert state.round == 2
    served = flat_server(state)
    for name, value in flatten_state(servers[-1]).items():
        if not name.startswith("privacy/"):
            torch.testing.assert_close(served[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("combiner", ["sum", SECURE])
def test_the_noise_on_a_model_has_the_promised_size(combiner, make_noisy):
    quiet = make_noisy("fedavg", QUIET, combiner=combiner, rounds=1, where="quiet")
    noisy = make_noisy("fedavg", 2.0, combiner=combiner, rounds=1, where="noisy")
    one = flat_server(quiet.serve())
    other = flat_server(noisy.serve())
    difference = torch.cat([(other[name] - one[name]).flatten() for name in one]).double()
    promised = 2.0 * 0.5 / 3  # noise · clip on the sum, divided by three members
    assert float(difference.std()) == pytest.approx(promised, rel=0.15)


def test_a_reply_beyond_its_bounds_is_brought_back_to_them(make_noisy):
    deployment = make_noisy("fedavg", QUIET, rounds=1)

    def exaggerate(name, reply, round):
        arrays = dict(reply.arrays)
        if name == "b":
            for key in [key for key in arrays if "/value." in key]:
                arrays[key] = arrays[key] * 1000
        return [Message(reply.header, arrays)]

    state = deployment.state()
    before = flat_server(state)
    deployment.serve(state, rewrite=exaggerate)
    assert all(member.last_round == 1 for member in state.members.values())
    after = flat_server(state)
    change = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm()
    assert float(change) <= 0.5 * (1 + 1e-5)  # the mean of three changes no longer than clip


def test_members_are_not_judged_by_each_other(make_noisy):
    deployment = make_noisy(FEDPROTO, max_norm_ratio=1.0001, max_count_ratio=1.0001, rounds=1)
    state = deployment.serve()
    assert [member.refused for member in state.members.values()] == [0, 0, 0]


# --- what it costs


def test_a_round_is_on_record_before_anybody_is_asked(make_noisy):
    deployment = make_noisy(rounds=2)
    state = deployment.state()
    stored = []

    class Watching(LocalTransport):
        def exchange(self, kind, requests, timeout):
            if kind == "train":
                status = read_status(state.path)
                stored.append([member["epsilon"] for member in status["members"].values()])
            yield from super().exchange(kind, requests, timeout)

    from fedproto.deploy.round_protocol import serve

    serve(state, Watching(deployment.members, state), deployment.said.append)
    one = compute_epsilon([Release(2.0, 1)], 1e-5)
    two = compute_epsilon([Release(2.0, 2)], 1e-5)
    assert stored == [[pytest.approx(one)] * 3, [pytest.approx(two)] * 3]


@pytest.mark.parametrize("combiner", ["sum", SECURE])
def test_a_federation_ends_before_its_budget_would_be_exceeded(combiner, make_noisy):
    limit = compute_epsilon([Release(2.0, 2)], 1e-5) + 1e-6
    deployment = make_noisy(epsilon=limit, rounds=9, combiner=combiner)
    state = deployment.serve()
    assert state.round == 2
    assert all(member.epsilon <= limit for member in state.members.values())
    assert any("would exceed the epsilon" in line for line in deployment.said)
    again = deployment.serve(deployment.state())  # a restart changes nothing
    assert again.round == 2


def test_who_has_spent_its_budget_is_left_out_and_the_others_go_on(make_noisy):
    limit = compute_epsilon([Release(2.0, 2)], 1e-5) + 1e-6
    deployment = make_noisy(
        names="abcd", epsilon=limit, rounds=3, quorum=2, classes="0,1,2,3,4,5,6"
    )
    state = deployment.serve(there=lambda name, round: name in "ab" or round > 1)
    assert state.round == 3
    assert {name: member.charges for name, member in state.members.items()} == dict.fromkeys(
        "abcd", 2
    )
    assert state.members["c"].last_round == 3 and state.members["a"].last_round == 2


def test_a_server_that_is_killed_in_a_round_has_paid_for_it_and_pays_once(make_noisy):
    deployment = make_noisy(rounds=2)
    state = deployment.state()

    def fall(name, round):
        if round == 2 and name == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deployment.serve(state, after=fall)
    loaded = deployment.state()
    assert loaded.round == 1
    assert [member.charges for member in loaded.members.values()] == [2, 2, 2]
    finished = deployment.serve(loaded)
    assert finished.round == 2
    assert [member.charges for member in finished.members.values()] == [2, 2, 2]


def test_rounds_of_different_noise_add_up_exactly():
    member = MemberRecord(0)
    for round, noise in enumerate((2.0, 2.0, 5.0), start=1):
        protection = Protection("client", noise, 1.0, at="server")
        privacy = SumPrivacy(protection, 1e-5, None)
        privacy.charge(member, round)
        privacy.charge(member, round)  # the same round once more
    expected = compute_epsilon([Release(2.0, 2), Release(5.0)], 1e-5)
    assert privacy.compute_spent(member) == pytest.approx(expected, abs=1e-6)


def test_the_status_shows_epsilon_and_the_claim(make_noisy):
    deployment = make_noisy(rounds=1)
    state = deployment.serve()
    status = read_status(state.path)
    epsilon = compute_epsilon([Release(2.0)], 1e-5)
    claim = status["privacy"]["claim"]
    assert claim["holds"] and claim["epsilon"] == pytest.approx(epsilon)
    assert claim["releases"] == 1 and "one member with all its records" in claim["statement"]
    shown = fedproto("deploy", "status", state.path.parent)
    assert f"{epsilon:.3g}" in shown.out
    assert "differential privacy of one member" in " ".join(shown.out.split())
    as_json = json.loads(fedproto("deploy", "status", state.path.parent, "--json").out)
    assert as_json["members"]["a"]["epsilon"] == pytest.approx(epsilon)


# --- members


def test_a_member_enters_the_noise_that_the_server_promises(make_noisy):
    deployment = make_noisy(rounds=2)
    deployment.serve()
    ledger = PrivacyLedger.read(deployment.members["a"])
    assert [entry.round for entry in ledger.entries] == [1, 2]
    import time

    expected = compute_epsilon([Release(2.0, 2)], 1e-5)
    assert ledger.epsilon(time.time()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("demand", "says"),
    [({"privacy": "release,training"}, "privacy=client"), ({"min_noise": 3.0}, "noise of 2")],
)
def test_a_member_may_refuse_to_trust_the_server_with_the_noise(demand, says, make_noisy):
    deployment = make_noisy()
    own = replace(deployment.members["a"], **demand)
    with pytest.raises(ProtectionTooWeak, match=says):
        refuse_weak_protection(deployment.terms, own)


# --- what is refused


@pytest.mark.parametrize(
    ("algorithm", "terms", "settings", "says"),
    [
        (FEDPROTO, {"noise_multiplier": 0.0}, {}, "needs `noise-multiplier`"),
        (FEDPROTO, {"transform": "quantise"}, {}, "leave transform or privacy out"),
        (FEDPROTO, {}, {"combiner": "median"}, "leave combiner out"),
        (FEDPROTO, {}, {"buffer": 2}, "leave buffer or privacy out"),
        (FEDPROTO, {}, {"new_classes": True}, "without new-classes"),
        (FEDPROTO, {}, {"classes": ""}, "list them as `classes`"),
        (FEDPROTO, {}, {"epsilon": 0.01}, "more than the budget of 0.01"),
        ("fedproto", {}, {}, "such as absent=drop"),
        (
            "closed-form",
            {"feature_map": "random-conv(filters=4)"},
            {},
            "once: use privacy=release",
        ),
        (
            "fedavg",
            {},
            {"model": "mlp(hidden=20),mlp(hidden=30)", "shape": "1,8,8"},
            "members of one model",
        ),
        (FEDPROTO, {"privacy": "none"}, {"epsilon": 1.0}, "set privacy to client, too"),
        (FEDPROTO, {"privacy": "none"}, {"delta": 1e-6}, "set privacy to client, too"),
    ],
)
def test_what_no_claim_covers_is_refused_in_one_sentence(
    algorithm, terms, settings, says, tmp_path
):
    stated = {"algorithm": algorithm, "dim": 4, "privacy": "client", "noise_multiplier": 2.0}
    given = {"state": str(tmp_path), "classes": "x,y,z"} | settings
    with pytest.raises(ConfigError, match=says):
        ServerState(ServerSettings(**given), TrainingTerms(**(stated | terms)))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"epsilon": -1.0}, "epsilon must be a number of at least 0"),
        ({"delta": 0.0}, "delta must be a number above 0"),
        ({"delta": 1.0}, "delta must be a number above 0 and at most 0.1"),
        ({"clip": 0.0}, "clip must be a number above 0"),
        ({"noise-multiplier": -1.0}, "noise_multiplier must be a number of at least 0"),
        ({"privacy": "secret"}, "unknown value of privacy"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_sentence(given, says):
    with pytest.raises(ConfigError, match=says):
        split_run_config(given, "pyproject.toml")


def test_a_state_without_noise_does_not_become_a_private_one(make_noisy, make_deployment):
    plain = make_deployment(FEDPROTO, rounds=1)
    plain.serve()
    noisy = make_noisy(FEDPROTO, rounds=2)
    with pytest.raises(RunFolderError, match="one claim cannot cover both"):
        noisy.state()


def test_a_backup_that_would_set_budgets_back_is_refused(make_noisy, tmp_path):
    deployment = make_noisy()
    state = serve_to(deployment, 1)
    backup = back_up_server(state.path, tmp_path / "backups")
    with pytest.raises(ConfigError, match="their budgets would go back: begin a new federation"):
        restore_server(backup.path, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_a_server_whose_budgets_are_lost_is_not_rebuilt(make_noisy, tmp_path):
    deployment = make_noisy()
    state = serve_to(deployment, 1)
    file = write_contribution(deployment.members["a"], tmp_path)
    state.path.unlink()
    with pytest.raises(ConfigError, match="their budgets would go back: begin a new federation"):
        rebuild_state(state.settings, state.terms, [read_contribution(file)])
    assert not state.path.exists()
