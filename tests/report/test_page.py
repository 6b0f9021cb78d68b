"""The page of a report: it says what the run folders hold, loads nothing, and escapes names."""

import base64
import hashlib
import json
import re
import tomllib
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from helpers.reports import (
    PageParser,
    make_run,
    read_frozen,
    read_numbers,
    read_result,
    read_table,
)

from fedproto.config.config_file import flatten_tables
from fedproto.report import write
from fedproto.report.configuration import common_settings, own_settings
from fedproto.report.groups import group_runs
from fedproto.report.ownership import RECORD
from fedproto.report.read import read_runs
from fedproto.report.read_metrics import read_metrics
from fedproto.runs.folder import RunFolder

HOSTILE_NAME = '<script>alert("1")</script>|`$x$`'


def find_figures(folder: Path) -> set[str]:
    """The names of the figures; each must have an image and numbers, and nothing else be there."""
    names = {path.stem for path in folder.glob("*.png")}
    files = {RECORD}
    for name in names:
        files |= {f"{name}.png", f"{name}.csv"}
    assert {path.name for path in folder.iterdir()} == files
    return names


def test_a_report_is_a_page_a_markdown_file_and_a_folder_of_figures(page: Path) -> None:
    files = sorted(path.name for path in page.parent.iterdir())
    assert files == ["report-figures", "report.html", "report.md"]
    figures = find_figures(page.parent / "report-figures")
    assert figures == {
        "accuracy",
        "accuracy-own",
        "gains",
        "loss-supervised",
        "loss-regulariser",
        "clients-1",
        "clients-2",
        "clients-3",
        "classes-1",
        "prototypes-1",
        "traffic",
        "calibration",
        "confusion-1",
        "confusion-2",
        "confusion-3",
        "confusion-4",
        "confusion-5",
    }
    markdown = page.with_suffix(".md").read_text()
    for name in figures:
        assert f"](report-figures/{name}.png)" in markdown
        assert f"](report-figures/{name}.csv)" in markdown


# --- the table


def test_the_table_has_the_numbers_of_a_run(runs: Path, single_page: Path) -> None:
    (row,) = read_table(single_page).values()
    result = read_result(runs / "fedproto-0")
    columns = {
        "head": "head, %",
        "head_own": "head, own classes, %",
        "prototype": "prototype, %",
        "prototype_own": "prototype, own classes, %",
        "both": "both, %",
        "both_own": "both, own classes, %",
    }
    for name, column in columns.items():
        accuracy = result["accuracy"][name]
        expected = f"{100 * accuracy['mean']:.1f} ± {100 * accuracy['std']:.1f}"
        is_repeated = accuracy == result["accuracy"][name.removesuffix("_own")]
        assert row.get(column) == (None if "own" in name and is_repeated else expected)
    assert row["method"] == "fedproto"
    assert row["data set"] == "digits"
    assert row["clients"] == "4"
    assert row["rounds"] == "3"
    traffic = result["communication"]
    assert row["values per round"] == f"{traffic['values_per_round']:,.0f}"
    assert float(row["MB up"]) == pytest.approx(traffic["bytes_up"] / 1e6, rel=0.005)
    assert float(row["MB down"]) == pytest.approx(traffic["bytes_down"] / 1e6, rel=0.005)
    assert row["seconds"] == f"{result['seconds']['total']:.1f}"


def test_runs_that_differ_only_in_seed_share_a_row_of_means(runs: Path, page: Path) -> None:
    rows = read_table(page)
    assert list(rows) == ["local", "fedavg", "fedproto"]
    assert [row["seeds"] for row in rows.values()] == ["1", "1", "2"]
    results = [read_result(runs / f"fedproto-{seed}") for seed in (0, 1)]
    means = [100 * result["accuracy"]["head"]["mean"] for result in results]
    deviations = [100 * result["accuracy"]["head"]["std"] for result in results]
    over_clients = f"{np.mean(means):.1f} ± {np.mean(deviations):.1f}"
    over_seeds = f"seeds ± {np.std(means, ddof=1):.1f}"
    assert rows["fedproto"]["head, %"] == over_clients + over_seeds
    bytes_up = np.mean([result["communication"]["bytes_up"] for result in results])
    assert float(rows["fedproto"]["MB up"]) == pytest.approx(bytes_up / 1e6, rel=0.005)
    assert rows["local"]["prototype, %"] == "–"
    for equal_in_all_rows in ("data set", "clients", "rounds"):
        assert equal_in_all_rows not in rows["local"]


