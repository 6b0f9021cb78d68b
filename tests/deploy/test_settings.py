"""The settings of server and members."""

from pathlib import Path
from typing import Any

import pytest

from fedproto.deploy.member import train_round
from fedproto.deploy.member_data import load_source
from fedproto.deploy.settings import (
    read_member,
    split_run_config,
)
from fedproto.errors import ConfigError

MEMBER = 'name = "a"\ndata = "npz:a.npz"\nstate = "mine"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "a.toml"
    path.write_text(text)
    return path


def test_paths_are_relative_to_the_members_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = read_member(
        written(tmp_path, MEMBER + 'weights = "w.safetensors"\ndata_dir = "/data"\n')
    )
    assert (found.state, found.weights, found.data_dir) == (
        str(tmp_path / "mine"),
        str(tmp_path / "w.safetensors"),
        "/data",
    )
    monkeypatch.chdir(tmp_path)
    assert read_member(Path("a.toml")).state == str(tmp_path / "mine")


def test_paths_under_keys_with_hyphens_are_relative_to_the_members_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_member(written(tmp_path, MEMBER + 'data-dir = "d"\n')).data_dir == str(
        tmp_path / "d"
    )


def test_data_paths_are_relative_to_the_members_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    member_files: dict[str, Any],
    make_deployment: Any,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a.npz").write_bytes((member_files["folder"] / "a.npz").read_bytes())
    monkeypatch.chdir(tmp_path / "elsewhere")
    own = read_member(written(tmp_path, MEMBER + 'model = "mlp(hidden=5)"\n'))
    assert train_round(make_deployment().state().make_request("a"), own).header["spoken"] == [
        "0",
        "1",
        "2",
    ]


def test_files_in_options_are_relative_to_the_members_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rows.csv").write_text("size,label\n" + "1,a\n2,b\n" * 5)
    (tmp_path / "other.csv").write_text("size,label\n" + "7,a\n9,b\n" * 5)
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = 'name = "a"\ndata = "csv:other.csv"\nstate = "kept"\n'
    agreed = load_source(read_member(written(tmp_path, text))).encoding
    data = 'data = "csv:rows.csv(label=label, encoding=kept/encoding.json)"\n'
    model = 'model = "resnet18(weights=w.safetensors)"\n'
    own = read_member(written(tmp_path, f'name = "a"\nstate = "mine"\n{data}{model}'))
    assert own.model == f"resnet18(weights={tmp_path}/w.safetensors)"
    assert load_source(own).encoding == agreed


def test_options_without_files_stay_as_they_are_written(tmp_path: Path) -> None:
    text = MEMBER.replace("npz:a.npz", "npz:a.npz( mean=0.5)") + 'model = "auto( hidden=5 )"\n'
    own = read_member(written(tmp_path, text))
    assert own.data == "npz:a.npz( mean=0.5)" and own.model == "auto( hidden=5 )"
    text = MEMBER + 'model = "auto(weights=none)"\n'
    assert read_member(written(tmp_path, text)).model == "auto(weights=none)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MEMBER + 'modle = "mlp"\n', "model"),
        ('name = "a"\ndata = "digits"\n', "state"),
        ('data = "digits"\nstate = "s"\n', "name"),
        (MEMBER + "threads = 0\n", "threads"),
        (MEMBER + 'device = "tpu"\n', "device"),
        (MEMBER + "tell_accuracy = 3\n", "tell_accuracy"),
        (MEMBER.replace('"mine"', "5"), "state"),
        (MEMBER.replace('"a"', "5"), "name"),
        (MEMBER.replace('"a"', '""'), "name"),
        (MEMBER + "[table]\nx = 1\n", "table"),
        ("name = ", "TOML"),
    ],
)
def test_a_wrong_member_file_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        read_member(written(tmp_path, text))


def test_a_missing_member_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_member(tmp_path / "a.toml")


def test_the_run_config_is_split_and_checked() -> None:
    mine, theirs = split_run_config(
        {"new-classes": True, "rounds": 3, "last-batch": "drop", "lr": 0.1}, "here"
    )
    assert (
        mine.new_classes and mine.rounds == 3 and theirs.last_batch == "drop" and theirs.lr == 0.1
    )
    for bad, says in (
        ({"round": 3}, "rounds"),
        ({"rounds": 0}, "rounds"),
        ({"lr": 0}, "lr"),
        ({"quorum": "x"}, "quorum"),
        ({"local-steps": -1}, "local_steps must be a whole number of at least 0"),
        ({"local-steps": 5, "epochs": 2}, r"local_steps \(5\) and epochs \(2\) both say"),
    ):
        with pytest.raises(ConfigError, match=says):
            split_run_config(bad, "here")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.csv", "(label=kind)"),
        ("a.csv", '(label=kind, missing="-9,n/a")'),
        ("a (new), b.csv", "(label=kind)"),
    ],
)
def test_data_paths_with_options_are_relative_to_the_members_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: str
) -> None:
    folder = tmp_path / "member"
    folder.mkdir()
    (folder / name).write_text("size,kind\n1,x\n2,x\n3,y\n4,y\n")
    quoted = f'"csv:{name}"' if "," in name else f"csv:{name}"
    text = f'name = "a"\ndata = \'{quoted}{options}\'\nstate = "mine"\n'
    (folder / "a.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    own = read_member(folder / "a.toml")
    source = load_source(own)
    assert source.classes == ("x", "y") and source.name == f"csv:{folder / name}"


def test_data_that_is_not_beside_the_members_file_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(MEMBER.replace("npz:a.npz", "csv:gone.csv(label=kind)"))
    assert read_member(tmp_path / "a.toml").data == "csv:gone.csv(label=kind)"
