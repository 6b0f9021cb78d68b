"""The latest upload of every client, over a list of classes that may grow.

The round loop, a deployed server and the membership of a finished run all keep uploads this way.
Single uploads are kept, never only their sum, so that a client can be removed exactly: what is left
is, bit for bit, what it would be if the client's upload had never arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedproto.core.tensors import (
    FLOATS,
    find_mismatch,
    flatten_groups,
    move_index,
    pad_rows,
    select_rows,
    split_groups,
    take_one,
)
from fedproto.core.types import Tree, Upload
from fedproto.errors import shown

#: All clients' prototypes are saved beside the global ones up to this many values in all.
LARGEST_LOCAL_VALUES = 2**22
#: The exported tensor with the round of each client's latest upload.
_LAST_ROUND = "last"


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
        if self.uploads is None:
            self.uploads = Upload(self._make_room(uploads.sums), self._make_room(uploads.weights))
        for stored, new in zip(self.uploads, uploads, strict=True):
            for name, value in new.items():
                stored[name].index_copy_(0, move_index(clients, value.device), value)
        self.last_round[clients] = round

    def _make_room(self, tree: Tree) -> Tree:
        """Return zeros like the tensors of some clients' uploads, with a row for every client."""
        clients = len(self.last_round)
        return {name: value.new_zeros(clients, *value.shape[1:]) for name, value in tree.items()}

    def store_one(self, client: int, upload: Upload, round: int) -> None:
        """Replace one client's upload, whose tensors have no axis over clients."""
        sums = {name: value[None] for name, value in upload.sums.items()}
        weights = {name: value[None] for name, value in upload.weights.items()}
        self.store(torch.tensor([client]), Upload(sums, weights), round)

    def add_clients(self, clients: int) -> None:
        """Make room for further clients, so that there are `clients` in all."""
        self.last_round = pad_rows(self.last_round, clients)
        self._change_tensors(lambda value: pad_rows(value, clients))

    def remove(self, client: int) -> None:
        """Forget a client's upload; its number stays taken."""
        self.last_round[client] = 0
        if self.uploads is None:
            return
        for tree in self.uploads:
            for value in tree.values():
                value[client] = 0

    def widen(self, classes: int) -> None:
        """Append classes, so that there are `classes`; the stored uploads have no value for them.

        As in `keep_classes`, the uploads must have one weight per class.
        """

        def append_classes(value: Tensor) -> Tensor:
            clients, old_classes = value.shape[:2]
            missing = value.new_zeros(clients, classes - old_classes, *value.shape[2:])
            return torch.cat([value, missing], 1)

        self._change_tensors(append_classes)

    def keep_classes(self, places: Tensor) -> None:
        """Keep only the classes at these places of the list, in this order."""
        self._change_tensors(lambda value: value[:, move_index(places, value.device)])

    def _change_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.uploads is None:
            return
        sums = {name: change(value) for name, value in self.uploads.sums.items()}
        weights = {name: change(value) for name, value in self.uploads.weights.items()}
        self.uploads = Upload(sums, weights)

    # --- what is stored

    def clients(self, round: int | None = None) -> list[int]:
        """Return the clients with a stored upload, or those whose upload is of this round."""
        chosen = self.last_round > 0 if round is None else self.last_round == round
        return chosen.nonzero().flatten().tolist()

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
        first = self.get(stored[0])
        sums = dict(first.sums)
        weights = dict(first.weights)
        for client in stored[1:]:
            upload = self.get(client)
            sums = {name: value + upload.sums[name] for name, value in sums.items()}
            weights = {name: value + upload.weights[name] for name, value in weights.items()}
        sums = {name: value[None] for name, value in sums.items()}
        weights = {name: value[None] for name, value in weights.items()}
        return Upload(sums, weights)

    def local_prototypes(self) -> Tree:
        """Return the clients' own prototypes, or nothing if there are none or too many to save.

        `local` (clients, C, d) are the prototypes and `held` (clients, C) their weights; both are
        zero where a client never uploaded a prototype of the class.
        """
        if self.uploads is None:
            return {}
        sums = self.uploads.sums.get("prototypes")
        held = self.uploads.weights.get("weight")
        if sums is None or held is None:
            return {}
        if sums.numel() > LARGEST_LOCAL_VALUES or held.shape != sums.shape[:-1]:
            return {}
        weight = held[..., None]
        return {"local": torch.where(weight > 0, sums / weight, 0), "held": held}

    # --- copies and files

    def copy(self) -> LatestUploads:
        """Return a copy that can be changed independently."""
        copied = LatestUploads(0)
        copied.last_round = self.last_round.clone()
        copied.uploads = self.uploads
        copied._change_tensors(torch.clone)
        return copied

    def export(self) -> Tree:
        """Return the rounds as `last`, and the uploads as `sums.NAME` and `weights.NAME`."""
        tensors = {_LAST_ROUND: self.last_round}
        if self.uploads is not None:
            tensors |= flatten_groups(self.uploads._asdict())
        return tensors

    @classmethod
    def restore(
        cls,
        tensors: Tree,
        clients: int | None = None,
        row_shapes: Mapping[str, torch.Size] | None = None,
        device: torch.device | str = "cpu",
    ) -> LatestUploads:
        """Return what `export` was called on, given its tensors and possibly others.

        `clients` is the number of clients, if it is known. A tensor named in `row_shapes` must
        have that shape per client. Raises ValueError that says what does not fit.
        """
        last_round = tensors.get(_LAST_ROUND)
        if clients is None:
            clients = 0 if last_round is None else last_round.numel()
        found = {} if last_round is None else {_LAST_ROUND: last_round}
        restored = cls(clients)
        mismatch = find_mismatch({_LAST_ROUND: restored.last_round}, found)
        groups = split_groups(tensors)
        uploads = Upload(groups.get("sums", {}), groups.get("weights", {}))
        mismatch = mismatch or _find_upload_mismatch(uploads, clients, row_shapes or {})
        if mismatch is not None:
            raise ValueError(mismatch)
        restored.last_round = found[_LAST_ROUND]
        if uploads.sums:
            restored.uploads = uploads
            restored._change_tensors(lambda value: value.to(device))
        return restored


def _find_upload_mismatch(
    uploads: Upload, clients: int, row_shapes: Mapping[str, torch.Size]
) -> str | None:
    """Return what is wrong with stored uploads, or None."""
    if not uploads.sums and not uploads.weights:
        return None
    if "weight" not in uploads.weights:
        return "there is no weights.weight"
    weight_shape = uploads.weights["weight"].shape
    for group, values in uploads._asdict().items():
        for name, value in values.items():
            shape = value.shape
            fits = shape[:1] == (clients,) and shape[: len(weight_shape)] == weight_shape
            if name in row_shapes:
                fits = fits and shape[1:] == row_shapes[name]
            if not fits or value.dtype not in FLOATS:
                label = shown(f"{group}.{name}", 80)
                return f"{label} is {tuple(shape)} of {value.dtype}"
    return None
