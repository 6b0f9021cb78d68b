import numpy as np

from fedproto.config.options import PositiveInt
from fedproto.errors import ConfigError
from fedproto.partitions import ClientRows, PartitionRequest, grouped, portions


def natural(pool: PartitionRequest, *, test_shots: PositiveInt | None = None) -> list[ClientRows]:
    """One client a writer (or value of `client`), `clients` of them drawn at random.

    Tested on images of its classes: the writer's own where every drawn writer has some, else everybody's.
    """
    if pool.train_writer is None:
        raise ConfigError(
            "partition natural needs a data set that says who wrote each image: chars74k, femnist, pfllib, or npz, "
            "csv, text or hf with a column `client`"
        )
    writers, train_writer = np.unique(pool.train_writer, return_inverse=True)
    if pool.clients > len(writers):
        raise ConfigError(f"clients is {pool.clients}, but there are only {len(writers)} writers")
    drawn = np.sort(pool.generator.permutation(len(writers))[: pool.clients])
    by_writer = grouped(train_writer, len(writers))
    trains = [by_writer[writer] for writer in drawn]
    own = _own_tests(pool, writers, train_writer)
    tests = [own[writer] for writer in drawn] if own else []
    return portions(pool, trains, test_shots, tests if tests and all(map(len, tests)) else None)


def _own_tests(
    pool: PartitionRequest, writers: np.ndarray, train_writer: np.ndarray
) -> list[np.ndarray]:
    """Each writer's test rows of classes it has training rows of."""
    if pool.test_writer is None:
        return []
    known = np.flatnonzero(np.isin(pool.test_writer, writers))
    writer, classes = np.searchsorted(writers, pool.test_writer[known]), len(pool.names)
    trained = np.unique(train_writer * classes + pool.train)
    fits = np.isin(writer * classes + pool.test[known], trained)
    rows = known[fits]
    return [rows[places] for places in grouped(writer[fits], len(writers))]
