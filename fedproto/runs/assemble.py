"""Builds a federation: divides the data among the clients and puts each client together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core import rng
from fedproto.core.client_names import client_name, refuse_equal_names
from fedproto.core.federation import Examples, Federation, Member
from fedproto.core.types import Task
from fedproto.data import Source, Split
from fedproto.data.shared.feature_encoding import Words
from fedproto.errors import ConfigError, DataError
from fedproto.models.shared.wrap import Wrapped
from fedproto.partitions import ClientRows, PartitionRequest
from fedproto.partitions.file import hash_partition
from fedproto.partitions.nway import fill_in
from fedproto.runs.client_modules import ModuleBuilder

PARTITION_VERSION = 1  # of the format of partition.json


# --- choices and sources per client


def deal(parts: Sequence[Part], clients: int, what: str) -> list[Part]:
    """Return one part per client, in order.

    Args:
        parts: the choices, such as those of `cnn*7,mlp*13`; either all have a count or none has.
            Without counts the clients are divided into equal blocks.
        clients: the number of clients, which the counts must add up to.
        what: the setting, for errors.
    """
    counts = [part.count for part in parts if part.count is not None]
    if counts and len(counts) < len(parts):
        raise ConfigError(f"{what}: give each part a count, as in 'a*7,b*13', or none")
    if not counts:
        counts = [len(block) for block in np.array_split(np.arange(clients), len(parts))]
    if sum(counts) != clients:
        raise ConfigError(
            f"the counts of {what} add up to {sum(counts)}, but there are {clients} clients"
        )
    dealt: list[Part] = []
    for part, count in zip(parts, counts, strict=True):
        dealt += [Part(part.name, part.options)] * count
    return dealt


def _clients_by_source(sources: Sequence[Source]) -> dict[Source, list[int]]:
    """Return the numbers of each source's clients; the sources in the order they first appear."""
    clients: dict[Source, list[int]] = {}
    for number, source in enumerate(sources):
        clients.setdefault(source, []).append(number)
    return clients


# --- dividing the data


def divide(sources: Sequence[Source], partition: Part, seed: int) -> list[ClientRows]:
    """Return each client's rows of its source.

    The rows of one source are divided among all its clients at once, so that they share no
    training row. Each source draws for itself; the first draws what it draws alone.

    Args:
        sources: one per client.
        partition: the choice of a partition with its options.
        seed: of the run.
    """
    rows_by_client: dict[int, ClientRows] = {}
    fingerprints = _fingerprints(sources)
    for position, (source, clients) in enumerate(_clients_by_source(sources).items()):
        # Equal draws would give the clients of two sources the same classes.
        purpose = f"partition of source {position}" if position else "partition"
        request = PartitionRequest(
            train=source.train.y,
            test=source.test.y,
            names=source.classes,
            clients=len(clients),
            shots=source.shots,
            generator=rng.generator(seed, purpose),
            source=fingerprints[source],
            train_writer=source.train.writer,
            test_writer=source.test.writer,
            validation=None if source.validation is None else source.validation.y,
            train_group=source.train.group,
        )
        divided = plugins.build("partition", partition, request)
        if plugins.is_outside("partition", partition.name):
            divided = _check_outside_partition(divided, request, f"partition {partition.name!r}")
        rows_by_client.update(zip(clients, divided, strict=True))
    return [rows_by_client[number] for number in range(len(sources))]


def _check_outside_partition(
    divided: Sequence[Any], request: PartitionRequest, where: str
) -> list[ClientRows]:
    """Return the rows of a partition from outside as sorted arrays, or refuse them.

    Every client needs rows that exist, and no training row may be dealt twice.
    """
    if len(divided) != request.clients:
        raise ConfigError(f"{where} returned {len(divided)} portions for {request.clients} clients")
    is_taken = np.zeros(len(request.train), bool)
    checked = []
    for client, portion in enumerate(divided):
        name = None
        if isinstance(portion, ClientRows) and portion.name is not None:
            name = client_name(portion.name, f"{where}: client {client} has the name")
        try:
            pair = portion[:2] if isinstance(portion, ClientRows) else portion
            train, test = (np.sort(np.asarray(rows)) for rows in pair)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{where}: client {client}'s portion must be (training rows, test rows)"
            ) from error
        _refuse_wrong_rows(train, len(request.train), f"{where}: client {client}'s training rows")
        _refuse_wrong_rows(test, len(request.test), f"{where}: client {client}'s test rows")
        if is_taken[train].any() or len(np.unique(train)) < len(train):
            raise ConfigError(
                f"{where} gives client {client} a training row twice, or one that another client "
                "has"
            )
        is_taken[train] = True
        checked.append(ClientRows(train.astype(np.int64), test.astype(np.int64), name=name))
    return checked


