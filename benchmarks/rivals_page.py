"""The tables of `benchmarks/rivals.py`, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.rivals_turns import Lap

HEADINGS = (
    "",
    "CPU s per round (least to most)",
    "wall s per round",
    "CPU, times ours",
    "wall, times ours",
)


def make_table(
    found: Mapping[str, Sequence[Lap] | str], refused: Mapping[str, str], base: str
) -> str:
    """Return a line per contender, with medians and their ratios to those of `base`.

    A contender that did not run has its reason in place of numbers.
    """
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    base_laps = found[base]
    for name, laps in found.items():
        if isinstance(laps, str):
            lines.append(_make_empty_row(name, laps))
        else:
            lines.append(_make_row(name, laps, None if isinstance(base_laps, str) else base_laps))
    lines += [_make_empty_row(name, reason) for name, reason in refused.items()]
    return "\n".join(lines)


def _make_row(name: str, laps: Sequence[Lap], base: Sequence[Lap] | None) -> str:
    cpu = [lap.cpu_seconds for lap in laps]
    cpu_median = statistics.median(cpu)
    wall_median = statistics.median(lap.seconds for lap in laps)
    cells = [
        name,
        f"{cpu_median:.2f} ({min(cpu):.2f} to {max(cpu):.2f})",
        f"{wall_median:.2f}",
    ]
    if base is None:
        cells += ["-", "-"]
    else:
        base_cpu = statistics.median(lap.cpu_seconds for lap in base)
        base_wall = statistics.median(lap.seconds for lap in base)
        cells += [f"{cpu_median / base_cpu:.1f}", f"{wall_median / base_wall:.1f}"]
    return "| " + " | ".join(cells) + " |"


def _make_empty_row(name: str, reason: str) -> str:
    # A bar would end the cell.
    return f"| {name} | did not run: {reason.replace('|', '/')} | | | |"
