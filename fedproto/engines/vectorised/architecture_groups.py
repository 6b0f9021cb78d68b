"""Clients of one architecture, of all federations of a run, as stacks: their data, settings and states."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedproto.core.dropout import Dropped
from fedproto.core.engine import Shard
from fedproto.core.federation import Examples, Federation, Member
from fedproto.core.local_training import Training, steps_per_epoch
from fedproto.core.tensors import move_index
from fedproto.core.types import Tree
from fedproto.errors import ConfigError

Place = Literal["auto", "device", "host", "disk"]


class Data(NamedTuple):
    """Rows of a pool of inputs, a line a client, padded with zeros to the longest."""

    x: Tensor
    y: Tensor
    rows: Tensor  # (clients, longest)
    lengths: Tensor  # (clients,)


@dataclass
class ArchitectureGroup:
    model: str
    module: nn.Module
    dropped: tuple[Dropped, ...]
    federation: Tensor  # (clients,) on the CPU: which of the run's federations each belongs to
    number: Tensor  # (clients,) on the CPU: its number there
    seed: Tensor  # (clients,) on the CPU
    lr: Tensor
    momentum: Tensor
    per_epoch: Tensor  # (clients,) on the CPU: batches an epoch
    own: Tensor  # (clients, C) 1 where the client holds the class
    border: Tensor | None  # (clients, channels)
    train: Data
    test: Data
    states: Store

    def __len__(self) -> int:
        return len(self.number)

    @property
    def device(self) -> torch.device:
        return self.train.x.device


def build_groups(
    federations: Sequence[Federation], trainings: Sequence[Training], place: Place, shard: Shard
) -> list[ArchitectureGroup]:
    """The shard's members of all federations as architecture groups; the order of federations and clients stays."""
    return [
        build_group(group, federations, trainings, place) for group in grouped(federations, shard)
    ]


def grouped(federations: Sequence[Federation], shard: Shard) -> list[list[tuple[int, Member]]]:
    """The shard's members, with the numbers of their federations, by architecture."""
    groups: list[list[tuple[int, Member]]] = []
    for number, federation in enumerate(federations):
        for member in filter(lambda member: shard.holds(member.id), federation.members):
            for group in groups:
                if alike(group[0][1], member):
                    group.append((number, member))
                    break
            else:
                groups.append([(number, member)])
    return groups


def alike(a: Member, b: Member) -> bool:
    """Whether two members can be trained in one stack: equal modules but for their values, and inputs of one shape."""
    return (
        a.train.x.shape[1:] == b.train.x.shape[1:]
        and (a.border is None) == (b.border is None)
        and (a.module is b.module or _blueprint(a.module) == _blueprint(b.module))
    )


_KEPT_BY_TORCH = set(vars(nn.Module()))  # hooks, children, parameters: what every module has
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _blueprint(module: nn.Module) -> list[Any]:
    """All that makes a module do what it does, but for the values of its parameters and buffers that are its state."""
    state = module.state_dict()
    parts: list[Any] = [(name, value.shape, value.dtype) for name, value in state.items()]
    parts += [(name, value.requires_grad) for name, value in module.named_parameters()]
    parts += [(name, value.tolist()) for name, value in module.named_buffers() if name not in state]
    for name, layer in module.named_modules():
        settings = {key: value for key, value in vars(layer).items() if key not in _KEPT_BY_TORCH}
        parts.append(
            (name, type(layer), {key: value for key, value in settings.items() if _is_plain(value)})
        )
        parts += [
            id(value) for value in settings.values() if not _is_plain(value)
        ]  # equal only to itself
        parts += [id(hook) for key in _HOOKS for hook in vars(layer)[key].values()]
    return parts


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, tuple, type(None)))


