"""Sweeps: their federations, what is trained together, and that each gives what it gives alone."""

import json
import os
import signal
import weakref
from pathlib import Path

import pytest
import torch
from helpers.command_line import fedproto, files_in, only_line
from helpers.engine_comparison import assert_close, assert_same_clients
from helpers.killed_runs import Killed, as_toml
from helpers.tiny import SETTINGS
from safetensors.torch import load_file

from fedproto.cli import progress
from fedproto.config.settings import configure
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.errors import ConfigError, RunFolderError, TrainingError
from fedproto.runs import sweep
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder
from fedproto.runs.sweep import batches, read_sweep, run_sweep

ALL = SETTINGS | {"engine": "vectorised", "checkpoint_every": 1}


def written(path: Path, swept: dict, **settings) -> Path:
    """A sweep file over the tiny federation."""
    lists = {repr_key(key): value for key, value in swept.items()}
    path.write_text(f"{as_toml(ALL | settings)}[sweep]\n{as_toml(lists)}")
    return path


def repr_key(key):
    return json.dumps(key) if "." in key else key


def cells_of(tmp_path, swept, **settings):
    return read_sweep(written(tmp_path / "sweep.toml", swept, **settings))


def ignore(result):
    pass


def quietly(cells, round, notices):
    return ignore


def remembering(seen):
    """Quietly, but for the names of the cells that are trained."""
    return lambda cells, done, notices: seen.extend(cell.name for cell in cells) or ignore


def states_in(folder):
    """Everything of the newest checkpoint."""
    (path,) = (folder / "checkpoint").iterdir()
    return load_file(path)


def times_of(folder):
    return {name: (folder / name).stat().st_mtime_ns for name in files_in(folder)}


# --- which federations there are


def test_all_combinations_the_last_list_changing_fastest(tmp_path):
    cells = cells_of(tmp_path, {"algorithm": ["local", "fedproto"], "seed": [0, 1], "ways": [2, 3]})
    assert [cell.name for cell in cells] == [
        f"{algorithm}-seed={seed}-ways={ways}"
        for algorithm in ("local", "fedproto")
        for seed in (0, 1)
        for ways in (2, 3)
    ]
    assert [
        (c.config.algorithm.name, c.config.seed, c.config.partition.options["ways"]) for c in cells
    ] == [
        (algorithm, seed, ways)
        for algorithm in ("local", "fedproto")
        for seed in (0, 1)
        for ways in (2, 3)
    ]
    assert cells[3].varied == {"algorithm": "local", "seed": 1, "ways": 3}


def test_folders_are_named_by_all_that_is_swept(tmp_path):
    """Also by a list of one value: when it grows, finished runs keep their folders."""
    cells = cells_of(tmp_path, {"seed": [4], "lr": [0.1, 1e-30]})
    assert [cell.name for cell in cells] == ["seed=4-lr=0.1", "seed=4-lr=1e-30"]
    assert {cell.config.seed for cell in cells} == {4}
    cells = cells_of(
        tmp_path,
        {"algorithm": ["fedproto(lam=0.1, distance=l1)", "fedavg"], "partition.ways": [2, 3]},
    )
    assert [cell.name for cell in cells] == [
        "fedproto_lam=0.1__distance=l1_-ways=2",
        "fedproto_lam=0.1__distance=l1_-ways=3",
        "fedavg-ways=2",
        "fedavg-ways=3",
    ]


def test_a_file_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no table \[sweep\] of lists.*`fedproto run`"):
        cells_of(tmp_path, {})


