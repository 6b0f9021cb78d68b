"""Claims on which method is best, judged by the benchmark of all methods.

All are on accuracy over own classes with equal architectures, in those settings of the benchmark
that are finished. A data set that the whole benchmark lacks is taken from the form for a CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedproto.reproduce.claims import AS_GOOD, NOT_MEASURED, Claim, Question, judge
from fedproto.reproduce.evidence import Cell, Results, Run, measure_accuracy
from fedproto.reproduce.methods.benchmark import CPU, EQUAL, FULL, name_files
from fedproto.reproduce.statistics import ACCURACY_MARGIN, Measurement, compare
from fedproto.reproduce.table_claims import ALL_SETTINGS

#: What the benchmark calls the number of training rows per class with which two points are asked.
FEW_ROWS = 20
#: Points by which sums over rows are to beat methods that share weights.
LEAD = 2.0
BEST_TITLE = "The best method that shares no weights is as good as every other of the package"
CONTRAST = "Contrast"
FEDPER = "FedPer"
_NAMES = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "chars74k": "62 characters",
    "cifar10": "CIFAR-10",
}


def judge_methods(results: dict[str, Results]) -> list[Claim]:
    """Return the claims on the methods of the benchmark."""
    cells = list_cells(results)
    return [judge_best(cells), judge_lead(cells), judge_contrast(cells)]


def list_cells(results: dict[str, Results]) -> list[Cell]:
    """Return the cells with equal architectures that claims are judged by."""
    cells: list[Cell] = []
    for size in (FULL, CPU):
        table = results.get(name_files(size), Results())
        equal = [cell for cell in table.cells.values() if cell["architecture"] == EQUAL]
        datasets = {cell["dataset"] for cell in cells}
        cells += [cell for cell in equal if cell["dataset"] not in datasets]
    return cells


def measure_own(cell: Cell, run: Run) -> float:
    """Return the mean accuracy over clients, in percent, over own classes."""
    return measure_accuracy(cell, run, f"{cell['score']}_own")


def find_best_sums(cells: Sequence[Cell]) -> str | None:
    """Return the method without shared weights that is best on validation rows.

    By the mean over the data sets, of methods that were run wherever any method was.
    """
    columns = {cell["column"] for cell in cells}
    means: dict[str, float] = {}
    for method in dict.fromkeys(cell["method"] for cell in cells):
        own = [cell for cell in cells if cell["method"] == method and cell["runs"]]
        if {cell["column"] for cell in own} != columns or own[0].get("shares_weights"):
            continue
        by_column = [statistics.fmean(run["validation"] for run in cell["runs"]) for cell in own]
        means[method] = statistics.fmean(by_column)
    return max(means, key=lambda method: means[method], default=None)


def judge_best(cells: Sequence[Cell]) -> Claim:
    """Judge whether the best method that shares no weights is as good as every other one."""
    best = find_best_sums(cells)
    if best is None:
        return Claim("best method", BEST_TITLE, NOT_MEASURED)
    questions = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        if method != best:
            questions += _ask(cells, best, method)
    return judge(
        "best method",
        BEST_TITLE,
        questions,
        good=AS_GOOD,
        note=(
            f"That method is {best}: of all that share no weights, it has the highest accuracy on "
            "validation rows, by the mean over settings. Accuracy over own classes on test rows."
        ),
    )


def judge_lead(cells: Sequence[Cell]) -> Claim:
    """Judge whether sums beat every method that shares weights by two points with few rows."""
    title = (
        f"Without sharing weights, accuracy is {LEAD:g} points higher than with any "
        f"method that shares them, with k = {FEW_ROWS}"
    )
    few = [cell for cell in cells if cell["k"] == FEW_ROWS]
    best = find_best_sums(cells)
    if best is None or not few:
        return Claim("lead without weights", title, NOT_MEASURED)
    others = [cell["method"] for cell in few if cell.get("shares_weights")]
    questions = []
    for method in dict.fromkeys(others):
        questions += _ask(few, best, method, lead=LEAD)
    return judge(
        "lead without weights",
        title,
        questions,
        note=(
            f"{best} minus each method that shares weights, minus {LEAD:g} points: what "
            "is left of the lead. FedBlend with a teacher shares weights, too."
        ),
    )


def judge_contrast(cells: Sequence[Cell]) -> Claim:
    """Judge whether prototypes alone are level with FedPer, which shares all but the head."""
    return judge(
        "prototypes only",
        f"{CONTRAST}, which sends prototypes only, is as good as {FEDPER}, which shares all but "
        "the head",
        _ask(cells, CONTRAST, FEDPER),
        good=AS_GOOD,
        note=f"Equivalent means within {ACCURACY_MARGIN} points. Accuracy over own classes.",
    )


def _ask(cells: Sequence[Cell], first: str, second: str, lead: float = 0.0) -> list[Question]:
    """Return a question per data set that both methods were run on; `lead` is taken off first."""
    questions = []
    for dataset in dict.fromkeys(cell["dataset"] for cell in cells):
        table = Results.from_cells(cell for cell in cells if cell["dataset"] == dataset)
        if not table.has(first, second):
            continue
        ours = {}
        for key, measured in table.measure(first, measure_own).items():
            value = None if measured.value is None else measured.value - lead
            ours[key] = Measurement(value)
        theirs = table.measure(second, measure_own)
        comparison = compare(ours, theirs, margin=ACCURACY_MARGIN)
        questions.append(Question(_NAMES[dataset], ALL_SETTINGS, first, second, comparison))
    return questions
