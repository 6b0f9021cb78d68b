"""The vectorised engine: whatever it does to many clients at once, the reference engine does to one after the other."""

import functools
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.command_line import SMALL, fedproto
from helpers.tiny import ALGORITHMS, SETTINGS
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fedproto as package
from fedproto.config.settings import configure
from fedproto.core.engine import Cohort, Shard
from fedproto.core.local_training import Training
from fedproto.core.rounds import run_rounds
from fedproto.engines import selection
from fedproto.engines.gpu.graphs import STEP, rewind
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.vectorised import engine as vectorised
from fedproto.engines.vectorised import layer_support, obstacles, stacks
from fedproto.engines.vectorised import layers as stacked
from fedproto.engines.vectorised.architecture_groups import group_by_architecture
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.engines.vectorised.receiving import send_own_classes
from fedproto.engines.vectorised.state_store import Store
from fedproto.errors import TrainingError
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import RunFolder

#: Everything that can go wrong in a round, and more than one epoch of it.
TROUBLE = {"clients": 6, "epochs": 2, "participation": 0.6, "stragglers": 0.5, "lost_uploads": 0.3}
#: Sizes that no batch of four divides; none leaves a last batch of one, which BatchNorm refuses.
RAGGED = (10, 7, 15, 3, 12)
FULL = (12, 8, 12, 4, 4)


# --- both engines side by side


def prepared(algorithm, engine, data=None, modules=None, **settings):
    config = configure(SETTINGS | {"algorithm": algorithm, "engine": engine} | settings)[0]
    return Experiment.prepare(config, data=data, modules=modules)


def both(algorithm, **settings):
    """A run by each engine, finished: (experiment, result) of the reference and of the vectorised one."""
    runs = [prepared(algorithm, engine, **settings) for engine in ("reference", "vectorised")]
    assert [type(run.engine) for run in runs] == [ReferenceEngine, VectorisedEngine], runs[
        1
    ].notices
    return [(run, run.execute()) for run in runs]


def apart(a, b):
    """The largest difference between two trees of equal names, shapes and types."""
    assert a.keys() == b.keys()
    assert all((a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype) for name in a)
    assert all(torch.isfinite(tree[name]).all() for tree in (a, b) for name in tree)
    return max(
        (float((a[name].double() - b[name].double()).abs().max()) for name in a), default=0.0
    )


def assert_equal(first, second, tolerance=1e-8):
    """Clients, server, ledger, losses and accuracies of two finished runs."""
    (run, result), (other, found) = first, second
    for mine, theirs in zip(result.states, found.states, strict=True):
        assert apart(mine, theirs) <= tolerance
    assert apart(run.progress.server, other.progress.server) <= tolerance
    assert torch.equal(run.progress.ledger.counts, other.progress.ledger.counts)
    assert torch.equal(
        run.progress.latest_uploads.last_round, other.progress.latest_uploads.last_round
    )
    for line, same in zip(result.metrics, found.metrics, strict=True):
        for each in ("loss", "loss_std"):
            assert line[each] == pytest.approx(same[each], rel=0, abs=tolerance)
        measured = {"loss": 0, "loss_std": 0, "seconds": 0}
        assert {**line, **measured} == {**same, **measured}
    assert result.clients == found.clients


def assert_engines_agree(algorithm, tolerance=1e-8, **settings):
    reference, vectorised = both(algorithm, **settings)
    assert_equal(reference, vectorised, tolerance)
    return reference, vectorised


@functools.cache
def digits():
    bunch = load_digits()
    return (bunch.images / 16).astype(np.float64), bunch.target


def clients_of(sizes, tests=(9, 4, 6, 5, 7), classes=4):
    """Arrays a client: 8x8 digits of the first classes, as many as `sizes` says, and test images of other numbers."""
    images, labels = digits()
    images, labels = images[labels < classes], labels[labels < classes]
    found, start = [], 0
    for size, test in zip(sizes, tests, strict=False):
        x, y = images[start : start + size + test], labels[start : start + size + test]
        found.append((x[:size], y[:size], x[size:], y[size:]))
        start += size + test
    return found


def network(*layers, seed=0, classes=4, shape=(1, 8, 8)):
    """The layers as a body that embeds in six values, and a head."""
    torch.manual_seed(seed)
    for layer in nn.Sequential(*layers).modules():
        if hasattr(layer, "reset_parameters"):  # drawn before the seed was set
            layer.reset_parameters()
    with torch.no_grad():
        width = nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).flatten(1).shape[1]
    return Net(
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 6), nn.Tanh()), nn.Linear(6, classes)
    )


class Net(nn.Module):
    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


def with_dropout(**how):
    return network(
        nn.Conv2d(1, 3, 3), nn.Dropout2d(0.4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3), **how
    )


# --- every algorithm and every option


def test_the_clients_compared_here_really_differ_in_size():
    sizes = [len(member.train) for member in prepared("local", "reference").federation.members]
    assert len(set(sizes)) > 1
    assert any(size % SETTINGS["batch"] for size in sizes)
    tests = [len(member.test) for member in prepared("local", "reference").federation.members]
    assert len(set(tests)) > 1


@pytest.mark.parametrize("trouble", [{}, TROUBLE], ids=["calm", "trouble"])
@pytest.mark.parametrize("name", [*ALGORITHMS, "fedrep(head_epochs=2)", "fesem(clusters=2)"])
def test_every_algorithm_is_the_reference_engines(name, trouble):
    assert_engines_agree(name, **trouble)


@pytest.mark.parametrize(
    "name", ["local", "fedavg", "fedrep(head_epochs=2)", "fesem(clusters=2)", "fedproto"]
)
def test_dropout_inside_a_model_draws_what_it_draws_alone(name):
    """Draws are counted, not called for, so that a stack of clients drops what each of them drops alone."""
    assert_engines_agree(
        name, modules=with_dropout(), data=clients_of(RAGGED), **TROUBLE | {"clients": 5}
    )


@pytest.mark.parametrize("regularise", ["sample", "class"])
@pytest.mark.parametrize("distance", ["mse", "l2", "sql2", "l1", "emd", "cosine"])
def test_every_distance_is_the_reference_engines(distance, regularise):
    assert_engines_agree(f"fedproto(distance={distance},regularise={regularise})", **TROUBLE)


