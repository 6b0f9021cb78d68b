"""Columns that tell rows apart instead of describing them: names, ids and dates."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from fedproto.data.shared.feature_encoding import ENCODING, parse_numbers
from fedproto.errors import ColumnsError

#: Texts or numbers per column that count as categories of a small table, however few rows hold one.
MAX_RARE_CATEGORIES = 10
#: Different whole numbers that may stand in a column of ids before it is taken for one.
MAX_NUMBERS_OF_IDS = 20
WAYS_OUT = "name it in `ignore`, or in `keep` if it is to be an input"
#: Dates as people and programs write them, with a time or without.
DATE = re.compile(
    r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))"
    r"([ T]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?( ?[AaPp][Mm])?(Z|[+-]\d{2}:?\d{2})?)?"
)
#: Dates as whole numbers, such as 20240131.
DATE_NUMBER = re.compile(r"(19|20)\d{2}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])(\.0)?")
#: The last word of the name of a column of ids, as in patient_id.
ID_WORDS = ("id", "ids", "uuid", "guid", "mrn")
CAMEL_CASE_ID = re.compile(r".*[a-z](Id|ID)s?$")


def refuse_telling_column(
    where: str, name: str, texts: np.ndarray, train_texts: np.ndarray
) -> None:
    """Raise ColumnsError if a column holds dates or ids, or if nearly every row holds its own text.

    `texts` are those of all rows. Each text would become an input, and be listed in the encoding;
    ids that were given out in the order of the classes would even tell the label.
    """
    column = f"{where}: column {name!r}"
    values = np.unique(train_texts[train_texts != ""])
    if len(values) > MAX_RARE_CATEGORIES and _holds_dates(values):
        message = f"{column} holds {len(values):,} different dates: {WAYS_OUT}"
        raise ColumnsError(message, (name,))
    numbers = parse_numbers(train_texts)
    if numbers is not None:
        if _holds_ids(name, texts):
            raise ColumnsError(
                f"{column} holds {len(np.unique(texts)):,} different whole numbers in "
                f"{len(texts):,} rows, as ids do: {WAYS_OUT}",
                (name,),
            )
        return
    if _identifies_rows(train_texts):
        raise ColumnsError(
            f"{column} holds {len(values):,} different texts in {len(train_texts):,} training "
            "rows, as names, ids and dates do: each would become an input and be listed in "
            f"{ENCODING}, so name it in `ignore`, or in `keep` if they are categories",
            (name,),
        )


def join_refusals(where: str, refusals: Sequence[ColumnsError]) -> ColumnsError:
    """Return one error about all columns that were refused one by one."""
    if len(refusals) == 1:
        return refusals[0]
    columns: list[str] = []
    for refusal in refusals:
        columns.extend(refusal.columns)
    listed = ", ".join(repr(name) for name in columns)
    return ColumnsError(
        f"{where}: {len(columns)} columns hold names, ids or dates, which tell rows apart instead "
        f"of describing them: {listed}; name them in `ignore`, or in `keep` those that are to be "
        "inputs",
        tuple(columns),
    )


def _holds_dates(values: np.ndarray) -> bool:
    """Return whether all texts are dates."""
    listed = values.tolist()
    if all(DATE.fullmatch(value) for value in listed):
        return True
    return all(DATE_NUMBER.fullmatch(value) for value in listed)


def _holds_ids(name: str, texts: np.ndarray) -> bool:
    """Return whether a column of numbers holds ids.

    Those are whole numbers in a column that is called one, or consecutive ones of which every row
    has its own.
    """
    numbers = parse_numbers(texts)
    if numbers is None or not np.isfinite(numbers).all():
        return False
    if not (numbers == np.floor(numbers)).all():
        return False
    different = len(np.unique(numbers))
    if different <= MAX_NUMBERS_OF_IDS:
        return False
    is_consecutive = numbers.max() - numbers.min() == different - 1
    is_numbered = different == len(numbers) and is_consecutive
    return is_numbered or _is_called_id(name)


def _is_called_id(name: str) -> bool:
    words = re.split(r"[^A-Za-z]+", name)
    last_word = [word for word in words if word][-1:]
    if last_word and last_word[0].lower() in ID_WORDS:
        return True
    return CAMEL_CASE_ID.fullmatch(name) is not None


def _identifies_rows(texts: np.ndarray) -> bool:
    """Return whether nearly every row holds its own text: on average fewer than two rows share one.

    Missing values and the most common text do not count: "none" may stand in most rows of free
    remarks.
    """
    _, counts = np.unique(texts[texts != ""], return_counts=True)
    other_counts = np.sort(counts)[:-1]
    has_many = len(other_counts) > MAX_RARE_CATEGORIES
    return has_many and 2 * len(other_counts) > other_counts.sum()
