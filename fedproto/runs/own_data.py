"""What a user's own data decides where the settings leave it open: clients and partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedproto.config import plugins
from fedproto.config.choices import AUTO
from fedproto.config.options import Part
from fedproto.config.settings import DEFAULT_CLIENTS, Config
from fedproto.data import DataFolders, Source
from fedproto.partitions.file import count_clients as count_clients_in_file
from fedproto.runs.assemble import hash_labels

#: Rows of the smallest class that a client gets on average where `clients` is left open.
ROWS_PER_CLASS_AND_CLIENT = 100
#: The fewest clients of data that does not name its own.
MIN_CLIENTS = 2


def load_source(part: Part, data_dir: str | None, loaded: dict[str, Source]) -> Source:
    """Return a data set; one that was loaded before is not read again."""
    name = str(Part(part.name, part.options))
    if name not in loaded:
        loaded[name] = plugins.build("dataset", part, DataFolders(data_dir))
    return loaded[name]


def settle_clients(config: Config, loaded: dict[str, Source]) -> Config:
    """Return the settings with a number of clients; where none is given, the data decides.

    With several data sets each of them gets its number of clients, which is then written behind
    its name, as in `csv:a.csv*3,csv:b.csv*5`.
    """
    if config.clients is not None:
        return config
    counts = [part.count for part in config.dataset if part.count is not None]
    if counts:
        return replace(config, clients=sum(counts))
    counted = {}
    for part in config.dataset:
        source = load_source(part, config.data_dir, loaded)
        counted[str(part)] = replace(part, count=count_clients(source, config.partition))
    parts = tuple(counted.values())
    clients = sum(part.count or 0 for part in parts)
    if len(parts) == 1:
        parts = config.dataset[:1]  # one for all needs no count
    return replace(config, clients=clients, dataset=parts)


def settle_partition(partition: Part, sources: Sequence[Source]) -> Part:
    """Return the partition that `auto` stands for, or itself where the sources do not agree."""
    if partition.name != AUTO:
        return partition
    names = {"iid" if source.train.writer is None else "natural" for source in sources}
    return replace(partition, name=names.pop()) if len(names) == 1 else partition


def count_clients(source: Source, partition: Part) -> int:
    """Return the number of clients of a user's own data where the settings name none.

    These are all clients that the data names or that a stored partition has. Other data is divided
    among 2 to 20 clients, such that a client has about 100 training rows of the smallest class.
    """
    base, _, path = partition.name.partition(":")
    if base == "file":
        return count_clients_in_file(Path(path), hash_labels(source))
    writers = source.train.writer
    if writers is not None and base in (AUTO, "natural"):
        return len(np.unique(writers))
    _, rows_by_class = np.unique(source.train.y, return_counts=True)
    suitable = int(rows_by_class.min(initial=len(source.train.y))) // ROWS_PER_CLASS_AND_CLIENT
    wanted = min(DEFAULT_CLIENTS, max(MIN_CLIENTS, suitable))
    return max(1, min(wanted, len(source.train.y)))
