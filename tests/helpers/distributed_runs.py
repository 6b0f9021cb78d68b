"""Runs by several processes and by one, and all that they result in, for comparison.

Programs that tests start import this too.
"""

import functools
from collections.abc import Sequence
from typing import Any

from helpers.tiny import experiment
from torch import tensor

from fedproto.core.engine import Engine, Shard
from fedproto.core.rounds import RoundResult, run_rounds
from fedproto.core.sampling import sample_cohort
from fedproto.core.types import Tree
from fedproto.engines.distributed.forked import build_process_engine
from fedproto.engines.distributed.shared_work import Build
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.engines.vectorised.plan import Plan
from fedproto.runs.experiment import Experiment
from fedproto.runs.training_settings import training_of

#: For sums that are added in another order.
ALMOST = 1e-10
FAULTS = {
    "clients": 6,
    "participation": 0.7,
    "lost_uploads": 0.3,
    "stragglers": 0.5,
    "eval_every": 2,
}
#: Algorithms with which nothing is added in another order.
EXACT = ("fesem", "fedproto(absent=remember)", "local", "fedgh", "fedtgp", "fedorgp", "fedre")
#: Algorithms and their settings.
RUNS: dict[str, dict[str, Any]] = {
    "local": {},
    "fedavg": {},
    "fedprox": {},
    "fedper": {},
    "fedrep": {},
    "fedproto(absent=drop)": {},
    "feddistill": {},
    "fedadam": {},
    "scaffold": {},
    "ditto": {},
    "fesem": {"clusters": 2},
    "fedproto(absent=remember)": {},
    "fedproto-mh": {"model": "mlp(hidden=5),mlp(hidden=9)", "dim": 8},
    "moon": {},
    "feddyn": {},
    "fednh": {},
    "fedgh": {"model": "mlp(hidden=5),mlp(hidden=9)", "dim": 8},
    "fedtgp": {"model": "mlp(hidden=5),mlp(hidden=9)", "dim": 8, "server_epochs": 5},
    "fedorgp": {"model": "mlp(hidden=5),mlp(hidden=9)", "dim": 8},
    "protonorm": {"model": "mlp(hidden=5),mlp(hidden=9)", "dim": 8},
    "fedsa": {"model": "mlp(hidden=5),mlp(hidden=9)", "dim": 8},
    "fedre": {"model": "mlp(hidden=5),mlp(hidden=9)", "dim": 8},
}


def make_builder(runs: Sequence[Experiment], vectorised: bool = False) -> Build:
    """Return a function that builds the engine of a shard of the runs' clients."""
    algorithm = runs[0].algorithm
    federations = [run.federation for run in runs]
    trainings = [training_of(run.config) for run in runs]

    def build(shard: Shard) -> Engine:
        if vectorised:
            return VectorisedEngine(federations, algorithm, trainings, Plan(), shard)
        return ReferenceEngine(federations, algorithm, trainings, shard)

    return build


def use_processes(run: Experiment, workers: int, vectorised: bool = False) -> Experiment:
    """Give a run an engine of several processes, and return it."""
    build = make_builder([run], vectorised)
    run.engine = build_process_engine(build, run.algorithm, workers)
    return run


def use_one_process(run: Experiment) -> Experiment:
    """Give a run the reference engine, and return it."""
    run.engine = make_builder([run])(Shard())
    return run


def do_rounds(*runs: Experiment) -> list[list[RoundResult]]:
    """Do all rounds of runs that share the first one's engine; return their results."""
    federation_runs = [run.federation_run() for run in runs]
    return list(run_rounds(runs[0].algorithm, runs[0].engine, federation_runs))


def train_one_round(run: Experiment) -> list[Any]:
    """Train the four clients of a run in round 1; return the chunks."""
    cohort = sample_cohort(4, run.federation_run().schedule, 1)
    return list(run.engine.train(1, [run.progress.server], [cohort]))


def collect_states(run: Experiment, position: int = 0, engine: Engine | None = None) -> Tree:
    """Return the states of the clients and of the server of a run."""
    states = (engine or run.engine).export(position)
    tree = {f"client.{name}": value for name, value in states.items()}
    return tree | run.progress.export()


def collect_outcomes(*runs: Experiment) -> list[Tree]:
    """Do all rounds; return states, ledger, losses and accuracies, one tree per federation."""
    rounds = do_rounds(*runs)
    engine = runs[0].engine
    engine.close()
    trees = []
    for position, run in enumerate(runs):
        tree = collect_states(run, position, engine)
        for results in rounds:
            result = results[position]
            for name, loss in result.loss.items():
                tree[f"loss.{result.round}.{name}"] = tensor(loss).double()
            for name, accuracies in (result.clients or {}).items():
                tree[f"accuracy.{result.round}.{name}"] = accuracies
        trees.append(tree)
    return trees


@functools.cache
def outcome_of_one_process(name: str) -> Tree:
    """Return what an algorithm of RUNS results in with the reference engine."""
    (outcome,) = collect_outcomes(use_one_process(experiment(name, **FAULTS | RUNS[name])))
    return outcome


def assert_alike(found: Tree, expected: Tree, tolerance: float) -> None:
    """Check that two trees have equal names, types and shapes, and (almost) equal values."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert float((found[name].double() - value.double()).abs().sum()) <= tolerance, name
