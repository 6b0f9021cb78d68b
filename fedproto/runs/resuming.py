"""`fedproto.resume`: a run that was stopped goes on, and a finished one is read again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from fedproto.core.tensors import split_client, split_groups
from fedproto.core.types import Tree
from fedproto.data.shared.python_data import PythonData
from fedproto.engines.distributed.torchrun import follows
from fedproto.errors import ConfigError
from fedproto.runs.announcements import announce_rounds
from fedproto.runs.execution import OnRound, follow
from fedproto.runs.experiment import reopen
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import take_prototypes
from fedproto.runs.result import Result
from fedproto.runs.stored_clients import ClientModels


def resume(
    folder: str | Path,
    *,
    dataset: PythonData | None = None,
    model: nn.Module | Sequence[nn.Module] | None = None,
    on_round: OnRound | None = None,
    progress: bool = False,
) -> Result:
    """Continue a run that was stopped or killed, and return its result.

    The result is that of a run that was never stopped, to the bit. A finished run is not trained
    again: its result is read from the folder.

    Args:
        folder: the run folder.
        dataset: the data that the run was started with, if it was started with data from Python,
            such as arrays or a DataFrame; other data is refused.
        model: the module or modules that the run was started with, if it was started with such;
            their weights come from the newest checkpoint.
        on_round: is called with the result of each round.
        progress: print a line to stderr for each evaluated round.
    """
    run = RunFolder.open(Path(folder))
    if run.result() is not None:
        run.drop_leftovers()
        return read_result(run)
    if follows():
        experiment, _ = reopen(run, None, dataset, model)
        follow([experiment])
        raise SystemExit(0)
    with run.hold():  # before the checkpoint is read, so that nobody writes a newer one
        experiment, reopened = reopen(run, None, dataset, model)
        for notice in experiment.notices:
            warnings.warn(notice, stacklevel=2)
        announced = announce_rounds(experiment.algorithm.name, on_round, progress=progress)
        return experiment.execute(reopened, announced)


def read_result(folder: RunFolder) -> Result:
    """Return the result of a finished run from its folder; its data and modules stay out.

    Raises ConfigError if the run has not finished.
    """
    content = folder.result()
    if content is None:
        raise ConfigError(f"{folder.path} has not finished: continue it with fedproto.resume")
    stored = folder.load_checkpoint()
    groups: dict[str, Tree] = {} if stored is None else split_groups(stored[1])
    prototypes = take_prototypes(groups.get("server", {}))
    of_clients = split_groups(groups.get("client", {}))
    states = []
    for client in range(len(of_clients)):
        params, _ = split_client(of_clients[str(client)])
        states.append(params)
    if states and "frozen" in folder.read_start():
        models = ClientModels.open(folder)  # a checkpoint holds nothing of a frozen body
        states = [models.read(client).state | state for client, state in enumerate(states)]
    return Result(content, folder.metrics(), prototypes, states, folder.path)
