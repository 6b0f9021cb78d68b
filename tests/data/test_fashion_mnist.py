"""Fashion-MNIST against tiny files written byte by byte."""

import gzip

import numpy as np
import pytest
from helpers.data_files import idx, write
from helpers.sources import build, images, refusal

pytestmark = pytest.mark.usefixtures("only_own_files")


def write_fashion(folder, changes=None):
    for part, count in (("train", 3), ("t10k", 2)):
        files = {
            f"{part}-images-idx3": idx(images(count, 28, 28)),
            f"{part}-labels-idx1": idx(np.arange(count, dtype="u1")),
        }
        for name, raw in (
            files | {key: value for key, value in (changes or {}).items() if key in files}
        ).items():
            write(folder / f"{name}-ubyte.gz", gzip.compress(raw))


@pytest.mark.parametrize("place", ["fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnist_reads_what_the_idx_files_hold(tmp_path, place):
    write_fashion(tmp_path / place)
    source = build("fashion-mnist", tmp_path)
    assert source.train.x.tolist() == images(3, 28, 28).tolist() and source.test.y.tolist() == [
        0,
        1,
    ]
    assert (
        source.classes[0] == "T-shirt/top"
        and source.classes[9] == "Ankle boot"
        and len(source.classes) == 10
    )


def test_fashion_mnist_does_not_take_mnist_for_itself(tmp_path):
    for place in (".", "mnist", "MNIST/raw"):
        write_fashion(tmp_path / place)
    assert "was not found in" in refusal("fashion-mnist", tmp_path)


def test_a_damaged_fashion_mnist_file_is_refused(tmp_path):
    write_fashion(
        tmp_path / "fashion-mnist", {"t10k-labels-idx1": idx(np.array([0, 10], np.uint8))}
    )
    assert "a label 10, out of range" in refusal("fashion-mnist", tmp_path)
