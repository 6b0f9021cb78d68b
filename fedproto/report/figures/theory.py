"""The convergence statements as `fedproto theory` measured them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedproto.plots.theory import CHANGES, ETAS, LAMBDAS, collect_points, draw_theory
from fedproto.report.figures.figure import WIDTH_INCHES, Figure, Section, finish_figure
from fedproto.report.groups import Group
from fedproto.report.summary import Cell, Table
from fedproto.theory.words import CAVEAT, HEADERS, SETTING_TITLES, explain, list_rows


def draw_theory_section(groups: Sequence[Group]) -> Section:
    """Return the section with a table of the statements and one figure per setting."""
    figures: list[Figure] = []
    rows = []
    notes = [CAVEAT]
    for group in groups:
        if group.first.theory is None:
            continue
        settings = group.first.theory["settings"]
        for name, setting in settings.items():
            title = SETTING_TITLES.get(name, name)
            label = title if len(groups) == 1 else f"{group.label}, {title}"
            rows += [_make_row(row, label) for row in list_rows(setting["summary"])]
            notes.append(f"{label}: {' '.join(explain(setting))}")
            notes.append(f"Assumptions, {label}: {' '.join(setting['departures'])}")
            figures.append(_draw(label, title, setting, len(figures) + 1))
    header = [HEADERS[0], "setting", *HEADERS[1:]]
    return Section("Theory", figures, notes, Table(header, rows))


def _make_row(row: Sequence[str], label: str) -> list[Cell]:
    """Return a row of the table: the statement, the setting, and the numbers."""
    statement, *numbers = row
    return [Cell(statement), Cell(label), *(Cell(text) for text in numbers)]


def _draw(label: str, title: str, setting: dict[str, Any], number: int) -> Figure:
    """Draw the measured rounds of one run in one setting."""
    canvas = draw_theory({title: setting}, columns=1, width=WIDTH_INCHES)
    caption = (
        "The change of the clients' losses in a round beside the bounds, and λ and η beside the "
        "limits of Corollary 1: medians over clients, bands from the smallest to the largest."
    )
    alt = f"{len(setting['rounds'])} measured rounds, {label}."
    return finish_figure(canvas, f"theory-{number}", label, caption, alt, _list_points(setting))


def _list_points(setting: dict[str, Any]) -> Iterator[Sequence[Any]]:
    """Yield a header, then what every line of the figure shows."""
    yield "series", "round", "median", "smallest", "largest"
    for label, read, _ in [*CHANGES, *LAMBDAS, *ETAS]:
        for point in collect_points(setting["rounds"], read):
            yield label, *point
