"""The Python interface: `fedproto.run` and `fedproto.stream`."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fedproto.config import plugins
from fedproto.config.options import options_of
from fedproto.config.settings import configure
from fedproto.core.rounds import RoundResult
from fedproto.engines.distributed.torchrun import follows
from fedproto.errors import ConfigError, DataError
from fedproto.runs.experiment import Experiment, OnRound, _attended, follow, proceed
from fedproto.runs.folder import RunFolder
from fedproto.runs.result import Result


def run(
    *,
    algorithm: str = "fedproto",
    dataset: Any = "mnist5k",
    model: Any = None,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    **options: Any,
) -> Result:
    """Run a federation and return what it found.

    The keywords are the keys of the TOML file: `rounds=50`, `lam=0.1`, `ways=3`; for an ambiguous name, or a run's own
    that a model has too, `**{"model.dropout": 0}`. `dataset` may be a list with one `(x, y)` or
    `(x, y, x_test, y_test)` of arrays a client; `model` a module that returns (features, logits), or a list of one a
    client. With `out` the run is written to a folder; `on_round` is called with each round's result.
    """
    experiment, folder = _begin(algorithm, dataset, model, out, options)
    return experiment.execute(folder, on_round)


def stream(
    *,
    algorithm: str = "fedproto",
    dataset: Any = "mnist5k",
    model: Any = None,
    out: str | Path | None = None,
    **options: Any,
) -> Generator[RoundResult | Result]:
    """Run a federation round by round: a generator of each `RoundResult` as it comes, and at the end of the `Result`.

    The keywords are those of `run`. Nothing happens before the first result is asked for. A loop that is left early
    ends the run; with `out`, `fedproto resume` continues it.
    """
    experiment, folder = _begin(algorithm, dataset, model, out, options)
    interrupted = threading.Event()
    with closing(proceed([experiment], [folder], interrupted)) as steps, _closed_at_exit(steps):
        while True:
            with _attended(
                experiment.config, interrupted
            ):  # not between rounds, where the caller is at work
                found = next(steps, None)
            if found is None:
                return
            yield found[0]


@contextmanager
def _closed_at_exit(steps: Generator) -> Iterator[None]:
    """A stream that its script still holds when it ends writes its checkpoint then: later, torch is gone."""
    atexit.register(steps.close)
    try:
        yield
    finally:
        atexit.unregister(steps.close)


def _begin(
    algorithm: str, dataset: Any, model: Any, out: str | Path | None, options: dict[str, Any]
) -> tuple[Experiment, RunFolder | None]:
    """The experiment that the keywords of `run` describe, and its folder, once nothing can be refused any more."""
    data = None if isinstance(dataset, str) else dataset
    if data is not None and not (isinstance(data, Sequence) and len(data)):
        raise DataError(
            "dataset must be text, or a list of one (x, y) or (x, y, x_test, y_test) of arrays a client"
        )
    if data is not None:
        _refuse_partition(options, len(data))
    modules = None if model is None or isinstance(model, str) else model
    settings = options | {"algorithm": algorithm}
    settings |= {"dataset": dataset} if data is None else {"clients": len(data)}
    settings |= {"model": model} if modules is None else {}
    plugins.trust_chosen(settings)
    configs = configure(settings)
    if len(configs) != 1:
        raise ConfigError(f"fedproto.run takes one algorithm, not {algorithm!r}")
    if out is not None and not follows():
        RunFolder.refuse_used(Path(out))
    experiment = Experiment.prepare(configs[0], data, modules)
    if follows():
        follow([experiment])
        raise SystemExit(0)
    for notice in experiment.notices:
        warnings.warn(notice, stacklevel=3)
    return experiment, None if out is None else experiment.new_folder(out)


def _refuse_partition(options: dict[str, Any], clients: int) -> None:
    """A list of clients' arrays is its own partition; settings that would be passed over in silence are refused."""
    shares = {"partition", *options_of(plugins.find("partition", "nway"))}
    for key in options:
        if (
            key in shares
            or key.startswith("partition.")
            or (key == "clients" and options[key] != clients)
        ):
            raise ConfigError(
                f"{key!r} has no meaning for a list of arrays, which says what each client has"
            )
