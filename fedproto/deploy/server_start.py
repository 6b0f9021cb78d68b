"""The server's state before the first round, and what a member's upload looks like."""

from __future__ import annotations

import torch

from fedproto.config.choices import complete, parse_choice
from fedproto.config.options import PositiveInt, convert
from fedproto.core.types import Algorithm, Batch, Step, Task, Tree, nothing
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.deploy.validation import UploadLayout, describe_upload
from fedproto.errors import ConfigError
from fedproto.models import Fit
from fedproto.runs.client_modules import copy_state, draw_model


def start_server(
    algorithm: Algorithm, terms: TrainingTerms, settings: ServerSettings, classes: tuple[str, ...]
) -> tuple[Tree, UploadLayout]:
    """Return the server's state before the first round, and the layout of an upload.

    Raises ConfigError if the settings say too little, or if the algorithm sends nothing.
    """
    sends_prototypes = algorithm.shared is nothing
    if sends_prototypes:
        if not terms.dim:
            raise ConfigError(
                "dim, the number of values of a prototype, must be set: "
                "the server does not take it from a member"
            )
        task = Task(max(1, len(classes)), terms.dim, 1, terms.seed)
        params = {"any": torch.zeros(1)}
    else:
        task = Task(len(classes), terms.dim, 1, terms.seed)
        params = _draw_weights(terms, settings, len(classes))
    server = algorithm.init(params, task)
    layout = _try_upload(algorithm, server, params, task)
    if "known" in server:  # there may be no classes yet, where the task has one
        server = {name: value[: len(classes)] for name, value in server.items()}
    return server, layout


def _try_upload(algorithm: Algorithm, server: Tree, params: Tree, task: Task) -> UploadLayout:
    """Return the layout of an upload, found with one sample of zeros."""
    features = torch.zeros(1, task.dim)
    batch = Batch(torch.empty(0), torch.zeros(1, dtype=torch.long), torch.ones(1))
    received = algorithm.send(server, torch.ones(task.classes))
    upload = algorithm.upload(Step(params, features, features, batch, received))
    if not upload.sums:
        raise ConfigError(f"{algorithm.name} sends nothing, so there is nothing to deploy")
    return describe_upload(upload)


def _draw_weights(terms: TrainingTerms, settings: ServerSettings, classes: int) -> Tree:
    """Return the initial weights, which all members draw as well, where weights travel."""
    if not settings.model or not settings.shape:
        raise ConfigError(
            f"{terms.algorithm} averages weights: the server needs `model` and `shape`, "
            "such as '1,28,28'"
        )
    model = complete("model", parse_choice("model", settings.model), {}, {})
    shape = tuple(convert("shape", settings.shape, tuple[PositiveInt, ...]))
    fit = Fit(shape, classes, terms.dim or None)
    return copy_state(draw_model(model, fit, terms.seed))
