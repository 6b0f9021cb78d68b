"""What is suspicious about the data of a federation although it can be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

from fedproto.core.class_names import list_names
from fedproto.core.federation import Examples, Federation, Member
from fedproto.data.shared.feature_encoding import Columns, Number

#: Rows per client by which ranges are compared.
MAX_COMPARED_ROWS = 1000
#: A client's mean is suspicious if it is so many typical deviations away from the others' ...
MAX_SHIFT = 5.0
#: ... and its deviation if it is so many times larger or smaller than theirs.
MAX_RATIO = 10.0
#: Test rows below which an accuracy of a client says little.
FEW_TEST_ROWS = 10
MAX_LISTED = 4
HASH_BYTES = 16


def find_suspicions(federation: Federation) -> list[str]:
    """Return a sentence for each suspicious thing, the most serious first."""
    return [
        *describe_ranges(federation),
        *describe_shared_rows(federation),
        *describe_poor_clients(federation),
    ]


# --- ranges


class _Measured(NamedTuple):
    """A number that all clients have, with its mean and deviation at each of them."""

    name: str  # with its verb
    means: np.ndarray
    deviations: np.ndarray


def describe_ranges(federation: Federation) -> list[str]:
    """Return which numbers have another range with one client than with the others.

    So it is where one hospital writes centimetres and the others metres, or where the images of
    one client go from 0 to 1 and those of the others from 0 to 255.
    """
    sentences = []
    for measured in _measure(federation):
        typical = float(np.median(measured.deviations))
        centre = float(np.median(measured.means))
        odd = []
        for member, mean, deviation in zip(
            federation.members, measured.means, measured.deviations, strict=True
        ):
            is_shifted = abs(mean - centre) > MAX_SHIFT * typical
            is_wide = deviation > MAX_RATIO * typical
            is_narrow = deviation < typical / MAX_RATIO
            if is_shifted or is_wide or is_narrow:
                odd.append(f"{member.name} (mean {mean:.3g}, deviation {deviation:.3g})")
        if odd:
            listed = list_names(odd, MAX_LISTED)
            sentences.append(
                f"{measured.name} another range with client {listed} than with most (mean "
                f"{centre:.3g}, deviation {typical:.3g}): is the unit the same everywhere?"
            )
    return sentences


def _measure(federation: Federation) -> Iterator[_Measured]:
    """Yield what can be compared between clients: columns of a table, or all values of an image.

    Nothing if clients have inputs of different shapes.
    """
    members = federation.members
    shapes = {tuple(member.train.x.shape[1:]) for member in members}
    if len(members) < 2 or len(shapes) > 1:
        return
    samples = [_take_rows(member.train) for member in members]
    encodings = {member.preprocessing.encoding for member in members}
    encoding = encodings.pop() if len(encodings) == 1 else None
    if isinstance(encoding, Columns):
        for number, place in _place_numbers(encoding):
            columns = [sample[:, place] * number.std + number.mean for sample in samples]
            yield _summarise(f"column {number.name!r} has", columns)
    elif encoding is None:
        yield _summarise("the inputs have", samples)


def _place_numbers(encoding: Columns) -> Iterator[tuple[Number, int]]:
    """Yield the columns of numbers, and at which input each is."""
    place = 0
    for column in encoding.columns:
        if isinstance(column, Number):
            yield column, place
            place += 1
        else:
            place += len(column.values)


def _take_rows(examples: Examples) -> np.ndarray:
    """Return some of a client's inputs, spread over all its rows."""
    step = max(1, len(examples.rows) // MAX_COMPARED_ROWS)
    rows = examples.rows[::step]
    return examples.x[rows].double().cpu().numpy()


def _summarise(name: str, samples: list[np.ndarray]) -> _Measured:
    means = np.array([sample.mean() for sample in samples])
    deviations = np.array([sample.std() for sample in samples])
    return _Measured(name, means, deviations)


# --- rows that are there twice


def describe_shared_rows(federation: Federation) -> list[str]:
    """Return how many rows are with several clients, or both in training and in test sets."""
    holders: dict[bytes, set[int]] = {}
    for member in federation.members:
        for row in _hash_rows(member.train):
            holders.setdefault(row, set()).add(member.id)
    sentences = []
    shared = sum(len(clients) > 1 for clients in holders.values())
    if shared:
        sentences.append(
            f"{shared:,} training rows are with two or more clients, label included: the same "
            "patient or file may be in two places"
        )
    tested: set[bytes] = set()
    for member in federation.members:
        tested.update(_hash_rows(member.test))
    seen = sum(row in holders for row in tested)
    is_known = any("equal a training row" in notice for notice in federation.notices)
    if seen and not is_known:
        sentences.append(
            f"{seen:,} of {len(tested):,} different test rows equal a training row, label "
            "included: the accuracy is partly that of rows seen in training"
        )
    return sentences


def _hash_rows(examples: Examples) -> Iterator[bytes]:
    """Yield a hash of each row's input and label."""
    for start in range(0, len(examples.rows), MAX_COMPARED_ROWS):
        rows = examples.rows[start : start + MAX_COMPARED_ROWS]
        inputs = examples.x[rows].cpu().numpy()
        labels = examples.y[rows].to(torch.int64).cpu().numpy()
        for value, label in zip(inputs, labels, strict=True):
            content = value.tobytes() + label.tobytes()
            yield blake2b(content, digest_size=HASH_BYTES).digest()


# --- clients with little


def describe_poor_clients(federation: Federation) -> list[str]:
    """Return which clients have one class only, or hardly a test row."""
    sentences = []
    single = [member.name for member in federation.members if len(member.classes) == 1]
    if single:
        sentences.append(
            f"{_name_clients(single)} one class only: alone, it would call everything by its name"
        )
    untested = [member.name for member in federation.members if _has_few_test_rows(member)]
    if untested:
        sentences.append(
            f"{_name_clients(untested)} fewer than {FEW_TEST_ROWS} test rows: the accuracy of "
            "such a client says little"
        )
    return sentences


def _has_few_test_rows(member: Member) -> bool:
    return len(member.test) < FEW_TEST_ROWS


def _name_clients(names: list[str]) -> str:
    if len(names) == 1:
        return f"client {names[0]} has"
    return f"{len(names)} clients ({list_names(names, MAX_LISTED)}) have"
