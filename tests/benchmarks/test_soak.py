"""The soak: its page and its replay of a federation without Flower; and one of real processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from helpers.patience import wait_until
from scipy.stats import linregress

from benchmarks import soak
from benchmarks.soak_events import draw_event, strike
from benchmarks.soak_federation import prepare_replay, write_data
from benchmarks.soak_page import make_page
from benchmarks.soak_processes import find_processes, measure_files
from benchmarks.soak_record import Journal, Line, Watcher, note_member, note_server
from benchmarks.soak_replay import verify
from benchmarks.soak_trends import fit_slope, summarise_processes
from fedproto.deploy.member import train_round
from fedproto.deploy.member_checkpoint import find_state_file
from fedproto.deploy.server_state import ServerState

REPOSITORY = Path(__file__).resolve().parents[2]
HAS_PROC = Path("/proc/self/environ").exists()
needs_proc = pytest.mark.skipif(not HAS_PROC, reason="processes are found by /proc")
#: Who trains in each round, and whose reply counts. c is late, away, and there again.
TRAINED = ["abc", "abc", "ab", "abc"]
COUNTED = ["abc", "ab", "ab", "abc"]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Line], Any]:
    """The journal of a federation without Flower, and the settings of its members."""
    folder = tmp_path_factory.mktemp("soak")
    files = write_data(folder, list("abc"))
    members, settings, terms = prepare_replay(folder / "real", files)
    journal = Journal(folder / "journal.jsonl")
    server = ServerState(settings, terms)
    for name in files:
        server.make_request(name)
    for trained, counted in zip(TRAINED, COUNTED, strict=True):
        requests = {name: server.make_request(name) for name in trained}
        for name in trained:
            reply = train_round(requests[name], members[name])
            journal.write("member", **note_member(find_state_file(members[name])))
            if name in counted:
                server.accept_reply(name, reply, server.expect_replies(frozenset(counted)))
        server.close_round()
        server.save()
        journal.write("server", **note_server(server.path))
    return journal.read(), files


def change(lines: list[Line], what: str, round: int, **values: Any) -> list[Line]:
    """Return a journal in which the lines of one round say something else."""
    changed = []
    for line in lines:
        is_meant = (line["what"], line["round"]) == (what, round)
        changed.append(line | values if is_meant else line)
    return changed


def test_a_soak_in_which_nothing_was_lost_is_replayed_to_the_bit(
    record: tuple[list[Line], Any], tmp_path: Path
) -> None:
    found = verify(*record, tmp_path / "replay")
    assert found["problems"] == []
    assert found["largest difference from numpy"] < 1e-6
    assert [row[1] for row in found["rounds"]] == COUNTED
    assert [row[2] for row in found["rounds"]] == TRAINED
    assert found["uploads"] == {
        "member-rounds": 12,
        "counted": 10,
        "trained, but not counted": 1,
        "not trained": 1,
    }


def test_a_reply_that_was_lost_is_found(record: tuple[list[Line], Any], tmp_path: Path) -> None:
    """The server says that c counted in round 2; its prototypes know nothing of it."""
    lines, files = record
    changed = change(lines, "server", 2, counted=["a", "b", "c"])
    found = verify(changed, files, tmp_path / "replay")
    assert found["problems"][0] == "round 2: the server's prototypes differ"
    assert found["largest difference from numpy"] > 1e-3


def test_a_reply_that_was_not_said_to_count_is_found(
    record: tuple[list[Line], Any], tmp_path: Path
) -> None:
    lines, files = record
    found = verify(change(lines, "server", 4, counted=["a", "b"]), files, tmp_path / "replay")
    assert found["problems"] == ["round 4: the server's prototypes differ"]


def test_contradictions_are_found_without_a_replay(
    record: tuple[list[Line], Any], tmp_path: Path
) -> None:
    lines, files = record
    (second,) = [line for line in lines if (line["what"], line["round"]) == ("server", 2)]
    without = [line for line in lines if line is not second]
    (missing,) = verify(without, files, tmp_path / "replay")["problems"]
    assert missing == "round 2 was not seen"
    (twice,) = verify([*lines, second | {"hash": "0"}], files, tmp_path / "replay")["problems"]
    assert twice == "the server has two versions of round 2"
    unseen = [line for line in lines if (line.get("name"), line["round"]) != ("b", 2)]
    (untrained,) = verify(unseen, files, tmp_path / "replay")["problems"]
    assert untrained == "round 2: b counted without having been seen to train"


def test_a_journal_whose_last_line_was_cut_off_is_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("run", round=1)
    with journal.path.open("a") as file:
        file.write('{"what": "run", "rou')
    assert [line["round"] for line in journal.read()] == [1]


def test_each_version_of_a_file_is_noted_once(
    record: tuple[list[Line], Any], tmp_path: Path
) -> None:
    _, files = record
    members, settings, terms = prepare_replay(tmp_path / "federation", files)
    server = ServerState(settings, terms)
    watcher = Watcher(tmp_path / "federation", [], Journal(tmp_path / "journal.jsonl"))
    server.make_request("a")
    server.save()
    watcher.look()
    watcher.look()
    train = train_round(server.make_request("a"), members["a"])
    server.accept_reply("a", train, server.expect_replies(frozenset("a")))
    server.close_round()
    server.save()
    watcher.look()
    noted = [(line["round"], line["counted"]) for line in watcher.journal.read()]
    assert noted == [(0, []), (1, ["a"])]
    assert watcher.round == 1


# --- the page


def make_sample(round: int, kilobytes: int, log_bytes: int, life: str = "7-1") -> Line:
    worker = ["a", "worker", life, kilobytes, 1, 4]
    return {
        "what": "sample",
        "round": round,
        "load": 1.0,
        "processes": [worker],
        "files": {"logs": [1, log_bytes]},
    }


def make_found(record: tuple[list[Line], Any], folder: Path) -> dict[str, Any]:
    """What soak.json holds: the record, with an event on c after round 2 and hand-made samples."""
    found = verify(*record, folder)
    found["rounds"] = [[*row[:4], 100.0 + 10 * row[0]] for row in found["rounds"]]
    event = {"owner": "c", "role": "supernode", "signal": "SIGKILL", "found": True}
    session = {"every": 8.0, "timeout": 12.0, "note": "as an example"}
    journal = [{"what": "session", "time": 90.0, **session}]
    journal.append({"what": "event", "time": 121.0, **event})
    journal += [make_sample(round, 1024 + 8 * round, 2048 + 100 * round) for round in range(30)]
    journal.append({"what": "end", "left": []})
    settings = {"members": 3, "rounds": 10, "model": "mlp", "dim": 10, "quorum": 3}
    settings |= {"retry": 1.0, "poll": 0.5, "stall": 240.0}
    return found | {"settings": settings, "journal": journal}


def test_the_page_says_what_was_found(record: tuple[list[Line], Any], tmp_path: Path) -> None:
    found = make_found(record, tmp_path / "replay")
    (tmp_path / "soak.json").write_text(json.dumps(found))
    soak.main(["--draw", "--out", str(tmp_path)])
    page = (tmp_path / "soak.md").read_text()
    assert "ran 4 of 10 rounds" in page
    assert "All are equal, to the bit." in page
    assert "| 1 | 1 to 4 | 8 rounds | 12 s | as an example |" in page
    assert "| counted | 10 | 83.3% |" in page
    assert "| member: supernode | 1 | 0 | 9 s | 9 s | 1 | 1 |" in page
    assert "| member: worker | 1 | 29 | 1.1 | 1.2 | +8.0 ± 0.0 | 4 | 4 | 4 | 1 | 1 |" in page
    assert "| logs | 1 | 1 | 2.0 | 3.4 | 4.8 | +100.0 ± 0.0 | +100.0 ± 0.0 |" in page
    assert "no processes of the federation were left" in page


def test_the_page_says_what_differs(record: tuple[list[Line], Any], tmp_path: Path) -> None:
    found = make_found(record, tmp_path / "replay")
    page = make_page(found | {"problems": ["round 3: a trained something else"]})
    assert "**They differ:**\n\n- round 3: a trained something else" in page
    assert "to the bit" not in page


def test_a_slope_has_the_interval_of_a_linear_regression() -> None:
    x, y = [0.0, 1.0, 2.0, 5.0, 7.0], [1.0, 0.5, 3.0, 4.5, 9.0]
    slope = fit_slope([list(zip(x, y, strict=True))])
    assert slope is not None
    expected = linregress(x, y)
    assert slope.value == pytest.approx(expected.slope)
    assert slope.half == pytest.approx(3.182446 * expected.stderr)  # Student's t, 3 degrees


def test_a_process_that_begins_anew_is_no_growth() -> None:
    """Two processes that do not grow, the second of which is larger from its start."""
    first = [make_sample(round, 1000, 0, "7-1") for round in range(30)]
    second = [make_sample(round, 2000, 0, "8-2") for round in range(30, 60)]
    (usage,) = summarise_processes(first + second)
    assert usage.lives == 2
    assert usage.growth is not None and usage.growth.value == 0
    assert fit_slope([[(1, 1)], []]) is None


# --- processes


def test_events_depend_on_seed_and_number_only() -> None:
    events = [draw_event(1, number, list("abcd"), 8.0) for number in range(400)]
    assert events == [draw_event(1, number, list("abcd"), 8.0) for number in range(400)]
    assert events != [draw_event(2, number, list("abcd"), 8.0) for number in range(400)]
    assert {event.owner for event in events} == {"server", *"abcd"}
    assert 7 < sum(event.rounds for event in events) / len(events) < 9
    for event in events:
        wrong = "supernode" if event.owner == "server" else "superlink"
        assert event.role != wrong


@contextmanager
def stand_in(folder: Path, owner: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like one of a federation's."""
    wait = [sys.executable, "-c", "import time; time.sleep(600)", *words]
    environment = os.environ | {"FLWR_HOME": str(folder / f".flwr-{owner}")}
    process = subprocess.Popen(wait, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@needs_proc
def test_an_event_strikes_the_process_that_it_names(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    words = ("fedproto.deploy.flower_node", "supernode")
    with (
        stand_in(here, "a", *words) as meant,
        stand_in(here, "b", *words) as other,
        stand_in(there, "a", *words) as elsewhere,
        stand_in(here, "a", "fedproto.deploy.supervisor") as supervisor,
    ):
        wait_until(lambda: len(find_processes(here)) == 3, "the stand-ins run")
        found = {each.number: (each.owner, each.role) for each in find_processes(here)}
        assert found == {
            meant.pid: ("a", "supernode"),
            other.pid: ("b", "supernode"),
            supervisor.pid: ("a", "supervisor"),
        }
        event = draw_event(1, 0, ["a"], 8.0)._replace(owner="a", role="supernode", signal="SIGTERM")
        assert strike(event, lambda: find_processes(here))
        assert meant.wait() == -signal.SIGTERM
        assert not strike(event, lambda: find_processes(here))
        assert other.poll() is None and elsewhere.poll() is None and supervisor.poll() is None


def test_files_are_counted_by_what_they_are(tmp_path: Path) -> None:
    paths = ("server/flower.db", "server/server.safetensors", "state-a/member.safetensors")
    for path in (*paths, "state-a/.member.safetensors.1-2.new", "tmp/x", ".flwr-a/source"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(b"12345")
    assert measure_files(tmp_path) == {
        "Flower's database": [1, 5],
        "Flower's homes": [1, 5],
        "temporary files": [1, 5],
        "the members' states": [2, 10],
        "the server's state": [1, 5],
    }


@pytest.mark.slow
@needs_proc
def test_a_short_soak_of_real_processes_loses_nothing(tmp_path: Path) -> None:
    """Called twice, it goes on after the rounds that were done."""
    command = [sys.executable, "-m", "benchmarks.soak", str(tmp_path / "soak"), "--members", "abcd"]
    command += ["--every", "1.5", "--calm", "1", "--minutes", "20", "--out", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    for rounds in ("3", "6"):
        subprocess.run([*command, "--rounds", rounds], cwd=REPOSITORY, env=environment, check=True)
    found = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert found["problems"] == []
    assert [row[0] for row in found["rounds"]] == list(range(1, 7))
    assert found["largest difference from numpy"] < 1e-6
    whats = [line["what"] for line in found["journal"]]
    assert whats.count("session") == 2 and whats.count("event") >= 2
    assert [line["left"] for line in found["journal"] if line["what"] == "end"] == [[], []]
    assert "All are equal, to the bit." in (tmp_path / "out" / "soak.md").read_text()
