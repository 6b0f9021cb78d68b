"""A member's upload by class name: what is taken from a federation, a file or a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.uploads import prototype_upload

from fedproto.core import files
from fedproto.core.types import Tree
from fedproto.core.uploads import LatestUploads
from fedproto.errors import DataError
from fedproto.membership.contribution import Contribution, read_file_classes
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import PROTOTYPES_FORMAT, UPLOAD_FORMAT

VALUES = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
#: Over the classes x, y and z, of which the member does not hold y.
WHOLE = prototype_upload(VALUES, torch.tensor([5.0, 0.0, 7.0]))
SUMS = "prototypes/sums/prototypes"
WEIGHT = "prototypes/weight"


def test_only_the_classes_with_a_weight_are_contributed() -> None:
    found = Contribution.of("new", ("x", "y", "z"), WHOLE)
    assert (found.member, found.classes) == ("new", ("x", "z"))
    group = found.upload["prototypes"]
    assert group.sums["prototypes"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert group.weight.tolist() == [5.0, 7.0]


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        (
            SUMS,
            f"the upload of 'new' holds {WEIGHT} instead of {SUMS}, {WEIGHT}: "
            "is it of the same algorithm",
        ),
        (WEIGHT, r".*upload\.safetensors is not an upload: there is no 'prototypes'/weight$"),
    ],
    ids=["sums", "weight"],
)
def test_a_file_without_sums_or_weights_is_refused_for_what_it_lacks(
    lost: str, sentence: str, tmp_path: Path
) -> None:
    tensors = {SUMS: VALUES, WEIGHT: torch.ones(3)}
    del tensors[lost]
    path = tmp_path / "upload.safetensors"
    header = {"member": "new", "classes": ["x", "y", "z"]}
    files.write_tensors(path, tensors, UPLOAD_FORMAT, header)
    with pytest.raises(DataError, match=f"^{sentence}"):
        Contribution.load(path).check_layout(WHOLE)


def test_an_unusable_class_name_is_refused_in_one_sentence() -> None:
    upload = prototype_upload(VALUES[:2], torch.ones(2))
    with pytest.raises(DataError, match=r"^the upload of 'new' has a class 'y\\x1b', which holds"):
        Contribution("new", ("x", "y\x1b"), upload)
    with pytest.raises(DataError, match=r"^the upload of 'new' names a class twice$"):
        Contribution("new", ("x", " x"), upload)


def test_whole_numbers_are_refused_by_their_type() -> None:
    found = Contribution("new", ("x", "y", "z"), prototype_upload(VALUES.long(), torch.ones(3)))
    sentence = f"has {SUMS} of type torch.int64 instead of floating-point numbers"
    with pytest.raises(DataError, match=f"^the upload of 'new' {sentence}$"):
        found.check_layout(WHOLE)


def test_weights_by_samples_are_refused_where_every_member_counts_once() -> None:
    found = Contribution.of("new", ("x", "y", "z"), WHOLE)
    found.check_values(uniform=False)
    sentence = "is weighted by samples, but in this federation every member counts once"
    with pytest.raises(DataError, match=f"^the upload of 'new' {sentence}$"):
        found.check_values(uniform=True)


def test_a_file_without_class_names_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prototypes.safetensors"
    files.write_tensors(path, {"prototypes": VALUES}, PROTOTYPES_FORMAT, {"classes": []})
    with pytest.raises(DataError, match=r"prototypes\.safetensors names no classes, or one twice"):
        read_file_classes(path)


def test_an_upload_that_should_hold_nothing_is_refused() -> None:
    found = Contribution("new", ("x", "y", "z"), WHOLE)
    with pytest.raises(DataError, match=f"holds {SUMS}, {WEIGHT} instead of nothing:"):
        found.check_layout({})


class FolderInMemory(RunFolder):
    """A run folder whose checkpoint and result are given."""

    def __init__(self, path: Path, tree: Tree | None, result: dict[str, Any] | None) -> None:
        super().__init__(path)
        self._tree = tree
        self._result = result

    def load_checkpoint(self) -> tuple[int, Tree] | None:
        return None if self._tree is None else (1, self._tree)

    def result(self) -> dict[str, Any] | None:
        return self._result


def export_one() -> Tree:
    latest = LatestUploads(1)
    latest.store_one(0, WHOLE, round=1)
    return latest.export()


@pytest.mark.parametrize(
    ("tree", "result"),
    [
        (None, {"clients": [{}]}),  # no checkpoint
        (export_one(), None),  # not finished
        ({"last": torch.ones(1)}, {"clients": [{}]}),  # of an algorithm without prototypes
    ],
    ids=["no checkpoint", "not finished", "no prototypes"],
)
def test_a_newcomers_folder_needs_a_finished_run_of_prototypes(
    tree: Tree | None, result: dict[str, Any] | None, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="is not a finished run of fedproto: finish it with"):
        Contribution._from_checkpoint(FolderInMemory(tmp_path, tree, result))


def test_a_newcomers_checkpoint_must_be_whole_and_of_one_client(tmp_path: Path) -> None:
    result = {"clients": [{}]}
    damaged = export_one() | {f"uploads.{SUMS}": torch.ones(2, 3, 2)}
    with pytest.raises(DataError, match=f"^the checkpoint of .* is corrupted: '{SUMS}' is"):
        Contribution._from_checkpoint(FolderInMemory(tmp_path, damaged, result))
    latest = LatestUploads(2)
    latest.store_one(0, WHOLE, round=1)
    several = FolderInMemory(tmp_path, latest.export(), result)
    advice = "name a newcomer's folder, which `fedproto join` wrote"
    with pytest.raises(DataError, match=f" is a run of several clients: {advice}$"):
        Contribution._from_checkpoint(several)
