"""How well a run's clients reject inputs of classes that they never saw.

This is measured on test rows that nothing was calibrated on, whose outputs the run folder holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score

from fedproto.inference.calibration import can_reject, compute_novelty, compute_threshold
from fedproto.inference.trained_client import ClassScorer, make_scorer
from fedproto.runs.devices import torch_settings
from fedproto.runs.folder import RunFolder
from fedproto.runs.stored_clients import ClientModels, StoredClient


@dataclass(frozen=True)
class Rejection:
    """How one client rejects by one way to classify, such as "prototype own"."""

    client: int
    name: str  # of the client
    way: str
    accuracy: float  # on known rows, by this way
    known_rejected: float | None  # should be near what was asked for; None if it cannot reject
    unseen_rejected: float | None  # rows of classes the client never saw; None likewise
    auroc: float  # the probability that an unseen row is more novel than a known one
    calibrated_on: int  # held-out rows: fewer than `count_rows_needed` cannot reject


def measure_rejections(
    run: Path, reject: float, clients: Sequence[int | str] | None = None
) -> list[Rejection]:
    """Return a `Rejection` per client (all, or some of them) and way to classify.

    `reject` is the fraction of known rows that may be rejected. Clients without unseen rows are
    left out. A client whose calibration is too small has None for what it would reject.
    """
    models = ClientModels.open(RunFolder.open(run))
    chosen = range(len(models)) if clients is None else clients
    found = []
    with torch_settings(models.threads, models.precision):
        for client in chosen:
            stored = models.read(client)
            found += _measure_client(stored, make_scorer(models, stored), reject)
    return found


def _measure_client(stored: StoredClient, scorer: ClassScorer, reject: float) -> list[Rejection]:
    """Return a client's `Rejection` per way to classify; none if it has no unseen rows."""
    held_out = stored.held_out
    if not len(held_out.known.features) or not len(held_out.unseen.features):
        return []
    calibrations = scorer.calibrate(held_out.calibration)
    labels = np.array(scorer.classes)[held_out.known_labels.numpy()]
    found = []
    for way, calibration in calibrations.items():
        by, among = way.split()
        known_scores = scorer.score(by, among, held_out.known)
        unseen_scores = scorer.score(by, among, held_out.unseen)
        predicted = np.array(scorer.candidates(by, among))[known_scores.argmax(1).numpy()]
        known = compute_novelty(by, known_scores).numpy()
        unseen = compute_novelty(by, unseen_scores).numpy()
        known_rejected = None
        unseen_rejected = None
        if can_reject(calibration, reject):
            threshold = compute_threshold(calibration, reject)
            known_rejected = float((known > threshold).mean())
            unseen_rejected = float((unseen > threshold).mean())
        is_unseen = np.concatenate([np.zeros(len(known)), np.ones(len(unseen))])
        found.append(
            Rejection(
                client=stored.id,
                name=stored.name,
                way=way,
                accuracy=float((predicted == labels).mean()),
                known_rejected=known_rejected,
                unseen_rejected=unseen_rejected,
                auroc=float(roc_auc_score(is_unseen, np.concatenate([known, unseen]))),
                calibrated_on=len(calibration),
            )
        )
    return found
