"""Sources that read other layouts: the same images give the same bits, damage is refused."""

import json
import os
import pickle
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import fedproto as command
from helpers.data_files import as_npy, as_npz, encode_image
from helpers.sources import build, images, refusal
from PIL import Image

import fedproto
from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.data import DataFolders, default_shots, hold_out
from fedproto.data.mnist5k import _read_splits
from fedproto.data.shared.images import ImageFormat, LazyImages
from fedproto.data.shared.lazy_array import LazyArray
from fedproto.errors import ConfigError, FedProtoError, MissingExtra
from fedproto.runs import assemble

NORMAL = {"mean": 0.1307, "std": 0.3081}


def save(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)


# --- one data set in six forms


def real_mnist():
    """Return 40 training and 10 test images per digit, of MNIST if it is there, else of mnist5k."""
    try:
        source = build("mnist")
        train, test = source.train, source.test
    except FedProtoError:
        train, test = _read_splits()
    return [_by_class(split, count) for split, count in ((train, 40), (test, 10))]


def _by_class(split, count):
    rows = np.concatenate([np.flatnonzero(split.y == label)[:count] for label in range(10)])
    return split.x[rows], split.y[rows]


@pytest.fixture(scope="module")
def digits():
    return real_mnist()


def as_mnist(folder, train, test):
    for part, (x, y) in (("train", train), ("t10k", test)):
        for kind, array in (("images-idx3", x), ("labels-idx1", y.astype(np.uint8))):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(
                struct.pack(">I", n) for n in array.shape
            )
            (folder / f"{part}-{kind}-ubyte").write_bytes(head + array.tobytes())
    return "mnist"


def as_folder(folder, train, test):
    for part, (x, y) in (("train", train), ("test", test)):
        for number, (image, label) in enumerate(zip(x, y, strict=True)):
            save(folder / part / str(label) / f"{number:05}.png", image)
    return f"folder:{folder}"


def as_hf(folder, train, test):
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=[str(digit) for digit in range(10)])
    features = datasets.Features({"image": datasets.Image(), "label": names})
    (folder / "data").mkdir()
    for part, (x, y) in (("train", train), ("test", test)):
        columns = {"image": [encode_image(image) for image in x], "label": y}
        table = datasets.Dataset.from_dict(columns, features=features)
        table.to_parquet(folder / "data" / f"{part}-00000-of-00001.parquet")
    return f"hf:{folder}"


def as_pfllib(folder, train, test, clients=4):
    """As PFLlib writes them: a dictionary a client, here of neighbouring rows."""
    for part, (x, y) in (("train", train), ("test", test)):
        (folder / part).mkdir()
        for client, rows in enumerate(np.array_split(np.arange(len(y)), clients)):
            np.savez_compressed(folder / part / f"{client}.npz", data={"x": x[rows], "y": y[rows]})
    (folder / "config.json").write_text(json.dumps({"num_clients": clients, "num_classes": 10}))
    return f"pfllib:{folder}"


FORMS = {"npz": as_npz, "npy": as_npy, "folder": as_folder, "hf": as_hf, "pfllib": as_pfllib}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """What `datasets` makes of parquet files goes where the test goes."""
    if "datasets" in sys.modules:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def run(dataset, folder, **options):
    settings = {
        "ways": 3,
        "stdev": 1,
        "shots": 8,
        "clients": 4,
        "rounds": 2,
        "seed": 3,
        "engine": "vectorised",
    }
    return fedproto.run(dataset=dataset, data_dir=str(folder), device="cpu", **settings, **options)


def assert_same_bits(one, other):
    assert one.accuracy == other.accuracy
    assert [client["accuracy"] for client in one.clients] == [
        client["accuracy"] for client in other.clients
    ]
    for name, value in one.prototypes.items():
        assert value.equal(other.prototypes[name]), name
    for a, b in zip(one.states, other.states, strict=True):
        assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@pytest.fixture(scope="module")
