"""What is drawn into panels has the right places."""

import numpy as np
import pytest

from fedproto.plots.colours import COLOURS, colour_at
from fedproto.plots.marks import (
    centred_offsets,
    draw_front,
    draw_line_with_band,
    pareto_front,
    show_bytes,
)
from fedproto.plots.style import MARKERS, make_panels, marker_at


def test_the_pareto_front_has_the_points_that_no_other_beats() -> None:
    nothing = (0, 0.5)
    worse = (10, 0.4)
    better = (10, 0.7)
    equal_but_dearer = (20, 0.7)
    best = (30, 0.9)
    points = [best, equal_but_dearer, better, worse, nothing]
    assert [points[i] for i in pareto_front(points)] == [nothing, better, best]
    assert pareto_front([]) == []


def test_a_front_goes_on_to_the_right_edge() -> None:
    _, (axes,) = make_panels(2, 2)
    axes.set_xlim(0, 10)
    line = draw_front(axes, [1, 3], [0.5, 0.7], colour="black", alpha=0.2)
    assert np.array(line.get_xydata()).tolist() == [[1, 0.5], [3, 0.7], [10, 0.7]]


def test_a_band_is_cut_at_its_limits() -> None:
    _, (axes,) = make_panels(2, 2)
    draw_line_with_band(
        axes, [1, 2], [0.9, 0.5], [0.2, 0.1], band_alpha=0.1, band_limits=(0, 1), color="black"
    )
    (band,) = axes.collections
    (path,) = band.get_paths()
    corners = {(x, round(y, 9)) for x, y in np.array(path.vertices).tolist()}
    assert corners == {(1, 0.7), (1, 1.0), (2, 0.4), (2, 0.6)}


def test_a_missing_deviation_leaves_out_the_band() -> None:
    _, (axes,) = make_panels(2, 2)
    draw_line_with_band(axes, [1, 2], [0.9, 0.5], [0.2, None], band_alpha=0.1, color="black")
    assert not axes.collections


def test_offsets_are_centred() -> None:
    assert centred_offsets(1, 5) == [0]
    assert centred_offsets(2, 0.4) == pytest.approx([-0.2, 0.2])


@pytest.mark.parametrize(
    ("limits", "expected"), [((900, 12_000), "2 kB"), ((900, 1_200_000), "10 kB")]
)
def test_a_narrow_log_axis_has_more_labels(limits: tuple[float, float], expected: str) -> None:
    _, (axes,) = make_panels(4, 2)
    axes.set_xscale("log")
    axes.set_xlim(limits)
    show_bytes(axes)
    labels = [axes.xaxis.get_major_formatter()(tick, 0) for tick in axes.get_xticks()]
    assert expected in labels
    assert ("2 kB" in labels) == (expected == "2 kB")


def test_pairs_of_colour_and_marker_do_not_repeat_with_the_colours() -> None:
    count = len(COLOURS) * 3
    pairs = {(colour_at(position), marker_at(position)) for position in range(count)}
    assert len(pairs) == count
    assert all(marker in MARKERS for _, marker in pairs)
