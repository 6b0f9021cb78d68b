"""The figures of `fedproto reproduce`: they show the JSON's numbers, and what is computed for them is right by hand."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedproto.errors import MissingExtra
from fedproto.reproduce import make
from fedproto.reproduce.pictures import clusters, draw, folder, front, limits, measures, spread
from fedproto.reproduce.plan import Request, plan, read_spec
from fedproto.reproduce.tables import summary

COLUMNS = ("n = 3, stdev 2", "n = 4, stdev 2")


def cell(
    method: str, column: str, seeds: list[dict[str, Any]], score: str = "head", **more: Any
) -> dict[str, Any]:
    """A cell as `gather` makes it, of a dict a seed: accuracies of the clients, and whatever else the run has."""
    keys = ("head", "head_own", "prototype")
    runs = [
        {"seed": number, "accuracy": {key: run[key] for key in keys if key in run}}
        | {key: value for key, value in run.items() if key not in keys}
        for number, run in enumerate(seeds)
    ]
    accuracy = (
        {key: summary([run["accuracy"][key] for run in runs]) for key in runs[0]["accuracy"]}
        if runs
        else {}
    )
    found = {
        "method": method,
        "column": column,
        "score": score,
        "seeds": list(range(len(runs))),
        "runs": runs,
    }
    return found | {"accuracy": accuracy, "paper": None} | more


def same(cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {"title": "A table of two methods, by hand", "cells": cells}


def table() -> dict[str, Any]:
    """Local sends nothing, FedAvg gains by its own classes, FedProto is cheap; another lacks a column."""
    cells = []
    for place, column in enumerate(COLUMNS):
        paper = {"accuracy": 90 + 2 * place, "params_per_round": 100}
        low = [
            {"head": [0.8, 0.9 + 0.01 * seed], "head_own": [0.8, 0.9 + 0.01 * seed]}
            for seed in (0, 1)
        ]
        mean = [{"head": [0.7, 0.8], "head_own": [0.9, 0.98 - 0.01 * seed]} for seed in (0, 1)]
        near = [{"head": [0.9, 0.9], "prototype": [0.9, 0.92 + 0.02 * place]}] * 2
        cells += [
            cell("Local", column, low, communication={"bytes_up_per_round": 0}),
            cell(
                "FedAvg",
                column,
                mean,
                communication={"bytes_up_per_round": 4000 + 1000 * place},
                paper=paper,
            ),
            cell(
                "FedProto",
                column,
                near,
                "prototype",
                communication={"bytes_up_per_round": 400},
                paper=paper,
            ),
        ]
    extra = cell(
        "FedProto, batch 8", COLUMNS[0], near, "prototype", communication={"bytes_up_per_round": 1}
    )
    return same([*cells, extra, cell("FedPer", COLUMNS[0], [])])


def made(
    name: str, found: dict[str, Any], out: Path, runs: Path | None = None
) -> list[dict[str, str]]:
    """The rows of the CSV, once the PNG beside it is seen to show something."""
    paths = list(draw(name, found, out, runs or out))
    assert [path.name for path in paths if path.suffix != ".json"] == [f"{name}.csv", f"{name}.png"]
    with Image.open(out / f"{name}.png") as image:
        assert image.width == 1600
        pixels = np.asarray(image.convert("L"))
    assert pixels[0, 0] == 255 and (pixels < 128).mean() > 0.002, "blank"
    with (out / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# --- a table


def test_a_table_shows_the_means_over_columns_and_what_they_cost(tmp_path: Path) -> None:
    rows = {(row["method"], row["accuracy"]): row for row in made("table-mnist", table(), tmp_path)}
    assert list(rows) == [
        ("Local", "head"),
        ("FedAvg", "head"),
        ("FedAvg", "head_own"),
        ("FedProto", "prototype"),
    ]
    cells = table()["cells"]
    for (method, key), row in rows.items():
        mine = [each for each in cells if each["method"] == method]
        assert float(row["mean"]) == pytest.approx(
            np.mean([each["accuracy"][key]["mean"] for each in mine])
        )
    assert float(rows["FedProto", "prototype"]["mean"]) == pytest.approx(0.915)
    assert float(rows["FedAvg", "head"]["bytes_up"]) == 4500
    assert (
        float(rows["FedAvg", "head"]["paper"]),
        float(rows["FedAvg", "head"]["paper_bytes"]),
    ) == (0.91, 400)
    assert rows["Local", "head"]["paper"] == ""


def test_a_tables_interval_is_that_of_the_means_over_columns(tmp_path: Path) -> None:
    rows = {(row["method"], row["accuracy"]): row for row in made("table-mnist", table(), tmp_path)}
    # Local: 0.85 and 0.855 by seed, in both columns; t(0.975, 1) = 12.706, standard error 0.0025
    assert float(rows["Local", "head"]["interval"]) == pytest.approx(12.7062 * 0.0025, rel=1e-4)
    assert float(rows["FedProto", "prototype"]["interval"]) == 0


def test_the_front_of_a_table_counts_heads_limited_to_own_classes(tmp_path: Path) -> None:
    on = [
        (row["method"], row["accuracy"])
        for row in made("table-mnist", table(), tmp_path)
        if row["on_front"] == "True"
    ]
    assert on == [("Local", "head"), ("FedAvg", "head_own"), ("FedProto", "prototype")]


def test_a_point_is_on_the_front_when_none_is_cheaper_or_as_cheap_and_better() -> None:
    points = [(0.0, 0.5), (10.0, 0.4), (10.0, 0.7), (20.0, 0.7), (5.0, 0.6), (30.0, 0.9)]
    assert front(points) == [0, 4, 2, 5]
    assert front([]) == []


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    once = cell(
        "FedAvg",
        "n = 3",
        [{"head": [0.5], "head_own": [0.5]}],
        communication={"bytes_up_per_round": 10},
    )
    (row,) = made("table-mnist", same([once]), tmp_path)
    assert (row["interval"], row["seeds"]) == ("", "1")


def test_labels_keep_their_order_and_their_distance() -> None:
    assert spread([0, 10, 20], 1) == [0, 10, 20]
    assert spread([5, 5, 5], 2) == pytest.approx([3, 5, 7])
    assert spread([6, 5], 3) == pytest.approx([7, 4])
    assert clusters([5, 1, 2, 9], 1, float) == [[1, 2], [5], [9]]


def test_a_wide_interval_leaves_the_means_their_room() -> None:
    low, high = limits([0.9, 0.95], [5.0, 0.0])
    assert 0.85 < low < 0.9 and 0.95 < high < 1
    assert limits([0.0, 1.0], [0, 0]) == pytest.approx((-0.06, 1.06))
    assert limits([0.5], [0.0]) == pytest.approx((0.49, 0.51))


# --- figures


def test_accuracy_against_images_a_class(tmp_path: Path) -> None:
    means = {
        ("FedProto", 5): 0.8,
        ("FedProto", 100): 0.9,
        ("FedAvg", 5): 0.5,
        ("FedAvg", 100): 0.95,
    }
    cells = [
        cell(method, f"k = {k}", [{"head": [mean]}, {"head": [mean]}])
        for (method, k), mean in means.items()
    ]
    rows = made("fig-shots", same(cells), tmp_path)
    assert {(row["method"], float(row["k"])): float(row["mean"]) for row in rows} == means
    lost = {(row["method"], float(row["k"])): float(row["lost"]) for row in rows}
    assert lost == pytest.approx(
        {("FedProto", 5): 10, ("FedProto", 100): 0, ("FedAvg", 5): 45, ("FedAvg", 100): 0}
    )


def test_the_distance_is_the_regulariser_over_lambda(tmp_path: Path) -> None:
    run = {"head": [0.5, 0.7], "prototype": [0.9, 0.7]}
    cells = [
        cell(
            f"lambda = {lam:g}",
            "n = 3",
            [run | {"loss": {"regulariser": lam * away}} for away in (0.2, 0.4)],
        )
        for lam in (0, 0.5, 4)
    ]
    rows = made("fig-lambda", same(cells), tmp_path)
    assert [float(row["lambda"]) for row in rows] == [0, 0.5, 4]
    assert rows[0]["distance_mean"] == ""
    assert [float(row["distance_mean"]) for row in rows[1:]] == pytest.approx([0.3, 0.3])
    assert all(float(row["head_mean"]) == pytest.approx(0.6) for row in rows)
    assert all(float(row["prototype_mean"]) == pytest.approx(0.8) for row in rows)


def embeddings(path: Path, known: bool) -> None:
    """Two classes of ten images at each of two clients."""
    draws = np.random.default_rng(1)
    y, client = np.tile(np.repeat([0, 1], 10), 2), np.repeat([0, 1], 20)
    x = draws.normal(size=(40, 3)) + 8 * y[:, None]
    means = {
        "local": np.array([[0.0] * 3, [8.0] * 3] * 2),
        "local_y": [0, 1, 0, 1],
        "local_client": [0, 0, 1, 1],
    }
    shared = (
        {"prototypes": np.array([[0.0] * 3, [8.0] * 3, [9.0] * 3]), "known": [1, 1, 0]}
        if known
        else {}
    )
    path.mkdir(parents=True)
    np.savez(path / "embeddings.npz", x=x, y=y, client=client, **means, **shared)


def test_a_map_of_embeddings_and_its_measures(tmp_path: Path) -> None:
    cells = [
        cell(method, COLUMNS[0], [{"head": [0.5]}]) for method in ("FedProto", "FedAvg", "FedPer")
    ]
    for each in cells[:2]:  # FedPer's are not there
        embeddings(folder(tmp_path / "runs", each), each["method"] == "FedProto")
    rows = made("fig-tsne", same(cells), tmp_path, tmp_path / "runs")
    count = [
        (method, kind) for method in ("FedProto", "FedAvg") for kind in ("image", "local", "global")
    ]
    assert [sum((r["method"], r["kind"]) == each for r in rows) for each in count] == [
        40,
        4,
        2,
        40,
        4,
        0,
    ]
    found = json.loads((tmp_path / "fig-tsne-measures.json").read_text())["measures"]
    assert set(found) == {"FedProto", "FedAvg"}
    assert found["FedProto"]["silhouette_class"] > 0.7
    assert abs(found["FedProto"]["silhouette_client_within_class"]) < 0.2


def test_the_measures_of_four_points_by_hand() -> None:
    """Class 0 at 0 and 1 (clients 0, 1), class 1 at 10 and 13 (clients 0, 1)."""
    x, y, client = (
        np.array([[0.0], [1.0], [10.0], [13.0]]),
        np.array([0, 0, 1, 1]),
        np.array([0, 1, 0, 1]),
    )
    found = measures(x, y, client)
    assert found["same_class_to_other_class"] == pytest.approx(
        ((1 + 3) / 2) / ((10 + 13 + 9 + 12) / 4)
    )
    apart = [1 - 1 / 11.5, 1 - 1 / 10.5, 1 - 3 / 9.5, 1 - 3 / 12.5]
    assert found["silhouette_class"] == pytest.approx(np.mean(apart))
    assert found["silhouette_client_within_class"] is None  # a sample a client


def test_clients_that_lie_apart_within_a_class_are_seen() -> None:
    x = np.array([[0.0], [1.0], [10.0], [11.0]] + [[100.0]] * 2)
    found = measures(x, np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 1, 1, 0, 0]))
    assert found["silhouette_client_within_class"] == pytest.approx(
        np.mean([1 - 1 / 10.5, 1 - 1 / 9.5])
    )


def test_where_nothing_can_be_compared_there_is_no_measure() -> None:
    alone = measures(np.array([[0.0], [1.0]]), np.array([0, 0]), np.array([0, 0]))
    assert set(alone.values()) == {None}


def test_a_figure_finds_the_folders_that_the_plan_names() -> None:
    for target in ("fig-tsne", "study-options"):
        for each in plan(read_spec(target, Request(quick=True))):
            found = {"method": each.row.name, "column": each.column, "seeds": [each.seed]}
            assert folder(Path("runs"), found) == Path("runs") / each.cell.name


# --- studies


def test_a_study_of_what_travels(tmp_path: Path) -> None:
    client = {"id": 0, "with_own": 0.9, "without_own": 0.5, "covered": 1.0}
    other = client | {"with_own": 0.7, "without_own": 0.4, "covered": 0.5}
    runs = [{"head": [0.5], "travel": [client, other]}, {"head": [0.5], "travel": [client, client]}]
    rows = made("study-travel", same([cell("FedProto", COLUMNS[0], runs)]), tmp_path)
    assert [row["prototypes"] for row in rows] == ["with_own", "without_own"]
    assert [float(row["mean"]) for row in rows] == pytest.approx([0.85, 0.475])
    assert float(rows[0]["interval"]) == pytest.approx(12.7062 * 0.05, rel=1e-4)
    assert float(rows[0]["covered"]) == pytest.approx(0.875)


def test_a_study_of_the_start_shows_the_start(tmp_path: Path) -> None:
    """Not what the first round made of it."""
    start = {"head": {"mean": 0.1, "interval": 0.02}, "prototype_own": {"mean": 0.6}}
    cells = [cell("all weights", COLUMNS[0], [{"head": [0.5]}]) | {"before": start}]
    rows = made("study-before", same(cells), tmp_path)
    assert [tuple(row.values()) for row in rows] == [
        ("all weights", "head", "0.1", "0.02"),
        ("all weights", "prototype, own classes", "0.6", ""),
    ]


def test_other_studies_are_rows_of_dots(tmp_path: Path) -> None:
    cells = [
        cell(method, column, [{"prototype": [0.9]}, {"prototype": [0.9 + more]}], "prototype")
        for column in COLUMNS
        for method, more in (("default", 0.02), ("distance l1", 0.04))
    ]
    rows = made("study-options", same(cells), tmp_path)
    assert [(row["method"], float(row["mean"]), float(row["interval"])) for row in rows] == [
        (
            each["method"],
            each["accuracy"]["prototype"]["mean"],
            each["accuracy"]["prototype"]["interval"],
        )
        for each in cells
    ]


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
def test_where_every_run_broke_down_nothing_is_drawn(name: str, tmp_path: Path) -> None:
    assert list(draw(name, same([cell("FedProto", "k = 5", [])]), tmp_path, tmp_path)) == []


# --- without matplotlib


def test_without_matplotlib_a_figure_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        MissingExtra,
        match=r"a figure needs the package 'matplotlib': pip install 'fedproto\[plots\]'",
    ):
        list(make.make("fig-shots", Request(), tmp_path, None, pytest.fail))
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_a_table_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert list(make._draw_figure("table-mnist", table(), tmp_path)) == []
    monkeypatch.undo()
    assert [path.name for path in make._draw_figure("table-mnist", table(), tmp_path)] == [
        "table-mnist.csv",
        "table-mnist.png",
    ]
