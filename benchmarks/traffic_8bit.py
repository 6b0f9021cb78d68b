"""FedProto with prototypes of 8 or 4 bits, or of their largest values only, beside float32.

    python3 -m benchmarks.traffic_8bit results             # on a GPU, minutes: JSON, page, figure
    python3 -m benchmarks.traffic_8bit FOLDER --measure    # the JSON alone, without matplotlib
    python3 -m benchmarks.traffic_8bit results --finished  # page and figure again, from the JSON
    python3 -m benchmarks.traffic_8bit FOLDER --tiny       # on a CPU, seconds: UCI's digits

MNIST and CIFAR-10 are read from $FEDPROTO_DATA. Called again, it measures only what the JSON lacks,
CIFAR-10 last. All federations of a data set have the same clients, rows, weights and batches; only
what travels differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fedproto
from fedproto.core.files import write_atomically

NAME = "traffic-8bit"
#: What travels, and the setting `transform` for it.
ARMS = {
    "float32": "",
    "8 bits": "quantise(bits=8)",
    "4 bits": "quantise(bits=4)",
    "largest 10%": "top_k(fraction=0.1)",
    "largest 10%, 8 bits": "top_k(fraction=0.1),quantise(bits=8)",
}
WHOLE = "float32"
#: The accuracies that are shown, and what they are called.
SHOWN = {
    "prototype": "nearest prototype",
    "prototype_own": "nearest prototype, own classes",
    "head": "head",
    "head_own": "head, own classes",
}
#: The settings of the paper's tables, at 3 classes per client on average; for CIFAR-10, the small
#: CNN in place of ResNet18, and 30 rounds.
STUDIES: dict[str, dict[str, Any]] = {
    "FedProto, MNIST": {
        "dataset": "mnist",
        "algorithm": "fedproto",
        "seed": [0, 1, 2, 3, 4],
        "shots": 100,
        "ways": 3,
        "stdev": 2,
        "rounds": 100,
        "eval_every": 100,
        "compile": "off",
    },
    "FedAvg, MNIST": {
        "dataset": "mnist",
        "algorithm": "fedavg",
        "seed": [0, 1, 2, 3, 4],
        "shots": 100,
        "ways": 3,
        "stdev": 2,
        "rounds": 100,
        "eval_every": 100,
        "compile": "off",
    },
    "FedProto, CIFAR-10": {
        "dataset": "cifar10",
        "algorithm": "fedproto",
        "model": "cnn",
        "seed": [0, 1, 2, 3, 4],
        "shots": 100,
        "ways": 3,
        "stdev": 2,
        "lam": 0.1,
        "rounds": 30,
        "eval_every": 30,
        "compile": "off",
    },
}
TINY: dict[str, dict[str, Any]] = {
    "FedProto, digits": {
        "dataset": "digits",
        "algorithm": "fedproto",
        "model": "mlp(hidden=16,width=50)",
        "seed": [0, 1],
        "clients": 4,
        "shots": 5,
        "test_shots": 5,
        "rounds": 2,
        "eval_every": 2,
    },
}


# --- measuring


def measure(studies: dict[str, dict[str, Any]], path: Path) -> dict[str, Any]:
    """Return every number of all studies: by study and arm, one entry per seed.

    They are written to the file after each study; those that it holds already are kept.
    """
    measured: dict[str, Any] = {"arms": ARMS, "studies": {}}
    if path.exists():
        measured = json.loads(path.read_text())
    for title, settings in studies.items():
        if title in measured["studies"]:
            continue
        runs = run_study(settings)
        measured["studies"][title] = {"settings": settings, "runs": runs}
        write_atomically(path, json.dumps(measured, indent=1).encode())
    return measured


def run_study(settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Run one federation per arm and seed; the seeds of an arm are trained as one stack."""
    fixed = {key: value for key, value in settings.items() if key != "seed"}
    over = {"transform": list(ARMS.values()), "seed": settings["seed"]}
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    names = {transform: arm for arm, transform in ARMS.items()}
    with tempfile.TemporaryDirectory() as folder:
        swept = fedproto.sweep(over, out=folder, progress=True, checkpoint_every=0, **fixed)
    for run in swept:
        if run.result is None:
            raise SystemExit(f"{run.name} broke down")
        runs[names[run.varied["transform"]]].append(describe(run.result, run.varied["seed"]))
    return runs


def describe(result: fedproto.Result, seed: int) -> dict[str, Any]:
    """Return what is kept of a run: accuracies in percent, and bytes per round."""
    rounds = result.data["rounds"]
    return {
        "seed": seed,
        "accuracy": {name: 100 * value["mean"] for name, value in result.accuracy.items()},
        "bytes_up_per_round": result.communication["bytes_up"] / rounds,
        "bytes_down_per_round": result.communication["bytes_down"] / rounds,
        "partition": result.data["partition"],
        "machine": result.data["machine"],
    }


# --- page and figure


