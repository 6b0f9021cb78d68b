"""Measure what it is worth to join a trained federation: newcomers with its prototypes, and alone.

MNIST is divided among 25 clients. Twenty are trained as a federation. Then five newcomers with few
images learn with its global prototypes held fixed (joined) or without them (alone), from the same
start. Three of them have the federation's architecture, two have others. The same is repeated from
the body of one of its members. Finally, the members themselves are tested on images of classes that
they never saw. results/newcomers.md was written by this script.

    python examples/newcomers.py                       # an hour on two busy cores; can be resumed
    python examples/newcomers.py --quick --out runs    # half a minute, on the embedded images
"""

import argparse
import csv
import io
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure as Canvas
from safetensors.torch import save_file

import fedproto
from fedproto.config.settings import configure
from fedproto.core.rng import generator
from fedproto.data import Source
from fedproto.inference.open_set import measure_rejections
from fedproto.partitions.file import hash_partition
from fedproto.plots.marks import show_percent
from fedproto.plots.style import COLOURS, STYLE
from fedproto.reproduce.statistics import ACCURACY_MARGIN, Outcome, compare, decide_family, exact
from fedproto.reproduce.tables import summary
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import write_atomically

MEMBERS = 20  # of the federation
#: The newcomers' models; the federation's is cnn.
MODELS = ("cnn", "cnn", "cnn", "mlp", "cnn(channels=32,width=100)")
ALL = range(5)  # the newcomers by number
SAME = range(3)  # those with the federation's architecture
OTHER = range(3, 5)
#: What newcomers start from, and who can: a member's body fits its own architecture only.
BODIES = {"drawn": ALL, "trained": SAME}
METHODS = {"alone": 0.0, "joined": 1.0}  # their lambda
REPORTED_EPOCHS = (1, 3, 10)
BATCH_IMAGES = 8
WAYS = ("prototype all", "prototype own", "head all", "head own")
RATES = ("accuracy", "known_rejected", "unseen_rejected", "auroc")
REJECT = 0.05  # the fraction of known images that may be called none of these
Found = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """What is measured; the runs of another study lie in another folder."""

    dataset: str
    seeds: int
    rounds: int
    epochs: int = 10
    shots: int = 100
    ks: tuple[int, ...] = (5, 10, 20, 100)  # images per class of a newcomer

    @property
    def folder(self) -> Path:
        return Path("runs/newcomers", f"{self.dataset}-{self.shots}-{self.rounds}-{self.epochs}")


