"""Rows of a table, and texts, as numbers, by what the training rows hold; so that later ones are read alike.

It belongs to a member like its weights: `fedproto predict` reads new tables and texts with it, `fedproto export` takes
it along.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedproto.errors import DataError

Place = Callable[[int], str]  # where a row stands, for people
WORD = re.compile(r"\w+(?:'\w+)*")
PADDING, UNKNOWN = 0, 1  # the ids that are no word


@dataclass(frozen=True)
class Number:
    """x ← (x − mean) / std over the training rows; what is missing is 0."""

    name: str
    mean: float
    std: float

    def __call__(self, texts: np.ndarray, place: Place) -> np.ndarray:
        found = numbers(texts)
        if found is None:
            row = next(row for row in range(len(texts)) if numbers(texts[row : row + 1]) is None)
            raise DataError(
                f"{place(row)}: column {self.name!r} holds {str(texts[row])!r}, but the training rows hold numbers"
            )
        wrong = np.flatnonzero(~np.isfinite(found) & (texts != ""))
        if len(wrong):
            raise DataError(
                f"{place(wrong[0])}: column {self.name!r} holds {str(texts[wrong[0]])!r}, which is no finite number; "
                "leave empty what is missing, or write NA"
            )
        return np.nan_to_num((found - self.mean) / self.std).astype(np.float32)[:, None]


@dataclass(frozen=True)
class Category:
    """A one where the row holds the text; a text that no training row holds is all zeros."""

    name: str
    values: tuple[str, ...]  # sorted

    def __call__(self, texts: np.ndarray, place: Place) -> np.ndarray:
        values = np.array(self.values)
        position = np.searchsorted(values, texts).clip(max=len(values) - 1)
        known = values[position] == texts
        x = np.zeros((len(texts), len(values)), np.float32)
        x[np.flatnonzero(known), position[known]] = 1
        return x


@dataclass(frozen=True)
class Columns:
    """Of a table: one input a number, one for each text of a category."""

    columns: tuple[Number | Category, ...]

    def __call__(self, table: Mapping[str, np.ndarray], place: Place) -> np.ndarray:
        return np.concatenate([column(table[column.name], place) for column in self.columns], 1)

    def strangers(self, table: Mapping[str, np.ndarray]) -> dict[int, list[str]]:
        """The rows that hold a text that no training row did, each with what it holds."""
        found: dict[int, list[str]] = {}
        for column in self.columns:
            if isinstance(column, Category):
                texts = table[column.name]
                for row in np.flatnonzero(~np.isin(texts, column.values)).tolist():
                    found.setdefault(row, []).append(f"column {column.name!r} holds {str(texts[row])!r}")
        return found

    @property
    def tells(self) -> str:
        return f"names {len(self.columns)} columns, with the mean, or the texts, of the training rows in each"

    @property
    def width(self) -> int:
        return sum(len(each.values) if isinstance(each, Category) else 1 for each in self.columns)


@dataclass(frozen=True)
class Words:
    """Of texts: each word's rank among the frequent ones, from 2 on; 1 is any other, 0 padding."""

    words: tuple[str, ...]
    length: int

    @classmethod
    def of(cls, texts: Iterable[str], size: int, length: int) -> Words:
        """The most frequent words; of equally frequent ones the alphabetically first."""
        counts: Counter[str] = Counter()
        for each in texts:
            counts.update(words_of(each))
        return cls(tuple(sorted(counts, key=lambda word: (-counts[word], word))[:size]), length)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        known = {word: rank for rank, word in enumerate(self.words, UNKNOWN + 1)}
        x = np.full((len(texts), self.length), PADDING, np.int32)
        for row, each in zip(x, texts, strict=True):
            ids = [known.get(word, UNKNOWN) for word in words_of(each)[: self.length]]
            row[: len(ids)] = ids
        return x

    @property
    def tells(self) -> str:
        return f"holds {len(self.words):,} words of the training texts"

    @property
    def width(self) -> int:
        return self.length


Encoding = Columns | Words


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


def numbers(texts: np.ndarray) -> np.ndarray | None:
    """As numbers, NaN where they are missing; None where one is none, as 1_000 is, which Python would read."""
    if (np.char.find(texts, "_") >= 0).any():
        return None
    try:
        return np.where(texts == "", "nan", texts).astype(np.float64)
    except ValueError:
        return None


# --- as JSON


def to_json(encoding: Encoding) -> dict[str, Any]:
    return asdict(encoding)


def from_json(given: Any, where: str) -> Encoding:
    """What `to_json` gave; refused where it is something else."""
    try:
        if given.keys() == {"words", "length"} and _are_texts(given["words"]) and _is_count(given["length"]):
            return Words(tuple(given["words"]), given["length"])
        if given.keys() == {"columns"} and given["columns"]:
            return Columns(tuple(map(_column, given["columns"])))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where} does not say how rows or texts become numbers: {error}") from error
    raise DataError(f"{where} does not say how rows or texts become numbers: it must hold columns, or words and length")


def _column(given: dict[str, Any]) -> Number | Category:
    if not isinstance(given["name"], str):
        raise ValueError("a column's name must be a text")
    if given.keys() == {"name", "values"}:
        if not _are_texts(given["values"]) or sorted(given["values"]) != given["values"]:
            raise ValueError(f"the values of {given['name']!r} must be different texts in order")
        return Category(given["name"], tuple(given["values"]))
    mean, std = given["mean"], given["std"]
    if not (isinstance(mean, float) and isinstance(std, float) and np.isfinite([mean, std]).all() and std > 0):
        raise ValueError(f"mean and std of {given['name']!r} must be finite numbers, and std above 0")
    return Number(given["name"], mean, std)


def _are_texts(given: Any) -> bool:
    return (
        isinstance(given, list) and all(isinstance(each, str) for each in given) and 0 < len(given) == len(set(given))
    )


def _is_count(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given > 0