def of_mnist(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mnist")
    return run(as_mnist(folder, *digits), folder)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_images_in_another_form_give_the_same_bits(form, digits, of_mnist, tmp_path):
    found = run(FORMS[form](tmp_path, *digits), tmp_path, **NORMAL)
    assert len(found.states) == 4
    assert_same_bits(of_mnist, found)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_rows_in_the_same_order(form, digits, tmp_path):
    source = build(FORMS[form](tmp_path, *digits))
    assert source.classes == tuple("0123456789")
    for split, (x, y) in zip((source.train, source.test), digits, strict=True):
        assert split.y.tolist() == y.tolist()
        assert split.x.shape == x.shape and split.x.dtype == np.uint8
        assert (split.x[np.arange(len(y))] == x).all()


@pytest.mark.parametrize("form", FORMS)
def test_thirty_images_of_two_classes_are_enough_for_the_defaults(form, tmp_path):
    """Whatever the seed, no class of 20 clients runs out; asking for too much is refused."""
    x, y = images(60, 28, 28), np.repeat([0, 1], 30)
    source = build(FORMS[form](tmp_path, (x, y), (x, y)))
    source = (
        source if len(source.classes) == 2 else replace(source, classes=("0", "1"))
    )  # as_hf and as_pfllib say ten
    for seed in range(50):
        portions = assemble.divide([source] * 20, Part("nway"), seed)
        assert all(len(np.unique(source.train.y[portion.train])) == 2 for portion in portions)
    with pytest.raises(
        ConfigError, match="class '0' has 30 training rows, but 100 are wanted: lower shots"
    ):
        assemble.divide([source] * 20, Part("nway", {"shots": 5, "stdev": 0}), 0)


@pytest.mark.parametrize("rows", [0, 1, 19, 20, 39, 60, 99, 100, 120, 1000, 2040, 100_000])
def test_few_shots_are_as_many_as_twenty_clients_can_have(rows):
    """With nway's noise, up to two more, but less than as many again."""
    found = default_shots(np.repeat([0, 2], [rows, 200_000]) if rows else np.zeros(0, int))
    most = [shots for shots in range(1, 101) if 20 * (shots + min(2, shots - 1)) <= rows]
    assert found == max(most, default=1)


def test_a_run_of_a_folder_of_a_very_long_name_needs_no_option(tmp_path, monkeypatch):
    """The name leaves a run folder no room for the time and the method."""
    monkeypatch.chdir(tmp_path)
    name = write_folder(tmp_path / ("é" * 120), count=30, shape=(28, 28))
    answer = command("run", "--dataset", name, "--rounds", "1")
    assert answer.code == 0, answer.err
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("é-fedproto") and len(folder.name.encode()) < 240


def test_clients_without_a_name_are_refused(tmp_path):
    np.savez(tmp_path / "own.npz", x=images(4, 2), y=[0, 0, 1, 1], client=["a", "a", "", "b"])
    assert "has an empty client or writer id in row 2" in refusal(f"npz:{tmp_path}/own.npz")


# --- arrays that stay on disk


@pytest.mark.parametrize(
    "index",
    [3, -1, slice(1, 4), [2, 0], np.array([4, 4]), np.arange(5) > 2, np.zeros(0, int)],
    ids=repr,
)
def test_a_lazy_array_gives_the_rows_that_an_array_gives(index):
    array = images(5, 2, 3)
    lazy = LazyArray(array.shape, lambda rows: array[rows])
    assert (lazy.shape, lazy.ndim, len(lazy)) == (array.shape, 3, 5)
    assert lazy[index].tolist() == array[index].tolist()
    assert (
        lazy.subset(np.array([4, 1, 0])).subset(np.array([2, 1]))[:].tolist()
        == array[[0, 1]].tolist()
    )


def test_images_are_read_when_asked_for(tmp_path):
    array = images(3, 4, 5)
    for number, image in enumerate(array):
        save(tmp_path / f"{number}.png", image)
    lazy = LazyImages([tmp_path / f"{number}.png" for number in range(3)], ImageFormat((4, 5), "L"))
    (tmp_path / "1.png").unlink()
    assert lazy[[2, 0]].tolist() == array[[2, 0]].tolist()
    with pytest.raises(FedProtoError, match=r"1\.png cannot be read: No such file"):
        lazy[1]


# --- folder


def write_folder(root, count=5, shape=(4, 4), end="png", classes=("cat", "dog")):
    for seed, name in enumerate(classes):
        for number, image in enumerate(images(count, *shape, seed=seed)):
            save(root / name / f"{number}.{end}", image)
    return f"folder:{root}"


def test_folder_without_train_and_test_holds_out_a_fifth_of_each_class(tmp_path):
    source = build(write_folder(tmp_path))
    assert source.classes == ("cat", "dog")
    everything = np.concatenate([images(5, 4, 4, seed=seed) for seed in (0, 1)])
    train, test = hold_out(np.repeat([0, 1], 5))
    assert source.train.x[:].tolist() == everything[train].tolist()
    assert source.test.x[:].tolist() == everything[test].tolist()
    assert source.test.y.tolist() == [0, 1]


def test_folder_with_train_alone_holds_out_too(tmp_path):
    write_folder(tmp_path / "train")
    assert len(build(f"folder:{tmp_path}").test.y) == 2


def test_folder_classes_may_be_called_test(tmp_path):
    assert build(write_folder(tmp_path, classes=("live", "test"))).classes == ("live", "test")


def test_folder_refuses_a_class_called_train(tmp_path):
    message = refusal(write_folder(tmp_path, classes=("plane", "train")))
    assert "train holds images, but no folder per class: put them in" in message
    assert "train/CLASS, and do not call a class 'train', which is the name of a set" in message


@pytest.mark.parametrize("name", ["test", "val"])
def test_folder_refuses_test_images_without_classes_or_without_a_training_set(tmp_path, name):
    write_folder(tmp_path / "a" / "train")
    write_folder(tmp_path / "a", classes=(name,))
    assert f"a/{name} holds images, but no folder per class" in refusal(f"folder:{tmp_path}/a")
    write_folder(tmp_path / "b")
    write_folder(tmp_path / "b" / name)
    message = refusal(f"folder:{tmp_path}/b")
    assert (
        f"b/{name} holds one folder per class, but there is no" in message
        and "b/train to train with" in message
    )


def test_folder_refuses_a_class_that_only_the_test_set_has(tmp_path):
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "test", classes=("cat", "owl"))
    message = refusal(f"folder:{tmp_path}")
    assert (
        "test/owl holds a class of which" in message
        and "train has no image: add some, or remove it" in message
    )


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_folder_tests_with_the_validation_set_where_there_is_no_test_set(tmp_path, name):
    write_folder(tmp_path / "train", count=5)
    write_folder(tmp_path / name, count=3)
    source = build(f"folder:{tmp_path}")
    assert (len(source.train.y), len(source.test.y)) == (10, 6)
    write_folder(tmp_path / "test", count=2)
    assert len(build(f"folder:{tmp_path}").test.y) == 4


