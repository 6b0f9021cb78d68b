"""Data sources as a run would ask for them, for all tests of them."""

import numpy as np
import pytest

from fedproto import registry
from fedproto.data import Places
from fedproto.errors import FedProtoError
from fedproto.options import Part


def build(name, folder=None, **options):
    """A source that looks for its files in `folder`, if one is named."""
    return registry.build("dataset", Part(str(name), options), Places(None if folder is None else str(folder)))


def refusal(name, folder=None, **options):
    """The one sentence with which a source refuses."""
    with pytest.raises(FedProtoError) as caught:
        build(name, folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def images(count, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)
