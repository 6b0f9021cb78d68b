"""Which round is the best by validation, and when rounds without improvement end a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedproto.errors import ConfigError, unknown

#: Stands for the main accuracy of an algorithm; see `main_accuracy`.
ACCURACY = "accuracy"
#: Metrics of core/measurement.py that can choose, of the main way to predict; larger is better.
METRICS_TO_SELECT_BY = ("balanced_accuracy", "macro_f1", "auroc")


def main_accuracy(names: Collection[str]) -> str:
    """Return the accuracy that an algorithm is judged by, of those it has.

    It is that of the nearest prototype where there are prototypes, otherwise the head's, otherwise
    the first; all classes compete.
    """
    for name in ("prototype", "head"):
        if name in names:
            return name
    return next(iter(names))


@dataclass
class BestRound:
    """The best round so far: the first with the largest score.

    select_by  `accuracy`, the name of one of the algorithm's accuracies, or a metric
    patience   evaluations without improvement after which a run is over; None: it never is
    """

    select_by: str = ACCURACY
    patience: int | None = None
    round: int = 0  # 0: no round was evaluated yet
    score: float = -math.inf
    waited: int = 0  # evaluations since the best round

    @property
    def needs_metric(self) -> bool:
        """Whether a metric decides, which is not measured otherwise."""
        return self.select_by in METRICS_TO_SELECT_BY

    @property
    def is_over(self) -> bool:
        """Whether the run has waited long enough for an improvement."""
        return self.patience is not None and self.waited >= self.patience

    def note(self, round: int, validation: Mapping[str, Mapping[str, float]]) -> None:
        """Take an evaluated round into account; `validation` has the mean of each accuracy."""
        score = validation[self.find_name(validation)]["mean"]
        if score > self.score:
            self.round = round
            self.score = score
            self.waited = 0
        else:
            self.waited += 1

    def find_name(self, names: Collection[str]) -> str:
        """Return the name by which rounds are chosen; ConfigError if there is no such accuracy."""
        if self.select_by == ACCURACY:
            return main_accuracy(names)
        if self.select_by not in names and not self.needs_metric:
            raise unknown(
                "way to select the best round",
                self.select_by,
                [ACCURACY, *METRICS_TO_SELECT_BY, *names],
            )
        return self.select_by

    def look_back(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Start again from the lines of the earlier rounds."""
        self.round = 0
        self.score = -math.inf
        self.waited = 0
        for line in lines:
            if line.get("validation"):
                self.note(line["round"], line["validation"])


def refuse_idle_settings(select_by: str, patience: int | None) -> None:
    """Refuse what only a run with validation can do."""
    if patience is not None:
        raise ConfigError(
            f"patience is {patience}, but there are no validation rows to improve on: set "
            "validation, as in --validation 0.2"
        )
    if select_by != ACCURACY:
        raise ConfigError(
            f"select_by is {select_by}, but there are no validation rows to choose a round by: set "
            "validation, as in --validation 0.2"
        )
