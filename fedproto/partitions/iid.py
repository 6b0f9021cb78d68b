import numpy as np

from fedproto.config.options import PositiveInt
from fedproto.errors import ConfigError
from fedproto.partitions import ClientRows, PartitionRequest, portions


def iid(pool: PartitionRequest, *, test_shots: PositiveInt | None = None) -> list[ClientRows]:
    """All training images, shuffled and dealt in equal parts."""
    if pool.clients > len(pool.train):
        raise ConfigError(f"{pool.clients} clients cannot share {len(pool.train)} training images")
    return portions(
        pool, np.array_split(pool.generator.permutation(len(pool.train)), pool.clients), test_shots
    )
