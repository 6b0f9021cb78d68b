"""Private steps: the same in both engines, and plain SGD where nothing is clipped or noisy."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.engine_comparison import TROUBLE, largest_difference
from helpers.private_runs import HARMLESS, SEEDED, final_states, prepare_private

from fedproto.core.entropy import Entropy
from fedproto.core.local_training import algorithm_key
from fedproto.core.private_steps import PrivateSteps
from fedproto.core.tensors import flatten_state


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("fedproto", {"absent": "drop"}),
        ("fedproto", {"absent": "drop", "contrast": 0.5, **TROUBLE}),
        ("fedavg", {"optimiser": "adam", "lr": 0.005, "weight_decay": 0.1}),
        ("fedprox", {"momentum": 0.9, "clip_norm": 0.1}),
        ("fedrep", {"local_steps": 3}),
        ("local", {"batch": 1}),
        ("ditto", {}),
        ("fedproto", {"model": "cnn(kernel=3)", "dataset": "mnist5k", "clients": 3, "rounds": 1}),
    ],
)
def test_both_engines_take_the_same_private_steps(algorithm, settings):
    settings = {"rounds": 2} | settings
    states, server = final_states(prepare_private(algorithm, "reference", SEEDED, **settings))
    others, other = final_states(
        prepare_private(algorithm, "vectorised", SEEDED, stack=3, **settings)
    )
    assert largest_difference(states, others) < 1e-8
    if server:
        assert largest_difference(flatten_state(server), flatten_state(other)) < 1e-8


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg", "fedprox", "fedrep"])
def test_unclipped_steps_over_all_records_without_noise_are_plain_gradient_descent(
    engine, algorithm
):
    settings = {"batch": 1000, "local_steps": 3, "rounds": 3}
    plain = final_states(prepare_private(algorithm, engine, None, **settings))
    private = final_states(prepare_private(algorithm, engine, HARMLESS, **settings))
    assert largest_difference(private[0], plain[0]) < 1e-12
    assert largest_difference(flatten_state(private[1]), flatten_state(plain[1])) < 1e-12


def test_two_private_runs_differ_although_their_seed_is_the_same():
    private = PrivateSteps(norm=1.0, noise=0.5, entropy=Entropy())
    first, _ = final_states(prepare_private("local", "vectorised", private, rounds=1))
    second, _ = final_states(prepare_private("local", "vectorised", private, rounds=1))
    assert largest_difference(first, second) > 1e-6


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_a_step_without_records_still_adds_its_noise(engine):
    private = replace(SEEDED, noise=1.0)
    settings = {"clients": 9, "rounds": 1, "batch": 1, "local_steps": 1, "momentum": 0}
    run = prepare_private("local", engine, private, **settings)
    start = {name: value.clone() for name, value in run.engine.export(0).items()}
    states, _ = final_states(run)
    for client, member in enumerate(run.federation.members):
        moved = [
            float((states[name] - value).norm())
            for name, value in start.items()
            if name.startswith(f"{client}.")
        ]
        # lr · σ · C · √parameters, whether a record was drawn or not
        parameters = sum(value.numel() for value in member.initial.values())
        expected = 0.05 * 1.0 * 0.5 * math.sqrt(parameters)
        assert math.hypot(*moved) == pytest.approx(expected, rel=0.2)
    taken = [_records_of_first_step(run, private, member) for member in run.federation.members]
    assert 0 in taken and any(taken)  # both kinds of step have been seen


def _records_of_first_step(run, private, member):
    key = int(algorithm_key(run.config.seed, 1, member.id))
    records = len(member.train)
    return int(private.draw_places(1 / records, records, 1, key, 0).sum())


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_a_record_that_makes_nan_changes_only_itself(engine):
    run = prepare_private("local", engine, SEEDED, rounds=1)
    clean, _ = final_states(run)
    bad = prepare_private("local", engine, SEEDED, rounds=1)
    member = bad.federation.members[0]
    member.train.x[member.train.rows[0]] = math.nan
    states, _ = final_states(bad)
    assert all(torch.isfinite(value).all() for value in states.values())
    change = max(float((states[name] - clean[name]).abs().max()) for name in states)
    assert 0 < change < 0.5
