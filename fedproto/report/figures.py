"""The figures: each as SVG for the page (light and dark), as PNG, and its numbers as CSV."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fedproto.report.cells import write_csv
from fedproto.report.read import WAYS, Group, Run, Spread, mean_of, same_task

#: Ink on a light page; exchanged for the other on a dark one, which is why no figure has a background.
INK, INK_ON_DARK = "#1b1f24", "#e6e8eb"
GRID = "#8a919966"  # between the two
#: Okabe and Ito's colours, which the colour-blind can tell apart; the ink for their black, grey for a yellow that white
#: paper swallows.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK, "#999999")
MARKERS = "os^DvPX*<>ph"
WIDTH = 4.4  # inches: letters keep their size on a telephone, and two figures fit beside each other on a desk
LONGEST = 40  # letters of a label
FEW_CLIENTS = 40  # that get a row and a name each
MOST_POINTS = 1000  # t-SNE of more takes a while
MOST_PANELS = 12  # of one kind; the CSV files hold all

STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "text.parse_math": False,  # a class may be called $
    "axes.formatter.use_mathtext": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "fedproto",  # the same runs give the same file
    "savefig.transparent": True,
} | dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
)


@dataclass(frozen=True)
class Figure:
    name: str  # of its files
    title: str
    caption: str
    alt: str
    svg: str
    png: bytes
    csv: str

    @property
    def dark(self) -> str:
        return self.svg.replace(INK, INK_ON_DARK)


Section = tuple[
    str, list[Figure], list[str]
]  # its heading, its figures, and sentences on what is left out


def draw(groups: Sequence[Group]) -> list[Section]:
    """All figures that these runs allow, by section."""
    from fedproto.report.changes import changes

    with mpl.rc_context():
        mpl.rcdefaults()  # whatever a person's own style is
        mpl.rcParams.update(STYLE)
        return [
            ("Accuracy and loss", *_curves(groups)),
            ("Clients", *_clients(groups)),
            ("Classes of the clients", *_coverage(groups)),
            ("Prototypes", *_maps(groups)),
            *(
                [("Members since training", *changes(groups))]
                if any(each.first.since for each in groups)
                else []
            ),
            ("Accuracy and traffic", *_traffic(groups)),
        ]


# --- what all figures share


def finish(
    canvas: Canvas, name: str, title: str, caption: str, alt: str, table: Iterable[Sequence[Any]]
) -> Figure:
    """`table` is the header, then the rows."""
    svg, png = io.StringIO(), io.BytesIO()
    canvas.savefig(svg, format="svg", metadata={"Date": None})
    canvas.savefig(png, format="png", dpi=200, transparent=False, facecolor="white")
    drawn = svg.getvalue()
    return Figure(
        name, title, caption, alt, drawn[drawn.index("<svg") :], png.getvalue(), write_csv(table)
    )


def panel(height: float, rows_of_legend: int = 0) -> tuple[Canvas, Axes]:
    canvas = Canvas(figsize=(WIDTH, height + 0.19 * rows_of_legend), layout="constrained")
    return canvas, canvas.add_subplot()


def plain(name: str, longest: int = LONGEST) -> str:
    """A name from a file as one short line of letters that can be drawn."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
    line = line if len(line) <= longest else line[: longest - 1] + "…"
    return (
        f" {line}" if line.startswith("_") else line
    )  # matplotlib passes over labels that begin so


def colour(position: int) -> str:
    return COLOURS[position % len(COLOURS)]


