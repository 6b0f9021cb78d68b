"""A member's own demands and its own ledger of epsilon, which no server can change."""

import contextlib
import json
import logging
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from helpers.command_line import fedproto
from helpers.deployment import Deployment

from fedproto.core.files import read_json
from fedproto.deploy import member
from fedproto.deploy.error_codes import choose_code, describe_code
from fedproto.deploy.member import train_round
from fedproto.deploy.privacy_ledger import (
    YEAR_SECONDS,
    PrivacyLedger,
    find_ledger,
    mark_as_sent,
    reserve_round,
)
from fedproto.deploy.settings import MemberSettings, TrainingTerms, read_member
from fedproto.deploy.status import read_status
from fedproto.errors import (
    BudgetSpent,
    ConfigError,
    MessageError,
    ProtectionTooWeak,
    RunFolderError,
)
from fedproto.privacy.accounting import Release

PRIVATE = TrainingTerms(
    algorithm="fedavg", dim=12, privacy="training", step_noise=1.5, gradient_clip=0.5
)


@pytest.fixture
def private(tmp_path, member_files):
    """A federation whose members train with private steps."""
    deployment = Deployment(tmp_path, member_files["folder"], "fedavg")
    deployment.terms = PRIVATE
    return deployment


def own_settings(folder, **changes):
    return MemberSettings("a", "npz:data.npz", str(folder / "state"), **changes)


# --- the ledger


def test_a_ledger_adds_up_releases_as_googles_accountant_does(tmp_path):
    own = own_settings(tmp_path)
    for round in (1, 2, 3):
        spent = reserve_round(own, "f", round, [Release(1.5, 5, 0.25), Release(8.0)], now=100.0)
        mark_as_sent(own, "f", round)
    accountant = PLDAccountant()
    accountant.compose(PoissonSampledDpEvent(0.25, GaussianDpEvent(1.5)), 15)
    accountant.compose(GaussianDpEvent(8.0), 3)
    assert spent == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-3)
    assert PrivacyLedger.read(own).epsilon(100.0) == pytest.approx(spent)


def test_a_year_later_an_entry_costs_nothing_and_a_day_earlier_all_of_it(tmp_path):
    own = own_settings(tmp_path, max_epsilon_per_year=1.0)
    start = 1e9
    first = reserve_round(own, "f", 1, [Release(5.0)], now=start)
    mark_as_sent(own, "f", 1)
    assert first < 1 < PrivacyLedger.read(own).epsilon(start, [Release(5.0)])
    day_before = start + YEAR_SECONDS - 86400
    with pytest.raises(BudgetSpent, match="max-epsilon-per-year is 1"):
        reserve_round(own, "f", 2, [Release(5.0)], now=day_before)
    assert len(PrivacyLedger.read(own).entries) == 1
    assert reserve_round(own, "f", 2, [Release(5.0)], now=start + YEAR_SECONDS + 1) == first


def test_a_clock_that_is_set_back_does_not_hide_what_was_spent(tmp_path):
    own = own_settings(tmp_path, max_epsilon_per_year=1.0)
    reserve_round(own, "f", 1, [Release(5.0)], now=1e9)
    mark_as_sent(own, "f", 1)
    with pytest.raises(BudgetSpent):
        reserve_round(own, "f", 2, [Release(5.0)], now=1e9 - 3 * YEAR_SECONDS)


def test_two_federations_spend_from_one_budget(tmp_path):
    own = own_settings(tmp_path, max_epsilon_per_year=1.0)
    reserve_round(own, "first", 1, [Release(5.0)])
    mark_as_sent(own, "first", 1)
    with pytest.raises(BudgetSpent):
        reserve_round(own, "second", 1, [Release(5.0)])


def test_a_round_that_was_entered_and_never_sent_is_not_paid_twice(tmp_path):
    own = own_settings(tmp_path)
    first = reserve_round(own, "f", 1, [Release(2.0)])
    assert reserve_round(own, "f", 1, [Release(2.0)]) == first
    assert len(PrivacyLedger.read(own).entries) == 1
    mark_as_sent(own, "f", 1)
    assert reserve_round(own, "f", 1, [Release(2.0)]) > first  # the first one may be out there
    assert len(PrivacyLedger.read(own).entries) == 2


