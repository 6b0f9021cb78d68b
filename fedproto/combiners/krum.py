import torch
from torch import Tensor

from fedproto.config.options import PositiveInt
from fedproto.core.combination import Combiner, average_weighted, combine_rows, compute_gram


def krum(*, attackers: PositiveInt | None = None, chosen: PositiveInt = 1) -> Combiner:
    """Take the upload that is nearest to its neighbours (Blanchard et al. 2017, Krum).

    v = x_i with the smallest score s_i = Σ_(i→j) ‖x_i − x_j‖², a sum over the n − f − 2 uploads
    nearest to x_i, where f is `attackers`; of equal scores, the first. `chosen` above 1 is
    Multi-Krum: the mean of that many uploads with the smallest scores, but of no more than n − f.
    Distances are those of all tensors of a group together. Weights do not count.

    Krum withstands f of n ≥ 2f + 3 uploads. Without `attackers`, f is the most that n allows. A row
    that fewer uploads have than 2f + 3, or than 5, is their median.
    """
    needs = 5 if attackers is None else 2 * attackers + 3

    def choose(values: Tensor, weight: Tensor) -> Tensor:
        holders = (weight > 0).sum(0)
        if attackers is None:
            wrong = (holders - 3) // 2
        else:
            wrong = torch.full_like(holders, attackers)
        scores = _scores(values, weight, holders - wrong - 2)
        ranks = scores.argsort(dim=0, stable=True).argsort(dim=0)
        kept = (holders - wrong).clamp(min=1, max=chosen)
        is_kept = ranks < kept
        return average_weighted(values, is_kept.double() / kept)

    return combine_rows("krum", choose, needs)


def _scores(values: Tensor, weight: Tensor, neighbours: Tensor) -> Tensor:
    """Return the sums of the smallest squared distances to other uploads, (m, R).

    neighbours  (R,) how many other uploads count; an upload without a row has an infinite score
    """
    gram = compute_gram(values, weight)
    lengths = gram.diagonal(dim1=1, dim2=2)
    squares = (lengths[:, :, None] + lengths[:, None, :] - 2 * gram).clamp(min=0)  # (R, m, m)
    is_held = (weight > 0).T
    itself = torch.eye(len(weight), dtype=torch.bool, device=weight.device)
    is_other = is_held[:, :, None] & is_held[:, None, :] & ~itself
    nearest_first = torch.where(is_other, squares, torch.inf).sort(dim=2).values
    places = torch.arange(len(weight), device=weight.device)
    counts = places < neighbours[:, None, None]
    scores = torch.where(counts, nearest_first, 0).sum(2)
    return torch.where(is_held, scores, torch.inf).T
