"""Majority class, local training and pooled training, beside a federation's own result."""

import numpy as np
import pytest
import torch
from helpers.tiny import SETTINGS, experiment

import fedproto
from fedproto.core.federation import Examples
from fedproto.runs.baselines import pool_clients, pool_examples
from fedproto.runs.metric_contents import describe_majority

SMALL = SETTINGS | {"rounds": 2, "clients": 3}


def run(**settings: object) -> dict:
    return fedproto.run(**SMALL | {"algorithm": "fedavg"} | settings).data


@pytest.fixture(scope="module")
def with_baselines() -> dict:
    return run(baselines=True)


def test_nothing_is_trained_unless_it_is_asked_for() -> None:
    assert list(run()["baselines"]) == ["majority"]


def test_baselines_change_nothing_else(with_baselines: dict) -> None:
    plain = run()
    assert list(with_baselines["baselines"]) == ["majority", "local", "pooled"]
    assert with_baselines["metrics"] == plain["metrics"]
    assert with_baselines["accuracy"] == plain["accuracy"]


@pytest.mark.parametrize("engine", ["reference", "vectorised", "processes"])
def test_local_training_is_the_algorithm_local(engine: str, with_baselines: dict) -> None:
    found = run(baselines=True, engine=engine)["baselines"]
    alone = run(algorithm="local")["metrics"]["head"]
    assert found["local"]["metrics"]["accuracy"] == pytest.approx(alone["accuracy"])
    assert found["local"]["metrics"]["brier"] == pytest.approx(alone["brier"], abs=1e-9)
    pooled = with_baselines["baselines"]["pooled"]["metrics"]
    assert found["pooled"]["metrics"]["brier"] == pytest.approx(pooled["brier"], abs=1e-9)


def test_pooled_training_of_one_client_is_its_local_training() -> None:
    found = run(baselines=True, clients=1)["baselines"]
    assert found["pooled"]["metrics"] == found["local"]["metrics"]


def test_the_pooled_client_has_every_row_once() -> None:
    federation = experiment("fedavg", clients=3).federation
    pooled = pool_clients(federation)
    (everybody,) = pooled.members
    assert len(everybody.train) == sum(len(member.train) for member in federation.members)
    assert everybody.train.rows.unique().numel() == len(everybody.train)
    classes = {label for member in federation.members for label in member.classes}
    assert set(everybody.classes) == classes
    assert pooled.task.clients == 1 and pooled.classes == federation.classes


def test_rows_of_several_pools_are_laid_end_to_end() -> None:
    a = Examples(torch.arange(3.0)[:, None], torch.tensor([0, 1, 2]), torch.tensor([0, 2]))
    same_pool = Examples(a.x, a.y, torch.tensor([2]))
    b = Examples(torch.arange(10.0, 12)[:, None], torch.tensor([5, 6]), torch.tensor([1]))
    pooled = pool_examples([a, b, same_pool])
    assert pooled.x[pooled.rows].flatten().tolist() == [0, 2, 11]
    assert pooled.y[pooled.rows].tolist() == [0, 2, 6]


def test_pooled_training_counts_the_rounds_a_client_takes_part_in() -> None:
    found = run(baselines=True, participation=0.5, rounds=4)["baselines"]
    assert found["pooled"]["rounds"] == 2 and found["local"]["rounds"] == 4


def test_pooled_training_does_the_local_steps_of_all_clients() -> None:
    """Three steps of each of three clients are an epoch of all, nine steps."""
    rng = np.random.default_rng(0)
    data = []
    for _ in range(3):
        labels = np.arange(12) % 3
        data.append((rng.normal(size=(12, 5)), labels, rng.normal(size=(6, 5)), labels[:6]))
    settings = {"dataset": data, "model": "mlp", "batch": 4, "rounds": 2, "baselines": True}
    epochs = fedproto.run(algorithm="local", **settings).data["baselines"]
    steps = fedproto.run(algorithm="local", local_steps=3, **settings).data["baselines"]
    assert steps == epochs


def test_clients_with_different_models_have_no_pooled_training() -> None:
    mixed = "mlp(hidden=16,width=8)*2,mlp(hidden=12,width=8)*1"
    found = run(algorithm="fedproto", model=mixed, baselines=True)["baselines"]
    assert "models differ" in found["pooled"]["missing"]
    assert found["local"]["metrics"]["accuracy"]["clients"] == 3


def test_the_majority_class_by_hand() -> None:
    def client(train: list[int], test: list[int]) -> tuple:
        x = np.zeros((len(train), 4), np.float32)
        return x, np.array(train), np.zeros((len(test), 4), np.float32), np.array(test)

    data = [client([0, 0, 1], [0, 0, 0, 1]), client([1, 1, 1, 1, 0], [0, 1])]
    found = fedproto.run(dataset=data, model="mlp", algorithm="local", rounds=1).data
    majority = found["baselines"]["majority"]
    assert majority["clients"] == [0.75, 0.5]
    assert majority["accuracy"]["mean"] == 0.625 and majority["accuracy"]["worst_client"] == 1
    assert majority["accuracy"]["pooled"] == 4 / 6
    assert majority["class"] == "1" and majority["class_accuracy"] == 2 / 6
    assert majority["balanced_accuracy"]["mean"] == 0.5


def test_ties_go_to_the_first_class_and_missing_test_classes_count_as_wrong() -> None:
    federation = experiment("local", clients=2).federation
    described = describe_majority(federation)
    assert len(described["clients"]) == 2
    assert 0 <= described["class_accuracy"] <= 1
