"""The engine that trains clients of one architecture together, in stacks, and when it cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedproto.core.engine import Chunk, Cohort, Shard, errors_named, make_chunk
from fedproto.core.federation import Federation, Member
from fedproto.core.local_training import Training, has_batch_norm, steps_per_epoch
from fedproto.core.tensors import move_index
from fedproto.core.types import Algorithm, Tree, Upload
from fedproto.engines.vectorised.architecture_groups import (
    ArchitectureGroup,
    Data,
    build_group,
    build_groups,
    grouped,
)
from fedproto.engines.vectorised.layers import TABLE
from fedproto.engines.vectorised.stacks import Plan, Stack


class VectorisedEngine:
    def __init__(
        self,
        federations: Sequence[Federation],
        algorithm: Algorithm,
        trainings: Sequence[Training],
        plan: Plan,
        shard: Shard = Shard(),  # noqa: B008 (a constant)
    ) -> None:
        self.algorithm, self.sizes = algorithm, [len(each.members) for each in federations]
        groups = build_groups(federations, trainings, plan.place, shard)
        self.stacks = [Stack(group, algorithm, trainings[0], plan) for group in groups]

    @property
    def groups(self) -> list[ArchitectureGroup]:
        return [stack.group for stack in self.stacks]

    def train(
        self, round: int, servers: Sequence[Tree], cohorts: Sequence[Cohort]
    ) -> Iterator[Chunk]:
        """Train the sampled clients, group by group, in chunks that fit; keep their new states."""
        sampled = _marks(self.sizes, [cohort.sampled for cohort in cohorts])
        slow = _marks(self.sizes, [cohort.slow for cohort in cohorts])
        for stack in self.stacks:
            group = stack.group
            key = group.federation, group.number
            for who in stack.chunks(sampled[key].nonzero().flatten(), slow[key]):
                with errors_named(f"round {round}, {len(who)} clients of {group.model}, training"):
                    received = _received(self.algorithm, servers, group, who)
                    trained = stack.train(round, who, received, slow[key][who])
                yield from _by_federation(group, who, cohorts, *trained)

    def evaluate(self, servers: Sequence[Tree]) -> list[Tree]:
        """Every client's accuracies with the server's present state."""
        tables: list[Tree] = [{} for _ in servers]
        for stack in self.stacks:
            group = stack.group
            for who in torch.arange(len(group)).split(stack.room):
                with errors_named(f"{len(who)} clients of {group.model}, evaluation"):
                    received = _received(self.algorithm, servers, group, who, everything=True)
                    accuracies = stack.evaluate(who, received)
                for key, values in accuracies.items():
                    for number, table in enumerate(tables):
                        mine = group.federation[who] == number
                        column = table.setdefault(
                            key, torch.zeros(self.sizes[number], dtype=torch.float64)
                        )
                        column[group.number[who[mine]]] = values[mine]
        return tables

    def export(self, federation: int) -> Tree:
        """All clients' states as one flat tree, for a checkpoint."""
        states = {}
        for group in self.groups:
            for position in (group.federation == federation).nonzero().flatten().tolist():
                values = group.states.values.items()
                states[int(group.number[position])] = {
                    name: value[position] for name, value in values
                }
        return {
            f"{number}.{name}": value
            for number in sorted(states)
            for name, value in states[number].items()
        }

    def restore(self, federation: int, tree: Tree) -> None:
        for group in self.groups:
            for position in (group.federation == federation).nonzero().flatten().tolist():
                for name, value in group.states.values.items():
                    value[position] = tree[f"{int(group.number[position])}.{name}"].to(value.device)

    def close(self) -> None:
        for stack in self.stacks:
            stack.forget()


def obstacle(
    federations: Sequence[Federation],
    algorithm: Algorithm,
    trainings: Sequence[Training],
    plan: Plan,
) -> str | None:
    """Why the clients cannot be trained in stacks, or None: a step of two clients of each architecture is tried."""
    for group in grouped(federations, Shard()):
        number, member = group[0]
        ragged = any(len(m.train) % trainings[n].batch for n, m in group)
        mixing = _mixes_samples(member, ragged)
        if mixing:
            return f"{member.model} {mixing}"
        if has_batch_norm(member.module) and any(_leaves_one(m, trainings[n]) for n, m in group):
            return f"{member.model} has BatchNorm, and a client's last batch has one image"
        try:
            few = _shortened(
                build_group(group[:2], federations, trainings, "device"), trainings[number].batch
            )
            _try(
                few,
                algorithm,
                algorithm.init(member.initial, federations[number].task),
                trainings[number],
                plan,
            )
        except Exception as error:  # whatever a module of somebody's own may do under vmap
            reason = str(error).strip().split(". ")[0].splitlines()[0]
            return f"{member.model} cannot be run for many clients at once ({type(error).__name__}: {reason})"
    return None


