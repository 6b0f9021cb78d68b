"""Run folders that are damaged, foreign, continued on other data, or have two writers."""

import json
import os
import random
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.command_line import Gate, answer, fedproto, files_in, only_line, process
from helpers.killed_runs import (
    Killed,
    copy_before_each_step,
    kill_in,
    killed_run,
    left_behind,
    newest_checkpoint,
    wait_until,
)
from helpers.killed_runs import resume as resumed
from safetensors.torch import load_file, save_file

import fedproto as package
from fedproto.config.settings import configure
from fedproto.core import files
from fedproto.errors import FedProtoError, RunFolderError
from fedproto.inference.export.read import read_exported
from fedproto.inference.export.write import export_client
from fedproto.inference.trained_client import load_client
from fedproto.membership.contribution import Contribution
from fedproto.membership.extend import extend
from fedproto.membership.join import join
from fedproto.membership.membership import Membership
from fedproto.reproduce.archive import pack, unpack
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import CHECKPOINT_FORMAT, RunFolder, is_taken
from fedproto.runs.prototype_files import read_prototypes
from fedproto.runs.sweep import read_sweep, run_sweep

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "clients": 3,
    "shots": 5,
    "rounds": 2,
    "model": "mlp(hidden=4)",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    package.run(**SMALL, out=path)
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


# --- flipped bits


def with_flipped_bit(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def some_bits(content: bytes, count: int) -> list[int]:
    """The first bits, which say how long the header is, and some of the others."""
    return [*range(64), *random.Random(0).sample(range(64, 8 * len(content)), count)]


TENSOR_FILES: dict[str, Callable[[Path], Any]] = {
    "checkpoint/round-00000002.safetensors": lambda run: RunFolder(run).load_checkpoint(),
    "prototypes.safetensors": lambda run: read_prototypes(run / "prototypes.safetensors"),
    "members.safetensors": lambda run: Membership.of(RunFolder(run)),
    "upload.safetensors": Contribution.load,
    "member/model.safetensors": lambda run: read_exported(run / "member"),
}


@pytest.mark.parametrize(("name", "read"), TENSOR_FILES.items(), ids=TENSOR_FILES)
def test_a_flipped_bit_in_a_file_of_tensors_is_refused_by_name(
    name: str, read: Callable[[Path], Any], run: Path
) -> None:
    folder = RunFolder(run)
    bank = Membership.of(folder)
    Contribution.of("zoo", bank.classes, bank.upload_of("0")).save(run / "upload.safetensors")
    bank.save(folder)
    export_client(load_client(run, 0), run / "member", onnx=False)
    read(run)
    content = (run / name).read_bytes()
    for bit in some_bits(content, 150):
        (run / name).write_bytes(with_flipped_bit(content, bit))
        with pytest.raises(FedProtoError, match=Path(name).name):
            read(run)


@pytest.mark.parametrize("name", ["result.json", "start.json"])
def test_a_flipped_bit_in_a_json_file_is_refused_by_name(name: str, run: Path) -> None:
    path = run / name
    content = path.read_bytes()
    before = RunFolder(run).read_json(name)
    refused = 0
    for bit in some_bits(content, 400):
        path.write_bytes(with_flipped_bit(content, bit))
        try:
            assert RunFolder(run).read_json(name) == before  # as 1E-05 is for 1e-05
        except RunFolderError as error:
            assert name in str(error)
            refused += 1
    assert refused > 450


def test_a_flipped_bit_in_a_line_of_metrics_is_refused_by_file_and_line(run: Path) -> None:
    path = run / "metrics.jsonl"
    content = path.read_bytes()
    before = RunFolder(run).metrics()
    first, _ = content.splitlines(keepends=True)
    refused = 0
    for bit in range(8 * len(first)):
        path.write_bytes(with_flipped_bit(content, bit))
        try:
            assert RunFolder(run).metrics() == before
        except RunFolderError as error:
            assert f"{path}, line 1," in str(error)
            refused += 1
    assert refused > 0.99 * 8 * len(first)


def test_a_number_that_was_changed_in_a_result_or_a_line_reaches_no_report(run: Path) -> None:
    for name in ("result.json", "metrics.jsonl"):
        path = run / name
        before = path.read_text()
        path.write_text(before.replace('"mean": 0.', '"mean": 0.9', 1))
        answer = fedproto("report", run)
        assert answer.code == 2 and name in only_line(answer.err) and "checksum" in answer.err
        path.write_text(before)


# --- foreign and missing files, other versions


def test_a_file_of_another_kind_is_refused_in_place_of_a_checkpoint(run: Path) -> None:
    shutil.copy(run / "prototypes.safetensors", newest_checkpoint(run))
    with pytest.raises(RunFolderError, match="is not a file of checkpoint but of 'prototypes'"):
        RunFolder(run).load_checkpoint()
    save_file({"a": torch.zeros(1)}, newest_checkpoint(run))
    with pytest.raises(RunFolderError, match="is not a file of checkpoint"):
        RunFolder(run).load_checkpoint()


def test_a_run_that_has_lost_what_it_began_with_is_refused(run: Path) -> None:
    (run / "result.json").unlink()
    (run / "start.json").unlink()
    answer = fedproto("resume", run)
    assert answer.code == 2 and str(run / "start.json") in only_line(answer.err)


def test_another_version_is_refused_by_name(run: Path) -> None:
    checkpoint = newest_checkpoint(run)
    tensors, _ = files.read_tensors(checkpoint, CHECKPOINT_FORMAT)
    files.write_tensors(checkpoint, tensors, replace(CHECKPOINT_FORMAT, version=3), {})
    with pytest.raises(
        RunFolderError, match=rf"{checkpoint.name} has version '3' of the format checkpoint"
    ):
        RunFolder(run).load_checkpoint()
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(files.seal(result, 2)))
    with pytest.raises(
        RunFolderError, match=r"result\.json has version '2'; this fedproto reads version 1"
    ):
        RunFolder(run).result()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text(json.dumps(files.seal(lines[0], 2)) + "\n")
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 1, has version '2'"):
        RunFolder(run).metrics()


