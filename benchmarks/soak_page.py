"""The page of a soak, from what results/soak.json holds."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from benchmarks.soak_trends import SETTLED_ROUNDS, Slope, summarise_files, summarise_processes

SERVER = "server"


def make_page(found: dict[str, Any]) -> str:
    """Return the page."""
    sections = (
        _introduce(found),
        _tell_rounds(found),
        _tell_uploads(found),
        _tell_events(found),
        _tell_memory(found),
        _tell_files(found),
    )
    return "\n".join(line for section in sections for line in section) + "\n"


def _lines(found: dict[str, Any], what: str) -> list[dict[str, Any]]:
    return [line for line in found["journal"] if line["what"] == what]


def _introduce(found: dict[str, Any]) -> list[str]:
    settings = found["settings"]
    done = len(found["rounds"])
    return [
        "# A soak of a deployed federation",
        "",
        *_wrap(
            "Made by `OMP_NUM_THREADS=1 python -m benchmarks.soak FOLDER`, which says how; "
            "`--draw` writes this page again from the JSON."
        ),
        "",
        *_wrap(
            f"A server and {settings['members']} members ran {done:,} of {settings['rounds']:,} "
            "rounds of FedProto in real processes with TLS and keys, by the scripts of `fedproto "
            "deploy init`, all on one machine. Every few rounds a process got a signal, or a whole "
            "member or server was stopped and started later. A supervisor that had ended was "
            "started again after a second, as systemd does, and a run that had ended with the "
            "server was submitted again, as a person does with `./run.sh`. The last member and the "
            "last rounds were left in peace, so that some processes lived long enough to show a "
            "leak."
        ),
        "",
        *_wrap(
            f"Little data (60 images per member), a small model (`{settings['model']}`, prototypes "
            f"of {settings['dim']} values), quorum {settings['quorum']}, "
            f"`RETRY={settings['retry']:g}`, and `FLWR_SUPEREXEC_TASK_POLL_INTERVAL="
            f"{settings['poll']:g}`. The rounds are many and short: this shows what happens in a "
            "number of rounds, not what happens in a number of days."
        ),
    ]


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def _list_sessions(found: dict[str, Any]) -> list[str]:
    """Return the table of the sessions, of which a soak has several if it was taken up again."""
    sessions = _lines(found, "session")
    ends = [session["time"] for session in sessions[1:]] + [float("inf")]
    lines = ["", "| session | rounds | an event every | timeout | |", "|---|---|---|---|---|"]
    for number, session in enumerate(sessions, 1):
        end = ends[number - 1]
        rounds = [row[0] for row in found["rounds"] if session["time"] < row[4] < end]
        shown = f"{rounds[0]} to {rounds[-1]}" if rounds else "none"
        cells = [str(number), shown, f"{session['every']:g} rounds", f"{session['timeout']:g} s"]
        lines.append(f"| {' | '.join(cells)} | {session['note']} |")
    return lines


def _tell_rounds(found: dict[str, Any]) -> list[str]:
    sessions = _lines(found, "session")
    samples = _lines(found, "sample")
    seconds = _round_seconds(found)
    total = sum(seconds)
    loads = [sample["load"] for sample in samples]
    machine = found["machine"]
    stalls = len(_lines(found, "stall"))
    left = sum(len(line["left"]) for line in _lines(found, "end"))
    facts = [
        f"{len(found['rounds']):,} rounds in {total / 60:.0f} minutes, in "
        f"{_count(len(sessions), 'session')}.",
        f"A round took {statistics.median(seconds):.1f} s in the median, and {max(seconds):.0f} s "
        "at most, with all restarts of the server. The machine "
        f"({machine['cores']} cores, Python {machine['python']}) had other work: its load was "
        f"{statistics.median(loads):.0f} in the median, from {min(loads):.0f} to "
        f"{max(loads):.0f}.",
        _tell_stalls(stalls, found["settings"]["stall"]),
        f"After the end {_count(left, 'process', 'processes')} of the federation "
        f"{'was' if left == 1 else 'were'} left.",
    ]
    lines = ["", "## Rounds", ""]
    for fact in facts:
        lines += textwrap.wrap(
            fact, 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
        )
    return [*lines, *_list_sessions(found)]


def _tell_stalls(stalls: int, seconds: float) -> str:
    """Return how often a person would have had to restart the server."""
    if not stalls:
        return f"A round was closed at least every {seconds:g} s, so no person had to step in."
    return (
        f"{_count(stalls, 'time').capitalize()} no round was closed for {seconds:g} s, and the "
        "server was restarted, as a person would do."
    )


def _count(number: int, one: str, many: str = "") -> str:
    words = one if number == 1 else many or f"{one}s"
    return f"{number or 'no'} {words}"


def _round_seconds(found: dict[str, Any]) -> list[float]:
    """Return the seconds between the ends of two rounds of one session."""
    starts = [line["time"] for line in _lines(found, "session")]
    times = [row[4] for row in found["rounds"]]
    seconds = []
    for before, after in pairwise(times):
        if not any(before < start < after for start in starts):
            seconds.append(after - before)
    return seconds


def _tell_uploads(found: dict[str, Any]) -> list[str]:
    uploads = found["uploads"]
    total = uploads["member-rounds"]
    problems = found["problems"]
    lines = [
        "",
        "## Was anything lost, or counted twice?",
        "",
        "All rounds were run again in one process, without Flower: those trained who had trained,",
        "those counted who had counted. Compared were the server's prototypes after every round,",
        "and every member's model and reply in every round, by SHA-256 of their bits.",
        "",
    ]
    if problems:
        lines += ["**They differ:**", "", *(f"- {problem}" for problem in problems)]
    else:
        lines += ["**All are equal, to the bit.** No round is missing, and none has two versions."]
    difference = found["largest difference from numpy"]
    if difference is not None:
        lines += [
            "",
            "Added by numpy in float64, without our code, the uploads that had counted differ from",
            f"the server's prototypes by {difference:.1e} at most (these are float32).",
        ]
    lines += [
        "",
        "| uploads | number | of all |",
        "|---|---|---|",
    ]
    for name, number in uploads.items():
        lines.append(f"| {name} | {number:,} | {number / total:.1%} |")
    for reason, number in found["reasons"].items():
        lines.append(f"| the server says: {reason} | {number:,} | {number / total:.1%} |")
    lines += [
        "",
        "A reply does not count if it comes after the timeout, or if the server was killed before",
        "it wrote the round, and the member is not there when the round is asked for again. Its",
        "member keeps the model, and goes on from there; the replay does the same.",
    ]
    return lines


def _tell_events(found: dict[str, Any]) -> list[str]:
    events = [event for event in _lines(found, "event") if event["found"]]
    signals: dict[str, Counter[str]] = defaultdict(Counter)
    pauses: dict[str, list[float]] = defaultdict(list)
    missed: dict[str, list[int]] = defaultdict(list)
    for event in events:
        kind = _name_event(event)
        signals[kind][event["signal"]] += 1
        after = [row for row in found["rounds"] if row[4] > event["time"]]
        if after:
            pauses[kind].append(after[0][4] - event["time"])
        if event["owner"] != SERVER:
            missed[kind].append(_count_missed(after, event["owner"]))
    lines = [
        "",
        "## What was done to it",
        "",
        f"{len(events)} events. A pause is the time from an event to the end of the next round; it",
        "includes what a round takes anyway. Rounds missed are those in a row in which the member",
        "that was struck did not count; for Flower, a member whose SuperNode was killed is online",
        "for another minute, and it is not let in again before.",
        "",
        "| struck | SIGKILL | SIGTERM | pause, median | longest | rounds missed, median | most |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in sorted(signals):
        cells = [kind, str(signals[kind]["SIGKILL"]), str(signals[kind]["SIGTERM"])]
        cells += _median_and_most(pauses[kind], " s")
        cells += _median_and_most(missed[kind], "")
        lines.append(f"| {' | '.join(cells)} |")
    slow = _lines(found, "slow")
    if slow:
        lines += ["", f"Within a minute of SIGTERM, {len(slow)} times something had not ended."]
    return lines


def _name_event(event: dict[str, Any]) -> str:
    side = SERVER if event["owner"] == SERVER else "member"
    names = {"all": "all its processes, started later", "fork": "the process of a message"}
    if side == SERVER:
        names["fork"] = "the process of the run"
    return f"{side}: {names.get(event['role'], event['role'])}"


def _count_missed(after: list[list[Any]], name: str) -> int:
    """Return the rounds in a row that a member missed; its reply to the first may be in already."""
    if after and name in after[0][1]:
        after = after[1:]
    missed = 0
    for row in after:
        if name in row[1]:
            break
        missed += 1
    return missed


def _median_and_most(values: Iterable[float], unit: str) -> list[str]:
    numbers = list(values)
    if not numbers:
        return ["", ""]
    return [f"{statistics.median(numbers):.0f}{unit}", f"{max(numbers):.0f}{unit}"]


def _tell_memory(found: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## Memory, open files and threads",
        "",
        "Resident memory by kind of process, medians of the samples in the first and in the second",
        "half of the rounds; pages that a fork shares with its parent count in both. Growth is",
        f"within the lives of processes, after the first {SETTLED_ROUNDS} rounds of each, with the "
        "95% interval",
        "of the slope, as if samples were independent.",
        "",
        "| process | lives | longest, rounds | MiB, first half | second half | KiB per round "
        "| open files | second half | most | threads | second half |",
        "|---" * 11 + "|",
    ]
    for usage in summarise_processes(_lines(found, "sample")):
        cells = [usage.kind, str(usage.lives), str(usage.longest)]
        cells += [f"{value:.1f}" for value in usage.memory]
        cells.append(_show_slope(usage.growth))
        cells += [f"{value:.0f}" for value in usage.descriptors]
        cells.append(str(usage.most_descriptors))
        cells += [f"{value:.0f}" for value in usage.threads]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _show_slope(slope: Slope | None) -> str:
    return "" if slope is None else f"{slope.value:+.1f} ± {slope.half:.1f}"


def _tell_files(found: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## Files",
        "",
        "| files | number, first | last | KiB, first | middle | last "
        "| bytes per round, first half | second half |",
        "|---" * 8 + "|",
    ]
    for growth in summarise_files(_lines(found, "sample")):
        cells = [growth.kind, *(str(number) for number in growth.numbers)]
        cells += [f"{size:,.1f}" for size in growth.sizes]
        cells += [_show_slope(slope) for slope in growth.slopes]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
