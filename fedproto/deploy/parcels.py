"""What travels in one message: named arrays, and a header of numbers, words and lists of words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedproto.types import Tree, Upload

Header = dict[str, Any]


@dataclass(frozen=True)
class Parcel:
    header: Header
    arrays: dict[str, np.ndarray]


def rows_of_classes(tree: Tree, rows: torch.Tensor) -> dict[str, np.ndarray]:
    return {name: value[rows.to(value.device)].cpu().numpy() for name, value in tree.items()}


def of_server(server: Tree, classes: tuple[str, ...]) -> Parcel:
    """The server's state: of prototypes one array, of the classes that have one, whose names are in the header."""
    if "known" not in server:
        return Parcel({}, {name: value.cpu().numpy() for name, value in server.items()})
    known = server["known"].nonzero().flatten()
    values = {name: value for name, value in server.items() if name != "known"}
    return Parcel({"known": [classes[row] for row in known.tolist()]}, rows_of_classes(values, known))


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
    weight = upload.weights.get("weight")
    by_class = weight is not None and weight.dim() > 0
    header: Header = {}
    if by_class:
        assert weight is not None
        rows = weight.nonzero().flatten()
        header["spoken"] = [classes[row] for row in rows.tolist()]
        parts = [rows_of_classes(tree, rows) for tree in upload]
    else:
        parts = [{name: value.cpu().numpy() for name, value in tree.items()} for tree in upload]
    named = zip(Upload._fields, parts, strict=True)
    return Parcel(header, {f"{group}.{name}": value for group, part in named for name, value in part.items()})


def to_upload(parcel: Parcel) -> Upload:
    """An upload as it was sent: rows are of the header's `spoken` classes, in that order."""
    parts: dict[str, Tree] = {group: {} for group in Upload._fields}
    for key, value in parcel.arrays.items():
        group, _, name = key.partition(".")
        parts[group][name] = torch.from_numpy(value.copy())
    return Upload(**parts)


def over(upload: Upload, spoken: list[str], classes: tuple[str, ...]) -> Upload:
    """An upload's rows in the places of their classes; zeros for those it says nothing of."""
    rows = torch.tensor([classes.index(name) for name in spoken], dtype=torch.long)
    return Upload(
        *(
            {n: value.new_zeros(len(classes), *value.shape[1:]).index_copy(0, rows, value) for n, value in tree.items()}
            for tree in upload
        )
    )
