"""The figure of a target, as PNG, and what it shows, as CSV: both from the same rows, which the target's JSON gives.

This module needs matplotlib; whoever may have to do without imports it late.
"""

from __future__ import annotations

import io
import json
import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from fedproto.core.files import write_atomically
from fedproto.report.cells import write_csv
from fedproto.report.figures import (
    COLOURS,
    GRID,
    INK,
    STYLE,
    Axes,
    Canvas,
    Line2D,
    mpl,
    percent,
    size,
)
from fedproto.reproduce.plan import cell_name
from fedproto.reproduce.tables import PAPERS_START, summary

Cells = Sequence[dict[str, Any]]  # those of the JSON that have runs
Rows = list[dict[str, Any]]

WIDTH = 8.0  # inches: 1,600 pixels, whose letters are still read when 800 are shown
PALE = "#8a9199"  # the paper's values
VALUE = 4  # bytes: the paper counts values
VISIBLE = 0.001  # of accuracy: what choosing among own classes must gain to be shown a second time
#: A method keeps its colour in all figures; its variants share it and differ by their marker.
FAMILIES = ("FedProto", "FedAvg", "FeSEM", "FedProx", "FedPer", "FedRep", "Local")
MARKERS = "osD^vP"
#: Ten classes' colours (Paul Tol's "muted" and a grey), which the colour-blind can tell apart.
CLASSES = (
    *("#332288", "#88ccee", "#44aa99", "#117733", "#999933"),
    *("#ddcc77", "#cc6677", "#882255", "#aa4499", "#999999"),
)
MOST_DRAWN = 1500  # images a panel of t-SNE
MOST_MEASURED = 2000  # samples of a silhouette


@dataclass(frozen=True)
class Picture:
    rows: Callable[[Cells, Path], Rows]
    canvas: Callable[[Rows], Canvas]


def draw(name: str, found: dict[str, Any], out: Path, runs: Path) -> Iterator[Path]:
    """Write a target's figure and its numbers; `runs` holds the folders of its runs. Nothing, where all broke down."""
    picture = _picture(name)
    cells = [cell for cell in found["cells"] if cell["runs"]]
    rows = picture.rows(cells, runs)
    if not rows:
        return
    yield _written(out / f"{name}.csv", _csv(rows))
    if name == "fig-tsne":
        yield _written(
            out / f"{name}-measures.json",
            json.dumps({"measures": _all_measures(cells, runs)}).encode(),
        )
    yield _written(out / f"{name}.png", _png(picture.canvas, rows, found["title"]))


def _picture(name: str) -> Picture:
    known = {
        "fig-shots": Picture(shots_rows, _shots),
        "fig-lambda": Picture(lambda_rows, _lambda),
        "fig-tsne": Picture(tsne_rows, _tsne),
        "study-travel": Picture(travel_rows, _travel),
        "study-before": Picture(before_rows, _before),
    }
    return known.get(name) or (
        Picture(table_rows, _table) if name.startswith("table-") else Picture(dot_rows, _dots)
    )


# --- what all figures share


def _written(path: Path, content: bytes) -> Path:
    write_atomically(path, content)
    return path


def _csv(rows: Rows) -> bytes:
    header = list(rows[0])
    cells = [[row.get(name, "") for name in header] for row in rows]
    return write_csv([header, *cells]).encode()


def _png(canvas_of: Callable[[Rows], Canvas], rows: Rows, title: str) -> bytes:
    file = io.BytesIO()
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever a person's own style is
        mpl.rcParams.update(STYLE)
        canvas = canvas_of(rows)
        canvas.suptitle(textwrap.fill(title, 102), x=0.01, ha="left", fontsize=11)
        canvas.savefig(file, format="png", dpi=200, transparent=False, facecolor="white")
    return file.getvalue()


def _panels(
    height: float, columns: int = 1, rows: int = 1, **how: Any
) -> tuple[Canvas, list[Axes]]:
    canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
    return canvas, list(canvas.subplots(rows, columns, squeeze=False, **how).flat)


def _family(method: str) -> str:
    return method.split(",")[0].removesuffix("-mh")


def _colour(method: str) -> str:
    family = _family(method)
    return COLOURS[FAMILIES.index(family)] if family in FAMILIES else COLOURS[-1]


