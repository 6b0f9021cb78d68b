"""Files that survive crashes and strangers: atomic writes, checked reads, one writer at a time.

Every file that holds tensors is a safetensors file with one metadata entry, `fedproto`. It is a
JSON object with the file's `format` and `version`, a `sha256` over everything else, and whatever
header the format needs. A single entry keeps equal states equal to the byte: safetensors writes
several entries in no fixed order.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import socket
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from fedproto.errors import FedProtoError, RunFolderError, WriteError

if TYPE_CHECKING:  # locks and plain files are also for processes that need no torch
    from fedproto.core.types import Tree

MAX_NESTING = 100  # brackets inside brackets in JSON or TOML; our own files need fewer than ten
METADATA_KEY = "fedproto"
LOCK_NAME = ".lock"
_TEMPORARY_ENDING = ".new"
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


# --- writing


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Replace a file atomically: readers see either the old or the new version, never a part.

    A private file can be read and written by its owner only. The temporary name is unique, so two
    writers cannot mix their bytes; `remove_leftovers` deletes what a killed writer left behind.
    """
    with _temporary_file(path, content, private) as temporary:
        os.replace(temporary, path)


def write_new(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file that does not exist yet, atomically; FileExistsError if it does."""
    with _temporary_file(path, content, private) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # some disks, such as FAT, have no links
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
            os.replace(temporary, path)
            return
        temporary.unlink()


@contextmanager
def _temporary_file(path: Path, content: bytes, private: bool) -> Iterator[Path]:
    """Write a file beside another one, on disk for certain, and delete it after an error."""
    unique = f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{_TEMPORARY_ENDING}"
    temporary = path.with_name(unique)
    mode = 0o600 if private else 0o666
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk into one sentence with the path."""
    try:
        yield
    except OSError as problem:
        raise WriteError(f"{path} cannot be written: {problem.strerror or problem}") from problem


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of killed writers; the caller holds the folder's lock."""
    for path in folder.glob(f".*{_TEMPORARY_ENDING}"):
        path.unlink(missing_ok=True)


# --- one writer at a time


@contextmanager
def hold_lock(folder: Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Be the only writer of a folder, or raise a sentence that names the process that is.

    The operating system releases the lock when its holder ends, however that happens.
    """
    lock = FileLock(folder / LOCK_NAME, timeout=wait_seconds)
    holder = folder / f"{LOCK_NAME}-holder"
    try:
        lock.acquire()
    except Timeout as error:
        user = _read_holder(holder)
        raise RunFolderError(f"{folder} is in use by {user}: wait for it, or stop it") from error
    except OSError as error:
        reason = error.strerror or error
        raise WriteError(f"{folder} cannot be locked for writing: {reason}") from error
    try:
        with explain_write_errors(holder):
            remove_leftovers(folder)
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            process = f"process {os.getpid()} on {socket.gethostname()} since {started}"
            write_atomically(holder, process.encode())
        yield
    finally:
        try:
            holder.unlink(missing_ok=True)
        finally:
            lock.release()


def is_locked(folder: Path) -> bool:
    """Return whether a process is the only writer of a folder at this moment."""
    path = folder / LOCK_NAME
    if not path.exists():
        return False
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return True
    except OSError:  # of somebody else's folder nothing is known
        return False
    lock.release()
    return False


def _read_holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:200]
    except OSError:
        return "another process"


# --- JSON and TOML


def parse_json(text: str | bytes, where: str, error: type[FedProtoError] = RunFolderError) -> Any:
    """Parse JSON that may come from anybody; `where` names it in the one-sentence error."""
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        _refuse_deep_nesting(decoded)
        return json.loads(decoded)
    except (ValueError, RecursionError) as problem:
        reason = _first_line(problem)
        raise error(f"{where} is not valid JSON (or is corrupted): {reason}") from problem


def read_json(path: Path, error: type[FedProtoError] = RunFolderError) -> Any:
    """Read a JSON file that may come from anybody."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from problem
    return parse_json(content, str(path), error)


def parse_toml(
    text: str | bytes,
    where: str,
    error: type[FedProtoError] = RunFolderError,
) -> dict[str, Any]:
    """Parse TOML that may come from anybody; `where` names it in the one-sentence error."""
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        _refuse_deep_nesting(decoded)
        return tomllib.loads(decoded)
    except (ValueError, RecursionError) as problem:
        raise error(f"{where} is not valid TOML: {_first_line(problem)}") from problem


def _refuse_deep_nesting(text: str) -> None:
    """Raise ValueError before a parser recurses too far.

    Comments of TOML may hold unpaired brackets or quotes; `MAX_NESTING` leaves room for them.
    """
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        first = token.group()[0]
        if first in "[{":
            depth += 1
        elif first in "]}":
            depth -= 1
        if depth > MAX_NESTING:
            raise ValueError(f"more than {MAX_NESTING} nested brackets")


def _first_line(problem: Exception) -> str:
    lines = str(problem).splitlines()
    return lines[0][:200] if lines else type(problem).__name__


# --- JSON objects with a version and a checksum


def seal(content: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Return an object for JSON whose last keys are its version and a short checksum of itself."""
    sealed = {key: value for key, value in content.items() if key not in ("version", "checksum")}
    sealed["version"] = version
    return {**sealed, "checksum": _short_checksum(sealed)}


def unseal(
    sealed: Any,
    version: int,
    where: str,
    error: type[FedProtoError] = RunFolderError,
) -> dict[str, Any]:
    """Return what `seal` was given, or raise a sentence that names the place it was read from."""
    if not isinstance(sealed, dict):
        kind = type(sealed).__name__
        raise error(f"{where} is corrupted: it must hold a JSON object, not {kind}")
    check_version(sealed, version, where, error)
    content = {key: value for key, value in sealed.items() if key != "checksum"}
    if sealed.get("checksum") != _short_checksum(content):
        raise error(f"{where} is corrupted: its contents do not match its checksum")
    del content["version"]
    return content


def check_version(
    stored: Mapping[str, Any], version: int, where: str, error: type[FedProtoError] = RunFolderError
) -> None:
    """Refuse an object of another version, or of none."""
    found = stored.get("version")
    if isinstance(found, bool) or found != version:
        said = f"has version {str(found)[:20]!r}" if "version" in stored else "states no version"
        raise error(f"{where} {said}; this fedproto reads version {version}")


def _short_checksum(content: Mapping[str, Any]) -> str:
    """Return the first 16 hexadecimal digits of the object's SHA-256."""
    as_read = json.loads(json.dumps(content))  # keys that are numbers become text, and sort as text
    text = json.dumps(as_read, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- tensors


@dataclass(frozen=True)
class TensorFormat:
    """A kind of file that holds tensors: its name and version, and what a bad file raises."""

    name: str
    version: int
    error: type[FedProtoError] = RunFolderError


def pack_tensors(tensors: Tree, format: TensorFormat, header: Mapping[str, Any]) -> bytes:
    """Return the bytes of a safetensors file with its format, version, header and checksum."""
    from safetensors.torch import save

    separate = _without_shared_memory(tensors)
    described = {"format": format.name, "version": format.version, **header}
    described["sha256"] = _checksum(separate, described)
    return save(separate, {METADATA_KEY: json.dumps(described, sort_keys=True)})


def write_tensors(
    path: Path,
    tensors: Tree,
    format: TensorFormat,
    header: Mapping[str, Any],
    *,
    private: bool = False,
) -> None:
    """Write such a file atomically."""
    write_atomically(path, pack_tensors(tensors, format, header), private=private)


def read_tensors(path: Path, format: TensorFormat) -> tuple[Tree, dict[str, Any]]:
    """Tensors and header of a file that `write_tensors` wrote, its checksum verified.

    Another format or version, a missing or cut file and a flipped bit are each refused by name,
    with the format's error.
    """
    error = format.error
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except FileNotFoundError as problem:
        raise error(f"{path} does not exist") from problem
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as problem:
        reason = _first_line(problem)
        sentence = f"{path} is not a valid safetensors file (or is corrupted): {reason}"
        raise error(sentence) from problem
    if METADATA_KEY not in metadata:
        raise error(
            f"{path} is not a file of {format.name}: it lacks the metadata entry '{METADATA_KEY}'"
        )
    header = parse_json(metadata[METADATA_KEY], f"the header of {path}", error)
    if not isinstance(header, dict) or header.get("format") != format.name:
        found = header.get("format") if isinstance(header, dict) else header
        raise error(f"{path} is not a file of {format.name} but of {str(found)[:60]!r}")
    if header.get("version") != format.version:
        raise error(
            f"{path} has version {str(header.get('version'))[:20]!r} of the format {format.name}; "
            f"this fedproto reads version {format.version}"
        )
    stated = header.pop("sha256", None)
    if stated != _checksum(tensors, header):
        raise error(f"{path} is corrupted: its contents do not match its checksum")
    return tensors, header


def hash_tensors(tensors: Tree) -> str:
    """Return the SHA-256 of named tensors: of their names, types, shapes and values."""
    return _checksum(tensors, {})


def _checksum(tensors: Tree, header: Mapping[str, Any]) -> str:
    import torch

    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"\0{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _without_shared_memory(tensors: Tree) -> Tree:
    """The same values on the CPU, each in memory of its own, as safetensors demands.

    Clients that have not trained yet share one tensor: all start equal.
    """
    separate: Tree = {}
    taken: set[int] = set()
    for name, value in tensors.items():
        value = value.detach().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        separate[name] = value.clone() if address in taken else value
        taken.add(address)
    return separate
