"""`fedproto data`: a real server on this machine that misbehaves in every way a server does."""

import gzip
import hashlib
import io
import pickle
import re
import socket
import tarfile
import threading
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import fedproto, files_in, only_line
from helpers.data_files import REAL_DATA, idx, tgz, zipped
from PIL import Image

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DataFolders
from fedproto.data.shared import catalogue, download, inventory
from fedproto.data.shared.archives import unpack
from fedproto.data.shared.catalogue import CATALOGUE, DataSet, File
from fedproto.errors import DataError

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No real data, no cache, no proxy, no waiting."""
    monkeypatch.delenv("FEDPROTO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "PAUSE_SECONDS", 0)


# --- the server


class Server(ThreadingHTTPServer):
    """Serves `files` in a manner; remembers what it was asked for and how many bytes it sent."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests, self.sent = {"file.bin": CONTENT}, [], 0
        self.break_after = []  # bytes after which the next answers break off
        self.ranges = True  # does it know Range?
        self.length = None  # what it announces instead of the truth
        self.tag = '"one"'
        self.status = []  # the next answers
        self.redirect = {}
        self.shift = 0  # how far behind the place it was asked for it starts

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server, name = self.server, self.path.removeprefix("/")
        server.requests.append((name, self.headers.get("Range"), self.headers.get("If-Range")))
        if name in server.redirect:
            return self.answer(302, b"", {"Location": server.redirect[name]})
        if server.status and (status := server.status.pop(0)):
            return self.answer(status, b"sorry", {})
        if name not in server.files:
            return self.answer(404, b"not here", {})
        return self.serve(server.files[name])

    def serve(self, body):
        server, headers, status, start = self.server, {}, 200, 0
        if server.tag:
            headers["ETag"] = server.tag
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and server.ranges and self.headers.get("If-Range", server.tag) == server.tag:
            start, status = int(asked[1]) + server.shift, 206
            if start >= len(body):
                return self.answer(416, b"", {"Content-Range": f"bytes */{len(body)}"})
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        return self.answer(status, body[start:], headers)

    def answer(self, status, body, headers):
        server = self.server
        self.send_response(status)
        length = len(body) if server.length is None or status != 200 else server.length
        for key, value in (headers | {"Content-Length": length}).items():
            self.send_header(key, str(value))
        self.end_headers()
        if status in (200, 206) and server.break_after:
            body = body[: server.break_after.pop(0)]
            self.close_connection = True
        server.sent += len(body)  # before the client can have the last byte
        self.wfile.write(body)


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def one(monkeypatch, server):
    """A data set of one file, `one`, in the catalogue."""
    put(monkeypatch, server)


def put(monkeypatch, server, *files, **changes):
    files = files or (File("file.bin", MD5, len(CONTENT)),)
    folders, terms = ("one",), {"licence": "free", "source": "a test"}
    data = DataSet(server.url, "one", files, **({"search_folders": folders} | terms | changes))
    monkeypatch.setitem(CATALOGUE, "one", data)


def get(tmp_path, *flags):
    return fedproto("data", "get", "one", "--data-dir", tmp_path, *flags)


def refused(answer):
    assert answer.code == 2
    return only_line(answer.err)


# --- a download


def test_a_file_is_downloaded_whole(tmp_path, server, one):
    answer = get(tmp_path)
    assert answer.code == 0 and f"one is in {tmp_path / 'one'}" in answer.out
    assert (tmp_path / "one" / "file.bin").read_bytes() == CONTENT
    assert files_in(tmp_path) == ["one", "one/file.bin"] and server.sent == len(CONTENT)


def test_what_is_there_is_not_downloaded_again(tmp_path, server, one):
    get(tmp_path)
    assert get(tmp_path).code == 0 and len(server.requests) == 1


def test_a_broken_download_goes_on_where_it_broke_off(tmp_path, server, one):
    server.break_after = [100_000, 50_000]
    assert get(tmp_path).code == 0
    assert server.requests == [
        ("file.bin", None, None),
        ("file.bin", "bytes=100000-", '"one"'),
        ("file.bin", "bytes=150000-", '"one"'),
    ]
    assert server.sent == len(CONTENT)  # no byte twice
    assert files_in(tmp_path / "one") == ["file.bin"]


def test_a_command_goes_on_where_the_one_before_broke_off(tmp_path, server, one):
    server.break_after = [100_000, 0, 0, 0]
    message = refused(get(tmp_path))
    assert "it broke off after 100000 of 300000 bytes" in message and "try again" in message
    assert files_in(tmp_path / "one") == [
        "file.bin.part",
        "file.bin.part.tag",
    ]  # nothing that a loader would take
    assert get(tmp_path).code == 0
    assert server.sent == len(CONTENT) and server.requests[-1][1] == "bytes=100000-"