def build_group(
    group: list[tuple[int, Member]],
    federations: Sequence[Federation],
    trainings: Sequence[Training],
    place: Place,
) -> ArchitectureGroup:
    members = [member for _, member in group]
    trained = [trainings[number] for number, _ in group]
    first, device = members[0], federations[0].device
    like = next(value for value in first.initial.values() if value.is_floating_point())
    borders = [member.border for member in members if member.border is not None]
    own = torch.stack([federations[number].own_classes[member.id] for number, member in group])
    return ArchitectureGroup(
        model=first.model,
        module=first.module,
        dropped=first.dropped,
        federation=torch.tensor([number for number, _ in group]),
        number=torch.tensor([member.id for member in members]),
        seed=torch.tensor([training.seed for training in trained]),
        lr=like.new_tensor([training.lr for training in trained]),
        momentum=like.new_tensor([training.momentum for training in trained]),
        per_epoch=torch.tensor(
            [steps_per_epoch(m, t) for m, t in zip(members, trained, strict=True)]
        ),
        own=own.to(like.dtype),
        border=torch.stack(borders) if borders else None,
        train=_data([member.train for member in members]),
        test=_data([member.test for member in members]),
        states=Store([member.initial for member in members], device, place),
    )


def _data(examples: Sequence[Examples]) -> Data:
    """One pool for all: those of several sources or federations one after the other."""
    pools = {id(each.x): each for each in examples}
    starts, end = {}, 0
    for key, pool in pools.items():
        starts[key], end = end, end + len(pool.x)
    lengths = torch.tensor([len(each) for each in examples], device=examples[0].x.device)
    rows = nn.utils.rnn.pad_sequence(
        [each.rows + starts[id(each.x)] for each in examples], batch_first=True
    )
    first = next(iter(pools.values()))
    if len(pools) == 1:
        return Data(first.x, first.y, rows, lengths)
    return Data(
        torch.cat([p.x for p in pools.values()]),
        torch.cat([p.y for p in pools.values()]),
        rows,
        lengths,
    )


class Store:
    """The clients' states, a line a client: on the device, or, where they do not fit, in host memory or on disk."""

    SPARE = 0.75  # of the free memory; the rest is for training

    def __init__(
        self, initial: Sequence[Tree], device: torch.device, place: Place = "auto"
    ) -> None:
        self.device = device
        bytes_needed = len(initial) * sum(value.nbytes for value in initial[0].values())
        self.place = _place(bytes_needed, device) if place == "auto" else place
        self.values = {name: self._room(value, len(initial)) for name, value in initial[0].items()}
        for name, rows in self.values.items():
            if all(state[name] is initial[0][name] for state in initial):
                rows[:] = initial[0][name].to(rows.device)
            else:
                for row, state in zip(rows, initial, strict=True):
                    row.copy_(state[name])

    def _room(self, like: Tensor, clients: int) -> Tensor:
        shape = (clients, *like.shape)
        if self.place == "device":
            return torch.empty(shape, dtype=like.dtype, device=self.device)
        if self.place == "host":
            return torch.empty(shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")
        with tempfile.NamedTemporaryFile(
            prefix="fedproto-states-"
        ) as file:  # the mapping outlives the name
            size = clients * like.numel()
            _reserve(file.fileno(), size * like.element_size())
            return torch.from_file(file.name, shared=True, size=size, dtype=like.dtype).reshape(
                shape
            )

    def take(self, who: Tensor) -> Tree:
        """The states of some clients, on the device."""
        return {
            name: value[move_index(who, value.device)].to(self.device, non_blocking=True)
            for name, value in self.values.items()
        }

    def put(self, who: Tensor, tree: Tree) -> None:
        for name, value in self.values.items():
            value.index_copy_(0, move_index(who, value.device), tree[name].to(value.device))


def _reserve(file: int, size: int) -> None:
    """Room on the disk, now: a mapping that finds none later kills the process without a word."""
    try:
        os.posix_fallocate(file, 0, max(1, size))
    except OSError as error:
        where = tempfile.gettempdir()
        raise ConfigError(
            f"the clients' models need {size / 1e9:.1f} GB, more than memory holds, and {where} has no room for them "
            f"({error.strerror}): set TMPDIR to a larger disk, or train fewer clients"
        ) from error


def free_memory(device: torch.device) -> int | None:
    """The bytes that are free on a GPU now; None for a CPU, where the caches decide how much is done at a time."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _place(needed: int, device: torch.device) -> Place:
    """The nearest place with room."""
    if device.type == "cuda" and needed < Store.SPARE * (free_memory(device) or 0):
        return "device"
    if needed < Store.SPARE * _free_host_memory():
        return "host" if device.type == "cuda" else "device"
    return "disk"


def _free_host_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # no Linux: trust that there is enough
        return 2**62
