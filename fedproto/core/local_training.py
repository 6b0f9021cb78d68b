"""One client's round, as pure functions: parameters and what the server sent in, parameters and an upload out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedproto.core import dropout, rng
from fedproto.core.federation import Examples, Member
from fedproto.core.metrics import mark_correct
from fedproto.core.types import Algorithm, Batch, Phase, Step, Tree, Upload

CROP = 4  # pixels of border around an image from which a crop of its own size is cut
EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Training:
    """How every client trains: SGD whose momentum starts fresh each round."""

    batch: int
    lr: float
    momentum: float
    epochs: int
    last_batch: Literal["auto", "keep", "drop"]
    seed: int


class Outcome(NamedTuple):
    state: Tree
    upload: Upload
    loss: Tree  # the mean of each term over the samples that passed


def train(
    member: Member, algorithm: Algorithm, own: Tree, received: Tree, training: Training, round: int, slow: bool = False
) -> Outcome:
    """Adopt what was received, run the algorithm's phases, and say what the server may know."""
    state = algorithm.adopt(own, received)
    seen: list[tuple[Step, Tree]] = []
    epoch = 0
    with seed_module_draws(training.seed, round, member.id, member.train.x.device):
        for phase in algorithm.phases:
            parameters = member.module.named_parameters()
            names = [name for name, value in parameters if value.requires_grad and phase.trains(name)]
            if names:  # a phase may have nothing to train: FedRep with no personal layer
                epochs = phase.epochs or training.epochs
                batches = _batches(member, training, round, range(epoch, epoch + epochs), slow)
                state, steps = _run_phase(member, algorithm, phase, names, state, received, batches, training)
                seen, epoch = seen + steps, epoch + epochs
    closing = _closing_step(member, algorithm, state, received, [step for step, _ in seen], training)
    return Outcome(state, algorithm.upload(closing), _mean_loss(seen))


@contextmanager
def seed_module_draws(seed: int, round: int, client: int, device: torch.device) -> Iterator[None]:
    """What a module draws for itself, as by calling `F.dropout`, depends on seed, round and client: runs repeat."""
    with rng.preserve_torch_generators(device):
        torch.manual_seed(int(rng.key(seed, "a module's own", round, client)))
        yield


def has_batch_norm(module: nn.Module) -> bool:
    """Whether it has BatchNorm."""
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


def steps_per_epoch(member: Member, training: Training) -> int:
    """How many batches an epoch has; the last, partial one counts, unless told otherwise or the model has BatchNorm.

    The statistics of a batch of two images, at layers where an image is one pixel, ruin a ResNet18 (and those of one
    image do not exist). A client with less than a full batch keeps what it has.
    """
    full, rest = divmod(len(member.train), training.batch)
    drop = training.last_batch == "drop" or (training.last_batch == "auto" and has_batch_norm(member.module))
    return full if not rest or (drop and full) else full + 1


def _batches(member: Member, training: Training, round: int, epochs: range, slow: bool) -> Iterator[tuple[Batch, Tree]]:
    """The batches of some epochs, freshly shuffled in each, and what dropout keeps of them; half of them if slow."""
    per_epoch, count = steps_per_epoch(member, training), len(member.train)
    left = math.ceil(len(epochs) * per_epoch / 2) if slow else len(epochs) * per_epoch
    device = member.train.rows.device

    def key(purpose: str, epoch: int) -> Tensor:
        return rng.key(training.seed, purpose, round, member.id, epoch).to(device)

    for epoch in epochs:
        rows = member.train.rows[rng.permutation(key("shuffle", epoch), count)]
        x, y = member.train.x[rows], member.train.y[rows]
        if member.border is not None:
            x = crop_and_flip(x, member.border, rng.uniform(key("augment", epoch), 3 * count).reshape(count, 3))
        keep = dropout.draw(member.dropped, key("dropout", epoch), count)
        for step in range(min(left, per_epoch)):
            part = slice(step * training.batch, min((step + 1) * training.batch, count))
            batch = Batch(x[part], y[part], x.new_ones(part.stop - part.start))
            yield batch, {name: value[part] for name, value in keep.items()}
        left -= min(left, per_epoch)


