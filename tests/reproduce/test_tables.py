"""The numbers of a target are those of its runs, and the numbers of its page those of its JSON."""

import json
import math
import re
import statistics
import tomllib

import numpy as np
import pytest
from helpers.command_line import fedproto
from helpers.reproduction import CELLS, TINY, read_content, read_markdown
from hypothesis import given
from hypothesis import strategies as st

from fedproto.reproduce import tables
from fedproto.runs.folder import RunFolder

#: t(0.975, 1), from a printed table.
T1 = 12.7062

# --- one number


def test_a_summary_is_as_computed_by_hand():
    # Means 0.6 and 0.8; deviations over clients 0.1 and 0.2.
    # t(0.975, 1) = 12.7062 times the standard error (0.2 / √2) / √2 = 0.1.
    summary = tables.summary([[0.5, 0.7], [0.6, 1.0]])
    expected = {"mean": 0.7, "std_clients": 0.15, "interval": 1.27062}
    assert summary == pytest.approx(expected, abs=1e-5)
    # Means 1 to 5: t(0.975, 4) = 2.77645 times their standard deviation √2.5 over √5.
    summary = tables.summary([[1.0], [2.0], [3.0], [4.0], [5.0]])
    expected = {"mean": 3, "std_clients": 0, "interval": 2.77645 * math.sqrt(0.5)}
    assert summary == pytest.approx(expected, abs=1e-4)


def test_one_seed_has_no_interval():
    assert tables.summary([[0.5, 0.7]]) == pytest.approx({"mean": 0.6, "std_clients": 0.1})


def test_equal_seeds_have_an_interval_of_zero():
    assert tables.summary([[0.5], [0.5]]) == {"mean": 0.5, "std_clients": 0.0, "interval": 0.0}


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=5))
def test_summaries_agree_with_numpy(accuracies):
    summary = tables.summary(accuracies)
    assert summary["mean"] == pytest.approx(np.mean(accuracies), abs=1e-12)
    assert summary["std_clients"] == pytest.approx(np.std(accuracies, axis=1).mean(), abs=1e-9)
    assert ("interval" in summary) == (len(accuracies) > 1)
    json.loads(json.dumps(summary), parse_constant=pytest.fail)  # no NaN


@pytest.mark.parametrize(
    ("values", "round"),
    [
        ([0.5, 0.9, 0.98, 1.0], 40),
        ([0.5, 0.9, 0.991, 1.0], 30),
        ([0.5, 1.0, 0.2, 0.5], 10),  # of the last round's accuracy, not of the best
        ([0.99, 1.0, 1.0, 1.0], 10),  # 99% is enough
        ([0.0, 0.0, 0.0, 0.0], 10),
        ([0.7], 10),
    ],
    ids=str,
)
def test_the_first_round_that_is_close_to_the_last(values, round):
    rounds = [10, 20, 30, 40][: len(values)]
    curve = {"round": rounds, "head": [0.0] * len(values), "prototype": values}
    assert tables.rounds_to_close(curve, "prototype") == round


# --- the JSON


def run_folder(out, cell, run):
    return RunFolder(
        out / "runs" / "tiny" / f"{cell['method']}-n={cell['n']}_stdev_2-seed={run['seed']}"
    )


def test_the_command_writes_numbers_page_and_runs(tiny_by_command):
    out, answer = tiny_by_command
    written = [line for line in answer.out.splitlines() if line.startswith("written")]
    assert written == [f"written to {out / 'tiny.json'}", f"written to {out / 'tiny.md'}"]
    names = {path.name for path in out.iterdir()}
    assert names == {"cells.tgz", "runs", "tiny.json", "tiny.md"}
    assert {path.name for path in (out / "runs" / "tiny").iterdir()} == set(CELLS)
    assert "4 federations together" in answer.out  # a row is trained as one stack


def test_the_json_describes_its_cells(tiny):
    content = read_content(tiny)
    assert (content["title"], content["command"]) == ("Tiny", "fedproto reproduce tiny")
    assert content["settings"] == tomllib.loads(TINY)["settings"]
    cells = content["cells"]
    assert [(cell["method"], cell["n"], cell["stdev"]) for cell in cells] == [
        ("Local", 3, 2),
        ("Local", 4, 2),
        ("FedProto", 3, 2),
        ("FedProto", 4, 2),
    ]
    for cell in cells:
        assert (cell["dataset"], cell["rounds"], cell["seeds"]) == ("digits", 3, [0, 1])
        assert cell["score"] == ("prototype" if cell["method"] == "FedProto" else "head")


