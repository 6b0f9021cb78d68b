"""The ways to classify: by what, and among which classes."""

from __future__ import annotations

from typing import Literal

#: `both`: the sum of the log-probabilities by prototype and by head.
By = Literal["prototype", "head", "both"]
Among = Literal["all", "own"]

#: All ways, as files name them.
WAYS = ("prototype all", "prototype own", "head all", "head own", "both all", "both own")
