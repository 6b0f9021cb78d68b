"""What travels in one message: named arrays, and a header of numbers, texts and lists of texts.

The arrays are those of `core.codec`, whose messages the simulator counts: those of a group of an
upload, or of a tree of what a member receives, are named `GROUP/value.NAME`. Rows of classes are
identified by the names in the header, not by the numbers in `extra.rows`: the list of classes may
have changed since a reply was made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedproto.core import codec
from fedproto.core.closed_form import TEACHER
from fedproto.core.tensors import flatten_state, scatter_rows, split_groups, unflatten_state
from fedproto.core.types import Group, GroupLayout, State, Tree, Upload
from fedproto.errors import TrainingError

Header = dict[str, Any]
_GROUPED = re.compile(r"(.*?)/((?:value|extra)\..*)", re.DOTALL)  # GROUP/value.NAME
MAX_PRINTED_CHARACTERS = 300
#: In messages of a secure sum: the key of a header with its terms, and the name of its bytes.
SECURE_SUM = "secure_sum"


@dataclass(frozen=True)
class Message:
    """A request of the server, or a member's reply."""

    header: Header
    arrays: dict[str, np.ndarray]

    def groups(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the arrays by group, or tree, and name; the group of a plain name is empty."""
        groups: dict[str, dict[str, np.ndarray]] = {}
        for path, value in self.arrays.items():
            match = _GROUPED.fullmatch(path)
            group, name = match.groups() if match else ("", path)
            groups.setdefault(group, {})[name] = value
        return groups

    def payloads(self) -> dict[str, bytes]:
        """Return the arrays as they travel, one payload per group.

        Their bytes are what the traffic ledger counts. The header, and what Flower adds, are
        counted separately.
        """
        return {name: codec.encode(arrays) for name, arrays in self.groups().items()}

    def count_bytes(self) -> int:
        """Return the bytes of all payloads."""
        return sum(codec.count_bytes(arrays) for arrays in self.groups().values())


def name_arrays(group: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a group under the names they have in a message."""
    prefix = f"{group}/" if group else ""
    return {prefix + name: value for name, value in arrays.items()}


def make_printable(text: str) -> str:
    """Return somebody else's text such that a log or a table can show it."""
    letters = [letter if letter.isprintable() else "?" for letter in text]
    return "".join(letters)[:MAX_PRINTED_CHARACTERS]


# --- downloads


def known_key(tree: str) -> str:
    """Return the key of a header that names the classes of a tree's rows."""
    return f"known.{tree}" if tree else "known"


def pack_download(received: State, classes: tuple[str, ...]) -> Message:
    """Return the message with what a member receives.

    Of a tree with `known`, only the rows of classes that have one travel; the header names them.
    """
    arrays: dict[str, np.ndarray] = {}
    header: Header = {}
    for name, tree in codec.split_trees(received).items():
        known: list[str] | None = None
        if "known" in tree:
            rows = tree["known"].nonzero().flatten()
            known = [classes[row] for row in rows.tolist()]
            header[known_key(name)] = known
        if known is None or known:
            arrays |= name_arrays(name, _to_arrays(codec.tree_parts(tree)))
    return Message(header, arrays)


def unpack_download(message: Message, classes: tuple[str, ...], like: State) -> State:
    """Return what `pack_download` was given, over `classes`.

    `like` is what a member would receive before the first round, which gives shapes and types.
    Raises KeyError, ValueError, RuntimeError, IndexError or TypeError if the message does not fit.
    """
    groups = message.groups()
    received: Tree = {}
    for name, tree in codec.split_trees(like).items():
        arrays = groups.get(name, {})
        places = None
        if "known" in tree:
            places = _find_places(message.header[known_key(name)], classes)
        for value_name, value in _unpack_tree(arrays, places, tree).items():
            path = f"{name}/{value_name}" if name else value_name
            received[path] = value
    return unflatten_state(received)


def _unpack_tree(arrays: Mapping[str, np.ndarray], places: Tensor | None, like: Tree) -> Tree:
    """Return one tree; with `places`, these are the places of its rows."""
    if places is None:
        return {name: _read_array(arrays, name, value) for name, value in like.items()}
    received = dict(like)
    received["known"] = like["known"].index_fill(0, places.to(like["known"].device), 1)
    if not len(places):
        return received
    for name, value in like.items():
        if name != "known":
            rows = _read_array(arrays, name, value)
            received[name] = value.index_copy(0, places.to(value.device), rows)
    return received


def _read_array(arrays: Mapping[str, np.ndarray], name: str, like: Tensor) -> Tensor:
    """Return a value of a message on the device and in the type of another tensor."""
    return torch.from_numpy(arrays[f"value.{name}"].copy()).to(like)


def keep_classes(received: State, own_classes: Tensor) -> State:
    """Return what a member receives for some classes only: `known` is 0 for the others.

    A teacher's solution is for all classes.
    """
    flat = flatten_state(received)
    for path, value in flat.items():
        tree, _, name = path.rpartition("/")
        if name == "known" and tree != TEACHER:
            flat[path] = value * own_classes.to(value)
    return unflatten_state(flat)


# --- uploads


def pack_upload(
    upload: Upload, classes: tuple[str, ...], layouts: Mapping[str, GroupLayout]
) -> Message:
    """Return the message with a member's upload.

    If groups have one weight per class, the header names the classes of their rows as `spoken`.
    """
    header: Header = {}
    arrays: dict[str, np.ndarray] = {}
    for name, group in upload.items():
        parts = codec.group_parts(group)
        arrays |= name_arrays(name, _to_arrays(parts))
        if layouts[name].per == "class":
            spoken = [classes[row] for row in parts["extra.rows"].tolist()]
            if header.setdefault("spoken", spoken) != spoken:
                raise TrainingError(f"the groups of an upload speak of different classes ({name})")
    return Message(header, arrays)


def unpack_upload(message: Message) -> Upload:
    """Return an upload as it was sent: its rows are those of the header's `spoken` classes."""
    upload = {}
    for group, arrays in message.groups().items():
        tensors = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
        parts = split_groups(tensors)
        extras = {name: value for name, value in parts["extra"].items() if name != "rows"}
        weight = extras.pop("weight")
        upload[group] = Group(parts.get("value", {}), weight, extras)
    return upload


def place_rows(
    upload: Upload,
    spoken: list[str],
    classes: tuple[str, ...],
    layouts: Mapping[str, GroupLayout],
) -> Upload:
    """Return an upload over all classes: the rows of its `spoken` classes, and zeros elsewhere."""
    placed = dict(upload)
    places = _find_places(spoken, classes)
    for name, group in upload.items():
        if layouts[name].per == "class":
            placed[name] = scatter_rows(group, places, len(classes))
    return placed


def _find_places(names: list[str], classes: tuple[str, ...]) -> Tensor:
    places = [classes.index(name) for name in names]
    return torch.tensor(places, dtype=torch.long)


def _to_arrays(tree: Tree) -> dict[str, np.ndarray]:
    return {name: value.cpu().numpy() for name, value in tree.items()}
