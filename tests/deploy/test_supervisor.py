"""The supervisor: what it started ends with it, and what ended is started again."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fedproto.core.files import is_locked
from fedproto.deploy import scaffold, supervisor
from fedproto.deploy.supervisor import RotatedLog, Supervisor

#: Stands in for Flower's SuperNode. Like Flower's, it starts a process that ends with it, takes a
#: moment to take its leave of the server, and dies at once of a second signal.
NODE = """#!/usr/bin/env bash
sleep 300 &
helper=$!
leave() {
  trap - INT TERM
  kill "$helper"
  sleep 0.5
  echo left >> node.left
  exit 0
}
trap leave INT TERM
echo "$$ $helper" >> node.started
wait
"""
#: Stands in for a worker, which reads the secret.
WORKER = """#!/usr/bin/env bash
cp "$1" "secret.$(ls secret.* 2> /dev/null | wc -l)"
echo "$$" >> worker.started
echo "the worker works"
exec sleep 300
"""
REFUSED = """#!/usr/bin/env bash
echo "$$" >> node.started
exit 3
"""


def wait_for(path: Path, lines: int = 1) -> list[str]:
    """Return a file's lines, once it has so many."""
    deadline = time.monotonic() + 60
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline, f"{path} has too few lines"
        time.sleep(0.02)
    return path.read_text().splitlines()


