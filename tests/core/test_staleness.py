"""Late uploads: how much they count, and what becomes of a late model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto.core.staleness import (
    age_uploads,
    apply_changes,
    scale_uploads,
    take_changes,
    weigh_staleness,
)
from fedproto.core.tensors import make_group, weighted_mean
from fedproto.core.types import Group, GroupLayout

MODEL = {"model": GroupLayout({"w": (2,)}, relative=True)}
PROTOTYPES = {"prototypes": GroupLayout({"prototypes": (2,)}, "class", 2, ("holders",))}


def test_weights_of_late_uploads_by_hand() -> None:
    staleness = torch.tensor([0, 1, 3, 8])
    assert weigh_staleness(staleness, 0.5).tolist() == pytest.approx([1, 0.5**0.5, 1 / 2, 1 / 3])
    assert weigh_staleness(staleness, 1.0).tolist() == pytest.approx([1, 1 / 2, 1 / 4, 1 / 9])
    assert weigh_staleness(staleness, 0.0).tolist() == [1, 1, 1, 1]


def test_two_models_of_which_one_is_late_by_hand() -> None:
    """Client 0 is fresh: 4 samples, (2, 2). Client 1 moved (0, 0) to (1, -1) with 12 samples.

    Meanwhile the server is at (1, 1), so that client 1's model counts as (2, 0); after 3 versions
    it counts half: 6 samples. The mean is (4·(2, 2) + 6·(2, 0)) / 10 = (2, 0.8).
    """
    late = {"model": make_group({"w": torch.tensor([[1.0, -1.0]])}, torch.tensor([12.0]))}
    change = take_changes(late, {"w": torch.tensor([[0.0, 0.0]])}, MODEL)
    moved = apply_changes(change, {"w": torch.tensor([[1.0, 1.0]])}, MODEL)["model"]
    uploads = {
        "model": Group(
            {"w": torch.cat([torch.tensor([[8.0, 8.0]]), moved.sums["w"]])},
            torch.cat([torch.tensor([4.0]), moved.weight]),
        )
    }
    weighed = scale_uploads(uploads, weigh_staleness(torch.tensor([0, 3]), 0.5))
    mean = weighted_mean({"w": torch.zeros(2)}, weighed["model"])
    torch.testing.assert_close(mean["w"], torch.tensor([2.0, 0.8]))


@pytest.mark.parametrize("tree", ["model", "body"])
def test_received_values_may_be_in_a_tree(tree: str) -> None:
    late = {"model": make_group({"w": torch.tensor([[3.0, 5.0]])}, torch.tensor([2.0]))}
    change = take_changes(late, {tree: {"w": torch.tensor([[1.0, 1.0]])}}, MODEL)
    assert change["model"].sums["w"].tolist() == [[4.0, 8.0]]


def test_late_prototypes_stay_where_they_are_and_all_their_counts_shrink() -> None:
    prototypes = torch.tensor([[[1.0, 2.0], [0.0, 0.0]]])
    group = make_group({"prototypes": prototypes}, torch.tensor([[4.0, 0.0]]))
    group = group._replace(counts={"holders": torch.tensor([[1.0, 0.0]])})
    received = {"prototypes": torch.full((1, 2, 2), 9.0)}
    assert take_changes({"prototypes": group}, received, PROTOTYPES)["prototypes"] is group
    weighed = scale_uploads({"prototypes": group}, torch.tensor([0.5], dtype=torch.float64))
    assert weighed["prototypes"].sums["prototypes"].tolist() == [[[2.0, 4.0], [0.0, 0.0]]]
    assert weighed["prototypes"].weight.tolist() == [[2.0, 0.0]]
    assert weighed["prototypes"].counts["holders"].tolist() == [[0.5, 0.0]]
    assert weighed["prototypes"].weight.dtype == torch.float32


def test_what_is_sent_once_does_not_age() -> None:
    group = make_group({"w": torch.tensor([[1.0, -1.0]])}, torch.tensor([12.0]))
    aged = age_uploads({"model": group, "sums": group}, torch.tensor([0.5]), ("sums",))
    assert aged["sums"] is group
    assert aged["model"].weight.tolist() == [6.0]


@given(st.integers(0, 99), st.integers(1, 4))
def test_a_change_applied_to_where_it_came_from_is_the_upload(seed: int, speakers: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = {"w": torch.randn(speakers, 2, generator=generator, dtype=torch.float64)}
    weight = torch.rand(speakers, generator=generator, dtype=torch.float64)
    received = {"w": torch.randn(speakers, 2, generator=generator, dtype=torch.float64)}
    uploads = {"model": make_group(values, weight)}
    again = apply_changes(take_changes(uploads, received, MODEL), received, MODEL)
    torch.testing.assert_close(again["model"].sums, uploads["model"].sums)
    assert again["model"].weight is weight
