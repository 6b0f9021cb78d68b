"""What the documents tell a newcomer to run, run."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from statistics import fmean

import nbformat
import pytest
from nbclient import NotebookClient

from fedproto.config.settings import configure, read_assignment
from fedproto.reproduce.plan import targets
from fedproto.runs.experiment import Experiment

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART_OUTPUT = (
    r"local +(?P<local>[\d.]+)% accurate, mean over 20 clients\n"
    r"fedproto +(?P<fedproto>[\d.]+)% accurate, mean over 20 clients\n"
    r"client 0 knows [\d ]+; it uploaded \d+ bytes per round\n"
)


def run_example(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def test_the_readmes_example_is_the_quickstart():
    (first, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert (ROOT / "examples" / "quickstart.py").read_text().endswith(first)


def test_quickstart_with_a_single_round(capsys):
    program = (ROOT / "examples" / "quickstart.py").read_text()
    assert "rounds = 10\n" in program
    exec(compile(program.replace("rounds = 10\n", "rounds = 1\n"), "quickstart.py", "exec"), {})
    assert re.fullmatch(QUICKSTART_OUTPUT, capsys.readouterr().out)


@pytest.mark.slow
def test_quickstart(monkeypatch, capsys):
    run_example("quickstart.py", monkeypatch)
    found = re.fullmatch(QUICKSTART_OUTPUT, capsys.readouterr().out)
    assert found
    assert min(float(found["local"]), float(found["fedproto"])) > 60


NOTEBOOKS = sorted(path.name for path in (ROOT / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path):
    """In a kernel of its own and in an empty folder; a cell that raises fails the test."""
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and code[-1].outputs


def test_notebooks_are_stored_without_outputs_and_documented():
    assert NOTEBOOKS == [
        "first_steps.ipynb",
        "own_data_and_model.ipynb",
        "privacy_and_deployment.ipynb",
    ]
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for name in NOTEBOOKS:
        notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
        assert not any(cell.get("outputs") for cell in notebook.cells)
        assert f"examples/{name}" in pages


def test_mixed_inputs(monkeypatch, capsys):
    run_example("mixed_inputs.py", monkeypatch, "1", "2")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 5 * 2
    assert all(0 <= float(line.split()[-1]) <= 100 for line in lines[1:])


def test_the_readmes_method_is_the_packages():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    file = (ROOT / "fedproto" / "algorithms" / "fedprox.py").read_text()
    strip = re.compile(r'\n    """.*?"""\n\n', re.DOTALL)  # the docstring
    assert strip.sub("\n", file) in blocks


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 800


def test_the_readme_shows_what_the_quickstart_prints():
    """The numbers may differ in the last digit on other machines, so the words are compared."""
    (output,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert re.fullmatch(QUICKSTART_OUTPUT, output)


def readme_commands():
    """The fedproto commands in the README's table of tasks."""
    return re.findall(r"`(fedproto [^`]+)`", (ROOT / "README.md").read_text())


@pytest.mark.parametrize("command", readme_commands())
def test_every_command_in_the_readme_is_accepted(command, monkeypatch, tmp_path):
    """Everything up to the first round: names, options, mixes, data."""
    words = shlex.split(command)[1:]
    if words[0] == "reproduce":
        assert words[1] in (*targets(), "all") and set(words[2:]) <= {"--quick"}
    if words[0] != "run":
        # test_docs.py runs those for a trained federation, test_deploy.py those for machines.
        after = ("predict", "join", "members", "extend", "export", "deploy", "theory", "audit")
        before = ("init", "list", "sweep", "tune", "bench", "report", "reproduce", "watch")
        assert words[0] in (*before, *after)
        return
    if words[1] == "federation.toml":
        return  # tests/cli/test_init.py runs what `init` writes
    monkeypatch.chdir(tmp_path)
    bottles = [f"{number % 7},{'red' if number % 2 else 'white'}" for number in range(60)]
    (tmp_path / "wine.csv").write_text("\n".join(["acid,kind", *bottles]) + "\n")
    flags = dict(zip(words[1::2], words[2::2], strict=True))
    assigned = dict([read_assignment(flags.pop("--set"))] if "--set" in flags else [])
    settings = {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()}
    for config in configure(settings, assigned):
        assert Experiment.prepare(config).federation.members


def test_the_committed_mixed_inputs_are_what_their_json_says(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from mixed_inputs import markdown

    found = json.loads((ROOT / "results" / "mixed-inputs.json").read_text())
    assert len(found["runs"]) == 5
    assert (ROOT / "results" / "mixed-inputs.md").read_text() == markdown(found)


def test_the_mixed_input_table_of_the_results_is_the_committed_one(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from mixed_inputs import seed_means

    found = json.loads((ROOT / "results" / "mixed-inputs.json").read_text())

    def mean(way, half):
        return f"{fmean(seed_means(found, way, half).values()):.1f}"

    page = (ROOT / "results" / "README.md").read_text()
    halves = list(found["halves"])
    assert (
        "| alone (head) | " + " | ".join(mean("alone, head", half) for half in halves) + " |"
        in page
    )
    for words, way in (
        ("all 20 together", "together"),
        ("each half a federation of its own", "each half apart"),
    ):
        pairs = [
            f"{mean(f'{way}, head', half)} / {mean(f'{way}, prototype', half)}" for half in halves
        ]
        assert f"| FedProto, {words} (head / prototype) | {' | '.join(pairs)} |" in page


def test_the_mnist_table_of_the_results_is_the_committed_one():
    """Accuracy at n = 3, 4 and 5 and among own classes, of the methods in the table."""
    content = json.loads((ROOT / "results" / "table-mnist.json").read_text())
    cells = {(cell["method"], cell["column"]): cell for cell in content["cells"]}
    page = (ROOT / "results" / "README.md").read_text()
    for method in (
        "Local",
        "FeSEM",
        "FedProx",
        "FedPer",
        "FedAvg",
        "FedRep",
        "FedProto",
        "FedProto-mh",
    ):
        (line,) = re.findall(rf"^\| \**{method}\**(?: \(.*\))? \| .*\|$", page, re.MULTILINE)
        numbers = [number.strip(" *") for number in line.split("|")[2:6]]
        expected = []
        for n in (3, 4, 5):
            cell = cells[method, f"n = {n}, stdev 2"]
            score = cell["accuracy"][cell["score"]]
            expected.append(f"{100 * score['mean']:.2f} ± {100 * score['interval']:.2f}")
        first = cells[method, "n = 3, stdev 2"]
        own = first["accuracy"][first["score"] + "_own"]["mean"]
        assert numbers == [*expected, f"{100 * own:.2f}"]
