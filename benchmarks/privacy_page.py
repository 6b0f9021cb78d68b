"""The page and the figure of the benchmark of epsilons, from its .json."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from benchmarks.privacy_lines import (
    BATCH,
    DATASETS,
    DELTA,
    EPSILONS,
    GRID,
    METHODS,
    SEEDS,
    Method,
    label,
    name_cell,
    name_run,
)
from fedproto.core.files import write_atomically

NAME = "privacy"
ACCURACIES = {"all": "all classes compete", "own": "own classes"}
#: Lines of the table that are left out of the figure, where they would hide others.
NOT_DRAWN = ("class means", "FedRE")
LINE_STYLES = {"release": "-", "training": "--", "client": "-"}
COLOUR_OF = {
    "closed form": "C0",
    "FedProto": "C1",
    "contrast": "C2",
    "FedAvg": "C3",
    "FedAvg, linear": "C4",
    "Local": "C7",
}


class Summary(NamedTuple):
    """What the seeds say about one cell, in %."""

    mean: float
    deviation: float
    seeds: int

    def __str__(self) -> str:
        missing = "" if self.seeds == len(SEEDS) else f" ({self.seeds})"
        return f"{self.mean:.1f} ± {self.deviation:.1f}{missing}"


def summarise(
    found: dict[str, Any], dataset: str, method: Method, epsilon: float, which: str
) -> Summary | None:
    """Return mean and standard deviation over seeds; None if nothing was measured.

    which  all or own; with "head " before it, that of the head
    """
    values = []
    for seed in SEEDS:
        run = found["runs"].get(name_run(dataset, method, epsilon, seed))
        if run is not None and which in run:
            values.append(100 * run[which])
    return Summary(fmean(values), pstdev(values), len(values)) if values else None


def list_measured(found: dict[str, Any]) -> list[str]:
    """Return the data sets of which something was measured."""
    return [name for name in DATASETS if any(key.startswith(name) for key in found["runs"])]


def name_epsilon(epsilon: float) -> str:
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"


def write_page(found: dict[str, Any], out: Path) -> None:
    """Write the tables, one per data set and kind of accuracy."""
    lines = _describe()
    for dataset in list_measured(found):
        for which, heading in ACCURACIES.items():
            lines += [f"## {dataset}, {heading}", ""]
            lines += _make_table(found, dataset, which)
            lines.append("")
    if found.get("tuned"):
        lines += ["## Chosen rounds and learning rates", ""]
        lines += _list_choices(found["tuned"])
        lines.append("")
    write_atomically(out / f"{NAME}.md", "\n".join(lines).encode())


def _describe() -> list[str]:
    """Return what the page says before its tables."""
    tried = "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in GRID.items())
    return [
        "# Accuracy against epsilon",
        "",
        f"Test accuracy in %, mean ± standard deviation over {len(SEEDS)} seeds (of means over "
        f"clients; a number in brackets if there were fewer), delta {DELTA:g}, by `python3 -m "
        "benchmarks.privacy`. An epsilon of ∞ is the same method without clipping and noise; – was "
        "not measured.",
        "",
        "- `release` protects one record: 20 clients with 3 classes, 100 rows of each, 64 fixed "
        "random features, one release. Noise at the server is as good as noise on a secure sum. "
        "FedRE sends one mixture per client in 5 rounds.",
        "- `training` protects one record, too, in the same federation: the clients train a "
        "perceptron with hidden layers of 16 and 50 units by DP-SGD, gradients and embeddings "
        f"clipped to norm 1, steps of {BATCH['training']} records on average, noise at the "
        "clients.",
        "- `client` protects a whole client: 100 clients with 3 classes, 20 rows of each. Closed "
        "form and class means: the same features, one release. The others train the same "
        f"perceptron in batches of {BATCH['client']}; what they send is clipped to norm 1.",
        "- *FedAvg, linear* averages a linear model of the 64 fixed features, which has 650 "
        "weights instead of the perceptron's 13,920. *Local* trains the perceptron alone and sends "
        "nothing, so that it needs no protection.",
        "- *contrast* is FedProto with `contrast=1`. FedProto and contrast predict by the nearest "
        "global prototype; *by its head* is the same run, by the head that each client keeps. With "
        "`client` these heads are not protected, and need not be as long as they stay there.",
        "",
        "Not in the tables: contrast with `release`, which equals FedProto since the encoder is "
        "frozen; FedAvg with `release`, which is refused since its weights are trained on records; "
        "the closed form with `training`, which trains nothing, so that its line is that of "
        "`release`.",
        "",
        f"Rounds and learning rate of methods that train were chosen among {tried}, by one run "
        "each on MNIST rows that are used for nothing else (other training rows, for testing, "
        "too), by accuracy over all classes, for each method, setting and epsilon; contrast takes "
        "over what was chosen for FedProto, and Fashion-MNIST what was chosen on MNIST. All else "
        "was fixed beforehand. Choosing on the clients' own rows would not be covered by the "
        "claims.",
        "",
        "What this rule costs, to be read with the tables: MNIST's rates are too high for "
        "perceptrons on Fashion-MNIST without noise and clipping, so that FedAvg and Local (as for "
        "`training`) are below what they can reach at ∞ there. Where FedProto is near chance its "
        "choice is arbitrary, and contrast inherits it: with `client` at epsilon 8 on MNIST, seed "
        "0, contrast with a choice of its own (8 rounds, 0.3) had 87.8 instead of 68.5.",
        "",
        f"![Accuracy against epsilon]({NAME}.png)",
        "",
    ]


def _make_table(found: dict[str, Any], dataset: str, which: str) -> list[str]:
    """Return the lines of one table."""
    names = [name_epsilon(each) for each in EPSILONS]
    lines = ["| epsilon | " + " | ".join(names) + " |", "|---" * (len(EPSILONS) + 1) + "|"]
    for method in METHODS:
        lines.append(_make_row(found, dataset, method, which, label(method)))
        if method.is_tuned and method.way == "prototype":
            name = f"{label(method)}, by its head"
            lines.append(_make_row(found, dataset, method, f"head {which}", name))
    return lines


def _make_row(found: dict[str, Any], dataset: str, method: Method, which: str, name: str) -> str:
    cells = [name]
    for epsilon in EPSILONS:
        summary = summarise(found, dataset, method, epsilon, which)
        cells.append("–" if summary is None else str(summary))
    return "| " + " | ".join(cells) + " |"


def _list_choices(tuned: dict[str, Any]) -> list[str]:
    """Return a table of what was chosen for each method that trains."""
    lines = ["| method | epsilon | rounds | learning rate |", "|---|---|---|---|"]
    for method in METHODS:
        for epsilon in method.epsilons:
            entry = tuned.get(name_cell(method, epsilon))
            if entry is not None:
                chosen = entry["settings"]
                cells = [label(method), name_epsilon(epsilon), chosen["rounds"], chosen["lr"]]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


# --- figure


def draw(found: dict[str, Any], out: Path) -> None:
    """Draw accuracy over all classes against epsilon, a panel per data set and protected unit."""
    from fedproto.plots.marks import show_percent
    from fedproto.plots.style import figure_style, make_panels, save_png

    datasets = list_measured(found)
    with figure_style():
        canvas, panels = make_panels(11.5, 1.2 + 3.6 * len(datasets), columns=2, rows=len(datasets))
        places = ((dataset, unit) for dataset in datasets for unit in ("record", "client"))
        for axes, (dataset, unit) in zip(panels, places, strict=True):
            for method in _list_drawn(unit):
                _draw_method(axes, found, dataset, method)
            axes.set_title(f"{dataset}: protects one {unit}")
            axes.set_xticks(range(len(EPSILONS)))
            axes.set_xticklabels([name_epsilon(each) for each in EPSILONS])
            axes.set_xlabel(f"epsilon (delta {DELTA:g})")
            axes.set_ylabel("accuracy, all classes")
            axes.set_ylim(0, 1)
            show_percent(axes)
            is_last_row = dataset == datasets[-1]
            if is_last_row and axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
        write_atomically(out / f"{NAME}.png", save_png(canvas))


def _list_drawn(unit: str) -> Iterator[Method]:
    for method in METHODS:
        if method.unit == unit and method.name not in NOT_DRAWN:
            yield method


def _draw_method(axes: Any, found: dict[str, Any], dataset: str, method: Method) -> None:
    """Draw one method's means over the epsilons, with their standard deviations.

    What needs no protection is a line across all of them. Markers are filled where clients add the
    noise, and hollow where the server does.
    """
    colour = COLOUR_OF[method.name]
    points = []
    for place, epsilon in enumerate(EPSILONS):
        summary = summarise(found, dataset, method, epsilon, "all")
        if summary is not None:
            points.append((place, summary.mean / 100, summary.deviation / 100))
    if not points:
        return
    places, means, deviations = zip(*points, strict=True)
    if method.name == "Local":
        axes.axhline(means[0], color=colour, linestyle=":", label="Local, sends nothing")
        return
    axes.errorbar(
        places,
        means,
        yerr=deviations,
        color=colour,
        linestyle=LINE_STYLES[method.privacy],
        marker="o" if method.place == "client" else "s",
        markerfacecolor=colour if method.place == "client" else "white",
        label=f"{method.name}, {method.privacy}, noise at {method.place}",
    )
