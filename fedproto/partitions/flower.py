import inspect
from typing import Any, Literal

import numpy as np

from fedproto.config.options import Fraction, PositiveFloat, PositiveInt
from fedproto.errors import ConfigError, need, unknown
from fedproto.partitions import ClientRows, PartitionRequest, portions

#: Those that divide rows by what a pool knows; others want functions, arrays or columns.
PARTITIONERS = (
    "ContinuousPartitioner",
    "DirichletPartitioner",
    "ExponentialPartitioner",
    "GroupedNaturalIdPartitioner",
    "IidPartitioner",
    "LinearPartitioner",
    "NaturalIdPartitioner",
    "PathologicalPartitioner",
    "ShardPartitioner",
    "SquarePartitioner",
)


def flower(
    pool: PartitionRequest,
    name: str,
    *,
    alpha: PositiveFloat | None = None,
    min_partition_size: int | None = None,
    self_balancing: bool | None = None,
    num_classes_per_partition: PositiveInt | None = None,
    class_assignment_mode: Literal["random", "deterministic", "first-deterministic"] | None = None,
    num_shards_per_partition: PositiveInt | None = None,
    shard_size: PositiveInt | None = None,
    keep_incomplete_shard: bool | None = None,
    group_size: PositiveInt | None = None,
    strictness: Fraction | None = None,
    test_shots: PositiveInt | None = None,
) -> list[ClientRows]:
    """A partitioner of Flower Datasets by its name: `flower:PathologicalPartitioner(num_classes_per_partition=2)`.

    It divides the shuffled training images by label (by client where it wants ids), with a seed drawn for it; options
    have its names. Each client is tested on every test image of its classes, or on `test_shots` of each.
    """
    given = {
        "alpha": alpha,
        "min_partition_size": min_partition_size,
        "self_balancing": self_balancing,
        "num_classes_per_partition": num_classes_per_partition,
        "class_assignment_mode": class_assignment_mode,
        "num_shards_per_partition": num_shards_per_partition,
        "shard_size": shard_size,
        "keep_incomplete_shard": keep_incomplete_shard,
        "group_size": group_size,
        "strictness": strictness,
    }
    partitioner = _built(
        pool, name, {option: value for option, value in given.items() if value is not None}
    )
    return portions(pool, _rows(pool, name, partitioner), test_shots)


def _built(pool: PartitionRequest, name: str, given: dict[str, Any]) -> Any:
    """The partitioner, with what it wants to know of this federation filled in."""
    if name not in PARTITIONERS:
        raise unknown("partitioner of Flower Datasets", name, PARTITIONERS)
    module = need("flwr_datasets.partitioner", "'fedproto[flower]'", "partition flower")
    if name not in module.__all__ or name == "Partitioner":
        raise unknown(
            "partitioner of Flower Datasets",
            name,
            [each for each in module.__all__ if each != "Partitioner"],
        )
    wanted = inspect.signature(getattr(module, name)).parameters
    column = "client" if name.endswith("NaturalIdPartitioner") else "label"
    known = {
        "num_partitions": pool.clients,
        "partition_by": column,
        "seed": int(pool.generator.integers(2**31)),
    }
    for option in given:
        if option not in wanted:
            raise unknown(
                f"option of {name}", option, [each for each in wanted if each not in known]
            )
    options = {option: value for option, value in known.items() if option in wanted} | given
    return _calling(name, getattr(module, name), **options)


def _rows(pool: PartitionRequest, name: str, partitioner: Any) -> list[np.ndarray]:
    """The training rows of each client. Rows are shuffled first, as Flower does, whose iid deals them in order."""
    order = pool.generator.permutation(len(pool.train))
    columns = {"row": order, "label": pool.train[order]}
    if pool.train_writer is not None:
        columns["client"] = pool.train_writer[order]
    elif name.endswith("NaturalIdPartitioner"):
        raise ConfigError(
            f"{name} needs a data set that says whose each image is, as for partition natural"
        )
    partitioner.dataset = need(
        "datasets", "'fedproto[flower]'", "partition flower"
    ).Dataset.from_dict(columns)
    found = _calling(name, lambda: partitioner.num_partitions)
    if found != pool.clients:
        raise ConfigError(
            f"{name} makes {found} clients of this data set, but clients is {pool.clients}"
        )
    parts = (_calling(name, partitioner.load_partition, number) for number in range(pool.clients))
    rows = [np.asarray(part.with_format("numpy")["row"][:], np.int64) for part in parts]
    for number, some in enumerate(rows):
        if not len(some):
            raise ConfigError(
                f"{name} leaves client {number} without an image: fewer clients, or other options, may help"
            )
    return rows


def _calling(name: str, function: Any, *arguments: Any, **options: Any) -> Any:
    """What Flower's function returns, or what it refuses in one sentence."""
    try:
        return function(*arguments, **options)
    except Exception as error:  # each partitioner has its own way to refuse
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from error
