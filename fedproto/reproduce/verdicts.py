"""The paper's claims, each with what was measured, a paired test over seeds, and a verdict; and what it leaves out.

Everything is computed from the JSON files of the targets; a claim whose target has not been made yet says so. Two
methods are compared over pairs: the same column and seed, so the same partition and the same images.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fedproto.errors import RunFolderError
from fedproto.files import read_json
from fedproto.reproduce.tables import PAPERS_START

LIKELY = 0.05  # chance of a difference where there is none, up to which we believe in one
TABLES = {"table-mnist": "MNIST", "table-femnist": "62 characters", "table-cifar10": "CIFAR-10"}
BASELINES = ("Local", "FeSEM", "FedProx", "FedPer", "FedAvg", "FedRep")
OURS = "FedProto"
NEXT = "<br>"  # a data set a line
HOLDS, CONDITION, NOT, OPEN = "holds", "holds under a condition", "does not hold", "not measured yet"


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


Numbers = dict[tuple[str, int], float]  # by column and seed


def pair(first: Numbers, second: Numbers) -> Paired | None:
    """first − second, over what both have, if there is any. Seeds are independent; a seed's columns share images."""
    apart = {key: first[key] - second[key] for key in first if key in second}
    above = sum(difference > 0 for difference in apart.values())
    by_seed: dict[int, list[float]] = {}
    for (_, seed), difference in apart.items():
        by_seed.setdefault(seed, []).append(difference)
    means = [statistics.fmean(each) for each in by_seed.values()]
    if not means:
        return None
    if len(means) < 2 or np.ptp(means) == 0:  # one seed tells nothing; the same difference in all of them, everything
        chance = float("nan") if len(means) < 2 else 0.0 if means[0] else 1.0
        return Paired(means[0], 0.0, chance, above, len(apart), len(means))
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
    return f"{CONDITION}: on {' and '.join(yes)}, not on {' and '.join(no)}"


def read(folder: Path) -> dict[str, Found]:
    """The targets that were made."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        if not isinstance(content, dict):
            raise RunFolderError(f"{path} is not what a target writes: delete it, or make its target again")
        if "cells" in content and not content.get("quick"):  # a quick version is no evidence
            found[path.stem] = Found(content["cells"])
    return found


# --- the paper's claims


def _tables(found: dict[str, Found], *methods: str) -> dict[str, Found]:
    """The tables in which these methods were run, by the name of their data."""
    return {title: found[name] for name, title in TABLES.items() if name in found and found[name].has(OURS, *methods)}


@dataclass(frozen=True)
class Compared:
    """Two methods on one data set: over all its columns, and column by column."""

    title: str
    whole: Paired
    columns: dict[str, Paired]

    @classmethod
    def of(cls, title: str, first: Numbers, second: Numbers) -> Compared | None:
        whole = pair(first, second)
        by_column = {c: pair(_only(first, c), _only(second, c)) for c in dict.fromkeys(column for column, _ in first)}
        found = {column: each for column, each in by_column.items() if each is not None}
        return None if whole is None else cls(title, whole, found)

    def __str__(self) -> str:
        signs = [each.sign for each in self.columns.values()]
        counts = f"settings above / level / below: {signs.count(1)} / {signs.count(0)} / {signs.count(-1)}"
        return f"{self.title} {self.whole}" + (f"; {counts}" if len(signs) > 1 and None not in signs else "")

    def verdict(self, wanted: int) -> str:
        """In words: whether in every setting, only in their mean, or not."""
        unlike = [column for column, each in self.columns.items() if each.sign != wanted]
        if self.whole.sign is None:
            return OPEN
        if self.whole.sign != wanted:
            return NOT if self.whole.sign else f"{NOT}: no difference seen in the mean"
        if not unlike:
            return HOLDS
        return f"{CONDITION}: in the mean of the settings, not seen at {', '.join(unlike)}"


def _only(numbers: Numbers, column: str) -> Numbers:
    return {key: value for key, value in numbers.items() if key[0] == column}


def _combined(compared: Sequence[Compared], wanted: int) -> str:
    """One verdict of several data sets; where they differ, each says its own."""
    told = {each.title: each.verdict(wanted) for each in compared}
    told = {title: verdict for title, verdict in told.items() if verdict != OPEN}
    if not told:
        return OPEN
    if set(told.values()) == {HOLDS} and len(told) == len(TABLES):
        return HOLDS
    return NEXT.join(f"{title}: {verdict}" for title, verdict in told.items())


def _against(
    found: dict[str, Found], ours: Value, theirs: Value, wanted: int, what: str, rivals: Sequence[str] = BASELINES
) -> Iterator[Verdict]:
    """FedProto against each rival, on each data set."""
    for rival in rivals:
        tables = _tables(found, rival).items()
        pairs = [Compared.of(title, table.of(OURS, ours), table.of(rival, theirs)) for title, table in tables]
        compared = [each for each in pairs if each is not None]
        yield Verdict(what.format(rival), NEXT.join(map(str, compared)), _combined(compared, wanted))


def more_accurate(found: dict[str, Found]) -> Iterator[Verdict]:
    yield from _against(found, accuracy(), accuracy(), 1, "FedProto is more accurate than {} (points)")


def less_varied(found: dict[str, Found]) -> Iterator[Verdict]:
    yield from _against(found, deviation, deviation, -1, "its accuracy deviates less over clients than {}'s (points)")


def fewer_rounds(found: dict[str, Found]) -> Iterator[Verdict]:
    """To a target that both share: 98% of FedProto's own last accuracy. Who never gets there counts as at its end."""
    for baseline in BASELINES:
        compared, shown = [], []
        for title, table in _tables(found, baseline).items():
            goals = {key: 0.98 * value / 100 for key, value in table.of(OURS, accuracy()).items()}
            ours, theirs = (_rounds_to(table, method, goals) for method in (OURS, baseline))
            each = Compared.of(title, *({key: float(round) for key, (round, _) in m.items()} for m in (ours, theirs)))
            if each is not None:
                compared.append(each)
                never = sum(not there for _, there in theirs.values())
                shown.append(f"{each}; {baseline} never got there in {never}")
        claim = f"it needs fewer rounds than {baseline} (to 98% of FedProto's last accuracy)"
        yield Verdict(claim, NEXT.join(shown), _combined(compared, -1))


