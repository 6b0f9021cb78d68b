"""Builds a federation: divides the data, builds the models, and puts each client together."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core import rng
from fedproto.core.dropout import Dropped, hand_in_dropout
from fedproto.core.federation import Examples, Federation, Member
from fedproto.core.types import Task, Tree
from fedproto.data import Source, Split
from fedproto.errors import ConfigError, DataError, FedProtoError
from fedproto.models import Fit, with_body
from fedproto.partitions import ClientRows, PartitionRequest
from fedproto.partitions.file import stamp
from fedproto.partitions.nway import fill_in


def deal(parts: Sequence[Part], clients: int, what: str) -> list[Part]:
    """One part a client: as many as each part's count says, or equal blocks where none has a count."""
    counts = [part.count for part in parts]
    if any(counts) and not all(counts):
        raise ConfigError(f"{what}: give each part a count, as in 'a*7,b*13', or none")
    if not all(counts):
        counts = [len(block) for block in np.array_split(np.arange(clients), len(parts))]
    if sum(counts) != clients:  # type: ignore[arg-type]
        raise ConfigError(
            f"the counts of {what} add up to {sum(counts)}, but there are {clients} clients"
        )  # type: ignore[arg-type]
    plain = [Part(part.name, part.options) for part in parts]
    return [part for part, count in zip(plain, counts, strict=True) for _ in range(count or 0)]


def _clients_of(sources: Sequence[Source]) -> dict[Source, list[int]]:
    """The numbers of each source's clients, in the order in which the sources first appear."""
    clients: dict[Source, list[int]] = {}
    for number, source in enumerate(sources):
        clients.setdefault(source, []).append(number)
    return clients


def divide(sources: Sequence[Source], partition: Part, seed: int) -> list[ClientRows]:
    """Each client's rows. The clients of one source are dealt from it together, so that they share no image."""
    result: dict[int, ClientRows] = {}
    marks = _marks(sources)
    for position, (source, clients) in enumerate(_clients_of(sources).items()):
        # Each source draws for itself: equal draws would give the clients of two sources the same classes.
        purpose = f"partition of source {position}" if position else "partition"
        pool = PartitionRequest(
            train=source.train.y,
            test=source.test.y,
            names=source.classes,
            clients=len(clients),
            shots=source.shots,
            generator=rng.generator(seed, purpose),
            source=marks[source],
            train_writer=source.train.writer,
            test_writer=source.test.writer,
        )
        portions = plugins.build("partition", partition, pool)
        if plugins.is_outside("partition", partition.name):
            portions = _checked_portions(portions, pool, f"partition {partition.name!r}")
        result.update(zip(clients, portions, strict=True))
    return [result[number] for number in range(len(sources))]


def _checked_portions(
    portions: Sequence[Any], pool: PartitionRequest, where: str
) -> list[ClientRows]:
    """The portions of a partition from outside, as arrays; refused where they are not rows of the pool."""
    if len(portions) != pool.clients:
        raise ConfigError(f"{where} returned {len(portions)} portions for {pool.clients} clients")
    taken = np.zeros(len(pool.train), bool)
    result = []
    for number, portion in enumerate(portions):
        try:
            train, test = (np.sort(np.asarray(rows)) for rows in portion)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{where}: client {number}'s portion must be (training rows, test rows)"
            ) from error
        for part, rows, labels in (("training", train, pool.train), ("test", test, pool.test)):
            _refuse_wrong_rows(rows, len(labels), f"{where}: client {number}'s {part} rows")
        if taken[train].any() or len(np.unique(train)) < len(train):
            raise ConfigError(
                f"{where} gives client {number} a training row twice, or one that another client has"
            )
        taken[train] = True
        result.append(ClientRows(train.astype(np.int64), test.astype(np.int64)))
    return result


def _refuse_wrong_rows(rows: np.ndarray, count: int, where: str) -> None:
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise ConfigError(f"{where} must be a list of whole numbers")
    if len(rows) and not (rows[0] >= 0 and rows[-1] < count):
        raise ConfigError(f"{where} must lie between 0 and {count - 1}")


def options_from_data(sources: Sequence[Source], partition: Part) -> dict[str, Any]:
    """The options of a partition that were left open, with the values that the data set gives them.

    Where several data sets give different values, one value is not the truth, and the option stays open.
    """
    if partition.name != "nway":
        return {}
    asked = {name: partition.options.get(name) for name in ("ways", "shots", "shots_stdev")}
    stdev = partition.options["stdev"]
    found = [
        fill_in(len(source.classes), source.shots, stdev=stdev, **asked)
        for source in dict.fromkeys(sources)
    ]
    agreed = {
        name: value
        for name, value in found[0].items()
        if all(each[name] == value for each in found)
    }
    return {name: value for name, value in agreed.items() if asked[name] is None}


