"""What private steps cost, and what is refused because they do not cover it."""

import math
from types import SimpleNamespace

import dp_accounting
import pytest
from helpers.private_runs import SEEDED, prepare_private
from helpers.tiny import build
from torch import nn

from fedproto.core.batches import Training
from fedproto.core.private_steps import PrivateSteps
from fedproto.errors import ConfigError
from fedproto.privacy.accounting import Release, compute_epsilon
from fedproto.privacy.step_costs import count_private_steps, refuse_unprotected_training

LINEAR = nn.ModuleDict({"body": nn.Linear(4, 3), "head": nn.Linear(3, 2)})


def member_of(rows, module=LINEAR):
    return SimpleNamespace(train=range(rows), module=module, model="linear")


def list_step_releases(member, algorithm, training):
    return count_private_steps(member, algorithm, training).releases(training.private.noise)


def training_of(batch, noise, epochs=1, **changes):
    return Training(batch, 0.1, 0.0, epochs, "auto", 0, private=PrivateSteps(1.0, noise), **changes)


@pytest.mark.parametrize(
    ("rows", "batch", "noise", "epochs", "delta", "epsilon"),
    [  # tensorflow_privacy/privacy/analysis/compute_dp_sgd_privacy_test.py
        (60_000, 150, 1.3, 15, 1e-5, 0.7242234026109595),
        (100_000, 100, 1.0, 30, 1e-7, 1.4154988495444845),
    ],
)
def test_steps_of_published_settings_cost_what_was_published(
    rows, batch, noise, epochs, delta, epsilon
):
    releases = list_step_releases(
        member_of(rows), build("local"), training_of(batch, noise, epochs)
    )
    assert compute_epsilon(releases, delta, "rdp") == pytest.approx(epsilon, abs=1e-3)


@pytest.mark.parametrize(("rows", "batch", "epochs"), [(300, 30, 20), (50, 8, 7), (20, 64, 3)])
def test_steps_cost_what_googles_accountant_says_of_dp_sgd(rows, batch, epochs):
    releases = list_step_releases(member_of(rows), build("local"), training_of(batch, 1.1, epochs))
    rate = min(1.0, batch / rows)
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(1.1))
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(step, epochs * math.ceil(rows / batch))
    expected = accountant.get_epsilon(1e-5)
    assert compute_epsilon(releases, 1e-5) == pytest.approx(expected, abs=1e-3)


def test_every_phase_and_every_local_step_is_counted():
    member = member_of(100)
    assert list_step_releases(member, build("local"), training_of(10, 1.0, local_steps=7)) == [
        Release(1.0, 7, 0.1)
    ]
    (release,) = list_step_releases(member, build("fedrep", head_epochs=2), training_of(10, 1.0))
    assert release.times == 30  # two epochs of the head, one of the body


def test_as_many_steps_are_taken_as_are_paid_for():
    for engine in ("reference", "vectorised"):
        drawn = []

        class Counting(PrivateSteps):
            def draw_noise(self, trained, keys, steps, drawn=drawn):
                drawn += keys
                return super().draw_noise(trained, keys, steps)

        private = Counting(0.5, 0.7, SEEDED.entropy)
        run = prepare_private("fedrep", engine, private, rounds=1, epochs=2)
        run.execute()
        training = training_of(run.config.batch, 0.7, epochs=2)
        paid = 0
        for member in run.federation.members:
            (release,) = list_step_releases(member, run.algorithm, training)
            paid += release.times
        assert len(drawn) == paid


@pytest.mark.parametrize(
    ("algorithm", "changes", "says"),
    [
        ("local", {"class_weights": "balanced"}, "class_weights"),
        ("local", {"sampling": "balanced"}, "sampling"),
        ("scaffold", {}, "scaffold"),
        ("moon", {}, "moon"),
        ("fedproto(collect=during)", {}, "collect=after"),
    ],
)
def test_what_private_steps_do_not_cover_is_refused_in_one_sentence(algorithm, changes, says):
    name, _, options = algorithm.partition("(")
    chosen = {"collect": "during"} if options else {}
    with pytest.raises(ConfigError, match=says):
        refuse_unprotected_training(
            member_of(10), build(name, **chosen), training_of(5, 1.0, **changes)
        )


def test_models_whose_records_see_each_other_are_refused():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(ConfigError, match="BatchNorm"):
        refuse_unprotected_training(member_of(10, module), build("local"), training_of(5, 1.0))


def test_a_loss_of_whole_batches_is_refused():
    with pytest.raises(ConfigError, match="regularise=sample"):
        refuse_unprotected_training(
            member_of(10), build("fedproto"), training_of(5, 1.0), regularise="class"
        )
