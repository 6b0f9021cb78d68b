"""The vectorised engine computes what the reference engine computes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.engine_comparison import (
    RAGGED,
    TROUBLE,
    assert_engines_agree,
    assert_equal,
    assert_same_clients,
    finish,
    largest_difference,
    make_clients,
    make_noise,
    narrow_resnet,
    network,
    prepare,
    with_batch_norm,
    with_dropout,
)
from helpers.tiny import ALGORITHMS, SETTINGS
from torch import nn

from fedproto.engines.vectorised import engine as vectorised
from fedproto.engines.vectorised import layer_support, obstacles, stacks
from fedproto.engines.vectorised import layers as stacked
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.engines.vectorised.state_store import Store
from fedproto.errors import TrainingError
from fedproto.runs.experiment import reopen
from fedproto.runs.folder import RunFolder

# --- every algorithm and every option


def test_the_clients_compared_here_really_differ_in_size():
    sizes = [len(member.train) for member in prepare("local", "reference").federation.members]
    assert len(set(sizes)) > 1
    assert any(size % SETTINGS["batch"] for size in sizes)
    tests = [len(member.test) for member in prepare("local", "reference").federation.members]
    assert len(set(tests)) > 1


@pytest.mark.parametrize("trouble", [{}, TROUBLE], ids=["calm", "trouble"])
@pytest.mark.parametrize("name", [*ALGORITHMS, "fedrep(head_epochs=2)", "fesem(clusters=2)"])
def test_every_algorithm_computes_what_the_reference_engine_does(name, trouble):
    assert_engines_agree(name, **trouble)


@pytest.mark.parametrize(
    "name", ["local", "fedavg", "fedrep(head_epochs=2)", "fesem(clusters=2)", "fedproto"]
)
def test_dropout_draws_the_same_in_a_stack_as_for_a_single_client(name):
    """Draws depend on counters, not on the order of calls."""
    assert_engines_agree(
        name, modules=with_dropout(), data=make_clients(RAGGED), **TROUBLE | {"clients": 5}
    )


@pytest.mark.parametrize("regularise", ["sample", "class"])
@pytest.mark.parametrize("distance", ["mse", "l2", "sql2", "l1", "emd", "cosine"])
def test_every_distance_agrees(distance, regularise):
    assert_engines_agree(f"fedproto(distance={distance},regularise={regularise})", **TROUBLE)


#: Federations in which embeddings (nearly) equal their prototypes: where a distance has a kink.
AT_THE_KINK = {
    "one sample per class": {"ways": 1, "clients": 3, "stdev": 0, "shots": 1, "lam": 10},
    "one client, batch 1": {"ways": 2, "clients": 1, "stdev": 0, "shots": 1, "batch": 1, "lam": 10},
    "a large lambda": {"ways": 2, "clients": 4, "stdev": 0, "lam": 100, "lr": 0.001},
}


@pytest.mark.parametrize("setting", AT_THE_KINK.values(), ids=AT_THE_KINK)
@pytest.mark.parametrize("distance", ["mse", "l2", "sql2", "l1", "emd", "cosine"])
def test_engines_agree_where_embeddings_equal_prototypes(distance, setting):
    """Where the gradient was rounding noise, engines differed by 0.05 to 17 after ten rounds."""
    assert_engines_agree("fedproto", rounds=10, eval_every=10, distance=distance, **setting)


def test_no_distance_moves_embeddings_that_are_zero():
    """They equal their prototypes, which are zero too, such as with dead ReLUs."""

    class Dead(nn.Module):
        def __init__(self):
            super().__init__()
            self.flatten = nn.Flatten()
            self.embed = nn.Linear(64, 6)
            self.decide = nn.Linear(6, 4)
            nn.init.constant_(self.embed.bias, -100.0)

        def forward(self, x):
            features = self.embed(self.flatten(x)).relu()
            return features, self.decide(features)

    for distance in ("l1", "l2", "emd"):
        (run, _), _ = assert_engines_agree(
            "fedproto",
            modules=Dead(),
            data=make_clients(RAGGED),
            clients=5,
            distance=distance,
            lam=100,
        )
        assert not run.progress.server["prototypes"].any()


NORMALISED = {
    "Conv, GroupNorm": lambda: network(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()),
    "Conv, GroupNorm, pool": lambda: network(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2)
    ),
    "Linear, GroupNorm": lambda: network(
        nn.Flatten(), nn.Linear(64, 8), nn.GroupNorm(2, 8), nn.ReLU()
    ),
    "Conv, InstanceNorm": lambda: network(
        nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU()
    ),
    "Conv, LayerNorm": lambda: network(nn.Conv2d(1, 4, 3), nn.LayerNorm([4, 6, 6]), nn.ReLU()),
    "Conv, BatchNorm": lambda: network(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("model", NORMALISED)
def test_layers_that_normalise_agree_with_any_batch_size(model, batch):
    """With batch 1, steps see one sample and evaluation sees many: GroupNorm failed on that."""
    settings = {"batch": batch, "clients": 5, "rounds": 2, "data": make_clients(RAGGED)}
    modules = NORMALISED[model]()
    reference = prepare("fedproto", "reference", modules=modules, **settings)
    stacked_if_possible = prepare("fedproto", "vectorised", modules=modules, **settings)
    expected = finish(reference)
    assert_equal(expected, finish(stacked_if_possible))
    if (model, batch) in (("Conv, GroupNorm", 1), ("Conv, BatchNorm", 3)):
        in_processes = prepare("fedproto", "processes", modules=modules, workers=2, **settings)
        assert_equal(expected, finish(in_processes))


@pytest.mark.parametrize("model", ["Conv, GroupNorm", "Conv, InstanceNorm", "Conv, LayerNorm"])
def test_layers_that_normalise_single_samples_are_stacked_with_batch_1(model):
    run = prepare(
        "fedproto",
        "vectorised",
        batch=1,
        clients=5,
        data=make_clients(RAGGED),
        modules=NORMALISED[model](),
    )
    assert isinstance(run.engine, VectorisedEngine), run.notices


@pytest.mark.parametrize("weighting", ["samples", "uniform", "eq6"])
@pytest.mark.parametrize("absent", ["remember", "drop"])
@pytest.mark.parametrize("collect", ["after", "during"])
def test_every_way_to_collect_prototypes_agrees(collect, absent, weighting):
    assert_engines_agree(
        f"fedproto(collect={collect},absent={absent},weighting={weighting})", **TROUBLE
    )


def test_prototypes_collected_during_training_with_dropout_agree():
    assert_engines_agree(
        "fedproto(collect=during)", modules=with_dropout(), data=make_clients(RAGGED), epochs=3
    )


def test_momentum_and_rounds_with_a_single_slow_client_agree():
    assert_engines_agree("fedavg", momentum=0.9, participation=0.25, stragglers=1.0)


#: Optimisers with everything that changes a step, at a rate that is small enough for Adam.
OPTIMISERS = {
    "sgd": {"optimiser": "sgd", "weight_decay": 0.1, "clip_norm": 0.5},
    "adam": {"optimiser": "adam", "weight_decay": 0.1, "lr": 0.01},
    "adamw": {
        "optimiser": "adamw",
        "weight_decay": 0.1,
        "lr": 0.01,
        "clip_norm": 0.5,
        "schedule": "cosine",
        "warmup": 1,
    },
}


@pytest.mark.parametrize("algorithm", ["fedproto", "fedrep(head_epochs=2)", "fesem(clusters=2)"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_every_optimiser_agrees_with_slow_clients_and_partial_batches(optimiser, algorithm):
    assert_engines_agree(algorithm, **TROUBLE, **OPTIMISERS[optimiser])


@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_every_optimiser_agrees_with_batch_norm_and_dropout(optimiser):
    for module in (with_batch_norm(), with_dropout()):
        assert_engines_agree(
            "fedavg", modules=module, data=make_clients(RAGGED), **OPTIMISERS[optimiser]
        )


def test_every_optimiser_agrees_in_single_precision():
    for options in OPTIMISERS.values():
        assert_engines_agree("fedproto", 1e-4, precision="float32", **options)


@pytest.mark.parametrize("change", [{"class_weights": "balanced"}, {"sampling": "balanced"}])
@pytest.mark.parametrize(
    "algorithm", ["fedproto(regularise=class,collect=during)", "fedproto", "fedrep", "fedprox"]
)
def test_balanced_classes_agree(algorithm, change):
    modules = with_batch_norm() if algorithm == "fedprox" else None
    settings = TROUBLE | {"clients": 5}
    assert_engines_agree(
        algorithm, modules=modules, data=make_clients(RAGGED), **settings, **change
    )


def test_a_round_in_which_every_upload_is_lost():
    assert_engines_agree("fedproto", lost_uploads=1.0)


@pytest.mark.parametrize("algorithm", ["fedproto-mh", "fedproto", "local"])
def test_architectures_may_be_mixed(algorithm):
    (_, vectorised) = assert_engines_agree(algorithm, model="mlp-mh", dim=8, **TROUBLE)
    assert len(vectorised[0].engine.groups) == 3


def test_input_shapes_may_be_mixed():
    data = make_clients(RAGGED)
    for number in (1, 3):
        x, y, x_test, y_test = data[number]
        data[number] = x[:, 1:7], y, x_test[:, 1:7], y_test
    (_, vectorised) = assert_engines_agree("fedproto", data=data)
    assert [len(group) for group in vectorised[0].engine.groups] == [3, 2]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedproto"])
def test_clients_given_as_arrays_of_their_own_are_one_stack(algorithm):
    (_, vectorised) = assert_engines_agree(algorithm, data=make_clients(RAGGED))
    assert [len(group) for group in vectorised[0].engine.groups] == [5]


def test_two_data_sets_in_one_federation():
    """Their images differ in size; classes that both have share a prototype."""
    settings = {"dataset": "digits*3,mnist5k*2", "clients": 5, "test_shots": 3}
    (_, (run, _)) = assert_engines_agree("fedproto", **settings)
    assert [len(group) for group in run.engine.groups] == [3, 2]


# --- the paper's networks


MNIST = {
    "dataset": "mnist5k",
    "model": "cnn",
    "clients": 3,
    "shots": 6,
    "rounds": 1,
    "lr": 0.01,
    "test_shots": 3,
}


def test_the_cnn_in_single_precision():
    assert_engines_agree("fedproto", 1e-4, precision="float32", **MNIST, **{"model.dropout": 0})


def test_the_cnn_with_dropout():
    assert_engines_agree("fedproto", 1e-8, **MNIST)


@pytest.mark.parametrize(("last_batch", "sizes"), [("auto", (4, 2)), ("keep", (5, 3))])
def test_a_resnet(last_batch, sizes):
    """Does one step or two; a last batch of two images beside one of three is padded.

    BatchNorm must not see the padding. The strides leave more than one pixel to the last layers:
    over two pixels in all, BatchNorm's gradient is noise.
    """
    assert_engines_agree(
        "fedavg",
        1e-6,
        data=make_noise(sizes),
        modules=narrow_resnet(strides=(1, 1)),
        batch=3,
        rounds=1,
        lr=0.01,
        last_batch=last_batch,
    )


@pytest.mark.slow
def test_resnet18():
    assert_engines_agree(
        "fedavg",
        1e-6,
        data=make_noise((5, 3)),
        model='resnet18(strides="1,1")',
        batch=3,
        rounds=1,
        lr=0.01,
        last_batch="keep",
    )


@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg"])
@pytest.mark.parametrize("strides", [(2, 2), (1, 4)], ids=str)
def test_a_resnet_with_the_layers_of_a_gpu(strides, algorithm, monkeypatch):
    """Its convolutions and BatchNorm take their forms for a GPU; torch does their arithmetic.

    The images of the last layers are few pixels, so batches are not small: over four values
    BatchNorm's gradient is noise.
    """
    monkeypatch.setattr(layer_support, "on_gpu", lambda x: True)
    monkeypatch.setattr(stacked, "MAX_SMALL_WEIGHTS", 0)
    assert_engines_agree(
        algorithm,
        1e-6,
        data=make_noise([32, 48, 40], (3, 32, 32)),
        modules=narrow_resnet(strides, shape=(3, 32, 32)),
        batch=16,
        rounds=1,
        lr=0.01,
    )


@pytest.mark.slow
def test_resnet18_with_the_layers_of_a_gpu(monkeypatch):
    monkeypatch.setattr(layer_support, "on_gpu", lambda x: True)
    monkeypatch.setattr(stacked, "MAX_SMALL_WEIGHTS", 0)
    assert_engines_agree(
        "fedproto",
        1e-6,
        data=make_noise([32, 48, 40], (3, 32, 32)),
        model='resnet18(strides="2,2")',
        batch=16,
        rounds=1,
        lr=0.01,
    )


# --- crops and flips


def test_random_crops_and_flips_are_the_reference_engines(tmp_path):
    rng = np.random.default_rng(0)
    paths = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for path in paths:
        np.savez(path, x=rng.integers(0, 256, (60, 2, 8, 8), dtype=np.uint8), y=np.arange(60) % 3)
    # The borders of the two sources differ, and their clients share a stack.
    first = f'npz:{paths[0]}(augment=true,mean="0.4,0.5",std=0.3)*2'
    second = f'npz:{paths[1]}(augment=true,mean="0.1,0.9",std=0.3)*2'
    dataset = f"{first},{second}"
    settings = {"dataset": dataset, "ways": 2, "modules": None, "epochs": 2, "test_shots": None}
    (_, (run, _)) = assert_engines_agree("fedproto", **settings)
    assert [len(group) for group in run.engine.groups] == [4]
    assert len(run.engine.groups[0].border.unique()) == 4
    bare = prepare(
        "fedproto",
        "vectorised",
        **settings | {"dataset": dataset.replace("augment=true", "augment=false")},
    )
    bare.execute()
    assert largest_difference(bare.progress.server, run.progress.server) > 1e-4


# --- what must not matter: neighbours, sizes of stacks, where states are


@pytest.mark.parametrize("build", [with_dropout, with_batch_norm], ids=["dropout", "batchnorm"])
def test_a_client_alone_is_what_it_is_among_larger_ones(build):
    data = make_clients((7, 15, 3, 12, 10), classes=2)
    keep = {"last_batch": "keep"}
    alone = prepare(
        "local", "vectorised", data=data[:1], modules=build(classes=2), clients=1, **keep
    ).execute()
    among = prepare("local", "vectorised", data=data, modules=build(classes=2), **keep).execute()
    assert largest_difference(alone.states[0], among.states[0]) <= 1e-12


SMALL_STACKS = {
    "modules": with_dropout(),
    "data": make_clients(RAGGED),
    "rounds": 2,
    "epochs": 2,
    "stragglers": 0.4,
}


@pytest.mark.parametrize("algorithm", ["fedproto", "fedproto(absent=drop)", "fesem(clusters=2)"])
def test_the_size_of_a_stack_does_not_matter(algorithm):
    all_clients = finish(prepare(algorithm, "vectorised", stack=None, **SMALL_STACKS))
    for size in (1, 2, 3):
        run = prepare(algorithm, "vectorised", stack=size, **SMALL_STACKS)
        assert run.engine.stacks[0].capacity == size
        assert_equal(all_clients, finish(run), 1e-10)


def test_a_step_is_tried_with_two_clients_however_little_memory_is_free(monkeypatch):
    """With space for one, the second of the two would not fit into a GPU's workspace."""
    tried = []

    class Seen(vectorised.Stack):
        def train(self, *how):
            tried.append((self.capacity, len(how[1])))
            return super().train(*how)

    monkeypatch.setattr(stacks, "_choose_capacity", lambda group, batch: 1)
    monkeypatch.setattr(vectorised, "Stack", Seen)
    monkeypatch.setattr(obstacles, "Stack", Seen)
    run = prepare("fedproto", "vectorised", data=make_clients(RAGGED))
    assert tried == [(2, 2)] and not run.notices
    run.execute()
    assert set(tried[1:]) == {(1, 1)}