def _marks(sources: Sequence[Source]) -> dict[Source, str]:
    """What tells the sources of a federation apart in a partition file: a fingerprint, numbered where two are equal."""
    marks: dict[Source, str] = {}
    for source in dict.fromkeys(sources):
        mark = fingerprint(source)
        equal = sum(other.startswith(mark) for other in marks.values())
        marks[source] = f"{mark}-{equal + 1}" if equal else mark
    return marks


def fingerprint(source: Source) -> str:
    """Tells data sets apart by class names and labels, so that a partition is not used on the wrong one."""
    digest = hashlib.sha256("\n".join(source.classes).encode())
    for split in (source.train, source.test):
        digest.update(np.ascontiguousarray(split.y, np.int64).tobytes())
    return digest.hexdigest()[:16]


def assemble(
    sources: Sequence[Source],
    portions: Sequence[ClientRows],
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
    """The federation of clients given by their source, rows and model, in order.

    `known` are classes that somebody else already has; they come first. `weights` are a file's, for all bodies.
    """
    names = tuple(dict.fromkeys((*known, *(name for source in sources for name in source.classes))))
    trains = _examples(sources, [p.train for p in portions], "train", names, device, dtype)
    tests = _examples(sources, [p.test for p in portions], "test", names, device, dtype)
    modules = _Modules(dim, len(names), seed, device, dtype, start, weights)
    members = []
    for number, (source, train, test, model) in enumerate(
        zip(sources, trains, tests, models, strict=True)
    ):
        for part, examples in (("training", train), ("test", test)):
            if not len(examples):
                raise DataError(f"client {number} has no {part} image in {source.name}")
        module, dropped, initial = modules.get(model, train, number)
        classes = tuple(train.y[train.rows].unique().tolist())
        border = _border(source, device, dtype) if source.augment else None
        name = _model_name(model)
        prepared = source.preprocessing
        members.append(
            Member(
                number,
                source.name,
                name,
                module,
                dropped,
                initial,
                classes,
                train,
                test,
                prepared,
                border,
            )
        )
    partition = _partition(sources, portions, names, members)
    task = Task(len(names), modules.agreed_dim(members), len(members), seed)
    return Federation(names, tuple(members), task, partition)


def _examples(
    sources: Sequence[Source],
    rows: Sequence[np.ndarray],
    part: str,
    names: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> list[Examples]:
    """For each client its examples; one pool of tensors a source, holding just the rows that somebody uses."""
    result: dict[int, Examples] = {}
    for source, clients in _clients_of(sources).items():
        split: Split = getattr(source, part)
        used = np.unique(np.concatenate([rows[client] for client in clients]))
        to_federation = torch.tensor([names.index(name) for name in source.classes])
        x = source.tensor(split, used)
        if x.numel() and not torch.isfinite(torch.stack(x.aminmax())).all():
            raise DataError(
                f"{source.name} has inputs that are not finite once mean and std are applied to them"
            )
        x = x.to(device, dtype)
        y = to_federation[torch.from_numpy(split.y[used])].to(device)
        for client in clients:
            position = np.searchsorted(used, rows[client])
            result[client] = Examples(x, y, torch.from_numpy(position).to(device))
    return [result[number] for number in range(len(sources))]


def _border(source: Source, device: torch.device, dtype: torch.dtype) -> Tensor:
    return (-torch.tensor(source.mean) / torch.tensor(source.std)).to(device, dtype)


def _model_name(model: Part | nn.Module) -> str:
    return plugins.short("model", model) if isinstance(model, Part) else type(model).__name__


def _partition(
    sources: Sequence[Source],
    portions: Sequence[ClientRows],
    names: tuple[str, ...],
    members: Sequence[Member],
) -> dict[str, Any]:
    """The content of partition.json: who has what, and a hash over it."""
    marks = _marks(sources)
    clients = [
        {
            "dataset": source.name,
            "labels": marks[source],
            "classes": [names[label] for label in member.classes],
            "train": portion.train.tolist(),
            "test": portion.test.tolist(),
        }
        for source, portion, member in zip(sources, portions, members, strict=True)
    ]
    content = {"version": 1, "clients": clients}
    return content | {"sha256": stamp(content)}


def state_of(module: nn.Module) -> Tree:
    """The module's parameters and buffers, by name; of a layer that is there twice, under its first name."""
    first = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return {
        name: value.detach().clone() for name, value in module.state_dict().items() if name in first
    }


def _separate(parent: nn.Module, seen: set[int]) -> None:
    """A layer that is there twice becomes two layers with the same parameters.

    `functional_call` would put back its parameters twice, the second time the ones it had put in.
    """
    for name, child in list(parent._modules.items()):
        if child is None:
            continue
        if id(child) in seen:
            child = _twin(child)
            setattr(parent, name, child)
        seen.add(id(child))
        _separate(child, seen)


def _twin(layer: nn.Module) -> nn.Module:
    twin = copy.copy(layer)
    for name in ("_parameters", "_buffers", "_modules"):
        vars(twin)[name] = dict(vars(layer)[name])
    return twin


def draw_model(model: Part, fit: Fit, seed: int, *client: int) -> nn.Module:
    """The model with its initial weights: those of its architecture, or a client's own."""
    with rng.preserve_torch_generators(torch.device("cpu")):
        torch.manual_seed(int(rng.key(seed, "initial weights", *client)))
        try:
            return plugins.build("model", model, fit)
        except FedProtoError:
            raise
        except (
            Exception
        ) as error:  # a layer larger than the memory, or whatever a model from outside may raise
            lines = str(error).splitlines() or [type(error).__name__]
            raise ConfigError(f"model {model} cannot be built: {lines[0]}") from error


@contextmanager
def _model_errors(client: int, what: str) -> Iterator[None]:
    """One sentence for whatever a model may raise."""
    try:
        yield
    except FedProtoError:
        raise
    except Exception as error:
        raise ConfigError(
            f"client {client}'s model {what}: {type(error).__name__}: {error}"
        ) from error


class _Modules:
    """Builds each architecture once: its clients share the module and, unless `start` is own, its initial weights."""

    def __init__(
        self,
        dim: int | None,
        classes: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        start: str,
        weights: Path | None,
    ) -> None:
        self.dim, self.classes, self.seed, self.device, self.dtype = (
            dim,
            classes,
            seed,
            device,
            dtype,
        )
        self.start, self.weights = start, weights
        self.built: dict[Any, tuple[nn.Module, tuple[Dropped, ...], Tree]] = {}
        self.dims: dict[nn.Module, int] = {}

    def get(
        self, model: Part | nn.Module, examples: Examples, client: int
    ) -> tuple[nn.Module, tuple[Dropped, ...], Tree]:
        shape = tuple(examples.x.shape[1:])
        name = (str(model) if isinstance(model, Part) else id(model), shape)
        if name not in self.built:
            # A copy: the user's own module keeps its type, its device and its mode.
            module = self._build(model, shape) if isinstance(model, Part) else copy.deepcopy(model)
            module = module.to(self.device, self.dtype)
            _separate(module, set())
            dim = self._probe(module, examples, client)
            initial = self._initial(module)
            with _model_errors(client, "cannot be trained"):
                module, dropped = hand_in_dropout(module, examples.x[examples.rows[:1]])
            self.dims[module] = dim
            self.built[name] = module, dropped, initial
        if self.start == "own" and isinstance(model, Part):
            return *self.built[name][:2], self._initial(
                self._build(model, shape, client).to(self.device, self.dtype)
            )
        return self.built[name]

    def _initial(self, module: nn.Module) -> Tree:
        return with_body(state_of(module), self.weights) if self.weights else state_of(module)

    def _build(self, model: Part, shape: tuple[int, ...], *client: int) -> nn.Module:
        return draw_model(model, Fit(shape, self.classes, self.dim), self.seed, *client)

    def _probe(self, module: nn.Module, examples: Examples, client: int) -> int:
        """The size of the module's embedding, once it is known to keep the contract."""
        try:
            with torch.no_grad():
                features, logits = module.eval()(examples.x[examples.rows[:2]])
            (rows, dim), (same_rows, classes) = features.shape, logits.shape
            if not rows == same_rows == min(2, len(examples)):
                raise ValueError(
                    f"{rows} and {same_rows} rows came back for {min(2, len(examples))} samples"
                )
            if not (features.is_floating_point() and logits.is_floating_point()):
                raise TypeError(f"features are {features.dtype} and logits {logits.dtype}")
        except Exception as error:
            shape = tuple(examples.x.shape[1:])
            raise ConfigError(
                f"client {client}'s model must take a batch of inputs of shape {shape} and return "
                f"(features, logits), a row a sample: {error}"
            ) from error
        if classes != self.classes:
            raise ConfigError(
                f"client {client}'s model gives {classes} logits for {self.classes} classes"
            )
        return dim

    def agreed_dim(self, members: Sequence[Member]) -> int:
        first = self.dims[members[0].module]
        for member in members:
            own = self.dims[member.module]
            if self.dim is not None and own != self.dim:
                raise ConfigError(
                    f"dim is {self.dim}, but client {member.id}'s {member.model} embeds in {own} values: "
                    "a model of your own projects to `dim` itself"
                )
            if own != first:
                raise ConfigError(
                    f"client 0's {members[0].model} embeds in {first} values but client {member.id}'s {member.model} "
                    f"in {own}: set dim, and models project to it"
                )
        return first
