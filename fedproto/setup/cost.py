"""What a round will cost, from a few batches and the messages of the real engine."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

from fedproto.core.rounds import RoundResult, run_rounds
from fedproto.runs.devices import torch_settings
from fedproto.runs.experiment import Experiment
from fedproto.runs.scheduling import count_local_steps
from fedproto.runs.training_settings import training_of

#: Local steps of the two trials: what is longer in the second one is the time of the steps.
TRIAL_STEPS = (1, 3)
#: Rounds of a trial: the first is slow, the second is timed, and the third is evaluated.
TRIAL_ROUNDS = 3


@dataclass(frozen=True)
class Cost:
    """The estimated cost of a run."""

    seconds_per_round: float
    seconds_per_evaluation: float
    rounds: int
    evaluations: int
    #: Bytes of the first round, in which some methods send more, and of a later one.
    first_bytes_up: int
    bytes_up: int
    bytes_down: int

    @property
    def seconds(self) -> float:
        """All rounds and evaluations, without reading data and without baselines."""
        training = self.rounds * self.seconds_per_round
        return training + self.evaluations * self.seconds_per_evaluation

    @property
    def total_bytes_up(self) -> int:
        return self.first_bytes_up + (self.rounds - 1) * self.bytes_up


def estimate_cost(experiment: Experiment) -> Cost:
    """Return the cost of a run; two trials of some batches each are run and forgotten.

    Bytes are those of the trials' messages. In the vectorised engine all clients take a step
    together, so that the client with the most steps counts; in others, the mean.
    """
    config = experiment.config
    short, long = (_try_rounds(experiment, steps) for steps in TRIAL_STEPS)
    per_step = (long[1].seconds - short[1].seconds) / (TRIAL_STEPS[1] - TRIAL_STEPS[0])
    per_step = max(0.0, per_step)
    steps = count_local_steps(experiment.federation, experiment.algorithm, training_of(config))
    is_stacked = config.engine == "vectorised"
    wanted = float(steps.max()) if is_stacked else float(steps.double().mean())
    phases = max(1, len(experiment.algorithm.phases))
    seconds = short[1].seconds + max(0.0, wanted - phases * TRIAL_STEPS[0]) * per_step
    evaluation = max(0.0, short[2].seconds - short[1].seconds)
    evaluations = -(-config.rounds // config.eval_every)
    return Cost(
        seconds_per_round=seconds,
        seconds_per_evaluation=evaluation,
        rounds=config.rounds,
        evaluations=evaluations,
        first_bytes_up=short[0].bytes_up,
        bytes_up=short[1].bytes_up,
        bytes_down=short[1].bytes_down,
    )


def _try_rounds(experiment: Experiment, local_steps: int) -> list[RoundResult]:
    """Return the results of a few short rounds of a copy of the experiment."""
    config = replace(
        experiment.config,
        local_steps=local_steps,
        rounds=TRIAL_ROUNDS,
        eval_every=TRIAL_ROUNDS,
        patience=None,
        warmup=0,
    )
    (trial,) = Experiment.share_engine([config], experiment.algorithm, [experiment.federation])
    results = []
    with torch_settings(config.threads, config.precision), closing(trial.engine):
        for outcome in run_rounds(trial.algorithm, trial.engine, [trial.federation_run()]):
            assert outcome[0] is not None, "nothing ends a trial early"
            results.append(outcome[0])
    return results
