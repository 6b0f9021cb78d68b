import torch
from torch import Tensor, nn

from fedproto.config.options import Fraction, PositiveInt
from fedproto.errors import ConfigError
from fedproto.models import Classifier, Fit, assemble

WIDTHS = (3, 4, 5)  # Kim's


def textcnn(
    fit: Fit,
    *,
    words: PositiveInt = 5000,
    embedding: PositiveInt = 50,
    filters: PositiveInt = 50,
    width: PositiveInt = 50,
    dropout: Fraction = 0.5,
) -> Classifier:
    """Sentences as rows of word ids (Kim 2014): learned word vectors, convolutions over 3, 4 and 5 words, their maxima.

    Embeds: word vectors - conv `filters` of each width - max over time - relu - fc `width` - relu; decides: dropout -
    fc. Id 0 is padding, 1 an unknown word; ids beyond the `words` most frequent ones are unknown words, too.
    """
    if len(fit.shape) != 1 or fit.shape[0] < max(WIDTHS):
        raise ConfigError(
            f"model textcnn takes texts of at least {max(WIDTHS)} word ids a row, not inputs of shape {fit.shape}: "
            "use dataset text:PATH, or mlp"
        )
    layers = {
        "words": Words(words, embedding),
        "convs": Convolutions(embedding, filters),
        "relu1": nn.ReLU(),
        "fc1": nn.Linear(filters * len(WIDTHS), width),
        "relu2": nn.ReLU(),
    }
    return assemble(layers, width, {"dropout": nn.Dropout(dropout)}, "fc2", fit)


class Words(nn.Module):
    """Ids (n, length), which come as floats like all inputs, to an image of one row: (n, embedding, 1, length)."""

    def __init__(self, words: int, embedding: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(words + 2, embedding)

    def forward(self, x: Tensor) -> Tensor:
        ids = x.long()  # exact: float32 counts to 2^24
        ids = torch.where((ids >= 0) & (ids < self.vectors.num_embeddings), ids, 1)
        found = self.vectors(ids) * (ids != 0)[..., None]  # padding is zero, and learns nothing
        return found.transpose(-1, -2).unsqueeze(-2)


class Convolutions(nn.Module):
    """Each width's filters and where they answer most: (n, embedding, 1, length) to (n, 3 · filters)."""

    def __init__(self, embedding: int, filters: int) -> None:
        super().__init__()
        # Of two dimensions, because those have a fast form in a stack of clients.
        self.widths = nn.ModuleList(nn.Conv2d(embedding, filters, (1, width)) for width in WIDTHS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([conv(x).flatten(-2).amax(-1) for conv in self.widths], -1)
