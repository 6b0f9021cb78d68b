"""Image files of every kind, written by pillow and pydicom and read back."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedproto.data.shared.dicom import apply_window
from fedproto.data.shared.images import (
    ImageFile,
    ImageFormat,
    describe_broken,
    examine,
    read_header,
    read_images,
)
from fedproto.errors import DataError, MissingExtra
from fedproto.inference.input_files import read_inputs
from tests.helpers.data_files import encode_image
from tests.helpers.image_files import PILLOW_KINDS, random_pixels, write_dicom, write_image
from tests.helpers.sources import build, refusal


def read(path, mode="L", bits=16, size=None, **options):
    """One image as an array, in its own size unless another is given."""
    wanted = size or read_header(path, str(path)).size
    format = ImageFormat(wanted, mode, bits, resize=size is not None, **options)
    return read_images([ImageFile(path, str(path))], format)[0]


def unreadable(path):
    with pytest.raises(DataError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- 16 bits


@pytest.mark.parametrize(("end", "mode"), [("png", "I;16"), ("tif", "I;16"), ("tif", "I;16B")])
def test_sixteen_bits_are_kept(tmp_path, end, mode):
    path = write_image(tmp_path / f"a.{end}", mode, 5, 7)
    assert read_header(path, "a") == ((5, 7), True, 16, False)
    assert (read(path) == random_pixels(5, 7, 16)).all()


def test_a_data_set_with_one_image_of_sixteen_bits_has_them_all(tmp_path):
    """White stays white: 255 of 8 bits is 65535, and 1 is 257."""
    small = np.arange(16, dtype=np.uint8).reshape(4, 4) * 17
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for number in range(2):
            Image.fromarray(small).save(tmp_path / label / f"{number}.png")
    write_image(tmp_path / "cat" / "9.tif", "I;16", 4, 4)
    source = build(f"folder:{tmp_path}")
    assert source.scale == 65535 and source.train.x.dtype == np.uint16
    rows = np.arange(len(source.test.y))
    wanted = small.astype(np.float32) * 257 / 65535
    assert source.preprocessing.scale == 65535
    assert np.isclose(source.tensor(source.test, rows).numpy(), wanted).all(axis=(1, 2, 3)).any()
    assert source.tensor(source.train, np.arange(3)).max() <= 1


def test_sixteen_bits_are_resized_in_sixteen_bits(tmp_path):
    image = np.full((8, 8), 300, np.uint16)
    Image.fromarray(image).save(tmp_path / "a.png")
    assert (read(tmp_path / "a.png", size=(3, 5)) == 300).all()  # 8 bits would make 257 of it
    Image.fromarray(image.astype(np.uint8) + np.uint8(7)).save(tmp_path / "b.png")
    assert read(tmp_path / "b.png", bits=8, size=(3, 5)).dtype == np.uint8


@given(st.integers(0, 65535))
def test_eight_bits_survive_sixteen(value):
    from fedproto.data.shared.images import _change_bits

    byte = np.array([[value % 256]], np.uint8)
    assert (_change_bits(_change_bits(byte, 16), 8) == byte).all()
    deep = np.array([[value]], np.uint16)
    assert abs(int(_change_bits(deep, 8)[0, 0]) - value / 257) <= 0.5


def test_sixteen_bits_are_kept_in_tables_of_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pixels = [random_pixels(6, 6, 16, seed) for seed in range(4)]
    columns = {"image": [encode_image(each) for each in pixels], "label": ["a", "a", "b", "b"]}
    table = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    for part in ("train", "test"):
        table.to_parquet(tmp_path / "own" / f"{part}-00000-of-00001.parquet")
    source = build(f"hf:{tmp_path}/own")
    assert source.scale == 65535
    assert (source.test.x[:] == np.stack(pixels)).all()


# --- TIFF


def test_twelve_bits_of_a_tiff_file_reach_white(tmp_path):
    """Pillow reads packed 12 bits, but writes none: two pixels are three bytes."""
    content = bytes([0xFF, 0xFF, 0xFF, 0x80, 0x00, 0x00])  # 4095, 4095, 2048, 0
    entries = {256: 4, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 6}
    directory = b"".join(
        tag.to_bytes(2, "little")
        + (3).to_bytes(2, "little")
        + (1).to_bytes(4, "little")
        + value.to_bytes(4, "little")
        for tag, value in entries.items()
    )
    start = 8 + len(content)
    head = b"II*\0" + start.to_bytes(4, "little")
    count = len(entries).to_bytes(2, "little")
    (tmp_path / "a.tif").write_bytes(head + content + count + directory + bytes(4))
    assert read(tmp_path / "a.tif").tolist() == [[65535, 65535, round(2048 * 65535 / 4095), 0]]


def test_zero_is_white_where_a_tiff_file_says_so(tmp_path):
    pixels = random_pixels(4, 4, 16)
    Image.fromarray(pixels).save(tmp_path / "a.tif", tiffinfo={262: 0})
    with Image.open(tmp_path / "a.tif") as image:
        assert image.tag_v2[262] == 0
    assert (read(tmp_path / "a.tif") == 65535 - pixels).all()


def test_a_tiff_file_of_several_pages_is_refused(tmp_path):
    pages = [Image.fromarray(random_pixels(4, 4, seed=seed)) for seed in range(3)]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    assert "a.tif has 3 pages, but one image per file is needed" in unreadable(tmp_path / "a.tif")


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_numbers_without_a_white_are_refused(tmp_path, kind):
    Image.fromarray(np.ones((4, 4), kind)).save(tmp_path / "a.tif")
    assert "of which none is known to be white: save it with 8 or 16 bits" in unreadable(
        tmp_path / "a.tif"
    )


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_a_truncated_tiff_file_is_refused(tmp_path, share):
    path = write_image(tmp_path / "a.tif", "I;16", 40, 40)
    path.write_bytes(path.read_bytes()[: int(share * len(path.read_bytes()))])
    assert "a.tif is" in unreadable(path)


# --- DICOM


def test_a_grey_dicom_file_without_a_window_spreads_its_values(tmp_path):
    values = np.array([[-1000, 0], [1000, 3000]], np.int16)
    path = write_dicom(tmp_path / "a.dcm", values)
    assert read_header(path, "a") == ((2, 2), True, 16, False)
    assert read(path).tolist() == [[0, 16384], [32768, 65535]]  # quarters, rounded


def test_slope_and_intercept_come_before_the_window(tmp_path):
    """Stored 0, 500, 1000 are -1000, 0, 1000 Hounsfield units; the window is 0 +- 1000 of these."""
    stored = np.array([[0, 500, 1000]], np.uint16)
    path = write_dicom(
        tmp_path / "a.dcm",
        stored,
        RescaleSlope=2,
        RescaleIntercept=-1000,
        WindowCenter=0.5,
        WindowWidth=2001,
    )
    assert read(path).tolist() == [[0, 32768, 65535]]


def test_the_option_replaces_the_window_of_the_file(tmp_path):
    stored = np.array([[0, 100, 200, 300]], np.int16)
    path = write_dicom(tmp_path / "a.dcm", stored, WindowCenter=1000, WindowWidth=10)
    assert read(path).tolist() == [[0, 0, 0, 0]]
    assert read(path, window=(150.5, 101)).tolist() == [[0, 0, 65535, 65535]]
    assert read(path, window=(150.5, 201)).tolist() == [[0, 16384, 49151, 65535]]


def test_the_first_of_several_windows_is_taken_and_an_impossible_one_is_not(tmp_path):
    stored = np.array([[0, 100, 200]], np.int16)
    several = write_dicom(tmp_path / "a.dcm", stored, WindowCenter=[100.5, 7], WindowWidth=[201, 3])
    assert read(several).tolist() == [[0, 32768, 65535]]
    none = write_dicom(tmp_path / "b.dcm", stored, WindowCenter=100, WindowWidth=0)
    assert read(none).tolist() == [[0, 32768, 65535]]


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_windows_are_those_of_pydicom(function):
    from pydicom.dataset import Dataset
    from pydicom.pixels import apply_windowing

    header = Dataset()
    header.WindowCenter = 40
    header.WindowWidth = 400
    header.VOILUTFunction = function
    header.BitsStored = 16
    header.PixelRepresentation = 1
    header.PhotometricInterpretation = "MONOCHROME2"
    values = np.linspace(-1000, 1000, 41).astype(np.int16)
    theirs = apply_windowing(values, header)
    low, high = -(2**15), 2**15 - 1
    ours = apply_window(values.astype(float), (40, 400), function)
    assert np.allclose(ours, (theirs - low) / (high - low), atol=1e-9)


def test_a_window_of_one_value_is_a_step():
    assert apply_window(np.array([2.0, 3.0, 4.0]), (3.5, 1)).tolist() == [0, 0, 1]


def test_monochrome1_is_inverted(tmp_path):
    stored = np.array([[0, 50, 100]], np.uint8)
    path = write_dicom(tmp_path / "a.dcm", stored, PhotometricInterpretation="MONOCHROME1")
    assert read(path).tolist() == [[65535, 32768, 0]]


def test_padding_does_not_widen_the_range(tmp_path):
    stored = np.array([[-2000, 0, 100]], np.int16)
    path = write_dicom(tmp_path / "a.dcm", stored, PixelPaddingValue=-2000)
    assert read(path).tolist() == [[0, 0, 65535]]


def test_an_image_of_one_value_is_black(tmp_path):
    assert not read(write_dicom(tmp_path / "a.dcm", np.full((3, 3), 9, np.uint16))).any()


def test_colours_of_a_dicom_file_are_bytes(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
    path = write_dicom(tmp_path / "a.dcm", colours)
    assert read_header(path, "a") == ((4, 5), False, 8, False)
    assert (read(path, "RGB", 8) == colours.transpose(2, 0, 1)).all()
    grey = np.asarray(Image.fromarray(colours).convert("L"))
    assert (read(path, "L", 8) == grey).all()


def test_a_dicom_file_of_several_frames_is_refused(tmp_path):
    pixels = np.zeros((4, 4), np.uint8)
    path = write_dicom(tmp_path / "a.dcm", pixels, NumberOfFrames=3, PixelData=bytes(48))
    assert "a.dcm holds 3 frames, but one image per file is needed" in unreadable(path)


def without_image(path):
    write_dicom(path, np.zeros((4, 4), np.uint8))
    from pydicom import dcmread

    header = dcmread(path)
    del header.Rows
    header.save_as(path)


def without_pixels(path):
    write_dicom(path, np.zeros((4, 4), np.uint8), PixelData=bytes(3))


def cut_off(path):
    write_dicom(path, np.zeros((40, 40), np.uint8))
    path.write_bytes(path.read_bytes()[:900])


def other_bytes(path):
    path.write_bytes(b"hello" * 100)


@pytest.mark.parametrize("write", [without_image, without_pixels, cut_off, other_bytes])
def test_dicom_files_that_are_refused(tmp_path, write):
    write(tmp_path / "a.dcm")
    assert "a.dcm is" in unreadable(tmp_path / "a.dcm")


def test_dicom_files_need_no_ending(tmp_path):
    """Scanners call them IM0001, or by an identifier of numbers and points."""
    values = random_pixels(4, 4, 16)
    for label in ("sick", "well"):
        for number in range(3):
            write_dicom(tmp_path / label / f"IM{number:04}", values)
        write_dicom(tmp_path / label / "1.2.840.10008.5", values)
        (tmp_path / label / "README").write_text("not an image")
        (tmp_path / label / "notes.2024").write_text("not an image")
    source = build(f"folder:{tmp_path}")
    assert len(source.train.y) + len(source.test.y) == 8
    assert source.train.x[:].shape[1:] == (4, 4)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    write_dicom(tmp_path / "cat" / "a.dcm", random_pixels(4, 4))
    for name in list(sys.modules):
        if name == "pydicom" or name.startswith("pydicom."):
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(MissingExtra, match=r"needs the package 'pydicom': pip install .*dicom"):
        build(f"folder:{tmp_path}")


@given(
    st.sampled_from(["a.dcm", "a.tif", "a.png"]),
    st.integers(0, 2**32),
    st.integers(1, 255),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_is_read_or_refused_in_one_sentence(
    tmp_path_factory, name, place, change, cut
):
    path = tmp_path_factory.getbasetemp() / f"damaged-{name}"
    if name == "a.dcm":
        write_dicom(path, random_pixels(6, 6, 16), WindowCenter=7, WindowWidth=9, RescaleSlope=2)
    else:
        write_image(path, "I;16", 6, 6)
    content = bytearray(path.read_bytes())
    place %= len(content)
    content[place] ^= change
    path.write_bytes(content[:place] if cut else content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            read(path, size=(6, 6))
        except DataError as error:
            assert path.name in str(error) and "\n" not in str(error)


# --- the same for new images


def everything_that_is_read():
    return [*PILLOW_KINDS, ("dcm", "grey"), ("dcm", "window"), ("dcm", "inverted"), ("dcm", "RGB")]


def write_any(path, mode, seed):
    if path.suffix != ".dcm":
        return write_image(path, mode, 8, 6, seed)
    if mode == "RGB":
        colours = np.random.default_rng(seed).integers(0, 256, (8, 6, 3), np.uint8)
        return write_dicom(path, colours)
    elements = {
        "grey": {},
        "window": {"WindowCenter": 100, "WindowWidth": 30_000, "RescaleSlope": 1.5},
        "inverted": {"PhotometricInterpretation": "MONOCHROME1"},
    }
    pixels = random_pixels(8, 6, 16, seed).astype(np.int16)
    return write_dicom(path, pixels, **elements[mode])


def assert_predict_reads_the_same(source):
    """Every file of a source, read for `predict`, is the source's own row to the bit."""
    preprocessing = source.preprocessing
    for split in (source.train, source.test):
        rows = np.arange(len(split.y))
        wanted = source.tensor(split, rows)
        new = [found.x for path in split.paths for found in read_inputs(path, preprocessing)]
        assert preprocessing.normalise(np.stack(new)).equal(wanted)


