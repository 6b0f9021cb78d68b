import numpy as np

from fedproto.config.options import PositiveInt
from fedproto.errors import ConfigError
from fedproto.partitions import ClientRows, PartitionRequest, add_test_rows, keep_groups_whole


def iid(request: PartitionRequest, *, test_shots: PositiveInt | None = None) -> list[ClientRows]:
    """All training rows, shuffled and dealt in equal parts."""
    rows = len(request.train)
    if request.clients > rows:
        raise ConfigError(f"{request.clients} clients cannot share {rows} training rows")
    shuffled = request.generator.permutation(rows)
    train_rows = keep_groups_whole(request, np.array_split(shuffled, request.clients))
    return add_test_rows(request, train_rows, test_shots)
