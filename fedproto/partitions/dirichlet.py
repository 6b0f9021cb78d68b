import numpy as np

from fedproto.config.options import PositiveFloat, PositiveInt
from fedproto.errors import ConfigError
from fedproto.partitions import ClientRows, PartitionRequest, add_test_rows, keep_groups_whole

MAX_TRIES = 100


def dirichlet(
    request: PartitionRequest,
    *,
    alpha: PositiveFloat = 0.5,
    smallest: PositiveInt = 10,
    test_shots: PositiveInt | None = None,
) -> list[ClientRows]:
    """Each class is divided by proportions from Dirichlet(α, ..., α) (Hsu et al. 2019).

    All rows are used. A small α gives few classes per client. The split is drawn again until
    every client has at least `smallest` rows.
    """
    for _ in range(MAX_TRIES):
        train_rows = keep_groups_whole(request, _draw_split(request, alpha))
        if min(len(rows) for rows in train_rows) >= smallest:
            return add_test_rows(request, train_rows, test_shots)
    raise ConfigError(
        f"dirichlet found no split of {len(request.train)} rows that gives each of "
        f"{request.clients} clients {smallest} in {MAX_TRIES} tries with alpha {alpha:g}: "
        "raise alpha, or lower clients or smallest"
    )


def _draw_split(request: PartitionRequest, alpha: float) -> list[np.ndarray]:
    """Return the training rows of each client."""
    hands: list[list[np.ndarray]] = [[] for _ in range(request.clients)]
    alphas = np.full(request.clients, alpha)
    for label in range(len(request.names)):
        rows = request.generator.permutation(np.flatnonzero(request.train == label))
        proportions = request.generator.dirichlet(alphas)
        ends = np.cumsum(proportions)[:-1] * len(rows)
        pieces = np.split(rows, np.rint(ends).astype(int))
        for hand, piece in zip(hands, pieces, strict=True):
            hand.append(piece)
    return [np.concatenate(hand) for hand in hands]
