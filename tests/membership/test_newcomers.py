"""The study of newcomers: equal conditions, and a page that agrees with its numbers."""

import csv
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def study():
    return SimpleNamespace(
        **runpy.run_path(str(ROOT / "examples" / "newcomers.py"), run_name="newcomers")
    )


@pytest.fixture(scope="module")
def quick(study, tmp_path_factory):
    """The small study, run once, in a folder of its own."""
    folder = tmp_path_factory.mktemp("newcomers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        study.main(["--quick", "--out", str(folder)])
    return folder


def of(found, *wanted):
    (run,) = [
        r for r in found["runs"][0]["newcomers"] if (r["body"], r["k"], r["method"]) == wanted
    ]
    return run


@pytest.mark.slow
def test_joined_and_alone_have_the_same_rows_and_start(quick):
    found = json.loads((quick / "newcomers.json").read_text())
    for body, clients in (("drawn", 5), ("trained", 3)):
        alone, joined = (of(found, body, 5, method) for method in ("alone", "joined"))
        assert alone["partition"] == joined["partition"]
        assert {way: epochs[0] for way, epochs in alone["accuracy"].items()} == {
            way: epochs[0] for way, epochs in joined["accuracy"].items()
        }
        assert alone["accuracy"] != joined["accuracy"]
        assert [len(epoch) for epoch in joined["accuracy"]["head"]] == [clients] * 4
        assert all(set(client["images"]) == {5} for client in joined["clients"])


@pytest.mark.slow
def test_rows_are_nested_and_nobody_elses(quick):
    (federation,) = quick.glob("runs/newcomers/*/seed-0/federation-rows.json")
    taken = {row for client in rows_of(federation) for row in client["train"]}
    few, more = (rows_of(federation.with_name(f"drawn-{k}-rows.json")) for k in (5, 10))
    for smaller, larger in zip(few, more, strict=True):
        assert set(smaller["train"]) < set(larger["train"])
        assert smaller["test"] == larger["test"]
        assert taken.isdisjoint(larger["train"])


def rows_of(path):
    return json.loads(path.read_text())["clients"]


@pytest.mark.slow
def test_finished_runs_are_not_run_again(study, quick, monkeypatch, capsys):
    before = (quick / "newcomers.json").read_bytes()
    monkeypatch.chdir(quick)
    study.main(["--quick", "--out", str(quick)])
    assert capsys.readouterr().out == ""
    assert (quick / "newcomers.json").read_bytes() == before


@pytest.mark.slow
def test_the_page_and_the_figure_show_the_numbers_of_the_json(study, quick):
    found = json.loads((quick / "newcomers.json").read_text())
    alone, joined = (
        of(found, "drawn", 10, method)["accuracy"]["head"][3] for method in ("alone", "joined")
    )
    means = [100 * sum(each) / 5 for each in (alone, joined)]
    page = (quick / "newcomers.md").read_text()
    (line,) = re.findall(r"^\| 10 \| 3 \| \d+ \|.*$", page, re.MULTILINE)
    assert line.split(" | ")[3:6] == [
        f"{means[0]:.2f}",
        f"{means[1]:.2f}",
        f"{means[1] - means[0]:+.2f}",
    ]
    assert line.endswith("| undecided |")  # one seed shows nothing
    with (quick / "newcomers.csv").open() as file:
        last = [
            float(row["mean"])
            for row in csv.DictReader(file)
            if (row["k"], row["epoch"]) == ("10", "3")
        ]
    assert last == pytest.approx([mean / 100 for mean in means], abs=1e-6)
    assert (quick / "newcomers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([0.01, 0.011, 0.012], "helps"),
        ([-0.01, -0.011, -0.012], "hurts"),
        ([0.01, -0.01, 0.02], "undecided"),
        ([0.0001, -0.0001, 0.0002], "equivalent"),  # within 0.3 points
        ([0.3], "undecided"),
        ([0.0, 0.0], "undecided"),
    ],
)
def test_the_wording_follows_the_statistical_tests(study, differences, word):
    assert study.judge_alone(differences) == word


def test_the_rows_of_a_table_are_corrected_together(study):
    weak = [0.005, 0.010, 0.021, 0.003, 0.014]  # p = 0.03
    assert study.judge_alone(weak) == "helps"
    assert study.judge([weak] * 12) == ["undecided"] * 12


def test_the_committed_page_is_what_its_json_renders_to(study):
    found = json.loads((RESULTS / "newcomers.json").read_text())
    assert (RESULTS / "newcomers.md").read_text() == study.markdown(found)
    with (RESULTS / "newcomers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {name: str(value) for name, value in row.items()} for row in study.curves(found)
    ]
