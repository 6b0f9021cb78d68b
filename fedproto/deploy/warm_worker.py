"""A process that has imported everything, and forks for every message.

Flower starts a new Python for every message, which imports torch for seconds before it trains for a
fraction of one. `python -m fedproto.deploy.warm_worker` takes the place of `flower-superexec` (it
has the same options) and starts these processes:

    warm worker       imports Flower, torch and fedproto, runs nothing, and has one thread
    ├─ SuperExec      Flower's own loop, which asks for tasks; it passes each on by a socket pair
    └─ a fork per task  Flower's own `flwr-clientapp` or `flwr-serverapp`; it ends with its task

A fork begins with modules that are imported and nothing else, so one message leaves nothing to the
next. Tokens of tasks go over the socket pair; Flower itself writes them on a command line.

The worker ends when its SuperExec ends, when its parent ends, or when the process of a message was
killed or ended without an answer, as on SIGTERM: its supervisor then starts the member again.
Flower alone would wait for that answer for ever. It uses undocumented parts of Flower 1.41, in this
file only; where they are missing, Flower's own executor takes over.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

#: Rooms whose modules messages need, and which are imported before the first one.
ROOMS = (
    "core",
    "config",
    "privacy",
    "teachers",
    "algorithms",
    "combiners",
    "metrics",
    "models",
    "transforms",
    "feature_maps",
    "data",
    "deploy",
)
#: What no deployed process needs: fesem cannot be deployed, and its libraries start threads.
LEFT_OUT = ("fedproto.algorithms.fesem",)
#: Flower's commands for the tasks that are forked, and the modules that hold them.
COMMANDS = {
    "flwr-clientapp": "flwr.supernode.cli.flwr_clientapp",
    "flwr-serverapp": "flwr.superlink.cli.flwr_serverapp",
}
#: The modules whose `push_message` sends the answer of a task, by Flower's command.
ANSWERS = {"flwr-clientapp": "flwr.supernode.runtime.run_clientapp"}
MAX_TASK_BYTES = 2**16
LOOK_SECONDS = 0.5  # between two looks at the worker's parent and children
CRASHED = 70  # the exit status of a worker one of whose tasks was killed, or did not answer
UNANSWERED = 71  # the exit status of a task's process that ends without an answer


def main() -> None:
    """Run the worker until it is told to end."""
    if not hasattr(os, "fork") or not _import_flower():
        os.execvp("flower-superexec", ["flower-superexec", *sys.argv[1:]])
    preload()
    ours, superexecs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    superexec = os.fork()
    if superexec == 0:
        ours.close()
        _run_superexec(superexecs)
    superexecs.close()
    _fork_for_tasks(ours, superexec)


def _import_flower() -> bool:
    """Import what we use of Flower; return whether it is all there."""
    try:
        for name, module in COMMANDS.items():
            getattr(importlib.import_module(module), name.replace("-", "_"))
        run_superexec = importlib.import_module("flwr.supercore.superexec.run_superexec")
        importlib.import_module("flwr.supercore.cli.flower_superexec")
        executors = importlib.import_module("flwr.supercore.superexec.executor")
        return hasattr(run_superexec, "get_executor") and hasattr(executors, "SubprocessExecutor")
    except (ImportError, AttributeError):
        return False


def preload() -> None:
    """Import all modules that a message may need, and run nothing of them."""
    for room in ROOMS:
        package = importlib.import_module(f"fedproto.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name not in LEFT_OUT:
                with suppress(ImportError):  # an optional library is not installed
                    importlib.import_module(module.name)


# --- the process that asks for tasks


def _run_superexec(channel: socket.socket) -> NoReturn:
    """Run Flower's SuperExec with an executor that passes tasks on."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec import run_superexec

    module: Any = run_superexec
    module.get_executor = lambda *_, **__: make_executor(channel)
    words = sys.argv[1:]
    if "--parent-pid" not in words:
        words = [*words, "--parent-pid", str(os.getppid())]
    sys.argv = ["flower-superexec", *words]
    flower_superexec()
    sys.exit(0)


