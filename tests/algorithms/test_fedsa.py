"""FedSA: anchors of all classes, which move slowly towards the clients' class means."""

import math

import pytest
import torch
from helpers.devices import no_other_device
from helpers.engine_comparison import assert_engines_agree
from helpers.tiny import build, experiment, finished, send, step

from fedproto.algorithms.fedsa import draw_anchors, mean_gap
from fedproto.core.tensors import stack_uploads
from fedproto.core.types import Task
from fedproto.errors import ConfigError

TASK = Task(classes=2, dim=2, clients=2, seed=0)
EYE = torch.eye(2, dtype=torch.float64)
PARAMS = {"body.w": EYE, "head.v": EYE}
X = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
Y = torch.tensor([0, 1])
ANCHORS = torch.tensor([[0.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
MIX = {"model": "mlp(hidden=5),mlp(hidden=9)", "dim": 8}


def received():
    return {
        "prototypes": torch.zeros(2, 2, dtype=torch.float64),
        "known": torch.zeros(2, dtype=torch.float64),
        "anchors": {"anchors": ANCHORS},
    }


def client_step(gap=0.0, x=X, y=Y, mask=None):
    state = {"means": {"gap": torch.tensor(gap, dtype=torch.float64)}}
    return step(PARAMS, received(), x, y, mask, state)


def minus_log_softmax(values, place):
    return math.log(sum(map(math.exp, values))) - values[place]


@pytest.mark.parametrize(("gap", "margin"), [(0.0, 4.0), (5.5, 5.5)])
def test_the_loss_by_hand(gap, margin):
    """(3, 4) is 5 and 3 from the anchors, (0, 2) 2 and 2; the anchors are 4 apart."""
    terms = build("fedsa", lam=2, contrast=3, calibration=5).loss(client_step(gap))
    assert terms["regulariser"].item() == pytest.approx(2 * (25 / 2 + 4 / 2) / 2)
    first = minus_log_softmax([-5 - margin, -3], 0)
    second = minus_log_softmax([-2, -2 - margin], 1)
    assert terms["contrast"].item() == pytest.approx(3 * (first + second) / 2)
    # The head gives the anchors the logits (0, 0) and (0, 4).
    calibration = (math.log(2) + minus_log_softmax([0, 4], 1)) / 2
    assert terms["calibration"].item() == pytest.approx(5 * calibration)


def test_without_weights_only_the_cross_entropy_is_left():
    terms = build("fedsa", lam=0, contrast=0, calibration=0).loss(client_step())
    local = build("local").loss(client_step())
    assert sum(terms.values()).item() == pytest.approx(local["supervised"].item())


def test_padding_changes_nothing():
    x = torch.cat([X, torch.full((1, 2), 9.0, dtype=torch.float64)])
    mask = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    padded = build("fedsa").loss(client_step(x=x, y=torch.tensor([0, 1, 1]), mask=mask))
    for name, value in build("fedsa").loss(client_step()).items():
        assert padded[name].item() == pytest.approx(value.item())


def test_the_gap_is_the_mean_distance_to_the_nearest_other():
    """0, 1 and 4 on a line: their nearest others are 1, 1 and 3 away."""
    vectors = torch.tensor([[0.0], [1.0], [4.0]], dtype=torch.float64)
    assert float(mean_gap(vectors, torch.ones(3).double())) == pytest.approx(5 / 3)
    assert float(mean_gap(vectors, torch.tensor([1.0, 0.0, 1.0]).double())) == pytest.approx(4)
    assert float(mean_gap(vectors, torch.tensor([0.0, 1.0, 0.0]).double())) == 0
    assert float(mean_gap(vectors, torch.zeros(3).double())) == 0


def test_a_round_of_two_clients_by_hand():
    """Both hold class 1, with means (3, 4) and (0, 2): their plain mean is (1.5, 3)."""
    algorithm = build("fedsa", rho=0.75)
    server = algorithm.init(PARAMS, TASK) | {"anchors": {"anchors": ANCHORS}}
    told = send(algorithm, server, torch.ones(2))
    rows = [X[:1], X[1:].repeat(3, 1)]
    steps = [step(PARAMS, told, x, torch.ones(len(x), dtype=torch.int64)) for x in rows]
    new = algorithm.aggregate(server, stack_uploads([algorithm.upload(each) for each in steps]))
    assert new["prototypes"][1].tolist() == pytest.approx([1.5, 3])
    assert new["known"].tolist() == [0, 1]
    moved = new["anchors"]["anchors"]
    assert moved[0].tolist() == ANCHORS[0].tolist()
    assert moved[1].tolist() == pytest.approx([0.25 * 1.5, 0.75 * 4 + 0.25 * 3])


def test_a_client_keeps_the_gap_of_its_own_means():
    new = build("fedsa").client_update(client_step())
    assert float(new["means"]["gap"]) == pytest.approx(math.hypot(3, 2))


def test_anchors_of_all_classes_are_there_before_the_first_round():
    algorithm = build("fedsa")
    server = algorithm.init(PARAMS, TASK)
    told = send(algorithm, server, torch.tensor([1.0, 0.0]))
    assert torch.equal(told["anchors"]["anchors"], server["anchors"]["anchors"])
    first, second = (draw_anchors(torch.tensor(seed), torch.zeros(5, 8)) for seed in (1, 2))
    assert (first >= 0).all() and not torch.equal(first, second)
    assert float(mean_gap(first, torch.ones(5))) > 0


def test_a_head_of_several_layers_is_refused():
    deep = PARAMS | {"head.w": EYE}
    with pytest.raises(ConfigError, match="fedsa needs a model whose head is one linear layer"):
        build("fedsa").client_init(deep, TASK)


def test_prototypes_are_scored_like_fedprotos():
    _, result = finished("fedsa", rounds=1)
    assert {"head", "prototype", "both"} <= result.accuracy.keys()


def test_a_server_that_knows_no_class_says_so():
    run = experiment("fedsa", lost_uploads=1.0, rounds=1)
    assert "fedsa: no class has a prototype yet" in str(run.execute().metrics[-1]["notes"])


def test_architectures_may_differ_in_every_engine():
    assert_engines_agree("fedsa", **MIX)


def test_a_gap_is_measured_on_the_device_of_its_vectors() -> None:
    """A GPU cannot record a step that brings a tensor from the CPU."""
    with no_other_device("meta"):
        gap = mean_gap(torch.empty(4, 3, device="meta"), torch.empty(4, device="meta"))
    assert gap.device.type == "meta"
