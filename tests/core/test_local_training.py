"""A client's batches and what is made of them, by draws and sums that are stated here."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.tiny import build, experiment, send

from fedproto.algorithms import supervised
from fedproto.core import dropout, local_training, rng
from fedproto.core.batches import crop_and_flip, steps_per_epoch
from fedproto.core.dropout import Dropped
from fedproto.core.local_training import TrainedStep, embed
from fedproto.core.prototypes import DISTANCES
from fedproto.core.types import Batch, Group, Phase, Step, Task, nothing
from fedproto.runs.training_settings import training_of

SEED = 5
ROUND = 3


@pytest.fixture(scope="module")
def run():
    """A client with 2 x 3 rows in batches of 4: 2 steps per epoch, the last one partial."""
    settings = {"ways": 2, "shots": 3, "stdev": 0, "clients": 2, "batch": 4, "seed": SEED}
    return experiment("local", **settings)


def batches_of(run, epochs, **changes):
    member = replace(run.federation.members[1], **changes)
    training = training_of(run.config)
    steps = len(epochs) * steps_per_epoch(member, training)
    found = list(local_training.draw_batches(member, training, ROUND, epochs, steps))
    return member, found


def key(purpose: str, epoch: int) -> torch.Tensor:
    return rng.key(SEED, purpose, ROUND, 1, epoch)


def test_each_epoch_is_shuffled_by_the_stream_of_its_round_client_and_number(run) -> None:
    member, found = batches_of(run, range(2, 4))
    assert [len(batch.y) for batch, _ in found] == [4, 2, 4, 2]
    for place, epoch in enumerate((2, 3)):
        rows = member.train.rows[rng.permutation(key("shuffle", epoch), 6)]
        x = torch.cat([batch.x for batch, _ in found[2 * place : 2 * place + 2]])
        y = torch.cat([batch.y for batch, _ in found[2 * place : 2 * place + 2]])
        assert torch.equal(x, member.train.x[rows])
        assert torch.equal(y, member.train.y[rows])


def test_images_are_cropped_by_a_stream_of_their_own(run) -> None:
    border = torch.zeros(1, dtype=torch.float64)
    member, found = batches_of(run, range(1), border=border)
    rows = member.train.rows[rng.permutation(key("shuffle", 0), 6)]
    draws = rng.uniform(key("augment", 0), 18).reshape(6, 3)
    expected = crop_and_flip(member.train.x[rows], border, draws)
    assert torch.equal(torch.cat([batch.x for batch, _ in found]), expected)


def test_dropout_is_drawn_from_a_stream_of_its_own(run) -> None:
    layer = Dropped("keep", shape=(3,), p=0.5)
    member, found = batches_of(run, range(1), dropped=(layer,))
    expected = dropout.draw(member.dropped, key("dropout", 0), 6)
    for name, kept in expected.items():
        assert torch.equal(torch.cat([keep[name] for _, keep in found]), kept)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 1), (2, 2), (3, 3)])
def test_a_slow_client_does_half_its_steps_over_all_epochs(run, epochs, steps) -> None:
    seen = train_watched(run, slow=True, epochs=epochs)
    assert len(seen) == steps == math.ceil(epochs * 2 / 2)


def train_watched(run, algorithm="local", slow=False, **changes):
    """Train client 1, which has 2 steps per epoch; return the inputs of its batches."""
    member = run.federation.members[1]
    built = build(algorithm) if isinstance(algorithm, str) else algorithm
    seen = []

    def loss(step):
        seen.append(step.batch.x)
        return built.loss(step)

    server = built.init(member.initial, run.federation.task)
    received = send(built, server, torch.ones(len(run.federation.classes)))
    training = replace(training_of(run.config), **changes)
    watched = replace(built, loss=loss)
    local_training.train(member, watched, member.initial, received, training, ROUND, slow)
    return seen


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_local_steps_pass_through_as_many_epochs_as_they_need(run, steps) -> None:
    seen = train_watched(run, local_steps=steps)
    as_epochs = train_watched(run, epochs=4)
    assert len(seen) == steps
    for x, expected in zip(seen, as_epochs, strict=False):
        assert torch.equal(x, expected)


@pytest.mark.parametrize(("steps", "done"), [(1, 1), (2, 1), (5, 3), (8, 4)])
def test_a_slow_client_does_half_its_local_steps(run, steps, done) -> None:
    assert len(train_watched(run, slow=True, local_steps=steps)) == done


@pytest.mark.parametrize("slow", [False, True])
def test_local_steps_count_per_phase_and_epochs_go_on_behind_a_partial_one(run, slow) -> None:
    """Three steps of two per epoch are epochs 0 and half of 1; the next phase begins with 2."""
    algorithm = build("fedrep")
    without_epochs = [replace(phase, epochs=None) for phase in algorithm.phases]
    phases = (*without_epochs, replace(without_epochs[0], epochs=1))
    seen = train_watched(run, replace(algorithm, phases=phases), slow, local_steps=3)
    as_epochs = train_watched(run, epochs=5)
    places = [0, 1, 4, 5, 8] if slow else [0, 1, 2, 4, 5, 6, 8, 9]
    assert len(seen) == len(places)
    for x, place in zip(seen, places, strict=True):
        assert torch.equal(x, as_epochs[place])


@pytest.mark.parametrize(("steps", "collected"), [(1, 4), (2, 6), (3, 4), (4, 6)])
def test_each_sample_is_collected_at_most_once_however_many_steps(run, steps, collected) -> None:
    """An epoch has a batch of 4 and one of 2; what the last one has begun is collected."""
    uploads = []
    algorithm = build("fedproto", collect="during")

    def upload(step):
        uploads.append(step)
        return algorithm.upload(step)

    train_watched(run, replace(algorithm, upload=upload), local_steps=steps)
    (step,) = uploads
    assert len(step.features) == len(step.batch.y) == collected
    assert len(step.features.unique(dim=0)) == collected


def test_a_slow_client_of_two_phases_collects_the_last_phase_only(run) -> None:
    uploads = []
    algorithm = build("fedproto", collect="during")

    def upload(step):
        uploads.append(step)
        return algorithm.upload(step)

    twice = replace(algorithm, phases=(Phase(), Phase()), upload=upload)
    train_watched(run, twice, slow=True)
    (step,) = uploads
    assert len(step.features) == 4


def test_the_loss_of_a_round_is_the_mean_over_samples_not_over_steps() -> None:
    trained = []
    for rows, loss in ((4, 1.0), (2, 4.0)):
        batch = Batch(torch.zeros(0), torch.zeros(rows).long(), torch.ones(rows))
        step = Step({}, torch.zeros(0), torch.zeros(0), batch, {})
        trained.append(TrainedStep(step, {"supervised": torch.tensor(loss)}))
    found = local_training._mean_loss(trained)
    assert float(found["supervised"]) == pytest.approx((4 * 1 + 2 * 4) / 6)


def test_an_embedding_is_what_the_module_makes_of_the_rows_in_eval_mode(run) -> None:
    member = run.federation.members[0]
    features, y = embed(member.module, member.initial, member.test)
    module = member.module.eval()
    state = dict(module.state_dict()) | member.initial
    x = member.test.x[member.test.rows]
    expected, _ = torch.func.functional_call(module, state, (x,))
    assert torch.allclose(features, expected)
    assert torch.equal(y, member.test.y[member.test.rows])


def test_given_prototypes_stay_and_others_are_averaged() -> None:
    """Class 0 was given as 7, class 1 is 3 from 2 samples, class 2 has neither."""
    algorithm = build("fedproto", fixed=True)
    server = algorithm.init({"w": torch.zeros(1)}, Task(3, 1, 1, 0))
    assert server["given"].tolist() == [0.0, 0.0, 0.0]
    server["prototypes"] = torch.tensor([[7.0], [0.0], [0.0]])
    server["known"] = torch.tensor([1.0, 0.0, 0.0])
    server["given"] = torch.tensor([1.0, 0.0, 0.0])
    sums = {"prototypes": torch.tensor([[[2.0], [6.0], [0.0]]])}
    uploads = {"prototypes": Group(sums, torch.tensor([[2.0, 2.0, 0.0]]))}
    new = algorithm.aggregate(server, uploads)
    assert new["prototypes"].flatten().tolist() == [7.0, 3.0, 0.0]
    assert new["known"].tolist() == [1.0, 1.0, 0.0]


def test_the_epochs_of_all_phases_have_numbers_of_their_own(run, monkeypatch) -> None:
    """FedRep trains the head for two epochs, then the body for three: 0 to 1, and 2 to 4."""
    ranges = []
    original = local_training.draw_batches

    def watch(member, training, round, epochs, steps):
        ranges.append(epochs)
        return original(member, training, round, epochs, steps)

    monkeypatch.setattr(local_training, "draw_batches", watch)
    member = run.federation.members[0]
    algorithm = build("fedrep", head_epochs=2, body_epochs=3)
    server = algorithm.init(member.initial, run.federation.task)
    received = send(algorithm, server, torch.ones(len(run.federation.classes)))
    training = training_of(run.config)
    outcome = local_training.train(member, algorithm, member.initial, received, training, ROUND)
    assert ranges == [range(2), range(2, 5)]
    ranges.clear()
    nothing_first = replace(
        algorithm, phases=(replace(algorithm.phases[0], trains=nothing), *algorithm.phases)
    )
    again = local_training.train(member, nothing_first, member.initial, received, training, ROUND)
    assert ranges == [range(2), range(2, 5)]
    assert float(again.loss["supervised"]) == float(outcome.loss["supervised"])


def test_the_loss_of_a_round_is_that_of_all_phases(run) -> None:
    member = run.federation.members[0]
    algorithm = build("fedrep", head_epochs=1, body_epochs=1)
    seen = []

    def loss(step):
        terms = algorithm.loss(step)
        seen.append((float(terms["supervised"].detach()), len(step.batch.y)))
        return terms

    watched = replace(algorithm, loss=loss)
    server = algorithm.init(member.initial, run.federation.task)
    received = send(algorithm, server, torch.ones(len(run.federation.classes)))
    training = training_of(run.config)
    outcome = local_training.train(member, watched, member.initial, received, training, ROUND)
    assert len(seen) == 4
    expected = sum(value * rows for value, rows in seen) / sum(rows for _, rows in seen)
    assert float(outcome.loss["supervised"]) == pytest.approx(expected)


def test_the_loss_of_a_single_sample_is_its_cross_entropy() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    batch = Batch(torch.zeros(0), torch.tensor([2]), torch.ones(1))
    found = supervised(Step({}, torch.zeros(0), logits, batch, {}))
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([2]))
    assert torch.allclose(found["supervised"], expected)


@pytest.mark.parametrize("distance", ["l1", "l2"])
def test_what_is_a_rounding_error_is_judged_for_each_pair_alone(distance) -> None:
    """Beside an embedding of a million, a difference of a thousandth still has its gradient."""
    features = torch.tensor([[1e6, 0.0], [1e-3, 0.0]], requires_grad=True)
    prototypes = torch.tensor([[1e6, 0.0], [0.0, 0.0]])
    DISTANCES[distance](features, prototypes).sum().backward()
    assert features.grad[0].tolist() == [0.0, 0.0]
    assert features.grad[1, 0] == pytest.approx(1.0)
