"""The global prototypes as a file, and who contributed what to them: members join, bring new classes, and leave.

RUN/prototypes.safetensors  as training left them
RUN/members.safetensors     as they are since members came or went; whoever reads a run's prototypes reads these first
RUN/start.safetensors       those it started from, where it was given some
RUN/upload.safetensors      what a newcomer would send, by class name
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from fedproto.config import plugins
from fedproto.config.choices import parse_choice
from fedproto.config.config_file import read_run_toml
from fedproto.config.options import Part
from fedproto.core import files
from fedproto.core.class_names import class_name, describe_similar_names
from fedproto.core.tensors import (
    FLOATS,
    flatten_groups,
    pad_rows,
    scatter_rows,
    split_groups,
    stack_uploads,
    take_one,
)
from fedproto.core.types import Tree, Upload
from fedproto.errors import ConfigError, DataError, RunFolderError
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import (
    MEMBERS,
    PROTOTYPES,
    PROTOTYPES_FORMAT,
    START,
    UPLOAD,
    UPLOAD_FORMAT,
    Prototypes,
    read_class_names,
    read_prototypes,
)

#: Methods whose server needs no more than the sum of what it remembers.
SUMMED = ("fedproto", "fedproto-mh")


@dataclass(frozen=True)
class Contribution:
    """A member's upload by class name: row i of every tensor is of class i."""

    member: str
    classes: tuple[str, ...]
    upload: Upload

    def __post_init__(self) -> None:
        where = f"the upload of {self.member!r} has a class"
        names = tuple(class_name(name, where) for name in self.classes)
        if len(set(names)) < len(names):
            raise DataError(f"the upload of {self.member!r} names a class twice")
        object.__setattr__(self, "classes", names)  # frozen for everybody else

    def save(self, path: Path) -> None:
        header = {"member": self.member, "classes": list(self.classes)}
        files.write_tensors(path, flatten_groups(self.upload._asdict()), UPLOAD_FORMAT, header)

    @classmethod
    def of(cls, member: str, classes: tuple[str, ...], upload: Upload) -> Contribution:
        """Of an upload over a federation's classes: the rows it speaks of."""
        own = upload.weights["weight"].nonzero().flatten()
        rows = Upload(
            *({name: value[own].cpu() for name, value in tree.items()} for tree in upload)
        )
        return cls(member, tuple(classes[row] for row in own.tolist()), rows)

    @classmethod
    def load(cls, path: Path) -> Contribution:
        """Of a file, or of a newcomer's run folder, whose join may have been stopped and resumed."""
        if path.is_dir() and not (path / UPLOAD).exists() and (path / "config.toml").exists():
            return cls._resumed(RunFolder(path))
        path = path / UPLOAD if path.is_dir() else path
        tensors, header = files.read_tensors(path, UPLOAD_FORMAT)
        member = header.get("member") or path.parent.name
        return cls(str(member), read_class_names(header, path), _uploads_of(tensors))

    @classmethod
    def _resumed(cls, folder: RunFolder) -> Contribution:
        stored = folder.load_checkpoint()
        if stored is None or folder.result() is None or "sums.prototypes" not in stored[1]:
            raise DataError(
                f"{folder.path} holds no {UPLOAD}, and is no finished run of fedproto: `fedproto resume` it"
            )
        if len(stored[1]["last"]) != 1:
            raise DataError(
                f"{folder.path} is a run of several members: a newcomer's folder of `fedproto join` is wanted"
            )
        names = _classes_of(folder.path / PROTOTYPES)
        return cls.of(folder.path.name, names, take_one(_uploads_of(stored[1]), 0))


