import numpy as np

from fedproto.config.options import PositiveFloat, PositiveInt
from fedproto.errors import ConfigError
from fedproto.partitions import ClientRows, PartitionRequest, portions

TRIES = 100


def dirichlet(
    pool: PartitionRequest,
    *,
    alpha: PositiveFloat = 0.5,
    smallest: PositiveInt = 10,
    test_shots: PositiveInt | None = None,
) -> list[ClientRows]:
    """Each class is shared out by proportions drawn from Dirichlet(α, ..., α) (Hsu et al. 2019); all images are used.

    Small α: few classes a client. Drawn again until every client has at least `smallest` images.
    """
    for _ in range(TRIES):
        trains = _draw(pool, alpha)
        if min(map(len, trains)) >= smallest:
            return portions(pool, trains, test_shots)
    raise ConfigError(
        f"dirichlet found no split of {len(pool.train)} images that gives each of {pool.clients} clients {smallest} "
        f"in {TRIES} tries with alpha {alpha:g}: raise alpha, or lower clients or smallest"
    )


def _draw(pool: PartitionRequest, alpha: float) -> list[np.ndarray]:
    hands: list[list[np.ndarray]] = [[] for _ in range(pool.clients)]
    for label in range(len(pool.names)):
        rows = pool.generator.permutation(np.flatnonzero(pool.train == label))
        cuts = np.cumsum(pool.generator.dirichlet(np.full(pool.clients, alpha)))[:-1]
        for hand, piece in zip(
            hands, np.split(rows, np.rint(cuts * len(rows)).astype(int)), strict=True
        ):
            hand.append(piece)
    return [np.concatenate(hand) for hand in hands]
