"""Clients that are sampled independently and in secret: amplification, and what it needs."""

import json
import math

import dp_accounting
import pytest
import torch
from helpers.canaries import lower_bound
from helpers.tiny import SETTINGS, build, experiment, finished

from fedproto.config.settings import configure
from fedproto.core.entropy import Entropy
from fedproto.core.sampling import Schedule, sample_cohort
from fedproto.core.tensors import flatten_state
from fedproto.core.types import Group, Task
from fedproto.errors import ConfigError
from fedproto.privacy.accounting import Release, compute_epsilon
from fedproto.privacy.mechanism import protect
from fedproto.privacy.noisy_uploads import Protection
from fedproto.runs.execution import execute
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.sweep import _stack_key

POISSON = {"privacy": "client", "client_sampling": "poisson", "participation": 0.5}
SEEDED = POISSON | {"noise_multiplier": 0.3, "noise_source": "seeded"}
NEVER = 1e-9  # a participation with which no client is ever sampled


# --- the sampler


def test_every_client_is_drawn_independently_with_the_same_probability():
    rounds = 1000
    schedule = Schedule(rounds, participation=0.3, secret=Entropy())
    drawn = torch.zeros(rounds, 5)
    for round in range(rounds):
        drawn[round, sample_cohort(5, schedule, round).sampled] = 1
    # Five standard deviations of a share, and of a covariance of independent draws.
    assert (drawn.mean(0) - 0.3).abs().max() < 5 * math.sqrt(0.3 * 0.7 / rounds)
    covariance = torch.cov(drawn.T)
    off_diagonal = covariance - covariance.diag().diag()
    assert off_diagonal.abs().max() < 5 * 0.3 * 0.7 / math.sqrt(rounds)


def test_secret_samples_come_from_the_operating_system_and_seeded_ones_repeat():
    secret = Schedule(1, participation=0.5, seed=3, secret=Entropy())
    drawn = {tuple(sample_cohort(60, secret, 1).sampled.tolist()) for _ in range(5)}
    assert len(drawn) == 5
    seeded = Schedule(1, participation=0.5, seed=3, secret=Entropy(seed=3))
    first = sample_cohort(60, seeded, 1)
    assert torch.equal(first.sampled, sample_cohort(60, seeded, 1).sampled)
    assert not torch.equal(first.sampled, sample_cohort(60, seeded, 2).sampled)


def test_what_happens_to_a_client_does_not_depend_on_who_else_is_sampled():
    """Whose upload is lost, and who is slow, is the same in any cohort of the round."""
    schedule = Schedule(1, 0.5, lost_uploads=0.4, stragglers=0.4, secret=Entropy())
    lost = {}
    slow = {}
    for _ in range(40):
        cohort = sample_cohort(30, schedule, 1)
        for client in cohort.sampled.tolist():
            is_lost = client in cohort.lost.tolist()
            is_slow = client in cohort.slow.tolist()
            assert lost.setdefault(client, is_lost) == is_lost
            assert slow.setdefault(client, is_slow) == is_slow
    assert len(lost) == 30 and 0 < sum(lost.values()) < 30


def test_a_cohort_is_drawn_once_per_round():
    run = experiment("fedavg", noise_multiplier=0.3, **POISSON).federation_run()
    cohorts = [run.plan_round(1)[0].sampled.tolist() for _ in range(20)]
    assert all(cohort == cohorts[0] for cohort in cohorts)


# --- the price


@pytest.mark.parametrize(("noise", "rounds", "rate"), [(1.0, 30, 0.1), (0.7, 5, 0.5)])
def test_rounds_cost_what_googles_accountant_says_of_poisson_samples(noise, rounds, rate):
    settings = POISSON | {"participation": rate, "noise_multiplier": noise, "rounds": rounds}
    plan = experiment("fedavg", **settings).algorithm.privacy
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(event, rounds)
    spent = compute_epsilon(plan.price(0, 0, rounds, 0), 1e-5)
    assert spent == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-3)
    assert spent < compute_epsilon([Release(noise, rounds)], 1e-5)