@dataclass(frozen=True)
class Trial:
    """One seed of a study: its runs, in a folder of its own."""

    study: Study
    seed: int
    loaded: dict[str, Source]  # the data, read once

    def measure(self) -> Found:
        """Return everything that is measured; finished runs are not run again."""
        self.path("").mkdir(parents=True, exist_ok=True)
        clients = self.divide_rows()
        members = clients[:MEMBERS]
        newcomers = clients[MEMBERS:]
        federation = run_once(
            self.path("federation"), lambda run: self.train_federation(run, members)
        )
        cells = [(body, k, method) for body in BODIES for k in self.study.ks for method in METHODS]
        found = [self.train_newcomers(newcomers, *cell) for cell in cells]
        rejection = run_once(
            self.path("rejection"), lambda _: measure_rejection(self.path("federation"))
        )
        return {
            "seed": self.seed,
            "federation": federation,
            "newcomers": found,
            "rejection": rejection,
        }

    def path(self, name: str) -> Path:
        return self.study.folder / f"seed-{self.seed}" / name

    def divide_rows(self) -> list[Found]:
        """Return the rows of all 25 clients as in partition.json, by the paper's partition."""
        settings = {
            "dataset": self.study.dataset,
            "seed": self.seed,
            "clients": MEMBERS + len(MODELS),
            "ways": 3,
            "stdev": 2,
            "shots": self.study.shots,
            "model": "cnn",
            "engine": "reference",
        }
        experiment = Experiment.prepare(configure(settings)[0], loaded=self.loaded)
        with closing(experiment.engine):
            return experiment.federation.partition["clients"]

    def train_federation(self, run: Path, clients: list[Found]) -> Found:
        """Train the members with the defaults; save the body of the first one for newcomers."""
        rounds = self.study.rounds
        result = fedproto.run(
            algorithm="fedproto",
            dataset=self.study.dataset,
            model="cnn",
            partition=write_partition(self.path("federation-rows.json"), clients),
            clients=len(clients),
            seed=self.seed,
            rounds=rounds,
            eval_every=rounds,
            checkpoint_every=rounds,
            out=run,
        )
        state = fedproto.Classifier.of(run, 0).trained.module.state_dict()
        body = {name: value for name, value in state.items() if name.startswith("body.")}
        save_file(body, self.path("body.safetensors"))
        members = [select(client, "classes", "accuracy") for client in result.clients]
        return summarise_run(result, "machine") | {"members": members}

    def train_newcomers(self, clients: list[Found], body: str, k: int, method: str) -> Found:
        """Train newcomers, joined or alone: same rows, start and shuffles, another lambda."""
        name = f"{body}-{k}"
        who = BODIES[body]
        rows = [self.select_rows(clients[number], k) for number in who]
        settings = {
            "dataset": self.study.dataset,
            "partition": write_partition(self.path(f"{name}-rows.json"), rows),
            "clients": len(who),
            "model": ",".join(f"{MODELS[number]}*1" for number in who),
            # Each draws its own first weights, which are not the federation's.
            "start": "own",
            "initial": str(self.path("body.safetensors")) if body == "trained" else None,
            "prototypes": str(self.path("federation")),
            "fixed": True,
            "lam": METHODS[method],
            "rounds": self.study.epochs,
            "eval_every": 1,
            "seed": self.seed,
        }
        found = run_once(self.path(f"{name}-{method}"), lambda run: self.train(run, settings))
        return {"body": body, "k": k, "method": method} | found

    def select_rows(self, client: Found, k: int) -> Found:
        """Keep k training rows per class, or all there are; a larger k keeps those of a smaller."""
        rows = generator(self.seed, "newcomers").permutation(client["train"])
        (source,) = self.loaded.values()
        labels = source.train.y[rows]
        kept = [rows[labels == label][:k] for label in np.unique(labels)]
        return client | {"train": np.sort(np.concatenate(kept)).tolist()}

    def train(self, run: Path, settings: Found) -> Found:
        """Do what `fedproto.run` does, but evaluate before the first epoch, too."""
        experiment = Experiment.prepare(configure(settings)[0], loaded=self.loaded)
        epochs = experiment.engine.evaluate([experiment.progress.server])
        result = experiment.execute(
            experiment.new_folder(run), lambda found: epochs.append(found.clients)
        )
        accuracy: dict[str, list[list[float]]] = {}
        for way in epochs[0]:
            accuracy[way] = []
            for epoch in epochs:
                accuracy[way].append([round(float(value), 5) for value in epoch[way]])
        clients = [select(client, "model", "classes", "images") for client in result.clients]
        return summarise_run(result) | {"clients": clients, "accuracy": accuracy}


def run_once(run: Path, make: Callable[[Path], Found]) -> Found:
    """Return what a run gave, from the file beside its folder; without that file, run it."""
    path = run.with_suffix(".json")
    if not path.exists():
        shutil.rmtree(run, ignore_errors=True)  # of a run that was stopped
        write_atomically(path, json.dumps(make(run)).encode())
        print(run, flush=True)
    return json.loads(path.read_text())


def write_partition(path: Path, clients: list[Found]) -> str:
    """Write the rows of clients as a partition file, and return it as a setting."""
    content = {"version": 1, "clients": clients}
    stamped = content | {"sha256": hash_partition(content)}
    write_atomically(path, json.dumps(stamped).encode())
    return f"file:{path}"


def select(values: Found, *names: str) -> Found:
    """Return the values of these names."""
    return {name: values[name] for name in names}


def summarise_run(result: fedproto.Result, *more: str) -> Found:
    """Return a run's partition, seconds and more of its result."""
    chosen = select(result.data, "partition", *more)
    return chosen | {"seconds": result.data["seconds"]["total"]}


def measure_rejection(run: Path) -> Found:
    """Return, for each member and way to classify, how many images it calls none of these.

    These are fractions of the known and of the unseen test images.
    """
    started = time.perf_counter()
    members = []
    for found in measure_rejections(run, REJECT):
        rates = {name: round(getattr(found, name), 5) for name in RATES}
        members.append(vars(found) | rates)
    return {"members": members, "seconds": time.perf_counter() - started}


# --- the numbers of the page and the figure, from the JSON alone


