"""The test rows that a client finds hardest, and what is near them, for the page about its run.

Rows are numbers and distances only: a page may be sent around. What is kept of a client are tensors
`hard.NAME` beside its model, a row per test row:

rows                    its number in the test set
labels, answers         its class, and the class that the client takes it for
probabilities           how probable the client finds its true class
prototypes, prototype_distances
                        the nearest classes by their prototypes, if there are any
training, training_labels, training_distances
                        the client's nearest training rows: number, class and distance
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedproto.core import prototypes
from fedproto.core.federation import Examples, Member
from fedproto.core.neighbours import find_nearest
from fedproto.core.types import State, Tree
from fedproto.runs.held_out import compute_outputs, split_test_rows
from fedproto.runs.prototype_files import take_prototypes
from fedproto.runs.teacher_files import SolvedTeacher

HARD = "hard"
#: What rows are compared by: the model's embeddings, or the features of the run's feature map.
Space = Literal["embedding", "fixed"]
#: Test rows per client, and what is near each of them.
MAX_HARD_ROWS = 6
NEAR_COUNT = 3


def find_hard_rows(
    module: nn.Module,
    member: Member,
    numbers: Mapping[str, Sequence[int]],
    outputs: Tree,
    server: State,
    teacher: SolvedTeacher | None,
    with_training: bool,
) -> Tree:
    """Return the tensors above for a client; none if no test rows are held out.

    Hardest are the rows whose true class the client finds least probable, by what it is judged by:
    prototypes if there are any, else its head, or the closed form where no model was trained.

    Args:
        module: the client's model.
        member: the client.
        numbers: of its rows, as partition.json states them.
        outputs: what the model makes of held-out rows, by `compute_held_out`.
        server: the server's state.
        teacher: the closed form, if there is one.
        with_training: whether training rows may be named; those of a private run may not.
    """
    labels = outputs["known.labels"]
    if not len(labels):
        return {}
    is_alone = teacher is not None and teacher.is_alone
    shared = {} if is_alone else take_prototypes(server)
    scores = outputs["known.teacher"] if is_alone else _score(outputs, shared)
    probabilities = scores.double().softmax(1)
    of_truth = probabilities.gather(1, labels[:, None])[:, 0]
    hard = of_truth.argsort(stable=True)[:MAX_HARD_ROWS]
    known_rows = split_test_rows(member)[1].rows[: len(labels)][hard]
    found = {
        "rows": _look_up(member.test, numbers["test"], known_rows),
        "labels": labels[hard],
        "answers": scores[hard].argmax(1),
        "probabilities": of_truth[hard].float(),
    }
    if shared:
        found |= _find_near_prototypes(outputs["known.features"][hard], shared)
    if with_training:
        space: Space = "fixed" if is_alone else "embedding"
        found |= _find_near_rows(module, member, numbers["train"], known_rows, space)
    return {f"{HARD}.{name}": value.contiguous() for name, value in found.items()}


def _score(outputs: Tree, shared: Tree) -> Tensor:
    """Return the scores of all classes by prototypes if there are any, else by the head."""
    if not shared:
        return outputs["known.logits"]
    values = shared["prototypes"].float()
    return prototypes.scores(outputs["known.features"], values, shared["known"].float())


def _look_up(examples: Examples, numbers: Sequence[int], rows: Tensor) -> Tensor:
    """Return the numbers of some rows of a client's examples in the data set."""
    number_of = dict(zip(examples.rows.tolist(), numbers, strict=True))
    return torch.tensor([number_of[row] for row in rows.tolist()])


def _find_near_prototypes(points: Tensor, shared: Tree) -> Tree:
    """Return the classes whose prototypes are nearest to each point, and how far they are."""
    known = shared["known"].nonzero().flatten()
    near, distances = find_nearest(points, shared["prototypes"][known].float(), NEAR_COUNT)
    return {"prototypes": known[near], "prototype_distances": distances.float()}


def _find_near_rows(
    module: nn.Module, member: Member, numbers: Sequence[int], test_rows: Tensor, space: Space
) -> Tree:
    """Return the training rows that are nearest to each of some test rows."""
    train = member.train
    points = _embed(module, member.test, test_rows, space)
    among = _embed(module, train, train.rows, space)
    near, distances = find_nearest(points, among, NEAR_COUNT)
    return {
        "training": torch.tensor(numbers)[near],
        "training_labels": train.y[train.rows].cpu()[near],
        "training_distances": distances.float(),
    }


def _embed(module: nn.Module, examples: Examples, rows: Tensor, space: Space) -> Tensor:
    """Return rows as the model embeds them, or their features by the run's feature map."""
    rows = rows.to(examples.x.device)
    if space == "embedding":
        return compute_outputs(module, examples.x[rows]).features
    assert examples.fixed is not None, "the closed form has features of all rows"
    return examples.fixed[rows].float().cpu()
