"""From checked settings to a federation: data, rows, models and starting prototypes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import AUTO, Config, resolve_auto
from fedproto.core.federation import Federation, Member
from fedproto.core.server import Progress
from fedproto.core.types import Algorithm
from fedproto.data import DataFolders, Source
from fedproto.data.shared.client_arrays import from_clients
from fedproto.errors import ConfigError
from fedproto.partitions import ClientRows
from fedproto.runs.assemble import assemble, deal, divide, options_from_data
from fedproto.runs.devices import device_of
from fedproto.runs.prototype_files import Prototypes, read_prototypes

FROM_PYTHON = Part(
    "python"
)  # stands in a configuration for arrays and modules that no file can name


def _federation(
    config: Config, algorithm: Algorithm, data: Any, modules: Any, loaded: dict[str, Source]
) -> tuple[Federation, Config]:
    """The federation a configuration describes, and the configuration with what was left open filled in."""
    sources, portions, config = (
        _given(data, config) if data is not None else _shared_out(config, loaded)
    )
    models, config = _models(modules, sources, algorithm, config)
    given = _given_prototypes(config)
    if given is not None and config.dim not in (None, given.values.shape[1]):
        raise ConfigError(
            f"dim is {config.dim}, but the prototypes have {given.values.shape[1]} values: leave it out"
        )
    federation = assemble(
        sources,
        portions,
        models,
        dim=given.values.shape[1] if given else config.dim,
        seed=config.seed,
        device=device_of(config.device),
        dtype=torch.float64 if config.precision == "float64" else torch.float32,
        start=config.start,
        known=given.classes if given else (),
        weights=Path(config.initial) if config.initial else None,
    )
    _refuse_mixed(federation, algorithm)
    _refuse_own_start(config.start, federation, algorithm)
    from_data = options_from_data(sources, config.partition)
    return replace(federation, from_data=from_data), config


def _given_prototypes(config: Config) -> Prototypes | None:
    return read_prototypes(Path(config.prototypes)) if config.prototypes is not None else None


def _start(config: Config, federation: Federation, algorithm: Algorithm) -> Progress:
    """Where a federation stands before its first round: at nothing, or at the prototypes it was given."""
    progress, given = Progress.start(federation, algorithm), _given_prototypes(config)
    if given is None:
        return progress
    if not {"prototypes", "known"} <= progress.server.keys():
        raise ConfigError(
            f"{algorithm.name} has no prototypes to start from: `prototypes` is for fedproto"
        )
    placed, like = given.over(federation.classes), progress.server["prototypes"]
    server = {"prototypes": placed.values.to(like), "known": placed.known.to(like)}
    progress.server |= server | ({"given": server["known"]} if "given" in progress.server else {})
    return progress


def _shared_out(
    config: Config, loaded: dict[str, Source]
) -> tuple[list[Source], list[ClientRows], Config]:
    """Each client's source and rows; a source that was loaded before is not read again."""
    sources = []
    for part in deal(config.dataset, config.clients, "dataset"):
        if str(part) not in loaded:
            loaded[str(part)] = plugins.build("dataset", part, DataFolders(config.data_dir))
        sources.append(loaded[str(part)])
    return sources, divide(sources, config.partition, config.seed), config


def _given(data: Sequence, config: Config) -> tuple[list[Source], list[ClientRows], Config]:
    """Each client's own arrays as a source of its own, all of whose rows it has."""
    sources = from_clients(data)
    whole = [
        ClientRows(np.arange(len(source.train.y)), np.arange(len(source.test.y)))
        for source in sources
    ]
    return (
        sources,
        whole,
        replace(config, dataset=(FROM_PYTHON,), partition=FROM_PYTHON, clients=len(sources)),
    )


def _models(
    modules: Any, sources: list[Source], algorithm: Algorithm, config: Config
) -> tuple[list[Part | nn.Module], Config]:
    """One model a client: those given, those configured, or those its data names."""
    if modules is not None:
        given = [modules] * len(sources) if isinstance(modules, nn.Module) else modules
        listed = isinstance(given, Sequence) and all(
            isinstance(module, nn.Module) for module in given
        )
        if not listed or len(given) != len(sources):
            raise ConfigError(
                f"model must be text, a module, or a list of {len(sources)} modules, one a client"
            )
        return list(given), replace(config, model=(FROM_PYTHON,))
    parts = _parts_of_models(sources, algorithm, config)
    return list(parts), replace(config, model=tuple(in_runs(parts)))


def _parts_of_models(sources: list[Source], algorithm: Algorithm, config: Config) -> list[Part]:
    parts = deal(config.model, len(sources), "model")
    waiting: dict[tuple[Source, str], list[int]] = {}
    for number, part in enumerate(parts):
        if part.name == AUTO:
            waiting.setdefault((sources[number], str(part)), []).append(number)
    for (source, _), numbers in waiting.items():
        name = source.mixed_model if algorithm.mixed else source.model
        resolved = deal(resolve_auto(parts[numbers[0]], name), len(numbers), "model")
        for number, part in zip(numbers, resolved, strict=True):
            parts[number] = part
    return parts


def in_runs(parts: list[Part]) -> list[Part]:
    """Equal neighbours as one part with a count, for the configuration file."""
    runs = [(part, len(list(equal))) for part, equal in itertools.groupby(parts)]
    return [runs[0][0]] if len(runs) == 1 else [replace(part, count=count) for part, count in runs]


def _refuse_mixed(federation: Federation, algorithm: Algorithm) -> None:
    """Weights can be averaged between equal architectures only."""
    first = federation.members[0]
    if not any(algorithm.shared(name) for name in first.initial):
        return
    for member in federation.members:
        if _architecture(member) != _architecture(first):
            one, other = (
                f"client {m.id} has {m.model} on {tuple(m.train.x.shape[1:])}"
                for m in (first, member)
            )
            raise ConfigError(
                f"{algorithm.name} averages weights, so all clients need one architecture, but {one} and {other}: "
                "use fedproto or local, or one model"
            )


def _refuse_own_start(start: str, federation: Federation, algorithm: Algorithm) -> None:
    """Refuse own initial weights where clients adopt the server's before their first step: they would do nothing.

    FedPer and FedRep are refused, too: only their personal layers would start apart.
    """
    travelling = [name for name in federation.members[0].initial if algorithm.shared(name)]
    if start == "own" and travelling:
        raise ConfigError(
            f"start=own has no meaning for {algorithm.name}: every client begins with the server's weights; "
            "leave start out, or use fedproto or local"
        )


def _architecture(member: Member) -> tuple[str, dict[str, torch.Size]]:
    """What two members' models must have in common to be averaged: how they are built, and of what shapes."""
    return repr(member.module), {name: value.shape for name, value in member.initial.items()}
