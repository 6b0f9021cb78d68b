"""From checked settings to a federation: data, rows, models and starting prototypes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedproto.config import plugins
from fedproto.config.choices import AUTO, PYTHON, has_own_data, resolve_auto
from fedproto.config.options import Part, options_of
from fedproto.config.settings import Config
from fedproto.core.architectures import describe_shared, name_architectures
from fedproto.core.client_names import client_name, refuse_equal_names
from fedproto.core.closed_form import TEACHER
from fedproto.core.federation import Federation, Member
from fedproto.core.server import Progress
from fedproto.core.types import Algorithm
from fedproto.data import Source
from fedproto.data.shared.client_arrays import from_clients
from fedproto.data.shared.python_data import is_per_client, to_source
from fedproto.errors import ConfigError
from fedproto.partitions import ClientRows
from fedproto.runs.assemble import assemble, deal, divide, options_from_data
from fedproto.runs.chosen_metrics import choose_metrics
from fedproto.runs.data_notices import describe_single_rows
from fedproto.runs.devices import device_of, torch_settings
from fedproto.runs.fixed_features import add_fixed_features, build_map
from fedproto.runs.frozen_bodies import freeze_bodies
from fedproto.runs.own_data import load_source, settle_clients, settle_partition
from fedproto.runs.prototype_files import Prototypes, read_prototypes
from fedproto.runs.row_counts import count_rows
from fedproto.runs.validation_rows import refuse_leaking_groups, set_validation_apart

#: Stands in a configuration for arrays and modules that no file can name.
FROM_PYTHON = Part(PYTHON)


def build_federation(
    config: Config,
    algorithm: Algorithm,
    data: Any,
    modules: Any,
    loaded: dict[str, Source],
    names: Sequence[str] | None = None,
) -> tuple[Federation, Config]:
    """Return the federation that a configuration describes, and the completed configuration.

    The configuration is completed by what the data decides: models and a partition instead of
    `auto`, and the number of clients.

    Args:
        config: the settings.
        algorithm: the algorithm of the settings.
        data: what a Python program holds instead of a named data set, or None.
        modules: a module or one per client from Python, or None.
        loaded: the sources read so far, by name; new ones are added.
        names: what the clients are called, where neither settings nor data say it.
    """
    if data is not None:
        config = replace(config, dataset=(_keep_given_options(config.dataset[0]),))
    if data is not None and not is_per_client(data):
        (part,) = config.dataset
        loaded = {str(part): to_source(data, part.options)}
        data = None
    if data is None:
        config = settle_clients(config, loaded)
        sources = _load_sources(config, loaded)
        config = replace(config, partition=settle_partition(config.partition, sources))
        rows = divide(sources, config.partition, config.seed)
    else:
        names, listed = _split_names(data)
        sources = from_clients(listed, names, config.dataset[0].options)
        rows = [_all_rows(source) for source in sources]
        config = replace(config, partition=FROM_PYTHON, clients=len(sources))
    if names is not None:
        rows = [each._replace(name=name) for each, name in zip(rows, names, strict=True)]
    rows = set_validation_apart(sources, rows, config.validation, config.seed)
    refuse_leaking_groups(sources, rows)
    models: list[Part | nn.Module]
    if modules is None:
        parts = _choose_models(sources, algorithm, config)
        models = list(parts)
        config = replace(config, model=tuple(merge_equal_neighbours(parts)))
    else:
        models = _list_modules(modules, len(sources))
        config = replace(config, model=(FROM_PYTHON,))
    dim = config.dim
    known_classes: tuple[str, ...] = ()
    given = _read_given_prototypes(config)
    if given is not None:
        dim = given.values.shape[1]
        known_classes = given.classes
    is_double = config.precision == "float64"
    federation = assemble(
        sources,
        rows,
        models,
        dim=dim,
        seed=config.seed,
        device=device_of(config.device),
        dtype=torch.float64 if is_double else torch.float32,
        start=config.start,
        known=known_classes,
        weights=None if config.initial is None else Path(config.initial),
    )
    federation = _tell_architectures_apart(federation, algorithm)
    _refuse_own_start(config.start, federation, algorithm)
    _refuse_no_validation(federation, algorithm)
    if algorithm.uses_fixed:
        feature_map = build_map(config.feature_map)
        with torch_settings(config.threads, config.precision):
            federation = add_fixed_features(federation, feature_map)
    if config.freeze == "body":
        with torch_settings(config.threads, config.precision):
            federation = freeze_bodies(federation)
    from_data = options_from_data(sources, config.partition)
    metrics = choose_metrics(config.metric, federation.classes)
    notices = federation.notices
    if has_own_data(config.dataset):
        notices = (*notices, *describe_single_rows(sources))
    federation = replace(
        federation,
        from_data=from_data,
        metrics=metrics,
        rows=count_rows(sources, rows),
        notices=notices,
    )
    return federation, config


def start_progress(config: Config, federation: Federation, algorithm: Algorithm) -> Progress:
    """Return the progress before the first round, with the given prototypes if there are any.

    Classes of the federation that have no given prototype start without one.
    """
    progress = Progress.start(federation, algorithm)
    given = _read_given_prototypes(config)
    if given is None:
        return progress
    if not {"prototypes", "known"} <= progress.server.keys():
        raise ConfigError(
            f"{algorithm.name} has no prototypes to start from: `prototypes` is for fedproto"
        )
    placed = given.over(federation.classes)
    like = progress.server["prototypes"]
    progress.server["prototypes"] = placed.values.to(like)
    progress.server["known"] = placed.known.to(like)
    if "given" in progress.server:
        progress.server["given"] = progress.server["known"]
    return progress


def _read_given_prototypes(config: Config) -> Prototypes | None:
    """Read the prototypes that the settings name, and refuse another `dim` beside them."""
    if config.prototypes is None:
        return None
    given = read_prototypes(Path(config.prototypes))
    dim = given.values.shape[1]
    if config.dim not in (None, dim):
        raise ConfigError(
            f"dim is {config.dim}, but the prototypes have {dim} values: leave it out"
        )
    return given


# --- data


def _keep_given_options(part: Part) -> Part:
    """Return the part of data from Python with those options that are not the defaults."""
    given = {}
    for name, option in options_of(plugins.find("dataset", PYTHON)).items():
        if part.name == PYTHON and part.options.get(name, option.default) != option.default:
            given[name] = part.options[name]
    return Part(PYTHON, given)


def _load_sources(config: Config, loaded: dict[str, Source]) -> list[Source]:
    """Return each client's source; one that was loaded before is not read again."""
    assert config.clients is not None
    parts = deal(config.dataset, config.clients, "dataset")
    return [load_source(part, config.data_dir, loaded) for part in parts]