#: Federations in which embeddings equal their prototypes, as the only sample of a class does, or nearly do.
AT_THE_KINK = {
    "one sample per class": {"ways": 1, "clients": 3, "stdev": 0, "shots": 1, "lam": 10},
    "one client, batch 1": {"ways": 2, "clients": 1, "stdev": 0, "shots": 1, "batch": 1, "lam": 10},
    "a large lambda": {"ways": 2, "clients": 4, "stdev": 0, "lam": 100, "lr": 0.001},
}


@pytest.mark.parametrize("setting", AT_THE_KINK.values(), ids=AT_THE_KINK)
@pytest.mark.parametrize("distance", ["mse", "l2", "sql2", "l1", "emd", "cosine"])
def test_engines_agree_where_embeddings_equal_prototypes(distance, setting):
    """Where the gradient was rounding noise, they came 0.05 to 17 apart in ten rounds."""
    assert_engines_agree("fedproto", rounds=10, eval_every=10, distance=distance, **setting)


def test_dead_features_agree_with_their_prototypes():
    """Embeddings that are all zero, as of dead ReLUs, equal prototypes of zero: no distance moves them."""

    class Dead(nn.Module):
        def __init__(self):
            super().__init__()
            self.flatten, self.embed, self.decide = nn.Flatten(), nn.Linear(64, 6), nn.Linear(6, 4)
            nn.init.constant_(self.embed.bias, -100.0)

        def forward(self, x):
            features = self.embed(self.flatten(x)).relu()
            return features, self.decide(features)

    for distance in ("l1", "l2", "emd"):
        (run, _), _ = assert_engines_agree(
            "fedproto",
            modules=Dead(),
            data=clients_of(RAGGED),
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


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("model", NORMALISED.values(), ids=NORMALISED)
def test_layers_that_normalise_agree_whatever_the_batch(model, batch, engine):
    """With batch 1, steps see one sample and evaluation sees many: GroupNorm died of that in round 1."""
    settings = {
        "batch": batch,
        "clients": 5,
        "rounds": 2,
        "data": clients_of(RAGGED),
        "modules": model(),
    }
    runs = [
        prepared("fedproto", "reference", **settings),
        prepared(
            "fedproto", engine, **settings | ({"workers": 2} if engine == "processes" else {})
        ),
    ]
    assert_equal(*[(run, run.execute()) for run in runs])


@pytest.mark.parametrize("model", ["Conv, GroupNorm", "Conv, InstanceNorm", "Conv, LayerNorm"])
def test_layers_that_normalise_samples_are_stacked_with_batch_1(model):
    run = prepared(
        "fedproto",
        "vectorised",
        batch=1,
        clients=5,
        data=clients_of(RAGGED),
        modules=NORMALISED[model](),
    )
    assert isinstance(run.engine, VectorisedEngine), run.notices


@pytest.mark.parametrize("weighting", ["samples", "uniform", "eq6"])
@pytest.mark.parametrize("absent", ["remember", "drop"])
@pytest.mark.parametrize("collect", ["after", "during"])
def test_every_way_to_collect_prototypes_is_the_reference_engines(collect, absent, weighting):
    assert_engines_agree(
        f"fedproto(collect={collect},absent={absent},weighting={weighting})", **TROUBLE
    )


def test_prototypes_collected_during_training_with_dropout_are_the_reference_engines():
    assert_engines_agree(
        "fedproto(collect=during)", modules=with_dropout(), data=clients_of(RAGGED), epochs=3
    )


def test_momentum_and_participation_of_a_single_client_change_nothing():
    assert_engines_agree("fedavg", momentum=0.9, participation=0.25, stragglers=1.0)


def test_a_round_in_which_every_upload_is_lost():
    assert_engines_agree("fedproto", lost_uploads=1.0)


@pytest.mark.parametrize("algorithm", ["fedproto-mh", "fedproto", "local"])
def test_architectures_may_be_mixed(algorithm):
    (_, vectorised) = assert_engines_agree(algorithm, model="mlp-mh", dim=8, **TROUBLE)
    assert len(vectorised[0].engine.groups) == 3


def test_input_shapes_may_be_mixed():
    data = clients_of(RAGGED)
    for number in (1, 3):
        x, y, x_test, y_test = data[number]
        data[number] = x[:, 1:7], y, x_test[:, 1:7], y_test
    (_, vectorised) = assert_engines_agree("fedproto", data=data)
    assert [len(group) for group in vectorised[0].engine.groups] == [3, 2]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedproto"])
def test_clients_given_as_arrays_of_their_own_are_one_stack(algorithm):
    (_, vectorised) = assert_engines_agree(algorithm, data=clients_of(RAGGED))
    assert [len(group) for group in vectorised[0].engine.groups] == [5]


def test_two_data_sets_in_one_federation():
    """Of other sizes of images and other classes, each with its own pool; the classes they share have one prototype."""
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


def noise(sizes, shape=(3, 16, 16)):
    rng = np.random.default_rng(0)
    return [
        (
            rng.normal(size=(size, *shape)),
            np.arange(size) % 2,
            rng.normal(size=(2, *shape)),
            np.arange(2),
        )
        for size in sizes
    ]


@pytest.mark.parametrize(("last_batch", "sizes"), [("auto", (4, 2)), ("keep", (5, 3))])
def test_resnet18(last_batch, sizes):
    """One step or two; a last batch of two images beside one of three is padded, and BatchNorm must not see it.

    The strides leave more than one pixel to the last layers: over two pixels in all, BatchNorm's gradient is noise.
    """
    assert_engines_agree(
        "fedavg",
        1e-6,
        data=noise(sizes),
        model='resnet18(strides="1,1")',
        batch=3,
        rounds=1,
        lr=0.01,
        last_batch=last_batch,
    )


# --- BatchNorm


def normalised(seed=0, classes=4, **options):
    layers = (
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3, **options),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2),
    )
    return network(*layers, seed=seed, classes=classes)


def normalised_flat(seed=0, **options):
    return network(
        nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10, **options), nn.ReLU(), seed=seed
    )


