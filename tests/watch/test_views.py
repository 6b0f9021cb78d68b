"""What a page is told agrees with the run's files, also of runs in progress and hostile files."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.reports import read_metrics, read_result
from hypothesis import given
from hypothesis import strategies as st

from fedproto.core.files import read_tensors, seal
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import PROTOTYPES_FORMAT
from fedproto.runs.stored_clients import ClientModels
from fedproto.watch.collection import Collection
from fedproto.watch.discovery import Place
from fedproto.watch.numbers import to_number
from fedproto.watch.run_view import RunView
from fedproto.watch.series import Series


def view_of(folder: Path) -> RunView:
    view = RunView(Place("id", folder.name, folder))
    view.refresh()
    return view


def describe(folder: Path) -> dict[str, Any]:
    """What a page is told; it must be JSON without NaN."""
    described = view_of(folder).describe()
    json.dumps(described, allow_nan=False)
    return described


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "fedproto", tmp_path / "run"))


def unfinish(run: Path, rounds: int) -> None:
    """Make a finished run look like one that goes on after some rounds."""
    (run / "result.json").unlink()
    RunFolder(run).keep_metrics(rounds)


# --- a finished run


def test_a_finished_run_is_told_as_its_result_has_it(run: Path) -> None:
    result = read_result(run)
    told = describe(run)
    assert told["state"] == "finished"
    assert (told["method"], told["dataset"], told["seed"]) == ("fedproto", "digits", 0)
    assert told["rounds_done"] == told["rounds_planned"] == 3
    assert told["classes"] == result["classes"]
    assert told["partition"] == result["partition"]
    for way, spread in result["accuracy"].items():
        assert told["accuracy"][way]["mean"] == pytest.approx(spread["mean"], rel=1e-5)
    for client, stored in zip(told["clients"], result["clients"], strict=True):
        assert client["rows"] == stored["images"]
        assert client["train"] == stored["train"]
        recall = stored["metrics"]["prototype"]["sensitivity"]
        assert client["recall"]["prototype"] == pytest.approx(recall, rel=1e-5)
    assert told["bytes_up"] == result["communication"]["bytes_up"]


def test_curves_are_the_lines_of_the_metrics(run: Path) -> None:
    lines = read_metrics(run)
    series = describe(run)["series"]
    assert series["rounds"] == [line["round"] for line in lines]
    means = [line["accuracy"]["prototype"]["mean"] for line in lines]
    assert series["columns"]["accuracy/prototype/mean"] == pytest.approx(means, rel=1e-5)
    losses = [line["loss"]["supervised"] for line in lines]
    assert series["columns"]["loss/supervised/mean"] == pytest.approx(losses, rel=1e-5)


def test_a_clients_confusion_matrix_is_what_its_model_predicts(run: Path) -> None:
    """Counted again from what `fedproto predict` reads of the client."""
    told = view_of(run).describe_client(1)
    assert told is not None
    held_out = ClientModels.open(RunFolder(run)).read(1).held_out
    rows = held_out.known
    labels = held_out.known_labels
    matrix = np.zeros((10, 10), int)
    np.add.at(matrix, (labels.numpy(), rows.logits.argmax(1).numpy()), 1)
    assert told["confusion"]["rows"] == len(labels)
    assert told["confusion"]["ways"]["head"] == matrix.tolist()
    stored, _ = read_tensors(run / "prototypes.safetensors", PROTOTYPES_FORMAT)
    distances = torch.cdist(rows.features.double(), stored["prototypes"].double())
    distances[:, stored["known"] == 0] = math.inf
    nearest = distances.argmin(1).numpy()
    assert np.trace(told["confusion"]["ways"]["prototype"]) == (nearest == labels.numpy()).sum()


def test_distances_to_the_global_prototypes_are_euclidean(run: Path) -> None:
    stored, _ = read_tensors(run / "prototypes.safetensors", PROTOTYPES_FORMAT)
    told = view_of(run).describe_client(0)
    assert told is not None
    classes = read_result(run)["classes"]
    for row in told["prototypes"]:
        label = classes.index(row["class"])
        difference = stored["local"][0, label] - stored["prototypes"][label]
        assert row["distance"] == pytest.approx(float(difference.norm()), rel=1e-4)
    assert [row["class"] for row in told["prototypes"]] == read_result(run)["clients"][0]["classes"]


def test_the_map_keeps_the_distances_of_a_plane(tmp_path: Path) -> None:
    """Points in a plane of many dimensions are projected without loss."""
    from fedproto.watch.prototype_map import _find_axes

    generator = np.random.default_rng(0)
    plane = np.linalg.qr(generator.normal(size=(7, 2)))[0]
    points = generator.normal(size=(5, 2)) @ plane.T
    centre, axes, share = _find_axes(points)
    places = (points - centre) @ axes
    before = np.linalg.norm(points[:, None] - points, axis=-1)
    after = np.linalg.norm(places[:, None] - places, axis=-1)
    assert after == pytest.approx(before)
    assert share.sum() == pytest.approx(1)


# --- a run in progress


def test_a_run_in_progress_shows_what_is_known(run: Path) -> None:
    unfinish(run, 2)
    told = describe(run)
    assert told["state"] == "stopped"
    assert (told["rounds_done"], told["rounds_planned"]) == (2, 3)
    assert [client["train"] for client in told["clients"]] == [
        client["train"] for client in describe(run)["clients"]
    ]
    assert all(client["last_round"] == 2 for client in told["clients"])
    assert not any(client["accuracy"] for client in told["clients"])
    details = view_of(run).describe_client(0)
    assert details is not None and details["client"]["recall"] == {}


def test_a_run_that_is_written_to_is_running_and_has_an_estimate(run: Path) -> None:
    unfinish(run, 2)
    view = view_of(run)
    with RunFolder(run).hold():
        view.refresh()
        told = view.summarise()
    assert told["state"] == "running"
    seconds = [line["seconds"] for line in read_metrics(run)]
    assert told["seconds_left"] == pytest.approx(sum(seconds) / 2, rel=1e-4)
    view.refresh()
    assert view.summarise()["state"] == "stopped"


def test_a_run_whose_process_is_gone_is_stopped(run: Path) -> None:
    import socket

    unfinish(run, 2)
    (run / ".lock-holder").write_text(f"process 99999999 on {socket.gethostname()} since 1")
    assert view_of(run).state == "stopped"


def test_lines_that_are_added_are_read_once_they_are_whole(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(lines[0])
    series = Series(run, "run")
    assert series.refresh() and series.rounds == [1]
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(lines[1][:50])
        file.flush()
        assert not series.refresh() and series.rounds == [1]
        file.write(lines[1][50:])
    assert series.refresh() and series.rounds == [1, 2]
    assert series.problems == []
    assert series.after(1)["rounds"] == [2]
    assert not series.refresh()


def test_a_file_that_was_replaced_is_read_anew(run: Path) -> None:
    series = Series(run, "run")
    series.refresh()
    assert (series.rounds, series.epoch) == ([1, 2, 3], 0)
    RunFolder(run).keep_metrics(1)
    assert series.refresh()
    assert (series.rounds, series.epoch) == ([1], 1)


def test_prototypes_of_a_run_in_progress_come_from_its_checkpoint(run: Path) -> None:
    """Its classes are told by what clients have uploaded, since the order is not written yet."""
    finished = describe(run)
    unfinish(run, 3)
    (run / "prototypes.safetensors").unlink()
    told = describe(run)
    known = {name for client in told["clients"] for name in client["classes"]}
    for (label, *place), (_, *expected) in zip(
        told["map"]["steps"][0]["points"], finished["map"]["steps"][0]["points"], strict=True
    ):
        assert place == pytest.approx(expected, rel=1e-3, abs=1e-4)
        if finished["classes"][label] in known:
            assert told["map"]["names"][label] == finished["classes"][label]
    assert told["map"]["local"]


def test_the_folder_is_searched_for_new_runs(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedproto.watch.collection.SEARCH_SECONDS", 0.0)
    shutil.copytree(runs / "local", tmp_path / "first")
    collection = Collection(tmp_path)
    collection.open()
    assert [run["name"] for run in collection.list()] == ["first"]
    shutil.copytree(runs / "local", tmp_path / "second")
    assert [run["name"] for run in collection.list()] == ["first", "second"]
    shutil.rmtree(tmp_path / "first")
    assert [run["name"] for run in collection.list()] == ["second"]


# --- files from anybody


@pytest.mark.parametrize(
    "name", ["config.toml", "partition.json", "result.json", "metrics.jsonl", "diverged.json"]
)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"version": 1}',
        b"null\n",
        b'{"round": NaN, "version": 1, "checksum": "0"}\n',
        b"version = 1\n[algorithm]\nname = 3",
    ],
    ids=["empty", "binary", "deep", "lacking", "null", "nan", "toml"],
)
def test_a_damaged_file_becomes_a_sentence(run: Path, name: str, content: bytes) -> None:
    (run / name).write_bytes(content)
    told = describe(run)
    assert all(run.as_posix() not in sentence for sentence in told["problems"])
    is_silent = content == b"" and name in ("metrics.jsonl", "partition.json", "diverged.json")
    assert told["problems"] or is_silent or name == "metrics.jsonl"
    view_of(run).describe_client(0)


def test_a_damaged_line_is_named_and_the_others_are_shown(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"supervised", b"supervise!")
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    told = describe(run)
    assert told["series"]["rounds"] == [1, 3]
    (problem,) = told["problems"]
    assert problem.startswith("run/metrics.jsonl, line 2, is corrupted")


@pytest.mark.parametrize("name", ["prototypes.safetensors", "models/index.json"])
def test_damaged_tensors_and_models_become_a_sentence(run: Path, name: str) -> None:
    (run / name).write_bytes(b"\x00" * 64)
    described = view_of(run).describe_client(0)
    assert described is not None
    problems = [*describe(run)["problems"], described["problem"]]
    assert any(problem for problem in problems)


def test_links_inside_a_run_are_not_followed(run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("result.json", "metrics.jsonl", "prototypes.safetensors"):
        shutil.move(run / name, outside / name)
        (run / name).symlink_to(outside / name)
    shutil.move(run / "models", outside / "models")
    (run / "models").symlink_to(outside / "models")
    shutil.move(run / "checkpoint", outside / "checkpoint")
    (run / "checkpoint").symlink_to(outside / "checkpoint")
    told = describe(run)
    assert told["state"] == "stopped"
    assert told["series"]["rounds"] == []
    assert told["map"] is None
    details = view_of(run).describe_client(0)
    assert details is not None and details["confusion"] is None


def test_a_result_with_odd_entries_is_still_json(run: Path) -> None:
    result = read_result(run)
    result["metrics"]["head"]["confusion"] = [[1, -1], ["x"]]
    result["metrics"]["prototype"] = "nothing"
    result["clients"][0]["metrics"] = {"head": {"sensitivity": {"1": math.nan, "4": "x"}}}
    result["clients"][1]["train"] = 10**400
    result["baselines"] = {"local": {"clients": "all"}, "pooled": None}
    result["accuracy"]["head"]["mean"] = math.inf
    RunFolder(run).write_json("result.json", result)
    told = describe(run)
    assert told["metrics"]["ways"]["head"]["confusion"] is None
    assert told["clients"][0]["recall"]["head"] == {"1": None, "4": None}
    assert told["clients"][1]["train"] is None
    assert told["accuracy"]["head"]["mean"] is None


def test_odd_lines_of_metrics_are_still_json(run: Path) -> None:
    line = read_metrics(run)[0]
    line["participants"] = ["x", -1, 2**70, 2]
    line["notes"] = "not a list"
    line["server"] = {"epsilon": math.inf, "name": "text", "fine": 1.5}
    line["loss_std"] = {}
    line["loss"]["supervised"] = math.nan
    text = json.dumps(seal(line, 1))
    (run / "metrics.jsonl").write_text(text + "\n")
    columns = describe(run)["series"]["columns"]
    assert columns["server/fine"] == [1.5]
    assert columns["server/epsilon"] == columns["server/name"] == [None]
    assert columns["loss/supervised/mean"] == [None]
    assert columns["participants"] == [1]


@given(st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.booleans()))
def test_numbers_are_finite_or_missing(value: Any) -> None:
    found = to_number(value)
    json.dumps(found, allow_nan=False)
    if isinstance(value, float) and math.isfinite(value):
        assert found == pytest.approx(value, rel=1e-5, abs=1e-300)