@pytest.mark.parametrize(
    ("version", "said"), [("version = 2\n", "has version '2'"), ("", "states no version")]
)
def test_another_version_of_the_configuration_is_refused(
    version: str, said: str, run: Path
) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text().replace("version = 1\n", version))
    (run / "result.json").unlink()
    for command in (("resume", run), ("members", run)):
        answer = fedproto(*command)
        assert answer.code == 2 and str(config) in only_line(answer.err) and said in answer.err


def test_settings_changed_before_the_first_checkpoint_are_refused(tmp_path: Path) -> None:
    """Without a checkpoint, there was nothing that told."""
    path = killed_run(tmp_path / "run", SMALL | {"checkpoint_every": 0}, round=1)
    config = path / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.01", "lr = 0.02"))
    answer = fedproto("resume", path)
    assert (
        answer.code == 2 and "config.toml" in only_line(answer.err) and "was changed" in answer.err
    )


# --- one writer


#: Flags of a run that is still training when a test looks at it.
LONG_RUN = ("--dataset=digits", "--clients=3", "--rounds=3000", "--eval-every=3000", "--shots=5")


def test_a_second_process_is_refused_while_the_first_one_trains(tmp_path: Path) -> None:
    path = tmp_path / "run"
    gate = Gate(tmp_path / "gate", round=2)
    first = process("run", *LONG_RUN, "--out", path, gate=gate)
    wait_until(
        lambda: (path / ".lock-holder").exists() and bool((path / "metrics.jsonl").read_bytes()),
        first,
    )
    second = fedproto("resume", path)
    first.terminate()
    gate.open()
    assert answer(first).code == 130
    assert second.code == 2
    assert f"{path} is in use by process {first.pid} on " in only_line(second.err)
    lines = RunFolder(path).metrics()
    assert [line["round"] for line in lines] == list(range(1, len(lines) + 1))
    assert RunFolder(path).checkpoint_round() == len(lines)


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    """Also where it had worker processes, which are forked with all its open files."""
    path = tmp_path / "run"
    first = process("run", *LONG_RUN, "--engine", "processes", "--set", "workers=2", "--out", path)
    wait_until(
        lambda: (path / "metrics.jsonl").exists() and bool((path / "metrics.jsonl").read_bytes()),
        first,
    )
    first.kill()
    first.wait()
    with RunFolder(path).hold():
        pass


