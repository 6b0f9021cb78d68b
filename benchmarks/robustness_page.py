"""The page and the figure of the study of wrong uploads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from statistics import fmean, pstdev
from typing import Any

from benchmarks.attacks import LARGEST_RMS, MEANINGS

#: What is shown: algorithm, accuracy, and what tables call it.
MEASURES = (
    ("fedproto", "prototype", "FedProto, nearest prototype"),
    ("fedproto", "head", "FedProto, own head"),
    ("fedavg", "head", "FedAvg"),
)


def accuracies_of(found: Mapping[str, Any], **wanted: Any) -> list[dict[str, float]]:
    """Return the accuracies of the cells with these values, one per seed."""
    cells = [cell for cell in found["measured"] if wanted.items() <= cell.items()]
    return [cell["accuracy"] for cell in cells]


def mean_and_spread(found: Mapping[str, Any], way: str, **wanted: Any) -> tuple[float, float]:
    """Return the mean over the seeds of an accuracy in percent, and its standard deviation."""
    values = [100 * accuracy[way] for accuracy in accuracies_of(found, **wanted)]
    return fmean(values), pstdev(values)


def make_page(found: Mapping[str, Any]) -> str:
    """Return results/robustness.md."""
    study = found["study"]
    alone = [100 * value for value in found["alone"]]
    lines = [
        "# Wrong uploads, and what combiners do about them",
        "",
        "<!-- Made by `python3 -m benchmarks.robustness`; do not edit. -->",
        "",
        f"{study['clients']} clients of {study['dataset']} with 3 ± 2 classes of "
        f"{study['shots']} images each, {study['model']}, {study['rounds']} rounds. Some clients "
        "upload something wrong in every round. Given is the mean accuracy of the *other* clients "
        f"after the last round, in %, {_describe_seeds(study['seeds'])}. Best of a line in bold.",
        "",
    ]
    lines += [f"- **{attack}**: {MEANINGS[attack]}" for attack in study["attacks"]]
    lines += [
        "",
        f"Training alone, without a federation: {fmean(alone):.1f}%.",
        "",
        "![accuracy of honest clients](robustness.png)",
    ]
    for algorithm, way, title in MEASURES:
        lines += ["", f"## {title}", "", *_table(found, algorithm, way)]
    lines += [
        "",
        f"Gradients are clipped at a norm of 10, and a server whose values would exceed a root "
        f"mean square of {LARGEST_RMS:.0f} keeps the old ones. Computed in {found['seconds']:.0f} "
        f"seconds on {found['device']}, torch {found['torch']}, fedproto {found['version']}.",
    ]
    return "\n".join(lines) + "\n"


def _describe_seeds(seeds: int) -> str:
    """Return what a number in the tables is made of."""
    if seeds == 1:
        return "of one seed, so differences of a point or two mean nothing"
    return f"mean ± standard deviation over seeds ({seeds})"


def _table(found: Mapping[str, Any], algorithm: str, way: str) -> list[str]:
    study = found["study"]
    combiners = study["combiners"]
    lines = [
        f"| attack | attackers | {' | '.join(combiners)} |",
        f"|---|---|{'---|' * len(combiners)}",
    ]
    rows = [("none", 0), *itertools.product(study["attacks"], study["attackers"])]
    for attack, attackers in rows:
        measured = []
        for combiner in combiners:
            cell = {"algorithm": algorithm, "combiner": combiner}
            cell |= {"attack": attack, "attackers": attackers}
            measured.append(mean_and_spread(found, way, **cell))
        best = max(round(mean, 1) for mean, _ in measured)
        texts = []
        for mean, spread in measured:
            text = f"{mean:.1f}" if study["seeds"] == 1 else f"{mean:.1f} ± {spread:.1f}"
            texts.append(f"**{text}**" if round(mean, 1) == best else text)
        share = f"{attackers / study['clients']:.0%}"
        lines.append(f"| {attack} | {share} | {' | '.join(texts)} |")
    return lines


def draw_figure(found: Mapping[str, Any]) -> bytes:
    """Return a PNG: accuracy against the fraction of attackers, by attack and measure."""
    from fedproto.plots.colours import colour_at
    from fedproto.plots.style import figure_style, make_panels, marker_at, save_png

    study = found["study"]
    attacks = study["attacks"]
    counts = [0, *study["attackers"]]
    percent = [100 * count / study["clients"] for count in counts]
    with figure_style():
        canvas, panels = make_panels(
            width=2.4 * len(attacks),
            height=2.1 * len(MEASURES) + 0.6,
            columns=len(attacks),
            rows=len(MEASURES),
            sharex=True,
            sharey=True,
        )
        for place, axes in enumerate(panels):
            row, column = divmod(place, len(attacks))
            algorithm, way, title = MEASURES[row]
            attack = attacks[column]
            for number, combiner in enumerate(study["combiners"]):
                means = []
                for count in counts:
                    cell = {"algorithm": algorithm, "combiner": combiner, "attackers": count}
                    cell["attack"] = attack if count else "none"
                    means.append(mean_and_spread(found, way, **cell)[0])
                look = {"color": colour_at(number), "marker": marker_at(number)}
                axes.plot(percent, means, label=combiner, **look)
            if row == 0:
                axes.set_title(attack)
            if column == 0:
                axes.set_ylabel(f"{title}\naccuracy, %")
        lines, labels = panels[0].get_legend_handles_labels()
        canvas.supxlabel("clients that attack, %")
        canvas.legend(lines, labels, loc="outside upper center", ncols=len(labels))
        return save_png(canvas)
