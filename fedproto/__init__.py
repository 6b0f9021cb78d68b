"""Federated learning by class prototypes, for clients that share only the names of their classes.

import fedproto
result = fedproto.run(algorithm="fedproto", dataset="mnist5k", rounds=20)
print(result.accuracy["prototype"]["mean"])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedproto.config.plugin_trust import trust_plugins
    from fedproto.core.rounds import RoundResult
    from fedproto.core.transforms import Encoded, Transform
    from fedproto.core.types import (
        Algorithm,
        Batch,
        Group,
        GroupLayout,
        Phase,
        Recipient,
        SentOnce,
        State,
        Step,
        Task,
        Tree,
        Upload,
        per_class,
        per_client,
    )
    from fedproto.errors import (
        ConfigError,
        DataError,
        FedProtoError,
        MissingExtra,
        RunFolderError,
        TrainingError,
    )
    from fedproto.inference.classifier import Classifier
    from fedproto.membership.api import extend, members
    from fedproto.membership.join import Joined, join
    from fedproto.models.shared.wrap import wrap
    from fedproto.runs.api import run, stream
    from fedproto.runs.result import Result
    from fedproto.runs.resuming import resume
    from fedproto.runs.sweeping import SweptRun, sweep
    from fedproto.runs.tune.tuning import Tuned, tune

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Batch",
    "Classifier",
    "ConfigError",
    "DataError",
    "Encoded",
    "FedProtoError",
    "Group",
    "GroupLayout",
    "Joined",
    "MissingExtra",
    "Phase",
    "Recipient",
    "Result",
    "RoundResult",
    "RunFolderError",
    "SentOnce",
    "State",
    "Step",
    "SweptRun",
    "Task",
    "TrainingError",
    "Transform",
    "Tree",
    "Tuned",
    "Upload",
    "extend",
    "join",
    "members",
    "per_class",
    "per_client",
    "resume",
    "run",
    "stream",
    "sweep",
    "trust_plugins",
    "tune",
    "wrap",
]

_HOMES = {
    "Classifier": "inference.classifier",
    "Encoded": "core.transforms",
    "Joined": "membership.join",
    "Result": "runs.result",
    "RoundResult": "core.rounds",
    "SweptRun": "runs.sweeping",
    "Transform": "core.transforms",
    "Tuned": "runs.tune.tuning",
    "extend": "membership.api",
    "join": "membership.join",
    "members": "membership.api",
    "resume": "runs.resuming",
    "run": "runs.api",
    "stream": "runs.api",
    "sweep": "runs.sweeping",
    "tune": "runs.tune.tuning",
    "trust_plugins": "config.plugin_trust",
    "wrap": "models.shared.wrap",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a public name on first use: torch takes seconds, and `--help` does not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'fedproto' has no attribute {name!r}")
    is_error = name == "MissingExtra" or name.endswith("Error")
    home = _HOMES.get(name) or ("errors" if is_error else "core.types")
    return getattr(importlib.import_module(f"fedproto.{home}"), name)
