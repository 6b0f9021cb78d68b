"""FEMNIST in its three forms, against tiny files written byte by byte."""

import gzip
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto, only_line
from helpers.data_files import SYMBOLS, idx, leaf_file, png, write
from helpers.sources import build, images, refusal

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.errors import FedProtoError
from fedproto.models import Fit

pytestmark = pytest.mark.usefixtures("only_own_files")


# --- femnist: the same 62 + 62 characters in each form. Ink is bright in X, TEST_X


X, TEST_X, Y = images(62, 28, 28), images(62, 28, 28, seed=1), np.arange(62)


WRITERS = np.where(Y % 2, 7, 3)


def write_leaf(folder):
    names = [f"f{writer:04}_10" for writer in WRITERS]
    for part, x in (("train", X), ("test", TEST_X)):
        for shard, some in enumerate((slice(0, 40), slice(40, 62))):
            content = leaf_file(x[some], Y[some], names[some])
            write(
                folder / part / f"all_data_{shard}_niid_0_keep_0_{part}_9.json",
                json.dumps(content).encode(),
            )


def write_emnist(folder, end=".gz", pack=gzip.compress, changes=None):
    """Images lie on their side: column by column."""
    for part, x in (("train", X), ("test", TEST_X)):
        sides = np.ascontiguousarray(x.transpose(0, 2, 1))
        files = {f"{part}-images-idx3": idx(sides), f"{part}-labels-idx1": idx(Y.astype(np.uint8))}
        for name, raw in (
            files | {key: value for key, value in (changes or {}).items() if key in files}
        ).items():
            write(folder / f"emnist-byclass-{name}-ubyte{end}", pack(raw))


def element(kind, raw):
    """A data element of MATLAB 5, little-endian: type, length, bytes, filled up to eight."""
    return struct.pack("<II", kind, len(raw)) + raw + b"\0" * (-len(raw) % 8)


def matrix(name, array):
    """Return an array of MATLAB 5: flags with its class, sizes, name, values in Fortran order."""
    kinds = {"u1": (9, 2), "u2": (11, 4), "f8": (6, 9)}  # class of the array, type of its values
    klass, kind = kinds[array.dtype.str[1:]]
    return element(14, _head(klass, array.shape, name) + element(kind, array.tobytes(order="F")))


def structure(name, fields):
    """A 1x1 struct: the length of a field's name, the names, and a nameless matrix a field."""
    names = b"".join(field.encode().ljust(32, b"\0") for field in fields)
    length = struct.pack("<HHI", 5, 4, 32)  # a small element: type and length share four bytes
    return element(
        14, _head(2, (1, 1), name) + length + element(1, names) + b"".join(fields.values())
    )


def _head(klass, shape, name):
    flags = element(6, struct.pack("<II", klass, 0))
    return flags + element(5, struct.pack(f"<{len(shape)}i", *shape)) + element(1, name.encode())


def mat_part(x, labels=None, count=None):
    rows = np.ascontiguousarray(x.transpose(0, 2, 1)).reshape(len(x), 784)
    labels = (Y if labels is None else labels).astype(np.uint8)
    writers = WRITERS[:count].astype(np.uint16)
    fields = {
        "images": matrix("", rows),
        "labels": matrix("", labels[:, None]),
        "writers": matrix("", writers[:, None]),
    }
    return structure("", fields)


def mat_file(train=None, mapping=SYMBOLS):
    codes = np.array([[label, ord(symbol)] for label, symbol in enumerate(mapping)], np.uint8)
    parts = {"train": train or mat_part(X), "test": mat_part(TEST_X), "mapping": matrix("", codes)}
    header = (
        b"MATLAB 5.0 MAT-file, made by a test".ljust(116)
        + b"\0" * 8
        + struct.pack("<H", 0x0100)
        + b"IM"
    )
    packed = zlib.compress(structure("dataset", parts))  # as MATLAB 7 saves
    return header + struct.pack("<II", 15, len(packed)) + packed


def write_nist(folder, x=X, test_x=TEST_X):
    """Write one folder per class, named by its code; hsf_4 is the test set."""
    for label, symbol in enumerate(SYMBOLS):
        code = symbol.encode().hex()
        for where, pixels in (
            (f"train_{code}", x[label]),
            ("hsf_0", x[label]),
            ("hsf_4", test_x[label]),
        ):
            write(folder / "by_class" / code / where / f"{where}_00000.png", png(255 - pixels))
        write(folder / "by_class" / code / "hsf_0.mit", b"1\n")