def _split_names(data: Any) -> tuple[list[str] | None, Sequence]:
    """Return the clients' names, where a mapping gives them, and what each client gave."""
    if not isinstance(data, Mapping):
        return None, data
    names = [client_name(str(name), "the data has a client") for name in data]
    refuse_equal_names(names)
    return names, list(data.values())


def _all_rows(source: Source) -> ClientRows:
    """Return the rows of a source that belongs to one client."""
    train_rows = np.arange(len(source.train.y))
    test_rows = np.arange(len(source.test.y))
    return ClientRows(train_rows, test_rows)


# --- models


def _list_modules(modules: Any, clients: int) -> list[Part | nn.Module]:
    """Return one module per client: the one given for all, or those of a list."""
    listed = [modules] * clients if isinstance(modules, nn.Module) else modules
    is_list = isinstance(listed, Sequence) and len(listed) == clients
    if not is_list or not all(isinstance(module, nn.Module) for module in listed):
        raise ConfigError(
            f"model must be text, a module, or a list of {clients} modules, one per client "
            f"(clients is {clients})"
        )
    return list(listed)


def _choose_models(sources: list[Source], algorithm: Algorithm, config: Config) -> list[Part]:
    """Return one model per client; `auto` becomes the model that the client's data set names.

    A data set may name a mix of models, which is dealt to all its clients with the same `auto`.
    """
    parts = deal(config.model, len(sources), "model")
    clients_of_auto: dict[tuple[Source, str], list[int]] = {}
    for client, part in enumerate(parts):
        if part.name == AUTO:
            choice = (sources[client], str(part))
            clients_of_auto.setdefault(choice, []).append(client)
    for (source, _), clients in clients_of_auto.items():
        name = source.mixed_model if algorithm.mixed else source.model
        if source.adaptive_model and config.optimiser != "sgd" and not algorithm.mixed:
            name = source.adaptive_model
        candidates = resolve_auto(parts[clients[0]], name)
        resolved = deal(candidates, len(clients), "model")
        for client, part in zip(clients, resolved, strict=True):
            parts[client] = part
    return parts


