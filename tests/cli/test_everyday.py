"""Small things of every day: -h, completion, --quiet, --verbose, --json, logs, `fedproto runs`."""

import json
from pathlib import Path

import pytest
from helpers.command_line import SMALL, Answer, fedproto

from fedproto.core.files import hold_lock
from fedproto.inference.trained_client import load_client


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def succeed(*arguments: str | Path) -> Answer:
    answer = fedproto(*arguments)
    assert answer.code == 0, answer.err
    return answer


@pytest.mark.parametrize("command", [(), ("run",), ("data", "list"), ("deploy", "init")])
def test_h_is_help(command: tuple[str, ...]) -> None:
    assert succeed(*command, "-h").out == succeed(*command, "--help").out


def test_completion_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever shell started the tests: typer asks which one it is."""
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))
    assert "--install-completion" in succeed("--help").out
    shown = succeed("--show-completion").out
    assert "complete -o default -F" in shown and "fedproto" in shown


def test_json_is_the_result_and_nothing_else() -> None:
    answer = succeed("run", *SMALL, "--algorithm", "local,fedproto", "--out", "a", "--json")
    lines = [json.loads(line) for line in answer.out.splitlines()]
    assert [line["algorithm"] for line in lines] == ["local", "fedproto"]
    assert json.loads(Path("a/local/result.json").read_text())["accuracy"] == lines[0]["accuracy"]
    again = succeed("resume", "a", "--json")
    names = {json.loads(line)["algorithm"] for line in again.out.splitlines()}
    assert names == {"local", "fedproto"}


def test_quiet_prints_nothing_but_warnings() -> None:
    answer = succeed("run", *SMALL, "--out", "a", "--quiet")
    assert answer.out == ""
    assert all(line.startswith("warning:") for line in answer.err.splitlines())
    # The next command is loud again.
    assert "written to b" in succeed("run", *SMALL, "--out", "b").out


def test_verbose_prints_every_round_with_the_terms_of_its_loss() -> None:
    quiet = succeed("run", *SMALL, "--out", "a").out
    verbose = succeed("run", *SMALL, "--out", "b", "--verbose").out
    assert quiet.count("fedproto round") == 1
    assert verbose.count("fedproto round") == 3
    line = next(line for line in verbose.splitlines() if line.startswith("fedproto round    3"))
    stored = json.loads(Path("b/metrics.jsonl").read_text().splitlines()[-1])
    for term, value in stored["loss"].items():
        assert f"{term} {value:.3f}" in line
    assert len(stored["loss"]) > 1


def test_a_sweep_prints_json() -> None:
    Path("s.toml").write_text(
        'dataset = "digits"\nclients = 3\nrounds = 2\n[partition]\nname = "nway"\nshots = 5\n'
        "[sweep]\nseed = [0, 1]\n"
    )
    answer = succeed("sweep", "s.toml", "--json")
    assert [json.loads(line)["seed"] for line in answer.out.splitlines()] == [0, 1]


def test_the_log_says_what_happened() -> None:
    succeed("run", *SMALL, "--out", "a")
    log = Path("a/run.log").read_text()
    lines = log.splitlines()
    assert "fedproto from round 1 of 3, 4 clients" in lines[0]
    assert sum("fedproto round" in line for line in lines) == 3
    assert lines[-1].endswith("finished")


# --- fedproto runs


def test_runs_are_listed_with_state_accuracy_and_size() -> None:
    succeed("run", *SMALL, "--algorithm", "local,fedproto", "--out", "runs/both")
    succeed("run", *SMALL, "--out", "runs/one")
    (Path("runs/one") / "result.json").unlink()
    (Path("runs/both/local/metrics.jsonl")).write_text("{")
    (Path("runs/both/local/result.json")).write_text("{")
    listed = {}
    for line in succeed("runs", "--json").out.splitlines():
        each = json.loads(line)
        listed[each["name"]] = each
    assert set(listed) == {"both/local", "both/fedproto", "one"}
    finished = listed["both/fedproto"]
    result = json.loads(Path("runs/both/fedproto/result.json").read_text())
    assert (finished["state"], finished["round"], finished["rounds"]) == ("finished", 3, 3)
    assert finished["accuracy"] == result["accuracy"]["head"]["mean"]
    files = [path for path in Path("runs/both/fedproto").rglob("*") if path.is_file()]
    assert finished["bytes"] == sum(path.stat().st_size for path in files)
    assert (listed["one"]["state"], listed["one"]["round"]) == ("stopped", 3)
    assert listed["both/local"]["state"] == "damaged"
    with hold_lock(Path("runs/one")):
        assert "running" in succeed("runs").out
    assert "running" not in succeed("runs").out


def test_checkpoints_of_finished_runs_are_deleted_on_request() -> None:
    succeed("run", *SMALL, "--out", "runs/done")
    succeed("run", *SMALL, "--out", "runs/begun")
    Path("runs/begun/result.json").unlink()
    answer = succeed("runs", "--drop-checkpoints")
    assert "of checkpoints deleted" in answer.out
    assert not list(Path("runs/done/checkpoint").glob("*.safetensors"))
    assert list(Path("runs/begun/checkpoint").glob("*.safetensors"))
    assert Path("runs/done/models/index.json").exists()
    assert load_client(Path("runs/done"), 0).own  # predict and export begin so
    succeed("resume", "runs/begun")


def test_a_folder_that_is_not_there_is_refused() -> None:
    assert fedproto("runs", "nowhere").code == 2
    Path("empty").mkdir()
    assert "holds no run" in succeed("runs", "empty").out
