"""What a run's claim promises about the federations that a membership attack is scored on.

Their noise is the run's. But the coins change how many records a client has, and with that how
often a private step takes each record, and how many steps there are. So the epsilon of these
federations is computed anew, and the lower bound of an attack is compared with that.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from fedproto.audit.attacked_run import AttackedRun
from fedproto.audit.membership import THREATS
from fedproto.audit.shadows import Records
from fedproto.core.federation import Examples
from fedproto.privacy.accounting import compute_epsilon
from fedproto.privacy.planning import PrivacyPlan
from fedproto.privacy.step_costs import StepCount, count_private_steps
from fedproto.runs.training_settings import training_of

#: The attacker that sees a client's own model, which leaves it only in the end, if at all.
MODEL = "trained model"


def promised_epsilon(
    run: AttackedRun, records: Records, included: Tensor, rounds: int
) -> float | None:
    """Return the largest epsilon of any client of some federations; None if nothing is claimed.

    included  (federations, records) which records they have
    rounds    of each federation, in all of which every client counts as present
    """
    claim = run.experiment.claim()
    if claim is None or not claim.holds:
        return None
    plan: PrivacyPlan = run.algorithm.privacy
    counts: set[StepCount | None] = {None}
    if plan.steps is not None:
        counts = _list_step_counts(run, records, included)
    epsilons = [_price(plan, count, rounds) for count in counts]
    largest = max(epsilons)
    return largest if math.isfinite(largest) else None


def _list_step_counts(
    run: AttackedRun, records: Records, included: Tensor
) -> set[StepCount | None]:
    """Return the different steps of a round that clients of these federations take."""
    training = training_of(run.config)
    counts: set[StepCount | None] = set()
    for member in records.members:
        is_own = records.client == member.id
        sizes = included[:, is_own].sum(1).unique().tolist() if is_own.any() else []
        for size in sizes:
            pool = member.train
            examples = Examples(pool.x, pool.y, pool.rows.new_zeros(size))
            smaller = replace(member, train=examples)
            counts.add(count_private_steps(smaller, run.algorithm, training))
        if not sizes:
            counts.add(count_private_steps(member, run.algorithm, training))
    return counts


def _price(plan: PrivacyPlan, count: StepCount | None, rounds: int) -> float:
    """Return what all rounds cost a client that takes these steps in each."""
    if plan.steps is not None and count is not None:
        plan = replace(plan, steps=replace(plan.steps, counts=[[count]]))
    return compute_epsilon(plan.price(0, 0, rounds, int(plan.sends_once)), plan.delta)


def is_promised(run: AttackedRun, attacker: str) -> bool:
    """Return whether the run's claim covers what this attacker sees.

    Single uploads are not covered where the server adds the noise and is trusted; a client's own
    model is covered only if its training is private.
    """
    plan: PrivacyPlan | None = run.algorithm.privacy
    if plan is None:
        return False
    if attacker == MODEL:
        return plan.steps is not None
    is_upload = THREATS[attacker].attacker == "server"
    only_steps = plan.steps is not None and not plan.per_round
    return only_steps or not (is_upload and plan.protection.at == "server")
