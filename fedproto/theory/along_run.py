"""Measures the theory along a run: its rounds are trained again, and each is replayed first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedproto.core.batches import count_round_steps
from fedproto.core.rounds import run_rounds
from fedproto.core.types import Algorithm
from fedproto.errors import ConfigError
from fedproto.runs.devices import torch_settings
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder
from fedproto.runs.restarting import restart
from fedproto.runs.training_settings import training_of
from fedproto.theory.checks import RoundSettings, check_round
from fedproto.theory.conditions import list_departures, make_proof_config, refuse_unsuited
from fedproto.theory.files import VERSION
from fedproto.theory.measured_round import Clients, MeasureOptions, measure_round
from fedproto.theory.objectives import group_by_module
from fedproto.theory.replays import ReplayPlan
from fedproto.theory.summary import summarise_rounds

#: The settings in which a run is measured.
RUN = "run"
PROOF = "proof"
SETTINGS = (RUN, PROOF)

OnMeasured = Callable[[str, dict[str, Any]], None]


class TheoryOptions(NamedTuple):
    """What is measured of a run."""

    rounds: int = 5  # the last round that is measured
    first: int = 1
    every: int = 1
    settings: tuple[str, ...] = SETTINGS
    measure: MeasureOptions = MeasureOptions()

    def check(self) -> None:
        """Refuse numbers that mean nothing."""
        for name in ("rounds", "first", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.first > self.rounds:
            raise ConfigError(
                f"first ({self.first}) must not be after the last measured round ({self.rounds})"
            )
        if self.measure.replays < 2:
            raise ConfigError(
                f"replays must be at least 2, to have a spread, not {self.measure.replays}"
            )
        for name in ("hessian_rows", "jacobian_rows", "iterations"):
            if getattr(self.measure, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self.measure, name)}")


def measure_folder(
    path: Path, options: TheoryOptions, on_measured: OnMeasured | None = None
) -> dict[str, Any]:
    """Return the content of theory.json: what was measured in each setting of a run folder."""
    options.check()
    folder = RunFolder.open(path)
    measured = {}
    for name in options.settings:
        change = make_proof_config if name == PROOF else None
        experiment = restart(folder, change)
        measured[name] = measure_experiment(experiment, options, _named(on_measured, name))
    return {"version": VERSION, "settings": measured}


def _named(on_measured: OnMeasured | None, name: str) -> Callable[[dict[str, Any]], None] | None:
    if on_measured is None:
        return None
    return lambda record: on_measured(name, record)


def measure_experiment(
    experiment: Experiment,
    options: TheoryOptions,
    on_measured: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train an experiment from its start, and return what was measured of its first rounds."""
    config = experiment.config
    refuse_unsuited(config)
    clients = _list_clients(experiment)
    last = min(options.rounds, config.rounds)
    wanted = range(options.first, last + 1, options.every)
    records = []
    with torch_settings(config.threads, config.precision), closing(experiment.engine):
        rounds = run_rounds(experiment.algorithm, experiment.engine, [experiment.federation_run()])
        for round in range(1, last + 1):
            if round in wanted:
                record = _measure(experiment, clients, round, options.measure)
                records.append(record)
                if on_measured is not None:
                    on_measured(record)
            if round < last:
                next(rounds)
    has_dropout = any(layer.p > 0 for group in clients.groups for layer in group.dropped)
    unequal_steps = len(set(clients.steps.tolist())) > 1
    return {
        "eta": config.lr,
        "lam": config.algorithm.options["lam"],
        "momentum": config.momentum,
        "distance": config.algorithm.options["distance"],
        "batch": config.batch,
        "seed": config.seed,
        **options.measure._asdict(),
        "departures": list_departures(config, has_dropout, unequal_steps),
        "summary": summarise_rounds(records, config.lr, config.algorithm.options["lam"]),
        "rounds": records,
    }


def _list_clients(experiment: Experiment) -> Clients:
    """Return the clients with their objectives and numbers of steps."""
    federation = experiment.federation
    algorithm: Algorithm = experiment.algorithm
    if federation.device.type != "cpu":
        raise ConfigError("theory is measured on the CPU: run it with device=cpu")
    training = training_of(experiment.config)
    steps = [count_round_steps(member, algorithm, training) for member in federation.members]
    groups = group_by_module(federation, algorithm)
    return Clients(federation, algorithm, groups, torch.tensor(steps))


def _measure(
    experiment: Experiment, clients: Clients, round: int, options: MeasureOptions
) -> dict[str, Any]:
    """Return what is measured of the round that comes next in an experiment."""
    config = experiment.config
    eta = training_of(config).rate(round)
    plan = ReplayPlan(options.replays, config.batch, eta, config.momentum, config.seed, round)
    states = experiment.client_states()
    server = experiment.progress.server
    measured = measure_round(clients, states, server, plan, options)
    algorithm_options = config.algorithm.options
    settings = RoundSettings(
        eta=eta,
        lam=algorithm_options["lam"],
        momentum=config.momentum,
        distance=algorithm_options["distance"],
        dim=experiment.federation.task.dim,
    )
    return check_round(measured, clients.steps, settings)
