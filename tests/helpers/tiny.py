"""Small federations and steps for hundreds of tests, so they must be fast."""

from typing import Any

import torch

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.core.tensors import split_client
from fedproto.core.types import Algorithm, Batch, Recipient, State, Step, Tree
from fedproto.runs.experiment import Experiment
from fedproto.runs.result import Result

ALGORITHMS = plugins.names("algorithm")
#: Without the closed form, which has a test of its own: it trains nothing and needs fixed features.
TRAINED = [name for name in ALGORITHMS if name != "closed-form"]

#: Four clients of 8x8 digits and a perceptron, in float64 so that an identity shows as one.
SETTINGS: dict[str, Any] = {
    "dataset": "digits",
    "clients": 4,
    "rounds": 3,
    "shots": 5,
    "stdev": 1,
    "test_shots": 5,
    "batch": 4,
    "lr": 0.05,
    "precision": "float64",
    "engine": "reference",
    "model": "mlp(hidden=16,width=8)",
}


def experiment(algorithm: str, **settings: Any) -> Experiment:
    return Experiment.prepare(configure(SETTINGS | {"algorithm": algorithm} | settings)[0])


def finished(algorithm: str, **settings: Any) -> tuple[Experiment, Result]:
    run = experiment(algorithm, **settings)
    return run, run.execute()


def build(name: str, **options: Any) -> Algorithm:
    return plugins.build("algorithm", Part(name, options))


def largest_difference(a: Experiment, b: Experiment) -> float:
    """Between the models the clients of two runs would be scored with."""
    return max(
        float((first[name].double() - second[name].double()).abs().max())
        for first, second in zip(scored_states(a), scored_states(b), strict=True)
        for name in first
    )


def scored_states(run: Experiment) -> list[Tree]:
    received = send(run.algorithm, run.progress.server, torch.ones(len(run.federation.classes)))
    return [run.algorithm.adopt(split_client(state)[0], received) for state in run.engine.states[0]]


def send(algorithm: Algorithm, server: State, classes: torch.Tensor, number: int = 0) -> State:
    """What a client receives that is sent something of these classes, marked by 1."""
    return algorithm.send(server, Recipient(torch.tensor(number), classes))


def step(
    params: Tree,
    received: State,
    x: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor | None = None,
    state: State | None = None,
) -> Step:
    """A step of the smallest model: features = x W, logits = features V (`body.w`, `head.v`)."""

    def forward(others: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        run = params | others
        features = x @ run["body.w"]
        return features, features @ run["head.v"]

    features, logits = forward({})
    batch = Batch(x, y, torch.ones(len(y), dtype=x.dtype) if mask is None else mask)
    return Step(params, features, logits, batch, received, state=state or {}, forward=forward)
