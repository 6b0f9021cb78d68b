"""Finished cells in one file that can be moved to another machine, which goes on from there.

The archive holds what tables and figures are made of, not models: config.toml, metrics.jsonl,
result.json and the probes of the models. Partitions, which the methods of a table share, are
stored once each, by their hash.
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

CELL_FILES = ("config.toml", "metrics.jsonl", "result.json")
PROBE_FILES = ("embeddings.npz", "travel.json", "before.json")
PARTITIONS = "partitions"

Files = dict[PurePosixPath, bytes]


# --- packing


def pack(archive: Path, runs: Path) -> None:
    """Replace the archive, atomically, by one of all finished cells under `runs` (target/cell)."""
    buffer = io.BytesIO()
    packed_partitions = set()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for result in sorted(runs.glob("*/*/result.json")):
            cell = result.parent
            if _awaits_probes(cell):
                continue
            for name in (*CELL_FILES, *PROBE_FILES):
                if (cell / name).exists():
                    tar.add(cell / name, f"{cell.parent.name}/{cell.name}/{name}")
            partition = _read_partition_hash(result.read_bytes(), str(result))
            if partition not in packed_partitions:
                tar.add(cell / "partition.json", str(_partition_path(partition)))
                packed_partitions.add(partition)
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(archive, buffer.getvalue())
    except OSError as error:
        raise RunFolderError(f"{archive} cannot be written: {error}") from error


def _awaits_probes(cell: Path) -> bool:
    """Return whether a finished cell still has models, of which no probe has been made yet.

    Its checkpoint does not travel, so elsewhere the probes could never be made.
    """
    has_probe = any((cell / name).exists() for name in PROBE_FILES)
    return not has_probe and RunFolder(cell).checkpoint_round() > 0


# --- unpacking


def unpack(archive: Path, runs: Path) -> int:
    """Put the archive's cells where none are finished yet; return how many were new.

    Raises RunFolderError if the archive is damaged or lacks a part of a cell.
    """
    files = _read_files(archive)
    new = 0
    for path in files:
        if path.name != "result.json" or not _is_inside_target(path):
            continue
        cell = path.parent
        if not _is_free(runs / cell, files.get(cell / "config.toml", b"")):
            continue
        try:
            _place(runs / cell, cell, files)
        except (KeyError, TypeError, ValueError, RunFolderError) as error:
            raise RunFolderError(f"{archive} does not hold all of {cell}: {error}") from error
        except OSError as error:
            raise RunFolderError(f"{runs / cell} cannot be written: {error}") from error
        new += 1
    return new


def _is_inside_target(path: PurePosixPath) -> bool:
    """Return whether a path is target/cell/file and leads nowhere else."""
    return len(path.parts) == 3 and ".." not in path.parts and not path.is_absolute()


def _read_files(archive: Path) -> Files:
    """Return the content of all regular files in the archive."""
    files = {}
    try:
        # Decompressed as a whole before anything is used: the checksum comes last.
        content = io.BytesIO(gzip.decompress(archive.read_bytes()))
        with tarfile.open(fileobj=content, mode="r:") as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                if file is not None:
                    files[PurePosixPath(member.name)] = file.read()
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise RunFolderError(f"{archive} is not an archive of finished cells: {error}") from error
    return files


def _is_free(folder: Path, config: bytes) -> bool:
    """Return whether a cell may be put there: there is nothing, or the same run, unfinished.

    An unfinished run with other settings is somebody's work and stays.
    """
    if (folder / "result.json").exists():
        return False
    if not folder.exists():
        return True
    try:
        existing = (folder / "config.toml").read_bytes()
        return _identifying_settings(existing) == _identifying_settings(config)
    except (OSError, RunFolderError):
        return False


def _identifying_settings(config: bytes) -> dict[str, Any]:
    """Return the settings that make a run what it is, without how and where it is computed.

    The model is left out, too: it may name a file of weights, whose place differs by machine.
    """
    settings = parse_toml(config, "config.toml")
    left_out = (*COMPUTE_SETTINGS, "model")
    return {key: value for key, value in settings.items() if key not in left_out}


def _place(folder: Path, cell: PurePosixPath, files: Files) -> None:
    """Write one cell, whole or not at all; an unfinished run that is there is replaced."""
    partition = _read_partition_hash(files[cell / "result.json"], f"result.json of {cell}")
    content = {name: files[cell / name] for name in CELL_FILES}
    content["partition.json"] = files[_partition_path(partition)]
    for name in PROBE_FILES:
        if cell / name in files:
            content[name] = files[cell / name]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as temporary:
        for name, text in content.items():
            write_atomically(temporary / name, text)
        if folder.exists():
            with hold_lock(folder):  # not while a process trains it
                shutil.rmtree(folder)


def _read_partition_hash(content: bytes, where: str) -> str:
    """Return the hash of the partition that a result.json names."""
    result = parse_json(content, where)
    partition = result.get("partition") if isinstance(result, dict) else None
    if not isinstance(partition, str):
        raise RunFolderError(f"{where} is damaged: it does not name its partition")
    return partition


def _partition_path(partition: str) -> PurePosixPath:
    return PurePosixPath(PARTITIONS) / f"{partition}.json"