def test_a_release_without_noise_is_never_within_a_budget(tmp_path):
    own = own_settings(tmp_path, max_epsilon_per_year=1e9)
    with pytest.raises(BudgetSpent, match="to inf"):
        reserve_round(own, "f", 1, [Release(0.0)])
    assert not find_ledger(own).exists()


def test_a_ledger_is_readable_by_its_owner_only_and_survives_a_new_state(tmp_path):
    own = own_settings(tmp_path)
    reserve_round(own, "f", 1, [Release(2.0)])
    path = find_ledger(own)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_ledger(replace(own, state=str(tmp_path / "other"))) == path
    assert find_ledger(replace(own, data="npz:other.npz")) != path
    assert find_ledger(replace(own, ledger=str(tmp_path / "mine.json"))) == tmp_path / "mine.json"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-30],
        lambda text: "[]",
        lambda text: text.replace('"noise": 2.0', '"noise": 99.0'),
        lambda text: "",
    ],
)
def test_a_damaged_ledger_is_refused_and_never_begun_anew(tmp_path, damage):
    own = own_settings(tmp_path)
    reserve_round(own, "f", 1, [Release(2.0)])
    path = find_ledger(own)
    path.write_text(damage(path.read_text()))
    before = path.read_text()
    with pytest.raises(RunFolderError, match="privacy-ledger"):
        reserve_round(own, "f", 2, [Release(2.0)])
    assert path.read_text() == before


# --- deployed rounds


def test_a_private_federation_trains_and_every_member_keeps_its_ledger(private):
    state = private.serve()
    assert state.round == 4
    for own in private.members.values():
        ledger = PrivacyLedger.read(own)
        assert [entry.round for entry in ledger.entries] == [1, 2, 3, 4]
        assert all(entry.sent for entry in ledger.entries)
    told = read_status(Path(private.settings.state))["members"]
    for name, own in private.members.items():
        assert told[name]["epsilon"] == pytest.approx(PrivacyLedger.read(own).epsilon(0))


def test_a_members_noise_is_not_the_same_twice(private, tmp_path, member_files):
    request = private.state().make_request("a")
    first = train_round(request, private.members["a"])
    elsewhere = replace(private.members["a"], state=str(tmp_path / "again" / "a"))
    second = train_round(request, elsewhere)
    names = [each for each in first.arrays if each.startswith("model/value.")]
    assert any((first.arrays[each] != second.arrays[each]).any() for each in names)


def test_a_member_stops_before_its_budget_would_be_exceeded(private, tmp_path):
    elsewhere = replace(private.members["a"], state=str(tmp_path / "elsewhere" / "a"))
    train_round(private.state().make_request("a"), elsewhere)
    ledger = PrivacyLedger.read(elsewhere)
    one_round = ledger.epsilon(0)
    two_rounds = ledger.epsilon(0, ledger.entries[0].releases)
    assert one_round < two_rounds
    limit = (one_round + two_rounds) / 2
    private.members["a"] = replace(private.members["a"], max_epsilon_per_year=limit)
    private.settings = replace(private.settings, quorum=2)
    state = private.serve()
    assert state.round == 4  # the others go on
    assert [entry.round for entry in PrivacyLedger.read(private.members["a"]).entries] == [1]
    assert "budget-spent" in state.members["a"].reason


