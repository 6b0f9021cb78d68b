"""Tables of clients stay readable: with names, with many clients, on narrow terminals."""

import io

import pytest
from rich.console import Console

from fedproto.cli.fitted_tables import TextColumn, fit_tables
from fedproto.cli.metric_table import metric_tables
from fedproto.cli.numbers import percent, signed_points
from fedproto.cli.tables import (
    MAX_SHOWN_CLIENTS,
    clients_tables,
    compare_runs,
    describe_divergence,
    describe_traffic,
)

WAYS = ("head", "head_own", "prototype", "prototype_own")


def a_result(names, algorithm="fedproto", classes=("benign", "malignant")):
    clients = []
    for number, name in enumerate(names):
        client = {"id": number, "model": "mlp", "classes": list(classes), "train": 100 + number}
        client["accuracy"] = dict.fromkeys(WAYS, 0.5)
        if name is not None:
            client["name"] = name
        clients.append(client)
    accuracy = {way: {"mean": 0.5, "std": 0.0} for way in WAYS}
    return {
        "algorithm": algorithm,
        "dataset": "csv:a.csv",
        "clients": clients,
        "accuracy": accuracy,
        "rounds": 1,
    }


def printed(results, width):
    stream = io.StringIO()
    console = Console(file=stream, width=width)
    for table in clients_tables(results, width):
        console.print(table)
    return stream.getvalue()


def test_clients_are_called_by_name():
    shown = printed([a_result(["Ulm", "Köln", "[red]Gdańsk[/red]"])], 100)
    assert "Ulm " in shown and "Köln " in shown and "[red]Gdańsk[/red]" in shown


def test_clients_of_an_older_version_are_called_by_number():
    shown = printed([a_result([None, None])], 100)
    assert "      0  mlp" in shown and "      1  mlp" in shown


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("algorithms", [1, 2, 9])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_broken(width, algorithms):
    names = ["Ulm", "Universitätsklinikum Hamburg-Eppendorf, Campus Nord"]
    results = [a_result(names, f"method{number}") for number in range(algorithms)]
    lines = printed(results, width).splitlines()
    assert max(len(line) for line in lines) <= width
    shown = 4 if algorithms == 1 else 2  # accuracies per run
    rows = [line for line in lines if "Ulm" in line]
    assert sum(line.count("50.0") for line in rows) == shown * algorithms
    assert any("Universitätsklinikum Ha…" in line for line in lines)


def test_short_names_and_one_run_fit_one_table_of_80_columns():
    assert len(clients_tables([a_result(["Ulm", "Köln", "Gdańsk"])], 80)) == 1


def test_many_clients_are_cut_and_the_mean_is_of_all():
    shown = printed([a_result([f"site {number}" for number in range(1000)])], 120)
    assert len(shown.splitlines()) < MAX_SHOWN_CLIENTS + 15
    assert "the first 50 of 1000 clients" in shown and "mean" in shown


def test_many_classes_are_cut():
    classes = [f"class {number}" for number in range(62)]
    shown = printed([a_result(["Ulm"], classes=classes)], 160)
    assert "class 0 class 1 class 2 class 3 class 4 class 5 and 56 more" in shown
    assert "62 classes" not in shown
    shown = printed([a_result(["Ulm"], classes=["x" * 80, "y" * 80])], 160)
    assert "2 classes" in shown


def test_a_warning_of_divergence_names_the_client():
    result = a_result(["Ulm", "Köln"])
    result["diverged"] = [{"client": 1, "name": "Köln", "round": 3}]
    assert "first that of client Köln in round 3" in describe_divergence(result)
    result["diverged"] = [{"client": 1, "round": 3}]
    assert "first that of client 1 in round 3" in describe_divergence(result)


# --- other tables


def shown_tables(tables, width):
    stream = io.StringIO()
    console = Console(file=stream, width=width)
    for table in tables:
        console.print(table)
    return stream.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_wide_table_goes_on_below_with_its_first_column_and_whole_numbers(width):
    columns = [TextColumn("method", ["fedproto(lam=0.5, distance=l2)", "[local]"])]
    columns += [TextColumn(f"score {number}", ["1,234.5", "-0.1"]) for number in range(20)]
    shown = shown_tables(fit_tables(columns, width, "scores"), width)
    assert max(len(line) for line in shown.splitlines()) <= width
    assert shown.count("1,234.5") == 20 and shown.count("-0.1") == 20
    assert shown.count("[local]") == shown.count("method") > 1
    assert "continued" in shown


def test_numbers_are_set_right_and_texts_left():
    (table,) = fit_tables([TextColumn("a", ["x", "yy"]), TextColumn("b", ["5", "10"])], 80)
    lines = [line.rstrip() for line in shown_tables([table], 80).splitlines()]
    assert " x    5" in lines and " yy  10" in lines


def test_metrics_of_a_user_do_not_widen_the_table():
    values = {name: {"mean": 0.5} for name in ("balanced_accuracy", "macro_f1", "auroc")}
    values["accuracy"] = {"mean": 0.5, "worst": 0.25, "worst_client": 0}
    one = {"mean": 0.125, "worst": 0.1, "worst_client": 0}
    further = {f"my_long_metric_{number}": one for number in range(9)}
    result = a_result(["Ulm"]) | {"metrics": {"head": values | further}, "baselines": {}}
    shown = shown_tables(metric_tables([result], 80), 80)
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert shown.count("0.125") == 9 and shown.count("25.0") == 1


# --- sentences


def test_a_comparison_counts_better_equal_and_worse():
    first = a_result(["a", "b", "c", "d"], "local")
    other = a_result(["a", "b", "c", "d"], "fedproto")
    for client, accuracy in zip(other["clients"], (0.75, 0.5, 0.5 + 1e-15, 0.0), strict=True):
        client["accuracy"] = client["accuracy"] | {"head": accuracy}
    (head, _) = compare_runs([first, other])
    assert head == "fedproto head against local head: -6.2 points, 1 better, 2 equal, 1 worse"


def test_nothing_is_minus_zero():
    assert percent(-0.0001) == "0.0"
    assert signed_points(-0.04) == "0.0"
    assert signed_points(-0.06) == "-0.1"
    assert percent(0.123) == "12.3"


@pytest.mark.parametrize(("rounds", "shown"), [(1, "in 1 round,"), (2, "in 2 rounds,")])
def test_traffic_of_a_single_round_is_said_in_the_singular(rounds, shown):
    sent = {"values_per_round": 3, "bytes_up": 12, "bytes_down": 0}
    result = {"algorithm": "local", "communication": sent, "rounds": rounds}
    assert shown in describe_traffic(result | {"seconds": {"total": 0.5}})
