"""Files that somebody made to do harm, or that a disk damaged: one sentence each, never a crash."""

import csv
import io
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
from helpers.uploads import prototype_upload
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core.multiarray import _reconstruct, scalar
from numpy._core.numeric import _frombuffer
from PIL import Image
from safetensors.torch import load_file, save

import fedproto
from fedproto.config import plugins
from fedproto.config.config_file import read_tables
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.core.class_names import class_name, describe_similar_names, is_plain, normalise_name
from fedproto.core.csv_cells import make_harmless
from fedproto.core.csv_cells import write_csv as as_csv
from fedproto.core.types import Tree, Upload
from fedproto.data import DataFolders, Source, Split, from_arrays
from fedproto.data.cifar10 import read_batch
from fedproto.data.shared.pickles import load_arrays
from fedproto.errors import ConfigError, DataError, FedProtoError, RunFolderError
from fedproto.inference.trained_client import load_client
from fedproto.membership.contribution import Contribution
from fedproto.membership.membership import Membership
from fedproto.models import load_body
from fedproto.partitions.file import hash_partition, read_partition
from fedproto.report.figures.figure import finish_figure, make_panel
from fedproto.report.groups import group_runs
from fedproto.report.read import read_run
from fedproto.reproduce.pictures.rows import to_csv
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import read_prototypes, write_prototypes

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
    """In a process of its own: five of these files ended it with SIGSEGV, one filled the memory."""
    files = [tmp_path / f"data_batch_{number}" for number in range(len(CRAFTED) + 1)]
    for file, crafted in zip(files, CRAFTED.values(), strict=False):
        file.write_bytes(pickle.dumps({b"data": crafted, b"labels": [0]}, 2))
    files[-1].write_bytes(CLAIMED)
    command = [sys.executable, "-c", READ_ALL, *map(str, files)]
    found = subprocess.run(command, capture_output=True, text=True)
    sentences = found.stdout.splitlines()
    assert (found.returncode, len(sentences)) == (0, len(files)), found.stderr
    for file, sentence in zip(files, sentences, strict=True):
        assert sentence.startswith(f"{file} is not a CIFAR-10 python batch (or is damaged)")
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
    with pytest.raises(DataError, match="which a data file must not use"):
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
    rows = [
        json.dumps({"text": f"word{row % 3}", "label": name}) for row, name in enumerate(names * 4)
    ]
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
    source = plugins.build("dataset", Part(f"{kind}:{path}"), DataFolders())
    assert sorted(source.classes) == [COMPOSED, "tea"]
    labels = np.concatenate([source.train.y, source.test.y])
    counts = np.bincount(labels, minlength=2)
    assert counts[source.classes.index(COMPOSED)] == 16
    assert counts[source.classes.index("tea")] == 4
    assert np.bincount(source.test.y).tolist() == [3, 1] or np.bincount(source.test.y).tolist() == [
        1,
        3,
    ]


def test_a_class_of_the_test_folder_may_be_spelled_otherwise(tmp_path):
    train = Path(write_folders(tmp_path, (COMPOSED, "tea")).partition(":")[2])
    (train.parent / "all" / "test").mkdir(parents=True)
    train.rename(train.parent / "all" / "train")
    for raw in (DECOMPOSED, "tea"):
        copied = train.parent / "all" / "test" / raw
        shutil.copytree(train.parent / "all" / "train" / unicodedata.normalize("NFC", raw), copied)
    source = plugins.build("dataset", Part(f"folder:{tmp_path / 'all'}"), DataFolders())
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
    upload = prototype_upload(torch.ones(1, 2), torch.ones(1))
    assert Contribution("zoo", (DECOMPOSED,), upload).classes == (COMPOSED,)
    with pytest.raises(
        DataError, match=r"the upload of 'zoo' has a class 'a\\nb', which holds a line break"
    ):
        Contribution("zoo", ("a\nb",), upload)
    two = prototype_upload(torch.ones(2, 2), torch.ones(2))
    with pytest.raises(DataError, match="names a class twice"):
        Contribution("zoo", SPELLINGS[:2], two)


