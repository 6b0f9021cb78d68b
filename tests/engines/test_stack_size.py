"""How many clients are trained at a time: where free memory decides, a run records it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import fedproto
from helpers.tiny import SETTINGS, experiment
from safetensors.torch import load_file

from fedproto.config.config_file import read_toml
from fedproto.engines import selection
from fedproto.engines.vectorised import memory
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.report.groups import group_runs
from fedproto.report.read import read_run
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import RunFolder
from fedproto.runs.sweep import read_sweep, run_sweep

CLIENTS = 7
RUN: dict[str, Any] = {
    "engine": "vectorised",
    "clients": CLIENTS,
    "rounds": 4,
    "checkpoint_every": 2,
}


def pretend_free(monkeypatch: pytest.MonkeyPatch, clients: int) -> None:
    """Have memory for all models and for so many clients in training, as a GPU may."""
    run = experiment("fedproto", engine="reference", clients=CLIENTS)
    first = run.federation.members[0]
    model = sum(value.nbytes for value in first.initial.values())
    longest = max(len(member.train) for member in run.federation.members)
    need = memory.training_memory(
        model, first.train.x[0].nbytes, SETTINGS["batch"], first.dropped, longest
    )
    free = CLIENTS * model + clients * need
    monkeypatch.setattr(memory, "free_memory", lambda device: free)


def room_of(run: Experiment) -> int:
    assert isinstance(run.engine, VectorisedEngine)
    return run.engine.stacks[0].capacity


class Killed(BaseException):
    pass


def die_in(round: int) -> Any:
    def on_round(result: Any) -> None:
        if result.round == round:
            raise Killed

    return on_round


def states_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max((folder / "checkpoint").glob("round-*")))


def assert_equal_states(one: Path, other: Path) -> None:
    first, second = states_in(one), states_in(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_cpu_leaves_the_stack_open() -> None:
    run = experiment("fedproto", **RUN)
    assert run.config.stack is None
    assert room_of(run) == CLIENTS


@pytest.mark.parametrize(("fitting", "used"), [(0, 1), (1, 1), (3, 3), (7, 7), (1000, 7)])
def test_free_memory_decides_and_the_configuration_says_so(
    fitting: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least one client and at most all of them: the configuration says what was used."""
    pretend_free(monkeypatch, fitting)
    run = experiment("fedproto", **RUN)
    assert run.config.stack == used
    assert f"\nstack = {used}\n" in run.config.toml()
    assert room_of(run) == -(-CLIENTS // -(-CLIENTS // used))


def test_a_stack_that_was_asked_for_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_free(monkeypatch, 3)
    assert experiment("fedproto", stack=5, **RUN).config.stack == 5
    assert experiment("fedproto", **RUN | {"engine": "reference"}).config.stack is None


def test_a_resumed_run_uses_the_stack_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_free(monkeypatch, 3)
    whole = experiment("fedproto", **RUN)
    whole.execute(whole.new_folder(tmp_path / "whole"))
    begun = experiment("fedproto", **RUN)
    with pytest.raises(Killed):
        begun.execute(begun.new_folder(tmp_path / "run"), die_in(3))
    pretend_free(monkeypatch, 1)
    again, folder = reopen(RunFolder.open(tmp_path / "run"))
    assert (again.config.stack, room_of(again)) == (3, 3)
    again.execute(folder)
    assert_equal_states(tmp_path / "run", tmp_path / "whole")


def test_a_sweep_goes_on_with_the_stack_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sweep.toml"
    settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in (SETTINGS | RUN).items())
    path.write_text(f"{settings}[sweep]\nseed = [0, 1]\n")
    cells = read_sweep(path)
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**40)
    run_sweep(cells, tmp_path / "whole", lambda *how: lambda result: None)
    assert read_toml(tmp_path / "whole" / "seed=0" / "config.toml")["stack"] == 2 * CLIENTS
    with pytest.raises(Killed):
        run_sweep(cells, tmp_path / "out", lambda *how: die_in(3))
    used: list[int | None] = []
    real = selection.build_engine

    def watched(config: Any, *rest: Any) -> Any:
        used.append(config.stack)
        return real(config, *rest)

    monkeypatch.setattr("fedproto.runs.experiment.build_engine", watched)
    monkeypatch.setattr(memory, "free_memory", lambda device: 1)
    run_sweep(cells, tmp_path / "out", lambda *how: lambda result: None)
    assert used == [2 * CLIENTS]
    for cell in cells:
        assert_equal_states(tmp_path / "out" / cell.name, tmp_path / "whole" / cell.name)


def test_runs_that_differ_in_the_stack_share_a_row_of_the_report(tmp_path: Path) -> None:
    for seed, stack in ((0, 2), (1, 3)):
        flags = (
            "--dataset",
            "digits",
            "--clients",
            "4",
            "--rounds",
            "1",
            "--shots",
            "5",
            "--engine",
            "vectorised",
        )
        out = ("--seed", str(seed), "--set", f"stack={stack}", "--out", tmp_path / str(seed))
        assert fedproto("run", *flags, *out).code == 0
    (both,) = group_runs([read_run(tmp_path / str(seed)) for seed in (0, 1)])
    assert both.seeds == [0, 1]