def _marker(method: str, methods: Sequence[str]) -> str:
    """Variants of a method follow each other through the markers."""
    variants = [each for each in dict.fromkeys(methods) if _family(each) == _family(method)]
    return MARKERS[variants.index(method) % len(MARKERS)]


def _legend(canvas: Canvas, entries: Sequence[tuple[Any, str]], columns: int = 4) -> None:
    handles, labels = zip(*entries, strict=True)
    close: dict[str, Any] = (
        {"columnspacing": 0.7, "handletextpad": 0} if columns > 6 else {"columnspacing": 1.6}
    )
    canvas.legend(
        handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), **close
    )


def _bar(row: dict[str, Any], name: str = "interval") -> float | None:
    """The half-width of an interval; one seed has none."""
    return row[name] if row[name] != "" else None


def _of_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean and interval of a number a seed."""
    found = summary([[value] for value in values])
    return {"mean": found["mean"], "interval": found.get("interval", "")}


def _score(cell: dict[str, Any]) -> dict[str, Any]:
    """What the method predicts by, and how well."""
    found = cell["accuracy"][cell["score"]]
    return {"accuracy": cell["score"], "mean": found["mean"], "interval": found.get("interval", "")}


def limits(means: Sequence[float], halves: Sequence[float]) -> tuple[float, float]:
    """The axis of accuracies: intervals of few seeds may be so wide that they would leave the means no room."""
    room = max(0.4 * (max(means) - min(means)), 0.005)
    low = min(mean - half for mean, half in zip(means, halves, strict=True))
    high = max(mean + half for mean, half in zip(means, halves, strict=True))
    low, high = max(low, min(means) - room, 0), min(high, max(means) + room, 1)
    margin = 0.06 * (high - low) or 0.01
    return low - margin, high + margin


def _values(rows: Rows, name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


# --- a table: accuracy against bytes


def table_rows(cells: Cells, _: Path) -> Rows:
    """A row a method, over all columns, and another where its head gains by being limited to the client's classes.

    A method that was run in some columns only is left out: their mean is no match for the others'.
    """
    columns = {cell["column"] for cell in cells}
    methods = dict.fromkeys(cell["method"] for cell in cells)
    groups = [[cell for cell in cells if cell["method"] == method] for method in methods]
    rows = [
        row
        for group in groups
        if {cell["column"] for cell in group} == columns
        for row in _table_rows(group)
    ]
    best = front([(row["bytes_up"], row["mean"]) for row in rows])
    return [row | {"on_front": number in best} for number, row in enumerate(rows)]


def _table_rows(group: Cells) -> Iterator[dict[str, Any]]:
    """The rows of one method."""
    method, score = group[0]["method"], group[0]["score"]
    sent = statistics.fmean(cell["communication"]["bytes_up_per_round"] for cell in group)
    papers = [cell["paper"] for cell in group if cell["paper"]]
    first = {"method": method, "accuracy": score} | _over_columns(group, score)
    yield first | {"bytes_up": sent} | _paper(papers if len(papers) == len(group) else [])
    own = f"{score}_own"
    if all(own in run["accuracy"] for cell in group for run in cell["runs"]):
        limited = _over_columns(group, own)
        if limited["mean"] - first["mean"] > VISIBLE:
            yield {"method": method, "accuracy": own} | limited | {"bytes_up": sent} | _paper([])


def _over_columns(group: Cells, key: str) -> dict[str, Any]:
    """The mean over columns, and its interval over the seeds that all of them have."""
    seeds = [seed for seed in group[0]["seeds"] if all(seed in cell["seeds"] for cell in group)]
    means = [
        {run["seed"]: statistics.fmean(run["accuracy"][key]) for run in cell["runs"]}
        for cell in group
    ]
    mean = statistics.fmean(cell["accuracy"][key]["mean"] for cell in group)
    over = (
        _of_seeds([statistics.fmean(each[seed] for each in means) for seed in seeds])
        if seeds
        else {"interval": ""}
    )
    return {"mean": mean, "interval": over["interval"], "columns": len(group), "seeds": len(seeds)}


def _paper(papers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not papers:
        return {"paper": "", "paper_bytes": ""}
    return {
        "paper": statistics.fmean(paper["accuracy"] for paper in papers) / 100,
        "paper_bytes": VALUE * statistics.fmean(paper["params_per_round"] for paper in papers),
    }


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which (bytes, accuracy) no other beats with as few bytes or fewer; the cheapest first."""
    best: list[int] = []
    for number in sorted(range(len(points)), key=lambda n: (points[n][0], -points[n][1])):
        if not best or points[number][1] > points[best[-1]][1]:
            best.append(number)
    return best


