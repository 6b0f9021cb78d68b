import torch
from torch import Tensor, nn

from fedproto.config.options import Fraction, PositiveInt
from fedproto.errors import ConfigError
from fedproto.models import Classifier, Fit, assemble
from fedproto.models.shared.word_ids import PADDING_ID, RESERVED_IDS, read_word_ids

#: Words that the filters span, as in Kim (2014).
WIDTHS = (3, 4, 5)


def textcnn(
    fit: Fit,
    *,
    words: PositiveInt = 5000,
    embedding: PositiveInt = 50,
    filters: PositiveInt = 50,
    width: PositiveInt = 50,
    dropout: Fraction = 0.5,
) -> Classifier:
    """Convolutions over 3, 4 and 5 learned word vectors, and their maxima (Kim 2014).

    Inputs are rows of word ids: 0 is padding, 1 an unknown word; ids beyond the `words` most
    frequent ones are unknown words, too.

    Body: word vectors - conv `filters` of each width - max over time - relu - fc `width` - relu.
    Head: dropout - fc.
    """
    longest = max(WIDTHS)
    if len(fit.shape) != 1 or fit.shape[0] < longest:
        raise ConfigError(
            f"model textcnn takes texts of at least {longest} word ids per row, "
            f"not inputs of shape {fit.shape}: use dataset text:PATH, or mlp"
        )
    body = {
        "words": Words(words, embedding),
        "convs": Convolutions(embedding, filters),
        "relu1": nn.ReLU(),
        "fc1": nn.Linear(filters * len(WIDTHS), width),
        "relu2": nn.ReLU(),
    }
    return assemble(body, width, {"dropout": nn.Dropout(dropout)}, "fc2", fit)


class Words(nn.Module):
    """Looks up word vectors: ids (n, length) to an image of one row (n, embedding, 1, length).

    The ids come as floats, like all inputs.
    """

    def __init__(self, words: int, embedding: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(words + RESERVED_IDS, embedding)

    def forward(self, x: Tensor) -> Tensor:
        ids = read_word_ids(x, self.vectors.num_embeddings)
        is_word = (ids != PADDING_ID)[..., None]
        vectors = self.vectors(ids) * is_word  # padding is zero, and learns nothing
        return vectors.transpose(-1, -2).unsqueeze(-2)


class Convolutions(nn.Module):
    """The strongest answer of each filter: (n, embedding, 1, length) to (n, 3 · filters)."""

    def __init__(self, embedding: int, filters: int) -> None:
        super().__init__()
        # Two-dimensional, because those have a fast form in a stack of clients.
        self.widths = nn.ModuleList(nn.Conv2d(embedding, filters, (1, width)) for width in WIDTHS)

    def forward(self, x: Tensor) -> Tensor:
        answers = [convolution(x).flatten(-2).amax(-1) for convolution in self.widths]
        return torch.cat(answers, -1)
