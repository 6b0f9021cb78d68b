"""FedProto's contrast term, and the prediction by both prototypes and head."""

import math

import pytest
import torch
from helpers.engine_comparison import TROUBLE, assert_engines_agree
from helpers.tiny import build, experiment, finished, largest_difference, send, step

from fedproto.core.prototypes import Tau, measure_spread
from fedproto.errors import ConfigError

EYE = torch.eye(2, dtype=torch.float64)
PARAMS = {"body.w": EYE, "head.v": torch.tensor([[1.0, 0, 0], [0, 2, 0]], dtype=torch.float64)}
#: Two samples, whose embeddings are themselves, and three prototypes.
X = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
Y = torch.tensor([0, 1])
RECEIVED = {
    "prototypes": torch.tensor([[0.0, 0.0], [0.0, 2.0], [2.0, 0.0]], dtype=torch.float64),
    "known": torch.ones(3, dtype=torch.float64),
}
#: By hand: mean squared distances of the samples to the prototypes,
GAPS = [[0.5, 2.5, 0.5], [4.5, 0.5, 6.5]]
#: and between the prototypes: 2, 2 and 4.
SPREAD = 8 / 3


def known(*flags):
    return RECEIVED | {"known": torch.tensor(flags, dtype=torch.float64)}


def log_softmax(values):
    return [value - math.log(sum(map(math.exp, values))) for value in values]


def contrast_by_hand(tau):
    losses = []
    for gaps, label in zip(GAPS, Y.tolist(), strict=True):
        losses.append(-log_softmax([-gap / tau for gap in gaps])[label])
    return sum(losses) / 2


@pytest.mark.parametrize(
    ("options", "tau"),
    [({}, 0.3 * SPREAD), ({"tau": 2}, 2 * SPREAD), ({"tau": 2, "tau_unit": "absolute"}, 2)],
)
def test_the_contrast_term_by_hand(options, tau):
    terms = build("fedproto", contrast=1.5, **options).loss(step(PARAMS, RECEIVED, X, Y))
    assert terms["contrast"].item() == pytest.approx(1.5 * contrast_by_hand(tau))
    plain = build("fedproto").loss(step(PARAMS, RECEIVED, X, Y))
    assert terms["supervised"] == plain["supervised"]
    assert terms["regulariser"] == plain["regulariser"]


def test_the_gradient_pushes_from_every_prototype_in_proportion_to_its_probability():
    """2 / (tau d) (h - C_y - sum_j p_j (h - C_j)), also for classes without a sample."""
    h = X[:1].clone().requires_grad_()
    algorithm = build("fedproto", lam=0, contrast=1, tau=2, tau_unit="absolute")
    algorithm.loss(step(PARAMS, RECEIVED, h, Y[:1]))["contrast"].backward()
    p = torch.tensor(log_softmax([-gap / 2 for gap in GAPS[0]]), dtype=torch.float64).exp()
    differences = X[0] - RECEIVED["prototypes"]
    expected = 2 / (2 * 2) * (differences[0] - (p[:, None] * differences).sum(0))
    assert torch.allclose(h.grad[0], expected)


