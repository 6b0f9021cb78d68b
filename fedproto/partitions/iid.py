import numpy as np

from fedproto.config.options import PositiveInt
from fedproto.errors import ConfigError
from fedproto.partitions import ClientRows, PartitionRequest, add_test_rows, keep_groups_whole


def iid(request: PartitionRequest, *, test_shots: PositiveInt | None = None) -> list[ClientRows]:
    """All training images, shuffled and dealt in equal parts."""
    images = len(request.train)
    if request.clients > images:
        raise ConfigError(f"{request.clients} clients cannot share {images} training images")
    shuffled = request.generator.permutation(images)
    train_rows = keep_groups_whole(request, np.array_split(shuffled, request.clients))
    return add_test_rows(request, train_rows, test_shots)