def test_every_command_that_writes_into_a_run_folder_respects_its_holder(
    run: Path, tmp_path: Path
) -> None:
    unfinished = killed_run(
        tmp_path / "runs" / "seed=0", SMALL | {"rounds": 3, "checkpoint_every": 1}, round=1
    )
    sweep = tmp_path / "runs.toml"
    settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in SMALL.items())
    sweep.write_text(f"{settings.replace('rounds = 2', 'rounds = 3')}\n[sweep]\nseed = [0]\n")
    for folder, command in (
        (unfinished, ("resume", unfinished)),
        (unfinished, ("sweep", sweep, "--out", tmp_path / "runs")),
        (run, ("members", run, "--remove", "1")),
    ):
        before = {
            name: (folder / name).read_bytes()
            for name in files_in(folder)
            if (folder / name).is_file()
        }
        with RunFolder(folder).hold():
            refused = fedproto(*command)
        assert refused.code == 2, command
        assert f"{folder} is in use by process {os.getpid()}" in refused.err
        after = {
            name: (folder / name).read_bytes()
            for name in files_in(folder)
            if (folder / name).is_file()
        }
        assert after == before
    assert fedproto("members", run).code == 0  # who only looks needs no lock


def test_an_archive_does_not_replace_a_run_that_is_being_trained(run: Path, tmp_path: Path) -> None:
    cell = tmp_path / "runs" / "target" / "cell"
    cell.parent.mkdir(parents=True)
    shutil.copytree(run, cell)
    (cell / "checkpoint" / "round-00000002.safetensors").unlink()
    pack(tmp_path / "archive.tar.gz", tmp_path / "runs")
    (cell / "result.json").unlink()
    with RunFolder(cell).hold(), pytest.raises(RunFolderError, match="is in use by process"):
        unpack(tmp_path / "archive.tar.gz", tmp_path / "runs")
    assert (cell / "start.json").exists()
    assert unpack(tmp_path / "archive.tar.gz", tmp_path / "runs") == 1
    assert RunFolder(cell).metrics() == RunFolder(run).metrics()


def test_a_folder_of_which_only_a_lock_is_left_is_not_taken(tmp_path: Path) -> None:
    with RunFolder(tmp_path).hold():
        pass
    assert (tmp_path / ".lock").exists()
    assert not is_taken(tmp_path)
    package.run(**SMALL | {"rounds": 1}, out=tmp_path)
    assert RunFolder(tmp_path).result() is not None


# --- folders appear complete


def test_an_extension_killed_at_any_step_continues_with_the_models_it_was_given(
    finished: Path, tmp_path: Path
) -> None:
    """Killed between creating its folder and its first checkpoint, it once used random weights."""
    experiment, folder = extend(finished, [], tmp_path / "whole", rounds=1)
    experiment.execute(folder)
    states = load_file(newest_checkpoint(tmp_path / "whole"))
    copies = tmp_path / "killed at step"
    with pytest.MonkeyPatch.context() as patch:
        copy_before_each_step(patch, tmp_path / "killed", copies)
        experiment, folder = extend(finished, [], tmp_path / "killed", rounds=1)
        experiment.execute(folder)
    killed = list(copies.iterdir())
    assert len(killed) > 5
    for path in killed:
        resumed(path)
        found = load_file(newest_checkpoint(path))
        assert found.keys() == states.keys()
        assert all(torch.equal(found[name], states[name]) for name in states), path


def test_an_extension_without_its_models_is_refused(finished: Path, tmp_path: Path) -> None:
    experiment, folder = extend(finished, [], tmp_path / "more", rounds=2)
    kill_in(1, folder, experiment)
    for path in (folder.path / "checkpoint").iterdir():
        path.unlink()
    refused = fedproto("resume", folder.path)
    assert refused.code == 2 and "the weights it began with are gone" in only_line(refused.err)


