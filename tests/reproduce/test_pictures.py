"""The figures of `fedproto reproduce` show the numbers of the JSON, and measures that are right."""

import csv
import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from fedproto.errors import MissingExtra
from fedproto.reproduce import make
from fedproto.reproduce.pictures import draw
from fedproto.reproduce.pictures.embedding_measures import measure_embeddings
from fedproto.reproduce.pictures.embeddings import first_run_folder
from fedproto.reproduce.pictures.methods import draw as draw_methods
from fedproto.reproduce.pictures.methods import draw_overview, make_rows
from fedproto.reproduce.pictures.panels import limit_accuracies
from fedproto.reproduce.pictures.placement import cluster, spread_out
from fedproto.reproduce.plan import Request, plan, read_spec
from fedproto.reproduce.tables import summary

COLUMNS = ("n = 3, stdev 2", "n = 4, stdev 2")


ACCURACIES = ("head", "head_own", "prototype")


def make_cell(
    method: str, column: str, seeds: list[dict[str, Any]], score: str = "head", **more: Any
) -> dict[str, Any]:
    """A cell as `gather` makes it; a seed has the accuracies of clients and other keys of a run."""
    runs = []
    for number, values in enumerate(seeds):
        run: dict[str, Any] = {"seed": number, "accuracy": {}}
        for key, value in values.items():
            if key in ACCURACIES:
                run["accuracy"][key] = value
            else:
                run[key] = value
        runs.append(run)
    accuracy = {}
    for key in runs[0]["accuracy"] if runs else ():
        accuracy[key] = summary([run["accuracy"][key] for run in runs])
    cell = {
        "method": method,
        "column": column,
        "score": score,
        "seeds": list(range(len(runs))),
        "runs": runs,
        "accuracy": accuracy,
        "paper": None,
    }
    return cell | more


