"""The rounds of a run as columns, read from metrics.jsonl as it grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedproto.core.files import parse_json, unseal
from fedproto.errors import FedProtoError
from fedproto.runs.folder import METRICS, VERSION
from fedproto.runs.result_file import check_line
from fedproto.watch.numbers import to_count, to_number
from fedproto.watch.plain_files import read_plain, stamp_of

MAX_NOTES = 200  # the latest are kept
MAX_PROBLEMS = 20
ETA_ROUNDS = 20  # the estimate is the mean of the latest rounds

Column = list[Any]


class Series:
    """Columns with an entry per round; None where a round has no such number."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / METRICS
        self._where = f"{name}/{METRICS}"
        self.epoch = 0  # counts how often the file was replaced, so that columns begin anew
        self._reset()

    def _reset(self) -> None:
        self._offset = 0
        self._inode = 0
        self._line = 0
        self.rounds: list[int] = []
        self.columns: dict[str, Column] = {}
        self.notes: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.is_validation = False
        self.last_round: dict[int, int] = {}  # by client: the latest round it took part in
        self.times: dict[int, int] = {}  # by client: in how many rounds it took part
        self.diverged: list[int] = []

    def refresh(self) -> bool:
        """Read the lines that were added; return whether there were any, or other ones."""
        stamp = stamp_of(self._path)
        if stamp is None:
            return False
        is_replaced = stamp.inode != self._inode or stamp.size < self._offset
        if is_replaced:
            was_read = self._offset > 0
            self._reset()
            self._inode = stamp.inode
            self.epoch += was_read
        if stamp.size == self._offset:
            return is_replaced
        try:
            content = read_plain(self._path, self._where, self._offset)
        except FedProtoError as error:
            self._note_problem(str(error))
            return True
        end = content.rfind(b"\n") + 1  # what follows is still being written
        for line in content[:end].split(b"\n")[:-1]:
            self._add_line(line)
        self._offset += end
        return end > 0 or is_replaced

    def _add_line(self, text: bytes) -> None:
        self._line += 1
        where = f"{self._where}, line {self._line},"
        try:
            line = check_line(unseal(parse_json(text, where), VERSION, where), where)
        except FedProtoError as error:
            self._note_problem(str(error))
            return
        if self.rounds and line["round"] <= self.rounds[-1]:
            self._note_problem(f"{where} repeats a round")
            return
        self._add_round(line)

    def _note_problem(self, sentence: str) -> None:
        if len(self.problems) < MAX_PROBLEMS and sentence not in self.problems:
            self.problems.append(sentence)

    def _add_round(self, line: dict[str, Any]) -> None:
        self.rounds.append(line["round"])
        participants = _read_clients(line.get("participants"))
        for client in participants:
            self.last_round[client] = line["round"]
            self.times[client] = self.times.get(client, 0) + 1
        values = {
            "bytes_up": line["bytes_up"],
            "bytes_down": line["bytes_down"],
            "seconds": line["seconds"],
            "participants": len(participants),
        }
        deviations = line.get("loss_std", {})
        for term, mean in line["loss"].items():
            values[f"loss/{term}/mean"] = mean
            values[f"loss/{term}/std"] = deviations.get(term)
        self.is_validation = line.get("validation") is not None or self.is_validation
        measured = line.get("validation") or line["accuracy"] or {}
        for way, spread in measured.items():
            for part, value in spread.items():
                values[f"accuracy/{way}/{part}"] = value
        for group in ("server", "clock", "staleness"):
            values |= _flatten_numbers(group, line.get(group))
        self._append(values)
        self._add_notes(line)

    def _append(self, values: dict[str, Any]) -> None:
        known = len(self.rounds) - 1
        for name, value in values.items():
            column = self.columns.setdefault(name, [None] * known)
            column.append(to_number(value))
        for column in self.columns.values():
            if len(column) <= known:
                column.append(None)

    def _add_notes(self, line: dict[str, Any]) -> None:
        notes = line.get("notes")
        for note in notes if isinstance(notes, list) else []:
            self.notes.append({"round": line["round"], "text": str(note)})
        self.notes = self.notes[-MAX_NOTES:]
        self.diverged = _read_clients(line.get("diverged")) or self.diverged

    # --- what a page shows

    def after(self, round: int) -> dict[str, Any]:
        """Return the columns of the rounds after one, for a page that has the earlier ones."""
        start = 0
        while start < len(self.rounds) and self.rounds[start] <= round:
            start += 1
        columns = {name: column[start:] for name, column in self.columns.items()}
        return {"epoch": self.epoch, "rounds": self.rounds[start:], "columns": columns}

    def seconds_per_round(self) -> float | None:
        """Return the mean time of the latest rounds; None before the first."""
        latest = self.columns.get("seconds", [])[-ETA_ROUNDS:]
        known = [seconds for seconds in latest if seconds is not None]
        return sum(known) / len(known) if known else None

    def latest(self, prefix: str) -> dict[str, float]:
        """Return the latest number of each column whose name begins so."""
        found = {}
        for name, column in self.columns.items():
            known = [value for value in column if value is not None]
            if name.startswith(prefix) and known:
                found[name.removeprefix(prefix)] = known[-1]
        return found

    def total(self, name: str) -> float:
        """Return the sum of a column."""
        return sum(value for value in self.columns.get(name, []) if value is not None)


def _read_clients(value: Any) -> list[int]:
    """Return the clients' numbers in a list; none for anything else."""
    if not isinstance(value, list):
        return []
    return [number for number in value if to_count(number) is not None]


def _flatten_numbers(name: str, value: Any) -> dict[str, Any]:
    """Return a number, or an object of numbers, by the names of columns."""
    if isinstance(value, dict):
        return {f"{name}/{key}": each for key, each in value.items()}
    return {} if value is None else {name: value}