def test_options_of_plug_ins_in_tables_of_their_own(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(
        f"{as_toml(ALL)}[partition]\nstdev = 0\n"
        "[sweep]\nseed = [0, 1]\n[sweep.partition]\nways = [2, 3]\n"
    )
    cells = read_sweep(path)
    assert [(cell.config.seed, cell.config.partition.options["ways"]) for cell in cells] == [
        (0, 2), (0, 3), (1, 2), (1, 3)
    ]  # fmt: skip
    assert [cell.name for cell in cells] == [
        f"seed={seed}-ways={ways}" for seed in (0, 1) for ways in (2, 3)
    ]


@pytest.mark.parametrize(
    ("swept", "sentence"),
    [
        ({"seed": 3}, r"\[sweep\] of .*: seed must be a list of values, such as \[1, 2\], not 3"),
        ({"algorithm": "local,fedavg"}, r"algorithm must be a list of values"),
        ({"seed": []}, r"seed must be a list of values, such as \[1, 2\], not \[\]"),
        ({"sed": [1]}, r"unknown key 'sed'.*seed"),
        ({"partition.wys": [1]}, r"unknown option of partition nway 'wys'.*ways"),
        ({"algorithm": ["local,fedavg"]}, r"a sweep takes one algorithm in each entry of its list"),
        ({"algorithm": ["fedavgg"]}, r"unknown algorithm 'fedavgg'.*fedavg"),
        ({"seed": [1, 2, 1]}, r"\[sweep\] of .* lists a federation twice: seed=1 and seed=1"),
        ({"lr": [1, 1.0]}, r"lists a federation twice: lr=1 and lr=1.0"),
        (
            {"algorithm": ["local", "fedproto"], "lam": [0.1]},
            r"the cell algorithm = local, lam = 0.1: unknown key 'lam'",
        ),
        ({"lr": [0.1, "high"]}, r"lr must be"),
        ({"seed": [[1, 2]]}, r"seed must be"),
    ],
)
def test_what_a_sweep_refuses(swept, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence) as caught:
        cells_of(tmp_path, swept)
    assert "\n" not in str(caught.value)
    answer = fedproto("sweep", tmp_path / "sweep.toml", "--out", tmp_path / "out")
    assert answer.code == 2
    assert only_line(answer.err).startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_an_unknown_table_is_refused(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text("[sweep.partitions]\nways = [2, 3]\n")
    with pytest.raises(ConfigError, match=r"unknown table in \[sweep\] of .* 'partitions'"):
        read_sweep(path)


@pytest.mark.parametrize("value", ["3", "[1, 2]", '"seed"'])
def test_a_sweep_that_is_not_a_table_is_refused(value, tmp_path):
    (tmp_path / "sweep.toml").write_text(f"sweep = {value}\n")
    with pytest.raises(ConfigError):
        read_sweep(tmp_path / "sweep.toml")


def test_a_missing_file_is_refused(tmp_path):
    answer = fedproto("sweep", tmp_path / "none.toml")
    assert answer.code == 2
    assert "does not exist" in only_line(answer.err)


# --- which are trained together


@pytest.mark.parametrize(
    ("swept", "sizes"),
    [
        ({"seed": [0, 1, 2]}, [3]),
        ({"seed": [0, 1], "ways": [2, 3], "lr": [0.1, 0.2]}, [8]),
        ({"clients": [3, 4], "momentum": [0.0, 0.9], "participation": [0.5, 1.0]}, [8]),
        ({"lost_uploads": [0.0, 0.5], "stragglers": [0.0, 0.5]}, [4]),
        ({"buffer": [1], "concurrency": [2, 3], "staleness": [0.0, 1.0]}, [4]),
        ({"buffer": [0, 1, 2], "seed": [0, 1]}, [2, 2, 2]),
        ({"partition": ["nway", "iid"]}, [2]),
        ({"algorithm": ["local", "fedavg"], "seed": [0, 1, 2]}, [3, 3]),
        ({"seed": [0, 1, 2], "algorithm": ["local", "fedavg"]}, [3, 3]),
        ({"algorithm.lam": [0.1, 1.0]}, [1, 1]),
        ({"model": ["mlp", "mlp(hidden=3)"], "seed": [0, 1]}, [2, 2]),
        ({"batch": [4, 8]}, [1, 1]),
        ({"epochs": [1, 2]}, [1, 1]),
        ({"rounds": [1, 2]}, [1, 1]),
        ({"precision": ["float32", "float64"]}, [1, 1]),
        ({"dim": [5, 6]}, [1, 1]),
    ],
    ids=str,
)
def test_federations_that_can_be_stacked_are_trained_together(swept, sizes, tmp_path):
    settings = {} if "partition" in swept else {"ways": 3}
    if "partition" in swept:
        path = tmp_path / "sweep.toml"
        shared = {k: v for k, v in ALL.items() if k not in ("shots", "stdev", "test_shots")}
        path.write_text(f"{as_toml(shared)}[sweep]\n{as_toml(swept)}")
        cells = read_sweep(path)
    else:
        cells = cells_of(tmp_path, swept, **{k: v for k, v in settings.items() if k not in swept})
    found = batches(cells, tmp_path / "out")
    assert [len(batch) for batch in found] == sizes
    assert sorted(cell.name for batch in found for cell, _ in batch) == sorted(
        cell.name for cell in cells
    )
    assert all(folder is None for batch in found for _, folder in batch)


# --- each is what it is alone


#: method -> what varies in one stack
STACKS = {
    "fedproto": {"seed": [0, 7], "ways": [2, 4], "lr": [0.05, 0.02]},
    "fedavg": {"seed": [0, 7], "clients": [3, 5], "participation": [0.5, 1.0]},
    "fesem(clusters=2)": {"seed": [0, 7], "ways": [2, 4], "stragglers": [0.0, 0.5]},
    "fedprox": {
        "buffer": [2],
        "seed": [0, 7],
        "concurrency": [2, 3],
        "speed_spread": [0.0, 1.0],
    },
    "local": {"seed": [0, 7], "momentum": [0.0, 0.9], "ways": [2, 4]},
    "fedrep(head_epochs=2)": {"seed": [0, 7], "lr": [0.05, 0.02], "lost_uploads": [0.0, 0.5]},
    "fedproto(absent=drop,collect=during)": {
        "seed": [0, 7],
        "participation": [0.5, 1.0],
        "stdev": [0, 2],
    },
}


SLOW_STACKS = ("local", "fedrep(head_epochs=2)", "fedproto(absent=drop,collect=during)")


@pytest.mark.parametrize(
    "algorithm",
    [
        *(name for name in STACKS if name not in SLOW_STACKS),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_STACKS),
    ],
)
def test_each_federation_gives_what_it_gives_alone(algorithm, tmp_path):
    cells = cells_of(tmp_path, STACKS[algorithm], algorithm=algorithm, eval_every=2)
    assert [len(batch) for batch in batches(cells, tmp_path / "out")] == [8]
    results = run_sweep(cells, tmp_path / "out", quietly)
    for cell, result in zip(cells, results, strict=True):
        folder = tmp_path / "out" / cell.name
        alone = Experiment.prepare(
            configure({**ALL, "algorithm": algorithm, "eval_every": 2, **cell.varied})[0]
        )
        assert isinstance(alone.engine, VectorisedEngine)
        expected = alone.execute(alone.new_folder(tmp_path / "alone" / cell.name))
        ours, theirs = states_in(folder), states_in(tmp_path / "alone" / cell.name)
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-10) for name in ours)
        for line, same in zip(RunFolder(folder).metrics(), expected.metrics, strict=True):
            for key in ("loss", "loss_std"):
                assert line[key] == pytest.approx(same[key], rel=0, abs=1e-10)
            measured = {"loss": 0, "loss_std": 0, "seconds": 0}
            assert {**line, **measured} == {**same, **measured}
        whole = json.loads(json.dumps(expected.data))
        assert_same_clients(result["clients"], whole["clients"])
        assert_close(result["metrics"], whole["metrics"])
        compared = {"seconds": 0, "clients": 0, "metrics": 0}
        assert {**result, **compared} == {**whole, **compared}
        files = [tmp_path / of / cell.name / "config.toml" for of in ("out", "alone")]
        assert files[0].read_text() == files[1].read_text()
        assert files_in(folder) == files_in(tmp_path / "alone" / cell.name)


