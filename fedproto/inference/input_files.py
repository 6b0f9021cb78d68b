"""Images, tables, texts and arrays in files, as a trained member takes them.

What had to be changed about one, or is new to the member, is said, not hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedproto.data.shared.feature_encoding import UNKNOWN, Columns, Words
from fedproto.data.shared.images import GREY_MODES, open_image
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.data.shared.tables import TABLE_ENDINGS, Table
from fedproto.data.text import PLAIN_TEXT_ENDINGS, ROW_FILE_ENDINGS, read_texts
from fedproto.errors import DataError

STRETCH = 2.0  # an image whose sides must change their ratio by more than that is not recognisable any more
SMALLEST = 4  # pixels a side, below which there is nothing to enlarge


class Input(NamedTuple):
    name: str
    x: np.ndarray  # one input, in the units of the data set
    notices: list[str]


def read_inputs(path: Path, preprocessing: Preprocessing) -> Iterator[Input]:
    """The inputs of an image, a table, texts or an array file, or of all such files in a folder."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.is_dir():
        files = sorted(
            file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
        )
        if not files:
            raise DataError(
                f"{path} holds no file to classify; folders inside it are not looked into"
            )
        for file in files:
            yield from read_inputs(file, preprocessing)
    elif path.suffix.lower() in (".npy", ".npz"):
        yield from _from_array(path, preprocessing)
    elif isinstance(preprocessing.encoding, Columns):
        _refuse_other_kinds(path, "tables", TABLE_ENDINGS)
        yield from _from_table(path, preprocessing.encoding)
    elif isinstance(preprocessing.encoding, Words):
        _refuse_other_kinds(path, "texts", (*PLAIN_TEXT_ENDINGS, *ROW_FILE_ENDINGS))
        yield from _from_texts(path, preprocessing.encoding)
    else:
        yield _from_image(path, preprocessing)


def _from_array(path: Path, preprocessing: Preprocessing) -> Iterator[Input]:
    try:
        stored = np.load(path, allow_pickle=False)
        x = (
            stored
            if isinstance(stored, np.ndarray)
            else stored["x" if "x" in stored.files else stored.files[0]]
        )
        if not isinstance(x, np.ndarray):
            raise ValueError("an entry of it is no array")
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{path} is no array file: {error}") from error
    try:
        rows = preprocessing.reshape(x[None] if _is_one(x.shape, preprocessing.shape) else x)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    for number, row in enumerate(rows):
        yield Input(f"{path}[{number}]" if len(rows) > 1 else str(path), row, [])


def _refuse_other_kinds(path: Path, of: str, taken: tuple[str, ...]) -> None:
    if not path.name.lower().endswith(taken):
        raise DataError(
            f"{path} is no file for a member that was trained on {of}: it takes {', '.join(taken)}, .npy"
        )


def _from_table(path: Path, encoding: Columns) -> Iterator[Input]:
    """A row each; columns that the member does not know are passed over, such as one of classes."""
    wanted = [column.name for column in encoding.columns]
    table = Table.read(path, only=wanted)
    missing = encoding.find_missing(table.columns)
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}, which this member was trained on: {', '.join(wanted)}"
        )
    notices = [
        _new_texts(name, rows, table)
        for name, rows in encoding.find_unknown_texts(table.columns).items()
    ]
    for row, x in enumerate(encoding(table.columns, table.place)):
        yield Input(table.place(row), x, [] if row else notices)


def _new_texts(name: str, rows: np.ndarray, table: Table) -> str:
    text, place = str(table.columns[name][rows[0]]), table.place(rows[0])
    if len(rows) > 1:
        return f"{place} and {len(rows) - 1:,} more rows: column {name!r} holds what no training row does, first {text!r}"
    return f"{place}: column {name!r} " + (
        f"holds {text!r}, which no training row does" if text else "is empty"
    )


def _from_texts(path: Path, encoding: Words) -> Iterator[Input]:
    found = list(read_texts(path))
    if not found:
        raise DataError(f"{path} holds no text")
    for (_, place), ids in zip(found, encoding([text for text, _ in found]), strict=True):
        strange = (
            [] if (ids > UNKNOWN).any() else [f"{place} holds no word that the training texts hold"]
        )
        yield Input(place, ids.astype(np.float32), strange)


def _is_one(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether an array is a single input: as the model takes it, without its channel, or with the channels last."""
    return shape in (wanted, wanted[1:] if wanted[0] == 1 else wanted, (*wanted[1:], wanted[0]))


def _from_image(path: Path, preprocessing: Preprocessing) -> Input:
    if len(preprocessing.shape) != 3 or preprocessing.shape[0] not in (1, 3):
        raise DataError(
            f"{path} cannot be classified: this member takes inputs of shape {preprocessing.shape}, no images"
        )
    channels, height, width = preprocessing.shape
    with open_image(path, str(path)) as image:
        notices = _differences(image, channels, (width, height), path)
        try:
            pixels = image.convert("L" if channels == 1 else "RGB").resize(
                (width, height), Image.Resampling.BILINEAR
            )
        except Exception as error:  # a damaged file can fail in any way
            raise DataError(f"{path} is damaged: {error}") from error
    x = np.asarray(pixels, np.float32).reshape(height, width, channels).transpose(2, 0, 1)
    return Input(str(path), x * (preprocessing.scale / 255), notices)


def _differences(image: Image.Image, channels: int, size: tuple[int, int], path: Path) -> list[str]:
    """What is done to an image to make it fit; refused where little of it would be left."""
    (width, height), (wide, high) = image.size, size
    found, wanted = f"{height}x{width}", f"{high}x{wide}"
    ratio = (width / height) / (wide / high)
    if image.size != size and (
        min(width, height) < SMALLEST or not 1 / STRETCH <= ratio <= STRETCH
    ):
        raise DataError(
            f"{path} has {found} pixels, of which nothing recognisable is left at {wanted}: crop it first"
        )
    notices = [f"{path} was resized from {found} to {wanted} pixels"] if image.size != size else []
    if "A" in image.getbands() or "transparency" in image.info:
        notices.append(f"{path} is partly transparent, which was ignored")
    if (image.mode in GREY_MODES) != (channels == 1):
        notices.append(
            f"{path} was turned from {'grey to colour' if channels == 3 else 'colour to grey'}"
        )
    return notices