@pytest.mark.parametrize("build", [normalised, normalised_flat], ids=["2d", "1d"])
@pytest.mark.parametrize(
    ("sizes", "last_batch"),
    [(RAGGED, "keep"), (RAGGED, "drop"), (RAGGED, "auto"), (FULL, "keep")],
    ids=["kept", "dropped", "auto", "full"],
)
def test_batchnorm_leaves_padding_out(build, sizes, last_batch):
    for algorithm in ("local", "fedavg"):
        _, (_, result) = assert_engines_agree(
            algorithm, modules=build(), data=clients_of(sizes), last_batch=last_batch, epochs=2
        )
        layer = "body.1" if build is normalised else "body.2"
        assert min(state[f"{layer}.num_batches_tracked"] for state in result.states) > 0


@pytest.mark.parametrize("build", [normalised, normalised_flat], ids=["2d", "1d"])
@pytest.mark.parametrize(
    "options", [{"momentum": None}, {"affine": False}, {"momentum": 0.3, "eps": 0.01}], ids=str
)
def test_batchnorm_with_options(build, options):
    assert_engines_agree(
        "local",
        modules=build(**options),
        data=clients_of(RAGGED),
        last_batch="keep",
        **TROUBLE | {"clients": 5},
    )


def test_batchnorm_without_running_statistics_is_left_to_the_reference_engine():
    """It normalises by the images it is tested with, and which those are depends on the engine."""
    settings = {
        "modules": normalised(track_running_stats=False),
        "data": clients_of(RAGGED),
        "last_batch": "keep",
    }
    assert_falls_back("Net normalises by the batch it is tested in", **settings)


def test_a_frozen_batchnorm_keeps_its_running_statistics():
    """FedRep's first phase trains the head alone, through a body whose statistics move in it but are then forgotten."""
    for personal in ("head", "body.1", "body.1,head"):
        assert_engines_agree(
            f'fedrep(personal="{personal}",head_epochs=2)',
            modules=normalised(),
            data=clients_of(RAGGED),
            epochs=1,
        )


def test_batchnorm_with_stragglers_and_the_absent():
    assert_engines_agree(
        "fedavg", modules=normalised(), data=clients_of(RAGGED), **TROUBLE | {"clients": 5}
    )
    assert_engines_agree(
        "fesem(clusters=2)", modules=normalised(), data=clients_of(RAGGED), last_batch="keep"
    )


# --- crops and flips


def test_random_crops_and_flips_are_the_reference_engines(tmp_path):
    rng = np.random.default_rng(0)
    paths = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for path in paths:
        np.savez(path, x=rng.integers(0, 256, (60, 2, 8, 8), dtype=np.uint8), y=np.arange(60) % 3)
    means = (
        "0.4,0.5",
        "0.1,0.9",
    )  # the borders of the two sources differ, and their clients are one stack
    dataset = ",".join(
        f'npz:{path}(augment=true,mean="{mean}",std=0.3)*2'
        for path, mean in zip(paths, means, strict=True)
    )
    settings = {"dataset": dataset, "ways": 2, "modules": None, "epochs": 2, "test_shots": None}
    (_, (run, _)) = assert_engines_agree("fedproto", **settings)
    assert [len(group) for group in run.engine.groups] == [4]
    assert len(run.engine.groups[0].border.unique()) == 4
    bare = prepared(
        "fedproto",
        "vectorised",
        **settings | {"dataset": dataset.replace("augment=true", "augment=false")},
    )
    bare.execute()
    assert apart(bare.progress.server, run.progress.server) > 1e-4


# --- what must not matter: neighbours, sizes of stacks, where states lie


@pytest.mark.parametrize("build", [with_dropout, normalised], ids=["dropout", "batchnorm"])
def test_a_client_alone_is_what_it_is_among_larger_ones(build):
    data = clients_of((7, 15, 3, 12, 10), classes=2)
    keep = {"last_batch": "keep"}
    alone = prepared(
        "local", "vectorised", data=data[:1], modules=build(classes=2), clients=1, **keep
    ).execute()
    among = prepared("local", "vectorised", data=data, modules=build(classes=2), **keep).execute()
    assert apart(alone.states[0], among.states[0]) <= 1e-12


@pytest.mark.parametrize("stack", [1, 2, 3])
def test_the_size_of_a_stack_does_not_matter(stack):
    settings = {
        "modules": with_dropout(),
        "data": clients_of(RAGGED),
        "epochs": 2,
        "stragglers": 0.4,
    }
    for algorithm in ("fedproto", "fedproto(absent=drop)", "fesem(clusters=2)"):
        runs = [prepared(algorithm, "vectorised", stack=size, **settings) for size in (None, stack)]
        assert runs[1].engine.stacks[0].capacity == stack
        assert_equal(*((run, run.execute()) for run in runs), 1e-10)


def test_a_step_is_tried_with_two_clients_however_little_memory_is_free(monkeypatch):
    """With room for one, the second of the two would not fit into what a GPU's step works on."""
    tried = []

    class Seen(vectorised.Stack):
        def train(self, *how):
            tried.append((self.capacity, len(how[1])))
            return super().train(*how)

    monkeypatch.setattr(stacks, "_choose_capacity", lambda group, batch: 1)
    monkeypatch.setattr(vectorised, "Stack", Seen)
    monkeypatch.setattr(obstacles, "Stack", Seen)
    run = prepared("fedproto", "vectorised", data=clients_of(RAGGED))
    assert tried == [(2, 2)] and not run.notices
    run.execute()
    assert set(tried[1:]) == {(1, 1)}


@pytest.mark.parametrize("place", ["host", "disk"])
def test_states_may_lie_elsewhere(place):
    settings = {
        "modules": normalised(),
        "data": clients_of(RAGGED),
        "participation": 0.6,
        "stack": 2,
    }
    runs = [
        prepared("fedavg", "vectorised", states=states, **settings) for states in ("device", place)
    ]
    assert [run.engine.groups[0].states.place for run in runs] == ["device", place]
    assert_equal(*((run, run.execute()) for run in runs), 0.0)


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_a_store_gives_back_what_was_put_in(place):
    initial = [{"w": torch.full((2, 3), float(n)), "n": torch.tensor(n)} for n in range(5)]
    store = Store(initial, torch.device("cpu"), place)
    assert store.take(torch.tensor([3, 1]))["n"].tolist() == [3, 1]
    store.put(torch.tensor([4, 0]), {"w": torch.ones(2, 2, 3) * 9, "n": torch.tensor([40, 0])})
    assert store.take(torch.arange(5))["n"].tolist() == [0, 1, 2, 3, 40]
    assert store.take(torch.arange(5))["w"][:, 1, 2].tolist() == [9, 1, 2, 3, 9]


