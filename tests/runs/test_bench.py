"""The benchmark runs and writes its measurements; no test asserts how fast anything is."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto, only_line
from torch import nn

from fedproto.core.prototypes import class_means
from fedproto.data import DIGITS, DataFolders, Source, Split
from fedproto.runs.bench import contenders, federations, plain_loop, scale
from fedproto.runs.bench.federations import Work, build_federation, draw_rows
from fedproto.runs.bench.scale import measure_crowd, measure_seeds
from fedproto.runs.bench.timing import Row, measure

CONTENDERS = ["plain loop", "plain loop, 2 processes", "reference", "vectorised", "processes"]


@pytest.fixture(autouse=True)
def _no_files(tmp_path, monkeypatch):
    """As on a machine without MNIST: noise of its shape, and little of it."""
    monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    draw_noise = federations._draw_noise
    monkeypatch.setattr(
        federations, "_draw_noise", lambda name, shape, count: draw_noise(name, shape, 500)
    )
    monkeypatch.setattr(federations, "SHOTS", 5)


def source():
    rng = np.random.default_rng(0)
    splits = [
        Split(rng.integers(0, 256, (count, 8, 8), dtype=np.uint8), np.arange(count) % 10)
        for count in (60, 20)
    ]
    return Source("noise", DIGITS, *splits)


def assert_measured(row):
    assert list(row) == [field.name for field in fields(Row)]
    assert row["seconds"] > 0
    assert row["start"] > 0
    assert row["memory"] > 0
    assert row["ratio"] is None or row["ratio"] > 0


def test_every_contender_is_measured_and_written(tmp_path):
    answer = fedproto(
        "bench",
        "--clients",
        "3",
        "--model",
        "mlp",
        "--rounds",
        "1",
        "--device",
        "cpu",
        "--json",
        tmp_path / "b.json",
    )
    assert answer.code == 0, answer.err
    found = json.loads((tmp_path / "b.json").read_text())
    assert list(found) == ["machine", "rows"]
    assert set(found["machine"]) == {"device", "cores", "threads", "torch", "python"}
    assert {row["data"] for row in found["rows"]} == {"noise like MNIST"}
    assert [row["contender"] for row in found["rows"]] == CONTENDERS
    for row in found["rows"]:
        assert_measured(row)
        assert (row["model"], row["clients"], row["device"], row["precision"], row["counted"]) == (
            "mlp", 3, "cpu", "float32", 3
        )  # fmt: skip
    assert found["rows"][0]["ratio"] == 1
    assert "measuring mlp, 3 clients, float32, on cpu" in answer.out
    assert all(name in answer.out for name in CONTENDERS)


def test_the_time_of_few_clients_is_scaled_up_to_all(monkeypatch):
    monkeypatch.setattr(contenders, "MAX_SLOW_CLIENTS", 2)
    rows = measure(Work("mlp", 3, "cpu"), DataFolders(None), 1)
    counted = {row.contender: row.counted for row in rows}
    assert counted == dict(zip(CONTENDERS, (2, 2, 2, 3, 3), strict=True))


@pytest.mark.parametrize("stack", [4, 1000])
def test_a_fraction_of_a_crowd_is_measured(stack):
    row = measure_crowd(Work("mlp", 50, "cpu"), source(), fraction=0.2, rounds=2, stack=stack)
    assert_measured(asdict(row))
    assert (row.clients, row.counted, row.ratio) == (50, 10, None)
    assert row.contender == "vectorised, 10 a round, states on device"


def test_a_crowd_ends():
    """Its members are made when they are looked at, so a loop without an end would fill memory."""
    member = build_federation(Work("mlp", 1, "cpu"), source(), 1).members[0]
    crowd = scale._Crowd(member, 3)
    assert [found.id for found in crowd] == [0, 1, 2]


def test_several_seeds_are_measured_in_one_stack(monkeypatch):
    assert (scale.ROUNDS_OF_SEEDS, scale.EVAL_EVERY) == (100, 10)
    monkeypatch.setattr(scale, "ROUNDS_OF_SEEDS", 6)
    monkeypatch.setattr(scale, "EVAL_EVERY", 2)
    row = measure_seeds(Work("mlp", 2, "cpu"), source(), seeds=2)
    assert_measured(asdict(row))
    assert row.contender.startswith("2 seeds, 6 rounds in ")
    assert row.contender.endswith(" s with 3 evaluations")


def test_each_client_draws_from_three_classes_and_always_the_same():
    drawn = draw_rows(source(), 7, test_shots=2)
    for rows in drawn:
        assert len(rows.train) == 3 * federations.SHOTS
        assert len(np.unique(source().train.y[rows.train])) == 3
        assert set(source().test.y[rows.test]) == set(source().train.y[rows.train])
        assert len(rows.test) == 3 * 2
    again = draw_rows(source(), 7, test_shots=2)
    assert all(np.array_equal(a.train, b.train) for a, b in zip(drawn, again, strict=True))


@pytest.mark.slow
def test_the_benchmark_needs_no_file_outside_the_package(tmp_path):
    """As from an installed wheel: a copy of the package alone, used in an empty folder."""
    package = Path(federations.__file__).parents[2]
    shutil.copytree(
        package, tmp_path / "installed/fedproto", ignore=shutil.ignore_patterns("__pycache__")
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    flags = ["--clients", "2", "--model", "mlp", "--rounds", "1", "--device", "cpu"]
    code = (
        "from fedproto.runs.bench import federations; federations.SHOTS = 5; "
        "from fedproto.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", *flags],
        cwd=empty,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "plain loop" in done.stdout


def test_an_unknown_model_is_refused_in_one_line():
    answer = fedproto("bench", "--clients", "3", "--model", "nonsense", "--device", "cpu")
    assert answer.code == 2
    assert "unknown model 'nonsense'" in only_line(answer.err)


@pytest.mark.parametrize(
    "wrong",
    [("--clients", "3x"), ("--clients", "0"), ("--device", "tpu"), ("--precision", "double")],
    ids=str,
)
def test_other_mistakes_are_refused_in_one_line(wrong):
    flags = {"--clients": "2", "--model": "mlp", "--device": "cpu", "--rounds": "1"} | dict([wrong])
    answer = fedproto("bench", *(text for flag in flags.items() for text in flag))
    assert answer.code == 2
    assert only_line(answer.err)


# --- the plain loop itself


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


def clients_of(lr):
    torch.manual_seed(0)
    shards = [
        (torch.randn(7, 6), torch.tensor([0, 0, 1, 1, 1, 3, 0])),
        (torch.randn(4, 6), torch.tensor([1, 1, 2, 2])),
    ]
    return [plain_loop.Client(x, y, Linear(), lr, 0.5) for x, y in shards]


def test_the_plain_loops_prototypes_are_those_by_hand():
    """With a learning rate of 0, each prototype is the mean over all samples of its class."""
    clients = clients_of(lr=0.0)
    old = torch.full((5, 4), 9.0)
    known = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    prototypes, now_known = plain_loop.run_round(clients, old, known, lam=1.0, batch=3)
    with torch.no_grad():
        features = torch.cat([client.model(client.x)[0] for client in clients])
    y = torch.cat([client.y for client in clients])
    for label in range(4):
        assert torch.allclose(prototypes[label], features[y == label].mean(0), atol=1e-6)
    assert torch.equal(prototypes[4], old[4])  # nobody spoke of it
    assert now_known.tolist() == [1, 1, 1, 1, 1]
    means, counts = class_means(features, y, torch.ones(len(y)), 5)
    assert torch.allclose(prototypes[:4], means[:4], atol=1e-6)
    assert counts.tolist() == [3, 5, 2, 1, 0]


def test_the_plain_loop_trains_towards_the_prototypes_it_knows():
    far = torch.full((5, 4), 20.0)
    ends = []
    for lam in (0.0, 1.0):
        prototypes, _ = plain_loop.run_round(
            clients_of(lr=0.05), far, torch.ones(5), lam=lam, batch=3
        )
        ends.append(float((prototypes[:4] - far[:4]).norm()))
    assert ends[1] < ends[0]


def test_the_plain_loops_network_is_the_papers():
    ours = contenders.build_model("cnn", (1, 28, 28))
    count = sum(parameter.numel() for parameter in plain_loop.CNN().parameters())
    assert count == sum(parameter.numel() for parameter in ours.parameters()) == 21_840
    ours.load_state_dict(
        dict(zip(ours.state_dict(), plain_loop.CNN().state_dict().values(), strict=True))
    )
    theirs = plain_loop.CNN()
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    x = torch.rand(3, 1, 28, 28)
    for mine, other in zip(ours.eval()(x), theirs.eval()(x), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)
