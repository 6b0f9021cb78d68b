"""Noise of a different size for each coordinate of an embedding, at the price of equal noise.

Coordinates of an embedding may differ in size, and then equal noise drowns the small ones. So each
embedding v is divided by a shape s, coordinate by coordinate, clipped to the same length as before,
and added up; the class sums get equal noise and are multiplied by s again. Of a sum in the scaled
space one record moves no more than `clip`, whatever s is, so that the Gaussian mechanism costs what
it always costs. Multiplying by s afterwards costs nothing, since s itself is paid for.

With p_j the share of coordinate j in Σ_j E[v_j²], the least total noise is had with
s_j² = √p_j · Σ_k √p_k: then E‖v/s‖² = E‖v‖², and Σ_j s_j² = (Σ_j √p_j)² ≤ d, with equality where
all shares are equal (Cauchy and Schwarz). The shares are the client's own, so they have to be paid
for: each client first makes a noisy release of Σ v_j², a vector that one record moves by no more
than ‖v‖² ≤ clip², with a small share of the budget. It keeps that to itself; only the shaped sums
leave it. Both are Gaussian mechanisms, the second one chosen by the result of the first, and their
1/noise² add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from fedproto.core.types import Algorithm, Group, GroupLayout, Step, Upload
from fedproto.errors import ConfigError
from fedproto.privacy.bounds import Part, bound_records, fit_grids
from fedproto.privacy.clipping import clip_rows
from fedproto.privacy.noise import Grid, add_noise
from fedproto.privacy.noisy_uploads import (
    Grids,
    Protection,
    add_to_upload,
    as_dtype,
    leave_out_rare,
)

#: The one group that can be shaped, and its tensor.
SHAPED = "prototypes"
#: What a client releases to itself: Σ of the squares of each coordinate.
MOMENTS = "moments"
#: What the moments get of the budget, where sums get 1 and counts 0.2.
MOMENT_SHARE = 0.1


def with_shaped_noise(
    algorithm: Algorithm, protection: Protection, layouts: Mapping[str, GroupLayout]
) -> Algorithm:
    """Return the algorithm whose clients add shaped noise to their class sums.

    algorithm  as it is before embeddings are clipped; its uploads are what
               `refuse_unshapeable` accepts
    """
    assert protection.clip is not None
    clip = protection.clip
    grids = fit_shaped(protection, layouts)
    ((_, moment_grid),) = grids[MOMENTS].items()

    def upload(step: Step) -> Upload:
        rows = clip_rows(step.features.double(), clip)
        moments = sum_squares(rows, step.batch.mask)
        noisy_moments = add_noise(moments, moment_grid, step.key, MOMENTS, protection.seeded)
        shape = choose_shape(noisy_moments, moment_grid)
        scaled = step._replace(features=clip_rows(rows / shape, clip))
        noisy = add_to_upload(algorithm.upload(scaled), grids, step.key, protection.seeded)
        kept = leave_out_rare(noisy, grids, protection)
        return as_dtype(_multiply(kept, shape), step.lr.dtype)

    return replace(algorithm, upload=upload)


def fit_shaped(protection: Protection, layouts: Mapping[str, GroupLayout]) -> Grids:
    """Return the noise of sums, counts and moments, which together are one release."""
    assert protection.clip is not None
    (width,) = layouts[SHAPED].shapes[SHAPED]
    parts = bound_records(layouts, protection.clip)
    parts.append(Part(MOMENTS, (MOMENTS,), protection.clip**2, MOMENT_SHARE))
    with_moments = {**layouts, MOMENTS: GroupLayout({MOMENTS: (width,)})}
    return fit_grids(parts, with_moments, protection.noise)


def sum_squares(rows: Tensor, mask: Tensor) -> Tensor:
    """Return Σ of the squares of each coordinate over the rows that count, (d,)."""
    return (rows.square() * mask[:, None]).sum(0)


def choose_shape(noisy_moments: Tensor, grid: Grid) -> Tensor:
    """Return s of noisy moments, (d,), of which those below the noise count as its size."""
    moments = noisy_moments.clamp(min=grid.deviation)
    roots = (moments / moments.sum()).sqrt()
    return (roots * roots.sum()).sqrt()


def _multiply(upload: Upload, shape: Tensor) -> Upload:
    """Return class sums of scaled embeddings as sums of embeddings."""
    group = upload[SHAPED]
    return {SHAPED: Group({SHAPED: group.sums[SHAPED] * shape}, group.weight)}


def refuse_unshapeable(protection: Protection, layouts: Mapping[str, GroupLayout]) -> None:
    """Raise ConfigError unless each client adds noise to sums of plain embeddings, and no more."""
    if protection.unit != "record" or protection.at != "client":
        raise ConfigError(
            "noise_shape=variance is chosen by each client for the noise that it adds itself: use "
            "it with privacy=release or training, and noise at the clients"
        )
    shapes = {name: dict(layout.shapes) for name, layout in layouts.items()}
    widths = shapes.get(SHAPED, {}).get(SHAPED, ())
    if set(shapes) != {SHAPED} or set(shapes[SHAPED]) != {SHAPED} or len(widths) != 1:
        raise ConfigError(
            "noise_shape=variance is for uploads that are class sums of embeddings and nothing "
            "else: use fedproto without a teacher, or leave noise_shape out"
        )
