"""What a deployed round costs beyond training: before and after the warm worker, beside Flower's.

Three members with a few images each run in real processes, with TLS and keys, three times:

    hello      an app of Flower's own kind: FedAvg of one small array by numpy, without torch, on
               Flower's own processes as they come
    before     fedproto on Flower's own processes: a new Python for every message
    after      fedproto by the scripts of `fedproto deploy init`: a warm worker, shorter pauses

    OMP_NUM_THREADS=1 python benchmarks/deploy_overhead.py    # five minutes, on an idle machine
"""

import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from helpers.flower import MODELS, Deployed, Run, deployed, digits

import fedproto

ROUNDS = 6

#: Scripts that start Flower's processes as they come.
PLAIN_MEMBER = """#!/usr/bin/env bash
set -e
. ./env.sh
exec flower-supernode --superlink "$SERVER:$PORT" \\
  --root-certificates keys/ca.crt --auth-supernode-private-key "keys/$1" \\
  --host 127.0.0.1 --port "$LOCAL_PORT" --node-config "member=\\"$PWD/$1.toml\\""
"""
PLAIN_SERVER = """#!/usr/bin/env bash
set -e
. ./env.sh
mkdir -p -m 700 server
exec flower-superlink --database server/flower.db \\
  --host 127.0.0.1 --port "$PORT" --enable-supernode-auth \\
  --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.pem --ssl-keyfile keys/server.key
"""

#: An app as Flower's guides write one, with nothing to train.
HELLO_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "hello"
version = "1.0.0"
description = "Hello"
license = "Apache-2.0"
dependencies = ["flwr"]

[tool.flwr.app]
publisher = "hello"

[tool.flwr.app.components]
serverapp = "hello.server:app"
clientapp = "hello.client:app"

[tool.flwr.app.config]
rounds = 1
times = ""
"""
HELLO_CLIENT = """
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    arrays = message.content["arrays"].to_numpy_ndarrays()
    content = {
        "arrays": ArrayRecord([array + 1 for array in arrays]),
        "metrics": MetricRecord({"num-examples": 1}),
    }
    return Message(RecordDict(content), reply_to=message)
"""
HELLO_SERVER = """
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Timed(FedAvg):
    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        with self.times.open("a") as file:
            file.write(f"{time.time()}\\n")
        return result


@app.main()
def main(grid, context):
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    strategy.times = Path(context.run_config["times"])
    initial = ArrayRecord([np.zeros(100, np.float32)])
    strategy.start(grid, initial, num_rounds=context.run_config["rounds"])
"""

#: A `sitecustomize.py` that every process of a member reads. The process that answers notes, for
#: each round, when it was started, when it was asked, and when it had answered.
NOTE_TIMES = """
import os, pathlib, sys, time
words = " ".join(sys.orig_argv)
if "flwr-clientapp" in words or "warm_worker" in words:
    started = [time.time()]
    os.register_at_fork(after_in_child=lambda: started.append(time.time()))
    from fedproto.deploy import member
    train_round = member.train_round
    def train_and_note(message, own):
        asked = time.time()
        reply = train_round(message, own)
        with (pathlib.Path(__file__).parent / "times").open("a") as file:
            file.write(f"{message.header['round']} {started[-1]} {asked} {time.time()}\\n")
        return reply
    member.train_round = train_and_note
"""

#: The parts of a member's time in a round: between two rounds of the server, with its three notes.
PARTS = ("until started", "until asked", "to answer", "until counted")


def use_plain_scripts(folder: Path) -> None:
    """Replace the scripts of a deployment by those that start Flower's own processes."""
    for name, text in (("member.sh", PLAIN_MEMBER), ("server.sh", PLAIN_SERVER)):
        (folder / name).write_text(text)
    environment = (folder / "env.sh").read_text().splitlines()
    kept = [line for line in environment if "POLL_INTERVAL" not in line]
    (folder / "env.sh").write_text("\n".join(kept) + "\n")


