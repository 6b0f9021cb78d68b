"""How rows of a table, and texts, become numbers, learned from the training rows.

An encoding belongs to a client like its weights: a run folder keeps it, `fedproto predict` reads
new tables and texts with it, and `fedproto export` takes it along.
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

from fedproto.core.files import check_version, read_json
from fedproto.data.shared.delimited import UTF_8, check_text_encoding
from fedproto.errors import ConfigError, DataError

Place = Callable[[int], str]  # names a row in an error, by its file and line
WORD = re.compile(r"\w+(?:'\w+)*")
PADDING = 0  # the id that fills up short texts
UNKNOWN = 1  # the id of all words outside the vocabulary
ENCODING = "encoding.json"  # the file's name
VERSION = 1  # of the file's format
TEXT = "text"  # the usual name of the column of texts


@dataclass(frozen=True)
class Notation:
    """How the values of a table are written, in training files and in those to classify."""

    missing: tuple[str, ...] = ()  # marks of missing values, besides nothing, NA and ?
    decimal: str = "."
    text_encoding: str = UTF_8


USUAL_NOTATION = Notation()


@dataclass(frozen=True)
class Number:
    """A column of numbers: x ← (x − mean) / std over the training rows; missing values become 0."""

    name: str
    mean: float
    std: float

    def __call__(self, texts: np.ndarray, place: Place) -> np.ndarray:
        """Return the column as float32, (n, 1).

        Raises DataError where a text is not a finite number, or is too far from the mean.
        """
        values = parse_numbers(texts)
        if values is None:
            row = find_non_number(texts)
            raise DataError(
                f"{self._describe(texts, row, place)}, but the training rows hold numbers"
            )
        not_finite = np.flatnonzero(~np.isfinite(values) & (texts != ""))
        if len(not_finite):
            raise DataError(
                f"{self._describe(texts, not_finite[0], place)}, which is not a finite number; "
                "leave missing values empty, write NA, or name their mark in `missing`"
            )
        with np.errstate(over="ignore"):
            scaled = (values - self.mean) / self.std
            # Infinities stay, so that they are found below; only missing values become 0.
            x = np.nan_to_num(scaled, posinf=np.inf, neginf=-np.inf).astype(np.float32)
        too_large = np.flatnonzero(~np.isfinite(x))
        if len(too_large):
            raise DataError(
                f"{self._describe(texts, too_large[0], place)}, which is too far from the "
                f"training rows' mean of {self.mean:g} (standard deviation {self.std:g})"
            )
        return x[:, None]

    def _describe(self, texts: np.ndarray, row: int, place: Place) -> str:
        return f"{place(row)}: column {self.name!r} holds {str(texts[row])!r}"


@dataclass(frozen=True)
class Category:
    """A column of categories, as one input per text of the training rows.

    The input is 1 where the row holds that text; a text that no training row holds is all zeros.
    """

    name: str
    values: tuple[str, ...]  # sorted

    def __call__(self, texts: np.ndarray, place: Place) -> np.ndarray:
        """Return the column as float32, (n, number of values)."""
        values = np.array(self.values)
        position = np.searchsorted(values, texts)
        position = position.clip(max=len(values) - 1)
        is_known = values[position] == texts
        known_rows = np.flatnonzero(is_known)
        x = np.zeros((len(texts), len(values)), np.float32)
        x[known_rows, position[known_rows]] = 1
        return x


@dataclass(frozen=True)
class Columns:
    """The encoding of a table: one input per column of numbers, one per text of a category."""

    columns: tuple[Number | Category, ...]
    notation: Notation = USUAL_NOTATION

    def __call__(self, table: Mapping[str, np.ndarray], place: Place) -> np.ndarray:
        """Return the table's rows as float32, (n, width); `table` maps names to columns of text."""
        encoded = [column(table[column.name], place) for column in self.columns]
        return np.concatenate(encoded, 1)

    def find_missing(self, names: Iterable[str]) -> list[str]:
        """Return the columns of this encoding that are not among these names."""
        present = set(names)
        return [column.name for column in self.columns if column.name not in present]

    def find_unknown_texts(self, table: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the rows with texts that no training row holds, by column, where there are any."""
        found = {}
        for column in self.columns:
            if isinstance(column, Category):
                is_known = np.isin(table[column.name], column.values)
                if not is_known.all():
                    found[column.name] = np.flatnonzero(~is_known)
        return found

    @property
    def disclosure(self) -> str:
        """What the encoding discloses about the training rows, as a predicate."""
        return (
            f"names {len(self.columns)} columns, and for each the mean and standard deviation, "
            "or the texts, of all clients' training rows"
        )

    @property
    def width(self) -> int:
        width = 0
        for column in self.columns:
            width += len(column.values) if isinstance(column, Category) else 1
        return width


@dataclass(frozen=True)
class Words:
    """The encoding of texts: each word becomes its rank in the vocabulary.

    Ranks count from 2; 1 is any other word, 0 is padding.
    """

    words: tuple[str, ...]
    length: int  # words per text
    column: str = TEXT  # that holds the texts in a table
    text_encoding: str = UTF_8  # of files

    @classmethod
    def fit(
        cls,
        texts: Iterable[str],
        size: int,
        length: int,
        column: str = TEXT,
        text_encoding: str = UTF_8,
    ) -> Words:
        """Return the `size` most frequent words; ties are broken alphabetically."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(split_words(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(tuple(ranked[:size]), length, column, text_encoding)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return the texts as int32, (n, length), cut off or padded."""
        ids_of = {word: rank for rank, word in enumerate(self.words, UNKNOWN + 1)}
        x = np.full((len(texts), self.length), PADDING, np.int32)
        for row, text in zip(x, texts, strict=True):
            words = split_words(text)[: self.length]
            row[: len(words)] = [ids_of.get(word, UNKNOWN) for word in words]
        return x

    @property
    def disclosure(self) -> str:
        """What the encoding discloses about the training texts, as a predicate."""
        return f"holds {len(self.words):,} words of all clients' training texts"

    @property
    def width(self) -> int:
        return self.length


Encoding = Columns | Words


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case.

    >>> split_words("Don't panic!")
    ["don't", 'panic']
    """
    return WORD.findall(text.lower())


def parse_numbers(texts: np.ndarray) -> np.ndarray | None:
    """Return texts as float64, NaN where they are empty, or None if one is not a number.

    Python reads 1_000 as a number; here it is not one.
    """
    if (np.char.find(texts, "_") >= 0).any():
        return None
    try:
        return np.where(texts == "", "nan", texts).astype(np.float64)
    except ValueError:
        return None


def find_non_number(texts: np.ndarray) -> int:
    """Return the first row that holds no number, where `parse_numbers` returned None."""
    for row in range(len(texts)):
        if parse_numbers(texts[row : row + 1]) is None:
            return row
    raise AssertionError("all texts are numbers")


# --- as JSON


#: Entries of the JSON object that may be left out, with what they mean then.
_USUAL_OF_WORDS: dict[str, Any] = {"column": TEXT, "text_encoding": UTF_8}
_USUAL_OF_COLUMNS: dict[str, Any] = {"notation": {}}
_USUAL_ENTRIES = _USUAL_OF_WORDS | _USUAL_OF_COLUMNS


def read_encoding(path: Path) -> Encoding:
    """Read an encoding from its file, or raise DataError."""
    return from_json(read_json(path, DataError), str(path))


def to_json(encoding: Encoding) -> dict[str, Any]:
    """Return the encoding as a JSON object, with the version of its format.

    What is as usual about the files that it reads is left out.
    """
    content = {"version": VERSION, **asdict(encoding)}
    if isinstance(encoding, Columns):
        notation = asdict(encoding.notation)
        usual = asdict(USUAL_NOTATION)
        unusual = {key: value for key, value in notation.items() if value != usual[key]}
        content["notation"] = unusual
    for key, usual_value in _USUAL_ENTRIES.items():
        if content.get(key) == usual_value:
            del content[key]
    return content


def from_json(given: Any, where: str) -> Encoding:
    """Return the encoding that `to_json` wrote.

    Raises DataError if it is anything else, or of another version; `where` begins the sentence.
    """
    if isinstance(given, dict):
        check_version(given, VERSION, where, DataError)
        given = {name: value for name, value in given.items() if name != "version"}
        given = _USUAL_OF_WORDS | given if "words" in given else _USUAL_OF_COLUMNS | given
    if _is_object(
        given,
        words=_is_list_of_texts,
        length=is_count,
        column=_is_text,
        text_encoding=_is_text_encoding,
    ):
        return Words(**given | {"words": tuple(given["words"])})
    if _is_object(given, columns=_is_list_of_columns, notation=_is_notation):
        columns = tuple(_read_column(column) for column in given["columns"])
        return Columns(columns, _read_notation(given["notation"]))
    raise DataError(
        f"{where} is not a valid encoding: it must hold distinct `words` and a `length`, or "
        "`columns` with distinct names, each with `mean` and `std`, or with sorted `values`"
    )


def _read_notation(given: dict[str, Any]) -> Notation:
    """Return a notation from its JSON object, which has been checked."""
    return Notation(**given | {"missing": tuple(given.get("missing", ()))})


def _read_column(given: dict[str, Any]) -> Number | Category:
    """Return a column from its JSON object, which has been checked."""
    if "values" in given:
        return Category(given["name"], tuple(given["values"]))
    return Number(given["name"], given["mean"], given["std"])


def _is_object(given: Any, **accepts: Callable[[Any], bool]) -> bool:
    """Return whether this is an object with exactly these entries, each of which is accepted."""
    if not isinstance(given, dict) or given.keys() != accepts.keys():
        return False
    return all(accept(given[name]) for name, accept in accepts.items())


def _is_list_of_columns(given: Any) -> bool:
    """Return whether this is a list of columns with distinct names, at least one."""
    if not isinstance(given, list) or not given:
        return False
    if not all(_is_column(column) for column in given):
        return False
    return len({column["name"] for column in given}) == len(given)


def _is_column(given: Any) -> bool:
    is_number = _is_object(given, name=_is_text, mean=_is_number, std=_is_deviation)
    return is_number or _is_object(given, name=_is_text, values=_is_sorted)


def _is_text(given: Any) -> bool:
    return isinstance(given, str)


def _is_notation(given: Any) -> bool:
    usual = {"missing": ["NA"], "decimal": ".", "text_encoding": UTF_8}
    if not isinstance(given, dict):
        return False
    return _is_object(
        usual | given,
        missing=_is_list_of_texts,
        decimal=lambda mark: mark in (".", ","),
        text_encoding=_is_text_encoding,
    )


def _is_text_encoding(given: Any) -> bool:
    if not isinstance(given, str):
        return False
    try:
        check_text_encoding(given)
    except ConfigError:
        return False
    return True


def _is_list_of_texts(given: Any) -> bool:
    """Return whether this is a list of distinct texts, at least one."""
    if not isinstance(given, list) or not given:
        return False
    return all(_is_text(each) for each in given) and len(set(given)) == len(given)


def _is_sorted(given: Any) -> bool:
    return _is_list_of_texts(given) and sorted(given) == given


def _is_number(given: Any) -> bool:
    return isinstance(given, float) and math.isfinite(given)


def _is_deviation(given: Any) -> bool:
    return _is_number(given) and given > 0


def is_count(given: Any) -> bool:
    """Return whether this is a positive whole number."""
    return isinstance(given, int) and not isinstance(given, bool) and given > 0
