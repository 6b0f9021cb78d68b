"""Clients of one architecture, from all federations of a run: their data, settings and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedproto.core.batches import Training, steps_per_epoch
from fedproto.core.class_balance import balanced_weights, count_classes
from fedproto.core.dropout import Dropped
from fedproto.core.engine import Shard, errors_named
from fedproto.core.federation import EvaluatedPart, Examples, Federation, Member
from fedproto.core.local_training import start_client
from fedproto.core.types import Algorithm, Tree
from fedproto.engines.vectorised.state_store import Place, Store

#: Attributes that every module has, such as hooks, children and parameters.
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class GroupedClient(NamedTuple):
    """A client, and the position of its federation in the run's list."""

    federation: int
    member: Member


class Data(NamedTuple):
    """A pool of inputs, and the rows of it that each client has."""

    x: Tensor
    y: Tensor
    rows: Tensor  # (clients, longest), padded with zeros
    lengths: Tensor  # (clients,)
    fixed: Tensor | None = None  # the pool's features by the run's feature map, if it has one


@dataclass
class ArchitectureGroup:
    """Clients whose modules differ in nothing but their values, and have inputs of one shape."""

    model: str
    module: nn.Module
    dropped: tuple[Dropped, ...]
    federation: Tensor  # (clients,) on the CPU: the position of the client's federation
    number: Tensor  # (clients,) on the CPU: the client's number in its federation
    seed: Tensor  # (clients,) on the CPU
    lr: Tensor
    momentum: Tensor
    per_epoch: Tensor  # (clients,) on the CPU: steps per epoch
    own: Tensor  # (clients, C) 1 where the client has the class
    border: Tensor | None  # (clients, channels)
    train: Data
    test: Data
    states: Store
    validation: Data | None = None  # None: the federations have no validation
    class_weights: Tensor | None = None  # (clients, C) of a sample in the loss; None: all equal
    architecture: str = ""  # as the algorithm names it, if it tells architectures apart

    def __len__(self) -> int:
        return len(self.number)

    def data_of(self, part: EvaluatedPart) -> Data:
        """Return the rows that the clients are evaluated on."""
        if part == "test":
            return self.test
        assert self.validation is not None, "the federations have no validation rows"
        return self.validation

    @cached_property
    def number_on_device(self) -> Tensor:
        """(clients,) the client's number in its federation, on the device."""
        return self.number.to(self.device)

    @property
    def device(self) -> torch.device:
        """The device that the data is on."""
        return self.train.x.device


def build_groups(
    federations: Sequence[Federation],
    algorithm: Algorithm,
    trainings: Sequence[Training],
    place: Place,
    shard: Shard,
) -> list[ArchitectureGroup]:
    """Return the architecture groups of the shard's clients.

    Within a group, clients stay in the order of their federations and numbers.
    """
    groups = group_by_architecture(federations, shard)
    return [build_group(clients, federations, algorithm, trainings, place) for clients in groups]


def group_by_architecture(
    federations: Sequence[Federation], shard: Shard
) -> list[list[GroupedClient]]:
    """Return the shard's clients of all federations, grouped by architecture."""
    groups: list[list[GroupedClient]] = []
    for number, federation in enumerate(federations):
        for member in federation.members:
            if shard.holds(member.id):
                group = _find_group(groups, member)
                group.append(GroupedClient(number, member))
    return groups


def _find_group(groups: list[list[GroupedClient]], member: Member) -> list[GroupedClient]:
    """Return the group that a client belongs to; if there is none, append a new one."""
    for group in groups:
        if can_share_stack(group[0].member, member):
            return group
    groups.append([])
    return groups[-1]


def can_share_stack(a: Member, b: Member) -> bool:
    """Return whether two clients can be trained in one stack.

    Their modules may differ in nothing but their values, and their inputs have the same shape.
    """
    if a.train.x.shape[1:] != b.train.x.shape[1:]:
        return False
    if (a.border is None) != (b.border is None) or a.architecture != b.architecture:
        return False
    return a.module is b.module or _describe_module(a.module) == _describe_module(b.module)


def _describe_module(module: nn.Module) -> list[Any]:
    """Return everything that decides what a module computes, except the values of its state.

    Two modules with equal descriptions can be run as one, with the state of either.
    """
    state = module.state_dict()
    parts: list[Any] = []
    for name, value in state.items():
        parts.append((name, value.shape, value.dtype))
    for name, parameter in module.named_parameters():
        parts.append((name, parameter.requires_grad))
    for name, buffer in module.named_buffers():
        if name not in state:
            parts.append((name, buffer.tolist()))
    for name, layer in module.named_modules():
        parts.append((name, type(layer)))
        parts += _describe_settings(layer)
    return parts


