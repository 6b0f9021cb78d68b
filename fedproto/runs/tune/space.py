"""A search space: the settings that are tried, each a range of numbers or some values.

As text: `lam=0.1..10:log,lr=0.003..0.1:log,tau=0.1|0.3|1`. In Python and TOML a setting has the
same text, or a list of its values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedproto.errors import ConfigError

#: Between the ends of a range, between values, and before `log`.
RANGE_MARK = ".."
VALUE_MARK = "|"
LOG_ENDING = ":log"
#: Drawn numbers are rounded to that many digits, so that files and tables stay readable.
DIGITS = 3

EXAMPLE = "lam=0.1..10:log,lr=0.003..0.1:log,tau=0.1|0.3|1"


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, uniform, or uniform in their logarithms."""

    low: float
    high: float
    log: bool = False
    #: Whether only whole numbers are drawn; found out from the setting's type.
    whole: bool = False

    def pick(self, fraction: float) -> float:
        """Return the number at a fraction in [0, 1) of the way from the low end to the high one."""
        if self.whole:
            low, high = self.low - 0.5, self.high + 0.5
            number = self._between(max(low, 0.5) if self.log else low, high, fraction)
            return min(max(round(number), int(self.low)), int(self.high))
        number = self._between(self.low, self.high, fraction)
        rounded = float(f"{number:.{DIGITS}g}")
        return min(max(rounded, self.low), self.high)

    def _between(self, low: float, high: float, fraction: float) -> float:
        if self.log:
            return math.exp(math.log(low) + fraction * (math.log(high) - math.log(low)))
        return low + fraction * (high - low)

    def examples(self) -> list[float]:
        """Return both ends, which a setting must accept."""
        return [self.low, self.high]

    def __str__(self) -> str:
        ending = LOG_ENDING if self.log else ""
        return f"{self.low:g}{RANGE_MARK}{self.high:g}{ending}"


@dataclass(frozen=True)
class Values:
    """Some values, all equally likely."""

    values: tuple[Any, ...]

    def pick(self, fraction: float) -> Any:
        """Return the value at a fraction in [0, 1) of the list."""
        return self.values[int(fraction * len(self.values))]

    def examples(self) -> list[Any]:
        """Return all values, which a setting must accept."""
        return list(self.values)

    def __str__(self) -> str:
        return VALUE_MARK.join(str(value) for value in self.values)


Dimension = Range | Values
#: What is searched, by setting.
Space = dict[str, Dimension]


def read_search(search: str | Mapping[str, Any]) -> Space:
    """Return the space that text, or a mapping from settings to texts or lists, describes."""
    if isinstance(search, str):
        search = _split_text(search)
    if not search:
        raise ConfigError(f"the search names no setting: write one as in {EXAMPLE}")
    return {key.strip(): _read_dimension(key.strip(), value) for key, value in search.items()}


def describe_space(space: Space) -> dict[str, str]:
    """Return the text of each dimension, from which `read_search` makes an equal space."""
    return {key: str(dimension) for key, dimension in space.items()}


def _split_text(text: str) -> dict[str, str]:
    """Return the text of each setting's values."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, values = part.partition("=")
        if not equals or not key.strip() or not values.strip():
            raise ConfigError(f"a search takes SETTING=VALUES, as in {EXAMPLE}, not {part!r}")
        if key.strip() in found:
            raise ConfigError(f"the search names {key.strip()} twice")
        found[key.strip()] = values.strip()
    return found


def _read_dimension(key: str, values: Any) -> Dimension:
    """Return what is searched of one setting."""
    if isinstance(values, (list, tuple)):
        if not values:
            raise ConfigError(f"the search lists no value of {key}")
        return Values(tuple(values))
    if isinstance(values, (bool, int, float)):
        return Values((values,))
    if not isinstance(values, str):
        raise ConfigError(
            f"the search of {key} must be a range such as '0.1..10:log' or a list of values, not "
            f"{values!r}"
        )
    if RANGE_MARK in values:
        return _read_range(key, values)
    listed = [value.strip() for value in values.split(VALUE_MARK)]
    if "" in listed:
        raise ConfigError(f"the search of {key} has an empty value: {values!r}")
    return Values(tuple(listed))


def _read_range(key: str, text: str) -> Range:
    """Return a range of numbers from its text, such as `0.1..10:log`."""
    is_log = text.endswith(LOG_ENDING)
    low_text, _, high_text = text.removesuffix(LOG_ENDING).partition(RANGE_MARK)
    try:
        low = float(low_text)
        high = float(high_text)
    except ValueError:
        low = high = math.nan
    if not math.isfinite(low) or not math.isfinite(high):
        raise ConfigError(f"the range of {key} must be two numbers, as in 0.1..10:log, not {text}")
    if low >= high:
        raise ConfigError(f"the range of {key} is empty: {low:g} is not less than {high:g}")
    if is_log and low <= 0:
        raise ConfigError(
            f"the range of {key} begins at {low:g}, but a logarithmic one must begin above 0"
        )
    return Range(low, high, is_log)
