"""`fedproto deploy run`: it starts or takes up a run, shows its progress, and says how it ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command_line import fedproto

from fedproto.cli.progress import estimate_rest
from fedproto.deploy import flower_runs, scaffold
from fedproto.deploy.flower_runs import FlowerRuns, LogLine, Rounds, read_line, read_rounds
from fedproto.errors import ConfigError

#: Stands in for Flower's command line. It notes its words, and answers from files: `statuses` has a
#: status per line, of which the last one stays; `log` what the log says, from one call to the next.
FLWR = f"""#!{sys.executable}
import json, pathlib, sys, time
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
with (here / "calls").open("a") as file:
    file.write(json.dumps(words) + "\\n")
if words[0] == "log":
    logs = (here / "log").read_text().split("---\\n")
    print("Using SuperLink: federation (127.0.0.1:9443)")
    print(logs[0], end="", flush=True)
    if len(logs) > 1:
        (here / "log").write_text("---\\n".join(logs[1:]))
    while (here / "hold").exists():
        time.sleep(0.05)
elif (here / "refusal").exists():
    print(json.dumps({{"success": False, "error-message": (here / "refusal").read_text()}}))
    sys.exit(1)
elif words[0] == "run":
    print(json.dumps({{"success": True, "run-id": "7"}}))
elif words[0] == "stop":
    (here / "statuses").write_text("finished:stopped")
    print(json.dumps({{"success": True, "run-id": words[1]}}))
else:
    statuses = (here / "statuses").read_text().splitlines()
    runs = [{{"run-id": "7", "status": statuses[0]}}] if statuses[0] else []
    (here / "statuses").write_text("\\n".join(statuses[1:] or statuses))
    print(json.dumps({{"success": True, "runs": runs}}))
"""
INFO = "\x1b[92mINFO \x1b[0m:      "
ERROR = "\x1b[91mERROR \x1b[0m:     "
LOG = f"""{INFO}Start `flwr-serverapp` process
{INFO}round 0 of 2 is done; the state is in server
{INFO}round 1: 3 of 3 replies accepted
{INFO}round 2: 3 of 3 replies accepted
{INFO}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A federation whose Flower is the stand-in; a run completes."""
    folder = tmp_path / "fed"
    scaffold.init(folder, ["a", "b"], "digits", ["0", "1"])
    stand_in = folder / "bin"
    stand_in.mkdir()
    (stand_in / "flwr").write_text(FLWR)
    (stand_in / "flwr").chmod(0o755)
    (stand_in / "log").write_text(LOG)
    (stand_in / "statuses").write_text("\nfinished:completed")
    with (folder / "env.sh").open("a") as file:
        file.write('export PATH="$PWD/bin:$PATH"\n')
    return folder


def calls(folder: Path) -> list[list[str]]:
    lines = (folder / "bin" / "calls").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_that_completes_is_shown_and_exits_with_0(folder: Path) -> None:
    done = fedproto("deploy", "run", folder, "rounds=2 lr=0.1")
    assert done.code == 0, done.out + done.err
    lines = done.out.splitlines()
    assert lines[0] == "run 7 has started"
    assert [line.partition(" (about")[0] for line in lines[2:]] == [
        "round 0 of 2 is done; the state is in server",
        "round 1: 3 of 3 replies accepted",
        "round 2: 3 of 3 replies accepted",
    ]
    (started,) = [words for words in calls(folder) if words[0] == "run"]
    assert started[started.index("--run-config") + 1] == "rounds=2 lr=0.1"


def test_a_run_that_fails_exits_with_1_and_the_first_error(folder: Path) -> None:
    log = f"{INFO}round 0 of 2 is done\n{ERROR}round 1: 9 are needed\n{ERROR}Exit Code: 201\n"
    (folder / "bin" / "log").write_text(log)
    (folder / "bin" / "statuses").write_text("\nfinished:failed")
    done = fedproto("deploy", "run", folder)
    assert (done.code, done.err) == (
        1,
        "error: run 7 has finished:failed: round 1: 9 are needed\n",
    )


def test_a_run_that_is_going_on_is_taken_up_again(folder: Path) -> None:
    (folder / "bin" / "statuses").write_text("running\nfinished:completed")
    done = fedproto("deploy", "run", folder)
    assert done.code == 0 and done.out.startswith("run 7 is going on\n"), done.out + done.err
    assert "run" not in {words[0] for words in calls(folder)}


def test_settings_do_not_change_a_run_that_is_going_on(folder: Path) -> None:
    (folder / "bin" / "statuses").write_text("running")
    done = fedproto("deploy", "run", folder, "rounds=9")
    assert done.code == 2 and "run 7 is going on, so its settings stay" in done.err


def test_a_run_can_be_stopped(folder: Path) -> None:
    (folder / "bin" / "statuses").write_text("running")
    done = fedproto("deploy", "run", folder, "--stop")
    assert done.code == 0 and "run 7 is stopped" in done.out, done.out + done.err
    assert calls(folder)[-1][:2] == ["stop", "7"]
    again = fedproto("deploy", "run", folder, "--stop")
    assert again.code == 0 and "no run is going on" in again.out


def test_a_log_that_breaks_off_is_continued_without_repetition(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the server is started again: Flower's log then begins with its first line."""
    monkeypatch.setattr(flower_runs, "LOOK_SECONDS", 0.0)
    lines = LOG.splitlines(keepends=True)
    (folder / "bin" / "log").write_text("".join(lines[:3]) + "---\n" + LOG)
    (folder / "bin" / "statuses").write_text("running\nfinished:completed")
    texts = [line.text for line in FlowerRuns(folder).follow("7")]
    assert texts == [
        "Start `flwr-serverapp` process",
        "round 0 of 2 is done; the state is in server",
        "round 1: 3 of 3 replies accepted",
        "round 2: 3 of 3 replies accepted",
    ]