def write_mat(folder):
    write(folder / "emnist-byclass.mat", mat_file())


WRITE = {"leaf": write_leaf, "emnist": write_emnist, "mat": write_mat, "nist": write_nist}


@pytest.mark.parametrize("form", WRITE)
def test_femnist_is_the_same_in_every_form(tmp_path, form):
    WRITE[form](tmp_path / "femnist")
    source = build("femnist", tmp_path)
    assert "".join(source.classes) == SYMBOLS
    for split, x in ((source.train, X), (source.test, TEST_X)):
        assert sorted(split.y) == list(range(62))
        order = np.argsort(split.y)
        seen = source.tensor(split, order)
        wanted = (torch.tensor(x[:, None]) / 255.0 - 0.1307) / 0.3081
        torch.testing.assert_close(seen, wanted)


@pytest.mark.parametrize(("form", "names"), [("leaf", ("f0003_10", "f0007_10")), ("mat", (3, 7))])
def test_femnist_says_who_wrote_what_where_it_is_known(tmp_path, form, names):
    WRITE[form](tmp_path / "femnist")
    source = build("femnist", tmp_path)
    for split in (source.train, source.test):
        assert split.writer.tolist() == [names[label % 2] for label in split.y]


@pytest.mark.parametrize("form", ["emnist", "nist"])
def test_femnist_without_writers(tmp_path, form):
    WRITE[form](tmp_path / "femnist")
    assert build("femnist", tmp_path).train.writer is None


@pytest.mark.parametrize(
    ("form", "place"),
    [
        ("leaf", "femnist/data"),
        ("leaf", "leaf/data/femnist/data"),
        ("emnist", "femnist/gzip"),
        ("emnist", "EMNIST/raw"),
        ("mat", "femnist/matlab"),
        ("nist", "."),
    ],
)
def test_femnist_is_found_where_its_publishers_put_it(tmp_path, form, place):
    WRITE[form](tmp_path / place)
    assert len(build("femnist", tmp_path).train.y) == 62


def test_femnist_takes_the_form_that_is_asked_for(tmp_path):
    for each in WRITE.values():
        each(tmp_path / "femnist")
    assert build("femnist", tmp_path).train.writer.dtype.kind == "U"  # LEAF is the first choice
    assert (
        build("femnist", tmp_path, form="emnist").train.writer.dtype.kind == "i"
    )  # with writers rather than without
    assert build("femnist", tmp_path, form="nist").train.writer is None


@pytest.mark.parametrize("form", ["auto", "leaf", "emnist", "nist"])
def test_femnist_that_is_nowhere_names_all_places(tmp_path, form):
    message = refusal("femnist", tmp_path, form=form)
    assert "was not found in" in message and "--data-dir" in message and str(tmp_path) in message


# --- LEAF


def test_leaf_all_data_holds_out_a_fifth_of_each_class(tmp_path):
    y = np.repeat(np.arange(2), 10)
    content = leaf_file(X[:20], y, ["ann"] * 10 + ["bob"] * 10)
    write(tmp_path / "femnist" / "all_data" / "all_data_0.json", json.dumps(content).encode())
    source = build("femnist", tmp_path)
    assert np.bincount(source.train.y).tolist() == [8, 8] and np.bincount(
        source.test.y
    ).tolist() == [2, 2]
    assert set(source.train.writer) == {"ann", "bob"}


def test_leaf_paper_is_dark_and_ink_bright(tmp_path):
    """White paper with a black pixel at the end of the first row, and a grey one below it."""
    pixels = [1.0] * 784
    pixels[27], pixels[28] = 0.0, 0.5019607843137255  # 128 / 255
    one = {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [pixels], "y": [61]}}}
    for part in ("train", "test"):
        write(tmp_path / "femnist" / part / "0.json", json.dumps(one).encode())
    x = build("femnist", tmp_path).train.x[0]
    assert x.sum() == 255 + 127 and x[0, 27] == 255 and x[1, 0] == 127


LEAF = leaf_file(X[:1], [5], ["ann"])


