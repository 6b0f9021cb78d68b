"""An exploding loss is reported in the terminal, in all files and in tables; no seed is dropped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import fedproto
from helpers.killed_runs import as_toml
from helpers.tiny import SETTINGS, experiment

from fedproto.core import rounds
from fedproto.core.engine import Chunk, Cohort
from fedproto.errors import DivergedError, TrainingError
from fedproto.reproduce.plan import Request, plan, read_spec
from fedproto.reproduce.table_page import render_page
from fedproto.reproduce.tables import gather
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import RunFolder
from fedproto.runs.sweep import read_sweep, run_sweep

#: Found by trying: the losses become 1e9 and more, but stay finite for these rounds.
EXPLODING: dict[str, Any] = {"algorithm": "local", "lr": 60.0, "rounds": 3, "momentum": 0.0}
INFINITE: dict[str, Any] = {"algorithm": "local", "lr": 1e200, "rounds": 3}


def round_with_losses(run: Experiment) -> Any:
    """A function from each client's losses of a round to what is said of that round."""
    number = 0

    def tell(**losses: list[float]) -> rounds.RoundResult:
        nonlocal number
        number += 1
        everybody = torch.arange(len(run.federation.members))
        nobody = everybody[:0]
        tally = rounds.RoundAccumulator(
            run.algorithm, run.federation_run(), number, Cohort(everybody, nobody, nobody)
        )
        sizes = torch.zeros(len(everybody), 0, 2, dtype=torch.int64)
        sound = torch.ones(len(everybody), dtype=torch.bool)
        loss = {name: torch.tensor(values, dtype=torch.float64) for name, values in losses.items()}
        tally.add(Chunk(0, everybody, sizes, loss, sound, nobody, {}))
        return tally.result(None, 0.0)

    return tell


def test_a_supervised_loss_above_ten_thousand_has_exploded() -> None:
    run = experiment("local")
    tell = round_with_losses(run)
    assert tell(supervised=[2.0, 2.0, 2.0, 9999.0]).diverged == []
    result = tell(supervised=[2.0, 1e5, 2.0, 2.4e17])
    assert result.diverged == [1, 3]
    assert result.notes == [
        "the loss of 2 clients, client 1 among them, has exploded (up to 2.4e+17); "
        "the lr may be too high"
    ]
    again = tell(supervised=[2.0, 1e6, 2.0, 2.0])
    assert (again.diverged, again.notes) == ([], [])  # said once
    assert tell(supervised=[1e9, 2.0, 2.0, 2.0]).diverged == [0]
    assert run.progress.diverged == {1: 2, 3: 2, 0: 4}


def test_a_loss_that_exploded_in_the_first_round_is_noticed() -> None:
    assert round_with_losses(experiment("local"))(supervised=[1e17] * 4).diverged == [0, 1, 2, 3]


def test_a_large_lambda_is_not_an_explosion() -> None:
    """λ times a distance may start at 1e6; it has exploded if it also grew a thousandfold."""
    tell = round_with_losses(experiment("fedproto"))
    assert tell(supervised=[2.0] * 4, regulariser=[0.0] * 4).diverged == []
    assert tell(supervised=[2.0] * 4, regulariser=[1e6] * 4).diverged == []
    assert tell(supervised=[2.0] * 4, regulariser=[2e4] * 4).diverged == []
    assert tell(supervised=[2.0] * 4, regulariser=[2e4, 1e7, 2e4, 2e4]).diverged == []
    assert tell(supervised=[2.0] * 4, regulariser=[2e4, 3e7, 2e4, 2e4]).diverged == [1]


def test_a_small_loss_may_grow() -> None:
    tell = round_with_losses(experiment("fedproto"))
    assert tell(supervised=[1e-6] * 4, regulariser=[1e-9] * 4).diverged == []
    assert tell(supervised=[50.0] * 4, regulariser=[100.0] * 4).diverged == []


