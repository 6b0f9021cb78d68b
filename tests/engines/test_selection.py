"""Which engine a run gets."""

from dataclasses import replace

import pytest
from helpers.command_line import SMALL, fedproto
from helpers.engine_comparison import (
    assert_equal,
    make_noise,
    prepare,
)

from fedproto.core.batches import Training
from fedproto.engines import selection
from fedproto.engines.vectorised.engine import VectorisedEngine


def resolved(cores=2, data=None, **settings):
    run = prepare("fedproto", "reference", data=data, **settings)
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


def test_a_long_run_gets_one_process_per_core():
    found = resolved(rounds=2000)
    assert (found.engine, found.workers) == ("processes", 2)
    assert resolved(rounds=2000, cores=1).engine == "vectorised"
    assert resolved(rounds=2000, clients=1).engine == "reference"


def test_large_models_and_few_of_a_kind_are_not_stacked_on_a_cpu():
    assert resolved(data=make_noise((2, 2, 2)), model="resnet18").engine == "reference"
    assert resolved(clients=2).engine == "reference"
    assert resolved(model="mlp-mh", dim=8).engine == "reference"
    assert resolved(model="mlp-mh", dim=8, clients=9).engine == "vectorised"


def test_the_configuration_says_what_auto_meant(tmp_path):
    answer = fedproto("run", *SMALL, "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    written = (tmp_path / "run" / "config.toml").read_text().splitlines()
    assert {'engine = "vectorised"', 'device = "cpu"', 'compile = "off"'} <= set(written)
    assert not any(
        "auto" in line for line in written if line.startswith(("engine", "device", "compile"))
    )


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_auto_equals_the_engine_it_chooses_on_any_machine(cores, monkeypatch):
    monkeypatch.setattr(selection, "_count_cores", lambda: cores)
    auto, named = (prepare("fedproto", engine, device="auto") for engine in ("auto", "vectorised"))
    assert isinstance(auto.engine, VectorisedEngine)
    assert auto.config.engine == "vectorised"
    assert_equal((auto, auto.execute()), (named, named.execute()), 0.0)