def make_target(cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {"title": "A table of two methods, by hand", "cells": cells}


def make_table() -> dict[str, Any]:
    """Local sends nothing, FedAvg gains among own classes, FedProto is cheap.

    A fourth method was run in one of the two columns only, and a fifth has no finished run.
    """
    cells = []
    for place, column in enumerate(COLUMNS):
        paper = {"accuracy": 90 + 2 * place, "params_per_round": 100}
        local_runs = []
        fedavg_runs = []
        for seed in (0, 1):
            local_accuracies = [0.8, 0.9 + 0.01 * seed]
            local_runs.append({"head": local_accuracies, "head_own": local_accuracies})
            fedavg_runs.append({"head": [0.7, 0.8], "head_own": [0.9, 0.98 - 0.01 * seed]})
        fedproto_run = {"head": [0.9, 0.9], "prototype": [0.9, 0.92 + 0.02 * place]}
        fedproto_runs = [fedproto_run, fedproto_run]
        cells += [
            make_cell("Local", column, local_runs, communication=sends(0)),
            make_cell(
                "FedAvg", column, fedavg_runs, communication=sends(4000 + 1000 * place), paper=paper
            ),
            make_cell(
                "FedProto",
                column,
                fedproto_runs,
                "prototype",
                communication=sends(400),
                paper=paper,
            ),
        ]
    incomplete = make_cell(
        "FedProto, batch 8", COLUMNS[0], fedproto_runs, "prototype", communication=sends(1)
    )
    return make_target([*cells, incomplete, make_cell("FedPer", COLUMNS[0], [])])


def sends(bytes_up: int) -> dict[str, int]:
    return {"bytes_up_per_round": bytes_up}


def draw_rows(
    name: str, target: dict[str, Any], out: Path, runs: Path | None = None
) -> list[dict[str, str]]:
    """The rows of the CSV file, after a look at the PNG file beside it."""
    paths = list(draw(name, target, out, runs or out))
    assert [path.name for path in paths if path.suffix != ".json"] == [f"{name}.csv", f"{name}.png"]
    with Image.open(out / f"{name}.png") as image:
        assert image.width == 1600
        pixels = np.asarray(image.convert("L"))
    assert pixels[0, 0] == 255
    assert (pixels < 128).mean() > 0.002, "blank"
    with (out / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# --- a table


TableRows = dict[tuple[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def table_rows(tmp_path_factory: pytest.TempPathFactory) -> TableRows:
    """The rows of a table's figure, by method and accuracy."""
    rows = draw_rows("table-mnist", make_table(), tmp_path_factory.mktemp("table"))
    return {(row["method"], row["accuracy"]): row for row in rows}


def test_a_table_shows_the_means_over_columns_and_what_they_cost(table_rows: TableRows) -> None:
    assert list(table_rows) == [
        ("Local", "head"),
        ("FedAvg", "head"),
        ("FedAvg", "head_own"),
        ("FedProto", "prototype"),
    ]
    cells = make_table()["cells"]
    for (method, accuracy), row in table_rows.items():
        own_cells = [cell for cell in cells if cell["method"] == method]
        means = [cell["accuracy"][accuracy]["mean"] for cell in own_cells]
        assert float(row["mean"]) == pytest.approx(np.mean(means))
    assert float(table_rows["FedProto", "prototype"]["mean"]) == pytest.approx(0.915)
    fedavg = table_rows["FedAvg", "head"]
    assert float(fedavg["bytes_up"]) == 4500
    assert float(fedavg["paper"]) == 0.91
    assert float(fedavg["paper_bytes"]) == 400
    assert table_rows["Local", "head"]["paper"] == ""


def test_a_tables_interval_is_that_of_the_means_over_columns(table_rows: TableRows) -> None:
    # Local: 0.85 and 0.855 by seed, in both columns; t(0.975, 1) = 12.706, standard error 0.0025
    local = table_rows["Local", "head"]
    assert float(local["interval"]) == pytest.approx(12.7062 * 0.0025, rel=1e-4)
    assert float(table_rows["FedProto", "prototype"]["interval"]) == 0


def test_heads_limited_to_own_classes_count_for_the_front(table_rows: TableRows) -> None:
    on_front = [key for key, row in table_rows.items() if row["on_front"] == "True"]
    assert on_front == [("Local", "head"), ("FedAvg", "head_own"), ("FedProto", "prototype")]


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    runs = [{"head": [0.5], "head_own": [0.5]}]
    once = make_cell("FedAvg", "n = 3", runs, communication=sends(10))
    (row,) = draw_rows("table-mnist", make_target([once]), tmp_path)
    assert (row["interval"], row["seeds"]) == ("", "1")


def test_labels_keep_their_order_and_their_distance() -> None:
    assert spread_out([0, 10, 20], 1) == [0, 10, 20]
    assert spread_out([5, 5, 5], 2) == pytest.approx([3, 5, 7])
    assert spread_out([6, 5], 3) == pytest.approx([7, 4])
    assert cluster([5, 1, 2, 9], 1, float) == [[1, 2], [5], [9]]


def test_a_wide_interval_leaves_the_means_their_room() -> None:
    low, high = limit_accuracies([0.9, 0.95], [5.0, 0.0])
    assert 0.85 < low < 0.9
    assert 0.95 < high < 1
    assert limit_accuracies([0.0, 1.0], [0, 0]) == pytest.approx((-0.06, 1.06))
    assert limit_accuracies([0.5], [0.0]) == pytest.approx((0.49, 0.51))


# --- figures


def test_accuracy_against_images_per_class(tmp_path: Path) -> None:
    means = {
        ("FedProto", 5): 0.8,
        ("FedProto", 100): 0.9,
        ("FedAvg", 5): 0.5,
        ("FedAvg", 100): 0.95,
    }
    cells = [
        make_cell(method, f"k = {k}", [{"head": [mean]}, {"head": [mean]}])
        for (method, k), mean in means.items()
    ]
    rows = draw_rows("fig-shots", make_target(cells), tmp_path)
    assert {(row["method"], float(row["k"])): float(row["mean"]) for row in rows} == means
    lost = {(row["method"], float(row["k"])): float(row["lost"]) for row in rows}
    assert lost == pytest.approx(
        {("FedProto", 5): 10, ("FedProto", 100): 0, ("FedAvg", 5): 45, ("FedAvg", 100): 0}
    )


def test_the_distance_is_the_regulariser_over_lambda(tmp_path: Path) -> None:
    run = {"head": [0.5, 0.7], "prototype": [0.9, 0.7]}
    cells = []
    for lam in (0, 0.5, 4):
        seeds = [run | {"loss": {"regulariser": lam * distance}} for distance in (0.2, 0.4)]
        cells.append(make_cell(f"lambda = {lam:g}", "n = 3", seeds))
    rows = draw_rows("fig-lambda", make_target(cells), tmp_path)
    assert [float(row["lambda"]) for row in rows] == [0, 0.5, 4]
    assert rows[0]["distance_mean"] == ""
    assert [float(row["distance_mean"]) for row in rows[1:]] == pytest.approx([0.3, 0.3])
    assert all(float(row["head_mean"]) == pytest.approx(0.6) for row in rows)
    assert all(float(row["prototype_mean"]) == pytest.approx(0.8) for row in rows)


def write_embeddings(path: Path, has_prototypes: bool) -> None:
    """Ten images of each of two classes at each of two clients."""
    rng = np.random.default_rng(1)
    y = np.tile(np.repeat([0, 1], 10), 2)
    x = rng.normal(size=(40, 3)) + 8 * y[:, None]
    arrays: dict[str, Any] = {
        "x": x,
        "y": y,
        "client": np.repeat([0, 1], 20),
        "local": np.array([[0.0] * 3, [8.0] * 3] * 2),
        "local_y": [0, 1, 0, 1],
        "local_client": [0, 0, 1, 1],
    }
    if has_prototypes:
        arrays["prototypes"] = np.array([[0.0] * 3, [8.0] * 3, [9.0] * 3])
        arrays["known"] = [1, 1, 0]
    path.mkdir(parents=True)
    np.savez(path / "embeddings.npz", **arrays)


def test_a_map_of_embeddings_and_its_measures(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    methods = ("FedProto", "FedAvg", "FedPer")
    cells = [make_cell(method, COLUMNS[0], [{"head": [0.5]}]) for method in methods]
    fedproto, fedavg, _ = cells  # FedPer's embeddings were not kept
    write_embeddings(first_run_folder(runs, fedproto), has_prototypes=True)
    write_embeddings(first_run_folder(runs, fedavg), has_prototypes=False)
    rows = draw_rows("fig-tsne", make_target(cells), tmp_path, runs)
    assert Counter((row["method"], row["kind"]) for row in rows) == {
        ("FedProto", "image"): 40,
        ("FedProto", "local"): 4,
        ("FedProto", "global"): 2,
        ("FedAvg", "image"): 40,
        ("FedAvg", "local"): 4,
    }
    found = json.loads((tmp_path / "fig-tsne-measures.json").read_text())["measures"]
    assert set(found) == {"FedProto", "FedAvg"}
    assert found["FedProto"]["silhouette_class"] > 0.7
    assert abs(found["FedProto"]["silhouette_client_within_class"]) < 0.2


def test_the_measures_of_four_points_by_hand() -> None:
    """Class 0 at 0 and 1 (clients 0, 1), class 1 at 10 and 13 (clients 0, 1)."""
    x = np.array([[0.0], [1.0], [10.0], [13.0]])
    y = np.array([0, 0, 1, 1])
    client = np.array([0, 1, 0, 1])
    found = measure_embeddings(x, y, client)
    same_class = (1 + 3) / 2
    other_class = (10 + 13 + 9 + 12) / 4
    assert found["same_class_to_other_class"] == pytest.approx(same_class / other_class)
    silhouettes = [1 - 1 / 11.5, 1 - 1 / 10.5, 1 - 3 / 9.5, 1 - 3 / 12.5]
    assert found["silhouette_class"] == pytest.approx(np.mean(silhouettes))
    assert found["silhouette_client_within_class"] is None  # there is one sample per client


def test_clients_that_lie_apart_within_a_class_are_seen() -> None:
    x = np.array([[0.0], [1.0], [10.0], [11.0], [100.0], [100.0]])
    y = np.array([0, 0, 0, 0, 1, 1])
    client = np.array([0, 0, 1, 1, 0, 0])
    found = measure_embeddings(x, y, client)
    expected = np.mean([1 - 1 / 10.5, 1 - 1 / 9.5])
    assert found["silhouette_client_within_class"] == pytest.approx(expected)


def test_where_nothing_can_be_compared_there_is_no_measure() -> None:
    only_one = np.array([0, 0])
    found = measure_embeddings(np.array([[0.0], [1.0]]), y=only_one, client=only_one)
    assert set(found.values()) == {None}


def test_a_figure_finds_the_folders_that_the_plan_names() -> None:
    for target in ("fig-tsne", "study-options"):
        for planned in plan(read_spec(target, Request(quick=True))):
            cell = {"method": planned.row.name, "column": planned.column, "seeds": [planned.seed]}
            assert first_run_folder(Path("runs"), cell) == Path("runs") / planned.cell.name


# --- studies


def test_a_study_of_what_travels(tmp_path: Path) -> None:
    client = {"id": 0, "with_own": 0.9, "without_own": 0.5, "covered": 1.0}
    other = client | {"with_own": 0.7, "without_own": 0.4, "covered": 0.5}
    runs = [{"head": [0.5], "travel": [client, other]}, {"head": [0.5], "travel": [client, client]}]
    cells = [make_cell("FedProto", COLUMNS[0], runs)]
    rows = draw_rows("study-travel", make_target(cells), tmp_path)
    assert [row["prototypes"] for row in rows] == ["with_own", "without_own"]
    assert [float(row["mean"]) for row in rows] == pytest.approx([0.85, 0.475])
    assert float(rows[0]["interval"]) == pytest.approx(12.7062 * 0.05, rel=1e-4)
    assert float(rows[0]["covered"]) == pytest.approx(0.875)


def test_a_study_of_the_start_does_not_show_the_first_round(tmp_path: Path) -> None:
    start = {"head": {"mean": 0.1, "interval": 0.02}, "prototype_own": {"mean": 0.6}}
    cells = [make_cell("all weights", COLUMNS[0], [{"head": [0.5]}]) | {"before": start}]
    rows = draw_rows("study-before", make_target(cells), tmp_path)
    assert [tuple(row.values()) for row in rows] == [
        ("all weights", "head", "0.1", "0.02"),
        ("all weights", "prototype, own classes", "0.6", ""),
    ]


def test_other_studies_are_rows_of_dots(tmp_path: Path) -> None:
    cells = []
    for column in COLUMNS:
        for method, accuracy in (("default", 0.92), ("distance l1", 0.94)):
            seeds = [{"prototype": [0.9]}, {"prototype": [accuracy]}]
            cells.append(make_cell(method, column, seeds, "prototype"))
    rows = draw_rows("study-options", make_target(cells), tmp_path)
    for row, cell in zip(rows, cells, strict=True):
        accuracy = cell["accuracy"]["prototype"]
        assert row["method"] == cell["method"]
        assert float(row["mean"]) == accuracy["mean"]
        assert float(row["interval"]) == accuracy["interval"]


@pytest.mark.parametrize(
    "name",
    [
        "table-mnist",
        "fig-shots",
        "fig-lambda",
        "fig-tsne",
        "study-travel",
        "study-before",
        "study-options",
    ],
)
def test_nothing_is_drawn_if_all_runs_failed(name: str, tmp_path: Path) -> None:
    target = make_target([make_cell("FedProto", "k = 5", [])])
    assert list(draw(name, target, tmp_path, tmp_path)) == []


# --- without matplotlib


def test_without_matplotlib_a_figure_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = r"a figure needs the package 'matplotlib': pip install '\.\[plots\]'"
    with pytest.raises(MissingExtra, match=message):
        list(make.make("fig-shots", Request(), tmp_path, None, pytest.fail))
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_a_table_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert list(make._draw_figure("table-mnist", make_table(), tmp_path)) == []
    monkeypatch.undo()
    assert [path.name for path in make._draw_figure("table-mnist", make_table(), tmp_path)] == [
        "table-mnist.csv",
        "table-mnist.png",
    ]


def make_benchmark_cell(method: str, accuracy: float, sent: int, shares: bool) -> dict[str, Any]:
    run = {"head_own": [accuracy], "head": [accuracy], "bytes_up": sent, "bytes_down": sent}
    place = {"dataset": "mnist", "partition": "nway3", "architecture": "equal", "k": 20}
    return make_cell(method, COLUMNS[0], [run], shares_weights=shares, **place)


def test_every_method_of_the_benchmark_has_a_name_at_the_place_of_its_accuracy() -> None:
    cells = [make_benchmark_cell("Local", 0.8, 0, False)]
    cells.append(make_benchmark_cell("FedProto", 0.85, 1_000_000, False))
    # All in one place, as methods are that send the same weights.
    cells += [
        make_benchmark_cell(f"W{number}", 0.9 + number / 1e5, 100_000_000, True)
        for number in range(30)
    ]
    rows = make_rows(cells)
    travels = {row["method"]: row["travels"] for row in rows}
    assert (travels["Local"], travels["FedProto"], travels["W3"]) == ("nothing", "sums", "weights")

    canvas = draw_methods(rows, list(travels))
    canvas.draw_without_rendering()
    (axes,) = canvas.axes
    # Of an annotation, its line is part of the extent.
    names = {text.get_text(): Text.get_window_extent(text) for text in axes.texts}
    assert "FedProto  85.0" in names
    assert len(names) == 32
    boxes = sorted(names.values(), key=lambda box: box.y0)
    for below, above in pairwise(boxes):
        assert above.y0 - below.y0 > 0.8 * below.height  # names can be told apart
    assert boxes[0].y0 >= 0
    assert boxes[-1].y1 <= canvas.bbox.height
    assert axes.get_xticklabels()[0].get_text() == "0"  # where Local is


def test_an_overview_names_the_usual_methods_and_the_best_of_each_kind() -> None:
    cells = [
        make_benchmark_cell("Local", 0.8, 0, False),
        make_benchmark_cell("FedProto", 0.85, 1_000, False),
        make_benchmark_cell("FedSA", 0.86, 1_000, False),
        make_benchmark_cell("FedGH", 0.84, 1_000, False),
        make_benchmark_cell("FedAdam", 0.9, 1_000_000, True),
        make_benchmark_cell("FedPer", 0.89, 1_000_000, True),
        make_benchmark_cell("FedBlend + teacher", 0.95, 2_000_000, True),
    ]
    canvas = draw_overview(make_rows(cells), {"mnist": "MNIST (digits)"})
    (axes,) = canvas.axes
    assert axes.get_title() == "MNIST"
    assert len(axes.lines) >= len(cells)  # a mark each
    names = {text.get_text() for text in axes.texts}
    assert names == {"Local  80.0", "FedProto  85.0", "FedSA  86.0", "FedAdam  90.0"}
