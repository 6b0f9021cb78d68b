"""Images, tables, texts and arrays in files, as a trained client takes them.

Whatever had to be changed about an input, or is new to the client, is reported in a notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedproto.data.shared.delimited import TABLE_ENDINGS
from fedproto.data.shared.feature_encoding import UNKNOWN, Columns, Words
from fedproto.data.shared.images import Header, ImageFormat, read_header, read_pixels
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.data.shared.stored_tables import EXCEL_ENDINGS, PARQUET_ENDINGS
from fedproto.data.shared.tables import MISSING_VALUES, Table
from fedproto.data.text import PLAIN_TEXT_ENDINGS, ROW_FILE_ENDINGS, read_texts
from fedproto.errors import DataError

MAX_STRETCH_RATIO = 2.0  # of an image's sides; beyond it nothing is recognisable
MODES = {1: "L", 3: "RGB"}  # by the number of channels
MIN_IMAGE_PIXELS = 4  # per side; there is nothing to enlarge in a smaller image


class Input(NamedTuple):
    """An input that was read from a file."""

    name: str
    x: np.ndarray  # one input, in the units of the data set
    notices: list[str]


class FileContents(NamedTuple):
    """What was read from one file."""

    inputs: list[Input]
    #: The columns of a table or of rows of texts, one text per row; None: the file has none.
    columns: dict[str, list[str]] | None = None


def read_inputs(path: Path, preprocessing: Preprocessing) -> Iterator[Input]:
    """Yield the inputs of an image, a table, texts or an array file, or of a folder of such files.

    What the client was trained on decides how a file is read: images by default, tables or texts
    if its preprocessing encodes them. Folders inside the folder are not searched. Raises DataError
    for a file that cannot be read or that the client cannot take.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if not path.is_dir():
        yield from read_file(path, preprocessing).inputs
        return
    files = list_visible_files(path.iterdir())
    if not files:
        raise DataError(f"{path} holds no file to classify; folders inside it are not searched")
    for file in files:
        yield from read_file(file, preprocessing).inputs


def read_file(
    path: Path, preprocessing: Preprocessing, *, with_columns: bool = False
) -> FileContents:
    """Return the inputs of one file, as `read_inputs` yields them; if asked for, its columns."""
    if path.suffix.lower() in (".npy", ".npz"):
        return FileContents(list(_read_array(path, preprocessing)))
    if isinstance(preprocessing.encoding, Columns):
        endings = (*TABLE_ENDINGS, *PARQUET_ENDINGS, *EXCEL_ENDINGS)
        _refuse_other_endings(path, "tables", endings)
        return _read_table(path, preprocessing.encoding, with_columns)
    if isinstance(preprocessing.encoding, Words):
        _refuse_other_endings(path, "texts", (*PLAIN_TEXT_ENDINGS, *ROW_FILE_ENDINGS))
        return _read_texts(path, preprocessing.encoding)
    return FileContents([_read_image(path, preprocessing)])


def list_visible_files(paths: Iterable[Path]) -> list[Path]:
    """Return those of some paths that are files and not hidden, sorted."""
    return sorted(path for path in paths if path.is_file() and not path.name.startswith("."))


def _refuse_other_endings(path: Path, kind: str, endings: tuple[str, ...]) -> None:
    if not path.name.lower().endswith(endings):
        accepted = ", ".join(endings)
        raise DataError(
            f"{path} cannot be read by a client that was trained on {kind}: "
            f"it takes {accepted}, .npy"
        )


# --- arrays


def _read_array(path: Path, preprocessing: Preprocessing) -> Iterator[Input]:
    """Yield an input per row of an array, or the array itself if it is a single input."""
    x = _load_array(path)
    if _is_single_input(x.shape, preprocessing.shape):
        x = x[None]
    try:
        rows = preprocessing.reshape(x)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    for number, row in enumerate(rows):
        name = f"{path}[{number}]" if len(rows) > 1 else str(path)
        yield Input(name, row, [])


def _load_array(path: Path) -> np.ndarray:
    """Return the array of a .npy file, or `x` or else the first array of a .npz file."""
    try:
        stored = np.load(path, allow_pickle=False)
        if isinstance(stored, np.ndarray):
            return stored
        name = "x" if "x" in stored.files else stored.files[0]
        x = stored[name]
        if not isinstance(x, np.ndarray):
            raise ValueError(f"its entry {name!r} is not an array")
        return x
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{path} is not a valid array file (or is corrupted): {error}") from error