def test_a_published_value_of_tensorflow_privacy_holds_for_sampled_clients():
    # compute_dp_sgd_privacy_test.py: 60,000 units, 150 in a step, noise 1.3, 15 epochs, 1e-5
    settings = POISSON | {"participation": 150 / 60_000, "noise_multiplier": 1.3, "rounds": 6000}
    plan = experiment("fedavg", **settings).algorithm.privacy
    releases = plan.price(0, 0, 6000, 0)
    assert compute_epsilon(releases, 1e-5, "rdp") == pytest.approx(0.7242234026, abs=1e-3)


def test_everybody_pays_for_every_round_and_the_noise_for_a_budget_just_keeps_it():
    run, result = finished("fedavg", epsilon=4.0, rounds=2, **POISSON)
    assert run.budget.rounds.tolist() == [2, 2, 2, 2]
    spent = result.metrics[-1]["epsilon"]
    assert len(set(spent)) == 1 and 3.99 <= spent[0] <= 4.0
    plain = experiment("fedavg", privacy="client", epsilon=4.0, rounds=2).algorithm.privacy
    assert run.algorithm.privacy.protection.noise < plain.protection.noise


def test_a_run_ends_before_a_round_that_would_exceed_the_budget():
    limit = compute_epsilon([Release(2.0, 2, 0.5)], 1e-5) + 1e-6
    _, result = finished("fedavg", noise_multiplier=2.0, epsilon=limit, rounds=9, **POISSON)
    assert result.data["rounds"] == 2 and result.metrics[-1]["accuracy"] is not None


def test_a_stopped_run_goes_on_with_what_it_has_spent(tmp_path):
    run = experiment("fedavg", noise_multiplier=1.0, rounds=3, **POISSON)
    folder = run.new_folder(tmp_path / "run")
    execute([run], [folder], until=2)
    resumed, reopened = reopen(folder)
    assert resumed.budget.rounds.tolist() == [2] * 4
    result = resumed.execute(reopened)
    wanted = compute_epsilon([Release(1.0, 3, 0.5)], 1e-5)
    assert result.metrics[-1]["epsilon"] == [pytest.approx(wanted)] * 4


# --- the mechanism


def test_a_round_without_clients_still_releases_noise_of_the_promised_size():
    """Else everybody would see that nobody was sampled."""
    settings = POISSON | {"participation": NEVER, "noise_multiplier": 0.5, "rounds": 2}
    run = experiment("fedavg", **settings)
    before = {name: value.clone() for name, value in flatten_state(run.progress.server).items()}
    result = run.execute()
    assert [line["participants"] for line in result.metrics] == [[], []]
    assert result.metrics[0]["loss"] == {} and result.metrics[0]["bytes_up"] == 0
    after = flatten_state(run.progress.server)
    names = [name for name in before if not name.startswith("privacy/")]
    change = torch.cat([(after[name] - before[name]).flatten() for name in names])
    expected = NEVER * 4
    deviation = 0.5 * math.sqrt(2) / expected  # of two rounds, divided by the expected number
    assert float(change.std()) == pytest.approx(deviation, rel=0.2)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_models_are_divided_by_the_expected_number_of_clients(engine):
    """By hand: with hardly any noise, old + Σ clipped changes / (q × clients)."""
    settings = POISSON | {"participation": 0.6, "noise_source": "seeded", "rounds": 1}
    run = experiment("fedavg", noise_multiplier=1e-9, clip=0.01, engine=engine, seed=1, **settings)
    old = {name: value.clone() for name, value in run.progress.server.items() if name != "privacy"}
    result = run.execute()
    participants = result.metrics[0]["participants"]
    assert 0 < len(participants) < 4
    total = {name: torch.zeros_like(value) for name, value in old.items()}
    for client in participants:
        state = run.engine.export(0)
        change = {name: state[f"{client}.{name}"] - value for name, value in old.items()}
        length = torch.cat([value.flatten() for value in change.values()]).norm()
        factor = min(1.0, 0.01 / float(length))
        for name, value in change.items():
            total[name] += factor * value
    for name, value in old.items():
        torch.testing.assert_close(
            run.progress.server[name], value + total[name] / (0.6 * 4), rtol=0, atol=1e-7
        )


