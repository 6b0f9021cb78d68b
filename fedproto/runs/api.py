"""The Python interface: `fedproto.run` and `fedproto.stream`."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from fedproto.config import plugins
from fedproto.config.choices import PYTHON
from fedproto.config.options import options_of
from fedproto.config.settings import Config, configure
from fedproto.core.rounds import RoundResult
from fedproto.data.shared.python_data import PythonData, is_per_client
from fedproto.engines.distributed.torchrun import follows
from fedproto.errors import ConfigError
from fedproto.runs.announcements import announce_rounds
from fedproto.runs.execution import OnRound, during_rounds, follow, proceed
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder
from fedproto.runs.keywords import RunKeywords
from fedproto.runs.result import Result


def run(
    *,
    algorithm: str = "fedproto",
    dataset: str | PythonData = "mnist5k",
    model: str | nn.Module | Sequence[nn.Module] | None = None,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    progress: bool = False,
    **options: Unpack[RunKeywords],
) -> Result:
    """Run a federation and return its result.

    Further keywords are the keys of the TOML file, such as `rounds=50`, `lam=0.1` and `ways=3`.
    An ambiguous name, or an option of a model that has the name of a run's setting, is written with
    its owner: `**{"model.dropout": 0}`.

    Args:
        algorithm: the name of one algorithm: of a built-in one, or `file:function` for one of your
            own. To compare several, call `run` once for each.
        dataset: the name of a data set, or data: one `(x, y)` or `(x, y, x_test, y_test)` of
            arrays, a pandas DataFrame, a torch Dataset or a Hugging Face Dataset, which is divided
            by `partition` and `clients`; or a list or dict with one `(x, y)` or
            `(x, y, x_test, y_test)`, or one torch Dataset, per client, where the keys of the dict
            are the clients' names. A dict may hold DataFrames, too. `label`, `client`, `ignore`,
            `keep` and `missing` say about a DataFrame what they say about a csv file.
        model: the name of a model, a module that returns (features, logits), or one such module
            per client (with a named data set, pass `clients` as well); without it, the model that
            the data set names.
        out: a new folder to write the run to.
        on_round: is called with the result of each round.
        progress: print a line to stderr for each evaluated round. The logger "fedproto" of
            Python's `logging` gets every round at level INFO in any case.
    """
    experiment, folder = _begin(algorithm, dataset, model, out, options)
    return experiment.execute(
        folder, announce_rounds(experiment.algorithm.name, on_round, progress=progress)
    )


def stream(
    *,
    algorithm: str = "fedproto",
    dataset: str | PythonData = "mnist5k",
    model: str | nn.Module | Sequence[nn.Module] | None = None,
    out: str | Path | None = None,
    **options: Unpack[RunKeywords],
) -> Generator[RoundResult | Result]:
    """Run a federation round by round: yield each `RoundResult`, and at the end the `Result`.

    The keywords are those of `run`. Nothing happens before the first result is requested. Leaving
    the loop early ends the run; with `out`, `fedproto resume` continues it.
    """
    experiment, folder = _begin(algorithm, dataset, model, out, options)
    interrupted = threading.Event()
    announced = announce_rounds(experiment.algorithm.name)
    steps = proceed([experiment], [folder], interrupted, announced)
    with closing(steps), _closed_at_exit(steps):
        while True:
            # Only during a round: between rounds the caller's own signal handlers apply.
            with during_rounds(experiment.config, interrupted):
                results = next(steps, None)
            if results is None:
                return
            yield results[0]


@contextmanager
def _closed_at_exit(steps: Generator) -> Iterator[None]:
    """Close a stream that is still open when its script ends, so that it writes its checkpoint.

    When Python collects it later, torch is gone.
    """
    atexit.register(steps.close)
    try:
        yield
    finally:
        atexit.unregister(steps.close)


def _begin(
    algorithm: str,
    dataset: Any,
    model: Any,
    out: str | Path | None,
    options: Mapping[str, Any],
) -> tuple[Experiment, RunFolder | None]:
    """Return the experiment that the keywords of `run` describe, and its folder.

    The folder is created last, once nothing can be refused any more. Under torchrun, all processes
    but the first serve as workers here and exit.
    """
    arrays = None if isinstance(dataset, str) else dataset
    modules = None if model is None or isinstance(model, str) else model
    config = _configure(algorithm, dataset, model, options)
    if out is not None and not follows():
        RunFolder.refuse_used(Path(out))
    experiment = Experiment.prepare(config, arrays, modules)
    if follows():
        follow([experiment])
        raise SystemExit(0)
    for notice in experiment.notices:
        warnings.warn(notice, stacklevel=3)
    folder = None if out is None else experiment.new_folder(out)
    return experiment, folder


def _configure(algorithm: str, dataset: Any, model: Any, options: Mapping[str, Any]) -> Config:
    """Check the keywords of `run`; arrays and modules have no place in a configuration."""
    settings = {**options, "algorithm": algorithm}
    if isinstance(dataset, str):
        settings["dataset"] = dataset
    else:
        settings["dataset"] = PYTHON
        if is_per_client(dataset):
            _refuse_partition(options, len(dataset))
            settings["clients"] = len(dataset)
    if model is None or isinstance(model, str):
        settings["model"] = model
    plugins.trust_chosen(settings)
    configs = configure(settings)
    if len(configs) != 1:
        raise ConfigError(
            f"fedproto.run takes one algorithm, not {algorithm!r}: call it in a loop, once for "
            "each, or compare several with `fedproto run --algorithm` on the command line"
        )
    return configs[0]


def _refuse_partition(options: Mapping[str, Any], clients: int) -> None:
    """Refuse settings of a partition: a list of arrays already says what each client has."""
    partition_keys = {"partition", *options_of(plugins.find("partition", "nway"))}
    for key, value in options.items():
        is_of_partition = key in partition_keys or key.startswith("partition.")
        is_other_count = key == "clients" and value != clients
        if is_of_partition or is_other_count:
            raise ConfigError(
                f"{key!r} has no meaning for a list of arrays, which says what each client has"
            )