def test_the_json_holds_the_results_of_the_runs(tiny):
    for cell in read_content(tiny)["cells"]:
        for run in cell["runs"]:
            folder = run_folder(tiny, cell, run)
            result = folder.result()
            lines = folder.metrics()
            assert (run["partition"], run["rounds"]) == (result["partition"], 3)
            assert run["accuracy"].keys() == result["accuracy"].keys()
            for score, values in run["accuracy"].items():
                clients = result["clients"]
                assert values == [round(client["accuracy"][score], 5) for client in clients]
            assert run["communication"] == result["communication"]
            assert run["communication"]["bytes_up"] == sum(line["bytes_up"] for line in lines)
            last_loss = lines[-1]["loss"]
            assert run["loss"] == {name: round(value, 6) for name, value in last_loss.items()}


def test_curves_are_those_of_the_runs(tiny):
    for cell in read_content(tiny)["cells"]:
        for run in cell["runs"]:
            lines = run_folder(tiny, cell, run).metrics()
            curve = run["curve"]
            assert curve.pop("round") == [1, 2, 3]
            for score, values in curve.items():
                assert values == [round(line["accuracy"][score]["mean"], 5) for line in lines]
                last = statistics.fmean(run["accuracy"][score])
                assert values[-1] == pytest.approx(last, abs=1e-5)


def test_methods_of_a_column_have_the_same_images(tiny):
    partitions = {}
    for cell in read_content(tiny)["cells"]:
        for run in cell["runs"]:
            shared = partitions.setdefault((cell["column"], run["seed"]), set())
            shared.add(run["partition"])
    assert [len(shared) for shared in partitions.values()] == [1, 1, 1, 1]


def test_values_per_round_are_the_prototypes_that_the_clients_hold(tiny):
    """By hand, from the partition: eight values per class and client."""
    for cell in read_content(tiny)["cells"]:
        for run in cell["runs"]:
            folder = run_folder(tiny, cell, run)
            clients = json.loads((folder.path / "partition.json").read_text())["clients"]
            held = sum(len(client["classes"]) for client in clients)
            expected = 8 * held if cell["method"] == "FedProto" else 0
            assert run["communication"]["values_per_round"] == expected


@pytest.mark.parametrize("method", ["local", "fedproto"])
def test_a_cell_equals_a_run_with_the_same_settings(method, tiny, tmp_path):
    """By `fedproto run`, with settings written by hand."""
    flags = {
        "dataset": "digits",
        "algorithm": method,
        "model": "mlp(hidden=16,width=8)",
        "clients": 4,
        "shots": 5,
        "test-shots": 5,
        "batch": 4,
        "lr": 0.05,
        "rounds": 3,
        "eval-every": 1,
        "ways": 4,
        "stdev": 2,
        "seed": 1,
        "set": "precision=float64",
        "engine": "reference",
        "out": tmp_path / "run",
    }
    arguments = []
    for name, value in flags.items():
        arguments += [f"--{name}", str(value)]
    answer = fedproto("run", *arguments)
    assert answer.code == 0, answer.err
    alone = json.loads((tmp_path / "run" / "result.json").read_text())
    cells = {(cell["method"].lower(), cell["n"]): cell for cell in read_content(tiny)["cells"]}
    run = cells[method, 4]["runs"][1]
    assert run["seed"] == 1
    assert run["partition"] == alone["partition"]
    assert run["communication"] == alone["communication"]
    assert run["accuracy"].keys() == alone["accuracy"].keys()
    for score, values in run["accuracy"].items():
        assert values == [round(client["accuracy"][score], 5) for client in alone["clients"]]


# --- the page: every number can be computed from the JSON


@pytest.fixture(scope="module")
def tiny_content(tiny):
    return json.loads((tiny / "tiny.json").read_text())


@pytest.fixture(scope="module")
def tiny_page(tiny):
    return (tiny / "tiny.md").read_text()


def row_of(page, heading, method):
    (row,) = [row for row in read_markdown(page)[heading] if row["method"] == method]
    return row


def section_of(content, column):
    """Return the heading of a column's table, which gives the mean number of classes."""
    classes = []
    for cell in content["cells"]:
        if cell["column"] == column:
            classes += [run["classes"] for run in cell["runs"]]
    return f"{column} ({statistics.fmean(classes):.1f} classes per client)"


