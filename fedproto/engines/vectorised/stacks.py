"""A stack: clients of one architecture group side by side, their training and their evaluation.

Each step gathers a batch for every client, runs the module by `vmap`, takes the gradient of the sum of all losses (each
client's part depends on its own parameters only), and updates. Clients are sorted by their number of steps, so that a
step runs on the prefix that still has some to do; what pads a batch, an epoch or the stack is masked and changes
nothing. On a GPU the step is recorded once and replayed (`graphs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedproto.core.dropout import Dropped
from fedproto.core.engine import even_size
from fedproto.core.local_training import Training, crop_and_flip, seed_module_draws
from fedproto.core.metrics import mark_correct
from fedproto.core.rng import preserve_torch_generators
from fedproto.core.tensors import align_axes, move_index
from fedproto.core.types import Algorithm, Batch, Step, Tree, Upload
from fedproto.engines.gpu.fused_passes import descend
from fedproto.engines.gpu.graphs import STEP, Replay, fused
from fedproto.engines.vectorised.architecture_groups import (
    ArchitectureGroup,
    Data,
    Place,
    free_memory,
)
from fedproto.engines.vectorised.layers import stackable, whether_fusing
from fedproto.engines.vectorised.timetable import Timetable

#: Values of input that one batched forward pass may look at: more than a cache holds are slow, more than memory fail.
GLANCE = {"cpu": 2**20, "cuda": 2**26}
WINDOWED = (
    2**11
)  # bytes of a GPU's memory that a value of input is granted: a convolution writes it out up to 200 times
FINE = 32  # clients from which on a step over three quarters of them takes a GPU less time than one over all
_COLLECTED = ("collected", "labels", "taken")


@dataclass(frozen=True)
class Plan:
    """How a vectorised engine works; what it computes does not depend on it, up to the order of sums."""

    stack: int | None = None  # clients trained at a time; None: as many as the device is good at
    place: Place = "auto"  # where the clients' states lie
    compile: bool = (
        False  # fuse the kernels of a step: seconds once, then up to twice as fast on a GPU
    )
    half: bool = False  # products in bfloat16
    stacked: bool = True  # at all; else one client after the other
    tidy: bool = (
        False  # layers leave each client's values in one piece: slower, but some modules want it
    )


class Stack:
    """Room for some of an architecture group's clients, side by side, and what is done to them."""

    def __init__(
        self, group: ArchitectureGroup, algorithm: Algorithm, training: Training, plan: Plan
    ) -> None:
        self.group, self.algorithm, self.training, self.plan = group, algorithm, training, plan
        self.module, told = stackable(group.module, plan.tidy)
        ragged = (
            group.per_epoch.to(group.train.lengths.device) * training.batch > group.train.lengths
        ).any()
        self.told = told if ragged else []  # which layers must know what pads a batch
        self.parameters = [
            name for name, value in group.module.named_parameters() if value.requires_grad
        ]
        self.buffers = [name for name, _ in group.module.named_buffers()]
        self.phases = [
            phase for phase in algorithm.phases if any(map(phase.trains, self.parameters))
        ]
        self.timetable = Timetable(
            group, self.phases, training, collecting=algorithm.collects == "during"
        )
        self.room = even_size(len(group), plan.stack or _room(group, training.batch))
        self.slots: dict[int, Tree] = {}
        self.steps: dict[tuple[int, int], Replay] = {}
        self.pool = torch.cuda.graph_pool_handle() if group.device.type == "cuda" else None
        self.outline: tuple[list[str], int] | None = None
        self.recorded_for: dict[str, torch.Size] | None = None
        self.ahead: dict[int, tuple[Tensor, list[Tree]]] = {}
        self.looks: dict[tuple[int, ...], Callable[[Tree], tuple[Tensor, Tensor]]] = {}

    def forget(self) -> None:
        """Free what was recorded."""
        for kept in (self.slots, self.steps, self.ahead, self.looks):
            kept.clear()
        self.outline = None

    def chunks(self, who: Tensor, slow: Tensor) -> Iterator[Tensor]:
        """Those who train, most steps first, as many at a time as there is room for."""
        if not len(who):
            return
        steps = self.timetable.steps(who, self.phases[0], slow[who])
        yield from who[steps.argsort(descending=True, stable=True)].split(self.room)

    # --- training

    def train(
        self, round: int, who: Tensor, received: Tree, slow: Tensor
    ) -> tuple[Upload, Tree, Tensor]:
        """A round of local training of the clients `who`: uploads, losses, and whether all of it is finite."""
        state = vmap(self.algorithm.adopt)(self.group.states.take(who), received)
        tables = self._tables_for(round, who, slow)
        records: list[Tree] = []
        first = int(who[0])
        seed, client = int(self.group.seed[first]), int(self.group.number[first])
        with seed_module_draws(seed, round, client, self.group.device):
            for number, phase in enumerate(self.phases):
                todo = self.timetable.steps(who, phase, slow)
                trained = self._run_phase(number, state, received, tables[number], todo)
                state = {
                    name: trained[f"state.{name}"] if phase.trains(name) else v
                    for name, v in state.items()
                }
                records.append(
                    {
                        name: value
                        for name, value in trained.items()
                        if not name.startswith("state.")
                    }
                )
        if self.group.device.type == "cuda" and len(who) == len(self.group) and not slow.any():
            # All will most likely train again. While the GPU is busy with this round, the next one's tables are made.
            self.ahead = {round + 1: (who, self.timetable.tables(round + 1, who, slow))}
        upload = vmap(self.algorithm.upload)(self._closing_step(who, state, received, records))
        self.group.states.put(who, state)
        loss = _mean_loss(records)
        return upload, loss, _finite(state | upload.sums | loss)

    def _tables_for(self, round: int, who: Tensor, slow: Tensor) -> list[Tree]:
        """The tables of a round, if they were not made ahead for just these clients."""
        guessed, tables = self.ahead.pop(round, (None, []))
        if guessed is not None and torch.equal(guessed, who) and not slow.any():
            return tables
        return self.timetable.tables(round, who, slow)

    def _run_phase(
        self, number: int, state: Tree, received: Tree, tables: Tree, todo: Tensor
    ) -> Tree:
        """All steps of a phase on the clients that have some left, most first; gives what the steps wrote."""
        size = len(todo)
        slots = self._load(number, state, received, tables)
        busy = todo[:, None] > torch.arange(int(todo.max()))
        up_to = (busy * torch.arange(1, size + 1)[:, None]).amax(0)  # the last who has a step left
        for count in up_to.tolist():
            self._step(number, self._prefix(count))(slots)
        written = ("state.", "terms.", "count", "collected")
        found = {
            name: value[:size].clone() for name, value in slots.items() if name.startswith(written)
        }
        return found | self.timetable.labels(tables)

    def _load(self, number: int, state: Tree, received: Tree, tables: Tree) -> Tree:
        """The tensors the steps work on; on a GPU always the same ones, into which this chunk's values are copied."""
        values = tables | {f"received.{name}": value for name, value in received.items()}
        values |= {f"state.{name}": value for name, value in state.items()}
        self._start_anew_if_other({name: value.shape[1:] for name, value in received.items()})
        if self.group.device.type != "cuda":
            zeros = self._zeros(number, values, len(tables["at"]))
            return (
                values
                | zeros
                | {name: v.clone() for name, v in values.items() if name.startswith("state.")}
            )
        if number not in self.slots:
            self.slots[number] = {
                n: v.new_zeros(self.room, *v.shape[1:]) for n, v in values.items()
            }
            self.slots[number] |= self._zeros(number, values, self.room)
        slots = self.slots[number]
        for name, slot in slots.items():
            if name in values:
                slot[: len(values[name])].copy_(values[name])
                if name == "mask":
                    slot[len(values[name]) :] = 0
            else:
                slot.zero_()
        return slots

    def _start_anew_if_other(self, received: dict[str, torch.Size]) -> None:
        """What was recorded is for what the server sent then; a server may begin to send something else."""
        if self.recorded_for not in (None, received):
            self.forget()
        self.recorded_for = received

    def _zeros(self, number: int, values: Tree, size: int) -> Tree:
        """What starts at nothing in each phase: momentum, sums of the loss, the step, collected embeddings."""
        like = values["lr"]
        terms, width = self._outline(number, values)
        trained = [name for name in self.parameters if self.phases[number].trains(name)]
        zeros = {
            f"velocity.{name}": like.new_zeros(size, *values[f"state.{name}"].shape[1:])
            for name in trained
        }
        zeros |= {f"terms.{name}": like.new_zeros(size) for name in terms}
        zeros |= {
            "count": like.new_zeros(size),
            STEP: torch.zeros(1, dtype=torch.int64, device=like.device),
        }
        if "slot" in values:
            zeros["collected"] = like.new_zeros(size, self.timetable.places + 1, width)
        return zeros

    def _outline(self, number: int, values: Tree) -> tuple[list[str], int]:
        """The names of the loss's terms, and the size of embedding and logits together, from one client's step."""
        if self.outline is None:
            one = {name: value[:1].clone() for name, value in values.items()}
            one[STEP] = torch.zeros(1, dtype=torch.int64, device=self.group.device)
            with preserve_torch_generators(
                self.group.device
            ):  # a look, not a step: it draws nothing
                terms, seen, _ = self._forward(one, _part(one, "state."))
            self.outline = list(terms), seen.shape[-1]
        return self.outline

    def _prefix(self, active: int) -> int:
        """How many of the stack a step works on: on a GPU a few sizes only, since each is recorded for itself."""
        size = self.room
        if self.group.device.type != "cuda":
            return active
        if self.plan.compile:
            return size // 2 if size // 2 >= max(active, 8) else size
        while (less := size * 3 // 4 if size >= FINE else size // 2) >= max(active, 8):
            size = less
        return size

    def _step(self, number: int, prefix: int) -> Replay:
        if (number, prefix) not in self.steps:

            def step(slots: Tree) -> None:
                self._descend(number, {n: v if n == STEP else v[:prefix] for n, v in slots.items()})

            self.steps[number, prefix] = Replay(step, self.plan.compile, self.pool)
        return self.steps[number, prefix]

    def _descend(self, number: int, slots: Tree) -> None:
        """One step of SGD for every client: v ← momentum·v + g, w ← w − lr·v, where a client still has a batch."""
        state = _part(slots, "state.")
        trained = [name for name in self.parameters if self.phases[number].trains(name)]
        leaves = {name: state[name].detach().requires_grad_() for name in trained}
        buffers = {name: value.clone() for name, value in state.items() if name in self.buffers}
        terms, seen, mask = self._forward(slots, state | leaves | buffers)
        loss = torch.stack(list(terms.values())).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        with torch.no_grad():
            count = mask.sum(1)
            for name, term in terms.items():
                slots[f"terms.{name}"].add_(term.detach() * count)
            slots["count"].add_(count)
            rate = (count > 0) * slots["lr"]
            for name, gradient in zip(trained, gradients, strict=True):
                self._move(
                    state[name], slots[f"velocity.{name}"], gradient, slots["momentum"], rate
                )
            for name, value in buffers.items():
                state[name].copy_(torch.where(align_axes(count > 0, value), value, state[name]))
            if "slot" in slots:
                slot = slots["slot"].index_select(1, slots[STEP])[:, 0, :, None].expand_as(seen)
                slots["collected"].scatter_(1, slot, seen.detach())
            slots[STEP].add_(1)

    def _move(
        self, value: Tensor, speed: Tensor, gradient: Tensor, momentum: Tensor, rate: Tensor
    ) -> None:
        if value.is_cuda and not whether_fusing():
            descend(value, speed, gradient, momentum, rate)
        else:
            speed.mul_(align_axes(momentum, speed)).add_(gradient)
            value.addcmul_(speed, align_axes(rate, speed), value=-1)

    def _forward(self, slots: Tree, state: Tree) -> tuple[Tree, Tensor, Tensor]:
        """The loss's terms (m,), embeddings and logits side by side (m, b, d + C), and the mask (m, b) of a step."""
        at, mask = (slots[name].index_select(1, slots[STEP])[:, 0] for name in ("at", "mask"))
        # Who has no batch left is shown a full one, of which nothing comes: a loss may divide by the mask's sum.
        shown = mask + (mask.sum(1, keepdim=True) == 0)
        rows = slots["rows"].gather(1, at)
        x, y = self.group.train.x[rows], self.group.train.y[rows]
        client = torch.arange(len(at), device=at.device)[:, None]
        if "crops" in slots:
            border = slots["border"][:, None].expand(-1, at.shape[1], -1).flatten(0, 1)
            x = crop_and_flip(
                x.flatten(0, 1), border, slots["crops"][client, at].flatten(0, 1)
            ).view_as(x)
        told = {name: value[client, at] for name, value in _part(slots, "keep.").items()}
        told |= dict.fromkeys(self.told, shown)

        def client_loss(
            state: Tree, told: Tree, batch: Batch, received: Tree
        ) -> tuple[Tree, Tensor]:
            features, logits = functional_call(self.module, state | told, (batch.x,))
            terms = self.algorithm.loss(Step(state, features, logits, batch, received))
            return terms, torch.cat([features, logits], 1)

        self.module.train()
        with torch.autocast(at.device.type, torch.bfloat16, enabled=self.plan.half):
            terms, seen = vmap(client_loss, randomness="different")(
                state, told, Batch(x, y, shown), _part(slots, "received.")
            )
        return terms, seen, mask

    def _closing_step(self, who: Tensor, state: Tree, received: Tree, records: list[Tree]) -> Step:
        """A step over all the clients' samples, with the features the algorithm asks for."""
        data = self.group.train
        if self.algorithm.collects == "during":
            return self._collected_step(state, received, records)
        here = move_index(who, data.x.device)
        y = data.y[data.rows[here]]
        inside = torch.arange(y.shape[1], device=y.device) < data.lengths[here, None]
        empty = self.group.lr.new_empty(len(who), 0)
        batch = Batch(empty, y, inside.to(self.group.lr.dtype))
        if self.algorithm.collects == "nothing":
            return Step(state, empty, empty, batch, received)
        pairs = [(features, logits) for features, logits, _ in self._glances(state, data, who)]
        features, logits = (torch.cat(parts, 1) for parts in zip(*pairs, strict=True))
        return Step(state, features, logits, batch, received)

    def _collected_step(self, state: Tree, received: Tree, records: list[Tree]) -> Step:
        """What the phases collected; each place was taken in one of them, and is zero in the others."""
        found = {
            name: torch.stack([r[name] for r in records]).sum(0)[:, :-1] for name in _COLLECTED
        }
        seen, y, mask = (found[name] for name in _COLLECTED)
        features, logits = seen.split(
            [seen.shape[2] - self.group.own.shape[1], self.group.own.shape[1]], 2
        )
        return Step(
            state, features, logits, Batch(self.group.lr.new_empty(len(y), 0), y, mask), received
        )

    # --- evaluation

    def _glances(
        self, state: Tree, data: Data, who: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """Features and logits of the clients' examples in eval mode, as many a time as one look may take in."""
        rows = data.rows[move_index(who, data.x.device)]
        pieces = math.ceil(rows.numel() * data.x[0].numel() / _glance(data.x.device))
        width = math.ceil(rows.shape[1] / pieces)
        for start in range(0, rows.shape[1], width):
            part = slice(start, min(start + width, rows.shape[1]))
            features, logits = self._look(state | {"x": data.x[rows[:, part]]})
            yield features, logits, part

    @torch.no_grad()
    def _look(self, tensors: Tree) -> tuple[Tensor, Tensor]:
        """Features and logits of the clients' images `x` in eval mode; compiled, if the steps are."""
        shape = tuple(tensors["x"].shape)
        if shape not in self.looks:
            self.looks[shape] = (
                fused(self._plain_look, tensors) if self.plan.compile else self._plain_look
            )
        return self.looks[shape](tensors)

    def _plain_look(self, tensors: Tree) -> tuple[Tensor, Tensor]:
        def look(state: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
            return functional_call(self.module, state, (x,))

        state = {name: value for name, value in tensors.items() if name != "x"}
        self.module.eval()
        with torch.autocast(tensors["x"].device.type, torch.bfloat16, enabled=self.plan.half):
            features, logits = vmap(look)(state, tensors["x"])
        return features.to(self.group.lr.dtype), logits.to(self.group.lr.dtype)

    def evaluate(self, who: Tensor, received: Tree) -> Tree:
        """The share of test images predicted right by each score, over all classes and over the clients' own."""
        state = vmap(self.algorithm.adopt)(self.group.states.take(who), received)
        data = self.group.test
        here = move_index(who, self.group.device)
        own_classes = self.group.own[here] > 0
        lengths = data.lengths[here]
        y = data.y[data.rows[here]]
        correct: Tree = {}
        for features, logits, part in self._glances(state, data, who):
            inside = (
                torch.arange(part.start, part.start + features.shape[1], device=y.device)
                < lengths[:, None]
            )
            batch = Batch(features.new_empty(len(who), 0), y[:, part], inside.to(features.dtype))
            scores = vmap(self.algorithm.predict)(Step(state, features, logits, batch, received))
            for name, found in mark_correct(scores, y[:, part], own_classes).items():
                correct[name] = correct.get(name, 0) + (found & inside).sum(1)
        return {name: (count.double() / lengths).cpu() for name, count in correct.items()}


def _part(tree: Tree, prefix: str) -> Tree:
    return {
        name.removeprefix(prefix): value for name, value in tree.items() if name.startswith(prefix)
    }


def _mean_loss(records: Sequence[Tree]) -> Tree:
    """Each term's mean over the samples that passed in all phases."""
    count = torch.stack([record["count"] for record in records]).sum(0)
    names = [name for name in records[0] if name.startswith("terms.")]
    return {
        name.removeprefix("terms."): torch.stack([record[name] for record in records]).sum(0)
        / count
        for name in names
    }


def _finite(tree: Tree) -> Tensor:
    """(m,) whether all of a client's values are finite: a sum is not where one of its parts is not."""
    return torch.isfinite(
        torch.stack([value.reshape(len(value), -1).double().sum(1) for value in tree.values()])
    ).all(0)


def _glance(device: torch.device) -> int:
    """Values of input for one look; a rule of the device, not of what is free, so that runs repeat."""
    most = GLANCE[device.type]
    return (
        min(most, torch.cuda.get_device_properties(device).total_memory // WINDOWED)
        if device.type == "cuda"
        else most
    )


def _room(group: ArchitectureGroup, batch: int) -> int:
    """How many clients to train at a time: on a CPU as many as its caches hold, on a GPU as many as its memory."""
    free = free_memory(group.device)
    if free is None:
        return 20
    model = sum(value[0].nbytes for value in group.states.values.values())
    image = group.train.x[0].nbytes
    return max(
        1, free // training_memory(model, image, batch, group.dropped, group.train.rows.shape[1])
    )


def training_memory(
    model: int, image: int, batch: int, dropped: Sequence[Dropped], samples: int
) -> int:
    """The bytes of a GPU that a client in training is granted, from those of its model and of one input."""
    drawn = sum(math.prod(layer.shape) for layer in dropped) * samples
    # With gradients, momentum and copies; activations; what dropout keeps, of this round and the next.
    need = 6 * model + 1000 * batch * image + 3 * drawn
    return 2 * need
