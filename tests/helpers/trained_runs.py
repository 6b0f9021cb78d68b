"""Commands on a trained federation: how they are called, and how their answers are read."""

import re
from pathlib import Path

from helpers.command_line import Answer, fedproto, files_in, only_line

#: A federation that trains in a second.
DIGITS = {
    "dataset": "digits",
    "clients": 4,
    "rounds": 5,
    "shots": 5,
    "lr": 0.1,
    "engine": "reference",
    "model": "mlp(hidden=16,width=8)",
}
#: The data and the training of a newcomer, as flags of `fedproto join`.
NEWCOMER = (
    "--data",
    "digits",
    "--classes",
    "0,5,7",
    "--shots",
    "5",
    "--epochs",
    "2",
    "--set",
    "lr=0.1",
)


def succeed(*arguments: str | Path) -> Answer:
    """Run a command that must succeed."""
    answer = fedproto(*arguments)
    assert answer.code == 0, answer.err
    return answer


def fail(*arguments: str | Path, writes: Path | None = None) -> Answer:
    """Exit code 2, one line that says why, nothing printed, and nothing half-written."""
    before = files_in(writes) if writes and writes.exists() else None
    answer = fedproto(*arguments)
    assert answer.code == 2, answer
    assert only_line(answer.err).startswith("error: ")
    assert "Traceback" not in answer.err
    assert (files_in(writes) if writes and writes.exists() else None) == before
    return answer


def cells(out: str, header: str) -> list[list[str]]:
    """The header and the rows of the table whose header holds this word; no cell may be empty."""
    lines = out.splitlines()
    rule = next(
        place
        for place, line in enumerate(lines)
        if set(line.strip()) == {"─"} and header in lines[place - 1]
    )
    rows = [lines[rule - 1]]
    for line in lines[rule + 1 :]:
        if not line.strip():
            break
        rows.append(line)
    return [re.split(r"\s{2,}", row.strip()) for row in rows]
