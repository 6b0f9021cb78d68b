"""Each data source against tiny files written byte by byte, whole and damaged, and the real ones where they lie."""

import gzip
import hashlib
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data_files import CIFAR10_BATCHES, cifar10_batch, idx
from helpers.sources import build, images, refusal

import fedproto
from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DataFolders, Source, Split, hold_out
from fedproto.errors import DataError

REAL = Path(
    os.environ.get("FEDPROTO_DATA") or Path(__file__).parents[3] / "shared" / "data"
).absolute()


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch, tmp_path):
    """A test finds only the files it wrote: no real data, no cache of whoever runs it."""
    monkeypatch.delenv("FEDPROTO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no cache"))


# --- mnist: idx files -------------------------------------------------------------------------------------------------

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


# --- cifar10: python batches ------------------------------------------------------------------------------------------


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
    """The real files come from Python 2, which writes its strings and arrays otherwise than any Python 3 can."""
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


# --- npz: a user's own arrays -----------------------------------------------------------------------------------------

X, Y = np.random.default_rng(2).random((30, 4)), np.arange(30) % 3


def write_npz(folder, **arrays):
    """`x` and `y` as above, or what is said otherwise; None: leave it out."""
    path = folder / "own.npz"
    np.savez(
        path,
        **{name: value for name, value in ({"x": X, "y": Y} | arrays).items() if value is not None},
    )
    return f"npz:{path}"


def test_npz_holds_out_a_fifth_of_each_class(tmp_path):
    source = build(write_npz(tmp_path))
    assert np.bincount(source.train.y).tolist() == [8, 8, 8]
    assert np.bincount(source.test.y).tolist() == [2, 2, 2]
    assert source.classes == ("0", "1", "2")
    rows = sorted(source.train.x.tolist() + source.test.x.tolist())  # no row is lost or doubled
    assert rows == sorted(X.tolist())


def test_npz_takes_the_test_set_it_is_given(tmp_path):
    source = build(write_npz(tmp_path, x_test=X[:4] + 1, y_test=Y[:4]))
    assert source.train.x.tolist() == X.tolist() and source.train.y.tolist() == Y.tolist()
    assert (
        source.test.x.tolist() == (X[:4] + 1).tolist() and source.test.y.tolist() == Y[:4].tolist()
    )


def test_npz_clients_become_writers_and_stay_with_their_rows(tmp_path):
    source = build(write_npz(tmp_path, client=Y + 10))
    for split in (source.train, source.test):
        assert (split.writer == split.y + 10).all()


def test_npz_clients_may_be_names(tmp_path):
    source = build(write_npz(tmp_path, client=np.array(["ann", "bob", "cy"])[Y]))
    assert set(source.train.writer) == {"ann", "bob", "cy"}


def test_npz_class_names(tmp_path):
    source = build(write_npz(tmp_path, classes=np.array(["cat", "dog", "owl", "yak"])))
    assert source.classes == ("cat", "dog", "owl", "yak")


@pytest.mark.parametrize(
    ("x", "model", "scale"),
    [
        (X, "mlp", 1.0),
        (images(30, 28, 28), "cnn", 255.0),
        (images(30, 3, 28, 28) / 255.0, "cnn", 1.0),
    ],
    ids=["rows", "bytes", "colour floats"],
)
def test_npz_names_a_model_and_a_scale_by_the_kind_of_inputs(tmp_path, x, model, scale):
    source = build(write_npz(tmp_path, x=x))
    assert (source.model, source.mixed_model, source.scale) == (model, f"{model}-mh", scale)


def test_npz_is_normalised_by_its_options(tmp_path):
    source = build(write_npz(tmp_path, x=images(30, 2, 5, 5)), mean="0.5,0.25", std=(0.5, 2.0))
    found = source.tensor(source.train, np.array([3]))[0]
    wanted = (
        torch.tensor(source.train.x[3] / 255.0) - torch.tensor([[[0.5]], [[0.25]]])
    ) / torch.tensor([[[0.5]], [[2]]])
    torch.testing.assert_close(found, wanted.float())


