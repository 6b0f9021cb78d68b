"""The latest upload of every client, over a list of classes that may grow.

The round loop, a deployed server and the membership of a finished run all keep uploads this way.
Single uploads are kept, never only their sum, so that a client can be removed exactly: what is left
is, bit for bit, what it would be if the client's upload had never arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from fedproto.core.tensors import (
    FLOATS,
    divide_by_weight,
    find_mismatch,
    flatten_upload,
    map_group,
    map_upload,
    move_index,
    pad_rows,
    select_rows,
    take_one,
    unflatten_upload,
)
from fedproto.core.types import Group, GroupLayout, Tree, Upload
from fedproto.errors import shown

#: All clients' prototypes are saved beside the global ones up to this many values in all.
LARGEST_LOCAL_VALUES = 2**22
#: The exported tensor with the round of each client's latest upload.
_LAST_ROUND = "last"
#: The beginning of the names of the exported tensors of uploads.
_UPLOADS = "uploads."


class LatestUploads:
    """Keeps every client's latest upload and its round: absent clients may still count with it.

    Clients are numbered from 0, and a number is never used for another client. Everything that
    goes over several clients does so in the order of their numbers, whatever order they came in.
    """

    def __init__(self, clients: int) -> None:
        self.last_round = torch.zeros(clients, dtype=torch.int64)  # of the upload; 0 = none so far
        self.uploads: Upload | None = None  # with a leading axis over all clients

    # --- changes

    def store(self, clients: Tensor, uploads: Upload, round: int) -> None:
        """Replace the uploads of these clients by those of this round."""
        new = {name: group for name, group in uploads.items() if name not in (self.uploads or {})}
        if new:
            self.uploads = (self.uploads or {}) | map_upload(new, self._make_room)
        stored = flatten_upload(self.uploads or {})
        for name, value in flatten_upload(uploads).items():
            stored[name].index_copy_(0, move_index(clients, value.device), value)
        self.last_round[clients] = round

    def _make_room(self, value: Tensor) -> Tensor:
        """Return zeros like a tensor of some clients' uploads, with a row for every client."""
        return value.new_zeros(len(self.last_round), *value.shape[1:])

    def store_one(self, client: int, upload: Upload, round: int) -> None:
        """Replace one client's upload, whose tensors have no axis over clients."""
        uploads = map_upload(upload, lambda value: value[None])
        self.store(torch.tensor([client]), uploads, round)

    def add_clients(self, clients: int) -> None:
        """Make room for further clients, so that there are `clients` in all."""
        self.last_round = pad_rows(self.last_round, clients)
        self._change_tensors(lambda value: pad_rows(value, clients))

    def remove(self, client: int) -> None:
        """Forget a client's upload; its number stays taken."""
        self.last_round[client] = 0
        if self.uploads is None:
            return
        for value in flatten_upload(self.uploads).values():
            value[client] = 0

    def widen(self, classes: int, groups: Collection[str]) -> None:
        """Append classes, so that there are `classes`; the stored uploads have no value for them.

        As in `keep_classes`, `groups` names those with one weight per class.
        """

        def append_classes(value: Tensor) -> Tensor:
            clients, old_classes = value.shape[:2]
            missing = value.new_zeros(clients, classes - old_classes, *value.shape[2:])
            return torch.cat([value, missing], 1)

        self._change_tensors(append_classes, groups)

    def keep_classes(self, places: Tensor, groups: Collection[str]) -> None:
        """Keep only the classes at these places of the list, in this order."""
        self._change_tensors(lambda value: value[:, move_index(places, value.device)], groups)

    def _change_tensors(
        self, change: Callable[[Tensor], Tensor], groups: Collection[str] | None = None
    ) -> None:
        """Change the tensors of all groups, or only of some."""
        if self.uploads is None:
            return
        changed = dict(self.uploads)
        for name, group in self.uploads.items():
            if groups is None or name in groups:
                changed[name] = map_group(group, change)
        self.uploads = changed

    # --- what is stored

    def clients(self, round: int | None = None) -> list[int]:
        """Return the clients with a stored upload, or those whose upload is of this round."""
        chosen = self.last_round > 0 if round is None else self.last_round == round
        return chosen.nonzero().flatten().tolist()

    def rounds(self) -> dict[int, int]:
        """Return the round of each stored upload, by client."""
        return {client: int(self.last_round[client]) for client in self.clients()}

    def get(self, client: int) -> Upload:
        """Return one client's upload, without an axis over clients; KeyError if there is none."""
        if self.uploads is None or not self.last_round[client]:
            raise KeyError(client)
        return take_one(self.uploads, client)

    def recall(self, round: int | None = None) -> Upload | None:
        """Return the latest uploads of all clients that have one, or only those of one round.

        They have a leading axis over these clients; None if there are no such clients.
        """
        chosen = self.last_round > 0 if round is None else self.last_round == round
        if self.uploads is None or chosen.all():
            return self.uploads
        if not chosen.any():
            return None
        return select_rows(self.uploads, chosen.nonzero().flatten())

    def sum(self) -> Upload | None:
        """Return the sum of all latest uploads, with an axis of length 1 over clients, or None.

        Uploads are added one after the other. So a client without a weight for a class changes no
        bit of that class; in torch's own sums, whose order depends on the number of rows, it may.
        """
        stored = self.clients()
        if not stored:
            return None
        total = flatten_upload(self.get(stored[0]))
        for client in stored[1:]:
            upload = flatten_upload(self.get(client))
            total = {name: value + upload[name] for name, value in total.items()}
        return unflatten_upload({name: value[None] for name, value in total.items()})

    def local_prototypes(self) -> Tree:
        """Return the clients' own prototypes, or nothing if there are none or too many to save.

        `local` (clients, C, d) are the prototypes and `held` (clients, C) their weights; both are
        zero where a client never uploaded a prototype of the class.
        """
        if self.uploads is None:
            return {}
        group = self.uploads.get("prototypes")
        sums = None if group is None else group.sums.get("prototypes")
        if group is None or sums is None:
            return {}
        held = group.weight
        if sums.numel() > LARGEST_LOCAL_VALUES or held.shape != sums.shape[:-1]:
            return {}
        values = divide_by_weight(Group({"local": sums}, held))
        return values | {"held": held}

    # --- copies and files

    def copy(self) -> LatestUploads:
        """Return a copy that can be changed independently."""
        copied = LatestUploads(0)
        copied.last_round = self.last_round.clone()
        copied.uploads = self.uploads
        copied._change_tensors(torch.clone)
        return copied

    def export(self) -> Tree:
        """Return the rounds as `last`, and the uploads as `uploads.GROUP/...`."""
        tensors = {_LAST_ROUND: self.last_round}
        if self.uploads is not None:
            for name, value in flatten_upload(self.uploads).items():
                tensors[_UPLOADS + name] = value
        return tensors

    @classmethod
    def restore(
        cls,
        tensors: Tree,
        clients: int | None = None,
        layouts: Mapping[str, GroupLayout] | None = None,
        device: torch.device | str = "cpu",
    ) -> LatestUploads:
        """Return what `export` was called on, given its tensors and possibly others.

        `clients` is the number of clients, and `layouts` are those of the groups, if they are
        known. Raises ValueError that says what does not fit.
        """
        last_round = tensors.get(_LAST_ROUND)
        if clients is None:
            clients = 0 if last_round is None else last_round.numel()
        found = {} if last_round is None else {_LAST_ROUND: last_round}
        restored = cls(clients)
        mismatch = find_mismatch({_LAST_ROUND: restored.last_round}, found)
        uploads = read_uploads(tensors)
        mismatch = mismatch or _find_upload_mismatch(uploads, clients, layouts)
        if mismatch is not None:
            raise ValueError(mismatch)
        restored.last_round = found[_LAST_ROUND]
        if uploads:
            restored.uploads = uploads
            restored._change_tensors(lambda value: value.to(device))
        return restored


