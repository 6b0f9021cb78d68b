"""One client's round, as pure functions.

They take the client's parameters and what the server sent, and return new parameters and an upload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedproto.core import codec, rng
from fedproto.core.batches import (
    Training,
    count_passes,
    count_steps,
    draw_batches,
    draw_private_batches,
    list_trained_names,
    steps_per_epoch,
)
from fedproto.core.closed_form import TEACHER
from fedproto.core.contract import check_kept, check_phases, check_same_kept, check_upload
from fedproto.core.federation import EvaluatedPart, Examples, Member
from fedproto.core.metrics import mark_correct
from fedproto.core.optimisers import Optimiser, adam_rates, clip_factor, move_by_adam
from fedproto.core.private_steps import expected_batch, record_gradients, sum_clipped
from fedproto.core.tensors import join_client, map_upload, split_client
from fedproto.core.types import Algorithm, Batch, Phase, State, Step, Task, Tree, Upload

EVALUATION_BATCH = 1000  # examples per forward pass


class Outcome(NamedTuple):
    """What a client's training results in."""

    state: Tree  # the whole one: see `tensors.join_client`
    upload: Upload  # as the server decodes it
    sizes: Tensor  # (groups, 2): values and bytes of what travels
    loss: Tree  # the mean of each term over the samples of all steps
    wire: Upload  # what travels; the upload itself, unless there are transforms


class RoundContext(NamedTuple):
    """What a client's steps know of the round."""

    received: State
    rate: Tensor  # () the learning rate
    key: Tensor  # () of (seed, round, client)
    number: Tensor  # () the client's number
    momentum: Tensor  # () of SGD


class TrainedStep(NamedTuple):
    """A step that was trained on, without its graph, and the terms of its loss."""

    step: Step
    terms: Tree


def start_client(algorithm: Algorithm, params: Tree, task: Task) -> Tree:
    """Return the whole state of a client before its first round."""
    kept = check_kept(algorithm.client_init(params, task))
    check_phases(algorithm, kept)
    return join_client(params, kept)


def algorithm_key(seed: int | Tensor, round: int, client: int | Tensor) -> Tensor:
    """Return the key from which an algorithm's functions draw; clients may be a tensor."""
    return rng.key(seed, "algorithm", round, client)


def train(
    member: Member,
    algorithm: Algorithm,
    own: Tree,
    received: State,
    training: Training,
    round: int,
    slow: bool = False,
    once_due: bool = True,
) -> Outcome:
    """Return the client's new state, its upload and its loss after a round of local training.

    The client adopts what it received, then runs the algorithm's phases. A slow client does half
    its steps. `own` is its whole state, as `start_client` returns it. `once_due` says whether the
    groups of `upload_once` are wanted.
    """
    own_params, kept = split_client(own)
    params = algorithm.start_from(own_params, received, kept)
    kept = check_same_kept(kept, algorithm.client_start(kept, received), "client_start")
    like = next(value for value in own_params.values() if value.is_floating_point())
    context = RoundContext(
        received=received,
        rate=like.new_tensor(training.rate(round)),
        key=algorithm_key(training.seed, round, member.id).to(like.device),
        number=torch.tensor(member.id, device=like.device),
        momentum=like.new_tensor(training.momentum),
    )
    trained: list[TrainedStep] = []
    last_phase: list[TrainedStep] = []
    per_epoch = steps_per_epoch(member, training)
    epoch = 0
    with seed_module_draws(training.seed, round, member.id, member.train.x.device):
        for phase in algorithm.phases:
            names = list_trained_names(member.module, phase)
            if not names:  # a phase may have nothing to train: FedRep without a personal layer
                continue
            step_count = count_steps(phase, training, per_epoch)
            epochs = count_passes(step_count, per_epoch)
            if slow:
                step_count = math.ceil(step_count / 2)
            if training.private is None:
                in_epochs = range(epoch, epoch + epochs)
                batches = draw_batches(member, training, round, in_epochs, step_count)
            else:
                batches = draw_private_batches(
                    member, training, round, int(context.key), len(trained), step_count
                )
            start = trained_tree(phase, params, kept)
            moved, steps = _run_phase(
                member,
                algorithm,
                phase,
                names,
                start,
                kept,
                context,
                batches,
                training,
                training.rate(round),
                len(trained),
            )
            params, kept = replace_trained(phase, params, kept, moved)
            trained += steps
            last_phase = steps
            epoch += epochs
    steps_seen = [each.step for each in last_phase]
    closing_step = _closing_step(member, algorithm, params, received, steps_seen, training)
    closing_step = closing_step._replace(
        state=kept,
        lr=context.rate,
        steps=torch.tensor(len(trained), device=like.device),
        key=context.key,
        number=context.number,
        momentum=context.momentum,
    )
    upload, wire = make_upload(algorithm, algorithm.upload, closing_step)
    if algorithm.upload_once is not None and once_due:
        batch = _batch_of_rows(member.train, like)
        once_step = closing_step._replace(
            features=like.new_empty(0), logits=like.new_empty(0), batch=batch
        )
        once_upload, once_wire = make_upload(algorithm, algorithm.upload_once, once_step)
        upload = upload | once_upload
        wire = wire | once_wire
    sizes = codec.upload_sizes(map_upload(wire, lambda value: value[None]), clients=1)[0]
    kept = check_same_kept(kept, algorithm.client_update(closing_step), "client_update")
    kept = _validate(member, algorithm, closing_step._replace(state=kept))
    state = join_client(params, kept)
    return Outcome(state, upload, sizes, _mean_loss(trained), wire)