@dataclass(frozen=True)
class Point:
    """A mark on the map: x is the logarithm of bytes, with nothing at the left edge."""

    x: float
    y: float
    label: str
    row: dict[str, Any]
    paper: bool = False


class Scale:
    """A logarithmic axis of bytes with a place for zero, left of a break."""

    def __init__(self, sent: Sequence[float]) -> None:
        logs = [math.log10(each) for each in sent if each] or [0.0]
        self.low, self.high = min(logs), max(logs)
        self.zero = self.low - max(0.22 * (self.high - self.low), 0.3) if 0 in sent else None
        self.left = self.low if self.zero is None else self.zero
        self.span = max(self.high - self.left, 0.5)

    def __call__(self, sent: float) -> float:
        return math.log10(sent) if sent else self.left

    def ticks(self) -> list[float]:
        """Round numbers of bytes; more of them where the axis spans little."""
        digits = (1, 2, 5) if self.high - self.low < 2.3 else (1,)
        powers = range(math.floor(self.low) - 1, math.ceil(self.high) + 1)
        logs = [math.log10(digit) + power for power in powers for digit in digits]
        margin = 0.05 * self.span
        return [log for log in logs if self.low - margin <= log <= self.high + margin]


def _table(rows: Rows) -> Canvas:
    papers = [row for row in rows if row["paper"] != ""]
    scale = Scale([row["bytes_up"] for row in rows] + [row["paper_bytes"] for row in papers])
    canvas, (axes,) = _panels(5.2)
    ours = [Point(scale(row["bytes_up"]), row["mean"], _label(row), row) for row in rows]
    theirs = {
        row["method"]: Point(scale(row["paper_bytes"]), row["paper"], row["method"], row, True)
        for row in papers
    }
    theirs = {
        name: point for name, point in theirs.items() if name != "FedProto, released"
    }  # FedProto's again
    _frame(axes, scale, [*ours, *theirs.values()])
    entries = [
        (_draw_front(axes, [point for point in ours if point.row["on_front"]]), "Pareto front")
    ]
    moved = _beside([*ours, *theirs.values()], 0.02 * scale.span, 0.024 * np.ptp(axes.get_ylim()))
    entries += _draw_papers(axes, [point for point in moved if point.paper], scale)
    _draw_ours(axes, [point for point in moved if not point.paper], scale)
    _legend(canvas, [*_keys(ours), *entries])
    axes.set_title(_mean_of(rows[0]), loc="left", fontsize=8.5, color=PALE)
    return canvas


def _mean_of(row: dict[str, Any]) -> str:
    settings, seeds = row["columns"], row["seeds"]
    over = (
        f"mean over {f'{settings} settings and ' if settings > 1 else ''}{seeds} seeds"
        if seeds > 1
        else "one seed"
    )
    bars = "; bars: its 95% interval" if seeds > 1 else ""
    return f"{over}{bars}; marks that would hide each other stand side by side"


def _label(row: dict[str, Any]) -> str:
    return row["method"] + (", own classes" if row["accuracy"].endswith("_own") else "")


def _frame(axes: Axes, scale: Scale, points: Sequence[Point]) -> None:
    """Limits, ticks and the break of the axis: all places of letters depend on them."""
    halves = [0.0 if point.paper else _bar(point.row) or 0.0 for point in points]
    axes.set_ylim(limits([point.y for point in points], halves))
    axes.set_xlim(scale.left - 0.05 * scale.span, scale.high + 0.05 * scale.span)
    ticks = {tick: size(10**tick) for tick in scale.ticks()}
    if scale.zero is not None:
        ticks[scale.zero] = "0"
        middle = scale.zero + 0.55 * (scale.low - scale.zero)
        look: dict[str, Any] = {
            "boxstyle": "square,pad=0.05",
            "facecolor": "white",
            "edgecolor": "none",
        }
        axes.text(
            middle,
            0,
            "//",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="center",
            bbox=look,
            fontsize=10,
        )
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set(xlabel="bytes uploaded a round, by all clients", ylabel="test accuracy, %")
    percent(axes)


