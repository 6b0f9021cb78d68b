"""What a search leaves behind: `tune.json`, written after every rung, and `best.toml`.

Both hold accuracies on validation rows only, and nothing that differs from one machine or one
interruption to the next, such as seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedproto.core.files import read_json, write_atomically
from fedproto.errors import RunFolderError
from fedproto.runs.tune.candidates import Candidate
from fedproto.runs.tune.halving import DEFAULT, rank

RECORD = "tune.json"
BEST = "best.toml"
#: The version of the file's format.
VERSION = 1


@dataclass
class Trial:
    """A candidate, and what it has reached so far.

    scores  by round, one score per seed, in the order of the seeds
    broken  why its training failed, if it did
    """

    candidate: Candidate
    scores: dict[int, list[float]] = field(default_factory=dict)
    broken: str | None = None

    @property
    def rounds(self) -> int:
        """The last round after which it was judged."""
        return max(self.scores, default=0)

    def mean(self, round: int) -> float | None:
        """Return the mean over seeds after a round; None if its training failed before."""
        scores = self.scores.get(round)
        return sum(scores) / len(scores) if scores else None

    @property
    def score(self) -> float | None:
        """The mean over seeds after the last round it was judged after."""
        return None if self.broken else self.mean(self.rounds)

    def describe(self) -> dict[str, Any]:
        """Return what tune.json holds of a candidate."""
        judged = []
        for round, scores in sorted(self.scores.items()):
            judged.append({"round": round, "mean": self.mean(round), "seeds": scores})
        described: dict[str, Any] = {
            "number": self.candidate.number,
            "settings": self.candidate.settings,
            "rounds": self.rounds,
            "validation": self.score,
            "judged": judged,
        }
        if self.broken:
            described["broken"] = self.broken
        return described


def rank_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials, best first: those that were trained longest, by their mean score."""
    ranked: list[Trial] = []
    for rounds in sorted({trial.rounds for trial in trials}, reverse=True):
        same = {trial.candidate.number: trial for trial in trials if trial.rounds == rounds}
        scores = {number: trial.score for number, trial in same.items()}
        ranked += [same[number] for number in rank(scores)]
    whole = [trial for trial in ranked if not trial.broken]
    return whole + [trial for trial in ranked if trial.broken]


def write_record(
    folder: Path, plan: Mapping[str, Any], trials: Sequence[Trial], is_complete: bool
) -> dict[str, Any]:
    """Write tune.json, and best.toml once the search is complete; return what tune.json holds."""
    content: dict[str, Any] = {"version": VERSION} | dict(plan)
    content["tried"] = len(trials)
    content["complete"] = is_complete
    content["candidates"] = [trial.describe() for trial in trials]
    content["best"] = None
    if is_complete:
        best = rank_trials(trials)[0]
        content["best"] = best.candidate.number
        header = (
            f"# Chosen by `fedproto tune` among {len(trials)} settings, on validation rows only.\n"
        )
        write_atomically(folder / BEST, (header + best.candidate.config.toml()).encode())
    content["default"] = DEFAULT
    write_atomically(folder / RECORD, (json.dumps(content, indent=1) + "\n").encode())
    return content


def refuse_other_search(folder: Path, plan: Mapping[str, Any]) -> None:
    """Refuse a folder that holds something else than this search."""
    path = folder / RECORD
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise RunFolderError(
                f"{folder} holds something else than a search: name another folder with --out"
            )
        return
    stored = read_json(path)
    for key, value in json.loads(json.dumps(plan)).items():
        if not isinstance(stored, dict) or stored.get(key) != value:
            raise RunFolderError(
                f"{folder} holds another search, with a different {key}: name another folder with "
                "--out"
            )
