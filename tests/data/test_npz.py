"""A user's own arrays in npz files: what is read and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.sources import build, images, refusal

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DataFolders
from fedproto.errors import DataError

pytestmark = pytest.mark.usefixtures("only_own_files")


# --- npz: a user's own arrays


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
        (
            {"x_test": X, "y_test": Y, "x": holes(np.nan)},
            "the training set holds a value that is not a finite number",
        ),
        (
            {"x_test": holes(np.nan), "y_test": Y},
            "the test set holds a value that is not a finite number",
        ),
        ({"x_test": X}, "must hold both x_test and y_test, or neither"),
        ({"y_test": Y}, "must hold both x_test and y_test, or neither"),
        (
            {"x_test": X[:, :3], "y_test": Y},
            "training inputs of shape (4,) but test inputs of (3,)",
        ),
        (
            {"x_test": images(30, 4), "y_test": Y},
            "training inputs of type float64 but test inputs of uint8",
        ),
        (
            {"x_test": X, "y_test": Y + 1},
            "the test set has a label 3, out of range: there are 3 classes, 0 to 2",
        ),
        ({"x_test": X, "y_test": Y[:-1]}, "the test set has 30 inputs but 29 labels"),
        ({"y": Y[:-1]}, "has 30 inputs but 29 labels"),
        ({"y": Y - 1}, "has a label -1, out of range"),
        ({"classes": ["cat", "dog"]}, "has a label 2, out of range: there are 2 classes, 0 to 1"),
        ({"classes": ["cat", "dog", "cat"]}, "names a class twice: cat, dog, cat"),
        ({"y": Y.astype(str)}, "y must be a list of whole numbers, not <U"),
        ({"y": Y + 0.5}, "y must be a list of whole numbers, not float64"),
        (
            {"y": np.eye(3)[Y].astype(int)},
            "y must be a list of whole numbers, not int64 of shape (30, 3)",
        ),
        ({"client": Y[:-1]}, "has 30 labels but 29 client or writer ids"),
        ({"x": X.astype(str)}, "must have numeric inputs with one row per sample, not <U"),
        ({"x": X + 1j}, "must have numeric inputs"),
        ({"x": X[:, 0]}, "with one row per sample, not float64 of shape (30,)"),
        ({"x": np.float64(3)}, "with one row per sample, not float64 of shape ()"),
        # Objects are pickles, and pickles run code.
        ({"x": X.astype(object)}, "is not a valid npz file (or is damaged)"),
    ],
)
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


# --- arrays passed from Python


def test_one_wild_label_does_not_make_a_billion_classes(tmp_path):
    np.savez(tmp_path / "own.npz", x=X, y=np.where(np.arange(len(Y)) == 3, 10**9, Y))
    with pytest.raises(DataError, match="label 1000000000, out of range"):
        plugins.build("dataset", Part(f"npz:{tmp_path}/own.npz"), DataFolders())
