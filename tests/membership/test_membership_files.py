"""A members.safetensors that somebody changed: every part of it is checked when it is read."""

import pytest
import torch
from helpers.uploads import prototype_upload

from fedproto.core import files
from fedproto.core.uploads import LatestUploads
from fedproto.errors import DataError, FedProtoError
from fedproto.membership.membership import Membership
from fedproto.runs.prototype_files import PROTOTYPES_FORMAT

#: The names of the tensors of the members' uploads.
SUMS = "uploads.prototypes/sums/prototypes"
WEIGHT = "uploads.prototypes/weight"
HEADER = {
    "classes": ["x", "y"],
    "algorithm": "fedproto(weighting=samples)",
    "members": {"b": 0, "a": 1},
    "changes": [{"member": "c", "did": "left", "classes": ["x"]}],
}


def make_tensors():
    """Return the tensors of two members with two classes of three values each."""
    latest = LatestUploads(2)
    for number in range(2):
        upload = prototype_upload(torch.full((2, 3), number + 1.0), torch.ones(2))
        latest.store_one(number, upload, round=1)
    tensors = {"prototypes": torch.ones(2, 3), "known": torch.ones(2)} | latest.export()
    return tensors | {"base": torch.zeros(2, 3), "base_known": torch.ones(2)}


def load(tmp_path, header=None, tensors=None, without=()):
    written = {name: value for name, value in make_tensors().items() if name not in without}
    stated = {key: value for key, value in (HEADER | (header or {})).items() if key not in without}
    path = tmp_path / "members.safetensors"
    files.write_tensors(path, written | (tensors or {}), PROTOTYPES_FORMAT, stated)
    return Membership._load(path)


def test_a_file_that_nobody_changed_is_read_in_the_order_of_the_numbers(tmp_path) -> None:
    membership = load(tmp_path)
    assert list(membership.members.items()) == [("b", 0), ("a", 1)]
    assert membership.classes == ("x", "y")
    assert membership.base is not None
    assert membership.prototypes().values.tolist() == [[1.5] * 3] * 2
    assert membership.prototypes().weighting == "samples"
    reordered = load(tmp_path, {"members": {"a": 1, "b": 0}})
    assert list(reordered.members.items()) == [("b", 0), ("a", 1)]


@pytest.mark.parametrize("key", ["algorithm", "members", "changes"])
def test_a_key_that_is_missing_is_named(key, tmp_path) -> None:
    with pytest.raises(DataError, match=f"is not a file of members: it lacks '{key}'"):
        load(tmp_path, without=(key,))


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ({"algorithm": 5}, "its algorithm is not text"),
        ({"algorithm": "fedproto(lam"}, "is corrupted: "),
        ({"members": ["b", "a"]}, "its members are not those of its uploads"),
        ({"members": {"b": 0}}, "its members are not those of its uploads"),
        ({"members": {"b": 0, "a": 2}}, "its members are not those of its uploads"),
        ({"members": {"b": 0, "a": "1"}}, "its members are not those of its uploads"),
        ({"members": {"b": 0, "a": True}}, "its members are not those of its uploads"),
        ({"changes": {}}, "its changes do not say who joined or left"),
        ({"changes": ["c left"]}, "its changes do not say who joined or left"),
        ({"changes": [{"member": "c"}]}, "its changes do not say who joined or left"),
    ],
    ids=str,
)
def test_a_changed_header_is_refused(header, sentence, tmp_path) -> None:
    with pytest.raises(DataError, match=sentence):
        load(tmp_path, header)


def test_an_algorithm_from_outside_is_refused_before_it_is_imported(tmp_path) -> None:
    with pytest.raises(FedProtoError, match="evil"):
        load(tmp_path, {"algorithm": "evil:run"})


@pytest.mark.parametrize(
    ("tensors", "without", "sentence"),
    [
        ({}, (SUMS,), "is corrupted"),
        ({WEIGHT: torch.ones(2, 3)}, (), "is corrupted"),
        ({SUMS: torch.ones(2, 2)}, (), "is corrupted"),
        ({SUMS: torch.full((2, 2, 3), torch.nan)}, (), "values that are not finite"),
        ({}, ("base_known",), "its given prototypes are not those of its classes"),
        ({"base": torch.zeros(2, 4)}, (), "its given prototypes are not those of its classes"),
        ({"base_known": torch.ones(3)}, (), "its given prototypes are not those of its classes"),
        ({"base": torch.zeros(2, 3).int()}, (), "its given prototypes are not finite numbers"),
        ({"base": torch.full((2, 3), torch.inf)}, (), "its given prototypes are not finite"),
    ],
    ids=[
        "no sums",
        "another class",
        "two axes",
        "not finite",
        "no base_known",
        "base of another size",
        "base_known of another size",
        "base of whole numbers",
        "base that is infinite",
    ],
)
def test_changed_tensors_are_refused(tensors, without, sentence, tmp_path) -> None:
    with pytest.raises(DataError, match=sentence):
        load(tmp_path, tensors=tensors, without=without)
