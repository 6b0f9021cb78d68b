"""Inversions of models that have a closed form."""

import torch
from torch import Tensor, nn

from fedproto.audit.decoder import train_decoder
from fedproto.audit.gradient_inversion import _match, invert_gradient
from fedproto.audit.white_box import invert_embeddings


def test_a_linear_embedding_is_inverted_exactly() -> None:
    """With an orthogonal matrix Q, x = c Qᵀ is the only input whose embedding is c = x Q."""
    torch.manual_seed(0)
    matrix, _ = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))
    images = torch.rand(3, 1, 4, 4, dtype=torch.float64)

    def embed(x: Tensor) -> Tensor:
        return x.flatten(1) @ matrix

    prototypes = embed(images)
    exact = (prototypes @ matrix.T).reshape(images.shape)
    torch.testing.assert_close(exact, images)
    start = torch.full_like(images, 0.5)
    zero = torch.zeros(1, 1, 1, dtype=torch.float64)
    found = invert_embeddings(embed, prototypes, start, zero, zero + 1, 800, smoothness=0)
    torch.testing.assert_close(found, images, atol=5e-3, rtol=0)


def test_inversions_stay_within_the_range_of_pixels() -> None:
    found = invert_embeddings(
        lambda x: x.flatten(1),
        torch.full((1, 4), 5.0),
        torch.zeros(1, 1, 2, 2),
        torch.tensor(-1.0),
        torch.tensor(2.0),
        steps=200,
        smoothness=0,
    )
    assert found.flatten().tolist() == [2.0] * 4


class Linear(nn.Module):
    """Logits that are linear in the input, and the input as its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = x.flatten(1)
        return features, self.head(features)


def test_the_gradient_of_a_linear_model_gives_its_input_away() -> None:
    """∂L/∂W = (p − y) xᵀ and ∂L/∂b = p − y, so x is a quotient of two; the attack finds it."""
    torch.manual_seed(1)
    module = Linear()
    image = torch.rand(1, 1, 4, 4)
    label = torch.tensor([2])
    _, logits = module(image)
    loss = nn.functional.cross_entropy(logits, label)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    direction = dict(zip(["head.weight", "head.bias"], gradients, strict=True))
    quotient = direction["head.weight"][0] / direction["head.bias"][0]
    torch.testing.assert_close(quotient, image.flatten(), atol=1e-5, rtol=1e-4)
    found = invert_gradient(
        module,
        {name: value.detach() for name, value in module.named_parameters()},
        list(direction),
        direction,
        label,
        (1, 4, 4),
        torch.tensor(0.0),
        torch.tensor(1.0),
        steps=600,
        smoothness=0.0,
    )
    torch.testing.assert_close(found, image, atol=0.03, rtol=0)


def test_found_images_are_matched_within_their_class_only() -> None:
    """The second image looks like the third, which has another class."""
    true_images = torch.tensor([0.0, 0.5, 1.0]).reshape(3, 1, 1, 1)
    found = torch.tensor([0.45, 0.05, 0.5]).reshape(3, 1, 1, 1)
    matched = _match(found, true_images, torch.tensor([0, 0, 1]))
    torch.testing.assert_close(matched.flatten(), torch.tensor([0.05, 0.45, 0.5]))


def test_a_decoder_learns_what_embeddings_hold_and_nothing_from_constants() -> None:
    torch.manual_seed(0)
    pixels = torch.rand(200, 1, 3, 3)
    labels = torch.zeros(200, dtype=torch.long)
    mean_error = (pixels - pixels.mean(0)).square().mean()
    knowing = train_decoder(pixels.flatten(1), labels, pixels, 1, epochs=60)
    error = (knowing.decode(pixels.flatten(1), labels) - pixels).square().mean()
    assert error < 0.1 * mean_error
    ignorant = train_decoder(torch.ones(200, 9), labels, pixels, 1, epochs=20)
    decoded = ignorant.decode(torch.ones(200, 9), labels)
    assert (decoded - pixels).square().mean() > 0.95 * mean_error


def test_noise_on_embeddings_keeps_a_decoder_near_the_class_mean() -> None:
    torch.manual_seed(0)
    pixels = torch.rand(200, 1, 3, 3)
    labels = torch.zeros(200, dtype=torch.long)
    embeddings = pixels.flatten(1)
    careful = train_decoder(embeddings, labels, pixels, 1, noise=20.0, epochs=20)
    moved = careful.decode(embeddings + 3, labels)  # another member's embeddings
    bold = train_decoder(embeddings, labels, pixels, 1, epochs=20)
    mean = pixels.mean(0)
    far = (bold.decode(embeddings + 3, labels) - mean).square().mean()
    assert (moved - mean).square().mean() < 0.1 * far
