"""What the documents tell a newcomer to run, run."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from statistics import fmean

import pytest

import fedproto
from fedproto.config.settings import configure, read_assignment
from fedproto.data import DataFolders
from fedproto.errors import DataError
from fedproto.reproduce.plan import targets
from fedproto.runs.experiment import Experiment
from fedproto.runs.sweep import batches, read_sweep

ROOT = Path(__file__).resolve().parents[1]


def run_example(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def test_the_readmes_example_is_the_quickstart():
    (first, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert (ROOT / "examples" / "quickstart.py").read_text().endswith(first)


def test_quickstart(monkeypatch, capsys):
    run_example("quickstart.py", monkeypatch)
    local, fedproto, client = capsys.readouterr().out.splitlines()
    accuracy = [float(re.search(r"([\d.]+)% accurate, mean over 20 clients", line)[1]) for line in (local, fedproto)]
    assert min(accuracy) > 60
    assert re.fullmatch(r"client 0 knows [\d ]+; it uploaded \d+ bytes a round", client)


def test_mixed_inputs(monkeypatch, capsys):
    run_example("mixed_inputs.py", monkeypatch, "1", "2")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 5 * 2
    assert all(0 <= float(line.split()[-1]) <= 100 for line in lines[1:])


def test_the_outside_method_of_contributing(monkeypatch, tmp_path, capsys):
    """With two holders a class the (lower) median is one of them, so it must differ from the mean."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (tmp_path / "contributed_method.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    small = {"dataset": "digits", "clients": 6, "rounds": 2, "shots": 4}
    ours = fedproto.run(algorithm="contributed_method:fedmedian", **small)
    theirs = fedproto.run(algorithm="fedproto", **small)
    assert ours.data["algorithm"] == "fedmedian"
    assert ours.prototypes["known"].equal(theirs.prototypes["known"])
    assert not ours.prototypes["prototypes"].equal(theirs.prototypes["prototypes"])


def test_the_readmes_method_is_the_packages():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    file = (ROOT / "fedproto" / "algorithms" / "fedprox.py").read_text()
    strip = re.compile(r'\n    """.*?"""\n\n', re.DOTALL)  # the docstring
    assert strip.sub("\n", file) in blocks


def commands(text):
    """The fedproto commands of a document, without their comments."""
    return [line.partition("  #")[0].strip() for line in re.findall(r"^fedproto .*$", text, re.MULTILINE)]


@pytest.mark.parametrize("command", commands((ROOT / "README.md").read_text()))
def test_every_command_in_the_readme_is_accepted(command):
    """Everything up to the first round: names, options, mixes, data."""
    words = shlex.split(command)[1:]
    if words[0] == "reproduce":
        assert words[1] in (*targets(), "all") and set(words[2:]) <= {"--quick"}
    if words[0] != "run":
        # Those for a trained federation are run in test_tutorials.py, those for real machines in test_deploy.py.
        after = ("predict", "join", "members", "extend", "export", "deploy")
        assert words[0] in ("list", "resume", "report", "reproduce", *after)
        return
    flags = dict(zip(words[1::2], words[2::2], strict=True))
    flags.pop("--out", None)
    assigned = dict([read_assignment(flags.pop("--set"))] if "--set" in flags else [])
    settings = {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()}
    if settings.get("dataset") == "mnist":
        try:
            DataFolders().find("mnist")
        except DataError:
            pytest.skip("no MNIST here")
    for config in configure(settings, assigned):
        assert Experiment.prepare(config).federation.members


def test_the_readmes_sweep_is_one_stack_a_method(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "sweep.toml").write_text(text)
    cells = read_sweep(tmp_path / "sweep.toml")
    assert len(cells) == 2 * 5 * 3
    assert [len(batch) for batch in batches(cells, tmp_path / "out")] == [15, 15]


def test_the_committed_mixed_inputs_are_what_their_json_says(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from mixed_inputs import markdown

    found = json.loads((ROOT / "results" / "mixed-inputs.json").read_text())
    assert len(found["runs"]) == 5
    assert (ROOT / "results" / "mixed-inputs.md").read_text() == markdown(found)


def test_the_readmes_mixed_input_table_is_the_committed_one(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from mixed_inputs import seed_means

    found = json.loads((ROOT / "results" / "mixed-inputs.json").read_text())

    def mean(way, half):
        return f"{fmean(seed_means(found, way, half).values()):.1f}"

    readme = (ROOT / "README.md").read_text()
    halves = list(found["halves"])
    assert "| alone (head) | " + " | ".join(mean("alone, head", half) for half in halves) + " |" in readme
    for words, way in (("all 20 together", "together"), ("each half a federation of its own", "each half apart")):
        pairs = [f"{mean(f'{way}, head', half)} / {mean(f'{way}, prototype', half)}" for half in halves]
        assert f"| FedProto, {words} (head / prototype) | {' | '.join(pairs)} |" in readme


def test_the_readmes_mnist_table_is_the_committed_one():
    """Accuracy at n = 3, 4 and 5 and among own classes, of the methods in the table."""
    content = json.loads((ROOT / "results" / "table-mnist.json").read_text())
    cells = {(cell["method"], cell["column"]): cell for cell in content["cells"]}
    readme = (ROOT / "README.md").read_text()
    for method in ("Local", "FeSEM", "FedProx", "FedPer", "FedAvg", "FedRep", "FedProto", "FedProto-mh"):
        (line,) = re.findall(rf"^\| \**{method}\**(?: \(.*\))? \| .*\|$", readme, re.MULTILINE)
        numbers = [number.strip(" *") for number in line.split("|")[2:6]]
        expected = []
        for n in (3, 4, 5):
            cell = cells[method, f"n = {n}, stdev 2"]
            score = cell["accuracy"][cell["score"]]
            expected.append(f"{100 * score['mean']:.2f} ± {100 * score['interval']:.2f}")
        first = cells[method, "n = 3, stdev 2"]
        own = first["accuracy"][first["score"] + "_own"]["mean"]
        assert numbers == [*expected, f"{100 * own:.2f}"]
