"""The round loop: the cohort, latest uploads, traffic, and what a client does in its round."""

import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.distributed_runs import use_processes
from helpers.tiny import build, experiment, finished, send
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from fedproto.config.settings import configure
from fedproto.core import codec, local_training
from fedproto.core.batches import crop_and_flip, steps_per_epoch
from fedproto.core.metrics import summarise
from fedproto.core.rng import key, uniform
from fedproto.core.sampling import Schedule, sample_cohort
from fedproto.core.tensors import stack_uploads
from fedproto.core.types import Group, Task, Tree, Upload
from fedproto.core.uploads import LatestUploads
from fedproto.errors import ConfigError, TrainingError
from fedproto.runs.experiment import Experiment


@given(st.integers(1, 40), st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 1), st.integers(1, 5))
def test_as_many_are_drawn_as_the_shares_say(
    clients, participation, lost_uploads, stragglers, round
):
    schedule = Schedule(9, participation, lost_uploads, stragglers)
    cohort = sample_cohort(clients, schedule, round)
    sampled, lost, slow = (numbers.tolist() for numbers in cohort[:3])
    assert len(sampled) == len(set(sampled)) == max(1, math.floor(participation * clients + 0.5))
    assert len(lost) == math.floor(lost_uploads * len(sampled) + 0.5)
    assert len(slow) == math.floor(stragglers * len(sampled) + 0.5)
    assert set(lost) | set(slow) <= set(sampled) <= set(range(clients))
    assert [sampled, lost, slow] == [
        numbers.tolist() for numbers in sample_cohort(clients, schedule, round)[:3]
    ]


def test_samples_differ_between_rounds_and_seeds():
    draws = {
        tuple(sample_cohort(20, Schedule(9, 0.3, seed=seed), round).sampled.tolist())
        for seed in range(3)
        for round in range(5)
    }
    assert len(draws) == 15


def speak(value: float, count: float) -> Upload:
    """A client's upload of one class: a one-dimensional prototype `value` of `count` samples."""
    return stack_uploads(
        [
            {
                "prototypes": Group(
                    {"prototypes": torch.tensor([[value * count]])}, torch.tensor([count])
                )
            }
        ]
    )


@pytest.mark.parametrize(
    ("absent", "expected"),
    [
        # Round 1: values 0 .. 5 with 1 .. 6 samples. Round 2: client 2 uploads 20 (3 samples).
        ("remember", (0 * 1 + 1 * 2 + 20 * 3 + 3 * 4 + 4 * 5 + 5 * 6) / 21),
        ("drop", 20.0),
    ],
)
def test_one_of_six_holders_present(absent, expected):
    algorithm, memory = build("fedproto", absent=absent), LatestUploads(6)
    server = algorithm.init({"w": torch.zeros(1)}, Task(1, 1, 6, 0))
    everyone = [speak(float(value), value + 1.0) for value in range(6)]
    for number, upload in enumerate(everyone):
        memory.store(torch.tensor([number]), upload, round=1)
    server = algorithm.aggregate(server, memory.recall())
    assert server["prototypes"].item() == pytest.approx((0 + 2 + 6 + 12 + 20 + 30) / 21)
    memory.store(torch.tensor([2]), speak(20.0, 3.0), round=2)
    uploads = memory.recall() if algorithm.remembers else speak(20.0, 3.0)
    assert algorithm.aggregate(server, uploads)["prototypes"].item() == pytest.approx(expected)
    assert memory.last_round.tolist() == [1, 1, 2, 1, 1, 1]


@pytest.mark.parametrize("absent", ["remember", "drop"])
def test_the_loop_remembers_or_drops_the_absent(absent):
    """Two rounds of half the clients, against prototypes summed by hand from their uploads."""
    run = experiment("fedproto", absent=absent, clients=6, rounds=2, participation=0.5)
    last: dict[int, Upload] = {}
    original = run.engine.train

    def watched(round, servers, cohorts):
        for chunk in original(round, servers, cohorts):
            last[int(chunk.clients[0])] = chunk.uploads
            yield chunk
        if absent == "drop":
            for number in set(last) - set(cohorts[0].sampled.tolist()):
                del last[number]

    run.engine.train = watched
    run.execute()
    sums = sum(upload["prototypes"].sums["prototypes"][0] for upload in last.values())
    counts = sum(upload["prototypes"].weight[0] for upload in last.values())
    for label in counts.nonzero().flatten():
        assert torch.allclose(run.progress.server["prototypes"][label], sums[label] / counts[label])


