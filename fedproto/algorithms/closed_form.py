from typing import Literal

from fedproto.algorithms import supervised
from fedproto.config.options import Fraction, NonNegativeFloat
from fedproto.core.closed_form import Teacher, with_teacher
from fedproto.core.types import (
    Algorithm,
    GroupLayout,
    Recipient,
    State,
    Step,
    Task,
    Tree,
    Upload,
)
from fedproto.errors import ConfigError
from fedproto.teachers.lda import lda
from fedproto.teachers.ncm import ncm
from fedproto.teachers.ridge import ridge


def closed_form(
    *,
    solve: Literal["lda", "ridge", "ncm"] = "lda",
    shrinkage: Fraction = 0.1,
    strength: NonNegativeFloat = 0.1,
    individual: Fraction = 0,
) -> Algorithm:
    """A classifier that is solved, not trained: one upload of sums, and one round suffices.

    Every client sends Σ φ of each class and, but for `ncm`, Σ φ φᵀ over a feature map φ that all
    share; see `fedproto list feature-maps`. The server solves `lda` (with `shrinkage`), `ridge`
    (Fed3R, with `strength`) or `ncm` (FedNCM) for the pooled rows of all clients, and predicts by
    the score `teacher`. With `individual` above 0, `lda` has a solution for every client, whose
    covariance is that part its own. Models are not used.
    """
    if individual and solve != "lda":
        raise ConfigError(
            f"closed-form takes individual={individual:g} with solve=lda only, not with {solve}: "
            "leave it out"
        )
    teachers: dict[str, Teacher] = {
        "lda": lda(shrinkage=shrinkage, individual=individual),
        "ridge": ridge(strength=strength),
        "ncm": ncm(),
    }
    return with_teacher(_idle(), teachers[solve])


def _idle() -> Algorithm:
    """Return the algorithm that trains, sends and predicts nothing."""

    def init(params: Tree, task: Task) -> State:
        return {}

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        return {}

    def send(server: State, recipient: Recipient) -> State:
        return {}

    def upload(step: Step) -> Upload:
        return {}

    return Algorithm(
        name="closed-form",
        init=init,
        declare=declare,
        send=send,
        adopt=lambda params, received: params,
        loss=supervised,
        phases=(),
        upload=upload,
        aggregate=lambda server, uploads: server,
        predict=lambda step: {},
        combinable=False,
    )