def run_hello(federation: Deployed, folder: Path) -> list[float]:
    """Return the seconds of each round but the first of the app of Flower's own kind."""
    app = folder / "app"
    (app / "hello").mkdir(parents=True)
    (app / "pyproject.toml").write_text(HELLO_PROJECT)
    (app / "hello" / "__init__.py").touch()
    (app / "hello" / "client.py").write_text(HELLO_CLIENT)
    (app / "hello" / "server.py").write_text(HELLO_SERVER)
    times = folder / "hello-times"
    config = f'rounds={ROUNDS} times="{times}"'
    words = ("run", str(app), "federation", "--format", "json", "--run-config", config)
    done = federation.flwr(*words)
    run = json.loads(done.stdout)["run-id"]
    while not (found := federation.status(run))["status"].startswith("finished"):
        time.sleep(10)  # asking costs the processor as much as a round
    if found["status"] != "finished:completed":
        raise RuntimeError(federation.flwr("log", run, "federation", "--show").stdout)
    moments = [float(line) for line in times.read_text().splitlines()]
    return [later - earlier for earlier, later in pairwise(moments)]


def run_fedproto(federation: Deployed, folder: Path) -> tuple[list[float], dict[str, float], Run]:
    """Return the seconds of each round but the first, a member's parts of them, and the run."""
    run = federation.run(rounds=ROUNDS, quorum=3, timeout=300.0)
    if run.status != "finished:completed":
        raise RuntimeError(run.log)
    lines = (folder / "times").read_text().splitlines()
    notes = [_read_note(line) for line in lines]
    seconds = [run.times[round] - run.times[round - 1] for round in range(2, ROUNDS + 1)]
    return seconds, split_times(run, notes), run


def _read_note(line: str) -> list[float]:
    return [float(word) for word in line.split()]


def split_times(run: Run, notes: list[list[float]]) -> dict[str, float]:
    """Return the median seconds of each part of a member's round, without the first round."""
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for number, *member_times in notes:
        round = int(number)
        if round == 1:
            continue
        times = [run.times[round - 1], *member_times, run.times[round]]
        for part, (earlier, later) in zip(PARTS, pairwise(times), strict=True):
            seconds[part].append(later - earlier)
    return {part: statistics.median(values) for part, values in seconds.items()}


def prepare(folder: Path) -> tuple[dict[str, dict[str, str]], list[Any], dict[str, str]]:
    """Return members' files, their arrays, and an environment in which they note times."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(NOTE_TIMES)
    files, arrays = digits(folder)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return files, arrays, {"PYTHONPATH": path}


def summarise(seconds: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(seconds), "rounds": [round(value, 2) for value in seconds]}


def main() -> None:
    """Print the report as JSON."""
    report: dict[str, Any] = {"load average": os.getloadavg()}
    with tempfile.TemporaryDirectory() as name:
        before = Path(name) / "before"
        files, arrays, environment = prepare(before)
        with deployed(
            before / "federation", files, prepare=use_plain_scripts, **environment
        ) as federation:
            report["hello"] = summarise(run_hello(federation, before))
            seconds, parts, run_before = run_fedproto(federation, before)
            report["before"] = summarise(seconds) | {"a member's parts, medians": parts}
        after = Path(name) / "after"
        files, arrays, environment = prepare(after)
        with deployed(after / "federation", files, **environment) as federation:
            seconds, parts, run_after = run_fedproto(federation, after)
            report["after"] = summarise(seconds) | {"a member's parts, medians": parts}
    models = ",".join(f"{model}*1" for model in MODELS.values())
    simulated = fedproto.run(
        dataset=arrays, model=models, rounds=ROUNDS, dim=50, engine="reference"
    )
    report["simulator, a round"] = simulated.data["seconds"]["per_round"]
    report["after / hello"] = report["after"]["median"] / report["hello"]["median"]
    report["before / after"] = report["before"]["median"] / report["after"]["median"]
    report["equal states after all rounds"] = states_are_equal(run_before, run_after)
    report["bytes Flower counts, the app and the last accuracies included"] = run_after.traffic
    report["load average at the end"] = os.getloadavg()
    print(json.dumps(report, indent=2))


def states_are_equal(a: Run, b: Run) -> bool:
    """Return whether two runs left the same tensors at the server, to the bit."""
    first, second = a.rounds[ROUNDS][0], b.rounds[ROUNDS][0]
    same_names = set(first) == set(second)
    return same_names and all(first[name].equal(second[name]) for name in first)


if __name__ == "__main__":
    main()
