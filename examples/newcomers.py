"""What is it worth to join a trained federation? Newcomers beside its prototypes, and the same ones alone.

MNIST is dealt to 25 clients: twenty are trained as a federation, then five newcomers with few images learn with its
global prototypes held fixed (joined) or without them (alone), from the same start. Three of them have the federation's
architecture, two another. Then again from the body of one of its members; and, of the members themselves, how well
they tell images of classes they never saw. results/newcomers.md is what this wrote.

    python examples/newcomers.py                       # an hour on two busy cores; started again, it goes on
    python examples/newcomers.py --quick --out runs    # half a minute, on the embedded images
"""

import argparse
import csv
import io
import json
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
from fedproto.inference.open_set import rejections
from fedproto.partitions.file import stamp
from fedproto.plots.marks import show_percent
from fedproto.plots.style import COLOURS, STYLE
from fedproto.reproduce.statistics import ACCURACY_MARGIN, Outcome, compare, decide_family, exact
from fedproto.reproduce.tables import summary
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import write_atomically

MODELS = (
    "cnn",
    "cnn",
    "cnn",
    "mlp",
    "cnn(channels=32,width=100)",
)  # of the newcomers; the federation's is cnn
ALL, SAME, OTHER = range(5), range(3), range(3, 5)
BODIES = {
    "drawn": ALL,
    "trained": SAME,
}  # what newcomers start from; a member's body fits its own architecture only
METHODS = {"alone": 0.0, "joined": 1.0}  # their lambda
WAYS = ("prototype all", "prototype own", "head all", "head own")
RATES = ("accuracy", "known_rejected", "unseen_rejected", "auroc")
REJECT = 0.05  # the share of known images that may be called none of these
Found = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """What is measured; runs of another study lie in another folder."""

    dataset: str
    seeds: int
    rounds: int
    epochs: int = 10
    shots: int = 100
    ks: tuple[int, ...] = (5, 10, 20, 100)

    @property
    def folder(self) -> Path:
        return Path("runs/newcomers", f"{self.dataset}-{self.shots}-{self.rounds}-{self.epochs}")


@dataclass(frozen=True)
class Trial:
    """One seed of a study: its runs, in a folder of its own."""

    study: Study
    seed: int
    loaded: dict[str, Source]  # the data, read once

    def measured(self) -> Found:
        """Everything; what is finished is not run again."""
        self.path("").mkdir(parents=True, exist_ok=True)
        clients = self.dealt()
        federation = kept(self.path("federation"), lambda run: self.federation(run, clients[:20]))
        cells = [(body, k, method) for body in BODIES for k in self.study.ks for method in METHODS]
        found = [self.newcomers(clients[20:], *cell) for cell in cells]
        rejection = kept(self.path("rejection"), lambda _: told_apart(self.path("federation")))
        return {
            "seed": self.seed,
            "federation": federation,
            "newcomers": found,
            "rejection": rejection,
        }

    def path(self, name: str) -> Path:
        return self.study.folder / f"seed-{self.seed}" / name

    def dealt(self) -> list[Found]:
        """Who has which rows, as partition.json says it, by the paper's partition among all 25."""
        share = {
            "clients": 25,
            "ways": 3,
            "stdev": 2,
            "shots": self.study.shots,
            "model": "cnn",
            "engine": "reference",
        }
        settings = {"dataset": self.study.dataset, "seed": self.seed} | share
        experiment = Experiment.prepare(configure(settings)[0], loaded=self.loaded)
        with closing(experiment.engine):
            return experiment.federation.partition["clients"]

    def federation(self, run: Path, clients: list[Found]) -> Found:
        """Twenty clients trained with the defaults; the body of the first goes into a file for newcomers."""
        rounds, rows = self.study.rounds, written(self.path("federation-rows.json"), clients)
        settings = {
            "dataset": self.study.dataset,
            "model": "cnn",
            "clients": len(clients),
            "seed": self.seed,
        }
        every = {"rounds": rounds, "eval_every": rounds, "checkpoint_every": rounds}
        result = fedproto.run(algorithm="fedproto", partition=rows, **settings, **every, out=run)
        state = fedproto.Classifier.of(run, 0).member.module.state_dict()
        save_file(
            {k: v for k, v in state.items() if k.startswith("body.")}, self.path("body.safetensors")
        )
        members = [
            {name: client[name] for name in ("classes", "accuracy")} for client in result.clients
        ]
        return summed_up(result, "machine") | {"members": members}

    def newcomers(self, clients: list[Found], body: str, k: int, method: str) -> Found:
        """Joined and alone differ in lambda alone: same rows, same start, same shuffles."""
        name, who = f"{body}-{k}", BODIES[body]
        settings = {
            "dataset": self.study.dataset,
            "partition": written(
                self.path(f"{name}-rows.json"), [self.fewer(clients[each], k) for each in who]
            ),
            "clients": len(who),
            "model": ",".join(f"{MODELS[each]}*1" for each in who),
            "start": "own",  # strangers, who have neither the federation's first weights nor each other's
            "initial": str(self.path("body.safetensors")) if body == "trained" else None,
            "prototypes": str(self.path("federation")),
            "fixed": True,
            "lam": METHODS[method],
            "rounds": self.study.epochs,
            "eval_every": 1,
            "seed": self.seed,
        }
        about = {"body": body, "k": k, "method": method}
        return about | kept(self.path(f"{name}-{method}"), lambda run: self.learnt(run, settings))

    def fewer(self, client: Found, k: int) -> Found:
        """k rows of each class, or all there are; those of a smaller k are among those of a larger one."""
        rows = generator(self.seed, "newcomers").permutation(client["train"])
        labels = next(iter(self.loaded.values())).train.y[rows]
        few = np.concatenate([rows[labels == label][:k] for label in np.unique(labels)])
        return client | {"train": np.sort(few).tolist()}

    def learnt(self, run: Path, settings: Found) -> Found:
        """What `fedproto.run` does, after a look before the first epoch."""
        experiment = Experiment.prepare(configure(settings)[0], loaded=self.loaded)
        epochs = experiment.engine.evaluate([experiment.progress.server])
        result = experiment.execute(
            experiment.new_folder(run), lambda found: epochs.append(found.clients)
        )
        accuracy = {
            way: [[round(float(x), 5) for x in epoch[way]] for epoch in epochs] for way in epochs[0]
        }
        clients = [
            {name: client[name] for name in ("model", "classes", "images")}
            for client in result.clients
        ]
        return summed_up(result) | {"clients": clients, "accuracy": accuracy}


