"""Members keep their names, and whoever was added takes part in what follows."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from helpers.sites import write_sites
from helpers.uploads import prototype_upload

import fedproto
from fedproto.errors import DataError
from fedproto.membership.contribution import Contribution
from fedproto.membership.extend import extend
from fedproto.membership.membership import Membership
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder

ENGINE = {"engine": "reference", "model": "mlp(hidden=8,width=4)"}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of Gdańsk, Köln and Ulm, and a newcomer, Bonn."""
    folder = tmp_path_factory.mktemp("sites")
    data = write_sites(folder / "sites.csv")
    fedproto.run(
        dataset=f"csv:{data}",
        partition="natural",
        clients=3,
        rounds=1,
        out=folder / "run",
        **ENGINE,
    )
    bonn = write_sites(folder / "bonn.csv", ["Bonn"], seed=1)
    join(folder, "bonn", f"csv:{bonn}")
    return folder


def join(folder: Path, out: str, data: str, **options) -> Path:
    fedproto.join(folder / "run", data, epochs=1, out=folder / out, **ENGINE, **options)
    return folder / out


@pytest.fixture
def own(sites: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    shutil.copytree(sites / "run", tmp_path / "run")
    return tmp_path / "run"


def change(run: Path, add: tuple[Path, ...] = (), remove: tuple[str, ...] = ()) -> Membership:
    folder = RunFolder.open(run)
    membership = Membership.of(folder)
    for name in remove:
        membership = membership.without(name)
    for path in add:
        membership = membership.with_member(Contribution.load(path))
    membership.save(folder)
    return Membership.of(folder)


def names_after(experiment: Experiment) -> list[str]:
    with closing(experiment.engine):
        return [member.name for member in experiment.federation.members]


def test_members_are_called_by_their_names(sites):
    membership = Membership.of(RunFolder.open(sites / "run"))
    assert membership.members == {"Gdańsk": 0, "Köln": 1, "Ulm": 2}


@pytest.mark.parametrize("text", ["Köln", " Ko\u0308ln", "1"])
def test_a_member_leaves_by_name_or_number(text, own):
    assert list(change(own, remove=(text,)).members) == ["Gdańsk", "Ulm"]


def test_after_one_left_a_number_finds_nobody_else(own):
    change(own, remove=("0",))
    with pytest.raises(DataError, match="there is no member '0': there are Köln, Ulm"):
        change(own, remove=("0",))


def test_a_newcomer_is_called_as_its_data_says(sites):
    assert Contribution.load(sites / "bonn").member == "Bonn"
    result = json.loads((sites / "bonn" / "result.json").read_text())
    assert result["clients"][0]["name"] == "Bonn"
    assert json.loads((sites / "bonn" / "join.json").read_text())["member"] == "Bonn"


def test_a_given_name_wins_and_several_clients_name_nobody(sites, tmp_path):
    bonn = f"csv:{sites / 'bonn.csv'}"
    join(sites, "given", bonn, name=" Mu\u0308nster ")
    assert Contribution.load(sites / "given").member == "Münster"
    several = write_sites(tmp_path / "several.csv", ["A", "B"])
    assert Contribution.load(join(sites, "several", f"csv:{several}")).member == "several"


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 101, "\u202eUlm"])
def test_a_bad_name_of_a_newcomer_is_refused(name, sites, tmp_path):
    with pytest.raises(DataError, match="the newcomer is called"):
        fedproto.join(
            sites / "run", f"csv:{sites / 'bonn.csv'}", name=name, out=tmp_path / "x", **ENGINE
        )
    assert not (tmp_path / "x").exists()


def test_a_newcomer_resumed_after_a_stop_keeps_its_name(sites, tmp_path):
    shutil.copytree(sites / "bonn", tmp_path / "copy")
    (tmp_path / "copy" / "upload.safetensors").unlink()
    assert Contribution.load(tmp_path / "copy").member == "Bonn"


def test_a_member_that_was_added_takes_part_without_being_named_again(sites, own, tmp_path):
    change(own, add=(sites / "bonn",))
    experiment, _ = extend(own, [], tmp_path / "together", rounds=1)
    assert names_after(experiment) == ["Gdańsk", "Köln", "Ulm", "Bonn"]