def _describe_settings(layer: nn.Module) -> list[Any]:
    """Return a layer's settings and hooks; objects of other types equal only themselves."""
    attributes = vars(layer)
    plain_settings = {}
    identities = []
    for name, value in attributes.items():
        if name in _TORCH_ATTRIBUTES:
            continue
        if isinstance(value, (int, float, str, tuple, type(None))):
            plain_settings[name] = value
        else:
            identities.append(id(value))
    for kind in _HOOKS:
        identities += [id(hook) for hook in attributes[kind].values()]
    return [plain_settings, *identities]


def build_group(
    clients: Sequence[GroupedClient],
    federations: Sequence[Federation],
    algorithm: Algorithm,
    trainings: Sequence[Training],
    place: Place,
) -> ArchitectureGroup:
    """Return the architecture group of clients that can share a stack."""
    members = [client.member for client in clients]
    client_trainings = [trainings[client.federation] for client in clients]
    first = members[0]
    like = next(value for value in first.initial.values() if value.is_floating_point())
    own_classes = []
    per_epoch = []
    for client, training in zip(clients, client_trainings, strict=True):
        federation = federations[client.federation]
        own_classes.append(federation.own_classes[client.member.id])
        per_epoch.append(steps_per_epoch(client.member, training))
    borders = [member.border for member in members if member.border is not None]
    initial_states = _start_clients(clients, federations, algorithm)
    federation_numbers = [client.federation for client in clients]
    client_numbers = [member.id for member in members]
    seeds = [training.seed for training in client_trainings]
    learning_rates = [training.lr for training in client_trainings]
    momenta = [training.momentum for training in client_trainings]
    training_data = [member.train for member in members]
    test_data = [member.test for member in members]
    validation_data = [member.validation for member in members if member.validation is not None]
    train = _pool(training_data)
    class_weights = None
    if client_trainings[0].class_weights == "balanced":
        class_weights = _weigh_classes(train, len(own_classes[0]), like.dtype)
    return ArchitectureGroup(
        model=first.model,
        module=first.module,
        dropped=first.dropped,
        federation=torch.tensor(federation_numbers),
        number=torch.tensor(client_numbers),
        seed=torch.tensor(seeds),
        lr=like.new_tensor(learning_rates),
        momentum=like.new_tensor(momenta),
        per_epoch=torch.tensor(per_epoch),
        own=torch.stack(own_classes).to(like.dtype),
        border=torch.stack(borders) if borders else None,
        train=train,
        test=_pool(test_data),
        states=Store(initial_states, federations[0].device, place),
        validation=_pool(validation_data) if validation_data else None,
        class_weights=class_weights,
        architecture=first.architecture,
    )


def _start_clients(
    clients: Sequence[GroupedClient], federations: Sequence[Federation], algorithm: Algorithm
) -> list[Tree]:
    """Return the clients' whole states before round 1."""
    states = []
    for client in clients:
        task = federations[client.federation].task
        with errors_named(f"algorithm {algorithm.name}, before round 1"):
            states.append(start_client(algorithm, client.member.initial, task))
    return states


def _weigh_classes(data: Data, classes: int, dtype: torch.dtype) -> Tensor:
    """Return the weights of the clients' classes, by how rare a class is with a client."""
    places = torch.arange(data.rows.shape[1], device=data.rows.device)
    inside = places < data.lengths[:, None]
    counts = count_classes(data.y[data.rows], inside, classes)
    return balanced_weights(counts, dtype)


def _pool(examples: Sequence[Examples]) -> Data:
    """Return the clients' examples as rows of one pool.

    Inputs of several sources or federations are concatenated.
    """
    sources = {id(each.x): each for each in examples}
    starts = {}
    end = 0
    for key, source in sources.items():
        starts[key] = end
        end += len(source.x)
    lengths = torch.tensor([len(each) for each in examples], device=examples[0].x.device)
    rows = [each.rows + starts[id(each.x)] for each in examples]
    padded_rows = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    if len(sources) == 1:
        (only,) = sources.values()
        return Data(only.x, only.y, padded_rows, lengths, only.fixed)
    x = torch.cat([source.x for source in sources.values()])
    y = torch.cat([source.y for source in sources.values()])
    fixed = [source.fixed for source in sources.values() if source.fixed is not None]
    return Data(x, y, padded_rows, lengths, torch.cat(fixed) if fixed else None)
