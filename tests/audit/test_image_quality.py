"""PSNR, SSIM and total variation, against hand-computed numbers."""

import pytest
import torch

from fedproto.audit.image_quality import nearest, psnr, ssim, total_variation


def test_psnr_of_a_tenth_per_pixel_is_20_decibels() -> None:
    a = torch.zeros(2, 1, 4, 4)
    b = torch.stack([torch.full((1, 4, 4), 0.1), torch.full((1, 4, 4), 0.01)])
    assert psnr(a, b).tolist() == pytest.approx([20, 40], abs=1e-4)
    assert psnr(a, a).tolist() == pytest.approx([100, 100])


def test_ssim_of_flat_images_is_that_of_their_brightness() -> None:
    """Without structure, SSIM = (2ab + C1) / (a² + b² + C1)."""
    a = torch.full((1, 3, 16, 16), 0.2, dtype=torch.float64)
    b = torch.full((1, 3, 16, 16), 0.6, dtype=torch.float64)
    expected = (2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4)
    assert float(ssim(a, b)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("side", [8, 11, 28])
def test_ssim_is_1_for_equal_images_and_about_0_for_noise(side: int) -> None:
    torch.manual_seed(0)
    a = torch.rand(8, 1, side, side)
    b = torch.rand(8, 1, side, side)
    assert ssim(a, a).tolist() == pytest.approx([1] * 8, abs=1e-5)
    assert float(ssim(a, b).mean()) < 0.25
    assert float(ssim(a, 1 - a).mean()) < 0


def test_total_variation_of_a_step() -> None:
    """Half black, half white: one of three steps across is 1, and none is down."""
    image = torch.zeros(1, 1, 4, 4)
    image[..., 2:] = 1
    assert float(total_variation(image)) == pytest.approx(1 / 3)


def test_the_nearest_image_is_found() -> None:
    candidates = torch.stack([torch.zeros(1, 2, 2), torch.ones(1, 2, 2)])
    place, distances = nearest(torch.full((1, 2, 2), 0.9), candidates)
    assert place == 1
    assert distances.tolist() == pytest.approx([0.81, 0.01])
