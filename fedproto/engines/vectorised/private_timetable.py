"""Tables of which client uses which record in which private step of a round.

The first axis of every table is over the m clients of a chunk. The order is that of the steps, each
padded to the largest batch that was drawn, b records.

rows, keep.*, crops, border, at, mask, lr, momentum  as in timetable.py, over steps·b places
key, number, steps  (m,)
has_step            (m, steps)  1 where the client takes a step, be it without records
expected            (m,)        the expected number of records of a step
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedproto.core import dropout, rng
from fedproto.core.batches import PRIVATE_PURPOSES, Training
from fedproto.core.local_training import algorithm_key
from fedproto.core.private_steps import expected_batch, sampling_rate
from fedproto.core.tensors import move_index
from fedproto.core.types import Tree
from fedproto.engines.vectorised.architecture_groups import ArchitectureGroup


def draw_private_tables(
    group: ArchitectureGroup,
    training: Training,
    round: int,
    positions: Tensor,
    done: Tensor,
    step_counts: Tensor,
) -> Tree:
    """Return the tables of one phase of a round.

    positions    (m,) the clients' positions in the architecture group
    done         (m,) how many steps of the round earlier phases have taken
    step_counts  (m,) how many steps this phase takes
    """
    device = group.device
    on_device = move_index(positions, device)
    keys = algorithm_key(group.seed[positions], round, group.number[positions])
    lengths = group.train.lengths.cpu()[positions].tolist()
    places = _draw_places(training, keys.tolist(), lengths, done.tolist(), step_counts.tolist())
    mask = (places >= 0).to(group.lr.dtype)
    places = places.clamp(min=0)
    clients, steps, batch = places.shape
    step_numbers = done[:, None] + torch.arange(steps)
    record_keys = rng.keys(
        group.seed[positions, None, None],
        PRIVATE_PURPOSES,
        round,
        group.number[positions, None, None],
        step_numbers[:, :, None],
        places,
    )
    augment_keys, dropout_keys = record_keys.flatten(2).to(device)
    flat_places = move_index(places.flatten(1), device)
    tree = {"rows": group.train.rows[on_device].gather(1, flat_places)}
    if group.border is not None:
        tree["crops"] = rng.uniform(augment_keys, 3)
        tree["border"] = group.border[on_device]
    for name, value in dropout.draw(group.dropped, dropout_keys, 1).items():
        tree[f"keep.{name}"] = value[:, :, 0]
    at = torch.arange(steps * batch, device=device).reshape(steps, batch)
    has_step = torch.arange(steps) < step_counts[:, None]
    expected = [expected_batch(training.batch, length) for length in lengths]
    return tree | {
        "at": at.expand(clients, -1, -1),
        "mask": mask.to(device),
        "has_step": has_step.to(group.lr),
        "expected": group.lr.new_tensor(expected),
        "lr": group.lr[on_device] * training.schedule.factor(round),
        "momentum": group.momentum[on_device],
        "key": move_index(keys, device),
        "number": group.number_on_device[on_device],
        "steps": move_index(step_counts, device),
    }


def _draw_places(
    training: Training,
    keys: list[int],
    lengths: list[int],
    done: list[int],
    step_counts: list[int],
) -> Tensor:
    """Return the places of the records of every step, −1 for padding: (m, steps, b)."""
    assert training.private is not None
    taken = []
    for client, length in enumerate(lengths):
        rate = sampling_rate(training.batch, length)
        drawn = training.private.draw_places(
            rate, length, step_counts[client], keys[client], done[client]
        )
        taken.append(drawn)
    most_steps = max(step_counts)
    largest = max(int(drawn.sum(1).max()) if len(drawn) else 0 for drawn in taken)
    places = torch.full((len(taken), most_steps, max(1, largest)), -1)
    for client, drawn in enumerate(taken):
        step, place = drawn.nonzero(as_tuple=True)
        in_batch = drawn.cumsum(1)[step, place] - 1
        places[client, step, in_batch] = place
    return places
