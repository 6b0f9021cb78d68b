"""Paths that are named without their kind, and names that are near, or not."""

from pathlib import Path

import pytest
from helpers.command_line import fedproto, only_line

from fedproto.config.own_files import suggest_dataset
from fedproto.data import DataFolders
from fedproto.data.shared.catalogue import CATALOGUE
from fedproto.errors import DataError, unknown


@pytest.mark.parametrize(
    ("named", "suggested"),
    [
        ("breast.csv", "csv:breast.csv"),
        ("a/b.TSV.gz", "csv:a/b.TSV.gz"),
        ("scans.npz", "npz:scans.npz"),
        ("arrays/x.npy", "npy:arrays"),
        ("reviews.jsonl", "text:reviews.jsonl"),
        ("table.parquet", "parquet:table.parquet"),
        ("table.xlsx", "excel:table.xlsx"),
        ("digit", None),
        ("run.pth", None),
        ("x" * 5000, None),
    ],
)
def test_a_path_is_recognised_by_its_ending(named: str, suggested: str | None) -> None:
    assert suggest_dataset(named) == suggested


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("cat/1.png", "folder"),
        ("cat/patient/1.dcm", "folder"),
        ("pos/1.txt", "text"),
        ("train.csv", "csv"),
        ("x.npy", "npy"),
        ("data/train-0.parquet", "hf"),
    ],
)
def test_a_folder_is_recognised_by_its_files(file: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert suggest_dataset(str(tmp_path)) == f"{kind}:{tmp_path}"


def test_a_file_without_its_kind_is_answered_with_what_to_write() -> None:
    answer = fedproto("run", "--dataset", "breast.csv")
    assert answer.code == 2
    assert only_line(answer.err).endswith(
        "unknown dataset 'breast.csv': data of your own is named with its kind, 'csv:breast.csv'"
    )


def test_help_shows_the_kinds_of_own_data() -> None:
    shown = fedproto("run", "--help").out
    for kind in ("csv:", "folder:", "text:", "hf:", "npz:"):
        assert kind in shown


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "femnist"])
def test_a_known_set_that_is_missing_names_the_command_that_gets_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    answer = fedproto("run", "--dataset", name)
    assert f"get it with `fedproto data get {name}`" in only_line(answer.err)
    assert name in CATALOGUE


def test_a_file_that_no_command_gets_is_only_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="put it there") as caught:
        DataFolders(str(tmp_path)).find("weights.safetensors")
    assert "data get" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("digit", "digits"),
        ("mnst", "mnist"),
        ("cvs", "csv"),
        ("MNIST", "mnist"),
        ("far", "cifar10"),
        ("fa", None),
        ("", None),
        ("iris", None),
        ("heart", None),
    ],
)
def test_only_near_names_are_suggested(name: str, near: str | None) -> None:
    message = str(unknown("dataset", name, ["digits", "mnist", "csv", "text", "cifar10", "hf"]))
    assert (f"did you mean {near!r}" in message) == (near is not None)
    assert ("did you mean" in message) == (near is not None)


def test_a_folder_divided_by_pfllib_is_recognised(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "0.npz").touch()
    assert suggest_dataset(str(tmp_path)) == f"pfllib:{tmp_path}"
    (tmp_path / "test" / "0.npz").unlink()
    assert suggest_dataset(str(tmp_path)) == f"npz:{tmp_path}"
