"""Runs with private steps by either engine, whose draws are seeded so that they can be compared."""

import math
from dataclasses import replace

from helpers.tiny import SETTINGS

from fedproto.config.settings import configure
from fedproto.core.entropy import Entropy
from fedproto.core.private_steps import PrivateSteps
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.engines.vectorised.plan import Plan
from fedproto.runs.experiment import Experiment
from fedproto.runs.training_settings import training_of

#: Steps that are clipped and noisy, but can be repeated.
SEEDED = PrivateSteps(norm=0.5, noise=0.7, entropy=Entropy(seed=3))
#: Steps that change nothing but how records are drawn.
HARMLESS = PrivateSteps(norm=math.inf, noise=0.0, entropy=Entropy(seed=3))


def prepare_private(algorithm, engine, private, data=None, modules=None, stack=None, **settings):
    """Return an experiment whose clients take private steps, by an engine of this name."""
    config = configure(SETTINGS | {"algorithm": algorithm, "engine": "reference"} | settings)[0]
    run = Experiment.prepare(config, data=data, modules=modules)
    trainings = [replace(training_of(config), private=private)]
    if engine == "reference":
        run.engine = ReferenceEngine([run.federation], run.algorithm, trainings)
    else:
        plan = Plan(stack=stack)
        run.engine = VectorisedEngine([run.federation], run.algorithm, trainings, plan)
    return run


def final_states(run):
    """Return the clients' and the server's state after all rounds of an experiment."""
    run.execute()
    return run.engine.export(0), run.progress.server
