"""Arrays passed from Python, a pair per client."""

import numpy as np
import pytest
import torch
from helpers.sources import images

import fedproto
from fedproto.errors import DataError

pytestmark = pytest.mark.usefixtures("only_own_files")


# --- npz: a user's own arrays


X, Y = np.random.default_rng(2).random((30, 4)), np.arange(30) % 3


def holes(value):
    return np.where(np.arange(120).reshape(30, 4) == 21, value, X)  # row 5


# --- arrays passed from Python


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
            "client 1 has labels that are not a list of whole numbers or of text: "
            "int64 of shape (30, 1)",
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
        ((X[:0], Y[:0]), "client 1 has no training row"),
        (
            (X[:2], Y[:2]),
            "client 1 has no test row",
        ),  # one image a class: nothing can be held out
    ],
)
def test_unusable_arrays_from_python_are_refused(client, words):
    with pytest.raises(DataError) as caught:
        run([(X, Y), client])
    assert words in str(caught.value)


def test_no_clients_from_python_are_refused():
    for nothing in ([], 5, {}):
        with pytest.raises(DataError, match=r"dataset must be text; one .* not "):
            run(nothing)
