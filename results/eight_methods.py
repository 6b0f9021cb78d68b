"""Turn the run folders of eight_methods.sh into mnist-eight-methods.{json,md,png} beside this file.

Usage: python results/eight_methods.py RUNS
"""

import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
#: run folder name without its seed -> (how the table calls it, the paper's accuracy or None)
METHODS = {
    "local": ("Local", 94.05),
    "fesem": ("FeSEM", 95.26),
    "fedprox": ("FedProx", 96.26),
    "fedper-personal--fc1-fc2--": ("FedPer (fc1, fc2 personal, as in the paper)", 95.57),
    "fedavg": ("FedAvg", 95.04),
    "fedrep-personal--fc1-fc2--": ("FedRep (fc1, fc2 personal, as in the paper)", 94.96),
    "fedproto": ("FedProto", 97.13),
    "fedproto-mh": ("FedProto-mh", 97.07),
    "fedper": ("FedPer (head personal, our default)", None),
    "fedrep": ("FedRep (head personal, our default)", None),
    "fedproto-released": ("FedProto, profile `released` (40 test images a class)", None),
}
KEYS = ("head", "head_own", "prototype", "prototype_own")


def read(runs: Path, name: str) -> list[dict]:
    files = sorted(runs.glob(f"{name}-seed[0-9]/result.json"))
    if len(files) < 3:
        sys.exit(
            f"{runs} holds {len(files)} finished runs of {name}, 3 are wanted: run results/eight_methods.sh {runs}"
        )
    return [json.loads(file.read_text()) for file in files]


def cell(results: list[dict], key: str) -> dict | None:
    """Mean over clients and seeds, in percent; its deviation over clients (the seeds' mean) and over seeds."""
    if key not in results[0]["accuracy"]:
        return None
    means = [100 * result["accuracy"][key]["mean"] for result in results]
    clients = [100 * result["accuracy"][key]["std"] for result in results]
    return {
        "mean": statistics.fmean(means),
        "over_clients": statistics.fmean(clients),
        "over_seeds": statistics.stdev(means),
    }


def summarise(results: list[dict]) -> dict:
    return {
        "accuracy": {key: cell(results, key) for key in KEYS if cell(results, key)},
        "values_per_round": statistics.fmean(result["communication"]["values_per_round"] for result in results),
        "bytes_up_per_round": statistics.fmean(r["communication"]["bytes_up"] / r["rounds"] for r in results),
        "runs": [
            {
                "seed": result["seed"],
                "partition": result["partition"],
                "seconds": result["seconds"]["total"],
                "clients": [client["accuracy"] for client in result["clients"]],
            }
            for result in results
        ],
    }


def markdown(table: dict[str, dict]) -> str:
    lines = [
        "| method | head | head, own classes | prototype | prototype, own classes | paper | values up a round |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (title, paper) in METHODS.items():
        row = table[name]
        cells = [_shown(row["accuracy"].get(key)) for key in KEYS]
        lines.append(f"| {title} | {' | '.join(cells)} | {paper or '–'} | {row['values_per_round']:,.0f} |")
    return "\n".join(lines)


def _shown(cell: dict | None) -> str:
    return f"{cell['mean']:.2f} ± {cell['over_clients']:.2f} (± {cell['over_seeds']:.2f})" if cell else "–"


#: What the picture shows: run, which accuracy, label, and where the label stands beside its point. Nothing that did
#: better than FedProto is left out.
POINTS = (
    ("fedproto", "prototype", "FedProto", (10, 6)),
    ("fedproto-mh", "prototype", "FedProto-mh (three architectures)", (10, -13)),
    ("fedper-personal--fc1-fc2--", "head", "", (0, 0)),
    ("fedrep-personal--fc1-fc2--", "head", "FedPer, FedRep (fc1, fc2 at home)", (8, -4)),
    ("fedper", "head", "", (0, 0)),
    ("fedrep", "head", "FedPer, FedRep (head at home)", (-8, -3)),
    ("fedprox", "head", "", (0, 0)),
    ("fedavg", "head", "FedAvg, FedProx", (-8, -4)),
    ("fedavg", "head_own", "FedAvg, own classes only", (-8, 4)),
    ("fesem", "head", "FeSEM", (-8, -4)),
)


def picture(table: dict[str, dict], target: Path) -> None:
    """Accuracy against what a client uploads a round: the claim of this package in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 3.9), dpi=130)
    for name, key, label, offset in POINTS:
        ours = name.startswith("fedproto")
        color, place = "#0072b2" if ours else "#666666", "left" if offset[0] > 0 else "right"
        point = table[name]["bytes_up_per_round"] / 20, table[name]["accuracy"][key]["mean"]
        axes.plot(*point, "o" if ours else "s", color=color, markersize=9 if ours else 7)
        axes.annotate(label, point, offset, textcoords="offset points", color=color, ha=place)
    local = table["local"]["accuracy"]["head"]["mean"]
    axes.axhline(local, color="#d55e00", linestyle="--", linewidth=1)
    axes.annotate("Local (sends nothing)", (6e2, local - 0.22), color="#d55e00")
    axes.set(xscale="log", xlim=(5e2, 4e5), ylim=(95.6, 99.4))
    axes.set(xlabel="bytes uploaded per client and round", ylabel="test accuracy, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("MNIST, 20 clients with 2 to 5 classes each, 100 rounds, mean of 3 seeds", fontsize=10, loc="left")
    figure.tight_layout()
    figure.savefig(target)


def main(runs: Path) -> None:
    table = {name: summarise(read(runs, name)) for name in METHODS}
    (HERE / "mnist-eight-methods.json").write_text(json.dumps(table, indent=1) + "\n")
    page = HERE / "mnist-eight-methods.md"
    before, mark, _ = page.read_text().partition("<!-- table -->\n")
    page.write_text(before + mark + markdown(table) + "\n")
    picture(table, HERE / "mnist-eight-methods.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
