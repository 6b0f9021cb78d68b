"""How well a run's members tell what they never saw: measured on test images that nothing was calibrated on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedproto.core.federation import Member
from fedproto.inference.trained_client import (
    Trained,
    can_reject,
    halves,
    members_of,
    novelty,
    scores_of,
    threshold,
)
from fedproto.runs.devices import torch_settings

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rejection:
    """One client and one way to classify, such as "prototype own"."""

    client: int
    way: str
    accuracy: float  # among known images, by this way
    known_rejected: float | None  # should be near what was asked for; None where it cannot reject
    unseen_rejected: (
        float | None
    )  # images of classes the client never saw; None where it cannot reject
    auroc: float  # the chance that an unseen image looks newer than a known one
    calibrated_on: int  # held-out images: fewer than `trained.rows_needed` cannot reject


def rejections(run: Path, reject: float, clients: list[int] | None = None) -> list[Rejection]:
    """For the members of a run, or some of them, each way to classify; those with nothing unseen are left out.

    A client whose calibration is too small to reject that share is there, with None for what it would reject.
    """
    experiment, makers = members_of(run, clients or [])
    chosen = range(len(makers)) if clients is None else clients
    members = experiment.federation.members
    with torch_settings(experiment.config.threads, experiment.config.precision):
        return [
            found
            for client in chosen
            for found in _of_member(members[client], makers[client](), reject)
        ]


def _of_member(member: Member, trained: Trained, reject: float) -> list[Rejection]:
    known, unseen = halves(member)[1], _unseen(member)
    if not len(known) or not len(unseen):
        return []
    seen = trained.see_prepared(known.x[known.rows])
    strange = trained.see_prepared(member.test.x[unseen])
    names = np.array(trained.classes)[known.y[known.rows].cpu().numpy()]
    return [
        _judged(member.id, way, trained, seen, strange, names, reject)
        for way in trained.calibration
    ]


def _unseen(member: Member) -> Tensor:
    """The test images at hand, which are of classes that some client has, of which this one has none."""
    own = torch.tensor(member.classes, device=member.test.y.device)
    return (~torch.isin(member.test.y, own)).nonzero().flatten()


def _judged(
    client: int,
    way: str,
    trained: Trained,
    seen: Pair,
    strange: Pair,
    names: np.ndarray,
    reject: float,
) -> Rejection:
    by, among = way.split()
    scores = scores_of(by, among, trained, seen)
    old, new = (
        novelty(by, scores).numpy(),
        novelty(by, scores_of(by, among, trained, strange)).numpy(),
    )
    candidates = np.array(trained.names(by, among))
    calibration = trained.calibration[way]
    limit = threshold(calibration, reject) if can_reject(calibration, reject) else None
    return Rejection(
        client=client,
        way=way,
        accuracy=float((candidates[scores.argmax(1).numpy()] == names).mean()),
        known_rejected=None if limit is None else float((old > limit).mean()),
        unseen_rejected=None if limit is None else float((new > limit).mean()),
        auroc=float(roc_auc_score(np.r_[np.zeros(len(old)), np.ones(len(new))], np.r_[old, new])),
        calibrated_on=len(calibration),
    )
