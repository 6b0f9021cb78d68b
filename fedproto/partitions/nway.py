from typing import Any, Literal

import numpy as np

from fedproto.config.options import NonNegativeFloat, PositiveInt
from fedproto.errors import ConfigError
from fedproto.partitions import (
    ClientRows,
    PartitionRequest,
    add_test_rows,
    group_positions,
    require_rows,
)

#: Classes per client where the user names no number.
DEFAULT_WAYS = 3


def nway(
    request: PartitionRequest,
    *,
    ways: PositiveInt | None = None,
    shots: PositiveInt | None = None,
    stdev: NonNegativeFloat = 2.0,
    shots_stdev: NonNegativeFloat | None = None,
    noise: Literal["uniform", "normal"] = "uniform",
    test_shots: PositiveInt | None = None,
) -> list[ClientRows]:
    """The paper's setting: client i draws n_i classes and k_i rows of each of them.

    n_i lies around `ways` and k_i around `shots`. By default, `ways` is 3 (or all classes if there
    are fewer), `shots` is the data set's own number, and `shots_stdev` is `stdev`, but less than
    the data set's shots where those are used. `uniform` noise is a whole number within ± stdev (a
    half-range, as in the released code), `normal` noise a rounded Gaussian. n_i stays between 2 and
    the number of classes, k_i at 1 or more. A client is tested on every test row of its classes,
    or on `test_shots` of each.
    """
    if request.train_group is not None:
        raise ConfigError(
            "partition nway deals single rows of a class and would separate groups: use iid, "
            "dirichlet, classes or natural"
        )
    total = len(request.names)
    filled = fill_in(
        total, request.shots, ways=ways, shots=shots, stdev=stdev, shots_stdev=shots_stdev
    )
    if filled["ways"] > total:
        raise ConfigError(f"ways is {filled['ways']}, but there are only {total} classes")
    if shots is not None and shots > len(request.train):
        # Refused before numbers are drawn around it, since no generator draws numbers of any size.
        first_class_rows = int((request.train == 0).sum())
        require_rows(request, 0, first_class_rows, shots, "training")
    # One stream per purpose, and per client or class: no setting changes what another one draws.
    for_n, for_k, for_classes, for_rows, for_tests = request.generator.spawn(5)
    class_counts = _draw_around(
        for_n,
        request.clients,
        filled["ways"],
        stdev,
        noise,
        low=min(2, filled["ways"]),
        high=total,
    )
    row_counts = _draw_around(
        for_k,
        request.clients,
        filled["shots"],
        filled["shots_stdev"],
        noise,
        low=1,
        high=len(request.train),
    )
    classes = []
    for generator, count in zip(for_classes.spawn(request.clients), class_counts, strict=True):
        classes.append(generator.permutation(total)[:count])
    train_rows = deal_rows(request, for_rows.spawn(total), classes, row_counts)
    return add_test_rows(request._replace(generator=for_tests), train_rows, test_shots)


def fill_in(
    classes: int,
    usual_shots: int,
    *,
    ways: int | None,
    shots: int | None,
    stdev: float,
    shots_stdev: float | None,
) -> dict[str, Any]:
    """Return the options `ways`, `shots` and `shots_stdev`; the data set fills in those left open.

    `classes` and `usual_shots` are the data set's.
    """
    if shots_stdev is None and shots is not None:
        shots_stdev = stdev
    elif shots_stdev is None:
        # A data set of few rows has little to spare for clients that draw more than its shots.
        shots_stdev = min(stdev, usual_shots - 1)
    return {
        "ways": min(DEFAULT_WAYS, classes) if ways is None else ways,
        "shots": usual_shots if shots is None else shots,
        "shots_stdev": shots_stdev,
    }


def _draw_around(
    generator: np.random.Generator,
    clients: int,
    centre: int,
    spread: float,
    noise: str,
    low: int,
    high: int,
) -> np.ndarray:
    """Return one whole number per client around `centre`, between `low` and `high`."""
    if noise == "normal":
        drawn = generator.normal(centre, spread, clients)
        return np.rint(drawn).clip(low, high).astype(int)
    if not float(spread).is_integer():
        raise ConfigError(
            f"stdev is {spread:g}, but uniform noise is in whole numbers: "
            "round it, or set noise=normal"
        )
    first = max(low, centre - int(spread))
    last = max(first, min(high, centre + int(spread)))
    return generator.integers(first, last + 1, clients)


def deal_rows(
    request: PartitionRequest,
    generators: list[np.random.Generator],
    classes: list[np.ndarray],
    row_counts: np.ndarray,
) -> list[np.ndarray]:
    """Return the training rows of each client: its number of rows for each of its classes.

    The rows of a class are shuffled by the class's generator and dealt to the clients in order,
    so that no two clients share one.
    """
    hands: list[list[np.ndarray]] = [[] for _ in classes]
    class_counts = [len(labels) for labels in classes]
    client_of_pair = np.repeat(np.arange(len(classes)), class_counts)
    pairs_by_label = group_positions(np.concatenate(classes), len(generators))
    for label, generator in enumerate(generators):
        holders = client_of_pair[pairs_by_label[label]]
        rows = generator.permutation(np.flatnonzero(request.train == label))
        ends = np.cumsum([0, *row_counts[holders]])
        require_rows(request, label, len(rows), int(ends[-1]), "training")
        for client, start, end in zip(holders, ends[:-1], ends[1:], strict=True):
            hands[client].append(rows[start:end])
    return [np.concatenate(hand) for hand in hands]
