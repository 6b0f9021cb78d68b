"""What travels in one message: named arrays, and a header of numbers, words and lists of words.

The arrays are those of `wire`, whose messages the simulator counts. The rows of the classes go by the names in the
header, not by their numbers in `extra.rows`: the list of classes may have changed since an answer was made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedproto.core import codec
from fedproto.core.tensors import scatter_rows, split_groups
from fedproto.core.types import Tree, Upload

Header = dict[str, Any]


@dataclass(frozen=True)
class Message:
    header: Header
    arrays: dict[str, np.ndarray]

    def payload(self) -> bytes:
        """The arrays as they travel: what the ledger counts. The header, and what Flower adds, are counted apart."""
        return codec.encode(self.arrays)


def printable(words: str) -> str:
    """A stranger's words, as a log or a table can show them."""
    return "".join(c if c.isprintable() else "?" for c in words)[:300]


def of_server(received: Tree, classes: tuple[str, ...]) -> Message:
    """What a member receives: of prototypes a row per class that has one, whose names are in the header."""
    arrays = _as_arrays(codec.download_parts(received))
    if "known" not in received:
        return Message({}, arrays)
    known = [classes[row] for row in received["known"].nonzero().flatten().tolist()]
    return Message({"known": known}, arrays if known else {})


def to_server(parcel: Message, classes: tuple[str, ...], like: Tree) -> Tree:
    """The same back, over `classes`, in the shapes and types of `like`: the state before anybody spoke."""
    if "known" not in like:
        return {
            name: torch.from_numpy(parcel.arrays[f"value.{name}"].copy()).to(v)
            for name, v in like.items()
        }
    rows = torch.tensor([classes.index(name) for name in parcel.header["known"]], dtype=torch.long)
    result = {"known": like["known"].index_fill(0, rows.to(like["known"].device), 1)}
    for name, value in like.items():
        if name != "known" and len(rows):
            sent = torch.from_numpy(parcel.arrays[f"value.{name}"].copy()).to(value)
            result[name] = value.index_copy(0, rows.to(value.device), sent)
    return like | result


def of_upload(upload: Upload, classes: tuple[str, ...]) -> Message:
    """A member's upload: one weight for all of it, or a row per class it speaks of, whose names are in the header."""
    parts = codec.upload_parts(upload)
    spoken = (
        [classes[row] for row in parts["extra.rows"].tolist()] if "extra.rows" in parts else None
    )
    return Message({} if spoken is None else {"spoken": spoken}, _as_arrays(parts))


def to_upload(parcel: Message) -> Upload:
    """An upload as it was sent: rows are of the header's `spoken` classes, in that order."""
    groups = split_groups(
        {name: torch.from_numpy(value.copy()) for name, value in parcel.arrays.items()}
    )
    weights = {name: value for name, value in groups["extra"].items() if name != "rows"}
    return Upload(groups["value"], weights)


def _as_arrays(tree: Tree) -> dict[str, np.ndarray]:
    return {name: value.cpu().numpy() for name, value in tree.items()}


def over(upload: Upload, spoken: list[str], classes: tuple[str, ...]) -> Upload:
    """An upload's rows in the places of their classes; zeros for those it says nothing of."""
    places = torch.tensor([classes.index(name) for name in spoken], dtype=torch.long)
    return scatter_rows(upload, places, len(classes))