def test_prototypes_of_a_file_are_found_however_they_are_spelled(tmp_path):
    tensors = {"prototypes": torch.ones(1, 2), "known": torch.ones(1)}
    write_prototypes(tmp_path / "file", tensors, [f" {DECOMPOSED}"])
    assert read_prototypes(tmp_path / "file").classes == (COMPOSED,)


def test_names_that_differ_in_case_are_told_before_the_run(tmp_path):
    """Of a person's own file; the 62 characters of a data set of ours are meant so."""
    config = configure(
        {"dataset": write_csv(tmp_path, ("Cat", "cat", "dog")), "clients": 1, "partition": "iid"}
    )
    notices = Experiment.prepare(config[0]).notices
    assert [notice for notice in notices if "'Cat', 'cat' differ only in case" in notice]


def test_few_sentences_are_said_about_many_names():
    names = [*"abcdefgh", *"ABCDEFGH"]
    assert (
        len(describe_similar_names(names)) == 6
        and describe_similar_names(names)[-1] == "so do 3 more groups of classes"
    )


# --- numbers that a cast spoils, and tensors of other names and kinds


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished run of two clients, which nobody may change."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    options = {"clients": 2, "rounds": 2, "eval_every": 1, "shots": 4, "test_shots": 4, "stdev": 0}
    fedproto.run(dataset="digits", model="mlp(hidden=4,width=4)", out=folder, **options)
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def upload_of(value: float, weight: float = 1.0, dtype: torch.dtype = torch.float64) -> Upload:
    values = torch.full((1, 4), value, dtype=torch.float64).to(dtype)
    return prototype_upload(values, torch.full((1,), weight, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize(
    ("upload", "sentence"),
    [
        # infinite in float32
        (upload_of(1e300), "has prototypes/sums/prototypes with values that are not finite"),
        (upload_of(1.0, 1e300), "has prototypes/weight with values that are not finite"),
        (upload_of(1.0, 1e-300), "a weight that is not positive"),  # zero in float32
        (upload_of(3e38, 1e-30), "is too large: with it the prototypes are not finite"),
        (
            upload_of(1.0, dtype=torch.bool),
            "of type torch.bool instead of floating-point numbers",
        ),
        (upload_of(1.0, dtype=torch.int64), "of type torch.int64"),
        (upload_of(1.0, dtype=torch.complex64), "of type torch.complex64"),
        (upload_of(1.0, dtype=torch.float8_e4m3fn), "of type torch.float8_e4m3fn"),
    ],
)
def test_an_upload_is_checked_as_it_will_be_summed(run, upload, sentence):
    bank = Membership.of(RunFolder.open(run))
    with pytest.raises(DataError, match=sentence):
        bank.with_member(Contribution("new", ("0",), upload))
    assert torch.isfinite(
        bank.with_member(Contribution("new", ("0",), upload_of(1.0))).prototypes().values
    ).all()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "prototypes",
            torch.full((1, 2), 1e300, dtype=torch.float64),
            "prototypes that are not finite",
        ),
        ("prototypes", torch.ones(1, 2, dtype=torch.bool), "prototypes of type torch.bool"),
        ("prototypes", torch.ones(1, 2, dtype=torch.int32), "prototypes of type torch.int32"),
        (
            "prototypes",
            torch.ones(1, 2, dtype=torch.complex64),
            "prototypes of type torch.complex64",
        ),
        (
            "prototypes",
            torch.ones(1, 2).to(torch.float8_e5m2),
            "prototypes of type torch.float8_e5m2",
        ),
        ("known", torch.ones(1, dtype=torch.bool), "known of type torch.bool"),
        ("known", torch.full((1,), 0.5), "neither 0 nor 1"),
    ],
)
def test_odd_prototypes_of_a_file_are_refused(tmp_path, name, value, sentence):
    tensors = {"prototypes": torch.ones(1, 2), "known": torch.ones(1), name: value}
    write_prototypes(tmp_path / "file", tensors, ["cat"])
    with pytest.raises(DataError, match=sentence):
        read_prototypes(tmp_path / "file")


