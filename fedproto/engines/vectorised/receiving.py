"""What the clients of a stack receive from the servers of their federations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from fedproto.core.tensors import flatten_state, move_index, unflatten_state
from fedproto.core.types import OVER_RECIPIENTS, Algorithm, Recipient, State
from fedproto.engines.vectorised.architecture_groups import ArchitectureGroup


def send_own_classes(
    algorithm: Algorithm,
    servers: Sequence[State],
    group: ArchitectureGroup,
    positions: Tensor,
    heard: Tensor | None = None,
) -> State:
    """Return what clients receive for training, with a leading axis over these clients.

    servers    the states of the federations' servers
    positions  (m,) the clients' positions in the group
    heard      (m,) see `types.Recipient`; None: nobody was heard
    """
    on_device = move_index(positions, group.device)
    number = group.number_on_device[on_device]
    last_heard = torch.zeros_like(number)
    if heard is not None:
        last_heard = move_index(heard, group.device)
    recipients = Recipient(number, group.own[on_device], group.architecture, last_heard)
    return _send(algorithm, servers, group, positions, recipients)


def send_all_classes(
    algorithm: Algorithm, servers: Sequence[State], group: ArchitectureGroup, positions: Tensor
) -> State:
    """Return what clients receive for evaluation, which is over all classes."""
    on_device = move_index(positions, group.device)
    all_classes = torch.ones_like(group.own[on_device])
    number = group.number_on_device[on_device]
    never = torch.zeros_like(number)
    recipients = Recipient(number, all_classes, group.architecture, never)
    return _send(algorithm, servers, group, positions, recipients)


def _send(
    algorithm: Algorithm,
    servers: Sequence[State],
    group: ArchitectureGroup,
    positions: Tensor,
    recipients: Recipient,
) -> State:
    if len(servers) == 1:  # what all clients receive is not copied for each of them
        return vmap(algorithm.send, in_dims=(None, OVER_RECIPIENTS))(servers[0], recipients)
    federations = move_index(group.federation[positions], group.device)
    flat_servers = [flatten_state(server) for server in servers]
    server_of_each = {}
    for name in flat_servers[0]:
        values = torch.stack([server[name] for server in flat_servers]).to(group.device)
        server_of_each[name] = values[federations]
    send_to_all = vmap(algorithm.send, in_dims=(0, OVER_RECIPIENTS))
    return send_to_all(unflatten_state(server_of_each), recipients)
