"""A members.safetensors that somebody changed: every part of it is checked when it is read."""

import pytest
import torch
from helpers.uploads import prototype_upload

from fedproto.config.settings import configure
from fedproto.core import files
from fedproto.core.uploads import LatestUploads
from fedproto.errors import ConfigError, DataError, FedProtoError, RunFolderError
from fedproto.membership import membership as membership_module
from fedproto.membership.contribution import Contribution
from fedproto.membership.membership import Membership
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import PROTOTYPES, PROTOTYPES_FORMAT

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
        ({"classes": ["x", "x"]}, "names no classes, or one twice"),
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
    with pytest.raises(DataError, match=rf"members\.safetensors.*{sentence}"):
        load(tmp_path, header)


def test_an_algorithm_from_outside_is_refused_before_it_is_imported(tmp_path) -> None:
    with pytest.raises(FedProtoError, match=r"members\.safetensors.*evil"):
        load(tmp_path, {"algorithm": "evil:run"})


@pytest.mark.parametrize(
    ("tensors", "without", "sentence"),
    [
        ({}, (SUMS,), "is corrupted"),
        ({WEIGHT: torch.ones(2, 3)}, (), "is corrupted"),
        ({SUMS: torch.ones(2, 2)}, (), "is corrupted"),
        (
            {WEIGHT: torch.ones(2, 3), SUMS: torch.ones(2, 3, 3)},
            (),
            "its uploads are not those of its classes",
        ),
        ({"last": torch.zeros(2, dtype=torch.int64)}, (), "it holds no uploads of prototypes"),
        (
            {SUMS.replace("sums/prototypes", "sums/others"): torch.ones(2, 2, 3)},
            (SUMS,),
            "it holds no uploads of prototypes",
        ),
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
        "all of another class",
        "no uploads",
        "sums of something else",
        "not finite",
        "no base_known",
        "base of another size",
        "base_known of another size",
        "base of whole numbers",
        "base that is infinite",
    ],
)
def test_changed_tensors_are_refused(tensors, without, sentence, tmp_path) -> None:
    with pytest.raises(DataError, match=rf"members\.safetensors.*{sentence}"):
        load(tmp_path, tensors=tensors, without=without)


def test_an_algorithm_that_needs_single_uploads_gets_them(tmp_path, monkeypatch) -> None:
    membership = load(tmp_path)
    summed = membership.prototypes().values
    monkeypatch.setattr(membership_module, "SUMMED_ALGORITHMS", ())
    assert torch.equal(membership.prototypes().values, summed)


def test_newcomers_are_numbered_one_after_the_other(tmp_path) -> None:
    membership = load(tmp_path)
    for name in ("n", "m"):
        upload = prototype_upload(torch.ones(1, 3), torch.ones(1))
        membership = membership.with_member(Contribution(name, ("x",), upload))
    assert membership.members == {"b": 0, "a": 1, "n": 2, "m": 3}
    assert membership.uploads.last_round.tolist() == [1, 1, 1, 1]


def test_a_name_that_is_taken_is_refused_with_what_to_do(tmp_path) -> None:
    upload = prototype_upload(torch.ones(1, 3), torch.ones(1))
    advice = "give the newcomer another name, or remove the member first"
    with pytest.raises(DataError, match=f"^there is a member 'a' already: {advice}$"):
        load(tmp_path).with_member(Contribution("a", ("x",), upload))


def test_finite_values_whose_sum_is_infinite_are_refused(tmp_path) -> None:
    largest = torch.full((1, 3), torch.finfo(torch.float32).max)
    membership = load(tmp_path).with_member(
        Contribution("n", ("x",), prototype_upload(largest, torch.ones(1)))
    )
    again = Contribution("m", ("x",), prototype_upload(largest, torch.ones(1)))
    sentence = "the upload of 'm' is too large: with it the prototypes are not finite"
    with pytest.raises(DataError, match=f"^{sentence}$"):
        membership.with_member(again)


def test_given_prototypes_take_the_type_of_the_uploads(tmp_path) -> None:
    given = {"base": torch.zeros(2, 3).double(), "base_known": torch.ones(2).double()}
    prototypes = load(tmp_path, tensors=given).prototypes()
    assert (prototypes.values.dtype, prototypes.known.dtype) == (torch.float32, torch.float32)


# --- a run folder


class FolderWithCheckpoint(RunFolder):
    """A run folder whose checkpoint holds what `make_tensors` returns about uploads, no more."""

    def load_checkpoint(self):
        needed = (SUMS, WEIGHT, "last")
        tensors = make_tensors()
        return 1, {name: tensors[name] for name in needed}


def make_folder(path, algorithm="fedproto"):
    """Return a run folder with a complete config.toml and prototypes of two classes."""
    (config,) = configure({"dataset": "digits"})
    text = config.toml().replace('name = "fedproto"', f'name = "{algorithm}"')
    (path / "config.toml").write_text(text)
    tensors = {"prototypes": torch.ones(2, 3), "known": torch.ones(2)}
    files.write_tensors(path / PROTOTYPES, tensors, PROTOTYPES_FORMAT, {"classes": ["x", "y"]})
    return FolderWithCheckpoint(path)


def test_a_checkpoint_needs_nothing_but_the_uploads(tmp_path) -> None:
    membership = Membership.of(make_folder(tmp_path))
    assert membership.members == {"0": 0, "1": 1}
    assert membership.algorithm.options["weighting"] == "samples"
    assert membership.prototypes().values.tolist() == [[1.5] * 3] * 2


def test_the_run_of_a_newcomer_is_refused(tmp_path) -> None:
    folder = make_folder(tmp_path)
    config = tmp_path / "config.toml"
    config.write_text(config.read_text().replace("fixed = false", "fixed = true"))
    with pytest.raises(
        RunFolderError,
        match=r"is the run of a newcomer.*; name the run of that federation instead$",
    ):
        Membership.of(folder)


def test_an_algorithm_from_outside_in_a_run_folder_is_refused_before_it_is_imported(
    tmp_path,
) -> None:
    with pytest.raises(FedProtoError, match=r"config\.toml.*evil"):
        membership_module.read_choice(make_folder(tmp_path, "evil:run"), "algorithm")


def test_an_algorithm_with_a_count_in_a_run_folder_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm 'fedproto\*2': a count has no meaning"):
        membership_module.read_choice(make_folder(tmp_path, "fedproto*2"), "algorithm")


def test_a_run_without_single_uploads_is_refused_with_what_is_needed(tmp_path) -> None:
    folder = make_folder(tmp_path)
    config = tmp_path / "config.toml"
    config.write_text(config.read_text().replace('absent = "remember"', 'absent = "drop"'))
    needed = "so nobody can join or leave it exactly: this needs a run of fedproto with absent="
    with pytest.raises(RunFolderError, match=f"keeps no single uploads.*{needed}remember$"):
        Membership.of(folder)


def test_a_run_without_a_checkpoint_is_refused(tmp_path) -> None:
    make_folder(tmp_path)
    with pytest.raises(RunFolderError, match=r"has no checkpoint with its members' uploads$"):
        Membership.of(RunFolder(tmp_path))


def test_a_checkpoint_of_other_classes_is_refused(tmp_path) -> None:
    folder = make_folder(tmp_path)
    tensors = {"prototypes": torch.ones(3, 3), "known": torch.ones(3)}
    header = {"classes": ["x", "y", "z"]}
    files.write_tensors(tmp_path / PROTOTYPES, tensors, PROTOTYPES_FORMAT, header)
    with pytest.raises(DataError, match=r"^the checkpoint of .*: its uploads are not those of"):
        Membership.of(folder)