def test_folder_names_that_are_no_text_are_refused(tmp_path):
    """A byte that is no UTF-8, in a class's name and in the path's."""
    try:
        name = write_folder(tmp_path, classes=("cat", os.fsdecode(b"do\xff")))
    except OSError:
        pytest.skip("this file system takes no such name")
    assert (
        r"has a class 'do\udcff', which holds half a character and cannot be written in UTF-8"
        in refusal(name)
    )
    message = refusal(write_folder(tmp_path / os.fsdecode(b"\xff")))
    assert r"\udcff', which holds half a character" in message and message.isascii()


@pytest.mark.parametrize("end", ["png", "PNG", "bmp", "gif", "jpg", "jpeg", "webp"])
def test_folder_reads_each_kind_of_file(tmp_path, end):
    source = build(write_folder(tmp_path, end=end), grey=True)
    assert source.train.x[:].shape == (8, 4, 4)


def test_folder_leaves_other_files_alone(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("none")
    (tmp_path / "cat" / "._0.png").write_text("none")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "empty").mkdir()
    assert build(f"folder:{tmp_path}").classes == ("cat", "dog")


def test_folder_colours_are_channels_first(tmp_path):
    image = images(1, 3, 4, 3)[0]
    for number in range(2):
        save(tmp_path / "a" / f"{number}.png", image)
    x = build(f"folder:{tmp_path}").train.x
    assert x.shape == (1, 3, 3, 4)
    assert x[0].tolist() == image.transpose(2, 0, 1).tolist()


