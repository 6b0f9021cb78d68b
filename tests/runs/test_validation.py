"""Runs with validation rows: the best round, early stopping, resuming, and what is reported."""

import contextlib
import json
import shutil

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto
from helpers.engine_comparison import assert_engines_agree
from helpers.killed_runs import Killed, begin, die_at_step, left_behind, resume, run_with_copies
from helpers.tiny import SETTINGS, experiment, finished

from fedproto.config.settings import configure
from fedproto.errors import ConfigError, DataError
from fedproto.runs.execution import execute
from fedproto.runs.experiment import Experiment
from fedproto.runs.sweep import rank_by_validation
from fedproto.runs.tracking import scalars

#: Learns fast, then gets worse on the few validation rows: the best round is not the last.
VALIDATED = {"validation": 0.3, "eval_every": 1, "rounds": 6, "shots": 8, "lr": 0.3}
STORED = SETTINGS | VALIDATED | {"algorithm": "fedproto", "checkpoint_every": 2}


# --- rows


def test_validation_rows_are_taken_from_each_clients_training_rows():
    alone = experiment("fedproto", shots=8)
    run = experiment("fedproto", shots=8, validation=0.3)
    before = alone.federation.partition["clients"]
    for client, earlier in zip(run.federation.partition["clients"], before, strict=True):
        assert sorted(client["train"] + client["validation"]) == earlier["train"]
        assert client["classes"] == earlier["classes"]
        assert client["test"] == earlier["test"]
        assert client["validation"]
    for member in run.federation.members:
        labels = member.validation.y[member.validation.rows]
        assert set(labels.tolist()) == set(member.classes)


def test_without_validation_a_partition_says_nothing_of_it():
    run = experiment("fedproto")
    assert not run.federation.has_validation
    assert all("validation" not in client for client in run.federation.partition["clients"])
    off = experiment("fedproto", validation=0)
    assert off.federation.partition == run.federation.partition


def test_a_stored_partition_brings_its_validation_rows(tmp_path):
    run = experiment("fedproto", shots=8, validation=0.3)
    path = tmp_path / "partition.json"
    path.write_text(json.dumps(run.federation.partition))
    fields = {key: value for key, value in SETTINGS.items() if not key.endswith(("shots", "stdev"))}
    settings = fields | {"partition": f"file:{path}"}
    again = Experiment.prepare(configure(settings)[0])
    assert again.federation.partition == run.federation.partition
    off = Experiment.prepare(configure(settings | {"validation": 0})[0])
    assert not off.federation.has_validation


def test_a_client_whose_classes_have_one_row_has_no_validation_rows():
    run, result = finished(
        "fedproto", ways=3, shots=2, stdev=0, shots_stdev=1, noise="uniform", validation=0.2
    )
    rows = [len(member.validation) for member in run.federation.members]
    assert 0 in rows and max(rows) > 0
    chosen = torch.tensor(rows) > 0
    (table,) = run.engine.evaluate([run.progress.server], "validation")
    assert (table["head"][~chosen] == 0).all()
    measured = result.data["validation"]["accuracy"]["head"]["mean"]
    assert measured == pytest.approx(float(table["head"][chosen].mean()))


# --- the best round


def test_the_result_is_that_of_the_best_round():
    """A run of as many rounds as the best one, without validation, on the same rows."""
    _, result = finished("fedproto", **VALIDATED)
    best = result.data["best_round"]
    scores = [line["validation"]["prototype"]["mean"] for line in result.metrics]
    assert best == 1 + int(np.argmax(scores)) < result.data["rounds"]  # argmax takes the first
    assert result.data["validation"]["score"] == max(scores)
    assert result.data["validation"]["select_by"] == "prototype"
    _, expected = finished("fedproto", **VALIDATED | {"rounds": best})
    assert expected.data["best_round"] == best
    assert result.clients[0]["accuracy"] == expected.clients[0]["accuracy"]
    for state, other in zip(result.states, expected.states, strict=True):
        assert all(torch.equal(state[name], other[name]) for name in state)
    assert torch.equal(result.prototypes["prototypes"], expected.prototypes["prototypes"])
    assert result.data["communication"]["bytes_up"] > expected.data["communication"]["bytes_up"]


def test_test_rows_are_looked_at_once():
    run = experiment("fedproto", **VALIDATED)
    looks = []

    def watch(look):
        def watched(servers, part="test"):
            looks.append(part)
            return look(servers, part)

        return watched

    run.engine.evaluate = watch(run.engine.evaluate)
    run.engine.measure = watch(run.engine.measure)
    result = run.execute()
    assert looks == ["validation"] * 6 + ["test"]
    assert all(line["accuracy"] is None for line in result.metrics)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_the_last_round_is_reported_beside_the_best_one(engine):
    """It is what the same run without validation in its rounds ends with, on the same rows."""
    settings = VALIDATED | {"engine": engine, "report_last": True}
    _, result = finished("fedproto", **settings)
    assert result.data["best_round"] < result.data["rounds"]
    last = result.data["last_round"]
    at_the_end = VALIDATED | {"engine": engine, "eval_every": result.data["rounds"]}
    _, expected = finished("fedproto", **at_the_end)
    assert last["accuracy"] == expected.data["accuracy"]
    for mine, theirs in zip(last["clients"], expected.clients, strict=True):
        assert mine["accuracy"] == theirs["accuracy"]
        assert mine["metrics"] == theirs["metrics"]
    _, plain = finished("fedproto", **VALIDATED | {"engine": engine})
    assert plain.data["accuracy"] == result.data["accuracy"]
    assert "last_round" not in plain.data


