import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.errors import DataError
from fedproto.partitions import Pool, Portion


def file(pool: Pool, path: str) -> list[Portion]:
    """A partition that was written before: `file:RUN/partition.json`, checked against its hash and the data set."""
    clients = [client for client in read(Path(path))["clients"] if client["labels"] == pool.source]
    if not clients:
        raise DataError(f"{path} divides another data set: its class names or labels are not this one's")
    if len(clients) != pool.clients:
        raise DataError(
            f"{path} divides this data set among {len(clients)} clients, but {pool.clients} are wanted: set clients to "
            f"{len(clients)}"
        )
    portions = [_portion(pool, client, f"{path}: client {number}") for number, client in enumerate(clients)]
    rows, counts = np.unique(np.concatenate([portion.train for portion in portions]), return_counts=True)
    if (counts > 1).any():
        raise DataError(f"{path} gives training row {rows[counts > 1][0]} to more than one client")
    return portions


def _portion(pool: Pool, client: dict[str, Any], where: str) -> Portion:
    train, test = (np.asarray(client[part], np.int64) for part in ("train", "test"))
    for part, rows, labels in (("train", train, pool.train), ("test", test, pool.test)):
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(labels)):
            raise DataError(f"{where} names a {part} row out of range: the data set has rows 0 to {len(labels) - 1}")
    held = {pool.names[label] for label in np.unique(pool.train[train])}
    for name in client["classes"]:
        if name not in held:
            raise DataError(f"{where} claims class {name!r} but has no training image of it")
    return Portion(np.sort(train), np.sort(test))


def stamp(content: dict[str, Any]) -> str:
    """SHA-256 of a partition's canonical JSON, without the stamp itself."""
    unstamped = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(unstamped, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """A partition file whose hash is right."""
    try:
        content = json.loads(path.read_text())
        found, wanted = stamp(content), content["sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no partition file: {error}") from error
    if found != wanted:
        raise DataError(f"{path} was changed after it was written: its SHA-256 is not the one it states")
    return content