def holes(value):
    return np.where(np.arange(120).reshape(30, 4) == 21, value, X)  # row 5


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": None}, "holds no array 'y': it needs x, y, it has x"),
        ({"x": None}, "holds no array 'x'"),
        ({"x": holes(np.nan)}, "not a finite number (NaN or infinite) in row 5"),
        ({"x": holes(-np.inf)}, "not a finite number (NaN or infinite) in row 5"),
        ({"x_test": X, "y_test": Y, "x": holes(np.nan)}, "the training set holds a value that is not a finite number"),
        ({"x_test": holes(np.nan), "y_test": Y}, "the test set holds a value that is not a finite number"),
        ({"x_test": X}, "must hold both x_test and y_test, or neither"),
        ({"y_test": Y}, "must hold both x_test and y_test, or neither"),
        ({"x_test": X[:, :3], "y_test": Y}, "training inputs of shape (4,) but test inputs of (3,)"),
        ({"x_test": images(30, 4), "y_test": Y}, "training inputs of type float64 but test inputs of uint8"),
        ({"x_test": X, "y_test": Y + 1}, "the test set has a label 3, out of range: there are 3 classes, 0 to 2"),
        ({"x_test": X, "y_test": Y[:-1]}, "the test set has 30 inputs but 29 labels"),
        ({"y": Y[:-1]}, "has 30 inputs but 29 labels"),
        ({"y": Y - 1}, "has a label -1, out of range"),
        ({"classes": ["cat", "dog"]}, "has a label 2, out of range: there are 2 classes, 0 to 1"),
        ({"classes": ["cat", "dog", "cat"]}, "names a class twice: cat, dog, cat"),
        ({"y": Y.astype(str)}, "y must be a list of whole numbers, not <U"),
        ({"y": Y + 0.5}, "y must be a list of whole numbers, not float64"),
        ({"y": np.eye(3)[Y].astype(int)}, "y must be a list of whole numbers, not int64 of shape (30, 3)"),
        ({"client": Y[:-1]}, "has 30 labels but 29 client or writer ids"),
        ({"x": X.astype(str)}, "must have numeric inputs with one row per sample, not <U"),
        ({"x": X + 1j}, "must have numeric inputs"),
        ({"x": X[:, 0]}, "with one row per sample, not float64 of shape (30,)"),
        ({"x": np.float64(3)}, "with one row per sample, not float64 of shape ()"),
        ({"x": X.astype(object)}, "is not a valid npz file (or is damaged)"),  # objects are pickles, and pickles run code
    ],
)  # fmt: skip
def test_unusable_npz_arrays_are_refused(tmp_path, arrays, words):
    assert words in refusal(write_npz(tmp_path, **arrays))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mean": (0.1, 0.2, 0.3)}, "has 4 channels: mean and std take 1 or 4 values"),
        ({"std": "0.1,0.2"}, "has 4 channels: mean and std take 1 or 4 values"),
        ({"std": "0"}, "std must be a number above 0"),
        ({"mean": "nan"}, "mean must be a number"),
        ({"augment": True}, "has inputs of shape (4,): augment crops and flips images only"),
    ],
)
def test_unusable_npz_options_are_refused(tmp_path, options, words):
    assert words in refusal(write_npz(tmp_path), **options)


def whole_npz(folder):
    return Path(write_npz(folder).partition(":")[2]).read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: b"not a zip",
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:-1],
        lambda raw: raw.replace(b"NUMPY", b"numpy"),
        lambda raw: raw[:200] + bytes(64) + raw[264:],
        lambda raw: raw[raw.index(b"\x93NUMPY") :],  # the first array alone
    ],
    ids=["empty", "no zip", "half", "a byte short", "no arrays", "overwritten", "npy"],
)
def test_a_damaged_npz_file_is_refused(tmp_path, damage):
    raw = damage(whole_npz(tmp_path))
    (tmp_path / "own.npz").write_bytes(raw)
    assert "own.npz is not a valid npz file (or is damaged)" in refusal(f"npz:{tmp_path}/own.npz")


def test_an_npz_file_that_is_not_there_is_named(tmp_path):
    assert "absent.npz does not exist" in refusal(f"npz:{tmp_path}/absent.npz")
    assert "dataset 'npz' needs a path: 'npz:PATH'" in refusal("npz")


# --- chars74k ---------------------------------------------------------------------------------------------------------


