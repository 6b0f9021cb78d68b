import zlib

import torch
import torch.nn.functional as F
from torch import Tensor

from fedproto.config.options import NonNegativeInt, PositiveInt
from fedproto.core import rng
from fedproto.feature_maps import Compute, FeatureMap, Inputs, refuse_inputs
from fedproto.models.shared.word_ids import RESERVED_IDS, read_word_ids


def hashed_ngrams(
    *, values: PositiveInt = 1024, n: PositiveInt = 2, seed: NonNegativeInt = 0
) -> FeatureMap:
    """The words of a text, and up to n neighbours in a row, hashed to a bag of `values` counts.

    Every n-gram adds 1 or −1, by its hash, to one of the values (Weinberger et al. 2009); the root
    of each count's size is taken, with its sign, and the row divided by its norm. The hash is of
    the words themselves, not of their ranks, so clients with different vocabularies share the
    features. Words outside a client's vocabulary, and padding, are left out.
    """

    def build(inputs: Inputs) -> Compute:
        if inputs.words is None:
            raise refuse_inputs("hashed-ngrams", "texts", inputs)
        hashes = [zlib.crc32(word.encode()) for word in inputs.words]
        word_hashes = torch.tensor([0] * RESERVED_IDS + hashes, dtype=torch.int64)

        def compute(x: Tensor) -> Tensor:
            ids = read_word_ids(x, len(word_hashes))
            is_word = ids >= RESERVED_IDS
            of_words = word_hashes.to(x.device)[ids]
            bag = x.new_zeros(len(x), values)
            for length in range(1, n + 1):
                positions = ids.shape[1] - length + 1
                if positions < 1:
                    break
                keys = torch.full_like(of_words[:, :positions], seed + length)
                present = torch.ones_like(is_word[:, :positions])
                for offset in range(length):
                    words = of_words[:, offset : offset + positions]
                    keys = rng.bits(keys * 31 + words, 1)[..., 0]
                    present = present & is_word[:, offset : offset + positions]
                places = keys.remainder(values)
                signs = ((keys >> 32) % 2 * 2 - 1).to(x.dtype)
                bag = bag.scatter_add(1, places, signs * present)
            rooted = bag.sign() * bag.abs().sqrt()
            return F.normalize(rooted, dim=1)

        return compute

    return FeatureMap("hashed-ngrams", lambda inputs: values, build)
