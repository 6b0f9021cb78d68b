"""Images as arrays: (rows, height, width, channels) and (rows, channels, height, width)."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedproto
from fedproto.data.shared.channel_order import USUAL_CHANNELS, find_order
from fedproto.data.shared.client_arrays import from_clients
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, DataError, RunFolderError
from fedproto.inference.classifier import Classifier
from fedproto.inference.export.write import export_client
from fedproto.inference.trained_client import load_client
from fedproto.runs.client_models import INDEX
from fedproto.runs.folder import RunFolder
from tests.helpers.data_files import as_npy, as_npz
from tests.helpers.sources import build, images, refusal

LABELS = np.arange(20) % 2


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((32, 32, 3), "last"),
        ((3, 32, 32), "first"),
        ((28, 28, 1), "last"),
        ((1, 28, 28), "first"),
        ((20, 30, 4), "last"),
        ((4, 20, 30), "first"),
        ((4, 4, 1), "last"),  # square images, where both ends could be channels
        ((3, 4, 4), "first"),
        ((32, 32, 2), "first"),  # neither is a usual number of channels: as it stands
        ((13, 64, 64), "first"),
        ((28, 28), "first"),
        ((64,), "first"),
        ((3, 8, 8, 8), "first"),
    ],
)
def test_the_axis_of_one_three_or_four_entries_is_that_of_the_channels(shape, order):
    assert find_order("it", shape, "auto") == order


@given(st.integers(5, 300), st.integers(5, 300), st.sampled_from(USUAL_CHANNELS))
def test_usual_images_are_never_ambiguous(height, width, channels):
    assert find_order("it", (height, width, channels), "auto") == "last"
    assert find_order("it", (channels, height, width), "auto") == "first"


@pytest.mark.parametrize("shape", [(3, 3, 3), (1, 28, 1), (3, 64, 4), (1, 2, 3)])
def test_a_shape_that_does_not_tell_is_refused_unless_the_option_says_it(shape):
    with pytest.raises(DataError, match="does not tell where the channels are: set channel"):
        find_order("it", shape, "auto")
    assert find_order("it", shape, "first") == "first"
    assert find_order("it", shape, "last") == "last"


@pytest.mark.parametrize("shape", [(), (5,), (28, 28), (1, 2, 3, 4)])
@pytest.mark.parametrize("channels", ["first", "last"])
def test_the_option_is_refused_for_inputs_without_channels(shape, channels):
    with pytest.raises(ConfigError, match=f"channel_order={channels} is for images with"):
        find_order("it", shape, channels)


@pytest.mark.parametrize("form", [as_npz, as_npy])
@pytest.mark.parametrize("option", ["auto", "last"])
def test_both_orders_are_the_same_inputs_to_the_bit(form, option, tmp_path):
    x = images(20, 8, 10, 3)
    (tmp_path / "last").mkdir()
    (tmp_path / "first").mkdir()
    first = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    last = build(form(tmp_path / "last", (x, LABELS), (x, LABELS)), channel_order=option)
    same = build(form(tmp_path / "first", (first, LABELS), (first, LABELS)))
    rows = np.array([3, 0, 19])
    assert last.preprocessing.shape == same.preprocessing.shape == (3, 8, 10)
    assert (last.channel_order, same.channel_order) == ("last", "first")
    assert last.tensor(last.test, rows).equal(same.tensor(same.test, rows))


def test_images_in_npy_files_stay_on_disk_whatever_their_order(tmp_path):
    np.save(tmp_path / "x.npy", images(20, 8, 10, 3))
    np.save(tmp_path / "y.npy", LABELS)
    source = build(f"npy:{tmp_path}")
    assert not isinstance(source.train.x, np.ndarray)
    assert source.train.x.shape[1:] == (3, 8, 10)


def test_a_wrong_option_is_refused(tmp_path):
    name = as_npz(tmp_path, (images(4, 5), [0, 0, 1, 1]), (images(4, 5), [0, 0, 1, 1]))
    assert "'middle', accepted: auto, first, last" in refusal(name, channel_order="middle")
    assert "inputs of shape (5,): channel_order=last is for images" in refusal(
        name, channel_order="last"
    )


def test_another_order_in_the_test_set_is_refused(tmp_path):
    train = (images(20, 8, 10, 3), LABELS)
    test = (images(20, 3, 8, 10), LABELS)
    assert "training inputs of shape (3, 8, 10) but test inputs of (10, 3, 8)" in refusal(
        as_npz(tmp_path, train, test)
    )


def test_pfllib_and_arrays_from_python_may_have_either_order(tmp_path):
    x = images(20, 8, 10, 3).astype(np.float32)
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        np.savez(tmp_path / part / "0.npz", data={"x": x, "y": LABELS})
    assert build(f"pfllib:{tmp_path}").preprocessing.shape == (3, 8, 10)
    assert build(f"pfllib:{tmp_path}", channel_order="first").preprocessing.shape == (8, 10, 3)
    last, first = from_clients([(x, LABELS), (np.moveaxis(x, -1, 1), LABELS)])
    rows = np.arange(len(last.train.y))
    assert last.preprocessing.shape == (3, 8, 10)
    assert last.tensor(last.train, rows).equal(first.tensor(first.train, rows))


# --- new inputs of a trained client


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 3, 3), (1, 6, 6)])
@pytest.mark.parametrize("order", ["first", "last"])
def test_new_arrays_are_read_in_the_order_of_those_in_training(shape, order):
    """Flat rows, too, and images of 3x3 pixels with 3 channels, which fit both orders."""
    preprocessing = Preprocessing(shape, channel_order=order)
    wanted = images(2, *shape).astype(np.float32)
    given = wanted if order == "first" else np.moveaxis(wanted, 1, -1)
    assert (preprocessing.reshape(given) == wanted).all()
    assert (preprocessing.reshape(given.reshape(2, -1)) == wanted).all()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run on arrays with the channels last, in a shape that does not tell."""
    folder = tmp_path_factory.mktemp("last")
    x = np.random.default_rng(0).random((40, 3, 3, 3), np.float32)
    np.savez(folder / "own.npz", x=x, y=np.arange(40) % 2)
    fedproto.run(
        dataset=f"npz:{folder}/own.npz(channel_order=last)",
        model="mlp(hidden=4)",
        clients=2,
        rounds=1,
        out=folder / "run",
        device="cpu",
    )
    return folder


