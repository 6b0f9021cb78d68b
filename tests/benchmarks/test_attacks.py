"""The wrong uploads of the study of combiners: what an attacker sends, and that others do not."""

import sys
from pathlib import Path

import pytest
import torch
from torch.func import vmap

from fedproto.core.types import Batch, Group, Step

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not a package
from benchmarks.attacks import ATTACKS, LARGEST_RMS, _attack, _refuse_huge

PROTOTYPES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0], [5.0, 6.0]])
WEIGHT = torch.tensor([2.0, 1.0, 0.0, 4.0])


def step_of(received, key=7) -> Step:
    nothing = torch.empty(0)
    batch = Batch(nothing, nothing, nothing)
    return Step({}, nothing, nothing, batch, received, key=torch.tensor(key))


def attacked(attack, values, weight, received=None):
    """Return the values that an attacker sends."""
    step = step_of(received or {"w": torch.full_like(values, 9.0)})
    return ATTACKS[attack]({"w": values}, weight, step)["w"]


def test_flipped_scaled_and_colluding_values() -> None:
    assert torch.equal(attacked("flipped", PROTOTYPES, WEIGHT), -PROTOTYPES)
    assert torch.equal(attacked("scaled", PROTOTYPES, WEIGHT), 10 * PROTOTYPES)
    assert torch.equal(attacked("colluding", PROTOTYPES, WEIGHT), torch.full_like(PROTOTYPES, -9.0))


def test_shuffled_prototypes_are_those_of_the_next_class_of_the_client() -> None:
    shuffled = attacked("shuffled", PROTOTYPES, WEIGHT)
    assert shuffled.tolist() == [[3.0, 4.0], [5.0, 6.0], [0.0, 0.0], [1.0, 2.0]]


def test_a_shuffled_layer_has_the_weights_of_its_next_unit() -> None:
    shuffled = attacked("shuffled", PROTOTYPES, torch.tensor(3.0))
    assert shuffled.tolist() == [[5.0, 6.0], [1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]


@pytest.mark.parametrize("weight", [torch.ones(3), torch.tensor(1.0)])
def test_random_values_are_as_large_as_the_honest_ones(weight) -> None:
    values = torch.ones(3, 4000) * torch.tensor([[0.1], [2.0], [30.0]])
    noise = attacked("random", values, weight)
    found = noise.square().mean(1).sqrt() if weight.dim() else noise.square().mean().sqrt()
    expected = torch.tensor([0.1, 2.0, 30.0])
    expected = expected if weight.dim() else expected.square().mean().sqrt()
    assert torch.allclose(found, expected, rtol=0.05)
    assert abs(float(noise.mean())) < 1


@pytest.mark.parametrize("attack", ATTACKS)
def test_only_those_who_are_ordered_to_attack_do(attack) -> None:
    """In a stack of two clients, as the engine runs it: one attacks, the other does not."""
    group = Group({"w": PROTOTYPES * WEIGHT[:, None]}, WEIGHT, {"holders": (WEIGHT > 0).float()})
    stacked = Group(
        {"w": group.sums["w"].expand(2, 4, 2)},
        WEIGHT.expand(2, 4),
        {"holders": group.counts["holders"].expand(2, 4)},
    )
    place = torch.tensor(list(ATTACKS).index(attack))

    def send(own, key, attacks):
        step = step_of({"w": torch.full_like(PROTOTYPES, 9.0)})._replace(key=key)
        return _attack(own, step, {"attack": place, "attacks": attacks})

    sent = vmap(send)(stacked, torch.tensor([3, 4]), torch.tensor([1.0, 0.0]))
    assert torch.equal(sent.sums["w"][1], group.sums["w"])
    assert not torch.equal(sent.sums["w"][0], group.sums["w"])
    assert sent.sums["w"][0, 2].tolist() == [0.0, 0.0]  # a class that it does not have
    assert torch.equal(sent.weight, stacked.weight)
    assert torch.equal(sent.counts["holders"], stacked.counts["holders"])


def test_a_server_keeps_its_values_where_the_new_ones_are_huge_or_not_finite() -> None:
    before = {"w": torch.ones(2)}
    for value, expected in ((2.0, 2.0), (2 * LARGEST_RMS, 1.0), (float("nan"), 1.0)):
        after = _refuse_huge(before, {"w": torch.full((2,), value)})
        assert after["w"].tolist() == [expected] * 2