def _is_single_input(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether an array is one input, perhaps without its channel or with channels last."""
    channels_last = (*wanted[1:], wanted[0])
    if shape in (wanted, channels_last):
        return True
    return wanted[0] == 1 and shape == wanted[1:]


# --- tables and texts


def _read_table(path: Path, encoding: Columns, with_columns: bool) -> FileContents:
    """Return an input per row; columns that the client does not know are not looked at."""
    wanted = [column.name for column in encoding.columns]
    table = Table.read(path, only=wanted, notation=encoding.notation, keep_others=with_columns)
    encoded, notices = _encode_table(table, encoding)
    inputs = []
    for row, x in enumerate(encoded):
        inputs.append(Input(table.place(row), x, notices if row == 0 else []))
    if not with_columns:
        return FileContents(inputs)
    columns = {name: values.tolist() for name, values in table.columns.items()}
    (part,) = table.parts
    marks = (*MISSING_VALUES, *encoding.notation.missing)
    for name, values in part.others.items():
        stripped = [value.strip() for value in values]
        columns[name] = ["" if value in marks else value for value in stripped]
    return FileContents(inputs, columns)


def encode_frame(frame: Any, encoding: Columns) -> tuple[np.ndarray, list[str]]:
    """Return the rows of a DataFrame as inputs, (n, width), and notices about them."""
    wanted = [column.name for column in encoding.columns]
    frames = [frame]
    table = Table.from_frames(frames, ["the DataFrame"], only=wanted, notation=encoding.notation)
    return _encode_table(table, encoding)


def _encode_table(table: Table, encoding: Columns) -> tuple[np.ndarray, list[str]]:
    """Return the rows of a table as inputs, and notices about texts that are new."""
    missing = encoding.find_missing(table.columns)
    if missing:
        wanted = [column.name for column in encoding.columns]
        raise DataError(
            f"{table.name} has no column {missing[0]!r}, which this client was trained on: "
            f"{', '.join(wanted)}"
        )
    notices = []
    for name, rows in encoding.find_unknown_texts(table.columns).items():
        notices.append(_describe_new_texts(name, rows, table))
    return encoding(table.columns, table.place), notices


def _describe_new_texts(name: str, rows: np.ndarray, table: Table) -> str:
    """Return a notice about the rows of a column whose texts no training row holds."""
    text = str(table.columns[name][rows[0]])
    place = table.place(rows[0])
    if len(rows) > 1:
        return (
            f"{place} and {len(rows) - 1:,} more rows: column {name!r} holds texts that no "
            f"training row holds, first {text!r}"
        )
    if not text:
        return f"{place}: column {name!r} is empty"
    return f"{place}: column {name!r} holds {text!r}, which no training row holds"


def _read_texts(path: Path, encoding: Words) -> FileContents:
    """Return an input per text; a notice marks a text without any known word."""
    found = list(read_texts(path, encoding))
    if not found:
        raise DataError(f"{path} holds no text")
    encoded = encoding([each.text for each in found])
    inputs = []
    for each, ids in zip(found, encoded, strict=True):
        notices = []
        if not (ids > UNKNOWN).any():
            notices.append(f"{each.place} holds no word that the training texts hold")
        inputs.append(Input(each.place, ids.astype(np.float32), notices))
    rows = [each.row for each in found if each.row is not None]
    return FileContents(inputs, _join_rows(rows) if rows else None)


def _join_rows(rows: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """Return rows as columns; a row that lacks a column has an empty text there."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return {name: [row.get(name, "") for row in rows] for name in names}


# --- images


def _read_image(path: Path, preprocessing: Preprocessing) -> Input:
    """Return an image in the size and the colours that the client takes, (channels, h, w).

    It is read as a source of image files reads it, to the bit.
    """
    shape = preprocessing.shape
    if len(shape) != 3 or shape[0] not in MODES:
        raise DataError(
            f"{path} cannot be classified: this client takes inputs of shape {shape}, not images"
        )
    channels, height, width = shape
    size = (height, width)
    format = ImageFormat(size, MODES[channels], resize=True, window=preprocessing.window)
    header = read_header(path, str(path))
    notices = _describe_changes(header, channels, size, path)
    pixels = read_pixels(path, str(path), format)
    white = np.iinfo(pixels.dtype).max
    x = pixels.astype(np.float32).reshape(height, width, channels)
    channels_first = x.transpose(2, 0, 1)
    return Input(str(path), channels_first * (preprocessing.scale / white), notices)


def _describe_changes(
    header: Header, channels: int, size: tuple[int, int], path: Path
) -> list[str]:
    """Return what is done to an image to make it fit."""
    notices = []
    if header.size != size:
        change = f"from {_format_size(header.size)} to {_format_size(size)} pixels"
        if _is_unrecognisable(header.size, size):
            notices.append(
                f"{path} was resized {change}, of which hardly anything recognisable is left: "
                "crop it first"
            )
        else:
            notices.append(f"{path} was resized {change}")
    if header.is_transparent:
        notices.append(f"{path} is partly transparent, which was ignored")
    if header.is_grey and channels == 3:
        notices.append(f"{path} was converted from grey to colour")
    if not header.is_grey and channels == 1:
        notices.append(f"{path} was converted from colour to grey")
    return notices


def _is_unrecognisable(found: tuple[int, int], wanted: tuple[int, int]) -> bool:
    """Return whether little of an image would be left at another size, (height, width)."""
    height, width = found
    new_height, new_width = wanted
    stretch = (width / height) / (new_width / new_height)
    is_too_small = min(width, height) < MIN_IMAGE_PIXELS
    return is_too_small or not 1 / MAX_STRETCH_RATIO <= stretch <= MAX_STRETCH_RATIO


def _format_size(size: tuple[int, int]) -> str:
    """Return `28x20` for 28 rows of 20 pixels."""
    height, width = size
    return f"{height}x{width}"
