"""The idx files of MNIST, written byte by byte, whole and damaged, and the real ones."""

import gzip
import hashlib
import struct

import numpy as np
import pytest
from helpers.data_files import REAL_DATA, idx
from helpers.sources import build, images, refusal

pytestmark = pytest.mark.usefixtures("only_own_files")


# --- mnist: idx files


MNIST = {
    "train-images-idx3-ubyte": images(3, 28, 28),
    "train-labels-idx1-ubyte": np.array([7, 0, 9], np.uint8),
    "t10k-images-idx3-ubyte": images(2, 28, 28, seed=1),
    "t10k-labels-idx1-ubyte": np.array([1, 2], np.uint8),
}


def write_mnist(folder, changes=None, end="", pack=lambda raw: raw):
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in (
        {name: idx(array) for name, array in MNIST.items()} | (changes or {})
    ).items():
        (folder / (name + end)).write_bytes(pack(raw))


@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize(
    ("end", "pack"), [("", bytes), (".gz", gzip.compress)], ids=["plain", "gz"]
)
def test_mnist_reads_what_the_idx_files_hold(tmp_path, place, end, pack):
    write_mnist(tmp_path / place, end=end, pack=pack)
    source = build("mnist", tmp_path)
    found = source.train.x, source.train.y, source.test.x, source.test.y
    for array, wanted in zip(found, MNIST.values(), strict=True):
        assert array.tolist() == wanted.tolist()


def test_idx_sizes_are_big_endian(tmp_path):
    """One image of 2x3, spelled out."""
    raw = (
        b"\x00\x00\x08\x03"
        + b"\x00\x00\x00\x01"
        + b"\x00\x00\x00\x02"
        + b"\x00\x00\x00\x03"
        + b"\x01\x02\x03\x04\x05\x06"
    )
    one = b"\x00\x00\x08\x01\x00\x00\x00\x01\x05"
    write_mnist(tmp_path, {name: raw if "images" in name else one for name in MNIST})
    source = build("mnist", tmp_path)
    assert source.train.x.tolist() == [[[1, 2, 3], [4, 5, 6]]]
    assert source.train.y.tolist() == [5]


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


WHOLE = idx(MNIST[IMAGES])


@pytest.mark.parametrize(
    ("file", "raw", "words"),
    [
        (IMAGES, b"", "it starts with nothing, not 00000803"),
        (IMAGES, WHOLE[:3], "it starts with 000008, not 00000803"),
        (IMAGES, WHOLE[:10], "is not an idx file of bytes with 3 axes"),
        (IMAGES, WHOLE[:-1], "announces 2352 bytes of data, but it holds 2351"),
        (IMAGES, WHOLE + b"x", "announces 2352 bytes of data, but it holds 2353"),
        (
            IMAGES,
            WHOLE[:4] + b"\0\0\0\x04" + WHOLE[8:],
            "announces 3136 bytes of data, but it holds 2352",
        ),
        # 2^64 bytes: a product in 64 bits would say zero
        (
            IMAGES,
            WHOLE[:4] + b"\x80\0\0\0\x80\0\0\0\0\0\0\x04",
            "announces 18446744073709551616 bytes",
        ),
        (IMAGES, b"\0\0\x0d\x03" + WHOLE[4:], "it starts with 00000d03"),  # floats
        (IMAGES, b"\x03\x08\0\0" + WHOLE[4:], "it starts with 03080000"),  # the small end first
        (IMAGES, idx(MNIST[LABELS]), "it starts with 00000801"),  # labels where images belong
        (LABELS, WHOLE, "it starts with 00000803"),
        (
            LABELS,
            idx(np.array([7, 0, 10], np.uint8)),
            "a label 10, out of range: there are 10 classes, 0 to 9",
        ),
        (LABELS, idx(np.array([7, 0], np.uint8)), "has 3 inputs but 2 labels"),
        (
            "t10k-images-idx3-ubyte",
            idx(images(2, 27, 28)),
            r"shape (28, 28) but test inputs of (27, 28)",
        ),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path, file, raw, words):
    write_mnist(tmp_path, {file: raw})
    assert words in refusal("mnist", tmp_path)


@pytest.mark.parametrize(
    ("pack", "words"),
    [
        (lambda raw: gzip.compress(raw)[:-12], "is damaged"),
        (lambda raw: raw, "is damaged: Not a gzipped file"),
        (lambda raw: b"", "it starts with nothing"),
        (lambda raw: gzip.compress(raw[:-1]), "it holds 2351"),
        (lambda raw: gzip.compress(raw)[:20] + b"\xff" * 40, "is damaged"),
    ],
    ids=["truncated", "plain", "empty", "truncated inside", "overwritten"],
)
def test_a_damaged_gz_file_is_refused(tmp_path, pack, words):
    write_mnist(tmp_path, end=".gz", pack=pack)
    message = refusal("mnist", tmp_path)
    assert words in message and "train-images-idx3-ubyte.gz" in message


# --- the real files, where they lie


real_mnist = pytest.mark.skipif(
    not (REAL_DATA / "mnist").exists(), reason="no MNIST in $FEDPROTO_DATA"
)


@real_mnist
def test_real_mnist_is_complete():
    source = build("mnist", REAL_DATA)
    assert source.train.x.shape == (60_000, 28, 28) and source.test.x.shape == (10_000, 28, 28)
    assert np.bincount(source.train.y)[:3].tolist() == [5923, 6742, 5958]  # LeCun's counts
    assert (
        abs(source.train.x.mean() / 255 - 0.1307) < 1e-4
        and abs(source.train.x.std() / 255 - 0.3081) < 1e-4
    )


@real_mnist
def test_real_mnist_training_images_are_the_canonical_bytes():
    header = struct.pack(">BBBBIII", 0, 0, 8, 3, 60_000, 28, 28)
    raw = header + build("mnist", REAL_DATA).train.x.tobytes()  # what was read, written back
    assert hashlib.md5(raw).hexdigest() == "6bbc9ace898e44ae57da46a324031adb"