def make_upload(
    algorithm: Algorithm, compute: Callable[[Step], Upload], step: Step
) -> tuple[Upload, Upload]:
    """Return a client's upload as the server will decode it, and what travels of it.

    compute  the algorithm's `upload` or `upload_once`
    """
    upload = check_upload(compute(step))
    if algorithm.encode is None or algorithm.decode is None:
        return upload, upload
    wire = algorithm.encode(upload, step)
    return algorithm.decode(wire, step.received), wire


def trained_tree(phase: Phase, params: Tree, kept: State) -> Tree:
    """Return what a phase trains: the model, or a tree that the client keeps beside it.

    Of a tree that lacks some of the model's names, these are the model's own.
    """
    if not phase.model:
        return params
    return params | kept[phase.model]


def replace_trained(phase: Phase, params: Tree, kept: State, moved: Tree) -> tuple[Tree, State]:
    """Return the client's model, and what it keeps beside it, after a phase has trained `moved`."""
    if not phase.model:
        return moved, kept
    tree = {name: moved[name] for name in kept[phase.model]}
    return params, kept | {phase.model: tree}


@contextmanager
def seed_module_draws(seed: int, round: int, client: int, device: torch.device) -> Iterator[None]:
    """Make what a module draws by itself, as by `F.dropout`, depend on seed, round and client.

    Runs repeat that way. Afterwards torch's generators are as they were.
    """
    with rng.preserve_torch_generators(device):
        rng.seed_torch_generators(int(rng.key(seed, "a module's own", round, client)))
        yield


def forward(
    module: nn.Module,
    params: Tree,
    batch: Batch,
    keep: Tree,
    kept: State,
    context: RoundContext,
    steps: Tensor,
) -> Step:
    """Return the step of one batch.

    keep   what each dropout layer keeps of the batch
    kept   what the client keeps beside its model
    steps  () how many steps came before in this round
    """

    def run_other(others: Tree) -> tuple[Tensor, Tensor]:
        return run_copy(module, params | others, keep, batch.x)

    features, logits = functional_call(module, params | keep, (batch.x,))
    return Step(
        params=params,
        features=features,
        logits=logits,
        batch=batch,
        received=context.received,
        state=kept,
        forward=run_other,
        lr=context.rate,
        steps=steps,
        key=context.key,
        number=context.number,
        momentum=context.momentum,
    )


