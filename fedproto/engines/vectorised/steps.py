"""The training steps of a stack of clients, one batch per client and step.

Each step gathers a batch for every client, runs the module by `vmap`, takes the gradient of the sum
of all losses (each client's part of it depends on its own parameters only), and updates them. What
pads a batch, an epoch or the stack is masked and changes nothing. A step is recorded once and
replayed: on a GPU its kernels (`gpu/graphs.py`), on a CPU its operations (`recordings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedproto.core.batches import crop_and_flip, list_trained_names
from fedproto.core.class_balance import weigh_samples
from fedproto.core.local_training import run_copy
from fedproto.core.optimisers import adam_rates, clip_factor, move_by_adam
from fedproto.core.private_steps import record_gradients, sum_clipped
from fedproto.core.rng import preserve_torch_generators
from fedproto.core.tensors import align_axes, flatten_state, unflatten_state
from fedproto.core.types import Algorithm, Batch, Phase, State, Step, Tree
from fedproto.engines.gpu.fused_passes import descend
from fedproto.engines.gpu.graphs import STEP, Replay
from fedproto.engines.vectorised.architecture_groups import ArchitectureGroup
from fedproto.engines.vectorised.layer_support import is_fusing
from fedproto.engines.vectorised.plan import Plan
from fedproto.engines.vectorised.recordings import RecordedFunctions
from fedproto.engines.vectorised.timetable import Timetable

#: In stacks of at least this many clients, a GPU is faster with a step over three quarters of them.
MIN_CLIENTS_FOR_THREE_QUARTERS = 32
#: A GPU's steps work on at least this many clients, so that few sizes are recorded.
MIN_CLIENTS_PER_RECORDED_STEP = 8
#: The beginnings of the names of what steps sum and collect in their workspace.
_PHASE_RESULTS = ("terms.", "count", "collected")


class StepOutputs(NamedTuple):
    """What a step computes for each of its m clients."""

    terms: Tree  # the terms of the loss, (m,) each
    outputs: Tensor  # embeddings and logits side by side, (m, b, d + C)
    mask: Tensor  # (m, b)


class StepBatch(NamedTuple):
    """The batches that a step takes, one per client."""

    batch: Batch
    module_buffers: Tree  # what dropout keeps, and which samples are padding
    mask: Tensor  # (m, b)


class Known(NamedTuple):
    """What m clients know in a step beside their model and their batch."""

    received: State
    kept: State
    lr: Tensor  # (m,)
    steps: Tensor  # (m,) done so far in this round
    key: Tensor  # (m,)
    number: Tensor  # (m,)
    momentum: Tensor  # (m,)


class Steps:
    """The steps of all phases of a stack, and the tensors they work on.

    These tensors are a *workspace*: the tables of the timetable, `state.*`, `received.*`, what the
    clients keep beside their models `kept.*`, the optimiser's moments `velocity.*` and `square.*`,
    sums of the loss `terms.*` over `count` samples, the number of the next step, and `collected`
    embeddings. Steps change it in place.
    """

    def __init__(
        self,
        group: ArchitectureGroup,
        module: nn.Module,
        padding_buffers: Sequence[str],
        algorithm: Algorithm,
        phases: Sequence[Phase],
        timetable: Timetable,
        capacity: int,
        plan: Plan,
    ) -> None:
        self.group = group
        self.module = module
        self.padding_buffers = padding_buffers
        self.has_ties = has_tied_tensors(module)
        self.algorithm = algorithm
        self.timetable = timetable
        self.optimiser = timetable.training.optimiser
        self.private = timetable.training.private
        self.capacity = capacity
        self.plan = plan
        self.phases = phases
        self.trained_names = [list_trained_names(group.module, phase) for phase in phases]
        self.buffer_names = {name for name, _ in group.module.named_buffers()}
        self.graph_pool = torch.cuda.graph_pool_handle() if group.device.type == "cuda" else None
        self.workspaces: dict[int, Tree] = {}  # by phase, on a GPU
        self.graphs: dict[tuple[int, int], Replay] = {}  # by phase and number of clients
        self.recordings = RecordedFunctions(module)  # on a CPU
        self.output_layouts: dict[int, tuple[list[str], int]] = {}  # by phase
        self.received_shapes: dict[str, torch.Size] | None = None

    @property
    def has_graphs(self) -> bool:
        """Whether a GPU records and replays the steps, in memory that stays.

        Private ones cannot be: their batches are of any size, and the noise of each is new.
        """
        return self.group.device.type == "cuda" and self.private is None

    def clear(self) -> None:
        """Free the recorded steps and the tensors they work on."""
        self.workspaces.clear()
        self.graphs.clear()
        self.recordings.clear()
        self.output_layouts.clear()

    def run_phase(
        self,
        phase: int,
        state: Tree,
        kept: State,
        received: State,
        tables: Tree,
        step_counts: Tensor,
    ) -> tuple[Tree, Tree]:
        """Do all steps of a phase; return the state, and what the steps summed and collected.

        A step works on the first clients only, up to the last one that has a step left. `state` is
        what the phase trains, `kept` what the clients keep beside their models.
        """
        clients = len(step_counts)
        workspace = self.load(phase, state, kept, received, tables)
        has_step = step_counts[:, None] > torch.arange(int(step_counts.max()))
        client_numbers = torch.arange(1, clients + 1)[:, None]
        active_counts = (has_step * client_numbers).amax(0)
        for active, equal_counts in groupby(active_counts.tolist()):
            self._run_steps(phase, workspace, active, len(list(equal_counts)))
        state_after = {}
        for name, value in part_of_tree(workspace, "state.").items():
            state_after[name] = value[:clients].clone()
        results = {}
        for name, value in workspace.items():
            if name.startswith(_PHASE_RESULTS):
                results[name] = value[:clients].clone()
        return state_after, results | self.timetable.collect_labels(tables)

    # --- the workspace

    def load(self, phase: int, state: Tree, kept: State, received: State, tables: Tree) -> Tree:
        """Return the workspace of a phase, filled with a chunk's values.

        On a GPU it is always the same memory, since recorded steps read and write that.
        """
        values = dict(tables)
        flat_received = flatten_state(received)
        for name, value in flat_received.items():
            values[f"received.{name}"] = value
        for name, value in flatten_state(kept).items():
            values[f"kept.{name}"] = value
        for name, value in state.items():
            values[f"state.{name}"] = value
        self._clear_if_received_changed(flat_received)
        if self.has_graphs:
            return self._load_fixed_memory(phase, values)
        workspace = values | self._make_zeros(phase, values, len(tables["at"]))
        for name in state:
            workspace[f"state.{name}"] = workspace[f"state.{name}"].clone()
        return workspace

    def _load_fixed_memory(self, phase: int, values: Tree) -> Tree:
        """Return the workspace in memory that stays, with these values and zeros elsewhere."""
        if phase not in self.workspaces:
            allocated = {}
            for name, value in values.items():
                allocated[name] = value.new_zeros(self.capacity, *value.shape[1:])
            self.workspaces[phase] = allocated | self._make_zeros(phase, values, self.capacity)
        workspace = self.workspaces[phase]
        for name, target in workspace.items():
            if name not in values:
                target.zero_()
                continue
            clients = len(values[name])
            target[:clients].copy_(values[name])
            if name == "mask":
                target[clients:] = 0
        return workspace

    def _clear_if_received_changed(self, received: Tree) -> None:
        """Free the recorded steps if the server now sends other things than when they were."""
        shapes = {name: value.shape[1:] for name, value in received.items()}
        if self.received_shapes is not None and self.received_shapes != shapes:
            self.clear()
        self.received_shapes = shapes

    def _make_zeros(self, phase: int, values: Tree, clients: int) -> Tree:
        """Return what starts at zero in each phase.

        That is the optimiser's moments, sums of the loss, the number of the step, and collected
        embeddings.
        """
        like = values["lr"]
        term_names, output_width = self._find_output_layout(phase, values)
        zeros = {}
        for name in self.trained_names[phase]:
            shape = values[f"state.{name}"].shape[1:]
            for moment in self.optimiser.moments:
                zeros[f"{moment}.{name}"] = like.new_zeros(clients, *shape)
        for name in term_names:
            zeros[f"terms.{name}"] = like.new_zeros(clients)
        zeros["count"] = like.new_zeros(clients)
        zeros[STEP] = torch.zeros(1, dtype=torch.int64, device=like.device)
        if "slot" in values:
            slots = self.timetable.unused_slot + 1
            zeros["collected"] = like.new_zeros(clients, slots, output_width)
        return zeros

    def _find_output_layout(self, phase: int, values: Tree) -> tuple[list[str], int]:
        """Return the names of the loss's terms, and the width of embedding and logits together.

        One client's step is computed to find out, the first time.
        """
        if phase not in self.output_layouts:
            one_client = {name: value[:1].clone() for name, value in values.items()}
            one_client[STEP] = torch.zeros(1, dtype=torch.int64, device=self.group.device)
            state = part_of_tree(one_client, "state.")
            with preserve_torch_generators(self.group.device):
                computed = self._compute(phase, one_client, state)
            self.output_layouts[phase] = (list(computed.terms), computed.outputs.shape[-1])
        return self.output_layouts[phase]

    # --- a step

    def _round_up(self, active: int) -> int:
        """Return how many clients a recorded step works on; the first `active` have one left.

        These are a few sizes only, since a step is recorded for each of them.
        """
        size = self.capacity
        smallest = max(active, MIN_CLIENTS_PER_RECORDED_STEP)
        if self.plan.compile:
            return size // 2 if size // 2 >= smallest else size
        while True:
            smaller = size // 2
            if size >= MIN_CLIENTS_FOR_THREE_QUARTERS:
                smaller = size * 3 // 4
            if smaller < smallest:
                return size
            size = smaller

    def recorded_step(self, phase: int, clients: int) -> Replay:
        """Return the step of a phase for the first clients of a workspace."""
        key = (phase, clients)
        if key not in self.graphs:

            def step(workspace: Tree) -> None:
                self._descend(phase, _take_first(workspace, clients))

            self.graphs[key] = Replay(step, self.plan.compile, self.graph_pool)
        return self.graphs[key]

    def _run_steps(self, phase: int, workspace: Tree, clients: int, steps: int) -> None:
        """Do the next steps of a phase for the first clients of a workspace."""
        step: Callable[[Tree], None]
        if self.has_graphs:
            step = self.recorded_step(phase, self._round_up(clients))
            tensors = workspace
        else:
            step = partial(self._descend, phase)
            tensors = _take_first(workspace, clients)
            if self.private is None:
                step = self.recordings.find(phase, step, tensors)
        for _ in range(steps):
            step(tensors)

    def _descend(self, phase: int, workspace: Tree) -> None:
        """Do one step of the optimiser for every client that still has a batch."""
        state = part_of_tree(workspace, "state.")
        trained_names = self.trained_names[phase]
        buffers = {n: value.clone() for n, value in state.items() if n in self.buffer_names}
        if self.private is None:
            leaves = {name: state[name].detach().requires_grad_() for name in trained_names}
            terms, outputs, mask = self._compute(phase, workspace, state | leaves | buffers)
            loss = torch.stack(list(terms.values())).sum()
            of_leaves = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            gradients = dict(zip(trained_names, of_leaves, strict=True))
        else:
            gradients, computed = self._compute_privately(phase, workspace, state | buffers)
            terms, outputs, mask = computed
        with torch.no_grad():
            count = mask.sum(1)
            for name, term in terms.items():
                workspace[f"terms.{name}"].add_(term.detach() * count)
            workspace["count"].add_(count)
            has_batch = count > 0
            if self.private is not None:  # a step without records still adds its noise
                has_batch = _take_step(workspace, "has_step") > 0
            rate = has_batch * workspace["lr"]
            self._follow(gradients, state, workspace, rate)
            for name, value in buffers.items():
                kept = torch.where(align_axes(has_batch, value), value, state[name])
                state[name].copy_(kept)
            if "slot" in workspace:
                slot = _take_step(workspace, "slot")[:, :, None].expand_as(outputs)
                workspace["collected"].scatter_(1, slot, outputs.detach())
            workspace[STEP].add_(1)

    def _follow(self, gradients: Tree, state: Tree, workspace: Tree, rate: Tensor) -> None:
        """Move parameters along their gradients, in place, by each client's rate.

        The rate of a client without a batch is 0. It gets none in a later step of the phase either,
        so what becomes of its moments does not matter.
        """
        optimiser = self.optimiser
        if optimiser.clip_norm:
            gradients = _clip(gradients, optimiser.clip_norm)
        for name, gradient in gradients.items():
            value = state[name]
            velocity = workspace[f"velocity.{name}"]
            gradient = optimiser.decay_gradient(gradient, value)
            if optimiser.name == "sgd":
                _move_by_sgd(value, velocity, gradient, workspace["momentum"], rate)
                continue
            rate_of_value = align_axes(rate, value)
            optimiser.shrink(value, rate_of_value)
            step_number = (workspace[STEP][0] + 1).double()  # on a GPU a recorded step reads it
            rates = adam_rates(rate_of_value, step_number)
            move_by_adam(value, velocity, workspace[f"square.{name}"], gradient, rates)

    def _compute(self, phase: int, workspace: Tree, state: Tree) -> StepOutputs:
        """Return the loss, embeddings and logits of every client's next batch."""
        batch, module_buffers, mask = self._gather_batch(workspace)
        compute_step = self._compute_step_of(phase, self.module)

        def compute_one(
            state: Tree, module_buffers: Tree, batch: Batch, *known: Any
        ) -> tuple[Tree, Tensor]:
            terms, step = compute_step(state, module_buffers, batch, *known)
            return terms, torch.cat([step.features, step.logits], 1)

        compute_all = vmap(compute_one, randomness="different")
        with torch.autocast(mask.device.type, torch.bfloat16, enabled=self.plan.half):
            terms, outputs = compute_all(state, module_buffers, batch, *_take_known(workspace))
        return StepOutputs(terms, outputs, mask)

    def _compute_privately(
        self, phase: int, workspace: Tree, state: Tree
    ) -> tuple[Tree, StepOutputs]:
        """Return the noisy mean of the records' clipped gradients, and what `_compute` returns.

        The layers are the module's own: those of a stack know one axis of clients, not another one
        of records within it.
        """
        assert self.private is not None
        norm = self.private.norm
        batch, module_buffers, mask = self._gather_batch(workspace)
        compute_step = self._compute_step_of(phase, self.group.module)
        trained = {name: state[name] for name in self.trained_names[phase]}

        def compute_one(
            trained: Tree, state: Tree, keep: Tree, batch: Batch, *known: Any
        ) -> tuple[Tree, Tree, Tensor]:
            def compute_terms(trained: Tree, of_one: Batch, keep: Tree) -> tuple[Tree, Step]:
                return compute_step(state | trained, keep, of_one, *known)

            computed = record_gradients(compute_terms, trained, batch, keep)
            sums = sum_clipped(computed.gradients, batch.mask, norm)
            outputs = torch.cat([computed.step.features, computed.step.logits], 1)
            return sums, computed.terms, outputs

        compute_all = vmap(compute_one, randomness="different")
        batch = batch._replace(mask=mask)
        known = _take_known(workspace)
        with torch.autocast(mask.device.type, torch.bfloat16, enabled=self.plan.half):
            sums, terms, outputs = compute_all(trained, state, module_buffers, batch, *known)
        of_one_client = {name: value[0] for name, value in trained.items()}
        noise = self.private.draw_noise(of_one_client, known.key.tolist(), known.steps.tolist())
        gradients = {}
        for name, value in sums.items():
            expected = align_axes(workspace["expected"], value)
            gradients[name] = (value + noise[name]) / expected
        return gradients, StepOutputs(terms, outputs, mask)

    def _compute_step_of(self, phase: int, module: nn.Module) -> Callable[..., tuple[Tree, Step]]:
        """Return a function of one client's tensors that gives the terms of its loss, and its step.

        It takes the state, buffers of the module such as what dropout keeps, the batch, and what
        else the client knows.
        """
        compute_loss = self.phases[phase].loss or self.algorithm.loss
        has_ties = self.has_ties
        if not module.training:
            module.train()

        def compute_step(
            state: Tree,
            module_buffers: Tree,
            batch: Batch,
            received: State,
            kept: State,
            *rest: Tensor,
        ) -> tuple[Tree, Step]:
            def run_other(others: Tree) -> tuple[Tensor, Tensor]:
                return run_copy(module, state | others, module_buffers, batch.x)

            tensors = state | module_buffers
            features, logits = functional_call(module, tensors, (batch.x,), tie_weights=has_ties)
            step = Step(state, features, logits, batch, received, kept, run_other, *rest)
            return compute_loss(step), step

        return compute_step

    def _gather_batch(self, workspace: Tree) -> StepBatch:
        """Return the batches of the next step.

        A client without a batch left is shown a full one, whose results are not used: a loss may
        divide by the sum of the mask.
        """
        at = _take_step(workspace, "at")
        mask = _take_step(workspace, "mask")
        shown = mask + (mask.sum(1, keepdim=True) == 0)
        rows = workspace["rows"].gather(1, at)
        x = self.group.train.x[rows]
        y = self.group.train.y[rows]
        client = torch.arange(len(at), device=at.device)[:, None]
        if "crops" in workspace:
            border = workspace["border"][:, None].expand(-1, at.shape[1], -1).flatten(0, 1)
            crops = workspace["crops"][client, at].flatten(0, 1)
            x = crop_and_flip(x.flatten(0, 1), border, crops).view_as(x)
        module_buffers = {}
        for name, value in part_of_tree(workspace, "keep.").items():
            module_buffers[name] = value[client, at]
        for name in self.padding_buffers:
            module_buffers[name] = shown
        weighted = shown
        if "class_weights" in workspace:
            weighted = weigh_samples(shown, workspace["class_weights"].gather(1, y))
        return StepBatch(Batch(x, y, weighted), module_buffers, mask)