def test_a_server_without_etags_goes_on_too(tmp_path, server, one):
    server.tag, server.break_after = None, [100_000]
    assert get(tmp_path).code == 0
    assert server.requests[1] == ("file.bin", "bytes=100000-", None) and server.sent == len(CONTENT)


def test_a_server_that_ignores_ranges_starts_again(tmp_path, server, one):
    server.ranges, server.break_after = False, [100_000]
    assert get(tmp_path).code == 0
    assert (tmp_path / "one" / "file.bin").read_bytes() == CONTENT and server.sent == 100_000 + len(
        CONTENT
    )


def test_a_file_that_changed_in_between_is_not_mixed(tmp_path, server, one):
    """The first part is of another version: If-Range makes the server start again."""
    server.files["file.bin"], server.tag = CONTENT[::-1], '"old"'
    server.break_after = [100_000, 0, 0, 0]
    get(tmp_path)
    server.files["file.bin"], server.tag = CONTENT, '"new"'
    assert get(tmp_path).code == 0 and (tmp_path / "one" / "file.bin").read_bytes() == CONTENT


def test_a_server_that_sends_another_part_is_asked_from_the_start(tmp_path, server, one):
    server.shift, server.break_after = 10, [100_000]
    assert get(tmp_path).code == 0
    assert [asked for _, asked, _ in server.requests] == [None, "bytes=100000-", None]


def test_a_part_that_is_longer_than_the_file_is_forgotten(tmp_path, server, one):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file.bin.part").write_bytes(CONTENT + b"more")
    assert get(tmp_path).code == 0 and files_in(tmp_path / "one") == ["file.bin"]


def test_a_part_that_is_complete_needs_no_server(tmp_path, server, one):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file.bin.part").write_bytes(CONTENT)
    assert get(tmp_path).code == 0 and not server.requests


def test_redirects_are_followed_and_ranges_go_with_them(tmp_path, server, one):
    server.files = {"moved/file.bin": CONTENT}
    server.redirect = {"file.bin": "/moved/file.bin"}
    server.break_after = [100_000]
    assert get(tmp_path).code == 0 and server.sent == len(CONTENT)


def test_a_circle_of_redirects_ends(tmp_path, server, one):
    server.redirect = {"file.bin": "/file.bin"}
    assert "answers 302" in refused(get(tmp_path))
    assert files_in(tmp_path / "one") == []


def test_a_server_that_is_busy_is_asked_again(tmp_path, server, one):
    server.status = [503, 429]
    assert get(tmp_path).code == 0


def test_a_server_that_stays_broken_is_given_up(tmp_path, server, one):
    server.status = [500] * 9
    assert "it answers 500" in refused(get(tmp_path))
    assert len(server.requests) == download.MAX_FRUITLESS_TRIES and files_in(tmp_path / "one") == []


def test_a_file_that_is_not_there_is_asked_for_once(tmp_path, server, one):
    server.files = {}
    message = refused(get(tmp_path))
    assert "answers 404 Not Found" in message and f"put file.bin into {tmp_path / 'one'}" in message
    assert len(server.requests) == 1 and files_in(tmp_path / "one") == []


def test_without_a_network_a_sentence_says_which_file_goes_where(tmp_path, server, one):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # held, so that nobody else listens on it
        message = refused(get(tmp_path, "--mirror", f"http://127.0.0.1:{port}"))
    assert (
        "cannot be downloaded" in message
        and f"put file.bin into {tmp_path / 'one'} and run this again" in message
    )


def test_a_mirror_is_a_folder_with_the_same_files(tmp_path, server, monkeypatch):
    put(monkeypatch, server)
    server.files = {"elsewhere/file.bin": CONTENT}
    assert get(tmp_path, "--mirror", f"{server.url}elsewhere").code == 0


@pytest.mark.parametrize(
    "mirror", ["file:///tmp", "ftp://host/", "nonsense", "http:///path", "http://[half", ""]
)
def test_a_mirror_that_is_no_address_is_refused(tmp_path, server, one, mirror):
    assert "it must start with http:// or https://" in refused(get(tmp_path, "--mirror", mirror))


# --- lies