@dataclass(frozen=True)
class Membership:
    """Every member's last upload, over one list of classes; the global prototypes are made of these and nothing else.

    That is why a member can leave exactly: what remains is summed anew, as if its upload had never come. What the
    others learned from it while it was there stays in their models.
    """

    classes: tuple[str, ...]
    algorithm: Part
    members: dict[str, Upload]
    base: Prototypes | None = (
        None  # those training was given, for classes of which no member speaks
    )
    changes: tuple[dict[str, Any], ...] = ()  # who came and left, in order

    @classmethod
    def of(cls, folder: RunFolder) -> Membership:
        """A run's bank: as it was saved, or what its server remembered when training ended."""
        saved = folder.path / MEMBERS
        return cls._load(saved) if saved.exists() else cls._of_training(folder)

    @classmethod
    def _of_training(cls, folder: RunFolder) -> Membership:
        algorithm, stored = _algorithm_of(folder), folder.load_checkpoint()
        if algorithm.options.get("fixed"):
            raise RunFolderError(
                f"{folder.path} is a newcomer beside somebody else's prototypes: name the federation that it joined"
            )
        if not plugins.build("algorithm", algorithm).remembers:
            raise RunFolderError(
                f"the server of {folder.path} keeps no single uploads, only their sum, so nobody can join or leave it "
                "exactly: a run of fedproto with absent=remember is wanted"
            )
        if stored is None or not {"sums.prototypes", "weights.weight", "last"} <= stored[1].keys():
            raise RunFolderError(f"{folder.path} has no checkpoint with its members' uploads")
        tree = stored[1]
        spoke = tree["last"].nonzero().flatten().tolist()
        uploads = _uploads_of(tree)
        members = {str(client): take_one(uploads, client) for client in spoke}
        base = read_prototypes(folder.path / START) if (folder.path / START).exists() else None
        return cls(_classes_of(folder.path / PROTOTYPES), algorithm, members, base)

    @classmethod
    def _load(cls, path: Path) -> Membership:
        tensors, header = files.read_tensors(path, PROTOTYPES_FORMAT)
        try:
            algorithm = parse_choice("algorithm", header["algorithm"])
            uploads = _uploads_of(tensors)
            members = {
                name: take_one(uploads, place) for place, name in enumerate(header["members"])
            }
            changes = tuple(header["changes"])
            base_values = (tensors["base"], tensors["base_known"]) if "base" in tensors else None
        except KeyError as error:
            raise DataError(f"{path} is not a file of members: it lacks {error}") from error
        except (ValueError, IndexError, TypeError, ConfigError) as error:
            raise DataError(f"{path} is damaged: {error}") from error
        plugins.refuse_plugins({"algorithm": header["algorithm"]}, path)
        classes = read_class_names(header, path)
        base = Prototypes(classes, *base_values) if base_values else None
        bank = cls(classes, algorithm, members, base, changes)
        if not bank._is_sound():
            raise DataError(
                f"{path} is damaged: its members, changes or tensors are not those of its classes"
            )
        return bank

    def _is_sound(self) -> bool:
        """Whether members, changes and tensors are of the kinds and shapes that the rest relies upon."""
        keys = {"member", "did", "classes"}
        if not self.members or not all(isinstance(name, str) for name in self.members):
            return False
        if not all(isinstance(change, dict) and keys <= change.keys() for change in self.changes):
            return False
        rows = len(self.classes)
        for upload in self.members.values():
            if "prototypes" not in upload.sums or "weight" not in upload.weights:
                return False
            for value in (*upload.sums.values(), *upload.weights.values()):
                if (
                    value.dtype not in FLOATS
                    or value.shape[:1] != (rows,)
                    or not torch.isfinite(value).all()
                ):
                    return False
        wanted = next(iter(self.members.values())).sums["prototypes"].shape
        given = wanted if self.base is None else self.base.values.shape
        return (
            len(wanted) == 2
            and given == wanted
            and (self.base is None or self.base.known.shape == wanted[:1])
        )

    def save(self, folder: RunFolder) -> None:
        made = self.prototypes()
        tensors = {"prototypes": made.values, "known": made.known}
        if self.members:
            tensors |= flatten_groups(stack_uploads(list(self.members.values()))._asdict())
        header = {
            "classes": list(self.classes),
            "algorithm": str(self.algorithm),
            "members": list(self.members),
            "changes": list(self.changes),
        }
        if self.base is not None:
            base = self.base.over(self.classes)
            tensors |= {"base": base.values, "base_known": base.known}
        with folder.hold():
            files.write_tensors(folder.path / MEMBERS, tensors, PROTOTYPES_FORMAT, header)

    def prototypes(self) -> Prototypes:
        """Eq. 6 over the members that are there; a class of which none of them speaks has none, or what was given."""
        algorithm, uploads = plugins.build("algorithm", self.algorithm), list(self.members.values())
        zeros = torch.zeros_like(uploads[0].sums["prototypes"])
        base = (
            self.base.over(self.classes)
            if self.base
            else Prototypes(self.classes, zeros, zeros[:, 0])
        )
        server = {"prototypes": base.values.to(zeros), "known": base.known.to(zeros)}
        server = algorithm.aggregate(
            server, _added(uploads) if self.algorithm.name in SUMMED else stack_uploads(uploads)
        )
        return Prototypes(
            self.classes,
            server["prototypes"],
            server["known"],
            self.algorithm.options.get("weighting"),
        )

    def with_member(self, contribution: Contribution) -> Membership:
        """The bank with an upload folded in; its classes that nobody had come after those that are there."""
        name = contribution.member
        if name in self.members:
            raise DataError(f"there is a member {name!r} already: give the newcomer another name")
        contribution = self._checked(contribution)
        classes = tuple(dict.fromkeys((*self.classes, *contribution.classes)))
        members = {each: _widened(upload, len(classes)) for each, upload in self.members.items()}
        members[name] = _placed(contribution, classes)
        new = [each for each in contribution.classes if each not in self._spoken()]
        joined = replace(
            self,
            classes=classes,
            members=members,
            changes=(*self.changes, _change("joined", name, new)),
        )
        if not torch.isfinite(joined.prototypes().values).all():
            raise DataError(
                f"the upload of {name!r} is too large: with it the prototypes are not finite"
            )
        return joined

    def without(self, name: str) -> Membership:
        """The bank as if this member's upload had never been summed; classes keep their places."""
        if name not in self.members:
            raise DataError(f"there is no member {name!r}: there are {', '.join(self.members)}")
        if len(self.members) == 1:
            raise DataError(f"{name!r} is the last member: with nobody there are no prototypes")
        rest = replace(
            self, members={each: upload for each, upload in self.members.items() if each != name}
        )
        held = self._held(self.members[name])
        gone = [each for each in self.classes if each in held - rest._spoken()]
        others = tuple(each for each in self.classes if each not in held)
        base = rest.base and rest.base.over(others)  # of the rest it may have been part
        return replace(rest, base=base, changes=(*self.changes, _change("left", name, gone)))

    def notices(self) -> list[str]:
        return describe_similar_names(self.classes)

    def held_by(self, name: str) -> list[str]:
        held = self._held(self.members[name])
        return [each for each in self.classes if each in held]

    def _spoken(self) -> set[str]:
        """The classes of which somebody speaks."""
        return {name for upload in self.members.values() for name in self._held(upload)}

    def _held(self, upload: Upload) -> set[str]:
        return {
            self.classes[place] for place in upload.weights["weight"].nonzero().flatten().tolist()
        }

    def _checked(self, contribution: Contribution) -> Contribution:
        """The contribution in the types of the others' uploads; what is not one must not reach the sums."""
        where, rows = f"the upload of {contribution.member!r}", len(contribution.classes)
        like = next(iter(self.members.values()))
        for mine, theirs in zip(like, contribution.upload, strict=True):
            if set(mine) != set(theirs):
                found, wanted = (", ".join(sorted(tree)) or "nothing" for tree in (theirs, mine))
                raise DataError(
                    f"{where} holds {found}, where {wanted} are wanted: is it of the same method?"
                )
            for name, value in theirs.items():
                if value.shape != (rows, *mine[name].shape[1:]):
                    shapes = tuple(value.shape), (rows, *mine[name].shape[1:])
                    raise DataError(
                        "{} has {} of shape {}, where {} is wanted".format(where, name, *shapes)
                    )
                if value.dtype not in FLOATS:
                    raise DataError(
                        f"{where} has {name} of type {value.dtype}, where floating-point numbers are wanted"
                    )
        contribution = _cast(contribution, like)
        for tree in contribution.upload:
            for name, value in tree.items():
                if not torch.isfinite(value).all():
                    raise DataError(f"{where} has {name} that are not finite")
        for weight in contribution.upload.weights.values():
            if not (weight > 0).all():
                raise DataError(f"{where} names a class with a weight that is not positive")
        if (
            self.algorithm.options.get("weighting") == "uniform"
            and not (contribution.upload.weights["weight"] == 1).all()
        ):
            raise DataError(
                f"{where} is weighed by images, but in this federation every member counts once"
            )
        return contribution


