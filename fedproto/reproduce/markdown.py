"""Tables in Markdown, for the pages of targets and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a header and one line per row."""
    rule = "|---" * len(header) + "|"
    lines = [_format_line(header), rule]
    lines += [_format_line(row) for row in rows]
    return "\n".join(lines)


def format_columns(columns: Mapping[str, Sequence[str]]) -> str:
    """Return a table that is given by columns: the entries of each title."""
    rows = list(zip(*columns.values(), strict=True))
    return format_table(list(columns), rows)


def _format_line(entries: Sequence[str]) -> str:
    joined = " | ".join(entries)
    return f"| {joined} |"
