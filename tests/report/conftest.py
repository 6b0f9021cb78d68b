"""Run folders and pages that the tests of reports share, since drawing takes seconds."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.reports import make_run

from fedproto.report import write
from fedproto.report.groups import Group


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three methods, one of them with two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "local", algorithm="local")
    make_run(folder / "fedavg", algorithm="fedavg")
    for seed in (0, 1):
        make_run(folder / f"fedproto-{seed}", algorithm="fedproto", seed=seed)
    return folder


@pytest.fixture(scope="session")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another task than `runs`."""
    folder = tmp_path_factory.mktemp("other") / "run"
    return make_run(folder, algorithm="fedproto(lam=0.5)", ways=2)


@pytest.fixture(scope="session")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on all runs."""
    return write([runs], tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="session")
def single_page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on a single run."""
    return write([runs / "fedproto-0"], tmp_path_factory.mktemp("single") / "one.html")


@pytest.fixture
def one_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have one small figure called `accuracy`, for tests that look at other things."""
    from fedproto.report import figures
    from fedproto.report.figures.figure import Figure, Section

    svg = "<svg xmlns='x' width='9pt' height='9pt'></svg>"
    figure = Figure("accuracy", "title", "caption", "alternative", 12, 12, svg, b"png", "a,b\n")

    def draw_sections(groups: Sequence[Group]) -> list[Section]:
        return [Section("Accuracy and loss", [figure])]

    monkeypatch.setattr(figures, "draw_sections", draw_sections)