def _rounds_to(table: Found, method: str, goals: Numbers) -> dict[tuple[str, int], tuple[int, bool]]:
    """The first evaluated round in which a federation reached its goal, or its last round; and whether it did."""
    reached = {}
    for (name, column), cell in table.cells.items():
        for run in cell["runs"] if name == method else ():
            goal, curve = goals.get((column, run["seed"]), 0), run["curve"]
            there = [r for r, v in zip(curve["round"], curve[cell["score"]], strict=True) if v >= goal]
            reached[column, run["seed"]] = (there[0], True) if there else (curve["round"][-1], False)
    return reached


def little_traffic(found: dict[str, Found]) -> Iterator[Verdict]:
    for name, papers in (("table-mnist", 4_000), ("table-femnist", 4_000), ("table-cifar10", 41_000)):
        claim = f"{papers:,} values a round on {TABLES[name]}"
        if name not in found or not found[name].has(OURS):
            yield Verdict(claim, "", OPEN)
            continue
        cells = {column: cell for (method, column), cell in found[name].cells.items() if method == OURS}
        sent = {column: cell["communication"]["values_per_round"] for column, cell in cells.items()}
        four = [value for column, value in sent.items() if column.startswith("n = 4")]
        near = bool(four) and all(abs(value / papers - 1) < 0.15 for value in four)
        shown = ", ".join(f"{column}: {value:,.0f}" for column, value in sent.items())
        yield Verdict(claim, shown, OPEN if not four else f"{CONDITION}: at n = 4; it grows with n" if near else NOT)


def mixed_models(found: dict[str, Found]) -> Iterator[Verdict]:
    mixed = "FedProto-mh"
    tables = _tables(found, mixed)
    pairs = {title: pair(table.of(mixed, accuracy()), table.of(OURS, accuracy())) for title, table in tables.items()}
    there = {title: each for title, each in pairs.items() if each is not None}
    shown = NEXT.join(f"{title} {each}" for title, each in there.items())
    signs = {title: each.sign if each.sign is None else _at_least(each, -1) for title, each in there.items()}
    yield Verdict("mixed models are as good as equal ones (at most one point less)", shown, judged(signs))


def _at_least(each: Paired, least: float) -> int:
    """1 where the whole interval lies above, else -1."""
    return 1 if each.mean - each.half > least else -1


