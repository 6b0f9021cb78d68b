"""The paper's claims, each with what was measured, a paired test over seeds, and a verdict; and what it leaves out.

Everything is computed from the JSON files of the targets; a claim whose target has not been made yet says so. Two
methods are compared over pairs: the same column and seed, so the same partition and the same images.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

LIKELY = 0.05  # chance of a difference where there is none, up to which we believe in one
TABLES = {"table-mnist": "MNIST", "table-femnist": "62 characters", "table-cifar10": "CIFAR-10"}
BASELINES = ("Local", "FeSEM", "FedProx", "FedPer", "FedAvg", "FedRep")
OURS = "FedProto"
HOLDS, NOT, OPEN = "holds", "does not hold", "not measured yet"


@dataclass(frozen=True)
class Verdict:
    claim: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class Paired:
    """The differences of two methods over the same federations, in points or rounds."""

    mean: float
    half: float  # of the 95% interval
    chance: float  # two-sided p of Student's paired test
    above: int  # federations in which the difference is positive
    pairs: int
    seeds: int

    def __str__(self) -> str:
        if self.seeds < 2:
            return f"{self.mean:+.2f} (one seed, {self.above} of {self.pairs} federations above)"
        surely = "p < 0.001" if self.chance < 0.001 else f"p = {self.chance:.3f}"
        return f"{self.mean:+.2f} ± {self.half:.2f} ({surely}, {self.above} of {self.pairs} federations above)"

    @property
    def sign(self) -> int | None:
        """1 or -1 for a difference we believe in, 0 for none, None where one seed tells nothing."""
        if self.seeds < 2:
            return None
        return 0 if not self.chance < LIKELY else 1 if self.mean > 0 else -1


class Found:
    """A target's cells."""

    def __init__(self, cells: Sequence[dict[str, Any]]) -> None:
        self.cells = {(cell["method"], cell["column"]): cell for cell in cells if cell["runs"]}

    def has(self, *methods: str) -> bool:
        return all(any(method == name for name, _ in self.cells) for method in methods)

    def columns(self, method: str) -> list[str]:
        return [column for name, column in self.cells if name == method]

    def of(self, method: str, value: Value) -> dict[tuple[str, int], float]:
        """One number a federation of the method, by column and seed."""
        return {
            (column, run["seed"]): value(cell, run)
            for (name, column), cell in self.cells.items()
            if name == method
            for run in cell["runs"]
        }

    def mean(self, method: str, value: Value) -> float:
        return statistics.fmean(self.of(method, value).values())


Value = Callable[[dict[str, Any], dict[str, Any]], float]


def accuracy(key: str | None = None) -> Value:
    """The mean over clients of an accuracy, or of what the method predicts by, in percent."""
    return lambda cell, run: 100 * statistics.fmean(run["accuracy"][key or cell["score"]])


def deviation(cell: dict[str, Any], run: dict[str, Any]) -> float:
    return 100 * float(np.std(run["accuracy"][cell["score"]]))


def rounds(cell: dict[str, Any], run: dict[str, Any]) -> float:
    return cell["rounds_to_99"][cell["seeds"].index(run["seed"])]


def values(cell: dict[str, Any], run: dict[str, Any]) -> float:
    return run["communication"]["values_per_round"]


Numbers = dict[tuple[str, int], float]  # by column and seed


def pair(first: Numbers, second: Numbers) -> Paired:
    """first − second, over what both have. Seeds are what is independent: columns of one share images and weights."""
    apart = {key: first[key] - second[key] for key in first if key in second}
    above = sum(difference > 0 for difference in apart.values())
    by_seed: dict[int, list[float]] = {}
    for (_, seed), difference in apart.items():
        by_seed.setdefault(seed, []).append(difference)
    means = [statistics.fmean(each) for each in by_seed.values()]
    if len(means) < 2 or np.ptp(means) == 0:
        return Paired(statistics.fmean(means), float("nan"), float("nan"), above, len(apart), len(means))
    half = float(stats.sem(means) * stats.t.ppf(0.975, len(means) - 1))
    chance = float(stats.ttest_1samp(means, 0).pvalue)
    return Paired(statistics.fmean(means), half, chance, above, len(apart), len(means))