def test_initial_weights_are_checked_after_the_cast(tmp_path):
    initial = {"body.fc.weight": torch.zeros(2, 2), "head.fc.weight": torch.zeros(1, 2)}
    for value in (
        torch.full((2, 2), 1e300, dtype=torch.float64),
        torch.zeros(2, 2, dtype=torch.complex64),
    ):
        (tmp_path / "w.safetensors").write_bytes(save({"body.fc.weight": value}))
        with pytest.raises(
            ConfigError, match=r"have body\.fc\.weight with values that are not finite numbers"
        ):
            load_body(initial, tmp_path / "w.safetensors")


def test_inputs_are_checked_once_they_are_normalised(tmp_path):
    """Each number is finite, and so are mean and std; what they make is not."""
    np.savez(tmp_path / "own.npz", x=np.full((8, 2), 1e30, np.float32), y=np.arange(8) % 2)
    options = {
        "dataset": f"npz:{tmp_path / 'own.npz'}(std=1e-20)",
        "clients": 1,
        "partition": "iid",
    }
    with pytest.raises(DataError, match="inputs that are not finite once mean and std are applied"):
        Experiment.prepare(configure(options)[0])


@pytest.mark.parametrize("shape", [(6, 0), (6, 0, 4), (6, 3, 0, 4)])
def test_inputs_without_a_value_are_refused(tmp_path, shape):
    np.savez(tmp_path / "own.npz", x=np.zeros(shape), y=np.array([0, 1] * 3))
    with pytest.raises(DataError, match="which hold no value"):
        plugins.build("dataset", Part(f"npz:{tmp_path / 'own.npz'}"), DataFolders())


def renamed(tree: Tree, old: str, new: str) -> Tree:
    return {new if name == old else name: value for name, value in tree.items()}


#: The names of the tensors of the clients' uploads.
SUMS = "uploads.prototypes/sums/prototypes"
WEIGHT = "uploads.prototypes/weight"

SPOILT = {
    "a flipped letter": lambda t: renamed(
        t, "client.0.body.fc1.weight", "client.0.body.fc1.wmight"
    ),
    "a client too many": lambda t: t | {"client.9.body.fc1.weight": torch.zeros(1)},
    "another shape": lambda t: t | {"client.1.body.fc1.weight": torch.zeros(2, 2)},
    "another type": lambda t: t | {"client.1.body.fc1.bias": t["client.1.body.fc1.bias"].double()},
    "a server's name": lambda t: renamed(t, "server.known", "server.knwon"),
    "a server's shape": lambda t: t | {"server.prototypes": torch.zeros(3, 3)},
    "no ledger": lambda t: {name: value for name, value in t.items() if name != "ledger"},
    "another ledger": lambda t: t | {"ledger": torch.zeros(5, 4, dtype=torch.int64)},
    "another group": lambda t: t | {"servr.x": torch.zeros(1)},
    "uploads of nobody": lambda t: t | {SUMS: t[SUMS][:1]},
    "uploads without weights": lambda t: {name: v for name, v in t.items() if name != WEIGHT},
    "uploads of whole numbers": lambda t: t | {WEIGHT: t[WEIGHT].long()},
    "uploads of another group": lambda t: t | {"uploads.model/weight": t[WEIGHT]},
    "uploads of other counts": lambda t: t | {"uploads.prototypes/counts/holders": t[WEIGHT]},
    "uploads of other parts": lambda t: t | {"uploads.prototypes/others/a": t[WEIGHT]},
    "uploads of another size": lambda t: t | {SUMS: t[SUMS][..., :1]},
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


# --- JSON and TOML of the wrong kind

DEEP = "[" * 5000 + "]" * 5000


def stamped(content: dict) -> str:
    return json.dumps(content | {"sha256": hash_partition(content)})


def partition_with(run: Path, **changes) -> dict:
    content = json.loads((run / "partition.json").read_text())
    del content["sha256"]
    content["clients"][0] |= changes
    return content


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": [0.5]}, "client 0 must have a list of whole numbers as 'train', not 0.5"),
        ({"train": [1.0]}, "not 1.0"),
        ({"test": [True]}, "whole numbers as 'test', not True"),
        ({"test": ["1"]}, "not '1'"),
        ({"test": [None]}, "not None"),
        ({"test": [[1]]}, "whole numbers as 'test'"),
        ({"train": {"0": 1}}, "whole numbers as 'train'"),
        ({"train": None}, "whole numbers as 'train', not None"),
        ({"train": [-1]}, "names a train row out of range"),
        ({"train": [10**40]}, "names a train row out of range"),
        ({"classes": [1]}, "list of names as 'classes'"),
        ({"classes": "012"}, "list of names as 'classes'"),
        ({"labels": 7}, "text as 'labels', not 7"),
        ({"dataset": None}, "text as 'dataset', not None"),
    ],
)
def test_a_partition_with_a_right_hash_and_odd_contents_is_refused(run, changes, sentence):
    (run / "partition.json").write_text(stamped(partition_with(run, **changes)))
    with pytest.raises(DataError, match=sentence):
        reopen(RunFolder.open(run))


