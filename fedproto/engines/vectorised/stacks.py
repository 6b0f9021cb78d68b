"""A stack: clients of one architecture group side by side, trained and evaluated together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedproto.core import codec
from fedproto.core.batches import Training, count_passes, list_trained_names
from fedproto.core.closed_form import TEACHER
from fedproto.core.contract import check_same_kept
from fedproto.core.engine import even_size
from fedproto.core.federation import EvaluatedPart
from fedproto.core.local_training import (
    make_upload,
    replace_trained,
    seed_module_draws,
    trained_tree,
)
from fedproto.core.metrics import divide_counts, mark_correct
from fedproto.core.tensors import (
    flatten_state,
    join_client,
    move_index,
    split_client,
    unflatten_state,
)
from fedproto.core.types import Algorithm, Batch, Phase, State, Step, Tree, Upload, refuse_forward
from fedproto.engines.vectorised.architecture_groups import ArchitectureGroup, Data
from fedproto.engines.vectorised.attention import plain_attention
from fedproto.engines.vectorised.forward_passes import ForwardPasses
from fedproto.engines.vectorised.layers import make_stackable
from fedproto.engines.vectorised.memory import free_memory, training_memory, values_per_pass
from fedproto.engines.vectorised.plan import Plan
from fedproto.engines.vectorised.steps import Steps, part_of_tree
from fedproto.engines.vectorised.timetable import Timetable

#: Clients whose small models a CPU's caches hold.
CPU_CLIENTS_AT_ONCE = 10
#: Gradients of single records that a CPU works on at a time: its caches are too small for more.
CPU_BYTES_OF_RECORD_GRADIENTS = 2**24
#: Scores (rows times classes) of clients that are measured together: 80 MB for each named score.
MAX_SCORES_AT_ONCE = 20_000_000
#: Fixed features (rows times values) of clients whose `upload_once` is computed together: 64 MB.
MAX_FIXED_AT_ONCE = 16_000_000


class TrainedClients(NamedTuple):
    """The outcome of a round for m clients."""

    uploads: Upload  # with a leading axis over the clients
    sizes: Tensor  # (m, groups, 2): values and bytes of what travels
    loss: Tree  # each term, (m,)
    sound: Tensor  # (m,) whether loss, parameters and upload are finite


class _ScoredColumns(NamedTuple):
    """The scores of some columns of m clients' rows."""

    scores: Tree  # (m, columns, C) each
    y: Tensor  # (m, columns)
    inside: Tensor  # (m, columns) false where a client has no such row


