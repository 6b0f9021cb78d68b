"""Federations of real processes: the scripts of `fedproto deploy init`, with TLS and keys."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout
from sklearn.datasets import load_digits

from fedproto.core.files import read_tensors
from fedproto.core.types import Tree
from fedproto.deploy.member import evaluate_member, train_round
from fedproto.deploy.member_checkpoint import STATE_FORMAT
from fedproto.deploy.messages import Message
from fedproto.deploy.scaffold import init
from fedproto.deploy.server_state import STATE_FILE, ServerState, read_state
from fedproto.deploy.settings import ServerSettings, TrainingTerms, read_member

PATIENCE = 180.0  # seconds, on a machine that does other things, too
#: Ports that are ours until this process ends.
_RESERVED: list[FileLock] = []
CLASSES = ("0", "1", "2", "3", "4", "5")
OWN = {"a": (0, 1, 2), "b": (2, 3, 4), "c": (4, 5, 0)}
MODELS = {"a": "mlp(hidden=30)", "b": "mlp(hidden=50)", "c": "mlp(hidden=40)"}

#: Makes a member misbehave: the files in its folder `odd` say how. Every process of Flower reads
#: this module at its start; only the one whose forks reply imports fedproto.
ODD = """
import pathlib, sys, time
here = pathlib.Path(__file__).parent

def read_words(name):
    path = here / name
    return path.read_text().split() if path.exists() else []

def choose(name, round):
    words = read_words(name)
    return words[round - 1] if round <= len(words) else "none"

def malform_objects(kind):
    import json
    from flwr.app import Array, ArrayRecord
    from flwr.supercore.inflatable import inflatable_object

    def repeat_chunk(body):
        return json.dumps(json.loads(body) | {"arraychunk_ids": [0] * 200_000}).encode()

    changes = {
        "json": (ArrayRecord, lambda body: body[:-2]),
        "deep": (Array, lambda body: b"[" * 100_000),
        "repeat": (Array, repeat_chunk),
    }
    if kind not in changes:
        return
    changed_class, change = changes[kind]
    deflate = changed_class.deflate

    def deflate_changed(self):
        body = inflatable_object.get_object_body(deflate(self), changed_class)
        return inflatable_object.add_header_to_object_body(change(body), self)

    changed_class.deflate = deflate_changed

if "supernode" in sys.orig_argv:
    import httpx
    from flwr.supernode.fleet_http_client import FleetHttpClient
    announce = FleetHttpClient.PushMessages

    def announce_and_lose_the_answer(self, request):
        answer = announce(self, request)
        if (here / "lose").exists():
            (here / "lose").unlink()
            raise httpx.ReadTimeout("as if the line was cut")
        return answer

    FleetHttpClient.PushMessages = announce_and_lose_the_answer

if any("warm_worker" in word for word in sys.orig_argv):
    import dataclasses
    import numpy as np
    from fedproto.deploy import member
    train_round = member.train_round

    def train_oddly(request, own, **options):
        round = request.header["round"]
        (here / "asked").write_text(str(round))
        while read_words("hold") == [str(round)]:
            time.sleep(0.05)
        reply = train_round(request, own, **options)
        with (here / "trained").open("a") as trained:
            print(round, file=trained)
        trick = choose("tricks", round)
        header = dict(reply.header)
        arrays = {name: np.array(value) for name, value in reply.arrays.items()}
        sums = arrays.get("prototypes/value.prototypes")
        if trick == "nan":
            sums[0, 0] = np.nan
        if trick == "huge":
            sums[:] = 1e30
        if trick == "shape":
            wider = (len(sums), sums.shape[1] + 1)
            arrays["prototypes/value.prototypes"] = np.zeros(wider, sums.dtype)
        if trick == "many":
            header["spoken"] = [f"{number:x}" for number in range(1_000_000)]
        if trick == "crowd":
            header["spoken"] = [f"{number:x}" for number in range(100_000)]
        if trick == "round":
            header["round"] += 1
        if trick == "name":
            header["member"] = "a"
        if trick == "weight":
            arrays["prototypes/extra.weight"][:] = -1
        if trick == "raise":
            raise RuntimeError("as if something broke")
        malform_objects(choose("objects", round))
        return dataclasses.replace(reply, header=header, arrays=arrays)

    member.train_round = train_oddly