def _classes_of(path: Path) -> tuple[str, ...]:
    """The classes that a file of prototypes is about."""
    _, header = files.read_tensors(path, PROTOTYPES_FORMAT)
    return read_class_names(header, path)


def _algorithm_of(folder: RunFolder) -> Part:
    """The run's method with its options."""
    settings = read_run_toml(folder.path / "config.toml")
    plugins.refuse_plugins({"algorithm": settings["algorithm"]}, folder.path / "config.toml")
    part = parse_choice("algorithm", settings["algorithm"])
    options = {k.partition(".")[2]: v for k, v in settings.items() if k.startswith("algorithm.")}
    return replace(part, options=part.options | options)


def _added(uploads: list[Upload]) -> Upload:
    """Their sum, one after the other: who says nothing of a class changes no bit of it, as in torch's sums he may."""
    return Upload(
        *(
            {name: reduce(torch.add, (tree[name] for tree in trees))[None] for name in trees[0]}
            for trees in zip(*uploads, strict=True)
        )
    )


def _uploads_of(tensors: Tree) -> Upload:
    """What a file holds under `sums.NAME` and `weights.NAME`."""
    parts = split_groups(tensors)
    return Upload(*(parts.get(group, {}) for group in Upload._fields))


def _widened(upload: Upload, classes: int) -> Upload:
    """An upload over more classes, of whose new ones it says nothing."""
    return Upload(
        *({name: pad_rows(value, classes) for name, value in tree.items()} for tree in upload)
    )


def _cast(contribution: Contribution, like: Upload) -> Contribution:
    """The contribution in the types of another upload."""
    trees = []
    for others, tree in zip(like, contribution.upload, strict=True):
        trees.append({name: value.to(others[name]) for name, value in tree.items()})
    return replace(contribution, upload=Upload(*trees))


def _placed(contribution: Contribution, classes: tuple[str, ...]) -> Upload:
    """A contribution's rows in the places of its classes."""
    places = torch.tensor([classes.index(name) for name in contribution.classes])
    return scatter_rows(contribution.upload, places, len(classes))


def _change(did: str, member: str, classes: list[str]) -> dict[str, Any]:
    """`classes`: those that nobody had before, or has any more."""
    return {"member": member, "did": did, "classes": classes}