@pytest.mark.parametrize("length", [299_999, 300_001, 10, 10**15])
def test_a_length_that_cannot_be_right_is_refused_at_once(tmp_path, server, one, length):
    server.length = length
    assert f"announces {length} bytes, but file.bin has 300000" in refused(get(tmp_path))
    assert files_in(tmp_path / "one") == []


def test_a_length_that_is_not_known_beforehand_is_held_to_the_announced_one(
    tmp_path, server, monkeypatch
):
    put(monkeypatch, server, File("file.bin", MD5))
    server.length, server.ranges = 300_001, False
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.3)  # the line stays open
    assert "cannot be downloaded" in refused(get(tmp_path))
    assert "file.bin" not in files_in(tmp_path / "one")


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_a_wrong_checksum_leaves_nothing(tmp_path, server, monkeypatch, size):
    put(monkeypatch, server, File("file.bin", MD5, size))
    server.files["file.bin"] = CONTENT[::-1]
    message = refused(get(tmp_path))
    assert "is not the published file (md5" in message and "nothing was kept" in message
    assert files_in(tmp_path / "one") == []


def test_a_wrong_part_from_before_leaves_nothing_and_the_next_try_is_right(tmp_path, server, one):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file.bin.part").write_bytes(b"x" * 1000)
    assert "is not the published file" in refused(get(tmp_path))
    assert files_in(tmp_path / "one") == []
    assert get(tmp_path).code == 0


def test_a_wrong_file_that_somebody_put_there_is_not_touched(tmp_path, server, one):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file.bin").write_bytes(b"mine")
    assert "file.bin is wrong, not the published file: remove it" in refused(get(tmp_path))
    assert (tmp_path / "one" / "file.bin").read_bytes() == b"mine" and not server.requests


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, server, one):
    (tmp_path / "one").write_text("a file where a folder belongs")
    assert "cannot be written" in refused(get(tmp_path))


def test_ctrl_c_says_how_to_go_on(monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "get", stop)
    answer = fedproto("data", "get", "mnist")
    assert answer.code == 130 and "`fedproto data get mnist` goes on" in only_line(answer.err)


def test_an_unknown_data_set_is_refused():
    assert "did you mean 'mnist'?" in refused(fedproto("data", "get", "mnits"))
    assert "accepted: " in refused(fedproto("data", "check", "xyzzy"))


# --- archives


@pytest.fixture
def packed(monkeypatch, server):
    """Puts an archive into the catalogue whose file `inside/a` is wanted."""

    def pack(raw, md5=None):
        server.files = {"all.tgz": raw}
        file = File("all.tgz", md5 or hashlib.md5(raw).hexdigest(), len(raw))
        inside = (File("a", hashlib.md5(b"A").hexdigest()),)
        put(
            monkeypatch,
            server,
            file,
            search_folders=("one/inside",),
            unpacked=inside,
            open_archive=partial(unpack, pattern="inside/*"),
        )

    return pack


@pytest.mark.parametrize("kind", [tgz, zipped])
def test_an_archive_is_unpacked_and_goes(tmp_path, server, packed, kind):
    packed(kind({"inside/a": b"A", "inside/deep/b": b"B", "other": b"not wanted"}))
    assert get(tmp_path).code == 0
    assert files_in(tmp_path / "one") == ["inside", "inside/a", "inside/deep", "inside/deep/b"]
    assert get(tmp_path).code == 0 and len(server.requests) == 1


def test_an_archive_that_somebody_put_there_is_taken_and_stays(tmp_path, server, packed):
    packed(tgz({"inside/a": b"A"}))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "all.tgz").write_bytes(server.files["all.tgz"])
    assert get(tmp_path).code == 0 and not server.requests
    assert files_in(tmp_path / "one") == ["all.tgz", "inside", "inside/a"]


def test_a_wrong_archive_that_somebody_put_there_is_refused(tmp_path, server, packed):
    packed(tgz({"inside/a": b"A"}))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "all.tgz").write_bytes(b"half of it")
    assert "all.tgz is not the published file" in refused(get(tmp_path))


@pytest.mark.parametrize("kind", [tgz, zipped])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("../outside", b"x", "would be written outside its folder"),
        ("inside/../../outside", b"x", "would be written outside its folder"),
        ("/tmp/fedproto-outside", b"x", "would be written outside its folder"),
        ("inside\\..\\outside", b"x", "would be written outside its folder"),
        ("inside/link", (tarfile.SYMTYPE, "/etc/passwd"), "is a link or a device, not a file"),
    ],
)
def test_an_archive_that_leads_outside_is_refused_before_anything_is_written(
    tmp_path, server, packed, kind, name, content, words
):
    packed(kind({"inside/a": b"A", name: content}))
    assert words in refused(get(tmp_path / "data"))
    assert files_in(tmp_path) == ["data", "data/one"]
    assert not Path("/tmp/fedproto-outside").exists()