def _draw_front(axes: Axes, points: Sequence[Point]) -> Line2D:
    """Steps: what is to be had for so many bytes."""
    points = sorted(points, key=lambda point: point.x)
    x, y = [point.x for point in points], [point.y for point in points]
    (line,) = axes.step(
        [*x, axes.get_xlim()[1]],
        [*y, y[-1]],
        where="post",
        color=COLOURS[0],
        linewidth=5,
        alpha=0.16,
        zorder=1,
    )
    return line


def _draw_papers(axes: Axes, points: Sequence[Point], scale: Scale) -> list[tuple[Line2D, str]]:
    """Crosses, named on their left; whoever sends nothing has no room there."""
    for side in (-1, 1):
        some = [point for point in points if (side > 0) == (point.x == scale.zero)]
        _name(axes, some, scale, side, PALE, 7.5)
    if not points:
        return []
    x, y = [point.x for point in points], [point.y for point in points]
    (line,) = axes.plot(x, y, "x", color=PALE, markersize=5, markeredgewidth=1.2, zorder=2)
    return [(line, "in the paper")]


def _draw_ours(axes: Axes, points: Sequence[Point], scale: Scale) -> None:
    _name(axes, points, scale, 1, INK, 8.5)
    methods = sorted(point.row["method"] for point in points)
    for point in points:
        colour = _colour(point.row["method"])
        hollow = point.row["accuracy"].endswith("_own")
        look: dict[str, Any] = {
            "color": colour,
            "markerfacecolor": "white" if hollow else colour,
            "zorder": 4,
        }
        axes.errorbar(
            point.x,
            point.y,
            _bar(point.row),
            fmt=_marker(point.row["method"], methods),
            markersize=7,
            elinewidth=1.4,
            **look,
        )


def _beside(points: Sequence[Point], step: float, near: float) -> list[Point]:
    """Points that would hide each other stand side by side."""
    moved: list[Point] = []
    for cluster in clusters(points, 2 * step, lambda point: point.x):
        for heap in clusters(cluster, near, lambda point: point.y):
            heap = sorted(heap, key=lambda point: point.x)
            shifts = [(number - (len(heap) - 1) / 2) * step for number in range(len(heap))]
            moved += [
                replace(point, x=point.x + shift) for point, shift in zip(heap, shifts, strict=True)
            ]
    return moved


def clusters(points: Sequence[Any], gap: float, of: Callable[[Any], float]) -> list[list[Any]]:
    """Groups of which each member has a neighbour no farther than the gap."""
    found: list[list[Any]] = []
    for point in sorted(points, key=of):
        if found and of(point) - of(found[-1][-1]) <= gap:
            found[-1].append(point)
        else:
            found.append([point])
    return found


def _name(
    axes: Axes, points: Sequence[Point], scale: Scale, side: int, colour: str, letters: float
) -> None:
    """Labels in a column beside each cluster, as high as their points where that leaves them legible."""
    line = letters / 8.5 * 0.04 * np.ptp(axes.get_ylim())
    for cluster in clusters(points, 0.07 * scale.span, lambda point: point.x):
        x = side * max(side * point.x for point in cluster) + side * 0.035 * scale.span
        for point, y in zip(cluster, spread([point.y for point in cluster], line), strict=True):
            own = PALE if colour == PALE else _colour(point.row["method"])
            axes.annotate(
                point.label,
                (point.x, point.y),
                (x, y),
                ha="left" if side > 0 else "right",
                va="center",
                color=colour,
                fontsize=letters,
                bbox={
                    "boxstyle": "square,pad=0.05",
                    "facecolor": "white",
                    "edgecolor": "none",
                    "alpha": 0.85,
                },
                arrowprops={
                    "arrowstyle": "-",
                    "color": own,
                    "linewidth": 0.7,
                    "relpos": (side < 0, 0.5),
                },
                annotation_clip=False,
                zorder=2.5,
            )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """The places nearest to the wanted ones, in the same order, that lie a gap apart."""
    from sklearn.isotonic import isotonic_regression

    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(order))
    placed = np.empty(len(order))
    placed[order] = isotonic_regression(np.asarray(wanted, float)[order] - steps) + steps
    return placed.tolist()