def test_algorithms_and_models_are_trained_one_after_the_other(tmp_path):
    swept = {
        "algorithm": ["local", "fedproto"],
        "model": ["mlp(hidden=4)", "mlp-mh"],
        "seed": [0, 1],
    }
    seen = []
    cells = cells_of(tmp_path, swept, rounds=1, clients=3)
    results = run_sweep(
        cells,
        tmp_path / "out",
        lambda batch, done, notices: seen.append((len(batch), done)) or ignore,
    )
    assert seen == [(2, 0)] * 4
    assert [(r["algorithm"], r["clients"][0]["model"], r["seed"]) for r in results] == [
        (algorithm, model, seed)
        for algorithm in ("local", "fedproto")
        for model in ("mlp(hidden=4)", "mlp(hidden=50)")
        for seed in (0, 1)
    ]


def test_the_reference_engine_runs_a_sweep_to_the_same_numbers(tmp_path):
    swept = {"seed": [0, 1], "ways": [2, 4]}
    for engine in ("vectorised", "reference"):
        run_sweep(cells_of(tmp_path, swept, engine=engine), tmp_path / engine, quietly)
    for cell in cells_of(tmp_path, swept):
        one, other = (
            states_in(tmp_path / engine / cell.name) for engine in ("vectorised", "reference")
        )
        assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-8) for name in one)


# --- run again


