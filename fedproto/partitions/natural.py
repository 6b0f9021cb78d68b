import numpy as np

from fedproto.errors import ConfigError
from fedproto.options import Count
from fedproto.partitions import Pool, Portion, portions


def natural(pool: Pool, *, test_shots: Count | None = None) -> list[Portion]:
    """One client a writer (or value of `client`), `clients` of them drawn at random.

    Tested on the writer's own test images where the test set has some, else on all test images of its classes.
    """
    if pool.train_writer is None:
        raise ConfigError(
            "partition natural needs a data set that says who wrote each image: chars74k, or npz with `client`"
        )
    writers = np.unique(pool.train_writer)
    if pool.clients > len(writers):
        raise ConfigError(f"clients is {pool.clients}, but there are only {len(writers)} writers")
    chosen = np.sort(pool.generator.permutation(writers)[: pool.clients])
    shares = portions(pool, [np.flatnonzero(pool.train_writer == writer) for writer in chosen], test_shots)
    if pool.test_writer is None or not np.isin(chosen, pool.test_writer).all():
        return shares
    return [
        Portion(share.train, np.flatnonzero(pool.test_writer == writer))
        for writer, share in zip(chosen, shares, strict=True)
    ]
