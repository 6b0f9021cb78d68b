"""Tiny targets of `fedproto reproduce`, and a reporter that remembers what was trained."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from fedproto.reproduce import make
from fedproto.reproduce.plan import Request

#: Two methods in two columns with two seeds: eight federations.
TINY = """
title = "Tiny"
paper = "MNIST"
seeds = [0, 1]

[settings]
dataset = "digits"
model = "mlp(hidden=16,width=8)"
clients = 4
shots = 5
test_shots = 5
batch = 4
lr = 0.05
rounds = 3
eval_every = 1
checkpoint_every = 0
precision = "float64"
engine = "vectorised"

[columns]
"n = 3, stdev 2" = { ways = 3, stdev = 2 }
"n = 4, stdev 2" = { ways = 4, stdev = 2 }

[rows.Local]
algorithm = "local"

[rows.FedProto]
algorithm = "fedproto"
"""

#: The run folders of the tiny target, in the order in which they are run.
LOCAL_CELLS = [
    "Local-n=3_stdev_2-seed=0",
    "Local-n=3_stdev_2-seed=1",
    "Local-n=4_stdev_2-seed=0",
    "Local-n=4_stdev_2-seed=1",
]
FEDPROTO_CELLS = [
    "FedProto-n=3_stdev_2-seed=0",
    "FedProto-n=3_stdev_2-seed=1",
    "FedProto-n=4_stdev_2-seed=0",
    "FedProto-n=4_stdev_2-seed=1",
]
CELLS = [*LOCAL_CELLS, *FEDPROTO_CELLS]

#: Two rows whose trained models are probed.
PROBED = """
title = "Probed"
seeds = [3]

[settings]
dataset = "digits"
model = "mlp(hidden=16,width=8)"
algorithm = "fedproto"
clients = 4
shots = 5
ways = 3
stdev = 1
batch = 4
lr = 0.05
rounds = 3
precision = "float64"
engine = "vectorised"

[columns]
"all" = {}

[rows.FedProto]

[rows."FedProto, own start"]
start = "own"

[after]
embeddings = true
travel = true
"""

PROBED_CELLS = ("FedProto-all-seed=3", "FedProto_own_start-all-seed=3")


class Killed(BaseException):
    """Stands for SIGKILL inside this process."""


class QuietReporter:
    """Says nothing, remembers which cells were trained, and may stop everything.

    stop_at  the batch (from 1) and the round after which `Killed` is raised
    """

    def __init__(self, stop_at: tuple[int, int] | None = None) -> None:
        self.trained: list[list[str]] = []
        self.rounds_done: list[int] = []
        self.stop_at = stop_at

    def batch(self, cells, done, notices):
        self.trained.append([cell.name for cell in cells])
        self.rounds_done.append(done)
        return self.on_round

    def on_round(self, result):
        if self.stop_at == (len(self.trained), result.round):
            raise Killed

    def broken(self, cell, error):
        pytest.fail(f"{cell.name}: {error}")

    def open(self, cells, out):
        return contextlib.nullcontext(self)


def make_target(
    out: Path,
    target: str = "tiny",
    archive: Path | None = None,
    stop_at: tuple[int, int] | None = None,
    **request: Any,
) -> tuple[QuietReporter, list[Path]]:
    """Make a target; return the reporter and the files that were written."""
    reporter = QuietReporter(stop_at)
    files = list(make.make(target, Request(**request), out, archive, reporter.open))
    return reporter, files


def read_content(out: Path, name: str = "tiny") -> dict[str, Any]:
    """Return the JSON of a target without its measured times."""
    content = json.loads((out / f"{name}.json").read_text(), parse_constant=pytest.fail)
    for cell in content["cells"]:
        for run in cell["runs"]:
            assert run.pop("seconds") >= 0
    assert content.pop("seconds") >= 0
    return content


def refuse_to_train(*arguments, **settings):
    """Replace a function that trains, in tests where nothing may be trained."""
    pytest.fail("something was trained again")


def _split_row(line: str) -> list[str]:
    return [entry.strip() for entry in line.strip("|").split("|")]


def read_markdown(page: str) -> dict[str, list[dict[str, str]]]:
    """Return the tables of a page by the heading above them; a row is {column title: entry}."""
    tables = {}
    heading = ""
    for block in page.split("\n\n"):
        if block.startswith("#"):
            heading = block.lstrip("# ")
        if block.startswith("The same, "):
            heading = "own classes"
        if not block.startswith("|"):
            continue
        rows = [_split_row(line) for line in block.splitlines()]
        titles, _, *entries = rows
        tables[heading] = [dict(zip(titles, row, strict=True)) for row in entries]
    return tables