def test_a_sweep_of_mixed_architectures_can_be_run_again(tmp_path):
    """A run notes how many clients have each architecture, which the sweep leaves open."""
    cells = cells_of(tmp_path, {"seed": [0, 1]}, model="mlp-mh", rounds=1, clients=4)
    results = run_sweep(cells, tmp_path / "out", quietly)
    assert "*" in (tmp_path / "out" / cells[0].name / "config.toml").read_text()
    assert run_sweep(cells, tmp_path / "out", pytest.fail) == results
    others = cells_of(tmp_path, {"seed": [0, 1]}, model="mlp", rounds=1, clients=4)
    with pytest.raises(RunFolderError, match=r"holds a run with model .*: name another folder"):
        run_sweep(others, tmp_path / "out", pytest.fail)


SWEPT = {"algorithm": ["local", "fedavg"], "seed": [0, 1]}


def stopping(round, cell):
    """Die in a round once the files of a batch's first `cell` federations are written."""

    def on_batch(cells, done, notices):
        seen = []

        def on_round(result):
            seen.append(result.round)
            if seen.count(round) == cell:
                raise Killed

        return on_round

    return on_batch


def test_finished_runs_are_not_touched(tmp_path):
    cells = cells_of(tmp_path, SWEPT, rounds=2)
    first = run_sweep(cells, tmp_path / "out", quietly)
    before = times_of(tmp_path / "out")

    def never(cells, done):
        raise AssertionError("nothing is left to do")

    assert run_sweep(cells, tmp_path / "out", never) == first
    assert times_of(tmp_path / "out") == before
    assert batches(cells, tmp_path / "out") == []


def test_new_cells_are_run_beside_finished_ones(tmp_path):
    run_sweep(cells_of(tmp_path, {"seed": [0, 1]}, rounds=2), tmp_path / "out", quietly)
    before = times_of(tmp_path / "out" / "seed=0")
    seen = []
    cells = cells_of(tmp_path, {"seed": [0, 1, 2]}, rounds=2)
    results = run_sweep(
        cells,
        tmp_path / "out",
        lambda batch, done, notices: seen.extend(c.name for c in batch) or ignore,
    )
    assert seen == ["seed=2"]
    assert [result["seed"] for result in results] == [0, 1, 2]
    assert times_of(tmp_path / "out" / "seed=0") == before


@pytest.mark.parametrize("cell", [1, 2])
def test_an_interrupted_sweep_continues_to_the_same_bits(cell, tmp_path):
    """Killed in round 2 of `local`, after one or both checkpoints, before `fedavg` began."""
    cells = cells_of(tmp_path, SWEPT, rounds=4)
    run_sweep(cells, tmp_path / "whole", quietly)
    with pytest.raises(Killed):
        run_sweep(cells, tmp_path / "out", stopping(2, cell))
    assert not list((tmp_path / "out").glob("*/result.json"))
    assert len(list((tmp_path / "out").glob("*/config.toml"))) == 2
    seen = []
    results = run_sweep(
        cells,
        tmp_path / "out",
        lambda batch, done, notices: seen.append(([c.name for c in batch], done)) or ignore,
    )
    local, fedavg = (["local-seed=0", "local-seed=1"], ["fedavg-seed=0", "fedavg-seed=1"])
    apart = [(local[:1], 2), (local[1:], 1)]  # not equally far, so not together
    assert seen == ([(local, 2)] if cell == 2 else apart) + [(fedavg, 0)]
    assert [len(RunFolder(tmp_path / "out" / each.name).metrics()) for each in cells] == [4] * 4
    for each, result in zip(cells, results, strict=True):
        ours, theirs = (states_in(tmp_path / of / each.name) for of in ("out", "whole"))
        assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-12) for name in ours)
        assert cell == 1 or all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert result["clients"] == RunFolder(tmp_path / "whole" / each.name).result()["clients"]


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    cells = cells_of(tmp_path, {"seed": [0, 1]}, rounds=3, checkpoint_every=0)
    with pytest.raises(Killed):
        run_sweep(cells, tmp_path / "out", stopping(2, 2))
    results = run_sweep(cells, tmp_path / "out", quietly)
    run_sweep(cells, tmp_path / "whole", quietly)
    assert [r["clients"] for r in results] == [
        RunFolder(tmp_path / "whole" / cell.name).result()["clients"] for cell in cells
    ]
    assert [line["round"] for line in RunFolder(tmp_path / "out" / "seed=0").metrics()] == [1, 2, 3]


