"""The metrics that a run's setting `metric` names, tried before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core.measurement import METRICS, Metric, measure_predictions
from fedproto.errors import ConfigError

#: What stands beside metrics in result.json, and cannot be the name of one.
TAKEN_NAMES = (*METRICS, *measure_predictions([[1.0]], [0], ["a"]).describe(), "failures")


def choose_metrics(parts: Sequence[Part], classes: tuple[str, ...]) -> tuple[Metric, ...]:
    """Return the metrics that the settings name.

    Each is called with made-up rows, so that one that cannot work is refused before the training.
    """
    metrics: list[Metric] = []
    for part in parts:
        metric = _build_metric(part)
        if metric.name in (*TAKEN_NAMES, *(other.name for other in metrics)):
            raise ConfigError(f"metric {str(part)!r}: there is another metric named {metric.name}")
        _try_metric(metric, classes)
        metrics.append(metric)
    return tuple(metrics)


def _build_metric(part: Part) -> Metric:
    function = plugins.find("metric", part.name)

    def compute(probabilities: np.ndarray, y: np.ndarray, classes: tuple[str, ...]) -> float:
        return plugins.build("metric", part, probabilities, y, classes)

    lower_is_better = bool(getattr(function, "lower_is_better", False))
    return Metric(_name_metric(part), compute, lower_is_better)


def _name_metric(part: Part) -> str:
    """Return a metric's name: `log_loss`, or of a plug-in from outside `f_beta(beta=2)`."""
    text = plugins.short("metric", part)
    if plugins.is_outside("metric", part.name):
        module, _, _ = part.name.partition(":")
        return text.removeprefix(f"{module}:")
    return text.replace("-", "_")


def _try_metric(metric: Metric, classes: tuple[str, ...]) -> None:
    """Call a metric with two rows of each class; raise ConfigError if it fails."""
    y = np.arange(len(classes)).repeat(2)
    draws = np.random.default_rng(0).random((len(y), len(classes)))
    probabilities = draws / draws.sum(1, keepdims=True)
    measured = measure_predictions(probabilities, y, classes, [metric])
    if measured.failures:
        raise ConfigError(measured.failures[0])