def seed_numbers(clients):
    """Return one seed's mean and population deviation over four clients, in percent."""
    mean = 100 * sum(clients) / 4
    variance = sum((100 * value - mean) ** 2 for value in clients) / 4
    return mean, math.sqrt(variance)


def test_the_page_has_an_overview_and_a_table_per_column(tiny_content, tiny_page):
    columns = [section_of(tiny_content, f"n = {n}, stdev 2") for n in (3, 4)]
    assert list(read_markdown(tiny_page)) == ["Tiny", "own classes", *columns]
    assert tiny_page.startswith("# Tiny\n\nSeeds 0, 1, fixed in advance")


@pytest.mark.parametrize("score", ["head", "head_own", "prototype", "prototype_own"])
def test_accuracies_of_the_page_follow_from_the_json(score, tiny_content, tiny_page):
    for cell in tiny_content["cells"]:
        row = row_of(tiny_page, section_of(tiny_content, cell["column"]), cell["method"])
        entry = row[score.replace("_own", ", own")]
        if score not in cell["accuracy"]:
            assert (cell["method"], entry) == ("Local", "–")
            continue
        first, second = [seed_numbers(run["accuracy"][score]) for run in cell["runs"]]
        mean = (first[0] + second[0]) / 2
        deviation = (first[1] + second[1]) / 2
        interval = T1 * abs(first[0] - second[0]) / 2
        numbers = [float(number) for number in re.findall(r"\d+\.\d+", entry)]
        assert entry == "{:.2f} ± {:.2f} [± {:.2f}]".format(*numbers)
        assert numbers == pytest.approx([mean, deviation, interval], abs=0.006)


def papers_row(cell):
    wanted = ("MNIST", cell["method"], cell["n"], cell["stdev"])
    for row in tables.paper_rows():
        if (row["dataset"], row["method"], row["n"], row["stdev"]) == wanted:
            return row
    return pytest.fail("the paper has no such row")


@pytest.mark.parametrize(
    ("ending", "overview", "difference"),
    [("", "Tiny", "difference"), ("_own", "own classes", "difference, own")],
)
def test_the_paper_is_compared_with(ending, overview, difference, tiny_content, tiny_page):
    for cell in tiny_content["cells"]:
        paper = papers_row(cell)
        accuracy = cell["accuracy"][cell["score"] + ending]
        mean = 100 * accuracy["mean"]
        entry = row_of(tiny_page, overview, cell["method"])[cell["column"]]
        interval = 100 * accuracy["interval"]
        assert entry == f"{mean:.2f} ± {interval:.2f} ({paper['accuracy']:.2f})"
        row = row_of(tiny_page, section_of(tiny_content, cell["column"]), cell["method"])
        assert float(row["paper"]) == paper["accuracy"]
        assert float(row[difference]) == pytest.approx(mean - paper["accuracy"], abs=0.011)
        assert int(row["paper's values per round"].replace(",", "")) == paper["params_per_round"]


def test_rounds_and_traffic_of_the_page_follow_from_the_json(tiny_content, tiny_page):
    for cell in tiny_content["cells"]:
        row = row_of(tiny_page, section_of(tiny_content, cell["column"]), cell["method"])
        assert (row["seeds"], row["rounds"]) == ("2", "3")
        close = []
        for run in cell["runs"]:
            curve = run["curve"][cell["score"]]
            close.append(next(n for n, value in enumerate(curve, 1) if value >= 0.99 * curve[-1]))
        assert row["to 99%"] == f"{sum(close) / 2:.0f}"
        traffic = [run["communication"] for run in cell["runs"]]
        values = sum(each["values_per_round"] for each in traffic) / 2
        assert int(row["values per round"].replace(",", "")) == pytest.approx(values, abs=0.5)
        sent = sum(each["bytes_up"] for each in traffic) / 2 / 3
        assert int(row["bytes per round"].replace(",", "")) == pytest.approx(sent, abs=0.5)


def test_the_page_names_times_and_partitions(tiny_content, tiny_page):
    seconds = 0.0
    for cell in tiny_content["cells"]:
        for run in cell["runs"]:
            seconds += run["seconds"]
            partition = run["partition"][:12]
            assert f"{cell['column']}, seed {run['seed']}: {partition}" in tiny_page
    assert tiny_content["seconds"] == pytest.approx(seconds, abs=0.06)
    made_by = f"Made by `fedproto reproduce tiny`: {tiny_content['seconds']:,.0f} s of runs"
    assert made_by in tiny_page
