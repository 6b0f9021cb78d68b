"""Files that somebody made to do harm, or that a disk damaged: one sentence each, never a crash."""

import json
import pickle
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy._core.multiarray import _reconstruct, scalar
from numpy._core.numeric import _frombuffer
from PIL import Image
from safetensors.torch import save

import fedproto
from fedproto import registry
from fedproto.bank import Bank, Contribution, read_prototypes
from fedproto.config import configure
from fedproto.data import Places, Source, Split, from_arrays
from fedproto.data._pickles import load_arrays
from fedproto.data.cifar10 import read_batch
from fedproto.errors import ConfigError, DataError, RunFolderError
from fedproto.experiment import Experiment, reopen
from fedproto.models import with_body
from fedproto.options import Part
from fedproto.runfolder import RunFolder
from fedproto.types import Tree, Upload
from fedproto.vocabulary import alike, class_name, is_plain, normalise_name

# --- pickles


class Call:
    """Pickled as a call with these arguments, followed by a state."""

    def __init__(self, function, arguments, state=None):
        self.function = function
        self.arguments = arguments
        self.state = state

    def __reduce__(self):
        call = (self.function, self.arguments)
        return call if self.state is None else (*call, self.state)


RAW = b"A" * 8  # what numpy would take for a pointer
OBJECT = np.dtype("O")
#: A type with an object field whose flags say that it has none, so that numpy's own checks pass it.
HIDDEN = Call(np.dtype, ("V8", False, True), (4, "|", None, ("a",), {"a": (OBJECT, 0)}, 8, 1, 0))
ARRAY = (np.ndarray, (0,), b"b")
CRAFTED = {
    "objects in a buffer": Call(np.ndarray, ((1,), OBJECT, RAW)),
    "hidden objects in a buffer": Call(np.ndarray, ((1,), HIDDEN, RAW)),
    "hidden objects of protocol 5": Call(_frombuffer, (RAW, HIDDEN, (1,), "C")),
    "a hidden object as a number": Call(scalar, (HIDDEN, RAW)),
    "hidden objects as a state": Call(_reconstruct, ARRAY, (1, (1,), HIDDEN, False, RAW)),
    "objects as a state": Call(_reconstruct, ARRAY, (1, (1,), OBJECT, False, RAW)),
    "more numbers than bytes": Call(_reconstruct, ARRAY, (1, (9,), np.dtype("i8"), False, RAW)),
    "a shape of fractions": Call(_reconstruct, ARRAY, (1, (1.0,), np.dtype("i8"), False, RAW)),
    "text": np.array(["a"]),
    "times": np.array(["2020-01-01"], "M8[D]"),
}
#: LONG_BINPUT: remember the dictionary at place 2**32 - 1, for which C's unpickler makes room.
CLAIMED = b"\x80\x02}r\xff\xff\xff\xff."
READ_ALL = """
import resource, sys
from pathlib import Path
from fedproto.data.cifar10 import read_batch
from fedproto.errors import DataError
resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
for path in sys.argv[1:]:
    try:
        read_batch(Path(path))
    except DataError as error:
        print(error, flush=True)
"""


def test_crafted_pickles_are_refused(tmp_path):
    """In a process of its own, since five of these ended it with SIGSEGV, and one filled the memory."""
    files = [tmp_path / f"data_batch_{number}" for number in range(len(CRAFTED) + 1)]
    for file, crafted in zip(files, CRAFTED.values(), strict=False):
        file.write_bytes(pickle.dumps({b"data": crafted, b"labels": [0]}, 2))
    files[-1].write_bytes(CLAIMED)
    command = [sys.executable, "-c", READ_ALL, *map(str, files)]
    found = subprocess.run(command, capture_output=True, text=True)
    sentences = found.stdout.splitlines()
    assert (found.returncode, len(sentences)) == (0, len(files)), found.stderr
    for file, sentence in zip(files, sentences, strict=True):
        assert sentence.startswith(f"{file} is damaged or no CIFAR-10 python batch")
    assert sentences[-1].endswith(": b'data'")  # read, and found to lack its images


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", ["u1", "<i8", ">i4", "f4", ">f8", "?"])
def test_arrays_of_numbers_come_back_as_they_were(kind, protocol):
    values = np.arange(6).reshape(2, 3).astype(kind)
    content = {"rows": values, "columns": np.asfortranarray(values), "one": values[1, 2]}
    found = load_arrays(pickle.dumps(content, protocol))
    for name, value in content.items():
        read = np.asarray(found[name])
        np.testing.assert_array_equal(read, value)
        assert read.shape == value.shape