def test_a_member_killed_between_ledger_and_reply_answers_once_and_pays_once(private, monkeypatch):
    own = private.members["a"]
    request = private.state().make_request("a")

    def die(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(member, "train", die)
    with pytest.raises(KeyboardInterrupt):  # after the ledger, before anything is trained
        train_round(request, own)
    (entry,) = PrivacyLedger.read(own).entries
    assert not entry.sent
    monkeypatch.undo()
    monkeypatch.setattr(member.member_privacy, "mark_as_sent", die)
    with pytest.raises(KeyboardInterrupt):  # after the reply is saved, before it leaves
        train_round(request, own)
    monkeypatch.undo()
    first = train_round(request, own)
    again = train_round(request, own)
    assert first.header == again.header
    assert all((first.arrays[name] == again.arrays[name]).all() for name in first.arrays)
    (entry,) = PrivacyLedger.read(own).entries
    assert entry.sent


def test_a_server_that_asks_for_a_round_again_after_the_state_is_lost_pays_again(private):
    own = private.members["a"]
    request = private.state().make_request("a")
    train_round(request, own)
    Path(own.state, "member.safetensors").unlink()
    train_round(request, own)
    assert len(PrivacyLedger.read(own).entries) == 2


def test_no_header_of_a_server_changes_the_ledger(private):
    own = private.members["a"]
    request = private.state().make_request("a")
    train_round(request, own)
    before = read_json(find_ledger(own))
    hostile = {"epsilon": 0.0, "ledger": "/tmp/x", "max_epsilon_per_year": 1e9, "entries": []}
    for changes in (hostile, {"round": 1, "federation": "other"}, {"privacy": "none"}):
        with_changes = replace_header(request, **changes)
        with contextlib.suppress(RunFolderError, MessageError):
            train_round(with_changes, own)
        assert read_json(find_ledger(own)) == before


def replace_header(message, **changes):
    return type(message)(message.header | changes, message.arrays)


# --- what a member demands


@pytest.mark.parametrize(
    ("demand", "terms", "says"),
    [
        ({"privacy": "training"}, {"privacy": "none"}, "`privacy` is 'training'"),
        ({"max_epsilon_per_year": 2.0}, {"privacy": "none"}, "no budget allows"),
        ({"min_noise": 2.0}, {}, "noise of 1.5, but this member's min-noise is 2"),
        ({"secure_aggregation": "required"}, {}, "secure-aggregation is 'required'"),
    ],
)
def test_weaker_protection_than_a_member_demands_is_refused(private, demand, terms, says):
    private.terms = replace(PRIVATE, **terms)
    own = replace(private.members["a"], **demand)
    with pytest.raises(ProtectionTooWeak, match=says) as caught:
        train_round(private.state().make_request("a"), own)
    assert choose_code(caught.value) == "protection-too-weak"
    assert "demand more protection" in describe_code("protection-too-weak")
    assert not find_ledger(own).exists()
    assert not Path(own.state, "member.safetensors").exists()


def test_protection_that_is_enough_is_accepted(private):
    own = replace(
        private.members["a"], privacy="training", min_noise=1.5, max_epsilon_per_year=100.0
    )
    reply = train_round(private.state().make_request("a"), own)
    assert 0 < reply.header["epsilon"] < 100


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"class_weights": "balanced"}, "class_weights"),
        ({"algorithm": "moon"}, "moon"),
        ({"algorithm": "fedgh"}, "fedgh"),
    ],
)
def test_what_private_steps_do_not_cover_is_refused(private, changes, says):
    own = replace(private.members["a"], sends="prototypes,weights,counts")
    request = private.state().make_request("a")
    with pytest.raises(MessageError, match=says):
        train_round(replace_header(request, **changes), own)
    assert not find_ledger(own).exists()


def test_demands_in_a_members_file_are_read_and_checked(tmp_path):
    path = tmp_path / "a.toml"
    lines = ['name = "a"', 'data = "mnist5k"', 'state = "s"', 'ledger = "spent.json"']
    lines += ["max-epsilon-per-year = 3", "min-noise = 1", 'secure-aggregation = "required"']
    path.write_text("\n".join([*lines, 'privacy = "training"']))
    own = read_member(path)
    assert (own.max_epsilon_per_year, own.min_noise) == (3.0, 1.0)
    assert own.ledger == str(tmp_path / "spent.json")
    for bad in ('privacy = "secret"', "max-epsilon-per-year = 0", "epsilon-delta = 1"):
        path.write_text("\n".join([*lines[:4], bad]))
        with pytest.raises(ConfigError):
            read_member(path)


def test_log_and_status_show_what_is_spent(private, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="flwr"):
        train_round(private.state().make_request("a"), private.members["a"])
    assert "spent within a year" in caplog.text
    own = private.members["a"]
    file = tmp_path / "a.toml"
    file.write_text(f'name = "a"\ndata = "{own.data}"\nstate = "{own.state}"\n')
    spent = json.loads(fedproto("deploy", "status", file, "--json").out)
    assert spent["epsilon"] == pytest.approx(PrivacyLedger.read(own).epsilon(0))
    (federation,) = spent["federations"].values()
    assert federation["rounds"] == 1
    table = fedproto("deploy", "status", file)
    assert "no budget is set" in table.out + table.err