# --- modules of a user's own


def test_equal_modules_of_other_weights_are_one_stack():
    modules = [normalised(seed) for seed in range(5)]
    (_, (run, result)) = assert_engines_agree("fedproto", modules=modules, data=clients_of(RAGGED))
    assert len(group_by_architecture([run.federation], Shard())) == 1
    assert apart(result.states[0], result.states[1]) > 1e-3


class Scaled(nn.Module):
    """An attribute that is no parameter, and what it does."""

    def __init__(self, name, value):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(64, 6), nn.Linear(6, 4)
        self.name = name
        if isinstance(value, torch.Tensor):
            self.register_buffer(name, value, persistent=False)
        else:
            setattr(self, name, value)

    def forward(self, x):
        features = torch.tanh(getattr(self, self.name) * self.first(x.flatten(1)))
        return features, self.head(features)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("scale", (1.0, 3.0)),
        pytest.param("_scale", (1.0, 3.0)),
        pytest.param("table", (torch.tensor(1.0), torch.tensor(3.0))),
    ],
    ids=["plain", "private", "buffer that is not saved"],
)
def test_modules_that_differ_in_an_attribute_are_two_stacks(name, values):
    """Or one would be trained as the other."""
    modules = [Scaled(name, values[number % 2]) for number in range(5)]
    (_, (run, _)) = assert_engines_agree("fedproto", modules=modules, data=clients_of(RAGGED))
    assert [
        [member.id for _, member in group]
        for group in group_by_architecture([run.federation], Shard())
    ] == [
        [0, 2, 4],
        [1, 3],
    ]


def test_layers_with_other_settings_are_other_stacks():
    modules = [
        network(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(4), act)
        for act in (nn.ReLU(), nn.Tanh(), nn.ReLU())
    ]
    modules.append(network(nn.Conv2d(1, 2, 3, padding=1), nn.AvgPool2d(4), nn.ReLU()))
    modules.append(
        network(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.MaxPool2d(4), nn.ReLU())
    )
    (_, (run, _)) = assert_engines_agree("local", modules=modules, data=clients_of(RAGGED))
    groups = [
        [member.id for _, member in group]
        for group in group_by_architecture([run.federation], Shard())
    ]
    assert groups == [[0, 2], [1], [3], [4]]


class ByFunctions(nn.Module):
    """Convolution and pooling called as functions, which no table of layers sees."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.kernels = nn.Parameter(torch.randn(3, 1, 3, 3) / 3)
        self.conv = nn.Conv2d(3, 4, 2)
        self.fc, self.head = nn.Linear(16, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(F.conv2d(x, self.kernels, padding=1)), 2)
        x = F.avg_pool2d(self.conv(x), 2, 1)
        features = F.gelu(self.fc(x.flatten(1)))
        return features, self.head(features)


MODULES = {
    "functions": ByFunctions,
    "groups": lambda: network(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2)),
    "depthwise": lambda: network(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4, bias=False)
    ),
    "dilation": lambda: network(nn.Conv2d(1, 4, 3, dilation=2, padding=1), nn.ReLU()),
    "stride": lambda: network(nn.Conv2d(1, 4, (3, 2), stride=(2, 1), padding=(0, 1)), nn.ReLU()),
    "padding same": lambda: network(nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2)),
    "reflect": lambda: network(nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU()),
    "max pool": lambda: network(nn.Conv2d(1, 4, 3), nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)),
    "average pool": lambda: network(
        nn.Conv2d(1, 4, 3), nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)
    ),
    "adaptive pool": lambda: network(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((3, 2))),
    "dropout2d": lambda: network(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.5), nn.ReLU()),
    "nested": lambda: network(
        nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Sequential(nn.ReLU(), nn.Dropout(0.2)), nn.MaxPool2d(2)
        ),
        nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3)),
    ),
    "other layers": lambda: network(
        nn.Conv2d(1, 4, 3),
        nn.PReLU(4),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(4, 2, 2),
        nn.AdaptiveMaxPool2d(3),
    ),
    "one dimension": lambda: network(
        nn.Flatten(2), nn.Conv1d(1, 3, 5, 2), nn.BatchNorm1d(3), nn.MaxPool1d(2), nn.LayerNorm(15)
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_any_layers(name):
    assert_engines_agree(
        "fedproto", modules=MODULES[name](), data=clients_of(RAGGED), rounds=2, last_batch="keep"
    )


class View(nn.Module):
    def forward(self, x):
        return x.view(len(x), -1)


UNRULY = {
    "a view of a convolution": lambda: network(nn.Conv2d(1, 4, 3), View()),
    "GroupNorm": lambda: network(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)),
    "InstanceNorm": lambda: network(
        nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)
    ),
}


@pytest.mark.parametrize("name", UNRULY)
def test_modules_that_run_alone_run_in_a_stack_or_are_refused_before(name):
    """Whichever engine trains them in the end, the numbers are the reference engine's."""
    settings = {"modules": UNRULY[name](), "data": clients_of(RAGGED), "rounds": 2}
    reference, run = (
        prepared("fedproto", engine, **settings) for engine in ("reference", "vectorised")
    )
    assert_equal((reference, reference.execute()), (run, run.execute()))


# --- single layers


def outcome_alone(layer, x, weights):
    """Output and gradients of a layer, by x and by each parameter."""
    x = x.clone().requires_grad_()
    parameters = list(layer.parameters())
    out = layer(x)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [x, *parameters])]


