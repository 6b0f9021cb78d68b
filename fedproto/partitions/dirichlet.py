import math

import numpy as np

from fedproto.config.options import PositiveFloat, PositiveInt, Samples
from fedproto.errors import ConfigError
from fedproto.partitions import ClientRows, PartitionRequest, add_test_rows, keep_groups_whole

MAX_TRIES = 100


def dirichlet(
    request: PartitionRequest,
    *,
    alpha: PositiveFloat = 0.5,
    smallest: PositiveInt = 10,
    rows: Samples | None = None,
    test_shots: PositiveInt | None = None,
) -> list[ClientRows]:
    """Each class is divided by proportions from Dirichlet(α, ..., α) (Hsu et al. 2019).

    All training rows are used, or as many of each class as give every client `rows` on average,
    if there are so many. A small α gives few classes per client. The split is drawn again until
    every client has at least `smallest` rows.
    """
    for _ in range(MAX_TRIES):
        train_rows = keep_groups_whole(request, _draw_split(request, alpha, rows))
        if min(len(each) for each in train_rows) >= smallest:
            return add_test_rows(request, train_rows, test_shots)
    raise ConfigError(
        f"dirichlet found no split of {len(request.train)} rows that gives each of "
        f"{request.clients} clients {smallest} in {MAX_TRIES} tries with alpha {alpha:g}: "
        "raise alpha, or lower clients or smallest"
    )


def _draw_split(
    request: PartitionRequest, alpha: float, rows_per_client: int | None
) -> list[np.ndarray]:
    """Return the training rows of each client, so many on average; all rows if None."""
    most_per_class = None
    if rows_per_client is not None:
        most_per_class = math.ceil(rows_per_client * request.clients / len(request.names))
    hands: list[list[np.ndarray]] = [[] for _ in range(request.clients)]
    alphas = np.full(request.clients, alpha)
    for label in range(len(request.names)):
        rows = request.generator.permutation(np.flatnonzero(request.train == label))
        rows = rows[:most_per_class]
        proportions = request.generator.dirichlet(alphas)
        ends = np.cumsum(proportions)[:-1] * len(rows)
        pieces = np.split(rows, np.rint(ends).astype(int))
        for hand, piece in zip(hands, pieces, strict=True):
            hand.append(piece)
    return [np.concatenate(hand) for hand in hands]
