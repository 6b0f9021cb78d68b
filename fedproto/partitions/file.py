import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.core.class_names import normalise_name
from fedproto.core.client_names import client_name
from fedproto.core.files import check_version, read_json
from fedproto.errors import DataError, shown
from fedproto.partitions import ClientRows, PartitionRequest

VERSION = 1
#: Characters of a stored value that an error shows.
MAX_SHOWN_CHARACTERS = 40


def file(request: PartitionRequest, path: str) -> list[ClientRows]:
    """A partition that was written before, `file:RUN/partition.json`.

    It is checked against its hash and against the data set.
    """
    stored = read_partition(Path(path))["clients"]
    clients = [client for client in stored if client["labels"] == request.source]
    if not clients:
        raise DataError(
            f"{path} divides another data set: its class names or labels are not this one's"
        )
    if len(clients) != request.clients:
        raise DataError(
            f"{path} divides this data set among {len(clients)} clients, "
            f"but {request.clients} are wanted: set clients to {len(clients)}"
        )
    rows = []
    for number, client in enumerate(clients):
        rows.append(_read_rows(request, client, f"{path}: client {number}"))
    _refuse_shared_rows([client.train for client in rows], path)
    validations = [client.validation for client in rows if client.validation is not None]
    if validations and request.validation is None:
        trains = [client.train for client in rows]
        _refuse_shared_rows([*trains, *validations], path)
    return rows


def count_clients(path: Path, source: str) -> int:
    """Return among how many clients a stored partition divides a data set, at least 1."""
    stored = read_partition(path)["clients"]
    return max(1, sum(client["labels"] == source for client in stored))


def _read_rows(request: PartitionRequest, client: dict[str, Any], where: str) -> ClientRows:
    """Return the rows of one client, checked against the data set."""
    train = _convert_rows(client["train"], len(request.train), f"{where} names a train row")
    test = _convert_rows(client["test"], len(request.test), f"{where} names a test row")
    held = {request.names[label] for label in np.unique(request.train[train])}
    for name in client["classes"]:
        if normalise_name(name) not in held:
            raise DataError(f"{where} claims class {name!r} but has no training row of it")
    validation = None
    if "validation" in client:
        candidates = request.train if request.validation is None else request.validation
        listed = client["validation"]
        validation = _convert_rows(listed, len(candidates), f"{where} names a validation row")
        if request.validation is None and np.isin(validation, train).any():
            raise DataError(f"{where} has a validation row among its training rows")
        validation = np.sort(validation)
    name = client.get("name")
    if name is not None:
        name = client_name(name, f"{where} has the name")
    return ClientRows(np.sort(train), np.sort(test), validation, name)


def _convert_rows(listed: list[int], rows: int, where: str) -> np.ndarray:
    """Return an array of rows; they are compared as Python's integers, which cannot overflow."""
    if listed and (min(listed) < 0 or max(listed) >= rows):
        raise DataError(f"{where} out of range: the data set has rows 0 to {rows - 1}")
    return np.array(listed, np.int64)


def _refuse_shared_rows(rows_of_clients: list[np.ndarray], path: str) -> None:
    """Refuse a training row that two clients have, or one client twice."""
    rows, counts = np.unique(np.concatenate(rows_of_clients), return_counts=True)
    shared = rows[counts > 1]
    if len(shared):
        raise DataError(f"{path} gives training row {shared[0]} to more than one client")


def hash_partition(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a partition's canonical JSON, without its entry `sha256`."""
    hashed = {name: value for name, value in content.items() if name != "sha256"}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_partition(path: Path) -> dict[str, Any]:
    """Read a partition file; its version, its hash and the types of its entries are checked."""
    content = read_json(path, DataError)
    if not isinstance(content, dict) or not isinstance(content.get("sha256"), str):
        raise DataError(f"{path} is not a partition file: it must be an object with a 'sha256'")
    if hash_partition(content) != content["sha256"]:
        raise DataError(
            f"{path} was changed after it was written: its SHA-256 is not the one it states"
        )
    check_version(content, VERSION, str(path), DataError)
    clients = content.get("clients")
    if not isinstance(clients, list) or not clients:
        raise DataError(
            f"{path} is not a partition file: its 'clients' must be a list of at least one"
        )
    for number, client in enumerate(clients):
        _check_client(client, f"{path}: client {number}")
    return content


def _check_client(client: Any, where: str) -> None:
    """Refuse an entry that lacks a key, or holds a value of another type."""
    if not isinstance(client, dict):
        raise DataError(f"{where} must be an object, not {_shorten(client)}")
    for key in ("dataset", "labels"):
        text = client.get(key)
        if not isinstance(text, str):
            raise DataError(f"{where} must have text as {key!r}, not {_shorten(text)}")
    for key in ("train", "test"):
        _check_row_numbers(client.get(key), f"{where} must have a list of whole numbers as {key!r}")
    if "validation" in client:
        demand = f"{where} must have a list of whole numbers as 'validation'"
        _check_row_numbers(client["validation"], demand)
    name = client.get("name", "")
    if not isinstance(name, str):
        raise DataError(f"{where} must have text as 'name', not {_shorten(name)}")
    classes = client.get("classes")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise DataError(f"{where} must have a list of names as 'classes', not {_shorten(classes)}")


def _check_row_numbers(rows: Any, demand: str) -> None:
    """Refuse anything but a list of whole numbers; `demand` begins the sentence."""
    if not isinstance(rows, list):
        raise DataError(f"{demand}, not {_shorten(rows)}")
    for row in rows:
        if type(row) is not int:  # True is an instance of int
            raise DataError(f"{demand}, not {_shorten(row)}")


def _shorten(value: object) -> str:
    return shown(value, MAX_SHOWN_CHARACTERS)
