import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto.core import rng


def test_bits_are_splitmix64():
    """The first outputs of splitmix64 from state 1234567, as published (Rosetta Code)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    drawn = rng.bits(torch.tensor(1234567), 4)
    assert [value % 2**64 for value in drawn.tolist()] == published


@given(
    st.integers(0, 2**31),
    st.integers(0, 1000),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
    st.integers(1, 50),
)
def test_a_client_in_a_stack_draws_what_it_draws_alone(seed, round, clients, count):
    together = rng.permutation(rng.key(seed, "shuffle", round, torch.tensor(clients)), count)
    alone = [rng.permutation(rng.key(seed, "shuffle", round, client), count) for client in clients]
    assert torch.equal(together, torch.stack(alone))


@given(st.integers(0, 2**31), st.integers(1, 200))
def test_a_permutation_is_one(seed, count):
    order = rng.permutation(rng.key(seed, "shuffle"), count)
    assert order.sort().values.tolist() == list(range(count))


def test_every_part_of_a_key_matters():
    keys = [
        rng.key(0, "shuffle", 1, 2),
        rng.key(1, "shuffle", 1, 2),
        rng.key(0, "augment", 1, 2),
        rng.key(0, "shuffle", 2, 2),
        rng.key(0, "shuffle", 1, 3),
        rng.key(0, "shuffle", 2, 1),
    ]
    assert len({int(key) for key in keys}) == len(keys)


def test_uniform_draws_are_uniform():
    """Kolmogorov-Smirnov: the largest distance is below 1.95/sqrt(n), which means p > 0.001."""
    count = 100_000
    draws = rng.uniform(rng.key(0, "any"), count).sort().values
    gap = (draws - torch.arange(1, count + 1) / count).abs().max()
    assert gap < 1.95 / count**0.5
    assert draws.min() >= 0
    assert draws.max() < 1


def test_first_places_of_permutations_are_uniform():
    """Each of 10 samples leads 1,000 of 10,000 permutations, within four standard deviations."""
    firsts = rng.permutation(rng.key(0, "shuffle", torch.arange(10_000)), 10)[:, 0]
    counts = firsts.bincount(minlength=10)
    assert ((counts - 1000).abs() < 4 * 30).all()


def test_torchs_generators_are_seeded_as_by_torch():
    with rng.preserve_torch_generators(torch.device("cpu")):
        torch.manual_seed(2**40 + 3)
        expected = torch.randn(5)
        rng.seed_torch_generators(2**40 + 3)
        assert torch.equal(torch.randn(5), expected)
