"""Which members a run's global prototypes are made of: members join, bring classes, and leave.

RUN/prototypes.safetensors  the prototypes as training left them
RUN/members.safetensors     the prototypes after members joined or left, with everybody's upload;
                            if it exists, it takes the place of prototypes.safetensors
RUN/start.safetensors       the prototypes that the run started from, if it was given any
RUN/upload.safetensors      what a newcomer would send, by class name
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedproto.config import plugins
from fedproto.config.choices import parse_choice
from fedproto.config.config_file import read_run_toml
from fedproto.config.options import Part
from fedproto.config.settings import DEFAULTS, SUM
from fedproto.core import files
from fedproto.core.class_names import describe_similar_names, is_plain, list_names, normalise_name
from fedproto.core.client_names import (
    have_other_numbers,
    is_number,
    refuse_equal_names,
)
from fedproto.core.combination import with_combiner
from fedproto.core.prototypes import Tau
from fedproto.core.tensors import FLOATS, flatten_upload, scatter_rows
from fedproto.core.types import Tree, Upload
from fedproto.core.uploads import LatestUploads
from fedproto.errors import ConfigError, DataError, RunFolderError, shown
from fedproto.membership.contribution import Contribution, has_prototypes, read_file_classes
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import (
    MEMBERS,
    PROTOTYPES,
    PROTOTYPES_FORMAT,
    START,
    Prototypes,
    read_class_names,
    read_prototypes,
)

#: Algorithms whose server needs only the sum of the latest uploads.
SUMMED_ALGORITHMS = ("fedproto", "fedproto-mh")
#: Every upload counts as one of round 1: which round it came from no longer matters.
JOINING_ROUND = 1


@dataclass(frozen=True)
class Membership:
    """Every member's latest upload; the global prototypes are made of these and nothing else.

    That is why a member can leave exactly: what remains is summed again, as if its upload had never
    come. What the others learned from it while it was there stays in their models.
    """

    classes: tuple[str, ...]
    algorithm: Part
    members: dict[str, int]  # by name, in order of joining: the number of its upload
    uploads: LatestUploads  # over `classes`
    base: Prototypes | None = None  # given to training, for classes that no member holds
    changes: tuple[dict[str, Any], ...] = ()  # who joined and left, in order
    combiner: Part = SUM  # what the prototypes are made of the uploads by

    # --- reading and writing

    def __repr__(self) -> str:
        return f"<{len(self.members)} members: {list_names(list(self.members))}>"

    @classmethod
    def of(cls, folder: RunFolder) -> Membership:
        """Return a run's membership: as it was saved, or as it was when training ended."""
        saved = folder.path / MEMBERS
        return cls._load(saved) if saved.exists() else cls._from_training(folder)

    @classmethod
    def _from_training(cls, folder: RunFolder) -> Membership:
        path = folder.path
        algorithm = read_choice(folder, "algorithm")
        if algorithm.options.get("fixed"):
            raise RunFolderError(
                f"{path} is the run of a newcomer that joined a federation; "
                "name the run of that federation instead"
            )
        built = plugins.build("algorithm", algorithm)
        if built.uses_fixed:
            raise RunFolderError(
                f"{path} is a run of {algorithm.name}, whose clients send no prototypes, so nobody "
                "can join or leave it here: run it again without whoever leaves, or use a "
                "teacher beside fedproto"
            )
        if not built.remembers:
            raise RunFolderError(
                f"the server of {path} keeps no single uploads, only their sum, so nobody can join "
                "or leave it exactly: this needs a run of fedproto with absent=remember"
            )
        checkpoint = folder.load_checkpoint()
        if checkpoint is None or not has_prototypes(checkpoint[1]):
            raise RunFolderError(f"{path} has no checkpoint with its members' uploads")
        _, tensors = checkpoint
        classes = read_file_classes(path / PROTOTYPES)
        uploads = _restore_uploads(tensors, classes, f"the checkpoint of {path}")
        names = _read_client_names(folder)
        members = {names.get(client, str(client)): client for client in uploads.clients()}
        base = read_prototypes(path / START) if (path / START).exists() else None
        combiner = read_choice(folder, "combiner")
        return cls(classes, algorithm, members, uploads, base, combiner=combiner)

    @classmethod
    def _load(cls, path: Path) -> Membership:
        tensors, header = files.read_tensors(path, PROTOTYPES_FORMAT)
        missing = {"algorithm", "members", "changes"} - header.keys()
        if missing:
            raise DataError(f"{path} is not a file of members: it lacks {min(missing)!r}")
        algorithm = _parse_choice("algorithm", header["algorithm"], path)
        combiner = _parse_choice("combiner", header.get("combiner", SUM.name), path)
        classes = read_class_names(header, path)
        uploads = _restore_uploads(tensors, classes, str(path))
        return cls(
            classes,
            algorithm,
            _check_members(header["members"], uploads, path),
            uploads,
            _read_base(tensors, classes, uploads, path),
            _check_changes(header["changes"], path),
            combiner,
        )

    def save(self, folder: RunFolder) -> None:
        """Write the prototypes and what they are made of to the run's members.safetensors."""
        prototypes = self.prototypes()
        tensors = {"prototypes": prototypes.values, "known": prototypes.known}
        tensors |= self.uploads.export()
        if self.base is not None:
            base = self.base.over(self.classes)
            tensors |= {"base": base.values, "base_known": base.known}
        header = {
            "classes": list(self.classes),
            "algorithm": str(self.algorithm),
            "members": self.members,
            "changes": list(self.changes),
        }
        if self.combiner != SUM:
            header["combiner"] = str(self.combiner)
        with folder.hold():
            files.write_tensors(folder.path / MEMBERS, tensors, PROTOTYPES_FORMAT, header)

    # --- what the members make up

    def prototypes(self) -> Prototypes:
        """Return the prototypes of the members that are there (Eq. 6).

        A class that no member holds has the prototype that training was given, or none.
        """
        if self.algorithm.name in SUMMED_ALGORITHMS and self.combiner == SUM:
            uploads = self.uploads.sum()
        else:
            uploads = self.uploads.recall()
        assert uploads is not None, "a membership has at least one member"
        zeros = torch.zeros_like(uploads["prototypes"].sums["prototypes"][0])
        server = {"prototypes": zeros, "known": zeros[:, 0]}
        if self.base is not None:
            base = self.base.over(self.classes)
            server = {"prototypes": base.values.to(zeros), "known": base.known.to(zeros)}
        combiner = plugins.build("combiner", self.combiner)
        algorithm = with_combiner(plugins.build("algorithm", self.algorithm), combiner)
        server = algorithm.aggregate(server, uploads)
        options = self.algorithm.options
        return Prototypes(
            self.classes,
            server["prototypes"],
            server["known"],
            options.get("weighting"),
            Tau.of(options),
        )

    def upload_of(self, name: str) -> Upload:
        """Return a member's latest upload, with one row for each class."""
        return self.uploads.get(self.members[name])

    def held_by(self, name: str) -> list[str]:
        """Return the classes for which a member's upload has a weight."""
        held = self.upload_of(name)["prototypes"].weight.nonzero().flatten()
        return [self.classes[place] for place in held.tolist()]

    def _held_by_all(self) -> set[str]:
        """Return the classes that at least one member holds."""
        held: set[str] = set()
        for name in self.members:
            held.update(self.held_by(name))
        return held

    def notices(self) -> list[str]:
        """Return a warning for each group of classes whose names look alike."""
        return describe_similar_names(self.classes)

    # --- who is there

    def find(self, text: str) -> str:
        """Return the name of the member with this name or number."""
        name = normalise_name(text)
        if name in self.members:
            return name
        called = {number: each for each, number in self.members.items()}
        if is_number(name) and int(name) in called and not have_other_numbers(called.items()):
            return called[int(name)]
        raise DataError(
            f"there is no member {shown(text, 60)}: there are {list_names(list(self.members))}"
        )

    def added(self) -> dict[str, Path | None]:
        """Return the members that joined after training, with their run folders where known."""
        added: dict[str, Path | None] = {}
        for change in self.changes:
            if change["did"] == "joined":
                folder = change.get("folder")
                added[change["member"]] = None if folder is None else Path(folder)
            else:
                added.pop(change["member"], None)
        return added

    def left(self) -> set[str]:
        """Return the clients that took part in training and have left."""
        joined: set[str] = set()
        left: set[str] = set()
        for change in self.changes:
            name = change["member"]
            if change["did"] == "joined":
                joined.add(name)
            elif name in joined:
                joined.remove(name)
            else:
                left.add(name)
        return left

    def holds(self, contribution: Contribution) -> bool:
        """Return whether this is the upload of the member with its name, value by value."""
        upload = self.upload_of(contribution.member)
        if not set(contribution.classes) <= set(self.classes):
            return False
        contribution.check_layout(upload)
        places = torch.tensor([self.classes.index(each) for each in contribution.classes])
        other = _spread(contribution.cast(upload).upload, places, len(self.classes))
        others = flatten_upload(other)
        own = flatten_upload(upload)
        return all(torch.equal(value, others[name]) for name, value in own.items())

    # --- joining and leaving

    def with_member(self, contribution: Contribution) -> Membership:
        """Return the membership with a newcomer's upload; new classes come after the others.

        Raises DataError if the name is taken or the upload does not fit those of the others.
        """
        name = contribution.member
        if name in self.members:
            raise DataError(
                f"there is a member {name!r} already: give the newcomer another name, "
                "or remove the member first"
            )
        like = self.upload_of(next(iter(self.members)))
        contribution.check_layout(like)
        contribution = contribution.cast(like)
        contribution.check_values(uniform=self.algorithm.options.get("weighting") == "uniform")
        classes = tuple(dict.fromkeys((*self.classes, *contribution.classes)))
        number = len(self.uploads.last_round)
        uploads = self.uploads.copy()
        uploads.widen(len(classes), contribution.upload)
        uploads.add_clients(number + 1)
        places = torch.tensor([classes.index(each) for each in contribution.classes])
        upload = _spread(contribution.upload, places, len(classes))
        uploads.store_one(number, upload, JOINING_ROUND)
        held_before = self._held_by_all()
        brought = [each for each in contribution.classes if each not in held_before]
        change = _describe_change("joined", name, brought)
        if contribution.folder is not None:  # `extend` trains it there
            change["folder"] = str(contribution.folder.resolve())
        joined = replace(
            self,
            classes=classes,
            members=self.members | {name: number},
            uploads=uploads,
            changes=(*self.changes, change),
        )
        if not torch.isfinite(joined.prototypes().values).all():
            raise DataError(
                f"the upload of {name!r} is too large: with it the prototypes are not finite"
            )
        return joined

    def without(self, name: str) -> Membership:
        """Return the membership as if this member had never uploaded; classes keep their places.

        Raises DataError if there is no such member, or if it is the last one.
        """
        name = self.find(name)
        if len(self.members) == 1:
            raise DataError(f"{name!r} is the last member: without members there are no prototypes")
        uploads = self.uploads.copy()
        uploads.remove(self.members[name])
        members = {each: number for each, number in self.members.items() if each != name}
        rest = replace(self, members=members, uploads=uploads)
        held = self.held_by(name)
        held_by_others = rest._held_by_all()
        lost = [each for each in held if each not in held_by_others]
        base = self.base
        if base is not None:
            # The leaver may have been part of the given prototypes of its classes.
            base = base.over(tuple(each for each in self.classes if each not in held))
        change = _describe_change("left", name, lost)
        return replace(rest, base=base, changes=(*self.changes, change))


