"""The latest upload of every client: order, new classes, leaving, export and restore."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto.core.tensors import flatten_upload
from fedproto.core.types import Group, Upload
from fedproto.core.uploads import LatestUploads

DIM = 3
SUMS = "uploads.prototypes/sums/prototypes"
WEIGHT = "uploads.prototypes/weight"


def make_upload(classes: int, seed: int) -> Upload:
    """Return an upload of random values; some classes have no weight, and so no value."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 4, (classes,), generator=generator).float()
    means = torch.randn(classes, DIM, generator=generator) * 10.0 ** (seed % 7)
    return {"prototypes": Group({"prototypes": means * weight[:, None]}, weight)}


@st.composite
def stored_uploads(draw: st.DrawFn) -> tuple[LatestUploads, int]:
    """Draw uploads of a few clients, some of which never uploaded, and the number of classes."""
    clients = draw(st.integers(1, 6))
    classes = draw(st.integers(1, 5))
    latest = LatestUploads(clients)
    for client in draw(st.sets(st.integers(0, clients - 1), min_size=1)):
        seed = draw(st.integers(0, 10**6))
        latest.store_one(client, make_upload(classes, seed), round=draw(st.integers(1, 9)))
    return latest, classes


def assert_same(one: LatestUploads, other: LatestUploads) -> None:
    first = one.export()
    second = other.export()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        assert torch.equal(value, second[name])


@given(stored_uploads(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(
    drawn: tuple[LatestUploads, int], random: st.randoms
) -> None:
    latest, _ = drawn
    stored = latest.clients()
    other = LatestUploads(len(latest.last_round))
    for client in random.sample(stored, len(stored)):
        other.store_one(client, latest.get(client), int(latest.last_round[client]))
    assert_same(latest, other)
    others = flatten_upload(other.sum())
    for name, value in flatten_upload(latest.sum()).items():
        assert torch.equal(value, others[name])


@given(stored_uploads(), st.integers(0, 4), st.data())
def test_widening_and_removing_commute(
    drawn: tuple[LatestUploads, int], more: int, data: st.DataObject
) -> None:
    latest, classes = drawn
    client = data.draw(st.sampled_from(latest.clients()))
    widened_first = latest.copy()
    widened_first.widen(classes + more, {"prototypes"})
    widened_first.remove(client)
    removed_first = latest.copy()
    removed_first.remove(client)
    removed_first.widen(classes + more, {"prototypes"})
    assert_same(widened_first, removed_first)


@given(stored_uploads())
def test_export_and_restore_are_inverse(drawn: tuple[LatestUploads, int]) -> None:
    latest, _ = drawn
    assert_same(LatestUploads.restore(latest.export()), latest)


@given(stored_uploads(), st.integers(0, 3), st.integers(0, 10**6))
def test_a_client_that_was_removed_was_never_summed(
    drawn: tuple[LatestUploads, int], more: int, seed: int
) -> None:
    """Not by a bit, even if it brought new classes: sums and single uploads are as before."""
    latest, classes = drawn
    joined = latest.copy()
    newcomer = len(joined.last_round)
    joined.add_clients(newcomer + 1)
    joined.widen(classes + more, {"prototypes"})
    joined.store_one(newcomer, make_upload(classes + more, seed), round=1)
    joined.remove(newcomer)
    assert joined.clients() == latest.clients()
    sums = flatten_upload(joined.sum())
    for name, value in flatten_upload(latest.sum()).items():
        assert torch.equal(sums[name][:, :classes], value)
    joined.keep_classes(torch.arange(classes), {"prototypes"})
    after = flatten_upload(joined.recall())
    for name, value in flatten_upload(latest.recall()).items():
        assert torch.equal(value, after[name])


@given(stored_uploads(), st.integers(0, 10**6))
def test_a_client_without_a_class_changes_no_bit_of_its_sum(
    drawn: tuple[LatestUploads, int], seed: int
) -> None:
    latest, classes = drawn
    joined = latest.copy()
    newcomer = len(joined.last_round)
    joined.add_clients(newcomer + 1)
    upload = make_upload(classes, seed)
    joined.store_one(newcomer, upload, round=1)
    untouched = upload["prototypes"].weight == 0
    before = latest.sum()["prototypes"].sums["prototypes"][0]
    after = joined.sum()["prototypes"].sums["prototypes"][0]
    assert torch.equal(before[untouched], after[untouched])


def test_a_copy_is_independent() -> None:
    latest = LatestUploads(2)
    latest.store_one(0, make_upload(2, 1), round=1)
    copied = latest.copy()
    copied.remove(0)
    assert latest.clients() == [0]
    assert copied.clients() == []
    assert latest.get(0)["prototypes"].sums["prototypes"].shape == (2, DIM)
    assert not copied.uploads["prototypes"].sums["prototypes"].any(), (
        "nothing of the upload is left"
    )
    with pytest.raises(KeyError, match=r"^0$"):
        copied.get(0)


def test_uploads_of_one_round_can_be_recalled() -> None:
    latest = LatestUploads(3)
    assert latest.recall() is None
    assert latest.sum() is None
    for client, round in ((2, 1), (0, 2)):
        latest.store_one(client, make_upload(2, client), round)
    assert latest.clients() == [0, 2]
    assert latest.clients(round=2) == [0]
    assert len(latest.recall()["prototypes"].weight) == 2
    assert len(latest.recall(round=1)["prototypes"].weight) == 1
    assert latest.recall(round=3) is None


def test_classes_are_selected_by_place() -> None:
    latest = LatestUploads(1)
    upload = make_upload(3, 5)
    latest.store_one(0, upload, round=1)
    latest.keep_classes(torch.tensor([2, 0]), {"prototypes"})
    kept = latest.get(0)["prototypes"].sums["prototypes"]
    assert torch.equal(kept, upload["prototypes"].sums["prototypes"][[2, 0]])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"last": None}, "there is no last"),
        ({"last": torch.zeros(2)}, "last is"),
        ({WEIGHT: None}, "there is no 'prototypes'/weight"),
        ({SUMS: torch.zeros(1, 3, DIM)}, "'prototypes/sums/prototypes' is"),
        ({SUMS: torch.zeros(2, 4, DIM)}, "'prototypes/sums/prototypes' is"),
        ({WEIGHT: torch.zeros(2, 3, dtype=torch.int64)}, "'prototypes/weight' is"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict, reason: str) -> None:
    latest = LatestUploads(2)
    latest.store_one(1, make_upload(3, 1), round=1)
    tensors = latest.export() | changes
    tensors = {name: value for name, value in tensors.items() if value is not None}
    with pytest.raises(ValueError, match=reason):
        LatestUploads.restore(tensors, clients=2)


def test_uploads_without_their_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^there is no last$"):
        LatestUploads.restore({})


def test_a_client_without_an_upload_is_named() -> None:
    latest = LatestUploads(4)
    latest.store_one(1, make_upload(2, seed=0), round=1)
    with pytest.raises(KeyError, match=r"^3$"):
        latest.get(3)
