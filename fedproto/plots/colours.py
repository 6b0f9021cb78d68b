"""The colours of figures and pages. This module does without matplotlib."""

from __future__ import annotations

import zlib
from typing import NamedTuple

#: The colour of text and edges on a light page, and the one that replaces it on a dark page.
INK = "#1b1f24"
INK_ON_DARK = "#e6e8eb"
#: Okabe and Ito's palette, which colour-blind readers can tell apart. INK replaces its black, and
#: grey replaces its yellow, which is hard to see on white paper.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK, "#999999")

#: Methods in the order of their looks: the colours repeat, each time with another dash.
METHODS = (
    "fedproto",
    "fedavg",
    "fesem",
    "fedprox",
    "fedper",
    "fedrep",
    "local",
    "ditto",
    "fedproto-mh",
    "fedavgm",
    "closed-form",
    "scaffold",
    "moon",
    "feddyn",
    "fedadam",
    "lg-fedavg",
    "fedtgp",
    "fedgh",
    "fednh",
    "feddistill",
    "fedblend",
    "protonorm",
    "fedsa",
    "fedorgp",
    "fedre",
)


class MethodLook(NamedTuple):
    """How the lines of a method look on every page."""

    colour: str
    dash: int  # 0 is a solid line; others are told apart by their number


def colour_at(position: int) -> str:
    """Return the colour of the series at a position; the colours repeat."""
    return COLOURS[position % len(COLOURS)]


def look_of_method(name: str) -> MethodLook:
    """Return the look of a method, the same on all pages.

    A method from outside the package has one that depends on its name, and may share it.
    """
    if name in METHODS:
        position = METHODS.index(name)
    else:
        position = len(METHODS) + zlib.crc32(name.encode()) % len(METHODS)
    return MethodLook(colour_at(position), position // len(COLOURS))
