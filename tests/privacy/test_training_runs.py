"""Runs with privacy=training: one accountant over steps and uploads, a claim, and a budget."""

import json

import dp_accounting
import pytest
import torch
from helpers.engine_comparison import largest_difference
from helpers.tiny import SETTINGS, experiment

from fedproto.config.settings import configure
from fedproto.core.tensors import flatten_state
from fedproto.errors import ConfigError
from fedproto.privacy import training_plan
from fedproto.privacy.accounting import Release, compute_epsilon
from fedproto.runs.execution import execute
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder

SEEDED = {
    "privacy": "training",
    "noise_source": "seeded",
    "step_noise": 0.8,
    "noise_multiplier": 3.0,
    "gradient_clip": 0.5,
}


#: Clients with equally many rows cost the same, which the accountant computes once.
EQUAL = {"clients": 2, "ways": 3, "stdev": 0, "shots": 8}


def final_state(run):
    run.execute()
    return {name: value.clone() for name, value in run.engine.export(0).items()}


@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg", "local"])
def test_steps_and_uploads_are_composed_by_one_accountant(algorithm, tmp_path):
    given = {"step_noise": 1.3} | ({"noise_multiplier": 5.0} if algorithm == "fedproto" else {})
    run = experiment(algorithm, privacy="training", rounds=3, epochs=2, **given, **EQUAL)
    folder = run.new_folder(tmp_path / "run")
    run.execute(folder)
    (*_, last) = folder.keep_metrics(3)
    for client, member in enumerate(run.federation.members):
        rows = len(member.train)
        accountant = dp_accounting.pld.PLDAccountant()
        step = dp_accounting.PoissonSampledDpEvent(
            min(1.0, 4 / rows), dp_accounting.GaussianDpEvent(1.3)
        )
        accountant.compose(step, 3 * 2 * -(-rows // 4))
        if algorithm == "fedproto":
            accountant.compose(dp_accounting.GaussianDpEvent(5.0), 3)
        expected = accountant.get_epsilon(1e-5)
        assert last["epsilon"][client] == pytest.approx(expected, abs=1e-3)
    stored = json.loads((tmp_path / "run" / "privacy.json").read_text())["claim"]
    assert stored["holds"]
    assert stored["epsilon"] == pytest.approx(max(last["epsilon"]))
    assert "models of all clients" in stored["covers"]
    assert "is public" in stored["assumes"][0]


@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg"])
def test_the_noise_for_a_budget_just_keeps_it(algorithm):
    run = experiment(algorithm, privacy="training", epsilon=2.0, rounds=2, **EQUAL)
    run.execute()
    spent = run.budget.epsilons()
    assert 1.99 <= max(spent) <= 2.0
    plan = run.algorithm.privacy
    assert plan.steps.noise > 0 and (plan.protection.noise > 0) == (algorithm == "fedproto")


def test_a_run_stops_before_its_budget_would_be_exceeded():
    run = experiment("fedavg", privacy="training", step_noise=3.0, epsilon=1.5, rounds=50, **EQUAL)
    run.execute()
    done = run.progress.round
    assert 0 < done < 50
    plan = run.algorithm.privacy
    costs = [plan.price(0, client, done + 1, 0) for client in range(2)]
    assert max(run.budget.epsilons()) <= 1.5
    assert max(compute_epsilon(releases, 1e-5) for releases in costs) > 1.5


def test_the_client_that_spends_most_decides_the_noise():
    small = training_plan.Case(5, training_plan.StepCount(2, 0.5))
    large = training_plan.Case(5, training_plan.StepCount(50, 0.02))
    noise = training_plan._find_for_all(
        [large, small], lambda case, each: case.step_count.releases(each, case.rounds), 1.0, 1e-5
    )
    spent = [compute_epsilon(case.step_count.releases(noise, 5), 1e-5) for case in (small, large)]
    assert max(spent) == pytest.approx(1.0, abs=2e-3) and max(spent) <= 1.0


@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg"])
def test_without_bounds_noise_and_sampling_a_run_is_the_plain_one(algorithm):
    unprotected = {"privacy": "training", "step_noise": 0.0, "gradient_clip": "none"}
    if algorithm == "fedproto":
        unprotected |= {"noise_multiplier": 0.0, "clip": "none"}
    settings = {"batch": 1000, "rounds": 3, "local_steps": 2}
    run = experiment(algorithm, **settings, **unprotected)
    private = final_state(run)
    assert not run.claim().holds
    assert largest_difference(private, final_state(experiment(algorithm, **settings))) < 1e-12


@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg"])
def test_both_engines_agree_on_seeded_private_runs(algorithm):
    settings = dict(SEEDED)
    if algorithm == "fedavg":
        del settings["noise_multiplier"]
    reference = experiment(algorithm, rounds=2, **settings, **EQUAL)
    vectorised = experiment(algorithm, rounds=2, engine="vectorised", **settings, **EQUAL)
    assert vectorised.config.engine == "vectorised", vectorised.notices
    assert largest_difference(final_state(reference), final_state(vectorised)) < 1e-8
    servers = [flatten_state(run.progress.server) for run in (reference, vectorised)]
    assert largest_difference(*servers) < 1e-8
    assert "test" in str(reference.claim())


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    whole = final_state(experiment("fedproto", rounds=3, **SEEDED, **EQUAL))
    first = experiment("fedproto", rounds=3, **SEEDED, **EQUAL)
    folder = first.new_folder(tmp_path / "run")
    execute([first], [folder], until=2)
    again = experiment("fedproto", rounds=3, **SEEDED, **EQUAL)
    again.restore(RunFolder(tmp_path / "run"))
    assert again.progress.round == 2
    again.execute(RunFolder(tmp_path / "run"))
    resumed = again.engine.export(0)
    assert largest_difference(resumed, whole) == 0
    assert again.budget.rounds.tolist() == [3, 3]  # every round was paid for once


def test_two_private_runs_of_one_seed_differ():
    settings = {"privacy": "training", "step_noise": 1.0, "rounds": 1}
    first = final_state(experiment("fedavg", **settings))
    assert largest_difference(first, final_state(experiment("fedavg", **settings))) > 1e-6


@pytest.mark.parametrize(
    ("algorithm", "settings", "says"),
    [
        ("moon", {}, "moon"),
        ("scaffold", {}, "scaffold"),
        ("fedtgp", {}, "fedtgp"),
        ("feddistill", {}, "feddistill"),
        ("fedproto", {"collect": "during"}, "collect=after"),
        ("fedproto", {"regularise": "class"}, "regularise=sample"),
        ("fedproto", {"weighting": "uniform"}, "weighting=samples"),
        ("fedavg", {"class_weights": "balanced"}, "class_weights"),
        ("fedavg", {"sampling": "balanced"}, "class_weights"),
        ("fedavg", {"validation": 0.2}, "validation"),
        ("fedavg", {"noise_multiplier": 1.0}, "set step_noise instead"),
        ("fedavg", {"gradient_clip": "none"}, "clip"),
        ("fedavg", {"buffer": 2}, "asynchronous"),
    ],
)
def test_what_no_claim_covers_is_refused_before_anything_is_trained(algorithm, settings, says):
    with pytest.raises(ConfigError, match=says):
        experiment(algorithm, privacy="training", epsilon=5.0, **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"privacy": "training"}, "needs epsilon, the budget, or step_noise"),
        ({"privacy": "release", "epsilon": 1.0, "step_noise": 1.0}, "step_noise is for steps"),
        ({"step_noise": 1.0}, "step_noise is for runs with differential privacy"),
        ({"gradient_clip": 2.0}, "gradient_clip is for runs"),
        ({"privacy": "training", "step_noise": 1.0, "gradient_clip": 0}, "above 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        configure(SETTINGS | {"algorithm": "fedavg"} | settings)


def test_fedproto_needs_the_noise_of_uploads_too():
    with pytest.raises(ConfigError, match="needs noise_multiplier, too, or epsilon"):
        experiment("fedproto", privacy="training", step_noise=1.0)


def test_a_budget_below_one_round_is_refused():
    with pytest.raises(ConfigError, match="the first round costs an epsilon"):
        experiment("fedavg", privacy="training", step_noise=0.5, epsilon=0.5)


def test_experiments_trained_together_have_prices_of_their_own(tmp_path):
    settings = SETTINGS | {"algorithm": "fedavg", "privacy": "training", "step_noise": 2.0}
    configs = [configure(settings | {"seed": seed})[0] for seed in (0, 1)]
    runs = Experiment.prepare_together(configs)
    plan = runs[0].algorithm.privacy
    for place, run in enumerate(runs):
        for client, member in enumerate(run.federation.members):
            (*_, release) = plan.price(place, client, 1, 0)
            assert release == Release(2.0, -(-len(member.train) // 4), 4 / len(member.train))
    rows = [[len(member.train) for member in run.federation.members] for run in runs]
    assert rows[0] != rows[1]
    assert torch.equal(runs[0].budget.rounds, torch.zeros(4, dtype=torch.int64))