def read_uploads(tensors: Tree) -> Upload:
    """Return the uploads among exported tensors; ValueError if they are none."""
    flat = {}
    for name, value in tensors.items():
        if name.startswith(_UPLOADS):
            flat[name.removeprefix(_UPLOADS)] = value
    return unflatten_upload(flat)


def _find_upload_mismatch(
    uploads: Upload, clients: int, layouts: Mapping[str, GroupLayout] | None
) -> str | None:
    """Return what is wrong with stored uploads, or None."""
    for group_name, group in uploads.items():
        weight_shape = group.weight.shape
        for name, value in flatten_upload({group_name: group}).items():
            shape = value.shape
            fits = shape[:1] == (clients,) and shape[: len(weight_shape)] == weight_shape
            if not fits or value.dtype not in FLOATS:
                return f"{shown(name, 80)} is {tuple(shape)} of {value.dtype}"
        if layouts is not None:
            mismatch = find_layout_mismatch(group_name, take_one({"": group}, 0)[""], layouts)
            if mismatch is not None:
                return mismatch
    return None


def find_layout_mismatch(name: str, group: Group, layouts: Mapping[str, GroupLayout]) -> str | None:
    """Return how one client's group differs from what was declared, or None."""
    if name not in layouts:
        declared = ", ".join(layouts) or "none"
        return f"there is a group {shown(name, 80)}, where the declared ones are: {declared}"
    expected = layouts[name].tensor_shapes(name)
    found = flatten_upload({name: group})
    for tensor in sorted(expected.keys() ^ found.keys()):
        return f"{shown(tensor, 80)} is only in one of the upload and its declaration"
    for tensor, value in found.items():
        if tuple(value.shape) != expected[tensor]:
            return f"{tensor} is {tuple(value.shape)}, where {expected[tensor]} is declared"
    return None
