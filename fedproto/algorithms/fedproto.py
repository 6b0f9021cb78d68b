from typing import Literal

import torch
from torch import Tensor

from fedproto.algorithms import masked_mean, mean_over_known, supervised
from fedproto.config.options import NonNegativeFloat, PositiveFloat
from fedproto.core.prototypes import (
    DISTANCES,
    Tau,
    add_log_probabilities,
    class_means,
    contrast_losses,
    scores,
)
from fedproto.core.tensors import make_group, weighted_mean
from fedproto.core.types import (
    Algorithm,
    GroupLayout,
    Recipient,
    State,
    Step,
    Task,
    Tree,
    Upload,
    per_class,
)


def fedproto(
    *,
    lam: NonNegativeFloat = 1.0,
    distance: Literal["mse", "l2", "sql2", "l1", "emd", "cosine"] = "mse",
    weighting: Literal["samples", "uniform", "eq6"] = "samples",
    regularise: Literal["sample", "class"] = "sample",
    collect: Literal["after", "during"] = "after",
    absent: Literal["remember", "drop"] = "remember",
    fixed: bool = False,
    contrast: NonNegativeFloat = 0.0,
    tau: PositiveFloat = 0.3,
    tau_unit: Literal["relative", "absolute"] = "relative",
) -> Algorithm:
    """Exchange class means instead of weights (Tan et al. 2022, Algorithm 1).

    Client, Eq. 7: min L_S + λ L_R with L_R = mean over the batch of d(f(φ; x), C̄^(y)), or
    (`regularise="class"`, Eq. 8) the sum over the batch's classes of d(batch mean, C̄^(j)); 0 for
    a class that has no global prototype yet. It uploads C_i^(j), Eq. 3.

    Server: C̄^(j) = Σ_i |D_ij|/N_j · C_i^(j) (`samples`), the plain mean over the holders of a
    class (`uniform`), or Eq. 6 as printed, which divides by the number of holders once more
    (`eq6`).

    Prediction, Eq. 4: the prototype nearest in L2, whatever `distance` is; the head is evaluated,
    too, and `both`, the sum of the head's log-probabilities and of log p below.

    With `contrast` β > 0, clients receive all known prototypes and also minimise −β log p_y, where
    p_j = softmax_j(−d(f(φ; x), C̄^(j))/τ), d the mean squared difference; 0 while y or all other
    classes have no prototype. Since ∂(−log p_y)/∂h = 2/(τd) Σ_j (1[j = y] − p_j) (h − C̄^(j)), a
    step moves an embedding towards its own prototype and away from every other C̄^(j) in proportion
    to p_j. That needs no sample of class j: classes that no client holds together are kept apart.
    The unit of τ is the mean d between the prototypes, or 1 (`tau_unit="absolute"`).

    `collect="during"` takes the embeddings as they pass in the last epoch instead of after
    training. Absent clients still count with their latest upload (`absent="remember"`) or do not
    (`"drop"`); a class that is in no upload keeps its prototype. With `fixed`, the prototypes a
    run starts from stay as they are, as for a newcomer to a federation; only classes that had
    none get theirs from the uploads.
    """
    penalty = {"sample": _sample_penalty, "class": _class_penalty}[regularise]
    divisor = Tau(tau, tau_unit)

    def init(params: Tree, task: Task) -> State:
        like = next(value for value in params.values() if value.is_floating_point())
        server = {
            "prototypes": like.new_zeros(task.classes, task.dim),
            "known": like.new_zeros(task.classes),  # 1 where a class has a prototype
        }
        if fixed:
            server["given"] = like.new_zeros(task.classes)  # 1 where the run started with one
        return server

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        counts = ("holders",) if weighting == "eq6" else ()
        return per_class(task, counts, prototypes=(task.dim,))

    def send(server: State, recipient: Recipient) -> State:
        known = server["known"] if contrast else server["known"] * recipient.classes
        return {"prototypes": server["prototypes"], "known": known}

    def loss(step: Step) -> Tree:
        terms = supervised(step) | {"regulariser": lam * penalty(step, distance)}
        if contrast:
            prototypes, known = step.received["prototypes"], step.received["known"]
            losses = contrast_losses(step.features, step.batch.y, prototypes, known, divisor)
            terms["contrast"] = contrast * masked_mean(losses, step.batch.mask)
        return terms

    def upload(step: Step) -> Upload:
        means, counts = _local_prototypes(step)
        held = (counts > 0).to(counts.dtype)
        weight = held if weighting == "uniform" else counts
        group = make_group({"prototypes": means}, weight)
        if weighting == "eq6":
            group = group._replace(counts={"holders": held})
        return {"prototypes": group}

    def aggregate(server: State, uploads: Upload) -> State:
        group = uploads["prototypes"]
        spoken = group.weight.sum(0) > 0
        prototypes = weighted_mean(server, group)["prototypes"]
        if weighting == "eq6":
            holders = group.counts["holders"].sum(0).clamp(min=1)
            prototypes = torch.where(spoken[:, None], prototypes / holders[:, None], prototypes)
        if fixed:
            is_given = server["given"][:, None] > 0
            prototypes = torch.where(is_given, server["prototypes"], prototypes)
        known = torch.where(spoken, 1, server["known"])
        return server | {"prototypes": prototypes, "known": known}

    def predict(step: Step) -> Tree:
        prototypes, known = step.received["prototypes"], step.received["known"]
        by_prototype = scores(step.features, prototypes, known)
        tau_now = divisor.measure(prototypes, known)
        both = add_log_probabilities(step.logits, by_prototype, prototypes.shape[-1], tau_now)
        return {"head": step.logits, "prototype": by_prototype, "both": both}

    def notes(server: State) -> list[str]:
        if server["known"].any():
            return []
        return ["fedproto: no class has a prototype yet, so none is predicted"]

    return Algorithm(
        name="fedproto",
        init=init,
        declare=declare,
        send=send,
        adopt=lambda own, received: own,
        loss=loss,
        collects=collect,
        upload=upload,
        aggregate=aggregate,
        predict=predict,
        additive=absent == "drop",
        remembers=absent == "remember",
        sends_all=contrast > 0,
        notes=notes,
    )


def _local_prototypes(step: Step) -> tuple[Tensor, Tensor]:
    """Return C_i^(j) and |D_ij| of the samples in the step."""
    classes = len(step.received["known"])
    return class_means(step.features, step.batch.y, step.batch.mask, classes)


def _sample_penalty(step: Step, distance: str) -> Tensor:
    """Return the mean over the batch of d(f(φ; x), C̄^(y)); 0 where C̄^(y) does not exist."""
    prototypes = step.received["prototypes"][step.batch.y]
    return mean_over_known(DISTANCES[distance](step.features, prototypes), step)


def _class_penalty(step: Step, distance: str) -> Tensor:
    """Return Eq. 8: Σ_j d(C_i^(j) of the batch, C̄^(j)).

    The sum is over the classes that are in the batch and have a global prototype.
    """
    means, counts = _local_prototypes(step)
    distances = DISTANCES[distance](means, step.received["prototypes"])
    in_both = (counts > 0) & (step.received["known"] > 0)
    return (distances * in_both).sum()
