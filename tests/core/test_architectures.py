"""Clients of several architectures: weights stay within one, class means go across all of them."""

from dataclasses import replace

import pytest
import torch
from helpers.tiny import ALGORITHMS, SETTINGS, build, experiment

import fedproto
from fedproto.config.settings import configure
from fedproto.core.architectures import name_architectures, within_architectures
from fedproto.core.tensors import flatten_state, split_group_name
from fedproto.core.types import Group, Recipient, Task
from fedproto.errors import ConfigError
from fedproto.runs.execution import execute
from fedproto.runs.experiment import Experiment

ALMOST = 1e-9  # between sums of float64 in different orders
SMALL = "mlp(hidden=5,width=8)"
LARGE = "mlp(hidden=9,width=8)"
GENERATOR = torch.Generator().manual_seed(0)
#: Data of four clients: rows of 64 values, three classes.
DATA = [
    (torch.randn(12, 1, 8, 8, generator=GENERATOR).numpy(), torch.arange(12).numpy() % 3)
    for _ in range(4)
]
#: What averages weights, so that each architecture is a federation of its own.
SHARING = ("fedavg", "fedprox", "fedper", "fedrep", "lg-fedavg(personal=head)", "ditto", "moon")
SHARING += ("fedavgm", "fedadam", "scaffold", "feddyn", "fesem(clusters=2)")


def run_on(clients: slice, models: str, algorithm: str, **settings: object) -> Experiment:
    wanted = {**SETTINGS, "algorithm": algorithm, "model": models, "rounds": 2, **settings}
    data = DATA[clients]
    for name in ("dataset", "shots", "stdev", "test_shots"):
        del wanted[name]
    config = configure(wanted | {"dataset": "python", "clients": len(data)})[0]
    run = Experiment.prepare(config, data=data)
    run.execute()
    return run


def test_names_of_architectures():
    models = ["cnn", "mlp(hidden=8,width=4)", "cnn", "cnn", "()"]
    assert name_architectures(models) == ["cnn", "mlp-hidden-8-width-4", "cnn-2", "cnn-3", "model"]
    assert split_group_name("model@cnn-2") == ("model", "cnn-2")
    assert split_group_name("model") == ("model", "")


@pytest.mark.parametrize("algorithm", SHARING)
def test_two_architectures_are_two_federations(algorithm):
    """The first two clients have their numbers, and so their batches, in both federations."""
    mixed = run_on(slice(4), f"{SMALL}*2,{LARGE}*2", algorithm)
    alone = run_on(slice(2), SMALL, algorithm)
    for client in range(2):
        found = mixed.engine.states[0][client]
        wanted = alone.engine.states[0][client]
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.allclose(found[name], value, rtol=0, atol=ALMOST), name
    name = next(iter(mixed.federation.architectures))
    own_state = flatten_state(mixed.progress.server[f"@{name}"])
    for key, value in flatten_state(alone.progress.server).items():
        assert torch.allclose(own_state[key], value, rtol=0, atol=ALMOST), key
    assert torch.equal(mixed.progress.ledger.counts[:2], alone.progress.ledger.counts)


def test_an_architecture_may_be_anywhere_among_the_clients():
    """The order of the clients of other architectures changes nothing."""
    together = run_on(slice(4), f"{SMALL}*2,{LARGE}*2", "fedavg")
    between = run_on(slice(4), f"{SMALL},{LARGE},{LARGE},{SMALL}", "fedavg")
    assert list(between.federation.architectures) == list(together.federation.architectures)
    assert [len(each) for each in between.federation.architectures.values()] == [2, 2]
    assert between.federation.members[3].architecture == between.federation.members[0].architecture


def mixed_experiment(algorithm: str, **settings: object) -> Experiment:
    return experiment(algorithm, **{"model": f"{SMALL},{LARGE}", "rounds": 2, **settings})


def flat_server(run: Experiment) -> dict[str, torch.Tensor]:
    return flatten_state(run.progress.server)


def assert_same_server(first: Experiment, second: Experiment) -> None:
    assert flat_server(first).keys() == flat_server(second).keys()
    for name, value in flat_server(first).items():
        assert torch.allclose(value, flat_server(second)[name], rtol=0, atol=ALMOST), name


MIXED = [
    ("fedavg", {}),
    ("fedavg", {"participation": 0.5, "rounds": 4}),
    ("fednh", {}),
    ("fesem(clusters=2)", {}),
    ("scaffold", {"transform": "quantise"}),
    ("fedper", {"transform": "top-k(fraction=0.5)"}),
    ("fedavg", {"combiner": "median"}),
    ("fedadam", {"buffer": 2}),
]


@pytest.mark.parametrize(("algorithm", "settings"), MIXED)
@pytest.mark.parametrize("engine", ["vectorised", "processes"])
def test_engines_agree(algorithm, settings, engine):
    reference = mixed_experiment(algorithm, **settings)
    first = reference.execute()
    other = mixed_experiment(algorithm, **settings, engine=engine)
    second = other.execute()
    assert_same_server(reference, other)
    assert first.accuracy == second.accuracy
    assert torch.equal(reference.progress.ledger.counts, other.progress.ledger.counts)