@pytest.mark.parametrize("version", [2, "1", True, None, [1]])
def test_a_partition_of_another_version_is_refused(run, version):
    (run / "partition.json").write_text(stamped(partition_with(run) | {"version": version}))
    with pytest.raises(DataError, match=r"has version .*; this fedproto reads version 1"):
        read_partition(run / "partition.json")


@pytest.mark.parametrize(
    "content", ["[]", "1", '"text"', "null", "{}", DEEP, b"\xff\xfe", '{"sha256": [1]}']
)
def test_what_is_no_partition_is_refused(tmp_path, content):
    path = tmp_path / "partition.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=r"is not a partition file|is not valid JSON"):
        read_partition(path)


@pytest.mark.parametrize("clients", [None, [], {}, [1], [[]], ["x"]])
def test_a_partition_without_clients_is_refused(tmp_path, clients):
    (tmp_path / "partition.json").write_text(stamped({"version": 1, "clients": clients}))
    with pytest.raises(DataError, match=r"'clients' must be a list|must be an object"):
        read_partition(tmp_path / "partition.json")


def test_an_empty_configuration_is_no_run(run):
    (run / "config.toml").write_text("")
    for read in (
        lambda: reopen(RunFolder.open(run)),
        lambda: read_run(run),
        lambda: Membership.of(RunFolder.open(run)),
    ):
        with pytest.raises(RunFolderError, match=r"config\.toml states no version"):
            read()
    (run / "config.toml").write_text("version = 1\n")
    for read in (
        lambda: reopen(RunFolder.open(run)),
        lambda: read_run(run),
        lambda: Membership.of(RunFolder.open(run)),
    ):
        with pytest.raises(RunFolderError, match=r"config\.toml is damaged: it lacks 'algorithm'"):
            read()


def test_deep_toml_is_refused(tmp_path):
    (tmp_path / "config.toml").write_text(f"a = {DEEP}")
    with pytest.raises(ConfigError, match="more than 100 nested brackets"):
        read_tables(tmp_path / "config.toml")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", DEEP.encode(), b"[1]", b"null", b"{}", b'{"rounds": "2"}']
)
@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl"])
def test_results_of_the_wrong_kind_are_refused(run, name, content):
    (run / name).write_bytes(content + b"\n")
    with pytest.raises(RunFolderError) as refused:
        read_run(run)
    assert name in str(refused.value) and len(str(refused.value).splitlines()) == 1