def kept(run: Path, make: Callable[[Path], Found]) -> Found:
    """What a run gave, from the file beside its folder, which is there once the run is finished."""
    path = run.with_suffix(".json")
    if not path.exists():
        shutil.rmtree(run, ignore_errors=True)  # one that was stopped
        write_atomically(path, json.dumps(make(run)).encode())
        print(run, flush=True)
    return json.loads(path.read_text())


def written(path: Path, clients: list[Found]) -> str:
    """These clients as a partition file, and that as a choice."""
    content = {"version": 1, "clients": clients}
    write_atomically(path, json.dumps(content | {"sha256": stamp(content)}).encode())
    return f"file:{path}"


def summed_up(result: fedproto.Result, *more: str) -> Found:
    return {name: result.data[name] for name in ("partition", *more)} | {
        "seconds": result.data["seconds"]["total"]
    }


def told_apart(run: Path) -> Found:
    """Each member and way to classify: what share of known and of unseen test images it calls none of these."""
    started = time.perf_counter()
    found = [
        vars(each) | {name: round(getattr(each, name), 5) for name in RATES}
        for each in rejections(run, REJECT)
    ]
    return {"members": found, "seconds": time.perf_counter() - started}


# --- the page and the figure, of nothing but the JSON


def values(
    found: Found, body: str, k: int, method: str, way: str, epoch: int, who: Sequence[int] = ALL
) -> list[float]:
    """A number a seed: the mean over newcomers."""
    runs = [run for seed in found["runs"] for run in seed["newcomers"]]
    mine = [
        run["accuracy"][way][epoch]
        for run in runs
        if (run["body"], run["k"], run["method"]) == (body, k, method)
    ]
    return [fmean(x for number, x in enumerate(each) if number in who) for each in mine]


def gains(found: Found, body: str, k: int, epoch: int, who: Sequence[int] = ALL) -> list[float]:
    """Joined minus alone by the head, seed by seed."""
    alone, joined = (values(found, body, k, method, "head", epoch, who) for method in METHODS)
    return [more - less for more, less in zip(joined, alone, strict=True)]


def shown(of_seeds: Sequence[float], sign: str = "") -> str:
    """In percent, ± the half-width of the 95% interval over seeds."""
    spread = summary([[value] for value in of_seeds])
    half = f" ± {100 * spread['interval']:.2f}" if "interval" in spread else ""
    return f"{100 * spread['mean']:{sign}.2f}{half}"


