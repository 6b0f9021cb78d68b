"""Atomic writes, locks, and readers that refuse corrupted or foreign files in one sentence."""

import json
import multiprocessing
import os
import stat
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedproto.core import files
from fedproto.errors import DataError, RunFolderError

EXAMPLE = files.TensorFormat("example", 3)
TENSORS = {
    "a": torch.arange(6, dtype=torch.float64).view(2, 3),
    "b": torch.tensor(7),
    "c": torch.zeros(0, 4),
}


def written(folder: Path, **header: object) -> Path:
    path = folder / "state.safetensors"
    files.write_tensors(path, TENSORS, EXAMPLE, header)
    return path


# --- writing


def test_a_private_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    files.write_atomically(tmp_path / "secret", b"x", private=True)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_public_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        files.write_atomically(tmp_path / "open", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o644


def test_concurrent_writers_never_mix_their_bytes(tmp_path: Path) -> None:
    """With one temporary name for all writers, one renamed the file that another was writing."""
    path = tmp_path / "value"
    contents = [bytes([65 + number]) * 200_000 for number in range(4)]
    failures: list[BaseException] = []

    def write(content: bytes) -> None:
        try:
            for _ in range(20):
                files.write_atomically(path, content)
                assert path.read_bytes() in contents
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "value"
    path.write_bytes(b"old")
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# --- locks


def _hold(folder: Path, held: object, release: object) -> None:
    with files.hold_lock(folder):
        held.set()  # type: ignore[attr-defined]
        release.wait(60)  # type: ignore[attr-defined]


def test_a_second_writer_is_told_who_the_first_one_is(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, held, release))
    holder.start()
    try:
        assert held.wait(60)
        refused = pytest.raises(RunFolderError, match=f"is in use by process {holder.pid} on ")
        with refused as caught, files.hold_lock(tmp_path):
            pass
        assert str(tmp_path) in str(caught.value)
    finally:
        release.set()
        holder.join()
    with files.hold_lock(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_free_and_its_leftovers_are_removed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, held, release))
    holder.start()
    assert held.wait(60)
    (tmp_path / ".value.1-abc.new").write_bytes(b"half")
    holder.kill()
    holder.join()
    with files.hold_lock(tmp_path):
        assert not list(tmp_path.glob("*.new")) and not list(tmp_path.glob(".*.new"))


# --- JSON and TOML


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b"[" * 200 + b"]" * 200,
    ],
)
def test_bad_json_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is not valid JSON") as caught:
        files.read_json(path, DataError)
    assert (
        str(path) in str(caught.value)
        and "\n" not in str(caught.value)
        and len(str(caught.value)) < 600
    )


@pytest.mark.parametrize("content", ["a = ", "a = " + "[" * 3000 + "]" * 3000, "\x00"])
def test_bad_toml_is_one_sentence(content: str) -> None:
    with pytest.raises(RunFolderError, match="config is not valid TOML") as caught:
        files.parse_toml(content, "config")
    assert "\n" not in str(caught.value)


def test_brackets_inside_strings_are_not_nesting() -> None:
    value = {"name": "[" * 500 + '\\"' + "{" * 500}
    assert files.parse_json(json.dumps(value), "here") == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
@settings(deadline=None)
def test_valid_json_is_read_as_it_was_written(value: object) -> None:
    assert files.parse_json(json.dumps(value), "here") == value


# --- tensors


def test_tensors_come_back_with_their_header(tmp_path: Path) -> None:
    tensors, header = files.read_tensors(written(tmp_path, round=4), EXAMPLE)
    assert header == {"format": "example", "version": 3, "round": 4}
    assert tensors.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert tensors[name].dtype == value.dtype and torch.equal(tensors[name], value)


def test_equal_states_are_equal_files(tmp_path: Path) -> None:
    first = files.pack_tensors(TENSORS, EXAMPLE, {"round": 4, "classes": ["a", "b"]})
    second = files.pack_tensors(TENSORS, EXAMPLE, {"classes": ["a", "b"], "round": 4})
    assert first == second


def test_tensors_that_share_memory_can_be_written(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    path = tmp_path / "shared.safetensors"
    files.write_tensors(path, {"a": shared, "b": shared, "c": shared[1:]}, EXAMPLE, {})
    tensors, _ = files.read_tensors(path, EXAMPLE)
    assert torch.equal(tensors["b"], shared) and torch.equal(tensors["c"], shared[1:])


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path, round=4)
    content = path.read_bytes()
    for position in range(len(content)):
        for bit in (0, 5):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                tensors, header = files.read_tensors(path, EXAMPLE)
            except RunFolderError as error:
                assert str(path) in str(error) and "\n" not in str(error)
                continue
            # Only white space of the header can change without changing what the file says.
            assert header == {"format": "example", "version": 3, "round": 4}, position
            assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS), position


@pytest.mark.parametrize("length", [0, 4, 40, 200])
def test_a_cut_file_is_refused(tmp_path: Path, length: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(RunFolderError, match="is not a valid safetensors file"):
        files.read_tensors(path, EXAMPLE)


def test_another_format_version_or_no_file_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(RunFolderError, match="is not a file of checkpoint but of 'example'"):
        files.read_tensors(path, files.TensorFormat("checkpoint", 3))
    with pytest.raises(
        DataError, match="has version '3' of the format example; this fedproto reads version 4"
    ):
        files.read_tensors(path, files.TensorFormat("example", 4, DataError))
    with pytest.raises(RunFolderError, match="does not exist"):
        files.read_tensors(tmp_path / "none", EXAMPLE)
