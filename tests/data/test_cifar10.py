"""CIFAR-10's python batches, whole, damaged and malicious."""

import os
import pickle
import struct

import numpy as np
import pytest
from helpers.data_files import CIFAR10_BATCHES, cifar10_batch
from helpers.sources import build, images, refusal

pytestmark = pytest.mark.usefixtures("only_own_files")


def write_cifar10(folder, changes=None):
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        name: pickle.dumps(cifar10_batch(number), protocol=2)
        for number, name in enumerate(CIFAR10_BATCHES)
    }
    for name, raw in (whole | (changes or {})).items():
        (folder / name).write_bytes(raw)


@pytest.mark.parametrize("place", ["cifar10/cifar-10-batches-py", "cifar-10-batches-py"])
def test_cifar10_reads_the_batches_in_order(tmp_path, place):
    write_cifar10(tmp_path / place)
    source = build("cifar10", tmp_path)
    pixels = np.concatenate([cifar10_batch(number)[b"data"] for number in range(5)])
    assert source.train.x.shape == (10, 3, 32, 32) and source.test.x.shape == (2, 3, 32, 32)
    assert source.train.x.reshape(10, 3072).tolist() == pixels.tolist()
    assert source.train.y.tolist() == [0, 9] * 5
    assert source.augment and source.model == "resnet18"


def test_cifar10_reads_pickles_as_python_2_wrote_them(tmp_path):
    """The real files come from Python 2, which wrote strings and arrays differently."""
    pixels = images(2, 3072)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x02M\x00\x0c\x86"
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<i", pixels.size) + pixels.tobytes() + b"tb"
    )  # fmt: skip
    old = b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x03K\x04eu."
    write_cifar10(tmp_path / "cifar-10-batches-py", {"test_batch": old})
    source = build("cifar10", tmp_path)
    assert source.test.x.reshape(2, 3072).tolist() == pixels.tolist()
    assert source.test.y.tolist() == [3, 4]


GOOD = pickle.dumps(cifar10_batch(0), protocol=2)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is not a CIFAR-10 python batch (or is damaged)"),
        (GOOD[: len(GOOD) // 2], "is not a CIFAR-10 python batch (or is damaged)"),
        (b"not a pickle", "is not a CIFAR-10 python batch (or is damaged)"),
        (pickle.dumps({b"labels": [0]}), "CIFAR-10 python batch (or is damaged): b'data'"),
        (pickle.dumps([1, 2]), "is not a CIFAR-10 python batch (or is damaged)"),
        (
            pickle.dumps(cifar10_batch(0) | {b"data": images(2, 3000)}),
            "is not a CIFAR-10 python batch (or is damaged)",
        ),
        (
            pickle.dumps(cifar10_batch(0, labels=[0, 10]), protocol=2),
            "a label 10, out of range: there are 10 classes",
        ),
        (pickle.dumps(cifar10_batch(0, labels=[0, -1]), protocol=2), "a label -1, out of range"),
        (pickle.dumps(cifar10_batch(0, labels=[0]), protocol=2), "has 2 inputs but 1 labels"),
    ],
)
def test_a_damaged_cifar10_batch_is_refused(tmp_path, raw, words):
    write_cifar10(tmp_path / "cifar-10-batches-py", {"data_batch_3": raw})
    message = refusal("cifar10", tmp_path)
    assert words in message and "data_batch_3" in message


def test_cifar10_batches_whose_wrong_lengths_make_up_for_each_other_are_refused(tmp_path):
    # All in all there are as many labels as images, but they would be those of other images.
    changes = {
        "data_batch_1": cifar10_batch(0, labels=[1]),
        "data_batch_2": cifar10_batch(1, labels=[1, 2, 3]),
    }
    write_cifar10(
        tmp_path / "cifar-10-batches-py", {name: pickle.dumps(b) for name, b in changes.items()}
    )
    assert "data_batch_1 has 2 inputs but 1 labels" in refusal("cifar10", tmp_path)


class Malicious:
    def __init__(self, call, argument):
        self.call, self.argument = call, argument

    def __reduce__(self):
        return self.call, (self.argument,)


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize(
    ("call", "name"), [(os.system, "system"), (eval, "eval"), (np.load, "load")]
)
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, call, name, protocol):
    victim = tmp_path / "victim"
    argument = f"touch {victim}" if call is os.system else f"open({str(victim)!r}, 'w')"
    raw = pickle.dumps({b"data": Malicious(call, argument), b"labels": [0, 1]}, protocol)
    write_cifar10(tmp_path / "cifar-10-batches-py", {"data_batch_1": raw})
    assert f".{name}, which a data file must not use" in refusal("cifar10", tmp_path)
    assert not victim.exists()


@pytest.mark.parametrize("missing", ["data_batch_1", "data_batch_5", "test_batch"])
def test_a_missing_cifar10_batch_is_named(tmp_path, missing):
    write_cifar10(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / missing).unlink()
    assert f"{missing} is missing: the folder must hold" in refusal("cifar10", tmp_path)