def merge_equal_neighbours(parts: list[Part]) -> list[Part]:
    """Write equal neighbours as one part with a count, for the configuration file."""
    merged = []
    for part, neighbours in itertools.groupby(parts):
        count = len(list(neighbours))
        if count == len(parts):
            return [part]  # one for all needs no count
        merged.append(replace(part, count=count))
    return merged


# --- architectures, and what cannot be combined


def _tell_architectures_apart(federation: Federation, algorithm: Algorithm) -> Federation:
    """Return a federation whose members know their architecture, if there are several.

    Clients have one architecture if they agree in the parts of the model, such as the body, of
    which anything travels. If nothing does, no architectures are told apart.
    """
    groups: list[list[Member]] = []
    is_anything_shared = False
    for member in federation.members:
        is_anything_shared = is_anything_shared or any(map(algorithm.shared, member.initial))
        group = _find_architecture(groups, member, algorithm)
        group.append(member)
    if len(groups) == 1 or not is_anything_shared:
        return federation
    members = list(federation.members)
    names = name_architectures(group[0].model for group in groups)
    for name, group in zip(names, groups, strict=True):
        for member in group:
            members[member.id] = replace(member, architecture=name)
    federation = replace(federation, members=members)
    if set(algorithm.common) - {TEACHER}:  # it is made for several architectures
        return federation
    counts = [f"{len(group)} of {name}" for name, group in zip(names, groups, strict=True)]
    notice = (
        f"{algorithm.name} shares weights within each of {len(groups)} architectures: "
        f"{', '.join(counts)} clients"
    )
    return replace(federation, notices=(*federation.notices, notice))


def _find_architecture(
    groups: list[list[Member]], member: Member, algorithm: Algorithm
) -> list[Member]:
    """Return the clients of a client's architecture; if there are none, append a new group."""
    wanted = describe_shared(member.module, member.initial, algorithm.shared)
    for group in groups:
        first = group[0]
        if describe_shared(first.module, first.initial, algorithm.shared) == wanted:
            return group
    groups.append([])
    return groups[-1]


def _refuse_own_start(start: str, federation: Federation, algorithm: Algorithm) -> None:
    """Refuse own initial weights that would be replaced by the server's before the first step.

    FedPer and FedRep are refused, too: only their personal layers would start apart.
    """
    names = federation.members[0].initial
    has_shared_weights = any(algorithm.shared(name) for name in names)
    if start == "own" and has_shared_weights:
        raise ConfigError(
            f"start=own has no meaning for {algorithm.name}: every client begins with the "
            "server's weights; leave start out, or use fedproto or local"
        )


def _refuse_no_validation(federation: Federation, algorithm: Algorithm) -> None:
    """Refuse an algorithm whose clients adopt as they choose on validation rows, without any."""
    chooses = algorithm.client_adopt is not None and algorithm.client_validate is not None
    if chooses and not federation.has_validation:
        raise ConfigError(
            f"the clients of {algorithm.name} choose on validation rows how to adopt what they "
            "receive, but there are none: set validation, such as 0.2"
        )