def fewer_samples(found: dict[str, Found]) -> Iterator[Verdict]:
    for baseline, key in (("FedAvg", None), ("FedAvg", "head_own"), ("Local", None)):
        own = " whose head chooses among own classes" if key else ""
        claim = f"with fewer images it loses less than {baseline}{own} (from k = 100 to k = 5, points)"
        yield _fewer(found.get("fig-shots"), claim, baseline, key)


def _fewer(table: Found | None, claim: str, baseline: str, key: str | None) -> Verdict:
    if table is None or not table.has(OURS, baseline):
        return Verdict(claim, "", OPEN)
    lost = [_change(table, OURS, "k = 5", "k = 100", None), _change(table, baseline, "k = 5", "k = 100", key)]
    each = pair(*lost)
    if each is None:
        return Verdict(claim, "", OPEN)
    means = (
        f"FedProto loses {statistics.fmean(lost[0].values()):.2f}, {baseline} {statistics.fmean(lost[1].values()):.2f}"
    )
    verdict = judged({"MNIST": each.sign}, -1)
    if baseline == "FedAvg" and key is None and verdict.startswith(HOLDS):
        verdict = f"{CONDITION}: over all classes, and after 100 rounds, when FedAvg still learns"
    return Verdict(claim, f"{means}; difference {each}", verdict)


def imbalance(found: dict[str, Found]) -> Iterator[Verdict]:
    claim = "it stands imbalance in data size (k = 50 to 150 against 100) better than the others"
    table = found.get("study-imbalance")
    even, uneven = "k = 100", "k = 50 to 150"
    methods = list(dict.fromkeys(name for name, _ in table.cells)) if table else []
    changes = {method: _change(table, method, even, uneven, None) for method in methods} if table else {}
    rivals = {name: pair(changes[OURS], changes[name]) for name in methods if name in BASELINES and OURS in changes}
    told = {name: each for name, each in rivals.items() if each is not None and each.sign is not None}
    if not told:
        yield Verdict(claim, "", OPEN)
        return
    shown = ", ".join(f"{name} {statistics.fmean(change.values()):+.2f}" for name, change in changes.items() if change)
    above = [name for name, each in told.items() if each.sign == 1]
    verdict = HOLDS if len(above) == len(told) else f"{CONDITION}: against {', '.join(above)}" if above else NOT
    yield Verdict(claim, f"change in points: {shown}", verdict)


def _change(table: Found, method: str, of: str, to: str, key: str | None) -> Numbers:
    """What an accuracy gains from one column to another."""
    all_of = table.of(method, accuracy(key))
    return {(c, s): all_of[to, s] - all_of[of, s] for c, s in all_of if c == of and (to, s) in all_of}


def best_lambda(found: dict[str, Found]) -> Iterator[Verdict]:
    claim, table = "the best lambda is 1 (of 0 to 4)", found.get("fig-lambda")
    if table is None or not table.has("lambda = 1"):
        yield Verdict(claim, "", OPEN)
        return
    means = {name: table.mean(name, accuracy()) for name, _ in table.cells}
    others = {name: mean for name, mean in means.items() if name != "lambda = 1"}
    rival = max(others, key=others.__getitem__)
    shown = ", ".join(f"{name.removeprefix('lambda = ')}: {mean:.2f}" for name, mean in means.items())
    each = pair(table.of("lambda = 1", accuracy()), table.of(rival, accuracy()))
    sign = None if each is None else each.sign
    words = {1: HOLDS, 0: f"{CONDITION}: no worse than {rival}, as far as these seeds tell", -1: NOT, None: OPEN}
    yield Verdict(claim, f"accuracy by prototype {shown}; lambda = 1 against {rival}: {each}", words[sign])
    yield _distance_falls(table)


def _distance_falls(table: Found) -> Verdict:
    """The regulariser in the last round is lambda times the distance."""
    claim = "as lambda grows, the distance to the prototypes falls"
    found = {float(name.removeprefix("lambda = ")): table.of(name, _regulariser) for name, _ in table.cells}
    means = {lam: statistics.fmean(each.values()) / lam for lam, each in sorted(found.items()) if lam}
    falls = all(later < earlier for earlier, later in zip(means.values(), list(means.values())[1:], strict=False))
    shown = ", ".join(f"{lam:g}: {mean:.3g}" for lam, mean in means.items())
    return Verdict(claim, f"mean squared distance a dimension, by lambda {shown}", HOLDS if falls else NOT)