@pytest.mark.parametrize("place", ["host", "disk"])
def test_states_may_be_kept_in_host_memory_or_on_disk(place):
    settings = {
        "modules": with_batch_norm(),
        "data": make_clients(RAGGED),
        "participation": 0.6,
        "stack": 2,
    }
    runs = [
        prepare("fedavg", "vectorised", states=states, **settings) for states in ("device", place)
    ]
    assert [run.engine.groups[0].states.place for run in runs] == ["device", place]
    assert_equal(*((run, run.execute()) for run in runs), 0.0)


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_a_store_returns_what_was_put_in(place):
    initial = [{"w": torch.full((2, 3), float(n)), "n": torch.tensor(n)} for n in range(5)]
    store = Store(initial, torch.device("cpu"), place)
    assert store.take(torch.tensor([3, 1]))["n"].tolist() == [3, 1]
    store.put(torch.tensor([4, 0]), {"w": torch.ones(2, 2, 3) * 9, "n": torch.tensor([40, 0])})
    assert store.take(torch.arange(5))["n"].tolist() == [0, 1, 2, 3, 40]
    assert store.take(torch.arange(5))["w"][:, 1, 2].tolist() == [9, 1, 2, 3, 9]


# --- errors


@pytest.mark.parametrize("algorithm", ["local", "fedproto"])
def test_divergence_names_round_and_client(algorithm):
    with pytest.raises(
        TrainingError,
        match=r"round 1, client \d, training: the .* loss is (nan|inf); the lr may be too high",
    ):
        prepare(algorithm, "vectorised", lr=1e300).execute()


