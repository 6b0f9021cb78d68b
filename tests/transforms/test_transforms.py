"""The transforms that come with the package, each by hand, and what holds for all of them."""

import pytest
import torch
from helpers.transformed import closing_step, round_trip, send
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from fedproto.core import rng
from fedproto.core.transforms import Context
from fedproto.core.types import Group, GroupLayout
from fedproto.errors import ConfigError
from fedproto.transforms.clip import clip
from fedproto.transforms.quantise import quantise
from fedproto.transforms.top_k import top_k

PROTOTYPES = GroupLayout({"prototypes": (4,)}, "class", rows=3)
MODEL = GroupLayout({"bias": (2,), "weight": (2, 1)}, relative=True)

CHAINS = {
    "clip": [clip(norm=2.0)],
    "quantise 8": [quantise(bits=8)],
    "quantise 4": [quantise(bits=4)],
    "top-k": [top_k(fraction=0.5)],
    "clip, top-k, quantise 4": [clip(norm=2.0), top_k(fraction=0.5), quantise(bits=4)],
    "top-k, clip, quantise 8": [top_k(fraction=0.5), clip(norm=2.0), quantise(bits=8)],
}


def prototypes(values: list[list[float]], weight: list[float]) -> Group:
    """The group of a client that has these prototypes, with these weights."""
    weights = torch.tensor(weight)
    return Group({"prototypes": torch.tensor(values) * weights[:, None]}, weights)


# --- by hand