def assert_stacked_is_each_alone(layers, x):
    """A stack of layers on (clients, batch, ...) inputs against each layer on its own."""
    module, _ = stacked.make_stackable(layers[0])
    assert type(module) is stacked.STACKED_LAYERS[type(layers[0])]
    parameters = [dict(layer.named_parameters()) for layer in layers]
    state = {
        name: torch.stack([each[name].detach() for each in parameters]) for name in parameters[0]
    }
    leaves = {name: value.requires_grad_() for name, value in state.items()}
    inputs = x.clone().requires_grad_()
    out = vmap(lambda state, x: functional_call(module, state, (x,)))(leaves, inputs)
    weights = torch.randn(out.shape, dtype=out.dtype)
    found = [out.detach(), *torch.autograd.grad((out * weights).sum(), [inputs, *leaves.values()])]
    for number, layer in enumerate(layers):
        for mine, alone in zip(
            found, outcome_alone(layer, x[number], weights[number]), strict=True
        ):
            assert torch.allclose(mine[number], alone, rtol=0, atol=1e-10)


small = settings(max_examples=25)
windows = st.tuples(st.integers(1, 3), st.integers(1, 3))


@small
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), windows, windows,
       st.tuples(st.integers(0, 2), st.integers(0, 2)), windows, st.booleans(), st.integers(1, 2))  # fmt: skip
def test_a_stacked_convolution_is_each_clients(
    clients, batch, inside, outside, kernel, stride, padding, dilation, bias, groups
):
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(
            inside * groups, outside * groups, kernel, stride, padding, dilation, groups, bias
        ).double()
        for _ in range(clients)
    ]
    assert_stacked_is_each_alone(
        layers, torch.randn(clients, batch, inside * groups, 8, 7).double()
    )


@small
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), windows, windows, st.booleans(),
       st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]))  # fmt: skip
def test_stacked_pooling_is_each_clients(clients, batch, channels, kernel, stride, ceil_mode, pool):
    torch.manual_seed(0)
    padding = (kernel[0] // 2, kernel[1] // 2)
    layers = [pool(kernel, stride, padding, ceil_mode=ceil_mode)] * clients
    assert_stacked_is_each_alone(layers, torch.randn(clients, batch, channels, 6, 7).double())


@pytest.mark.parametrize("size", [1, (2, 3), (None, 1)])
def test_stacked_adaptive_pooling_is_each_clients(size):
    assert_stacked_is_each_alone(
        [nn.AdaptiveAvgPool2d(size)] * 3, torch.randn(3, 2, 4, 5, 7).double()
    )


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d, (5, 3)),
        (nn.BatchNorm1d, (5, 3, 4)),
        (nn.BatchNorm2d, (5, 3, 4, 2)),
        (nn.BatchNorm3d, (5, 3, 2, 3, 2)),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
def test_batchnorm_over_some_rows_is_batchnorm_of_those_rows(norm, shape, options):
    """Five rows of which the last two are padding, three times with other running statistics."""
    torch.manual_seed(0)
    layer, x = norm(3, **options).double(), torch.randn(shape).double()
    module, told = stacked.make_stackable(layer)
    assert told == ["rows"]
    rows = torch.tensor([1, 1, 1, 0, 0]).double()
    inputs = x.clone().requires_grad_()
    weights = torch.randn(3, *shape[1:]).double()
    for _ in range(2):  # the second batch finds statistics that are not the first ones
        module.rows = rows
        out = module(inputs)[:3]
        found = [
            out.detach(),
            *torch.autograd.grad((out * weights).sum(), [inputs, *module.parameters()]),
        ]
        expected = outcome_alone(layer, x[:3], weights)
        assert torch.allclose(found[1][:3], expected[1])
        assert not found[1][3:].any()
        for mine, alone in zip(found[:1] + found[2:], expected[:1] + expected[2:], strict=True):
            assert torch.allclose(mine, alone)
        assert (
            apart(dict(module.named_buffers()), dict(layer.named_buffers()) | {"rows": rows})
            < 1e-12
        )


@pytest.mark.parametrize("fusing", [False, True], ids=["plain", "fusing"])
@small
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), windows, windows,
       st.tuples(st.integers(0, 2), st.integers(0, 2)), st.booleans())  # fmt: skip
def test_convolution_by_columns_is_each_clients(
    fusing, clients, batch, inside, outside, kernel, stride, padding, bias
):
    """What a GPU does, called here; at stride 1 its backward pass is another one while a compiler watches."""
    torch.manual_seed(0)
    if fusing:
        stride = (1, 1)
    x = torch.randn(clients, batch, inside, 6, 5).double().requires_grad_()
    weight = torch.randn(clients, outside, inside, *kernel).double().requires_grad_()
    shift = torch.randn(clients, outside).double().requires_grad_() if bias else None
    leaves = [leaf for leaf in (x, weight, shift) if leaf is not None]

    def outcome(out):
        torch.manual_seed(1)
        return [out, *torch.autograd.grad((out * torch.randn_like(out)).sum(), leaves)]

    if fusing:
        with layer_support.fusing():
            ours = outcome(stacked.convolve(x, weight, shift, stride, padding))
    else:
        ours = outcome(stacked.convolve(x, weight, shift, stride, padding))
    biases = [None] * clients if shift is None else shift
    alone = [F.conv2d(x[n], weight[n], biases[n], stride, padding) for n in range(clients)]
    for mine, theirs in zip(ours, outcome(torch.stack(alone)), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("fusing", [False, True], ids=["plain", "fusing"])
def test_the_gradient_of_convolution_by_columns_is_the_numerical_one(fusing, monkeypatch):
    monkeypatch.setattr(layer_support, "_fusing", fusing)
    torch.manual_seed(0)
    shapes = (2, 2, 2, 4, 5), (2, 3, 2, 3, 2), (2, 3)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(
        lambda x, w, b: stacked.convolve(x, w, b, (1, 1), (1, 0)), leaves
    )


def test_fusing_ends_with_its_block_even_in_an_error():
    with pytest.raises(ValueError, match="boom"), layer_support.fusing():
        assert layer_support.is_fusing()
        raise ValueError("boom")
    assert not layer_support.is_fusing()


def by_columns(info, in_dims, x, weight, bias, stride, padding, dilation, groups):
    """What a GPU would choose for these layers."""
    x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    return stacked.convolve(x, weight, bias, stride, padding), 0


def test_a_model_whose_convolutions_are_columns_is_the_reference_engines(monkeypatch):
    monkeypatch.setattr(stacked._Convolution, "vmap", staticmethod(by_columns))
    modules = network(
        nn.Conv2d(1, 3, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2, bias=False)
    )
    assert_engines_agree("fedproto", modules=modules, data=clients_of(RAGGED))


def test_the_gpus_convolution_has_the_gradients_of_the_columns():
    """Its operations have a plain form for the CPU; what is tested here is how they are put together."""
    from fedproto.engines.gpu.implicit_convolutions import StackedConvolution

    leaves = [
        torch.rand(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 2, 2, 6, 5), (3, 4, 2, 3, 2), (3, 4))
    ]
    ours, theirs = StackedConvolution.apply(*leaves), stacked.convolve(*leaves, (1, 1), (0, 0))
    assert torch.allclose(ours, theirs)
    weights = torch.rand_like(ours)
    pairs = zip(
        *(torch.autograd.grad((out * weights).sum(), leaves) for out in (ours, theirs)), strict=True
    )
    assert all(torch.allclose(a, b) for a, b in pairs)