@pytest.mark.parametrize("flags", [(1, 1, 1), (1, 0, 1), (1, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("unit", ["relative", "absolute"])
def test_the_gradient_is_its_finite_difference(flags, unit):
    algorithm = build("fedproto", contrast=0.7, tau_unit=unit)

    def loss(w):
        params = PARAMS | {"body.w": w}
        return sum(algorithm.loss(step(params, known(*flags), X, Y)).values())

    assert torch.autograd.gradcheck(loss, ((EYE + 0.1).requires_grad_(),))


def test_without_another_known_class_there_is_no_contrast():
    algorithm = build("fedproto", contrast=1)
    for flags in [(0, 0, 0), (1, 0, 0), (0, 0, 1)]:
        assert algorithm.loss(step(PARAMS, known(*flags), X, Y))["contrast"] == 0
    # Class 1, of the second sample, is unknown: the first sample alone has a loss.
    spread = 2.0
    alone = -log_softmax([-0.5 / (0.3 * spread)] * 2)[0]
    found = algorithm.loss(step(PARAMS, known(1, 0, 1), X, Y))["contrast"]
    assert found.item() == pytest.approx(alone / 2)


def test_equal_prototypes_cannot_be_told_apart():
    """Their spread is 0, which divides nothing."""
    received = RECEIVED | {"prototypes": torch.ones(3, 2, dtype=torch.float64)}
    loss = build("fedproto", contrast=1).loss(step(PARAMS, received, X, Y))["contrast"]
    assert loss.item() == pytest.approx(math.log(3))


def test_padding_changes_no_contrast():
    algorithm = build("fedproto", contrast=1)
    x = torch.cat([X, torch.full((2, 2), 7.0, dtype=X.dtype)])
    y = torch.tensor([0, 1, 2, 2])
    mask = torch.tensor([1.0, 1, 0, 0], dtype=X.dtype)
    padded = algorithm.loss(step(PARAMS, RECEIVED, x, y, mask))["contrast"]
    assert padded == algorithm.loss(step(PARAMS, RECEIVED, X, Y))["contrast"]


def test_the_spread_is_the_mean_over_pairs():
    assert float(measure_spread(**RECEIVED)) == pytest.approx(SPREAD)
    assert float(measure_spread(**known(1, 1, 0))) == pytest.approx(2)
    assert float(measure_spread(**known(0, 1, 0))) == 0
    assert float(measure_spread(**known(0, 0, 0))) == 0


def test_with_contrast_a_client_is_sent_all_known_prototypes():
    server = known(1, 1, 0)
    classes = torch.tensor([1.0, 0, 1])
    assert send(build("fedproto"), server, classes)["known"].tolist() == [1, 0, 0]
    assert send(build("fedproto", contrast=0.1), server, classes)["known"].tolist() == [1, 1, 0]


def test_the_ledger_counts_the_further_prototypes():
    """From round 2 on, each client receives ten prototypes of 8 values, and ten flags."""
    _, result = finished("fedproto", contrast=1)
    _, plain = finished("fedproto")
    for client, without in zip(result.clients, plain.clients, strict=True):
        more = client["communication"]["values_down"] - without["communication"]["values_down"]
        classes_of_others = result.prototypes["known"].sum() - len(client["classes"])
        assert more == 2 * 8 * classes_of_others
        assert client["communication"]["values_up"] == without["communication"]["values_up"]


def test_without_contrast_nothing_changes():
    plain = experiment("fedproto")
    plain.execute()
    other = experiment("fedproto", contrast=0, tau=5, tau_unit="absolute")
    assert "contrast" not in other.execute().metrics[-1]["loss"]
    assert largest_difference(plain, other) == 0


def test_contrast_is_trained_alike_in_every_engine():
    assert_engines_agree("fedproto", contrast=1, **TROUBLE)


def test_both_is_the_sum_of_two_log_probabilities():
    scores = build("fedproto").predict(step(PARAMS, RECEIVED, X, Y))
    for row, logits in enumerate([[1.0, 0, 0], [0.0, 6, 0]]):
        by_prototype = log_softmax([-gap / (0.3 * SPREAD) for gap in GAPS[row]])
        by_head = log_softmax(logits)
        expected = [one + other for one, other in zip(by_head, by_prototype, strict=True)]
        assert scores["both"][row].tolist() == pytest.approx(expected)


def test_both_chooses_among_known_classes():
    algorithm = build("fedproto")
    assert (
        algorithm.predict(step(PARAMS, known(0, 0, 0), X, Y))["both"].tolist()
        == [[-math.inf] * 3] * 2
    )
    scores = algorithm.predict(step(PARAMS, known(1, 0, 1), X, Y))["both"]
    assert torch.isfinite(scores).tolist() == [[True, False, True]] * 2


@pytest.mark.parametrize("wrong", [{"contrast": -1}, {"tau": 0}, {"tau_unit": "metres"}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        build("fedproto", **wrong)


def test_an_algorithm_without_tau_has_the_default():
    assert Tau.of({"lam": 1}) == Tau() == (0.3, "relative")
    assert Tau.of({"tau": 1, "tau_unit": "absolute"}) == (1, "absolute")