def _regulariser(cell: dict[str, Any], run: dict[str, Any]) -> float:
    return run["loss"]["regulariser"]


def before_training(found: dict[str, Found]) -> Iterator[Verdict]:
    claim, table = "the pre-trained network gets 27.55% on CIFAR-10 before round 1", found.get("study-before")
    if table is None:
        yield Verdict(claim, "", OPEN)
        return
    means = {
        f"{method}, {key.replace('_own', ' among own classes')}": 100 * value["mean"]
        for (method, _), cell in table.cells.items()
        for key, value in cell.get("before", {}).items()
    }
    near = [name for name, mean in means.items() if abs(mean - 100 * PAPERS_START) < 3]
    verdict = f"{CONDITION}: near it comes {' and '.join(near)}" if near else NOT
    yield Verdict(claim, "; ".join(f"{name} {mean:.1f}" for name, mean in means.items()), verdict if means else OPEN)


def _measures(path: Path) -> dict[str, Any]:
    content = read_json(path)
    measures = content.get("measures") if isinstance(content, dict) else None
    if not isinstance(measures, dict) or not all(isinstance(each, dict) for each in measures.values()):
        raise RunFolderError(f"{path} is not what a target writes: delete it, or make its target again")
    return measures


def separable(folder: Path) -> Iterator[Verdict]:
    claim = "samples of a class lie close together over clients, and are separable by client"
    path = folder / "fig-tsne-measures.json"
    measures = _measures(path) if path.exists() else {}
    names = ("silhouette_class", "silhouette_client_within_class")
    told = {method: m for method, m in measures.items() if all(m.get(name) is not None for name in names)}
    if OURS not in told or len(told) < 2:
        yield Verdict(claim, "", OPEN)
        return
    by_class, by_client = ({method: m[name] for method, m in told.items()} for name in names)
    shown = "; ".join(f"{m}: by class {by_class[m]:.2f}, by client within a class {by_client[m]:.2f}" for m in told)
    close = by_class[OURS] == max(by_class.values())
    halves = (
        f"closest by class: {'yes' if close else 'no'}; separable by client: {'yes' if by_client[OURS] > 0 else 'no'}"
    )
    verdict = HOLDS if close and by_client[OURS] > 0 else f"{NOT} ({halves})"
    yield Verdict(claim, f"silhouettes, one seed, MNIST: {shown}", verdict)


# --- what the paper does not show


def own_heads(found: dict[str, Found]) -> Iterator[Verdict]:
    claim = "FedProto is more accurate than {} whose head chooses among the client's own classes"
    yield from _against(found, accuracy(), accuracy("head_own"), 1, claim, ("FedAvg", "FedProx", "FeSEM"))
    claim = "FedProto is more accurate than {}, both choosing among the client's own classes"
    yield from _against(found, accuracy("prototype_own"), accuracy("head_own"), 1, claim)


def _variants(
    found: dict[str, Found], claim: str, base: str, others: Sequence[str], good: set[int]
) -> Iterator[Verdict]:
    """One option of FedProto changed; `good` are the signs of the difference at which the sentence holds."""
    table = found.get("study-options")
    for other in others:
        there = table is not None and table.has(base, other)
        each = pair(table.of(other, accuracy()), table.of(base, accuracy())) if table and there else None
        if each is None or each.sign is None:
            yield Verdict(claim.format(other), "" if each is None else f"MNIST {each}", OPEN)
            continue
        verdict = HOLDS if each.sign in good else NOT if each.sign else f"{NOT}: no difference seen"
        yield Verdict(claim.format(other), f"MNIST {each}", verdict)


def options(found: dict[str, Found]) -> Iterator[Verdict]:
    either, worse = {-1, 1}, {-1}
    weightings = ("weighting uniform", "weighting eq6 (as printed)")
    yield from _variants(found, "{} changes accuracy (points)", "default", weightings, either)
    apart = ("l2", "sql2, lambda 1/50", "sql2, lambda 1", "l1", "emd", "cosine")
    yield from _variants(found, "{} is worse than mse (points)", "default", [f"distance {n}" for n in apart], worse)
    rest = ("regularise class (Eq. 8)", "collect during", "own initial weights")
    yield from _variants(found, "{} is worse than the default (points)", "default", rest, worse)
    tests = ("test 40 images a class", "test 15 images a class")
    yield from _variants(found, "{} changes the mean (points)", "default", tests, either)
    own = ("FedAvg, own initial weights",)
    yield from _variants(found, "{}: averaging needs one start (points)", "FedAvg", own, worse)


