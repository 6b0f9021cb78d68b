"""How the clients of a run train, as its settings and its protection say."""

from __future__ import annotations

from fedproto.config.settings import Config
from fedproto.core.batches import Training
from fedproto.core.optimisers import Optimiser, RateSchedule
from fedproto.privacy.planning import PrivacyPlan


def training_of(config: Config, plan: PrivacyPlan | None = None) -> Training:
    """Return how every client of a run with these settings trains.

    plan  how the run is protected, which may make its steps private
    """
    private = None
    if plan is not None and plan.steps is not None:
        private = plan.steps.private_steps()
    return Training(
        config.batch,
        config.lr,
        config.momentum,
        config.epochs,
        config.last_batch,
        config.seed,
        Optimiser(config.optimiser, config.weight_decay, config.clip_norm),
        RateSchedule(config.schedule, config.warmup, config.rounds),
        config.class_weights,
        config.sampling,
        config.local_steps,
        private,
    )
