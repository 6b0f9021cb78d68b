"""Members of a run with a combiner join and leave, and the rest is combined again."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedproto
from fedproto.config.options import Part
from fedproto.core import files
from fedproto.core.tensors import make_group
from fedproto.errors import DataError
from fedproto.membership.contribution import Contribution
from fedproto.membership.membership import Membership
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import MEMBERS, PROTOTYPES_FORMAT

SETTINGS = {
    "dataset": "digits",
    "clients": 6,
    "rounds": 3,
    "shots": 5,
    "ways": 5,
    "engine": "reference",
    "model": "mlp(hidden=16,width=8)",
    "participation": 0.7,
}


def read_membership(path: Path) -> Membership:
    return Membership.of(RunFolder.open(path))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "median"
    fedproto.run(**SETTINGS, combiner="trimmed-mean(fraction=0.3)", out=path)
    return path


def test_the_membership_of_a_run_gives_its_prototypes(run: Path) -> None:
    membership = read_membership(run)
    assert membership.combiner == Part("trimmed-mean", {"fraction": 0.3})
    stored = load_file(run / "prototypes.safetensors")
    assert torch.equal(membership.prototypes().values, stored["prototypes"])


def test_a_huge_upload_of_a_newcomer_hardly_moves_the_prototypes(run: Path) -> None:
    before = read_membership(run)
    shared = [name for name in before.classes if _count_holders(before, name) >= 3]
    assert shared
    group = make_group({"prototypes": torch.full((len(shared), 8), 1e3)}, torch.ones(len(shared)))
    joined = before.with_member(Contribution("new", tuple(shared), {"prototypes": group}))
    places = [before.classes.index(name) for name in shared]
    moved = (joined.prototypes().values - before.prototypes().values)[places]
    assert 0 < moved.abs().max() < 10


def test_a_member_that_joins_and_leaves_leaves_nothing_behind(run: Path) -> None:
    before = read_membership(run)
    group = make_group({"prototypes": torch.ones(1, 8)}, torch.ones(1))
    joined = before.with_member(Contribution("new", ("0",), {"prototypes": group}))
    after = joined.without("new")
    assert torch.equal(after.prototypes().values, before.prototypes().values)


def test_the_file_of_members_states_the_combiner(run: Path, tmp_path: Path) -> None:
    membership = read_membership(run)
    name = next(iter(membership.members))
    rest = membership.without(name)
    rest.save(RunFolder.open(run))
    try:
        again = read_membership(run)
        assert again.combiner == Part("trimmed-mean", {"fraction": "0.3"})
        assert torch.equal(again.prototypes().values, rest.prototypes().values)
        tensors, header = files.read_tensors(run / MEMBERS, PROTOTYPES_FORMAT)
        for wrong, says in ((3, "its combiner is not text"), ("krum(", "corrupted")):
            changed = {key: header[key] for key in header.keys() - {"format", "version"}}
            changed["combiner"] = wrong
            path = tmp_path / "members.safetensors"
            files.write_tensors(path, tensors, PROTOTYPES_FORMAT, changed)
            with pytest.raises(DataError, match=says):
                Membership._load(path)
    finally:
        (run / MEMBERS).unlink()


def test_a_run_with_a_combiner_can_be_extended(run: Path, tmp_path: Path) -> None:
    result = fedproto.extend(run, [], rounds=1, out=tmp_path / "more")
    text = (tmp_path / "more" / "config.toml").read_text()
    assert 'name = "trimmed-mean"' in text
    assert result.accuracy["prototype"]["mean"] > 0


def test_a_newcomer_has_nothing_to_combine(run: Path) -> None:
    with pytest.raises(fedproto.ConfigError, match="'combiner' cannot be set for a newcomer"):
        fedproto.join(run, "digits", combiner="median")


def _count_holders(membership: Membership, name: str) -> int:
    return sum(name in membership.held_by(member) for member in membership.members)
