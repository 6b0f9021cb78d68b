"""A real browser shows a report without complaint: on phones and desktops, light and dark."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.browser import Browser, open_browser
from helpers.reports import make_run, read_result

from fedproto.report import write
from fedproto.runs.folder import RunFolder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


SHOWN = "document.querySelector('.plot canvas') !== null"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_page_without_complaint(
    browser: Browser, page: Path, width: int, scheme: str
) -> None:
    browser.open(page.as_uri(), width, scheme)
    browser.wait_for(SHOWN)
    browser.wait_for("document.querySelector('.gains') !== null")
    assert browser.ask("innerWidth") == width
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert (np.median(browser.picture()) > 128) == (scheme == "light")
    assert browser.find_accessibility_problems() == []
    assert browser.messages() == []
    resources = browser.ask("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in resources if not name.startswith("data:")] == []


def test_a_client_of_a_report_has_its_confusion_matrix_and_hard_rows(
    browser: Browser, page: Path
) -> None:
    browser.open(page.as_uri(), 1280, "light")
    browser.wait_for(SHOWN)
    browser.ask("document.querySelector('[data-key=\"client-2\"]').click()")
    browser.wait_for("document.getElementById('client').open")
    assert browser.ask("document.querySelectorAll('dialog .matrix td').length") > 0
    assert "row " in browser.ask("document.querySelector('.reasons tbody td:last-child').innerText")
    assert browser.messages() == []


@pytest.mark.usefixtures("one_figure")
def test_the_summary_of_methods_with_different_predictions_fits_a_desktop(
    browser: Browser, runs: Path, tmp_path: Path
) -> None:
    solved = make_run(tmp_path / "solved", algorithm="closed-form")
    page = write([runs, solved], tmp_path / "report")
    browser.open(page.as_uri(), 1280, "light")
    browser.wait_for(SHOWN)
    table = "document.querySelector('[aria-labelledby=summary] .scroll')"
    assert "teacher" in browser.ask(f"{table}.textContent")
    assert browser.ask(f"{table}.scrollWidth <= {table}.clientWidth")


@pytest.mark.usefixtures("one_figure")
def test_a_browser_shows_a_hostile_name_as_it_is(
    browser: Browser, runs: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs / "local", tmp_path / "run"))
    hostile = "</script><img src=x onerror=alert(1)>" + "long" * 40
    RunFolder(run).write_json("result.json", read_result(run) | {"dataset": hostile})
    page = write([run])
    browser.open(page.as_uri(), 390, "light")
    browser.wait_for(SHOWN)
    assert "<img src=x onerror=alert(1)>" in browser.ask("document.querySelector('h1').textContent")
    assert browser.ask("document.images.length") == 0
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    assert browser.messages() == []