def test_result_tells_how_old_each_upload_is():
    _, result = finished("fedproto", clients=6, rounds=4, participation=0.5)
    spoke = {
        c: r for r in range(1, 5) for c in sample_cohort(6, Schedule(4, 0.5), r).sampled.tolist()
    }
    assert [each["last_upload"] for each in result.clients] == [
        spoke.get(number, 0) for number in range(6)
    ]


def test_a_lost_upload_was_trained_and_sent_but_does_not_count():
    run, result = finished("fedavg", rounds=1, lost_uploads=1.0)
    member, state = run.federation.members[0], run.engine.states[0][0]
    assert not torch.equal(state["head.fc3.weight"], member.initial["head.fc3.weight"])
    assert torch.equal(run.progress.server["head.fc3.weight"], member.initial["head.fc3.weight"])
    assert result.metrics[0]["participants"] == []
    assert result.metrics[0]["bytes_up"] > 0


@pytest.mark.parametrize(("slow", "steps"), [(False, 6), (True, 3)])
def test_a_straggler_does_half_its_steps(slow, steps, monkeypatch):
    run = experiment(
        "local", ways=2, stdev=0, shots=11, batch=4
    )  # 22 images in batches of 4: 6 steps
    calls = []
    real = local_training.forward
    monkeypatch.setattr(local_training, "forward", lambda *a: calls.append(1) or real(*a))
    local_training.train(
        run.federation.members[0],
        run.algorithm,
        run.engine.states[0][0],
        {},
        run.engine.trainings[0],
        1,
        slow,
    )
    assert len(calls) == steps


@pytest.mark.parametrize(
    ("last_batch", "model", "steps"),
    [
        ("keep", "mlp", 6),
        ("drop", "mlp", 5),
        ("auto", "mlp", 6),
        ("auto", "resnet18", 5),
        ("keep", "resnet18", 6),
    ],
)
def test_the_last_partial_batch(last_batch, model, steps):
    """22 images in batches of 4: the batch of two is dropped for BatchNorm unless asked for."""
    run = images_of_noise(images=28, model=model, batch=4, last_batch=last_batch)
    assert len(run.federation.members[0].train) == 22
    assert steps_per_epoch(run.federation.members[0], run.engine.trainings[0]) == steps
    outcome = local_training.train(
        run.federation.members[0],
        run.algorithm,
        run.engine.states[0][0],
        {},
        run.engine.trainings[0],
        1,
    )
    assert torch.isfinite(outcome.loss["supervised"])


def test_a_client_with_less_than_a_batch_keeps_it():
    run = images_of_noise(images=6, model="resnet18", batch=32)
    assert steps_per_epoch(run.federation.members[0], run.engine.trainings[0]) == 1


def images_of_noise(images, **settings):
    """One client with 3x16x16 images of two classes."""
    x = np.random.default_rng(0).normal(size=(images, 3, 16, 16))
    config = configure({"algorithm": "local", "clients": 1, "rounds": 1} | settings)[0]
    return Experiment.prepare(config, data=[(x, np.arange(images) % 2)])