def _refuse_wrong_rows(rows: np.ndarray, count: int, where: str) -> None:
    """Refuse what is not a sorted list of numbers of rows."""
    is_empty = rows.size == 0  # then numpy cannot know its type
    has_whole_numbers = is_empty or rows.dtype.kind in "iu"
    if rows.ndim != 1 or not has_whole_numbers:
        raise ConfigError(f"{where} must be a list of whole numbers")
    if not is_empty and (rows[0] < 0 or rows[-1] >= count):
        raise ConfigError(f"{where} must lie between 0 and {count - 1}")


def options_from_data(sources: Sequence[Source], partition: Part) -> dict[str, Any]:
    """Return the partition's options that were left open, with the values the data gives them.

    An option stays open where several data sets give it different values.
    """
    if partition.name != "nway":
        return {}
    asked = {name: partition.options.get(name) for name in ("ways", "shots", "shots_stdev")}
    stdev = partition.options["stdev"]
    filled_in = [
        fill_in(len(source.classes), source.shots, stdev=stdev, **asked)
        for source in dict.fromkeys(sources)
    ]
    agreed = {}
    for name, value in filled_in[0].items():
        all_agree = all(other[name] == value for other in filled_in)
        if all_agree and asked[name] is None:
            agreed[name] = value
    return agreed


def _fingerprints(sources: Sequence[Source]) -> dict[Source, str]:
    """Return what tells a federation's sources apart in a partition file.

    It is a hash of the source's classes and labels, with a number where two sources have the same.
    """
    fingerprints: dict[Source, str] = {}
    for source in dict.fromkeys(sources):
        fingerprint = hash_labels(source)
        equal = sum(other.startswith(fingerprint) for other in fingerprints.values())
        fingerprints[source] = f"{fingerprint}-{equal + 1}" if equal else fingerprint
    return fingerprints


def hash_labels(source: Source) -> str:
    """Hash class names and labels, so that a partition is not used on the wrong data set."""
    class_names = "\n".join(source.classes)
    digest = hashlib.sha256(class_names.encode())
    for split in (source.train, source.test, source.validation):
        if split is None:
            continue
        labels = np.ascontiguousarray(split.y, np.int64)
        digest.update(labels.tobytes())
    return digest.hexdigest()[:16]


# --- putting the clients together


def assemble(
    sources: Sequence[Source],
    rows: Sequence[ClientRows],
    models: Sequence[Part | nn.Module],
    *,
    dim: int | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    start: str = "shared",
    known: tuple[str, ...] = (),
    weights: Path | None = None,
) -> Federation:
    """Return the federation of clients given by their source, rows and model, in order.

    Args:
        sources, rows, models: one per client.
        dim: the size of all embeddings; None: that of the models, which must agree.
        start: whether clients of one architecture start from `shared` or from `own` weights.
        known: classes that the federation already has; they come first.
        weights: a file with the weights of all models' bodies.
    """
    rows = _distinguish_names(sources, rows)
    names_of_clients = _name_clients(rows)
    names = _class_names(sources, known)
    train_rows = [client_rows.train for client_rows in rows]
    test_rows = [client_rows.test for client_rows in rows]
    trains = _load_examples(sources, train_rows, "train", names, device, dtype)
    tests = _load_examples(sources, test_rows, "test", names, device, dtype)
    validations: list[Examples] | None = None
    validation_rows = [each.validation for each in rows if each.validation is not None]
    if validation_rows:
        validations = _load_examples(sources, validation_rows, "validation", names, device, dtype)
    builder = ModuleBuilder(dim, len(names), seed, device, dtype, start, weights)
    members = []
    for number, source in enumerate(sources):
        train = trains[number]
        test = tests[number]
        model = models[number]
        client = f"client {names_of_clients[number]}"
        _refuse_empty(train, f"{client} has no training row in {source.name}")
        _refuse_empty(test, f"{client} has no test row in {source.name}")
        _refuse_foreign_words(source, model, client)
        module, dropped, initial = builder.build(model, train, number, names_of_clients[number])
        own_labels = train.y[train.rows].unique()
        border = None
        if source.augment:
            border = _normalised_black(source, device, dtype)
        member = Member(
            id=number,
            dataset=source.name,
            model=_model_name(model),
            module=module,
            dropped=dropped,
            initial=initial,
            classes=tuple(own_labels.tolist()),
            train=train,
            test=test,
            preprocessing=source.preprocessing,
            border=border,
            validation=None if validations is None else validations[number],
            name=names_of_clients[number],
            place=source.train.place,
        )
        members.append(member)
    partition = _describe_partition(sources, rows, names, members)
    task = Task(len(names), builder.agree_on_dim(members), len(members), seed)
    notices: dict[str, None] = {}
    for source in dict.fromkeys(sources):
        notices |= dict.fromkeys(source.notices)
    return Federation(names, tuple(members), task, partition, notices=tuple(notices))


