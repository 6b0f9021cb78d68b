"""The ways to classify: by what, and among which classes."""

from __future__ import annotations

from typing import Literal

By = Literal["prototype", "head"]
Among = Literal["all", "own"]

#: All ways, as files name them.
WAYS = ("prototype all", "prototype own", "head all", "head own")