def _keys(points: Sequence[Point]) -> list[tuple[Line2D, str]]:
    look: dict[str, Any] = {"marker": "o", "linestyle": "", "color": INK, "markersize": 6}
    keys = [(Line2D([], [], **look), "choosing among all classes")]
    if any(point.row["accuracy"].endswith("_own") for point in points):
        keys.append((Line2D([], [], markerfacecolor="white", **look), "limited to own classes"))
    return keys


# --- accuracy against images a class


def shots_rows(cells: Cells, _: Path) -> Rows:
    """A row a method and k, with what it has lost against the largest k, in points."""
    rows = [
        {"method": cell["method"], "k": _number(cell["column"])} | _score(cell) for cell in cells
    ]
    most = max((row["k"] for row in rows), default=0)
    full = {row["method"]: row["mean"] for row in rows if row["k"] == most}
    return [
        row | {"lost": 100 * (full[row["method"]] - row["mean"])}
        for row in rows
        if row["method"] in full
    ]


def _number(name: str) -> float:
    """The value in `k = 5`, `lambda = 0.5`."""
    return float(name.split("=")[1])


def _shots(rows: Rows) -> Canvas:
    canvas, (left, right) = _panels(3.9, 2, width_ratios=(3, 2))
    entries = []
    for number, method in enumerate(_values(rows, "method")):
        mine = sorted((row for row in rows if row["method"] == method), key=lambda row: row["k"])
        look: dict[str, Any] = {"color": _colour(method), "marker": MARKERS[number % len(MARKERS)]}
        entries.append((_line(left, mine, "k", **look), method))
        right.plot([row["k"] for row in mine], [row["lost"] for row in mine], **look)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(ks := sorted(_values(rows, "k")), _apart(ks))
        axes.set_xticks([], minor=True)
        axes.set_xlabel("k, images a class")
    percent(left)
    left.set(ylabel="test accuracy, %", title="accuracy")
    right.set(ylabel="points", title=f"lost against k = {max(ks):g}")
    _legend(canvas, entries)
    return canvas


def _apart(numbers: Sequence[float]) -> list[str]:
    """Labels on a logarithmic axis, without those that would touch the next one."""
    labels, last = [], math.inf
    for number in reversed(numbers):
        labels.append(f"{number:g}" if last / number > 1.3 else "")
        last = number if labels[-1] else last
    return labels[::-1]


def _line(axes: Axes, rows: Rows, x: str, name: str = "", most: float = 1.0, **look: Any) -> Line2D:
    """Means with a band, the 95% interval over seeds, as far as such values can be."""
    at, means = [row[x] for row in rows], np.array([row[f"{name}mean"] for row in rows])
    (line,) = axes.plot(at, means, **look)
    halves = [_bar(row, f"{name}interval") for row in rows]
    if None not in halves:
        half = np.array(halves, float)
        low, high = np.clip(means - half, 0, most), np.clip(means + half, 0, most)
        axes.fill_between(at, low, high, color=look["color"], alpha=0.15, linewidth=0)
    return line


# --- accuracy and distance against lambda


def lambda_rows(cells: Cells, _: Path) -> Rows:
    """A row a lambda; without one the loss has no distance in it."""
    return [row for cell in cells if (row := _lambda_row(cell, _number(cell["method"])))]


def _lambda_row(cell: dict[str, Any], lam: float) -> dict[str, Any]:
    row: dict[str, Any] = {"lambda": lam}
    for key in ("prototype", "head"):
        found = cell["accuracy"][key]
        row |= {f"{key}_mean": found["mean"], f"{key}_interval": found.get("interval", "")}
    away = (
        _of_seeds([run["loss"]["regulariser"] / lam for run in cell["runs"]])
        if lam
        else {"mean": "", "interval": ""}
    )
    return row | {"distance_mean": away["mean"], "distance_interval": away["interval"]}


