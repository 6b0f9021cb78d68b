"""Rows of a table, and texts, as numbers, by what the training rows hold; so that later ones are read alike.

It belongs to a member like its weights: a run folder keeps it, `fedproto predict` reads new tables and texts with it,
`fedproto export` takes it along.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.core import files
from fedproto.core.files import check_version
from fedproto.errors import DataError

Place = Callable[[int], str]  # where a row stands, for people
WORD = re.compile(r"\w+(?:'\w+)*")
PADDING, UNKNOWN = 0, 1  # the ids that are no word
ENCODING = "encoding.json"  # its file
VERSION = 1  # of that file's format


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
        with np.errstate(over="ignore"):
            x = np.nan_to_num((found - self.mean) / self.std, posinf=np.inf, neginf=-np.inf).astype(
                np.float32
            )
        beyond = np.flatnonzero(~np.isfinite(x))
        if len(beyond):
            raise DataError(
                f"{place(beyond[0])}: column {self.name!r} holds {str(texts[beyond[0]])!r}, which is beyond measure "
                f"beside the training rows' mean of {self.mean:g} and deviation of {self.std:g}"
            )
        return x[:, None]


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

    def missing(self, names: Iterable[str]) -> list[str]:
        """The columns that are not among these."""
        there = set(names)
        return [column.name for column in self.columns if column.name not in there]

    def strangers(self, table: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The columns with texts that no training row holds, and the rows of those."""
        kept = {
            column.name: column.values for column in self.columns if isinstance(column, Category)
        }
        rows = {
            name: np.flatnonzero(~np.isin(table[name], values)) for name, values in kept.items()
        }
        return {name: each for name, each in rows.items() if len(each)}

    @property
    def tells(self) -> str:
        return (
            f"names {len(self.columns)} columns, and of each the mean and deviation, or the texts, of all clients' "
            "training rows"
        )

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
        return f"holds {len(self.words):,} words of all clients' training texts"

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


def read_json(path: Path) -> Any:
    return files.read_json(path, DataError)


def read_encoding(path: Path) -> Encoding:
    return from_json(read_json(path), str(path))


def to_json(encoding: Encoding) -> dict[str, Any]:
    """The encoding as an object for JSON, with the version of its format."""
    return {"version": VERSION, **asdict(encoding)}


def from_json(given: Any, where: str) -> Encoding:
    """What `to_json` gave; refused where it is something else, or of another version."""
    if isinstance(given, dict):
        check_version(given, VERSION, where, DataError)
        given = {name: value for name, value in given.items() if name != "version"}
    if _is(given, words=_are_texts, length=is_count):
        return Words(tuple(given["words"]), given["length"])
    if _is(given, columns=_are_columns):
        return Columns(tuple(_column(each) for each in given["columns"]))
    raise DataError(
        f"{where} does not say how rows or texts become numbers: it must hold different `words` and a `length`, or "
        "`columns`, each with a name of its own and `mean` and `std`, or `values` in order"
    )


def _column(given: dict[str, Any]) -> Number | Category:
    if "values" in given:
        return Category(given["name"], tuple(given["values"]))
    return Number(given["name"], given["mean"], given["std"])


def _is(given: Any, **wanted: Callable[[Any], bool]) -> bool:
    """Whether it is an object of just these entries, each of which is as it should be."""
    is_object = isinstance(given, dict) and given.keys() == wanted.keys()
    return is_object and all(accepts(given[name]) for name, accepts in wanted.items())


def _are_columns(given: Any) -> bool:
    if not isinstance(given, list) or not given:
        return False
    number, category = {"mean": _is_number, "std": _is_deviation}, {"values": _are_ordered}
    each_is = [
        _is(each, name=_is_text, **number) or _is(each, name=_is_text, **category) for each in given
    ]
    return all(each_is) and len({each["name"] for each in given}) == len(given)


def _is_text(given: Any) -> bool:
    return isinstance(given, str)


def _are_texts(given: Any) -> bool:
    """Different ones, and one at least."""
    return (
        isinstance(given, list) and all(map(_is_text, given)) and 0 < len(set(given)) == len(given)
    )


def _are_ordered(given: Any) -> bool:
    return _are_texts(given) and sorted(given) == given


def _is_number(given: Any) -> bool:
    return isinstance(given, float) and math.isfinite(given)


def _is_deviation(given: Any) -> bool:
    return _is_number(given) and given > 0


def is_count(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given > 0