def judged(signs: dict[str, int | None], wanted: int = 1) -> str:
    """A claim about several data sets, by the sign of the difference on each."""
    told = {name: sign for name, sign in signs.items() if sign is not None}
    yes, no = ([name for name, sign in told.items() if (sign == wanted) == right] for right in (True, False))
    if not told:
        return OPEN
    if not no:
        return HOLDS if len(told) > 1 else f"{HOLDS} on {yes[0]}"
    if not yes:
        return NOT if any(told.values()) else f"{NOT}: no difference seen"
    return f"holds under a condition: on {' and '.join(yes)}, not on {' and '.join(no)}"


def read(folder: Path) -> dict[str, Found]:
    """The targets that were made."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if "cells" in content:
            found[path.stem] = Found(content["cells"])
    return found


# --- the paper's claims


def _tables(found: dict[str, Found], *methods: str) -> dict[str, Found]:
    """The tables in which these methods were run, by the name of their data."""
    return {title: found[name] for name, title in TABLES.items() if name in found and found[name].has(OURS, *methods)}


def _against(found: dict[str, Found], value: Value, wanted: int, what: str) -> Iterator[Verdict]:
    """FedProto against each baseline, on each data set."""
    for baseline in BASELINES:
        tables = _tables(found, baseline)
        pairs = {title: pair(table.of(OURS, value), table.of(baseline, value)) for title, table in tables.items()}
        shown = "; ".join(f"{title} {each}" for title, each in pairs.items())
        yield Verdict(what.format(baseline), shown, judged({title: each.sign for title, each in pairs.items()}, wanted))


def more_accurate(found: dict[str, Found]) -> Iterator[Verdict]:
    yield from _against(found, accuracy(), 1, "FedProto is more accurate than {} (points)")


def less_varied(found: dict[str, Found]) -> Iterator[Verdict]:
    yield from _against(found, deviation, -1, "its accuracy deviates less over clients than {}'s (points)")


def fewer_rounds(found: dict[str, Found]) -> Iterator[Verdict]:
    yield from _against(found, rounds, -1, "it needs fewer rounds than {} (to 99% of its own last accuracy)")


def little_traffic(found: dict[str, Found]) -> Iterator[Verdict]:
    for name, papers in (("table-mnist", 4_000), ("table-femnist", 4_000), ("table-cifar10", 41_000)):
        claim = f"{papers:,} values a round on {TABLES[name]}"
        if name not in found or not found[name].has(OURS):
            yield Verdict(claim, "", OPEN)
            continue
        cells = {column: cell for (method, column), cell in found[name].cells.items() if method == OURS}
        sent = {column: cell["communication"]["values_per_round"] for column, cell in cells.items()}
        four = [value for column, value in sent.items() if column.startswith("n = 4")]
        near = all(abs(value / papers - 1) < 0.15 for value in four)
        shown = ", ".join(f"{column}: {value:,.0f}" for column, value in sent.items())
        yield Verdict(claim, shown, "holds under a condition: at n = 4; it grows with n" if near else NOT)


def mixed_models(found: dict[str, Found]) -> Iterator[Verdict]:
    mixed = "FedProto-mh"
    tables = _tables(found, mixed)
    pairs = {title: pair(table.of(mixed, accuracy()), table.of(OURS, accuracy())) for title, table in tables.items()}
    shown = "; ".join(f"{title} {each}" for title, each in pairs.items())
    signs: dict[str, int | None] = {title: 1 if each.mean > -1 else -1 for title, each in pairs.items()}
    yield Verdict("mixed models are as good as equal ones (within one point)", shown, judged(signs))


def fewer_samples(found: dict[str, Found]) -> Iterator[Verdict]:
    table = found.get("fig-shots")
    for baseline in ("FedAvg", "Local"):
        claim = f"with fewer images it loses less than {baseline} (from k = 100 to k = 5, points)"
        if table is None or not table.has(OURS, baseline):
            yield Verdict(claim, "", OPEN)
            continue
        lost = {method: _lost(table, method) for method in (OURS, baseline)}
        each = pair(lost[OURS], lost[baseline])
        means = ", ".join(f"{name} loses {statistics.fmean(loss.values()):.2f}" for name, loss in lost.items())
        yield Verdict(claim, f"{means}; difference {each}", judged({"MNIST": each.sign}, -1))


def _lost(table: Found, method: str) -> Numbers:
    return _change(table, method, "k = 5", "k = 100")


def imbalance(found: dict[str, Found]) -> Iterator[Verdict]:
    claim = "it stands imbalance in data size (k = 50 to 150 against 100) better than the others"
    table = found.get("study-imbalance")
    if table is None or not table.has(OURS, "FedAvg"):
        yield Verdict(claim, "", OPEN)
        return
    changes = {
        method: _change(table, method, "k = 100", "k = 50 to 150")
        for method in dict.fromkeys(name for name, _ in table.cells)
    }
    shown = ", ".join(f"{name} {statistics.fmean(change.values()):+.2f}" for name, change in changes.items())
    rivals = {name: pair(changes[OURS], change) for name, change in changes.items() if name in BASELINES}
    above = [name for name, each in rivals.items() if each.sign == 1]
    verdict = f"holds under a condition: against {', '.join(above)}" if above else NOT
    yield Verdict(claim, f"change in points: {shown}", HOLDS if len(above) == len(rivals) else verdict)


def _change(table: Found, method: str, of: str, to: str) -> Numbers:
    """What accuracy gains from one column to another."""
    all_of = table.of(method, accuracy())
    return {(c, s): all_of[to, s] - all_of[of, s] for c, s in all_of if c == of and (to, s) in all_of}


def best_lambda(found: dict[str, Found]) -> Iterator[Verdict]:
    claim, table = "the best lambda is 1 (0 to 4)", found.get("fig-lambda")
    if table is None or not table.has("lambda = 1"):
        yield Verdict(claim, "", OPEN)
        return
    names = [name for name, _ in table.cells]
    means = {name: table.mean(name, accuracy()) for name in names}
    best = max(means, key=means.__getitem__)
    shown = ", ".join(f"{name.removeprefix('lambda = ')}: {mean:.2f}" for name, mean in means.items())
    apart = pair(table.of(best, accuracy()), table.of("lambda = 1", accuracy())) if best != "lambda = 1" else None
    near = "holds under a condition: as good as the best, within the noise of five seeds"
    yield Verdict(
        claim,
        f"accuracy by prototype {shown}" + (f"; {best} against lambda = 1: {apart}" if apart else ""),
        HOLDS if apart is None else NOT if apart.sign == 1 else near,
    )


def before_training(found: dict[str, Found]) -> Iterator[Verdict]:
    claim, table = "the pre-trained network gets 27.55% on CIFAR-10 before round 1", found.get("study-before")
    if table is None:
        yield Verdict(claim, "", OPEN)
        return
    shown, near = [], False
    for (method, _), cell in table.cells.items():
        before = cell["before"]
        shown.append(f"{method}: " + ", ".join(f"{key} {100 * value['mean']:.1f}" for key, value in before.items()))
        near |= any(abs(100 * value["mean"] - 27.55) < 3 for value in before.values())
    yield Verdict(claim, "; ".join(shown), "holds under a condition: for one way to count" if near else NOT)


def separable(folder: Path) -> Iterator[Verdict]:
    claim = "samples of a class lie close together over clients, and are separable by client"
    path = folder / "fig-tsne-measures.json"
    if not path.exists():
        yield Verdict(claim, "", OPEN)
        return
    measures = json.loads(path.read_text())["measures"]
    shown = "; ".join(
        f"{method}: silhouette by class {m['silhouette_class']:.2f}, by client within a class "
        f"{m['silhouette_client_within_class']:.2f}"
        for method, m in measures.items()
    )
    ours, rest = measures[OURS], [m for method, m in measures.items() if method != OURS]
    close = all(ours["silhouette_class"] > m["silhouette_class"] for m in rest)
    apart = ours["silhouette_client_within_class"] > 0.1
    both = "holds under a condition: close by class, yes; separable by client, "
    yield Verdict(claim, shown, HOLDS if close and apart else both + ("yes" if apart else "no") if close else NOT)


# --- what the paper does not show


def own_heads(found: dict[str, Found]) -> Iterator[Verdict]:
    for baseline in ("FedAvg", "FedProx", "FeSEM"):
        tables = _tables(found, baseline)
        own = {
            t: pair(table.of(OURS, accuracy()), table.of(baseline, accuracy("head_own"))) for t, table in tables.items()
        }
        shown = "; ".join(f"{title} {each}" for title, each in own.items())
        claim = f"FedProto is more accurate than {baseline} whose head chooses among the client's own classes"
        yield Verdict(claim, shown, judged({title: each.sign for title, each in own.items()}))


def _variants(found: dict[str, Found], claim: str, base: str, others: Sequence[str], good: int) -> Iterator[Verdict]:
    """One option of FedProto changed; `good` is the sign of the difference at which the sentence holds."""
    table = found.get("study-options")
    for other in others:
        if table is None or not table.has(base, other):
            yield Verdict(claim.format(other), "", OPEN)
            continue
        each = pair(table.of(other, accuracy()), table.of(base, accuracy()))
        words = {good: HOLDS, 0: f"{NOT}: no difference seen", None: OPEN}
        yield Verdict(claim.format(other), f"MNIST {each}", words.get(each.sign, NOT))


def options(found: dict[str, Found]) -> Iterator[Verdict]:
    weightings = ("weighting uniform", "weighting eq6 (as printed)")
    yield from _variants(found, "{}: other than by samples, points", "default", weightings, -1)
    apart = ("l2", "sql2, lambda 1/50", "sql2, lambda 1", "l1", "emd", "cosine")
    yield from _variants(found, "{}: worse than mse, points", "default", [f"distance {name}" for name in apart], -1)
    rest = ("regularise class (Eq. 8)", "collect during", "own initial weights")
    yield from _variants(found, "{}: worse than the default, points", "default", rest, -1)
    tests = ("test 40 images a class", "test 15 images a class")
    yield from _variants(found, "{}: another mean than on all test images, points", "default", tests, -1)
    own = ("FedAvg, own initial weights",)
    yield from _variants(found, "{}: averaging needs one start, points", "FedAvg", own, -1)


def travel(found: dict[str, Found]) -> Iterator[Verdict]:
    table = found.get("study-travel")
    for method in ("FedProto", "FedProto, own initial weights", "lambda = 0, own initial weights"):
        claim = f"{method}: knowledge travels (nearest prototype with the client's own share removed, points lost)"
        if table is None or not table.has(method):
            yield Verdict(claim, "", OPEN)
            continue
        with_own, without = (table.of(method, _travelled(kind)) for kind in ("with_own", "without_own"))
        each = pair(without, with_own)
        means = f"{statistics.fmean(with_own.values()):.2f} with, {statistics.fmean(without.values()):.2f} without"
        yield Verdict(claim, f"MNIST {means}; {each}", HOLDS if each.mean > -1 else NOT)


def _travelled(kind: str) -> Value:
    return lambda cell, run: 100 * statistics.fmean(client[kind] for client in run["travel"])


# --- the page


def page(folder: Path) -> str:
    found = read(folder)
    judges = (more_accurate, less_varied, fewer_rounds, little_traffic, mixed_models, fewer_samples, imbalance)
    claims = [verdict for judge in (*judges, best_lambda, before_training) for verdict in judge(found)]
    claims += separable(folder)
    beyond = [verdict for claim in (own_heads, travel, options) for verdict in claim(found)]
    parts = [_INTRODUCTION, _table(claims), "## What the paper does not show", _table(beyond)]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """# The paper's claims, judged

Made by `fedproto reproduce verdicts` from the JSON files beside this page. A difference is FedProto's minus the other's
(or what is named first minus the second), the mean over federations with the same partition and seed, ± the half-width
of its 95% interval, with Student's paired test over seeds (each seed's mean over the columns is one number); we believe
in a difference at p < 0.05. Accuracy is what a method predicts by: the nearest prototype over all classes for FedProto,
the head over all classes for the others. "62 characters" is Chars74K's computer fonts, which stand in for FEMNIST;
ResNet18 starts from Tiny-ImageNet weights, which stand in for ImageNet's. Seeds were fixed before looking, the last
round is what counts, and nothing was selected on test data."""


def _table(verdicts: Sequence[Verdict]) -> str:
    lines = ["| claim | measured | verdict |", "|---|---|---|"]
    return "\n".join(lines + [f"| {v.claim} | {v.measured or '–'} | **{v.verdict}** |" for v in verdicts])
