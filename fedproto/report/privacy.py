"""What a report says about the privacy of its runs: their claims, word by word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fedproto.report.groups import Group

HEADING = "Privacy"


class Claim(NamedTuple):
    """A claim of differential privacy, as result.json has it."""

    statement: str
    neighbours: str
    mechanism: str
    releases: int
    assumes: list[str]
    does_not_cover: list[str]
    holds: bool


def read_claim(result: dict[str, Any]) -> Claim | None:
    """Return what a result.json claims; None if it claims nothing."""
    stored = result.get("privacy")
    if stored is None:
        return None
    return Claim(
        statement=str(stored["statement"]),
        neighbours=str(stored["neighbours"]),
        mechanism=str(stored["mechanism"]),
        releases=int(stored["releases"]),
        assumes=[str(line) for line in stored["assumes"]],
        does_not_cover=[str(line) for line in stored["does_not_cover"]],
        holds=bool(stored["holds"]),
    )


def list_claims(groups: Sequence[Group]) -> list[str]:
    """Return sentences on what is claimed of each group of runs; none if nothing is private."""
    sentences: list[str] = []
    for group in groups:
        claim = group.first.claim
        if claim is None:
            continue
        sentences.append(f"{group.label}: {claim.statement}.")
        if not claim.holds:
            continue
        sentences += [
            f"Neighbours: {claim.neighbours}.",
            f"Mechanism: {claim.mechanism}; at most {claim.releases} releases of the same data.",
            f"It assumes that {'; that '.join(claim.assumes)}.",
            f"It does not cover {'; nor '.join(claim.does_not_cover)}.",
        ]
    return list(dict.fromkeys(sentences))
