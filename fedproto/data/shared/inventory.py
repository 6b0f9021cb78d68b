"""Which files of the data sets are there, and whether they are the published ones."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path

from fedproto.data import DataFolders
from fedproto.data.shared.catalogue import CATALOGUE, DataSet, File
from fedproto.errors import DataError, unknown

MISSING = "missing"  # a finding's state


@dataclass(frozen=True)
class Finding:
    """The result of checking one file."""

    path: Path
    state: str  # in words
    good: bool = True


def find_data_set(name: str) -> DataSet:
    """Return a data set of the catalogue, or raise ConfigError."""
    if name not in CATALOGUE:
        raise unknown("data set", name, CATALOGUE)
    return CATALOGUE[name]


def find_file(data_set: DataSet, file: File, data_folders: DataFolders) -> Path | None:
    """Return where a file of a data set lies, gzipped or not, if it is there."""
    for data_folder in data_folders.folders():
        for folder in data_set.search_folders:
            for name in (file.name.removesuffix(".gz"), file.name):
                path = data_folder / folder / name
                if path.exists():
                    return path
    return None


def check(name: str, data_folders: DataFolders) -> list[Finding]:
    """Return a finding for each file that the loader of a data set reads."""
    data_set = find_data_set(name)
    findings = []
    for file in data_set.loader_files:
        path = find_file(data_set, file, data_folders)
        if path is None:
            findings.append(Finding(Path(file.name), MISSING, good=False))
        else:
            findings.append(check_file(path, file))
    return findings


def check_all(name: str | None, data_folders: DataFolders) -> list[tuple[str, Finding]]:
    """Return findings, each with its data set: of the named one, or of all that are there.

    Raises DataError if no file of the named one is there.
    """
    found: list[tuple[str, Finding]] = []
    for each in [name] if name else CATALOGUE:
        findings = check(each, data_folders)
        if any(finding.state != MISSING for finding in findings):
            found.extend((each, finding) for finding in findings)
    if name and not found:
        looked = data_folders.describe()
        raise DataError(
            f"{name} was not found in {looked}: `fedproto data get {name}` downloads it"
        )
    return found


def describe_data_sets(data_folders: DataFolders) -> list[tuple[str, ...]]:
    """Return a row per data set: name, where it lies, size of the download, licence, source."""
    rows: list[tuple[str, ...]] = []
    for name, data_set in CATALOGUE.items():
        place = _describe_place(data_set, data_folders)
        download = _describe_download(data_set)
        rows.append((name, place, download, data_set.licence, data_set.source))
    return rows


def _describe_place(data_set: DataSet, data_folders: DataFolders) -> str:
    """Return the folder of a data set, and how many files are there if some are missing."""
    paths = []
    for file in data_set.loader_files:
        path = find_file(data_set, file, data_folders)
        if path is not None:
            paths.append(path)
    if not paths:
        return "no"
    folder = str(paths[0].parent)
    wanted = len(data_set.loader_files)
    if len(paths) < wanted:
        return f"{len(paths)} of {wanted} files in {folder}"
    return folder


def _describe_download(data_set: DataSet) -> str:
    """Return the size of a download in megabytes, if it is known."""
    total_bytes = 0
    for file in data_set.files:
        if file.size is None:
            return "not known"
        total_bytes += file.size
    return f"{total_bytes / 1e6:.1f} MB"


def check_file(path: Path, file: File) -> Finding:
    """Compare a file with the published one."""
    if path.is_dir() or file.md5 is None:
        return Finding(path, "there; no checksum is known")
    try:
        if path.suffix == Path(file.name).suffix and compute_md5(path) == file.md5:
            return Finding(path, "as published")
        if file.read_content is not None:
            content_md5 = hashlib.md5(file.read_content(path)).hexdigest()
            if content_md5 == file.content_md5:
                return Finding(path, "as published, packed differently")
    except (OSError, EOFError, zlib.error, DataError) as error:
        return Finding(path, f"wrong, it cannot be read ({error})", good=False)
    return Finding(path, "wrong, not the published file", good=False)


def compute_md5(path: Path) -> str:
    """Return the MD5 checksum of a file in hexadecimal, as publishers give it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
