import inspect
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fedproto.config.options import Fraction, PositiveFloat, PositiveInt
from fedproto.errors import ConfigError, need, unknown
from fedproto.partitions import ClientRows, PartitionRequest, add_test_rows, keep_groups_whole

#: The partitioners that need no more than labels and writers; others want functions or arrays.
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
INSTALL = "'.[flower]'"
PURPOSE = "partition flower"
KIND = "partitioner of Flower Datasets"


def flower(
    request: PartitionRequest,
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
    """A partitioner of Flower Datasets by its name, such as `flower:IidPartitioner`.

    Its options have Flower's names: `flower:PathologicalPartitioner(num_classes_per_partition=2)`.
    It divides the shuffled training rows by label, or by client if it wants ids, with a seed
    drawn for it. A client is tested on every test row of its classes, or on `test_shots` of each.
    """
    options = {
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
    given = {option: value for option, value in options.items() if value is not None}
    partitioner = _build_partitioner(request, name, given)
    train_rows: Sequence[np.ndarray] = _divide_rows(request, name, partitioner)
    if not _wants_ids(name):
        train_rows = keep_groups_whole(request, train_rows)
    return add_test_rows(request, train_rows, test_shots)


def _build_partitioner(request: PartitionRequest, name: str, given: dict[str, Any]) -> Any:
    """Return Flower's partitioner; what it wants to know of this federation is filled in."""
    if name not in PARTITIONERS:
        raise unknown(KIND, name, PARTITIONERS)
    module = need("flwr_datasets.partitioner", INSTALL, PURPOSE)
    if name not in module.__all__:  # an older or newer version of Flower Datasets
        available = [each for each in module.__all__ if each != "Partitioner"]
        raise unknown(KIND, name, available)
    partitioner_class = getattr(module, name)
    parameters = inspect.signature(partitioner_class).parameters
    known = {
        "num_partitions": request.clients,
        "partition_by": "client" if _wants_ids(name) else "label",
        "seed": int(request.generator.integers(2**31)),
    }
    for option in given:
        if option not in parameters:
            accepted = [parameter for parameter in parameters if parameter not in known]
            raise unknown(f"option of {name}", option, accepted)
    options = {option: value for option, value in known.items() if option in parameters}
    return _call(name, partitioner_class, **options, **given)


def _wants_ids(name: str) -> bool:
    return name.endswith("NaturalIdPartitioner")


def _divide_rows(request: PartitionRequest, name: str, partitioner: Any) -> list[np.ndarray]:
    """Return the training rows of each client.

    Rows are shuffled first, as in Flower, whose IidPartitioner deals them in order.
    """
    order = request.generator.permutation(len(request.train))
    columns = {"row": order, "label": request.train[order]}
    if request.train_writer is not None:
        columns["client"] = request.train_writer[order]
    elif _wants_ids(name):
        raise ConfigError(
            f"{name} needs a data set that says whose each row is, as for partition natural"
        )
    datasets = need("datasets", INSTALL, PURPOSE)
    partitioner.dataset = datasets.Dataset.from_dict(columns)
    found = _call(name, getattr, partitioner, "num_partitions")
    if found != request.clients:
        raise ConfigError(
            f"{name} makes {found} clients of this data set, but clients is {request.clients}"
        )
    all_rows = []
    for client in range(request.clients):
        part = _call(name, partitioner.load_partition, client)
        rows = np.asarray(part.with_format("numpy")["row"][:], np.int64)
        if not len(rows):
            raise ConfigError(
                f"{name} leaves client {client} without a row: "
                "fewer clients, or other options, may help"
            )
        all_rows.append(rows)
    return all_rows


def _call(name: str, function: Any, *arguments: Any, **options: Any) -> Any:
    """Call a function of Flower's; whatever it raises becomes one sentence."""
    try:
        return function(*arguments, **options)
    except Exception as error:  # each partitioner has its own way to refuse
        message = " ".join(str(error).split())
        raise ConfigError(f"{name}: {message}") from error