@pytest.mark.parametrize("link", [tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_hard_links_and_devices_are_refused(tmp_path, server, packed, link):
    packed(tgz({"inside/a": b"A", "inside/b": (link, "inside/a")}))
    assert "is a link or a device, not a file" in refused(get(tmp_path))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"no archive at all", "is not a valid archive (or is damaged)"),
        (tgz({"inside/a": b"A" * 9999})[:-20], "is not a valid archive (or is damaged)"),
        (
            zipped({"inside/a": b"AAAA"}).replace(b"AAAA", b"AXAA", 1),
            "is not a valid archive (or is damaged): Bad CRC-32",
        ),
        (tgz({"other": b"A"}), "holds no inside/*: it is not the archive that was expected"),
        (tgz({"inside/b": b"B"}), "a is not in what was downloaded for one"),
        (tgz({"inside/a": b"not A"}), "is wrong, not the published file"),
    ],
)
def test_a_damaged_archive_is_refused(tmp_path, server, packed, raw, words):
    packed(raw)
    assert words in refused(get(tmp_path))
    assert not [name for name in files_in(tmp_path) if "unpacked" in name or name.endswith(".part")]


def test_chars74k_is_made_from_its_archive(tmp_path, server, monkeypatch):
    """128x128 images, black on white, in Sample001 to Sample062; two fonts."""
    page = np.full((128, 128), 255, np.uint8)
    page[:, 64:] = 0
    raw = io.BytesIO()
    Image.fromarray(page).save(raw, "png")
    names = [
        f"English/Fnt/Sample{label:03}/img{label:03}-{font:05}.png"
        for label in range(1, 63)
        for font in (1, 5)
    ]
    server.files = {"EnglishFnt.tgz": tgz(dict.fromkeys(names, raw.getvalue()))}
    answer = fedproto("data", "get", "chars74k", "--mirror", server.url, "--data-dir", tmp_path)
    assert answer.code == 0 and files_in(tmp_path / "chars74k-fnt") == ["chars74k_fnt_28.npz"]
    with np.load(tmp_path / "chars74k-fnt" / "chars74k_fnt_28.npz") as made:
        assert made["y"].tolist() == [label for label in range(62) for _ in range(2)]
        assert made["font_index"].tolist() == [1, 5] * 62
        assert not made["x"][0, :, :13].any() and (made["x"][0, :, 15:] == 255).all()
    server.files = {"EnglishFnt.tgz": tgz({names[0]: raw.getvalue()})}
    answer = fedproto(
        "data", "get", "chars74k", "--mirror", server.url, "--data-dir", tmp_path / "other"
    )
    assert "does not hold Sample001 to Sample062" in refused(answer)


# --- what is there


@pytest.fixture
def tiny_mnist(monkeypatch, server):
    """MNIST with three images, on the server and in the catalogue."""
    rng = np.random.default_rng(1)
    arrays = [
        rng.integers(0, 9, shape, np.uint8) for shape in ((3, 28, 28), (3,), (3, 28, 28), (3,))
    ]
    files = []
    for file, array in zip(CATALOGUE["mnist"].files, arrays, strict=True):
        raw = idx(array)
        server.files[file.name] = packed = gzip.compress(raw, mtime=0)
        files.append(
            File(
                file.name,
                hashlib.md5(packed).hexdigest(),
                len(packed),
                hashlib.md5(raw).hexdigest(),
                file.read_content,
            )
        )
    data = DataSet(server.url, "mnist", tuple(files), ("mnist", "MNIST/raw", "."), "free", "a test")
    monkeypatch.setitem(CATALOGUE, "mnist", data)


def check(folder, *name):
    return fedproto("data", "check", *name, "--data-dir", folder)


def test_what_was_downloaded_is_what_the_loader_reads(tmp_path, tiny_mnist):
    assert fedproto("data", "get", "mnist", "--data-dir", tmp_path).code == 0
    source = plugins.build("dataset", Part("mnist"), DataFolders(str(tmp_path)))
    assert source.train.x.shape == (3, 28, 28)
    answer = check(tmp_path)
    assert answer.code == 0 and answer.out.count("as published") == 4


