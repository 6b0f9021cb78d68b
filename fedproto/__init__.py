"""fedproto: federated learning by class prototypes, for members that share nothing but the names of their classes.

import fedproto
result = fedproto.run(algorithm="fedproto", dataset="mnist5k", rounds=20)
print(result.accuracy["prototype"]["mean"])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedproto.errors import ConfigError, DataError, FedProtoError, MissingExtra, RunFolderError, TrainingError
    from fedproto.experiment import Result, run, stream
    from fedproto.inference import Classifier
    from fedproto.joining import Joined, join
    from fedproto.plugins import trust_plugins
    from fedproto.rounds import RoundResult
    from fedproto.types import Algorithm, Batch, Phase, Step, Task, Tree, Upload

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Batch",
    "Classifier",
    "ConfigError",
    "DataError",
    "FedProtoError",
    "Joined",
    "MissingExtra",
    "Phase",
    "Result",
    "RoundResult",
    "RunFolderError",
    "Step",
    "Task",
    "TrainingError",
    "Tree",
    "Upload",
    "join",
    "run",
    "stream",
    "trust_plugins",
]

_HOMES = {
    "Classifier": "inference",
    "Joined": "joining",
    "Result": "experiment",
    "RoundResult": "rounds",
    "join": "joining",
    "run": "experiment",
    "stream": "experiment",
    "trust_plugins": "plugins",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes seconds, and `fedproto --help` does not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'fedproto' has no attribute {name!r}")
    is_error = name == "MissingExtra" or name.endswith("Error")
    home = _HOMES.get(name) or ("errors" if is_error else "types")
    return getattr(importlib.import_module(f"fedproto.{home}"), name)