def test_a_sweep_continues_after_ctrl_c(tmp_path, monkeypatch):
    """The round is finished, checkpoints are written, and one line says how to go on."""
    path = written(tmp_path / "sweep.toml", {"seed": [0, 1]}, rounds=5, checkpoint_every=5)
    real = progress.sweep_bar

    class Bar:
        def __init__(self, *arguments):
            self.bar = real(*arguments)

        def __enter__(self):
            teller = self.bar.__enter__()
            on_batch = teller.batch

            def interrupting(cells, done, notices):
                on_batch(cells, done, notices)
                return lambda result: (
                    os.kill(os.getpid(), signal.SIGINT)
                    if result.round == 2 and not sent()
                    else None
                )

            teller.batch = interrupting
            return teller

        def __exit__(self, *error):
            return self.bar.__exit__(*error)

    signals = []

    def sent():
        signals.append(1)
        return len(signals) > 1

    with monkeypatch.context() as patch:
        patch.setattr(progress, "sweep_bar", Bar)
        answer = fedproto("sweep", path, "--out", tmp_path / "out")
    assert answer.code == 130
    assert f"stopped; `fedproto sweep {path} --out {tmp_path / 'out'}` goes on" in answer.err
    assert RunFolder(tmp_path / "out" / "seed=1").checkpoint_round() == 2
    answer = fedproto("sweep", path, "--out", tmp_path / "out")
    assert answer.code == 0, answer.err
    assert "2 federations together, from round 3" in answer.out
    assert RunFolder(tmp_path / "out" / "seed=1").result()["rounds"] == 5


def test_an_unfinished_run_with_other_settings_is_refused(tmp_path):
    cells = cells_of(tmp_path, {"seed": [0, 1]}, rounds=3)
    with pytest.raises(Killed):
        run_sweep(cells, tmp_path / "out", stopping(2, 2))
    before = times_of(tmp_path / "out")
    for other in ({"rounds": 4}, {"lr": 0.5}, {"algorithm": "local"}, {"ways": 2}):
        cells = cells_of(tmp_path, {"seed": [0, 1]}, **{"rounds": 3, **other})
        with pytest.raises(
            RunFolderError, match=r"seed=0 holds a run with \w+ .*, not .*: name another"
        ):
            run_sweep(cells, tmp_path / "out", quietly)
    assert times_of(tmp_path / "out") == before


def test_a_finished_run_with_other_settings_is_refused(tmp_path):
    run_sweep(cells_of(tmp_path, {"seed": [0, 1]}, rounds=1), tmp_path / "out", quietly)
    with pytest.raises(RunFolderError, match=r"holds a run with rounds 1, not 2"):
        run_sweep(cells_of(tmp_path, {"seed": [0, 1]}, rounds=2), tmp_path / "out", quietly)


def test_nothing_is_written_before_everything_is_checked(tmp_path):
    """The second federation's folder is taken, so the first one's is not created either."""
    (tmp_path / "out" / "seed=1").mkdir(parents=True)
    (tmp_path / "out" / "seed=1" / "letter.txt").touch()
    with pytest.raises(RunFolderError, match="is not empty"):
        run_sweep(cells_of(tmp_path, {"seed": [0, 1]}, rounds=1), tmp_path / "out", quietly)
    assert files_in(tmp_path / "out") == ["seed=1", "seed=1/letter.txt"]


def test_a_sweep_may_continue_with_another_engine(tmp_path):
    """How a run is computed is no setting of what it is."""
    cells = cells_of(tmp_path, {"seed": [0, 1]}, rounds=3)
    with pytest.raises(Killed):
        run_sweep(cells, tmp_path / "out", stopping(2, 2))
    cells = cells_of(tmp_path, {"seed": [0, 1]}, rounds=3, engine="reference")
    assert [result["rounds"] for result in run_sweep(cells, tmp_path / "out", quietly)] == [3, 3]


def test_a_federation_of_a_sweep_can_be_resumed_alone(tmp_path):
    cells = cells_of(tmp_path, {"seed": [0, 1], "ways": [2, 3]}, rounds=3)
    with pytest.raises(Killed):
        run_sweep(cells, tmp_path / "out", stopping(2, 4))
    answer = fedproto("resume", tmp_path / "out" / "seed=1-ways=2")
    assert answer.code == 0, answer.err
    seen = []
    results = run_sweep(
        cells,
        tmp_path / "out",
        lambda batch, done, notices: seen.extend(c.name for c in batch) or ignore,
    )
    assert seen == ["seed=0-ways=2", "seed=0-ways=3", "seed=1-ways=3"]
    whole = run_sweep(cells, tmp_path / "whole", quietly)
    for result, expected in zip(results, whole, strict=True):
        # A stack of another size may round the last bits of probabilities in another way.
        assert_same_clients(result["clients"], expected["clients"])


