"""`fedproto deploy health`: what it finds, and its exit codes."""

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.certificates import make_keys, make_server_context, tls_server
from helpers.command_line import fedproto

pytest.importorskip("cryptography")

from fedproto.core.files import hold_lock
from fedproto.deploy import health, scaffold
from fedproto.deploy.health import Verdict, check_health, judge
from fedproto.deploy.supervisor import STATUS_FILE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A federation whose keys are made, and of which nothing runs."""
    folder = tmp_path / "fed"
    scaffold.init(folder, ["a", "b"], "digits", ["0", "1"])
    make_keys(folder)
    return folder


@pytest.fixture
def port() -> Iterator[int]:
    """A port that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def write_status(home: Path, **changes: Any) -> None:
    """Write what a supervisor of this process would write."""
    processes = [{"name": "flower_node", "process": os.getpid()}]
    status = {"processes": processes, "failures": [], "last_failure": ""} | changes
    home.mkdir(exist_ok=True)
    (home / STATUS_FILE).write_text(json.dumps(status))


def find(findings: list[health.Finding], what: str) -> health.Finding:
    (found,) = [finding for finding in findings if finding.what == what]
    return found


def test_a_server_that_runs_is_healthy(folder: Path, port: int) -> None:
    home = folder / ".flwr"
    write_status(home)
    with hold_lock(home):
        findings = check_health(folder, port=port)
    assert judge(findings) == Verdict.HEALTHY, findings
    assert {finding.what for finding in findings} == {
        *("supervisor", "processes", "port", "certificate", "disk", "state")
    }


def test_a_server_that_does_not_run_is_down(folder: Path, port: int) -> None:
    """Whatever its last status says: the lock of a process that has ended is free."""
    write_status(folder / ".flwr")
    findings = check_health(folder, port=port)
    assert find(findings, "supervisor").verdict == Verdict.DOWN
    assert judge(findings) == Verdict.DOWN


