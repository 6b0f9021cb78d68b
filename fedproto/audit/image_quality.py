"""How near a reconstructed image is to a true one. All images are (n, channels, h, w) in [0, 1]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Wang et al. (2004): the window, and the constants for a range of values of 1.
SSIM_WINDOW = 11
SSIM_SIGMA = 1.5
SSIM_C1 = 0.01**2
SSIM_C2 = 0.03**2
#: The mean squared error below which two images are called equal, so that PSNR stays finite.
SMALLEST_ERROR = 1e-10


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each pair of images in decibels, (n,).

    10 log10(1 / mean squared error): 20 dB is an error of 0.1 per pixel; at most 100 dB.
    """
    error = (a - b).square().flatten(1).mean(1).clamp(min=SMALLEST_ERROR)
    return -10 * error.log10()


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the structural similarity of each pair of images, (n,): 1 if they are equal.

    Means, variances and the covariance are those of Gaussian windows that lie within the image;
    the window of a small image is smaller.
    """
    window = _make_window(min(a.shape[-2:]), a)
    mean_a = _blur(a, window)
    mean_b = _blur(b, window)
    variance_a = _blur(a * a, window) - mean_a.square()
    variance_b = _blur(b * b, window) - mean_b.square()
    covariance = _blur(a * b, window) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + SSIM_C1) / (mean_a.square() + mean_b.square() + SSIM_C1)
    structure = (2 * covariance + SSIM_C2) / (variance_a + variance_b + SSIM_C2)
    return (luminance * structure).flatten(1).mean(1)


def _make_window(side: int, like: Tensor) -> Tensor:
    """Return a Gaussian window, (1, 1, size, size), of an odd size that fits into the image."""
    size = min(SSIM_WINDOW, side if side % 2 else side - 1)
    places = torch.arange(size, dtype=like.dtype, device=like.device) - size // 2
    weights = torch.exp(-places.square() / (2 * SSIM_SIGMA**2))
    weights = weights / weights.sum()
    return torch.outer(weights, weights)[None, None]


def _blur(images: Tensor, window: Tensor) -> Tensor:
    """Return the weighted mean of each window, channel by channel."""
    channels = images.shape[1]
    return F.conv2d(images, window.expand(channels, 1, -1, -1), groups=channels)


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels of each image, (n,)."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs()
    across = (images[..., 1:] - images[..., :-1]).abs()
    return down.flatten(1).mean(1) + across.flatten(1).mean(1)


def nearest(image: Tensor, candidates: Tensor) -> tuple[int, Tensor]:
    """Return which candidate is nearest to an image (channels, h, w), and all squared distances."""
    distances = (candidates - image[None]).square().flatten(1).mean(1)
    return int(distances.argmin()), distances
