"""Which files a report writes, replaces, keeps and refuses to overwrite; and its command."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command_line import fedproto, only_line
from helpers.reports import refuse

from fedproto.core.files import write_atomically
from fedproto.errors import ConfigError, RunFolderError
from fedproto.report import SIGNATURE, ownership, write
from fedproto.report.ownership import RECORD, refuse_foreign, replace_own

# --- the command


def test_only_reports_import_matplotlib() -> None:
    modules = "fedproto.cli.main, fedproto.runs.experiment, fedproto.report, fedproto.report.read"
    code = f"import sys, {modules}; print(*sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = process.stdout.split()
    assert "fedproto.report" in loaded
    assert "matplotlib" not in loaded


def test_without_matplotlib_the_command_says_how_to_get_it(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    advice = "a report needs the package 'matplotlib': pip install '.[plots]'"
    assert refuse(runs / "local").endswith(advice)


@pytest.mark.usefixtures("one_figure")
def test_the_command_says_where_the_page_is(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    answer = fedproto("report", runs / "local", runs / "fedavg", "--out", page)
    assert (answer.code, answer.err) == (0, "")
    assert only_line(answer.out) == f"written to {page}"
    assert page.exists()
    assert page.with_suffix(".md").exists()


def test_a_report_without_runs_is_refused() -> None:
    assert fedproto("report").code == 2
    with pytest.raises(ConfigError, match="a report needs a run"):
        write([])


# --- other people's files


@pytest.mark.usefixtures("one_figure")
def test_only_a_report_is_overwritten(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    assert "is there already and is not a report" in refuse(runs / "local", "--out", page)
    assert page.read_text() == "mine"
    page.write_bytes(SIGNATURE)
    for _ in range(2):  # the second time over the first report
        assert write([runs / "local"], page) == page
        assert page.read_bytes() != SIGNATURE


@pytest.mark.usefixtures("one_figure")
def test_a_page_that_cannot_be_written_is_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    page = tmp_path / "file" / "page.html"
    assert "cannot be written" in refuse(runs / "local", "--out", page)


def read_files(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.usefixtures("one_figure")
@pytest.mark.parametrize(
    "name", ["page.md", "page-figures/accuracy.png", "page-figures/accuracy.csv"]
)
def test_nothing_is_written_if_a_foreign_file_is_in_the_way(
    runs: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    before = read_files(tmp_path)
    message = refuse(runs / "local", "--out", tmp_path / "page.html")
    assert f"{path} is there already and was not written by a report" in message
    assert read_files(tmp_path) == before


@pytest.mark.usefixtures("one_figure")
def test_other_files_among_the_figures_are_kept(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "page-figures").mkdir()
    foreign = {
        "page-figures/thesis.png": b"mine",
        "page-figures/thesis.csv": b"also mine",
        "page-notes.md": b"notes",
    }
    for name, content in foreign.items():
        (tmp_path / name).write_bytes(content)
    for _ in range(2):
        write([runs / "local"], tmp_path / "page.html")
        assert foreign.items() <= read_files(tmp_path).items()


def test_figures_of_an_earlier_report_are_deleted_unless_they_were_changed(tmp_path: Path) -> None:
    folder = tmp_path / "x-figures"
    replace_own(folder, {"../x.md": b"text", "a.png": b"1", "b.png": b"2", "c.png": b"3"})
    (folder / "c.png").write_bytes(b"retouched")
    second = {"../x.md": b"new text", "a.png": b"4"}
    refuse_foreign(folder, second)
    replace_own(folder, second)
    files = read_files(tmp_path)
    assert files.pop(f"x-figures/{RECORD}")
    assert files == {
        "x.md": b"new text",
        "x-figures/a.png": b"4",
        "x-figures/c.png": b"retouched",
    }
    message = r"c\.png is there already and was not written by a report, or was changed"
    with pytest.raises(RunFolderError, match=message):
        refuse_foreign(folder, {"c.png": b"5"})


def test_a_report_that_was_killed_half_way_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x-figures"
    names = ("../x.md", "a.png", "b.png")
    replace_own(folder, dict.fromkeys(names, b"1"))

    def write_unless_full(path: Path, content: bytes) -> None:
        if path.name == "b.png":
            raise OSError("disk full")
        write_atomically(path, content)

    monkeypatch.setattr(ownership, "write_atomically", write_unless_full)
    with pytest.raises(OSError, match="disk full"):
        replace_own(folder, dict.fromkeys(names, b"2"))
    monkeypatch.undo()
    third = dict.fromkeys(names, b"3")
    refuse_foreign(folder, third)
    replace_own(folder, third)
    assert (folder / "b.png").read_bytes() == b"3"
    assert (tmp_path / "x.md").read_bytes() == b"3"


def test_a_record_from_somebody_else_deletes_nothing_outside_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "x-figures"
    folder.mkdir()
    letter = tmp_path / "letter.png"
    notes = folder / "notes.txt"
    letter.write_bytes(b"mine")
    notes.write_bytes(b"mine")
    digest = hashlib.sha256(b"mine").hexdigest()
    names = ["../letter.png", str(letter), "notes.txt"]
    files = {name: [digest] for name in names}
    record = {"format": "files of a report", "version": 1, "files": files}
    (folder / RECORD).write_text(json.dumps(record))
    replace_own(folder, {"a.png": b"new"})
    assert letter.read_bytes() == b"mine"
    assert notes.read_bytes() == b"mine"


@pytest.mark.parametrize("content", ["{", "[]", '{"files": {"a.png": "x"}}', "\xff", "[" * 10_000])
def test_a_damaged_record_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_bytes(content.encode("latin-1"))
    with pytest.raises(RunFolderError, match=RECORD):
        refuse_foreign(tmp_path, {"a.png": b""})