def select_runs(found: Found, body: str, k: int) -> list[Found]:
    """Return the newcomers' runs of all seeds with this start and number of images."""
    runs = [run for seed in found["runs"] for run in seed["newcomers"]]
    return [run for run in runs if run["body"] == body and run["k"] == k]


def seed_means(
    found: Found, body: str, k: int, method: str, way: str, epoch: int, who: Sequence[int] = ALL
) -> list[float]:
    """Return the mean accuracy over newcomers, for each seed."""
    means = []
    for run in select_runs(found, body, k):
        if run["method"] == method:
            accuracies = run["accuracy"][way][epoch]
            means.append(fmean(x for number, x in enumerate(accuracies) if number in who))
    return means


def gains(found: Found, body: str, k: int, epoch: int, who: Sequence[int] = ALL) -> list[float]:
    """Return the accuracy of joined minus that of alone, by the head, for each seed."""
    alone = seed_means(found, body, k, "alone", "head", epoch, who)
    joined = seed_means(found, body, k, "joined", "head", epoch, who)
    return [more - less for more, less in zip(joined, alone, strict=True)]


def show(values: Sequence[float], sign: str = "") -> str:
    """Return the mean of values by seed in percent, ± the half-width of the 95% interval."""
    spread = summary([[value] for value in values])
    text = f"{100 * spread['mean']:{sign}.2f}"
    if "interval" in spread:
        text += f" ± {100 * spread['interval']:.2f}"
    return text


WORDS = {
    Outcome.BETTER: "helps",
    Outcome.WORSE: "hurts",
    Outcome.EQUIVALENT: "equivalent",
    Outcome.UNDECIDED: "undecided",
}


def judge(rows: Sequence[Sequence[float]]) -> list[str]:
    """Return what joining does in each row of a table, from its differences by seed.

    The rows are one family of tests.
    """
    comparisons = []
    for differences in rows:
        points = exact({("row", seed): 100 * value for seed, value in enumerate(differences)})
        nothing = exact(dict.fromkeys(points, 0.0))
        comparisons.append(compare(points, nothing, margin=ACCURACY_MARGIN))
    return [WORDS[decision.outcome] for decision in decide_family(comparisons)]


def judge_alone(differences: Sequence[float]) -> str:
    """Return what joining does in a single row, not corrected for the others."""
    (word,) = judge([differences])
    return word


def reported_cells(found: Found) -> list[tuple[int, int]]:
    """Return the rows of a table: number of images per class, and epoch."""
    last = found["study"]["epochs"]
    epochs = [epoch for epoch in REPORTED_EPOCHS if epoch <= last]
    return [(k, epoch) for k in found["study"]["ks"] for epoch in epochs]


def judge_cells(found: Found, body: str) -> dict[tuple[int, int], str]:
    """Return the word for each number of images and epoch of a table."""
    cells = reported_cells(found)
    words = judge([gains(found, body, k, epoch) for k, epoch in cells])
    return dict(zip(cells, words, strict=True))


# --- the sentences of the page


def conclude(found: Found, body: str) -> str:
    """Return in which rows joining helps, hurts, is equivalent, or is undecided."""
    words = judge_cells(found, body)
    alone = [judge_alone(gains(found, body, k, epoch)) for k, epoch in words]
    return (
        f"By the head, joining helps {list_rows(words, 'helps')} and hurts "
        f"{list_rows(words, 'hurts')}; it is equivalent {list_rows(words, 'equivalent')}, and "
        f"undecided {list_rows(words, 'undecided')}. Not corrected, each row for itself, it would "
        f"help in {alone.count('helps')} and hurt in {alone.count('hurts')}."
    )


def list_rows(words: dict[tuple[int, int], str], wanted: str) -> str:
    """Return the rows with a word as text, by the number of images."""
    epochs_by_k: dict[int, list[str]] = {}
    for (k, epoch), word in words.items():
        if word == wanted:
            epochs_by_k.setdefault(k, []).append(str(epoch))
    if not epochs_by_k:
        return "in no row"
    listed = "; ".join(f"k = {k}, epoch {', '.join(e)}" for k, e in epochs_by_k.items())
    count = list(words.values()).count(wanted)
    return f"in {count} of {len(words)} rows ({listed})"


