from typing import Literal

import numpy as np

from fedproto.errors import ConfigError
from fedproto.options import Count, NonNegative
from fedproto.partitions import Pool, Portion, enough, portions


def nway(
    pool: Pool,
    *,
    ways: Count = 3,
    shots: Count | None = None,
    stdev: NonNegative = 2.0,
    shots_stdev: NonNegative | None = None,
    noise: Literal["uniform", "normal"] = "uniform",
    test_shots: Count | None = None,
) -> list[Portion]:
    """The paper's setting: client i draws n_i classes and k_i images of each; n_i about `ways`, k_i about `shots`.

    `uniform` noise is a whole number within ± stdev (a half-range, as in the released code), `normal` a rounded
    Gaussian; n_i stays between 2 and the number of classes, k_i at 1 or more. `shots_stdev` is `stdev` where it is not
    given. Tested on every test image of the client's classes, or on `test_shots` of each.
    """
    total = len(pool.names)
    if ways > total:
        raise ConfigError(f"ways is {ways}, but there are only {total} classes")
    if shots is not None and shots > len(pool.train):  # refused here, since no generator draws numbers of any size
        enough(pool, 0, int((pool.train == 0).sum()), shots, "training")
    spread = stdev if shots_stdev is None else shots_stdev
    ns = _around(pool, ways, stdev, noise, low=min(2, ways), high=total)
    ks = _around(pool, shots or pool.shots, spread, noise, low=1, high=len(pool.train))
    classes = [pool.generator.permutation(total)[:n] for n in ns]
    return portions(pool, _deal(pool, classes, ks), test_shots)


def _around(pool: Pool, centre: int, spread: float, noise: str, low: int, high: int) -> np.ndarray:
    """One whole number a client around `centre`, between `low` and `high`."""
    if noise == "normal":
        return np.rint(pool.generator.normal(centre, spread, pool.clients)).clip(low, high).astype(int)
    if not float(spread).is_integer():
        raise ConfigError(f"stdev is {spread:g}, but uniform noise is in whole numbers: round it, or set noise=normal")
    first, last = max(low, centre - int(spread)), min(high, centre + int(spread))
    return pool.generator.integers(first, max(first, last) + 1, pool.clients)


def _deal(pool: Pool, classes: list[np.ndarray], ks: np.ndarray) -> list[np.ndarray]:
    """The training rows of each client: k of each of its classes, from shuffled stacks that no two clients share."""
    hands: list[list[np.ndarray]] = [[] for _ in classes]
    for label in range(len(pool.names)):
        holders = [client for client, labels in enumerate(classes) if label in labels]
        stack = pool.generator.permutation(np.flatnonzero(pool.train == label))
        ends = np.cumsum([0] + [ks[client] for client in holders])
        enough(pool, label, len(stack), int(ends[-1]), "training")
        for client, start, end in zip(holders, ends[:-1], ends[1:], strict=True):
            hands[client].append(stack[start:end])
    return [np.concatenate(hand) for hand in hands]
