"""What the clients of a stack receive from the servers of their federations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from fedproto.core.tensors import flatten_state, move_index, unflatten_state
from fedproto.core.types import OVER_RECIPIENTS, Algorithm, Recipient, State, Tree
from fedproto.engines.vectorised.architecture_groups import ArchitectureGroup

#: Values of the servers' states that are copied, one state per client, to send all at once: 256 MB.
MAX_COPIED_VALUES = 2**26


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
    flat_servers = [flatten_state(server) for server in servers]
    if not _can_be_copied(flat_servers, len(positions)):
        return _send_apart(algorithm, servers, group.federation[positions], recipients)
    federations = move_index(group.federation[positions], group.device)
    server_of_each = {}
    for name in flat_servers[0]:
        values = torch.stack([server[name] for server in flat_servers]).to(group.device)
        server_of_each[name] = values[federations]
    send_to_all = vmap(algorithm.send, in_dims=(0, OVER_RECIPIENTS))
    return send_to_all(unflatten_state(server_of_each), recipients)


def _can_be_copied(servers: Sequence[Tree], clients: int) -> bool:
    """Return whether a state per client is small enough, and all servers' have the same shapes.

    A server that keeps something for each client has as many rows as its federation has clients.
    """
    shapes = [{name: value.shape for name, value in server.items()} for server in servers]
    values_of_one = sum(value.numel() for value in servers[0].values())
    are_alike = all(shape == shapes[0] for shape in shapes)
    return are_alike and values_of_one * clients <= MAX_COPIED_VALUES


def _send_apart(
    algorithm: Algorithm, servers: Sequence[State], federations: Tensor, recipients: Recipient
) -> State:
    """Return what clients receive, one federation after the other, so that no state is copied.

    federations  (m,) the number of each client's federation
    """
    send_to_all = vmap(algorithm.send, in_dims=(None, OVER_RECIPIENTS))
    received = []
    places = []
    for federation in federations.unique().tolist():
        rows = (federations == federation).nonzero().flatten()
        on_device = move_index(rows, recipients.number.device)
        some = Recipient(
            recipients.number[on_device],
            recipients.classes[on_device],
            recipients.architecture,
            recipients.heard[on_device],
        )
        received.append(send_to_all(servers[federation], some))
        places.append(on_device)
    return _join_rows(received, torch.cat(places).argsort())


def _join_rows(parts: Sequence[State], order: Tensor) -> State:
    """Return the rows of several states, one after the other, in an order."""
    joined: State = {}
    for name, value in parts[0].items():
        values = [part[name] for part in parts]
        is_tree = isinstance(value, dict)
        joined[name] = _join_rows(values, order) if is_tree else torch.cat(values)[order]
    return joined