"""


class Run(NamedTuple):
    """How a run ended, and the server's state after each of its rounds."""

    status: str  # finished:completed, or :failed, or :stopped
    log: str
    rounds: dict[int, tuple[Tree, dict[str, Any]]]
    traffic: dict[str, Any]
    times: dict[int, float]  # when each round's state was written


class Deployed:
    """The folder and its processes, all of which are found by their FLWR_HOME.

    A folder that is there already is taken up as it is.
    """

    def __init__(
        self,
        folder: Path,
        members: dict[str, dict[str, str]],
        hosts: tuple[str, ...] = ("localhost", "127.0.0.1"),
    ) -> None:
        self.folder, self.port = folder, _free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes: dict[str, str] = {}  # names by Flower's numbers
        if not folder.exists():
            init(folder, list(members), "mnist5k", list(CLASSES))
            subprocess.run(
                [sys.executable, "keys.py", *hosts, "--", *members],
                cwd=folder,
                check=True,
            )
        for name, own in members.items():
            self.write_member(name, **own)

    # --- files

    def write_member(self, name: str, **own: str) -> None:
        """Its file, which is read anew for every message."""
        lines = [
            f'{key} = "{value}"\n'
            for key, value in ({"name": name, "state": f"state-{name}"} | own).items()
        ]
        (self.folder / f"{name}.toml").write_text("".join(lines))

    def odd(self, name: str) -> Path:
        """The folder by which a member's processes are made to behave otherwise."""
        folder = self.folder / f"odd-{name}"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(ODD)
        return folder

    def member_round(self, name: str) -> int:
        path = Path(read_member(self.folder / f"{name}.toml").state) / "member.safetensors"
        return read_tensors(path, STATE_FORMAT)[1]["round"] if path.exists() else 0

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    # --- processes

    def place(self, name: str) -> list[str]:
        """The words before a command that start it where this server or member is."""
        return []

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        own = (
            _environment()
            | {
                "FLWR_HOME": str(self.folder / f".flwr-{name}"),
                "PORT": str(self.port),
                "RETRY": "2",
            }
            | environment
        )
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.place(name), *command],
                cwd=self.folder,
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.processes[name]

    def listens(self) -> bool:
        return _listens(self.port)

    def start_server(self, **environment: str) -> None:
        process = self.start("server", "./server.sh", **environment)
        until(lambda: self.listens() or process.poll() is not None, "the server listens")
        assert process.poll() is None, self.log("server")

    def start_member(self, name: str, **environment: str) -> subprocess.Popen[bytes]:
        return self.start(name, "./member.sh", name, LOCAL_PORT=str(_free_port()), **environment)

    def admit(self, *names: str) -> None:
        done = self.call("./admit.sh", *names)
        numbers = re.findall(r"SuperNode (\d+)", done.stdout)
        assert done.returncode == 0 and len(numbers) == len(names), done.stdout + done.stderr
        self.nodes |= dict(zip(numbers, names, strict=True))

    def online(self) -> set[str]:
        done = self.flwr("supernode", "list", "federation", "--format", "json")
        nodes = json.loads(done.stdout)["nodes"] if done.returncode == 0 else []
        return {self.nodes[node["node-id"]] for node in nodes if node["status"] == "online"}

    def bring(self, *names: str, **environment: str) -> None:
        """Start members until they are online: a killed one counts as online for a minute."""

        def there() -> bool:
            for name in names:
                if name not in self.processes or self.processes[name].poll() is not None:
                    self.start_member(name, **environment)
            return set(names) <= self.online()

        until(there, f"{', '.join(names)} are online")

    def kill(self, *names: str) -> None:
        """Kill processes and all they started; the server's helper has its own session."""
        for name in names:
            process = self.processes.pop(name)
            mark = f"FLWR_HOME={self.folder / f'.flwr-{name}'}"
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            until(lambda mark=mark: not _end(mark), f"{name} is gone", 30)

    def stop(self, name: str) -> None:
        """As Ctrl-C would: it takes its leave of the server."""
        process = self.processes.pop(name)
        _signal_group(process.pid, signal.SIGTERM)
        process.wait()
        until(
            lambda: not _marked(f"FLWR_HOME={self.folder / f'.flwr-{name}'}"),
            f"{name} has ended",
            60,
        )

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        own = _environment() | {"FLWR_HOME": str(self.folder / ".flwr"), "PORT": str(self.port)}
        return subprocess.run(
            [*self.place("server"), *command],
            cwd=self.folder,
            env=own,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def flwr(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.call("bash", "-c", '. ./env.sh; exec flwr "$@"', "./flwr", *words)

    # --- runs

    def submit(self, **config: Any) -> str:
        words = " ".join(
            f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items()
        )
        done = self.flwr("run", ".", "federation", "--format", "json", "--run-config", words)
        assert done.returncode == 0 and "run-id" in json.loads(done.stdout), (
            done.stdout + done.stderr
        )
        return json.loads(done.stdout)["run-id"]

    def status(self, run: str) -> dict[str, Any]:
        done = self.flwr("list", "federation", "--run-id", run, "--format", "json")
        return json.loads(done.stdout)["runs"][0] if done.returncode == 0 else {"status": "unknown"}

    def run(self, meanwhile: Callable[[], object] | None = None, **config: Any) -> Run:
        """Start a run and wait for its end; `flwr run --stream` exits with 0 even if it failed."""
        state = Path(config.get("state", self.folder / "server")) / STATE_FILE
        with _kept(state, self.folder / "kept", config["rounds"]) as (kept, times, complete):
            run, ends = self.submit(**config), time.monotonic() + 4 * PATIENCE
            if meanwhile is not None:
                meanwhile()
            while not (found := self.status(run))["status"].startswith("finished"):
                assert time.monotonic() < ends, f"the run does not end: {found}"
                if not complete.wait(8):  # asking costs the processor as much as a member's round
                    continue
                time.sleep(0.5)
        log = self.flwr("log", run, "federation", "--show").stdout
        rounds = {number: read_state(path) for number, path in kept.items()}
        if state.exists():  # the last one holds the accuracies after the last round
            rounds[read_state(state)[1]["round"]] = read_state(state)
        return Run(found["status"], log, rounds, found.get("network-traffic", {}), times)


@contextlib.contextmanager
def deployed(
    folder: Path,
    members: dict[str, dict[str, str]],
    *,
    prepare: Callable[[Path], None] | None = None,
    **environment: str,
) -> Iterator[Deployed]:
    """Server and members, online; nothing of them is left afterwards.

    `prepare` may change the folder before anything is started.
    """
    federation = Deployed(folder, members)
    if prepare is not None:
        prepare(folder)
    with running(federation):
        federation.start_server()
        federation.admit(*members)
        federation.bring(*members, **environment)
        yield federation


@contextlib.contextmanager
def running(federation: Deployed) -> Iterator[None]:
    """Nothing of the federation's processes is left afterwards."""
    try:
        yield
    finally:
        for process in federation.processes.values():
            _signal_group(process.pid, signal.SIGKILL)
        for process in federation.processes.values():
            process.wait()  # or those it started would take it for alive
        until(lambda: not _end(str(federation.folder)), "nothing is left", 30)


def digits(
    folder: Path, names: str = "abc"
) -> tuple[dict[str, dict[str, str]], list[tuple[np.ndarray, ...]]]:
    """Write three members' files with their own class numbers; return them and the arrays."""
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8).astype(np.uint8) * 15
    files, arrays = {}, []
    for place, name in enumerate(names):
        own = OWN.get(name, OWN["a"])
        rows = np.isin(y, own)
        images, labels = x[rows][place % 3 :: 3], y[rows][place % 3 :: 3]
        order = sorted(own, reverse=True)
        numbers = np.array([order.index(label) for label in labels])
        train, test = slice(0, 60), slice(60, 100)
        arrays.append((images[train], labels[train], images[test], labels[test]))
        np.savez(
            folder / f"{name}.npz",
            x=images[train],
            y=numbers[train],
            x_test=images[test],
            y_test=numbers[test],
            classes=[str(label) for label in order],
        )
        files[name] = {"data": f"npz:{folder / name}.npz", "model": MODELS.get(name, MODELS["a"])}
    return files, arrays


def replayed(
    federation: Deployed,
    files: dict[str, dict[str, str]],
    there: list[str],
    in_vain: list[str] | None = None,
    **config: Any,
) -> ServerState:
    """The same in this process, with those who are there in each round.

    `in_vain` names those who trained the round, but whose reply did not arrive.
    """
    terms = {
        key: config.pop(key) for key in list(config) if key in TrainingTerms.__dataclass_fields__
    }
    state = federation.folder / f"replayed-{len(list(federation.folder.glob('replayed-*')))}"
    server_state = ServerState(
        ServerSettings(state=str(state), classes=",".join(CLASSES), **config),
        TrainingTerms(**terms),
    )
    own = {}
    for name, settings in files.items():
        lines = [
            f'{k} = "{v}"\n'
            for k, v in (settings | {"name": name, "state": str(state / name)}).items()
        ]
        state.mkdir(exist_ok=True)
        (state / f"{name}.toml").write_text("".join(lines))
        own[name] = read_member(state / f"{name}.toml")
    for names, late in zip(there, in_vain or [""] * len(there), strict=True):
        requests: dict[str, Message] = {
            name: server_state.make_request(name) for name in sorted([*names, *late])
        }
        for name, request in requests.items():
            reply = train_round(request, own[name])
            if name in names:
                server_state.accept_reply(
                    name, reply, server_state.expect_replies(frozenset(names))
                )
        server_state.close_round()
    for name in server_state.members:
        server_state.members[name].note_accuracy(
            evaluate_member(server_state.make_request(name, all_classes=True), own[name])
        )
    return server_state


def same(a: Tree, b: Tree) -> bool:
    return set(a) == set(b) and all(
        torch.allclose(a[name], b[name], rtol=0, atol=1e-7) for name in a
    )


def server_of(tensors: Tree) -> Tree:
    return {
        name.removeprefix("server."): value
        for name, value in tensors.items()
        if name.startswith("server.")
    }


def until(
    true: Callable[[], object], what: str, seconds: float = PATIENCE, every: float = 0.1
) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, f"{what}: not within {seconds} seconds"
        time.sleep(every)


@contextlib.contextmanager
def _kept(
    state: Path, folder: Path, rounds: int
) -> Iterator[tuple[dict[int, Path], dict[int, float], threading.Event]]:
    """Copy the server's file after every round, by looking often; it is replaced atomically.

    After the last round it is written twice, the second time with the last accuracies: then it is
    complete.
    """
    kept: dict[int, Path] = {}
    times: dict[int, float] = {}
    over, complete = threading.Event(), threading.Event()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()

    def look() -> None:
        seen = 0
        while not over.wait(0.05):
            if state.exists() and (written := state.stat().st_mtime_ns) != seen:
                seen = written
                copy = shutil.copy(state, folder / "new")
                number = read_state(Path(copy))[1]["round"]
                if number >= rounds and number in kept:
                    complete.set()
                kept[number] = Path(copy).rename(folder / str(number))
                times.setdefault(number, state.stat().st_mtime)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield kept, times, complete
    finally:
        over.set()
        looking.join()


def _environment() -> dict[str, str]:
    quiet = dict.fromkeys(
        ("FLWR_DISABLE_UPDATE_CHECK", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"), "1"
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return (
        os.environ | quiet | {"FLWR_TELEMETRY_ENABLED": "0", "PATH": path, "OMP_NUM_THREADS": "1"}
    )


def _free_port() -> int:
    """A port that nobody listens on, and that no other test of this machine is given.

    It is below those that the system gives to whoever asks for any, for a server or a connection.
    """
    folder = Path("/tmp/fedproto-test-ports")
    folder.mkdir(exist_ok=True)
    for port in random.SystemRandom().sample(range(20_000, 32_000), 1000):
        lock = FileLock(folder / str(port), mode=0o666)
        with contextlib.suppress(Timeout, OSError), socket.socket() as probe:
            lock.acquire(blocking=False)
            _RESERVED.append(lock)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there is no free port")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _marked(mark: str) -> list[int]:
    """The processes with `mark` in their environment, or with an FLWR_HOME in that folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # somebody else's, or gone
            continue
        if any(word == mark or word.startswith(f"FLWR_HOME={mark}/") for word in environment):
            found.append(int(entry.name))
    return found


def _end(mark: str) -> list[int]:
    """End those; gives who was still there."""
    found = _marked(mark)
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return found
