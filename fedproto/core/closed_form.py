"""Closed-form teachers: linear classifiers that a server solves from sums, without any training.

Every client sends, once, sums over a feature map φ that all clients share: for each of its classes
Σ φ(x) and the number of rows, and, where the teacher needs it, Σ φ(x) φ(x)ᵀ over all its rows. The
server adds them and solves for one vector and one bias per class, w_j·φ + b_j. Sums add and
subtract, so the solution is that of the pooled rows, whoever holds them, and exact when a client
joins or leaves. A teacher may solve for every client apart, from the sums of all and from its own.

Shapes in comments: n rows, D values of φ, C classes, m clients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedproto.core.tensors import align_axes
from fedproto.core.types import (
    Algorithm,
    Group,
    GroupLayout,
    Phase,
    Recipient,
    SentOnce,
    State,
    Step,
    Task,
    Tree,
    Upload,
)
from fedproto.errors import ConfigError

#: The name of a batch's fixed features, of the teacher's trees and of its scores.
TEACHER = "teacher"
#: The groups of an upload, which are sent once.
CLASS_SUMS = "class_features"
GRAM = "gram"
#: A count of GRAM that a server's noise adds: about the largest eigenvalue of that noise.
NOISE = "noise"
#: How much a client may trust the teacher, beside its own scores. The first holds unless another
#: one is better.
WEIGHTS = (1.0, 0.5, 2.0, 0.25, 0.0)


class Sums(NamedTuple):
    """The sums over the rows of some clients, in float64."""

    classes: Tensor  # (C, D) Σ φ of each class
    counts: Tensor  # (C,) rows of each class
    gram: Tensor | None  # (D, D) Σ φ φᵀ over all rows; None: not sent
    noise: float = 0.0  # about the largest eigenvalue of the noise in the matrix; 0: there is none


class Solution(NamedTuple):
    """A linear classifier: the score of class j is vectors[j]·φ + bias[j]."""

    vectors: Tensor  # (C, D)
    bias: Tensor  # (C,)


@dataclass(frozen=True)
class Teacher:
    """How a server makes a classifier of sums.

    name        as in `--teacher`
    solve       sums, of classes that all have rows -> solution, in float64
    needs_gram  whether the clients send Σ φ φᵀ, too
    scale       scores are divided by it before they count as log-probabilities
    solve_own   (sums of all clients, sums of one) -> the solution of this one, in float64, over the
                classes that all together have rows of; None: all clients have the same solution
    """

    name: str
    solve: Callable[[Sums], Solution]
    needs_gram: bool
    scale: float
    solve_own: Callable[[Sums, Sums], Solution] | None = None


# --- sums


def sum_classes(features: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return Σ φ (C, D) and the number of rows (C,) of each class; `mask` is 0 for padding."""
    membership = F.one_hot(y, classes).to(features) * mask[:, None]
    return membership.T @ features, membership.sum(0)