def _lambda(rows: Rows) -> Canvas:
    rows = sorted(rows, key=lambda row: row["lambda"])
    canvas, (left, right) = _panels(3.7, 2)
    entries = [
        (
            _line(left, rows, "lambda", "prototype_", color=COLOURS[0], marker="o"),
            "by the nearest prototype",
        ),
        (
            _line(left, rows, "lambda", "head_", color=COLOURS[1], marker="s", linestyle="--"),
            "by the head",
        ),
    ]
    apart = [row for row in rows if row["distance_mean"] != ""]
    if apart:
        _line(right, apart, "lambda", "distance_", math.inf, color=COLOURS[2], marker="D")
    for axes in (left, right):
        axes.set(xlabel="lambda", xlim=left.get_xlim())
    percent(left)
    left.set(ylabel="test accuracy, %", title="accuracy")
    right.set(
        ylabel="mean in the last round", title="distance to the global prototype", ylim=(0, None)
    )
    _legend(canvas, entries)
    return canvas


# --- where embeddings lie


def folder(runs: Path, cell: dict[str, Any]) -> Path:
    """Where the first run of a cell lies."""
    return runs / cell_name(cell["method"], cell["column"], cell["seeds"][0])


def _embeddings(cells: Cells, runs: Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Each method with the embeddings of its first seed, where there are any."""
    for cell in cells:
        path = folder(runs, cell) / "embeddings.npz"
        if path.exists():
            with np.load(path) as file:
                yield cell["method"], dict(file)


def _some(count: int, most: int) -> np.ndarray:
    """So many of the numbers below a count, the same in every run."""
    return np.sort(np.random.default_rng(0).permutation(count)[:most])


def tsne_rows(cells: Cells, runs: Path) -> Rows:
    return [row for method, found in _embeddings(cells, runs) for row in _flattened(method, found)]


def _flattened(method: str, found: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """A row a point: images, the clients' means and the global prototypes, laid out together."""
    keep = _some(len(found["x"]), MOST_DRAWN)
    known = np.flatnonzero(found["known"] > 0) if "known" in found else np.empty(0, int)
    parts = [
        found["x"][keep],
        found["local"],
        *([found["prototypes"][known]] if len(known) else []),
    ]
    kinds = ["image"] * len(keep) + ["local"] * len(found["local"]) + ["global"] * len(known)
    classes = np.concatenate([found["y"][keep], found["local_y"], known]).tolist()
    clients = np.concatenate([found["client"][keep], found["local_client"]]).tolist() + [""] * len(
        known
    )
    places = _two_dimensions(np.concatenate(parts)).tolist()
    for kind, label, client, (x, y) in zip(kinds, classes, clients, places, strict=True):
        yield {"method": method, "kind": kind, "class": label, "client": client, "x": x, "y": y}


def _two_dimensions(points: np.ndarray) -> np.ndarray:
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    perplexity = min(30.0, (len(points) - 1) / 3)
    with threadpool_limits(1):  # sums depend on the number of threads
        return TSNE(2, init="pca", perplexity=perplexity, random_state=0).fit_transform(points)


def _tsne(rows: Rows) -> Canvas:
    methods = _values(rows, "method")
    across = min(2, len(methods))
    down = math.ceil(len(methods) / across)
    canvas, panels = _panels(3.6 * down + 0.9, across, down)
    for axes, method in zip(panels, methods, strict=False):
        for label in sorted(_values(rows, "class")):
            mine = [row for row in rows if (row["method"], row["class"]) == (method, label)]
            _draw_class(axes, mine, label)
            _name_class(axes, [row for row in mine if row["kind"] != "image"], label)
        axes.set(title=method, xticks=[], yticks=[])
        axes.spines[:].set(visible=True, color=GRID)
        axes.margins(0.08)
    for axes in panels[len(methods) :]:
        axes.set_axis_off()
    _legend(canvas, _class_keys(rows), 13)
    return canvas


#: Size, marker, width of the dark edge and order of what is drawn.
KINDS: dict[str, tuple[float, str, float, int]] = {
    "image": (7, "o", 0, 1),
    "local": (40, "o", 0.9, 2),
    "global": (260, "*", 1.1, 3),
}


def _draw_class(axes: Axes, rows: Rows, label: int) -> None:
    for kind, (area, marker, edge, order) in KINDS.items():
        some = [row for row in rows if row["kind"] == kind]
        look: dict[str, Any] = {
            "s": area,
            "marker": marker,
            "linewidths": edge,
            "edgecolors": INK,
            "zorder": order,
        }
        look["alpha"] = 0.7 if kind == "image" else 1
        axes.scatter(
            [row["x"] for row in some],
            [row["y"] for row in some],
            color=CLASSES[label % 10],
            **look,
        )


def _name_class(axes: Axes, means: Rows, label: int) -> None:
    """The class above the highest of its means: ten colours are many."""
    if means:
        top = max(means, key=lambda row: row["y"])
        how: dict[str, Any] = {
            "textcoords": "offset points",
            "ha": "center",
            "va": "bottom",
            "weight": "bold",
        }
        axes.annotate(f"{label}", (top["x"], top["y"]), (0, 6), fontsize=10, zorder=4, **how)


def _class_keys(rows: Rows) -> list[tuple[Line2D, str]]:
    dots: dict[str, Any] = {"marker": "o", "linestyle": ""}
    keys = [
        (Line2D([], [], color=CLASSES[label % 10], markersize=6, **dots), f"{label}")
        for label in sorted(_values(rows, "class"))
    ]
    edged: dict[str, Any] = {"linestyle": "", "markerfacecolor": "white", "markeredgecolor": INK}
    keys.append((Line2D([], [], marker="o", markersize=7, **edged), "a client's class mean"))
    if any(row["kind"] == "global" for row in rows):
        keys.append((Line2D([], [], marker="*", markersize=12, **edged), "global prototype"))
    return keys


def _all_measures(cells: Cells, runs: Path) -> dict[str, dict[str, float | None]]:
    return {
        method: measures(found["x"], found["y"], found["client"])
        for method, found in _embeddings(cells, runs)
    }


def measures(x: np.ndarray, y: np.ndarray, client: np.ndarray) -> dict[str, float | None]:
    """How embeddings lie, in their own space: by class, by client within a class, and the same class far from home."""
    keep = _some(len(x), MOST_MEASURED)
    x, y, client = x[keep], y[keep], client[keep]
    within = [_silhouette(x[y == label], client[y == label]) for label in np.unique(y)]
    there = [value for value in within if value is not None]
    return {
        "silhouette_class": _silhouette(x, y),
        "silhouette_client_within_class": statistics.fmean(there) if there else None,
        "same_class_to_other_class": _ratio(x, y, client),
    }


def _silhouette(x: np.ndarray, labels: np.ndarray) -> float | None:
    """None where there is but one group, or none but single samples."""
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(x, labels)) if 1 < len(np.unique(labels)) < len(x) else None


