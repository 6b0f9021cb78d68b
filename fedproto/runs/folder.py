"""The run folder: it appears complete, files are replaced atomically, and it has one writer.

config.toml             everything needed to run again
partition.json          the rows of each client, with a SHA-256
start.json              what the run began with: hashes of settings and weights, shapes of inputs
metrics.jsonl           one line per round, each with a checksum
result.json             the result, once the run has finished
prototypes.safetensors  the global prototypes, if the algorithm has any, and the clients' latest
checkpoint/             the newest state of server and clients
best/                   while a run with validation goes on: the state after its best round
models/                 the clients' trained models, once the run has finished (client_models.py)
diverged.json           if a client's numbers ceased to be finite, which ended the run: where
encoding.json           how the rows of tables, or texts, became numbers, if there were any
.lock                   held by the process that writes here

Every file carries the version of its format.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedproto.core.files import (
    LOCK_NAME,
    TensorFormat,
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
from fedproto.runs.result_file import check_line, check_result

CONFIG = "config.toml"
PARTITION = "partition.json"
METRICS = "metrics.jsonl"
JOIN = "join.json"  # of a newcomer: its accuracies beside training alone
RESULT = "result.json"
START_RECORD = "start.json"
CHECKPOINTS = "checkpoint"
BEST = "best"
CLIENT_MODELS = "models"
DIVERGED = "diverged.json"
LAST = "last-round.json"
LOG = "run.log"  # for people: what happened when
VERSION = 1  # of the JSON files, and of each line of metrics.jsonl
CHECKPOINT_FORMAT = TensorFormat("checkpoint", 2)
MAX_NAMED_RUNS = 10  # in one sentence


class RunFolder:
    """A run's folder. Hold it (`with folder.hold():`) while writing: a second writer is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_held = False

    @staticmethod
    def refuse_used(path: Path) -> None:
        """Refuse a folder that holds something: a run never writes into one."""
        try:
            holds_run = (path / CONFIG).exists()
        except OSError as error:  # a name longer than the file system accepts
            raise RunFolderError(f"{str(path)[:60]}... cannot be made: {error.strerror}") from error
        if holds_run:
            raise RunFolderError(
                f"{path} already holds a run: name another folder with --out, or "
                f"`fedproto resume {path}`"
            )
        if is_taken(path):
            raise RunFolderError(f"{path} is not empty: name another folder with --out")

    @classmethod
    @contextmanager
    def fill(cls, path: Path, config: str, partition: dict[str, Any]) -> Iterator[RunFolder]:
        """Fill a new folder, which appears at `path` with everything in it, or not at all."""
        cls.refuse_used(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_folder(path) as temporary:
                write_atomically(temporary / CONFIG, config.encode())
                write_atomically(temporary / PARTITION, json.dumps(partition).encode())
                (temporary / METRICS).touch()
                (temporary / CHECKPOINTS).mkdir()
                yield cls(temporary)
        except OSError as error:
            raise RunFolderError(
                f"{path} cannot be made: {error}; name another folder with --out"
            ) from error

    @classmethod
    def inside(cls, path: Path) -> list[RunFolder]:
        """Return the runs that were compared in a folder, oldest first; none if it is a run."""
        if (path / CONFIG).exists():
            return []
        folders = [cls.open(config.parent) for config in configs_below(path)]
        partitions = {(folder.path / PARTITION).read_bytes() for folder in folders}
        if len(partitions) > 1:
            raise RunFolderError(f"{path} holds runs of different federations: name one of them")
        return folders

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return the run folder at `path`, or refuse one that lacks what every run has."""
        for name in (CONFIG, PARTITION):
            if not (path / name).exists():
                raise RunFolderError(f"{path} is not a run folder: {_say_what_is_missing(path)}")
        return cls(path)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be the only writer of this folder, and remove what a killed writer left half-written.

        The holder may enter again through the same object.
        """
        if self._is_held:
            yield
            return
        with hold_lock(self.path):
            remove_leftovers(self.path / CHECKPOINTS)
            if (self.path / BEST).exists():
                remove_leftovers(self.path / BEST)
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False

    # --- metrics and results

    def result(self) -> dict[str, Any] | None:
        """Return the content of result.json, or None if the run has not finished."""
        path = self.path / RESULT
        if not path.exists():
            return None
        return check_result(self.read_json(RESULT), str(path))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, their checksums verified.

        A last line without its end was cut off, and is left out.
        """
        path = self.path / METRICS
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read: {error.strerror or error}") from error
        complete_lines = content.split(b"\n")[:-1]
        lines = []
        for number, text in enumerate(complete_lines, 1):
            where = f"{path}, line {number},"
            line = unseal(parse_json(text, where), VERSION, where)
            lines.append(check_line(line, where))
        return lines

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        with (self.path / METRICS).open("a") as file:
            file.write(_seal_line(line))

    def log(self, sentence: str) -> None:
        """Append a line with the time, in UTC, to the log."""
        now = datetime.now(UTC)
        with (self.path / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{now:%Y-%m-%d %H:%M:%S} {' '.join(sentence.split())}\n")

    def keep_metrics(self, rounds: int) -> list[dict[str, Any]]:
        """Delete the lines of later rounds, and one that was cut off; return the others."""
        kept = [line for line in self.metrics() if line["round"] <= rounds]
        text = "".join(_seal_line(line) for line in kept)
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
        """Write how each client's rows or texts became numbers, if any client has such.

        Clients of one data set share theirs, which is stored once.
        """
        different: list[Encoding] = []
        places: dict[int, int] = {}  # by the identity of an encoding
        for encoding in of_clients:
            if encoding is not None and id(encoding) not in places:
                places[id(encoding)] = len(different)
                different.append(encoding)
        if not different:
            return
        place_per_client = [places.get(id(encoding)) for encoding in of_clients]
        stored = [to_json(encoding) for encoding in different]
        self.write_json(ENCODING, {"encodings": stored, "clients": place_per_client})

    def encodings(self) -> dict[int, Encoding]:
        """Return the encodings by client; a client of images has none."""
        path = self.path / ENCODING
        if not path.exists():
            return {}
        stored = self.read_json(ENCODING)
        encodings = {}
        try:
            different = [from_json(each, str(path)) for each in stored["encodings"]]
            for client, place in enumerate(stored["clients"]):
                if place is not None:
                    encodings[client] = different[place]
        except (KeyError, TypeError, IndexError, DataError) as error:
            raise RunFolderError(f"{path} is damaged: {error}") from error
        return encodings

    # --- what the run began with

    def write_start(
        self,
        weights: str,
        inputs: Sequence[Sequence[int]],
        arrays: str | None = None,
        frozen: str | None = None,
    ) -> None:
        """Write what the run begins with: a hash of all clients' weights, and input shapes.

        `arrays` is a hash of inputs that were passed from Python, which no file can name, and
        `frozen` one of weights that are not trained, which no checkpoint holds.
        """
        started: dict[str, Any] = {
            "run": self.hash_settings(),
            "weights": weights,
            "inputs": [list(shape) for shape in inputs],
        }
        if arrays is not None:
            started["arrays"] = arrays
        if frozen is not None:
            started["frozen"] = frozen
        self.write_json(START_RECORD, started)

    def read_start(self) -> dict[str, Any]:
        """Read what `write_start` wrote; refuse settings or a partition that changed since."""
        started = self.read_json(START_RECORD)
        if started.get("run") != self.hash_settings():
            raise RunFolderError(
                f"{CONFIG} or {PARTITION} in {self.path} was changed after the run began: put it "
                "back"
            )
        has_weights = isinstance(started.get("weights"), str)
        has_inputs = isinstance(started.get("inputs"), list)
        if not (has_weights and has_inputs):
            raise RunFolderError(f"{self.path / START_RECORD} must hold `weights` and `inputs`")
        return started

    # --- checkpoints

    def save_checkpoint(self, round: int, tree: Tree) -> None:
        """Write a checkpoint, which is one file; the older one is deleted once it is complete."""
        with (self.path / METRICS).open("a") as file:
            os.fsync(file.fileno())  # a checkpoint must not outlive the lines of its rounds
        path = self.path / CHECKPOINTS / _checkpoint_name(round)
        header = {"round": round, "run": self.hash_settings()}
        write_tensors(path, tree, CHECKPOINT_FORMAT, header)
        for other in path.parent.iterdir():
            if other.name != path.name:
                other.unlink()

    def drop_checkpoints(self) -> None:
        """Delete the checkpoints and the clients' trained models."""
        for path in self._checkpoints():
            path.unlink()
        shutil.rmtree(self.path / CLIENT_MODELS, ignore_errors=True)
        shutil.rmtree(self.path / BEST, ignore_errors=True)

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint, readable or not."""
        return bool(self._checkpoints())

    def checkpoint_round(self) -> int:
        """Return the round of the newest checkpoint, by its name; 0 if there is none."""
        files = self._checkpoints()
        if not files:
            return 0
        number = files[-1].stem.removeprefix("round-")
        if not number.isdecimal():
            raise RunFolderError(
                f"{files[-1]} is not named as a checkpoint, such as {_checkpoint_name(1)}"
            )
        return int(number)

    def load_checkpoint(self) -> tuple[int, Tree] | None:
        """Return the round and the state of the newest checkpoint, or None if there is none."""
        files = self._checkpoints()
        if not files:
            return None
        newest = files[-1]
        try:
            tree, header = read_tensors(newest, CHECKPOINT_FORMAT)
        except RunFolderError as error:
            if not newest.exists():  # its writer has replaced it by a newer one meanwhile
                return self.load_checkpoint()
            raise RunFolderError(
                f"{error}: delete it and `fedproto resume` starts from round 1"
            ) from error
        if header.get("run") != self.hash_settings():
            raise RunFolderError(
                f"checkpoint {newest} is of another run, or {CONFIG} or {PARTITION} was changed "
                "after it was written: put them back, or delete it and `fedproto resume` starts "
                "from round 1"
            )
        return int(header["round"]), tree

    # --- the best round

    def save_best(self, round: int, tree: Tree) -> None:
        """Write the state after a round that is the best so far."""
        (self.path / BEST).mkdir(exist_ok=True)
        header = {"round": round, "run": self.hash_settings()}
        write_tensors(self._best_path(round), tree, CHECKPOINT_FORMAT, header)

    def load_best(self, round: int) -> Tree:
        """Return the state after a round that `save_best` wrote."""
        path = self._best_path(round)
        remedy = f"delete {self.path / CHECKPOINTS}, and `fedproto resume` starts from round 1"
        try:
            tree, header = read_tensors(path, CHECKPOINT_FORMAT)
        except RunFolderError as error:
            raise RunFolderError(f"{error}: {remedy}") from error
        if header.get("run") != self.hash_settings() or header.get("round") != round:
            raise RunFolderError(f"{path} is of another run, or of another round: {remedy}")
        return tree

    def drop_best(self, keep: Collection[int] = ()) -> None:
        """Delete the states of all rounds but these, and the folder where none is left."""
        kept_names = {_checkpoint_name(round) for round in keep}
        folder = self.path / BEST
        if not folder.exists():
            return
        for path in list(folder.iterdir()):
            if path.name not in kept_names:
                path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()

    def has_last(self) -> bool:
        """Return whether the last round was measured already, before the run has its result."""
        return (self.path / LAST).exists()

    def drop_last(self) -> None:
        """Delete what was measured of the last round, which the result holds from now on."""
        (self.path / LAST).unlink(missing_ok=True)

    def drop_leftovers(self) -> None:
        """Delete what a finished run no longer needs, if it was killed before it did so itself."""
        if self.has_last() or (self.path / BEST).exists():
            with self.hold():
                self.drop_best()
                self.drop_last()

    def _best_path(self, round: int) -> Path:
        return self.path / BEST / _checkpoint_name(round)

    def _checkpoints(self) -> list[Path]:
        """Return the files of all checkpoints, the newest last."""
        return sorted((self.path / CHECKPOINTS).glob("round-*.safetensors"))

    def hash_settings(self) -> str:
        """Hash settings and partition: a state is continued only under those it came from."""
        config = (self.path / CONFIG).read_bytes()
        partition = (self.path / PARTITION).read_bytes()
        return hashlib.sha256(config + b"\0" + partition).hexdigest()


def configs_below(path: Path) -> list[Path]:
    """Return the config.toml of each run folder in a folder, oldest first.

    Hidden folders are left out: a process killed while it makes a run folder leaves one behind.
    """
    configs = path.glob(f"*/{CONFIG}")
    visible = [config for config in configs if not config.parent.name.startswith(".")]
    return sorted(visible, key=lambda config: config.stat().st_mtime_ns)


def _say_what_is_missing(path: Path) -> str:
    """Say what a folder that is not a run folder lacks, or which run folders are inside it."""
    runs = [str(config.parent) for config in configs_below(path)]
    if not runs:
        return f"it must hold {CONFIG} and {PARTITION}"
    named = ", ".join(runs[:MAX_NAMED_RUNS])
    if len(runs) > MAX_NAMED_RUNS:
        named += f" and {len(runs) - MAX_NAMED_RUNS} others"
    return f"it holds the run folders {named}, so name one of them"


def is_taken(path: Path) -> bool:
    """Return whether a new folder would overwrite something; an empty folder or a lock is not."""
    if not path.is_dir():
        return path.exists()
    return any(not entry.name.startswith(LOCK_NAME) for entry in path.iterdir())


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; it becomes `path`, or is deleted if an error occurs."""
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


def _seal_line(line: dict[str, Any]) -> str:
    """Return a line of metrics.jsonl with its version and checksum."""
    return json.dumps(seal(line, VERSION)) + "\n"