@pytest.mark.parametrize("checkpoint_every", [0, 10])
def test_a_newcomer_never_continues_with_another_body(
    checkpoint_every: int, finished: Path, tmp_path: Path
) -> None:
    body = tmp_path / "body.safetensors"
    states = RunFolder(finished).load_checkpoint()[1]  # type: ignore[index]
    own = {name: value for name, value in states.items() if name.startswith("client.0.body.")}
    named = {name.removeprefix("client.0."): value.clone() for name, value in own.items()}
    save_file(named, body)

    def killed_join(out: Path) -> Path:
        def die(line: Any) -> None:
            raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Experiment, "write_round", lambda self, folder, result: die(result))
            options = {"checkpoint_every": checkpoint_every, "model": SMALL["model"]}
            with pytest.raises(Killed):
                join(finished, "digits", weights=body, shots=5, epochs=2, out=out, **options)
        return out

    # A newcomer has the name of its folder.
    first, second = (killed_join(tmp_path / name / "new") for name in ("first", "second"))
    whole = resumed(first)
    before = body.read_bytes()
    save_file({name: value + 1 for name, value in named.items()}, body)
    refused = fedproto("resume", second)
    assert refused.code == 2 and "the weights it began with" in only_line(refused.err)
    body.unlink()
    assert fedproto("resume", second).code == 2
    body.write_bytes(before)
    assert resumed(second) == whole


