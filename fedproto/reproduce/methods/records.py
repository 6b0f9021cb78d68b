"""What is kept of a finished federation of the benchmark: a small record, on any machine.

A record holds the numbers of the table, about 2 kB, and a hash of the settings of its run; run
folders are deleted once they have one. An archive is one file of all records, so that calls on
several machines, or at several times, add up.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fedproto.config.options import Part
from fedproto.config.settings import Config
from fedproto.core.files import parse_json, read_json, write_atomically
from fedproto.errors import RunFolderError
from fedproto.reproduce.methods.benchmark import TARGET, BenchmarkRun
from fedproto.reproduce.plan import DATA_PREFIX
from fedproto.runs.folder import DIVERGED, RunFolder
from fedproto.runs.sweep import COMPUTE_SETTINGS

#: Digits that are kept of an accuracy: a hundredth of a percent point.
DIGITS = 4
VERSION = 1

Json = dict[str, Any]


def identify(config: Config) -> str:
    """Return a hash of the settings that make a run what it is, on any machine.

    How it is computed and the folders of files are left out, and so is what has its default: a
    setting that the package gains later changes no hash.
    """
    portable = replace(
        config,
        dataset=_without_folders(config.dataset),
        model=_without_weights(config.model),
        feature_map=_without_weights(config.feature_map),
    )
    lines = []
    for setting in fields(Config):
        value = getattr(portable, setting.name)
        if setting.name in COMPUTE_SETTINGS or value == setting.default:
            continue
        parts = value if isinstance(value, tuple) else (value,)
        lines.append(f"{setting.name} = {', '.join(str(part) for part in parts)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _without_weights(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return plug-ins without the option that names a file of weights."""
    kept = []
    for part in parts:
        options = {name: value for name, value in part.options.items() if name != "weights"}
        kept.append(replace(part, options=options))
    return tuple(kept)


def _without_folders(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return data sets in which `npz:FOLDER/FILE` and `npz:data:FILE` are `npz:FILE`."""
    kept = []
    for part in parts:
        kind, colon, path = part.name.partition(":")
        file_name = Path(path).name.removeprefix(DATA_PREFIX)
        kept.append(replace(part, name=f"{kind}{colon}{file_name}"))
    return tuple(kept)


# --- records


class Records:
    """The records of a folder, beside that of the runs; `stem` begins the names of both."""

    def __init__(self, runs: Path, stem: str = TARGET) -> None:
        self.folder = runs / f"{stem}-records"
        self.runs = runs / stem

    def find(self, run: BenchmarkRun) -> Json | None:
        """Return the record of a federation with these settings, if there is one."""
        path = self.folder / f"{run.cell.name}.json"
        if not path.exists():
            return None
        record = read_json(path)
        if not isinstance(record, dict) or "settings" not in record:
            raise RunFolderError(f"{path} is damaged: delete it")
        return record if record["settings"] == identify(run.cell.config) else None

    def keep(self, run: BenchmarkRun) -> None:
        """Make the record of a federation that has ended, and delete its run folder."""
        folder = RunFolder(self.runs / run.cell.name)
        record: Json = {"settings": identify(run.cell.config)}
        result = folder.result() if folder.path.exists() else None
        if result is not None:
            record["run"] = describe_run(result, run)
        elif (folder.path / DIVERGED).exists():
            record["diverged"] = str(folder.read_json(DIVERGED).get("error"))
        else:
            return
        self._write(f"{run.cell.name}.json", record)
        shutil.rmtree(folder.path)

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / name, json.dumps(record).encode())

    # --- archives

    def pack(self, archive: Path) -> None:
        """Replace an archive, atomically, by one of all records of the folder."""
        cells = {path.stem: read_json(path) for path in sorted(self.folder.glob("*.json"))}
        text = json.dumps({"version": VERSION, "records": cells})
        try:
            archive.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(archive, gzip.compress(text.encode(), mtime=0))
        except OSError as error:
            raise RunFolderError(f"{archive} cannot be written: {error}") from error

    def unpack(self, archive: Path) -> int:
        """Add the records of an archive that the folder lacks; return how many they were."""
        try:
            content = parse_json(gzip.decompress(archive.read_bytes()), str(archive))
        except (OSError, EOFError, zlib.error) as error:
            raise RunFolderError(f"{archive} is not an archive of records: {error}") from error
        records = content.get("records") if isinstance(content, dict) else None
        if not isinstance(records, dict):
            raise RunFolderError(f"{archive} is not an archive of records")
        new = 0
        for name, record in records.items():
            if Path(name).name != name or not isinstance(record, dict):
                raise RunFolderError(f"{archive} is damaged: {name!r} is not a record")
            if not (self.folder / f"{name}.json").exists():
                self._write(f"{name}.json", record)
                new += 1
        return new


# --- what a record holds of a run


def describe_run(result: Json, run: BenchmarkRun) -> Json:
    """Return the numbers of the table from a federation's result.json."""
    score = run.method.score
    last = result["last_round"]
    return {
        "seed": run.seed,
        "rounds": result["rounds"],
        "best_round": result["best_round"],
        "partition": result["partition"][:12],
        "machine": ", ".join(result["machine"].values()),
        "seconds": round(result["seconds"]["total"], 2),
        "bytes_up": result["communication"]["bytes_up"],
        "bytes_down": result["communication"]["bytes_down"],
        "validation": round(result["validation"]["score"], DIGITS),
        "accuracy": _list_accuracies(result["clients"], score),
        "macro_f1": _mean_macro_f1(result["clients"], score),
        "last": {
            "accuracy": _list_accuracies(last["clients"], score),
            "macro_f1": _mean_macro_f1(last["clients"], score),
        },
        "ways": {way: round(found["mean"], DIGITS) for way, found in result["accuracy"].items()},
    }


def _list_accuracies(clients: Sequence[Json], score: str) -> dict[str, list[float]]:
    """Return each client's accuracy over all classes and over its own, by the method's score."""
    found = {}
    for way in (score, f"{score}_own"):
        found[way] = [round(client["accuracy"][way], DIGITS) for client in clients]
    return found


def _mean_macro_f1(clients: Sequence[Json], score: str) -> float:
    """Return the mean macro-F1 over clients, choosing among each client's own classes."""
    values = [client["metrics"][f"{score}_own"]["macro_f1"] for client in clients]
    return round(statistics.fmean(value for value in values if value is not None), DIGITS)
