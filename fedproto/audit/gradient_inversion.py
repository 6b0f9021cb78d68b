"""Images from a FedAvg update: inputs whose gradient points where the client's update does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.func import functional_call

from fedproto.audit.attacked_run import AttackedRun
from fedproto.audit.image_quality import psnr, ssim, total_variation
from fedproto.audit.threats import ThreatModel
from fedproto.core import rng
from fedproto.core.batches import list_trained_names
from fedproto.core.federation import Examples, Member
from fedproto.core.local_training import start_client, train
from fedproto.core.tensors import divide_by_weight
from fedproto.core.types import Phase, Tree
from fedproto.errors import DoesNotApply
from fedproto.runs.training_settings import training_of

THREAT = ThreatModel(
    "server",
    "the weights it sent in the first round, the weights that came back, the classes of the images "
    "in the update, and how the client trains (but not what its dropout drew)",
    "the images that the client trained on",
)
STEPS = 400
STEP_SIZE = 0.1  # of Adam on the sign of the gradient, in units of the normalised pixels
TOTAL_VARIATION = 0.1
#: Clients that are attacked in each case.
VICTIMS = 4


@dataclass(frozen=True)
class Case:
    """How much a client trained on before it sent its weights."""

    name: str
    images: int | None  # None: all of the client's
    batch: int | None  # None: the run's


CASES = (
    Case("one image", 1, 1),
    Case("one batch of 4", 4, 4),
    Case("one local epoch", None, None),
)


@dataclass(frozen=True)
class Inversion:
    """What came out of one client's update."""

    case: str
    client: int
    true_images: Tensor  # (n, channels, h, w) in pixels
    labels: Tensor  # (n,)
    found_images: Tensor  # in the order of the true images
    baseline: Tensor  # the mean image of the class, of other people's images

    def scores(self, images: Tensor) -> tuple[float, float]:
        """Return the mean PSNR and SSIM of images against the true ones."""
        return (
            float(psnr(images, self.true_images).mean()),
            float(ssim(images, self.true_images).mean()),
        )


def invert_gradient(
    module: nn.Module,
    state: Tree,
    names: list[str],
    direction: Tree,
    labels: Tensor,
    shape: tuple[int, ...],
    black: Tensor,
    white: Tensor,
    steps: int = STEPS,
    smoothness: float = TOTAL_VARIATION,
    seed: int = 0,
) -> Tensor:
    """Return inputs (n, *shape) of these classes whose gradient is parallel to a direction.

    Geiping et al. (2020): minimises 1 − cos(∇L(x), direction) + smoothness · TV(x) by Adam on the
    sign of the gradient, with a step size that falls three times by a factor of 10.

    state      the weights that the client started from
    names      the parameters that it trained
    direction  what it started from minus what it sent: for one step, its learning rate times ∇L
    """
    count = len(labels)
    like = direction[names[0]]
    values = count * int(torch.tensor(shape).prod())
    noise = rng.uniform(rng.key(seed, "audit: start of a gradient inversion"), values)
    start = black + (white - black) * noise.reshape(count, *shape).to(like)
    x = start.detach().requires_grad_()
    wanted = torch.cat([direction[name].flatten() for name in names])
    leaves = {name: state[name].detach().clone().requires_grad_() for name in names}
    module.eval()
    optimiser = torch.optim.Adam([x], lr=STEP_SIZE)
    milestones = [round(steps * part) for part in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones, gamma=0.1)
    for _ in range(steps):
        _, logits = functional_call(module, state | leaves, (x,))
        loss = F.cross_entropy(logits, labels)
        gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        found = torch.cat([gradient.flatten() for gradient in gradients])
        objective = 1 - F.cosine_similarity(found, wanted, dim=0)
        objective = objective + smoothness * total_variation(x).mean()
        (slope,) = torch.autograd.grad(objective, x)
        x.grad = slope.sign()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            x.copy_(torch.minimum(torch.maximum(x, black), white))
    return x.detach()


def attack(run: AttackedRun, case: Case, victims: int = VICTIMS, **options: Any) -> list[Inversion]:
    """Return what comes out of the first update of some clients; DoesNotApply says why nothing."""
    run.require_images()
    if any(member.frozen is not None for member in run.members):
        raise DoesNotApply("the clients train a head on features, and do not send all weights")
    return [_attack_client(run, member, case, **options) for member in run.members[:victims]]


def _attack_client(run: AttackedRun, member: Member, case: Case, **options: Any) -> Inversion:
    rows = member.train.rows if case.images is None else _choose_rows(member, case.images)
    labels = member.train.y[rows]
    names = list_trained_names(member.module, Phase())
    direction = _observe_update(run, member, rows, case, names)
    black, white = run.pixel_range(member.id)
    with run.computing():
        found = invert_gradient(
            member.module,
            member.initial,
            names,
            direction,
            labels,
            member.input_shape,
            black,
            white,
            seed=run.config.seed + member.id,
            **options,
        )
    true_images = run.to_pixels(member.id, member.train.x[rows])
    found_images = _match(run.to_pixels(member.id, found), true_images, labels)
    others = run.other_data(member.id)
    means = {}
    for label in labels.unique().tolist():
        means[label] = run.to_pixels(member.id, others.of_class(label)).mean(0)
    baseline = torch.stack([means[label] for label in labels.tolist()])
    return Inversion(case.name, member.id, true_images, labels, found_images, baseline)


def _choose_rows(member: Member, count: int) -> Tensor:
    """Return some of a client's rows: of its classes in turn."""
    rows = member.train.rows
    labels = member.train.y[rows]
    turn = torch.zeros(len(rows), dtype=torch.long)
    for label in labels.unique().tolist():
        of_class = (labels == label).nonzero().flatten()
        turn[of_class] = torch.arange(len(of_class))
    return rows[turn.argsort(stable=True)[:count]]


def _observe_update(
    run: AttackedRun, member: Member, rows: Tensor, case: Case, names: list[str]
) -> Tree:
    """Return what the server sent minus what comes back from a first round on these rows."""
    algorithm = run.algorithm
    examples = Examples(member.train.x, member.train.y, rows, member.train.fixed)
    victim = replace(member, train=examples)
    training = training_of(run.config, algorithm.privacy)
    if case.batch is not None:
        training = replace(training, batch=case.batch)
    server = algorithm.init(run.federation.initial, run.federation.task)
    received = algorithm.send(server, run.federation.recipient(member.id))
    own = start_client(algorithm, member.initial, run.federation.task)
    with run.computing():
        outcome = train(victim, algorithm, own, received, training, round=1)
    group = outcome.upload.get("model")
    if group is None or not set(names) <= group.sums.keys():
        raise DoesNotApply(f"clients of {algorithm.name} do not send all their weights")
    sent = divide_by_weight(group)
    return {name: member.initial[name] - sent[name].to(member.initial[name]) for name in names}


def _match(found: Tensor, true_images: Tensor, labels: Tensor) -> Tensor:
    """Return found images in the order of the true ones: within a class, the best assignment."""
    ordered = found.clone()
    for label in labels.unique().tolist():
        places = (labels == label).nonzero().flatten()
        distances = torch.cdist(true_images[places].flatten(1), found[places].flatten(1))
        _, chosen = linear_sum_assignment(distances.cpu().numpy())
        ordered[places] = found[places[torch.from_numpy(chosen)]]
    return ordered