def _describe_change(did: str, member: str, classes: list[str]) -> dict[str, Any]:
    """Return an entry of `changes`; `classes` are those nobody else held before or holds now."""
    return {"member": member, "did": did, "classes": classes}


# --- what files hold


def read_choice(folder: RunFolder, kind: str) -> Part:
    """Return a run's algorithm, its combiner or its teacher, with the options."""
    path = folder.path / "config.toml"
    settings = DEFAULTS | read_run_toml(path)
    plugins.refuse_plugins({kind: settings[kind]}, path)
    part = parse_choice(kind, settings[kind])
    options = dict(part.options)
    for key, value in settings.items():
        if key.startswith(f"{kind}."):
            options[key.removeprefix(f"{kind}.")] = value
    return replace(part, options=options)


def _parse_choice(kind: str, stated: Any, path: Path) -> Part:
    """Return the plug-in that a file names; code from outside the package is refused."""
    if not isinstance(stated, str):
        raise DataError(f"{path} is corrupted: its {kind} is not text")
    try:
        part = parse_choice(kind, stated)
    except (ConfigError, ValueError) as error:
        raise DataError(f"{path} is corrupted: {error}") from error
    plugins.refuse_plugins({kind: stated}, path)
    return part


def _restore_uploads(tensors: Tree, classes: tuple[str, ...], where: str) -> LatestUploads:
    """Return the stored uploads, which must be finite prototypes of these classes."""
    try:
        uploads = LatestUploads.restore(tensors)
    except ValueError as error:
        raise DataError(f"{where} is corrupted: {error}") from error
    stored = uploads.uploads
    if stored is None or not has_prototypes(tensors) or not uploads.clients():
        raise DataError(f"{where} is corrupted: it holds no uploads of prototypes")
    clients = len(uploads.last_round)
    weight_shapes = {group.weight.shape for group in stored.values()}
    values = stored["prototypes"].sums["prototypes"]
    if weight_shapes != {(clients, len(classes))} or values.dim() != 3:
        raise DataError(f"{where} is corrupted: its uploads are not those of its classes")
    for name, value in flatten_upload(stored).items():
        if not torch.isfinite(value).all():
            raise DataError(f"{where} is corrupted: {name} has values that are not finite")
    return uploads


