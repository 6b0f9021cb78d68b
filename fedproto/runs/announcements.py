"""What is said while a federation is trained from Python: a line per round, to a logger.

The logger is called "fedproto" and gets every round at level INFO, and what a round notes, such as
a loss that explodes, at level WARNING. With `progress`, evaluated rounds are printed as well.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from fedproto.core.rounds import RoundResult

if TYPE_CHECKING:
    from fedproto.runs.execution import OnRound

LOGGER = logging.getLogger("fedproto")
LOGGER.addHandler(logging.NullHandler())  # nothing is printed unless the user's program asks for it


def announce_rounds(
    name: str,
    on_round: OnRound | None = None,
    *,
    progress: bool = False,
    unit: str = "round",
) -> OnRound:
    """Return what to call after each round: it logs the round, then calls `on_round`.

    Args:
        name: what is trained, such as the algorithm.
        on_round: is called with the result of each round.
        progress: print a line to stderr for each evaluated round.
        unit: what a round is called.
    """

    def announce(result: RoundResult) -> None:
        if LOGGER.isEnabledFor(logging.INFO):
            LOGGER.info(describe_round(name, unit, result))
        for note in result.notes:
            LOGGER.warning("%s %d: %s", unit, result.round, note)
        if progress and (result.accuracy or result.validation):
            print(describe_round(name, unit, result), file=sys.stderr, flush=True)
        if on_round is not None:
            on_round(result)

    return announce


def describe_round(name: str, unit: str, result: RoundResult) -> str:
    """Return a line on a round: its loss and, if it was evaluated, its accuracies.

    The terms of the loss are listed, too, so that methods with different ones can be compared.
    """
    loss = f"loss {sum(result.loss.values()):.3f}" if result.loss else "nobody was sampled"
    line = f"{name} {unit} {result.round:>4}  {loss}"
    if len(result.loss) > 1:
        terms = [f"{term} {value:.3f}" for term, value in result.loss.items()]
        line += f" ({', '.join(terms)})"
    accuracies = []
    kind = "validation accuracy" if result.validation else "accuracy"
    for key, summary in (result.accuracy or result.validation or {}).items():
        if not key.endswith("_own"):
            accuracies.append(f"{key} {summary['mean']:.1%}")
    if accuracies:
        line += f"  {kind} by {'  '.join(accuracies)}"
    return line
