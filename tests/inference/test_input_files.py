"""Files as inputs of a client: every change to them is reported, and misfits are refused."""

import io
import warnings
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import DataError
from fedproto.inference.input_files import read_inputs

GREY = Preprocessing((1, 8, 8), (0.3,), (0.4,), 16.0)  # as digits
COLOUR = Preprocessing((3, 8, 10), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), 255.0)
TABLE = Preprocessing((5,))


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def saved(path, array, **options):
    """An image file of an array (height, width) or (height, width, channels)."""
    Image.fromarray(array).save(path, **options)
    return path


def one(path, preprocessing):
    (found,) = read_inputs(path, preprocessing)
    return found


def refused(path, preprocessing, message):
    with pytest.raises(DataError, match=message) as caught:
        list(read_inputs(path, preprocessing))
    assert "\n" not in str(caught.value)


# --- images


def test_a_grey_image_of_the_right_size_is_taken_as_it_is(tmp_path):
    image = pixels(8, 8)
    found = one(saved(tmp_path / "a.png", image), GREY)
    assert found.name == str(tmp_path / "a.png") and found.notices == []
    assert found.x.shape == (1, 8, 8)
    assert np.allclose(
        found.x[0], image / 255 * 16, atol=1e-5
    )  # in the data set's units, of which white is 16


def test_a_colour_image_of_the_right_size_is_taken_as_it_is(tmp_path):
    image = pixels(8, 10, 3)
    found = one(saved(tmp_path / "a.png", image), COLOUR)
    assert found.notices == []
    assert (found.x == image.transpose(2, 0, 1)).all()


def test_a_white_image_is_what_the_data_set_calls_white(tmp_path):
    white = one(saved(tmp_path / "a.png", np.full((8, 8), 255, np.uint8)), GREY)
    assert np.allclose(GREY(white.x[None]), (1 - 0.3) / 0.4, atol=1e-5)


def test_a_conversion_to_grey_is_reported(tmp_path):
    image = pixels(8, 8, 3)
    found = one(saved(tmp_path / "a.png", image), GREY)
    assert found.notices == [f"{tmp_path / 'a.png'} was converted from colour to grey"]
    brightness = image @ [0.299, 0.587, 0.114]  # ITU-R 601, which television and pillow use
    assert np.abs(found.x[0] * 255 / 16 - brightness).max() <= 1


def test_a_conversion_to_colour_is_reported(tmp_path):
    image = pixels(8, 10)
    found = one(saved(tmp_path / "a.png", image), COLOUR)
    assert found.notices == [f"{tmp_path / 'a.png'} was converted from grey to colour"]
    assert (found.x == image[None]).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
@pytest.mark.parametrize("preprocessing", [GREY, COLOUR])
def test_every_mode_of_eight_bits_is_read(mode, preprocessing, tmp_path):
    _, height, width = preprocessing.shape
    path = tmp_path / ("a.png" if mode in ("1", "L", "LA", "P", "RGB", "RGBA") else "a.jpg")
    Image.fromarray(np.full((height, width, 3), 255, np.uint8)).convert(mode).save(path)
    found = one(path, preprocessing)
    assert np.allclose(found.x, preprocessing.scale, atol=preprocessing.scale / 100)
    changed = (mode in ("1", "L", "LA")) != (preprocessing is GREY)
    assert len(found.notices) == changed + mode.endswith(
        "A"
    )  # which says that it is partly transparent


@pytest.mark.parametrize("end", ["png", "PNG", "jpg", "bmp", "gif", "webp"])
def test_every_usual_image_format_is_read(end, tmp_path):
    flat = np.full((8, 8), 100, np.uint8)
    assert np.allclose(one(saved(tmp_path / f"a.{end}", flat), GREY).x, 100 / 255 * 16, atol=0.2)


def test_resizing_is_reported(tmp_path):
    image = np.kron(
        np.array([[0, 255], [255, 0]], np.uint8), np.ones((16, 12), np.uint8)
    )  # 32 high, 24 wide
    found = one(saved(tmp_path / "a.png", image), GREY)
    assert found.notices == [f"{tmp_path / 'a.png'} was resized from 32x24 to 8x8 pixels"]
    assert found.x.shape == (1, 8, 8)
    corners = found.x[0][np.ix_([0, 7], [0, 7])]
    assert np.allclose(corners, [[0, 16], [16, 0]], atol=0.5)  # not mirrored, not turned


def test_all_changes_are_reported(tmp_path):
    assert len(one(saved(tmp_path / "a.png", pixels(16, 16, 3)), GREY).notices) == 2