@pytest.fixture
def paths_of_splits(monkeypatch):
    """Splits of image files that also know the paths of their rows."""
    from fedproto.data import Split
    from fedproto.data.shared.images import LazyImages

    original = LazyImages.__init__

    def keep_paths(self, paths, format):
        original(self, paths, format)
        self.paths = np.array(paths)

    select = Split.select_rows

    def select_paths(self, index):
        selected = select(self, index)
        selected.x.paths = self.x.paths[index]
        return selected

    monkeypatch.setattr(LazyImages, "__init__", keep_paths)
    monkeypatch.setattr(Split, "select_rows", select_paths)
    monkeypatch.setattr(
        Split, "paths", property(lambda self: map(Path, self.x.paths)), raising=False
    )


@pytest.mark.parametrize(("end", "mode"), everything_that_is_read())
@pytest.mark.parametrize("options", [{}, {"size": 5}, {"grey": True}, {"grey": False, "size": 9}])
def test_predict_takes_every_image_that_was_trained_on_to_the_bit(
    tmp_path, end, mode, options, paths_of_splits
):
    for label in ("cat", "dog"):
        for seed in range(2):
            write_any(tmp_path / label / f"{seed}.{end}", mode, seed)
    source = build(f"folder:{tmp_path}", mean="0.3", std="0.7", **options)
    assert_predict_reads_the_same(source)