def test_a_real_batch_is_read(tmp_path):
    batch = tmp_path / "data_batch_1"
    images = np.arange(2 * 3072).astype(np.uint8).reshape(2, 3072)
    batch.write_bytes(pickle.dumps({b"data": images, b"labels": [3, 9]}, 2))
    split = read_batch(batch)
    np.testing.assert_array_equal(split.x.reshape(2, 3072), images)
    assert split.y.tolist() == [3, 9]


def test_a_pickle_that_calls_functions_is_refused(tmp_path):
    batch = tmp_path / "data_batch_1"
    batch.write_bytes(pickle.dumps({b"data": Call(Path.touch, (tmp_path / "there",))}, 2))
    with pytest.raises(DataError, match="which a data file has no business with"):
        read_batch(batch)
    assert not (tmp_path / "there").exists()


# --- names of classes

COMPOSED = "caf\u00e9"
DECOMPOSED = "cafe\u0301"
SPELLINGS = (COMPOSED, DECOMPOSED, f" {COMPOSED}", f"{DECOMPOSED}\t")
UNUSABLE = {
    "": "is empty",
    " \t": "is empty",
    "a\nb": "line break",
    "a\rb": "line break",
    "a\u2028b": "line break",
    "a\x1b[2Jb": "control character",
    "a\x00b": "control character",
    "ma\u202elign": "control character",
    "\ud83d": "half a character",
    "\u200b": "nothing that can be seen",
}
letters = st.characters(codec="utf-8")


@given(st.text(letters))
def test_a_name_is_normalised_once_for_all(name):
    """Unicode's rule: composing is idempotent, and what looks the same composes to the same."""
    normal = normalise_name(name)
    assert normal == normal.strip() == unicodedata.normalize("NFC", normal)
    assert normalise_name(normal) == normal
    assert normalise_name(unicodedata.normalize("NFD", name)) == normal
    assert normalise_name(f"\t{name} ") == normal


@given(st.text(letters, min_size=1))
def test_a_name_is_refused_or_one_line(name):
    try:
        found = class_name(name, "the data has a class")
    except DataError as error:
        assert len(str(error).splitlines()) == 1
        assert not is_plain(name)
    else:
        assert is_plain(found) and found.splitlines() == [found]


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_name_is_refused_when_data_is_read(name):
    x, y = np.zeros((6, 2), np.float32), np.array([0, 0, 0, 1, 1, 1])
    with pytest.raises(DataError, match=UNUSABLE[name]) as refused:
        from_arrays("mine", ("cat", name), [Split(x, y)])
    assert len(str(refused.value).splitlines()) == 1
    with pytest.raises(DataError, match=UNUSABLE[name]):
        Source("mine", ("cat", name), Split(x, y), Split(x, y))


def write_npz(folder: Path, names) -> str:
    x = np.arange(8.0 * len(names), dtype=np.float32).reshape(-1, 2)
    y = np.repeat(np.arange(len(names)), 4)
    np.savez(folder / "own.npz", x=x, y=y, classes=np.array(names))
    return f"npz:{folder / 'own.npz'}"


def write_csv(folder: Path, names) -> str:
    rows = [f'{row},"{name}"' for row, name in enumerate(names * 4)]
    (folder / "own.csv").write_text("size,label\n" + "\n".join(rows), encoding="utf-8", newline="")
    return f"csv:{folder / 'own.csv'}"


def write_jsonl(folder: Path, names) -> str:
    rows = [json.dumps({"text": f"word{row % 3}", "label": name}) for row, name in enumerate(names * 4)]
    (folder / "own.jsonl").write_text("\n".join(rows))
    return f"text:{folder / 'own.jsonl'}"


def write_folders(folder: Path, names) -> str:
    for place, name in enumerate(names):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(4):
            image = Image.fromarray(np.full((4, 4), 10 * place + number, np.uint8))
            image.save(folder / "images" / name / f"{number}.png")
    return f"folder:{folder / 'images'}"


@pytest.mark.parametrize("write", [write_npz, write_csv, write_jsonl, write_folders])
def test_spellings_of_one_name_are_one_class(tmp_path, write):
    kind, _, path = write(tmp_path, (*SPELLINGS, "tea")).partition(":")
    source = registry.build("dataset", Part(f"{kind}:{path}"), Places())
    assert sorted(source.classes) == [COMPOSED, "tea"]
    labels = np.concatenate([source.train.y, source.test.y])
    counts = np.bincount(labels, minlength=2)
    assert counts[source.classes.index(COMPOSED)] == 16
    assert counts[source.classes.index("tea")] == 4
    assert np.bincount(source.test.y).tolist() == [3, 1] or np.bincount(source.test.y).tolist() == [1, 3]


