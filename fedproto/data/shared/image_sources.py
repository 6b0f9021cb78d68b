"""A source made of image files with labels: what folders of images and lists of them share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from fedproto.data import Source, Split, from_arrays
from fedproto.data.shared.dicom import Window, is_window
from fedproto.data.shared.images import (
    Examination,
    ImageFile,
    ImageFormat,
    LazyImages,
    agree_on_format,
    describe_broken,
    examine,
    list_errors,
)
from fedproto.errors import ConfigError, DataError

#: What is done about broken files.
Broken = Literal["refuse", "skip"]


class ImageOptions(NamedTuple):
    """The options that all sources of image files have."""

    size: int | None
    grey: bool | None
    window: tuple[float, ...] | None
    broken: Broken
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool


@dataclass(frozen=True)
class LabelledFiles:
    """The image files of one set, as lists of equal length; paths are texts to save memory."""

    paths: list[str]
    labels: list[str]
    clients: list[str] | None = None
    groups: list[str] | None = None

    def select(self, rows: Sequence[int]) -> LabelledFiles:
        """Return some of the files."""
        return LabelledFiles(
            [self.paths[row] for row in rows],
            [self.labels[row] for row in rows],
            _select(self.clients, rows),
            _select(self.groups, rows),
        )


def _select(values: list[str] | None, rows: Sequence[int]) -> list[str] | None:
    return None if values is None else [values[row] for row in rows]


def from_image_files(
    name: str,
    sets: Mapping[str, LabelledFiles],
    options: ImageOptions,
    notices: Sequence[str] = (),
) -> Source:
    """Return a source of image files, which stay on disk until used.

    `sets` are the files for `train` and perhaps for `test` and `validation`; without test files,
    some are held out. Classes are the labels of the training set, sorted. Raises one DataError
    about all broken files, unless they are to be skipped.
    """
    window = check_window(options.window)
    found = examine(_list_files(sets), pixels=options.broken == "skip", window=window)
    all_notices = list(notices)
    if found.errors:
        _refuse_broken(found, options.broken)
        sets = _skip_broken(name, sets, [header is None for header in found.headers])
        all_notices.append(_describe_skipped(found))
    format = agree_on_format(found, options.size, options.grey, window)
    names = tuple(sorted(set(sets["train"].labels)))
    number_of = {label: number for number, label in enumerate(names)}
    splits = {part: _make_split(name, files, number_of, format) for part, files in sets.items()}
    source = from_arrays(
        name,
        names,
        [splits[part] for part in ("train", "test") if part in splits],
        validation=splits.get("validation"),
        mean=options.mean,
        std=options.std,
        augment=options.augment,
    )
    return replace(source, scale=format.white, window=window, notices=tuple(all_notices))


def _make_split(
    name: str, files: LabelledFiles, number_of: Mapping[str, int], format: ImageFormat
) -> Split:
    """Return the files of a set as a split; refused if the training set lacks a class of theirs."""
    for path, label in zip(files.paths, files.labels, strict=True):
        if label not in number_of:
            raise DataError(
                f"{name}: {path} is of the class {label!r}, of which the training set has no "
                "image: add some, or remove it"
            )
    y = np.array([number_of[label] for label in files.labels], np.int64)
    clients = None if files.clients is None else np.array(files.clients)
    groups = None if files.groups is None else np.array(files.groups)
    return Split(LazyImages(files.paths, format), y, clients, groups, files.paths.__getitem__)


def check_window(window: tuple[float, ...] | None) -> Window | None:
    """Return the centre and the width of a window, or raise ConfigError."""
    if window is None:
        return None
    if not is_window(list(window)):
        written = ",".join(f"{value:g}" for value in window)
        raise ConfigError(
            f'window must be a centre and a width of at least 1, such as "40,400", not "{written}"'
        )
    return window[0], window[1]


# --- broken files


def _list_files(sets: Mapping[str, LabelledFiles]) -> Iterator[ImageFile]:
    for files in sets.values():
        for path in files.paths:
            yield ImageFile(path, path)


def _refuse_broken(found: Examination, broken: Broken) -> None:
    """Refuse broken files, unless they are to be skipped and others are left."""
    count = len(found.names)
    if broken == "refuse":
        what = "it" if len(found.errors) == 1 else "them"
        hint = f"; broken=skip goes on without {what}"
        raise DataError(describe_broken(found.errors, count, hint))
    if len(found.errors) == count:
        raise DataError(describe_broken(found.errors, count))


def _skip_broken(
    name: str, sets: Mapping[str, LabelledFiles], is_broken: Sequence[bool]
) -> dict[str, LabelledFiles]:
    """Return the sets without their broken files; refused if nothing is left of one."""
    kept = {}
    start = 0
    for part, files in sets.items():
        end = start + len(files.paths)
        flags = is_broken[start:end]
        kept[part] = files.select([row for row, flag in enumerate(flags) if not flag])
        start = end
        if not kept[part].paths:
            raise DataError(f"{name}: all {len(flags):,} images of {part} are broken")
    return kept


def _describe_skipped(found: Examination) -> str:
    count = len(found.names)
    verb = "was" if len(found.errors) == 1 else "were"
    listed = list_errors(found.errors)
    return f"{len(found.errors):,} of {count:,} image files {verb} skipped: {listed}"
