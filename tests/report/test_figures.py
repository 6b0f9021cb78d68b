"""The figures of a report: their numbers are those of the run folders, and they show something."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.reports import (
    draw_section,
    make_run,
    parse_numbers,
    read_metrics,
    read_numbers,
    read_result,
)
from helpers.uploads import prototype_upload
from PIL import Image

from fedproto.membership.contribution import Contribution
from fedproto.membership.membership import Membership
from fedproto.report import write
from fedproto.report.figures.classes import draw_classes
from fedproto.report.figures.clients import draw_clients
from fedproto.report.figures.curves import draw_curves
from fedproto.report.figures.members import draw_member_changes
from fedproto.report.figures.traffic import draw_traffic
from fedproto.runs.folder import RunFolder


def test_every_figure_shows_something(page: Path) -> None:
    files = list((page.parent / "report-figures").glob("*.png"))
    assert files
    for file in files:
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("L"))
        assert pixels.max() == 255
        assert 0.001 < (pixels < 200).mean() < 0.9


def test_the_same_run_gives_the_same_report(runs: Path, single_page: Path, tmp_path: Path) -> None:
    again = write([runs / "fedproto-0"], tmp_path / "one.html")
    assert again.read_bytes() == single_page.read_bytes()
    for file in (single_page.parent / "one-figures").iterdir():
        assert (tmp_path / "one-figures" / file.name).read_bytes() == file.read_bytes()


# --- curves


def select(page: Path, figure: str, **values: str) -> list[dict[str, str]]:
    """The numbers of a figure that have these values."""
    rows = read_numbers(page, figure)
    return [row for row in rows if values.items() <= row.items()]


def test_an_accuracy_curve_has_the_numbers_of_the_metrics(runs: Path, page: Path) -> None:
    rows = select(page, "accuracy", run="fedproto", seed="1", accuracy="head")
    for row, line in zip(rows, read_metrics(runs / "fedproto-1"), strict=True):
        assert int(row["round"]) == line["round"]
        assert float(row["mean"]) == line["accuracy"]["head"]["mean"]
        assert float(row["std"]) == line["accuracy"]["head"]["std"]


def test_a_loss_curve_has_the_numbers_of_the_metrics(runs: Path, page: Path) -> None:
    rows = select(page, "loss-supervised", run="fedproto", seed="1", loss="supervised")
    for row, line in zip(rows, read_metrics(runs / "fedproto-1"), strict=True):
        assert int(row["round"]) == line["round"]
        assert float(row["mean"]) == line["loss"]["supervised"]
        assert float(row["std"]) == line["loss_std"]["supervised"]


def test_the_mean_over_seeds_is_a_curve_too(runs: Path, page: Path) -> None:
    rows = select(page, "accuracy", seed="mean", accuracy="prototype")
    curves = []
    for seed in (0, 1):
        lines = read_metrics(runs / f"fedproto-{seed}")
        curves.append([line["accuracy"]["prototype"]["mean"] for line in lines])
    means = np.mean(curves, axis=0)
    assert [float(row["mean"]) for row in rows] == pytest.approx(means.tolist(), rel=1e-15)


# --- clients and classes


def test_the_clients_numbers_are_those_of_the_result(runs: Path, page: Path) -> None:
    rows = select(page, "clients-3", seed="1")
    for row, client in zip(rows, read_result(runs / "fedproto-1")["clients"], strict=True):
        assert int(row["client"]) == client["id"]
        assert row["model"] == client["model"]
        assert int(row["classes"]) == len(client["classes"])
        accuracy = {name: float(row[name]) for name in client["accuracy"]}
        assert accuracy == client["accuracy"]


def test_many_clients_are_ranked_and_not_named(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", algorithm="local", clients=50, rounds=1, shots=2, stdev=0, test_shots=2
    )
    ranking = draw_section(draw_clients, run)
    assert "from best to worst" in ranking.notes[0]
    assert len(parse_numbers(ranking.figures[0])) == 50
    (counts,) = draw_section(draw_classes, run).figures
    assert len(parse_numbers(counts)) == 50
    for figure in (ranking.figures[0], counts):
        assert figure.height < 700  # 50 rows of the usual height would be twice as high


def test_the_map_of_classes_counts_training_images(runs: Path, page: Path) -> None:
    rows = read_numbers(page, "classes-1")
    for row, client in zip(rows, read_result(runs / "local")["clients"], strict=True):
        assert int(row.pop("client")) == client["id"]
        images = {name: int(count) for name, count in row.items() if int(count)}
        assert images == dict(zip(client["classes"], client["images"], strict=True))


def test_each_partition_has_its_own_map(runs: Path, other_run: Path) -> None:
    section = draw_section(draw_classes, runs / "fedproto-0", other_run)
    assert [figure.name for figure in section.figures] == ["classes-1", "classes-2"]


def test_an_older_run_is_drawn_without_what_it_did_not_record(runs: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "old")
    run.path.mkdir()
    for name in ("config.toml", "partition.json"):
        shutil.copy(runs / "fedavg" / name, run.path)
    result = read_result(runs / "fedavg")
    for client in result["clients"]:
        del client["images"]
    run.write_json("result.json", result)
    for line in read_metrics(runs / "fedavg"):
        del line["loss_std"]
        run.add_metrics(line)
    (counts,) = draw_section(draw_classes, run.path).figures
    assert counts.caption == "Filled: the client has training rows of the class."
    *_, loss = draw_section(draw_curves, run.path).figures
    assert loss.name == "loss-supervised"
    assert "bands" not in loss.caption
    assert parse_numbers(loss)[0]["std"] == ""


# --- prototypes


def test_the_map_of_prototypes_has_all_of_them(runs: Path, single_page: Path) -> None:
    rows = read_numbers(single_page, "prototypes-1")
    held_classes: list[str] = []
    for client in read_result(runs / "fedproto-0")["clients"]:
        held_classes += client["classes"]
    local_rows = [row for row in rows if row["client"] != "global"]
    global_rows = [row for row in rows if row["client"] == "global"]
    assert len(local_rows) == len(held_classes)
    assert {row["class"] for row in global_rows} == set(held_classes)
    assert re.search("by (t-SNE|PCA)", single_page.read_text())


def test_prototypes_before_and_after_members_joined_and_left(runs: Path, tmp_path: Path) -> None:
    run = RunFolder(Path(shutil.copytree(runs / "fedproto-0", tmp_path / "run")))
    membership = Membership.of(run).without("0")
    width = membership.upload_of("1")["prototypes"].sums["prototypes"].shape[1]
    upload = prototype_upload(torch.ones(1, width, dtype=torch.float64), torch.ones(1))
    newcomer = Contribution("newcomer", ("another class",), upload)
    membership.with_member(newcomer).save(run)

    (figure,) = draw_section(draw_member_changes, run.path).figures
    assert figure.caption.startswith("0 left")
    assert "newcomer joined, with another class." in figure.caption
    rows = {row["class"]: row for row in parse_numbers(figure)}
    assert rows["another class"]["x before"] == ""
    assert float(rows["another class"]["x now"])
    left_classes = read_result(run.path)["clients"][0]["classes"]
    other_classes = set()
    for client in read_result(run.path)["clients"][1:]:
        other_classes |= set(client["classes"])
    for name in left_classes:
        assert (rows[name]["x now"] == "") == (name not in other_classes)
    unchanged = other_classes - set(left_classes)
    assert unchanged
    for name in unchanged:
        assert float(rows[name]["moved by, in all dimensions"]) == pytest.approx(0, abs=1e-12)


@pytest.mark.filterwarnings("error")
def test_the_smallest_possible_run_can_be_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", algorithm="fedproto", clients=1, rounds=1, ways=1, stdev=0)
    text = write([run]).read_text()
    figures = {path.stem for path in (run / "report-figures").iterdir()}
    assert {"clients-1", "classes-1", "accuracy"} <= figures
    assert "too few or too alike for a map" in text or "by PCA" in text


# --- traffic


def test_bytes_add_up_over_the_rounds(runs: Path, single_page: Path) -> None:
    rows = select(single_page, "traffic", accuracy="head")
    totals = np.cumsum([line["bytes_up"] for line in read_metrics(runs / "fedproto-0")])
    assert [float(row["bytes_up"]) for row in rows] == totals.tolist()
    assert totals[-1] == read_result(runs / "fedproto-0")["communication"]["bytes_up"]


def test_different_tasks_have_no_pareto_front(runs: Path, other_run: Path) -> None:
    section = draw_section(draw_traffic, runs / "fedproto-0", other_run)
    assert section.notes == ["The runs are of different tasks, so they share no Pareto front."]
    assert "Pareto" not in section.figures[0].caption


def test_the_pareto_front_is_named_if_runs_are_compared(page: Path, single_page: Path) -> None:
    on_front = {row["run"] for row in select(page, "traffic", on_front="True")}
    pattern = "On the Pareto front, the cheapest first: (.*?)</p>"
    (named,) = re.findall(pattern, page.read_text())
    assert "local" in on_front
    assert all(name in named for name in on_front)
    assert "Pareto" not in single_page.read_text()
