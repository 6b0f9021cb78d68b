"""A run as a stream of rounds, left early or not, and the examples of experiment tracking."""

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from helpers.command_line import fedproto as command
from helpers.patience import PATIENCE_SECONDS

import fedproto
from fedproto.errors import ConfigError, DataError, MissingExtra, RunFolderError
from fedproto.runs import tracking
from fedproto.runs.execution import Interrupted
from fedproto.runs.experiment import Experiment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = {
    "dataset": "digits",
    "clients": 4,
    "rounds": 5,
    "shots": 5,
    "eval_every": 2,
    "checkpoint_every": 100,
}


def timeless(found):
    return {key: value for key, value in found.items() if key not in ("seconds", "checksum")}


# --- the stream


def test_a_stream_gives_every_round_and_then_the_result():
    *rounds, result = fedproto.stream(**SMALL)
    assert all(isinstance(each, fedproto.RoundResult) for each in rounds)
    assert [each.round for each in rounds] == [1, 2, 3, 4, 5]
    assert isinstance(result, fedproto.Result)
    assert [timeless(each.line()) for each in rounds] == [timeless(line) for line in result.metrics]


def test_a_stream_gives_the_numbers_of_run():
    seen = []
    ran = fedproto.run(**SMALL, on_round=seen.append)
    *rounds, result = fedproto.stream(**SMALL)
    assert timeless(ran.data) == timeless(result.data)
    assert [timeless(each.line()) for each in seen] == [timeless(each.line()) for each in rounds]
    for mine, theirs in zip(ran.states, result.states, strict=True):
        assert all(mine[name].equal(theirs[name]) for name in mine)


def test_rounds_come_as_they_are_trained(tmp_path):
    """A folder holds what has been given out, and no more."""
    for found in fedproto.stream(**SMALL, out=tmp_path / "run"):
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        done = (tmp_path / "run" / "result.json").exists()
        if isinstance(found, fedproto.RoundResult):
            assert len(lines) == found.round and not done
    assert done and json.loads((tmp_path / "run" / "result.json").read_text())["rounds"] == 5


def test_a_stream_takes_arrays_and_modules():
    data = [(torch.rand(20, 6).numpy(), torch.arange(20).numpy() % 2) for _ in range(2)]
    *_, result = fedproto.stream(dataset=data, rounds=1)
    assert len(result.clients) == 2


def test_nothing_happens_before_the_first_round_is_requested(tmp_path):
    stream = fedproto.stream(**SMALL, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert next(stream).round == 1
    stream.close()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rounds": 0}, ConfigError),
        ({"algorithm": "local,fedproto"}, ConfigError),
        ({"on_round": print}, ConfigError),  # it is `run`'s
        ({"dataset": []}, DataError),
    ],
)
def test_a_stream_refuses_what_run_refuses(options, error):
    with pytest.raises(error) as caught:
        next(fedproto.stream(**options))
    assert "\n" not in str(caught.value)


def test_a_used_folder_is_refused(tmp_path):
    (tmp_path / "something").touch()
    with pytest.raises(RunFolderError):
        next(fedproto.stream(**SMALL, out=tmp_path))


# --- left early


