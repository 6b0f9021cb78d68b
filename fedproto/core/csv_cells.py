"""Tables as CSV in which a spreadsheet finds no formulas."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def write_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV.

    Text that a spreadsheet would take for a formula gets an apostrophe before it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([make_harmless(cell) for cell in row])
    return text.getvalue()


def make_harmless(cell: Any) -> Any:
    """Return a cell unchanged, or with an apostrophe before it if it would be a formula.

    >>> make_harmless("=1+1"), make_harmless("-0.5"), make_harmless(-0.5)
    ("'=1+1", '-0.5', -0.5)
    """
    if not isinstance(cell, str):
        return cell
    is_formula = cell.startswith(_FORMULA_STARTS) and not _is_number(cell)
    text = f"'{cell}" if is_formula else cell
    # Python does not quote a carriage return, which ends a row in a spreadsheet.
    return text.replace("\r", " ")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()