def test_a_member_that_was_added_and_is_named_takes_part_once(sites, own, tmp_path):
    change(own, add=(sites / "bonn",))
    experiment, _ = extend(own, [sites / "bonn"], tmp_path / "together", rounds=1)
    assert names_after(experiment) == ["Gdańsk", "Köln", "Ulm", "Bonn"]


def test_a_member_whose_folder_is_not_known_is_not_left_out_silently(sites, own, tmp_path):
    change(own, add=(sites / "bonn" / "upload.safetensors",))
    with pytest.raises(DataError, match=r"'Bonn' was added to .* its run folder is not at hand"):
        extend(own, [], tmp_path / "together", rounds=1)
    assert not (tmp_path / "together").exists()
    experiment, _ = extend(own, [sites / "bonn"], tmp_path / "together", rounds=1)
    assert names_after(experiment) == ["Gdańsk", "Köln", "Ulm", "Bonn"]


def test_a_folder_that_is_gone_is_asked_for(sites, own, tmp_path):
    shutil.copytree(sites / "bonn", tmp_path / "bonn")
    change(own, add=(tmp_path / "bonn",))
    shutil.rmtree(tmp_path / "bonn")
    with pytest.raises(DataError, match="name the folder after"):
        extend(own, [], tmp_path / "together", rounds=1)


def test_a_member_that_was_added_and_left_takes_no_part(sites, own, tmp_path):
    change(own, add=(sites / "bonn",))
    change(own, remove=("Bonn", "Gdańsk"))
    experiment, _ = extend(own, [], tmp_path / "rest", rounds=1)
    assert names_after(experiment) == ["Köln", "Ulm"]


def test_who_left_may_come_back_under_its_name(sites, own, tmp_path):
    data = write_sites(tmp_path / "ulm.csv", ["Ulm"], seed=2)
    back = join(sites, "back", f"csv:{data}")
    with pytest.raises(DataError, match="there is a member 'Ulm' already"):
        extend(own, [back], tmp_path / "twice", rounds=1)
    change(own, remove=("Ulm",), add=(back,))
    experiment, _ = extend(own, [], tmp_path / "back", rounds=1)
    assert names_after(experiment) == ["Gdańsk", "Köln", "Ulm"]
    assert "ulm.csv" in experiment.federation.members[2].dataset


def test_another_newcomer_of_the_same_name_is_refused(sites, own, tmp_path):
    change(own, add=(sites / "bonn",))
    data = write_sites(tmp_path / "bonn.csv", ["Bonn"], seed=3)
    other = join(sites, "other", f"csv:{data}")
    with pytest.raises(DataError, match="is not the newcomer that was added as 'Bonn'"):
        extend(own, [other], tmp_path / "together", rounds=1)


def test_clients_without_names_keep_their_numbers_as_names(sites, tmp_path):
    out = tmp_path / "numbered"
    data = f"csv:{sites / 'sites.csv'}"
    fedproto.run(dataset=data, partition="iid", clients=4, rounds=1, out=out, **ENGINE)
    change(out, remove=("1",))
    extended = tmp_path / "rest"
    experiment, folder = extend(out, [], extended, rounds=1)
    result = experiment.execute(folder)
    assert [client["name"] for client in result.clients] == ["0", "2", "3"]
    assert list(Membership.of(RunFolder.open(extended)).members) == ["0", "2", "3"]
    change(extended, remove=("2",))
    again, _ = extend(extended, [], tmp_path / "again", rounds=1)
    assert names_after(again) == ["0", "3"]
    with pytest.raises(fedproto.FedProtoError, match=r"no client 1 in .* there are 0, 2, 3"):
        fedproto.Classifier.of(extended, "1")
    assert fedproto.Classifier.of(extended, "3").trained.about["name"] == "3"


@pytest.mark.parametrize("name", ["a\nb", "", "x" * 101])
def test_a_strangers_upload_with_a_bad_name_is_refused(name):
    upload = prototype_upload(torch.ones(1, 4), torch.ones(1))
    with pytest.raises(DataError, match="the upload is of a member"):
        Contribution(name, ("benign",), upload)
