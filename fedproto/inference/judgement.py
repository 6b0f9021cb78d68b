"""From scores to answers: a class name per input, or "none of these"."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedproto.core.closed_form import TEACHER
from fedproto.errors import ConfigError, DataError
from fedproto.inference.calibration import (
    can_reject,
    compute_novelty,
    compute_threshold,
    explain_too_few_rows,
)
from fedproto.inference.trained_client import TrainedClient
from fedproto.inference.ways import ALL_WAYS

NONE_OF_THESE = "none of these"


class Judgement(NamedTuple):
    """What a classifier says about n inputs; columns are in the order of the candidates."""

    labels: np.ndarray  # (n,) class names, or "none of these"
    probabilities: np.ndarray  # (n, candidates); calibrated if the client has a temperature
    distances: np.ndarray  # (n, candidates); by head or both, minus the scores


def judge_inputs(
    trained: TrainedClient, x: Tensor, by: str, among: str, reject: float | None = None
) -> tuple[tuple[str, ...], Judgement]:
    """Return the candidates, and what a trained client says about preprocessed inputs.

    `reject` is the fraction of known inputs that may be called "none of these"; None: none is.
    """
    names = find_candidates(trained, by, among)
    calibration = trained.calibration.get(f"{by} {among}", np.zeros(0))
    threshold = find_threshold(calibration, reject, name_client(trained))
    scores = trained.score(by, among, trained.forward(x))
    temperature = trained.temperatures.get(f"{by} {among}", 1.0)
    return names, judge_scores(scores, np.array(names), by, threshold, temperature)


def judge_scores(
    scores: Tensor,
    names: np.ndarray,
    by: str,
    threshold: float | None,
    temperature: float = 1.0,
) -> Judgement:
    """Return the answers for (n, candidates) scores; without a threshold, nothing is rejected.

    Probabilities are the softmax of scores / temperature.
    """
    probabilities = (scores.double() / temperature).softmax(1).numpy()
    labels = names[scores.argmax(1).numpy()]
    if threshold is not None:
        is_rejected = compute_novelty(by, scores) > threshold
        labels = labels.astype(object)
        labels[is_rejected.numpy()] = NONE_OF_THESE
    return Judgement(labels, probabilities, -scores.numpy())


def find_candidates(trained: TrainedClient, by: str, among: str) -> tuple[str, ...]:
    """Return the classes to choose among; refused if there is none."""
    if f"{by} {among}" not in ALL_WAYS:
        raise ConfigError(
            "by is prototype, head, both, teacher, or one of the first three with +teacher, and "
            f"among is all or own, not {by!r} and {among!r}"
        )
    names = trained.candidates(by, among)
    if not names:
        if by == TEACHER:
            raise DataError(
                "the teacher knows none of the classes to choose among: classify among all"
            )
        raise DataError(
            "none of the classes to choose among has a prototype: classify among all, or by head"
        )
    return names


def find_threshold(calibration: np.ndarray, reject: float | None, who: str) -> float | None:
    """Return the novelty above which an input is rejected; None if `reject` is None.

    Refused if so few rows were held out that a threshold could reject nothing; `who` names the
    client in that sentence.
    """
    if reject is None:
        return None
    if not 0 <= reject <= 1:
        raise ConfigError(f"reject is a fraction from 0 to 1, not {reject}")
    if not len(calibration):
        raise DataError(
            "no rows were held out to calibrate `reject` on: classify without it, or fit on samples"
        )
    if not can_reject(calibration, reject):
        raise DataError(explain_too_few_rows(who, len(calibration), reject))
    return compute_threshold(calibration, reject)


def name_client(trained: TrainedClient) -> str:
    """Return a client's name for a sentence."""
    number = trained.about.get("client", "of this folder")
    return f"client {trained.about.get('name', number)}"
