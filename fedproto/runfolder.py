"""The run folder: complete or not there, every file written whole or not at all.

config.toml             everything needed to run again
partition.json          who has which rows, stamped with a SHA-256
metrics.jsonl           a line a round
result.json             when the run has finished
prototypes.safetensors  the global prototypes, where the algorithm has any, and the clients' own it remembers
checkpoint/             the newest state of server and clients
diverged.json           where a client's numbers ceased to be finite, which ended the run
encoding.json           how rows of tables, or texts, became numbers, where there were such
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

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedproto.encoding import ENCODING, Encoding, from_json, to_json
from fedproto.errors import RunFolderError
from fedproto.files import write_atomically
from fedproto.types import Tree

DIVERGED = "diverged.json"


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

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
    def create(cls, path: Path, config: str, partition: dict[str, Any]) -> RunFolder:
        """The folder appears with its configuration and partition in it, or not at all."""
        cls.refuse_used(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_folder(path) as temporary:
                write_atomically(temporary / "config.toml", config.encode())
                write_atomically(temporary / "partition.json", json.dumps(partition).encode())
                (temporary / "metrics.jsonl").touch()
                (temporary / "checkpoint").mkdir()
        except OSError as error:
            raise RunFolderError(f"{path} cannot be made: {error}; name another folder with --out") from error
        return cls(path)

    @classmethod
    def inside(cls, path: Path) -> list[RunFolder]:
        """The runs that were compared in a folder, in the order they were made; none where it is a run itself."""
        configs = [] if (path / "config.toml").exists() else list(path.glob("*/config.toml"))
        folders = [config.parent for config in sorted(configs, key=lambda config: config.stat().st_mtime_ns)]
        if len({(cls.open(folder).path / "partition.json").read_bytes() for folder in folders}) > 1:
            raise RunFolderError(f"{path} holds runs of different federations: name one of them")
        return [cls(folder) for folder in folders]

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not all((path / name).exists() for name in ("config.toml", "partition.json")):
            raise RunFolderError(f"{path} is not a run: it holds no config.toml and partition.json")
        return cls(path)

    def result(self) -> dict[str, Any] | None:
        path = self.path / "result.json"
        return _json(path, path.read_text()) if path.exists() else None

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [_json(path, line) for line in lines if line.endswith("\n")]  # without its end, a line was cut off

    def add_metrics(self, line: dict[str, Any]) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def keep_metrics(self, rounds: int) -> list[dict[str, Any]]:
        """Forget lines of rounds after the one the run continues from, and one that was cut off."""
        kept = [line for line in self.metrics() if line["round"] <= rounds]
        write_atomically(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept).encode())
        return kept

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
        stored = _json(path, path.read_text())
        try:
            different = [from_json(each, str(path)) for each in stored["encodings"]]
            return {client: different[place] for client, place in enumerate(stored["clients"]) if place is not None}
        except (KeyError, TypeError, IndexError) as error:
            raise RunFolderError(f"{path} is damaged: {error}") from error

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        write_atomically(self.path / name, (json.dumps(content, indent=1) + "\n").encode())

    def write_tensors(self, name: str, tree: Tree, metadata: dict[str, str]) -> None:
        write_atomically(self.path / name, save(_apart(tree), metadata))

    def save_checkpoint(self, round: int, tree: Tree) -> None:
        """One file a checkpoint; the older one goes when the newer is complete."""
        name = _checkpoint_name(round)
        with (self.path / "metrics.jsonl").open("a") as file:
            os.fsync(file.fileno())  # a checkpoint must not outlive the lines of its rounds
        # In one entry: safetensors writes several in no fixed order, and equal states should be equal files.
        self.write_tensors(f"checkpoint/{name}", tree, {"of": json.dumps({"round": round, "run": self._stamp()})})
        for path in (self.path / "checkpoint").iterdir():
            if path.name != name:
                path.unlink()

    def drop_checkpoints(self) -> None:
        for path in (self.path / "checkpoint").glob("round-*.safetensors"):
            path.unlink()

    def checkpoint_round(self) -> int:
        """The round of the newest checkpoint, 0 where there is none."""
        files = sorted((self.path / "checkpoint").glob("round-*.safetensors"))
        return int(files[-1].stem.removeprefix("round-")) if files else 0

    def load_checkpoint(self) -> tuple[int, Tree] | None:
        """The newest checkpoint, or None where the run was stopped before its first."""
        files = sorted((self.path / "checkpoint").glob("round-*.safetensors"))
        if not files:
            return None
        try:
            with safe_open(files[-1], "pt") as file:
                tree = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                of = json.loads(file.metadata()["of"])
                round, run = int(of["round"]), of["run"]
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"checkpoint {files[-1]} is damaged ({error}): delete it and `fedproto resume` starts from round 1"
            ) from error
        if run != self._stamp():
            raise RunFolderError(
                f"checkpoint {files[-1]} is of another run, or config.toml or partition.json was changed after it was "
                "written: put them back, or delete it and `fedproto resume` starts from round 1"
            )
        return round, tree

    def _stamp(self) -> str:
        """Tells runs apart: a state is continued only under the settings it was reached with."""
        files = (self.path / name for name in ("config.toml", "partition.json"))
        return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _apart(tree: Tree) -> Tree:
    """On the CPU, none in the memory of another, as those are of clients that have not trained yet: all start equal."""
    result, taken = {}, set()
    for name, value in tree.items():
        value = value.cpu().contiguous()
        result[name] = value.clone() if value.untyped_storage().data_ptr() in taken else value
        taken.add(value.untyped_storage().data_ptr())
    return result


def is_taken(path: Path) -> bool:
    """Whether something is there that a new folder would overwrite; an empty folder is nothing."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that becomes `path` if all goes well, and else goes away."""
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        temporary.chmod(0o755)
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _checkpoint_name(round: int) -> str:
    return f"round-{round:08d}.safetensors"


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error
