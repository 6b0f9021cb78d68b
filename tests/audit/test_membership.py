"""Likelihood ratios on known Gaussians, and attacks on mechanisms that leak all or nothing."""

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from fedproto.audit import statistics as tests
from fedproto.audit.membership import CERTAINLY_OUT, infer_membership, score_ratios
from fedproto.audit.shadows import Observations, Records, scaled_confidence


def test_scores_are_log_ratios_of_two_normal_densities() -> None:
    """One record: shadows with it have 1 and 3 (mean 2, σ² 2), those without −1 and 0 (σ² 1/2)."""
    values = torch.tensor([[1.0], [3.0], [-1.0], [0.0]], dtype=torch.float64)
    included = torch.tensor([[True], [True], [False], [False]])
    attacked = torch.tensor([[0.7], [2.5]], dtype=torch.float64)
    found = score_ratios(values, included, attacked).flatten().numpy()
    x = attacked.flatten().numpy()
    expected = norm.logpdf(x, 2, np.sqrt(2)) - norm.logpdf(x, -0.5, np.sqrt(0.5))
    assert found == pytest.approx(expected)


def test_the_curve_of_two_known_gaussians_is_the_closed_form() -> None:
    """Scores of N(0, 1) and N(1, 1): the area is Φ(1/√2), and the advantage 2Φ(1/2) − 1."""
    generator = torch.Generator().manual_seed(0)
    included = torch.rand(400, 300, generator=generator) < 0.5
    values = torch.randn(400, 300, generator=generator).double() + included
    scores = score_ratios(values[:300], included[:300], values[300:])
    flat = scores.flatten().numpy()
    truth = included[300:].flatten().numpy()
    assert tests.area_under_curve(flat, truth) == pytest.approx(norm.cdf(1 / np.sqrt(2)), abs=0.01)
    advantage = tests.advantage_at(flat, truth)
    assert advantage.value == pytest.approx(2 * norm.cdf(0.5) - 1, abs=0.02)
    assert advantage.low < 2 * norm.cdf(0.5) - 1 < advantage.high


def test_a_missing_prototype_means_that_no_record_of_its_class_is_in() -> None:
    values = torch.tensor([[1.0], [3.0], [-1.0], [0.0]], dtype=torch.float64)
    included = torch.tensor([[True], [True], [False], [False]])
    scores = score_ratios(values, included, torch.tensor([[torch.nan]], dtype=torch.float64))
    assert float(scores) == CERTAINLY_OUT


def test_confidence_is_the_log_odds_even_where_the_probability_rounds_to_1() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [90.0, 0.0, 0.0]])
    p = torch.softmax(logits[0].double(), 0)[0]
    found = scaled_confidence(logits, torch.tensor([0, 0])).tolist()
    assert found[0] == pytest.approx(float(torch.log(p / (1 - p))), abs=1e-5)
    assert found[1] == pytest.approx(90 - np.log(2), abs=1e-4)


def observe(mechanism: str, per_class: int = 4, federations: int = 60) -> Observations:
    """Return what two clients of three classes send, with the identity as their model."""
    generator = torch.Generator().manual_seed(0)
    clients, classes, dim = 2, 3, 6
    client = torch.arange(clients).repeat_interleave(classes * per_class)
    label = torch.arange(classes).repeat_interleave(per_class).repeat(clients)
    records = Records(client, label, torch.arange(len(client)), [])
    embeddings = torch.randn(len(client), dim, generator=generator).double()
    included = torch.rand(federations, len(client), generator=generator) < 0.5
    prototypes = torch.full((federations, clients, classes, dim), torch.nan).double()
    for place in range(clients * classes):
        i, j = divmod(place, classes)
        mine = (client == i) & (label == j)
        for federation in range(federations):
            chosen = included[federation] & mine
            if mechanism == "constant":
                prototypes[federation, i, j] = 1.0
            elif chosen.any():
                prototypes[federation, i, j] = embeddings[chosen].mean(0)
    return Observations(
        records,
        included,
        prototypes,
        None,
        embeddings.expand(federations, -1, -1),
        torch.zeros(federations, len(client)).double(),
        None,
    )


def trials_of(seen: Observations) -> tuple[np.ndarray, np.ndarray]:
    trials = infer_membership(seen, 40)["prototypes"]
    return trials.scores, trials.included


def test_a_mechanism_that_sends_plain_means_of_few_records_is_found_out() -> None:
    scores, included = trials_of(observe("mean"))
    assert tests.area_under_curve(scores, included) > 0.9
    assert tests.epsilon_bound_of_scores(scores, included) > 1


def test_a_mechanism_that_sends_constants_gives_nothing_away() -> None:
    seen = observe("constant")
    for name, trials in infer_membership(seen, 40).items():
        assert tests.epsilon_bound_of_scores(trials.scores, trials.included) == 0, name
        advantage = tests.advantage_at(trials.scores, trials.included)
        assert advantage.low < 0 < advantage.high, name


def test_attacked_federations_do_not_tell_the_attacker_their_coins() -> None:
    """Other coins in the attacked federations change no score."""
    seen = observe("mean")
    scores, _ = trials_of(seen)
    coins: Tensor = seen.included.clone()
    coins[40:] = ~coins[40:]
    other = Observations(
        seen.records, coins, seen.prototypes, None, seen.embeddings, seen.confidence, None
    )
    assert np.array_equal(trials_of(other)[0], scores)
