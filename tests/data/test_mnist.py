"""The claim on real data, as far as a minute allows; results/table-mnist.md has all of it."""

import hashlib

import numpy as np
import pytest

import fedproto
from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DataFolders
from fedproto.errors import DataError


def test_the_images_in_the_package_are_images_of_mnist():
    """Each of the 5,000 is one of the 60,000 training images, with its label, and none twice."""
    try:
        whole = plugins.build("dataset", Part("mnist"), DataFolders())
    except DataError:
        pytest.skip("no MNIST in $FEDPROTO_DATA")
    small = plugins.build("dataset", Part("mnist5k"), DataFolders())
    known = {}
    for split in (whole.train, whole.test):
        for image, label in zip(np.asarray(split.x), split.y, strict=True):
            known[hashlib.sha256(image.tobytes()).digest()] = int(label)
    found = {}
    for split in (small.train, small.test):
        for image, label in zip(split.x, split.y, strict=True):
            found[hashlib.sha256(image.tobytes()).digest()] = int(label)
    assert len(found) == 5000
    assert {key: known.get(key) for key in found} == found


@pytest.mark.slow
def test_fedproto_beats_training_alone_and_the_papers_value():
    """20 clients, n = 3, stdev 2, k = 100: 20 rounds suffice for the paper's final 97.13%."""
    try:
        DataFolders().find("mnist")
    except DataError:
        pytest.skip("no MNIST in $FEDPROTO_DATA")
    setting = {
        "dataset": "mnist",
        "rounds": 20,
        "eval_every": 20,
        "ways": 3,
        "stdev": 2,
        "shots": 100,
    }
    alone = fedproto.run(algorithm="local", **setting).accuracy["head"]["mean"]
    together = fedproto.run(algorithm="fedproto", **setting).accuracy
    assert together["prototype"]["mean"] > alone
    assert together["head"]["mean"] > alone
    assert together["prototype"]["mean"] > 0.9713