def test_only_what_is_missing_is_downloaded(tmp_path, server, tiny_mnist):
    fedproto("data", "get", "mnist", "--data-dir", tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    fedproto("data", "get", "mnist", "--data-dir", tmp_path)
    assert [name for name, _, _ in server.requests[4:]] == ["t10k-labels-idx1-ubyte.gz"]


def test_files_that_were_packed_again_or_unpacked_are_right(tmp_path, tiny_mnist):
    fedproto("data", "get", "mnist", "--data-dir", tmp_path)
    images, labels = (
        tmp_path / "mnist" / f"train-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")
    )
    images.write_bytes(gzip.compress(gzip.decompress(images.read_bytes()), 1))
    labels.with_suffix("").write_bytes(gzip.decompress(labels.read_bytes()))
    labels.unlink()
    answer = check(tmp_path, "mnist")
    assert answer.code == 0 and answer.out.count("as published, packed differently") == 2


def test_cifar10_batches_that_were_pickled_again_are_right(tmp_path, monkeypatch):
    """What counts is the binary edition's rows: a label, then 3,072 pixels."""
    rows = np.random.default_rng(2).integers(0, 10, (2, 3073), np.uint8)
    batch = {b"data": rows[:, 1:], b"labels": rows[:, 0].tolist()}
    digest = hashlib.md5(rows.tobytes()).hexdigest()
    cifar10 = CATALOGUE["cifar10"]
    inside = tuple(replace(file, content_md5=digest) for file in cifar10.unpacked)
    monkeypatch.setitem(CATALOGUE, "cifar10", replace(cifar10, unpacked=inside))
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for file in inside:
        (folder / file.name).write_bytes(pickle.dumps(batch))
    answer = check(tmp_path, "cifar10")
    assert answer.code == 0 and answer.out.count("as published, packed differently") == 6
    (folder / "test_batch").write_bytes(b"no pickle")
    assert "it cannot be read" in check(tmp_path, "cifar10").out


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "it cannot be read"),
        (lambda path: path.write_bytes(gzip.compress(b"other")), "not the published file"),
        (lambda path: path.write_bytes(b""), "wrong"),
    ],
    ids=["missing", "truncated", "other", "empty"],
)
def test_check_finds_what_is_wrong(tmp_path, tiny_mnist, damage, words):
    fedproto("data", "get", "mnist", "--data-dir", tmp_path)
    damage(tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz")
    answer = check(tmp_path)
    assert words in answer.out and "1 of 4 files are wrong or missing" in refused(answer)


def test_check_of_nothing(tmp_path):
    assert check(tmp_path).code == 0
    assert "mnist was not found in" in refused(check(tmp_path, "mnist"))


def test_list_shows_what_is_there(tmp_path, tiny_mnist):
    assert fedproto("data", "list", "--data-dir", tmp_path).out.count(str(tmp_path)) == 0
    fedproto("data", "get", "mnist", "--data-dir", tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    answer = fedproto("data", "list", "--data-dir", tmp_path)
    assert all(name in answer.out for name in CATALOGUE) and "MIT" in answer.out
    flat = re.sub(r"[\s│]+", "", answer.out)  # a long path is folded
    assert "3of4filesin" in flat


# --- the catalogue


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_is_well_formed(name):
    data = CATALOGUE[name]
    assert data.url.startswith("http") and data.url.endswith("/") and data.licence and data.source
    assert (data.open_archive is None) == (not data.unpacked)
    for file in (*data.files, *data.unpacked):
        assert all(re.fullmatch("[0-9a-f]{32}", md5) for md5 in (file.md5, file.content_md5) if md5)


@pytest.mark.parametrize(
    "name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "femnist", "femnist-nist", "chars74k"]
)
def test_every_loader_looks_where_get_puts_its_files(name, tmp_path):
    """With an empty file of each name, the loader refuses its content, not its absence."""
    data = CATALOGUE[name]
    for file in data.loader_files:
        place = next(folder for folder in data.search_folders if folder.startswith(data.folder))
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / file.name).touch()
    with pytest.raises(DataError) as caught:
        plugins.build("dataset", Part(name.removesuffix("-nist")), DataFolders(str(tmp_path)))
    assert "was not found" not in str(caught.value)


@pytest.mark.skipif(not (REAL_DATA / "mnist").exists(), reason="no MNIST in $FEDPROTO_DATA")
def test_the_real_mnist_is_as_published():
    findings = inventory.check("mnist", DataFolders(str(REAL_DATA)))
    assert len(findings) == 4 and all(finding.good for finding in findings)
    assert catalogue.CATALOGUE["mnist"].files[0].content_md5 == "6bbc9ace898e44ae57da46a324031adb"