@contextmanager
def supervised(folder: Path, node: str = NODE, **environment: str) -> Iterator[subprocess.Popen]:
    """Yield a running supervisor of two stand-ins."""
    folder.mkdir()
    for name, text in (("node", node), ("worker", WORKER)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    command = [sys.executable, "-m", "fedproto.deploy.supervisor", "a", "home"]
    running = subprocess.Popen(
        [*command, "--", "./node", "--", "./worker", "{secret}"],
        cwd=folder,
        env=os.environ | {"RETRY": "0.1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Under nohup the tests ignore SIGHUP, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        wait_for(folder / "node.started")
        yield running
    finally:
        running.kill()
        running.wait()
        for process in find_left(folder):
            os.kill(process, signal.SIGKILL)
        assert running.stdout is not None
        running.stdout.close()


def find_left(folder: Path) -> list[int]:
    """Return the processes of the stand-ins that are still there."""
    left = []
    for path in folder.glob("*.started"):
        for word in path.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(word), 0)
                left.append(int(word))
    return left


@pytest.mark.parametrize("to", ["supervisor", "group"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything_and_the_member_takes_its_leave(
    number: signal.Signals, to: str, tmp_path: Path
) -> None:
    """`kill` and service managers signal the process, a terminal its whole process group."""
    folder = tmp_path / "fed"
    with supervised(folder) as running:
        wait_for(folder / "worker.started")
        assert len(find_left(folder)) == 3
        if to == "supervisor":
            running.send_signal(number)
        else:
            os.killpg(running.pid, number)
        assert running.wait(30) == 128 + number
        assert (folder / "node.left").read_text() == "left\n"
        assert find_left(folder) == []
        assert not is_locked(folder / "home")


def test_when_the_worker_dies_the_member_leaves_and_comes_back(tmp_path: Path) -> None:
    """Flower alone would say for ever that the member is there."""
    folder = tmp_path / "fed"
    with supervised(folder) as running:
        (first,) = wait_for(folder / "worker.started")
        os.kill(int(first), signal.SIGKILL)
        workers = wait_for(folder / "worker.started", 2)
        assert wait_for(folder / "node.started", 2) and workers[1] != first
        assert (folder / "node.left").read_text() == "left\n"
        status = json.loads((folder / "home" / supervisor.STATUS_FILE).read_text())
        assert len(status["failures"]) == 1
        assert status["last_failure"] == "worker ended by signal 9"
        assert is_locked(folder / "home")
        first_secret = (folder / "secret.0").read_bytes()
        assert len(first_secret) == 32 and first_secret != (folder / "secret.1").read_bytes()
        secret = folder / "home" / supervisor.SECRET_FILE
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        running.terminate()
        output, _ = running.communicate(timeout=30)
    assert "worker ended by signal 9; a keeps trying; Ctrl-C stops it\n" in output


def test_a_member_that_is_refused_tries_again_until_it_is_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with supervised(folder, REFUSED) as running:
        wait_for(folder / "node.started", 2)
        running.terminate()
        output, _ = running.communicate(timeout=30)  # nobody has it open any more
        assert running.returncode == 128 + signal.SIGTERM
    assert "node ended with exit status 3; a keeps trying; Ctrl-C stops it\n" in output


def test_of_two_supervisors_of_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with supervised(folder):
        command = [sys.executable, "-m", "fedproto.deploy.supervisor", "a", "home", "--", "./node"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "is in use by process" in done.stderr


def test_pauses_between_failures_grow_to_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RETRY", raising=False)
    fails = Supervisor("a", tmp_path, [[sys.executable, "-c", ""]])
    pauses: list[float] = []

    def wait(seconds: float) -> bool:
        if seconds == supervisor.LOOK_SECONDS:
            time.sleep(0.01)
            return False
        pauses.append(seconds)
        return len(pauses) == 5

    monkeypatch.setattr(fails.stopping, "wait", wait)
    fails.run()
    assert pauses == [10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_log_is_rotated_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOG_BYTES", 1000)
    log = RotatedLog(tmp_path / "member.log")
    for number in range(500):
        log.write(f"line {number:>20}")
    os.close(log.output)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["member.log", *(f"member.log.{number}" for number in range(1, 6))]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert (tmp_path / "member.log").read_text().endswith(f"line {499:>20}\n")


def test_all_output_goes_to_the_log(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with supervised(folder, LOG="member.log") as running:
        wait_for(folder / "member.log")
        (worker,) = wait_for(folder / "worker.started")
        os.kill(int(worker), signal.SIGKILL)
        wait_for(folder / "member.log", 3)
        running.terminate()
        output, _ = running.communicate(timeout=30)
    assert output == ""
    lines = (folder / "member.log").read_text().splitlines()
    assert lines == [
        "the worker works",
        "worker ended by signal 9; a keeps trying; Ctrl-C stops it",
        "the worker works",
    ]


# --- the scripts that start it

#: Stands in for python: it prints the words it is given.
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$@"
"""


def read_commands(folder: Path, *script: str, **environment: str) -> list[list[str]]:
    """Return the commands that a script of the folder would supervise."""
    scaffold.init(folder, ["a", "b"], "digits", ["0", "1"])
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python").write_text(PYTHON)
    (programs / "python").chmod(0o755)
    own = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"} | environment
    own.pop("FLWR_HOME", None)
    done = subprocess.run(script, cwd=folder, env=own, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[:2] == ["-m", "fedproto.deploy.supervisor"]
    name, home, commands = supervisor._read_words(words[2:])
    assert home.parent == folder and name in ("a", "server")
    return commands


def test_the_members_script_starts_flowers_node_on_loopback_with_a_secret(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from flwr.supercore.cli.flower_superexec import _parse_args as parse_worker
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as parse_node

    node, worker = read_commands(tmp_path / "fed", "./member.sh", "a", LOCAL_PORT="9777")
    assert node[:4] == ["python", "-m", "fedproto.deploy.flower_node", "supernode"]
    options = parse_node().parse_args(node[4:])
    assert (options.host, options.port, options.isolation) == ("127.0.0.1", 9777, "process")
    assert options.superexec_auth_secret_file == "{secret}" and not options.insecure
    assert worker[:3] == ["python", "-m", "fedproto.deploy.warm_worker"]
    options = parse_worker().parse_args(worker[3:])
    assert options.runtime_api_address == "127.0.0.1:9777"
    assert options.superexec_auth_secret_file == "{secret}"


@pytest.mark.parametrize(
    ("listen", "local"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")]
)
def test_the_servers_script_starts_flowers_link_with_tls_and_a_secret(
    listen: str, local: str, tmp_path: Path
) -> None:
    pytest.importorskip("flwr")
    from flwr.supercore.cli.flower_superexec import _parse_args as parse_worker
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink as parse_link

    link, worker = read_commands(tmp_path / "fed", "./server.sh", LISTEN=listen, PORT="9500")
    assert link[:4] == ["python", "-m", "fedproto.deploy.flower_node", "superlink"]
    options = parse_link().parse_args(link[4:])
    assert (options.host, options.port, options.isolation) == (listen, 9500, "process")
    assert options.enable_supernode_auth and options.ssl_keyfile == "keys/server.key"
    assert options.superexec_auth_secret_file == "{secret}" and not options.insecure
    options = parse_worker().parse_args(worker[3:])
    assert options.runtime_api_address == f"{local}:9500" and not options.insecure