# --- absurd numbers


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clients", 10**12),
        ("dim", 10**12),
        ("threads", 10**9),
        ("rounds", 10**15),
        ("batch", 10**15),
        ("workers", 10**6),
    ],
)
def test_absurd_numbers_are_refused_before_memory_is_gone(key, value):
    with pytest.raises(
        ConfigError, match=f"{key} must be a whole number of at least 1 and at most"
    ):
        configure({key: value})


# --- CSV


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd", "-cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "\n=1"]
)
def test_a_text_is_no_formula(text):
    (row,) = csv.reader(io.StringIO(as_csv([[text, 1]]), newline=""))
    assert row == ["'" + text.replace("\r", " "), "1"]


@pytest.mark.parametrize("cell", [-1, -0.5, "-0.5", "+1e-3", "cat", "a=b", "", None, "'=1"])
def test_other_cells_stay_as_they_are(cell):
    assert make_harmless(cell) is cell


def test_a_class_name_of_a_figure_is_no_formula():
    canvas, _ = make_panel(1)
    figure = finish_figure(
        canvas,
        "name",
        "title",
        "caption",
        "alt",
        [["class", "accuracy"], ["=1+1", 0.5], ["-tea", -0.5]],
    )
    assert figure.csv == "class,accuracy\n'=1+1,0.5\n'-tea,-0.5\n"


def test_a_name_of_a_reproduced_table_is_no_formula():
    assert to_csv([{"method": "@fedproto", "mean": -1.5}]) == b"method,mean\n'@fedproto,-1.5\n"


# --- every entry of a run folder's files, damaged in many ways

WRONG = [
    None,
    True,
    -1,
    0,
    1.5,
    10**400,
    float("nan"),
    "",
    "x",
    "\ud800",
    [],
    [None],
    [[]],
    {},
    {"x": None},
]
TOML_WRONG = [
    "true",
    "-1",
    "0",
    "1.5",
    "1e999",
    "9" * 30,
    '""',
    '"x"',
    "[]",
    "[[1]]",
    "{}",
    "{x = 1}",
    "nonsense",
]


def places_of(value, path=()):
    """All paths into a JSON value; of a list, those into its first entry."""
    yield path
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from places_of(entry, (*path, key))
    elif isinstance(value, list) and value:
        yield from places_of(value[0], (*path, 0))


def damaged(value, path, how):
    """Return a copy of a JSON value whose entry at this path is `how(entry)`; deleted if `...`."""
    if not path:
        return how(value)
    copied = dict(value) if isinstance(value, dict) else list(value)
    changed = damaged(value[path[0]], path[1:], how)
    if changed is ...:
        del copied[path[0]]
    else:
        copied[path[0]] = changed
    return copied


def ways_to_damage():
    replaced = [lambda entry, wrong=wrong: wrong for wrong in WRONG]
    nested = [lambda entry: [entry], lambda entry: {"x": entry}, lambda entry: [entry, entry]]
    return [*replaced, *nested, lambda entry: ...]


def read_everything(run: Path) -> None:
    """What `report`, `members`, `resume` and `predict` read; each may refuse, in one sentence."""
    folder = RunFolder(run)

    def report() -> None:
        group_runs([read_run(run)])

    def members() -> None:
        Membership.of(folder).prototypes()

    def resume() -> None:
        folder.result()
        folder.metrics()
        reopen(folder)

    for read in (report, members, resume, lambda: load_client(run, 0)):
        try:
            read()
        except FedProtoError as error:
            assert len(str(error).splitlines()) == 1, f"not one sentence: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl"])
def test_every_damaged_entry_of_results_is_refused_or_read(run, name):
    """All of them: a wrong value, or none, in every place; by `report`, which reads most."""
    path = run / name
    *before, last = (
        path.read_text().strip().splitlines() if name == "metrics.jsonl" else [path.read_text()]
    )
    content = json.loads(last)
    for place in places_of(content):
        for how in ways_to_damage():
            changed = damaged(content, place, how)
            if changed is ...:
                continue
            path.write_text("\n".join([*before, json.dumps(changed)]) + "\n")
            try:
                group_runs([read_run(run)])
            except FedProtoError as error:
                assert len(str(error).splitlines()) == 1


