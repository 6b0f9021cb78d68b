"""Archives of finished cells: they are complete, replace nobody's work, and damage is refused."""

import io
import re
import tarfile

import pytest
from helpers.command_line import fedproto, files_in, only_line
from helpers.reproduction import (
    CELLS,
    FEDPROTO_CELLS,
    LOCAL_CELLS,
    Killed,
    make_target,
    read_content,
    refuse_to_train,
)

from fedproto.errors import RunFolderError
from fedproto.reproduce import archive
from fedproto.runs import sweep
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder

# --- there and back


def test_cells_are_moved_by_an_archive(tiny, specs, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert archive.unpack(tiny / "cells.tgz", out / "runs") == 8
    assert archive.unpack(tiny / "cells.tgz", out / "runs") == 0
    monkeypatch.setattr(sweep, "execute", refuse_to_train)
    monkeypatch.setattr(Experiment, "prepare_together", refuse_to_train)
    reporter, _ = make_target(out, archive=tiny / "cells.tgz")
    assert reporter.trained == []
    assert read_content(out) == read_content(tiny)
    for cell in CELLS:
        for name in ("config.toml", "partition.json", "metrics.jsonl", "result.json"):
            path = f"runs/tiny/{cell}/{name}"
            assert (out / path).read_bytes() == (tiny / path).read_bytes()


def test_packing_again_gives_the_same_files(tiny, tmp_path):
    archive.unpack(tiny / "cells.tgz", tmp_path / "runs")
    archive.pack(tmp_path / "again.tgz", tmp_path / "runs")
    files = archive._read_files(tmp_path / "again.tgz")
    assert files == archive._read_files(tiny / "cells.tgz")
    partitions = [path for path in files if path.parts[0] == "partitions"]
    assert len(partitions) == 4  # for eight cells: methods share them


def test_missing_cells_are_run_and_added(tiny, specs, tmp_path):
    path = tmp_path / "cells.tgz"
    reporter, _ = make_target(tmp_path / "one", archive=path, methods=("local",))
    assert reporter.trained == [LOCAL_CELLS]
    reporter, _ = make_target(tmp_path / "other", archive=path)
    assert reporter.trained == [FEDPROTO_CELLS]
    assert read_content(tmp_path / "other") == read_content(tiny)
    reporter, _ = make_target(tmp_path / "third", archive=path)
    assert reporter.trained == []


def test_the_folder_of_an_archive_is_created(tiny, tmp_path):
    archive.pack(tmp_path / "new" / "folder" / "cells.tgz", tiny / "runs")
    assert archive.unpack(tmp_path / "new" / "folder" / "cells.tgz", tmp_path / "runs") == 8


def test_an_archive_that_cannot_be_written_is_refused(tiny, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="cannot be written"):
        archive.pack(tmp_path / "file" / "cells.tgz", tiny / "runs")


# --- what is there already


def test_unpacking_overwrites_nothing(tiny, tmp_path):
    begun = tmp_path / "runs" / "tiny" / CELLS[0]
    begun.mkdir(parents=True)
    (begun / "config.toml").write_text("rounds = 4")  # of another run, not even finished
    finished = tmp_path / "runs" / "tiny" / CELLS[1]
    finished.mkdir()
    (finished / "result.json").write_text("mine")
    assert archive.unpack(tiny / "cells.tgz", tmp_path / "runs") == 6
    assert files_in(begun) == ["config.toml"]
    assert (begun / "config.toml").read_text() == "rounds = 4"
    assert files_in(finished) == ["result.json"]
    assert (finished / "result.json").read_text() == "mine"


def test_an_unfinished_run_with_other_settings_is_kept(tiny, tmp_path):
    """How a run is computed does not tell runs apart; its learning rate does."""
    folder = tmp_path / "runs" / "tiny" / CELLS[0]
    folder.mkdir(parents=True)
    config = (tiny / "runs" / "tiny" / CELLS[0] / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("lr = 0.05", "lr = 5.0"))
    assert archive.unpack(tiny / "cells.tgz", tmp_path / "runs") == 7
    (folder / "config.toml").write_text(re.sub("engine = .*", 'engine = "reference"', config))
    assert archive.unpack(tiny / "cells.tgz", tmp_path / "runs") == 1


def test_an_unfinished_run_is_replaced_by_the_finished_one(tiny, specs, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Killed):
        make_target(out, stop_at=(1, 2))
    begun = RunFolder(out / "runs" / "tiny" / CELLS[0])
    assert begun.result() is None
    assert archive.unpack(tiny / "cells.tgz", out / "runs") == 8
    assert begun.result() == RunFolder(tiny / "runs" / "tiny" / CELLS[0]).result()
    reporter, _ = make_target(out)
    assert reporter.trained == []
    assert read_content(out) == read_content(tiny)


def test_a_folder_that_cannot_be_written_is_refused(tiny, tmp_path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    config = (tiny / "runs" / "tiny" / CELLS[0] / "config.toml").read_text()
    (tmp_path / "elsewhere" / "config.toml").write_text(config)
    (tmp_path / "runs" / "tiny" / CELLS[0]).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match="cannot be written: "):
        archive.unpack(tiny / "cells.tgz", tmp_path / "runs")
    assert (tmp_path / "elsewhere" / "config.toml").read_text() == config


def test_a_cell_is_unpacked_completely_or_not_at_all(tiny, tmp_path, monkeypatch):
    written = []

    def write_two_files(path, content, write=archive.write_atomically):
        written.append(path.name)
        if len(written) == 3:
            raise Killed
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(archive, "write_atomically", write_two_files)
        with pytest.raises(Killed):
            archive.unpack(tiny / "cells.tgz", tmp_path / "runs")
    assert files_in(tmp_path / "runs") == ["tiny"]
    assert archive.unpack(tiny / "cells.tgz", tmp_path / "runs") == 8


# --- damaged archives


def cut(content, position):
    del content[int(len(content) * position) :]


def change(content, position):
    """Change some bytes: a single one may stand for another copy of the same zeros."""
    start = int(len(content) * position)
    for index in range(start, len(content))[:8]:
        content[index] ^= 0x55


@pytest.mark.parametrize("damage", [cut, change])
@pytest.mark.parametrize("position", [0.0, 0.01, 0.2, 0.5, 0.8, 0.99, 0.9999])
def test_nothing_of_a_damaged_archive_is_used(damage, position, tiny, specs, tmp_path):
    content = bytearray((tiny / "cells.tgz").read_bytes())
    damage(content, position)
    path = tmp_path / "cells.tgz"
    path.write_bytes(content)
    answer = fedproto("reproduce", "tiny", "--out", tmp_path / "out", "--archive", path)
    assert answer.code == 2
    assert f"{path} is not an archive of finished cells" in only_line(answer.err)
    assert not (tmp_path / "out").exists()
    assert path.read_bytes() == bytes(content)


@pytest.mark.parametrize("text", [b"", b"not an archive", b"\x1f\x8b"], ids=repr)
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "cells.tgz").write_bytes(text)
    with pytest.raises(RunFolderError, match="is not an archive of finished cells") as caught:
        archive.unpack(tmp_path / "cells.tgz", tmp_path / "runs")
    assert "\n" not in str(caught.value)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="is not an archive of finished cells"):
        archive.unpack(tmp_path, tmp_path / "runs")


