"""Getting data sets: downloads that go on where they broke off, and files held against their checksums."""

from __future__ import annotations

import hashlib
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedproto.data import DataFolders
from fedproto.data.shared.catalogue import CATALOGUE, DataSet, File
from fedproto.errors import ConfigError, DataError, unknown

TRIES = 3  # in a row that bring nothing new
PAUSE = 1.0  # seconds between them
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 1 << 18
PASSING = (408, 429)  # answers below 500 that may be better the next time

MISSING = "missing"

Told = Callable[[str, int, int | None], None]  # file, bytes that are here, bytes in all


# --- what is there


def find(data: DataSet, file: File, places: DataFolders) -> Path | None:
    """Where a file that the loader wants lies, packed or not."""
    names = (file.name.removesuffix(".gz"), file.name)
    candidates = [f"{folder}/{name}" for folder in data.folders for name in names]
    paths = (folder / candidate for folder in places.folders() for candidate in candidates)
    return next((path for path in paths if path.exists()), None)


def named(name: str) -> DataSet:
    if name not in CATALOGUE:
        raise unknown("data set", name, CATALOGUE)
    return CATALOGUE[name]


@dataclass(frozen=True)
class Finding:
    """What a look at one file gave."""

    path: Path
    state: str
    good: bool = True


def check(name: str, places: DataFolders) -> list[Finding]:
    """A finding for each file that the loader wants."""
    data = named(name)
    found = [(file, find(data, file, places)) for file in data.wanted]
    return [
        compare(path, file) if path else Finding(Path(file.name), MISSING, False)
        for file, path in found
    ]


def check_all(name: str | None, places: DataFolders) -> list[tuple[str, Finding]]:
    """Findings with their data set: of one, which must be there, or of all of which something is."""
    findings = {each: check(each, places) for each in ([name] if name else CATALOGUE)}
    there = {
        each for each, some in findings.items() if any(finding.state != MISSING for finding in some)
    }
    if name and not there:
        looked = ", ".join(map(str, places.folders()))
        raise DataError(f"{name} was not found in {looked}: `fedproto data get {name}` gets it")
    return [(each, finding) for each, some in findings.items() if each in there for finding in some]


def overview(places: DataFolders) -> list[tuple[str, ...]]:
    """A row a data set: name, where it lies, what a download is, licence, source."""
    rows: list[tuple[str, ...]] = []
    for name, data in CATALOGUE.items():
        paths = [path for file in data.wanted if (path := find(data, file, places))]
        whole = (
            ""
            if len(paths) == len(data.wanted)
            else f"{len(paths)} of {len(data.wanted)} files in "
        )
        there = f"{whole}{paths[0].parent}" if paths else "no"
        sizes = [file.size for file in data.files]
        download = "not known" if None in sizes else f"{sum(filter(None, sizes)) / 1e6:.1f} MB"
        rows.append((name, there, download, data.licence, data.source))
    return rows


def compare(path: Path, file: File) -> Finding:
    """Hold a file against what was published."""
    if path.is_dir() or file.md5 is None:
        return Finding(path, "there; no checksum is known")
    try:
        if path.suffix == Path(file.name).suffix and _md5(path) == file.md5:
            return Finding(path, "as published")
        if file.held and hashlib.md5(file.held(path)).hexdigest() == file.content:
            return Finding(path, "as published, packed otherwise")
    except (OSError, EOFError, zlib.error, DataError) as error:
        return Finding(path, f"wrong, it cannot be read ({error})", False)
    return Finding(path, "wrong, not the published file", False)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


# --- getting what is not


def get(
    name: str, places: DataFolders, mirror: str | None = None, told: Told = lambda *_: None
) -> Path:
    """Download what is missing of a data set; the folder that holds it."""
    data = named(name)
    if mirror is not None and not (
        mirror.isascii() and re.fullmatch(r"https?://[^/[\]\s]\S*", mirror)
    ):
        raise ConfigError(f"--mirror {mirror} is no address: it starts with http:// or https://")
    folder, url = places.folders()[0] / data.into, f"{mirror.rstrip('/')}/" if mirror else data.url
    missing = [file for file in data.wanted if find(data, file, places) is None]
    if not missing:
        _refuse_wrong(name, places)
        found = find(data, data.wanted[0], places)
        return found.parent if found else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if data.opened is None:
            for file in missing:
                _obtain(url, folder, file, told)
        else:
            _open_archive(data, url, folder, told)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error}; name another folder with --data-dir"
        ) from error
    _refuse_wrong(name, places)
    return folder


def _refuse_wrong(name: str, places: DataFolders) -> None:
    for finding in check(name, places):
        if finding.state == MISSING:
            raise DataError(
                f"{finding.path} is not in what was downloaded for {name}: it is not what was expected"
            )
        if not finding.good:
            raise DataError(
                f"{finding.path} is {finding.state}: remove it, and `fedproto data get {name}` gets it"
            )


