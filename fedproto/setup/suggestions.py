"""Which model, method and length of training suit somebody's data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedproto.config.choices import AUTO
from fedproto.config.options import Part
from fedproto.config.settings import TEXT_TRAINING
from fedproto.data import Source
from fedproto.runs.own_data import count_clients
from fedproto.setup.ease import measure_alone

#: Rounds of data of one's own; with fewer training rows per client, a round has few steps.
ROUNDS = 50
ROUNDS_OF_FEW_ROWS = 100
FEW_ROWS_PER_CLIENT = 400
#: Rounds between two evaluations, and evaluations without improvement after which a run ends.
EVAL_EVERY = 5
PATIENCE = 4
#: Fraction of the training rows that choose the best round.
VALIDATION = 0.2
#: With fewer training rows per class and client, a fifth of them says little.
MIN_ROWS_FOR_VALIDATION = 5
#: With fewer training rows per class and client, a classifier that is solved from the sums of all
#: clients is better than what the clients train: see docs/which-method.md.
MIN_ROWS_FOR_TRAINING = 50
#: Where a linear classifier on one client's rows alone is right this often, others add little.
EASY_ALONE = 0.95
#: Clients have "all" classes if each has at least this part of them on average.
MOST_CLASSES = 0.9
#: Training rows up to which two further trainings, for comparison, are no burden.
MAX_ROWS_FOR_BASELINES = 20_000


class Holdings(NamedTuple):
    """Who has what of a data set."""

    clients: int
    #: Which part of all classes a client has, on average.
    class_fraction: float
    #: Training rows per client and class that the client has; the median.
    rows_per_class: float


@dataclass(frozen=True)
class Suggestion:
    """A setting with its value, and why, in a sentence."""

    key: str
    value: Any
    why: str


def count_holdings(source: Source) -> Holdings:
    """Return who has what: by the clients that the data names, or else if rows are dealt evenly."""
    labels = source.train.y
    classes = len(source.classes)
    writers = source.train.writer
    if writers is None:
        clients = count_clients(source, Part(AUTO))
        counts = np.bincount(labels, minlength=classes) / clients
        return Holdings(clients, 1.0, float(np.median(counts)))
    names, positions = np.unique(writers, return_inverse=True)
    table = np.zeros((len(names), classes), int)
    np.add.at(table, (positions, labels), 1)
    fraction = float((table > 0).mean())
    return Holdings(len(names), fraction, float(np.median(table[table > 0])))


def suggest(source: Source, kind: str) -> list[Suggestion]:
    """Return settings for a data set, in the order in which a configuration file states them.

    `kind` is that of the data set, such as `csv`.
    """
    holdings = count_holdings(source)
    is_text = kind == "text"
    has_few_rows = len(source.train.y) < FEW_ROWS_PER_CLIENT * holdings.clients
    rounds = ROUNDS_OF_FEW_ROWS if has_few_rows else ROUNDS
    if is_text:
        rounds = TEXT_TRAINING["rounds"]
    is_image = len(source.train.x.shape) > 2
    alone = None
    if has_few_rows and not is_text:
        alone = measure_alone(source, holdings.clients)
    method = suggest_method(holdings, is_image=is_image, alone=alone)
    has_teacher = any(each.key == "teacher" for each in method)
    found = [Suggestion("rounds", rounds, "communication rounds")]
    if is_text:
        why = "most words are in few texts, and SGD hardly moves their vectors"
        found.append(Suggestion("optimiser", TEXT_TRAINING["optimiser"], why))
        found.append(Suggestion("lr", TEXT_TRAINING["lr"], "learning rate"))
    found += _suggest_validation(source, holdings, has_teacher, stops_early=not has_few_rows)
    if len(source.train.y) <= MAX_ROWS_FOR_BASELINES:
        why = "also train every client alone, and on the rows of all: what it is compared with"
        found.append(Suggestion("baselines", True, why))
    found += method
    model = source.model
    if is_text and source.adaptive_model is not None:
        model = source.adaptive_model
    shape = "x".join(str(size) for size in source.train.x.shape[1:])
    why = f"takes what suits the data, here {model} for inputs of {shape} values"
    found.append(Suggestion("model", AUTO, why))
    return found


def _suggest_validation(
    source: Source, holdings: Holdings, has_teacher: bool, stops_early: bool
) -> list[Suggestion]:
    """Return settings that choose the best round, if there are rows to choose it by."""
    found = []
    if source.validation is None and holdings.rows_per_class < MIN_ROWS_FOR_VALIDATION:
        return [Suggestion("eval_every", EVAL_EVERY, "evaluate every so many rounds")]
    if source.validation is None:
        why = "fraction of each client's training rows by which the best round is chosen"
        found.append(Suggestion("validation", VALIDATION, why))
    if has_teacher:
        why = "the best round is that of the head together with the teacher"
        found.append(Suggestion("select_by", "head+teacher", why))
    found.append(Suggestion("eval_every", EVAL_EVERY, "evaluate every so many rounds"))
    if stops_early:
        why = "stop after so many evaluations without improvement"
        found.append(Suggestion("patience", PATIENCE, why))
    return found


def suggest_method(
    holdings: Holdings, *, is_image: bool, alone: float | None = None
) -> list[Suggestion]:
    """Return the algorithm for clients that hold this, and a teacher where rows are few.

    The rules are those of docs/which-method.md, which compares methods on images with few rows.
    `alone` is how well a client does with its own rows, where that was measured.
    """
    if holdings.clients == 1:
        return [Suggestion("algorithm", "local", "there is one client, so nothing to exchange")]
    has_all_classes = holdings.class_fraction >= MOST_CLASSES
    if has_all_classes and alone is not None and alone >= EASY_ALONE:
        why = (
            f"a linear classifier on the rows of one client alone is right for {alone:.0%} of its "
            "other training rows, so an exchange can add little; fedproto costs least if you "
            "want one"
        )
        return [Suggestion("algorithm", "local", why)]
    has_few_rows = holdings.rows_per_class < MIN_ROWS_FOR_TRAINING
    if has_few_rows and is_image:
        name = "local"
        why = "with few images, a model of one's own beside the teacher below is as good as any"
    elif has_all_classes:
        name = "fedavg"
        why = (
            "all clients have the same classes and one model, where averaging weights gains most; "
            "fedproto sends far less"
        )
    else:
        name = "fedproto"
        why = "clients have different classes, so they exchange class prototypes"
    found = [Suggestion("algorithm", name, why)]
    if has_few_rows:
        why = (
            f"clients have about {holdings.rows_per_class:.0f} training rows per class: few "
            "enough that a classifier solved from sums over the rows of all helps"
        )
        found.append(Suggestion("teacher", "lda", why))
    return found
