"""All engines measure the same metrics, and accuracies are those of every round."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.engine_comparison import prepare
from helpers.tiny import experiment

from fedproto.core import federation as federation_module
from fedproto.core.federation import Examples
from fedproto.core.measurement import METRICS, MeasuredClient, collect_accuracies
from fedproto.core.metrics import ACCURACIES
from fedproto.engines.vectorised import stacks
from fedproto.runs.experiment import Experiment
from fedproto.runs.metric_contents import describe_metrics

ENGINES = {
    "reference": {"engine": "reference"},
    "vectorised": {"engine": "vectorised"},
    "in stacks of three": {"engine": "vectorised", "stack": 3},
    "two processes": {"engine": "processes", "workers": 2},
}


def measure(**settings: object) -> tuple[dict[int, MeasuredClient], dict, dict]:
    """Return what a finished run of fedproto measures, its accuracies and its summary."""
    run = experiment("fedproto", **{"clients": 5, "rounds": 2} | settings)
    result = run.execute()
    (measured,) = run.engine.measure([run.progress.server])
    summary = describe_metrics(run.federation, measured)
    run.engine.close()
    assert result.data["metrics"] == summary
    return measured, result.data["accuracy"], summary


@pytest.fixture(scope="module")
def expected() -> tuple[dict[int, MeasuredClient], dict, dict]:
    return measure(engine="reference")


@pytest.mark.parametrize("name", list(ENGINES)[1:])
def test_engines_measure_the_same(name: str, expected: tuple) -> None:
    measured, _, summary = measure(**ENGINES[name])
    expected_measured, _, expected_summary = expected
    assert list(measured) == list(expected_measured) == [0, 1, 2, 3, 4]
    for client, each in measured.items():
        other = expected_measured[client]
        assert list(each.ways) == list(ACCURACIES)
        for way, measurement in each.ways.items():
            wanted = pytest.approx(other.ways[way].values, rel=0, abs=1e-9, nan_ok=True)
            assert measurement.values == wanted
            assert (measurement.confusions == other.ways[way].confusions).all()
    for way, values in summary.items():
        assert values["auroc"] == pytest.approx(expected_summary[way]["auroc"], abs=1e-9)
        assert values["confusion"] == expected_summary[way]["confusion"]


def test_accuracies_are_those_of_the_rounds_to_the_bit(expected: tuple) -> None:
    measured, accuracy, summary = expected
    for way, values in accuracy.items():
        each = np.array([one.ways[way].values["accuracy"] for one in measured.values()])
        assert values["mean"] == pytest.approx(each.mean(), abs=1e-15)
        assert summary[way]["accuracy"]["worst"] == each.min()
        assert summary[way]["accuracy"]["worst_client"] == each.argmin()


def test_few_scores_at_a_time_measure_the_same(
    monkeypatch: pytest.MonkeyPatch, expected: tuple
) -> None:
    """A thousand clients fit into memory because few are scored at a time and none is kept."""
    monkeypatch.setattr(stacks, "MAX_SCORES_AT_ONCE", 1)
    monkeypatch.setattr(federation_module, "MAX_KEPT_SCORES", 1)
    measured, _, summary = measure(engine="vectorised")
    expected_summary = expected[2]
    for way, values in summary.items():
        for name in METRICS:
            pooled = values[name].pop("pooled")
            wanted = dict(expected_summary[way][name])
            wanted_pooled = None if name == "auroc" else wanted["pooled"]
            del wanted["pooled"]
            assert values[name] == pytest.approx(wanted, abs=1e-9)
            assert pooled == pytest.approx(wanted_pooled, abs=1e-9)
    assert all(each.scores is None for each in measured.values())


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_measured_accuracies_are_those_of_an_evaluation(engine: str) -> None:
    """So that the test rows need not be evaluated a second time at the end of a run."""
    run = experiment("fedproto", clients=5, rounds=1, engine=engine)
    run.execute()
    servers = [run.progress.server]
    (measured,) = run.engine.measure(servers)
    (evaluated,) = run.engine.evaluate(servers)
    collected = collect_accuracies(measured)
    assert list(collected) == list(evaluated)
    for name, values in evaluated.items():
        assert torch.equal(collected[name], values)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_a_client_without_rows_of_a_part_is_left_out(engine: str) -> None:
    source = prepare("fedavg", engine, clients=3)
    members = []
    for member, rows in zip(source.federation.members, (3, 0, 2), strict=True):
        test = member.test
        validation = Examples(test.x, test.y, test.rows[:rows])
        members.append(replace(member, validation=validation))
    federation = replace(source.federation, members=tuple(members))
    (run,) = Experiment.share_engine([source.config], source.algorithm, [federation])
    (measured,) = run.engine.measure([run.progress.server], "validation")
    assert [list(each.ways) for each in measured.values()] == [
        ["head", "head_own"],
        [],
        ["head", "head_own"],
    ]
    assert measured[0].ways["head"].rows == 3 and measured[2].ways["head"].rows == 2
    assert describe_metrics(federation, measured)["head"]["accuracy"]["clients"] == 2