def pack_triangle(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix (D, D), row by row: D (D + 1) / 2 values.

    >>> pack_triangle(torch.tensor([[1, 2], [2, 3]])).tolist()
    [1, 2, 3]
    """
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def unpack_triangle(packed: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix (size, size) that `pack_triangle` was given."""
    rows, columns = torch.triu_indices(size, size, device=packed.device)
    matrix = packed.new_zeros(size, size)
    matrix[rows, columns] = packed
    matrix[columns, rows] = packed
    return matrix


def add_rows(values: Tensor) -> Tensor:
    """Return the sum over the clients, (m, ...) -> (...), in float64, one after the other.

    In this order a client that left changes no bit of the sum of those that stay.
    """
    total = torch.zeros(values.shape[1:], dtype=torch.float64, device=values.device)
    for value in values:
        total += value
    return total


# --- solving


def solve_shifted(matrix: Tensor, added: Tensor, right: Tensor, advice: str) -> Tensor:
    """Return (matrix + added · I)⁻¹ right for a matrix without negative eigenvalues.

    Quantised or noisy sums may have some; they then count as 0. ConfigError, which ends with
    advice, if the sum is singular.
    """
    factor = _factorise(matrix, added)
    if factor is None and added > 0:
        values, vectors = torch.linalg.eigh(matrix)
        factor = _factorise((vectors * values.clamp(min=0)) @ vectors.T, added)
    if factor is None:
        raise ConfigError(
            f"the closed form cannot be solved: the matrix of {len(matrix)} features is singular; "
            f"{advice}"
        )
    return torch.cholesky_solve(right, factor)


def steady(matrix: Tensor, added: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Return a noisy matrix and what is added to its diagonal as they can be inverted.

    Eigenvalues below 0 count as 0, and half the size of the noise is added to all: directions in
    which the features vary less than the noise does say nothing. Without noise nothing changes.
    """
    if not noise:
        return matrix, added
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0)) @ vectors.T, added.clamp(min=0) + 0.5 * noise


def _factorise(matrix: Tensor, added: Tensor) -> Tensor | None:
    """Return the Cholesky factor of matrix + added · I, or None if there is none."""
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    factor, failed = torch.linalg.cholesky_ex(matrix + added * identity)
    return None if int(failed) or not factor.isfinite().all() else factor


def solve_known(teacher: Teacher, sums: Sums, own: Sums | None = None) -> Solution:
    """Return the solution over all classes; those without rows have zeros.

    own  the sums of the client that it is for; None: it is for all
    """
    known = (sums.counts > 0).nonzero().flatten()
    vectors = torch.zeros_like(sums.classes)
    bias = torch.zeros_like(sums.counts)
    if len(known):
        of_known = _select_classes(sums, known)
        if own is None or teacher.solve_own is None:
            solution = teacher.solve(of_known)
        else:
            solution = teacher.solve_own(of_known, _select_classes(own, known))
        vectors[known] = solution.vectors
        bias[known] = solution.bias
    return Solution(vectors, bias)


def _select_classes(sums: Sums, classes: Tensor) -> Sums:
    """Return the sums of some classes; the matrix is that of all."""
    return sums._replace(classes=sums.classes[classes], counts=sums.counts[classes])


# --- predicting


def score_rows(features: Tensor, tree: Tree) -> Tensor:
    """Return the scores (n, C) of rows with these features (n, D); −∞ for unknown classes."""
    scores = features @ tree["vectors"].T + tree["bias"]
    return scores.masked_fill(tree["known"] == 0, -torch.inf)


def to_log_probabilities(scores: Tensor) -> Tensor:
    """Return log-softmax over the classes, (n, C); a row without any finite score stays −∞."""
    has_score = scores.isfinite().any(1, keepdim=True)
    shown = torch.where(has_score, scores, 0.0)
    return torch.where(has_score, F.log_softmax(shown, 1), -torch.inf)


def judge(scores: Tensor, scale: float) -> Tensor:
    """Return the teacher's log-probabilities (n, C), to be added to those of others.

    A class that the teacher does not know counts as the least likely one that it knows, and
    without any the teacher favours no class.
    """
    is_known = scores.isfinite()
    least = torch.where(is_known, scores, torch.inf).amin(1, keepdim=True)
    filled = torch.where(is_known, scores, least)
    filled = torch.where(filled.isfinite(), filled, 0.0)
    return F.log_softmax(filled / scale, 1)


# --- the teacher beside an algorithm


def with_teacher(algorithm: Algorithm, teacher: Teacher) -> Algorithm:
    """Return the algorithm with a teacher beside it.

    Clients send the teacher's groups once. The solution travels to a client when it has changed
    since the client last took part, and the client keeps it. Every score NAME of the algorithm is
    still there; beside it are `teacher` and NAME+teacher, the sum of their log-probabilities with a
    weight for the teacher's. A client with validation rows chooses that weight by the cross-entropy
    of the algorithm's first score, see `choose_weight`; without, it is 1.
    """
    if algorithm.once and algorithm.aggregate_once is None:
        raise ConfigError(
            f"algorithm {algorithm.name} sends {' and '.join(algorithm.once)} once, so beside a "
            "teacher it needs aggregate_once"
        )
    groups = (CLASS_SUMS, GRAM) if teacher.needs_gram else (CLASS_SUMS,)

    def init(params: Tree, task: Task) -> State:
        return algorithm.init(params, task) | {TEACHER: _start_server(teacher, params, task)}

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        width = _width_of(task)
        layouts = algorithm.declare(params, task)
        layouts = layouts | {CLASS_SUMS: GroupLayout({"features": (width,)}, "class", task.classes)}
        if teacher.needs_gram:
            layouts[GRAM] = GroupLayout({"gram": (width * (width + 1) // 2,)}, across=True)
        return layouts

    def send(server: State, recipient: Recipient) -> State:
        own = server[TEACHER]
        has_it = recipient.heard > own["solved"]
        known = (own["counts"] > 0) & ~has_it
        sent = {"known": known.to(own["vectors"])} | _solution_for(own, recipient.number)
        return algorithm.send(_without(server), recipient) | {TEACHER: sent}

    def upload_once(step: Step) -> Upload:
        features = step.batch.fixed[TEACHER]
        mask = (step.batch.mask > 0).to(features)
        classes = step.received[TEACHER]["known"].shape[-1]
        sums, counts = sum_classes(features, step.batch.y, mask, classes)
        found = {} if algorithm.upload_once is None else algorithm.upload_once(_hide(step))
        found = found | {CLASS_SUMS: Group({"features": sums}, counts)}
        if teacher.needs_gram:
            kept_rows = features * mask[:, None]
            found[GRAM] = Group({"gram": pack_triangle(kept_rows.T @ features)}, mask.sum())
        return found

    def aggregate(server: State, uploads: Upload) -> State:
        return algorithm.aggregate(_without(server), uploads) | {TEACHER: server[TEACHER]}

    def aggregate_once(server: State, sent_once: SentOnce) -> State:
        inner = _without(server)
        if algorithm.aggregate_once is not None:
            inner = algorithm.aggregate_once(inner, _pick(sent_once, algorithm.once))
        return inner | {TEACHER: _solve(teacher, server[TEACHER], sent_once)}

    def client_init(params: Tree, task: Task) -> State:
        return algorithm.client_init(params, task) | {TEACHER: _start_client(params, task)}

    def client_start(kept: State, received: State) -> State:
        inner = algorithm.client_start(_without(kept), _without(received))
        newest = _newest(kept, received)
        named = {f"head.{name}": value for name, value in newest.items()}
        return inner | {TEACHER: named | {"weight": kept[TEACHER]["weight"]}}

    def client_adopt(params: Tree, received: State, kept: State) -> Tree:
        return algorithm.start_from(params, _without(received), _without(kept))

    def client_update(step: Step) -> State:
        return algorithm.client_update(_hide(step)) | {TEACHER: step.state[TEACHER]}

    def client_validate(step: Step) -> State:
        inner = _without(step.state)
        if algorithm.client_validate is not None:
            inner = algorithm.client_validate(_hide(step))
        own = step.state[TEACHER]
        scores = list(algorithm.predict(_hide(step)._replace(state=inner)).values())
        if not scores:
            return inner | {TEACHER: own}
        opinion = judge(score_rows(step.batch.fixed[TEACHER], _newest(step.state, {})), scale)
        weight = choose_weight(scores[0], opinion, step)
        return inner | {TEACHER: own | {"weight": weight.to(own["weight"])}}

    def predict(step: Step) -> Tree:
        scores = score_rows(step.batch.fixed[TEACHER], _newest(step.state, step.received))
        opinion = judge(scores, scale)
        weight = step.state[TEACHER]["weight"]
        found = dict(algorithm.predict(_hide(step)))
        names = list(found)
        found[TEACHER] = scores
        for name in names:
            found[f"{name}+{TEACHER}"] = to_log_probabilities(found[name]) + weight * opinion
        return found

    scale = teacher.scale
    return replace(
        algorithm,
        init=init,
        declare=declare,
        send=send,
        adopt=lambda params, received: algorithm.adopt(params, _without(received)),
        loss=lambda step: algorithm.loss(_hide(step)),
        phases=tuple(_hide_in_loss(phase) for phase in algorithm.phases),
        upload=lambda step: algorithm.upload(_hide(step)),
        upload_once=upload_once,
        aggregate=aggregate,
        aggregate_once=aggregate_once,
        predict=predict,
        client_init=client_init,
        client_start=client_start,
        client_adopt=None if algorithm.client_adopt is None else client_adopt,
        client_update=client_update,
        client_validate=client_validate,
        notes=lambda server: algorithm.notes(_without(server)),
        metrics=lambda server: algorithm.metrics(_without(server)),
        once=(*algorithm.once, *groups),
        common=(*algorithm.common, TEACHER),
        uses_fixed=True,
        keeps_once_singly=algorithm.keeps_once_singly or teacher.solve_own is not None,
    )


def choose_weight(scores: Tensor, opinion: Tensor, step: Step) -> Tensor:
    """Return the weight () of WEIGHTS with the least cross-entropy over the classes of the rows.

    Another one than 1 is taken only if it is better by more than the standard error of the
    difference: with few rows, chance would decide.

    scores   (n, C) the algorithm's
    opinion  (n, C) the teacher's log-probabilities
    """
    batch = step.batch
    classes = scores.shape[1]
    is_there = (F.one_hot(batch.y, classes) * (batch.mask > 0)[:, None]).any(0)
    weights = opinion.new_tensor(WEIGHTS)
    own_scores = to_log_probabilities(scores.masked_fill(~is_there, -torch.inf))
    combined = own_scores + weights[:, None, None] * opinion  # (weights, n, C)
    chances = F.log_softmax(torch.where(is_there, combined, -torch.inf), 2)
    rows = torch.arange(len(batch.y), device=batch.y.device)
    losses = -chances[:, rows, batch.y].clamp(min=-100.0)
    mask = (batch.mask > 0).to(losses)
    rows_there = mask.sum().clamp(min=1)
    gains = (losses[:1] - losses) * mask  # over the first weight, 1
    mean_gains = gains.sum(1) / rows_there
    deviations = (gains - mean_gains[:, None]).square() * mask
    standard_errors = deviations.sum(1).sqrt() / rows_there
    surely_better = mean_gains > standard_errors
    return weights[torch.where(surely_better, mean_gains, 0.0).argmax()]


def _width_of(task: Task) -> int:
    """Return the number of features; ConfigError if nobody said which map makes them."""
    if not task.fixed:
        raise ConfigError("a closed form needs the features of a feature map, and there is none")
    return task.fixed


def _like(params: Tree) -> Tensor:
    """Return a parameter, whose type and device the teacher has."""
    return next(value for value in params.values() if value.is_floating_point())


def _start_server(teacher: Teacher, params: Tree, task: Task) -> Tree:
    """Return what the server keeps: the sums so far, the solution, and when it was solved.

    If every client has a solution of its own, these are there, too; until a client's sums have
    arrived, its own is that of all.
    """
    like = _like(params)
    width = _width_of(task)
    own = {}
    if teacher.solve_own is not None:
        own["own_vectors"] = like.new_zeros(task.classes, task.numbers, width)
        own["own_bias"] = like.new_zeros(task.classes, task.numbers)
    return own | {
        "classes": like.new_zeros(task.classes, width, dtype=torch.float64),
        "counts": like.new_zeros(task.classes, dtype=torch.float64),
        "vectors": like.new_zeros(task.classes, width),
        "bias": like.new_zeros(task.classes),
        "solved": torch.zeros((), dtype=torch.int64, device=like.device),  # the round; 0: never
    }


def _start_client(params: Tree, task: Task) -> Tree:
    """Return what a client keeps: the newest solution that it received, and its weight.

    The tensors with a row per class are named as those of a head, so that a deployed member
    rearranges them as such when the list of classes changes.
    """
    like = _like(params)
    return {
        "head.vectors": like.new_zeros(task.classes, _width_of(task)),
        "head.bias": like.new_zeros(task.classes),
        "head.known": like.new_zeros(task.classes),
        "weight": like.new_ones(()),
    }


def _pick(sent_once: SentOnce, names: Collection[str]) -> SentOnce:
    """Return only the groups with these names."""
    return sent_once._replace(groups={name: sent_once.groups[name] for name in names})


def _solve(teacher: Teacher, own: Tree, sent_once: SentOnce) -> Tree:
    """Return the server's part with the solution of the sums of all clients."""
    group = sent_once.groups[CLASS_SUMS]
    classes = add_rows(group.sums["features"])
    counts = add_rows(group.weight)
    gram = None
    noise = 0.0
    if teacher.needs_gram:
        gram_group = sent_once.groups[GRAM]
        gram = unpack_triangle(add_rows(gram_group.sums["gram"]), classes.shape[1])
        if NOISE in gram_group.counts:
            noise = float(gram_group.counts[NOISE].sum())
    sums = Sums(classes, counts, gram, noise)
    solution = solve_known(teacher, sums)
    solved = {
        "classes": classes,
        "counts": counts,
        "vectors": solution.vectors.to(own["vectors"]),
        "bias": solution.bias.to(own["bias"]),
        "solved": torch.full_like(own["solved"], sent_once.round),
    }
    if teacher.solve_own is None:
        return solved
    own_vectors = solved["vectors"][:, None].expand_as(own["own_vectors"]).clone()
    own_bias = solved["bias"][:, None].expand_as(own["own_bias"]).clone()
    for row, client in enumerate(sent_once.clients.tolist()):
        own_sums = _read_sums(teacher, sent_once.groups, row)
        if own_sums.counts.any():
            own_solution = solve_known(teacher, sums, own_sums)
            own_vectors[:, client] = own_solution.vectors.to(own_vectors)
            own_bias[:, client] = own_solution.bias.to(own_bias)
    return solved | {"own_vectors": own_vectors, "own_bias": own_bias}


def _read_sums(teacher: Teacher, groups: Upload, row: int) -> Sums:
    """Return the sums of the client whose groups are in this row."""
    classes = groups[CLASS_SUMS].sums["features"][row].double()
    counts = groups[CLASS_SUMS].weight[row].double()
    gram = None
    if teacher.needs_gram:
        gram = unpack_triangle(groups[GRAM].sums["gram"][row].double(), classes.shape[1])
    return Sums(classes, counts, gram)


def _solution_for(own: Tree, number: Tensor) -> Tree:
    """Return the solution, out of the server's part, that the client with this number is sent."""
    if "own_vectors" not in own:
        return {"vectors": own["vectors"], "bias": own["bias"]}
    place = number[None]
    return {
        "vectors": own["own_vectors"].index_select(1, place)[:, 0],
        "bias": own["own_bias"].index_select(1, place)[:, 0],
    }


def _newest(kept: State, received: State) -> Tree:
    """Return the newest solution that a client has: what it received, else what it kept."""
    names = ("known", "vectors", "bias")
    own = {name: kept[TEACHER][f"head.{name}"] for name in names}
    if TEACHER not in received:
        return own
    sent = received[TEACHER]
    is_new = sent["known"] > 0
    return {name: torch.where(align_axes(is_new, own[name]), sent[name], own[name]) for name in own}


def _without(state: State) -> State:
    """Return a state as the algorithm knows it, without the teacher's part."""
    return {name: value for name, value in state.items() if name != TEACHER}


def _hide(step: Step) -> Step:
    """Return a step as the algorithm knows it."""
    return step._replace(received=_without(step.received), state=_without(step.state))


def _hide_in_loss(phase: Phase) -> Phase:
    """Return a phase whose loss, if it has one of its own, sees steps as the algorithm does."""
    loss = phase.loss
    if loss is None:
        return phase
    return replace(phase, loss=lambda step: loss(_hide(step)))