@pytest.mark.usefixtures("one_figure")
def test_settings_that_differ_are_a_table_and_not_a_name(runs: Path, tmp_path: Path) -> None:
    changed = {"lr": 0.01, "momentum": 0.1, "batch": 3}
    other = make_run(tmp_path / "changed", algorithm="local", **changed)
    page = write([runs / "local", other], tmp_path / "out")
    assert list(read_table(page)) == ["local, local", "local, changed"]
    header, *rows = PageParser(page).tables[-1]
    assert header == ["setting", "local, local", "local, changed"]
    assert {row[0]: float(row[2]) for row in rows} == changed


def test_the_markdown_has_the_same_table(page: Path) -> None:
    lines = page.with_suffix(".md").read_text().splitlines()
    rows = []
    for line in lines:
        if line.startswith("| "):
            cells = line.strip("|").split(" | ")
            rows.append([cell.strip().replace("; ", "").replace("\\_", "_") for cell in cells])
    for table in PageParser(page).tables:
        header, _, *others = rows[: len(table) + 1]
        del rows[: len(table) + 1]
        assert [header, *others] == table
    assert not rows


def test_the_table_of_metrics_has_the_numbers_of_a_run(single_page: Path, runs: Path) -> None:
    header, *rows = PageParser(single_page).tables[1]
    assert [row[1] for row in rows] == ["head", "prototype", "both", "majority class"]
    result = read_result(runs / "fedproto-0")
    auroc = result["metrics"]["prototype"]["auroc"]
    shown = dict(zip(header, rows[1], strict=True))
    assert shown["AUROC, %"] == f"{100 * auroc['mean']:.1f} ± {100 * auroc['std']:.1f}"
    worst = result["metrics"]["prototype"]["accuracy"]["worst"]
    assert shown["worst client's accuracy, %"] == f"{100 * worst:.1f}"
    counts = result["metrics"]["head"]["confusion"]
    numbers = read_numbers(single_page, "confusion-1")
    classes = result["metrics"]["head"]["classes"]
    for name, row, line in zip(classes, counts, numbers, strict=True):
        assert line["true class"] == name
        assert [int(line[f"as {other}"]) for other in classes] == row


@pytest.mark.parametrize(
    "damage",
    [
        {"confusion": [[1]]},
        {"confusion": "none"},
        {"calibration": [{"rows": 1}]},
        {"sensitivity": {"0": "high"}},
        {"accuracy": {"mean": 1.0, "worst_client": 0}},
    ],
)
def test_damaged_metrics_are_named(damage: dict, runs: Path) -> None:
    result = read_result(runs / "local")
    result["metrics"]["head"] |= damage
    with pytest.raises((KeyError, TypeError, ValueError)):  # `read_run` makes a sentence of them
        read_metrics(result, result["classes"])
    del result["metrics"]
    assert read_metrics(result, result["classes"]) is None


# --- nothing is loaded, nothing is unescaped


def test_the_page_loads_nothing_and_runs_its_own_scripts_only(page: Path) -> None:
    text = page.read_text()
    for forbidden in ('<link rel="stylesheet', "@import", "url(", "<iframe", "<img"):
        assert forbidden not in text
    parser = PageParser(page)
    for _, attributes in parser.tags:
        for name in ("src", "srcset", "href"):
            assert attributes.get(name, "data:").startswith(("data:", "#"))
        assert not [name for name in attributes if name.startswith("on")]
    (policy,) = [each["content"] for _, each in parser.tags if "http-equiv" in each]
    assert "default-src 'none'" in policy
    scripts = re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")