def test_a_last_step_that_diverges_is_noticed():
    with pytest.raises(
        TrainingError, match=r"client 0, training: its parameters or its upload are not finite"
    ):
        prepare(
            "fedproto", "vectorised", lr=1e30, batch=1000, rounds=1, precision="float32"
        ).execute()


def test_an_error_names_the_client_that_diverges():
    """Only the third of five clients, whose order in the stack is by steps, has huge inputs."""
    data = make_clients(RAGGED)
    data[2] = (data[2][0] * 1e38, *data[2][1:])
    with pytest.raises(TrainingError, match=r"round 1, client 2, training: "):
        prepare("local", "vectorised", data=data).execute()


# --- stopped and resumed


class Killed(BaseException):
    pass


@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg", "fesem(clusters=2)", "fedrep"])
def test_a_resumed_run_has_bit_identical_results(algorithm, tmp_path):
    settings = {
        "rounds": 6,
        "checkpoint_every": 3,
        "participation": 0.5,
        "stragglers": 0.5,
        "clients": 6,
        "stack": 2,
    }
    whole = prepare(algorithm, "vectorised", **settings)
    expected = whole.execute()
    run = prepare(algorithm, "vectorised", **settings)
    folder = run.new_folder(tmp_path / "run")

    def die(result):
        if result.round == 4:
            raise Killed

    with pytest.raises(Killed):
        run.execute(folder, die)
    again, folder = reopen(RunFolder.open(tmp_path / "run"))
    assert isinstance(again.engine, VectorisedEngine)
    assert again.progress.round == 3
    found = again.execute(folder)
    assert_equal((whole, expected), (again, found), 0.0)


def test_either_engine_continues_from_the_states_of_the_other():
    """Exported states belong to clients, not to an engine."""
    expected = prepare("fedproto", "reference", rounds=4).execute()
    for first, second in (("reference", "vectorised"), ("vectorised", "reference")):
        halves = prepare("fedproto", first, rounds=2)
        halves.execute()
        rest = prepare("fedproto", second, rounds=4)
        rest.progress.restore(halves.progress.export(), 2)
        states = {name: value.clone() for name, value in halves.engine.export(0).items()}
        rest.engine.restore(0, states)
        found = rest.execute()
        for mine, theirs in zip(found.states, expected.states, strict=True):
            assert largest_difference(mine, theirs) < 1e-10
        assert_same_clients(found.clients, expected.clients)


# --- what is left behind


def test_given_modules_are_not_changed():
    module = with_dropout()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    prepare("fedproto", "vectorised", modules=module, data=make_clients(RAGGED)).execute()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert type(module.body[0]) is nn.Conv2d


def test_no_temporary_files_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prepare("local", "vectorised", states="disk").execute()
    assert list(Path(tmp_path).iterdir()) == []
