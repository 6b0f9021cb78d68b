"""The result of a run, as `fedproto.run` returns it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fedproto.core.federation import Federation, Member
from fedproto.core.prototypes import DEFAULT_TAU, Tau
from fedproto.core.tensors import flatten_state, unflatten_state
from fedproto.core.types import Algorithm, State, Tree
from fedproto.errors import RunFolderError
from fedproto.runs.teacher_files import SolvedTeacher


@dataclass(frozen=True, eq=False)
class TrainedFederation:
    """A federation after its last round, with its data, for whoever still has it in memory."""

    federation: Federation
    algorithm: Algorithm
    server: State
    #: Whether its modules were passed from Python, so that no file can name them.
    has_own_modules: bool
    #: What each client keeps beside its model, if clients adopt by it.
    kept: Sequence[State] = ()
    tau: Tau = DEFAULT_TAU  # of the prediction by both prototypes and head
    teacher: SolvedTeacher | None = None
    teacher_weights: Sequence[float] = ()  # of each client, if there is a teacher

    def as_evaluated(self, member: Member, own: Tree) -> Tree:
        """Return a client's model as it is evaluated, on the device.

        That is its own state, with what the server sends adopted where the algorithm does so.
        """
        recipient = self.federation.recipient(member.id)
        received = self.algorithm.send(self.server, recipient)
        device = self.federation.device
        own_on_device = {name: value.to(device) for name, value in own.items()}
        if not self.kept:
            return self.algorithm.adopt(own_on_device, received)
        flat = flatten_state(self.kept[member.id])
        kept = unflatten_state({name: value.to(device) for name, value in flat.items()})
        return self.algorithm.start_from(own_on_device, received, kept)

    def __repr__(self) -> str:
        return f"<{self.algorithm.name}: {self.federation!r}>"


@dataclass(frozen=True)
class Result:
    """The result of a run; `data` is the content of result.json without version and checksum."""

    data: dict[str, Any] = field(repr=False)
    #: One line of metrics.jsonl per round.
    metrics: list[dict[str, Any]] = field(repr=False)
    #: The server's `prototypes` (C, d) and `known` (C,), if the algorithm has them.
    prototypes: Tree = field(repr=False)
    #: Each client's own parameters and buffers by name.
    states: list[Tree] = field(repr=False)
    folder: Path | None = None
    #: The clients with their data and modules, for `Classifier.of` and `export`; None if the
    #: result was read from a folder.
    trained: TrainedFederation | None = field(default=None, repr=False, compare=False)

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """Mean and std over clients of each accuracy, such as `head` and `head_own`."""
        return self.data["accuracy"]

    @property
    def clients(self) -> list[dict[str, Any]]:
        """What is known of each client: data, model, classes, accuracy and traffic."""
        return self.data["clients"]

    @property
    def communication(self) -> dict[str, Any]:
        """Values sent per round, and all bytes up and down."""
        return self.data["communication"]

    def export(
        self,
        to: str | Path,
        client: int | str | None = None,
        *,
        module: nn.Module | None = None,
        onnx: bool = True,
    ) -> Path:
        """Write a client as a folder that needs neither the run nor its data; return its path.

        `fedproto.Classifier.load(to)` reads it. Of a module that was passed from Python the folder
        has the weights, but not the code: `Classifier.load(to, module=...)` takes it again.

        Args:
            to: a new or empty folder.
            client: its name, such as `"Ulm"`, or its number; None: the one that knows the most
                classes, and of these has the most training rows.
            module: the client's module, for a result that was read from a folder.
            onnx: write model.onnx, too.
        """
        classifier = _in_later_room("inference.classifier", "Classifier")
        export_client = _in_later_room("inference.export.write", "export_client")
        trained = classifier.of(self, client, module=module).trained
        for notice in export_client(trained, Path(to), onnx):
            warnings.warn(notice, stacklevel=2)
        return Path(to)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the run as one HTML page with tables and figures; return the path of the page.

        `out` is FILE.html or a folder; by default the run folder. A run without a folder has no
        report: pass `out` to `fedproto.run`.
        """
        if self.folder is None:
            raise RunFolderError(
                "a report is made from a run folder: pass out=FOLDER to fedproto.run"
            )
        write = _in_later_room("report", "write")
        return write([self.folder], out)

    def __repr__(self) -> str:
        accuracies = []
        for name, value in self.accuracy.items():
            accuracies.append(f"{name} {value['mean']:.2%} ± {value['std']:.2%}")
        run = f"{self.data['algorithm']} on {self.data['dataset']}, {self.data['rounds']} rounds"
        return f"<{run}: {', '.join(accuracies)}>"


def _in_later_room(module: str, name: str) -> Any:
    """Return what is done with a result afterwards; this room does not depend on it."""
    return getattr(importlib.import_module(f"fedproto.{module}"), name)