# --- the step, traced


@pytest.mark.parametrize("algorithm", ["fedproto", pytest.param("fedavg", marks=pytest.mark.slow)])
@pytest.mark.parametrize("strides", ["2,2", pytest.param("1,4", marks=pytest.mark.slow)])
def test_a_resnet_by_the_gpus_windows_and_rows_is_the_reference_engines(
    strides, algorithm, monkeypatch
):
    """Its convolutions and BatchNorm as on a GPU, their kernels' arithmetic done by torch; the last layers' images are
    one pixel, so batches are not small: over four values BatchNorm's gradient is noise."""
    monkeypatch.setattr(layer_support, "on_gpu", lambda x: True)
    monkeypatch.setattr(stacked, "MAX_SMALL_WEIGHTS", 0)
    settings = {"batch": 16, "rounds": 1, "lr": 0.01, "model": f'resnet18(strides="{strides}")'}
    assert_engines_agree(algorithm, 1e-6, data=noise([32, 48, 40], (3, 32, 32)), **settings)


def slots_of(stack, server):
    """All that a step of a stack's first phase works on."""
    who = torch.arange(len(stack.group))
    slow = torch.zeros(len(who), dtype=torch.bool)
    received = send_own_classes(stack.algorithm, [server], stack.group, who)
    state = vmap(stack.algorithm.adopt)(stack.group.states.take(who), received)
    return stack.steps.load(0, state, received, stack.timetable.make_tables(1, who, slow)[0])


@pytest.mark.parametrize("algorithm", ["fedproto(collect=during)", "fedavg", "fedrep"])
def test_a_traced_step_is_the_step(algorithm, monkeypatch):
    """A GPU's step is traced down to torch's own operations before it is compiled; the trace computes the same."""
    monkeypatch.setattr(stacked._Convolution, "vmap", staticmethod(by_columns))
    module = network(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
    )
    run = prepared(
        algorithm, "vectorised", modules=module, data=clients_of(RAGGED), last_batch="keep"
    )
    (stack,) = run.engine.stacks
    slots = slots_of(stack, run.progress.server)
    names, step = list(slots), stack.steps.recorded_step(0, len(RAGGED)).function

    def flat(*values):
        step(dict(zip(names, values, strict=True)))

    with layer_support.fusing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = make_fx(flat)(*(value.clone() for value in slots.values()))
    traced = {name: value.clone() for name, value in slots.items()}
    before = {name: value.clone() for name, value in slots.items()}
    for _ in range(3):
        step(slots)
        with torch.no_grad():
            program(*(traced[name] for name in names))
    assert apart(slots, traced) < 1e-12
    assert slots["step"].item() == 3
    assert apart(slots, before) > 1e-3


def test_warming_up_never_runs_past_the_last_step():
    """A GPU's step is tried on copies before it is recorded, and that may be when only the last step is left."""
    run = prepared("fedproto", "vectorised", data=clients_of(RAGGED))
    (stack,) = run.engine.stacks
    slots = slots_of(stack, run.progress.server)
    slots[STEP].fill_(slots["at"].shape[1] - 1)
    aside = {name: value.clone() for name, value in slots.items()}
    for _ in range(2):
        stack.steps.recorded_step(0, len(RAGGED)).function(rewind(aside))
    assert aside[STEP].item() == 1
    assert slots[STEP].item() == slots["at"].shape[1] - 1


def test_a_phase_may_have_another_order_of_steps_than_the_first():
    """Half of 5 steps is 3, as many as the next client's whole 3; half of 10 is 5, less than its 6."""
    data = clients_of((20, 12, 20, 12), tests=(4,) * 4)
    assert_engines_agree("fedrep(head_epochs=1,body_epochs=2)", data=data, stragglers=0.5, rounds=4)