def test_folder_is_coloured_if_one_file_is(tmp_path):
    write_folder(tmp_path)
    save(tmp_path / "cat" / "9.png", images(1, 4, 4, 3)[0])
    assert build(f"folder:{tmp_path}").train.x.shape[1:] == (3, 4, 4)
    assert build(f"folder:{tmp_path}", grey=True).train.x.shape[1:] == (4, 4)


def test_folder_size_resizes_and_its_absence_refuses_other_sizes(tmp_path):
    write_folder(tmp_path)
    save(tmp_path / "dog" / "9.png", images(1, 6, 4)[0])
    assert "dog/9.png has 6x4 pixels but others have 4x4: with size=N every" in refusal(
        f"folder:{tmp_path}"
    )
    source = build(f"folder:{tmp_path}", size=8)
    assert source.train.x[:].shape == (len(source.train.y), 8, 8)
    assert (
        build(write_folder(tmp_path / "even"), size=4).train.x[:]
        == build(f"folder:{tmp_path}/even").train.x[:]
    ).all()


@pytest.mark.parametrize(
    ("raw", "words"), [(b"", "not an image"), (b"GIF89a", "not an image"), (None, "is damaged")]
)
def test_folder_names_a_broken_file(tmp_path, raw, words):
    write_folder(tmp_path, shape=(40, 40))
    for number in range(5):
        file = tmp_path / "cat" / f"{number}.png"
        file.write_bytes(file.read_bytes()[:600] if raw is None else raw)
    with pytest.raises(FedProtoError, match=words) as caught:
        build(f"folder:{tmp_path}").train.x[:]
    assert "cat/" in str(caught.value) and "\n" not in str(caught.value)


def test_folder_refuses_what_is_none(tmp_path):
    assert "absent cannot be read as a folder" in refusal(f"folder:{tmp_path}/absent")
    assert "holds no images: it needs one folder per class" in refusal(f"folder:{tmp_path}")
    assert "dataset 'folder' needs a path" in refusal("folder")
    assert "has 1 channels: mean and std take 1 or 1" in refusal(
        write_folder(tmp_path), mean="0.1,0.2,0.3"
    )


# --- pfllib


def write_pfllib(root, clients=3, change=None):
    """Uneven clients of two classes each; floats, one channel, as PFLlib writes MNIST."""
    fixed, written = np.random.default_rng(0), []
    for client in range(clients):
        for part, each in (("train", 4 + client), ("test", 2)):
            y = np.repeat([client, (client + 1) % clients], each)
            data = {"x": fixed.random((len(y), 1, 4, 4), np.float32), "y": y}
            (root / part).mkdir(parents=True, exist_ok=True)
            np.savez_compressed(
                root / part / f"{client}.npz", data=change(data) if change else data
            )
            written.append(data)
    return f"pfllib:{root}", written


def divided(source, clients, seed=0):
    return assemble.divide([source] * clients, Part("natural"), seed)


@pytest.mark.parametrize("clients", [3, 12])
def test_pfllib_clients_keep_their_files_to_the_bit(tmp_path, clients):
    """Twelve: by number, 10 comes after 9."""
    name, written = write_pfllib(tmp_path, clients)
    source = build(name)
    for seed in (0, 1):
        for client, portion in enumerate(divided(source, clients, seed)):
            train, test = written[2 * client : 2 * client + 2]
            assert (source.train.x[portion.train] == train["x"]).all()
            assert source.train.y[portion.train].tolist() == train["y"].tolist()
            assert (source.test.x[portion.test] == test["x"]).all()
    assert source.scale == 1.0 and source.classes == tuple(map(str, range(clients)))


def test_pfllib_config_says_how_many_classes_there_are(tmp_path):
    name, _ = write_pfllib(tmp_path)
    (tmp_path / "config.json").write_text('{"num_classes": 7}')
    assert len(build(name).classes) == 7
    (tmp_path / "config.json").write_text("{}")
    assert "config.json does not say num_classes" in refusal(name)