# --- sums over records


SUMS_OF_RECORDS = {
    "fedproto": {"privacy": "training", "step_noise": 1.5, "noise_multiplier": 0.3, "clip": 1.0},
    "closed-form": {
        "privacy": "release",
        "noise_multiplier": 0.3,
        "feature_map": "random-conv(filters=3,kernel=3,pool=2)",
    },
}


def deploy_sums(tmp_path, member_files, algorithm, **changes):
    deployment = Deployment(tmp_path, member_files["folder"], algorithm, options={"rounds": 2})
    terms = SUMS_OF_RECORDS[algorithm] | changes
    deployment.terms = replace(deployment.terms, **terms)
    for name, own in deployment.members.items():
        deployment.members[name] = replace(own, sends="prototypes,weights,counts")
    return deployment


@pytest.mark.parametrize("algorithm", SUMS_OF_RECORDS)
def test_sums_over_records_leave_a_member_clipped_and_noisy(tmp_path, member_files, algorithm):
    deployment = deploy_sums(tmp_path, member_files, algorithm)
    request = deployment.state().make_request("a")
    first = train_round(request, deployment.members["a"])
    elsewhere = replace(deployment.members["a"], state=str(tmp_path / "elsewhere" / "a"))
    second = train_round(request, elsewhere)
    (weight_name,) = [name for name in first.arrays if name.endswith("extra.weight")][:1]
    assert (first.arrays[weight_name] % 1 != 0).any()  # counts are not whole numbers
    assert first.header["spoken"] == sorted(set(first.header["spoken"]))
    if first.header["spoken"] == second.header["spoken"]:
        assert (first.arrays[weight_name] != second.arrays[weight_name]).any()
    (entry,) = PrivacyLedger.read(deployment.members["a"]).entries
    expected = [Release(0.3, 1)]
    if algorithm == "fedproto":
        expected = [Release(1.5, 5, 0.2), *expected]  # 40 rows in batches of 8
    assert list(entry.releases) == expected


def test_what_is_sent_once_is_paid_once(tmp_path, member_files):
    deployment = deploy_sums(tmp_path, member_files, "closed-form")
    state = deployment.serve()
    assert state.round == 2
    for own in deployment.members.values():
        costs = [entry.releases for entry in PrivacyLedger.read(own).entries]
        assert costs == [(Release(0.3, 1),), ()]


def test_a_private_fedproto_federation_learns_prototypes(tmp_path, member_files):
    deployment = deploy_sums(tmp_path, member_files, "fedproto", noise_multiplier=0.05)
    state = deployment.serve()
    assert state.round == 2
    assert state.server["known"].all()
    norms = state.server["prototypes"].norm(dim=1)
    assert float(norms.max()) < 2  # means of embeddings that are clipped to 1, and little noise


@pytest.mark.parametrize(
    ("algorithm", "terms", "says"),
    [
        ("fedproto", {"noise_multiplier": 0.0}, "needs `noise-multiplier`"),
        ("fedproto", {"step_noise": 0.0}, "needs `step-noise`"),
        ("fedproto", {"privacy": "release"}, "needs privacy=training"),
        ("closed-form", {"noise_multiplier": 0.0}, "needs `noise-multiplier`"),
        ("closed-form", {"privacy": "training", "step_noise": 1.0}, "closed-form sends something"),
    ],
)
def test_a_server_refuses_to_ask_for_what_nobody_can_give(
    tmp_path, member_files, algorithm, terms, says
):
    deployment = deploy_sums(tmp_path, member_files, algorithm, **terms)
    with pytest.raises(ConfigError, match=says):
        deployment.state()


def test_the_least_noise_counts_where_there_are_two(tmp_path, member_files):
    deployment = deploy_sums(tmp_path, member_files, "fedproto")
    own = replace(deployment.members["a"], min_noise=1.0)
    with pytest.raises(ProtectionTooWeak, match=r"noise of 0\.3"):
        train_round(deployment.state().make_request("a"), own)
