"""What tests of reports read: run folders, pages, and the numbers of figures."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from helpers.command_line import fedproto, only_line
from helpers.tiny import SETTINGS

import fedproto as package
from fedproto.plots.style import figure_style
from fedproto.report.figures.figure import Figure, Section
from fedproto.report.groups import Group, group_runs
from fedproto.report.read import read_runs

RUN = SETTINGS | {"eval_every": 1, "rounds": 3, "ways": 3}


def make_run(out: Path, **settings: Any) -> Path:
    """Run a small federation and return its folder."""
    package.run(out=out, **(RUN | settings))
    return out


def read_result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def read_metrics(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_numbers(page: Path, figure: str) -> list[dict[str, str]]:
    """The rows of a figure's CSV file."""
    folder = page.with_name(f"{page.stem}-figures")
    with (folder / f"{figure}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def draw_section(draw: Callable[[Sequence[Group]], Section], *runs: Path) -> Section:
    """One section of a report, for tests that need no page."""
    found = read_runs(runs)
    with figure_style():
        return draw(group_runs(found))


def parse_numbers(figure: Figure) -> list[dict[str, str]]:
    """The rows of a figure's CSV text."""
    return list(csv.DictReader(io.StringIO(figure.csv)))


class PageParser(HTMLParser):
    """The rows of a page's tables, by table, and all its tags with their attributes."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.in_cell = False
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.in_cell = False

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.tables[-1][-1][-1] += data


def read_table(page: Path) -> dict[str, dict[str, str]]:
    """The rows of a page's first table by their first cell, each by the names of its columns."""
    header, *rows = PageParser(page).tables[0]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def read_frozen(page: Path) -> dict[str, Any]:
    """The numbers that a page holds for its charts."""
    text = page.read_text()
    start = text.index('<script type="application/json" id="frozen">')
    return json.loads(text[text.index(">", start) + 1 : text.index("</script>", start)])


def refuse(*arguments: str | Path) -> str:
    """The sentence by which `fedproto report ARGUMENTS` is refused."""
    answer = fedproto("report", *arguments)
    assert (answer.code, answer.out) == (2, "")
    return only_line(answer.err)
