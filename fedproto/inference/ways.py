"""The ways to classify: by what, and among which classes."""

from __future__ import annotations

from typing import Literal

#: `both`: the sum of the log-probabilities by prototype and by head. `teacher`: by the closed-form
#: teacher of the run; `NAME+teacher`: the sum of its log-probabilities and those of NAME.
By = Literal[
    "prototype",
    "head",
    "both",
    "teacher",
    "prototype+teacher",
    "head+teacher",
    "both+teacher",
]
Among = Literal["all", "own"]

#: The ways of every run, as files name them.
WAYS = ("prototype all", "prototype own", "head all", "head own", "both all", "both own")
#: Further ways of a run with a teacher.
TEACHER_WAYS = (
    "teacher all",
    "teacher own",
    "prototype+teacher all",
    "prototype+teacher own",
    "head+teacher all",
    "head+teacher own",
    "both+teacher all",
    "both+teacher own",
)
ALL_WAYS = (*WAYS, *TEACHER_WAYS)
