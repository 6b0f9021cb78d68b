import numpy as np

from fedproto.errors import ConfigError
from fedproto.options import Count
from fedproto.partitions import Pool, Portion, portions


def natural(pool: Pool, *, test_shots: Count | None = None) -> list[Portion]:
    """One client a writer (or value of `client`), `clients` of them drawn at random.

    Tested on images of its classes: the writer's own where every drawn writer has some, else everybody's.
    """
    if pool.train_writer is None:
        raise ConfigError(
            "partition natural needs a data set that says who wrote each image: chars74k, or npz with `client`"
        )
    writers = np.unique(pool.train_writer)
    if pool.clients > len(writers):
        raise ConfigError(f"clients is {pool.clients}, but there are only {len(writers)} writers")
    chosen = np.sort(pool.generator.permutation(writers)[: pool.clients])
    trains = [np.flatnonzero(pool.train_writer == writer) for writer in chosen]
    if pool.test_writer is None:
        return portions(pool, trains, test_shots)
    tests = [
        np.flatnonzero((pool.test_writer == writer) & np.isin(pool.test, pool.train[rows]))
        for writer, rows in zip(chosen, trains, strict=True)
    ]
    return portions(pool, trains, test_shots, tests if all(map(len, tests)) else None)