@pytest.mark.parametrize(
    ("algorithm", "settings"), [("scaffold", {}), ("fedavg", {"buffer": 2}), ("fednh", {})]
)
def test_a_run_continues_from_its_checkpoint(algorithm, settings, tmp_path):
    settings = SETTINGS | {"model": f"{SMALL},{LARGE}", "algorithm": algorithm} | settings
    settings |= {"checkpoint_every": 1}
    whole = fedproto.run(**settings, out=tmp_path / "whole")
    for result in fedproto.stream(**settings, out=tmp_path / "killed"):
        if getattr(result, "round", 0) == 2:
            break
    resumed = fedproto.resume(tmp_path / "killed")
    assert resumed.accuracy == whole.accuracy
    for state, other in zip(resumed.states, whole.states, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in state.items())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_architecture_is_not_told_apart(algorithm):
    run = experiment(algorithm, rounds=1)
    assert run.federation.architectures == {}
    assert not any("@" in name for name in [*run.progress.layouts, *flat_server(run)])


def test_a_federation_that_shares_weights_says_within_what():
    run = mixed_experiment("fedavg", clients=5)
    said = "fedavg shares weights within each of 2 architectures: 3 of mlp-hidden-5-width-8, "
    assert any(notice.startswith(said) for notice in run.notices)
    assert list(run.progress.layouts) == [
        "model@mlp-hidden-5-width-8",
        "model@mlp-hidden-9-width-8",
    ]
    assert not any("architectures" in notice for notice in mixed_experiment("fedproto").notices)


def test_seeds_are_trained_together():
    """Each has initial weights of its own in every architecture."""
    configs = []
    for seed in (0, 1):
        wanted = SETTINGS | {"algorithm": "fedavg", "model": f"{SMALL},{LARGE}", "rounds": 1}
        configs.append(configure(wanted | {"engine": "vectorised", "seed": seed})[0])
    runs = Experiment.prepare_together(configs)
    servers = [flat_server(run) for run in runs]
    name = "@mlp-hidden-9-width-8/body.fc1.weight"
    assert not torch.equal(servers[0][name], servers[1][name])
    initial = runs[1].federation.initial["mlp-hidden-9-width-8"]
    assert torch.equal(servers[1][name], initial["body.fc1.weight"])
    results = execute(runs, [None, None])
    single = Experiment.prepare(configs[1]).execute()
    assert results[1].accuracy == single.accuracy


# --- the server, by hand

TASK = Task(classes=2, dim=1, clients=3, seed=0)
PARAMS = {"a": {"w": torch.tensor([1.0])}, "b": {"w": torch.tensor([5.0, 6.0])}}


def make_mixed(name: str = "fedavg"):
    methods = {architecture: build(name) for architecture in PARAMS}
    layouts = {key: methods[key].declare(params, TASK) for key, params in PARAMS.items()}
    return within_architectures(methods, layouts, {"a": 2, "b": 1})


def test_each_architecture_has_its_own_mean():
    algorithm = make_mixed()
    server = algorithm.init(PARAMS, TASK)
    assert {name: value.tolist() for name, value in flatten_state(server).items()} == {
        "@a/w": [1.0],
        "@b/w": [5.0, 6.0],
    }
    uploads = {
        # two clients of a, with weights 1 and 3, and between them one of b, which has no row in a
        "model@a": Group({"w": torch.tensor([[2.0], [0.0], [18.0]])}, torch.tensor([1.0, 0, 3.0])),
        "model@b": Group(
            {"w": torch.tensor([[0.0, 0], [8, 6], [0, 0]])}, torch.tensor([0, 2.0, 0])
        ),
    }
    after = algorithm.aggregate(server, uploads)
    assert after["@a"]["w"].tolist() == [5.0]
    assert after["@b"]["w"].tolist() == [4.0, 3.0]
    received = algorithm.send(after, Recipient(torch.tensor(1), torch.ones(2), "b"))
    assert list(received) == ["@b"]
    assert algorithm.adopt(PARAMS["b"], received)["w"].tolist() == [4.0, 3.0]


def test_an_architecture_that_nobody_speaks_for_stays_as_it_is():
    """Momentum would move the weights although nothing was sent."""
    algorithm = make_mixed("fedavgm")
    server = algorithm.init(PARAMS, TASK)
    uploads = {"model@a": Group({"w": torch.tensor([[3.0]])}, torch.tensor([1.0]))}
    moved = algorithm.aggregate(server, uploads)
    silent = Group({"w": torch.zeros(1, 2)}, torch.zeros(1))
    again = algorithm.aggregate(moved, uploads | {"model@b": silent})
    assert moved["@b"] == again["@b"] == server["@b"]
    assert not torch.equal(again["@a"]["model"]["w"], server["@a"]["model"]["w"])


def test_class_level_groups_must_be_the_same_in_all_architectures():
    algorithm = make_mixed()
    one = replace(build("fedproto"), common=("prototypes",))
    layouts = {name: one.declare(params, TASK) for name, params in PARAMS.items()}
    other = replace(one, declare=lambda params, task: one.declare(params, task._replace(dim=7)))
    mixed = within_architectures({"a": one, "b": other}, layouts, {"a": 1, "b": 1})
    with pytest.raises(ConfigError, match="declares the group prototypes differently"):
        mixed.declare(PARAMS, TASK)
    wide = replace(one, init=lambda params, task: one.init(params, task._replace(dim=7)))
    mixed = within_architectures({"a": one, "b": wide}, layouts, {"a": 1, "b": 1})
    with pytest.raises(ConfigError, match="architecture b and for the others: prototypes is"):
        mixed.init(PARAMS, TASK)
    assert list(algorithm.declare(PARAMS, TASK)) == ["model@a", "model@b"]
