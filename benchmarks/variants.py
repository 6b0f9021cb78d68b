"""What is called FedProto in public code, trained side by side: one table of all profiles.

    python3 -m benchmarks.variants results            # on a GPU, a minute: JSON and page
    python3 -m benchmarks.variants results --cpu      # on two cores, minutes: half the rounds
    python3 -m benchmarks.variants results --finished # the page again, from the JSON
    python3 -m benchmarks.variants FOLDER --quick     # on a CPU, seconds: UCI's digits

MNIST is read from $FEDPROTO_DATA. All profiles have the same clients, rows, test rows, initial
weights and batches. Profiles that differ only in what they report are trained once, and the seeds
of a profile are trained as one stack.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fedproto
from fedproto.config.profiles import PROFILES
from fedproto.core.files import write_atomically

NAME = "variants"
#: The accuracies by which all profiles are compared, after the last round.
COMMON = {
    "prototype_own": "nearest prototype",
    "head_own": "head",
    "both_own": "both",
}
TITLES = {
    "prototype": "nearest prototype, all classes",
    "prototype_own": "nearest prototype, own classes",
    "head": "head, all classes",
}
REPORTED = {"last": "last round", "best": "best test round"}
#: The paper's partition of MNIST, at 3 classes per client on average.
PAPERS: dict[str, Any] = {
    "dataset": "mnist",
    "seed": [0, 1, 2, 3, 4],
    "clients": 20,
    "ways": 3,
    "stdev": 2,
    "shots": 100,
    "rounds": 100,
    "eval_every": 1,
    "compile": "off",
}
#: The same with fewer rounds and test rows, of which each round needs all.
ON_CPU = PAPERS | {"rounds": 50, "test_shots": 100}
QUICK: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp(hidden=16,width=50)",
    "seed": [0, 1],
    "clients": 4,
    "shots": 5,
    "rounds": 3,
    "eval_every": 1,
}


# --- measuring


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Return every seed's accuracies, in percent, for every profile."""
    fixed = {key: value for key, value in settings.items() if key != "seed"}
    measured: dict[str, Any] = {"settings": settings, "profiles": {}}
    trained: dict[str, list[dict[str, Any]]] = {}
    for name, profile in PROFILES.items():
        options = dict(profile.options)
        key = json.dumps(options, sort_keys=True)
        if key not in trained:
            trained[key] = train(fixed | options, settings["seed"])
        measured["profiles"][name] = {
            "options": options,
            "accuracy": profile.accuracy,
            "reported": profile.reported,
            "runs": trained[key],
        }
    return measured


def train(settings: dict[str, Any], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Train one federation per seed; return what is kept of each."""
    with tempfile.TemporaryDirectory() as folder:
        swept = fedproto.sweep(
            {"seed": seeds}, out=folder, progress=True, checkpoint_every=0, **settings
        )
    kept = []
    for run in swept:
        if run.result is None:
            raise SystemExit(f"{run.name} broke down")
        kept.append(describe(run.result, run.varied["seed"]))
    return kept


def describe(result: fedproto.Result, seed: int) -> dict[str, Any]:
    """Return each accuracy after the last round and after its best round, and that round."""
    evaluated = [line for line in result.metrics if line["accuracy"]]
    accuracies = {}
    for name in result.accuracy:
        curve = [(100 * line["accuracy"][name]["mean"], line["round"]) for line in evaluated]
        best, best_round = max(curve, key=lambda point: (point[0], -point[1]))
        accuracies[name] = {"last": curve[-1][0], "best": best, "best_round": best_round}
    return {
        "seed": seed,
        "accuracy": accuracies,
        "partition": result.data["partition"],
        "machine": result.data["machine"],
    }


# --- the page


def summarise(runs: Sequence[Mapping[str, Any]], accuracy: str, reported: str) -> str:
    """Return the mean over seeds and the half-width of its 95% interval."""
    from fedproto.reproduce.statistics import mean_interval

    mean, half = mean_interval([run["accuracy"][accuracy][reported] for run in runs])
    return f"{mean:.2f} ± {half:.2f}"


def write_page(measured: Mapping[str, Any]) -> str:
    """Return the page: one table of all profiles."""
    common = [f"{title}, own classes, last round" for title in COMMON.values()]
    titles = ["profile", "as its authors report it", "%", *common]
    lines = [
        "# What is called FedProto",
        "",
        "Made by `python3 -m benchmarks.variants`. The profiles are those of",
        "`fedproto run --profile NAME`; docs/fedproto-variants.md says what each one is.",
        "All have the same clients, rows, initial weights and batches: the method alone differs.",
        "Accuracies are in percent, means over clients and seeds ± the half-width of the 95%",
        "interval over seeds. The first figure follows the convention of the profile, the others",
        "one convention for all. The best test round is chosen by looking at the test rows, as",
        "those libraries do: such a figure is too good, by what the columns of one profile show.",
        "",
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
    ]
    for name, profile in measured["profiles"].items():
        runs = profile["runs"]
        convention = f"{TITLES[profile['accuracy']]}, {REPORTED[profile['reported']]}"
        cells = [f"`{name}`", convention]
        cells.append(summarise(runs, profile["accuracy"], profile["reported"]))
        cells += [summarise(runs, accuracy, "last") for accuracy in COMMON]
        lines.append(f"| {' | '.join(cells)} |")
    settings = ", ".join(f"{key} {value}" for key, value in measured["settings"].items())
    machine = ", ".join(next(iter(measured["profiles"].values()))["runs"][0]["machine"].values())
    lines += ["", f"Settings: {settings}. Measured on {machine}."]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all profiles, or take the numbers of before, and write JSON and page."""
    parser = argparse.ArgumentParser(description="measure all profiles of FedProto")
    parser.add_argument("folder", type=Path, help="where variants.json and variants.md are written")
    parser.add_argument("--cpu", action="store_true", help="50 rounds, and fewer test images")
    parser.add_argument("--quick", action="store_true", help="UCI's digits, in seconds")
    parser.add_argument("--finished", action="store_true", help="only write the page again")
    chosen = parser.parse_args(arguments)
    path = chosen.folder / f"{NAME}.json"
    if chosen.finished:
        measured = json.loads(path.read_text())
    else:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        size = ON_CPU if chosen.cpu else PAPERS
        measured = measure(QUICK if chosen.quick else size)
        write_atomically(path, (json.dumps(measured, indent=1) + "\n").encode())
    page = write_page(measured)
    write_atomically(chosen.folder / f"{NAME}.md", page.encode())
    print(page)


if __name__ == "__main__":
    main()
