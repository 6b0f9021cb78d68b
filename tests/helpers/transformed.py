"""Uploads of one group, transformed and back, without a federation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedproto.algorithms import by_head, overwrite, receive_all, supervised
from fedproto.core.transform_chains import with_transforms
from fedproto.core.transforms import Transform
from fedproto.core.types import Algorithm, Batch, Group, GroupLayout, State, Step


def closing_step(received: State | None = None, key: Tensor | None = None) -> Step:
    """The step that an upload is made from, of a client that keeps no features."""
    empty = torch.empty(0)
    batch = Batch(empty, torch.zeros(0, dtype=torch.long), empty)
    key = torch.tensor(7) if key is None else key
    return Step({}, empty, empty, batch, received or {}, key=key)


def empty_algorithm(**fields) -> Algorithm:
    """An algorithm that does nothing, but for the given fields."""
    functions = {
        "init": lambda params, task: {},
        "declare": lambda params, task: {},
        "send": receive_all,
        "adopt": overwrite,
        "loss": supervised,
        "upload": lambda step: {},
        "aggregate": lambda server, uploads: server,
        "predict": by_head,
    }
    return Algorithm(name="empty", **(functions | fields))


def transformed(transforms: Sequence[Transform], layout: GroupLayout) -> Algorithm:
    """An algorithm whose uploads have one group, `own`, and are transformed."""
    return with_transforms(empty_algorithm(), transforms, {"own": layout})


def send(
    transforms: Sequence[Transform],
    layout: GroupLayout,
    group: Group,
    received: State | None = None,
    step: Step | None = None,
) -> Group:
    """What travels of a group."""
    algorithm = transformed(transforms, layout)
    assert algorithm.encode is not None
    return algorithm.encode({"own": group}, step or closing_step(received))["own"]


def round_trip(
    transforms: Sequence[Transform],
    layout: GroupLayout,
    group: Group,
    received: State | None = None,
) -> Group:
    """What arrives of a group."""
    algorithm = transformed(transforms, layout)
    assert algorithm.decode is not None
    wire = send(transforms, layout, group, received)
    return algorithm.decode({"own": wire}, received or {})["own"]
