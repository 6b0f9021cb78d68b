"""What travels in one message: named arrays, and a header of numbers, words and lists of words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedproto.bank import Contribution
from fedproto.trees import flat, parted, spread
from fedproto.types import Tree, Upload

Header = dict[str, Any]


@dataclass(frozen=True)
class Parcel:
    header: Header
    arrays: dict[str, np.ndarray]


def printable(words: str) -> str:
    """A stranger's words, as a log or a table can show them."""
    return "".join(c if c.isprintable() else "?" for c in words)[:300]


def of_server(server: Tree, classes: tuple[str, ...]) -> Parcel:
    """The server's state: of prototypes one array, of the classes that have one, whose names are in the header."""
    if "known" not in server:
        return Parcel({}, {name: value.cpu().numpy() for name, value in server.items()})
    known = server["known"].nonzero().flatten()
    values = {name: value[known].cpu().numpy() for name, value in server.items() if name != "known"}
    return Parcel({"known": [classes[row] for row in known.tolist()]}, values)


def to_server(parcel: Parcel, classes: tuple[str, ...], like: Tree) -> Tree:
    """The same back, over `classes`, in the shapes and types of `like`: the state before anybody spoke."""
    if "known" not in like:
        return {name: torch.from_numpy(parcel.arrays[name].copy()).to(value) for name, value in like.items()}
    rows = torch.tensor([classes.index(name) for name in parcel.header["known"]], dtype=torch.long)
    result = {"known": like["known"].index_fill(0, rows.to(like["known"].device), 1)}
    for name, value in like.items():
        if name != "known":
            sent = torch.from_numpy(parcel.arrays[name].copy()).to(value)
            result[name] = value.index_copy(0, rows.to(value.device), sent)
    return result


def of_upload(upload: Upload, classes: tuple[str, ...]) -> Parcel:
    """A member's upload: one weight for all of it, or a row a class it speaks of, whose names are in the header."""
    header: Header = {}
    if upload.weights["weight"].dim():
        spoken = Contribution.of("", classes, upload)
        header, upload = {"spoken": list(spoken.classes)}, spoken.upload
    return Parcel(header, {name: value.cpu().numpy() for name, value in flat(upload._asdict()).items()})


def to_upload(parcel: Parcel) -> Upload:
    """An upload as it was sent: rows are of the header's `spoken` classes, in that order."""
    return Upload(**parted({name: torch.from_numpy(value.copy()) for name, value in parcel.arrays.items()}))


def over(upload: Upload, spoken: list[str], classes: tuple[str, ...]) -> Upload:
    """An upload's rows in the places of their classes; zeros for those it says nothing of."""
    places = torch.tensor([classes.index(name) for name in spoken], dtype=torch.long)
    return spread(upload, places, len(classes))