def write_chars74k(folder, typefaces=54, **changes):
    """Two classes in each font; four consecutive fonts, counted from 1, are one typeface."""
    fonts = np.repeat(np.arange(1, 4 * typefaces + 1), 2)
    arrays = {
        "x": images(len(fonts), 4, 4),
        "y": np.tile([0, 61], len(fonts) // 2),
        "font_index": fonts,
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "chars74k_fnt_28.npz", **(arrays | changes))


@pytest.mark.parametrize("place", ["chars74k-fnt", "."])
def test_chars74k_tests_on_the_last_fifty_typefaces(tmp_path, place):
    write_chars74k(tmp_path / place)
    source = build("chars74k", tmp_path)
    assert sorted(set(source.train.writer)) == [0, 1, 2, 3]
    assert sorted(set(source.test.writer)) == list(range(4, 54))
    assert len(source.train.y) == 4 * 4 * 2 and len(source.test.y) == 50 * 4 * 2


def test_chars74k_classes_are_digits_capitals_and_small_letters(tmp_path):
    write_chars74k(tmp_path)
    source = build("chars74k", tmp_path)
    assert len(source.classes) == 62
    assert [source.classes[label] for label in (0, 9, 10, 35, 36, 61)] == [
        "0",
        "9",
        "A",
        "Z",
        "a",
        "z",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y": np.full(432, 62)}, "has a label 62, out of range: there are 62 classes, 0 to 61"),
        ({"y": np.full(432, "A")}, "y must be a list of whole numbers"),
        ({"y": np.zeros(431, int)}, "has 432 inputs but 431 labels"),
        ({"font_index": np.ones(433, int)}, "has 432 labels but 433 client or writer ids"),
        ({"font_index": np.ones(431, int)}, "has 432 labels but 431 client or writer ids"),
    ],
)
def test_an_unusable_chars74k_file_is_refused(tmp_path, changes, words):
    write_chars74k(tmp_path, **changes)
    assert words in refusal("chars74k", tmp_path)


def test_chars74k_without_fonts_is_refused(tmp_path):
    np.savez(tmp_path / "chars74k_fnt_28.npz", x=images(2, 4, 4), y=np.array([0, 1]))
    assert "holds no array 'font_index'" in refusal("chars74k", tmp_path)


# --- the sources that need no file ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mnist5k():
    return build("mnist5k")  # takes a second or two: it lies in a text file


def test_mnist5k_has_400_training_and_100_test_images_a_class(mnist5k):
    assert np.bincount(mnist5k.train.y).tolist() == [400] * 10
    assert np.bincount(mnist5k.test.y).tolist() == [100] * 10
    assert mnist5k.train.x.shape == (4000, 28, 28) and mnist5k.train.x.dtype == np.uint8


def test_mnist5k_training_and_test_images_are_disjoint(mnist5k):
    train, test = (
        {image.tobytes() for image in split.x} for split in (mnist5k.train, mnist5k.test)
    )
    assert len(train) == 4000 and len(test) == 1000  # the package holds no image twice
    assert not train & test


def test_digits_hold_out_a_fifth_of_each_class():
    source = build("digits")
    train, test = np.bincount(source.train.y), np.bincount(source.test.y)
    assert (train + test).sum() == 1797
    assert test.tolist() == [round(0.2 * count) for count in train + test]


def test_digits_are_the_same_every_time():
    first, again = build("digits"), build("digits")
    assert (
        first.test.x.tolist() == again.test.x.tolist()
        and first.train.y.tolist() == again.train.y.tolist()
    )


def test_digits_are_normalised_to_mean_zero_and_deviation_one():
    source = build("digits")
    assert source.train.x.max() == source.scale == 16
    x = torch.cat(
        [source.tensor(split, np.arange(len(split.y))) for split in (source.train, source.test)]
    )
    assert abs(float(x.mean())) < 1e-3 and abs(float(x.std()) - 1) < 1e-3
    assert float(x.min()) == pytest.approx(-0.3053 / 0.3760) and float(x.max()) == pytest.approx(
        0.6947 / 0.3760
    )


def test_hold_out_draws_the_rows():
    # Files are often sorted by writer: the first fifth would be other people than the rest.
    _, test = hold_out(np.zeros(100, int))
    assert len(test) == 20 and test.max() > 20


def test_hold_out_keeps_the_only_image_of_a_class_for_training():
    train, test = hold_out(np.array([0, 1, 1, 2]))
    assert len(test) == 1 and test[0] in (1, 2)
    assert sorted([*train, *test]) == [0, 1, 2, 3]


# --- what the model sees ----------------------------------------------------------------------------------------------


def source_of(x, **options):
    return Source("made", ("a",), *(Split(x, np.zeros(len(x), int)) for _ in range(2)), **options)