@pytest.mark.parametrize(
    ("size", "accepted"),
    [
        ((4, 4), True),
        ((3, 3), False),
        ((3, 100), False),
        ((100, 100), True),
        ((40, 20), True),  # twice as high is the most
        ((20, 40), True),
        ((41, 20), False),
        ((20, 41), False),
    ],
)
def test_an_image_that_would_not_be_recognisable_is_reported(size, accepted, tmp_path):
    """It is classified all the same: a client may have been trained on such images."""
    path = saved(tmp_path / "a.png", pixels(*size))
    found = one(path, GREY)
    assert found.x.shape == (1, 8, 8)
    change = f"{path} was resized from {size[0]}x{size[1]} to 8x8 pixels"
    rest = "" if accepted else ", of which hardly anything recognisable is left: crop it first"
    assert found.notices == [change + rest]


def test_the_ratio_of_sides_is_relative_to_the_wanted_one(tmp_path):
    wide = Preprocessing((1, 8, 32), scale=255.0)
    (notice,) = one(saved(tmp_path / "wide.png", pixels(20, 80)), wide).notices
    assert "recognisable" not in notice
    (notice,) = one(saved(tmp_path / "square.png", pixels(20, 20)), wide).notices
    assert "from 20x20 to 8x32 pixels, of which hardly anything recognisable" in notice


def test_a_tiny_image_is_fine_where_tiny_ones_are_wanted(tmp_path):
    image = pixels(2, 3)
    found = one(saved(tmp_path / "a.png", image), Preprocessing((1, 2, 3), scale=255.0))
    assert (found.x[0] == image).all() and not found.notices


def test_an_image_of_sixteen_bits_keeps_its_range(tmp_path):
    """Pillow would cut them off at 255."""
    image = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1040
    found = one(saved(tmp_path / "a.png", image), GREY)
    assert np.allclose(found.x[0], image / 65535 * 16, atol=1e-5) and not found.notices


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", bytes(1000)])
def test_a_file_that_is_not_an_image_is_refused(content, tmp_path):
    (tmp_path / "a.png").write_bytes(content)
    refused(tmp_path / "a.png", GREY, "a.png is not an image")


@pytest.mark.parametrize("end", ["png", "jpg", "gif", "bmp"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_image_is_refused(share, end, tmp_path):
    content = saved(tmp_path / f"a.{end}", pixels(64, 64)).read_bytes()
    (tmp_path / f"a.{end}").write_bytes(content[: int(share * len(content))])
    refused(tmp_path / f"a.{end}", GREY, r"a.* is (damaged|corrupted)")


def test_an_image_for_a_client_that_takes_no_images_is_refused(tmp_path):
    path = saved(tmp_path / "a.png", pixels(8, 8))
    refused(
        path, TABLE, r"cannot be classified: this client takes inputs of shape \(5,\), not images"
    )
    refused(path, Preprocessing((2, 8, 8)), "not images")


# --- arrays


@pytest.mark.parametrize("kind", ["uint8", "int64", "float32", "float64"])
@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (1, 1, 8, 8), (8, 8, 1)])
def test_an_array_of_one_sample(shape, kind, tmp_path):
    x = (pixels(8, 8) % 17).astype(kind)
    np.save(tmp_path / "a.npy", x.reshape(shape))
    found = one(tmp_path / "a.npy", GREY)
    assert found.name == str(tmp_path / "a.npy") and found.notices == []
    assert (found.x == x).all() and found.x.shape == (1, 8, 8)


@pytest.mark.parametrize("shape", [(3, 8, 10), (8, 10, 3)])
def test_an_array_of_one_colour_image(shape, tmp_path):
    """Pillow and most others have the channels last."""
    x = pixels(3, 8, 10)
    np.save(tmp_path / "a.npy", x if shape[0] == 3 else x.transpose(1, 2, 0))
    assert (one(tmp_path / "a.npy", COLOUR).x == x).all()


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 1, 8, 8), (3, 64), (3, 8, 8, 1)])
def test_an_array_of_many_samples(shape, tmp_path):
    x = pixels(3, 8, 8) % 17
    np.save(tmp_path / "a.npy", x.reshape(shape))
    found = list(read_inputs(tmp_path / "a.npy", GREY))
    names = [f"{tmp_path / 'a.npy'}[{number}]" for number in range(3)]
    assert [each.name for each in found] == names
    assert all((each.x[0] == row).all() for each, row in zip(found, x, strict=True))


def test_rows_of_a_table(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 5))
    np.save(tmp_path / "one.npy", x[0])
    np.save(tmp_path / "many.npy", x)
    assert np.allclose(one(tmp_path / "one.npy", TABLE).x, x[0])
    assert np.allclose([each.x for each in read_inputs(tmp_path / "many.npy", TABLE)], x)


