import torch
from sklearn.cluster import kmeans_plusplus
from torch import Tensor

from fedproto.algorithms import by_head, samples, supervised, trainable, travelling
from fedproto.config.options import PositiveInt
from fedproto.core import rng
from fedproto.core.tensors import align_axes, make_upload, weighted_mean
from fedproto.core.types import Algorithm, Step, Task, Tree, Upload, everything
from fedproto.errors import ConfigError

_STATE = ("seeded", "sizes", "seed")  # what the server keeps beside the centres


def fesem(*, clusters: PositiveInt = 3) -> Algorithm:
    """Several global models, each client follows the nearest (Xie et al. 2021, stochastic EM).

    min over centres and assignment r of Σ_i |D_i|/N Σ_k r_ik ||w_i − w̃_k||². E-step, at the client: r_i is the centre
    nearest to its trained weights. M-step, at the server: w̃_k ← Σ_i r_ik |D_i| w_i / Σ_i r_ik |D_i|. Each client
    downloads all centres, starts from the one nearest to its own weights, and uploads into one slot.

    All centres are equal at first, so round 1 is FedAvg's, and the server seeds the centres by k-means++ on its single
    uploads (hence not additive). A cluster for which nobody speaks keeps its centre and is reported.
    """

    def init(params: Tree, task: Task) -> Tree:
        if clusters > task.clients:
            raise ConfigError(f"algorithm fesem's clusters is {clusters}, but there are only {task.clients} clients")
        start = travelling(params, everything)
        centres = {name: value.expand(clusters, *value.shape).clone() for name, value in start.items()}
        seed = int(rng.key(task.seed, "fesem")) & 0x7FFFFFFF  # what scikit-learn takes
        sizes = torch.zeros(clusters, dtype=next(iter(start.values())).dtype)
        state = {"seeded": torch.tensor(0), "sizes": sizes, "seed": torch.tensor(seed)}
        return centres | state

    def adopt(own: Tree, received: Tree) -> Tree:
        chosen = _nearest(own, received)
        return own | {name: centre.index_select(0, chosen[None])[0] for name, centre in received.items()}

    def upload(step: Step) -> Upload:
        slot = torch.arange(clusters, device=samples(step).device) == _nearest(step.params, step.received)
        values = {name: step.params[name].expand(clusters, *step.params[name].shape) for name in step.received}
        return make_upload(values, slot * samples(step))

    def aggregate(server: Tree, uploads: Upload) -> Tree:
        seeded = server["seeded"]
        if not seeded and len(uploads.weights["weight"]) >= clusters:
            uploads, seeded = _seed(uploads, int(server["seed"])), torch.ones_like(seeded)
        elif not seeded:  # too few spoke to tell clusters apart: every centre follows the mean of those who did
            uploads = _assign(uploads, torch.ones_like(uploads.weights["weight"]))
        state = {"seeded": seeded, "sizes": uploads.weights["weight"].sum(0).cpu(), "seed": server["seed"]}
        return weighted_mean(server, uploads) | state

    def notes(server: Tree) -> list[str]:
        empty = (server["sizes"] == 0).nonzero().flatten().tolist()
        waiting = (
            [] if server["seeded"] else [f"fesem: fewer than {clusters} uploads, so the clusters are not seeded yet"]
        )
        return waiting + [f"fesem: nobody spoke for cluster {k}, which keeps its centre" for k in empty]

    return Algorithm(
        name="fesem",
        shared=everything,
        init=init,
        send=lambda server, classes: {name: value for name, value in server.items() if name not in _STATE},
        adopt=adopt,
        loss=supervised,
        upload=upload,
        aggregate=aggregate,
        predict=by_head,
        additive=False,
        notes=notes,
    )


def _nearest(own: Tree, centres: Tree) -> Tensor:
    """argmin_k ||w_i − w̃_k||², over the weights (running statistics are none); the first one of equals."""
    distances = [(centre - own[name]).flatten(1).square().sum(1) for name, centre in trainable(centres).items()]
    return torch.stack(distances).sum(0).argmin()


def _seed(uploads: Upload, seed: int) -> Upload:
    """k-means++ on the speakers' weights: the uploads again, each in the slot of its nearest seed."""
    weight = uploads.weights["weight"].sum(1)
    sums = trainable(uploads.sums).values()
    points = torch.cat([(s.sum(1) / align_axes(weight, s[:, 0])).flatten(1) for s in sums], dim=1)
    clusters = uploads.weights["weight"].shape[1]
    _, rows = kmeans_plusplus(points.double().cpu().numpy(), clusters, random_state=seed)
    chosen = torch.cdist(points.double(), points[rows.tolist()].double()).argmin(1)
    return _assign(uploads, torch.nn.functional.one_hot(chosen, clusters).to(weight.dtype))


def _assign(uploads: Upload, slots: Tensor) -> Upload:
    """The same uploads, moved from whatever slots they were in to those marked in `slots` (speakers, clusters)."""
    moved = {
        name: align_axes(slots, value) * value.sum(1, keepdim=True).expand_as(value)
        for name, value in uploads.sums.items()
    }
    return Upload(moved, {"weight": slots * uploads.weights["weight"].sum(1, keepdim=True)})