@pytest.mark.parametrize(
    ("stored", "seen"),
    [((5, 28, 28), (2, 1, 28, 28)), ((5, 3, 32, 32), (2, 3, 32, 32)), ((5, 7), (2, 7))],
    ids=["grey", "colour", "rows"],
)
@pytest.mark.parametrize("dtype", ["u1", "i8", "u2", "f4", "f8", ">f4", "g", "?"])
def test_tensor_has_channels_first_and_is_float32(stored, seen, dtype):
    source = source_of(images(*stored).astype(dtype))
    x = source.tensor(source.train, np.array([4, 0]))
    assert x.shape == seen and x.dtype == torch.float32


def test_tensor_scales_then_normalises_each_channel():
    source = source_of(
        np.full((2, 3, 2, 2), 51, np.uint8), mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0)
    )
    x = source.tensor(source.train, np.array([1]))
    # 51 / 255 = 0.2
    torch.testing.assert_close(x[0, :, 1, 1], torch.tensor([0.1 / 1, 0.0, -0.1 / 4]))


def test_tensor_of_one_mnist_pixel_by_hand(mnist5k):
    row, height, width = 1234, 14, 14
    x = mnist5k.tensor(mnist5k.train, np.array([row]))
    stored = int(mnist5k.train.x[row, height, width])
    assert float(x[0, 0, height, width]) == pytest.approx(
        (stored / 255 - 0.1307) / 0.3081, rel=1e-6
    )


def test_tensor_gives_the_rows_in_the_order_asked_for():
    source = source_of(np.arange(10, dtype=np.uint8)[:, None], scale=1.0)
    assert source.tensor(source.train, np.array([7, 2, 9]))[:, 0].tolist() == [7, 2, 9]


# --- where data is looked for -----------------------------------------------------------------------------------------


@pytest.fixture
def three_places(tmp_path, monkeypatch):
    """The three folders, in order, each with a file `data`."""
    folders = [tmp_path / name for name in ("given", "environment", "cache/fedproto")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "data").touch()
    monkeypatch.setenv("FEDPROTO_DATA", str(folders[1]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folders


def test_places_are_data_dir_then_environment_then_cache(three_places):
    places = DataFolders(str(three_places[0]))
    assert places.folders() == three_places
    for folder in three_places:
        assert places.find("data") == folder / "data"
        (folder / "data").unlink()


def test_a_nearer_place_wins_over_a_better_name(three_places):
    (three_places[0] / "second").touch()
    (three_places[0] / "data").unlink()
    assert DataFolders(str(three_places[0])).find("data", "second") == three_places[0] / "second"


def test_without_xdg_the_cache_is_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert DataFolders().folders() == [tmp_path / ".cache" / "fedproto"]


@pytest.mark.parametrize("name", ["mnist", "cifar10", "chars74k"])
def test_data_that_is_nowhere_is_an_error_that_names_all_places(three_places, name):
    message = refusal(name, three_places[0])
    assert "was not found in" in message and "--data-dir" in message
    assert all(str(folder) in message for folder in three_places)


# --- arrays passed from Python ----------------------------------------------------------------------------------------


def run(data, **options):
    return fedproto.run(dataset=data, rounds=1, device="cpu", **options)


def test_arrays_from_python_one_pair_a_client():
    result = run([(X, Y), (X[:15], Y[:15])])
    assert [client["classes"] for client in result.clients] == [["0", "1", "2"]] * 2
    assert [(client["train"], client["test"]) for client in result.clients] == [(24, 6), (12, 3)]


def test_arrays_from_python_with_test_arrays():
    result = run([(X, Y, X[:5], Y[:5]), (X, Y)])
    assert [(client["train"], client["test"]) for client in result.clients] == [(30, 5), (24, 6)]


def test_arrays_from_python_with_names_for_labels():
    names = np.array(["cat", "dog", "owl"])
    # The second client has no owl: classes are matched by name, not by position.
    second = names[1:][Y[Y < 2]][::-1]
    result = run([(X, names[Y]), (X[Y < 2], second)])
    assert [client["classes"] for client in result.clients] == [
        ["cat", "dog", "owl"],
        ["dog", "owl"],
    ]


def test_arrays_from_python_may_be_lists_or_tensors_of_different_shapes():
    result = run([(X.tolist(), Y.tolist()), (torch.tensor(X[:, :2]), torch.tensor(Y))])
    assert [client["model"] for client in result.clients] == ["mlp", "mlp"]


def test_bytes_from_python_are_scaled_as_images_are():
    same = [
        run([(x, Y)]).metrics[0]["loss"]
        for x in (images(30, 4), (images(30, 4) / 255.0).astype(np.float32))
    ]
    assert same[0]["supervised"] == pytest.approx(same[1]["supervised"], rel=1e-5)


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (
            (X, Y, X, Y + 1),
            "client 1 has test rows of class '3', of which no client has training rows",
        ),
        (
            (holes(np.nan), Y),
            "client 1 holds a value that is not a finite number (NaN or infinite) in row 5",
        ),
        (
            (X, Y, holes(np.nan), Y),
            "client 1: the test set holds a value that is not a finite number",
        ),
        ((X, Y[:-1]), "client 1 has 30 inputs but 29 labels"),
        ((X, Y, X, Y[:-1]), "client 1: the test set has 30 inputs but 29 labels"),
        ((X, Y, X), "client 1 must be (x, y) or (x, y, x_test, y_test), not 3 values"),
        ((X,), "client 1 must be (x, y) or (x, y, x_test, y_test), not 1 values"),
        (None, "client 1 must be (x, y) or (x, y, x_test, y_test), not NoneType"),
        (([[1.0], [1.0, 2.0]], [0, 1]), "client 1 has inputs or labels that are not an array"),
        (
            (X, Y[:, None]),
            "client 1 has labels that are not a list of whole numbers or of text: int64 of shape (30, 1)",
        ),
        (
            (X, Y.astype(float)),
            "client 1 has labels that are not a list of whole numbers or of text: float64",
        ),
        ((X * 1e300, Y), "client 1 holds a value that is not a finite number"),
        ((X, Y, X[:, :2], Y), "client 1 has training inputs of shape (4,) but test inputs of (2,)"),
        (
            (images(30, 4), Y, X, Y),
            "client 1 has training inputs of type uint8 but test inputs of float64",
        ),
        ((X.astype(str), Y), "client 1 must have numeric inputs"),
        ((X.astype(object), Y), "client 1 must have numeric inputs"),
        ((X[:, 0], Y), "with one row per sample, not float64 of shape (30,)"),
        ((X[:0], Y[:0]), "client 1 has no training image"),
        (
            (X[:2], Y[:2]),
            "client 1 has no test image",
        ),  # one image a class: nothing can be held out
    ],
)
def test_unusable_arrays_from_python_are_refused(client, words):
    with pytest.raises(DataError) as caught:
        run([(X, Y), client])
    assert words in str(caught.value)