def describe_progress(found: Found) -> str:
    """Return how much newcomers alone still learnt in the second half of the epochs.

    Epochs of few images have few steps, so they may not have learnt all they could.
    """
    last = found["study"]["epochs"]
    middle = last // 2
    rises = []
    for k in found["study"]["ks"]:
        before = seed_means(found, "drawn", k, "alone", "head", middle)
        after = seed_means(found, "drawn", k, "alone", "head", last)
        rises.append(f"{100 * (fmean(after) - fmean(before)):+.1f} at k = {k}")
    return (
        f"From epoch {middle} to {last} those alone changed by so many points: {', '.join(rises)}; "
        "where that is much, a row tells how fast newcomers learn, not where they end."
    )


def known_before(found: Found) -> float:
    """Return the fraction of the newcomers' classes that the member with their body was trained on.

    It is the mean over newcomers and seeds.
    """
    fractions = []
    for seed in found["runs"]:
        trained_on = seed["federation"]["members"][0]["classes"]
        for client in seed["newcomers"][-1]["clients"]:
            is_known = [name in trained_on for name in client["classes"]]
            fractions.append(fmean(is_known))
    return fmean(fractions)


def describe_partitions(found: Found) -> str:
    """Return hashes of the rows, by which another run can be recognised as the same."""
    sentences = []
    for seed in found["runs"]:
        hashes = {}
        for run in seed["newcomers"]:
            if run["body"] == "drawn":
                hashes[run["k"]] = run["partition"][:12]
        newcomers = ", ".join(f"k = {k} {text}" for k, text in hashes.items())
        federation = seed["federation"]["partition"][:12]
        sentences.append(f"seed {seed['seed']}: federation {federation}, newcomers {newcomers}")
    return "; ".join(sentences)


# --- the tables of the page

COMPARED = (
    "alone",
    "joined",
    "joined − alone",
    "joined, prototype own",
    "joined, prototype all",
    "joining",
)