def test_ctrl_c_leaves_the_run_going(folder: Path) -> None:
    (folder / "bin" / "hold").touch()
    (folder / "bin" / "statuses").write_text("\nrunning")
    process = subprocess.Popen(
        [sys.executable, "-m", "fedproto", "deploy", "run", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "round 2" in line:
                break
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output
        assert "run 7 goes on at the server" in output
        assert "stop" not in {words[0] for words in calls(folder)}
    finally:
        (folder / "bin" / "hold").unlink()
        process.kill()
        process.wait()


def test_a_server_that_refuses_is_quoted(folder: Path) -> None:
    (folder / "bin" / "refusal").write_text("Connection refused\n\x1b[31m")
    done = fedproto("deploy", "run", folder)
    assert done.code == 2 and "\x1b" not in done.err
    assert "does not accept `flwr list`: Connection refused" in done.err


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder that `fedproto deploy init` made"):
        FlowerRuns(tmp_path)


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("round 3 of 10 is done; the state is in x", Rounds(3, 10)),
        ("round 4: 3 of 4 replies accepted; c did not reply", Rounds(4, None)),
        ("round 5: 2 replies accepted, one 1 round late, 3 still open", Rounds(5, None)),
        ("round 6: the uploads of 3 of 3 members were added in a secure sum", Rounds(6, None)),
        ("round 7: 1 replies accepted; b did not reply, but 2 are needed; asked again", None),
        ("round 8: c was refused: it is of round 3, but this is round 8", None),
    ],
)
def test_the_log_says_how_far_the_rounds_are(text: str, rounds: Rounds | None) -> None:
    assert read_rounds(text) == rounds


def test_lines_lose_their_colours_and_control_characters() -> None:
    assert read_line(f"{INFO}round 1: \x07\x1b]0;x") == LogLine("INFO", "round 1:   ]0;x")
    assert read_line(f"{INFO}\n") is None
    assert read_line("Using SuperLink: federation\n") is None


def test_the_estimate_is_by_the_rounds_that_were_seen() -> None:
    """Taken up after round 4 of 10: two rounds in 20 seconds, four are left."""
    assert estimate_rest((100.0, 4), (120.0, 6), 10) == "about 40 s left"
    assert estimate_rest((0.0, 0), (600.0, 1), 7) == "about 60 min left"
    assert estimate_rest((100.0, 4), (100.0, 4), 10) == ""
    assert estimate_rest((100.0, 4), (130.0, 10), 10) == ""