WORDS = {
    Outcome.BETTER: "helps",
    Outcome.WORSE: "hurts",
    Outcome.EQUIVALENT: "equivalent",
    Outcome.UNDECIDED: "undecided",
}


def judge(rows: Sequence[Sequence[float]]) -> list[str]:
    """What joining does in each row of a table, from its differences by seed; the rows are one family."""
    comparisons = []
    for differences in rows:
        points = exact({("row", seed): 100 * value for seed, value in enumerate(differences)})
        nothing = exact(dict.fromkeys(points, 0.0))
        comparisons.append(compare(points, nothing, margin=ACCURACY_MARGIN))
    return [WORDS[decision.outcome] for decision in decide_family(comparisons)]


def judge_alone(differences: Sequence[float]) -> str:
    """What joining does in a row by itself, not corrected for the others."""
    (word,) = judge([differences])
    return word


COMPARED = (
    "alone",
    "joined",
    "joined − alone",
    "joined, prototype own",
    "joined, prototype all",
    "joining",
)


def compared(
    found: Found, body: str, k: int, epoch: int, word: str, who: Sequence[int] = ALL
) -> list[str]:
    """Before training the head is chance's, so that only the nearest prototype says something."""
    near = [
        shown(values(found, body, k, "joined", way, epoch, who))
        for way in ("prototype_own", "prototype")
    ]
    if not epoch:
        return ["–", "–", "–", *near, "–"]
    heads = [shown(values(found, body, k, method, "head", epoch, who)) for method in METHODS]
    difference = gains(found, body, k, epoch, who)
    return [*heads, shown(difference, "+"), *near, word]


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    first, *others = ("| " + " | ".join(map(str, row)) + " |" for row in (heads, *rows))
    return "\n".join([first, "|---" * len(heads) + "|", *others])


def grid(found: Found) -> list[tuple[int, int]]:
    return [
        (k, e) for k in found["study"]["ks"] for e in (1, 3, 10) if e <= found["study"]["epochs"]
    ]


def judged_grid(found: Found, body: str) -> dict[tuple[int, int], str]:
    """The word for each number of images and epoch of a table."""
    cells = grid(found)
    words = judge([gains(found, body, *cell) for cell in cells])
    return dict(zip(cells, words, strict=True))


def said(found: Found, body: str) -> str:
    """In which rows joining helps, hurts, does nothing that matters, or cannot be told."""
    words = judged_grid(found, body)

    def where(word: str) -> str:
        by_k = {
            k: [str(e) for (j, e), each in words.items() if (j, each) == (k, word)]
            for k, _ in words
        }
        listed = "; ".join(
            f"k = {k}, epoch {', '.join(epochs)}" for k, epochs in by_k.items() if epochs
        )
        return (
            f"in {list(words.values()).count(word)} of {len(words)} rows ({listed})"
            if listed
            else "in no row"
        )

    alone = [judge_alone(gains(found, body, *cell)) for cell in words]
    uncorrected = f"each row for itself, it would help in {alone.count('helps')} and hurt in {alone.count('hurts')}"
    return (
        f"By the head, joining helps {where('helps')} and hurts {where('hurts')}; it is equivalent "
        f"{where('equivalent')}, and undecided {where('undecided')}. Not corrected, {uncorrected}."
    )


