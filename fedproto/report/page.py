"""The report as an HTML page: the live page frozen, with tables and notes from `templates/`."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedproto.report.configuration import Block, describe_configuration
from fedproto.report.figures.figure import Figure, Section
from fedproto.report.groups import Group
from fedproto.report.privacy import HEADING, list_claims
from fedproto.report.summary import (
    Table,
    describe_groups,
    explain_table,
    join_names,
    make_difference_table,
    make_table,
    title_groups,
)
from fedproto.watch.page_files import render_frozen

GENERATOR = '<meta name="generator" content="fedproto report">'


@dataclass(frozen=True)
class Report:
    """Everything a page says beside its charts, before it is rendered."""

    title: str
    summary: str
    table: Table
    notes: list[str]
    sections: list[Section]
    configuration: list[Block]
    facts: list[tuple[str, str]] = field(default_factory=list)
    differences: Table | None = None

    @property
    def figures(self) -> list[Figure]:
        """The figures of all sections."""
        figures = []
        for section in self.sections:
            figures += section.figures
        return figures

    @property
    def claims(self) -> list[str]:
        """What the runs claim about privacy, which a page does not fold away."""
        notes = []
        for section in self.sections:
            if section.heading == HEADING:
                notes += section.notes
        return notes


def make_report(
    groups: Sequence[Group],
    unfinished: Sequence[str],
    sections: list[Section],
    frozen: dict[str, Any],
) -> Report:
    """Return the report on groups of finished runs.

    unfinished  a sentence for each run that has not finished
    frozen      what the page shows of all runs and deployed servers
    """
    facts = list_facts(frozen["runs"])
    if not groups:
        names = [run["name"] for run in frozen["runs"]]
        return Report(
            title=join_names(names),
            summary="Nothing here has finished yet: the page shows how far it is.",
            facts=facts,
            table=Table([], []),
            notes=list(unfinished),
            sections=[],
            differences=None,
            configuration=[],
        )
    return Report(
        title=title_groups(groups),
        summary=describe_groups(groups),
        facts=facts,
        table=make_table(groups),
        notes=[*explain_table(groups), *unfinished],
        sections=[Section(HEADING, [], list_claims(groups)), *sections],
        differences=make_difference_table(groups),
        configuration=describe_configuration(groups),
    )


def list_facts(runs: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return when the runs ended, what they were run on, and which version tells of them."""
    days = {time.strftime("%Y-%m-%d", time.gmtime(run["changed"] or 0)) for run in runs}
    machines = set()
    data = set()
    for run in runs:
        settings = run["settings"]
        if "engine" in settings:
            machines.add(
                f"{settings['engine']} engine on {settings['device']}, {settings['precision']}"
            )
        if run["rows"]["train"]:
            rows = f"{run['rows']['train']:,} training and {run['rows']['test']:,} test rows"
            data.add(f"{run['dataset']}: {rows} of all clients, partition {settings['partition']}")
    facts = [("last change", join_names(sorted(days)))]
    if data:
        facts.append(("data", "; ".join(sorted(data))))
    if machines:
        facts.append(("trained by", join_names(sorted(machines))))
    facts.append(("written by", f"fedproto {_read_version()}"))
    return facts


def render_report(report: Report, frozen: dict[str, Any]) -> str:
    """Return the report as one self-contained page with charts.

    Everything from a file, such as the name of a class, is escaped by the template engine, or is
    data that the page's script turns into text.
    """
    environment = _make_environment()
    before = environment.get_template("before.html.j2").render(report=report)
    after = environment.get_template("after.html.j2").render(report=report)
    made = f"a report by fedproto {_read_version()}"
    return render_frozen({**frozen, "made": made}, report.title, GENERATOR, before, after)


def render_html(report: Report) -> str:
    """Return a report as one self-contained page that runs nothing, with its figures in it."""
    environment = _make_environment()
    environment.filters["data_uri"] = _to_data_uri
    return environment.get_template("report.html.j2").render(report=report)


def _read_version() -> str:
    """Return the version of this package, whose front door this room must not import."""
    version: str = sys.modules["fedproto"].__version__
    return version


def _make_environment() -> Environment:
    """Return what renders templates; everything from a file is escaped."""
    return Environment(
        loader=PackageLoader("fedproto.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _to_data_uri(svg: str) -> str:
    """Return an image as a URI that contains it, so that the page needs no other file."""
    content = base64.b64encode(svg.encode()).decode()
    return f"data:image/svg+xml;base64,{content}"