def test_a_class_of_the_test_folder_may_be_spelled_otherwise(tmp_path):
    train = Path(write_folders(tmp_path, (COMPOSED, "tea")).partition(":")[2])
    (train.parent / "all" / "test").mkdir(parents=True)
    train.rename(train.parent / "all" / "train")
    for raw in (DECOMPOSED, "tea"):
        copied = train.parent / "all" / "test" / raw
        shutil.copytree(train.parent / "all" / "train" / unicodedata.normalize("NFC", raw), copied)
    source = registry.build("dataset", Part(f"folder:{tmp_path / 'all'}"), Places())
    assert source.classes == (COMPOSED, "tea") and len(source.test.y) == 8


def test_three_spellings_are_one_class_of_one_federation():
    """Three clients of Python arrays, each with a spelling of its own."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(8, 3)).astype(np.float32)
    clients = [(x, np.array([name, "tea"] * 4)) for name in SPELLINGS[:3]]
    found = fedproto.run(dataset=clients, model="mlp(hidden=4)", rounds=1)
    assert sorted(found.data["classes"]) == [COMPOSED, "tea"]
    assert found.prototypes["known"].tolist() == [1, 1]


def test_names_without_anything_to_normalise_change_nothing():
    """The labels stay the very array, and so does what a partition knows a data set by."""
    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 1, 0])
    source = Source("mine", ("b", "a"), Split(x, y), Split(x, y))
    assert source.classes == ("b", "a") and source.train.y is y


def test_an_upload_speaks_of_the_class_however_it_is_spelled():
    upload = Upload({"prototypes": torch.ones(1, 2)}, {"weight": torch.ones(1)})
    assert Contribution("zoo", (DECOMPOSED,), upload).classes == (COMPOSED,)
    with pytest.raises(DataError, match=r"the upload of 'zoo' has a class 'a\\nb', which holds a line break"):
        Contribution("zoo", ("a\nb",), upload)
    two = Upload({"prototypes": torch.ones(2, 2)}, {"weight": torch.ones(2)})
    with pytest.raises(DataError, match="names a class twice"):
        Contribution("zoo", SPELLINGS[:2], two)


def test_prototypes_of_a_file_are_found_however_they_are_spelled(tmp_path):
    tensors = {"prototypes": torch.ones(1, 2), "known": torch.ones(1)}
    (tmp_path / "file").write_bytes(save(tensors, {"classes": f" {DECOMPOSED}"}))
    assert read_prototypes(tmp_path / "file").classes == (COMPOSED,)


def test_names_that_differ_in_case_are_told_before_the_run(tmp_path):
    """Of a person's own file; the 62 characters of a data set of ours are meant so."""
    config = configure({"dataset": write_csv(tmp_path, ("Cat", "cat", "dog")), "clients": 1, "partition": "iid"})
    notices = Experiment.prepare(config[0]).notices
    assert [notice for notice in notices if "'Cat', 'cat' differ only in case" in notice]


def test_few_sentences_are_said_about_many_names():
    names = [*"abcdefgh", *"ABCDEFGH"]
    assert len(alike(names)) == 6 and alike(names)[-1] == "so do 3 more groups of classes"


# --- numbers that a cast spoils, and tensors of other names and kinds


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished run of two clients, which nobody may change."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    settings = {"clients": 2, "rounds": 2, "eval_every": 1, "shots": 4, "test_shots": 4, "stdev": 0}
    fedproto.run(dataset="digits", model="mlp(hidden=4,width=4)", out=folder, **settings)
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def upload_of(value: float, weight: float = 1.0, dtype: torch.dtype = torch.float64) -> Upload:
    values = torch.full((1, 4), value, dtype=torch.float64).to(dtype)
    return Upload({"prototypes": values}, {"weight": torch.full((1,), weight, dtype=torch.float64).to(dtype)})


