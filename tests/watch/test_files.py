"""Only plain files inside the watched folder are read, whatever else somebody puts there."""

import os
from pathlib import Path

import pytest

from fedproto.errors import RunFolderError
from fedproto.watch.discovery import find_places
from fedproto.watch.plain_files import read_plain, require_plain, stamp_of


def make_fake_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("version = 1")
    (folder / "partition.json").write_text("{}")
    return folder


def test_a_plain_file_is_read_from_a_place_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one\ntwo\n")
    assert read_plain(tmp_path / "file", "file") == b"one\ntwo\n"
    assert read_plain(tmp_path / "file", "file", start=4) == b"two\n"


def test_links_pipes_folders_and_large_files_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "missing"):
        with pytest.raises(RunFolderError, match="somewhere"):
            read_plain(tmp_path / name, "somewhere")
        assert stamp_of(tmp_path / name) is None
        with pytest.raises(RunFolderError, match="somewhere is not a plain file"):
            require_plain(tmp_path / name, "somewhere")
    with pytest.raises(RunFolderError, match="larger than"):
        read_plain(secret, "somewhere", max_bytes=3)


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    make_fake_run(tmp_path / "b" / "seed-1")
    make_fake_run(tmp_path / "a")
    make_fake_run(tmp_path / "a" / "inside-a-run")
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "server.safetensors").write_bytes(b"")
    found = [(place.name, place.is_deployed) for place in find_places(tmp_path)]
    assert found == [("a", False), ("b/seed-1", False), ("server", True)]


def test_a_run_itself_has_the_name_of_its_folder(tmp_path: Path) -> None:
    run = make_fake_run(tmp_path / "my-run")
    assert [place.name for place in find_places(run)] == ["my-run"]


def test_links_and_hidden_folders_are_left_out(tmp_path: Path) -> None:
    outside = make_fake_run(tmp_path / "outside")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root)
    make_fake_run(root / ".hidden")
    linked = root / "linked-files"
    linked.mkdir()
    for name in ("config.toml", "partition.json"):
        (linked / name).symlink_to(outside / name)
    assert find_places(root) == []


def test_a_name_that_is_not_utf_8_is_listed(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9\n<b>")
    make_fake_run(tmp_path / name)
    (place,) = find_places(tmp_path)
    assert place.id.isalnum()
    assert place.name == "caf�\n<b>"


def test_something_else_than_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a folder"):
        find_places(tmp_path / "missing")
