"""Downloading data sets; interrupted downloads continue where they stopped."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedproto.data import DataFolders
from fedproto.data.shared.catalogue import DataSet, File
from fedproto.data.shared.inventory import (
    MISSING,
    check,
    check_file,
    compute_md5,
    find_data_set,
    find_file,
)
from fedproto.errors import ConfigError, DataError

MAX_FRUITLESS_TRIES = 3  # in a row that bring nothing new
PAUSE_SECONDS = 1.0  # between tries
TIMEOUT_SECONDS = 30.0  # without a byte
BLOCK_BYTES = 1 << 18
TEMPORARY_STATUSES = (408, 429)  # below 500; a later try may succeed
RANGE_NOT_SATISFIABLE = 416
PARTIAL_CONTENT = 206
MIRROR = re.compile(r"https?://[^/[\]\s]\S*")

#: Called with the file's name, the bytes that are here, and the bytes in all, if known.
Report = Callable[[str, int, int | None], None]


def _report_nothing(name: str, received: int, total: int | None) -> None:
    pass


# --- data sets


def get(
    name: str,
    data_folders: DataFolders,
    mirror: str | None = None,
    report: Report = _report_nothing,
) -> Path:
    """Download what is missing of a data set, and return the folder that holds it.

    `mirror` is the address of a folder with the same files. Raises ConfigError or DataError if the
    data set cannot be downloaded, or if a file that is there is not the published one.
    """
    data_set = find_data_set(name)
    url = data_set.url if mirror is None else _check_mirror(mirror)
    folder = data_folders.folders()[0] / data_set.folder
    missing = []
    for file in data_set.loader_files:
        path = find_file(data_set, file, data_folders)
        if path is None:
            missing.append(file)
    if not missing:
        _refuse_wrong_files(name, data_folders)
        found = find_file(data_set, data_set.loader_files[0], data_folders)
        return found.parent if found else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if data_set.open_archive is None:
            for file in missing:
                _download_file(url, folder, file, report)
        else:
            _download_archive(data_set, data_set.open_archive, url, folder, report)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error}; name another folder with --data-dir"
        ) from error
    _refuse_wrong_files(name, data_folders)
    return folder


def _check_mirror(mirror: str) -> str:
    """Return the address of a mirror with a slash at its end."""
    if not mirror.isascii() or MIRROR.fullmatch(mirror) is None:
        raise ConfigError(
            f"--mirror {mirror} is not an address: it must start with http:// or https://"
        )
    return f"{mirror.rstrip('/')}/"


def _refuse_wrong_files(name: str, data_folders: DataFolders) -> None:
    """Raise DataError if a file of a data set is missing or not the published one."""
    for finding in check(name, data_folders):
        if finding.state == MISSING:
            raise DataError(
                f"{finding.path} is not in what was downloaded for {name}: "
                "it is not the download that was expected"
            )
        if not finding.good:
            raise DataError(
                f"{finding.path} is {finding.state}: remove it, and run "
                f"`fedproto data get {name}` again"
            )


def _download_archive(
    data_set: DataSet,
    open_archive: Callable[[Path, Path], None],
    url: str,
    folder: Path,
    report: Report,
) -> None:
    """Open an archive that a user put there, or download one, which is deleted afterwards."""
    (file,) = data_set.files
    archive = folder / file.name
    keep = archive.exists()
    if keep and not check_file(archive, file).good:
        raise DataError(
            f"{archive} is not the published file: remove it, or put the right one there"
        )
    if not keep:
        _download_file(url, folder, file, report)
    try:
        open_archive(archive, folder)
    except OSError:  # a full disk: the archive need not be downloaded again
        keep = True
        raise
    finally:
        if not keep:
            archive.unlink()


# --- one file, in as many tries as needed


def _download_file(url: str, folder: Path, file: File, report: Report) -> None:
    """Download one file into the folder; afterwards it is complete and right, or not there."""
    target = folder / file.name
    part = target.with_name(f"{target.name}.part")
    tag = target.with_name(f"{target.name}.part.tag")
    _download_part(url + file.name, part, tag, file, report)
    tag.unlink(missing_ok=True)
    if file.md5 is not None:
        md5 = compute_md5(part)
        if md5 != file.md5:
            part.unlink()
            raise DataError(
                f"{url}{file.name} is not the published file (md5 {md5}, not {file.md5}): "
                "nothing was kept"
            )
    part.replace(target)


def _download_part(url: str, part: Path, tag: Path, file: File, report: Report) -> None:
    """Download all bytes of a file to `part`; try again as long as a try brings something new."""
    most_bytes = _size(part)
    fruitless_tries = 0
    while True:
        try:
            _continue_download(url, part, tag, file, report)
            return
        except HTTPException as error:
            if _size(part) > most_bytes:
                most_bytes = _size(part)
                fruitless_tries = 0
            else:
                fruitless_tries += 1
            if fruitless_tries >= MAX_FRUITLESS_TRIES:
                raise _download_error(url, part, f"cannot be downloaded ({error})") from error
        time.sleep(PAUSE_SECONDS)


def _download_error(url: str, part: Path, what: str) -> DataError:
    """Return an error that says what to do about a download that failed."""
    name = part.name.removesuffix(".part")
    return DataError(
        f"{url} {what}: try again, name another place with --mirror, "
        f"or put {name} into {part.parent} and run this again"
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# --- one try


def _continue_download(url: str, part: Path, tag: Path, file: File, report: Report) -> None:
    """Ask for the bytes that are not here yet, and append them to `part`.

    Raises HTTPException if the download broke off and may be continued, DataError if not.
    """
    if file.size is not None and _size(part) == file.size:
        return
    with _send_request(url, part, tag) as response:
        start = _find_start(response, part, tag)
        total = _announced_total(response, start)
        if file.size is not None and total not in (None, file.size):
            what = f"announces {total} bytes, but {file.name} has {file.size}"
            raise _download_error(url, part, what)
        tag.write_text(_version_tag(response))
        total = total or file.size
        received = start
        with part.open("ab" if start else "wb") as output:
            for block in _read_blocks(response):
                output.write(block)
                received += len(block)
                report(file.name, received, total)
                if file.size is not None and received > file.size:
                    _delete_part(part, tag)
                    what = f"sends more than the {file.size} bytes that {file.name} has"
                    raise _download_error(url, part, what)
    if total is not None and received != total:
        raise HTTPException(f"it broke off after {received} of {total} bytes")


def _send_request(url: str, part: Path, tag: Path) -> HTTPResponse:
    """Ask for the rest of a file, or for all of it if nothing is here."""
    headers = {"User-Agent": "fedproto"}
    received = _size(part)
    if received:
        headers["Range"] = f"bytes={received}-"
        version = tag.read_text() if tag.exists() else ""
        if version:  # if the file has changed, the server sends it from its beginning
            headers["If-Range"] = version
    try:
        return urlopen(Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        answer = f"{error.code} {error.reason}"
        if error.code == RANGE_NOT_SATISFIABLE:  # what is here belongs to another file
            _delete_part(part, tag)
        elif error.code < 500 and error.code not in TEMPORARY_STATUSES:
            raise _download_error(url, part, f"answers {answer}") from error
        raise HTTPException(f"it answers {answer}") from error
    except OSError as error:
        raise HTTPException(str(getattr(error, "reason", error))) from error


def _find_start(response: HTTPResponse, part: Path, tag: Path) -> int:
    """Return the position in the file at which the answer begins.

    That is where we stopped, or 0 if the server sends the whole file.
    """
    if response.status != PARTIAL_CONTENT:
        return 0
    received = _size(part)
    content_range = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    starts_here = content_range is not None and int(content_range[1]) == received
    old_version = tag.read_text() if tag.exists() else ""
    new_version = _version_tag(response)
    has_changed = old_version != "" and new_version != "" and old_version != new_version
    if not starts_here or has_changed:
        _delete_part(part, tag)
        raise HTTPException("it sends another part of the file than the one asked for")
    return received


def _announced_total(response: HTTPResponse, start: int) -> int | None:
    """Return the size of the whole file by the answer's header, if it says so."""
    length = response.headers.get("Content-Length", "")
    return start + int(length) if length.isdecimal() else None


def _version_tag(response: HTTPResponse) -> str:
    """Return what distinguishes this version of the file: a strong ETag, or its date of change."""
    tag = response.headers.get("ETag", "")
    return tag if tag.startswith('"') else response.headers.get("Last-Modified", "")


def _read_blocks(response: HTTPResponse) -> Iterator[bytes]:
    """Yield the body in blocks; a broken connection raises HTTPException.

    An OSError would be taken for a full disk.
    """
    while True:
        try:
            block = response.read1(BLOCK_BYTES)
        except OSError as error:
            raise HTTPException(str(error)) from error
        if not block:
            return
        yield block


def _delete_part(part: Path, tag: Path) -> None:
    part.unlink(missing_ok=True)
    tag.unlink(missing_ok=True)
