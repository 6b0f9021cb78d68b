"""What trained models make of rows they were not trained on.

Test rows calibrate "none of these", and measure it. Validation rows calibrate probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedproto.core import rng
from fedproto.core.federation import Examples, Member
from fedproto.core.local_training import EVALUATION_BATCH
from fedproto.core.types import Tree
from fedproto.runs.teacher_files import SolvedTeacher

MAX_HELD_OUT_ROWS = 1000  # per client, to calibrate on, and as many to see what that is worth
MAX_UNSEEN_ROWS_PER_RUN = 20_000  # test rows of classes that a client lacks, over all clients


class Outputs(NamedTuple):
    """What a model makes of n inputs."""

    features: Tensor  # (n, dim)
    logits: Tensor  # (n, classes)
    #: (n, classes) the scores of the run's teacher, those of unknown classes included; None: there
    #: is no teacher.
    teacher: Tensor | None = None


@dataclass(frozen=True)
class HeldOut:
    """What a client's model makes of rows, none of which it was trained on."""

    calibration: Outputs  # one half of its own test rows
    known: Outputs  # the other half
    known_labels: Tensor  # (n,) the classes of that half, numbered as in the federation
    unseen: Outputs  # rows of classes of which the client has no training rows
    validation: Outputs  # its validation rows; none without a validation split
    validation_labels: Tensor  # (n,) the classes of those rows


def split_test_rows(member: Member) -> tuple[Examples, Examples]:
    """Return a client's test rows in two halves: to calibrate on, and to see what that is worth."""
    rows = member.test.rows.cpu()
    order = torch.from_numpy(rng.generator(0, "calibration").permutation(len(rows)))
    half = len(rows) // 2
    x, y, _, fixed = member.test
    calibration = Examples(x, y, rows[order[:half]], fixed)
    known = Examples(x, y, rows[order[half:]], fixed)
    return calibration, known


def find_unseen_rows(member: Member, max_rows: int) -> Tensor:
    """Return test rows of the client's source whose classes it lacks, drawn if there are more."""
    own = torch.tensor(member.classes, device=member.test.y.device)
    rows = (~torch.isin(member.test.y, own)).nonzero().flatten().cpu()
    if len(rows) <= max_rows:
        return rows
    order = rng.generator(0, "unseen").permutation(len(rows))[:max_rows]
    return rows[torch.from_numpy(order)]


@torch.no_grad()
def compute_outputs(module: nn.Module, x: Tensor) -> Outputs:
    """Return features and logits of preprocessed inputs, on the CPU in float32."""
    like = next(module.parameters(), torch.zeros(()))
    features = []
    logits = []
    for part in x.split(EVALUATION_BATCH):
        some_features, some_logits = module(part.to(like))
        features.append(some_features)
        logits.append(some_logits)
    return Outputs(torch.cat(features).float().cpu(), torch.cat(logits).float().cpu())


def compute_rows(
    module: nn.Module, examples: Examples, rows: Tensor, teacher: SolvedTeacher | None
) -> Outputs:
    """Return what a model, and the teacher if there is one, make of some rows."""
    rows = rows.to(examples.x.device)
    outputs = compute_outputs(module, examples.x[rows])
    if teacher is None or examples.fixed is None:
        return outputs
    return outputs._replace(teacher=teacher.score(examples.fixed[rows]))


def compute_held_out(
    module: nn.Module, member: Member, max_unseen_rows: int, teacher: SolvedTeacher | None = None
) -> Tree:
    """Return the tensors of a `HeldOut`, `GROUP.NAME`; those without rows are left out."""
    calibration, known = split_test_rows(member)
    known_rows = known.rows[:MAX_HELD_OUT_ROWS]
    rows_of = {
        "calibration": calibration.rows[:MAX_HELD_OUT_ROWS],
        "known": known_rows,
        "unseen": find_unseen_rows(member, max_unseen_rows),
    }
    tensors: Tree = {}
    for group, rows in rows_of.items():
        if not len(rows):
            continue
        outputs = compute_rows(module, member.test, rows, teacher)
        tensors |= _name_outputs(group, outputs)
    tensors["known.labels"] = member.test.y.cpu()[known_rows]
    if member.validation is not None:
        tensors |= _compute_validation(module, member.validation, teacher)
    return tensors


def _name_outputs(group: str, outputs: Outputs) -> Tree:
    """Return outputs as tensors `GROUP.NAME`; without a teacher, there are no scores of one."""
    found = outputs._asdict().items()
    return {f"{group}.{name}": value for name, value in found if value is not None}


def _compute_validation(
    module: nn.Module, examples: Examples, teacher: SolvedTeacher | None
) -> Tree:
    """Return what the model makes of validation rows, at most MAX_HELD_OUT_ROWS random ones."""
    rows = examples.rows.cpu()
    order = torch.from_numpy(rng.generator(0, "validation").permutation(len(rows)))
    chosen = rows[order[:MAX_HELD_OUT_ROWS]]
    outputs = compute_rows(module, examples, chosen, teacher)
    return _name_outputs("validation", outputs) | {"validation.labels": examples.y.cpu()[chosen]}