def _spread(upload: Upload, places: torch.Tensor, classes: int) -> Upload:
    """Return an upload over all classes: its rows at these places, and zeros elsewhere."""
    return {name: scatter_rows(group, places, classes) for name, group in upload.items()}


def _check_members(stated: Any, uploads: LatestUploads, path: Path) -> dict[str, int]:
    """Return the members' names and the numbers of their uploads, in the order of the numbers."""
    numbers = list(stated.values()) if isinstance(stated, dict) else []
    are_numbers = all(type(number) is int for number in numbers)
    if are_numbers and not all(is_plain(name) for name in stated or ()):
        raise DataError(f"{path} is corrupted: a member's name must be a line of text")
    if not are_numbers or sorted(numbers) != uploads.clients():
        raise DataError(f"{path} is corrupted: its members are not those of its uploads")
    return dict(sorted(stated.items(), key=lambda member: member[1]))


def _check_changes(stated: Any, path: Path) -> tuple[dict[str, Any], ...]:
    keys = {"member", "did", "classes"}
    changes = stated if isinstance(stated, list) else [None]
    for change in changes:
        if not isinstance(change, dict) or not keys <= change.keys() or not _is_change(change):
            raise DataError(f"{path} is corrupted: its changes do not say who joined or left")
    return tuple(changes)