@pytest.mark.parametrize(
    ("upload", "sentence"),
    [
        (upload_of(1e300), "has prototypes that are not finite"),  # infinite in float32
        (upload_of(1.0, 1e300), "has weight that are not finite"),
        (upload_of(1.0, 1e-300), "a weight that is not positive"),  # zero in float32
        (upload_of(3e38, 1e-30), "is too large: with it the prototypes are not finite"),
        (upload_of(1.0, dtype=torch.bool), "of type torch.bool, where floating-point numbers are wanted"),
        (upload_of(1.0, dtype=torch.int64), "of type torch.int64"),
        (upload_of(1.0, dtype=torch.complex64), "of type torch.complex64"),
        (upload_of(1.0, dtype=torch.float8_e4m3fn), "of type torch.float8_e4m3fn"),
    ],
)
def test_an_upload_is_checked_as_it_will_be_summed(run, upload, sentence):
    bank = Bank.of(RunFolder.open(run))
    with pytest.raises(DataError, match=sentence):
        bank.with_member(Contribution("new", ("0",), upload))
    assert torch.isfinite(bank.with_member(Contribution("new", ("0",), upload_of(1.0))).prototypes().values).all()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("prototypes", torch.full((1, 2), 1e300, dtype=torch.float64), "prototypes that are not finite"),
        ("prototypes", torch.ones(1, 2, dtype=torch.bool), "prototypes of type torch.bool"),
        ("prototypes", torch.ones(1, 2, dtype=torch.int32), "prototypes of type torch.int32"),
        ("prototypes", torch.ones(1, 2, dtype=torch.complex64), "prototypes of type torch.complex64"),
        ("prototypes", torch.ones(1, 2).to(torch.float8_e5m2), "prototypes of type torch.float8_e5m2"),
        ("known", torch.ones(1, dtype=torch.bool), "known of type torch.bool"),
        ("known", torch.full((1,), 0.5), "neither 0 nor 1"),
    ],
)
def test_odd_prototypes_of_a_file_are_refused(tmp_path, name, value, sentence):
    tensors = {"prototypes": torch.ones(1, 2), "known": torch.ones(1), name: value}
    (tmp_path / "file").write_bytes(save(tensors, {"classes": "cat"}))
    with pytest.raises(DataError, match=sentence):
        read_prototypes(tmp_path / "file")


def test_initial_weights_are_checked_after_the_cast(tmp_path):
    initial = {"body.fc.weight": torch.zeros(2, 2), "head.fc.weight": torch.zeros(1, 2)}
    for value in (torch.full((2, 2), 1e300, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.complex64)):
        (tmp_path / "w.safetensors").write_bytes(save({"body.fc.weight": value}))
        with pytest.raises(ConfigError, match=r"have body\.fc\.weight with values that are not finite numbers"):
            with_body(initial, tmp_path / "w.safetensors")


def test_inputs_are_checked_once_they_are_normalised(tmp_path):
    """Each number is finite, and so are mean and std; what they make is not."""
    np.savez(tmp_path / "own.npz", x=np.full((8, 2), 1e30, np.float32), y=np.arange(8) % 2)
    settings = {"dataset": f"npz:{tmp_path / 'own.npz'}(std=1e-20)", "clients": 1, "partition": "iid"}
    with pytest.raises(DataError, match="inputs that are not finite once mean and std are applied"):
        Experiment.prepare(configure(settings)[0])


@pytest.mark.parametrize("shape", [(6, 0), (6, 0, 4), (6, 3, 0, 4)])
def test_inputs_without_a_value_are_refused(tmp_path, shape):
    np.savez(tmp_path / "own.npz", x=np.zeros(shape), y=np.array([0, 1] * 3))
    with pytest.raises(DataError, match="which hold no value"):
        registry.build("dataset", Part(f"npz:{tmp_path / 'own.npz'}"), Places())


def renamed(tree: Tree, old: str, new: str) -> Tree:
    return {new if name == old else name: value for name, value in tree.items()}


SPOILT = {
    "a flipped letter": lambda t: renamed(t, "client.0.body.fc1.weight", "client.0.body.fc1.wmight"),
    "a client too many": lambda t: t | {"client.9.body.fc1.weight": torch.zeros(1)},
    "another shape": lambda t: t | {"client.1.body.fc1.weight": torch.zeros(2, 2)},
    "another type": lambda t: t | {"client.1.body.fc1.bias": t["client.1.body.fc1.bias"].double()},
    "a server's name": lambda t: renamed(t, "server.known", "server.knwon"),
    "a server's shape": lambda t: t | {"server.prototypes": torch.zeros(3, 3)},
    "no ledger": lambda t: {name: value for name, value in t.items() if name != "ledger"},
    "another ledger": lambda t: t | {"ledger": torch.zeros(5, 4, dtype=torch.int64)},
    "another group": lambda t: t | {"servr.x": torch.zeros(1)},
    "uploads of nobody": lambda t: t | {"sums.prototypes": t["sums.prototypes"][:1]},
    "uploads without weights": lambda t: {n: v for n, v in t.items() if not n.startswith("weights.")},
    "uploads of numbers": lambda t: t | {"weights.weight": t["weights.weight"].long()},
}


@pytest.mark.parametrize("change", SPOILT)
def test_a_checkpoint_of_other_tensors_is_refused_in_one_sentence(finished, change):
    experiment, folder = reopen(RunFolder.open(finished))
    round, tree = folder.load_checkpoint()
    folder.load_checkpoint = lambda: (round, SPOILT[change](tree))
    before = experiment.client_states()
    with pytest.raises(RunFolderError, match="does not fit the run, or is damaged"):
        experiment.restore(folder)
    for old, new in zip(before, experiment.client_states(), strict=True):
        assert all(torch.equal(value, new[name]) for name, value in old.items())
