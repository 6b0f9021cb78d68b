"""The server shows what is in the folder to those who know its address, and nothing else."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command_line import fedproto, only_line
from helpers.patience import PATIENCE_SECONDS
from helpers.watching import Watched, watching

from fedproto.errors import ConfigError
from fedproto.watch.guard import is_allowed_host, make_token
from fedproto.watch.page_files import ASSETS
from fedproto.watch.server import Watch


@pytest.fixture(scope="module")
def watched(runs: Path) -> Iterator[Watched]:
    with watching(runs) as server:
        yield server


def test_the_page_and_its_parts_are_served(watched: Watched) -> None:
    page = watched.get("")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    for name, kind in ASSETS.items():
        part = watched.get(f"assets/{name}")
        assert part.status == 200
        assert part.headers["content-type"].startswith(kind)


def test_the_policy_allows_no_inline_script_and_no_stranger(watched: Watched) -> None:
    page = watched.get("")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy and "*" not in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in page.headers
    scripts = re.findall(rb"<script([^>]*)>([^<]*)</script>", page.body)
    assert scripts and all(b"src=" in head and not inside for head, inside in scripts)
    assert not re.search(rb"\son\w+=", page.body)


def test_runs_and_clients_are_served_as_json(watched: Watched) -> None:
    runs = watched.get("api/runs").json()
    assert [run["name"] for run in runs] == ["fedproto", "local"]
    run = watched.get(f"api/runs/{runs[0]['id']}").json()
    assert run["series"]["rounds"] == [1, 2, 3]
    later = watched.get(f"api/runs/{runs[0]['id']}?after=2&epoch=0").json()
    assert later["series"]["rounds"] == [3]
    client = watched.get(f"api/runs/{runs[0]['id']}/clients/1").json()
    assert client["client"]["name"] == "1"
    assert [run["name"] for run in watched.first_event()["runs"]] == ["fedproto", "local"]


@pytest.mark.parametrize("token", ["", "wrong", "A" * 32, "%00", "%F0%9F%98%80"])
def test_an_address_without_the_token_shows_nothing(watched: Watched, token: str) -> None:
    for path in ("", "/", "/api/runs", "/assets/app.js", "/api/events"):
        answer = watched.raw(f"/{token}{path}")
        assert (answer.status, answer.body) == (403, b"the address lacks its token\n")


def test_tokens_are_long_and_different() -> None:
    tokens = {make_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) >= 32 for token in tokens)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example:8000",
        "",
        "localhost.evil.example",
    ],
)
def test_a_forged_host_is_refused(watched: Watched, host: str) -> None:
    answer = watched.raw(watched.prefix, host=host or "  ")
    assert answer.status in (400, 421)
    assert b"fedproto" not in answer.body


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("127.0.0.1:80", True),
        ("localhost:80", True),
        ("LOCALHOST", True),
        ("[::1]:80", True),
        ("[::1]", True),
        ("lab.example:80", True),
        ("labs.example:80", False),
        ("127.0.0.1.nip.example", False),
        ("localhost:80:evil", False),
    ],
)
def test_hosts_are_addresses_or_the_name_that_was_asked_for(host: str, is_allowed: bool) -> None:
    assert is_allowed_host(host, "lab.example") == is_allowed


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_but_reading_is_answered(watched: Watched, method: str) -> None:
    assert watched.raw(watched.prefix, method).status == 405


@pytest.mark.parametrize(
    "path",
    [
        "../../../../etc/passwd",
        "assets/../server.py",
        "assets/%2e%2e/server.py",
        "assets/..%2f..%2fserver.py",
        "assets//etc/passwd",
        "assets/",
        "api/runs/..",
        "api/runs/%2e%2e%2flocal",
        "api/runs/local",
        "api/runs/fedproto/config.toml",
        "api/runs/0/clients/0",
        "config.toml",
        "fedproto/result.json",
    ],
)
def test_paths_are_never_taken_as_files(watched: Watched, path: str) -> None:
    assert watched.get(path).status in (404, 405)


@pytest.mark.parametrize("number", ["99", "-1", "1e3", "0x1", "٣", "9" * 40, "1%00"])
def test_a_client_that_is_not_there_is_not_found(watched: Watched, number: str) -> None:
    run = watched.get("api/runs").json()[0]["id"]
    quoted = number.encode().replace(b"\xd9\xa3", b"%D9%A3").decode()
    assert watched.get(f"api/runs/{run}/clients/{quoted}").status == 404


def test_nothing_is_written_to_the_folder(runs: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(runs, tmp_path / "copy"))

    def list_files() -> dict[str, tuple[int, int]]:
        found = sorted(copy.rglob("*"))
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in found}

    before = list_files()
    for path in copy.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    with watching(copy) as server:
        for run in server.get("api/runs").json():
            assert server.get(f"api/runs/{run['id']}").status == 200
            assert server.get(f"api/runs/{run['id']}/clients/0").status == 200
    assert list_files() == before


def test_watching_imports_no_plug_in_and_unpickles_nothing(runs: Path) -> None:
    """A configuration may name a plug-in of somebody's own; showing it must not run it."""
    code = f"""
import pickle, sys
from pathlib import Path
def refuse(*arguments): raise AssertionError("unpickled")
from fedproto.watch.collection import Collection
pickle.load = pickle.loads = refuse
collection = Collection(Path({str(runs)!r}))
collection.open()
for run in collection.list():
    collection.describe(run["id"])
    collection.describe_client(run["id"], 0)
print(*sys.modules)
"""
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    folders = ("fedproto.algorithms.", "fedproto.models.cnn", "fedproto.models.mlp", "matplotlib")
    assert not [name for name in loaded if name.startswith(folders)]


def test_a_taken_port_is_refused_in_one_sentence(runs: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be used"):
            Watch(runs, "127.0.0.1", port)


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    answer = fedproto("watch", tmp_path)
    assert answer.code == 2
    assert "holds neither a run nor the state of a deployed server" in only_line(answer.err)


def test_the_command_prints_an_address_with_a_token_and_ends_at_ctrl_c(runs: Path) -> None:
    command = [sys.executable, "-m", "fedproto", "watch", str(runs)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", line)
        assert found, line
        runs_seen = Watched(found[0]).get("api/runs").json()
        assert len(runs_seen) == 2
        with urllib.request.urlopen(f"{found[0]}api/events") as page:  # an open page
            assert page.readline().startswith(b"data: ")
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=PATIENCE_SECONDS) in (0, 130)
        assert process.stderr.read() == ""