def has_tied_tensors(module: nn.Module) -> bool:
    """Return whether a parameter or buffer of a module has several names."""
    for named in (module.named_parameters, module.named_buffers):
        if len(list(named())) < len(list(named(remove_duplicate=False))):
            return True
    return False


def part_of_tree(tree: Tree, prefix: str) -> Tree:
    """Return the values whose names have a prefix, without it."""
    part = {}
    for name, value in tree.items():
        if name.startswith(prefix):
            part[name.removeprefix(prefix)] = value
    return part


def _take_first(workspace: Tree, clients: int) -> Tree:
    """Return the part of a workspace that belongs to the first clients."""
    first_clients = {}
    for name, value in workspace.items():
        first_clients[name] = value if name == STEP else value[:clients]
    return first_clients


def _take_known(workspace: Tree) -> Known:
    """Return what the clients know in the next step."""
    key, number, steps_before = workspace["client"].unbind(1)
    return Known(
        received=unflatten_state(part_of_tree(workspace, "received.")),
        kept=unflatten_state(part_of_tree(workspace, "kept.")),
        lr=workspace["lr"],
        steps=steps_before + workspace[STEP],
        key=key,
        number=number,
        momentum=workspace["momentum"],
    )


def _take_step(workspace: Tree, table: str) -> Tensor:
    """Return a table's values for the next step: (m, b)."""
    return workspace[table].index_select(1, workspace[STEP])[:, 0]


def _clip(gradients: Tree, clip_norm: float) -> Tree:
    """Return the gradients (m, …), scaled where the norm of all of a client's is too large."""
    squared_norms = [gradient.flatten(1).square().sum(1) for gradient in gradients.values()]
    factor = clip_factor(squared_norms, clip_norm)
    clipped = {}
    for name, gradient in gradients.items():
        clipped[name] = gradient * align_axes(factor, gradient)
    return clipped


def _move_by_sgd(
    value: Tensor, velocity: Tensor, gradient: Tensor, momentum: Tensor, rate: Tensor
) -> None:
    """Do one step of SGD in place, for parameters (m, …), by each client's momentum and rate.

    v ← momentum·v + g, w ← w − lr·v
    """
    if value.is_cuda and not is_fusing():
        descend(value, velocity, gradient, momentum, rate)
    else:
        velocity.mul_(align_axes(momentum, velocity)).add_(gradient)
        value.addcmul_(velocity, align_axes(rate, velocity), value=-1)
