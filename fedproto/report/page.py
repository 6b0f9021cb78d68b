"""The report as an HTML page, from the template in `templates/`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedproto.report.configuration import Block, describe_configuration
from fedproto.report.figures.figure import Figure, Section
from fedproto.report.groups import Group
from fedproto.report.summary import (
    Table,
    describe_groups,
    explain_table,
    make_table,
    title_groups,
)


@dataclass(frozen=True)
class Report:
    """Everything a page says, before it is rendered."""

    title: str
    summary: str
    table: Table
    notes: list[str]
    sections: list[Section]
    configuration: list[Block]

    @property
    def figures(self) -> list[Figure]:
        """The figures of all sections."""
        figures = []
        for section in self.sections:
            figures += section.figures
        return figures


def make_report(
    groups: Sequence[Group], left_out: Sequence[str], sections: list[Section]
) -> Report:
    """Return the report on groups of runs; `left_out` says which runs are missing, and why."""
    return Report(
        title=title_groups(groups),
        summary=describe_groups(groups),
        table=make_table(groups),
        notes=[*explain_table(groups), *left_out],
        sections=sections,
        configuration=describe_configuration(groups),
    )


def render_html(report: Report) -> str:
    """Return the report as one self-contained page.

    Everything from a file, such as the name of a class, is escaped by the template engine.
    """
    environment = Environment(
        loader=PackageLoader("fedproto.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["data_uri"] = _to_data_uri
    return environment.get_template("report.html.j2").render(report=report)


def _to_data_uri(svg: str) -> str:
    """Return an image as a URI that contains it, so that the page needs no other file."""
    content = base64.b64encode(svg.encode()).decode()
    return f"data:image/svg+xml;base64,{content}"