def summarise(runs: dict[str, list[dict[str, Any]]], arm: str, accuracy: str) -> dict[str, float]:
    """Return mean, half-width of the 95% interval over seeds, and the same of the difference."""
    from fedproto.reproduce.statistics import mean_interval

    values = [run["accuracy"][accuracy] for run in runs[arm]]
    whole = [run["accuracy"][accuracy] for run in runs[WHOLE]]
    differences = [value - other for value, other in zip(values, whole, strict=True)]
    mean, half = mean_interval(values)
    difference, half_difference = mean_interval(differences)
    return {
        "mean": mean,
        "half": half,
        "difference": difference,
        "half_difference": half_difference,
        "bytes": statistics.fmean(run["bytes_up_per_round"] for run in runs[arm]),
    }


def main_accuracy(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return the accuracy that a study is judged by: the nearest prototype's, if there are any."""
    names = runs[WHOLE][0]["accuracy"]
    return "prototype" if "prototype" in names else "head"


def write_page(measured: dict[str, Any]) -> str:
    """Return the page with one table per study."""
    lines = [
        "# What compressed uploads cost and save",
        "",
        "Made by `python3 -m benchmarks.traffic_8bit results`.",
        "Seeds were fixed in advance; the last round is reported. The federations of a study have",
        "the same clients, rows, initial weights and batches; only what clients upload differs.",
        "Accuracies are in percent, means over clients and seeds ± the half-width of the 95%",
        "interval over seeds; differences to float32 are paired by seed. Bytes are the messages",
        "that all clients upload per round; weights, scales, places and row numbers included.",
        "MNIST has the paper's CNN and 100 rounds; CIFAR-10 has the same small CNN in place of the",
        "paper's ResNet18, and 30 rounds: compare its accuracies with each other only.",
        "",
        f"![accuracy against bytes]({NAME}.png)",
    ]
    for title, study in measured["studies"].items():
        lines += ["", f"## {title}", "", *write_table(study["runs"])]
        settings = ", ".join(f"{key} {value}" for key, value in study["settings"].items())
        machine = ", ".join(study["runs"][WHOLE][0]["machine"].values())
        lines += ["", f"Settings: {settings}. Measured on {machine}."]
    return "\n".join(lines) + "\n"


def write_table(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the table of one study."""
    accuracies = [name for name in SHOWN if name in runs[WHOLE][0]["accuracy"]]
    titles = [SHOWN[name] for name in accuracies]
    main = main_accuracy(runs)
    lines = [
        f"| uploads | {' | '.join(titles)} | {SHOWN[main]}, minus float32's "
        "| bytes per round | of float32's |",
        "|---" * (len(titles) + 4) + "|",
    ]
    whole_bytes = summarise(runs, WHOLE, main)["bytes"]
    for arm in runs:
        cells = [arm]
        for name in accuracies:
            summary = summarise(runs, arm, name)
            cells.append(f"{summary['mean']:.2f} ± {summary['half']:.2f}")
        summary = summarise(runs, arm, main)
        difference = f"{summary['difference']:+.2f} ± {summary['half_difference']:.2f}"
        cells.append("" if arm == WHOLE else difference)
        cells.append(f"{summary['bytes']:,.0f}")
        cells.append(f"{summary['bytes'] / whole_bytes:.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(measured: dict[str, Any]) -> bytes:
    """Return the figure: accuracy against bytes per round, one panel per study."""
    from fedproto.plots.colours import colour_at
    from fedproto.plots.labels import format_bytes
    from fedproto.plots.style import figure_style, make_panels, marker_at, save_png

    studies = measured["studies"]
    with figure_style():
        canvas, panels = make_panels(3.8 * len(studies), 4.2, columns=len(studies))
        for axes, (title, study) in zip(panels, studies.items(), strict=True):
            main = main_accuracy(study["runs"])
            for position, arm in enumerate(study["runs"]):
                summary = summarise(study["runs"], arm, main)
                axes.errorbar(
                    summary["bytes"],
                    summary["mean"],
                    summary["half"],
                    color=colour_at(position),
                    marker=marker_at(position),
                    markersize=7,
                    capsize=3,
                    linestyle="none",
                    label=f"{arm}: {format_bytes(summary['bytes'])}",
                )
            axes.set_title(title)
            axes.set_xlabel("uploaded per round, all clients")
            axes.set_ylabel(f"accuracy, {SHOWN[main]} (%)")
            axes.set_xlim(left=0)
            axes.locator_params(axis="x", nbins=5)
            axes.xaxis.set_major_formatter(lambda count, _: format_bytes(count))
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))
        return save_png(canvas)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or read what was measured, and write the page and the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the files are written")
    parser.add_argument("--measure", action="store_true", help="write the JSON only")
    parser.add_argument("--finished", action="store_true", help="read the JSON, measure nothing")
    parser.add_argument("--tiny", action="store_true", help="a small federation, for a test")
    options = parser.parse_args(arguments)
    path = options.folder / f"{NAME}.json"
    if options.finished:
        measured = json.loads(path.read_text())
    else:
        options.folder.mkdir(parents=True, exist_ok=True)
        measured = measure(TINY if options.tiny else STUDIES, path)
    if not options.measure:
        write_atomically(options.folder / f"{NAME}.md", write_page(measured).encode())
        write_atomically(options.folder / f"{NAME}.png", draw(measured))


if __name__ == "__main__":
    main()
