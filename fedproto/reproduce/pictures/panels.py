"""What all drawings share: width, colours and markers of methods, legends, limits of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from fedproto.plots.colours import COLOURS
from fedproto.plots.marks import add_legend
from fedproto.plots.style import make_panels

WIDTH_INCHES = 8.0  # 1,600 pixels, whose letters can still be read at half that size
PALE = "#8a9199"  # the colour of the paper's values
#: A method has the same colour in all figures; its variants share it and differ in their markers.
FAMILIES = ("FedProto", "FedAvg", "FeSEM", "FedProx", "FedPer", "FedRep", "Local")
METHOD_MARKERS = "osD^vP"
MANY_LEGEND_COLUMNS = 6


def make_wide_panels(
    height: float, columns: int = 1, rows: int = 1, **options: Any
) -> tuple[Canvas, list[Axes]]:
    """Return a canvas of the common width with its axes, row by row; the height is in inches."""
    return make_panels(WIDTH_INCHES, height, columns, rows, **options)


def colour_of(method: str) -> str:
    """Return the colour of a method's family."""
    family = _family_of(method)
    if family not in FAMILIES:
        return COLOURS[-1]
    return COLOURS[FAMILIES.index(family)]


def marker_of(method: str, methods: Sequence[str]) -> str:
    """Return the marker that tells a method from the others of its family among `methods`."""
    family = _family_of(method)
    variants = [other for other in dict.fromkeys(methods) if _family_of(other) == family]
    return marker_number(variants.index(method))


def marker_number(number: int) -> str:
    """Return the marker at a position; the markers repeat."""
    return METHOD_MARKERS[number % len(METHOD_MARKERS)]


def _family_of(method: str) -> str:
    """Return the method of which another is a variant: `FedProto` for `FedProto, released`."""
    return method.split(",")[0].removesuffix("-mh")


def add_wide_legend(
    canvas: Canvas, entries: Sequence[tuple[Any, str]], max_columns: int = 4
) -> None:
    """Add a legend of (handle, label) entries; many columns stand close together."""
    spacing: dict[str, Any] = {"columnspacing": 1.6}
    if max_columns > MANY_LEGEND_COLUMNS:
        spacing = {"columnspacing": 0.7, "handletextpad": 0}
    add_legend(canvas, entries, max_columns, **spacing)


def limit_accuracies(means: Sequence[float], halves: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis of accuracies.

    They include the intervals of means ± halves, unless these are so wide (as those of few seeds
    can be) that the means would have no room.
    """
    smallest = min(means)
    largest = max(means)
    room = max(0.4 * (largest - smallest), 0.005)
    pairs = list(zip(means, halves, strict=True))
    lowest = min(mean - half for mean, half in pairs)
    highest = max(mean + half for mean, half in pairs)
    low = max(lowest, smallest - room, 0)
    high = min(highest, largest + room, 1)
    margin = 0.06 * (high - low)
    if margin == 0:
        margin = 0.01
    return low - margin, high + margin