def make_executor(channel: socket.socket) -> Any:
    """Return an executor of Flower's SuperExec that passes tasks on to the worker."""
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor

    class ForkExecutor(SubprocessExecutor):
        def launch(self, spec: ExecutionSpec) -> LaunchResult:
            task = describe_task(spec)
            if task is None:  # not one of ours: an agent, a model, a simulation
                return super().launch(spec)
            channel.send(json.dumps(task).encode())
            return LaunchResult.accepted()

    return ForkExecutor()


def describe_task(spec: Any) -> dict[str, Any] | None:
    """Return a task as a command and its words, or None if its command is not forked."""
    from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND

    command = TASK_TYPE_TO_COMMAND[spec.task_type]
    if command not in COMMANDS:
        return None
    address = TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type]
    words = [address, spec.runtime_api_address, "--token", spec.token]
    if spec.insecure:
        words.append("--insecure")
    elif spec.root_certificates_path is not None:
        words += ["--root-certificates", spec.root_certificates_path]
    if spec.runtime_dependency_install:
        words.append("--allow-runtime-dependency-installation")
    return {"command": command, "words": words, "quiet": spec.suppress_output}


# --- the process that forks


def _fork_for_tasks(channel: socket.socket, superexec: int) -> NoReturn:
    """Fork for each task that SuperExec passes on, until it ends or a task's process is killed."""
    parent = os.getppid()
    tasks: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _end(superexec, tasks, 0))
    while True:
        ready, _, _ = select.select([channel], [], [], LOOK_SECONDS)
        if ready:
            packet = channel.recv(MAX_TASK_BYTES)
            if packet:
                tasks.add(_fork(json.loads(packet), channel))
        if os.getppid() != parent:
            _end(superexec, tasks, 0)
        for process, status in _reap():
            tasks.discard(process)
            if process == superexec:
                _end(superexec, tasks, 1)
            if status < 0 or status == UNANSWERED:
                how = "without an answer" if status == UNANSWERED else f"by signal {-status}"
                print(f"the process of a message ended {how}", file=sys.stderr)
                _end(superexec, tasks, CRASHED)


def _reap() -> list[tuple[int, int]]:
    """Return the children that have ended and their exit status; minus a signal's number."""
    ended = []
    with suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            ended.append((process, os.waitstatus_to_exitcode(status)))
    return ended


def _end(superexec: int, tasks: set[int], status: int) -> NoReturn:
    """End all children and this process."""
    for process in (superexec, *tasks):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    os._exit(status)


def _fork(task: dict[str, Any], channel: socket.socket) -> int:
    """Fork a process for a task; return its number."""
    worker = os.getpid()
    process = os.fork()
    if process != 0:
        return process
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        channel.close()
        status = _run_task(task, worker)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_task(task: dict[str, Any], worker: int) -> int:
    """Run Flower's command for a task as if Python had just started; return its exit status.

    That is UNANSWERED if there was no answer: Flower's process obeys SIGTERM, and says it was well.
    """
    import numpy as np

    np.random.seed()  # or all forks would have one state of numpy's global generator
    if task["quiet"]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    name = task["command"]
    run: Callable[[], None] = getattr(
        importlib.import_module(COMMANDS[name]), name.replace("-", "_")
    )
    sys.argv = [name, *task["words"], "--parent-pid", str(worker)]
    answers = _watch_answers(name)
    status = 0
    try:
        run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        status = 1
    return UNANSWERED if answers == [] else status


def _watch_answers(command: str) -> list[str] | None:
    """Return a list to which Flower's command adds when it has answered; None if it owes none."""
    module: Any = importlib.import_module(ANSWERS[command]) if command in ANSWERS else None
    push = getattr(module, "push_message", None)
    if push is None:  # the server's part of a run, or another Flower
        return None
    answers: list[str] = []

    def push_and_note(*values: Any, **options: Any) -> Any:
        result = push(*values, **options)
        answers.append(command)
        return result

    module.push_message = push_and_note
    return answers


if __name__ == "__main__":
    main()