class Stack:
    """Trains and evaluates some of an architecture group's clients at a time.

    Their positions in the group say which ones. `capacity` is the largest number at a time.
    """

    def __init__(
        self, group: ArchitectureGroup, algorithm: Algorithm, training: Training, plan: Plan
    ) -> None:
        self.group = group
        self.algorithm = algorithm
        module, padding_buffers = make_stackable(group.module, plan.tidy)
        if not _has_partial_batches(group, training.batch):
            padding_buffers = []
        self.phases = [
            phase for phase in algorithm.phases if list_trained_names(group.module, phase)
        ]
        self.capacity = even_size(len(group), plan.stack or _choose_capacity(group, training))
        self.timetable = Timetable(
            group, self.phases, training, collecting=algorithm.collects == "during"
        )
        self.steps = Steps(
            group,
            module,
            padding_buffers,
            algorithm,
            self.phases,
            self.timetable,
            self.capacity,
            plan,
        )
        self.forward_passes = ForwardPasses(module, group.lr.dtype, plan.compile, plan.half)
        #: The tables of the next round, by its number, and the clients they are for.
        self.tables_ahead: dict[int, tuple[Tensor, list[Tree]]] = {}

    def clear(self) -> None:
        """Free what was recorded, compiled or made ahead."""
        self.steps.clear()
        self.forward_passes.clear()
        self.tables_ahead.clear()

    def split_into_chunks(self, positions: Tensor, slow: Tensor) -> Iterator[Tensor]:
        """Yield the clients to train, those with most steps first, at most `capacity` at a time.

        slow  whether a client does half its steps, for every client of the group
        """
        if not len(positions):
            return
        if not self.phases:
            yield from positions.split(self.capacity)
            return
        steps = self.timetable.count_steps(positions, self.phases[0], slow[positions])
        most_first = steps.argsort(descending=True, stable=True)
        yield from positions[most_first].split(self.capacity)

    # --- training

    def train(
        self,
        round: int,
        positions: Tensor,
        received: State,
        slow: Tensor,
        once_due: bool = True,
    ) -> TrainedClients:
        """Do a round of local training of some clients, and keep their new states.

        received  what the server sent, with a leading axis over these clients
        slow      (m,) whether a client does half its steps
        once_due  whether the groups of `upload_once` are wanted
        """
        params, kept = self._start_round(positions, received)
        tables = self._make_or_take_tables(round, positions, slow)
        phase_results: list[Tree] = []
        first = int(positions[0])
        seed = int(self.group.seed[first])
        client = int(self.group.number[first])
        device = self.group.device
        with seed_module_draws(seed, round, client, device), plain_attention(device):
            for number, phase in enumerate(self.phases):
                step_counts = self.timetable.count_steps(positions, phase, slow)
                start = trained_tree(phase, params, kept)
                moved, results = self.steps.run_phase(
                    number, start, kept, received, tables[number], step_counts
                )
                moved = _replace_trained(start, moved, phase)
                params, kept = replace_trained(phase, params, kept, moved)
                phase_results.append(results)
        self._prepare_next_round(round, positions, slow)
        closing_step = self._closing_step(positions, params, received, phase_results)
        facts = tables[-1] if tables else self.timetable.describe_idle_clients(round, positions)
        key, client_number, steps_before = facts["client"].unbind(1)
        has_step = facts["has_step"] if "has_step" in facts else facts["mask"].amax(2)
        closing_step = closing_step._replace(
            state=kept,
            lr=facts["lr"],
            steps=steps_before + has_step.sum(1).long(),
            key=key,
            number=client_number,
            momentum=facts["momentum"],
        )
        uploads, wire, updated = _finish(self.algorithm, closing_step)
        kept = check_same_kept(kept, updated, "client_update")
        kept = self._validate(positions, closing_step._replace(state=kept))
        sizes = codec.upload_sizes(wire, len(positions))
        if self.algorithm.upload_once is not None and once_due:
            once_uploads, once_wire = self._upload_once(positions, closing_step)
            once_sizes = codec.upload_sizes(once_wire, len(positions)).to(sizes.device)
            sizes = torch.cat([sizes, once_sizes], 1)
            uploads = uploads | once_uploads
        state = join_client(params, kept)
        self.group.states.put(positions, state)
        loss = _mean_loss(phase_results)
        sound = _are_finite(_take_values(state, uploads) | loss)
        return TrainedClients(uploads, sizes, loss, sound)

    def _start_round(self, positions: Tensor, received: State) -> tuple[Tree, State]:
        """Return what the clients train from, and what they keep beside their models."""
        own, kept = split_client(self.group.states.take(positions))
        params = vmap(self.algorithm.start_from)(own, received, kept)
        if kept:
            started = vmap(self.algorithm.client_start)(kept, received)
            kept = check_same_kept(kept, started, "client_start")
        return params, kept

    def _make_or_take_tables(self, round: int, positions: Tensor, slow: Tensor) -> list[Tree]:
        """Return the tables of a round, which may have been made ahead for just these clients."""
        if round in self.tables_ahead:
            expected_positions, tables = self.tables_ahead.pop(round)
            if torch.equal(expected_positions, positions) and not slow.any():
                return tables
        return self.timetable.make_tables(round, positions, slow)

    def _prepare_next_round(self, round: int, positions: Tensor, slow: Tensor) -> None:
        """Make the next round's tables while a GPU is busy, if all clients will likely train."""
        if self.group.device.type != "cuda" or len(positions) < len(self.group) or slow.any():
            return
        tables = self.timetable.make_tables(round + 1, positions, slow)
        self.tables_ahead = {round + 1: (positions, tables)}

    def _closing_step(
        self, positions: Tensor, state: Tree, received: State, phase_results: list[Tree]
    ) -> Step:
        """Return a step over all the clients' samples, with the features the algorithm asks for."""
        if self.algorithm.collects == "during":
            return self._collected_step(state, received, phase_results)
        data = self.group.train
        dtype = self.group.lr.dtype
        on_device = move_index(positions, data.x.device)
        y = data.y[data.rows[on_device]]
        inside = torch.arange(y.shape[1], device=y.device) < data.lengths[on_device, None]
        empty = self.group.lr.new_empty(len(positions), 0)
        batch = Batch(empty, y, inside.to(dtype))
        if self.algorithm.collects == "nothing":
            return Step(state, empty, empty, batch, received)
        all_features = []
        all_logits = []
        for outputs in self.forward_passes.run(state, data, positions):
            all_features.append(outputs.features)
            all_logits.append(outputs.logits)
        return Step(state, torch.cat(all_features, 1), torch.cat(all_logits, 1), batch, received)

    def _collected_step(self, state: Tree, received: State, phase_results: list[Tree]) -> Step:
        """Return the step over the samples that the phases collected.

        Each slot was filled in one phase at most, and is zero in the others.
        """

        def collected(name: str) -> Tensor:
            by_phase = torch.stack([results[name] for results in phase_results])
            return by_phase.sum(0)[:, :-1]  # without the unused slot

        outputs = collected("collected")
        y = collected("labels")
        mask = collected("taken")
        classes = self.group.own.shape[1]
        features, logits = outputs.split([outputs.shape[2] - classes, classes], 2)
        batch = Batch(self.group.lr.new_empty(len(y), 0), y, mask)
        return Step(state, features, logits, batch, received)

    def _upload_once(self, positions: Tensor, closing_step: Step) -> tuple[Upload, Upload]:
        """Return the groups that are sent once, and what travels of them.

        They are computed for as many clients at a time as fit.
        """
        data = self.group.train
        on_device = move_index(positions, data.x.device)
        rows = data.rows[on_device]
        inside = torch.arange(rows.shape[1], device=rows.device) < data.lengths[on_device, None]

        def upload_one(rows: Tensor, inside: Tensor, *fields: Any) -> tuple[Upload, Upload]:
            params, _, _, _, received, kept, *rest = fields
            empty = self.group.lr.new_empty(0)
            batch = Batch(empty, data.y[rows], inside.to(self.group.lr.dtype))
            batch = batch._replace(fixed=_take_fixed(data, rows))
            step = Step(params, empty, empty, batch, received, kept, refuse_forward, *rest)
            assert self.algorithm.upload_once is not None
            return make_upload(self.algorithm, self.algorithm.upload_once, step)

        width = 1 if data.fixed is None else data.fixed.shape[1]
        clients_at_once = max(1, MAX_FIXED_AT_ONCE // max(1, rows.shape[1] * width))
        upload_all = vmap(upload_one, chunk_size=clients_at_once)
        return upload_all(rows, inside, *_fields_of(closing_step))

    def _validate(self, positions: Tensor, closing_step: Step) -> State:
        """Return what the clients keep after `client_validate`, as many of them at a time as fit.

        Those without validation rows keep what they have.
        """
        data = self.group.validation
        kept = closing_step.state
        if self.algorithm.client_validate is None or data is None or not data.rows.shape[1]:
            return kept
        values_per_client = data.rows.shape[1] * data.x[0].numel()
        clients_at_once = max(1, values_per_pass(data.x.device) // values_per_client)
        on_device = move_index(positions, data.x.device)
        rows = data.rows[on_device]
        inside = torch.arange(rows.shape[1], device=rows.device) < data.lengths[on_device, None]

        def validate_one(rows: Tensor, inside: Tensor, *fields: Any) -> State:
            params, _, _, _, received, kept, *rest = fields
            x = data.x[rows]
            batch = Batch(x, data.y[rows], inside.to(self.group.lr.dtype))
            batch = batch._replace(fixed=_take_fixed(data, rows))

            def run_other(others: Tree) -> tuple[Tensor, Tensor]:
                return self.forward_passes.run_client(params | others, x)

            features, logits = run_other({})
            step = Step(params, features, logits, batch, received, kept, run_other, *rest)
            assert self.algorithm.client_validate is not None
            chosen = check_same_kept(kept, self.algorithm.client_validate(step), "client_validate")
            return {
                name: torch.where(inside.any(), value, flatten_state(kept)[name])
                for name, value in flatten_state(chosen).items()
            }

        fields = _fields_of(closing_step)
        validate_all = vmap(validate_one, chunk_size=clients_at_once)
        with plain_attention(self.group.device):
            return unflatten_state(validate_all(rows, inside, *fields))

    # --- evaluation

    def evaluate(self, positions: Tensor, received: State, part: EvaluatedPart = "test") -> Tree:
        """Return some clients' accuracies on a part of their data: (m,) each, float64, on the CPU.

        A client without rows of this part has accuracy 0.
        """
        on_device = move_index(positions, self.group.device)
        own_classes = self.group.own[on_device] > 0
        counts: Tree = {}
        for scores, y, inside in self._score_columns(positions, received, part):
            for name, correct in mark_correct(scores, y, own_classes).items():
                counts[name] = counts.get(name, 0) + (correct & inside).sum(1)
        lengths = self.group.data_of(part).lengths[on_device]
        return divide_counts(counts, lengths.clamp(min=1))

    def split_to_measure(self, part: EvaluatedPart) -> Iterator[Tensor]:
        """Yield the positions of all clients, as many at a time as have MAX_SCORES_AT_ONCE."""
        classes = self.group.own.shape[1]
        scores_per_client = max(1, self.group.data_of(part).rows.shape[1] * classes)
        clients = max(1, min(self.capacity, MAX_SCORES_AT_ONCE // scores_per_client))
        yield from torch.arange(len(self.group)).split(clients)

    def score(
        self, positions: Tensor, received: State, part: EvaluatedPart
    ) -> Iterator[tuple[int, Tree, Tensor]]:
        """Yield each client's position, its scores, (n, C) each, and its rows' classes, (n,).

        All are on the CPU.
        """
        pieces = list(self._score_columns(positions, received, part))
        names = list(pieces[0].scores) if pieces else []
        joined = {}
        for name in names:
            joined[name] = torch.cat([piece.scores[name] for piece in pieces], 1).cpu()
        data = self.group.data_of(part)
        on_device = move_index(positions, self.group.device)
        y = data.y[data.rows[on_device]].cpu()
        lengths = data.lengths[on_device].tolist()
        for place, position in enumerate(positions.tolist()):
            length = lengths[place]
            scores = {name: values[place, :length] for name, values in joined.items()}
            yield position, scores, y[place, :length]

    def _score_columns(
        self, positions: Tensor, received: State, part: EvaluatedPart
    ) -> Iterator[_ScoredColumns]:
        """Yield the scores of some clients' rows, some columns of them at a time."""
        own, kept = split_client(self.group.states.take(positions))
        state = vmap(self.algorithm.start_from)(own, received, kept)
        data = self.group.data_of(part)
        on_device = move_index(positions, self.group.device)
        lengths = data.lengths[on_device]
        y = data.y[data.rows[on_device]]
        for features, logits, columns in self.forward_passes.run(state, data, positions):
            column_numbers = torch.arange(columns.start, columns.stop, device=y.device)
            inside = column_numbers < lengths[:, None]
            empty = features.new_empty(len(positions), 0)
            batch = Batch(empty, y[:, columns], inside.to(features.dtype))
            batch = batch._replace(fixed=_take_fixed(data, data.rows[on_device][:, columns]))
            scores = _predict(self.algorithm, state, features, logits, batch, received, kept)
            yield _ScoredColumns(scores, batch.y, inside)


def _finish(algorithm: Algorithm, step: Step) -> tuple[Upload, Upload, State]:
    """Return the clients' uploads, what travels of them, and what the clients keep.

    The tensors of the step have a leading axis over the clients.
    """

    def finish_one(*fields: Any) -> tuple[Upload, Upload, State]:
        params, features, logits, batch, received, kept, *rest = fields
        one_step = Step(params, features, logits, batch, received, kept, refuse_forward, *rest)
        upload, wire = make_upload(algorithm, algorithm.upload, one_step)
        return upload, wire if has_wire else {}, algorithm.client_update(one_step)

    has_wire = algorithm.encode is not None
    uploads, wire, kept = vmap(finish_one)(*_fields_of(step))
    return uploads, wire if has_wire else uploads, kept


def _take_fixed(data: Data, rows: Tensor) -> Tree:
    """Return the fixed features of some rows of the pool, if there are any, for a batch."""
    return {} if data.fixed is None else {TEACHER: data.fixed[rows]}


def _fields_of(step: Step) -> list[Any]:
    """Return the fields of a step, for `vmap`: all but `forward`, which is a function."""
    return [value for name, value in step._asdict().items() if name != "forward"]


def _take_values(state: Tree, uploads: Upload) -> Tree:
    """Return the values of a client's state and uploads that must be finite.

    Parameters that travel are taken once: their products with a weight are finite if they are.
    """
    values = dict(state)
    for place, (group_name, group) in enumerate(uploads.items()):
        for name, sums in group.sums.items():
            values[name if place == 0 else f"{group_name}/{name}"] = sums
    return values


def _predict(algorithm: Algorithm, *fields: Any) -> Tree:
    """Return the scores of the clients' rows, given the first fields of a step."""
    return vmap(lambda *one: algorithm.predict(Step(*one)))(*fields)


def _replace_trained(state: Tree, moved_state: Tree, phase: Phase) -> Tree:
    """Return the state after a phase: what it does not train stays as it was."""
    new_state = {}
    for name, value in state.items():
        new_state[name] = moved_state[name] if phase.trains(name) else value
    return new_state


def _has_partial_batches(group: ArchitectureGroup, batch: int) -> bool:
    """Return whether a client's last batch has padding."""
    lengths = group.train.lengths
    places_per_epoch = group.per_epoch.to(lengths.device) * batch
    return bool((places_per_epoch > lengths).any())


def _choose_capacity(group: ArchitectureGroup, training: Training) -> int:
    """Return how many clients to train at a time: on a GPU, as many as its memory holds."""
    free = free_memory(group.device)
    model_bytes = sum(value[0].nbytes for value in group.states.values.values())
    if free is None:
        if training.private is None:
            return CPU_CLIENTS_AT_ONCE
        gradient_bytes = model_bytes * min(training.batch, group.train.rows.shape[1])
        fitting = CPU_BYTES_OF_RECORD_GRADIENTS // gradient_bytes
        return max(1, min(CPU_CLIENTS_AT_ONCE, fitting))
    input_bytes = group.train.x[0].nbytes
    samples = group.train.rows.shape[1]
    if training.local_steps is not None:
        samples *= count_passes(training.local_steps, int(group.per_epoch.min()))
    need = training_memory(model_bytes, input_bytes, training.batch, group.dropped, samples)
    if training.private is not None:  # a gradient for each record, and its clipped copies
        need += 4 * model_bytes * 2 * training.batch
    return max(1, free // need)


def _mean_loss(phase_results: Sequence[Tree]) -> Tree:
    """Return each term's mean over the samples of all phases: (m,) each; nothing without any."""
    if not phase_results:
        return {}
    count = torch.stack([results["count"] for results in phase_results]).sum(0)
    count = torch.where(count > 0, count, 1)  # private steps may all have been without records
    means = {}
    zero = torch.zeros_like(count)
    names = dict.fromkeys(name for each in phase_results for name in part_of_tree(each, "terms."))
    for name in names:  # a phase may have terms of its own, which are 0 in the others
        by_phase = torch.stack([each.get(f"terms.{name}", zero) for each in phase_results])
        means[name] = by_phase.sum(0) / count
    return means


def _are_finite(tree: Tree) -> Tensor:
    """Return whether all of a client's values are finite: (m,).

    A sum is not finite where one of its terms is not.
    """
    sums = [value.reshape(len(value), -1).double().sum(1) for value in tree.values()]
    return torch.isfinite(torch.stack(sums)).all(0)