def test_the_order_is_kept_with_the_models_and_by_an_export(run_folder, tmp_path):
    x = np.random.default_rng(1).random((5, 3, 3, 3), np.float32)
    channels_first = torch.from_numpy(np.moveaxis(x, -1, 1).copy())
    trained = load_client(run_folder / "run", 0)
    wanted = trained.forward(channels_first).features
    assert trained.preprocessing.channel_order == "last"
    assert trained.forward_raw(x).features.equal(wanted)
    export_client(trained, tmp_path / "member", onnx=False)
    manifest = json.loads((tmp_path / "member" / "manifest.json").read_text())
    assert manifest["input"]["channel_order"] == "last"
    exported = Classifier.load(tmp_path / "member").trained
    assert exported.forward_raw(x.reshape(5, 27)).features.equal(wanted)


@pytest.mark.parametrize("wrong", ["middle", 3, None, ["last"]])
def test_an_order_that_is_none_is_refused_in_a_run_folder(run_folder, tmp_path, wrong):
    shutil.copytree(run_folder / "run", tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    content = folder.read_json(INDEX)
    content["clients"][0]["preprocessing"]["channel_order"] = wrong
    folder.write_json(INDEX, content)
    with pytest.raises(RunFolderError, match="must have a `channel_order` of first or last, not"):
        load_client(tmp_path / "run", 0)