def _try(
    few: ArchitectureGroup, algorithm: Algorithm, server: Tree, training: Training, plan: Plan
) -> None:
    """A round of one batch, and an evaluation."""
    # Room for both, however little is free: the run itself will find out how many fit.
    stack, who = (
        Stack(few, algorithm, training, replace(plan, compile=False, stack=len(few))),
        torch.arange(len(few)),
    )
    servers = [server] * (1 + int(few.federation.max()))
    stack.train(
        1, who, _received(algorithm, servers, few, who), torch.zeros(len(who), dtype=torch.bool)
    )
    stack.evaluate(who, _received(algorithm, servers, few, who, everything=True))


def _mixes_samples(member: Member, ragged: bool) -> str | None:
    """How a module lets the samples of a batch see each other, so that what pads it would change them."""
    for layer in member.module.modules():
        tracks = isinstance(layer, _NormBase) and layer.track_running_stats
        if isinstance(layer, _BatchNorm) and not tracks:
            return f"normalises by the batch it is tested in ({type(layer).__name__} without running statistics)"
        if tracks and ragged and type(layer) not in TABLE:
            return f"gathers statistics of batches of unequal size ({type(layer).__name__})"
    return None if _scores_alone(member) else "scores an image differently in another batch"


@torch.no_grad()
def _scores_alone(member: Member) -> bool:
    """Whether the first two images get the same embedding with a third one beside them."""
    images = member.train.x[member.train.rows[:1]].repeat_interleave(3, 0)
    images[1:] = member.train.x[member.train.rows[-2:]][: len(images) - 1] * 0.5
    member.module.eval()
    two, three = (
        functional_call(member.module, dict(member.initial), (images[:size],))[0] for size in (2, 3)
    )
    return torch.allclose(two, three[:2], rtol=1e-3, atol=1e-4)


def _shortened(group: ArchitectureGroup, batch: int) -> ArchitectureGroup:
    """The architecture group with one training step per client, and data to look at.

    Steps see `batch` samples at a time, but evaluation sees many, whatever the batch: with batch 1 it
    gets two, since some layers can be run for many clients with one sample but not with several.
    """
    rows = max(batch, 2)

    def first(data: Data) -> Data:
        return data._replace(rows=data.rows[:, :rows], lengths=data.lengths.clamp(max=rows))

    per_epoch = torch.ones_like(group.per_epoch)
    return replace(group, train=first(group.train), test=first(group.test), per_epoch=per_epoch)


def _leaves_one(member: Member, training: Training) -> bool:
    """Whether the client's last batch is of one image."""
    return len(member.train) - (steps_per_epoch(member, training) - 1) * training.batch == 1


def _marks(sizes: Sequence[int], clients: Sequence[Tensor]) -> Tensor:
    """(federations, clients), True for those named."""
    marks = torch.zeros(len(sizes), max(sizes), dtype=torch.bool)
    for line, numbers in zip(marks, clients, strict=True):
        line[numbers] = True
    return marks


def _received(
    algorithm: Algorithm,
    servers: Sequence[Tree],
    group: ArchitectureGroup,
    who: Tensor,
    everything: bool = False,
) -> Tree:
    """What each client of a chunk gets from the server of its federation."""
    own = group.own[move_index(who, group.device)]
    classes = torch.ones_like(own) if everything else own
    if len(servers) == 1:  # no copy for each client of what all receive
        return vmap(algorithm.send, in_dims=(None, 0))(servers[0], classes)
    federation = move_index(group.federation[who], group.device)
    server = {
        name: torch.stack([each[name] for each in servers]).to(group.device)[federation]
        for name in servers[0]
    }
    return vmap(algorithm.send)(server, classes)


def _by_federation(
    group: ArchitectureGroup,
    who: Tensor,
    cohorts: Sequence[Cohort],
    uploads: Upload,
    loss: Tree,
    sound: Tensor,
) -> Iterator[Chunk]:
    """A trained chunk's outcome, cut by federation."""
    federations = group.federation[who]
    for number in federations.unique().tolist():
        rows = (federations == number).nonzero().flatten()
        if len(rows) == len(who):
            yield make_chunk(number, cohorts[number], group.number[who], uploads, loss, sound)
            return
        here = move_index(rows, sound.device)
        sums, weights, some = ({n: v[here] for n, v in tree.items()} for tree in (*uploads, loss))
        yield make_chunk(
            number,
            cohorts[number],
            group.number[who[rows]],
            Upload(sums, weights),
            some,
            sound[here],
        )