@pytest.mark.parametrize("step", [*range(22, 38)])
def test_a_run_killed_at_its_end_still_reports_its_last_round(tmp_path, step):
    settings = STORED | {"report_last": True}
    folder, run = begin(tmp_path / "whole", settings)
    expected = run.execute(folder).data["last_round"]
    folder, run = begin(tmp_path / "run", settings)
    with pytest.MonkeyPatch.context() as patch:
        die_at_step(patch, step)
        with contextlib.suppress(Killed):
            run.execute(folder)
    assert resume(tmp_path / "run")["result.json"]["last_round"] == expected
    assert not (tmp_path / "run/last-round.json").exists()


def test_other_accuracies_may_choose():
    by_head = finished("fedproto", **VALIDATED, select_by="head_own")[1]
    scores = [line["validation"]["head_own"]["mean"] for line in by_head.metrics]
    assert by_head.data["best_round"] == 1 + int(np.argmax(scores))
    assert finished("fedavg", **VALIDATED)[1].data["validation"]["select_by"] == "head"


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_a_metric_may_choose(engine):
    settings = VALIDATED | {"select_by": "balanced_accuracy", "engine": engine}
    run, result = finished("fedproto", **settings)
    scores = [line["validation"]["balanced_accuracy"]["mean"] for line in result.metrics]
    assert result.data["best_round"] == 1 + int(np.argmax(scores))
    assert result.data["validation"]["score"] == max(scores)
    (measured,) = run.engine.measure([run.progress.server], "validation")
    by_hand = [client.ways["prototype"].values["balanced_accuracy"] for client in measured.values()]
    assert np.mean(by_hand) == pytest.approx(max(scores))


@pytest.mark.parametrize("patience", [1, 2])
def test_patience_ends_a_run(patience):
    _, patiently = finished("fedproto", **VALIDATED | {"rounds": 12})
    _, result = finished("fedproto", **VALIDATED | {"rounds": 12}, patience=patience)
    scores = [line["validation"]["prototype"]["mean"] for line in patiently.metrics]
    best = 0
    while best + patience < len(scores):
        later = scores[best + 1 : best + 1 + patience]
        if max(later) <= scores[best]:
            break
        best += 1 + int(np.argmax(np.array(later) > scores[best]))
    last = best + 1 + patience
    assert result.data["best_round"] == best + 1
    assert result.data["stopped_round"] == result.data["rounds"] == last < 12
    assert len(result.metrics) == last
    assert result.metrics[-1]["validation"] == patiently.metrics[last - 1]["validation"]


# --- engines


@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg", "fedper", "local"])
def test_engines_agree_on_validation(algorithm):
    assert_engines_agree(algorithm, **VALIDATED, patience=2)


def test_processes_agree_with_the_reference_engine():
    alone = finished("fedproto", **VALIDATED, patience=2)[1]
    shared = finished("fedproto", **VALIDATED, patience=2, engine="processes", workers=2)[1]
    assert shared.data["best_round"] == alone.data["best_round"]
    for line, other in zip(shared.metrics, alone.metrics, strict=True):
        assert line["validation"] == other["validation"]
    for client, other in zip(shared.clients, alone.clients, strict=True):
        assert client["accuracy"] == other["accuracy"]


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_federations_that_are_trained_together_stop_alone(engine):
    settings = SETTINGS | VALIDATED | {"rounds": 10, "patience": 1, "engine": engine}
    configs = [configure(settings | {"seed": seed})[0] for seed in range(3)]
    together = Experiment.prepare_together(configs)
    results = execute(together, [None] * 3)
    stops = set()
    for config, result in zip(configs, results, strict=True):
        alone = Experiment.prepare(config).execute()
        assert alone.data["stopped_round"] == result.data["stopped_round"]
        assert alone.data["best_round"] == result.data["best_round"]
        assert alone.clients[0]["accuracy"] == result.clients[0]["accuracy"]
        assert len(result.metrics) == result.data["rounds"]
        stops.add(result.data["stopped_round"])
    assert len(stops) > 1  # or the test shows nothing