@pytest.mark.parametrize("algorithm", ["fedavg", "fedproto(absent=drop)", "fedadam"])
def test_engines_agree_on_seeded_samples(algorithm):
    name, _, option = algorithm.partition("(")
    settings = SEEDED | ({"absent": "drop"} if option else {})
    reference, first = finished(name, **settings)
    vectorised, second = finished(name, engine="vectorised", **settings)
    one = flatten_state(reference.progress.server)
    other = flatten_state(vectorised.progress.server)
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=1e-8, atol=1e-8)
    cohorts = [line["participants"] for line in first.metrics]
    assert cohorts == [line["participants"] for line in second.metrics]


# --- an attack


def test_an_attack_on_a_client_proves_some_epsilon_but_never_more_than_promised():
    """The attacker chooses what the client sends, knows all others, and sees the new model.

    The cohort is drawn and the noise is added by what a run uses, in the seeded mode.
    """
    noise = 1.0
    rate = 0.5
    trials = 2000
    params = {"w": torch.zeros(3)}
    task = Task(2, 3, clients=2, seed=0)
    algorithm = build("fedavg")
    protection = Protection("client", noise, 1.0, at="server", seeded=True, sampling=rate)
    protected = protect(algorithm, protection, algorithm.declare(params, task))
    canary = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    schedule = Schedule(trials, participation=rate, secret=Entropy(seed=1))

    def score(has_canary, seed):
        server = protected.init(params, task._replace(seed=seed))
        kept = server["privacy"]
        scores = []
        for trial in range(trials):
            is_in = 0 in sample_cohort(2, schedule, trial).sampled
            sums = canary * float(has_canary and is_in)
            total = {"model": Group({"w": sums[None]}, torch.ones(1, dtype=torch.float64))}
            server = protected.aggregate(params | {"privacy": kept}, total)
            kept = server["privacy"]
            scores.append(server["w"][0])
        return torch.stack(scores).double()

    promised = compute_epsilon([Release(noise, 1, rate)], 1e-5)
    proved = lower_bound(score(True, 1), score(False, 2), 1e-5)
    assert promised / 10 < proved <= promised


# --- the claim


def test_the_claim_says_what_sampling_needs_to_stay_secret(tmp_path):
    run = experiment("fedavg", noise_multiplier=1.0, **POISSON)
    result = run.execute(run.new_folder(tmp_path / "run"))
    claim = result.data["privacy"]
    assert claim["holds"] and claim["epsilon"] == max(result.metrics[-1]["epsilon"])
    assert "amplification by sampling" in claim["accountant"]
    assert "with probability 0.5" in claim["mechanism"]
    assert any("learns in which rounds" in line for line in claim["assumes"])
    assert not any("clients in a round is public" in line for line in claim["assumes"])
    assert any("metrics.jsonl" in line for line in claim["does_not_cover"])
    assert json.loads((tmp_path / "run/privacy.json").read_text())["claim"] == claim


def test_cohorts_of_a_fixed_size_are_not_counted_in_anybodys_favour():
    settings = {"privacy": "client", "noise_multiplier": 2.0, "participation": 0.5, "rounds": 2}
    run, result = finished("fedavg", **settings)
    assert "without amplification" in result.data["privacy"]["accountant"]
    most = int(run.budget.rounds.max())
    spent = compute_epsilon([Release(2.0, most)], 1e-5)
    assert result.data["privacy"]["epsilon"] == pytest.approx(spent)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"client_sampling": "poisson"}, "set privacy to release, training or client"),
        (
            {"client_sampling": "poisson", "privacy": "training", "epsilon": 1},
            "privacy=training does not protect",
        ),
        (POISSON | {"epsilon": 1, "combiner": "secure-sum"}, "members of a secure sum know"),
        (POISSON | {"epsilon": 1, "client_sampling": "often"}, "client_sampling"),
        (
            POISSON | {"epsilon": 1, "teacher": "lda", "feature_map": "flat"},
            "sends .* once: leave client_sampling out",
        ),
    ],
)
def test_sampling_that_protects_nobody_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        experiment("fedavg", **settings)


def test_federations_of_one_stack_have_one_probability():
    settings = SETTINGS | POISSON | {"algorithm": "fedavg", "epsilon": 1.0}
    configs = [configure(settings | {"participation": q})[0] for q in (0.5, 0.25)]
    with pytest.raises(ConfigError, match="one participation"):
        Experiment.prepare_together(configs)
    assert _stack_key(configs[0]) != _stack_key(configs[1])