#: The files of the smallest archive.
SMALLEST = {
    "tiny/a/config.toml": b"",
    "tiny/a/metrics.jsonl": b"",
    "tiny/a/result.json": b'{"partition": "x"}',
    "partitions/x.json": b"{}",
}


def write_archive(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return path


def move_cell(folder):
    """Return the files of the smallest archive with its cell in another folder."""
    return {name.replace("tiny/a", folder): text for name, text in SMALLEST.items()}


def test_the_smallest_archive(tmp_path):
    path = write_archive(tmp_path / "cells.tgz", SMALLEST)
    assert archive.unpack(path, tmp_path / "runs") == 1
    assert set(files_in(tmp_path / "runs" / "tiny")) == {
        "a",
        "a/config.toml",
        "a/metrics.jsonl",
        "a/result.json",
        "a/partition.json",
    }


@pytest.mark.parametrize(
    "lost", ["tiny/a/config.toml", "tiny/a/metrics.jsonl", "partitions/x.json"]
)
def test_an_incomplete_archive_is_refused(lost, tmp_path):
    files = {name: text for name, text in SMALLEST.items() if name != lost}
    path = write_archive(tmp_path / "cells.tgz", files)
    with pytest.raises(RunFolderError, match="does not hold all of tiny/a"):
        archive.unpack(path, tmp_path / "runs")
    assert set(files_in(tmp_path / "runs")) <= {"tiny"}


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"3", b"\xff"], ids=repr)
def test_an_invalid_result_is_refused(text, tmp_path):
    path = write_archive(tmp_path / "cells.tgz", SMALLEST | {"tiny/a/result.json": text})
    with pytest.raises(RunFolderError, match="does not hold all of tiny/a"):
        archive.unpack(path, tmp_path / "runs")


# --- hostile archives


@pytest.mark.parametrize(
    "folder", ["../a", "../../a", "tiny/..", "{}/a", "/a", "tiny/a/b", ".", "tiny/../.."], ids=str
)
def test_paths_that_lead_elsewhere_are_not_followed(folder, tmp_path):
    files = move_cell(folder.format(tmp_path / "elsewhere"))
    path = write_archive(tmp_path / "cells.tgz", files)
    assert archive.unpack(path, tmp_path / "deep" / "runs") == 0
    assert files_in(tmp_path) == ["cells.tgz"]


def test_a_single_absolute_folder_is_not_followed(tmp_path, monkeypatch):
    """`/a/result.json` has three parts, too: the root is one."""
    placed = []
    monkeypatch.setattr(archive, "_place", lambda folder, *rest: placed.append(folder))
    path = write_archive(tmp_path / "cells.tgz", move_cell("/a"))
    archive.unpack(path, tmp_path / "runs")
    assert placed == []


def test_links_are_not_followed(tmp_path):
    path = tmp_path / "cells.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name in ("tiny/a/result.json", "tiny/a"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.SYMTYPE
            member.linkname = "/etc/hostname"
            tar.addfile(member)
    assert archive.unpack(path, tmp_path / "runs") == 0
    assert files_in(tmp_path) == ["cells.tgz"]
