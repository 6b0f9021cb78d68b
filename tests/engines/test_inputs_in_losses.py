"""A loss may use the inputs of its batch, in every engine."""

from pathlib import Path

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
    make_clients,
    with_dropout,
)
from helpers.tiny import experiment, finished

from fedproto.config.plugin_trust import trust_plugins

#: Pulls every embedding towards the mean input: λ/n Σ (mean of x − mean of h)², without padding.
PLUGIN = """
from dataclasses import replace

from fedproto.algorithms import masked_mean, supervised
from fedproto.algorithms.fedavg import fedavg


def seeing(*, weight: float = 0.5):
    def loss(step):
        x = step.batch.x.flatten(1).mean(1)
        h = step.features.mean(1)
        penalty = masked_mean((x - h).square(), step.batch.mask)
        return supervised(step) | {"inputs": weight * penalty}

    return replace(fedavg(), name="seeing", loss=loss)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "seeing_inputs.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    trust_plugins("seeing_inputs:seeing")
    return "seeing_inputs:seeing"


def test_engines_agree(plugin: str) -> None:
    (_, result), _ = assert_engines_agree(plugin, **TROUBLE)
    assert result.metrics[-1]["loss"]["inputs"] > 0
    (_, without), _ = assert_engines_agree("fedavg", **TROUBLE)
    assert result.metrics[-1]["loss"]["supervised"] != without.metrics[-1]["loss"]["supervised"]


def test_engines_agree_on_images_with_dropout_and_partial_batches(plugin: str) -> None:
    assert_engines_agree(plugin, modules=with_dropout(), data=make_clients(RAGGED))


@pytest.mark.parametrize("vectorised", [False, True], ids=["reference", "vectorised"])
def test_processes_agree(plugin: str, vectorised: bool) -> None:
    expected = collect_outcomes(use_one_process(experiment(plugin)))[0]
    found = collect_outcomes(use_processes(experiment(plugin), 2, vectorised))[0]
    assert_alike(found, expected, ALMOST)


def test_the_inputs_pull_the_embeddings(plugin: str) -> None:
    _, weak = finished(f"{plugin}(weight=0)")
    _, strong = finished(f"{plugin}(weight=5)")
    assert strong.metrics[-1]["loss"]["inputs"] / 5 < strong.metrics[0]["loss"]["inputs"] / 5
    assert weak.metrics[-1]["loss"]["inputs"] == 0