def test_no_clients_from_python_are_refused():
    for nothing in ([], 5, {}):
        with pytest.raises(DataError, match="dataset must be text, or a list"):
            run(nothing)


def test_one_wild_label_does_not_make_a_billion_classes(tmp_path):
    np.savez(tmp_path / "own.npz", x=X, y=np.where(np.arange(len(Y)) == 3, 10**9, Y))
    with pytest.raises(DataError, match="label 1000000000, out of range"):
        plugins.build("dataset", Part(f"npz:{tmp_path}/own.npz"), DataFolders())


# --- the real files, where they lie -----------------------------------------------------------------------------------

real_mnist = pytest.mark.skipif(not (REAL / "mnist").exists(), reason="no MNIST in $FEDPROTO_DATA")
real_chars = pytest.mark.skipif(
    not (REAL / "chars74k-fnt").exists(), reason="no Chars74K in $FEDPROTO_DATA"
)


@real_mnist
def test_real_mnist_is_complete():
    source = build("mnist", REAL)
    assert source.train.x.shape == (60_000, 28, 28) and source.test.x.shape == (10_000, 28, 28)
    assert np.bincount(source.train.y)[:3].tolist() == [5923, 6742, 5958]  # LeCun's counts
    assert (
        abs(source.train.x.mean() / 255 - 0.1307) < 1e-4
        and abs(source.train.x.std() / 255 - 0.3081) < 1e-4
    )


@real_mnist
def test_real_mnist_training_images_are_the_canonical_bytes():
    header = struct.pack(">BBBBIII", 0, 0, 8, 3, 60_000, 28, 28)
    raw = header + build("mnist", REAL).train.x.tobytes()  # what was read, written back
    assert hashlib.md5(raw).hexdigest() == "6bbc9ace898e44ae57da46a324031adb"


@real_chars
def test_real_chars74k_has_62_classes_and_254_typefaces():
    source = build("chars74k", REAL)
    assert set(source.train.y) == set(source.test.y) == set(range(62))
    assert len(set(source.train.writer)) == 204 and len(set(source.test.writer)) == 50
    assert not set(source.train.writer) & set(source.test.writer)