def test_a_folder_of_compared_runs_is_refused_with_the_names_of_the_runs(tmp_path: Path) -> None:
    for name in ("local", "fedproto"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    with pytest.raises(RunFolderError) as caught:
        load_client(tmp_path)
    assert f"{tmp_path} is not a run folder: it holds the run folders" in str(caught.value)
    for name in ("local", "fedproto"):
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(
        RunFolderError, match=r"local is not a run folder: it must hold config.toml"
    ):
        load_client(tmp_path / "local")


def test_a_folder_that_was_never_completed_is_not_a_compared_run(
    finished: Path, tmp_path: Path
) -> None:
    """A process that is killed while it makes a run folder leaves a hidden one."""
    shutil.copytree(finished, tmp_path / "compared" / "fedproto")
    shutil.copytree(finished, tmp_path / "compared" / ".local.x1y2z3")
    assert [folder.path.name for folder in RunFolder.inside(tmp_path / "compared")] == ["fedproto"]


# --- continued on other data


def write_data(path: Path, *, seed: int = 0, shape: tuple[int, ...] = (6,)) -> None:
    generator = np.random.default_rng(seed)
    y = np.arange(200) % 4 if seed == 0 else generator.permutation(np.arange(200) % 4)
    x = generator.normal(size=(200, *shape)).astype(np.float32)
    np.savez(path, x=x, y=y)


SWEEP = """
dataset = "npz:{data}"
clients = 2
rounds = 3
shots = 5
checkpoint_every = {every}
model = "mlp(hidden=4)"
[sweep]
seed = [0, 1]
lam = [1, 2]
"""


def sweep_of(folder: Path, every: int = 1) -> list[Any]:
    write_data(folder / "data.npz")
    (folder / "sweep.toml").write_text(SWEEP.format(data=folder / "data.npz", every=every))
    return read_sweep(folder / "sweep.toml")


def killed_sweep(folder: Path, every: int = 1) -> list[Any]:
    cells = sweep_of(folder, every)

    def die_in_round_2(result: Any) -> None:
        if result.round == 2:
            raise Killed

    with pytest.raises(Killed):
        run_sweep(cells, folder / "out", lambda *of: die_in_round_2)
    return cells


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize(
    ("change", "said"),
    [({"seed": 1}, "other labels"), ({"shape": (7,)}, "inputs of other shapes")],
    ids=["labels", "shape"],
)
def test_a_sweep_is_not_continued_on_other_data(
    every: int, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    killed_sweep(tmp_path, every)
    write_data(tmp_path / "data.npz", **change)
    refused = fedproto("sweep", tmp_path / "sweep.toml", "--out", tmp_path / "out")
    assert refused.code == 2 and said in only_line(refused.err)
    write_data(tmp_path / "data.npz")
    assert fedproto("sweep", tmp_path / "sweep.toml", "--out", tmp_path / "out").code == 0


def test_resume_refuses_inputs_of_another_shape(tmp_path: Path) -> None:
    write_data(tmp_path / "data.npz")
    settings = {
        "dataset": f"npz:{tmp_path / 'data.npz'}",
        "clients": 2,
        "rounds": 3,
        "checkpoint_every": 1,
    }
    path = killed_run(tmp_path / "run", settings, round=2)
    write_data(tmp_path / "data.npz", shape=(7,))
    refused = fedproto("resume", path)
    assert refused.code == 2 and "inputs of other shapes" in only_line(refused.err)


def test_a_cell_does_not_begin_on_other_data_than_the_other_cells(tmp_path: Path) -> None:
    cells = sweep_of(tmp_path)
    out = tmp_path / "out"
    run_sweep(cells[:2], out, lambda *of: lambda result: None)
    write_data(tmp_path / "data.npz", seed=1)
    refused = fedproto("sweep", tmp_path / "sweep.toml", "--out", out)
    assert refused.code == 2 and "the labels of npz:" in only_line(refused.err)
    assert sorted(path.name for path in out.iterdir()) == sorted(cell.name for cell in cells[:2])


# --- the configuration says what was done


def test_the_configuration_states_what_the_data_set_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "open"
    package.run(**{key: value for key, value in SMALL.items() if key != "shots"}, out=path)
    stored = tomllib.loads((path / "config.toml").read_text())["partition"]
    assert stored["from_data"] == ["ways", "shots", "shots_stdev"]
    assert (stored["ways"], stored["shots"], stored["shots_stdev"]) == (
        3,
        8,
        2,
    )  # 8 are the usual shots of digits
    assert stored["test_shots"] == "none"  # all of them: nothing was filled in
    again = fedproto("run", path / "config.toml", "--out", tmp_path / "again")
    assert again.code == 0
    for name in ("config.toml", "partition.json", "prototypes.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (path / name).read_bytes()
    explicit = "".join(f",{name}={stored[name]}" for name in ("ways", "shots", "shots_stdev"))[1:]
    package.run(
        **SMALL | {"partition": f"nway({explicit})", "shots": None}, out=tmp_path / "explicit"
    )
    assert (tmp_path / "explicit" / "partition.json").read_bytes() == (
        path / "partition.json"
    ).read_bytes()
    assert "from_data" not in (tmp_path / "explicit" / "config.toml").read_text()


def test_what_data_sets_fill_in_differently_stays_open(tmp_path: Path) -> None:
    write_data(tmp_path / "data.npz")
    settings = SMALL | {
        "dataset": f"digits*2,npz:{tmp_path / 'data.npz'}*2",
        "clients": 4,
        "partition": "nway",
        "dim": 5,
    }
    experiment = Experiment.prepare(
        configure({key: v for key, v in settings.items() if key != "shots"})[0]
    )
    experiment.engine.close()
    assert experiment.federation.from_data == {"ways": 3}  # 8 ± 2 images per class, and 1 ± 0
    stored = tomllib.loads(experiment.config.toml(experiment.federation.from_data))["partition"]
    assert (stored["ways"], stored["shots"]) == (3, "none")


def test_a_sweep_knows_what_was_left_to_the_data_set(tmp_path: Path) -> None:
    text = (
        "dataset = 'digits'\nclients = 2\nrounds = 1\nmodel = 'mlp(hidden=4)'\n"
        "{}[sweep]\nseed = [0]\n"
    )
    file = tmp_path / "sweep.toml"
    file.write_text(text.format(""))
    assert fedproto("sweep", file, "--out", tmp_path / "out").code == 0
    result = (tmp_path / "out" / "seed=0" / "result.json").read_bytes()
    assert fedproto("sweep", file, "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "seed=0" / "result.json").read_bytes() == result
    file.write_text(text.format("ways = 4\n"))
    refused = fedproto("sweep", file, "--out", tmp_path / "out")
    assert refused.code == 2 and "holds a run with partition" in refused.err


def test_a_run_that_left_options_open_resumes_to_the_same_folder(tmp_path: Path) -> None:
    settings = {key: value for key, value in SMALL.items() if key != "shots"} | {
        "checkpoint_every": 1
    }
    experiment = Experiment.prepare(configure(settings)[0])
    experiment.execute(experiment.new_folder(tmp_path / "whole"))
    killed_run(tmp_path / "killed", settings, round=1)
    again, folder = reopen(RunFolder(tmp_path / "killed"))
    again.execute(folder)
    assert left_behind(tmp_path / "killed") == left_behind(tmp_path / "whole")
