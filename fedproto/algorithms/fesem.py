import torch
from sklearn.cluster import kmeans_plusplus
from torch import Tensor

from fedproto.algorithms import by_head, samples, supervised, trainable, travelling
from fedproto.config.options import PositiveInt
from fedproto.core import rng
from fedproto.core.tensors import align_axes, make_group, weighted_mean
from fedproto.core.types import (
    Algorithm,
    Group,
    GroupLayout,
    Recipient,
    State,
    Step,
    Task,
    Tree,
    Upload,
    everything,
)
from fedproto.errors import ConfigError

_NOT_SENT = ("seeded", "sizes", "seed")  # what the server keeps beside the centres


def fesem(*, clusters: PositiveInt = 3) -> Algorithm:
    """Several global models, each client follows the nearest (Xie et al. 2021, stochastic EM).

    min over centres and assignment r of Σ_i |D_i|/N Σ_k r_ik ||w_i − w̃_k||². E-step, at the
    client: r_i is the centre nearest to its trained weights. M-step, at the server:
    w̃_k ← Σ_i r_ik |D_i| w_i / Σ_i r_ik |D_i|. Each client downloads all centres, starts from the
    one nearest to its own weights, and uploads into the slot of one cluster.

    All centres are equal at first, so round 1 is FedAvg's. The server then seeds the centres by
    k-means++ on the single uploads (hence FeSEM is not additive). A cluster without uploads keeps
    its centre and is reported.
    """

    def init(params: Tree, task: Task) -> State:
        if clusters > task.clients:
            problem = f"algorithm fesem's clusters is {clusters}"
            raise ConfigError(f"{problem}, but there are only {task.clients} clients")
        start = travelling(params, everything)
        centres = {}
        for name, value in start.items():
            centres[name] = value.expand(clusters, *value.shape).clone()
        seed = int(rng.key(task.seed, "fesem")) & 0x7FFFFFFF  # as scikit-learn wants it
        sizes = torch.zeros(clusters, dtype=next(iter(start.values())).dtype)
        state = {"seeded": torch.tensor(0), "sizes": sizes, "seed": torch.tensor(seed)}
        return centres | state

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        values = travelling(params, everything)
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        return {"centres": GroupLayout(shapes, "cluster", clusters)}

    def send(server: State, recipient: Recipient) -> State:
        return {name: value for name, value in server.items() if name not in _NOT_SENT}

    def adopt(own: Tree, received: State) -> Tree:
        chosen = _nearest(own, received)[None]
        centre = {name: value.index_select(0, chosen)[0] for name, value in received.items()}
        return own | centre

    def upload(step: Step) -> Upload:
        count = samples(step)
        chosen = _nearest(step.params, step.received)
        slot = torch.arange(clusters, device=count.device) == chosen
        values = {}
        for name in step.received:
            own = step.params[name]
            values[name] = own.expand(clusters, *own.shape)
        return {"centres": make_group(values, slot * count)}

    def aggregate(server: State, uploads: Upload) -> State:
        seeded = server["seeded"]
        group = uploads["centres"]
        if not seeded and len(group.weight) >= clusters:
            group = _seed_clusters(group, int(server["seed"]))
            seeded = torch.ones_like(seeded)
        elif not seeded:  # too few uploads to tell clusters apart: every centre follows their mean
            group = _assign(group, torch.ones_like(group.weight))
        sizes = group.weight.sum(0).cpu()
        state = {"seeded": seeded, "sizes": sizes, "seed": server["seed"]}
        return weighted_mean(server, group) | state

    def notes(server: State) -> list[str]:
        sentences = []
        if not server["seeded"]:
            few = f"fewer than {clusters} uploads"
            sentences.append(f"fesem: {few}, so the clusters are not seeded yet")
        empty = (server["sizes"] == 0).nonzero().flatten().tolist()
        kept = "which keeps its centre"
        return sentences + [f"fesem: nobody spoke for cluster {k}, {kept}" for k in empty]

    return Algorithm(
        name="fesem",
        shared=everything,
        init=init,
        declare=declare,
        send=send,
        adopt=adopt,
        loss=supervised,
        upload=upload,
        aggregate=aggregate,
        predict=by_head,
        additive=False,
        combinable=False,
        notes=notes,
    )


def _nearest(own: Tree, centres: Tree) -> Tensor:
    """Return argmin_k ||w_i − w̃_k||² over the trained weights; of equal ones, the first."""
    distances = []
    for name, centre in trainable(centres).items():
        difference = (centre - own[name]).flatten(1)
        distances.append(difference.square().sum(1))
    return torch.stack(distances).sum(0).argmin()


def _seed_clusters(uploads: Group, seed: int) -> Group:
    """Return the uploads, each in the slot of the nearest of the seeds that k-means++ chooses."""
    clusters = uploads.weight.shape[1]
    weight = uploads.weight.sum(1)
    models = []
    for sums in trainable(uploads.sums).values():
        model = sums.sum(1) / align_axes(weight, sums[:, 0])
        models.append(model.flatten(1))
    points = torch.cat(models, dim=1).double()
    _, seeds = kmeans_plusplus(points.cpu().numpy(), clusters, random_state=seed)
    chosen = torch.cdist(points, points[seeds.tolist()]).argmin(1)
    return _assign(uploads, torch.nn.functional.one_hot(chosen, clusters).to(weight.dtype))


def _assign(uploads: Group, slots: Tensor) -> Group:
    """Return the uploads, moved to the slots that are marked in `slots` (speakers, clusters)."""
    sums = {}
    for name, value in uploads.sums.items():
        model_sum = value.sum(1, keepdim=True).expand_as(value)
        sums[name] = align_axes(slots, value) * model_sum
    weight = uploads.weight.sum(1, keepdim=True)
    return Group(sums, slots * weight)
