"""The command line: what it writes, prints and refuses."""

import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.command_line import SMALL, Answer, answer, fedproto, files_in, only_line, process
from safetensors import safe_open

from fedproto.cli.list_command import LISTS
from fedproto.config import plugins
from fedproto.config.config_file import read_toml
from fedproto.partitions.file import hash_partition

KINDS_OF_ACCURACY = {"head", "head_own", "prototype", "prototype_own", "both", "both_own"}
COMPLETE = [
    "checkpoint",
    "config.toml",
    "metrics.jsonl",
    "models",
    "partition.json",
    "prototypes.safetensors",
    "result.json",
    "start.json",
]
AFTER_FIVE_ROUNDS = [
    "checkpoint/round-00000005.safetensors",
    "models/index.json",
    "models/round-00000005-00000.safetensors",
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command is typed in an empty folder, on a machine without data files."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("FEDPROTO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def succeed(*arguments: str | Path) -> Answer:
    result = fedproto(*arguments)
    assert result.code == 0, result.err
    return result


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def timeless(folder: Path) -> dict[str, Any]:
    """result.json without the seconds and the checksum, in which two equal runs differ."""
    stored = read(folder / "result.json")
    return {key: value for key, value in stored.items() if key not in ("seconds", "checksum")}


# --- what a run leaves behind


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five rounds, evaluated in rounds 2, 4 and 5, with half the clients sampled."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    succeed(
        "run",
        *SMALL,
        "--rounds",
        "5",
        "--eval-every",
        "2",
        "--participation",
        "0.5",
        "--out",
        folder,
    )
    return folder


def test_a_run_leaves_a_complete_folder_and_nothing_else(run: Path) -> None:
    assert files_in(run) == sorted([*COMPLETE, *AFTER_FIVE_ROUNDS])
    assert files_in(run.parent)[0] == "run"


def test_all_files_of_a_run_have_the_same_permissions(run: Path) -> None:
    """A run is shared: no file of it is more private than the others."""
    modes = {path.name: path.stat().st_mode & 0o777 for path in run.rglob("*") if path.is_file()}
    assert len(set(modes.values())) == 1, modes


def test_the_result_has_the_keys_of_the_contract(run: Path) -> None:
    result = read(run / "result.json")
    expected = {"algorithm": "fedproto", "dataset": "digits", "seed": 0, "rounds": 5}
    assert {key: result[key] for key in expected} == expected
    assert set(result["accuracy"]) == KINDS_OF_ACCURACY
    assert {"values_per_round", "bytes_up", "bytes_down"} <= set(result["communication"])
    assert {"total", "per_round"} <= set(result["seconds"])
    numbers = [*result["communication"].values(), *result["seconds"].values()]
    assert all(isinstance(number, (int, float)) and number > 0 for number in numbers)


def test_every_client_has_the_keys_of_the_contract(run: Path) -> None:
    clients = read(run / "result.json")["clients"]
    assert [client["id"] for client in clients] == [0, 1, 2, 3]
    for client in clients:
        assert client["model"] == "mlp"
        assert set(client["classes"]) <= set("0123456789") and client["classes"]
        assert type(client["train"]) is type(client["test"]) is int
        assert set(client["accuracy"]) == KINDS_OF_ACCURACY


def test_accuracies_are_fractions_and_their_spread_is_over_clients(run: Path) -> None:
    result = read(run / "result.json")
    for key, summary in result["accuracy"].items():
        values = [client["accuracy"][key] for client in result["clients"]]
        assert all(0 <= value <= 1 for value in values)
        assert summary["mean"] == pytest.approx(statistics.fmean(values))
        assert summary["std"] == pytest.approx(statistics.pstdev(values))