def _is_change(change: dict[str, Any]) -> bool:
    """Return whether the values of an entry of `changes` have the right types."""
    member = change["member"]
    classes = change["classes"]
    folder = change.get("folder", "")
    is_member = isinstance(member, str) and is_plain(member)
    are_classes = isinstance(classes, list) and all(isinstance(each, str) for each in classes)
    is_known = change["did"] in ("joined", "left")
    return is_member and are_classes and is_known and isinstance(folder, str)


def _read_client_names(folder: RunFolder) -> dict[int, str]:
    """Return what the clients of a finished run are called; those without a name are left out."""
    result = folder.result() or {"clients": []}
    names: dict[int, str] = {}
    for number, client in enumerate(result["clients"]):
        if "name" in client:
            names[number] = client["name"]
    refuse_equal_names(list(names.values()))
    return names


def _read_base(
    tensors: Tree, classes: tuple[str, ...], uploads: LatestUploads, path: Path
) -> Prototypes | None:
    """Return the prototypes that training was given, if the file has any."""
    if "base" not in tensors:
        return None
    assert uploads.uploads is not None, "the uploads were checked before"
    shape = uploads.uploads["prototypes"].sums["prototypes"].shape[1:]
    values = tensors["base"]
    known = tensors.get("base_known")
    if known is None or values.shape != shape or known.shape != shape[:1]:
        raise DataError(f"{path} is corrupted: its given prototypes are not those of its classes")
    if values.dtype not in FLOATS or not torch.isfinite(values).all():
        raise DataError(f"{path} is corrupted: its given prototypes are not finite numbers")
    return Prototypes(classes, values, known)