def resnet_federation(algorithm="fedrep", **settings):
    """Two clients with four 3x16x16 images each and a network with BatchNorm."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(6, 3, 16, 16)), np.array([0, 0, 0, 1, 1, 1])) for _ in range(2)]
    config = configure(
        {"algorithm": algorithm, "model": "resnet18", "clients": 2, "batch": 2, "rounds": 1}
        | settings
    )[0]
    return Experiment.prepare(config, data=clients)


def test_a_frozen_layer_comes_out_as_it_went_in_running_statistics_too():
    run = resnet_federation()
    member, state = run.federation.members[0], run.engine.states[0][0]
    head_only = replace(run.algorithm, phases=run.algorithm.phases[:1])
    trained = local_training.train(
        member, head_only, state, run.progress.server, run.engine.trainings[0], 1
    ).state
    moved = {name for name in state if not torch.equal(state[name], trained[name])}
    assert moved == {"head.fc.weight", "head.fc.bias"}


def test_running_statistics_travel_with_their_layer():
    run = resnet_federation("fedavg")
    own = [state["body.bn1.running_mean"] for state in run.execute().states]
    assert not torch.allclose(own[0], own[1])
    assert torch.allclose(run.progress.server["body.bn1.running_mean"], (own[0] + own[1]) / 2)
    assert "body.bn1.num_batches_tracked" not in run.progress.server


def test_during_collects_what_passed_in_the_last_epoch():
    """With a tiny learning rate and no dropout, embeddings do not move: `during` is `after`."""
    during, _ = finished("fedproto(collect=during)", lr=1e-30, epochs=2)
    after, _ = finished("fedproto(collect=after)", lr=1e-30, epochs=2)
    assert torch.allclose(during.progress.server["prototypes"], after.progress.server["prototypes"])


def test_during_collects_each_sample_once():
    run = experiment("fedproto(collect=during)", epochs=3)
    member = run.federation.members[0]
    received = run.algorithm.send(run.progress.server, run.federation.recipient(0))
    for slow in (False, True):
        upload = local_training.train(
            member,
            run.algorithm,
            run.engine.states[0][0],
            received,
            run.engine.trainings[0],
            1,
            slow,
        ).upload
        counts = member.train.y[member.train.rows].bincount(minlength=10)
        assert (upload["prototypes"].weight <= counts).all()
        assert slow or torch.equal(upload["prototypes"].weight, counts.double())


def test_crops_and_flips_are_those_of_a_loop_over_images():
    x, border = torch.rand(6, 3, 8, 8), torch.tensor([-1.0, 0.5, 2.0])
    draws = uniform(key(3, "augment"), 18).reshape(6, 3)
    ours = crop_and_flip(x, border, draws)
    downs, rights, mirrors = draws.T
    for image in range(6):
        canvas = border[:, None, None].expand(3, 16, 16).clone()
        canvas[:, 4:12, 4:12] = x[image]
        top, left = int(downs[image] * 9), int(rights[image] * 9)
        cut = canvas[:, top : top + 8, left : left + 8]
        assert torch.allclose(ours[image], cut.flip(2) if mirrors[image] < 0.5 else cut, atol=1e-6)


def test_four_accuracies_by_hand():
    """Three test images of class 1; the client owns classes 1 and 2; the scores are made up."""
    run = experiment("fedproto")
    member = run.federation.members[0]
    own, other = member.classes[0], next(c for c in range(10) if c not in member.classes)
    y = member.test.y[member.test.rows]
    scores = torch.zeros(len(y), 10).double()
    scores[:, other] = 2.0  # everything looks most like a class the client does not have
    scores[:, own] = 1.0
    algorithm = replace(run.algorithm, predict=lambda step: {"head": scores})
    received = send(run.algorithm, run.progress.server, torch.ones(10))
    accuracy = local_training.evaluate(member, algorithm, run.engine.states[0][0], received)
    assert accuracy == {"head": 0.0, "head_own": pytest.approx(float((y == own).double().mean()))}


def test_summary_is_numpys():
    values = [0.5, 0.75, 1.0]
    found = summarise({"head": torch.tensor(values, dtype=torch.float64)})
    assert found == {
        "head": {"mean": pytest.approx(np.mean(values)), "std": pytest.approx(np.std(values))}
    }


def test_traffic_on_the_papers_network():
    """One round: FedAvg 20 x 21,840 values, FedPer 20 x 5,280, FedProto 50 per class."""
    found, classes = {}, 0
    for name in ("fedavg", 'fedper(personal="fc1,fc2")', "fedproto"):
        run = Experiment.prepare(
            configure(
                {"algorithm": name, "rounds": 1, "shots": 2, "shots_stdev": 0, "test_shots": 1}
            )[0]
        )
        found[name.partition("(")[0]] = run.execute().communication["values_per_round"]
        classes = sum(len(member.classes) for member in run.federation.members)
    assert found == {"fedavg": 436_800, "fedper": 105_600, "fedproto": 50 * classes}


def test_the_first_download_of_prototypes_is_nothing():
    _, result = finished("fedproto", rounds=2)
    assert result.metrics[0]["bytes_down"] == 0
    assert result.metrics[1]["bytes_down"] > 0


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_each_clients_downloads_are_those_of_its_own_classes(engine):
    """Stacks train clients in the order of their steps; what each downloads does not follow it."""
    run, result = finished("fedproto", engine=engine, stdev=2, shots_stdev=3, clients=6, rounds=3)
    held = [len(member.classes) for member in run.federation.members]
    assert len(set(held)) > 1
    ledger = run.progress.ledger
    assert [ledger.of(client)["values_down"] for client in range(6)] == [
        8 * count * 2 for count in held
    ]
    assert [ledger.of(client)["values_up"] for client in range(6)] == [
        8 * count * 3 for count in held
    ]
    received = [send(run.algorithm, run.progress.server, own) for own in run.federation.own_classes]
    sizes = [codec.download_size(each).bytes for each in received]
    assert [ledger.of(client)["bytes_down"] for client in range(6)] == [2 * size for size in sizes]
    assert result.metrics[2]["bytes_down"] == sum(sizes)


def test_downloads_belong_to_the_clients_that_were_drawn():
    """Half of them each round; the others download nothing."""
    schedule = Schedule(3, participation=0.5, seed=0)
    drawn = [sample_cohort(6, schedule, round).sampled.tolist() for round in (1, 2, 3)]
    run, result = finished("fedavg", participation=0.5, clients=6, rounds=3)
    assert [line["participants"] for line in result.metrics] == drawn
    size = codec.download_size(run.progress.server)
    for number in range(6):
        rounds = sum(number in each for each in drawn)
        assert run.progress.ledger.of(number)["values_down"] == rounds * size.values


def test_uploads_count_values_with_weight_only():
    weight = torch.tensor([0.0] * 7 + [1.0] * 3)
    group = Group({"prototypes": torch.zeros(10, 50)}, weight)
    assert codec.upload_size({"prototypes": group}).values == 150


def test_an_error_in_training_names_round_client_and_stage():
    run = experiment("local")

    def broken(step):
        raise ValueError("boom")

    run.engine.algorithm = replace(run.algorithm, loss=broken)
    place = r"\(test_rounds\.py, line \d+\)"
    with pytest.raises(
        TrainingError, match=rf"round 1, client 0 .*training {place}: ValueError: boom"
    ):
        run.execute()


def test_an_error_outside_a_users_code_names_no_file():
    run = experiment("local")
    run.engine.algorithm = replace(run.algorithm, loss=torch.relu)
    with pytest.raises(TrainingError, match=r"round 1, client 0 .*, training: relu"):
        run.execute()


def test_divergence_is_an_error_that_names_the_learning_rate():
    with pytest.raises(
        TrainingError,
        match=r"client \d, training: the .* loss is (nan|inf); the lr may be too high",
    ):
        finished("local", lr=1e300)


def test_a_last_step_that_diverges_is_noticed():
    """One step a round: the loss before it is fine, the prototypes after it are not."""
    with pytest.raises(
        TrainingError, match=r"client 0, training: its parameters or its upload are not finite"
    ):
        finished("fedproto", lr=1e30, batch=1000, rounds=1, precision="float32")


def test_without_any_prototype_nothing_is_predicted_right():
    _, result = finished("fedproto", rounds=1, lost_uploads=1.0)
    assert result.accuracy["prototype"]["mean"] == 0
    assert "no class has a prototype yet" in result.metrics[0]["notes"][0]


def test_sources_draw_their_classes_for_themselves():
    """Otherwise client i of one source would hold the classes of client i of the other."""
    mix = {"dataset": "mnist5k*10,digits*10", "shots": 2, "shots_stdev": 0}
    members = Experiment.prepare(configure(mix)[0]).federation.members
    assert [m.classes for m in members[:10]] != [m.classes for m in members[10:]]


def test_fesem_measures_distance_between_weights_only():
    """Running statistics are no weights: moving them a mile leaves the client with its centre."""
    algorithm = build("fesem", clusters=2)
    own = {"w": torch.tensor([1.0]), "bn.running_var": torch.tensor([1e6])}
    centres = {"w": torch.tensor([[0.0], [1.1]]), "bn.running_var": torch.tensor([[1e6], [0.0]])}
    assert algorithm.adopt(own, centres)["w"].item() == pytest.approx(1.1)


def test_groups_of_clients_with_permuted_labels_are_told_apart():
    """FeSEM recovers two planted groups: in half the clients each label means another digit."""
    bunch = load_digits()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(bunch.target))[:1600].reshape(8, 200)
    shifted = (bunch.target + 5) % 10
    clients = [
        (
            (bunch.images[rows] / 16).astype(np.float32),
            (bunch.target if number < 4 else shifted)[rows],
        )
        for number, rows in enumerate(order)
    ]
    settings = {
        "algorithm": "fesem(clusters=2)",
        "model": "mlp",
        "clients": 8,
        "rounds": 12,
        "lr": 0.05,
        "seed": 1,
    }
    run = Experiment.prepare(configure(settings)[0], data=clients)
    fesem = run.execute()
    centres = send(run.algorithm, run.progress.server, torch.ones(10))
    chosen = [run.algorithm.adopt(state, centres)["head.fc3.weight"] for state in fesem.states]
    groups = [int(torch.equal(weights, chosen[0])) for weights in chosen]
    assert groups == [1, 1, 1, 1, 0, 0, 0, 0]
    fedavg = Experiment.prepare(
        configure(settings | {"algorithm": "fedavg"})[0], data=clients
    ).execute()
    assert fesem.accuracy["head"]["mean"] > fedavg.accuracy["head"]["mean"] + 0.2


# --- an algorithm that says it is additive is


def median_of_uploads(server: Tree, uploads: Upload) -> Tree:
    """The median over clients of each parameter, which is not a function of the sum."""
    weight = uploads["model"].weight
    return {
        name: (sums / weight.view(-1, *[1] * (sums.dim() - 1))).median(0).values
        for name, sums in uploads["model"].sums.items()
    }


@pytest.mark.parametrize("engine", ["reference", "vectorised", "processes"])
def test_an_algorithm_that_is_wrongly_declared_additive_is_refused(engine: str) -> None:
    """Without the check a median would silently be a mean, because uploads are summed early."""
    run = experiment("fedavg", engine="vectorised" if engine == "vectorised" else "reference")
    run.algorithm = replace(run.algorithm, name="median", aggregate=median_of_uploads)
    if engine == "processes":
        run = use_processes(run, workers=2)
    sentence = (
        r"algorithm median is declared additive, but what it aggregates from \d uploads differs "
        r"from what it aggregates from their sum \(.+\): set additive=False"
    )
    with pytest.raises(ConfigError, match=f"^{sentence}$"), closing(run.engine):
        run.execute()


def test_an_algorithm_that_is_declared_not_additive_sees_single_uploads() -> None:
    run = experiment("fedavg", engine="reference")
    seen = []

    def aggregate(server: Tree, uploads: Upload) -> Tree:
        seen.append(len(uploads["model"].weight))
        return median_of_uploads(server, uploads)

    run.algorithm = replace(run.algorithm, aggregate=aggregate, additive=False)
    run.execute()
    assert set(seen) == {4}


def test_an_algorithm_cannot_be_additive_and_remember() -> None:
    with pytest.raises(ConfigError, match="algorithm fedproto cannot be both additive and rem"):
        replace(build("fedproto", absent="remember"), additive=True)