# --- the command


def test_the_command_prints_a_table(tmp_path):
    path = written(tmp_path / "sweep.toml", SWEPT, rounds=2)
    answer = fedproto("sweep", path, "--out", tmp_path / "out")
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[:2] == [
        "local: 2 federations together, from round 1",
        "fedavg: 2 federations together, from round 1",
    ]
    assert "mean test accuracy over clients, %" in answer.out
    assert lines[-1] == f"written to {tmp_path / 'out'}"
    rows = [line.split() for line in lines if line.split()[:1] in (["local"], ["fedavg"])]
    assert [row[:2] for row in rows] == [
        ["local", "0"],
        ["local", "1"],
        ["fedavg", "0"],
        ["fedavg", "1"],
    ]
    for row, cell in zip(rows, read_sweep(path), strict=True):
        accuracy = RunFolder(tmp_path / "out" / cell.name).result()["accuracy"]
        assert row[2:4] == [f"{100 * accuracy[key]['mean']:.1f}" for key in ("head", "head_own")]
    again = fedproto("sweep", path, "--out", tmp_path / "out")
    assert again.code == 0
    assert "together" not in again.out
    assert [
        line.split()
        for line in again.out.splitlines()
        if line.split()[:1] in (["local"], ["fedavg"])
    ] == rows


def test_the_default_folder_is_named_after_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "mine.toml", {"seed": [0, 1]}, rounds=1)
    answer = fedproto("sweep", path)
    assert answer.code == 0, answer.err
    assert sorted(each.name for each in (tmp_path / "runs" / "mine").iterdir()) == [
        "seed=0",
        "seed=1",
    ]
    assert answer.out.splitlines()[-1] == "written to runs/mine"


@pytest.mark.parametrize("error", [TrainingError, torch.OutOfMemoryError])
def test_a_batch_too_large_for_the_memory_is_halved(error, tmp_path, monkeypatch):
    """And what it held is let go first: the halves need the room."""
    alive, began, told, released = [], [], [], []

    def two_fit(experiments, folders, on_round, until):
        began.append((len(experiments), sum(each() is not None for each in alive), len(released)))
        alive.extend(weakref.ref(each) for each in experiments)
        if len(experiments) > 2:
            raise error("the GPU's memory is full")
        return real(experiments, folders, on_round, until)

    def remember(cells, done, notices):
        told.append(notices)
        return ignore

    real = sweep.execute
    monkeypatch.setattr(sweep, "execute", two_fit)
    monkeypatch.setattr(sweep, "_release_memory", lambda: released.append(1))
    cells = cells_of(tmp_path, {"seed": [0, 1, 2, 3, 4]})
    results = run_sweep(cells, tmp_path / "out", remember, pytest.fail)
    assert began == [(5, 0, 0), (2, 0, 1), (3, 0, 1), (1, 0, 2), (2, 0, 2)]
    assert [len(each) for each in told] == [0, 1, 0, 1, 0]
    for many, (notice,) in zip((5, 3), filter(None, told), strict=True):
        assert notice.startswith("the GPU's memory is full")
        assert notice.endswith(
            f": {many} federations together broke down, so half of them are tried at a time"
        )
    monkeypatch.undo()
    assert [r["accuracy"] for r in results] == [
        r["accuracy"] for r in run_sweep(cells, tmp_path / "again", quietly)
    ]


def test_a_diverging_federation_does_not_end_the_others(tmp_path):
    path = written(
        tmp_path / "sweep.toml", {"lr": [0.01, 1e300], "algorithm": ["local", "fedproto"]}
    )
    answer = fedproto("sweep", path, "--out", tmp_path / "out")
    assert answer.code == 2
    assert "lr=1e+300-local broke down: round 1, client" in answer.out
    finished = [
        (tmp_path / "out" / cell.name / "result.json").exists() for cell in read_sweep(path)
    ]
    assert finished == [True, True, False, False]
    (alone,) = run_sweep(
        cells_of(tmp_path, {"lr": [0.01], "algorithm": ["local"]}), tmp_path / "alone", quietly
    )
    assert alone["accuracy"] == RunFolder(tmp_path / "out" / "lr=0.01-local").result()["accuracy"]