def _open_archive(data: DataSet, url: str, folder: Path, told: Told) -> None:
    """Take an archive that somebody put there, or download one, which then goes."""
    (file,) = data.files
    archive = folder / file.name
    given = archive.exists()
    if given and not compare(archive, file).good:
        raise DataError(
            f"{archive} is not the published file: remove it, or put the right one there"
        )
    if not given:
        _obtain(url, folder, file, told)
    assert data.opened is not None
    try:
        data.opened(archive, folder)
    except OSError:  # a full disk: the archive need not come again
        given = True
        raise
    finally:
        if not given:
            archive.unlink()


def _obtain(url: str, folder: Path, file: File, told: Told) -> None:
    """Download one file into the folder: whole and right, or not there."""
    target = folder / file.name
    part, tag = (target.with_name(f"{target.name}{end}") for end in (".part", ".part.tag"))
    download(url + file.name, part, tag, file, told)
    tag.unlink(missing_ok=True)
    if file.md5 is not None and (found := _md5(part)) != file.md5:
        part.unlink()
        raise DataError(
            f"{url}{file.name} is not the published file (md5 {found}, not {file.md5}): nothing was kept"
        )
    part.replace(target)


def download(url: str, part: Path, tag: Path, file: File, told: Told) -> None:
    """All bytes of a file to `part`, by as many tries as bring something new."""
    most, fruitless = _bytes(part), 0
    while True:
        try:
            return _continue(url, part, tag, file, told)
        except HTTPException as error:
            fruitless = 0 if _bytes(part) > most else fruitless + 1
            most = max(most, _bytes(part))
            if fruitless >= TRIES:
                raise _refusal(url, part, f"cannot be fetched ({error})") from error
        time.sleep(PAUSE)


def _refusal(url: str, part: Path, what: str) -> DataError:
    name = part.name.removesuffix(".part")
    by_hand = f"put {name} into {part.parent} and run this again"
    return DataError(f"{url} {what}: try again, name another place with --mirror, or {by_hand}")


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _continue(url: str, part: Path, tag: Path, file: File, told: Told) -> None:
    """One try: ask for the bytes that are not here yet. HTTPException: it broke off, and may go on later."""
    if file.size is not None and _bytes(part) == file.size:
        return
    with _ask(url, part, tag) as response:
        here = _start(response, part, tag)
        total = _announced(response, here)
        if file.size is not None and total not in (None, file.size):
            raise _refusal(url, part, f"announces {total} bytes, but {file.name} has {file.size}")
        tag.write_text(_mark(response))
        with part.open("ab" if here else "wb") as output:
            for block in _blocks(response):
                output.write(block)
                here += len(block)
                told(file.name, here, total or file.size)
                if file.size is not None and here > file.size:
                    _forget(part, tag)
                    raise _refusal(
                        url, part, f"sends more than the {file.size} bytes that {file.name} has"
                    )
    if here != (total or here) or here != (file.size or here):
        raise HTTPException(f"it broke off after {here} of {total or file.size} bytes")


def _ask(url: str, part: Path, tag: Path) -> HTTPResponse:
    headers, here = {"User-Agent": "fedproto"}, _bytes(part)
    if here:
        headers["Range"] = f"bytes={here}-"
        if tag.exists() and (mark := tag.read_text()):
            headers["If-Range"] = (
                mark  # if the file has changed, the server starts from its beginning
            )
    try:
        return urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        if error.code == 416:  # there is no such rest: what is here is of another file
            _forget(part, tag)
        elif error.code < 500 and error.code not in PASSING:
            raise _refusal(url, part, f"answers {error.code} {error.reason}") from error
        raise HTTPException(f"it answers {error.code} {error.reason}") from error
    except OSError as error:
        raise HTTPException(str(getattr(error, "reason", error))) from error


def _start(response: HTTPResponse, part: Path, tag: Path) -> int:
    """The place in the file at which the answer begins: where we stopped, or 0 from a server that knows no ranges."""
    if response.status != 206:
        return 0
    begin = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    same = not tag.exists() or not _mark(response) or tag.read_text() in ("", _mark(response))
    if begin is None or int(begin[1]) != _bytes(part) or not same:
        _forget(part, tag)
        raise HTTPException("it sends another part of the file than it was asked for")
    return _bytes(part)


def _announced(response: HTTPResponse, here: int) -> int | None:
    length = response.headers.get("Content-Length", "")
    return here + int(length) if length.isdecimal() else None


def _mark(response: HTTPResponse) -> str:
    """What tells this version of the file from others: a strong ETag, or the date of its last change."""
    tag = response.headers.get("ETag", "")
    return tag if tag.startswith('"') else response.headers.get("Last-Modified", "")


def _blocks(response: HTTPResponse) -> Iterator[bytes]:
    """The body piece by piece; a broken line is an HTTPException, so that it is not taken for a full disk."""
    while True:
        try:
            block = response.read1(BLOCK)
        except OSError as error:
            raise HTTPException(str(error)) from error
        if not block:
            return
        yield block


def _forget(part: Path, tag: Path) -> None:
    part.unlink(missing_ok=True)
    tag.unlink(missing_ok=True)
