"""Finished cells as one file that can travel: another machine unpacks it and goes on from there.

It holds what tables and figures are made of, not models: config.toml, metrics.jsonl, result.json and what was made of
the models afterwards. Partitions, which the methods of a table share, are stored once, by their hash.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path, PurePosixPath

from fedproto.errors import RunFolderError
from fedproto.runfolder import write_atomically

KEPT = ("config.toml", "metrics.jsonl", "result.json", "embeddings.npz", "travel.json")
PARTITIONS = "partitions"


def pack(archive: Path, runs: Path) -> None:
    """Write all finished cells under `runs` (target/cell) into the archive, whole or not at all."""
    buffer, known = io.BytesIO(), set()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for result in sorted(runs.glob("*/*/result.json")):
            cell = result.parent
            for name in KEPT:
                if (cell / name).exists():
                    tar.add(cell / name, f"{cell.parent.name}/{cell.name}/{name}")
            stamp = json.loads(result.read_text())["partition"]
            if stamp not in known:
                tar.add(cell / "partition.json", f"{PARTITIONS}/{stamp}.json")
                known.add(stamp)
    write_atomically(archive, buffer.getvalue())


def unpack(archive: Path, runs: Path) -> int:
    """Put the archive's cells where there are none yet; how many were new."""
    try:
        with tarfile.open(archive) as tar:
            files = {PurePosixPath(member.name): tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]
    except (OSError, tarfile.TarError, EOFError) as error:
        raise RunFolderError(f"{archive} is no archive of finished cells: {error}") from error
    new = 0
    for path in files:
        if path.name != "result.json" or len(path.parts) != 3 or ".." in path.parts:
            continue
        target = runs / path.parent
        if not (target / "result.json").exists() and not (target / "config.toml").exists():
            _place(target, path.parent, files)
            new += 1
    return new


def _place(target: Path, cell: PurePosixPath, files: dict[PurePosixPath, bytes]) -> None:
    """One cell; its result comes last, so that a folder with a result is complete."""
    stamp = json.loads(files[cell / "result.json"])["partition"]
    target.mkdir(parents=True, exist_ok=True)
    write_atomically(target / "partition.json", files[PurePosixPath(PARTITIONS) / f"{stamp}.json"])
    for name in sorted(KEPT, key=lambda name: name == "result.json"):
        if cell / name in files:
            write_atomically(target / name, files[cell / name])