def test_paths_of_the_makers_machine_are_nowhere(runs: Path, page: Path) -> None:
    home = str(runs.parent)
    assert home not in page.read_text()
    assert home not in page.with_suffix(".md").read_text()


def test_the_charts_have_the_numbers_of_the_runs(runs: Path, page: Path) -> None:
    frozen = read_frozen(page)
    names = ["local", "fedavg", "fedproto-0", "fedproto-1"]
    assert [run["name"] for run in frozen["runs"]] == names
    for run, name in zip(frozen["runs"], names, strict=True):
        result = read_result(runs / name)
        head = result["accuracy"]["head"]["mean"]
        assert run["accuracy"]["head"]["mean"] == pytest.approx(head, rel=1e-5)
        details = frozen["clients"][run["id"]]
        assert len(details) == len(result["clients"])
        assert sum(map(sum, details["0"]["confusion"]["ways"]["head"])) > 0


def test_gains_are_differences_to_the_same_client_alone(runs: Path, page: Path) -> None:
    alone = read_result(runs / "local")["clients"]
    together = read_result(runs / "fedproto-0")["clients"]
    rows = [row for row in read_numbers(page, "gains") if row["run"] == "fedproto"]
    for row, client, other in zip(rows, together, alone, strict=True):
        gain = client["accuracy"]["prototype"] - other["accuracy"]["head"]
        assert float(row["gain"]) == pytest.approx(gain)


def test_names_from_files_are_escaped(runs: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", algorithm="fedproto", shots=3, test_shots=3)
    text = (run / "result.json").read_text()
    for name in ("3", "digits", "mlp(hidden=16, width=8)"):  # a class, the data set, the model
        text = text.replace(json.dumps(name), json.dumps(HOSTILE_NAME))
    RunFolder(run).write_json("result.json", json.loads(text))
    assert HOSTILE_NAME in read_result(run)["classes"]
    page = write([run], tmp_path / "out")
    html = page.read_text()
    assert html.count("<script") == 3  # the numbers, the library of charts and our own
    assert HOSTILE_NAME in unescape(html)
    assert HOSTILE_NAME in read_frozen(page)["runs"][0]["classes"]
    assert not re.search(r"(?<!\\)<script", page.with_suffix(".md").read_text())
    assert HOSTILE_NAME in read_numbers(page, "classes-1")[0]


# --- one run and several


def test_a_single_run_is_shown_with_its_whole_configuration(runs: Path, single_page: Path) -> None:
    text = unescape(single_page.read_text())
    config = runs / "fedproto-0" / "config.toml"
    assert config.read_text().strip() in text
    assert "fedproto run fedproto-0/config.toml" in text
    assert "over seeds" not in text
    files = sorted(path.name for path in single_page.parent.iterdir())
    assert files == ["one-figures", "one.html", "one.md"]


def test_common_and_own_settings_together_are_the_configuration(runs: Path) -> None:
    groups = group_runs(read_runs([runs]))
    common = common_settings(groups)
    for group in groups:
        for run in group.runs:
            seed = f"seed = {run.seed}\n" if len(group.runs) > 1 else ""
            toml = f"{common}\n{own_settings(group, groups)}\n{seed}"
            assert flatten_tables(tomllib.loads(toml), "both") == run.config
    assert "algorithm" not in common
    assert "rounds = 3" in common


def test_a_method_without_prototypes_has_no_map_of_them(runs: Path, tmp_path: Path) -> None:
    page = write([runs / "local"], tmp_path)
    text = page.read_text()
    assert "No method here has prototypes, so there is no map of them." in text
    assert "Nothing was sent" in text
    figures = find_figures(tmp_path / "report-figures")
    assert figures == {
        "accuracy",
        "accuracy-own",
        "loss-supervised",
        "clients-1",
        "classes-1",
        "calibration",
        "confusion-1",
    }
    assert "prototype, %" not in PageParser(page).tables[0][0]
