"""What `fedproto watch` costs a run: rounds of W20 with a page open, and with the server paused.

python benchmarks/watch_cost.py [ROUNDS]

W20 is FedProto over 20 clients of 3 classes x 100 MNIST images with the paper's CNN. A server of
`fedproto watch` follows the run folder for one open page, which also loads every new round. It is
paused (SIGSTOP) and continued every few rounds, so that both kinds of rounds belong to one run.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import fedproto

BLOCK_ROUNDS = 3  # with and without the server, in turn


def follow(address: str) -> None:
    """Do what an open page does: listen, and load the runs that changed."""
    with urllib.request.urlopen(f"{address}api/events") as events:
        for line in events:
            if line.startswith(b"data: "):
                for run in json.loads(line[6:])["runs"]:
                    after = max(0, run["rounds_done"] - 1)
                    path = f"api/runs/{run['id']}?after={after}&epoch=0"
                    urllib.request.urlopen(address + path).read()


def start_watch(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Return the process of the server and its address."""
    command = [sys.executable, "-u", "-m", "fedproto", "watch", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, line.split(" at ")[1].split()[0]


def cpu_seconds(process: int) -> float:
    """Return the time that a process has spent on a processor."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    settings = {"dataset": "mnist", "model": "cnn", "clients": 20, "ways": 3, "shots": 100}
    settings |= {"stdev": 0, "test_shots": 10, "eval_every": 5, "engine": "vectorised"}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runs" / "w20"
        server = None
        is_watched = False
        own = os.times()
        begin = time.monotonic()
        for found in fedproto.stream(out=out, rounds=rounds, **settings):
            if not hasattr(found, "round"):
                break  # the result
            if server is None:
                server, address = start_watch(out.parent)
                threading.Thread(target=follow, args=(address,), daemon=True).start()
                time.sleep(3)
                first_cpu = cpu_seconds(server.pid)
                own = os.times()
                begin = time.monotonic()
                is_watched = True
                continue
            seconds[is_watched].append(found.seconds)
            if found.round % BLOCK_ROUNDS == 0:
                is_watched = not is_watched
                server.send_signal(signal.SIGCONT if is_watched else signal.SIGSTOP)
        assert server is not None
        server.send_signal(signal.SIGCONT)
        used = cpu_seconds(server.pid) - first_cpu
        trained = os.times().user + os.times().system - own.user - own.system
        passed = time.monotonic() - begin
        server.terminate()
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    print(f"rounds with a page open {len(seconds[True])}, without {len(seconds[False])}")
    print(f"median seconds per round: {medians[True]:.3f} watched, {medians[False]:.3f} not")
    print(f"ratio {medians[True] / medians[False]:.4f}")
    share = used / (sum(seconds[True]) or 1)
    print(f"server: {used:.2f} s of CPU time, {share:.2%} of the watched rounds' time")
    print(f"training: {trained:.1f} s of CPU time in {passed:.1f} s; {used / trained:.2%} of it")


if __name__ == "__main__":
    main()
