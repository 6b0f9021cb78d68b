"""The run folder: complete or not there, every file written whole or not at all.

config.toml             everything needed to run again
partition.json          who has which rows, stamped with a SHA-256
metrics.jsonl           a line a round
result.json             when the run has finished
prototypes.safetensors  the global prototypes, where the algorithm has any
checkpoint/             the newest state of server and clients
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedproto.errors import RunFolderError
from fedproto.types import Tree


def write_atomically(path: Path, content: bytes) -> None:
    """Whoever looks, and whenever the machine stops, sees the old file or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def refuse_used(path: Path) -> None:
        """A run never writes into a folder that holds something."""
        if (path / "config.toml").exists():
            raise RunFolderError(
                f"{path} already holds a run: name another folder with --out, or `fedproto resume {path}`"
            )
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunFolderError(f"{path} is not empty: name another folder with --out")

    @classmethod
    def create(cls, path: Path, config: str, partition: dict[str, Any]) -> RunFolder:
        """The folder appears with its configuration and partition in it, or not at all."""
        cls.refuse_used(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        temporary.chmod(0o755)
        try:
            (temporary / "config.toml").write_text(config)
            (temporary / "partition.json").write_text(json.dumps(partition))
            (temporary / "metrics.jsonl").touch()
            (temporary / "checkpoint").mkdir()
            os.replace(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return cls(path)

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
        return (
            [_json(path, line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        )

    def add_metrics(self, line: dict[str, Any]) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def keep_metrics(self, rounds: int) -> list[dict[str, Any]]:
        """Forget lines of rounds after the one the run continues from, and one that was cut off."""
        kept = [line for line in self.metrics() if line["round"] <= rounds]
        write_atomically(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept).encode())
        return kept

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        write_atomically(self.path / name, (json.dumps(content, indent=1) + "\n").encode())

    def write_tensors(self, name: str, tree: Tree, metadata: dict[str, str]) -> None:
        write_atomically(self.path / name, save({n: v.cpu().contiguous() for n, v in tree.items()}, metadata))

    def save_checkpoint(self, round: int, tree: Tree) -> None:
        """One file a checkpoint; the older one goes when the newer is complete."""
        name = _checkpoint_name(round)
        self.write_tensors(f"checkpoint/{name}", tree, {"round": str(round)})
        for path in (self.path / "checkpoint").iterdir():
            if path.name != name:
                path.unlink()

    def load_checkpoint(self) -> tuple[int, Tree] | None:
        """The newest checkpoint, or None where the run was stopped before its first."""
        files = sorted((self.path / "checkpoint").glob("round-*.safetensors"))
        if not files:
            return None
        try:
            with safe_open(files[-1], "pt") as file:
                tree = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                return int(file.metadata()["round"]), tree
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"checkpoint {files[-1]} is damaged ({error}): delete it and `fedproto resume` starts from round 1"
            ) from error


def _checkpoint_name(round: int) -> str:
    return f"round-{round:08d}.safetensors"


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error