class Malicious:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_pfllib_runs_no_code(tmp_path):
    name, _ = write_pfllib(
        tmp_path, change=lambda data: data | {"x": Malicious(f"touch {tmp_path}/victim")}
    )
    assert ".system, which a data file must not use" in refusal(name)
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: {"y": data["y"]}, "is not a file of PFLlib (or is damaged): 'x'"),
        (lambda data: data["y"], "holds no dictionary of x and y"),
        (lambda data: data | {"y": data["y"][1:]}, "inputs but"),
        (lambda data: data | {"y": data["y"] - 1}, "has a label -1, out of range"),
        (lambda data: data | {"y": data["y"] + 0.5}, "y must be a list of whole numbers"),
        (lambda data: data | {"x": data["x"] * np.nan}, "not a finite number"),
        (lambda data: data | {"x": [[1], [2, 3]]}, "is not a file of PFLlib (or is damaged)"),
        (lambda data: data | {"x": np.zeros([len(data["y"])] * 2)}, "but client 1's are"),
    ],
)
def test_unusable_pfllib_files_are_refused(tmp_path, change, words):
    name, _ = write_pfllib(tmp_path, change=change)
    assert words in refusal(name)


def test_pfllib_folders_that_are_not_whole_are_refused(tmp_path):
    assert "is not a data set divided by PFLlib" in refusal(f"pfllib:{tmp_path}")
    name, _ = write_pfllib(tmp_path)
    (tmp_path / "test" / "1.npz").write_bytes(b"none")
    assert "1.npz is not a file of PFLlib" in refusal(name)
    (tmp_path / "test" / "1.npz").unlink()
    assert "client 1 has a file in only one of train and test" in refusal(name)


def test_pfllib_refuses_a_client_that_cannot_be_tested(tmp_path):
    name, _ = write_pfllib(tmp_path)
    np.savez(
        tmp_path / "test" / "1.npz",
        data={"x": np.zeros((1, 1, 4, 4), np.float32), "y": np.array([0])},
    )
    assert "client 1 has no test image of a class that it has training images of" in refusal(name)


# --- hf


def write_hf(root, features=None, parts=("train", "test"), **columns):
    datasets = pytest.importorskip("datasets")
    root.mkdir(exist_ok=True)
    whole = {
        "image": [encode_image(image) for image in images(6, 4, 4)],
        "label": [0, 1, 2] * 2,
    } | columns
    table = datasets.Dataset.from_dict(
        {name: column for name, column in whole.items() if column is not None}
    )
    for name, feature in ({"image": datasets.Image()} | (features or {})).items():
        table = table.cast_column(name, feature) if name in table.features and feature else table
    for part in parts:
        table.to_parquet(root / f"{part}-00000-of-00001.parquet")
    return f"hf:{root}"


def test_hf_reads_plain_structs_of_bytes_and_path(tmp_path):
    source = build(write_hf(tmp_path / "plain", {"image": None}))
    assert source.train.x[:].tolist() == images(6, 4, 4).tolist()
    assert source.classes == ("0", "1", "2")


def test_hf_labels_may_be_text(tmp_path):
    source = build(write_hf(tmp_path / "text", label=["owl", "cat", "owl", "cat", "dog", "dog"]))
    assert source.classes == ("cat", "dog", "owl")
    assert source.train.y.tolist() == [2, 0, 2, 0, 1, 1]


def test_hf_without_a_test_part_holds_out(tmp_path):
    source = build(write_hf(tmp_path / "one", parts=["train"]))
    assert (len(source.train.y), len(source.test.y)) == (3, 3)
    kept = hold_out(np.array([0, 1, 2] * 2))[0]
    assert source.train.x[:].tolist() == images(6, 4, 4)[kept].tolist()


def test_hf_takes_validation_for_a_missing_test_part(tmp_path):
    assert len(build(write_hf(tmp_path / "v", parts=["train", "validation"])).test.y) == 6


def test_hf_clients_become_writers(tmp_path):
    source = build(write_hf(tmp_path / "w", writer_id=["a", "a", "a", "b", "b", "b"]))
    assert source.train.writer.tolist() == list("aaabbb")
    assert [portion.train.tolist() for portion in divided(source, 2)] == [[0, 1, 2], [3, 4, 5]]