@given(
    st.lists(st.sampled_from(everything_that_is_read()), min_size=3, max_size=6),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=6, max_size=6),
    st.sampled_from([None, True, False]),
)
@settings(max_examples=25)
def test_predict_takes_any_mixture_in_any_size(
    tmp_path_factory, paths_of_splits, kinds, sizes, grey
):
    """8 and 16 bits, grey and coloured, one pixel or a stripe: whatever `size` resizes."""
    folder = tmp_path_factory.mktemp("mixture")
    for number, ((end, mode), (height, width)) in enumerate(zip(kinds, sizes, strict=False)):
        path = folder / ("cat", "dog")[number % 2] / f"{number}.{end}"
        if end == "dcm":
            write_any(path, mode, number)
        else:
            write_image(path, mode, height, width, number)
    assert_predict_reads_the_same(build(f"folder:{folder}", size=7, grey=grey))


# --- broken files


def break_files(root, count):
    for number in range(count):
        (root / "cat" / f"broken{number:02}.png").write_bytes(b"no image")


def write_cats_and_dogs(root, count=4):
    for label in ("cat", "dog"):
        for number in range(count):
            write_image(root / label / f"{number}.png", "L", 40, 40, number)
    return f"folder:{root}"


def test_all_broken_files_are_reported_at_once(tmp_path):
    name = write_cats_and_dogs(tmp_path)
    break_files(tmp_path, 12)
    message = refusal(name)
    assert message.startswith("12 of 20 image files cannot be used: ")
    for number in range(10):
        assert f"broken{number:02}.png is not an image" in message
    assert "broken10.png" not in message
    assert message.endswith("; and 2 more; broken=skip goes on without them")


