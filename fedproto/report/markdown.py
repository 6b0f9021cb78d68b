"""The report as Markdown, with links to the files of its figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fedproto.report.configuration import Block
from fedproto.report.figures.figure import Figure, Section
from fedproto.report.page import Report
from fedproto.report.summary import Cell, Table

TEXT_COLUMNS = 1  # the method or setting; all others are numbers


def render_markdown(report: Report, figure_folder: str) -> str:
    """Return the report as Markdown; `figure_folder` is where the figures are, from the page."""
    parts = [
        f"# {_escape(report.title)}",
        _escape(report.summary),
    ]
    if report.facts:
        parts.append(_escape("; ".join(f"{term}: {text}" for term, text in report.facts)))
    if report.table.rows:
        parts += ["## Summary", _render_table(report.table)]
    parts += [_escape(note) for note in report.notes]
    for section in report.sections:
        parts += _render_section(section, figure_folder)
    if report.differences is not None:
        parts += ["## Settings in which the runs differ", _render_table(report.differences)]
    if report.configuration:
        parts.append("## Configuration")
    for block in report.configuration:
        parts += _render_block(block)
    return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    """Return text as one line without any markup."""
    line = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]|#<>&~])", r"\\\1", line)


def _render_table(table: Table) -> str:
    """Return the table; columns of numbers are aligned to the right."""
    header = [_escape(name) for name in table.header]
    numbers = len(header) - TEXT_COLUMNS
    alignment = ["---"] * TEXT_COLUMNS + ["---:"] * numbers
    lines = [_join_cells(header), _join_cells(alignment)]
    for row in table.rows:
        cells = [_render_cell(cell) for cell in row]
        lines.append(_join_cells(cells))
    return "\n".join(lines)


def _join_cells(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _render_cell(cell: Cell) -> str:
    """Return a cell with its detail after a semicolon, since Markdown has no second line."""
    if cell.detail:
        return _escape(f"{cell.text}; {cell.detail}")
    return _escape(cell.text)


def _render_section(section: Section, figure_folder: str) -> Iterator[str]:
    """Yield the paragraphs of a section; nothing if it is empty."""
    if not section.figures and not section.notes:
        return
    yield f"## {section.heading}"
    if section.table is not None:
        yield _render_table(section.table)
    for note in section.notes:
        yield _escape(note)
    for figure in section.figures:
        yield _render_figure(figure, figure_folder)


def _render_figure(figure: Figure, figure_folder: str) -> str:
    """Return the image, its caption and a link to its numbers."""
    folder = figure_folder.replace(" ", "%20")
    path = f"{folder}/{figure.name}"
    image = f"![{_escape(figure.alt)}]({path}.png)"
    return f"{image}\n\n{_escape(figure.caption)} [Numbers]({path}.csv)"


def _render_block(block: Block) -> Iterator[str]:
    """Yield the paragraphs of a block of configuration."""
    if block.heading:
        yield f"### {_escape(block.heading)}"
    if block.settings:
        yield _fence(block.settings, "toml")
    if block.command:
        yield _fence(block.command, "sh")
    if block.note:
        yield _escape(block.note)


def _fence(text: str, language: str) -> str:
    """Return a code block whose fence is longer than any row of backticks in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.strip()}\n{fence}"