def test_clip_bounds_each_class_by_itself():
    group = prototypes([[3.0, 4, 0, 0], [0.6, 0, 0, 0], [0, 0, 0, 0]], [2.0, 5, 0])
    wire = send([clip(norm=1.0)], PROTOTYPES, group)
    expected = torch.tensor([[0.6, 0.8, 0, 0], [0.6, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(wire.sums["prototypes"], expected)
    arrived = round_trip([clip(norm=1.0)], PROTOTYPES, group)
    torch.testing.assert_close(arrived.sums["prototypes"], expected * group.weight[:, None])


def test_clip_bounds_the_change_of_all_tensors_of_a_model_together():
    received = {"bias": torch.tensor([1.0, 1.0]), "weight": torch.tensor([[0.0], [0.0]])}
    values = {"bias": torch.tensor([4.0, 1.0]), "weight": torch.tensor([[0.0], [4.0]])}
    weight = torch.tensor(2.0)
    group = Group({name: value * weight for name, value in values.items()}, weight)
    arrived = round_trip([clip(norm=1.0)], MODEL, group, received)
    # The change (3, 0, 0, 4) has the length 5.
    torch.testing.assert_close(arrived.sums["bias"] / 2, torch.tensor([1.6, 1.0]))
    torch.testing.assert_close(arrived.sums["weight"] / 2, torch.tensor([[0.0], [0.8]]))


def test_quantise_sends_a_scale_and_codes_of_eight_bits():
    group = prototypes([[2.0, -2, 0, 1], [0, 0, 0, 0], [254, 2, -4, 6]], [3.0, 0, 1])
    wire = send([quantise(bits=8)], PROTOTYPES, group)
    codes = wire.sums["prototypes"]
    assert codes.dtype == torch.int8
    assert codes[0, :3].tolist() == [127, -127, 0]
    assert codes[0, 3] in (63, 64)  # 63.5
    assert codes[1:].tolist() == [[0, 0, 0, 0], [127, 1, -2, 3]]
    assert wire.sums["prototypes/scale"].tolist() == [2, 0, 254]


def test_quantise_packs_two_codes_of_four_bits_into_a_byte():
    layout = GroupLayout({"prototypes": (3,)}, "class", rows=1)
    group = prototypes([[7.0, -7, 3]], [1.0])
    wire = send([quantise(bits=4)], layout, group)
    packed = wire.sums["prototypes"]
    assert packed.dtype == torch.uint8
    # Codes 7, -7, 3 and nothing, each plus 8: the first of two is the lower half.
    assert packed.tolist() == [[15 + 16 * 1, 11 + 16 * 8]]
    arrived = round_trip([quantise(bits=4)], layout, group)
    assert arrived.sums["prototypes"].tolist() == [[7, -7, 3]]


def test_quantise_rounds_up_as_often_as_the_fraction_says():
    layout = GroupLayout({"prototypes": (4000,)}, "class", rows=1)
    values = torch.full((1, 4000), 10.25)
    values[0, 0] = 127
    wire = send([quantise()], layout, Group({"prototypes": values}, torch.ones(1)))
    codes = wire.sums["prototypes"][0, 1:]
    assert set(codes.tolist()) == {10, 11}
    assert (codes == 11).float().mean() == pytest.approx(0.25, abs=0.03)


def test_top_k_sends_the_largest_values_and_their_places():
    group = prototypes([[0.5, -3, 1, 2], [1, 1, 1, 1], [0, 0, 0, 0]], [4.0, 1, 0])
    wire = send([top_k(fraction=0.5)], PROTOTYPES, group)
    assert wire.sums["prototypes"].tolist() == [[-3, 2], [1, 1], [0, 0]]
    assert wire.sums["prototypes/index"].tolist() == [[1, 3], [0, 1], [0, 1]]
    assert wire.sums["prototypes/index"].dtype == torch.int32
    arrived = round_trip([top_k(fraction=0.5)], PROTOTYPES, group)
    assert arrived.sums["prototypes"].tolist() == [[0, -12, 0, 8], [1, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_errors_do_not_choose_the_largest_values(dtype):
    eps = torch.finfo(dtype).eps
    values = torch.tensor([[0.3, 0.3 * (1 + 4 * eps), -0.3 * (1 - 2 * eps), 0.1]], dtype=dtype)
    layout = GroupLayout({"prototypes": (4,)}, "class", rows=1)
    group = Group({"prototypes": values}, torch.ones(1, dtype=dtype))
    wire = send([top_k(fraction=0.5)], layout, group)
    assert wire.sums["prototypes/index"].tolist() == [[0, 1]]


def test_top_k_leaves_the_rest_of_a_model_as_it_was_received():
    received = {"bias": torch.tensor([5.0, 6.0]), "weight": torch.tensor([[7.0], [8.0]])}
    values = {"bias": torch.tensor([5.5, 6.25]), "weight": torch.tensor([[6.0], [8.5]])}
    group = Group(dict(values), torch.tensor(1.0))
    arrived = round_trip([top_k(fraction=0.5)], MODEL, group, received)
    assert arrived.sums["bias"].tolist() == [5.5, 6.0]
    assert arrived.sums["weight"].tolist() == [[6.0], [8.0]]


def test_top_k_sends_at_least_one_value_of_each_tensor():
    layout = GroupLayout({"prototypes": (4,)}, "class", rows=1)
    wire = send([top_k(fraction=0.01)], layout, prototypes([[1.0, -9, 2, 3]], [1.0]))
    assert wire.sums["prototypes"].tolist() == [[-9]]


@pytest.mark.parametrize("bits", [-8, 0, 3, 7, 16])
def test_quantise_refuses_other_numbers_of_bits(bits):
    with pytest.raises(ConfigError, match=f"bits must be 8 or 4, not {bits}"):
        quantise(bits=bits)


# --- what holds for any values


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5),
    st.sampled_from([4, 8]),
    st.integers(0, 2**40),
)
def test_quantise_is_unbiased(values, bits, key):
    """The mean over 2,000 keys is within five standard errors of the value itself."""
    draws = 2000
    value = torch.tensor(values, dtype=torch.float64)
    keys = rng.bits(torch.tensor(key), draws)
    transform = quantise(bits=bits)
    layout = GroupLayout({"x": tuple(value.shape)})

    def there_and_back(key: torch.Tensor) -> torch.Tensor:
        wire, side = transform.encode({"x": value}, Context(layout, key, {}))
        return transform.decode(wire, side, layout.shapes)["x"]

    decoded = vmap(there_and_back)(keys)
    step = value.abs().max() / (2 ** (bits - 1) - 1)
    assert ((decoded - value).abs() <= step * (1 + 1e-9)).all()
    standard_error = 0.5 * step / draws**0.5
    assert ((decoded.mean(0) - value).abs() <= 5 * standard_error + 1e-12).all()


@given(
    st.lists(st.integers(-7, 7), min_size=1, max_size=9),
    st.floats(2.0**-60, 2.0**60, width=32),
    st.sampled_from([4, 8]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_quantise_keeps_what_a_code_stands_for(codes, scale, bits, dtype):
    """Of values that the server could decode, every bit arrives, whatever is drawn."""
    levels = 2 ** (bits - 1) - 1
    whole = torch.tensor([levels, *codes], dtype=dtype)
    values = whole / levels * torch.tensor(scale, dtype=dtype)
    layout = GroupLayout({"prototypes": tuple(values.shape)}, "class", rows=1)
    group = Group({"prototypes": values[None]}, torch.ones(1, dtype=dtype))
    arrived = round_trip([quantise(bits=bits)], layout, group)
    assert torch.equal(arrived.sums["prototypes"][0], values)


@given(st.integers(0, 10**6))
def test_top_k_of_everything_loses_nothing(seed):
    generator = torch.Generator().manual_seed(seed)
    group = Group({"prototypes": torch.randn(3, 4, generator=generator)}, torch.ones(3))
    arrived = round_trip([top_k(fraction=1.0)], PROTOTYPES, group)
    assert torch.equal(arrived.sums["prototypes"], group.sums["prototypes"])


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_row_without_weight_stays_inert(chain):
    group = prototypes([[1.0, 2, 3, 4], [0, 0, 0, 0], [5, 6, 7, 8]], [1.0, 0, 2])
    arrived = round_trip(chain, PROTOTYPES, group)
    assert arrived.sums["prototypes"].isfinite().all()
    assert not arrived.sums["prototypes"][1].any()
    alone = prototypes([[1.0, 2, 3, 4], [0, 0, 0, 0], [0, 0, 0, 0]], [1.0, 0, 0])
    alone_arrived = round_trip(chain, PROTOTYPES, alone)
    assert torch.equal(alone_arrived.sums["prototypes"][0], arrived.sums["prototypes"][0])


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_model_without_weight_stays_inert(chain):
    received = {"bias": torch.tensor([5.0, 6.0]), "weight": torch.tensor([[7.0], [8.0]])}
    nothing = {name: torch.zeros_like(value) for name, value in received.items()}
    group = Group(nothing, torch.zeros(()))
    arrived = round_trip(chain, MODEL, group, received)
    for sums in arrived.sums.values():
        assert not sums.any()


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_stack_of_clients_sends_what_each_sends_alone(chain):
    groups = []
    steps = []
    for client in range(3):
        generator = torch.Generator().manual_seed(client)
        weight = torch.tensor([1.0, 0.0, 2.0 + client])
        values = torch.randn(3, 4, generator=generator)
        groups.append(Group({"prototypes": values * weight[:, None]}, weight))
        steps.append(closing_step(key=rng.key(0, "step", 1, client)))
    alone = [
        send(chain, PROTOTYPES, group, step=step) for group, step in zip(groups, steps, strict=True)
    ]
    sums = torch.stack([group.sums["prototypes"] for group in groups])
    weights = torch.stack([group.weight for group in groups])
    keys = torch.stack([step.key for step in steps])

    def send_one(sums: torch.Tensor, weight: torch.Tensor, key: torch.Tensor) -> dict:
        group = Group({"prototypes": sums}, weight)
        return send(chain, PROTOTYPES, group, step=closing_step(key=key)).sums

    together = vmap(send_one)(sums, weights, keys)
    for client, wire in enumerate(alone):
        for name, value in wire.sums.items():
            assert torch.equal(together[name][client], value)
