"""A fixed number of batches per round: the same in every engine, for clients of unequal sizes."""

from dataclasses import replace

import pytest
from helpers.distributed_runs import (
    ALMOST,
    assert_alike,
    collect_outcomes,
    use_one_process,
    use_processes,
)
from helpers.engine_comparison import (
    RAGGED,
    TROUBLE,
    assert_engines_agree,
    assert_equal,
    finish,
    make_clients,
    prepare,
    with_batch_norm,
    with_dropout,
)
from helpers.tiny import experiment

from fedproto.engines import selection
from fedproto.runs.training_settings import training_of

#: A batch of four makes one to four steps of an epoch here.
UNEQUAL = TROUBLE | {"clients": 5, "local_steps": 7}
del UNEQUAL["epochs"]


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("name", ["fedavg", "fedproto", "fedproto(collect=during)", "fedrep"])
def test_engines_agree(name: str, steps: int) -> None:
    settings = UNEQUAL | {"local_steps": steps}
    assert_engines_agree(name, data=make_clients(RAGGED), **settings)


@pytest.mark.parametrize(
    "change",
    [
        {"optimiser": "adam", "lr": 0.01, "schedule": "cosine"},
        {"sampling": "balanced"},
        {"class_weights": "balanced"},
        {"modules": with_dropout()},
        {"modules": with_batch_norm()},
        {"last_batch": "drop"},
        {"stack": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_engines_agree_on_what_else_depends_on_steps(change: dict) -> None:
    for algorithm in ("fedproto(collect=during)", "fedrep"):
        assert_engines_agree(algorithm, data=make_clients(RAGGED), **UNEQUAL | change)


@pytest.mark.parametrize("vectorised", [False, True], ids=["reference", "vectorised"])
def test_processes_agree(vectorised: bool) -> None:
    settings = {"clients": 5, "local_steps": 3, "stragglers": 0.5}
    expected = collect_outcomes(use_one_process(experiment("fedavg", **settings)))[0]
    run = use_processes(experiment("fedavg", **settings), 2, vectorised)
    assert_alike(collect_outcomes(run)[0], expected, ALMOST)


def test_as_many_steps_as_an_epoch_has_are_one_epoch_to_the_bit() -> None:
    data = make_clients((12, 12, 12, 12, 12))
    for engine in ("reference", "vectorised"):
        for algorithm in ("fedavg", "fedproto(collect=during)", "fedrep"):
            settings = {"data": data, "clients": 5, "stragglers": 0.4}
            epochs = prepare(algorithm, engine, **settings)
            steps = prepare(algorithm, engine, local_steps=3, **settings)
            assert_equal(finish(epochs), finish(steps), 0.0)


def test_the_choice_of_an_engine_counts_local_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four clients, a thousand rounds and two steps each are 8,000 steps."""
    monkeypatch.setattr(selection, "_count_cores", lambda: 2)
    run = experiment("local", rounds=1000, local_steps=2)
    trainings = [training_of(run.config)]
    assert selection._count_steps([run.federation], trainings) == [[2, 2, 2, 2]]
    chosen = selection._choose_engine(run.config, [run.federation], trainings)
    assert chosen == "processes"
    few = replace(run.config, rounds=10)
    assert selection._choose_engine(few, [run.federation], trainings) == "vectorised"
