from torch import Tensor, nn

from fedproto.config.options import Fraction, PositiveInt
from fedproto.errors import ConfigError
from fedproto.models import Classifier, Fit, assemble
from fedproto.models.shared.word_ids import PADDING_ID, RESERVED_IDS, read_word_ids

#: Of the first word vectors. Small ones let the classes, not the draw, decide where words end up.
INITIAL_STD = 0.1


def textmean(
    fit: Fit,
    *,
    words: PositiveInt = 5000,
    width: PositiveInt = 50,
    dropout: Fraction = 0.5,
) -> Classifier:
    """The mean of a text's learned word vectors, each word with a learned importance.

    It is fastText's classifier (Joulin et al. 2017) with weights in its mean, which do what tf-idf
    does by a formula: rare and telling words count more. Inputs are rows of word ids: 0 is padding,
    1 an unknown word; ids beyond the `words` most frequent ones are unknown words, too. Train it
    with `optimiser=adam`: SGD hardly moves the vectors of words that few texts have.

    Body: Σ exp(a_w) v_w / Σ exp(a_w) over the words w of a text. Head: dropout - fc.
    """
    if len(fit.shape) != 1:
        raise ConfigError(
            f"model textmean takes rows of word ids, not inputs of shape {fit.shape}: "
            "use dataset text:PATH, or mlp"
        )
    body: dict[str, nn.Module] = {"words": WeightedMean(words, width)}
    return assemble(body, width, {"dropout": nn.Dropout(dropout)}, "fc1", fit)


class WeightedMean(nn.Module):
    """The weighted mean of word vectors: ids (n, length), which come as floats, to (n, width)."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(words + RESERVED_IDS, width)
        self.importance = nn.Embedding(words + RESERVED_IDS, 1)
        nn.init.normal_(self.vectors.weight, std=INITIAL_STD)
        nn.init.zeros_(self.importance.weight)

    def forward(self, x: Tensor) -> Tensor:
        ids = read_word_ids(x, self.vectors.num_embeddings)
        is_word = (ids != PADDING_ID).to(self.vectors.weight.dtype)
        weights = self.importance(ids)[..., 0].exp() * is_word
        shares = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)  # a text may have no word
        return (shares.unsqueeze(-2) @ self.vectors(ids)).squeeze(-2)
