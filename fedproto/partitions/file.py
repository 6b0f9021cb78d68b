import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.core.class_names import normalise_name
from fedproto.core.files import read_json
from fedproto.errors import DataError, shown
from fedproto.partitions import ClientRows, PartitionRequest

VERSION = 1


def file(pool: PartitionRequest, path: str) -> list[ClientRows]:
    """A partition that was written before: `file:RUN/partition.json`, checked against its hash and the data set."""
    clients = [client for client in read(Path(path))["clients"] if client["labels"] == pool.source]
    if not clients:
        raise DataError(
            f"{path} divides another data set: its class names or labels are not this one's"
        )
    if len(clients) != pool.clients:
        raise DataError(
            f"{path} divides this data set among {len(clients)} clients, but {pool.clients} are wanted: set clients to "
            f"{len(clients)}"
        )
    portions = [
        _portion(pool, client, f"{path}: client {number}") for number, client in enumerate(clients)
    ]
    rows, counts = np.unique(
        np.concatenate([portion.train for portion in portions]), return_counts=True
    )
    if (counts > 1).any():
        raise DataError(f"{path} gives training row {rows[counts > 1][0]} to more than one client")
    return portions


def _portion(pool: PartitionRequest, client: dict[str, Any], where: str) -> ClientRows:
    train = _rows(client["train"], len(pool.train), f"{where} names a train row")
    test = _rows(client["test"], len(pool.test), f"{where} names a test row")
    held = {pool.names[label] for label in np.unique(pool.train[train])}
    for name in client["classes"]:
        if normalise_name(name) not in held:
            raise DataError(f"{where} claims class {name!r} but has no training image of it")
    return ClientRows(np.sort(train), np.sort(test))


def _rows(listed: list[int], rows: int, where: str) -> np.ndarray:
    """The rows as an array; compared as Python's numbers, which have no largest."""
    if listed and not (min(listed) >= 0 and max(listed) < rows):
        raise DataError(f"{where} out of range: the data set has rows 0 to {rows - 1}")
    return np.array(listed, np.int64)


def stamp(content: dict[str, Any]) -> str:
    """SHA-256 of a partition's canonical JSON, without the stamp itself."""
    unstamped = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(
        json.dumps(unstamped, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """A partition file of our version, whose hash is right and whose entries are of the right kind."""
    try:
        content = read_json(path, DataError)
    except DataError as error:
        raise DataError(f"{path} is no partition file: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("sha256"), str):
        raise DataError(f"{path} is no partition file: it must be an object with a 'sha256'")
    if stamp(content) != content["sha256"]:
        raise DataError(
            f"{path} was changed after it was written: its SHA-256 is not the one it states"
        )
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise DataError(
            f"{path} is a partition of version {shown(version, 40)}, and this fedproto reads version {VERSION}"
        )
    clients = content.get("clients")
    if not isinstance(clients, list) or not clients:
        raise DataError(
            f"{path} is no partition file: its 'clients' must be a list of at least one"
        )
    for number, client in enumerate(clients):
        _check_client(client, f"{path}: client {number}")
    return content


def _check_client(client: Any, where: str) -> None:
    """Refuse an entry that lacks something, or holds it as something else."""
    if not isinstance(client, dict):
        raise DataError(f"{where} must be an object, not {shown(client, 40)}")
    for key in ("dataset", "labels"):
        if not isinstance(client.get(key), str):
            raise DataError(f"{where} must have text as {key!r}, not {shown(client.get(key), 40)}")
    for key in ("train", "test"):
        rows = client.get(key)
        odd = [row for row in rows if type(row) is not int] if isinstance(rows, list) else [rows]
        if odd:
            raise DataError(
                f"{where} must have a list of whole numbers as {key!r}, not {shown(odd[0], 40)}"
            )
    classes = client.get("classes")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise DataError(f"{where} must have a list of names as 'classes', not {shown(classes, 40)}")
