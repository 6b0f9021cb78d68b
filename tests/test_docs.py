"""The pages in docs/, run as a reader would: every command and Python block, in an empty folder."""

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.command_line import fedproto

from fedproto.runs.sweep import batches, read_sweep

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
BLOCK = re.compile(r"^```(\w*)(?: title=\"(.+?)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Language, file name and text of each code block of a page."""
    return BLOCK.findall((DOCS / page).read_text())


def runnable_pages() -> list[str]:
    """The pages with blocks that a reader is meant to run; test_your_data.py runs your-data.md."""
    pages = [page for page in PAGES if any(language == "sh" for language, _, _ in blocks(page))]
    return [page for page in pages if page != "your-data.md"]


class SharedRun(NamedTuple):
    """The command that four pages begin with, and its run folder: it is run for the first only."""

    kept: Path
    out: str = "runs/digits"
    command: str = (
        "fedproto run --dataset mnist5k --clients 10 --shots 20 --rounds 5 --out runs/digits"
    )


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> SharedRun:
    return SharedRun(tmp_path_factory.mktemp("shared") / "run")


@pytest.mark.parametrize("page", runnable_pages())
def test_everything_on_a_page_runs_in_an_empty_folder(
    page: str, shared_run: SharedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files with a title are written, commands and Python are run; plain blocks are only shown."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for language, title, text in blocks(page):
        if title:
            Path(title).write_text(text)
            # Another page may have imported a module of this name.
            monkeypatch.delitem(sys.modules, Path(title).stem, raising=False)
        elif language == "python":
            exec(compile(text, page, "exec"), names)
        elif language == "sh":
            run_commands(text, page, shared_run)


def run_commands(text: str, page: str, shared_run: SharedRun) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "fedproto", f"{page}: {line}"
        if line == shared_run.command and shared_run.kept.exists():
            shutil.copytree(shared_run.kept, shared_run.out)
            continue
        done = fedproto(*arguments)
        assert done.code == 0, f"{page}: {line}\n{done.err}"
        if line == shared_run.command:
            shutil.copytree(shared_run.out, shared_run.kept)


def shown_commands() -> list[str]:
    """The commands that are shown but not run, because they need hours or a second machine."""
    texts = [text for page in PAGES for language, _, text in blocks(page) if not language]
    lines = [line for text in texts for line in text.splitlines()]
    return sorted({line for line in lines if line.startswith("fedproto ")})


@pytest.mark.parametrize("command", shown_commands())
def test_a_command_that_is_only_shown_has_known_flags(command: str) -> None:
    _, *words = shlex.split(command, comments=True)
    name = words[:2] if words[0] in ("deploy", "data") else words[:1]
    answer = fedproto(*name, "--help")
    assert answer.code == 0, command
    flags = [word for word in words if word.startswith("--")]
    missing = [flag for flag in flags if flag not in answer.out]
    assert not missing, command


def test_the_sweep_of_the_guide_is_one_stack_per_algorithm(tmp_path: Path) -> None:
    (text,) = [text for _, title, text in blocks("sweeps-and-reports.md") if title == "sweep.toml"]
    (tmp_path / "sweep.toml").write_text(text)
    cells = read_sweep(tmp_path / "sweep.toml")
    assert len(cells) == 2 * 3 * 2
    assert [len(batch) for batch in batches(cells, tmp_path / "out")] == [6, 6]


@pytest.mark.parametrize("page", ["configuration.md", "api.md"])
def test_the_reference_pages_are_what_the_code_says(page: str) -> None:
    """If this fails: `python docs/generate.py`."""
    generator = runpy.run_path(str(DOCS / "generate.py"))
    assert (DOCS / page).read_text() == generator["PAGES"][page]()


def test_figures_are_those_of_the_results() -> None:
    """If this fails: `python docs/generate.py`."""
    generator = runpy.run_path(str(DOCS / "generate.py"))
    for pattern in generator["FIGURES"]:
        for path in (DOCS.parent / "results").glob(pattern):
            assert (DOCS / "images" / path.name).read_bytes() == path.read_bytes(), path.name


def test_every_page_is_in_the_index_and_in_the_navigation() -> None:
    index = (DOCS / "index.md").read_text()
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    others = [page for page in PAGES if page != "index.md"]
    assert [page for page in others if f"({page})" not in index] == []
    assert [page for page in others if f": {page}\n" not in navigation] == []


def test_links_lead_somewhere() -> None:
    """From the README and the pages to files of the repository."""
    for page in (
        DOCS.parent / "README.md",
        DOCS.parent / "CONTRIBUTING.md",
        *(DOCS / name for name in PAGES),
    ):
        targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        missing = [target for target in targets if not (page.parent / target).exists()]
        assert not missing, page.name


@pytest.mark.parametrize("page", PAGES)
def test_a_page_links_only_to_what_the_site_contains(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", (DOCS / page).read_text())
    outside = [target for target in targets if not (DOCS / target).resolve().is_relative_to(DOCS)]
    assert outside == []


def test_no_page_speaks_of_a_package_on_pypi() -> None:
    for page in (DOCS.parent / "README.md", *(DOCS / name for name in PAGES)):
        assert "pip install 'fedproto[" not in page.read_text(), page.name