def run_copy(module: nn.Module, params: Tree, keep: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and logits; buffers that the module updates in training are copied first."""
    return functional_call(module, with_copied_buffers(module, params) | keep, (x,))


def with_copied_buffers(module: nn.Module, params: Tree) -> Tree:
    """Return parameters with copies of a module's buffers, to which it may write in any mode."""
    copies = {name: params[name].clone() for name, _ in module.named_buffers() if name in params}
    return params | copies


def _run_phase(
    member: Member,
    algorithm: Algorithm,
    phase: Phase,
    names: list[str],
    state: Tree,
    kept: State,
    context: RoundContext,
    batches: Iterator[tuple[Batch, Tree]],
    training: Training,
    rate: float,
    steps_before: int,
) -> tuple[Tree, list[TrainedStep]]:
    """Train the named parameters over the batches; return the new state and the steps.

    All that the phase does not train, buffers included, stays as it was.
    """
    compute_loss = phase.loss or algorithm.loss
    moving = {name: value.detach().clone() for name, value in state.items()}
    leaves = [moving[name].requires_grad_() for name in names]
    moments = [_start_moments(leaf, training.optimiser) for leaf in leaves]
    member.module.train()
    private = training.private
    expected = expected_batch(training.batch, len(member.train))

    def compute_terms(params: Tree, batch: Batch, keep: Tree, steps: Tensor) -> tuple[Tree, Step]:
        step = forward(member.module, moving | params, batch, keep, kept, context, steps)
        return compute_loss(step), step

    trained: list[TrainedStep] = []
    for batch, keep in batches:
        steps = torch.tensor(steps_before + len(trained), device=batch.y.device)
        gradients: Sequence[Tensor]
        if private is None:
            terms, step = compute_terms({}, batch, keep, steps)
            loss = torch.stack(list(terms.values())).sum()
            gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        else:
            values = {name: moving[name].detach() for name in names}
            compute_one = partial(compute_terms, steps=steps)
            of_records, terms, step = record_gradients(compute_one, values, batch, keep)
            noise = private.draw_noise(values, [int(context.key)], [int(steps)])
            sums = sum_clipped(of_records, batch.mask, private.norm)
            gradients = [(sums[name] + noise[name][0]) / expected for name in names]
        _descend(leaves, moments, gradients, training, rate, step_number=len(trained) + 1)
        detached_terms = {name: term.detach() for name, term in terms.items()}
        trained.append(TrainedStep(_without_graph(step), detached_terms))
    new_state = {}
    for name, value in state.items():
        new_state[name] = moving[name].detach() if phase.trains(name) else value
    return new_state, trained


def _start_moments(leaf: Tensor, optimiser: Optimiser) -> list[Tensor]:
    """Return what an optimiser keeps for a parameter, at the start of a phase."""
    return [torch.zeros_like(leaf) for _ in optimiser.moments]


@torch.no_grad()
def _descend(
    leaves: list[Tensor],
    moments: list[list[Tensor]],
    gradients: Sequence[Tensor],
    training: Training,
    rate: float,
    step_number: int,
) -> None:
    """Do one step of the optimiser in place; the first has the number 1.

    SGD's is v ← momentum·v + g, w ← w − lr·v.
    """
    optimiser = training.optimiser
    if optimiser.clip_norm:
        squared_norms = [gradient.square().sum() for gradient in gradients]
        factor = clip_factor(squared_norms, optimiser.clip_norm)
        gradients = [gradient * factor for gradient in gradients]
    rates = adam_rates(rate, step_number)
    for leaf, kept, gradient in zip(leaves, moments, gradients, strict=True):
        gradient = optimiser.decay_gradient(gradient, leaf)
        optimiser.shrink(leaf, rate)
        if optimiser.name == "sgd":
            (velocity,) = kept
            velocity.mul_(training.momentum).add_(gradient)
            leaf.sub_(velocity, alpha=rate)
        else:
            mean, square = kept
            move_by_adam(leaf, mean, square, gradient, rates)


def _without_graph(step: Step) -> Step:
    """Return a step that holds neither parameters nor the graph of its gradient."""
    features = step.features.detach()
    logits = step.logits.detach()
    return Step({}, features, logits, step.batch, received={})


def _closing_step(
    member: Member,
    algorithm: Algorithm,
    state: Tree,
    received: State,
    seen: list[Step],
    training: Training,
) -> Step:
    """Return one step over all the client's samples, with the features the algorithm asks for.

    seen  the steps of the last phase, of which the last epoch, maybe a partial one, is collected
    """
    if algorithm.collects == "during":
        per_epoch = steps_per_epoch(member, training)
        epochs_before = (len(seen) - 1) // per_epoch
        last_epoch = seen[epochs_before * per_epoch :]
        y = torch.cat([step.batch.y for step in last_epoch])
        features = torch.cat([step.features for step in last_epoch])
        logits = torch.cat([step.logits for step in last_epoch])
        return Step(state, features, logits, _batch_without_inputs(y, features), received)
    if algorithm.collects == "after":
        return _evaluation_step(member.module, state, member.train, received)
    y = member.train.y[member.train.rows]
    empty = member.train.x.new_empty(0)
    return Step(state, empty, empty, _batch_without_inputs(y, empty), received)


def _batch_without_inputs(y: Tensor, like: Tensor) -> Batch:
    """Return a batch of samples of which only the classes are kept, in the type of `like`."""
    return Batch(like.new_empty(0), y, like.new_ones(len(y)))


def _batch_of_rows(examples: Examples, like: Tensor) -> Batch:
    """Return a batch of all examples without their inputs, but with their fixed features."""
    batch = _batch_without_inputs(examples.y[examples.rows], like)
    if examples.fixed is None:
        return batch
    return batch._replace(fixed={TEACHER: examples.fixed[examples.rows]})


def _validate(member: Member, algorithm: Algorithm, closing_step: Step) -> State:
    """Return what the client keeps after `client_validate`; without validation rows, as before."""
    examples = member.validation
    kept = closing_step.state
    if algorithm.client_validate is None or examples is None or not len(examples):
        return kept

    def run_other(others: Tree) -> tuple[Tensor, Tensor]:
        return _run_in_eval_mode(member.module, closing_step.params | others, examples)

    features, logits = run_other({})
    batch = _batch_of_rows(examples, features)._replace(x=examples.x[examples.rows])
    step = closing_step._replace(features=features, logits=logits, batch=batch, forward=run_other)
    return check_same_kept(kept, algorithm.client_validate(step), "client_validate")


def _evaluation_step(module: nn.Module, state: Tree, examples: Examples, received: State) -> Step:
    """Return one step over all examples in eval mode."""
    features, logits = _run_in_eval_mode(module, state, examples)
    batch = _batch_of_rows(examples, features)
    return Step(state, features, logits, batch, received)


def _run_in_eval_mode(module: nn.Module, state: Tree, examples: Examples) -> tuple[Tensor, Tensor]:
    """Return features and logits of all examples, computed EVALUATION_BATCH at a time."""
    module.eval()
    visible = with_copied_buffers(module, state)
    all_features = []
    all_logits = []
    with torch.no_grad():
        for rows in examples.rows.split(EVALUATION_BATCH):
            features, logits = functional_call(module, visible, (examples.x[rows],))
            all_features.append(features)
            all_logits.append(logits)
    return torch.cat(all_features), torch.cat(all_logits)


def embed(module: nn.Module, state: Tree, examples: Examples) -> tuple[Tensor, Tensor]:
    """Return the embeddings of all examples in eval mode, and their classes."""
    step = _evaluation_step(module, state, examples, received={})
    return step.features, step.batch.y


def _mean_loss(trained: list[TrainedStep]) -> Tree:
    """Return each term's mean over the samples of all steps; nothing without any step."""
    if not trained:
        return {}
    sizes = torch.stack([each.step.batch.mask.sum() for each in trained])
    total = sizes.sum()
    total = torch.where(total > 0, total, 1)  # private steps may all have been without records
    means = {}
    zero = torch.zeros_like(sizes[0])
    names = dict.fromkeys(name for each in trained for name in each.terms)
    for name in names:  # a phase may have terms of its own, which are 0 in the others
        values = torch.stack([each.terms.get(name, zero) for each in trained])
        means[name] = values @ sizes / total
    return means


def evaluate(
    member: Member,
    algorithm: Algorithm,
    own: Tree,
    received: State,
    part: EvaluatedPart = "test",
) -> dict[str, float]:
    """Return the client's accuracies on one part of its data, as fractions.

    They have the names that `metrics` gives them.
    """
    scores, y = score(member, algorithm, own, received, part)
    classes = next(iter(scores.values())).shape[1]
    own_classes = torch.zeros(classes, dtype=torch.bool, device=y.device)
    own_classes[list(member.classes)] = True
    correct = mark_correct(scores, y, own_classes)
    return {name: float(values.double().mean()) for name, values in correct.items()}


def score(
    member: Member,
    algorithm: Algorithm,
    own: Tree,
    received: State,
    part: EvaluatedPart = "test",
) -> tuple[Tree, Tensor]:
    """Return the algorithm's scores of one part of a client's data, (n, C) each, and the classes.

    The classes of the rows are (n,), numbered as in the federation.
    """
    own_params, kept = split_client(own)
    state = algorithm.start_from(own_params, received, kept)
    step = _evaluation_step(member.module, state, member.examples_of(part), received)
    return algorithm.predict(step._replace(state=kept)), step.batch.y
