"""Which rows are held out: a fraction of each class, and whole groups where rows belong to some.

A group is what must never be separated, such as the images of one patient: a model that has seen
one of them knows the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def draw_held_out(
    y: np.ndarray,
    fraction: float,
    generator: np.random.Generator,
    group: np.ndarray | None = None,
) -> np.ndarray:
    """Return the rows to hold out, ascending: about this fraction of each class.

    Of a class with two or more rows at least one is held out, and of every class at least one
    stays. With `group`, whole groups are held out: those that bring all classes nearest to the
    fraction, in a random order. A class that only one group has then stays as it is.
    """
    if group is not None:
        return _draw_groups(y, fraction, generator, group)
    held_out = [np.zeros(0, np.int64)]
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        if len(rows) == 1:
            continue  # a single row stays
        count = _count_to_hold_out(len(rows), fraction)
        held_out.append(generator.permutation(rows)[:count])
    return np.sort(np.concatenate(held_out))


def _count_to_hold_out(rows: int, fraction: float) -> int:
    """Return how many of two or more rows are held out: at least one, and never all."""
    return min(rows - 1, max(1, round(fraction * rows)))


def _draw_groups(
    y: np.ndarray, fraction: float, generator: np.random.Generator, group: np.ndarray
) -> np.ndarray:
    """Return the rows of the groups to hold out, ascending."""
    _, group_of_row = np.unique(group, return_inverse=True)
    counts = count_classes(group_of_row, y)
    in_class = counts.sum(0)
    can_be_divided = (counts > 0).sum(0) > 1  # by groups
    wanted = np.zeros(len(in_class))
    for label in np.flatnonzero(can_be_divided):
        wanted[label] = _count_to_hold_out(int(in_class[label]), fraction)
    held = np.zeros(len(in_class))
    is_held = np.zeros(len(counts), bool)
    for number in generator.permutation(len(counts)):
        if _is_nearer(held + counts[number], held, wanted) and _leaves_all_classes(
            held + counts[number], in_class
        ):
            is_held[number] = True
            held = held + counts[number]
    for label in np.flatnonzero(can_be_divided):
        if held[label]:
            continue
        number = _find_least_harm(int(label), counts, is_held, held, wanted, in_class)
        if number is not None:
            is_held[number] = True
            held = held + counts[number]
    return np.flatnonzero(is_held[group_of_row])


def count_classes(group_of_row: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return how many rows of each class each group has: (groups, classes).

    `group_of_row` numbers the groups from 0 on.
    """
    counts = np.zeros((int(group_of_row.max(initial=-1)) + 1, int(y.max(initial=-1)) + 1), int)
    np.add.at(counts, (group_of_row, y), 1)
    return counts


def _distance(held: np.ndarray, wanted: np.ndarray) -> float:
    """Return how far the classes are from what is wanted; small classes count as large ones do."""
    return float((np.abs(held - wanted) / np.maximum(wanted, 1)).sum())


def _is_nearer(candidate: np.ndarray, held: np.ndarray, wanted: np.ndarray) -> bool:
    return _distance(candidate, wanted) < _distance(held, wanted)


def _leaves_all_classes(held: np.ndarray, in_class: np.ndarray) -> bool:
    """Return whether a row of every class stays."""
    return bool(((held < in_class) | (in_class == 0)).all())


def _find_least_harm(
    label: int,
    counts: np.ndarray,
    is_held: np.ndarray,
    held: np.ndarray,
    wanted: np.ndarray,
    in_class: np.ndarray,
) -> int | None:
    """Return the group with rows of a class that can be held out, too, at the least cost.

    It is None if each of them has the last rows of some class.
    """
    best = None
    least = np.inf
    for number in np.flatnonzero((counts[:, label] > 0) & ~is_held):
        candidate = held + counts[number]
        distance = _distance(candidate, wanted)
        if distance < least and _leaves_all_classes(candidate, in_class):
            best = int(number)
            least = distance
    return best


def keep_groups_whole(
    rows_of_clients: Sequence[np.ndarray], y: np.ndarray, group: np.ndarray
) -> list[np.ndarray]:
    """Return the clients' rows, moved so that each group is with one client.

    Each client comes near to the number of rows per class that it had: the groups are dealt, the
    largest first, to whom they bring nearest to it. Rows that nobody had stay with nobody.
    """
    dealt = np.concatenate(rows_of_clients)
    sizes = [len(rows) for rows in rows_of_clients]
    owner_of_row = np.repeat(np.arange(len(rows_of_clients)), sizes)
    _, group_of_row = np.unique(group[dealt], return_inverse=True)
    counts = count_classes(group_of_row, y[dealt])
    missing = np.zeros((len(rows_of_clients), counts.shape[1]))
    np.add.at(missing, (owner_of_row, y[dealt]), 1)
    owner_of_group = np.zeros(len(counts), int)
    largest_first = np.argsort(-counts.sum(1), kind="stable")
    for number in largest_first:
        # The squared distance to what is missing falls most where this product is largest.
        owner = int((missing @ counts[number]).argmax())
        owner_of_group[number] = owner
        missing[owner] -= counts[number]
    new_owner = owner_of_group[group_of_row]
    return [dealt[new_owner == client] for client in range(len(rows_of_clients))]


def find_shared_group(groups_of_parts: Sequence[np.ndarray]) -> tuple[object, int, int] | None:
    """Return a group that two parts of the data have, and the positions of these parts, or None."""
    first_part: dict[object, int] = {}
    for position, groups in enumerate(groups_of_parts):
        for name in np.unique(groups).tolist():
            if first_part.setdefault(name, position) != position:
                return name, first_part[name], position
    return None