def test_hf_columns_may_be_named(tmp_path):
    name = write_hf(
        tmp_path / "n", label=None, animal=[1, 0] * 3, colour=[0] * 6, owner=[5, 5, 5, 6, 6, 6]
    )
    assert "needs label=COLUMN, to say which it is: it has image (" in refusal(name)
    source = build(name, label="animal", client="owner")
    assert source.train.y.tolist() == [1, 0] * 3 and source.train.writer.tolist() == [
        5,
        5,
        5,
        6,
        6,
        6,
    ]
    assert "has no column 'fur': it has" in refusal(name, label="fur")
    assert "column 'owner' holds int64, not images" in refusal(name, image="owner", label="animal")


SMALL_IMAGE = encode_image(images(1, 4, 4)[0])
WIDE_IMAGE = encode_image(images(1, 4, 5)[0])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"image": None, "height": [1.0] * 6},
            "has no column of images, and numbers go in an npz file",
        ),
        ({"label": [0, None, 2] * 2}, "column 'label' is empty in 2 rows"),
        ({"label": [0, -1, 2] * 2}, "has a label -1, out of range"),
        ({"label": None}, "needs label=COLUMN"),
        ({"image": [SMALL_IMAGE] * 5 + [None]}, "has no image in row 5"),
        ({"image": [SMALL_IMAGE] * 5 + [{"bytes": b"x", "path": None}]}, "row 5, is not an image"),
        ({"image": [SMALL_IMAGE] * 5 + [WIDE_IMAGE]}, "row 5, has 4x5 pixels but others have"),
    ],
)
def test_unusable_hf_tables_are_refused(tmp_path, columns, words):
    assert words in refusal(write_hf(tmp_path / "bad", **columns))