def _ratio(x: np.ndarray, y: np.ndarray, client: np.ndarray) -> float | None:
    """Mean distance of samples of one class at different clients, over that of samples of different classes."""
    apart = cdist(x, x)
    same = y[:, None] == y
    abroad = same & (client[:, None] != client)
    return (
        float(apart[abroad].mean() / apart[~same].mean())
        if abroad.any() and not same.all()
        else None
    )


# --- prototypes without a member's own share


def travel_rows(cells: Cells, _: Path) -> Rows:
    """Two rows a method, with and without the client's own share of the prototypes."""
    return [
        {"method": cell["method"], "prototypes": share}
        | _of_seeds([_over_clients(run, share) for run in cell["runs"]])
        | {"covered": statistics.fmean(_over_clients(run, "covered") for run in cell["runs"])}
        for cell in cells
        if all("travel" in run for run in cell["runs"])
        for share in ("with_own", "without_own")
    ]


def _over_clients(run: dict[str, Any], what: str) -> float:
    return statistics.fmean(client[what] for client in run["travel"])


def _travel(rows: Rows) -> Canvas:
    methods = _values(rows, "method")
    canvas, (axes,) = _panels(1.3 + 0.55 * len(methods))
    shares = {"with_own": "with the client's own share", "without_own": "without it"}
    entries = []
    for number, (share, label) in enumerate(shares.items()):
        some = [row for row in rows if row["prototypes"] == share]
        at = np.arange(len(some)) + (number - 0.5) * 0.36
        how: dict[str, Any] = {
            "color": COLOURS[number],
            "xerr": [_bar(row) or 0 for row in some],
            "ecolor": INK,
        }
        entries.append((axes.barh(at, [row["mean"] for row in some], 0.34, **how), label))
        for y, row in zip(at, some, strict=True):
            axes.text(
                0.01,
                y,
                f"{100 * row['mean']:.1f}",
                va="center",
                color="white",
                fontsize=8,
                weight="bold",
            )
    axes.set_yticks(range(len(methods)), methods)
    axes.set(
        xlim=(0, 1.01), xlabel="accuracy by the nearest prototype among the client's own classes, %"
    )
    _rows_down(axes, len(methods))
    _legend(canvas, entries)
    return canvas