def test_an_explosion_is_reported_everywhere(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(as_toml(SETTINGS | EXPLODING))
    path = tmp_path / "run"
    answer = fedproto("run", config, "--out", path)
    assert answer.code == 0, answer.err
    result = RunFolder(path).result()
    assert result is not None and result["diverged"]
    clients = [each["client"] for each in result["diverged"]]
    assert clients == sorted(set(clients))
    warning = f"warning: local diverged: the loss of {len(clients)} of 4 clients exploded, "
    assert f"{warning}first that of client " in answer.out
    lines = RunFolder(path).metrics()
    assert sorted(client for line in lines for client in line["diverged"]) == clients
    first = min(each["round"] for each in result["diverged"])
    assert "has exploded" in lines[first - 1]["notes"][0]
    page = tmp_path / "page.html"
    assert fedproto("report", path, "--out", page).code == 0
    assert f"diverged: the loss of {len(clients)} of 4 clients exploded" in page.read_text()


def test_a_run_without_an_explosion_states_null(tmp_path: Path) -> None:
    run = experiment("local")
    result = run.execute(run.new_folder(tmp_path / "run"))
    assert result.data["diverged"] is None
    assert all(line["diverged"] == [] for line in result.metrics)


def test_a_resumed_run_remembers_what_exploded(tmp_path: Path) -> None:
    settings = EXPLODING | {"rounds": 3, "checkpoint_every": 1}
    whole = experiment(**settings)
    expected = whole.execute(whole.new_folder(tmp_path / "whole")).data["diverged"]
    assert expected and expected[0]["round"] < 3

    def stop(result: rounds.RoundResult) -> None:
        if result.round == 2:
            raise KeyboardInterrupt

    begun = experiment(**settings)
    with pytest.raises(KeyboardInterrupt):
        begun.execute(begun.new_folder(tmp_path / "run"), stop)
    again, folder = reopen(RunFolder.open(tmp_path / "run"))
    assert again.execute(folder).data["diverged"] == expected


def test_a_run_whose_numbers_are_not_finite_leaves_a_record(tmp_path: Path) -> None:
    run = experiment(**INFINITE)
    folder = run.new_folder(tmp_path / "run")
    with pytest.raises(
        DivergedError, match=r"^round 1, client \d, training: .*; the lr may be too high$"
    ) as raised:
        run.execute(folder)
    found = json.loads((folder.path / "diverged.json").read_text())
    client = raised.value.client
    assert found["diverged"] == [{"client": client, "name": str(client), "round": 1}]
    assert found["error"] == str(raised.value)
    assert found["error"].startswith(f"round 1, client {raised.value.client}, ")
    assert isinstance(raised.value, TrainingError)
    assert folder.result() is None


def test_a_sweep_says_which_federation_diverged(tmp_path: Path) -> None:
    config = tmp_path / "sweep.toml"
    both = {**SETTINGS, **EXPLODING, "engine": "vectorised"}
    config.write_text(
        as_toml({k: v for k, v in both.items() if k != "lr"})
        + "[sweep]\nlr = [0.05, 60.0, 1e200]\n"
    )
    answer = fedproto("sweep", config, "--out", tmp_path / "out")
    assert answer.code == 2
    assert "warning: lr=60.0 diverged" in answer.out
    assert "warning: lr=0.05 diverged" not in answer.out
    assert "lr=1e+200 broke down: round 1" in answer.out
    assert (tmp_path / "out" / "lr=1e+200" / "diverged.json").exists()
    assert not (tmp_path / "out" / "lr=60.0" / "diverged.json").exists()


def test_tables_keep_a_seed_that_diverged(tmp_path: Path) -> None:
    """A run that exploded counts, one that is not finite has no result; the cell names both."""
    spec = read_spec("table-mnist", Request(quick=True, seeds=3, methods=("local",)))
    planned = plan(spec)
    assert len(planned) == 3
    sweep = tmp_path / "sweep.toml"
    rates = [0.05, EXPLODING["lr"], INFINITE["lr"]]
    for each, lr in zip(planned, rates, strict=True):
        tiny = (
            SETTINGS
            | EXPLODING
            | {"lr": lr, "rounds": each.cell.config.rounds, "eval_every": 10, "shots": 1}
        )
        sweep.write_text(as_toml(tiny) + f"[sweep]\nseed = [{each.seed}]\n")
        (cell,) = read_sweep(sweep)
        run_sweep(
            [cell._replace(name=each.cell.name)],
            tmp_path,
            lambda *how: lambda r: None,
            lambda *how: None,
        )
    found = gather(spec, planned, tmp_path, "fedproto reproduce")
    (cell,) = found["cells"]
    assert cell["seeds"] == [0, 1]
    assert [run.get("diverged", False) for run in cell["runs"]] == [False, True]
    assert [each["seed"] for each in cell["diverged"]] == [2]
    text = render_page(found)
    assert (
        "**The loss exploded**, but the run finished and counts: Local (n = 3, stdev 2), seed 1."
        in text
    )
    assert (
        "the means below are over the other seeds: Local (n = 3, stdev 2), seed 2: round 1, client "
        in text
    )
