"""The latest upload of every member, with rows of the classes that it sent and of no others.

A member has a few of a federation's classes, so what a server keeps of it does not grow with the
number of all classes. What an algorithm aggregates is made from that when a round is closed: their
sum where it needs no more, or else all uploads over all classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedproto.core.tensors import flatten_upload, map_group, pad_rows, unflatten_upload
from fedproto.core.types import Tree, Upload
from fedproto.core.uploads import LatestUploads
from fedproto.deploy.row_sums import add_rows

#: Values, over all members and classes, that torch adds as one dense tensor.
LARGEST_SPREAD_VALUES = 2**22
_LAST_ROUND = "last"
_CLASSES = "classes"
_ROWS = "rows"
_UPLOADS = "uploads."


class StoredUpload(NamedTuple):
    """One member's upload: of groups with a weight per class, the rows of some classes."""

    places: Tensor  # of these classes in the federation's list
    tensors: Tree  # named as by `flatten_upload`


class MemberUploads(LatestUploads):
    """Keeps every member's latest upload and its round, as LatestUploads does, but sparse.

    class_groups  the groups that have one weight per class
    classes       how many there are
    adds          whether `recall` returns the sum of the uploads, with an axis of length 1
    """

    def __init__(self, class_groups: Collection[str], classes: int, adds: bool = False) -> None:
        super().__init__(0)
        self.class_groups = frozenset(class_groups)
        self.classes = classes
        self.adds = adds
        self.stored: dict[int, StoredUpload] = {}

    # --- changes

    def put(self, client: int, upload: Upload, places: Tensor, round: int) -> None:
        """Replace one member's upload, whose rows are those of the classes at these places."""
        self.stored[client] = StoredUpload(places, flatten_upload(upload))
        self.last_round[client] = round

    def _has_rows(self, name: str) -> bool:
        """Return whether a tensor has one row per class."""
        return name.partition("/")[0] in self.class_groups

    def add_clients(self, clients: int) -> None:
        """Make room for further members, so that there are `clients` in all."""
        self.last_round = pad_rows(self.last_round, clients)

    def remove(self, client: int) -> None:
        """Forget a member's upload; its number stays taken."""
        if client < len(self.last_round):
            self.last_round[client] = 0
        self.stored.pop(client, None)

    def widen(self, classes: int, groups: Collection[str]) -> None:
        """Append classes, so that there are `classes`; nobody has values for them."""
        self.classes = classes

    def keep_classes(self, places: Tensor, groups: Collection[str]) -> None:
        """Keep only the classes at these places of the list, in this order."""
        new_places = torch.full((self.classes,), -1)
        new_places[places] = torch.arange(len(places))
        for client, stored in self.stored.items():
            moved = new_places[stored.places]
            rows = (moved >= 0).nonzero().flatten()
            tensors = dict(stored.tensors)
            for name, value in stored.tensors.items():
                if self._has_rows(name):
                    tensors[name] = value[rows]
            self.stored[client] = StoredUpload(moved[rows], tensors)
        self.classes = len(places)

    # --- what is stored

    def get(self, client: int) -> Upload:
        """Return one member's upload over all classes; KeyError if there is none."""
        return map_one(self._stack([client]))

    def recall(self, round: int | None = None) -> Upload | None:
        """Return the latest uploads of all members that have one, or only those of one round.

        They have a leading axis over these members, of length 1 with `adds`; None: there are none.
        """
        clients = self.clients(round)
        if not clients:
            return None
        return self._sum(clients) if self.adds else self._stack(clients)

    def _stack(self, clients: Sequence[int]) -> Upload:
        """Return uploads over all classes, one after the other."""
        return unflatten_upload(self._map_tensors(clients, self._spread))

    def _sum(self, clients: Sequence[int]) -> Upload:
        """Return the sum of uploads: that of `_stack`, without its zeros if there are many."""
        return unflatten_upload(self._map_tensors(clients, self._add))

    def _map_tensors(
        self, clients: Sequence[int], join: Callable[[str, Sequence[int], Tensor], Tensor]
    ) -> Tree:
        """Return what `join` makes of each tensor; it is given an example of the tensor."""
        examples: Tree = {}
        for client in clients:
            for name, value in self.stored[client].tensors.items():
                examples.setdefault(name, value)
        return {name: join(name, clients, example) for name, example in examples.items()}

    def _spread(self, name: str, clients: Sequence[int], example: Tensor) -> Tensor:
        """Return a tensor of several members, zeros where one of them has no value."""
        has_rows = self._has_rows(name)
        shape = (self.classes, *example.shape[1:]) if has_rows else example.shape
        spread = example.new_zeros(len(clients), *shape)
        for position, client in enumerate(clients):
            places, tensors = self.stored[client]
            value = tensors.get(name)
            if value is None:
                continue
            if has_rows:
                spread[position].index_copy_(0, places, value)
            else:
                spread[position] = value
        return spread

    def _add(self, name: str, clients: Sequence[int], example: Tensor) -> Tensor:
        """Return the sum of a tensor over members, with a leading axis of 1."""
        has_rows = self._has_rows(name)
        shape = (self.classes, *example.shape[1:]) if has_rows else (1, *example.shape)
        total_like = example.new_zeros(shape)
        if len(clients) * total_like.numel() <= LARGEST_SPREAD_VALUES:
            return self._spread(name, clients, example).sum(0, keepdim=True)
        total = add_rows(self._rows_to_add(name, clients, total_like[:0]), total_like)
        return total[None] if has_rows else total

    def _rows_to_add(
        self, name: str, clients: Sequence[int], no_rows: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each member's rows of a tensor and their places; what has no rows is one row."""
        first_place = torch.zeros(1, dtype=torch.int64)
        for client in clients:
            places, tensors = self.stored[client]
            value = tensors.get(name)
            if value is None:
                yield first_place[:0], no_rows
            elif self._has_rows(name):
                yield places, value
            else:
                yield first_place, value[None]

    # --- files

    def export(self) -> Tree:
        """Return the rounds as `last`, and of each upload its rows and the places of its classes.

        The rows of all members are one after the other, in the order of their numbers.
        """
        clients = sorted(self.stored)
        rows = [self.stored[client].places for client in clients]
        tensors = {
            _LAST_ROUND: self.last_round,
            f"{_UPLOADS}{_CLASSES}": torch.tensor(self.classes),
            f"{_UPLOADS}{_ROWS}": torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64),
            f"{_UPLOADS}counts": torch.tensor([len(each) for each in rows], dtype=torch.int64),
        }

        def join(name: str, clients: Sequence[int], example: Tensor) -> Tensor:
            if not self._has_rows(name):
                return self._spread(name, clients, example)
            values = []
            for client in clients:
                places, own = self.stored[client]
                empty = example.new_zeros(len(places), *example.shape[1:])
                values.append(own.get(name, empty))
            return torch.cat(values)

        for name, value in self._map_tensors(clients, join).items():
            tensors[f"{_UPLOADS}values.{name}"] = value
        return tensors

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `export` returned; ValueError if that is damaged."""
        self.last_round = tensors[_LAST_ROUND]
        self.classes = int(tensors[f"{_UPLOADS}{_CLASSES}"])
        places = tensors[f"{_UPLOADS}{_ROWS}"]
        counts = tensors[f"{_UPLOADS}counts"].tolist()
        clients = self.clients()
        is_whole = len(counts) == len(clients) and sum(counts) == len(places)
        if not is_whole or (len(places) and int(places.max()) >= self.classes):
            raise ValueError("its uploads are not those of its members and classes")
        prefix = f"{_UPLOADS}values."
        values = {key.removeprefix(prefix): tensors[key] for key in tensors if prefix in key}
        first = 0
        for position, client in enumerate(clients):
            end = first + counts[position]
            own: Tree = {}
            for name, value in values.items():
                lines = len(places) if self._has_rows(name) else len(clients)
                if len(value) != lines:
                    raise ValueError("its uploads are not those of its members and classes")
                own[name] = (value[first:end] if self._has_rows(name) else value[position]).clone()
            self.stored[client] = StoredUpload(places[first:end].clone(), own)
            first = end


def map_one(uploads: Upload) -> Upload:
    """Return the only upload of a stack of one."""
    return {name: map_group(group, lambda value: value[0]) for name, group in uploads.items()}
