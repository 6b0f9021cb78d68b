"""Chars74K as an npz file, whole and damaged, and the real one."""

import numpy as np
import pytest
from helpers.data_files import REAL_DATA
from helpers.sources import build, images, refusal

pytestmark = pytest.mark.usefixtures("only_own_files")


# --- chars74k


def write_chars74k(folder, typefaces=54, **changes):
    """Two classes in each font; four consecutive fonts, counted from 1, are one typeface."""
    fonts = np.repeat(np.arange(1, 4 * typefaces + 1), 2)
    arrays = {
        "x": images(len(fonts), 4, 4),
        "y": np.tile([0, 61], len(fonts) // 2),
        "font_index": fonts,
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "chars74k_fnt_28.npz", **(arrays | changes))


@pytest.mark.parametrize("place", ["chars74k-fnt", "."])
def test_chars74k_tests_on_the_last_fifty_typefaces(tmp_path, place):
    write_chars74k(tmp_path / place)
    source = build("chars74k", tmp_path)
    assert sorted(set(source.train.writer)) == [0, 1, 2, 3]
    assert sorted(set(source.test.writer)) == list(range(4, 54))
    assert len(source.train.y) == 4 * 4 * 2 and len(source.test.y) == 50 * 4 * 2


def test_chars74k_classes_are_digits_capitals_and_small_letters(tmp_path):
    write_chars74k(tmp_path)
    source = build("chars74k", tmp_path)
    assert len(source.classes) == 62
    assert [source.classes[label] for label in (0, 9, 10, 35, 36, 61)] == [
        "0",
        "9",
        "A",
        "Z",
        "a",
        "z",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y": np.full(432, 62)}, "has a label 62, out of range: there are 62 classes, 0 to 61"),
        ({"y": np.full(432, "A")}, "y must be a list of whole numbers"),
        ({"y": np.zeros(431, int)}, "has 432 inputs but 431 labels"),
        ({"font_index": np.ones(433, int)}, "has 432 labels but 433 client or writer ids"),
        ({"font_index": np.ones(431, int)}, "has 432 labels but 431 client or writer ids"),
    ],
)
def test_an_unusable_chars74k_file_is_refused(tmp_path, changes, words):
    write_chars74k(tmp_path, **changes)
    assert words in refusal("chars74k", tmp_path)


def test_chars74k_without_fonts_is_refused(tmp_path):
    np.savez(tmp_path / "chars74k_fnt_28.npz", x=images(2, 4, 4), y=np.array([0, 1]))
    assert "holds no array 'font_index'" in refusal("chars74k", tmp_path)


# --- the real files, where they lie


real_chars = pytest.mark.skipif(
    not (REAL_DATA / "chars74k-fnt").exists(), reason="no Chars74K in $FEDPROTO_DATA"
)


@real_chars
def test_real_chars74k_has_62_classes_and_254_typefaces():
    source = build("chars74k", REAL_DATA)
    assert set(source.train.y) == set(source.test.y) == set(range(62))
    assert len(set(source.train.writer)) == 204 and len(set(source.test.writer)) == 50
    assert not set(source.train.writer) & set(source.test.writer)
