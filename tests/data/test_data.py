"""What all sources share: held-out rows, what the model sees, where data is looked for."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.sources import build, images, refusal
from sklearn.datasets import load_digits

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DataFolders, Source, Split, choose_model, hold_out
from fedproto.models import Fit

pytestmark = pytest.mark.usefixtures("only_own_files")


# --- the sources that need no file


@pytest.fixture(scope="module")
def mnist5k():
    return build("mnist5k")


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


def test_digits_are_those_of_scikit_learn():
    source = build("digits")
    images = np.concatenate([source.train.x, source.test.x]).reshape(-1, 64)
    labels = np.concatenate([source.train.y, source.test.y])
    x, y = load_digits(return_X_y=True)
    found = np.column_stack([images, labels]).tolist()
    assert sorted(found) == sorted(np.column_stack([x, y]).tolist())


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


# --- what the model sees


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


# --- where data is looked for


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


def test_data_sets_of_the_system_come_last(three_places, monkeypatch, tmp_path):
    system = tmp_path / "share" / "datasets"
    system.mkdir(parents=True)
    monkeypatch.setenv("XDG_DATA_DIRS", f"{tmp_path / 'local'}:{tmp_path / 'share'}")
    assert DataFolders().folders() == [*three_places[1:], system]


@pytest.mark.parametrize("setting", [None, ""])
def test_debians_data_sets_are_found_without_a_setting(three_places, monkeypatch, setting):
    if setting is None:
        monkeypatch.delenv("XDG_DATA_DIRS")
    else:
        monkeypatch.setenv("XDG_DATA_DIRS", setting)
    monkeypatch.setattr(Path, "is_dir", lambda path: path == Path("/usr/share/datasets"))
    assert DataFolders().folders() == [*three_places[1:], Path("/usr/share/datasets")]


@pytest.mark.parametrize("name", ["mnist", "cifar10", "chars74k"])
def test_data_that_is_nowhere_is_an_error_that_names_all_places(three_places, name):
    message = refusal(name, three_places[0])
    assert "was not found in" in message and "--data-dir" in message
    assert all(str(folder) in message for folder in three_places)


@pytest.mark.parametrize(
    ("shape", "model"),
    [
        ((16, 16), "cnn"),
        ((3, 16, 40), "cnn"),
        ((15, 40), "mlp"),
        ((8, 8), "mlp"),
        ((3, 32, 15), "mlp"),
        ((12,), "mlp"),
        ((2, 3, 32, 32), "mlp"),
    ],
)
def test_the_default_model_fits_the_inputs(shape: tuple[int, ...], model: str) -> None:
    assert choose_model(shape) == model
    channels_first = (1, *shape) if len(shape) == 2 else shape
    plugins.build("model", Part(model), Fit(channels_first, 2, None))