# --- folders


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A finished run with a copy of its folder after every round."""
    path = tmp_path_factory.mktemp("validated") / "run"
    return path, run_with_copies(path, STORED)


def test_a_run_folder_holds_the_best_round(stored):
    path, _ = stored
    result = json.loads((path / "result.json").read_text())
    assert result["best_round"] < result["stopped_round"] == 6
    index = json.loads((path / "models" / "index.json").read_text())
    assert index["round"] == result["best_round"]
    assert not (path / "best").exists()
    _, expected = finished("fedproto", **VALIDATED)
    assert result["clients"][1]["accuracy"] == expected.clients[1]["accuracy"]


@pytest.mark.parametrize("round", range(1, 7))
def test_a_run_killed_after_a_round_goes_on_to_the_same_result(stored, tmp_path, round):
    path, copies = stored
    killed = tmp_path / "run"
    shutil.copytree(copies / f"round-{round}", killed)
    resumed = resume(killed)
    expected = left_behind(path)
    assert resumed.keys() == expected.keys()
    for name, content in expected.items():
        assert resumed[name] == content, name


@pytest.mark.parametrize("step", [*range(1, 60, 6)])
def test_a_run_killed_at_any_write_goes_on_to_the_same_result(stored, tmp_path, step):
    expected = left_behind(stored[0])
    path = tmp_path / "run"
    folder, run = begin(path, STORED)
    with pytest.MonkeyPatch.context() as patch:
        die_at_step(patch, step)
        with contextlib.suppress(Killed):
            run.execute(folder)
    resumed = resume(path)
    resumed = {name: value for name, value in resumed.items() if not name.startswith("best/")}
    assert resumed.keys() == expected.keys()
    for name, content in expected.items():
        assert resumed[name] == content, name


def test_at_most_two_states_are_kept(stored):
    _, copies = stored
    for copy in copies.iterdir():
        kept = list((copy / "best").glob("*"))
        assert 1 <= len(kept) <= 2


def test_without_checkpoints_the_best_state_is_kept_in_memory(tmp_path):
    folder, run = begin(tmp_path / "run", STORED | {"checkpoint_every": 0})
    result = run.execute(folder)
    _, expected = finished("fedproto", **VALIDATED)
    assert result.clients[0]["accuracy"] == expected.clients[0]["accuracy"]
    assert not (tmp_path / "run" / "best").exists()


# --- refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"validation": 1}, "validation must be"),
        ({"validation": -0.1}, "validation must be"),
        ({"validation": "some"}, "validation must be"),
        ({"patience": 3}, "no validation rows"),
        ({"select_by": "head"}, "no validation rows"),
        ({"validation": 0.2, "patience": 0}, "patience must be"),
        ({"validation": 0.2, "select_by": "recall"}, "unknown way to select the best round"),
        ({"validation": 0.2, "algorithm": "fedavg", "select_by": "prototype"}, "head"),
        ({"validation": 0.2, "shots": 1, "stdev": 0, "ways": 3}, "no client has a class with two"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(settings, words):
    with pytest.raises((ConfigError, DataError)) as caught:
        finished(settings.pop("algorithm", "fedproto"), **settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_best_state_is_refused(stored, tmp_path):
    _, copies = stored
    killed = tmp_path / "run"
    shutil.copytree(copies / "round-6", killed)
    shutil.rmtree(killed / "best")
    result = fedproto("resume", killed)
    assert result.code != 0
    assert "best" in result.err and "starts from round 1" in result.err


# --- what a user reads


def test_the_terminal_says_which_number_is_which(tmp_path):
    flags = "--dataset digits --clients 3 --rounds 4 --eval-every 1 --validation 0.3 --patience 3"
    result = fedproto("run", *flags.split(), "--select-by", "head", "--out", tmp_path / "run")
    assert result.code == 0, result.err
    assert "validation accuracy by head" in result.out
    assert "was chosen by head on validation rows" in result.out
    assert "on test rows, which were looked at once" in result.out


def test_the_report_says_which_number_is_which(stored, tmp_path):
    path, _ = stored
    result = fedproto("report", path, "--out", tmp_path / "report.html")
    assert result.code == 0, result.err
    page = (tmp_path / "report.html").read_text()
    assert "on test rows after the best round" in page
    assert "was chosen by prototype on validation rows" in page
    assert "on validation rows in runs that have some" in page


def test_a_sweep_is_ranked_by_validation(tmp_path):
    settings = {key: value for key, value in STORED.items() if key != "lr"}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    text = "\n".join([*lines, "[sweep]", "lr = [0.0001, 0.05]", ""])
    (tmp_path / "sweep.toml").write_text(text)
    result = fedproto("sweep", tmp_path / "sweep.toml", "--out", tmp_path / "runs")
    assert result.code == 0, result.err
    assert "ranked by accuracy on validation rows" in result.out
    rows = [line.split() for line in result.out.splitlines() if line.strip().startswith("0.")]
    assert [row[0] for row in rows] == ["0.05", "0.0001"]  # not the order of the file
    scores = [float(row[1]) for row in rows]
    assert scores == sorted(scores, reverse=True)


def test_results_without_validation_are_not_ranked():
    def scored(score):
        return {"validation": {"score": score}}

    assert rank_by_validation([scored(0.1), None, scored(0.5), scored(0.1)]) == [2, 0, 3, 1]
    assert rank_by_validation([scored(0.1), {}]) is None
    assert rank_by_validation([None]) is None


def test_tracking_has_the_validation_accuracies():
    _, result = finished("fedproto", **VALIDATED)
    numbers = scalars(result)
    assert numbers["final/best_round"] == result.data["best_round"]
    assert numbers["final/validation/prototype"] == result.data["validation"]["score"]
