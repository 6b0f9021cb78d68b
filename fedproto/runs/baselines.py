"""What a federation is compared with: the same models trained alone, and one on all rows.

`local` trains each client's model on its own rows only, in the same rounds. `pooled` trains one
model on the training rows of all clients together, as if they could be brought to one place. All
three start from the same weights and use the same batches, learning rate and optimiser, and each
training row equally often: `rounds` times `epochs` times, of which a client does the fraction
`participation`. So the number of gradient steps per training row is the same. With `local_steps`,
`pooled` does as many steps per round as all clients together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import Config
from fedproto.core.best_round import ACCURACY
from fedproto.core.federation import Examples, Federation, Member
from fedproto.core.types import Algorithm, Tree
from fedproto.engines.distributed.torchrun import under_torchrun
from fedproto.engines.reference import ReferenceEngine
from fedproto.errors import ConfigError, TrainingError
from fedproto.runs.metric_contents import describe_metrics
from fedproto.runs.result import Result

#: Runs a federation to its end in this process, without a folder.
RunFederation = Callable[[Config, Algorithm, Federation], Result]

LOCAL = Part("local")


def refuse_baselines(config: Config) -> None:
    """Refuse `baselines` where they cannot be trained."""
    if config.baselines and under_torchrun():
        raise ConfigError("baselines are trained by one process: run without torchrun")


def train_baselines(
    config: Config, federation: Federation, run: RunFederation
) -> dict[str, dict[str, Any]]:
    """Return the metrics of local and of pooled training, for result.json.

    A baseline that cannot be trained has a sentence under `missing` instead.
    """
    engine: Literal["reference", "vectorised"] = "vectorised"
    if config.engine == "reference":
        engine = "reference"
    config = replace(
        config,
        algorithm=LOCAL,
        engine=engine,
        workers=None,
        prototypes=None,
        baselines=False,
        select_by=ACCURACY,  # the head's: there are no prototypes
        eval_every=config.rounds if not federation.has_validation else config.eval_every,
    )
    algorithm = plugins.build("algorithm", LOCAL)
    found = {}
    for name, train in (("local", _train_locally), ("pooled", _train_pooled)):
        try:
            found[name] = train(config, algorithm, federation, run)
        except TrainingError as error:
            found[name] = {"missing": str(error)}
    return found


def _train_locally(
    config: Config, algorithm: Algorithm, federation: Federation, run: RunFederation
) -> dict[str, Any]:
    result = run(config, algorithm, federation)
    return _describe(result.data["metrics"]["head"], config.rounds)


def _train_pooled(
    config: Config, algorithm: Algorithm, federation: Federation, run: RunFederation
) -> dict[str, Any]:
    obstacle = _find_obstacle(federation.members)
    if obstacle is not None:
        return {"missing": obstacle}
    share = config.participation
    if config.buffer:
        share = config.buffer / len(federation.members)
    rounds = max(1, round(config.rounds * share))
    local_steps = config.local_steps
    if local_steps is not None:
        local_steps *= len(federation.members)
    config = replace(
        config,
        rounds=rounds,
        local_steps=local_steps,
        participation=1.0,
        lost_uploads=0.0,
        stragglers=0.0,
        buffer=0,
        concurrency=None,
    )
    result = run(config, algorithm, pool_clients(federation))
    (state,) = result.states
    metrics = _measure_everywhere(federation, algorithm, state)
    return _describe(metrics["head"], rounds)


def _describe(metrics: dict[str, Any], rounds: int) -> dict[str, Any]:
    return {"rounds": rounds, "metrics": metrics}


def _find_obstacle(members: Sequence[Member]) -> str | None:
    """Say why one model cannot be trained on the rows of all clients, or return None."""
    first = members[0]
    for member in members:
        if repr(member.module) != repr(first.module):
            return "the clients' models differ, so there is no one model to train on all rows"
        if member.train.x.shape[1:] != first.train.x.shape[1:]:
            return "the clients' inputs differ in shape, so they cannot be brought together"
    return None


# --- one client with all rows


def pool_clients(federation: Federation) -> Federation:
    """Return a federation of one client that has the rows of all, each row once."""
    members = federation.members
    validation = None
    if federation.has_validation:
        validation = pool_examples([member.examples_of("validation") for member in members])
    everybody = replace(
        members[0],
        id=0,
        name="pooled",
        classes=_unite_classes(members),
        train=pool_examples([member.train for member in members]),
        test=pool_examples([member.test for member in members]),
        validation=validation,
    )
    task = federation.task._replace(clients=1)
    return replace(federation, members=(everybody,), task=task)


def _unite_classes(members: Sequence[Member]) -> tuple[int, ...]:
    classes: set[int] = set()
    for member in members:
        classes.update(member.classes)
    return tuple(sorted(classes))


def pool_examples(several: Sequence[Examples]) -> Examples:
    """Return the rows of several clients as those of one; a row that two have is taken once."""
    pools = {id(examples.x): examples for examples in several}
    starts = {}
    start = 0
    for key, examples in pools.items():
        starts[key] = start
        start += len(examples.x)
    if len(pools) == 1:
        x = several[0].x
        y = several[0].y
    else:
        x = torch.cat([examples.x for examples in pools.values()])
        y = torch.cat([examples.y for examples in pools.values()])
    rows = torch.cat([examples.rows + starts[id(examples.x)] for examples in several])
    return Examples(x, y, rows.unique())


def _measure_everywhere(
    federation: Federation, algorithm: Algorithm, state: Tree
) -> dict[str, dict[str, Any]]:
    """Return the metrics of one model on the test rows of every client."""
    device = federation.device
    on_device = {name: value.to(device) for name, value in state.items()}
    members = [replace(member, initial=on_device) for member in federation.members]
    same_everywhere = replace(federation, members=tuple(members))
    engine = ReferenceEngine([same_everywhere], algorithm, [])
    (measured,) = engine.measure([{}])
    return describe_metrics(same_everywhere, measured)
