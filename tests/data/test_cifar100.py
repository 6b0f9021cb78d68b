"""CIFAR-100 against tiny files written byte by byte."""

import pickle

import pytest
from helpers.data_files import CIFAR100_META, write
from helpers.sources import build, images, refusal

pytestmark = pytest.mark.usefixtures("only_own_files")


def cifar100_part(seed, fine=(0, 99), coarse=(4, 19)):
    return {
        b"data": images(2, 3072, seed=seed),
        b"fine_labels": list(fine),
        b"coarse_labels": list(coarse),
    }


def write_cifar100(folder, changes=None):
    whole = {"meta": CIFAR100_META, "train": cifar100_part(0), "test": cifar100_part(1)}
    for name, content in (whole | (changes or {})).items():
        write(
            folder / name,
            content if isinstance(content, bytes) else pickle.dumps(content, protocol=2),
        )


@pytest.mark.parametrize("place", ["cifar100/cifar-100-python", "cifar-100-python"])
def test_cifar100_reads_images_labels_and_names(tmp_path, place):
    write_cifar100(tmp_path / place)
    source = build("cifar100", tmp_path)
    assert source.train.x.reshape(2, 3072).tolist() == images(2, 3072).tolist()
    assert source.train.x.shape == (2, 3, 32, 32) and source.test.y.tolist() == [0, 99]
    assert len(source.classes) == 100 and source.classes[99] == "fine 99"
    assert source.augment and source.model == "resnet18"


def test_cifar100_in_its_20_coarse_classes(tmp_path):
    write_cifar100(tmp_path / "cifar-100-python")
    source = build("cifar100", tmp_path, coarse="true")
    assert (
        source.train.y.tolist() == [4, 19]
        and source.classes[4] == "kind 4"
        and len(source.classes) == 20
    )


def test_cifar100_reads_names_as_python_2_wrote_them(tmp_path):
    """The real meta file: strings of Python 2, which are bytes."""
    texts = b"".join(
        b"U" + bytes([len(name)]) + name for name in CIFAR100_META[b"fine_label_names"]
    )
    meta = b"\x80\x02}U\x10fine_label_names](" + texts + b"es."
    write_cifar100(tmp_path / "cifar-100-python", {"meta": meta})
    assert build("cifar100", tmp_path).classes[42] == "fine 42"


GOOD = pickle.dumps(cifar100_part(0), protocol=2)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("train", b"", "is not a CIFAR-100 python file (or is damaged)"),
        ("train", GOOD[:-100], "is not a CIFAR-100 python file (or is damaged)"),
        ("train", [1], "it holds list, not a dict"),
        (
            "train",
            {b"data": images(2, 3072)},
            "CIFAR-100 python file (or is damaged): b'fine_labels'",
        ),
        (
            "train",
            cifar100_part(0) | {b"data": images(2, 3000)},
            "is not a CIFAR-100 python file (or is damaged)",
        ),
        (
            "test",
            cifar100_part(0, fine=(0, 100)),
            "a label 100, out of range: there are 100 classes",
        ),
        ("test", cifar100_part(0, fine=(0,)), "has 2 inputs but 1 labels"),
        ("meta", {}, "must hold a list fine_label_names of 100 names"),
        ("meta", {b"fine_label_names": [b"a"]}, "must hold a list fine_label_names of 100 names"),
        ("meta", CIFAR100_META | {b"fine_label_names": [b"twice"] * 100}, "names a class twice"),
    ],
)
def test_a_damaged_cifar100_file_is_refused(tmp_path, file, content, words):
    write_cifar100(tmp_path / "cifar-100-python", {file: content})
    assert words in refusal("cifar100", tmp_path)


@pytest.mark.parametrize("missing", ["train", "test", "meta"])
def test_a_missing_cifar100_file_is_named(tmp_path, missing):
    write_cifar100(tmp_path / "cifar-100-python")
    (tmp_path / "cifar-100-python" / missing).unlink()
    assert f"{missing} is missing: the folder must hold train, test and meta" in refusal(
        "cifar100", tmp_path
    )


def test_code_in_a_cifar100_pickle_is_refused(tmp_path):
    write_cifar100(tmp_path / "cifar-100-python", {"meta": b"cos\nsystem\n(S'true'\ntR."})
    assert "os.system, which a data file must not use" in refusal("cifar100", tmp_path)
