"""FedNH: prototypes on the unit sphere as a fixed head, beside an averaged body."""

import math

import pytest
import torch
from helpers.engine_comparison import RAGGED, assert_engines_agree, make_clients, with_batch_norm
from helpers.tiny import build, experiment, finished, scored_states, send, step

from fedproto.core.tensors import stack_uploads
from fedproto.core.types import Task
from fedproto.errors import ConfigError

TASK = Task(classes=2, dim=2, clients=2, seed=0)
EYE = torch.eye(2, dtype=torch.float64)
PARAMS = {"body.w": EYE, "head.v": EYE}
X = torch.tensor([[3.0, 4.0], [2.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
Y = torch.tensor([0, 0, 1])


def received(prototypes=EYE):
    return {"model": {"body.w": EYE}, "head": {"prototypes": prototypes}}


def test_the_loss_by_hand():
    now = step(PARAMS, received(), X[:1], Y[:1])
    # The cosines of (3, 4) with the axes are 3/5 and 4/5.
    terms = build("fednh", scale=5.0).loss(now)
    assert float(terms["supervised"]) == pytest.approx(math.log(1 + math.exp(5 * (0.8 - 0.6))))


def test_a_round_of_two_clients_by_hand():
    algorithm = build("fednh", rho=0.75)
    server = received()
    uploads = []
    for rows, by in (([0, 1], 1.0), ([2], 4.0)):
        params = {"body.w": by * EYE, "head.v": EYE}
        uploads.append(algorithm.upload(step(params, server, X[rows], Y[rows])))
    new = algorithm.aggregate(server, stack_uploads(uploads))
    assert torch.allclose(new["model"]["body.w"], (2 * 1 + 1 * 4) / 3 * EYE)
    # Class 0: the mean of (0.6, 0.8) and (1, 0) is (0.8, 0.4), which is (2, 1)/√5 as a direction.
    moved = 0.75 * torch.tensor([1.0, 0.0]) + 0.25 * torch.tensor([2.0, 1.0]) / math.sqrt(5)
    expected = torch.stack([moved / moved.norm(), torch.tensor([0.0, 1.0])]).double()
    assert torch.allclose(new["head"]["prototypes"], expected)


def test_a_class_without_uploads_keeps_its_prototype():
    algorithm = build("fednh", rho=0.0)
    upload = algorithm.upload(step(PARAMS, received(), X[:2], Y[:2]))
    new = algorithm.aggregate(received(), stack_uploads([upload]))
    assert torch.allclose(new["head"]["prototypes"][1], EYE[1])
    assert not torch.allclose(new["head"]["prototypes"][0], EYE[0])


def test_with_rho_1_the_prototypes_stay():
    run = experiment("fednh(rho=1)")
    before = run.progress.server["head"]["prototypes"].clone()
    run.execute()
    assert torch.allclose(run.progress.server["head"]["prototypes"], before, rtol=0, atol=1e-12)


def test_prototypes_stay_on_the_sphere():
    run, _ = finished("fednh(rho=0.3)")
    lengths = run.progress.server["head"]["prototypes"].norm(dim=-1)
    assert torch.allclose(lengths, torch.ones_like(lengths))


def test_the_models_own_head_ranks_classes_like_the_cosines():
    """So that a trained client can be used without this algorithm, as by `predict` or `export`."""
    run, result = finished("fednh")
    server = run.progress.server
    member = run.federation.members[0]
    state = scored_states(run)[0]
    assert torch.allclose(state["head.fc3.weight"], 10 * server["head"]["prototypes"])
    assert not state["head.fc3.bias"].any()
    x = member.test.x[member.test.rows]
    features, logits = torch.func.functional_call(member.module.eval(), state, (x,))
    now = step(PARAMS, send(run.algorithm, server, torch.ones(10)), X, Y)._replace(
        features=features, logits=logits
    )
    scores = run.algorithm.predict(now)["head"]
    assert torch.equal(scores.argmax(-1), logits.argmax(-1))
    assert scores.abs().max() <= 10 + 1e-9
    assert result.accuracy["head"]["mean"] >= 0


def test_the_head_is_not_trained():
    run, _ = finished("fednh(rho=1)", rounds=2)
    for state in run.engine.states[0]:
        expected = 10 * run.progress.server["head"]["prototypes"]
        assert torch.allclose(state["head.fc3.weight"], expected)


def test_it_sends_two_groups_with_weights_of_their_own():
    upload = build("fednh").upload(step(PARAMS, received(), X, Y))
    assert upload["model"].weight.tolist() == 3
    assert upload["prototypes"].weight.tolist() == [2, 1]


def test_a_frozen_body_is_refused():
    with pytest.raises(ConfigError, match="fednh trains the body alone, so it cannot be frozen"):
        build("fednh").init({"head.v": EYE}, TASK)


@pytest.mark.parametrize("option", ["rho=1.5", "rho=-0.1", "scale=0"])
def test_options_out_of_bounds_are_refused(option):
    with pytest.raises(ConfigError, match="algorithm fednh's"):
        experiment(f"fednh({option})")


def test_engines_agree_on_models_with_batch_norm():
    assert_engines_agree(
        "fednh",
        modules=with_batch_norm(),
        data=make_clients(RAGGED),
        last_batch="keep",
        rounds=2,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"transform": "clip(norm=1),quantise(bits=8)"},
        {"combiner": "median"},
        {"buffer": 2, "concurrency": 3, "speed_spread": 1.0},
    ],
    ids=["transformed", "combined", "late"],
)
def test_both_groups_can_be_transformed_combined_and_late(settings):
    assert_engines_agree("fednh", **settings)
