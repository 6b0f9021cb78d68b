"""The warm worker: what it imports, what its forks see, and when it ends."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import subprocess_executor
from flwr.supercore.superexec.executor.types import ExecutionSpec

from fedproto.deploy import warm_worker

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a new Python whose BLAS starts no threads."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by /proc")
def test_a_worker_has_imported_what_a_round_needs_and_started_nothing(tmp_path: Path) -> None:
    """A fork of a process with threads, or with a GPU in use, may hang."""
    done = run_script(
        "import os, sys\n"
        "from fedproto.deploy import warm_worker\n"
        "assert warm_worker._import_flower()\n"
        "warm_worker.preload()\n"
        "import torch\n"
        "needed = ('fedproto.deploy.member', 'fedproto.deploy.round_protocol', 'torch',\n"
        "          'fedproto.algorithms.fedproto', 'fedproto.models.cnn', 'fedproto.data.npz')\n"
        "print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized(),\n"
        "      [name for name in needed if name not in sys.modules])\n",
        tmp_path,
    )
    assert done.stdout == "1 False []\n", done.stdout + done.stderr


SPEC = {
    "runtime_api_address": "127.0.0.1:9094",
    "token": "secret-token",
    "runtime_dependency_install": False,
    "parent_pid": 7,
    "suppress_output": True,
    "task_id": 1,
}


@pytest.mark.parametrize("kind", [TaskType.CLIENT_APP, TaskType.SERVER_APP])
@pytest.mark.parametrize("tls", [{"insecure": True}, {"insecure": False, "root": "keys/ca.crt"}])
@pytest.mark.parametrize("installs", [False, True])
def test_a_task_is_the_command_that_flower_itself_would_start(
    kind: TaskType, tls: dict[str, object], installs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    stand_in = SimpleNamespace(
        Popen=lambda words, **_: started.append(words), DEVNULL=subprocess.DEVNULL
    )
    monkeypatch.setattr(subprocess_executor, "subprocess", stand_in)
    spec = ExecutionSpec(
        **SPEC
        | {
            "task_type": kind,
            "insecure": tls["insecure"],
            "root_certificates_path": tls.get("root"),
            "runtime_dependency_install": installs,
        }
    )
    subprocess_executor.SubprocessExecutor().launch(spec)
    task = warm_worker.describe_task(spec)
    assert task is not None and task["quiet"] is True
    theirs = started[0]
    place = theirs.index("--parent-pid")
    del theirs[place : place + 2]  # that of the fork is the worker's
    assert [task["command"], *task["words"]] == theirs


def test_other_tasks_of_flower_are_left_to_flower() -> None:
    spec = ExecutionSpec(
        **SPEC | {"task_type": TaskType.MODEL, "insecure": True, "root_certificates_path": None}
    )
    assert warm_worker.describe_task(spec) is None


#: Stands in for Flower's command: it says what it sees, changes it, and ends as it is told.
STAND_IN = """
import os, signal, sys
seen = []
def flwr_clientapp():
    how = sys.argv[sys.argv.index("--token") + 1]
    seen.append(how)
    with open("seen", "a") as file:
        file.write(f"{how} {seen} {sys.argv[-2:] == ['--parent-pid', str(os.getppid())]}\\n")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise RuntimeError("as if something broke")
    if how == "silent":
        sys.exit(0)
    push_message()
    sys.exit(int(how))

def push_message():
    pass
"""
#: A worker whose SuperExec passes on the tasks that the test names, and then waits.
WORKER = """
import json, os, socket, sys, time
sys.path.insert(0, os.getcwd())
from fedproto.deploy import warm_worker
import stand_in
warm_worker.COMMANDS = warm_worker.ANSWERS = {"flwr-clientapp": "stand_in"}
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
superexec = os.fork()
if superexec == 0:
    for word in sys.argv[1:]:
        if word == "end":
            os._exit(0)
        task = {"command": "flwr-clientapp", "words": ["--token", word], "quiet": False}
        theirs.send(json.dumps(task).encode())
    time.sleep(60)
    os._exit(0)
warm_worker._fork_for_tasks(ours, superexec)
"""


def run_worker(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "stand_in.py").write_text(STAND_IN)
    command = [sys.executable, "-c", WORKER, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_fork_sees_nothing_of_the_messages_before_it(tmp_path: Path) -> None:
    """A task that fails says so by itself; one that is killed ends the worker."""
    done = run_worker(tmp_path, "0", "1", "0", "killed")
    assert done.returncode == warm_worker.CRASHED, done.stderr
    assert "the process of a message ended by signal 9" in done.stderr
    lines = sorted((tmp_path / "seen").read_text().splitlines())
    own = ["0 ['0'] True", "0 ['0'] True", "1 ['1'] True", "killed ['killed'] True"]
    assert lines == own


@pytest.mark.parametrize("how", ["silent", "raises"])
def test_a_worker_ends_when_a_message_gets_no_answer(how: str, tmp_path: Path) -> None:
    """Flower's process obeys SIGTERM with exit status 0, and its SuperNode waits for ever."""
    done = run_worker(tmp_path, how)
    assert done.returncode == warm_worker.CRASHED, done.stderr
    assert "the process of a message ended without an answer" in done.stderr
    assert ("as if something broke" in done.stderr) == (how == "raises")


def test_flower_answers_by_the_function_that_is_watched() -> None:
    for command, name in warm_worker.ANSWERS.items():
        module = importlib.import_module(name)
        assert command in warm_worker.COMMANDS
        assert callable(module.push_message)
        assert "push_message" in module.run_clientapp.__code__.co_names


def test_a_worker_ends_when_nobody_asks_for_tasks_any_more(tmp_path: Path) -> None:
    assert run_worker(tmp_path, "end").returncode == 1


def test_tasks_fit_into_a_packet() -> None:
    longest = {"command": "flwr-serverapp", "words": ["x" * 4096] * 8, "quiet": True}
    assert len(json.dumps(longest)) < warm_worker.MAX_TASK_BYTES
