"""What run folders hold for a report, how they are read and grouped, and which are refused."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.command_line import fedproto
from helpers.deployment import state_after_a_round
from helpers.reports import RUN, make_run, read_frozen, read_result, read_table, refuse
from helpers.uploads import prototype_upload
from safetensors import safe_open

import fedproto as package
from fedproto.core.uploads import LatestUploads
from fedproto.report.groups import group_runs
from fedproto.report.read import read_runs
from fedproto.report.summary import make_table
from fedproto.runs.folder import RunFolder

# --- what runs write


def test_metrics_have_the_deviation_of_each_loss_over_clients() -> None:
    (line,) = package.run(**(RUN | {"rounds": 1, "clients": 1})).metrics
    assert line["loss_std"] == {"supervised": 0, "regulariser": 0}
    *_, line = package.run(**RUN).metrics
    assert set(line["loss_std"]) == set(line["loss"])
    assert line["loss_std"]["supervised"] > 0


def test_the_last_local_prototypes_are_stored_beside_the_global_ones(runs: Path) -> None:
    with safe_open(runs / "fedproto-0" / "prototypes.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    held = stored["held"]
    for row, client in zip(held, read_result(runs / "fedproto-0")["clients"], strict=True):
        assert row[row > 0].tolist() == client["images"]
    assert not stored["local"][held == 0].any()
    sums = (stored["local"] * held[..., None]).sum(0)
    means = sums / held.sum(0).clamp(min=1)[:, None]
    known = stored["known"] > 0
    assert torch.allclose(means[known], stored["prototypes"][known])


def test_a_result_has_the_prototypes_of_the_server_only() -> None:
    assert set(package.run(**RUN).prototypes) == {"prototypes", "known"}


def test_too_many_local_prototypes_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    latest = LatestUploads(2)
    upload = prototype_upload(torch.ones(1, 3, 4), torch.tensor([[2.0, 0, 1]]))
    assert latest.local_prototypes() == {}
    latest.store(torch.tensor([1]), upload, round=1)
    found = latest.local_prototypes()
    assert found["held"].tolist() == [[0, 0, 0], [2, 0, 1]]
    assert found["local"][1, :, 0].tolist() == [0.5, 0, 1]
    assert torch.isfinite(found["local"]).all()
    monkeypatch.setattr("fedproto.core.uploads.LARGEST_LOCAL_VALUES", 23)
    assert latest.local_prototypes() == {}


def test_a_client_records_its_images_of_each_class(runs: Path) -> None:
    for client in read_result(runs / "local")["clients"]:
        assert len(client["images"]) == len(client["classes"])
        assert sum(client["images"]) == client["train"]
        assert min(client["images"]) > 0


# --- grouping


def label_runs(*paths: Path) -> list[str]:
    found = read_runs(paths)
    return [group.label for group in group_runs(found)]


def test_a_run_that_is_named_twice_is_shown_once(runs: Path) -> None:
    local = runs / "local"
    assert label_runs(local, local, runs / "fedavg" / ".." / "local") == ["local"]


def test_a_copy_of_a_run_is_labelled_by_its_folder(runs: Path, tmp_path: Path) -> None:
    original = runs / "local"
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    assert label_runs(original, copy) == ["local, local", "local, copy"]


def test_runs_of_one_method_are_labelled_by_their_differences(runs: Path, other_run: Path) -> None:
    labels = label_runs(runs / "fedproto-0", other_run)
    assert labels == ["fedproto, lam=1.0, ways=3", "fedproto, lam=0.5, ways=2"]


# --- refused


@pytest.fixture
def damaged(runs: Path, tmp_path: Path) -> Path:
    """A copy of a run, to be damaged."""
    return Path(shutil.copytree(runs / "fedproto-0", tmp_path / "runs" / "damaged"))


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    assert "is not a run" in refuse(tmp_path)
    assert "does not exist" in refuse(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "is not a folder" in refuse(tmp_path / "file")


def test_an_unfinished_run_is_shown_as_far_as_it_is(damaged: Path, tmp_path: Path) -> None:
    (damaged / "result.json").unlink()
    answer = fedproto("report", damaged, "--out", tmp_path / "out")
    assert answer.code == 0
    assert f"`fedproto resume {damaged}` finishes it" in answer.out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Nothing here has finished yet" in page
    assert "damaged has not finished its rounds: the page shows how far it is" in page
    assert '"state":"stopped"' in page
    assert str(tmp_path) not in page


@pytest.mark.usefixtures("one_figure")
def test_an_unfinished_run_among_others_is_on_the_page_only(damaged: Path, runs: Path) -> None:
    (damaged / "result.json").unlink()
    shutil.copytree(runs / "local", damaged.parent / "local")
    answer = fedproto("report", damaged.parent)
    assert answer.code == 0
    assert f"`fedproto resume {damaged}`" in answer.out
    page = damaged.parent / "report.html"
    assert list(read_table(page)) == ["local"]
    assert [run["name"] for run in read_frozen(page)["runs"]] == ["local", "damaged"]


def test_the_folder_of_a_deployed_server_is_shown(tmp_path: Path) -> None:
    state_after_a_round(tmp_path / "federation" / "server")
    answer = fedproto("report", tmp_path / "federation", "--out", tmp_path / "out")
    assert answer.code == 0
    (run,) = read_frozen(tmp_path / "out" / "report.html")["runs"]
    assert (run["kind"], run["rounds_done"]) == ("deployed", 1)
    assert [client["name"] for client in run["clients"]] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "name", ["result.json", "metrics.jsonl", "config.toml", "prototypes.safetensors"]
)
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[]\n", b'{"clients": [1]}\n'])
def test_a_damaged_file_is_named(damaged: Path, name: str, content: bytes) -> None:
    (damaged / name).write_bytes(content)
    line = refuse(damaged)
    assert name in line
    reasons = ("damaged", "is corrupted", "(or is corrupted)", "states no version")
    assert any(reason in line for reason in reasons)
    assert not (damaged / "report.html").exists()


def test_metrics_without_their_last_round_are_refused(damaged: Path) -> None:
    lines = (damaged / "metrics.jsonl").read_text().splitlines(keepends=True)
    (damaged / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert "does not have a line for each of the run's rounds" in refuse(damaged)


def test_a_result_without_a_key_is_refused(damaged: Path) -> None:
    result = read_result(damaged)
    del result["seconds"]
    RunFolder(damaged).write_json("result.json", result)
    assert "result.json is damaged: it lacks 'seconds'" in refuse(damaged)


def test_asynchronous_rounds_have_a_simulated_time_in_the_table(runs: Path, tmp_path: Path) -> None:
    late = make_run(tmp_path / "late", algorithm="fedavg", buffer=1, speed_spread=1.0)
    found = read_runs([runs / "local", late])
    table = make_table(group_runs(found))
    assert table.header[-1] == "simulated time"
    assert table.rows[0][-1].text == "–"
    stated = read_result(late)["asynchronous"]
    assert table.rows[1][-1].text == f"{stated['clock']:.1f}"
    assert table.rows[1][-1].detail == f"staleness {stated['staleness']:.1f}"
    synchronous = read_runs([runs / "local"])
    assert "simulated time" not in make_table(group_runs(synchronous)).header


def test_a_damaged_statement_about_asynchronous_rounds_is_refused(damaged: Path) -> None:
    result = read_result(damaged) | {"asynchronous": {"clock": 3}}
    RunFolder(damaged).write_json("result.json", result)
    assert "'asynchronous' must be clock and staleness" in refuse(damaged)