def test_a_closed_port_is_down(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    found = find(check_health(folder, port=closed), "port")
    assert found.verdict == Verdict.DOWN and str(closed) in found.why


def test_a_process_that_has_ended_is_down(folder: Path, port: int) -> None:
    home = folder / ".flwr"
    write_status(home, processes=[{"name": "warm_worker", "process": 2**22 + 1}])
    with hold_lock(home):
        found = find(check_health(folder, port=port), "processes")
    assert found.verdict == Verdict.DOWN and "warm_worker ended" in found.why


@pytest.mark.parametrize(
    ("ages", "verdict"),
    [
        ([], Verdict.HEALTHY),
        ([10.0, 20.0], Verdict.HEALTHY),
        ([10.0, 20.0, 30.0], Verdict.DEGRADED),
        ([10.0, 4000.0, 5000.0, 6000.0], Verdict.HEALTHY),
    ],
)
def test_restarts_of_the_last_hour_are_counted(
    ages: list[float], verdict: Verdict, folder: Path, port: int
) -> None:
    home = folder / ".flwr"
    failures = [time.time() - age for age in ages]
    write_status(home, failures=failures, last_failure="warm_worker ended by signal 9")
    with hold_lock(home):
        found = find(check_health(folder, port=port), "supervisor")
    assert found.verdict == verdict
    assert not ages or "because warm_worker ended by signal 9" in found.why


@pytest.mark.parametrize(
    ("days", "verdict"), [(-1, Verdict.DOWN), (20, Verdict.DEGRADED), (100, Verdict.HEALTHY)]
)
def test_a_certificate_is_judged_by_its_last_day(
    days: int, verdict: Verdict, folder: Path, port: int
) -> None:
    make_keys(folder, days)
    found = find(check_health(folder, port=port), "certificate")
    assert found.verdict == verdict
    advised = f"`fedproto deploy renew {folder}` writes a new one" in found.why
    assert advised == (verdict != Verdict.HEALTHY)


@pytest.mark.parametrize("content", ["", "{}", '{"processes": 1}', '{"processes": [[]]}'])
def test_an_odd_status_is_named(content: str, folder: Path, port: int) -> None:
    home = folder / ".flwr"
    home.mkdir()
    (home / STATUS_FILE).write_text(content)
    with hold_lock(home):
        found = find(check_health(folder, port=port), "supervisor")
    assert found.verdict == Verdict.DEGRADED and STATUS_FILE in found.why


def test_a_full_disk_wants_attention(
    folder: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FREE_BYTES", 10**18)
    assert find(check_health(folder, port=port), "disk").verdict == Verdict.DEGRADED


def test_a_member_that_does_not_count_any_more_is_named(
    folder: Path, port: int, make_deployment: Any
) -> None:
    """c replies in round 1 and is late from then on; a and b count in all four rounds."""
    deployment = make_deployment(quorum=2, timeout=7.0)
    deployment.serve(heard=lambda name, round: name != "c" or round == 1)
    (folder / "server").mkdir()
    source = deployment.folder / "server" / "server.safetensors"
    (folder / "server" / source.name).write_bytes(source.read_bytes())
    findings = check_health(folder, port=port)
    members = [finding for finding in findings if finding.what.startswith("member ")]
    assert members == [
        health.Finding(
            "member c",
            Verdict.DEGRADED,
            "its reply has not counted for 3 rounds: it did not reply within 7 s",
        )
    ]


def test_a_member_is_judged_by_its_file(folder: Path) -> None:
    path = folder / "a.toml"
    home = folder / ".flwr-a"
    write_status(home)
    with hold_lock(home):
        findings = check_health(path)
    assert judge(findings) == Verdict.HEALTHY, findings
    assert find(findings, "state").why == "it has not trained yet"
    assert judge(check_health(path)) == Verdict.DOWN


def check_server_of_member(folder: Path, port: int, host: str = "localhost") -> health.Finding:
    """What a member finds whose SuperNode has ended, and is started with this address."""
    command = ["python", "supernode", "--superlink", f"{host}:{port}", "--isolation", "process"]
    write_status(folder / ".flwr-a", commands=[command], processes=[])
    with hold_lock(folder / ".flwr-a"):
        return find(check_health(folder / "a.toml"), "server")


def test_a_member_reaches_its_server(folder: Path) -> None:
    with tls_server(make_server_context(folder)) as port:
        found = check_server_of_member(folder, port)
    assert found.verdict == Verdict.HEALTHY and f"localhost:{port} is reached" in found.why


def test_a_member_says_that_its_servers_certificate_has_expired(folder: Path) -> None:
    make_keys(folder, days=-1)
    with tls_server(make_server_context(folder)) as port:
        found = check_server_of_member(folder, port)
    assert found.verdict == Verdict.DOWN
    assert found.why == f"the certificate of localhost:{port} is refused: certificate has expired"


@pytest.mark.parametrize("commands", [None, 1, [1], [["--superlink"]], [["--superlink", "x:y"]]])
def test_an_odd_record_of_commands_ends_nothing(commands: object, folder: Path) -> None:
    write_status(folder / ".flwr-a", commands=commands)
    with hold_lock(folder / ".flwr-a"):
        found = {finding.what: finding.why for finding in check_health(folder / "a.toml")}
    assert "server" not in found or "x:y cannot be reached" in found["server"]


def test_a_member_says_that_a_certificate_belongs_to_another_server(folder: Path) -> None:
    """One that its authority never issued, behind the address that it knows."""
    context = make_server_context(folder)
    make_keys(folder)
    with tls_server(context) as port:
        found = check_server_of_member(folder, port)
    assert found.verdict == Verdict.DOWN and "is refused" in found.why


def test_a_member_says_that_its_server_cannot_be_reached(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    found = check_server_of_member(folder, closed, "127.0.0.1")
    assert found.verdict == Verdict.DOWN
    assert found.why == f"127.0.0.1:{closed} cannot be reached: Connection refused"


def test_the_command_says_it_by_its_exit_code(folder: Path, port: int, tmp_path: Path) -> None:
    home = folder / ".flwr"
    write_status(home)
    words = ("deploy", "health", str(folder), "--port", str(port))
    with hold_lock(home):
        done = fedproto(*words, "--json")
    assert done.code == 0, done.out + done.err
    assert json.loads(done.out)["verdict"] == "healthy"
    down = fedproto(*words)
    assert down.code == 3 and "it does not run" in down.out
    bad = fedproto("deploy", "health", str(tmp_path))
    assert bad.code == 2 and "neither a folder that `fedproto deploy init` made" in bad.err