def test_one_broken_file_is_one_sentence(tmp_path):
    name = write_cats_and_dogs(tmp_path)
    break_files(tmp_path, 1)
    assert refusal(name).endswith("is not known; broken=skip goes on without it")


def test_broken_files_are_skipped_and_counted(tmp_path):
    name = write_cats_and_dogs(tmp_path)
    wanted = build(name)
    break_files(tmp_path, 3)
    truncated = write_image(tmp_path / "cat" / "broken.png", "L", 40, 40)
    truncated.write_bytes(truncated.read_bytes()[:600])  # its header is fine
    source = build(name, broken="skip")
    assert source.train.y.tolist() == wanted.train.y.tolist()
    assert (source.train.x[:] == wanted.train.x[:]).all()
    (notice,) = source.notices
    assert notice.startswith("4 of 12 image files were skipped: ") and "broken.png is" in notice
    assert wanted.notices == ()


def test_truncated_files_are_reported_together_when_they_are_read(tmp_path):
    name = write_cats_and_dogs(tmp_path)
    for number in range(3):
        path = tmp_path / "cat" / f"{number}.png"
        path.write_bytes(path.read_bytes()[:600])
    source = build(name)
    with pytest.raises(DataError, match=r"of 6 image files cannot be used: .*png is damaged"):
        source.train.x[:]