def changed(**data):
    return LEAF | {"user_data": {"ann": LEAF["user_data"]["ann"] | data}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not valid JSON"),
        (json.dumps(LEAF).encode()[:-40], "is not valid JSON"),
        (b"[1, 2]", "is not a LEAF file (or is damaged)"),
        ({"users": ["ann"]}, "is not a LEAF file (or is damaged): KeyError: 'user_data'"),
        (LEAF | {"users": ["bob"]}, "is not a LEAF file (or is damaged): KeyError: 'bob'"),
        (LEAF | {"num_samples": [2]}, "num_samples does not say how many labels each writer has"),
        (LEAF | {"users": [], "num_samples": []}, "holds no writer"),
        (changed(y=[62]), "writer ann has a label 62, out of range: there are 62 classes, 0 to 61"),
        (changed(y=[-1]), "a label -1, out of range"),
        (changed(y=[0.5]), "has labels that are not whole numbers"),
        (changed(x=[[1.0] * 783]), "has images that are not 784 numbers each"),
        (changed(x=[]), "has images that are not 784 numbers each"),
        (changed(x=[[255.0] * 784]), "has a value that is not between 0 and 1"),
        (changed(x=[[float("nan")] * 784]), "has a value that is not between 0 and 1"),
        (changed(x=[["ink"] * 784]), "has images that are not 784 numbers each"),
    ],
)
def test_a_damaged_leaf_file_is_refused(tmp_path, content, words):
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    write(tmp_path / "femnist" / "train" / "0.json", raw)
    message = refusal("femnist", tmp_path)
    assert words in message and "train" in message


def test_leaf_without_its_test_folder_is_refused(tmp_path):
    write(tmp_path / "femnist" / "train" / "0.json", json.dumps(LEAF).encode())
    assert "femnist/test holds no .json file" in refusal("femnist", tmp_path)


# --- EMNIST


def test_emnist_images_are_put_upright(tmp_path):
    """A stroke along the first stored row is a stroke down the first column."""
    stored = np.zeros((62, 28, 28), np.uint8)
    stored[:, 0, :] = 255
    write_emnist(tmp_path / "emnist", changes={"train-images-idx3": idx(stored)})
    x = build("femnist", tmp_path).train.x
    assert (x[:, :, 0] == 255).all() and not x[:, :, 1:].any()


WHOLE = idx(X)


@pytest.mark.parametrize(
    ("file", "raw", "words"),
    [
        ("train-images-idx3", WHOLE[:-1], "announces 48608 bytes of data, but it holds 48607"),
        ("train-images-idx3", b"\0\0\x0d\x03" + WHOLE[4:], "it starts with 00000d03, not 00000803"),
        ("train-images-idx3", b"\x03\x08\0\0" + WHOLE[4:], "it starts with 03080000"),
        ("test-labels-idx1", WHOLE, "it starts with 00000803, not 00000801"),
        ("train-labels-idx1", idx(np.full(62, 62, np.uint8)), "a label 62, out of range"),
        ("test-labels-idx1", idx(np.zeros(61, np.uint8)), "has 62 inputs but 61 labels"),
    ],
)
def test_a_damaged_emnist_file_is_refused(tmp_path, file, raw, words):
    write_emnist(tmp_path / "femnist", changes={file: raw})
    assert words in refusal("femnist", tmp_path)


@pytest.mark.parametrize("missing", ["train-labels-idx1", "test-images-idx3", "test-labels-idx1"])
def test_a_missing_emnist_file_is_named(tmp_path, missing):
    write_emnist(tmp_path / "femnist")
    (tmp_path / "femnist" / f"emnist-byclass-{missing}-ubyte.gz").unlink()
    assert f"emnist-byclass-{missing}-ubyte was not found in" in refusal("femnist", tmp_path)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is not the emnist-byclass.mat of MATLAB 5 (or is damaged)"),
        (b"x" * 200, "is not the emnist-byclass.mat of MATLAB 5 (or is damaged)"),
        (mat_file()[:5000], "is not the emnist-byclass.mat of MATLAB 5 (or is damaged)"),
        (mat_file(mapping=SYMBOLS[:47]), "not to 0-9, A-Z, a-z: is it emnist-byclass.mat?"),
        (mat_file(train=mat_part(X, labels=Y + 1)), "train has a label 62, out of range"),
        (mat_file(train=mat_part(X, labels=Y[:-1])), "train has 62 inputs but 61 labels"),
        (mat_file(train=mat_part(X, count=61)), "train has 62 labels but 61 client or writer ids"),
        (
            mat_file(train=matrix("", X.reshape(62, 784))),
            "is not the emnist-byclass.mat of MATLAB 5 (or is damaged)",
        ),
    ],
)
def test_a_damaged_mat_file_is_refused(tmp_path, raw, words):
    write(tmp_path / "femnist" / "emnist-byclass.mat", raw)
    assert words in refusal("femnist", tmp_path)


