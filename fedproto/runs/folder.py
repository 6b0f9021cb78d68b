"""The run folder: complete or not there, every file written whole or not at all, one writer at a time.

config.toml             everything needed to run again
partition.json          who has which rows, stamped with a SHA-256
start.json              what the run began with: its settings, the shape of its inputs, its first weights
metrics.jsonl           a line per round, each with a checksum
result.json             when the run has finished
prototypes.safetensors  the global prototypes, where the algorithm has any, and the clients' own it remembers
checkpoint/             the newest state of server and clients
models/                 the clients' trained models, when the run has finished: see client_models.py
diverged.json           where a client's numbers ceased to be finite, which ended the run
encoding.json           how rows of tables, or texts, became numbers, where there were such
.lock                   held by the process that writes here

Every file carries the version of its format.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedproto.core.files import (
    LOCK_NAME,
    hold_lock,
    parse_json,
    read_json,
    read_tensors,
    remove_leftovers,
    seal,
    unseal,
    write_atomically,
    write_tensors,
)
from fedproto.core.types import Tree
from fedproto.data.shared.feature_encoding import ENCODING, Encoding, from_json, to_json
from fedproto.errors import DataError, RunFolderError
from fedproto.runs.result_file import checked_line, checked_result

METRICS = "metrics.jsonl"
RESULT = "result.json"
START_RECORD = "start.json"
CHECKPOINTS = "checkpoint"
CLIENT_MODELS = "models"
VERSION = 1  # of the JSON files, and of each line of metrics.jsonl
CHECKPOINT_FORMAT = "checkpoint"
CHECKPOINT_VERSION = 1
DIVERGED = "diverged.json"


class RunFolder:
    """A run's folder. Hold it (`with folder.hold():`) while writing: a second writer is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_held = False

    @staticmethod
    def refuse_used(path: Path) -> None:
        """A run never writes into a folder that holds something."""
        try:
            used = (path / "config.toml").exists()
        except OSError as error:  # a name longer than the file system takes
            raise RunFolderError(f"{str(path)[:60]}... cannot be made: {error.strerror}") from error
        if used:
            raise RunFolderError(
                f"{path} already holds a run: name another folder with --out, or `fedproto resume {path}`"
            )
        if is_taken(path):
            raise RunFolderError(f"{path} is not empty: name another folder with --out")

    @classmethod
    @contextmanager
    def fill(cls, path: Path, config: str, partition: dict[str, Any]) -> Iterator[RunFolder]:
        """Fill a folder that appears at `path` with everything in it, or not at all."""
        cls.refuse_used(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_folder(path) as temporary:
                write_atomically(temporary / "config.toml", config.encode())
                write_atomically(temporary / "partition.json", json.dumps(partition).encode())
                (temporary / METRICS).touch()
                (temporary / CHECKPOINTS).mkdir()
                yield cls(temporary)
        except OSError as error:
            raise RunFolderError(
                f"{path} cannot be made: {error}; name another folder with --out"
            ) from error

    @classmethod
    def inside(cls, path: Path) -> list[RunFolder]:
        """The runs that were compared in a folder, in the order they were made; none where it is a run itself."""
        configs = [] if (path / "config.toml").exists() else configs_below(path)
        folders = [config.parent for config in configs]
        if len({(cls.open(folder).path / "partition.json").read_bytes() for folder in folders}) > 1:
            raise RunFolderError(f"{path} holds runs of different federations: name one of them")
        return [cls(folder) for folder in folders]

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not all((path / name).exists() for name in ("config.toml", "partition.json")):
            raise RunFolderError(
                f"{path} is not a run folder: it must hold config.toml and partition.json"
            )
        return cls(path)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be the only writer of this folder, and remove what a killed one left half-written.

        Whoever holds it already may enter again through the same object.
        """
        if self._is_held:
            yield
            return
        with hold_lock(self.path):
            remove_leftovers(self.path / CHECKPOINTS)
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False

    # --- metrics and results

    def result(self) -> dict[str, Any] | None:
        """The contents of result.json, or None where the run has not finished."""
        path = self.path / RESULT
        return checked_result(self.read_json(RESULT), str(path)) if path.exists() else None

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, their checksums verified; a last line without its end was cut off."""
        path = self.path / METRICS
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read: {error.strerror or error}") from error
        *whole, _ = content.split(b"\n")
        return [_read_line(line, f"{path}, line {number},") for number, line in enumerate(whole, 1)]

    def add_metrics(self, line: dict[str, Any]) -> None:
        with (self.path / METRICS).open("a") as file:
            file.write(_line_of(line))

    def keep_metrics(self, rounds: int) -> list[dict[str, Any]]:
        """Forget lines of rounds after the one the run continues from, and one that was cut off."""
        kept = [line for line in self.metrics() if line["round"] <= rounds]
        text = "".join(map(_line_of, kept))
        write_atomically(self.path / METRICS, text.encode())
        return kept

    # --- JSON

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of JSON with a version and a checksum."""
        text = json.dumps(seal(content, VERSION), indent=1) + "\n"
        write_atomically(self.path / name, text.encode())

    def read_json(self, name: str) -> dict[str, Any]:
        """Read what `write_json` wrote."""
        path = self.path / name
        return unseal(read_json(path), VERSION, str(path))

    def write_encodings(self, of_clients: Sequence[Encoding | None]) -> None:
        """How each client's rows or texts became numbers; clients of one data set share theirs."""
        different = list({id(each): each for each in of_clients if each is not None}.values())
        if different:
            place = {id(each): number for number, each in enumerate(different)}
            stored = {
                "encodings": list(map(to_json, different)),
                "clients": [place.get(id(each)) for each in of_clients],
            }
            self.write_json(ENCODING, stored)

    def encodings(self) -> dict[int, Encoding]:
        """By client."""
        path = self.path / ENCODING
        if not path.exists():
            return {}
        stored = self.read_json(ENCODING)
        try:
            different = [from_json(each, str(path)) for each in stored["encodings"]]
            return {
                client: different[place]
                for client, place in enumerate(stored["clients"])
                if place is not None
            }
        except (KeyError, TypeError, IndexError, DataError) as error:
            raise RunFolderError(f"{path} is damaged: {error}") from error

    # --- what the run began with

    def write_start(self, weights: str, inputs: Sequence[Sequence[int]]) -> None:
        """Write down what the run begins with: a hash of the clients' weights, and the shape of their inputs."""
        started = {
            "run": self._stamp(),
            "weights": weights,
            "inputs": [list(shape) for shape in inputs],
        }
        self.write_json(START_RECORD, started)

    def read_start(self) -> dict[str, Any]:
        """What `write_start` wrote down, for settings and a partition that have not changed since."""
        started = self.read_json(START_RECORD)
        if started.get("run") != self._stamp():
            raise RunFolderError(
                f"config.toml or partition.json in {self.path} was changed after the run began: put it back"
            )
        if not isinstance(started.get("weights"), str) or not isinstance(
            started.get("inputs"), list
        ):
            raise RunFolderError(f"{self.path / START_RECORD} must hold `weights` and `inputs`")
        return started

    # --- checkpoints

    def save_checkpoint(self, round: int, tree: Tree) -> None:
        """One file per checkpoint; the older one goes when the newer is complete."""
        name = _checkpoint_name(round)
        with (self.path / METRICS).open("a") as file:
            os.fsync(file.fileno())  # a checkpoint must not outlive the lines of its rounds
        header = {"round": round, "run": self._stamp()}
        write_tensors(
            self.path / CHECKPOINTS / name, tree, CHECKPOINT_FORMAT, CHECKPOINT_VERSION, header
        )
        for path in (self.path / CHECKPOINTS).iterdir():
            if path.name != name:
                path.unlink()

    def drop_checkpoints(self) -> None:
        """Delete the checkpoints and the clients' trained models."""
        for path in self._checkpoints():
            path.unlink()
        shutil.rmtree(self.path / CLIENT_MODELS, ignore_errors=True)

    def has_checkpoint(self) -> bool:
        return bool(self._checkpoints())

    def checkpoint_round(self) -> int:
        """The round of the newest checkpoint, 0 where there is none."""
        files = self._checkpoints()
        number = files[-1].stem.removeprefix("round-") if files else "0"
        if not number.isdecimal():
            raise RunFolderError(
                f"{files[-1]} is not named as a checkpoint, such as {_checkpoint_name(1)}"
            )
        return int(number)

    def load_checkpoint(self) -> tuple[int, Tree] | None:
        """The newest checkpoint, or None where the run was stopped before its first."""
        files = self._checkpoints()
        if not files:
            return None
        try:
            tree, header = read_tensors(files[-1], CHECKPOINT_FORMAT, CHECKPOINT_VERSION)
        except RunFolderError as error:
            if not files[-1].exists():  # its writer has put a newer one in its place meanwhile
                return self.load_checkpoint()
            raise RunFolderError(
                f"{error}: delete it and `fedproto resume` starts from round 1"
            ) from error
        if header.get("run") != self._stamp():
            raise RunFolderError(
                f"checkpoint {files[-1]} is of another run, or config.toml or partition.json was changed after it was "
                "written: put them back, or delete it and `fedproto resume` starts from round 1"
            )
        return int(header["round"]), tree

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / CHECKPOINTS).glob("round-*.safetensors"))

    def _stamp(self) -> str:
        """Tells runs apart: a state is continued only under the settings it was reached with."""
        files = (self.path / name for name in ("config.toml", "partition.json"))
        return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def configs_below(path: Path) -> list[Path]:
    """The config.toml of each run folder in a folder, oldest first.

    Hidden folders are left out: a process that was killed while it made a run folder leaves one.
    """
    found = [
        config for config in path.glob("*/config.toml") if not config.parent.name.startswith(".")
    ]
    return sorted(found, key=lambda config: config.stat().st_mtime_ns)


def is_taken(path: Path) -> bool:
    """Whether something is there that a new folder would overwrite; an empty folder is nothing, nor is a lock."""
    if not path.is_dir():
        return path.exists()
    return any(not entry.name.startswith(LOCK_NAME) for entry in path.iterdir())


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that becomes `path` if all goes well, and else goes away."""
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        temporary.chmod(0o755)
        yield temporary
        _remove_lock(path)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove_lock(path: Path) -> None:
    """Remove a lock that was left in an otherwise empty folder, which can then be replaced."""
    if path.is_dir() and not is_taken(path):
        for entry in path.iterdir():
            entry.unlink()


def _checkpoint_name(round: int) -> str:
    return f"round-{round:08d}.safetensors"


def _line_of(line: dict[str, Any]) -> str:
    return json.dumps(seal(line, VERSION)) + "\n"


def _read_line(text: bytes, where: str) -> dict[str, Any]:
    line = unseal(parse_json(text, where), VERSION, where)
    return checked_line(line, where)
