"""Images that a csv file lists."""

import numpy as np
import pytest
from PIL import Image

from tests.helpers.image_files import write_dicom, write_image
from tests.helpers.sources import build, refusal


def write_list(root, rows, header="path,label", name="list.csv"):
    """Write a list and every image that it names."""
    for seed, row in enumerate(rows):
        path = root / row.split(",")[0]
        if not path.exists():
            write_image(path, "L", 6, 6, seed)
    (root / name).write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return f"images:{root / name}"


def cats_and_dogs(count=5):
    return [f"scans/{label}{n}.png,{label}" for n in range(count) for label in ("dog", "cat")]


def test_a_list_names_images_and_labels(tmp_path):
    source = build(write_list(tmp_path, cats_and_dogs()))
    assert source.classes == ("cat", "dog")
    assert (len(source.train.y), len(source.test.y)) == (8, 2)
    assert source.train.writer is None and source.train.group is None
    assert source.preprocessing.shape == (1, 6, 6) and source.scale == 255


def test_a_list_may_have_clients_groups_and_sets(tmp_path):
    rows = []
    for number in range(12):
        part = ("train", "Test", "val")[number // 4]
        site = ("Ulm", "Köln")[number % 2]
        rows.append(f"{number}.png,{'ab'[number % 4 // 2]},{site},p{number},{part}")
    source = build(write_list(tmp_path, rows, "file,class,client,patient,split"))
    assert source.train.y.tolist() == [0, 0, 1, 1]
    assert source.train.writer.tolist() == ["Ulm", "Köln", "Ulm", "Köln"]
    assert source.train.group.tolist() == ["p0", "p1", "p2", "p3"]
    assert source.test.group.tolist() == ["p4", "p5", "p6", "p7"]
    assert source.validation.group.tolist() == ["p8", "p9", "p10", "p11"]
    for row, number in enumerate((4, 5, 6, 7)):
        with Image.open(tmp_path / f"{number}.png") as image:
            assert (source.test.x[row] == np.asarray(image)).all()


def test_columns_can_be_named_and_others_are_left_alone(tmp_path):
    rows = [f"{n}.png,{n % 2},free text,{'xy'[n % 2]},{n % 3}" for n in range(12)]
    name = write_list(tmp_path, rows, "scan,ward,remark,finding,who")
    source = build(name, image="scan", label="finding", client="ward", group="who")
    assert source.classes == ("x", "y")
    assert set(source.train.writer.tolist()) <= {"0", "1"}
    assert not set(source.train.group.tolist()) & set(source.test.group.tolist())


def test_semicolons_and_dicom_files(tmp_path):
    for number in range(4):
        pixels = np.arange(36, dtype=np.int16).reshape(6, 6) * (number + 1)
        write_dicom(tmp_path / f"IM{number}", pixels)
    (tmp_path / "list.csv").write_text(
        "path;label\n" + "".join(f"IM{n};{'ab'[n % 2]}\n" for n in range(4))
    )
    source = build(f"images:{tmp_path}/list.csv", window="50.5,101")
    assert source.window == (50.5, 101.0) and source.scale == 65535
    assert source.train.x[:].max() == 65535


def test_a_list_as_pandas_and_older_programs_write_it(tmp_path):
    """With an index, and in another encoding."""
    write_list(tmp_path, [f"{number}.png,x" for number in range(4)])
    rows = [f"{number},{number}.png,{('Öl', 'Weiß')[number % 2]}" for number in range(4)]
    (tmp_path / "list.csv").write_text("\n".join([",path,label", *rows]), encoding="latin-1")
    name = f"images:{tmp_path}/list.csv"
    assert build(name, text_encoding="latin-1").classes == ("Weiß", "Öl")
    assert "text_encoding=latin-1" in refusal(name)
    assert "klingon" in refusal(name, text_encoding="klingon")


@pytest.mark.parametrize("written", ["../x.png", "{outside}", "a/../../x.png"])
def test_paths_outside_of_the_list_are_refused_unless_allowed(tmp_path, written):
    outside = write_image(tmp_path / "x.png", "L", 6, 6)
    rows = [*cats_and_dogs(), written.format(outside=outside) + ",cat"]
    (tmp_path / "own").mkdir()
    write_list(tmp_path / "own", cats_and_dogs())
    (tmp_path / "own" / "list.csv").write_text("\n".join(["path,label", *rows]))
    name = f"images:{tmp_path}/own/list.csv"
    message = refusal(name)
    assert "list.csv, line 12 names" in message
    assert "outside of the list's folder" in message and "outside=true" in message
    source = build(name, outside=True)
    assert len(source.train.y) + len(source.test.y) == 11


def test_an_absolute_path_inside_the_folder_is_fine(tmp_path):
    inside = write_image(tmp_path / "x.png", "L", 6, 6)
    write_list(tmp_path, cats_and_dogs())
    with (tmp_path / "list.csv").open("a") as file:
        file.write(f"{inside},cat\n")
    source = build(f"images:{tmp_path}/list.csv")
    assert len(source.train.y) + len(source.test.y) == 11


def test_missing_files_are_broken_ones(tmp_path):
    name = write_list(tmp_path, cats_and_dogs())
    (tmp_path / "scans" / "cat0.png").unlink()
    (tmp_path / "scans" / "dog1.png").write_bytes(b"no image")
    message = refusal(name)
    assert message.startswith("2 of 10 image files cannot be used: ")
    assert "cat0.png cannot be read: No such file" in message
    source = build(name, broken="skip")
    assert len(source.train.y) + len(source.test.y) == 8
    assert source.notices[0].startswith("2 of 10 image files were skipped")


@pytest.mark.parametrize(
    ("header", "rows", "words"),
    [
        ("label,kind", ["a,b"], "has no column of images: call it 'path', or name it with image"),
        ("path,kind", ["a.png,b"], "has no column of labels: call it 'label', or name it with"),
        ("path,label", [], "holds no row below its header"),
        ("path,label", ["a.png,"], "line 2 has no label: fill in column 'label'"),
        ("path,label", [",cat"], "line 2 has no image: fill in column 'path'"),
        ("path,label,client", ["a.png,cat,"], "line 2 has no client: fill in column 'client'"),
        ("path,label,split", ["a.png,cat,dev"], "has the split 'dev', but train, test or val"),
        ("path,label,split", ["a.png,cat,test"], "lists no image for training"),
        ("path,label", ["a.png,cat,1"], "line 2 has 3 values"),
        ("path,label", ["a.png,cat", "b/../a.png,dog"], "'b/../a.png', which line 2 names, too"),
    ],
)
def test_lists_that_are_refused(tmp_path, header, rows, words):
    (tmp_path / "list.csv").write_text("\n".join([header, *rows]) + "\n")
    assert words in refusal(f"images:{tmp_path}/list.csv")


def test_options_that_are_refused(tmp_path):
    name = write_list(tmp_path, cats_and_dogs())
    for option in ("image", "label", "client", "group", "split"):
        assert f"unknown column of {tmp_path}/list.csv 'kind'" in refusal(name, **{option: "kind"})
    assert "outside must be true or false" in refusal(name, outside="perhaps")
    assert "dataset 'images' needs a path" in refusal("images")
    assert "does not exist" in refusal(f"images:{tmp_path}/other.csv")


def test_a_class_that_only_the_test_set_has_is_refused(tmp_path):
    rows = ["a.png,cat,train", "b.png,cat,test", "c.png,owl,test"]
    message = refusal(write_list(tmp_path, rows, "path,label,split"))
    assert "c.png is of the class 'owl', of which the training set has no image" in message


def test_a_patient_in_two_sets_is_refused(tmp_path):
    rows = ["a.png,cat,train,p1", "b.png,cat,test,p1"]
    message = refusal(write_list(tmp_path, rows, "path,label,split,group"))
    assert "'p1'" in message