def unfinished(found: Found) -> str:
    """Epochs of few images have few steps: whether newcomers have learnt all they could is said in numbers."""
    last = found["study"]["epochs"]
    ends = {
        k: [values(found, "drawn", k, "alone", "head", e) for e in (last // 2, last)]
        for k in found["study"]["ks"]
    }
    rises = ", ".join(
        f"{100 * (fmean(end) - fmean(before)):+.1f} at k = {k}" for k, (before, end) in ends.items()
    )
    what = "where that is much, a row tells how fast newcomers learn, not where they end"
    return (
        f"From epoch {last // 2} to {last} those alone changed by so many points: {rises}; {what}."
    )


def steps(found: Found, k: int) -> float:
    """Steps an epoch, of 8 images each: the mean over newcomers and seeds."""
    runs = [
        run
        for seed in found["runs"]
        for run in seed["newcomers"]
        if (run["body"], run["k"]) == ("drawn", k)
    ]
    return fmean(-(-sum(client["images"]) // 8) for run in runs for client in run["clients"])


def tables(found: Found) -> dict[str, str]:
    """Table 2 is of the second k, where there is little to learn from; before training, k makes no difference."""
    ks, architectures = found["study"]["ks"], {"the federation's (3)": SAME, "another (2)": OTHER}
    cells = [
        (name, e, who) for name, who in architectures.items() for k, e in grid(found) if k == ks[1]
    ]
    drawn = judged_grid(found, "drawn")
    trained = judged_grid(found, "trained")
    by_architecture = judge([gains(found, "drawn", ks[1], e, who) for _, e, who in cells])
    first = []
    for (k, e), word in drawn.items():
        first.append([k, e, f"{e * steps(found, k):.0f}", *compared(found, "drawn", k, e, word)])
    second = []
    for (name, e, who), word in zip(cells, by_architecture, strict=True):
        second.append([name, e, *compared(found, "drawn", ks[1], e, word, who)])
    third = [[k, e, *compared(found, "trained", k, e, word)] for (k, e), word in trained.items()]
    return {
        "first": table(("k", "epoch", "steps", *COMPARED), first),
        "second": f"k = {ks[1]}.\n\n" + table(("architecture", "epoch", *COMPARED), second),
        "third": table(
            ("k", "epoch", *COMPARED),
            [["any", 0, *compared(found, "trained", ks[0], 0, "–")], *third],
        ),
        "fourth": table(
            ("by", "accuracy", "known rejected", "unseen rejected", "AUROC"), rejected(found)
        ),
    }


def rejected(found: Found) -> list[list[str]]:
    seeds = [seed["rejection"]["members"] for seed in found["runs"]]
    means = {
        (way, rate): [fmean(m[rate] for m in seed if m["way"] == way) for seed in seeds]
        for way in WAYS
        for rate in RATES
    }
    return [[way, *(shown(means[way, rate]) for rate in RATES)] for way in WAYS]


def known_before(found: Found) -> float:
    """The share of the newcomers' classes that the member whose body they have was trained on."""
    seeds = [
        (seed["newcomers"][-1]["clients"], seed["federation"]["members"][0]["classes"])
        for seed in found["runs"]
    ]
    return fmean(
        fmean(name in had for name in client["classes"])
        for clients, had in seeds
        for client in clients
    )


def partitions(found: Found) -> str:
    """Stamps of the rows, by which a run can be told to be the same."""
    stamps = []
    for seed in found["runs"]:
        rows = {
            run["k"]: run["partition"][:12] for run in seed["newcomers"] if run["body"] == "drawn"
        }
        by_k = ", ".join(f"k = {k} {text}" for k, text in rows.items())
        stamps.append(
            f"seed {seed['seed']}: federation {seed['federation']['partition'][:12]}, newcomers {by_k}"
        )
    return "; ".join(stamps)


PAGE = """# What joining a trained federation is worth

Seeds {numbers}, fixed before looking; nothing was selected on test data. Made by `{command}`: {seconds:,.0f} s of \
runs on {machine}.

For each seed {dataset} was dealt to 25 clients (3 ± 2 classes, at least 2; {shots} ± 2 images of each). Twenty \
were trained with FedProto's defaults for {rounds} rounds: {federation}% by the nearest prototype. The other five \
are newcomers: three with the federation's cnn, one with an mlp, one with a wider cnn that projects to the \
prototypes' size. Each has k images of each of its classes, and is tested on all test images of these. Joined: the \
global prototypes stay fixed, lambda 1. Alone: the same with lambda 0, from the same weights and with the same \
shuffles. Newcomers draw first weights of their own, not the federation's.

Accuracies in percent, mean over newcomers and seeds ± the half-width of the 95% interval over seeds (Student's \
t). `alone` and `joined` are by the head over all classes; `prototype own` and `all` by the nearest global \
prototype among the newcomer's own or all classes. The difference is paired by seed. Joining helps or hurts by \
Student's paired test, is equivalent where two one-sided tests put it within ± {margin} points, and is else \
undecided, which means that these seeds cannot tell; Holm's method corrects for the rows of a table. \
`steps`: how many, of 8 images each, a newcomer has made so far, in the mean. \
The figure's bands are of each method by itself; what is judged is the paired difference.

![Test accuracy against epochs, joined and alone, a panel for each number of images a class](newcomers.png)

## 1. Newcomers with a model drawn at random

{said_drawn}

{first}

## 2. The same by architecture

{second}

## 3. Newcomers that start from the body of member 0

Three newcomers with the federation's cnn; member 0 was trained on {known:.0%} of the classes they have. Epoch 0 \
is before any training, and the same for every k; the head is drawn anew. {said_trained}

{third}

## 4. What the federation's members never saw

At most {reject:.0%} of known images should be called none of these; the threshold comes from one half of a \
member's test images, everything here from the other. Unseen images are of the classes a member has none of. \
AUROC: the chance, in percent, that an unseen image looks newer than a known one.

{fourth}

Partitions (SHA-256, first 12 digits): {partitions}.
"""


def markdown(found: Found) -> str:
    members = [
        [member["accuracy"]["prototype"] for member in seed["federation"]["members"]]
        for seed in found["runs"]
    ]
    return PAGE.format(
        **found | found["study"] | tables(found),
        reject=REJECT,
        margin=ACCURACY_MARGIN,
        numbers=", ".join(str(seed["seed"]) for seed in found["runs"]),
        federation=shown([fmean(each) for each in members]),
        known=known_before(found),
        said_drawn=f"{said(found, 'drawn')} {unfinished(found)}",
        said_trained=said(found, "trained"),
        partitions=partitions(found),
    )


def curves(found: Found) -> list[Found]:
    """What the figure shows; before the first epoch the head is chance's."""
    epochs = range(1, found["study"]["epochs"] + 1)
    rows = [
        {"k": k, "method": m, "epoch": e}
        for k in found["study"]["ks"]
        for m in METHODS
        for e in epochs
    ]
    spreads = [
        summary([[x] for x in values(found, "drawn", r["k"], r["method"], "head", r["epoch"])])
        for r in rows
    ]
    numbers = [
        {name: round(s[name], 6) if name in s else "" for name in ("mean", "interval")}
        for s in spreads
    ]
    return [row | of for row, of in zip(rows, numbers, strict=True)]


def draw(rows: list[Found], seeds: int) -> bytes:
    """A panel a k, each with its own scale: what joining changes is small beside what k changes."""
    ks, file = sorted({row["k"] for row in rows}), io.BytesIO()
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        canvas = Canvas(figsize=(8, 2.5 * -(-len(ks) // 2) + 0.8), layout="constrained")
        panels = list(canvas.subplots(-(-len(ks) // 2), 2, squeeze=False).flat)
        lines = [
            panel(*each, [row for row in rows if row["k"] == each[1]])
            for each in zip(panels, ks, strict=False)
        ]
        canvas.legend(lines[0], METHODS, loc="outside lower center", ncols=2, handlelength=3)
        over = (
            f"mean over newcomers and {seeds} seeds; bands: its 95% interval"
            if seeds > 1
            else "one seed"
        )
        canvas.suptitle(
            f"Newcomers, alone and joined to a trained federation, by their head\n{over}",
            x=0.01,
            ha="left",
            fontsize=11,
        )
        canvas.savefig(file, format="png", dpi=200, transparent=False, facecolor="white")
    return file.getvalue()


def panel(axes: Any, k: int, rows: list[Found]) -> list[Any]:
    lines = []
    for method, (colour, marker, dashes) in zip(
        METHODS, ((COLOURS[1], "s", "--"), (COLOURS[0], "o", "-")), strict=True
    ):
        mine = [row for row in rows if row["method"] == method]
        x, mean, half = ([row[name] or 0 for row in mine] for name in ("epoch", "mean", "interval"))
        axes.fill_between(
            x, np.subtract(mean, half), np.add(mean, half), color=colour, alpha=0.15, linewidth=0
        )
        lines += axes.plot(x, mean, color=colour, marker=marker, linestyle=dashes)
    axes.set(title=f"k = {k} images a class", xlabel="epoch", ylabel="test accuracy, %")
    show_percent(axes)
    return lines


def gathered(runs: list[Found], study: Study, arguments: Sequence[str]) -> Found:
    """The content of newcomers.json: every number, and what made it."""
    parts = [
        part for run in runs for part in (run["federation"], run["rejection"], *run["newcomers"])
    ]
    return {
        "command": shlex.join(["python", "examples/newcomers.py", *arguments]),
        "machine": ", ".join(
            [*runs[0]["federation"]["machine"].values(), f"{os.cpu_count()} cores"]
        ),
        "versions": {"fedproto": fedproto.__version__, "numpy": np.__version__},
        "seconds": round(sum(part["seconds"] for part in parts), 1),
        "study": asdict(study),
        "runs": runs,
    }


def write(found: Found, out: Path) -> None:
    rows, text = curves(found), io.StringIO(newline="")
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
    runs = [Trial(study, seed, loaded).measured() for seed in range(study.seeds)]
    write(gathered(runs, study, arguments), Path(given.out))


if __name__ == "__main__":
    main(sys.argv[1:])