def whole(folder):
    """All that a finished run left, but for the seconds and the older checkpoints."""
    result = json.loads((folder / "result.json").read_text())
    lines = [
        timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    checkpoint = (folder / "checkpoint" / "round-00000005.safetensors").read_bytes()
    return timeless(result), lines, checkpoint, (folder / "prototypes.safetensors").read_bytes()


@pytest.mark.parametrize("engine", ["reference", "vectorised", "processes"])
def test_a_loop_left_early_leaves_a_run_that_resumes_where_it_stopped(tmp_path, engine):
    settings = SMALL | {"engine": engine, "workers": 2, "device": "cpu", "participation": 0.5}
    fedproto.run(**settings, out=tmp_path / "whole")
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    for found in fedproto.stream(**settings, out=tmp_path / "left"):
        if found.round == 3:
            break
    del found
    assert (torch.get_num_threads(), signal.getsignal(signal.SIGINT)) == (threads, handler)
    assert not multiprocessing.active_children()
    assert [path.name for path in (tmp_path / "left" / "checkpoint").iterdir()] == [
        "round-00000003.safetensors"
    ]
    assert not (tmp_path / "left" / "result.json").exists()
    answer = command("resume", tmp_path / "left")
    assert answer.code == 0, answer.err
    mine, theirs = whole(tmp_path / "left"), whole(tmp_path / "whole")
    assert mine[0] == theirs[0] and mine[1] == theirs[1] and mine[3] == theirs[3]


def test_a_loop_left_after_the_last_round_lacks_only_its_result(tmp_path):
    for found in fedproto.stream(**SMALL, out=tmp_path / "left"):
        if found.round == 5:
            break
    fedproto.run(**SMALL, out=tmp_path / "whole")
    assert command("resume", tmp_path / "left").code == 0
    assert whole(tmp_path / "left")[0] == whole(tmp_path / "whole")[0]


def test_without_checkpoints_a_loop_left_early_writes_none(tmp_path):
    stream = fedproto.stream(**SMALL | {"checkpoint_every": 0}, out=tmp_path / "left")
    next(stream)
    stream.close()
    assert not list((tmp_path / "left" / "checkpoint").iterdir())


def test_an_error_in_the_loop_ends_the_run_and_is_not_swallowed(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        contextlib.closing(fedproto.stream(**SMALL, out=tmp_path / "left")) as stream,
    ):
        for found in stream:
            1 / (2 - found.round)
    assert [path.name for path in (tmp_path / "left" / "checkpoint").iterdir()] == [
        "round-00000002.safetensors"
    ]


def test_two_streams_may_be_walked_at_once():
    """Neither ends with the other's settings."""
    before = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    alone = [each.loss for each in list(fedproto.stream(**SMALL))[:-1]]
    pairs = list(
        zip(fedproto.stream(**SMALL), fedproto.stream(**SMALL, algorithm="local"), strict=True)
    )
    assert [first.loss for first, _ in pairs[:-1]] == alone
    assert [second.data["algorithm"] for _, second in pairs[-1:]] == ["local"]
    assert (torch.get_num_threads(), signal.getsignal(signal.SIGINT)) == before


def test_threads_and_signals_belong_to_the_caller_between_rounds():
    torch.set_num_threads(2)
    try:
        handler = signal.getsignal(signal.SIGINT)
        for _ in fedproto.stream(**SMALL):
            assert (torch.get_num_threads(), signal.getsignal(signal.SIGINT)) == (2, handler)
    finally:
        torch.set_num_threads(1)


def test_ctrl_c_in_a_round_finishes_it_and_leaves_a_checkpoint(tmp_path, monkeypatch):
    rounds, write = [], Experiment.write_round

    def write_and_interrupt(self, folder, result):
        write(self, folder, result)
        if result.round == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Experiment, "write_round", write_and_interrupt)
    with pytest.raises(Interrupted):
        rounds.extend(found.round for found in fedproto.stream(**SMALL, out=tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == [
        "round-00000002.safetensors"
    ]
    monkeypatch.undo()
    assert command("resume", tmp_path / "run").code == 0


def test_ctrl_c_in_the_callers_code_is_a_keyboard_interrupt_and_leaves_a_checkpoint(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        contextlib.closing(fedproto.stream(**SMALL, out=tmp_path / "run")) as stream,
    ):
        for found in stream:
            if found.round == 2:
                os.kill(os.getpid(), signal.SIGINT)
    assert caught.type is KeyboardInterrupt
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == [
        "round-00000002.safetensors"
    ]


SCRIPT = """
import fedproto
settings = dict(dataset="digits", clients=4, rounds=50, shots=5)
for found in fedproto.stream(**settings, engine="processes", workers=2, device="cpu", out={out!r}):
    if found.round == 2:
        raise OSError("the tracker is down")
"""


def test_a_script_that_fails_in_its_loop_ends_its_processes(tmp_path):
    """It must end by itself: a worker that waits for ever would keep the pipes open."""
    script = [sys.executable, "-c", SCRIPT.format(out=str(tmp_path / "run"))]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert ended.returncode == 1 and ended.stderr.strip().endswith("OSError: the tracker is down")
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == [
        "round-00000002.safetensors"
    ]


# --- numbers by name


def test_scalars_of_a_round_and_of_a_result():
    *rounds, result = fedproto.stream(**SMALL)
    first, second = map(tracking.scalars, rounds[:2])
    assert set(first) == {
        "round",
        "loss/supervised",
        "loss/regulariser",
        "bytes_up",
        "bytes_down",
        "seconds",
    }
    assert second["accuracy/head"] == result.metrics[1]["accuracy"]["head"]["mean"]
    assert second["bytes_up"] == result.metrics[1]["bytes_up"]
    final = tracking.scalars(result)
    assert (
        final["round"] == 5
        and final["final/accuracy/prototype"] == result.accuracy["prototype"]["mean"]
    )
    auroc = result.data["metrics"]["head"]["auroc"]
    assert final["final/auroc/head"] == auroc["mean"]
    assert final["final/auroc/head/worst"] == auroc["worst"]
    assert final["final/bytes_up"] == sum(line["bytes_up"] for line in result.metrics)
    assert all(
        type(value) in (int, float)
        for numbers in (first, second, final)
        for value in numbers.values()
    )


def test_a_missing_tensorboard_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[tensorboard\]'"):
        tracking.tensorboard(tmp_path)


# --- the examples


def run_example(monkeypatch, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    monkeypatch.syspath_prepend(EXAMPLES)  # as `python examples/NAME` does
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_no_example_has_the_name_of_a_package():
    """`python examples/wandb.py` would import itself."""
    assert not {path.stem for path in EXAMPLES.glob("*.py")} & {
        "tensorboard",
        "wandb",
        "mlflow",
        "torch",
    }


def test_the_tensorboard_example_with_a_writer_that_remembers(monkeypatch, tmp_path, capsys):
    written = []

    class Writer:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, name, value, step):
            written.append((self.folder, name, value, step))

        def flush(self):
            written.append("flushed")

    stub = types.ModuleType("torch.utils.tensorboard")
    stub.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    run_example(monkeypatch, "with_tensorboard.py", tmp_path / "board", 5)
    assert written.count("flushed") == 6  # once per round, and for the result
    numbers = [each for each in written if each != "flushed"]
    assert {folder for folder, *_ in numbers} == {str(tmp_path / "board")}
    assert [step for _, name, _, step in numbers if name == "loss/supervised"] == [1, 2, 3, 4, 5]
    ((_, _, accuracy, step),) = [each for each in numbers if each[1] == "accuracy/head"]
    assert step == 5 and f"head {accuracy:.2%}" in capsys.readouterr().out


def test_the_tensorboard_example_for_real(monkeypatch, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_example(monkeypatch, "with_tensorboard.py", tmp_path, 5)
    events = reading.EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"loss/supervised", "loss/regulariser", "accuracy/head", "bytes_up"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("bytes_up")] == [1, 2, 3, 4, 5]
    (accuracy,) = events.Scalars("accuracy/head")
    assert f"head {accuracy.value:.2%}" in capsys.readouterr().out


def test_the_wandb_example(monkeypatch):
    logged = []

    class Run:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            logged.append("finished")

        def log(self, numbers):
            logged.append(numbers)

    stub = types.ModuleType("wandb")
    stub.init = lambda project, config: logged.append(config) or Run()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    run_example(monkeypatch, "with_wandb.py", 3)
    assert logged[0]["rounds"] == 3 and logged[-1] == "finished"
    assert [numbers["round"] for numbers in logged[1:-1]] == [1, 2, 3, 3]
    assert "final/accuracy/head" in logged[-2]


def test_the_mlflow_example(monkeypatch):
    logged = []
    stub = types.ModuleType("mlflow")
    stub.start_run = contextlib.nullcontext
    stub.log_params = logged.append
    stub.log_metrics = lambda numbers, step: logged.append((step, numbers))
    monkeypatch.setitem(sys.modules, "mlflow", stub)
    run_example(monkeypatch, "with_mlflow.py", 3)
    params, *steps = logged
    assert params["dataset"] == "digits"
    assert [step for step, _ in steps] == [1, 2, 3, 3] and "final/accuracy/head" in steps[-1][1]


def test_the_image_and_table_example(monkeypatch, capsys):
    run_example(monkeypatch, "image_and_table.py", 1, 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 5 * 2
    assert all(0 <= float(line.split()[-1]) <= 100 for line in lines[1:])


# --- left early


def test_a_stream_still_open_when_its_script_ends_leaves_a_checkpoint(tmp_path):
    script = (
        "import fedproto\n"
        "settings = dict(dataset='digits', clients=3, rounds=9, shots=5, checkpoint_every=50)\n"
        f"rounds = fedproto.stream(**settings, out={str(tmp_path / 'run')!r})\n"
        "for found in rounds:\n"
        "    if found.round == 2:\n"
        "        break\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == [
        "round-00000002.safetensors"
    ]
