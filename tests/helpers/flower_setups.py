"""What tests do with deployed federations: start anew, hold members, compare with the simulator."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from helpers.flower import MODELS, Deployed, Run, same, server_of

import fedproto


class Setup(NamedTuple):
    federation: Deployed
    files: dict[str, dict[str, str]]  # each member's settings
    arrays: list[tuple[np.ndarray, ...]]

    def fresh(self, tag: str, **changed: dict[str, str]) -> dict[str, Any]:
        """Start a new federation in the same processes, with new states for all."""
        for name, own in self.files.items():
            self.federation.write_member(
                name, **(own | {"state": f"{tag}/{name}"} | changed.get(name, {}))
            )
        return {"state": str(self.federation.folder / tag)}

    def odd(self, name: str) -> Path:
        """The member started again so that a test decides how it answers."""
        folder = self.federation.odd(name)
        for file in folder.glob("[!s]*"):
            if file.is_file():
                file.unlink()
        if name in self.federation.processes:
            self.federation.stop(name)
        self.federation.bring(name, PYTHONPATH=path_with(folder))
        return folder


def path_with(folder: Path) -> str:
    """The PYTHONPATH of these tests, with a folder in front."""
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def simulated(arrays: list[tuple[np.ndarray, ...]], rounds: int, **options: Any) -> fedproto.Result:
    models = ",".join(f"{model}*1" for model in MODELS.values())
    return fedproto.run(
        **{"dataset": arrays, "model": models, "rounds": rounds, "dim": 50, "engine": "reference"}
        | options
    )


def assert_like_the_simulator(
    run: Run, arrays: list[tuple[np.ndarray, ...]], rounds: range
) -> None:
    """Bit by bit, after each of the rounds."""
    assert run.status == "finished:completed", run.log
    assert set(run.rounds) - {0} == set(rounds), "a round's state was missed, or there are others"
    for number in rounds:
        found, expected = server_of(run.rounds[number][0]), simulated(arrays, number).prototypes
        assert same(found, expected), f"round {number}"