def travel(found: dict[str, Found]) -> Iterator[Verdict]:
    """The nearest prototype with the client's own share removed, beside members that never regularised."""
    table = found.get("study-travel")
    for ours, never, start in (
        ("FedProto", "lambda = 0", "one shared start"),
        ("FedProto, own initial weights", "lambda = 0, own initial weights", "a start of their own"),
    ):
        claim = (
            f"knowledge travels, from {start}: without its own share, FedProto's nearest prototype against lambda = 0's"
        )
        if table is None or not table.has(ours, never):
            yield Verdict(claim, "", OPEN)
            continue
        means = [f"{name} {_with_and_without(table, name)}" for name in (ours, never)]
        each = pair(*(table.of(name, _travelled("without_own")) for name in (ours, never)))
        shown = f"MNIST, with own share / without: {'; '.join(means)}; difference without {each}"
        yield Verdict(claim, shown, judged({"MNIST": each.sign if each else None}))


def _with_and_without(table: Found, method: str) -> str:
    return " / ".join(f"{table.mean(method, _travelled(kind)):.2f}" for kind in ("with_own", "without_own"))


def _travelled(kind: str) -> Value:
    return lambda cell, run: 100 * statistics.fmean(client[kind] for client in run["travel"])


# --- the page


def page(folder: Path) -> str:
    found = read(folder)
    judges = (more_accurate, less_varied, fewer_rounds, little_traffic, mixed_models, fewer_samples, imbalance)
    claims = [verdict for judge in (*judges, best_lambda, before_training) for verdict in judge(found)]
    claims += separable(folder)
    beyond = [verdict for claim in (own_heads, travel, options) for verdict in claim(found)]
    parts = [_INTRODUCTION, *_in_short(found), "## Claim by claim", _table(claims)]
    return "\n\n".join([*parts, "## What the paper does not show", _table(beyond)]) + "\n"


def _in_short(found: dict[str, Found]) -> list[str]:
    """FedProto minus each baseline, by data set, over all classes and among own ones; nothing without a table."""
    kinds = {"": (None, None), ", own classes": ("prototype_own", "head_own")}
    heads = [f"{title}{kind}" for title in _tables(found) for kind in kinds]
    lines = [f"| FedProto against | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for rival in BASELINES:
        entries = [
            _entry(pair(table.of(OURS, accuracy(ours)), table.of(rival, accuracy(theirs))))
            for table in _tables(found).values()
            for ours, theirs in kinds.values()
        ]
        lines.append(f"| {rival} | {' | '.join(entries)} |")
    return ["## In short: accuracy in points", _SHORT, "\n".join(lines)] if heads else []


_SHORT = "Bold is a difference we believe in (p < 0.05), ± the half-width of its 95% interval."


def _entry(each: Paired | None) -> str:
    if each is None or each.sign is None:
        return "–"
    text = f"{each.mean:+.2f} ± {each.half:.2f}"
    return f"**{text}**" if each.sign else text


_INTRODUCTION = """# The paper's claims, judged

Made by `fedproto reproduce verdicts` from the JSON files beside this page. A difference is FedProto's minus the other's
(or what is named first minus the second), the mean over federations with the same partition and seed, ± the half-width
of its 95% interval, with Student's paired test over seeds (each seed's mean over the settings is one number), and then
setting by setting; we believe in a difference at p < 0.05. Some hundred tests stand on this page and none is corrected
for that: a single p between 0.01 and 0.05 is weak evidence. Accuracy is what a method predicts by: the nearest
prototype over all classes for FedProto, the head over all classes for the others. "62 characters" is Chars74K's
computer fonts, which stand in for FEMNIST; ResNet18 starts from Tiny-ImageNet weights, which stand in for ImageNet's.
Seeds were fixed before looking, the last round is what counts, nothing was selected on test data, and quick versions do
not count."""


def _table(verdicts: Sequence[Verdict]) -> str:
    lines = ["| claim | measured | verdict |", "|---|---|---|"]
    return "\n".join(lines + [f"| {v.claim} | {v.measured or '–'} | **{v.verdict}** |" for v in verdicts])