def test_there_is_one_line_of_metrics_per_round(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = {"round", "loss", "accuracy", "bytes_up", "bytes_down", "participants", "seconds"}
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        assert keys <= set(line)
        assert set(line["loss"]) == {"supervised", "regulariser"}
        assert len(line["participants"]) == 2  # half of four
        assert line["seconds"] > 0


def test_accuracy_is_measured_in_the_rounds_that_ask_for_it_and_in_the_last(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if line["accuracy"] is not None] == [2, 4, 5]
    assert lines[-1]["accuracy"] == read(run / "result.json")["accuracy"]


def test_the_result_adds_up_what_the_lines_say(run: Path) -> None:
    result = read(run / "result.json")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    sent = result["communication"]
    for direction in ("bytes_up", "bytes_down"):
        assert sent[direction] == sum(line[direction] for line in lines)
        assert sent[direction] == sum(
            client["communication"][direction] for client in result["clients"]
        )
    values = sum(client["communication"]["values_up"] for client in result["clients"])
    assert sent["values_per_round"] == values / 5
    assert result["seconds"]["total"] == pytest.approx(sum(line["seconds"] for line in lines))


def test_the_partition_is_stamped_and_is_what_the_clients_had(run: Path) -> None:
    partition, result = read(run / "partition.json"), read(run / "result.json")
    assert partition["sha256"] == hash_partition(partition) == result["partition"]
    for portion, client in zip(partition["clients"], result["clients"], strict=True):
        assert (len(portion["train"]), len(portion["test"])) == (client["train"], client["test"])
        assert portion["classes"] == client["classes"]


def test_the_prototypes_carry_the_names_of_their_classes(run: Path) -> None:
    with safe_open(run / "prototypes.safetensors", "pt") as file:
        prototypes, known = file.get_tensor("prototypes"), file.get_tensor("known")
        header = json.loads(file.metadata()["fedproto"])
    assert (header["format"], header["version"], header["classes"]) == (
        "prototypes",
        1,
        list("0123456789"),
    )
    assert prototypes.shape == (10, 50)
    held = {label for client in read(run / "result.json")["clients"] for label in client["classes"]}
    # Half the clients are absent each round, so a class may lack a prototype.
    assert {str(label) for label in known.nonzero().flatten().tolist()} <= held


def test_a_method_without_prototypes_writes_none_and_counts_no_traffic() -> None:
    succeed("run", *SMALL, "--algorithm", "local", "--out", "out")
    assert not Path("out/prototypes.safetensors").exists()
    result = read(Path("out/result.json"))
    assert set(result["accuracy"]) == {"head", "head_own"}
    assert result["communication"] == {"values_per_round": 0, "bytes_up": 0, "bytes_down": 0}


def test_the_configuration_of_a_run_gives_the_identical_run(run: Path) -> None:
    succeed("run", run / "config.toml", "--out", "again")
    again = Path("again")
    assert timeless(again) == timeless(run)
    for name in (
        "config.toml",
        "partition.json",
        "prototypes.safetensors",
        "checkpoint/round-00000005.safetensors",
    ):
        assert (again / name).read_bytes() == (run / name).read_bytes()


def test_a_partition_can_be_shared_with_another_method(run: Path) -> None:
    succeed(
        "run",
        *SMALL[:6],
        "--algorithm",
        "local",
        "--partition",
        f"file:{run}/partition.json",
        "--out",
        "out",
    )
    assert read(Path("out/partition.json")) == read(run / "partition.json")


def test_without_a_name_the_folder_is_called_after_time_data_and_method() -> None:
    result = succeed("run", *SMALL, "--algorithm", "local")
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-digits-local")
    assert f"written to {Path('runs') / folder.name}" in result.out


def test_a_run_prints_its_clients_and_its_traffic(run: Path) -> None:
    out = succeed("run", run / "config.toml", "--out", "out").out
    result = read(run / "result.json")
    assert "4 clients on digits" in out
    assert f"{100 * result['accuracy']['prototype']['mean']:.1f}" in out
    assert f"{result['communication']['bytes_up']:,} bytes up" in out


def test_a_folder_may_be_called_anything() -> None:
    """Brackets are markup to the library that prints."""
    name = "a[/b] [red]c (1)"
    assert f"written to {name}\n" in succeed("run", *SMALL, "--out", name).out
    assert f"{name} has finished" in succeed("resume", name).out


def test_a_run_resumes_whatever_its_folder_is_called() -> None:
    """The partition of a resumed run is a choice of plug-in, where commas and brackets separate."""
    succeed("run", *SMALL, "--out", "a,b (1)*2")
    before = timeless(Path("a,b (1)*2"))
    Path("a,b (1)*2/result.json").unlink()
    succeed("resume", "a,b (1)*2")
    assert timeless(Path("a,b (1)*2")) == before


# --- several methods side by side


def test_several_methods_get_a_folder_each_and_one_table() -> None:
    out = succeed("run", *SMALL, "--algorithm", "local,fedproto", "--out", "out").out
    assert sorted(path.name for path in Path("out").iterdir()) == ["fedproto", "local"]
    assert read(Path("out/local/partition.json")) == read(Path("out/fedproto/partition.json"))
    assert "local head" in out and "fedproto prototype" in out
    assert "fedproto prototype against local head:" in out
    assert out.count("clients on digits") == 1


def test_a_flag_leaves_the_options_of_the_files_plug_in_behind() -> None:
    """`lam` is an option of fedproto: with another algorithm it must not be refused."""
    succeed("run", *SMALL, "--set", "lam=2", "--out", "one")
    succeed("run", "one/config.toml", "--algorithm", "local", "--out", "other")
    assert read(Path("other/result.json"))["algorithm"] == "local"


def test_a_flag_that_repeats_the_files_choice_keeps_its_options() -> None:
    succeed("run", *SMALL, "--set", "lam=2", "--out", "one")
    succeed("run", "one/config.toml", "--algorithm", "fedproto", "--out", "other")
    assert read_toml(Path("other/config.toml"))["algorithm.lam"] == 2


def test_a_profile_flag_governs_what_the_file_had_settled() -> None:
    succeed("run", *SMALL, "--out", "one")
    succeed("run", "one/config.toml", "--profile", "released", "--out", "other")
    assert read_toml(Path("other/config.toml"))["algorithm.weighting"] == "uniform"


def test_compared_runs_are_resumed_together() -> None:
    """As after Ctrl-C in the first of them: the second has a folder and has not begun."""
    succeed("run", *SMALL, "--algorithm", "local,fedproto", "--out", "out")
    before = timeless(Path("out/fedproto"))
    Path("out/fedproto/result.json").unlink()
    for checkpoint in Path("out/fedproto/checkpoint").iterdir():
        checkpoint.unlink()
    assert "fedproto prototype against local head:" in succeed("resume", "out").out
    assert timeless(Path("out/fedproto")) == before
    assert "has finished" in succeed("resume", "out").out


def test_unrelated_runs_are_not_resumed_together() -> None:
    """A folder of runs is not a comparison: their clients differ, and so no table holds them."""
    for clients in ("3", "4"):
        succeed("run", *SMALL, "--clients", clients, "--out", f"runs/{clients}")
    Path("runs/4/result.json").unlink()
    result = fedproto("resume", "runs")
    assert result.code == 2
    assert "holds runs of different federations" in only_line(result.err)
    succeed("resume", "runs/4")


def test_one_method_with_two_settings_gets_numbered_folders() -> None:
    succeed("run", *SMALL, "--algorithm", "fedproto(lam=0),fedproto(lam=2)", "--out", "out")
    lams = [
        read_toml(Path(f"out/fedproto-{number}/config.toml"))["algorithm.lam"] for number in (1, 2)
    ]
    assert lams == [0.0, 2.0]


def test_each_of_several_methods_gives_what_it_gives_alone(run: Path) -> None:
    settings = [run / "config.toml", "--set", "partition.ways=3"]
    succeed("run", *settings, "--set", "algorithm=fedproto,fedproto", "--out", "out")
    assert timeless(Path("out/fedproto-1")) == timeless(Path("out/fedproto-2")) == timeless(run)


# --- which setting overrides which


def settings_of(folder: str = "out") -> dict[str, Any]:
    return read_toml(Path(folder) / "config.toml")


@pytest.mark.parametrize(
    ("arguments", "ways"),
    [
        ("", 3),
        ("--ways 4", 4),
        ("--ways 4 --set ways=5", 5),
        ("--ways 4 --set partition.ways=6", 6),
    ],
)
@pytest.mark.parametrize("written", ["ways = 3\n{}", "{}[partition]\nways = 3\n"])
def test_flags_override_the_file_and_assignments_override_flags(
    written: str, arguments: str, ways: int
) -> None:
    run = 'dataset = "digits"\nclients = 4\nrounds = 1\n'
    Path("my.toml").write_text(written.format(run))
    succeed(
        "run", "my.toml", "--algorithm", "local", *arguments.split(), "--shots", "5", "--out", "out"
    )
    assert settings_of()["partition.ways"] == ways


def test_tables_of_the_file_reach_their_plug_in() -> None:
    Path("my.toml").write_text(
        'rounds = 1\n[algorithm]\nname = "fedprox"\nmu = 0.5\n[dataset]\nname = "digits"\n'
    )
    succeed("run", "my.toml", "--clients", "4", "--out", "out")
    settings = settings_of()
    assert (settings["algorithm"], settings["algorithm.mu"], settings["dataset"]) == (
        "fedprox",
        0.5,
        "digits",
    )


def test_the_released_profile_reaches_the_run() -> None:
    succeed("run", *SMALL, "--profile", "released", "--set", "weighting=eq6", "--out", "out")
    settings = settings_of()
    assert settings["algorithm.collect"] == "during" and settings["algorithm.absent"] == "drop"
    assert settings["algorithm.weighting"] == "eq6"  # said, so it wins
    clients = read(Path("out/result.json"))["clients"]
    assert all(client["test"] == 15 * len(client["classes"]) for client in clients)


def test_every_flag_is_a_key_of_the_file() -> None:
    """Flags are written to config.toml under their own names."""
    flags = {
        "batch": "4",
        "lr": "0.1",
        "lost-uploads": "0.2",
        "stragglers": "0.2",
        "seed": "7",
        "eval-every": "3",
        "checkpoint-every": "0",
        "stdev": "1",
        "engine": "reference",
        "device": "cpu",
        "shots-stdev": "2",
        "test-shots": "9",
        "ways": "4",
        "data-dir": ".",
        "participation": "0.9",
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    succeed("run", *SMALL, *words, "--out", "out")
    settings = settings_of()
    for flag, value in flags.items():
        key = flag.replace("-", "_")
        found = settings.get(key, settings.get(f"partition.{key}"))
        assert str(found) in (value, f"{value}.0", str(Path(value).absolute())), flag


def test_the_flags_of_asynchronous_rounds_are_keys_of_the_file() -> None:
    flags = {"buffer": "1", "concurrency": "2", "staleness": "0.7", "speed-spread": "0.4"}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    succeed("run", *SMALL, *words, "--out", "out")
    settings = settings_of()
    for flag, value in flags.items():
        assert str(settings[flag.replace("-", "_")]) == value
    assert "clock" in json.loads(Path("out/metrics.jsonl").read_text().splitlines()[0])


# --- help, lists, and what they cost


@pytest.mark.parametrize(
    "arguments", ["--help", "run --help", "list --help", "resume --help", "--version"]
)
def test_help_does_not_import_torch(arguments: str) -> None:
    result = answer(process(*arguments.split(), options=("-X", "importtime")))
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in result.err.splitlines()
    }
    assert result.code == 0 and "fedproto" in imported
    assert imported.isdisjoint({"torch", "numpy", "sklearn", "safetensors"})


@pytest.mark.parametrize("plural", LISTS)
def test_list_shows_every_plug_in_with_its_options(plural: str) -> None:
    out = succeed("list", plural).out
    first_words = [line.split()[0] for line in out.splitlines() if line.strip()]
    for name in [*plugins.names(LISTS[plural]), *plugins.presets(LISTS[plural])]:
        assert name in first_words
    assert out in succeed("list").out


def test_list_says_what_each_algorithm_sends() -> None:
    out = " ".join(succeed("list", "algorithms").out.replace("│", " ").split())
    for words in ("Sends nothing", "Sends model per client", "Sends prototypes per class"):
        assert words in out
    assert "takes no combiner" in out


def test_list_says_what_an_option_is_by_default() -> None:
    assert "lam=1.0" in succeed("list", "algorithms").out


def test_resume_of_a_finished_run_says_so_and_changes_nothing(run: Path) -> None:
    before = {path: (run / path).stat().st_mtime_ns for path in files_in(run)}
    assert (
        only_line(succeed("resume", run).out)
        == f"{run} has finished all its 5 rounds: its result is in result.json"
    )
    assert {path: (run / path).stat().st_mtime_ns for path in files_in(run)} == before


# --- plug-ins from outside

MY_ALGORITHM = """
from dataclasses import replace
from fedproto.algorithms.fedavg import fedavg

def patient(*, calm=3):
    \"\"\"FedAvg by another name.\"\"\"
    return replace(fedavg(), name=f"calm {calm}")

def forgetful():
    fedavg()
"""
MY_MODEL = """
from torch import nn

class Flat(nn.Module):
    def __init__(self, pixels, classes, width):
        super().__init__()
        self.body = nn.Linear(pixels, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        features = self.body(x.flatten(1))
        return features, self.head(features)

def flat(fit, *, width: int = 16):
    return Flat(64, fit.classes, width)
"""


@pytest.fixture
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plug-ins in the current folder; their modules are forgotten after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("my_algorithm.py").write_text(MY_ALGORITHM)
    Path("my_model.py").write_text(MY_MODEL)
    Path("my_broken.py").write_text("def")
    for name in ("my_algorithm", "my_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("_outside")
def test_an_algorithm_from_outside_runs_with_its_options() -> None:
    succeed("run", *SMALL, "--algorithm", "my_algorithm:patient", "--set", "calm=5", "--out", "out")
    assert read(Path("out/result.json"))["algorithm"] == "calm 5"
    succeed("run", "out/config.toml", "--out", "again", "--trust-plugins")
    assert timeless(Path("again")) == timeless(Path("out"))


@pytest.mark.usefixtures("_outside")
def test_a_model_from_outside_runs_beside_ours() -> None:
    succeed("run", *SMALL, "--model", "my_model:flat(width=8)*1,mlp(width=8)*3", "--out", "out")
    models = [client["model"] for client in read(Path("out/result.json"))["clients"]]
    assert models == ["my_model:flat(width=8)", *["mlp(width=8)"] * 3]


@pytest.mark.usefixtures("_outside")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--algorithm my_algorithm:impatient", ("my_algorithm:impatient", "cannot be loaded")),
        ("--algorithm nowhere.at_all:function", ("nowhere.at_all:function", "cannot be loaded")),
        ("--algorithm my_broken:function", ("my_broken:function", "SyntaxError")),
        ("--algorithm :function", ("unknown algorithm ':function'", "accepted")),
        ("--algorithm my_algorithm:__name__", ("my_algorithm:__name__", "not a function but str")),
        ("--algorithm my_algorithm:forgetful", ("my_algorithm:forgetful", "NoneType", "Algorithm")),
        ("--model my_model:flat --set calm=5", ("calm",)),
        ("--model my_model:flat(widht=5)", ("widht", "width")),
        ("--model my_model:flat(width=wide)", ("width", "whole number", "wide")),
    ],
)
def test_a_plug_in_from_outside_that_cannot_be_used_is_refused(
    arguments: str, words: tuple[str, ...]
) -> None:
    result = fedproto("run", *SMALL, *arguments.split(), "--out", "out")
    assert result.code == 2
    assert all(word in only_line(result.err) for word in words), result.err
    assert not Path("out").exists()