def test_hf_names_what_was_tried_without_a_network(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(name, subset):
        raise ConnectionError(f"Couldn't reach {name!r}\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.chdir(tmp_path)
    (part,) = configure({"dataset": "hf:someone/animals"})[0].dataset
    message = refusal(part.name)
    assert "finds no folder 'someone/animals', and it cannot be read from the hub" in message
    assert (
        "Couldn't reach 'someone/animals' more" in message and "name it with hf:FOLDER" in message
    )


@pytest.mark.parametrize(
    "name", ["pandas", "csv", "json", "mnist", "/nowhere", "owner/", "owner/script.py"]
)
def test_hf_takes_nothing_but_folders_and_data_sets_of_the_hub(name, tmp_path, monkeypatch):
    """The library has readers with short names for the current folder; one of them unpickles."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments: pytest.fail("it was asked"))
    assert f"finds no folder {name!r}; a data set of the hub is written hf:OWNER/NAME" in refusal(
        f"hf:{name}"
    )


class Canary:
    """Unpickled, it leaves a file."""

    def __reduce__(self):
        return Path.touch, (Path("it ran"),)


def test_hf_unpickles_nothing(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.pkl").write_bytes(pickle.dumps(Canary()))
    refusal("hf:pandas")
    assert not (tmp_path / "it ran").exists()


def test_hf_refuses_a_library_that_runs_code_of_data_sets(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments: pytest.fail("it was asked"))
    assert refusal("hf:owner/name") == (
        "dataset hf needs datasets>=4, since older versions run code that a data set brings"
    )


def test_hf_names_a_folder_without_tables(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train-0.parquet").write_bytes(b"none")
    assert f"cannot read the folder {tmp_path}, which needs train-*.parquet" in refusal(
        f"hf:{tmp_path}"
    )


@pytest.mark.parametrize(
    ("kind", "name", "module", "extra"),
    [
        ("dataset", "hf:x", "datasets", "hub"),
        ("partition", "flower:IidPartitioner", "flwr_datasets", "flower"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, kind, name, module, extra):
    for loaded in [each for each in sys.modules if each.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    context = DataFolders() if kind == "dataset" else a_pool()
    with pytest.raises(
        MissingExtra, match=rf"needs the package '{module}': pip install '.*\[{extra}\]'"
    ):
        plugins.build(kind, Part(name), context)


# --- Flower's partitioners


def a_pool(clients=4, seed=0):
    from fedproto.core import rng
    from fedproto.partitions import PartitionRequest

    fixed = np.random.default_rng(1)
    train, test = fixed.integers(0, 6, 600), fixed.integers(0, 6, 120)
    generator = rng.generator(seed, "partition")
    return PartitionRequest(
        train, test, tuple("abcdef"), clients, 7, generator, "", np.sort(fixed.integers(0, 4, 600))
    )


FLOWER = {
    "DirichletPartitioner": {"alpha": 0.5},
    "IidPartitioner": {},
    "PathologicalPartitioner": {"num_classes_per_partition": 2},
    "ShardPartitioner": {"num_shards_per_partition": 2},
    "NaturalIdPartitioner": {},
    "LinearPartitioner": {},
}


def flower(name, pool, **options):
    pytest.importorskip("flwr_datasets")
    return plugins.build("partition", Part(f"flower:{name}", FLOWER.get(name, {}) | options), pool)


@pytest.mark.parametrize("name", FLOWER)
def test_flowers_partitioners_keep_what_a_partition_promises(name):
    pool = a_pool()
    portions = flower(name, pool)
    rows = np.concatenate([portion.train for portion in portions])
    assert len(portions) == 4 and len(np.unique(rows)) == len(rows)
    for portion in portions:
        assert (np.diff(portion.train) > 0).all()
        own = np.unique(pool.train[portion.train])
        assert portion.test.tolist() == np.flatnonzero(np.isin(pool.test, own)).tolist()


@pytest.mark.parametrize(
    "name", ["DirichletPartitioner", "PathologicalPartitioner", "IidPartitioner"]
)
def test_flowers_partitioners_are_seeded(name):
    first, again, other = (
        [portion.train.tolist() for portion in flower(name, a_pool(seed=seed))]
        for seed in (3, 3, 4)
    )
    assert first == again != other


@pytest.mark.parametrize(
    "name", ["DirichletPartitioner", "PathologicalPartitioner", "ShardPartitioner"]
)
def test_rows_are_those_that_flower_gives_by_itself(name):
    """Flower called as its documentation does, on the same shuffled labels with the same seed."""
    partitioners, datasets = (
        pytest.importorskip("flwr_datasets.partitioner"),
        pytest.importorskip("datasets"),
    )
    drawn = a_pool().generator
    seed, order = int(drawn.integers(2**31)), drawn.permutation(600)
    partitioner = getattr(partitioners, name)(
        num_partitions=4, partition_by="label", seed=seed, **FLOWER[name]
    )
    partitioner.dataset = datasets.Dataset.from_dict({"label": a_pool().train[order], "row": order})
    wanted = [sorted(partitioner.load_partition(number)["row"]) for number in range(4)]
    assert [portion.train.tolist() for portion in flower(name, a_pool())] == wanted


def test_flower_options_are_written_as_any_others():
    pytest.importorskip("flwr_datasets")
    text = "flower:PathologicalPartitioner(num_classes_per_partition=2)"
    config = configure({"dataset": "digits", "clients": 4, "partition": text, "test_shots": 5})[0]
    source = build("digits")
    for portion in assemble.divide([source] * 4, config.partition, 0):
        labels = np.unique(source.train.y[portion.train])
        assert len(labels) == 2 and len(portion.test) == 5 * len(labels)


def test_flowers_refusals_are_one_sentence():
    cases = [
        ("IidPartitioner", {"alpha": 1}, "unknown option of IidPartitioner 'alpha'"),
        ("DirichletPartitioner", {"alpha": None}, "DirichletPartitioner: "),
        ("PathologicalPartitioner", {"num_classes_per_partition": 7}, "PathologicalPartitioner: "),
        ("Dirichlet", {}, "did you mean 'DirichletPartitioner'"),
    ]
    for name, options, words in cases:
        with pytest.raises(ConfigError, match=words) as caught:
            flower(name, a_pool(), **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="makes 4 clients of this data set, but clients is 3"):
        flower("NaturalIdPartitioner", a_pool(3))
    with pytest.raises(ConfigError, match="needs a data set that says whose each row is"):
        flower("NaturalIdPartitioner", a_pool()._replace(train_writer=None))