def _rows_down(axes: Axes, count: int) -> None:
    axes.set_ylim(count - 0.4, -0.6)
    axes.grid(False, axis="y")
    percent(axes, "x")


# --- before anybody trained


def before_rows(cells: Cells, _: Path) -> Rows:
    """A row for each way to predict with the weights a method starts from."""
    return [
        {"method": cell["method"], "column": key.replace("_own", ", own classes")}
        | {"mean": found["mean"], "interval": found.get("interval", "")}
        for cell in cells
        for key, found in cell.get("before", {}).items()
    ]


def _before(rows: Rows) -> Canvas:
    canvas = _dots(rows)
    (axes,) = canvas.axes
    axes.axvline(PAPERS_START, color=PALE, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    place: dict[str, Any] = {
        "transform": axes.get_xaxis_transform(),
        "ha": "center",
        "va": "bottom",
    }
    axes.text(
        PAPERS_START, 1.0, f"the paper: {100 * PAPERS_START:.2f}%", color=PALE, fontsize=8, **place
    )
    return canvas


# --- a row a setting


def dot_rows(cells: Cells, _: Path) -> Rows:
    return [{"method": cell["method"], "column": cell["column"]} | _score(cell) for cell in cells]


def _dots(rows: Rows) -> Canvas:
    methods, columns = _values(rows, "method"), _values(rows, "column")
    canvas, (axes,) = _panels(
        1.2 + 0.27 * len(methods) + 0.25 * (len(columns) > 1) + 0.3 * (len(columns) > 2)
    )
    shifts = [
        (number - (len(columns) - 1) / 2) * 0.56 / len(columns) for number in range(len(columns))
    ]
    entries = [
        (
            _dotted(axes, [row for row in rows if row["column"] == column], methods, shift, number),
            column,
        )
        for number, (column, shift) in enumerate(zip(columns, shifts, strict=True))
    ]
    axes.set_xlim(limits([row["mean"] for row in rows], [_bar(row) or 0 for row in rows]))
    axes.hlines(range(len(methods)), *axes.get_xlim(), color=GRID, linewidth=0.5, zorder=0)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_xlabel("test accuracy, %")
    _rows_down(axes, len(methods))
    if len(columns) > 1:
        _legend(canvas, entries)
    else:
        _write_means(axes, rows, methods)
    return canvas


def _dotted(axes: Axes, rows: Rows, methods: Sequence[str], shift: float, number: int) -> Any:
    """One column's dots, each in its method's row, and a line down from the default's."""
    at = [methods.index(row["method"]) + shift for row in rows]
    for row in rows:
        if row["method"] == "default":
            axes.axvline(
                row["mean"], color=COLOURS[number], linewidth=0.9, linestyle=(0, (4, 3)), zorder=1
            )
    look: dict[str, Any] = {
        "fmt": MARKERS[number],
        "color": COLOURS[number],
        "markersize": 6,
        "elinewidth": 1.4,
    }
    return axes.errorbar(
        [row["mean"] for row in rows], at, xerr=[_bar(row) or 0 for row in rows], zorder=3, **look
    )


def _write_means(axes: Axes, rows: Rows, methods: Sequence[str]) -> None:
    """The numbers, on the right: one row that fails makes the others' differences small."""
    for row in rows:
        half = _bar(row)
        text = f"{100 * row['mean']:.2f}" + ("" if half is None else f" ± {100 * half:.2f}")
        place = (1.01, methods.index(row["method"]))
        axes.text(*place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