# --- bad input: one line, exit code 2, nothing written


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Path:
    """Files that a command may be given, each wrong in its own way."""
    folder = tmp_path_factory.mktemp("inputs")
    _write_arrays(folder)
    _write_partitions(folder, read(run / "partition.json"))
    for name, content in {
        "unparsable": "rounds = ",
        "unknown-key": "rouns = 3",
        "unknown-table": "[algoritm]\nlam = 1",
        "unknown-option": "[algorithm]\nlamb = 1",
        "wrong-type": 'rounds = "many"',
        "not-a-number": "lr = nan",
    }.items():
        (folder / f"{name}.toml").write_text(content)
    (folder / "used").mkdir()
    (folder / "used" / "thesis.tex").write_text("years of work")
    return folder


def _write_arrays(folder: Path) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.random((60, 4, 4), np.float32), np.arange(60) % 3
    nan = x.copy()
    nan[17, 2, 2] = np.nan
    np.savez(folder / "good.npz", x=x, y=y)
    np.savez(folder / "nan.npz", x=nan, y=y)
    np.savez(folder / "negative.npz", x=x, y=y - 1)
    np.savez(folder / "beyond.npz", x=x, y=y, classes=np.array(["a", "b"]))
    np.savez(folder / "fractions.npz", x=x, y=y / 2)
    np.savez(folder / "longer.npz", x=x, y=np.arange(61) % 3)
    np.savez(folder / "nameless.npz", images=x, labels=y)
    np.savez(
        folder / "colour.npz",
        x=generator.integers(0, 255, (200, 3, 32, 32), np.uint8),
        y=np.arange(200) % 4,
    )
    whole = (folder / "good.npz").read_bytes()
    (folder / "half.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.npz").write_bytes(b"")


