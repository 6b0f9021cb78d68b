"""Rows of images: what clients have, what attackers make of it, and what a class name says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedproto.audit.attacks import Audit, to_arrays
from fedproto.audit.gradient_inversion import Inversion
from fedproto.audit.image_quality import nearest, psnr, ssim
from fedproto.plots.labels import shorten
from fedproto.plots.style import make_panels
from fedproto.report.figures.figure import Figure, finish_figure

INCHES_PER_IMAGE = 0.62
LABEL_INCHES = 1.9
MAX_COLUMNS = 10
MIN_COLUMNS = 6  # of which some may be empty, so that images have one size on the page


def draw_reconstructions(audit: Audit, number: int) -> Figure:
    """Draw the attacked prototypes of a run: one column each, one row per attacker."""
    targets, attempts = audit.pictures["reconstruction"]
    targets = targets[:MAX_COLUMNS]
    truth = []
    for place, target in enumerate(targets):
        # The client's image that the best attacker came nearest to.
        best = max(attempts, key=lambda attempt: attempt.scores[place].ssim_own)
        closest, _ = nearest(best.images[place], target.images)
        truth.append(to_arrays(target.images[closest][None])[0])
    rows = [("client's nearest image", truth)]
    rows += [(each.name, list(to_arrays(each.images[: len(targets)]))) for each in attempts]
    heads = [f"{len(target.images)} image{'s' * (len(target.images) > 1)}" for target in targets]
    canvas = _draw_rows(rows, heads, shorten(audit.name))
    caption = (
        f"{audit.name}: prototypes of classes with the fewest images, one column each, and what "
        'attackers make of them. The row "class name only" needs no prototype.'
    )
    alt = f"{audit.name}: {len(targets)} attacked prototypes, in rows by attacker."
    table = _reconstruction_table(audit)
    return finish_figure(canvas, f"reconstruction-{number}", audit.name, caption, alt, table)


def _reconstruction_table(audit: Audit) -> Iterator[Sequence[Any]]:
    yield ("client", "class", "images", "attacker", "psnr_own", "ssim_own", "psnr_mean", "rank")
    found = audit.found["reconstruction"]
    for attacker in found["attackers"]:
        for target, score in zip(found["targets"], attacker["scores"], strict=True):
            yield (
                *target.values(),
                attacker["attacker"],
                score["psnr_own"],
                score["ssim_own"],
                score["psnr_mean"],
                score["rank"],
            )


def draw_inversions(audit: Audit, case: str, number: int) -> Figure:
    """Draw the images of one case of gradient inversion beside the true ones."""
    inversions = [each for each in audit.pictures["gradients"] if each.case == case]
    true_images = []
    found = []
    baseline = []
    for each in inversions:
        share = max(1, MAX_COLUMNS // len(inversions))
        true_images += list(to_arrays(each.true_images[:share]))
        found += list(to_arrays(each.found_images[:share]))
        baseline += list(to_arrays(each.baseline[:share]))
    rows = [("trained on", true_images), ("from the update", found), ("class name only", baseline)]
    canvas = _draw_rows(rows, [], shorten(f"{audit.name}: {case}"))
    caption = (
        f"{audit.name}, {case}: images that a client trained on in round 1, what its update gives "
        "away, and the mean image of the class."
    )
    alt = f"{audit.name}: {len(found)} images from updates of {case}."
    name = f"gradients-{number}-{case.replace(' ', '-')}"
    return finish_figure(canvas, name, case, caption, alt, _inversion_table(inversions))


def _inversion_table(inversions: Sequence[Inversion]) -> Iterator[Sequence[Any]]:
    yield ("client", "image", "psnr", "ssim", "baseline_psnr", "baseline_ssim")
    for each in inversions:
        columns = [
            psnr(each.found_images, each.true_images),
            ssim(each.found_images, each.true_images),
            psnr(each.baseline, each.true_images),
            ssim(each.baseline, each.true_images),
        ]
        for image in range(len(each.labels)):
            yield (each.client, image, *[float(column[image]) for column in columns])


def _draw_rows(
    rows: Sequence[tuple[str, Sequence[np.ndarray]]], heads: Sequence[str], title: str
) -> Any:
    """Return a canvas with a row of images for each label."""
    shown = min(MAX_COLUMNS, len(rows[0][1]))
    columns = max(shown, MIN_COLUMNS)
    width = LABEL_INCHES + INCHES_PER_IMAGE * columns
    height = 0.5 + INCHES_PER_IMAGE * len(rows)
    canvas, panels = make_panels(width, height, columns, len(rows))
    canvas.suptitle(title, fontsize=10)
    for number, (label, images) in enumerate(rows):
        for column in range(columns):
            axes = panels[number * columns + column]
            if column >= shown:
                axes.set_axis_off()
                continue
            axes.imshow(images[column], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.grid(False)
            if number == 0 and heads:
                axes.set_title(heads[column], fontsize=7)
            if column == 0:
                axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    return canvas
