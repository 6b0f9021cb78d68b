"""Finished cells as one file that can travel: another machine unpacks it and goes on from there.

It holds what tables and figures are made of, not models: config.toml, metrics.jsonl, result.json and what was made of
the models afterwards. Partitions, which the methods of a table share, are stored once, by their hash.
"""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from fedproto.core.files import hold_lock, parse_json, parse_toml, write_atomically
from fedproto.errors import RunFolderError
from fedproto.runs.folder import RunFolder, whole_folder
from fedproto.runs.sweep import COMPUTE_SETTINGS

NEEDED = ("config.toml", "metrics.jsonl", "result.json")
LOOKS = ("embeddings.npz", "travel.json", "before.json")
PARTITIONS = "partitions"


def pack(archive: Path, runs: Path) -> None:
    """Write all finished cells under `runs` (target/cell) into the archive, whole or not at all."""
    buffer, known = io.BytesIO(), set()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for result in sorted(runs.glob("*/*/result.json")):
            cell = result.parent
            if (
                not any((cell / name).exists() for name in LOOKS)
                and RunFolder(cell).checkpoint_round()
            ):
                continue  # its models, which do not travel, are to be looked at or to go before it is done
            for name in (*NEEDED, *LOOKS):
                if (cell / name).exists():
                    tar.add(cell / name, f"{cell.parent.name}/{cell.name}/{name}")
            stamp = _stamp(result.read_bytes(), str(result))
            if stamp not in known:
                tar.add(cell / "partition.json", str(_partition(stamp)))
                known.add(stamp)
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(archive, buffer.getvalue())
    except OSError as error:
        raise RunFolderError(f"{archive} cannot be written: {error}") from error


def unpack(archive: Path, runs: Path) -> int:
    """Put the archive's cells where none are finished yet; how many were new."""
    files, new = _files(archive), 0
    for path in files:
        if (
            path.name != "result.json"
            or len(path.parts) != 3
            or ".." in path.parts
            or path.is_absolute()
        ):
            continue
        if _is_free(runs / path.parent, files.get(path.parent / "config.toml", b"")):
            try:
                _place(runs / path.parent, path.parent, files)
            except (KeyError, TypeError, ValueError, RunFolderError) as error:
                raise RunFolderError(
                    f"{archive} does not hold all of {path.parent}: {error}"
                ) from error
            except OSError as error:
                raise RunFolderError(f"{runs / path.parent} cannot be written: {error}") from error
            new += 1
    return new


def _is_free(place: Path, config: bytes) -> bool:
    """Where there is nothing, or the same run, and unfinished; one of other settings is somebody's work."""
    if (place / "result.json").exists():
        return False
    if not place.exists():
        return True
    try:
        return _meant((place / "config.toml").read_bytes()) == _meant(config)
    except (OSError, RunFolderError):
        return False


def _meant(config: bytes) -> dict[str, Any]:
    """What a run is, whatever computed it; models name weights by where they lie, which differs between machines."""
    return {
        key: value
        for key, value in parse_toml(config, "config.toml").items()
        if key not in (*COMPUTE_SETTINGS, "model")
    }


def _files(archive: Path) -> dict[PurePosixPath, bytes]:
    try:
        content = io.BytesIO(
            gzip.decompress(archive.read_bytes())
        )  # all of it: its checksum comes last
        with tarfile.open(fileobj=content, mode="r:") as tar:
            return {
                PurePosixPath(member.name): tar.extractfile(member).read()
                for member in tar
                if member.isfile()
            }  # type: ignore[union-attr]
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise RunFolderError(f"{archive} is no archive of finished cells: {error}") from error


def _place(target: Path, cell: PurePosixPath, files: dict[PurePosixPath, bytes]) -> None:
    """One cell, whole or not at all."""
    stamp = _stamp(files[cell / "result.json"], f"result.json of {cell}")
    found = {name: files[cell / name] for name in NEEDED} | {
        "partition.json": files[_partition(stamp)]
    }
    found |= {name: files[cell / name] for name in LOOKS if cell / name in files}
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(target) as temporary:
        for name, content in found.items():
            write_atomically(temporary / name, content)
        if target.exists():
            with hold_lock(target):  # whoever trains it now is not robbed of it
                shutil.rmtree(target)  # what was begun here


def _stamp(content: bytes, where: str) -> str:
    """The hash of the partition that a result.json names."""
    result = parse_json(content, where)
    stamp = result.get("partition") if isinstance(result, dict) else None
    if not isinstance(stamp, str):
        raise RunFolderError(f"{where} is damaged: it does not name its partition")
    return stamp


def _partition(stamp: str) -> PurePosixPath:
    return PurePosixPath(PARTITIONS) / f"{stamp}.json"
