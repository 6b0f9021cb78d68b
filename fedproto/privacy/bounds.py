"""By how much one record, or one client, can move the groups of an upload, and the noise for that.

The groups that travel together are one Gaussian release. Its parts have different units (sums of
embeddings, numbers of rows, products of features), so each part p has a bound Δ_p of its own, in
L2, and a share s_p of the budget. With a standard deviation of noise · Δ_p / √s_p and Σ s_p = 1,
Σ (Δ_p / σ_p)² = 1 / noise²: together they are one release with that noise multiplier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedproto.core.closed_form import CLASS_SUMS, GRAM
from fedproto.core.types import GroupLayout
from fedproto.errors import ConfigError
from fedproto.privacy.noise import Grid

#: How the budget is divided: what a sum, a Gram matrix and the numbers of rows get of it, before
#: the shares of a release are brought to a sum of 1.
SUM_SHARE = 1.0
GRAM_SHARE = 1.0
COUNT_SHARE = 0.2

#: The groups whose sums are Σ of embeddings by class, and whose weights are numbers of rows.
CLASS_GROUPS = ("prototypes", CLASS_SUMS)
#: FedRE's group: one mixture of a client's class means, and its weights.
MIXTURE = "mixture"


class Part(NamedTuple):
    """Tensors of a group that get noise of one size."""

    group: str
    tensors: tuple[str, ...]  # among the sums; none: the group's weight
    bound: float  # the L2 norm by which one unit moves them all together
    share: float  # of the budget, before normalisation


def bound_records(layouts: Mapping[str, GroupLayout], clip: float) -> list[Part]:
    """Return by how much one record, whose embedding is no longer than `clip`, moves each group.

    A record is in one class: it adds its embedding to one sum and 1 to one count. It adds φ φᵀ to
    a Gram matrix, whose upper triangle is no longer than ‖φ‖². A mixture Σ a_j C^(j) of class means
    is in the ball of radius `clip` with or without it, and the weights a on the simplex, so that
    they move by 2 · clip and √2 at most; since that holds however much of the data changes, the
    noise on a mixture protects all records of a client together.
    """
    parts = []
    for name in layouts:
        if name in CLASS_GROUPS:
            tensors = tuple(layouts[name].shapes)
            parts.append(Part(name, tensors, clip, SUM_SHARE))
            parts.append(Part(name, (), 1.0, COUNT_SHARE))
        elif name == GRAM:
            parts.append(Part(name, ("gram",), clip**2, GRAM_SHARE))
        elif name == MIXTURE:
            parts.append(Part(name, ("embedding",), 2 * clip, SUM_SHARE))
            parts.append(Part(name, ("labels",), math.sqrt(2), SUM_SHARE))
        else:
            raise ConfigError(
                f"the group {name} of an upload is not a sum over records, so that noise for one "
                "record cannot be sized: use fedproto or closed-form, or privacy=client"
            )
    return parts


def bound_clients(layouts: Mapping[str, GroupLayout], clip: float) -> list[Part]:
    """Return by how much one client moves each group.

    Every row of a client's values is no longer than `clip`, and its weights have norm 1, so
    Σ_j ‖w_j v_j‖² ≤ clip². The sums of a Gram matrix over n rows of norm at most `clip` are divided
    by the norm of the numbers of rows per class, ‖n_j‖ ≥ n / √C: they are no longer than √C clip².
    """
    parts = []
    for name, layout in layouts.items():
        if layout.counts or layout.per == "cluster":
            raise ConfigError(
                f"privacy=client cannot protect the group {name}, which has further counts or "
                "clusters: choose another algorithm, or another weighting"
            )
        if name == GRAM:
            classes = layouts[CLASS_SUMS].rows
            parts.append(Part(name, ("gram",), math.sqrt(classes) * clip**2, GRAM_SHARE))
            continue
        parts.append(Part(name, tuple(layout.shapes), clip, SUM_SHARE))
        if layout.per == "class":
            parts.append(Part(name, (), 1.0, COUNT_SHARE))
    return parts


def fit_grids(
    parts: Sequence[Part],
    layouts: Mapping[str, GroupLayout],
    noise: float,
    rounding: float = 0.0,
) -> dict[str, dict[tuple[str, ...], Grid]]:
    """Return the noise of all parts of one release, by group and by the names of the tensors.

    noise     the multiplier of the whole release
    rounding  by how much each value of a unit may be rounded before it is added
    """
    total = sum(part.share for part in parts)
    grids: dict[str, dict[tuple[str, ...], Grid]] = {}
    for part in parts:
        layout = layouts[part.group]
        rows = math.prod(layout.weight_shape)
        values = rows
        if part.tensors:
            values = rows * sum(math.prod(layout.shapes[name]) for name in part.tensors)
        part_noise = noise / math.sqrt(part.share / total)
        bound = part.bound + rounding * math.sqrt(values)
        grids.setdefault(part.group, {})[part.tensors] = Grid.fit(bound, values, part_noise)
    return grids
