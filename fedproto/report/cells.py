"""Tables as CSV that a spreadsheet shows and never computes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

_STARTS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def write_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV; a text that a spreadsheet would take for a formula begins with an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([make_harmless(cell) for cell in row])
    return text.getvalue()


def make_harmless(cell: Any) -> Any:
    """Return a cell as it is, or with an apostrophe before it where it would be a formula.

    >>> make_harmless("=1+1"), make_harmless("-0.5"), make_harmless(-0.5)
    ("'=1+1", '-0.5', -0.5)
    """
    if not isinstance(cell, str):
        return cell
    is_formula = cell.startswith(_STARTS_A_FORMULA) and not _is_number(cell)
    text = f"'{cell}" if is_formula else cell
    return text.replace(
        "\r", " "
    )  # which Python does not quote, and a spreadsheet takes for the end of a row


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()
