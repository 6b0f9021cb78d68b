"""Successive halving: after which rounds candidates are judged, and which of them go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from fedproto.errors import ConfigError

HALVING = "halving"
RANDOM = "random"
STRATEGIES = (HALVING, RANDOM)
#: The candidate that is never stopped, so that it is known what the default reaches.
DEFAULT = 0


def plan_rungs(strategy: str, rounds: int, halve_after: int | None = None) -> list[int]:
    """Return the rounds after which candidates are judged; the last is the last of all.

    With halving they are r, 2r, 4r, ... below `rounds`, then `rounds`; r is `halve_after`, or a
    quarter of the rounds. In a random search all candidates are trained to the end.

    >>> plan_rungs("halving", 20)
    [5, 10, 20]
    """
    if strategy == RANDOM:
        if halve_after is not None:
            raise ConfigError("halve_after is for successive halving, not for a random search")
        return [rounds]
    first = max(1, rounds // 4) if halve_after is None else halve_after
    if not 1 <= first <= rounds:
        raise ConfigError(f"halve_after must be a round from 1 to {rounds}, not {first}")
    rungs = []
    rung = first
    while rung < rounds:
        rungs.append(rung)
        rung *= 2
    return [*rungs, rounds]


def rank(scores: Mapping[int, float | None]) -> list[int]:
    """Return the candidates, best first; those that broke down are last, and ties go by number."""

    def order(number: int) -> tuple[bool, float, int]:
        score = scores[number]
        return (score is None, 0.0 if score is None else -score, number)

    return sorted(scores, key=order)


def choose_survivors(scores: Mapping[int, float | None]) -> list[int]:
    """Return the better half, rounded up, by number, and the default in any case.

    A candidate that broke down never goes on.
    """
    ranked = rank(scores)
    half = (len(ranked) + 1) // 2
    kept = set(ranked[:half])
    if DEFAULT in scores:
        kept.add(DEFAULT)
    return sorted(number for number in kept if scores[number] is not None)


def count_rounds(candidates: int, rungs: Sequence[int]) -> int:
    """Return how many rounds so many candidates are trained for after the first rung, per seed.

    It is the most: with the default beside the better half, and nobody broken down.
    """
    total = 0
    alive = candidates
    for done, rung in pairwise(rungs):
        alive = min(alive, (alive + 1) // 2 + 1)
        total += alive * (rung - done)
    return total
