from fedproto.feature_maps import Compute, FeatureMap, Inputs
from fedproto.feature_maps.hashed_ngrams import hashed_ngrams
from fedproto.feature_maps.random_conv import random_conv
from fedproto.feature_maps.random_fourier import random_fourier


def auto() -> FeatureMap:
    """`random-conv` for images, `hashed-ngrams` for texts, `random-fourier` for tables."""

    def choose(inputs: Inputs) -> FeatureMap:
        if inputs.words is not None:
            return hashed_ngrams()
        return random_conv() if inputs.are_images else random_fourier()

    def build(inputs: Inputs) -> Compute:
        return choose(inputs).build(inputs)

    return FeatureMap("auto", lambda inputs: choose(inputs).count(inputs), build)