def _write_partitions(folder: Path, good: dict[str, Any]) -> None:
    """Partitions with a right hash but impossible content, and one that was changed by hand."""

    def write(name: str, **of_first_client: Any) -> None:
        first, *others = good["clients"]
        content = good | {"clients": [first | of_first_client, *others]}
        (folder / f"{name}.json").write_text(
            json.dumps(content | {"sha256": hash_partition(content)})
        )

    missing = next(name for name in "0123456789" if name not in good["clients"][0]["classes"])
    write("claims", classes=[*good["clients"][0]["classes"], missing])
    write("beyond", train=[*good["clients"][0]["train"], 10**6])
    write("shared", train=good["clients"][1]["train"], classes=good["clients"][1]["classes"])
    (folder / "changed.json").write_text(json.dumps(good | {"version": 2}))
    (folder / "half.json").write_text(json.dumps(good)[:100])
    (folder / "list.json").write_text("[]")


UNKNOWN_NAMES = {
    "algorithm": ("--algorithm fedprot", "fedprot", "did you mean 'fedproto'"),
    "one of several algorithms": ("--algorithm local,fedprot", "did you mean 'fedproto'"),
    "dataset": ("--dataset digit", "did you mean 'digits'"),
    "model": ("--model mlpp", "did you mean 'mlp'"),
    "partition": ("--partition diriclet", "did you mean 'dirichlet'"),
    "profile": ("--profile relased", "did you mean 'released'"),
    "engine": ("--engine referense", "did you mean 'reference'"),
    "device": ("--device gpu", "accepted: auto, cpu, cuda"),
    "key": ("--set rouns=3", "did you mean 'rounds'"),
    "option": ("--set algorithm.lamb=3", "option of algorithm fedproto", "did you mean 'lam'"),
    "option in brackets": ("--model mlp(hiden=3)", "did you mean 'hidden'"),
    "option of the automatic model": ("--set channels=3", "option of model mlp", "hidden, width"),
    "value of an option": ("--set distance=mes", "distance", "did you mean 'mse'"),
    "preset in a mix": ("--model mlp-mh,mlp", "mlp-mh", "stands alone"),
}
ASSIGNMENTS = {
    "no equals sign": ("--set lam", "KEY=VALUE", "'lam'"),
    "no key": ("--set =3", "KEY=VALUE"),
    "no value": ("--set lam=", "lam", "a number"),
}
DATA = {
    "corrupt npz": ("--dataset npz:{inputs}/half.npz", "half.npz", "damaged"),
    "empty npz": ("--dataset npz:{inputs}/empty.npz", "empty.npz", "damaged"),
    "missing npz": ("--dataset npz:{inputs}/nowhere.npz", "nowhere.npz", "does not exist"),
    "npz without a path": ("--dataset npz", "npz:PATH"),
    "path where none is taken": (
        "--dataset digits:{inputs}/good.npz",
        "dataset 'digits' takes no path",
    ),
    "npz without labels": ("--dataset npz:{inputs}/nameless.npz", "'x'", "images, labels"),
    "negative label": ("--dataset npz:{inputs}/negative.npz", "label -1", "0 to"),
    "label out of range": ("--dataset npz:{inputs}/beyond.npz", "label 2", "2 classes", "0 to 1"),
    "labels that are fractions": (
        "--dataset npz:{inputs}/fractions.npz",
        "y must be",
        "whole numbers",
    ),
    "more labels than images": ("--dataset npz:{inputs}/longer.npz", "60 inputs", "61 labels"),
    "NaN in the data": ("--dataset npz:{inputs}/nan.npz", "NaN", "row 17"),
    "no data folder": ("--dataset mnist --data-dir {inputs}/nowhere", "not found", "--data-dir"),
}
PARTITIONS = {
    "more ways than classes": ("--ways 11", "ways is 11", "10 classes"),
    "more shots than images": ("--shots 5000", "training rows", "lower shots"),
    "more shots than a number holds": (
        "--shots 99999999999999999999",
        "class '0' has 142 training rows",
    ),
    "partition that does not exist": (
        "--partition file:{inputs}/nowhere.json --clients 4",
        "nowhere.json",
    ),
    "partition cut in half": ("--partition file:{inputs}/half.json", "not valid JSON"),
    "partition of another kind": ("--partition file:{inputs}/list.json", "not a partition file"),
    "partition changed by hand": ("--partition file:{inputs}/changed.json", "SHA-256"),
    "class without a training image": (
        "--partition file:{inputs}/claims.json",
        "client 0 claims class",
        "no training",
    ),
    "row beyond the data": ("--partition file:{inputs}/beyond.json", "client 0", "out of range"),
    "row of two clients": ("--partition file:{inputs}/shared.json", "more than one client"),
    "partition for other clients": (
        "--partition file:{inputs}/claims.json --clients 5",
        "4 clients",
        "5 are wanted",
    ),
    "partition of other data": (
        "--partition file:{inputs}/claims.json --dataset npz:{inputs}/good.npz",
        "claims.json",
    ),
}
MODELS = {
    "counts that do not add up": ("--model mlp*3,mlp(width=20)*2", "add up to 5", "4 clients"),
    "counts for some only": ("--model mlp*3,mlp(width=20)", "each part a count"),
    "count of nothing": ("--model mlp*0", "count", "at least 1"),
    "embeddings that disagree": ("--model mlp*2,mlp(width=40)*2", "50 values", "40", "set dim"),
    "images too small": ("--model cnn", "8x8", "use mlp"),
    "layer that does not exist": (
        "--algorithm fedper --set personal=neck",
        "'neck'",
        "body.fc1",
        "head.fc3",
    ),
    "layer of fedrep that does not exist": (
        "--algorithm fedrep --set personal=neck",
        "'neck'",
        "head.fc3",
    ),
    "more clusters than clients of an architecture": (
        "--model mlp(hidden=8),mlp(hidden=16) --algorithm fesem(clusters=3) --clients 4",
        "clusters is 3",
        "only 2 clients",
    ),
}
FILES = {
    "TOML that does not parse": ("{inputs}/unparsable.toml", "unparsable.toml", "TOML"),
    "TOML that is not there": ("{inputs}/nowhere.toml", "nowhere.toml", "does not exist"),
    "TOML with an unknown key": ("{inputs}/unknown-key.toml", "did you mean 'rounds'"),
    "TOML with an unknown table": ("{inputs}/unknown-table.toml", "did you mean 'algorithm'"),
    "TOML with an unknown option": ("{inputs}/unknown-option.toml", "did you mean 'lam'"),
    "TOML with text for a number": (
        "{inputs}/wrong-type.toml --set rounds=x",
        "rounds",
        "whole number",
    ),
    "TOML with NaN": ("{inputs}/not-a-number.toml", "lr", "nan"),
}
FOLDERS = {
    "folder of another run": ("--out {run}", "already holds a run", "fedproto resume"),
    "folder that is not empty": ("--out {inputs}/used", "not empty", "--out"),
    "folder that is a file": ("--out {inputs}/used/thesis.tex", "not empty", "--out"),
    "folder in a file": ("--out {inputs}/used/thesis.tex/out", "cannot be made", "--out"),
    "no such device": ("--device cuda", "cuda", "cpu and auto"),
}
#: Flags for the rows that name no configuration file.
PLAIN = ("--dataset", "digits", "--clients", "4")
BAD = UNKNOWN_NAMES | ASSIGNMENTS | DATA | PARTITIONS | MODELS | FILES | FOLDERS


