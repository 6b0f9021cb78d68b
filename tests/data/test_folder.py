"""Folders of images: what their levels mean, however deep they are."""

import os

import numpy as np
import pytest
from PIL import Image

from tests.helpers.image_files import write_dicom, write_image
from tests.helpers.sources import build, refusal

SITES = ("Köln", "Ulm")


def write_tree(root, *names):
    """Write an image per name, such as `cat/1/a.png`, each with other pixels."""
    for seed, name in enumerate(names):
        write_image(root / name, "L", 6, 6, seed)
    return f"folder:{root}"


def write_patients(root, patients=6, images=2, classes=("sick", "well")):
    """Images in class/patient/number.png; patients are numbered over all classes."""
    names = []
    for place, label in enumerate(classes):
        for patient in range(patients):
            number = place * patients + patient
            names.extend(f"{label}/p{number:02}/{image}.png" for image in range(images))
    return write_tree(root, *names)


def groups_of(split):
    return set(split.group.tolist())


def test_folders_inside_the_classes_are_patients_who_stay_on_one_side(tmp_path):
    source = build(write_patients(tmp_path))
    assert source.classes == ("sick", "well")
    assert len(source.train.y) + len(source.test.y) == 24
    assert len(source.test.y)
    assert not groups_of(source.train) & groups_of(source.test)
    assert groups_of(source.train) | groups_of(source.test) == {f"p{n:02}" for n in range(12)}
    (notice,) = source.notices
    assert "each of these 12 is taken for a group, such as a patient" in notice
    assert source.train.writer is None


def test_train_and_test_may_be_nested_too(tmp_path):
    write_patients(tmp_path / "train")
    for label in ("sick", "well"):
        for patient in ("q1", "q2"):
            write_image(tmp_path / "test" / label / patient / "a.png", "L", 6, 6)
    source = build(f"folder:{tmp_path}")
    assert (len(source.train.y), len(source.test.y)) == (24, 4)
    assert groups_of(source.test) == {"q1", "q2"}


def test_a_patient_in_training_and_test_is_refused(tmp_path):
    write_patients(tmp_path / "train")
    write_patients(tmp_path / "test", patients=2)
    message = refusal(f"folder:{tmp_path}")
    assert "train and" in message and "both have images in a folder 'p00'" in message
    assert "set levels=class" in message
    assert build(f"folder:{tmp_path}", levels="class").train.group is None
    assert "p0" in refusal(f"folder:{tmp_path}", levels="class/group")


@pytest.mark.parametrize(
    "names",
    [
        ("cat/a.png", "cat/b.png", "dog/1/a.png", "dog/2/a.png"),  # some are in no folder
        (
            "cat/all/a.png",
            "cat/all/b.png",
            "dog/all/a.png",
            "dog/all/b.png",
        ),  # one folder per class
    ],
)
def test_other_folders_inside_the_classes_mean_nothing(tmp_path, names):
    source = build(write_tree(tmp_path, *names))
    assert source.train.group is None and source.notices == ()
    assert len(source.train.y) + len(source.test.y) == 4


def test_deeper_folders_are_read_in_the_order_of_their_paths(tmp_path):
    names = ("a/z.png", "a/b/c/d/x.png", "b/y.png", "b/w/v.png", "b/x.png")
    write_tree(tmp_path / "train", *names)
    write_tree(tmp_path / "test", "a/1.png")
    source = build(f"folder:{tmp_path}")
    assert source.train.y.tolist() == [0, 0, 1, 1, 1]
    for row, name in enumerate(("a/b/c/d/x.png", "a/z.png", "b/w/v.png", "b/x.png", "b/y.png")):
        with Image.open(tmp_path / "train" / name) as image:
            assert (source.train.x[row] == np.asarray(image)).all()


def test_sites_are_clients_by_name(tmp_path):
    names = [f"{site}/{label}/{n}.png" for site in SITES for label in "ab" for n in range(5)]
    source = build(write_tree(tmp_path, *names), levels="client/class")
    assert source.classes == ("a", "b")
    assert set(source.train.writer.tolist()) == set(SITES)
    assert source.train.group is None


def test_sites_classes_and_patients(tmp_path):
    names = []
    for site in SITES:
        for label in "ab":
            for patient in range(4):
                names.extend(f"{site}/{label}/{site}{label}{patient}/{n}.png" for n in range(2))
    source = build(write_tree(tmp_path, *names), levels="client/class/group")
    for split in (source.train, source.test):
        for writer, label, group in zip(split.writer, split.y, split.group, strict=True):
            assert group.startswith(writer + "ab"[label])
    assert not groups_of(source.train) & groups_of(source.test)


def test_patients_may_be_outside_of_the_classes(tmp_path):
    names = [f"p{patient}/{label}/a.png" for patient in range(6) for label in "ab"]
    source = build(write_tree(tmp_path, *names), levels="group/class")
    assert source.classes == ("a", "b")
    assert not groups_of(source.train) & groups_of(source.test)


def test_images_that_are_not_deep_enough_are_refused(tmp_path):
    name = write_tree(tmp_path, "cat/1/a.png", "cat/b.png", "dog/1/a.png")
    message = refusal(name, levels="class/group")
    assert "cat/b.png is in no folder of a group, but levels=class/group says" in message
    assert message.endswith("CLASS/GROUP")


@pytest.mark.parametrize(
    "levels", ["", "group", "client", "class/class", "class/patient", "class,group", "/class"]
)
def test_wrong_levels_are_refused(tmp_path, levels):
    message = refusal(write_tree(tmp_path, "cat/a.png"), levels=levels)
    assert "levels must name what each level of folders is, such as class" in message


def test_a_link_that_leads_back_is_not_followed(tmp_path):
    name = write_tree(tmp_path, "cat/1/a.png", "cat/1/b.png", "dog/1/a.png", "dog/1/b.png")
    os.symlink(tmp_path / "cat", tmp_path / "cat" / "1" / "again")
    source = build(name)
    assert len(source.train.y) + len(source.test.y) == 4


def test_hidden_folders_are_not_read_however_deep(tmp_path):
    name = write_tree(tmp_path, "cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png")
    write_tree(tmp_path, "cat/.git/x.png", "cat/__MACOSX/x.png")
    source = build(name)
    assert len(source.train.y) + len(source.test.y) == 4


def test_every_kind_of_file_may_be_mixed(tmp_path):
    for label in ("cat", "dog"):
        write_image(tmp_path / label / "a.png", "RGB", 6, 6)
        write_image(tmp_path / label / "b.TIFF", "L", 6, 6)
        write_dicom(tmp_path / label / "c.dcm", np.arange(36, dtype=np.int16).reshape(6, 6))
    source = build(f"folder:{tmp_path}")
    assert source.train.x[:].shape == (4, 3, 6, 6) and source.train.x.dtype == np.uint16


def test_validation_images_beside_test_images_are_for_validation(tmp_path):
    for part, count in (("train", 4), ("val", 3), ("test", 2)):
        write_tree(tmp_path / part, *(f"{label}/{n}.png" for label in "ab" for n in range(count)))
    source = build(f"folder:{tmp_path}")
    splits = (source.train, source.validation, source.test)
    assert [len(split.y) for split in splits] == [8, 6, 4]
    assert source.validation.x[:].shape == (6, 6, 6)
    write_tree(tmp_path / "val", "c/1.png")
    assert "val/c holds a class of which" in refusal(f"folder:{tmp_path}")
