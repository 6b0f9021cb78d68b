from typing import Any, Literal

import numpy as np

from fedproto.config.options import NonNegativeFloat, PositiveInt
from fedproto.errors import ConfigError
from fedproto.partitions import ClientRows, PartitionRequest, enough, grouped, portions


def nway(
    pool: PartitionRequest,
    *,
    ways: PositiveInt | None = None,
    shots: PositiveInt | None = None,
    stdev: NonNegativeFloat = 2.0,
    shots_stdev: NonNegativeFloat | None = None,
    noise: Literal["uniform", "normal"] = "uniform",
    test_shots: PositiveInt | None = None,
) -> list[ClientRows]:
    """The paper's setting: client i draws n_i classes and k_i images of each; n_i about `ways`, k_i about `shots`.

    `ways` is 3 where it is not given, or all classes where there are fewer, `shots` the data set's own number, and
    `shots_stdev` is `stdev`, but less than the data set's shots where those are taken. `uniform` noise is a whole
    number within ± stdev (a half-range, as in the released code), `normal` a rounded Gaussian; n_i stays between 2 and
    the number of classes, k_i at 1 or more. Tested on every test image of the client's classes, or on `test_shots` of
    each.
    """
    total = len(pool.names)
    filled = fill_in(
        total, pool.shots, ways=ways, shots=shots, stdev=stdev, shots_stdev=shots_stdev
    )
    ways, shots_stdev = filled["ways"], filled["shots_stdev"]
    if ways > total:
        raise ConfigError(f"ways is {ways}, but there are only {total} classes")
    if shots is not None and shots > len(
        pool.train
    ):  # refused here, since no generator draws numbers of any size
        enough(pool, 0, int((pool.train == 0).sum()), shots, "training")
    # A stream for each purpose, and client or class: one setting does not change what another one draws.
    for_n, for_k, for_classes, for_rows, for_tests = pool.generator.spawn(5)
    ns = _around(for_n, pool.clients, ways, stdev, noise, low=min(2, ways), high=total)
    ks = _around(
        for_k, pool.clients, filled["shots"], shots_stdev, noise, low=1, high=len(pool.train)
    )
    draws = for_classes.spawn(pool.clients)
    classes = [generator.permutation(total)[:n] for generator, n in zip(draws, ns, strict=True)]
    return portions(
        pool._replace(generator=for_tests),
        _deal(pool, for_rows.spawn(total), classes, ks),
        test_shots,
    )


def fill_in(
    classes: int,
    usual_shots: int,
    *,
    ways: int | None,
    shots: int | None,
    stdev: float,
    shots_stdev: float | None,
) -> dict[str, Any]:
    """The options `ways`, `shots` and `shots_stdev`, with what they leave open filled in from the data set."""
    if (
        shots_stdev is None
    ):  # a data set of few images has little to spare for those who draw more than its shots
        shots_stdev = stdev if shots is not None else min(stdev, usual_shots - 1)
    return {
        "ways": min(3, classes) if ways is None else ways,
        "shots": usual_shots if shots is None else shots,
        "shots_stdev": shots_stdev,
    }


def _around(
    generator: np.random.Generator,
    clients: int,
    centre: int,
    spread: float,
    noise: str,
    low: int,
    high: int,
) -> np.ndarray:
    """One whole number a client around `centre`, between `low` and `high`."""
    if noise == "normal":
        return np.rint(generator.normal(centre, spread, clients)).clip(low, high).astype(int)
    if not float(spread).is_integer():
        raise ConfigError(
            f"stdev is {spread:g}, but uniform noise is in whole numbers: round it, or set noise=normal"
        )
    first, last = max(low, centre - int(spread)), min(high, centre + int(spread))
    return generator.integers(first, max(first, last) + 1, clients)


def _deal(
    pool: PartitionRequest,
    generators: list[np.random.Generator],
    classes: list[np.ndarray],
    ks: np.ndarray,
) -> list[np.ndarray]:
    """The training rows of each client: k of each of its classes, from shuffled stacks that no two clients share."""
    hands: list[list[np.ndarray]] = [[] for _ in classes]
    clients = np.repeat(np.arange(len(classes)), [len(labels) for labels in classes])
    places = grouped(np.concatenate(classes), len(generators))
    for label, generator in enumerate(generators):
        holders = clients[places[label]]
        stack = generator.permutation(np.flatnonzero(pool.train == label))
        ends = np.cumsum([0, *ks[holders]])
        enough(pool, label, len(stack), int(ends[-1]), "training")
        for client, start, end in zip(holders, ends[:-1], ends[1:], strict=True):
            hands[client].append(stack[start:end])
    return [np.concatenate(hand) for hand in hands]
