"""Sites keep their names through every command, and nobody's number ever changes."""

import csv
import json
from pathlib import Path

import pytest
from helpers.sites import SITES, write_sites
from helpers.trained_runs import cells, fail, succeed

import fedproto
from fedproto.core.files import read_tensors
from fedproto.runs.prototype_files import PROTOTYPES_FORMAT

NUMBERED = ["Gdańsk", "Köln", "Ulm"]  # in the order of their character codes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over Ulm, Köln and Gdańsk."""
    folder = tmp_path_factory.mktemp("names")
    data = write_sites(folder / "sites.csv", SITES)
    answer = succeed(
        "run",
        "--dataset",
        f"csv:{data}",
        "--partition",
        "natural",
        "--clients",
        "3",
        "--rounds",
        "2",
        "--model",
        "mlp(hidden=8,width=4)",
        "--lr",
        "0.1",
        "--out",
        folder / "run",
    )
    (folder / "table.txt").write_text(answer.out, encoding="utf-8")
    patients = "height,width\n0.1,0.2\n4.1,3.9\n"
    (folder / "patients.csv").write_text(patients)
    return folder


def clients_of(run: Path) -> list[tuple[int, str]]:
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return [(client["id"], client["name"]) for client in result["clients"]]


def test_names_go_through_every_command(folder: Path) -> None:
    run = folder / "run"
    numbered = list(enumerate(NUMBERED))
    assert clients_of(run) == numbered
    table = (folder / "table.txt").read_text(encoding="utf-8")
    assert all(f"\n {name} " in table for name in NUMBERED)

    _, header = read_tensors(run / "prototypes.safetensors", PROTOTYPES_FORMAT)
    assert header["clients"] == NUMBERED

    # predict: the same client by name and by number
    patients = folder / "patients.csv"
    by_name = succeed("predict", run, patients, "--client", "Köln", "--json").out
    assert by_name == succeed("predict", run, patients, "--client", "1", "--json").out
    of_another = succeed("predict", run, patients, "--client", "Ulm", "--json").out
    assert by_name != of_another
    missing = fail("predict", run, patients, "--client", "Koln").err
    assert "did you mean 'Köln'? there are Gdańsk, Köln, Ulm" in missing

    # export
    succeed("export", run, "--client", "Köln", "--to", folder / "exported", "--no-onnx")
    manifest = json.loads((folder / "exported" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["about"]["client"], manifest["about"]["name"]) == (1, "Köln")
    assert succeed("predict", folder / "exported", patients, "--json").out == by_name
    other = fail("predict", folder / "exported", patients, "--client", "Ulm").err
    assert "holds client Köln and no other" in other

    # report
    succeed("report", run, "--out", folder / "report")
    pages = list((folder / "report").rglob("*.html"))
    assert any("client Köln" in page.read_text(encoding="utf-8") for page in pages)
    counts = next((folder / "report").rglob("classes-1.csv"))
    with counts.open(encoding="utf-8", newline="") as file:
        assert [row[0] for row in csv.reader(file)] == ["client", *NUMBERED]

    # join, under the name in the newcomer's data
    newcomer = write_sites(folder / "bonn.csv", ["Bonn"], seed=1)
    join = ("join", "--prototypes", run, "--data", f"csv:{newcomer}", "--epochs", "1")
    succeed(*join, "--model", "mlp(hidden=8)", "--out", folder / "new")
    assert clients_of(folder / "new") == [(0, "Bonn")]

    # members and extend
    added = succeed("members", run, "--add", folder / "new").out
    assert [row[0] for row in cells(added, "member")[1:]] == [*NUMBERED, "Bonn"]
    extended = folder / "extended"
    table = succeed("extend", run, "--rounds", "1", "--out", extended).out
    assert all(f"\n {name} " in table for name in (*NUMBERED, "Bonn"))
    assert clients_of(extended) == [*numbered, (3, "Bonn")]
    classifier = fedproto.Classifier.of(extended, "Bonn")
    assert classifier.trained.about["client"] == 3

    # a member leaves: the others are still called what they were called
    left = succeed("members", extended, "--remove", "Gdańsk").out
    assert "Gdańsk left" in left
    succeed("extend", extended, "--rounds", "1", "--out", folder / "rest")
    assert [name for _, name in clients_of(folder / "rest")] == ["Köln", "Ulm", "Bonn"]


def test_a_name_is_text_and_never_markup(tmp_path: Path) -> None:
    """Neither in the terminal nor in HTML, and no path comes from it."""
    names = ["[red]a[/red]", "<img src=x onerror=alert(1)>", "../../etc", "=1+1"]
    data = write_sites(tmp_path / "sites.csv", names)
    run = ("run", "--dataset", f"csv:{data}", "--partition", "natural", "--clients", "4")
    table = succeed(*run, "--rounds", "1", "--out", tmp_path / "run").out
    assert "[red]a[/red]" in table and "../../etc" in table
    succeed("report", tmp_path / "run", "--out", tmp_path / "report")
    for page in (tmp_path / "report").rglob("*.html"):
        assert "<img src=x" not in page.read_text(encoding="utf-8")
    counts = next((tmp_path / "report").rglob("classes-1.csv")).read_text(encoding="utf-8")
    assert "\n'=1+1," in counts
    export = ("export", tmp_path / "run", "--to", tmp_path / "exported", "--no-onnx")
    succeed(*export, "--client", "../../etc")
    assert {path.name for path in tmp_path.iterdir()} == {"sites.csv", "run", "report", "exported"}