# --- NIST


def test_nist_images_stay_on_disk_and_take_the_papers_network(tmp_path):
    write_nist(tmp_path / "femnist", images(62, 128, 128), images(62, 128, 128, seed=1))
    source = build("femnist", tmp_path)
    assert not isinstance(source.train.x, np.ndarray) and source.train.x.shape == (62, 128, 128)
    model = plugins.build("model", Part("cnn", {"kernel": 3}), Fit((1, 128, 128), 62))
    assert source.model == "cnn(kernel=3)"
    assert model.state_dict()[
        next(key for key in model.state_dict() if key.endswith("fc1.weight"))
    ].shape == (
        50,
        16820,
    )


def test_nist_reads_only_the_rows_that_are_asked_for(tmp_path):
    write_nist(tmp_path / "femnist")
    source = build("femnist", tmp_path)
    code = "7a"
    (
        tmp_path / "femnist" / "by_class" / code / f"train_{code}" / f"train_{code}_00000.png"
    ).write_bytes(b"no image")
    assert source.train.x[np.array([3, 1])].tolist() == X[[3, 1]].tolist()
    with pytest.raises(FedProtoError, match=r"train_7a_00000\.png is not an image"):
        source.tensor(source.train, np.array([61]))


def test_nist_without_train_folders_takes_all_but_hsf_4(tmp_path):
    for where in ("hsf_0", "hsf_6", "hsf_4"):
        write(tmp_path / "by_class" / "41" / where / "a.png", png(X[0]))
    source = build("femnist", tmp_path)
    assert source.train.y.tolist() == [10, 10] and source.test.y.tolist() == [10]


def test_nist_images_may_be_made_smaller(tmp_path):
    write_nist(tmp_path / "femnist", images(62, 56, 56), images(62, 56, 56))
    source = build("femnist", tmp_path, size=28)
    assert source.train.x[np.arange(2)].shape == (2, 28, 28)


def test_size_is_refused_for_the_other_forms(tmp_path):
    write_leaf(tmp_path / "femnist")
    assert "size is for form nist" in refusal("femnist", tmp_path, size=14)


def test_a_nist_folder_without_images_is_refused(tmp_path):
    (tmp_path / "by_class" / "30" / "train_30").mkdir(parents=True)
    assert "holds no train image" in refusal("femnist", tmp_path)
    write(tmp_path / "by_class" / "30" / "train_30" / "a.png", png(X[0]))
    assert "holds no test image" in refusal("femnist", tmp_path)


# --- through the command line


@pytest.mark.parametrize(
    ("dataset", "file", "raw", "words"),
    [
        ("femnist", "femnist/train/0.json", b"{", "is not valid JSON"),
        (
            "femnist",
            "femnist/emnist-byclass-train-images-idx3-ubyte.gz",
            gzip.compress(b"\0\0\x0d\x03"),
            "it starts with",
        ),
        ("femnist", "femnist/emnist-byclass.mat", b"no", "is not the emnist-byclass.mat"),
        (
            "fashion-mnist",
            "fashion-mnist/train-images-idx3-ubyte.gz",
            b"\x1f\x8b\x08",
            "is damaged",
        ),
        ("cifar100", "cifar100/cifar-100-python/meta", b"no", "is not a CIFAR-100 python file"),
        ("femnist", "elsewhere", b"", "was not found in"),
        ("fashion-mnist", "elsewhere", b"", "was not found in"),
        ("cifar100", "elsewhere", b"", "was not found in"),
    ],
)
def test_the_command_line_refuses_in_one_sentence(tmp_path, dataset, file, raw, words):
    write(tmp_path / file, raw)
    answer = fedproto(
        "run", "--dataset", dataset, "--data-dir", tmp_path, "--out", tmp_path / "run"
    )
    assert answer.code == 2 and words in only_line(answer.err) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("form", ["leaf", "nist"])
def test_the_command_line_trains_on_femnist(tmp_path, form):
    WRITE[form](tmp_path / "femnist")
    flags = ("--clients", "2", "--rounds", "1", "--shots", "1", "--stdev", "0", "--device", "cpu")
    answer = fedproto(
        "run", "--dataset", "femnist", "--data-dir", tmp_path, *flags, "--out", tmp_path / "run"
    )
    assert answer.code == 0, answer.err
    assert (tmp_path / "run" / "result.json").exists()
