"""Sets validation rows apart, by which the best round is chosen, and refuses groups that leak.

A source may have a validation set of its own. From any other, a fraction of each client's training
rows is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedproto.core import rng
from fedproto.core.row_splits import draw_held_out, find_shared_group
from fedproto.data import Source
from fedproto.errors import ConfigError, DataError
from fedproto.partitions import ClientRows


def set_validation_apart(
    sources: Sequence[Source], rows: Sequence[ClientRows], fraction: float | None, seed: int
) -> list[ClientRows]:
    """Return the clients' rows with their validation rows; without validation, with none.

    Rows that a stored partition names are kept. A client's draw depends on the seed, its number
    and its own rows, and on nobody else's.

    Args:
        sources, rows: one per client.
        fraction: of each class of a client's training rows. At least one row of the class stays,
            and at least one is taken if there are two or more. None: only sources with a
            validation set of their own have validation rows. 0: nobody has any.
        seed: of the run.
    """
    if fraction == 0:
        return [each._replace(validation=None) for each in rows]
    lacking = [number for number, each in enumerate(rows) if each.validation is None]
    if not lacking:
        return list(rows)
    has_own_set = any(sources[number].validation is not None for number in lacking)
    nothing_is_asked = fraction is None and not has_own_set
    if nothing_is_asked and len(lacking) == len(rows):
        return list(rows)
    _refuse_unclear_wish([sources[number] for number in lacking], fraction)
    own_rows = _find_own_rows(sources, rows)
    divided = list(rows)
    for number in lacking:
        source = sources[number]
        if source.validation is not None:
            divided[number] = rows[number]._replace(validation=own_rows[number])
        else:
            assert fraction is not None
            generator = rng.generator(seed, f"validation of client {number}")
            divided[number] = _take_from_training(source, rows[number], fraction, generator)
    if not any(len(each.validation) for each in divided if each.validation is not None):
        raise DataError(
            "no client has a class with two training rows, so none can be set apart for "
            "validation: leave validation out"
        )
    return divided


def _refuse_unclear_wish(sources: Sequence[Source], fraction: float | None) -> None:
    """Refuse a fraction where all sources have their own set, and none where only some have."""
    with_set = [source.name for source in sources if source.validation is not None]
    without_set = [source.name for source in sources if source.validation is None]
    if fraction is not None and not without_set:
        raise ConfigError(
            f"validation is {fraction:g}, but {with_set[0]} has a validation set of its own: leave "
            "validation out, or set it to 0 to do without validation"
        )
    if fraction is None and without_set:
        raise ConfigError(
            f"{without_set[0]} has no validation set, but other clients have validation rows: set "
            "validation to a fraction of the training rows of those without, or to 0 to do without "
            "validation"
        )


def _take_from_training(
    source: Source, rows: ClientRows, fraction: float, generator: np.random.Generator
) -> ClientRows:
    """Return a client's rows with some of its training rows set apart."""
    group = None if source.train.group is None else source.train.group[rows.train]
    held = draw_held_out(source.train.y[rows.train], fraction, generator, group)
    return rows._replace(train=np.delete(rows.train, held), validation=rows.train[held])


# --- sources with a validation set of their own


def _find_own_rows(sources: Sequence[Source], rows: Sequence[ClientRows]) -> dict[int, np.ndarray]:
    """Return the clients' rows of their sources' validation sets, by client.

    They are the rows of a client's classes, as for its test rows: of the writer's own where all
    clients of a source are single writers with such rows, otherwise everybody's.
    """
    found: dict[int, np.ndarray] = {}
    for source in dict.fromkeys(sources):
        if source.validation is None:
            continue
        clients = [number for number, each in enumerate(sources) if each is source]
        of_classes = {}
        of_writers = {}
        for client in clients:
            labels = np.unique(source.train.y[rows[client].train])
            has_class = np.isin(source.validation.y, labels)
            of_classes[client] = np.flatnonzero(has_class)
            of_writers[client] = _rows_of_writer(source, rows[client], has_class)
        all_have_own = all(len(of_writers[client]) for client in clients)
        found |= of_writers if all_have_own else of_classes
    return found


def _rows_of_writer(source: Source, rows: ClientRows, has_class: np.ndarray) -> np.ndarray:
    """Return the validation rows of the only writer of a client's training rows, if there is one.

    has_class  which validation rows are of the client's classes
    """
    nothing = np.zeros(0, np.int64)
    if source.validation is None or source.validation.writer is None:
        return nothing
    if source.train.writer is None:
        return nothing
    writers = np.unique(source.train.writer[rows.train])
    if len(writers) != 1:
        return nothing
    return np.flatnonzero(has_class & (source.validation.writer == writers[0]))


# --- groups


def refuse_leaking_groups(sources: Sequence[Source], rows: Sequence[ClientRows]) -> None:
    """Refuse a group that two clients have, or that a client both trains and validates with."""
    for source in dict.fromkeys(sources):
        group = source.train.group
        if group is None:
            continue
        clients = [number for number, each in enumerate(sources) if each is source]
        taken_apart = []
        names = []
        for client in clients:
            name = f"client {rows[client].name or client}"
            names.append(name)
            validation = rows[client].validation
            if validation is None or source.validation is not None:
                validation = np.zeros(0, np.int64)
            _refuse_shared(
                [group[rows[client].train], group[validation]],
                [f"the training rows of {name}", f"the validation rows of {name}"],
                source.name,
            )
            taken_apart.append(np.concatenate([rows[client].train, validation]))
        _refuse_shared([group[part] for part in taken_apart], names, source.name)


def _refuse_shared(parts: Sequence[np.ndarray], names: Sequence[str], where: str) -> None:
    """Refuse a group that two parts of the data have; `names` are those of the parts."""
    shared = find_shared_group(parts)
    if shared is None:
        return
    group, first, second = shared
    raise DataError(
        f"{where} has leaking groups: {names[first]} and {names[second]} both have rows of the "
        f"group {group!r}"
    )
