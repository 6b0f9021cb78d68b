"""One member's upload by class name, as a newcomer sends it to a federation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedproto.core import files
from fedproto.core.class_names import class_name
from fedproto.core.client_names import chosen_name
from fedproto.core.tensors import (
    FLOATS,
    flatten_upload,
    map_upload,
    select_rows,
    unflatten_upload,
)
from fedproto.core.types import Tree, Upload
from fedproto.core.uploads import LatestUploads, read_uploads
from fedproto.errors import DataError
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import (
    PROTOTYPES,
    PROTOTYPES_FORMAT,
    UPLOAD,
    UPLOAD_FORMAT,
    read_class_names,
)


@dataclass(frozen=True)
class Contribution:
    """A member's upload by class name: row i of every tensor belongs to class i."""

    member: str
    classes: tuple[str, ...]
    upload: Upload
    folder: Path | None = None  # the newcomer's run, where it is at hand

    def __post_init__(self) -> None:
        member = chosen_name(self.member, "the upload is of a member")
        object.__setattr__(self, "member", member)  # frozen for everybody else
        where = f"the upload of {self.member!r} has a class"
        names = tuple(class_name(name, where) for name in self.classes)
        if len(set(names)) < len(names):
            raise DataError(f"the upload of {self.member!r} names a class twice")
        object.__setattr__(self, "classes", names)  # frozen for everybody else

    @classmethod
    def of(cls, member: str, classes: tuple[str, ...], upload: Upload) -> Contribution:
        """Return the rows that have a weight, of an upload over all classes of a federation."""
        has_weight = torch.stack([group.weight > 0 for group in upload.values()]).any(0)
        places = has_weight.nonzero().flatten()
        rows = map_upload(select_rows(upload, places), Tensor.cpu)
        names = tuple(classes[place] for place in places.tolist())
        return cls(member, names, rows)

    @classmethod
    def load(cls, path: Path) -> Contribution:
        """Read a file, or a newcomer's run folder, whose join may have been interrupted.

        Raises DataError if there is no upload, or if it is corrupted.
        """
        if path.is_dir() and not (path / UPLOAD).exists() and (path / "config.toml").exists():
            return cls._from_checkpoint(RunFolder(path))
        is_run = (path / "config.toml").exists()
        folder = path if is_run else None
        path = path / UPLOAD if path.is_dir() else path
        tensors, header = files.read_tensors(path, UPLOAD_FORMAT)
        member = header.get("member") or path.parent.name
        try:
            upload = unflatten_upload(tensors)
        except ValueError as error:
            raise DataError(f"{path} is not an upload: {error}") from error
        return cls(str(member), read_class_names(header, path), upload, folder)

    @classmethod
    def _from_checkpoint(cls, folder: RunFolder) -> Contribution:
        """Return the upload of a newcomer whose join was interrupted and then resumed."""
        path = folder.path
        checkpoint = folder.load_checkpoint()
        result = folder.result()
        if checkpoint is None or result is None or not has_prototypes(checkpoint[1]):
            raise DataError(
                f"{path} holds no {UPLOAD} and is not a finished run of fedproto: "
                "finish it with `fedproto resume`"
            )
        try:
            uploads = LatestUploads.restore(checkpoint[1])
        except ValueError as error:
            raise DataError(f"the checkpoint of {path} is corrupted: {error}") from error
        if len(uploads.last_round) != 1:
            raise DataError(
                f"{path} is a run of several clients: name a newcomer's folder, "
                "which `fedproto join` wrote"
            )
        classes = read_file_classes(path / PROTOTYPES)
        name = result["clients"][0].get("name", "0")
        member = path.name if name == "0" else name
        return replace(cls.of(member, classes, uploads.get(0)), folder=path)

    def save(self, path: Path) -> None:
        """Write the upload to a file that `load` reads."""
        tensors = flatten_upload(self.upload)
        header = {"member": self.member, "classes": list(self.classes)}
        files.write_tensors(path, tensors, UPLOAD_FORMAT, header)

    def cast(self, like: Upload) -> Contribution:
        """Return the contribution in the types of another upload with the same names."""

        others = flatten_upload(like)
        cast = {name: value.to(others[name]) for name, value in self._flat.items()}
        return replace(self, upload=unflatten_upload(cast))

    @property
    def _flat(self) -> Tree:
        return flatten_upload(self.upload)

    def check_layout(self, like: Upload) -> None:
        """Raise DataError unless names and shapes are those of another member's upload."""
        where = f"the upload of {self.member!r}"
        rows = len(self.classes)
        expected = flatten_upload(like)
        found = self._flat
        if set(expected) != set(found):
            found_names = ", ".join(sorted(found)) or "nothing"
            expected_names = ", ".join(sorted(expected)) or "nothing"
            raise DataError(
                f"{where} holds {found_names} instead of {expected_names}: "
                "is it of the same algorithm?"
            )
        for name, value in found.items():
            shape = (rows, *expected[name].shape[1:])
            if value.shape != shape:
                raise DataError(
                    f"{where} has {name} of shape {tuple(value.shape)} instead of {shape}"
                )
            if value.dtype not in FLOATS:
                raise DataError(
                    f"{where} has {name} of type {value.dtype} instead of floating-point numbers"
                )

    def check_values(self, uniform: bool) -> None:
        """Raise DataError unless all values are finite and all weights are positive.

        With `uniform`, every member counts once, so that each weight must be 1.
        """
        where = f"the upload of {self.member!r}"
        for name, value in self._flat.items():
            if not torch.isfinite(value).all():
                raise DataError(f"{where} has {name} with values that are not finite")
        for group in self.upload.values():
            for weight in (group.weight, *group.counts.values()):
                if not (weight > 0).all():
                    raise DataError(f"{where} names a class with a weight that is not positive")
            if uniform and not (group.weight == 1).all():
                raise DataError(
                    f"{where} is weighted by samples, but in this federation every member counts "
                    "once"
                )


def has_prototypes(checkpoint: Tree) -> bool:
    """Return whether a checkpoint holds uploads of prototypes."""
    try:
        uploads = read_uploads(checkpoint)
    except ValueError:
        return False
    return "prototypes" in uploads and "prototypes" in uploads["prototypes"].sums


def read_file_classes(path: Path) -> tuple[str, ...]:
    """Return the classes of a file of prototypes."""
    _, header = files.read_tensors(path, PROTOTYPES_FORMAT)
    return read_class_names(header, path)
