"""Tables of clients stay readable: with names, with many clients, on narrow terminals."""

import io

import pytest
from rich.console import Console

from fedproto.cli.tables import MAX_SHOWN_CLIENTS, clients_tables, describe_divergence

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