def test_nothing_but_broken_files_is_refused(tmp_path):
    break_files(write_image(tmp_path / "cat" / "a.png", "L").parents[1], 2)
    (tmp_path / "cat" / "a.png").write_bytes(b"")
    assert refusal(f"folder:{tmp_path}", broken="skip").startswith("3 of 3 image files cannot")


def test_wrong_options_are_refused(tmp_path):
    name = write_cats_and_dogs(tmp_path)
    assert "'ignore', accepted: refuse, skip" in refusal(name, broken="ignore")
    for window in ("40", "40,0", "1,2,3", "40,-400", "1e300,2"):
        assert "window must be a centre and a width of at least 1" in refusal(name, window=window)
    assert "must be a number" in refusal(name, window="wide,open")


def test_a_sentence_names_ten_files_at_most():
    errors = [f"{number} is damaged" for number in range(11)]
    assert describe_broken(errors[:1], 5) == "0 is damaged"
    assert describe_broken(errors[:2], 5, "!") == (
        "2 of 5 image files cannot be used: 0 is damaged; 1 is damaged!"
    )
    assert describe_broken(errors, 5000).endswith("9 is damaged; and 1 more")


def test_examining_reads_pixels_only_if_asked_to(tmp_path):
    path = write_image(tmp_path / "a.png", "L", 40, 40)
    path.write_bytes(path.read_bytes()[:600])
    file = ImageFile(path, "a.png")
    assert examine([file]).errors == []
    assert len(examine([file], pixels=True).errors) == 1
