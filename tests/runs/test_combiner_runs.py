"""Runs with a combiner: every engine, resumed, swept, from the command line, and refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command_line import SMALL
from helpers.command_line import fedproto as command
from helpers.engine_comparison import TROUBLE, assert_engines_agree, largest_difference
from helpers.tiny import ALGORITHMS as EVERY
from helpers.tiny import SETTINGS, build, experiment, finished

import fedproto
from fedproto.core.combination import Combiner, with_combiner
from fedproto.core.tensors import flatten_state, sum_group
from fedproto.errors import ConfigError

COMBINERS = ("median", "trimmed-mean(fraction=0.3)", "krum", "geometric-median")
ALGORITHMS = ("fedproto", "fedproto(absent=drop)", "fedproto(weighting=eq6)", "fedavg", "fedper")


def server_of(run) -> dict[str, torch.Tensor]:
    return flatten_state(run.progress.server)


# --- engines


@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg"])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_engines_agree(combiner, algorithm) -> None:
    assert_engines_agree(algorithm, combiner=combiner, **TROUBLE)


def test_transformed_uploads_are_combined_as_they_are_decoded() -> None:
    transform = "clip(norm=1),quantise(bits=8)"
    (run, _), _ = assert_engines_agree("fedproto", combiner="median", transform=transform)
    plain, _ = finished("fedproto", transform=transform)
    assert largest_difference(server_of(run), server_of(plain)) > 0


def test_several_processes_combine_what_one_does() -> None:
    settings = {"combiner": "median", "clients": 5, "participation": 0.8}
    alone, _ = finished("fedavg", **settings)
    together, _ = finished("fedavg", **settings, engine="processes", workers=2)
    assert largest_difference(server_of(alone), server_of(together)) <= 1e-8


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_that_only_divides_takes_a_combiner(algorithm) -> None:
    run, _ = finished(algorithm, combiner="median", clients=5)
    plain, _ = finished(algorithm, clients=5)
    assert all(value.isfinite().all() for value in server_of(run).values())
    changed = [
        not torch.equal(server_of(run)[name], server_of(plain)[name]) for name in server_of(run)
    ]
    assert any(changed)


@pytest.mark.parametrize("algorithm", ["fedproto", "fedproto(absent=drop)", "fedavg"])
def test_the_sum_changes_no_bit(algorithm) -> None:
    chosen, _ = finished(algorithm, combiner="sum")
    plain, _ = finished(algorithm)
    for name, value in server_of(plain).items():
        assert torch.equal(server_of(chosen)[name], value)


@pytest.mark.parametrize("algorithm", [name for name in EVERY if build(name).combinable])
def test_what_is_combinable_needs_nothing_but_sums(algorithm) -> None:
    """A server that is given the sum of the uploads must do what it does with the uploads."""
    plain, _ = finished(algorithm, participation=0.7)
    summed = experiment(algorithm, participation=0.7)
    summed.algorithm = with_combiner(summed.algorithm, Combiner("added", sum_group))
    summed.execute()
    if server_of(plain):
        assert largest_difference(server_of(plain), server_of(summed)) <= 1e-8


def test_local_training_has_nothing_to_combine() -> None:
    run, result = finished("local", combiner="median")
    _, plain = finished("local")
    assert result.accuracy == plain.accuracy
    assert run.progress.server == {}


# --- whose uploads are combined


def test_fedproto_combines_everybodys_latest_uploads() -> None:
    run, _ = finished("fedproto", combiner="median", clients=6, participation=0.5, rounds=6)
    latest = run.progress.latest_uploads
    assert len(set(latest.last_round.tolist())) > 1  # not all were there in the last round
    uploads = latest.recall()["prototypes"]
    weight = uploads.weight.numpy()
    means = uploads.sums["prototypes"].numpy() / np.maximum(weight, 1)[..., None]
    checked = 0
    for label in range(weight.shape[1]):
        holders = weight[:, label] > 0
        if holders.any():
            expected = np.median(means[holders, label], axis=0)
            found = run.progress.server["prototypes"][label].numpy()
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
            checked += 1
    assert checked > 3


def test_a_combined_class_without_uploads_keeps_its_prototype() -> None:
    run, _ = finished("fedproto(absent=drop)", combiner="median", clients=6, participation=0.4)
    known = run.progress.server["known"]
    assert run.progress.server["prototypes"].isfinite().all()
    assert set(known.tolist()) <= {0.0, 1.0}


# --- files


def test_a_run_with_a_combiner_resumes_to_the_same_result(tmp_path: Path) -> None:
    settings = SETTINGS | {"algorithm": "fedavg", "combiner": "krum", "clients": 6, "rounds": 4}
    whole = fedproto.run(**settings, checkpoint_every=2, out=tmp_path / "whole")
    for result in fedproto.stream(**settings, checkpoint_every=2, out=tmp_path / "killed"):
        if getattr(result, "round", 0) == 3:
            break
    shutil.copytree(tmp_path / "killed", tmp_path / "resumed")
    resumed = fedproto.resume(tmp_path / "resumed")
    assert resumed.accuracy == whole.accuracy
    for state, other in zip(resumed.states, whole.states, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in state.items())


def test_the_command_line_takes_a_combiner(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = command("run", *SMALL, "--combiner", "trimmed_mean(fraction=0.3)", "--out", run)
    assert done.code == 0, done.err
    text = (run / "config.toml").read_text()
    assert '[combiner]\nname = "trimmed-mean"\nfraction = 0.3\n' in text
    again = command("run", run / "config.toml", "--combiner", "median", "--out", tmp_path / "again")
    assert again.code == 0, again.err
    text = (tmp_path / "again" / "config.toml").read_text()
    assert '[combiner]\nname = "median"\n' in text
    assert "fraction" not in text


def test_combiners_are_listed() -> None:
    listed = command("list", "combiners")
    assert listed.code == 0
    for name in ("sum", "median", "trimmed-mean", "krum", "geometric-median"):
        assert name in listed.out
    assert "fraction=0.1" in listed.out


def test_a_sweep_compares_combiners(tmp_path: Path) -> None:
    swept = fedproto.sweep(
        {"combiner": ["sum", "median"]},
        **SETTINGS,
        algorithm="fedproto",
        out=tmp_path / "sweep",
    )
    found = [run.result.accuracy["prototype"]["mean"] for run in swept]
    assert len(found) == 2


# --- refused


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"algorithm": "fesem", "combiner": "median"},
            "algorithm fesem does more with the uploads than to divide their sum",
        ),
        ({"combiner": "krum"}, "combiner krum needs at least 5 clients, but there are only 4"),
        (
            {"combiner": "krum(attackers=2)", "clients": 6},
            "combiner krum needs at least 7 clients, but there are only 6",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(settings, sentence) -> None:
    algorithm = settings.pop("algorithm", "fedproto")
    with pytest.raises(ConfigError, match=sentence):
        experiment(algorithm, **settings)


def test_a_refusal_leaves_no_folder(tmp_path: Path) -> None:
    answer = command(
        "run", *SMALL, "--algorithm", "fesem", "--combiner", "median", "--out", tmp_path / "run"
    )
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_baselines_are_trained_without_the_combiner() -> None:
    _, result = finished("fedavg", combiner="krum", clients=5, baselines=True)
    for name in ("local", "pooled"):
        assert "missing" not in result.data["baselines"][name]