@settings(max_examples=20)
@given(data=st.data())
def test_a_damaged_run_folder_is_refused_in_one_sentence(finished, tmp_path_factory, data):
    """A partition whose hash is right, results and metrics."""
    run = Path(shutil.copytree(finished, tmp_path_factory.mktemp("damaged") / "run"))
    name = data.draw(st.sampled_from(["partition.json", "result.json", "metrics.jsonl"]))
    text = (run / name).read_text()
    content = json.loads(text.splitlines()[0] if name == "metrics.jsonl" else text)
    content.pop("sha256", None)
    place = data.draw(st.sampled_from(list(places_of(content))))
    changed = damaged(content, place, data.draw(st.sampled_from(ways_to_damage())))
    if name == "partition.json" and isinstance(changed, dict):
        changed = json.loads(stamped(changed))
    (run / name).write_text("" if changed is ... else json.dumps(changed) + "\n")
    read_everything(run)


@settings(max_examples=20)
@given(data=st.data())
def test_a_damaged_configuration_is_refused_in_one_sentence(finished, tmp_path_factory, data):
    run = Path(shutil.copytree(finished, tmp_path_factory.mktemp("damaged") / "run"))
    lines = (run / "config.toml").read_text().splitlines()
    place = data.draw(st.integers(0, len(lines) - 1))
    key, equals, _ = lines[place].partition(" = ")
    wrong = data.draw(st.sampled_from([None, *TOML_WRONG]))
    lines[place] = f"{key} = {wrong}" if equals and wrong is not None else ""
    (run / "config.toml").write_text("\n".join(lines))
    read_everything(run)


@pytest.mark.parametrize("of", [DEEP, "[]", "1", "{}", "no JSON"])
def test_members_with_odd_metadata_are_refused(run, of):
    bank = Membership.of(RunFolder.open(run))
    bank.save(RunFolder.open(run))
    assert list(Membership.of(RunFolder.open(run)).members) == ["0", "1"]
    tensors = load_file(run / "members.safetensors")
    (run / "members.safetensors").write_bytes(save(tensors, {"fedproto": of}))
    with pytest.raises(
        DataError, match=r"members\.safetensors is not (valid JSON|a file of prototypes)"
    ):
        Membership.of(RunFolder.open(run))


@pytest.mark.parametrize("wrong", [None, 1, "x", [], [1], {}, {"member": "0"}])
@pytest.mark.parametrize("key", ["members", "changes", "algorithm"])
def test_members_with_an_odd_entry_are_refused_or_read(run, key, wrong):
    bank = Membership.of(RunFolder.open(run))
    of = {
        "algorithm": str(bank.algorithm),
        "members": list(bank.members),
        "changes": [],
        key: wrong,
    }
    bank.save(RunFolder.open(run))
    tensors = load_file(run / "members.safetensors")
    metadata = {"classes": "\n".join(bank.classes), "of": json.dumps(of)}
    (run / "members.safetensors").write_bytes(save(tensors, metadata))
    try:
        Membership.of(RunFolder.open(run)).prototypes()
    except FedProtoError as error:
        assert len(str(error).splitlines()) == 1


def test_an_undamaged_folder_is_read(finished):
    assert group_runs([read_run(finished)])[0].runs[0].path == finished
    assert len(Membership.of(RunFolder(finished)).members) == 2
    assert load_client(finished, 1).about["client"] == 1


def test_a_width_that_torch_cannot_count_to_is_one_sentence():
    """Torch raises TypeError for it, but RuntimeError for a width that only lacks the memory."""
    with pytest.raises(ConfigError, match=r"model mlp.* cannot be built") as refused:
        fedproto.run(dataset="digits", model=f"mlp(hidden={'9' * 30})", rounds=1)
    assert len(str(refused.value).splitlines()) == 1