def crop_and_flip(x: Tensor, border: Tensor, draws: Tensor) -> Tensor:
    """Each image cut at a random place out of itself and a border, and mirrored half the time.

    `border` is one colour, (channels,), or one an image; `draws` are three numbers in [0, 1) an image.
    """
    height, width = x.shape[-2:]
    border = border[..., None, None]
    padded = F.pad(x - border, (CROP,) * 4) + border
    down, right = (draws[:, :2] * (2 * CROP + 1)).long().unbind(1)
    rows = down[:, None] + torch.arange(height, device=x.device)
    columns = right[:, None] + torch.arange(width, device=x.device)
    columns = torch.where(draws[:, 2:] < 0.5, columns.flip(1), columns)
    image = torch.arange(len(x), device=x.device)
    return padded.permute(0, 2, 3, 1)[image[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def forward(module: nn.Module, state: Tree, batch: Batch, received: Tree, keep: Tree) -> Step:
    features, logits = functional_call(module, state | keep, (batch.x,))
    return Step(state, features, logits, batch, received)


def _run_phase(
    member: Member,
    algorithm: Algorithm,
    phase: Phase,
    names: list[str],
    state: Tree,
    received: Tree,
    batches: Iterator[tuple[Batch, Tree]],
    training: Training,
) -> tuple[Tree, list[tuple[Step, Tree]]]:
    """SGD over the batches on the named parameters; everything else, buffers included, comes out as it went in."""
    moving = {name: value.detach().clone() for name, value in state.items()}
    leaves = [moving[name].requires_grad_() for name in names]
    velocity = [torch.zeros_like(leaf) for leaf in leaves]
    member.module.train()
    seen = []
    for batch, keep in batches:
        step = forward(member.module, moving, batch, received, keep)
        terms = algorithm.loss(step)
        loss = torch.stack(list(terms.values())).sum()
        _descend(leaves, velocity, torch.autograd.grad(loss, leaves, materialize_grads=True), training)
        seen.append((_without_graph(step), {name: term.detach() for name, term in terms.items()}))
    trained = {name: moving[name].detach() if phase.trains(name) else value for name, value in state.items()}
    return trained, seen


@torch.no_grad()
def _descend(leaves: list[Tensor], velocity: list[Tensor], gradients: tuple[Tensor, ...], training: Training) -> None:
    """v ← momentum·v + g, w ← w − lr·v. torch.optim.SGD does the same, but costs two seconds to import."""
    for leaf, speed, gradient in zip(leaves, velocity, gradients, strict=True):
        speed.mul_(training.momentum).add_(gradient)
        leaf.sub_(speed, alpha=training.lr)


def _without_graph(step: Step) -> Step:
    return step._replace(params={}, features=step.features.detach(), logits=step.logits.detach())


def _closing_step(
    member: Member, algorithm: Algorithm, state: Tree, received: Tree, seen: list[Step], training: Training
) -> Step:
    """One step over all the client's samples, with the features the algorithm asks for."""
    if algorithm.collects == "during":
        an_epoch = steps_per_epoch(member, training)
        last = seen[(len(seen) - 1) // an_epoch * an_epoch :]
        y, features, logits = (
            torch.cat(parts) for parts in zip(*((s.batch.y, s.features, s.logits) for s in last), strict=True)
        )
        return Step(state, features, logits, Batch(features.new_empty(0), y, features.new_ones(len(y))), received)
    if algorithm.collects == "after":
        return Step(state, *_evaluation_pass(member.module, state, member.train, received))
    y = member.train.y[member.train.rows]
    empty = member.train.x.new_empty(0)
    return Step(state, empty, empty, Batch(empty, y, empty.new_ones(len(y))), received)


def _evaluation_pass(
    module: nn.Module, state: Tree, examples: Examples, received: Tree
) -> tuple[Tensor, Tensor, Batch, Tree]:
    """Features and logits of all examples in eval mode, a thousand at a time."""
    module.eval()
    own = {name for name, _ in module.named_buffers()}
    state = {name: value.clone() if name in own else value for name, value in state.items()}  # looking changes nothing
    with torch.no_grad():
        pairs = [functional_call(module, state, (examples.x[rows],)) for rows in examples.rows.split(EVALUATION_BATCH)]
    features, logits = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    y = examples.y[examples.rows]
    return features, logits, Batch(features.new_empty(0), y, features.new_ones(len(y))), received


def embed(module: nn.Module, state: Tree, examples: Examples) -> tuple[Tensor, Tensor]:
    """The embeddings of all examples in eval mode, and their classes."""
    features, _, batch, _ = _evaluation_pass(module, state, examples, {})
    return features, batch.y


def _mean_loss(seen: list[tuple[Step, Tree]]) -> Tree:
    """Each term's mean over the samples that passed."""
    sizes = torch.stack([step.batch.mask.sum() for step, _ in seen])
    return {name: torch.stack([terms[name] for _, terms in seen]) @ sizes / sizes.sum() for name in seen[0][1]}


def evaluate(member: Member, algorithm: Algorithm, own: Tree, received: Tree) -> dict[str, float]:
    """The share of test images predicted right by each score, over all classes and over the client's own."""
    state = algorithm.adopt(own, received)
    step = Step(state, *_evaluation_pass(member.module, state, member.test, received))
    scores = algorithm.predict(step)
    own_classes = torch.zeros(step.logits.shape[1], dtype=torch.bool, device=step.logits.device)
    own_classes[list(member.classes)] = True
    correct = mark_correct(scores, step.batch.y, own_classes)
    return {name: float(values.double().mean()) for name, values in correct.items()}