def _name_clients(rows: Sequence[ClientRows]) -> list[str]:
    """Return what each client is called: as its rows say, or by its number."""
    names = []
    for number, client_rows in enumerate(rows):
        names.append(str(number) if client_rows.name is None else client_rows.name)
    refuse_equal_names(names)
    return names


def _distinguish_names(
    sources: Sequence[Source], rows: Sequence[ClientRows]
) -> Sequence[ClientRows]:
    """Return the rows with names that tell the clients of several sources apart.

    Nobody knows whether the `Ulm` of one data set is the `Ulm` of another: the second source's
    becomes `Ulm (2)`. Clients of one source keep their names, even if two are equal.
    """
    numbers = {source: number for number, source in enumerate(dict.fromkeys(sources), 1)}
    first_source: dict[str, Source] = {}
    distinguished = []
    for source, client_rows in zip(sources, rows, strict=True):
        name = client_rows.name
        if name is not None and first_source.setdefault(name, source) is not source:
            client_rows = client_rows._replace(name=f"{name} ({numbers[source]})")
        distinguished.append(client_rows)
    return distinguished


def _class_names(sources: Sequence[Source], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return all classes once: the known ones, then those of the sources in order."""
    names = dict.fromkeys(known)
    for source in dict.fromkeys(sources):
        names.update(dict.fromkeys(source.classes))
    return tuple(names)


def _load_examples(
    sources: Sequence[Source],
    rows: Sequence[np.ndarray],
    part: str,
    names: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> list[Examples]:
    """Return each client's examples of one part of its source: train, test or validation.

    The clients of one source share a pool of tensors, which holds just the rows that are used. A
    source without a validation set has validation rows among its training rows.
    """
    examples: dict[int, Examples] = {}
    for source, clients in _clients_by_source(sources).items():
        split: Split = getattr(source, part) or source.train
        used_rows = np.unique(np.concatenate([rows[client] for client in clients]))
        x = source.tensor(split, used_rows)
        _refuse_infinite(x, source)
        x = x.to(device, dtype)
        source_labels = torch.from_numpy(split.y[used_rows])
        federation_labels = torch.tensor([names.index(name) for name in source.classes])
        y = federation_labels[source_labels].to(device)
        for client in clients:
            positions = torch.from_numpy(np.searchsorted(used_rows, rows[client]))
            examples[client] = Examples(x, y, positions.to(device))
    return [examples[number] for number in range(len(sources))]


def _refuse_infinite(x: Tensor, source: Source) -> None:
    """Refuse inputs of which one is infinite or not a number."""
    if x.numel() == 0:
        return
    extremes = torch.stack(x.aminmax())
    if not torch.isfinite(extremes).all():
        raise DataError(
            f"{source.name} has inputs that are not finite once mean and std are applied to them"
        )


def _refuse_foreign_words(source: Source, model: Part | nn.Module, client: str) -> None:
    """Refuse texts as ranks of words for a model that was trained with token numbers of its own."""
    is_trained = isinstance(model, Part) and model.options.get("pretrained", False)
    if is_trained and isinstance(source.encoding, Words):
        raise ConfigError(
            f"{client}'s words are numbered by {source.name}, but {model} was trained with the "
            "numbers of its own tokenizer: pass these in an npz file, or set pretrained=false"
        )


def _refuse_empty(examples: Examples, sentence: str) -> None:
    if len(examples) == 0:
        raise DataError(sentence)


def _normalised_black(source: Source, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the value of a black pixel per channel, which pads random crops."""
    mean = torch.tensor(source.mean)
    std = torch.tensor(source.std)
    return (-mean / std).to(device, dtype)


def _model_name(model: Part | nn.Module) -> str:
    """Return a model's name with the options that are not the defaults, or a module's class."""
    if isinstance(model, Part):
        return plugins.short("model", model)
    return model.name if isinstance(model, Wrapped) else type(model).__name__


def _describe_partition(
    sources: Sequence[Source],
    rows: Sequence[ClientRows],
    names: tuple[str, ...],
    members: Sequence[Member],
) -> dict[str, Any]:
    """Return the content of partition.json: the rows of each client, and a hash over all.

    With it, `partition = "file:..."` deals the same rows again.
    """
    fingerprints = _fingerprints(sources)
    clients = []
    for source, client_rows, member in zip(sources, rows, members, strict=True):
        client = {
            "dataset": source.name,
            "labels": fingerprints[source],
            "classes": [names[label] for label in member.classes],
            "train": client_rows.train.tolist(),
            "test": client_rows.test.tolist(),
        }
        if client_rows.validation is not None:
            client["validation"] = client_rows.validation.tolist()
        if client_rows.name is not None:
            client["name"] = client_rows.name
        clients.append(client)
    content = {"version": PARTITION_VERSION, "clients": clients}
    return content | {"sha256": hash_partition(content)}