def marker(position: int) -> str:
    return MARKERS[(position + position // len(COLOURS)) % len(MARKERS)]


def legend(canvas: Canvas, entries: Sequence[tuple[Line2D, str]]) -> None:
    canvas.legend(
        [line for line, _ in entries],
        [plain(label) for _, label in entries],
        loc="outside lower center",
        ncols=_columns([label for _, label in entries]),
        handlelength=2.6,
        columnspacing=1.2,
    )


def _columns(labels: Sequence[str]) -> int:
    longest = max(len(plain(label)) for label in labels)
    return min(len(labels), 3 if longest <= 12 else 2 if longest <= 24 else 1)


def _rows(labels: Sequence[str]) -> int:
    return math.ceil(len(labels) / _columns(labels)) if labels else 0


def percent(axes: Axes, axis: str = "y") -> None:
    getattr(axes, f"{axis}axis").set_major_formatter(
        FuncFormatter(lambda share, _: f"{100 * share:g}")
    )


def _seeds(groups: Sequence[Group]) -> str:
    return (
        "; mean over seeds where there are several"
        if any(len(each.runs) > 1 for each in groups)
        else ""
    )


# --- accuracy and loss against rounds


Curve = list[tuple[int, Spread]]


def _curves(groups: Sequence[Group]) -> tuple[list[Figure], list[str]]:
    figures = [
        _accuracy_curves(groups, "accuracy", "Accuracy over all classes", own=False),
        _accuracy_curves(groups, "accuracy-own", "Accuracy among a client's own classes", own=True),
        *(_loss_curves(groups, term) for term in _terms(groups)),
    ]
    return figures, []


def _accuracy_curves(groups: Sequence[Group], name: str, title: str, own: bool) -> Figure:
    ways = [way for way in WAYS if way.endswith("_own") == own]
    series = [
        (position, way) for position, each in enumerate(groups) for way in each.ways if way in ways
    ]
    labels = [_named(groups, position, way) for position, way in series]
    canvas, axes = panel(2.9, _rows(labels))
    lines = [
        _line(
            axes,
            position,
            _accuracy(groups[position], way),
            way.startswith("prototype"),
            len(series),
        )
        for position, way in series
    ]
    axes.set(title=title, xlabel="round", ylabel="accuracy, %")
    percent(axes)
    legend(canvas, list(zip(lines, labels, strict=True)))
    caption = (
        f"Lines: mean over clients{_seeds(groups)}; bands: ± one standard deviation over clients"
    )
    dashes = (
        "; dashed: by the nearest prototype."
        if any(way.startswith("prototype") for _, way in series)
        else "."
    )
    ends = [
        f"{label} {groups[p].accuracy(way).mean:.1%}"
        for (p, way), label in zip(series, labels, strict=True)
    ]
    alt = f"{title} against rounds. In the end: {', '.join(ends)}."
    return finish(
        canvas, name, title, caption + dashes, alt, _curve_table(groups, "accuracy", ways)
    )


def _named(groups: Sequence[Group], position: int, way: str) -> str:
    """A run's label, with the way to predict where it has more than one."""
    short = way.removesuffix("_own")
    several = "prototype" in groups[position].ways
    return f"{groups[position].label}, {short}" if several else groups[position].label


def _line(axes: Axes, position: int, curve: Curve, dashed: bool, among: int) -> Line2D:
    """A curve with its band; the more there are, the paler the bands."""
    rounds, means = [number for number, _ in curve], [spread.mean for _, spread in curve]
    every = max(1, len(rounds) // 8)
    look: dict[str, Any] = {
        "linestyle": (0, (4, 2)) if dashed else "-",
        "markevery": every,
        "clip_on": len(rounds) > 1,
    }
    (line,) = axes.plot(rounds, means, color=colour(position), marker=marker(position), **look)
    if all(spread.std is not None for _, spread in curve):
        low, high = ([s.mean + sign * (s.std or 0) for _, s in curve] for sign in (-1, 1))
        axes.fill_between(
            rounds,
            low,
            high,
            color=colour(position),
            alpha=max(0.05, 0.2 / among**0.5),
            linewidth=0,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return line


def _accuracy(group: Group, way: str) -> Curve:
    return _over_seeds(
        group,
        lambda run: [(each.number, each.accuracy[way]) for each in run.rounds if each.accuracy],
    )


def _over_seeds(group: Group, curve: Callable[[Run], Curve]) -> Curve:
    found: dict[int, list[Spread]] = {}
    for run in group.runs:
        for number, spread in curve(run):
            found.setdefault(number, []).append(spread)
    return [(number, mean_of(spreads)) for number, spreads in sorted(found.items())]


def _terms(groups: Sequence[Group]) -> list[str]:
    """The terms of the loss that are anything but 0 somewhere."""
    rounds = [each for group in groups for run in group.runs for each in run.rounds]
    return list(
        dict.fromkeys(term for each in rounds for term, spread in each.loss.items() if spread.mean)
    )


def _loss_curves(groups: Sequence[Group], term: str) -> Figure:
    has = [
        p
        for p, each in enumerate(groups)
        if any(r.loss.get(term, Spread(0, 0)).mean for r in each.first.rounds)
    ]
    title = f"Training loss: {term}"
    canvas, axes = panel(2.9, _rows([groups[position].label for position in has]))
    lines = [
        (_line(axes, p, _loss(groups[p], term), False, len(has)), groups[p].label) for p in has
    ]
    axes.set(title=plain(title), xlabel="round", ylabel="loss")
    legend(canvas, lines)
    has_bands = all(spread.std is not None for p in has for _, spread in _loss(groups[p], term))
    bands = "; bands: ± one standard deviation over them." if has_bands else "."
    caption = f"Lines: mean over the clients that trained in the round{_seeds(groups)}{bands}"
    ends = [f"{groups[p].label} {_loss(groups[p], term)[-1][1].mean:.3g}" for p in has]
    alt = f"{title} against rounds. In the last round: {', '.join(ends)}."
    name = "".join(letter if letter.isalnum() else "-" for letter in f"loss-{term}")
    return finish(canvas, name, title, caption, alt, _curve_table(groups, "loss", [term]))


def _loss(group: Group, term: str) -> Curve:
    return _over_seeds(
        group,
        lambda run: [(each.number, each.loss[term]) for each in run.rounds if term in each.loss],
    )


def _curve_table(
    groups: Sequence[Group], what: str, keys: Sequence[str]
) -> Iterator[Sequence[Any]]:
    """Every run's own numbers; where seeds are grouped, their mean too."""
    yield "run", "seed", what, "round", "mean", "std"
    for each in groups:
        for run in each.runs:
            for round in run.rounds:
                found = getattr(round, what)
                for key in (key for key in keys if key in found):
                    yield each.label, run.seed, key, round.number, found[key].mean, found[key].std
        curve = _accuracy if what == "accuracy" else _loss
        for key in keys if len(each.runs) > 1 else ():
            for number, spread in curve(each, key) if what == "loss" or key in each.ways else ():
                yield each.label, "mean", key, number, spread.mean, spread.std


# --- each client's accuracy


def _clients(groups: Sequence[Group]) -> tuple[list[Figure], list[str]]:
    """Each seed draws clients of its own, so the bars are of one seed."""
    most = max(len(each.first.clients) for each in groups)
    names = (
        "with model and number of classes"
        if most <= FEW_CLIENTS
        else "from best to worst where they are many"
    )
    seed = (
        " of the first seed (each seed draws its own)"
        if any(len(each.runs) > 1 for each in groups)
        else ""
    )
    sentences = [f"Accuracy over all classes, in %, of each client{seed}, {names}."]
    left = len(groups) - MOST_PANELS
    sentences += (
        [f"The clients of {left} more are not drawn; result.json has their numbers."]
        if left > 0
        else []
    )
    return [_bars(each, position) for position, each in enumerate(groups[:MOST_PANELS])], sentences


def _bars(group: Group, position: int) -> Figure:
    clients, ways = group.first.clients, [way for way in ("head", "prototype") if way in group.ways]
    draw_them = _named_bars if len(clients) <= FEW_CLIENTS else _ranked
    canvas, axes = draw_them(group.first, ways, position)
    axes.set_title(plain(group.label))
    best, worst = (
        choose(clients, key=lambda client: client.accuracy["head"]) for choose in (max, min)
    )
    extremes = [f"client {c.id} with {c.accuracy['head']:.1%}" for c in (best, worst)]
    caption = f"{len(clients)} clients; best by the head: {extremes[0]}; worst: {extremes[1]}."
    alt = f"{group.label}: accuracy of each client. {caption}"
    return finish(
        canvas, f"clients-{position + 1}", group.label, caption, alt, _client_table(group)
    )


def _named_bars(run: Run, ways: Sequence[str], position: int) -> tuple[Canvas, Axes]:
    canvas, axes = panel(0.8 + 0.2 * len(run.clients), 1 if len(ways) > 1 else 0)
    thick = 0.76 / len(ways)
    rows = np.arange(len(run.clients))
    bars = [
        axes.barh(
            rows + (number - (len(ways) - 1) / 2) * thick,
            [client.accuracy[way] for client in run.clients],
            thick,
            color=colour(position) if number == 0 else "none",
            edgecolor=colour(position),
            linewidth=0.9,
            hatch=None if number == 0 else "//////",
        )
        for number, way in enumerate(ways)
    ]
    names = [f"{c.id} · {plain(c.model, 16)} · {len(c.classes)} cl." for c in run.clients]
    axes.set_yticks(rows, names, fontsize=8)
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.4, -0.6), xlabel="accuracy, %")
    axes.grid(False, axis="y")
    percent(axes, "x")
    if len(ways) > 1:
        canvas.legend([bar[0] for bar in bars], ways, loc="outside lower center", ncols=2)
    return canvas, axes


def _ranked(run: Run, ways: Sequence[str], position: int) -> tuple[Canvas, Axes]:
    """Too many clients for names: their accuracies from best to worst."""
    canvas, axes = panel(2.6, 1)
    lines = []
    for number, way in enumerate(ways):
        ranked = sorted((client.accuracy[way] for client in run.clients), reverse=True)
        lines += axes.plot(
            range(1, len(ranked) + 1), ranked, "-" if number == 0 else "--", color=colour(position)
        )
    axes.set(ylim=(0, 1.02), xlabel="clients, from best to worst", ylabel="accuracy, %")
    percent(axes)
    if len(ways) > 1:
        legend(canvas, list(zip(lines, ways, strict=True)))
    return canvas, axes


def _client_table(group: Group) -> Iterator[Sequence[Any]]:
    yield "run", "seed", "client", "model", "classes", *group.ways
    for run in group.runs:
        for client in run.clients:
            accuracies = (client.accuracy[way] for way in group.ways)
            yield group.label, run.seed, client.id, client.model, len(client.classes), *accuracies


# --- who has which classes


def _coverage(groups: Sequence[Group]) -> tuple[list[Figure], list[str]]:
    """A map for each division of the data, of the first seed of each group."""
    federations = {each.first.partition: each for each in reversed(groups)}
    distinct = [each for each in groups if federations[each.first.partition] is each]
    shown = distinct[:MOST_PANELS]
    left = len(distinct) - len(shown)
    figures = [
        _coverage_map(each, number, len(distinct) > 1) for number, each in enumerate(shown, 1)
    ]
    return figures, [f"{left} more divisions of the data are not drawn."] if left else []


def _coverage_map(group: Group, number: int, several: bool) -> Figure:
    run, counts = group.first, _counts(group.first)
    counted = all(client.images is not None for client in run.clients)
    canvas, axes = _coverage_panel(run, counts, counted)
    seed = f", seed {run.seed}" if len(group.runs) > 1 else ""
    title = f"{group.label if several else run.dataset}{seed}"
    axes.set(title=plain(title), xlabel="class", ylabel="client")
    caption = (
        "Colour: number of training images of the class that the client has; nothing where it has none."
        if counted
        else "Filled: the client has training images of the class."
    )
    classes = _range([len(client.classes) for client in run.clients])
    alt = f"{len(run.clients)} clients and {len(run.classes)} classes: a client has {classes} classes."
    return finish(canvas, f"classes-{number}", title, caption, alt, _coverage_table(run, counts))


def _coverage_panel(run: Run, counts: np.ndarray, counted: bool) -> tuple[Canvas, Axes]:
    canvas, axes = panel(1.8 + (0.2 * len(run.clients) if len(run.clients) <= FEW_CLIENTS else 5))
    look: dict[str, Any] = {
        "aspect": "auto",
        "cmap": "cividis",
        "vmin": 0,
        "interpolation": "nearest",
    }
    image = axes.imshow(np.where(counts > 0, counts, np.nan), **look)
    _class_ticks(axes, run)
    if counted:
        bar: dict[str, Any] = {
            "location": "bottom",
            "shrink": 0.9,
            "aspect": 40,
            "ticks": MaxNLocator(6, integer=True),
        }
        canvas.colorbar(image, ax=axes, label="training images", **bar)
    if counted and counts.size <= 300:
        _write_counts(axes, counts)
    return canvas, axes


def _range(numbers: Sequence[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else str(min(numbers))


def _counts(run: Run) -> np.ndarray:
    """(clients, classes): training images, or 1 where only the fact is known."""
    place = {name: number for number, name in enumerate(run.classes)}
    counts = np.zeros((len(run.clients), len(run.classes)), int)
    for row, client in enumerate(run.clients):
        for name, images in zip(
            client.classes, client.images or [1] * len(client.classes), strict=True
        ):
            counts[row, place[name]] = images
    return counts


def _class_ticks(axes: Axes, run: Run) -> None:
    axes.grid(False)
    step = math.ceil(len(run.classes) / 31)
    names = [plain(name, 12) for name in run.classes]
    upright = max(map(len, names)) * len(names) / step > 40
    axes.set_xticks(
        range(0, len(names), step), names[::step], rotation=90 if upright else 0, fontsize=8
    )
    if len(run.clients) <= FEW_CLIENTS:
        axes.set_yticks(
            range(len(run.clients)), [str(client.id) for client in run.clients], fontsize=8
        )


def _write_counts(axes: Axes, counts: np.ndarray) -> None:
    for (row, column), count in np.ndenumerate(counts):
        if count:
            light = count > 0.55 * counts.max()
            axes.text(
                column,
                row,
                str(count),
                ha="center",
                va="center",
                fontsize=7,
                color="black" if light else "white",
            )


def _coverage_table(run: Run, counts: np.ndarray) -> Iterator[Sequence[Any]]:
    yield "client", *run.classes
    for client, row in zip(run.clients, counts.tolist(), strict=True):
        yield client.id, *row


# --- the map of prototypes


def _maps(groups: Sequence[Group]) -> tuple[list[Figure], list[str]]:
    have = [each for each in groups if each.first.prototypes is not None]
    if not have:
        return [], ["No method here has prototypes, so there is no map of them."]
    figures = [_map(each, number) for number, each in enumerate(have[:MOST_PANELS], 1)]
    alike = [each.label for each, figure in zip(have, figures, strict=False) if figure is None]
    sentences = [f"{label}: its prototypes are too few or too alike for a map." for label in alike]
    left = len(have) - len(figures)
    sentences += [f"The prototypes of {left} more are not drawn."] if left else []
    return [figure for figure in figures if figure is not None], sentences


def _map(group: Group, number: int) -> Figure | None:
    run = group.first
    points, classes, clients = _points(run)
    if len(points) < 3 or np.ptp(points, axis=0).max() == 0:
        return None
    places, method = _flattened(points)
    canvas, axes = panel(4.0)
    for label in np.unique(classes):
        _draw_class(
            axes,
            places[classes == label],
            clients[classes == label] < 0,
            int(label),
            run.classes[label],
        )
    axes.set(
        title=plain(group.label),
        xlabel=f"{method}, first",
        ylabel=f"{method}, second",
        xticks=[],
        yticks=[],
    )
    seed = f" of seed {run.seed}" if len(group.runs) > 1 else ""
    locals_ = int((clients >= 0).sum())
    large = f"Large: the {len(points) - locals_} global prototypes{seed}, with their class"
    small = f"; small: the clients' {locals_} last local ones" if locals_ else ""
    dims = points.shape[1]
    caption = f"{large}{small}. From {dims} dimensions to two by {method}{', random state 0' * (method == 't-SNE')}."
    alt = f"{group.label}: map of {len(points)} prototypes of {len(np.unique(classes))} classes by {method}."
    return finish(
        canvas,
        f"prototypes-{number}",
        group.label,
        caption,
        alt,
        _map_table(run, places, classes, clients),
    )


def _points(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All prototypes there are, the class of each, and its client, -1 for a global one."""
    assert run.prototypes is not None
    known = np.flatnonzero(run.prototypes.known > 0)
    clients, labels = np.nonzero(run.prototypes.held > 0)
    points = np.concatenate([run.prototypes.shared[known], run.prototypes.local[clients, labels]])
    return (
        points,
        np.concatenate([known, labels]),
        np.concatenate([np.full(len(known), -1), clients]),
    )


def _flattened(points: np.ndarray) -> tuple[np.ndarray, str]:
    """Two dimensions by t-SNE; by PCA where points are too few for neighbourhoods, or too many to wait for."""
    if not 12 <= len(points) <= MOST_POINTS:
        from sklearn.decomposition import PCA

        return PCA(2, svd_solver="full").fit_transform(points), "PCA"
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    perplexity = min(30.0, (len(points) - 1) / 3)
    with threadpool_limits(
        1
    ):  # so few points gain nothing from a second thread, and sums depend on it
        return TSNE(2, init="pca", perplexity=perplexity, random_state=0).fit_transform(
            points
        ), "t-SNE"


def _draw_class(axes: Axes, places: np.ndarray, shared: np.ndarray, label: int, name: str) -> None:
    look: dict[str, Any] = {"color": colour(label), "marker": marker(label)}
    axes.scatter(places[~shared, 0], places[~shared, 1], s=16, alpha=0.65, linewidths=0, **look)
    axes.scatter(
        places[shared, 0], places[shared, 1], s=95, edgecolors=INK, linewidths=0.9, zorder=3, **look
    )
    for place in places[shared]:
        axes.annotate(
            plain(name, 12),
            place,
            (6, 5),
            textcoords="offset points",
            fontsize=9.5,
            weight="bold",
            zorder=4,
        )


def _map_table(
    run: Run, places: np.ndarray, classes: np.ndarray, clients: np.ndarray
) -> Iterator[Sequence[Any]]:
    yield "client", "class", "x", "y"
    for client, label, (x, y) in zip(
        clients.tolist(), classes.tolist(), places.tolist(), strict=True
    ):
        yield "global" if client < 0 else run.clients[client].id, run.classes[label], x, y


# --- accuracy against bytes


@dataclass(frozen=True)
class End:
    """Where a group ended by one way to predict."""

    position: int
    way: str
    label: str
    sent: float  # bytes uploaded, mean over seeds
    accuracy: float


def _traffic(groups: Sequence[Group]) -> tuple[list[Figure], list[str]]:
    ends = [
        End(
            p,
            way,
            _named(groups, p, way),
            each.mean(lambda run: run.bytes_up),
            each.accuracy(way).mean,
        )
        for p, each in enumerate(groups)
        for way in each.ways
        if not way.endswith("_own")
    ]
    if not any(end.sent for end in ends):
        return [], ["Nothing was sent, so there is no traffic to weigh accuracy against."]
    comparable = len(groups) > 1 and same_task(groups)
    front = pareto(ends) if comparable else []
    sentences = (
        []
        if comparable or len(groups) == 1
        else ["The runs are of different tasks, so they share no Pareto front."]
    )
    return [_traffic_figure(groups, ends, front)], sentences


def pareto(ends: Sequence[End]) -> list[End]:
    """Those than which no other sends less, or as little, and is more accurate; the cheapest first."""
    front: list[End] = []
    for end in sorted(ends, key=lambda end: (end.sent, -end.accuracy)):
        if not front or end.accuracy > front[-1].accuracy:
            front.append(end)
    return front


def _traffic_figure(groups: Sequence[Group], ends: Sequence[End], front: Sequence[End]) -> Figure:
    labels = [end.label if end.sent else f"{end.label} (sends nothing)" for end in ends]
    canvas, axes = panel(3.1, _rows([*labels, "Pareto front"]))
    axes.set_xscale("log")
    entries = [
        (_course(axes, groups[end.position], end), label)
        for end, label in zip(ends, labels, strict=True)
    ]
    axes.set(
        title="Accuracy against bytes sent",
        xlabel="bytes uploaded by all clients",
        ylabel="accuracy, %",
    )
    percent(axes)
    _bytes_axis(axes)
    if front:
        entries.append((_draw_front(axes, front), "Pareto front"))
    legend(canvas, entries)
    named = "; ".join(
        f"{end.label} ({size(end.sent) if end.sent else 'nothing'}, {end.accuracy:.1%})"
        for end in front
    )
    caption = f"Each run's way from its first evaluation to its end (large); over all classes{_seeds(groups)}."
    caption += f" On the Pareto front, the cheapest first: {named}." if front else ""
    alt = "Accuracy against bytes: " + ", ".join(
        f"{end.label} {end.accuracy:.1%} for {size(end.sent)}" for end in ends
    )
    return finish(
        canvas,
        "traffic",
        "Accuracy against bytes sent",
        caption,
        f"{alt}.",
        _traffic_table(groups, ends, front),
    )


def _bytes_axis(axes: Axes) -> None:
    """A log scale of sizes; one that spans little is labelled between its powers of ten, too."""
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda sent, _: size(sent)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _course(axes: Axes, group: Group, end: End) -> Line2D:
    look: dict[str, Any] = {
        "color": colour(end.position),
        "linestyle": "--" if end.way == "prototype" else "-",
    }
    if not end.sent:
        return axes.axhline(end.accuracy, color=look["color"], linestyle=":")
    curve = [(sent, spread.mean) for sent, spread in _spent(group, end.way) if sent]
    axes.plot(*zip(*curve, strict=True), linewidth=1, alpha=0.6, **look)
    filled = colour(end.position) if end.way == "head" else "none"
    at_end = {
        "marker": marker(end.position),
        "markersize": 8,
        "markerfacecolor": filled,
        "markeredgecolor": INK,
        **look,
    }
    (line,) = axes.plot([end.sent], [end.accuracy], zorder=3, **at_end)
    return line


def _spent(group: Group, way: str) -> list[tuple[float, Spread]]:
    """Bytes uploaded until each evaluated round, and the accuracy then."""
    until: dict[int, list[int]] = {}
    for run in group.runs:
        for round, total in zip(
            run.rounds, np.cumsum([each.bytes_up for each in run.rounds]).tolist(), strict=True
        ):
            until.setdefault(round.number, []).append(total)
    return [
        (sum(until[number]) / len(until[number]), spread)
        for number, spread in _accuracy(group, way)
    ]


def _draw_front(axes: Axes, front: Sequence[End]) -> Line2D:
    """Steps: what is to be had for so many bytes. Whoever sends nothing is beyond the left end of a log scale."""
    left, right = axes.get_xlim()
    sent = [max(end.sent, left) for end in front] + [right]
    accuracies = [end.accuracy for end in front] + [front[-1].accuracy]
    axes.set_xlim(left, right)
    (line,) = axes.step(
        sent, accuracies, where="post", color=INK, linewidth=5, alpha=0.18, zorder=1
    )
    return line


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _traffic_table(
    groups: Sequence[Group], ends: Sequence[End], front: Sequence[End]
) -> Iterator[Sequence[Any]]:
    yield "run", "accuracy", "bytes_up", "mean", "std", "end", "on_front"
    for end in ends:
        curve = _spent(groups[end.position], end.way)
        for number, (sent, spread) in enumerate(curve, 1):
            last = number == len(curve)
            yield (
                groups[end.position].label,
                end.way,
                sent,
                spread.mean,
                spread.std,
                last,
                last and end in front,
            )