# --- one step for all


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.counted, self.read = Counter(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counted[str(function)] += 1
        if function is torch.ops.aten._local_scalar_dense.default:
            self.read.append(args[0].dtype)
        return function(*args, **kwargs or {})


def operations(algorithm, clients, **settings):
    data = clients_of((7,) * clients, tests=(3,) * clients)
    run = prepared(algorithm, "vectorised", data=data, stack=100, **settings)
    everyone, nobody = torch.arange(clients), torch.tensor([], dtype=torch.int64)
    slow = torch.tensor([0, 3])
    list(
        run.engine.train(1, [run.progress.server], [Cohort(everyone, nobody, slow)])
    )  # what is made once is made
    with Operations() as seen:
        list(run.engine.train(2, [run.progress.server], [Cohort(everyone, nobody, slow)]))
    return seen


@pytest.mark.parametrize(
    "algorithm", ["local", "fedavg", "fedrep", "fesem", "fedproto", "fedproto(collect=during)"]
)
def test_twice_as_many_clients_are_as_many_operations(algorithm):
    """No loop over clients, in Python or anywhere above a kernel; and no number is read back from what is trained."""
    six, twelve = (
        operations(algorithm, clients, modules=with_dropout(), epochs=2) for clients in (6, 12)
    )
    assert six.counted == twelve.counted
    assert not any(dtype.is_floating_point for dtype in six.read)


def test_evaluation_has_no_loop_over_clients_either():
    found = []
    for clients in (6, 12):
        data = clients_of((7,) * clients, tests=(3,) * clients)
        run = prepared("fedproto", "vectorised", data=data, stack=100)
        with Operations() as seen:
            run.engine.evaluate([run.progress.server])
        found.append(seen.counted)
    assert found[0] == found[1]


# --- modules that look alike


class Plain(nn.Module):
    """Two layers of one shape, which may be one."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.a, self.head = nn.Linear(64, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.b = self.a if tied else nn.Linear(6, 6)

    def forward(self, x):
        features = self.b(torch.relu(self.a(torch.relu(self.inside(x.flatten(1))))))
        return features, self.head(features)


def doubling(module, arguments, output):
    return output * 2


def test_modules_with_other_hooks_are_other_groups():
    modules = [Plain() for _ in RAGGED]
    for module in modules[1:4]:
        module.a.register_forward_hook(doubling)
    assert_engines_agree("fedproto", modules=modules, data=clients_of(RAGGED))


@pytest.mark.parametrize("first", [True, False])
def test_tied_and_untied_layers_are_other_groups(first):
    modules = [Plain(tied=first if number % 2 else not first) for number in range(len(RAGGED))]
    assert_engines_agree("fedproto", modules=modules, data=clients_of(RAGGED))


def test_frozen_parameters_stay_as_they_are():
    module = Plain()
    module.a.requires_grad_(False)
    reference, vectorised = assert_engines_agree(
        "fedproto", modules=module, data=clients_of(RAGGED)
    )
    for _, result in (reference, vectorised):
        assert all(
            torch.equal(state["a.weight"], module.a.weight.detach().double())
            for state in result.states
        )
        assert not any(
            torch.equal(state["b.weight"], module.b.weight.detach().double())
            for state in result.states
        )


def test_a_loss_may_divide_by_the_number_of_samples():
    """A client that has no batch left is not shown an empty one."""

    def loss(step):
        each = (
            nn.functional.cross_entropy(step.logits, step.batch.y, reduction="none")
            * step.batch.mask
        )
        return {"supervised": each.sum() / step.batch.mask.sum()}

    run = prepared("local", "vectorised", data=clients_of(RAGGED))
    (stack,) = run.engine.stacks
    stack.steps.algorithm = replace(stack.algorithm, loss=loss)
    slots = slots_of(stack, run.progress.server)
    for _ in range(slots["at"].shape[1]):
        stack.steps.recorded_step(0, len(RAGGED)).function(
            slots
        )  # all of them in every step, as on a GPU
    assert all(torch.isfinite(value).all() for value in slots.values())


def test_a_server_may_begin_to_send_something_else():
    """From the second round on a second prototype, to which the loss then has a term."""

    def aggregate(server, uploads):
        made = original.aggregate(server, uploads)
        return made | {"second": made["prototypes"]}

    def send(server, classes):
        return original.send(server, classes) | {
            name: server[name] for name in server if name == "second"
        }

    def loss(step):
        if "second" not in step.received:
            return original.loss(step)
        apart = (step.features - step.received["second"][step.batch.y]).square().mean(1)
        return original.loss(step) | {
            "another": (apart * step.batch.mask).sum() / step.batch.mask.sum()
        }

    original = prepared("fedproto", "reference", data=clients_of(RAGGED)).algorithm
    algorithm = replace(original, aggregate=aggregate, send=send, loss=loss)
    found = []
    for engine in ("reference", "vectorised"):
        run = prepared("fedproto", engine, data=clients_of(RAGGED))
        run.algorithm = run.engine.algorithm = algorithm
        for stack in getattr(run.engine, "stacks", []):
            stack.algorithm = stack.steps.algorithm = algorithm
        federation_runs = [run.federation_run()]
        losses = [result.loss for (result,) in run_rounds(algorithm, run.engine, federation_runs)]
        found.append((losses, run.engine.export(0)))
    assert [set(loss) for loss in found[0][0]] == [set(loss) for loss in found[1][0]]
    assert apart(found[0][1], found[1][1]) < 1e-8


# --- what cannot be stacked


class Choosy(nn.Module):
    """Python decides by the values it sees."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(64, 6), nn.Linear(6, 4)

    def forward(self, x):
        features = self.first(x.flatten(1))
        features = torch.tanh(features) if features.sum() > 0 else torch.relu(features)
        return features, self.head(features)


def assert_falls_back(notice, **settings):
    run = prepared("fedproto", "vectorised", **settings)
    assert isinstance(run.engine, ReferenceEngine)
    (sentence,) = run.notices
    assert notice in sentence
    assert sentence.endswith(": the reference engine trains one client after the other")
    assert "\n" not in sentence
    reference = prepared("fedproto", "reference", **settings)
    assert reference.notices == []
    assert_equal((reference, reference.execute()), (run, run.execute()), 0.0)


def test_a_model_that_looks_at_values_is_trained_by_the_reference_engine():
    assert_falls_back(
        "Choosy cannot be run for many clients at once", modules=Choosy(), data=clients_of(RAGGED)
    )


@pytest.mark.parametrize(
    "sizes",
    [
        (9, 8),
        (10, 9, 8),
        pytest.param((8, 9)),
    ],
)
def test_batchnorm_over_a_last_batch_of_one_image_is_left_to_the_reference_engine(sizes):
    settings = {"modules": normalised(), "last_batch": "keep", "data": clients_of(sizes)}
    assert_falls_back("Net has BatchNorm, and a client's last batch has one image", **settings)


class Mixing(nn.Module):
    """Lets the images of a batch see each other."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.fc, self.head = how, nn.Linear(64, 6), nn.Linear(6, 4)

    def forward(self, x):
        features = self.fc(x.flatten(1))
        features = features - features.mean(0) if self.how == "mean" else features * len(x)
        return features, self.head(features)


@pytest.mark.parametrize("how", ["mean", "size"])
def test_a_model_whose_images_see_each_other_is_not_stacked(how):
    assert_falls_back(
        "Mixing scores an image differently", modules=Mixing(how), data=clients_of(RAGGED)
    )


def test_other_last_batches_are_stacked():
    settings = {"modules": normalised(), "last_batch": "keep"}
    assert not prepared("local", "vectorised", data=clients_of((8, 10)), **settings).notices
    assert not prepared(
        "local", "vectorised", data=clients_of((8, 9)), modules=normalised()
    ).notices  # dropped
    assert not prepared(
        "local", "vectorised", data=clients_of((8, 9)), last_batch="keep"
    ).notices  # no BatchNorm


def test_run_warns_of_it_in_one_sentence():
    settings = {
        "dataset": clients_of(RAGGED),
        "model": Choosy(),
        "rounds": 1,
        "engine": "vectorised",
    }
    with pytest.warns(UserWarning, match="Choosy cannot be run for many clients at once") as caught:
        package.run(**settings)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package.run(**settings | {"engine": "reference"})


def test_the_command_line_prints_it(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=rng.normal(size=(40, 3, 16, 16)), y=np.arange(40) % 2)
    answer = fedproto(
        "run", "--dataset", f"npz:{tmp_path / 'a.npz'}", "--model", 'resnet18(strides="1,1")', "--clients", "2",
        "--rounds", "1", "--ways", "1", "--shots", "5", "--stdev", "0", "--batch", "4", "--set", "last_batch=keep",
        "--engine", "vectorised", "--out", tmp_path / "run",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert (
        'resnet18(strides="1,1") has BatchNorm, and a client\'s last batch has one image: the reference'
        in answer.out
    )


# --- errors


@pytest.mark.parametrize("algorithm", ["local", "fedproto"])
def test_divergence_names_round_and_client(algorithm):
    with pytest.raises(
        TrainingError,
        match=r"round 1, client \d, training: the .* loss is (nan|inf); the lr may be too high",
    ):
        prepared(algorithm, "vectorised", lr=1e300).execute()


def test_a_last_step_that_diverges_is_noticed():
    with pytest.raises(
        TrainingError, match=r"client 0, training: its parameters or its upload are not finite"
    ):
        prepared(
            "fedproto", "vectorised", lr=1e30, batch=1000, rounds=1, precision="float32"
        ).execute()


def test_the_client_that_diverges_is_the_one_that_is_named():
    """In a stack of five, whose order is by steps, only the third has inputs that explode."""
    data = clients_of(RAGGED)
    data[2] = (data[2][0] * 1e38, *data[2][1:])
    with pytest.raises(TrainingError, match=r"round 1, client 2, training: "):
        prepared("local", "vectorised", data=data).execute()


# --- stopped and resumed


class Killed(BaseException):
    pass


@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg", "fesem(clusters=2)", "fedrep"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(algorithm, tmp_path):
    settings = {
        "rounds": 6,
        "checkpoint_every": 3,
        "participation": 0.5,
        "stragglers": 0.5,
        "clients": 6,
        "stack": 2,
    }
    whole = prepared(algorithm, "vectorised", **settings)
    expected = whole.execute()
    run = prepared(algorithm, "vectorised", **settings)
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


def test_either_engine_takes_up_what_the_other_left():
    """An exported state is of clients, not of an engine."""
    for first, second in (("reference", "vectorised"), ("vectorised", "reference")):
        whole, halves = (
            prepared("fedproto", "reference", rounds=4),
            prepared("fedproto", first, rounds=2),
        )
        halves.execute()
        rest = prepared("fedproto", second, rounds=4)
        rest.progress.restore(halves.progress.export(), 2)
        rest.engine.restore(
            0, {name: value.clone() for name, value in halves.engine.export(0).items()}
        )
        expected, found = whole.execute(), rest.execute()
        for mine, theirs in zip(found.states, expected.states, strict=True):
            assert apart(mine, theirs) < 1e-10
        assert found.clients == expected.clients


# --- which engine a run gets


def resolved(cores=2, data=None, **settings):
    run = prepared("fedproto", "reference", data=data, **settings)
    config = replace(run.config, engine="auto", device="auto")
    training = Training(
        config.batch, config.lr, config.momentum, config.epochs, config.last_batch, config.seed
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_count_cores", lambda: cores)
        return selection.resolve(config, [run.federation], run.algorithm, [training])[0]


def test_small_models_are_stacked_on_a_cpu():
    found = resolved()
    assert (found.engine, found.device, found.compile, found.workers) == (
        "vectorised",
        "cpu",
        "off",
        None,
    )


def test_a_long_run_gets_a_process_a_core():
    found = resolved(rounds=2000)
    assert (found.engine, found.workers) == ("processes", 2)
    assert resolved(rounds=2000, cores=1).engine == "vectorised"
    assert resolved(rounds=2000, clients=1).engine == "reference"


def test_large_models_and_few_of_a_kind_are_not_stacked_on_a_cpu():
    assert resolved(data=noise((2, 2, 2)), model="resnet18").engine == "reference"
    assert resolved(clients=2).engine == "reference"
    assert resolved(model="mlp-mh", dim=8).engine == "reference"
    assert resolved(model="mlp-mh", dim=8, clients=9).engine == "vectorised"


def test_what_auto_means_is_written_down(tmp_path):
    answer = fedproto("run", *SMALL, "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    written = (tmp_path / "run" / "config.toml").read_text().splitlines()
    assert {'engine = "vectorised"', 'device = "cpu"', 'compile = "off"'} <= set(written)
    assert not any(
        "auto" in line for line in written if line.startswith(("engine", "device", "compile"))
    )


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_auto_is_the_engine_it_names_whatever_the_machine(cores, monkeypatch):
    monkeypatch.setattr(selection, "_count_cores", lambda: cores)
    auto, named = (prepared("fedproto", engine, device="auto") for engine in ("auto", "vectorised"))
    assert isinstance(auto.engine, VectorisedEngine)
    assert auto.config.engine == "vectorised"
    assert_equal((auto, auto.execute()), (named, named.execute()), 0.0)


def test_the_trained_modules_themselves_are_left_alone():
    module = with_dropout()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    prepared("fedproto", "vectorised", modules=module, data=clients_of(RAGGED)).execute()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert type(module.body[0]) is nn.Conv2d


def test_nothing_is_left_in_the_folder_of_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prepared("local", "vectorised", states="disk").execute()
    assert list(Path(tmp_path).iterdir()) == []