def compare_cells(
    found: Found, body: str, k: int, epoch: int, word: str, who: Sequence[int] = ALL
) -> list[str]:
    """Return the cells of a row under `COMPARED`.

    Before training the head only guesses, so only the nearest prototype is shown.
    """
    prototype_own = show(seed_means(found, body, k, "joined", "prototype_own", epoch, who))
    prototype_all = show(seed_means(found, body, k, "joined", "prototype", epoch, who))
    if epoch == 0:
        return ["–", "–", "–", prototype_own, prototype_all, "–"]
    alone = show(seed_means(found, body, k, "alone", "head", epoch, who))
    joined = show(seed_means(found, body, k, "joined", "head", epoch, who))
    difference = show(gains(found, body, k, epoch, who), "+")
    return [alone, joined, difference, prototype_own, prototype_all, word]


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = []
    for row in (header, *rows):
        cells = [str(cell) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    lines.insert(1, "|---" * len(header) + "|")
    return "\n".join(lines)


def mean_steps(found: Found, k: int) -> float:
    """Return the steps per epoch: the mean over newcomers and seeds."""
    steps: list[int] = []
    for run in select_runs(found, "drawn", k):
        images = [sum(client["images"]) for client in run["clients"]]
        steps.extend(math.ceil(count / BATCH_IMAGES) for count in images)
    return fmean(steps)


def tables(found: Found) -> dict[str, str]:
    """Return the four tables of the page by the names that the page gives them."""
    return {
        "first": table_of_drawn(found),
        "second": table_by_architecture(found),
        "third": table_of_trained(found),
        "fourth": table_of_rejection(found),
    }


def table_of_drawn(found: Found) -> str:
    rows = []
    for (k, epoch), word in judge_cells(found, "drawn").items():
        steps = f"{epoch * mean_steps(found, k):.0f}"
        rows.append([k, epoch, steps, *compare_cells(found, "drawn", k, epoch, word)])
    return table(("k", "epoch", "steps", *COMPARED), rows)


def table_by_architecture(found: Found) -> str:
    """Return the table of the second k, where there is little to learn from."""
    k = found["study"]["ks"][1]
    epochs = [epoch for each, epoch in reported_cells(found) if each == k]
    cells: list[tuple[str, int, Sequence[int]]] = []
    for name, who in (("the federation's (3)", SAME), ("another (2)", OTHER)):
        cells.extend((name, epoch, who) for epoch in epochs)
    words = judge([gains(found, "drawn", k, epoch, who) for _, epoch, who in cells])
    rows = []
    for (name, epoch, who), word in zip(cells, words, strict=True):
        rows.append([name, epoch, *compare_cells(found, "drawn", k, epoch, word, who)])
    return f"k = {k}.\n\n" + table(("architecture", "epoch", *COMPARED), rows)


def table_of_trained(found: Found) -> str:
    """Return the table of newcomers with a member's body; before training, k does not matter."""
    smallest = found["study"]["ks"][0]
    rows: list[list[Any]] = [["any", 0, *compare_cells(found, "trained", smallest, 0, "–")]]
    for (k, epoch), word in judge_cells(found, "trained").items():
        rows.append([k, epoch, *compare_cells(found, "trained", k, epoch, word)])
    return table(("k", "epoch", *COMPARED), rows)


def table_of_rejection(found: Found) -> str:
    rows = []
    for way in WAYS:
        row = [way]
        for rate in RATES:
            means = []
            for seed in found["runs"]:
                members = seed["rejection"]["members"]
                means.append(fmean(each[rate] for each in members if each["way"] == way))
            row.append(show(means))
        rows.append(row)
    return table(("by", "accuracy", "known rejected", "unseen rejected", "AUROC"), rows)


PAGE = """# What joining a trained federation is worth

Seeds {numbers}, fixed before looking; nothing was selected on test data. Made by `{command}`: \
{seconds:,.0f} s of runs on {machine}.

For each seed {dataset} was dealt to 25 clients (3 ± 2 classes, at least 2; {shots} ± 2 images \
of each). Twenty were trained with FedProto's defaults for {rounds} rounds: {federation}% by the \
nearest prototype. The other five are newcomers: three with the federation's cnn, one with an \
mlp, one with a wider cnn that projects to the prototypes' size. Each has k images of each of \
its classes, and is tested on all test images of these. Joined: the global prototypes stay \
fixed, lambda 1. Alone: the same with lambda 0, from the same weights and with the same \
shuffles. Newcomers draw first weights of their own, not the federation's.

Accuracies in percent, mean over newcomers and seeds ± the half-width of the 95% interval over \
seeds (Student's t). `alone` and `joined` are by the head over all classes; `prototype own` and \
`all` by the nearest global prototype among the newcomer's own or all classes. The difference is \
paired by seed. Joining helps or hurts by Student's paired test, is equivalent where two \
one-sided tests put it within ± {margin} points, and is else undecided, which means that these \
seeds cannot tell; Holm's method corrects for the rows of a table. `steps`: how many, of 8 \
images each, a newcomer has made so far, in the mean. The figure's bands are of each method by \
itself; what is judged is the paired difference.

![Test accuracy against epochs, joined and alone, a panel for each number of images a \
class](newcomers.png)

## 1. Newcomers with a model drawn at random

{said_drawn}

{first}

## 2. The same by architecture

{second}

## 3. Newcomers that start from the body of member 0

Three newcomers with the federation's cnn; member 0 was trained on {known:.0%} of the classes \
they have. Epoch 0 is before any training, and the same for every k; the head is drawn anew. \
{said_trained}

{third}

## 4. What the federation's members never saw

At most {reject:.0%} of known images should be called none of these; the threshold comes from \
one half of a member's test images, everything here from the other. Unseen images are of the \
classes a member has none of. AUROC: the chance, in percent, that an unseen image looks newer \
than a known one.

{fourth}

Partitions (SHA-256, first 12 digits): {partitions}.
"""


def markdown(found: Found) -> str:
    """Return the page, from the content of newcomers.json."""
    accuracies = []
    for seed in found["runs"]:
        members = seed["federation"]["members"]
        accuracies.append(fmean(member["accuracy"]["prototype"] for member in members))
    return PAGE.format(
        **found | found["study"] | tables(found),
        reject=REJECT,
        margin=ACCURACY_MARGIN,
        numbers=", ".join(str(seed["seed"]) for seed in found["runs"]),
        federation=show(accuracies),
        known=known_before(found),
        said_drawn=f"{conclude(found, 'drawn')} {describe_progress(found)}",
        said_trained=conclude(found, "trained"),
        partitions=describe_partitions(found),
    )


# --- the figure


def curves(found: Found) -> list[Found]:
    """Return what the figure shows, a row per k, method and epoch.

    Epoch 0 is left out: before training the head only guesses.
    """
    rows = []
    for k in found["study"]["ks"]:
        for method in METHODS:
            for epoch in range(1, found["study"]["epochs"] + 1):
                values = seed_means(found, "drawn", k, method, "head", epoch)
                spread = summary([[value] for value in values])
                row: Found = {"k": k, "method": method, "epoch": epoch}
                for name in ("mean", "interval"):
                    row[name] = round(spread[name], 6) if name in spread else ""
                rows.append(row)
    return rows


def draw(rows: list[Found], seeds: int) -> bytes:
    """Return the figure as PNG, with a panel per k.

    Each panel has its own scale: what joining changes is small compared to what k changes.
    """
    ks = sorted({row["k"] for row in rows})
    panel_rows = math.ceil(len(ks) / 2)
    over = "one seed"
    if seeds > 1:
        over = f"mean over newcomers and {seeds} seeds; bands: its 95% interval"
    file = io.BytesIO()
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        canvas = Canvas(figsize=(8, 2.5 * panel_rows + 0.8), layout="constrained")
        panels = list(canvas.subplots(panel_rows, 2, squeeze=False).flat)
        for axes, k in zip(panels, ks, strict=False):  # one panel stays empty if ks are odd
            lines = draw_panel(axes, k, [row for row in rows if row["k"] == k])
        canvas.legend(lines, METHODS, loc="outside lower center", ncols=2, handlelength=3)
        canvas.suptitle(
            f"Newcomers, alone and joined to a trained federation, by their head\n{over}",
            x=0.01,
            ha="left",
            fontsize=11,
        )
        canvas.savefig(file, format="png", dpi=200, transparent=False, facecolor="white")
    return file.getvalue()


LOOKS = {"alone": (COLOURS[1], "s", "--"), "joined": (COLOURS[0], "o", "-")}


def draw_panel(axes: Any, k: int, rows: list[Found]) -> list[Any]:
    """Draw the curves of one k, and return their lines."""
    lines = []
    for method, (colour, marker, dashes) in LOOKS.items():
        own_rows = [row for row in rows if row["method"] == method]
        epochs = [row["epoch"] for row in own_rows]
        mean = np.array([row["mean"] for row in own_rows])
        half_width = np.array([row["interval"] or 0 for row in own_rows])
        low = mean - half_width
        high = mean + half_width
        axes.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
        lines += axes.plot(epochs, mean, color=colour, marker=marker, linestyle=dashes)
    axes.set(title=f"k = {k} images per class", xlabel="epoch", ylabel="test accuracy, %")
    show_percent(axes)
    return lines


# --- all together


def gather(runs: list[Found], study: Study, arguments: Sequence[str]) -> Found:
    """Return the content of newcomers.json: every number, and how it was made."""
    seconds = 0.0
    for run in runs:
        for part in (run["federation"], run["rejection"], *run["newcomers"]):
            seconds += part["seconds"]
    machine = [*runs[0]["federation"]["machine"].values(), f"{os.cpu_count()} cores"]
    return {
        "command": shlex.join(["python", "examples/newcomers.py", *arguments]),
        "machine": ", ".join(machine),
        "versions": {"fedproto": fedproto.__version__, "numpy": np.__version__},
        "seconds": round(seconds, 1),
        "study": asdict(study),
        "runs": runs,
    }


def write(found: Found, out: Path) -> None:
    """Write newcomers.json, .md, .csv and .png."""
    rows = curves(found)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    out.mkdir(parents=True, exist_ok=True)
    files = {"json": json.dumps(found), "md": markdown(found), "csv": text.getvalue()}
    for ending, content in files.items():
        write_atomically(out / f"newcomers.{ending}", content.encode())
    write_atomically(out / "newcomers.png", draw(rows, found["study"]["seeds"]))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", default="results")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument(
        "--quick", action="store_true", help="a few images of mnist5k, one seed, two rounds"
    )
    given = parser.parse_args(arguments)
    study = Study(given.dataset, given.seeds, given.rounds)
    if given.quick:
        study = Study("mnist5k", 1, 2, epochs=3, shots=12, ks=(5, 10))
    loaded: dict[str, Source] = {}
    runs = [Trial(study, seed, loaded).measure() for seed in range(study.seeds)]
    write(gather(runs, study, arguments), Path(given.out))


if __name__ == "__main__":
    main(sys.argv[1:])
