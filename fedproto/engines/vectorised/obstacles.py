"""Why the clients of some models cannot be trained in stacks."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedproto.core.batches import Training, has_batch_norm, steps_per_epoch
from fedproto.core.engine import Shard
from fedproto.core.federation import Federation, Member
from fedproto.core.types import Algorithm, State
from fedproto.engines.vectorised.architecture_groups import (
    ArchitectureGroup,
    Data,
    GroupedClient,
    build_group,
    group_by_architecture,
)
from fedproto.engines.vectorised.layers import STACKED_LAYERS
from fedproto.engines.vectorised.plan import Plan
from fedproto.engines.vectorised.receiving import send_all_classes, send_own_classes
from fedproto.engines.vectorised.stacks import Stack
from fedproto.errors import locate, name_failure

#: How torch begins its warning that it runs an operation for one client after the other.
VMAP_WARNING = "There is a performance drop"
#: An operation that torch's errors and warnings say `vmap` cannot run.
UNMAPPED_OPERATION = re.compile(r"[Bb]atching rule.* for (aten::\w+)")


def find_obstacle(
    federations: Sequence[Federation],
    algorithm: Algorithm,
    trainings: Sequence[Training],
    plan: Plan,
) -> str | None:
    """Return why the clients cannot be trained in stacks, or None.

    A step of two clients of each architecture is tried.
    """
    for clients in group_by_architecture(federations, Shard()):
        model = clients[0].member.model
        reason = _find_mixing(clients, trainings)
        if reason is None and _has_single_image_batch(clients, trainings):
            reason = "has BatchNorm, and a client's last batch has one image"
        if reason is not None:
            return f"{model} {reason}"
        error = _find_error(clients, federations, algorithm, trainings, plan)
        if error is not None:
            return _describe_error(error, model, algorithm)
    return None


def _find_mixing(clients: Sequence[GroupedClient], trainings: Sequence[Training]) -> str | None:
    """Return how a module lets the samples of a batch affect each other, or None.

    What pads a batch would then change the results.
    """
    member = clients[0].member
    has_partial_batches = any(
        len(client.member.train) % trainings[client.federation].batch for client in clients
    )
    for layer in member.module.modules():
        layer_type = type(layer)
        has_statistics = isinstance(layer, _NormBase) and layer.track_running_stats
        if isinstance(layer, _BatchNorm) and not has_statistics:
            return (
                "normalises by the batch it is tested in "
                f"({layer_type.__name__} without running statistics)"
            )
        if has_statistics and has_partial_batches and layer_type not in STACKED_LAYERS:
            return f"gathers statistics of batches of unequal size ({layer_type.__name__})"
    if not _embeds_independently(member):
        return "scores an image differently in another batch"
    return None


@torch.no_grad()
def _embeds_independently(member: Member) -> bool:
    """Return whether two images get the same embeddings with a third one in their batch."""
    images = member.train.x[member.train.rows[:1]].repeat_interleave(3, 0)
    images[1:] = member.train.x[member.train.rows[-2:]][: len(images) - 1] * 0.5
    member.module.eval()
    state = dict(member.initial)
    of_two, _ = functional_call(member.module, state, (images[:2],))
    of_three, _ = functional_call(member.module, state, (images,))
    return torch.allclose(of_two, of_three[:2], rtol=1e-3, atol=1e-4)


def _has_single_image_batch(
    clients: Sequence[GroupedClient], trainings: Sequence[Training]
) -> bool:
    """Return whether BatchNorm would see a batch of one image."""
    if not has_batch_norm(clients[0].member.module):
        return False
    for number, member in clients:
        training = trainings[number]
        full_batches = steps_per_epoch(member, training) - 1
        if len(member.train) - full_batches * training.batch == 1:
            return True
    return False


def _find_error(
    clients: Sequence[GroupedClient],
    federations: Sequence[Federation],
    algorithm: Algorithm,
    trainings: Sequence[Training],
    plan: Plan,
) -> Exception | None:
    """Return the error of a step and an evaluation of two clients in a stack, or None."""
    number = clients[0].federation
    training = trainings[number]
    try:
        group = build_group(clients[:2], federations, algorithm, trainings, "device")
        server = algorithm.init(federations[number].initial, federations[number].task)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=VMAP_WARNING)
            _try_round(_shorten(group, training.batch), algorithm, server, training, plan)
    except Exception as error:  # a user's module may raise anything under vmap
        return error
    return None


def _describe_error(error: Exception, model: str, algorithm: Algorithm) -> str:
    """Say whether the model or a function of the algorithm failed in a stack, where, and how."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    place = locate(error)
    subject = model
    if place is not None and torch.nn.modules.module.__file__ not in files:
        subject = f"algorithm {algorithm.name}"
    reason = name_failure(error).split(". ")[0].rstrip(".")
    operation = UNMAPPED_OPERATION.search(reason)
    if operation is not None:
        reason = f"torch's vmap has no rule for {operation[1]}"
    if place is not None:
        reason = f"{place}: {reason}"
    return f"{subject} cannot be run for many clients at once ({reason})"


def _try_round(
    group: ArchitectureGroup, algorithm: Algorithm, server: State, training: Training, plan: Plan
) -> None:
    """Do a round and an evaluation of all clients of a small group."""
    # All of them fit, however little memory is free: how many do is decided later, for the run.
    plan_of_trial = replace(plan, compile=False, stack=len(group))
    training_of_trial = replace(training, epochs=1, local_steps=None)
    stack = Stack(group, algorithm, training_of_trial, plan_of_trial)
    positions = torch.arange(len(group))
    servers = [server] * (1 + int(group.federation.max()))
    nobody_slow = torch.zeros(len(group), dtype=torch.bool)
    received = send_own_classes(algorithm, servers, group, positions)
    stack.train(1, positions, received, nobody_slow)
    stack.evaluate(positions, send_all_classes(algorithm, servers, group, positions))


def _shorten(group: ArchitectureGroup, batch: int) -> ArchitectureGroup:
    """Return the architecture group with one training step per client and few samples.

    Steps see `batch` samples at a time, but evaluation sees many, whatever the batch: with batch 1
    it gets two, since some layers can be run for many clients with one sample but not with several.
    """
    samples = max(batch, 2)

    def take_first(data: Data) -> Data:
        lengths = data.lengths.clamp(max=samples)
        return data._replace(rows=data.rows[:, :samples], lengths=lengths)

    return replace(
        group,
        train=take_first(group.train),
        test=take_first(group.test),
        validation=None if group.validation is None else take_first(group.validation),
        per_epoch=torch.ones_like(group.per_epoch),
    )
