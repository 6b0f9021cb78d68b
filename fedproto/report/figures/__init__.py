"""The figures of a report, by section. Importing this package imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from fedproto.plots.style import figure_style
from fedproto.report.figures.classes import draw_classes
from fedproto.report.figures.clients import draw_clients
from fedproto.report.figures.curves import draw_curves
from fedproto.report.figures.figure import Section
from fedproto.report.figures.gains import draw_gains
from fedproto.report.figures.members import draw_member_changes
from fedproto.report.figures.prototypes import draw_prototypes
from fedproto.report.figures.quality import draw_quality
from fedproto.report.figures.theory import draw_theory_section
from fedproto.report.figures.traffic import draw_traffic
from fedproto.report.groups import Group


def draw_sections(groups: Sequence[Group]) -> list[Section]:
    """Return all figures that these runs allow, by section."""
    with figure_style():
        sections = [
            draw_curves(groups),
            draw_gains(groups),
            draw_quality(groups),
            draw_clients(groups),
            draw_classes(groups),
            draw_prototypes(groups),
        ]
        if any(group.first.membership is not None for group in groups):
            sections.append(draw_member_changes(groups))
        if any(group.first.theory is not None for group in groups):
            sections.append(draw_theory_section(groups))
        sections.append(draw_traffic(groups))
    return sections