@pytest.mark.parametrize(
    ("arguments", "words"), [(row[0], row[1:]) for row in BAD.values()], ids=BAD
)
def test_bad_input_gets_one_clear_line_and_nothing_is_written(
    arguments: str, words: tuple[str, ...], inputs: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = files_in(inputs) + files_in(run.parent)
    given = shlex.split(arguments.format(inputs=inputs, run=run))
    result = fedproto("run", *([] if given[0].endswith(".toml") else PLAIN), "--out", "out", *given)
    assert result.code == 2
    for word in words:
        assert word in only_line(result.err)
    assert files_in(Path.cwd()) == []
    assert files_in(inputs) + files_in(run.parent) == before


COUNTS = ("0", "-1", "1.5", "many", "nan", "inf", "")
BAD_VALUES = {
    "clients": COUNTS,
    "rounds": COUNTS,
    "batch": COUNTS,
    "shots": COUNTS,
    "ways": COUNTS,
    "test-shots": COUNTS,
    "eval-every": COUNTS,
    "checkpoint-every": ("-1", "1.5", "often", "nan"),
    "lr": ("0", "-0.1", "fast", "nan", "inf", "1e999"),
    "stdev": ("-1", "wide", "nan", "inf"),
    "participation": ("0", "-0.5", "1.1", "half", "nan", "inf"),
    "lost-uploads": ("-0.1", "1.1", "some", "nan", "inf"),
    "stragglers": ("-0.1", "1.1", "some", "nan", "inf"),
    "buffer": ("-1", "1.5", "many", "nan", "inf"),
    "concurrency": COUNTS,
    "staleness": ("-0.1", "late", "nan", "inf"),
    "speed-spread": ("-0.1", "wide", "nan", "inf"),
    "seed": ("-1", "1.5", "lucky", "nan", "inf", str(2**63)),
}


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in BAD_VALUES.items() for value in values]
)
def test_a_value_out_of_bounds_gets_one_clear_line_and_nothing_is_written(
    flag: str, value: str
) -> None:
    result = fedproto("run", *SMALL, f"--{flag}={value}", "--out", "out")
    assert result.code == 2
    line = only_line(result.err)
    assert f"{flag.replace('-', '_')} must be a" in line and f"not {value!r}" in line
    assert files_in(Path.cwd()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("resume nowhere", ("nowhere", "not a run", "config.toml")),
        ("resume .", ("not a run", "config.toml")),
        ("resume {inputs}/used", ("used", "not a run")),
        ("resume {inputs}/used/thesis.tex", ("not a run",)),
        ("list algorithm", ("'algorithm'", "did you mean 'algorithms'")),
        ("list xyz", ("accepted: algorithms, ", "metrics, models, partitions")),
    ],
)
def test_other_commands_refuse_bad_input_in_one_line_too(
    arguments: str, words: tuple[str, ...], inputs: Path
) -> None:
    result = fedproto(*arguments.format(inputs=inputs).split())
    assert result.code == 2
    assert all(word in only_line(result.err) for word in words), result.err
    assert files_in(Path.cwd()) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("rnu", "run"),
        ("run --rouns 3", "--rounds"),
        ("run --rounds", "--rounds"),
        ("run a.toml b.toml", "b.toml"),
        ("resume", "run"),
    ],
)
def test_a_command_that_cannot_be_read_exits_with_two(arguments: str, word: str) -> None:
    """Usage is typer's business and takes more than a line; the code and what is meant are ours."""
    result = fedproto(*arguments.split())
    assert result.code == 2 and word in result.err.lower() and result.out == ""
    assert files_in(Path.cwd()) == []


# --- in a process of its own


def test_a_real_process_runs_and_is_silent_on_stderr() -> None:
    result = answer(process("run", *SMALL, "--out", "out"))
    assert (result.code, result.err) == (0, "")
    assert [name for name in files_in(Path("out")) if "/" not in name] == COMPLETE


def test_a_real_process_refuses_in_one_line(inputs: Path) -> None:
    """Warnings of libraries would be further lines."""
    result = answer(process("run", "--dataset", f"npz:{inputs}/nan.npz", "--out", "out"))
    assert (result.code, result.out) == (2, "")
    assert only_line(result.err).startswith("error: ")
    assert files_in(Path.cwd()) == []


@pytest.mark.parametrize(
    "words", [("--dataset", "folder:" + "x" * 300), (*SMALL, "--out", "x" * 300)]
)
def test_a_name_longer_than_files_may_have_is_a_sentence(words: tuple[str, ...]) -> None:
    result = fedproto("run", *words)
    assert result.code == 2 and "File name too long" in only_line(result.err)
