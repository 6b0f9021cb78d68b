import numpy as np

from fedproto.errors import ConfigError
from fedproto.options import Count
from fedproto.partitions import Pool, Portion, portions


def iid(pool: Pool, *, test_shots: Count | None = None) -> list[Portion]:
    """All training images, shuffled and dealt in equal parts."""
    if pool.clients > len(pool.train):
        raise ConfigError(f"{pool.clients} clients cannot share {len(pool.train)} training images")
    return portions(pool, np.array_split(pool.generator.permutation(len(pool.train)), pool.clients), test_shots)