def test_floats_between_zero_and_one_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.random.default_rng(0).random((3, 8, 8)))
    refused(
        tmp_path / "a.npy",
        GREY,
        "inputs are at most 1 in size, but values from 0 to 16 are needed: multiply by 16",
    )


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_the_array_x_or_the_only_array_of_an_npz_file(save, tmp_path):
    x = pixels(2, 8, 8) % 17
    save(tmp_path / "several.npz", first=np.zeros(3), x=x, y=np.arange(2))
    save(tmp_path / "only.npz", x)
    for name in ("several.npz", "only.npz"):
        assert (np.stack([each.x[0] for each in read_inputs(tmp_path / name, GREY)]) == x).all()


def test_files_are_closed(tmp_path):
    np.savez(tmp_path / "a.npz", pixels(2, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(read_inputs(tmp_path / "a.npz", GREY))


def test_a_suffix_may_be_in_capitals(tmp_path):
    with (tmp_path / "A.NPY").open("wb") as file:
        np.save(file, pixels(8, 8))
    assert one(tmp_path / "A.NPY", GREY).x.shape == (1, 8, 8)


def pickled(path):
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def pickled_in_npz(path):
    np.savez(path, x=np.array([{"a": 1}], dtype=object))


def no_array_at_all(path):
    with zipfile.ZipFile(path, "w"):
        pass


def a_text_in_npz(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "hello")


def an_end_of_text(path):
    path.write_text("1,2,3\n")


def nothing(path):
    path.write_bytes(b"")


def another_shape(path):
    with path.open("wb") as file:
        np.save(file, np.zeros((3, 7, 8), np.uint8))


def a_number(path):
    with path.open("wb") as file:
        np.save(file, np.array(3))


def not_a_number(path):
    with path.open("wb") as file:
        np.save(file, np.full((3, 8, 8), np.nan))


def text(path):
    with path.open("wb") as file:
        np.save(file, np.array(["a", "b"]))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.npy", pickled),
        ("a.npz", pickled_in_npz),
        ("a.npz", no_array_at_all),
        ("a.npz", a_text_in_npz),
        *((f"a.{end}", each) for end in ("npy", "npz") for each in (an_end_of_text, nothing)),
        *(("a.npy", each) for each in (another_shape, a_number, not_a_number, text)),
    ],
)
def test_array_files_that_are_refused(name, write, tmp_path):
    """By name: there may be a thousand in the folder."""
    write(tmp_path / name)
    refused(tmp_path / name, GREY, name)


def array_files():
    files = {}
    for name, save in (("a.npy", np.save), ("a.npz", np.savez), ("b.npz", np.savez_compressed)):
        buffer = io.BytesIO()
        save(buffer, pixels(3, 8, 8) % 17)
        files[name] = buffer.getvalue()
    return files


@given(
    st.sampled_from(sorted(array_files())),
    st.integers(0, 2**32),
    st.integers(1, 255),
    st.booleans(),
)
def test_a_damaged_array_file_is_read_or_refused(tmp_path_factory, name, place, change, cut):
    content = bytearray(array_files()[name])
    place %= len(content) if name != "a.npy" else 200
    content[place] ^= change
    path = tmp_path_factory.getbasetemp() / f"damaged-{name}"
    path.write_bytes(content[:place] if cut else content)
    try:
        list(read_inputs(path, GREY))
    except DataError as error:
        assert path.name in str(error)


# --- folders


def test_all_files_of_a_folder_by_name(tmp_path):
    saved(tmp_path / "b.png", pixels(8, 8))
    saved(tmp_path / "a.png", pixels(16, 16))
    np.save(tmp_path / "c.npy", pixels(2, 8, 8))
    (tmp_path / ".DS_Store").write_bytes(b"a Mac was here")
    names = ("a.png", "b.png", "c.npy[0]", "c.npy[1]")
    wanted = [str(tmp_path / name) for name in names]
    assert [each.name for each in read_inputs(tmp_path, GREY)] == wanted


@pytest.mark.parametrize("content", [[], [".hidden"]])
def test_a_folder_without_files_is_refused(content, tmp_path):
    for name in content:
        (tmp_path / name).write_text("")
    refused(tmp_path, GREY, "holds no file to classify; folders inside it are not searched")


def test_a_missing_path_is_refused(tmp_path):
    refused(tmp_path / "a.png", GREY, "a.png does not exist")
    refused(tmp_path / "folder" / "a.npy", GREY, "a.npy does not exist")


def test_one_bad_file_of_a_folder_is_named(tmp_path):
    saved(tmp_path / "a.png", pixels(8, 8))
    (tmp_path / "b.png").write_bytes(b"no image")
    refused(tmp_path, GREY, "b.png is not an image")
