"""What travels in one message: named arrays, and a header of numbers, texts and lists of texts.

The arrays are those of `core.codec`, whose messages the simulator counts. Rows of classes are
identified by the names in the header, not by the numbers in `extra.rows`: the list of classes may
have changed since a reply was made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedproto.core import codec
from fedproto.core.tensors import scatter_rows, split_groups
from fedproto.core.types import Tree, Upload

Header = dict[str, Any]
MAX_PRINTED_CHARACTERS = 300


@dataclass(frozen=True)
class Message:
    """A request of the server, or a member's reply."""

    header: Header
    arrays: dict[str, np.ndarray]

    def payload(self) -> bytes:
        """Return the arrays as they travel, which is what the traffic ledger counts.

        The header, and what Flower adds, are counted separately.
        """
        return codec.encode(self.arrays)


def make_printable(text: str) -> str:
    """Return somebody else's text such that a log or a table can show it."""
    letters = [letter if letter.isprintable() else "?" for letter in text]
    return "".join(letters)[:MAX_PRINTED_CHARACTERS]


def pack_download(received: Tree, classes: tuple[str, ...]) -> Message:
    """Return the message with what a member receives of the server's state.

    Of prototypes, only the rows of classes that have one travel; the header names these classes.
    """
    arrays = _to_arrays(codec.download_parts(received))
    if "known" not in received:
        return Message({}, arrays)
    rows = received["known"].nonzero().flatten()
    known = [classes[row] for row in rows.tolist()]
    return Message({"known": known}, arrays if known else {})


def unpack_download(message: Message, classes: tuple[str, ...], like: Tree) -> Tree:
    """Return what `pack_download` was given, over `classes`.

    `like` is the server's state before the first round, which gives shapes and types. Raises
    KeyError, ValueError, RuntimeError, IndexError or TypeError if the message does not fit it.
    """
    if "known" not in like:
        return {name: _read_array(message, name, value) for name, value in like.items()}
    places = _find_places(message.header["known"], classes)
    received = dict(like)
    received["known"] = like["known"].index_fill(0, places.to(like["known"].device), 1)
    if not len(places):
        return received
    for name, value in like.items():
        if name != "known":
            rows = _read_array(message, name, value)
            received[name] = value.index_copy(0, places.to(value.device), rows)
    return received


def _read_array(message: Message, name: str, like: Tensor) -> Tensor:
    """Return a value of the message on the device and in the type of another tensor."""
    array = message.arrays[f"value.{name}"]
    return torch.from_numpy(array.copy()).to(like)


def pack_upload(upload: Upload, classes: tuple[str, ...]) -> Message:
    """Return the message with a member's upload.

    If the upload has one weight per class, the header names the classes of its rows as `spoken`.
    """
    parts = codec.upload_parts(upload)
    header: Header = {}
    if "extra.rows" in parts:
        header["spoken"] = [classes[row] for row in parts["extra.rows"].tolist()]
    return Message(header, _to_arrays(parts))


def unpack_upload(message: Message) -> Upload:
    """Return an upload as it was sent: its rows are those of the header's `spoken` classes."""
    tensors = {name: torch.from_numpy(value.copy()) for name, value in message.arrays.items()}
    groups = split_groups(tensors)
    weights = {name: value for name, value in groups["extra"].items() if name != "rows"}
    return Upload(groups["value"], weights)


def place_rows(upload: Upload, spoken: list[str], classes: tuple[str, ...]) -> Upload:
    """Return an upload over all classes: the rows of its `spoken` classes, and zeros elsewhere."""
    return scatter_rows(upload, _find_places(spoken, classes), len(classes))


def _find_places(names: list[str], classes: tuple[str, ...]) -> Tensor:
    places = [classes.index(name) for name in names]
    return torch.tensor(places, dtype=torch.long)


def _to_arrays(tree: Tree) -> dict[str, np.ndarray]:
    return {name: value.cpu().numpy() for name, value in tree.items()}
