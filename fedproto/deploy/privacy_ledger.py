"""A member's own account of the epsilon that its records have spent, on its own disk.

The ledger is a JSON file that only its owner can read. An entry is written before a round is
trained, and marked as sent before the reply leaves; no message of a server can change or remove
one. A member that is killed in between finds its entry when it is asked again. If nothing has left
yet, the entry stands for the new reply, too; if something may have left, the round costs again.

Epsilon is over all federations that the member took part in within the last 365 days. Entries that
claim to be from the future, as after a clock was set back, count as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from fedproto.core.files import explain_write_errors, read_json, seal, unseal, write_atomically
from fedproto.deploy.settings import MemberSettings
from fedproto.errors import BudgetSpent, RunFolderError, WriteError
from fedproto.privacy.accounting import Release, compute_epsilon

VERSION = 1
YEAR_SECONDS = 365 * 86400.0
LOCK_WAIT_SECONDS = 60.0


class Entry(NamedTuple):
    """What one round of one federation costs."""

    time: float  # seconds since 1970
    federation: str
    round: int
    releases: tuple[Release, ...]
    sent: bool = False  # whether the reply may have left the member


@dataclass(frozen=True)
class PrivacyLedger:
    """The entries of a member's ledger, and the file they are in."""

    path: Path
    delta: float
    entries: tuple[Entry, ...] = ()

    @classmethod
    def read(cls, own: MemberSettings) -> PrivacyLedger:
        """Return a member's ledger, which is empty if there is no file.

        Raises RunFolderError if the file is damaged: a ledger is never begun anew by itself.
        """
        path = find_ledger(own)
        empty = cls(path, own.epsilon_delta)
        if not path.exists():
            return empty
        content = unseal(read_json(path), VERSION, str(path))
        return replace(empty, entries=tuple(read_entries(content.get("entries"), str(path))))

    def epsilon(
        self, now: float, more: Sequence[Release] = (), federation: str | None = None
    ) -> float:
        """Return what a year's entries cost together, with `more` releases beside them.

        federation  count only the entries of this one
        """
        times: Counter[tuple[float, float]] = Counter()
        for release in more:
            times[release.noise, release.sampling] += release.times
        for entry in self.entries:
            is_meant = federation is None or entry.federation == federation
            if is_meant and entry.time > now - YEAR_SECONDS:
                for release in entry.releases:
                    times[release.noise, release.sampling] += release.times
        releases = [
            Release(noise, count, sampling) for (noise, sampling), count in sorted(times.items())
        ]
        return compute_epsilon(releases, self.delta)

    def find_unsent(self, federation: str, round: int) -> int | None:
        """Return the place of the entry of a round whose reply has not left the member."""
        for place, entry in enumerate(self.entries):
            if (entry.federation, entry.round, entry.sent) == (federation, round, False):
                return place
        return None

    def without(self, place: int) -> PrivacyLedger:
        """Return the ledger without one entry."""
        return replace(self, entries=self.entries[:place] + self.entries[place + 1 :])

    def write(self) -> None:
        """Replace the file, for its owner only."""
        entries = [_describe_entry(entry) for entry in self.entries]
        content = seal({"delta": self.delta, "entries": entries}, VERSION)
        with explain_write_errors(self.path):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = json.dumps(content, indent=1) + "\n"
            write_atomically(self.path, text.encode(), private=True)


def find_ledger(own: MemberSettings) -> Path:
    """Return the path of a member's ledger.

    Unless the member's file names one, it lies beside the folder `state`, under a name that is made
    of the member's name and data: whoever begins with a new state goes on with the old ledger.
    """
    if own.ledger is not None:
        return Path(own.ledger)
    whose = hashlib.sha256(f"{own.name}\0{own.data}".encode()).hexdigest()[:12]
    return Path(own.state).absolute().parent / f"privacy-ledger-{whose}.json"


def carry_over(before: MemberSettings, own: MemberSettings) -> None:
    """Enter what a member spent under another name, or of data in another place, in its ledger.

    What was spent is never less afterwards: entries of both ledgers count, and the old file stays.
    """
    if find_ledger(before) == find_ledger(own) or not find_ledger(before).exists():
        return
    with _hold(before):
        spent = PrivacyLedger.read(before)
    with _hold(own):
        ledger = PrivacyLedger.read(own)
        replace(ledger, entries=_unite((*spent.entries, *ledger.entries))).write()


def recall_spending(
    own: MemberSettings, known: Sequence[Entry], federation: str, rounds: range
) -> None:
    """Enter what a member has spent, after it was restored from a backup with `known` entries.

    Entries of both ledgers count. A round among `rounds` that neither has is entered at the price
    of the federation's dearest one, if one of its rounds had a price.
    """
    with _hold(own):
        ledger = PrivacyLedger.read(own)
        united = _unite((*known, *ledger.entries))
        own_entries = [entry for entry in united if entry.federation == federation]
        if own_entries:
            dearest = max(own_entries, key=lambda entry: _price(entry, own.epsilon_delta))
            entered = {entry.round for entry in own_entries}
            for round in rounds:
                if round not in entered:
                    entry = dearest._replace(time=time.time(), round=round, sent=True)
                    united = (*united, entry)
        if united:
            replace(ledger, entries=united).write()


def _price(entry: Entry, delta: float) -> float:
    return compute_epsilon(list(entry.releases), delta)


def describe_entries(own: MemberSettings) -> list[dict[str, Any]]:
    """Return the entries of a member's ledger, for JSON."""
    return [_describe_entry(entry) for entry in PrivacyLedger.read(own).entries]


def read_entries(stored: Any, where: str) -> list[Entry]:
    """Return what `describe_entries` returned; RunFolderError names where it is damaged."""
    try:
        return [_read_entry(each) for each in stored]
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{where} is not a ledger of epsilon: {error}") from error


def _unite(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return entries in the order of their times, each once; it is sent if one of them is."""
    united: dict[Entry, bool] = {}
    for entry in entries:
        key = entry._replace(sent=False)
        united[key] = united.get(key, False) or entry.sent
    return tuple(key._replace(sent=sent) for key, sent in sorted(united.items()))


def reserve_round(
    own: MemberSettings,
    federation: str,
    round: int,
    releases: Sequence[Release],
    now: float | None = None,
) -> float:
    """Enter what a round costs, before it is trained; return the year's epsilon with it.

    Raises BudgetSpent, and writes nothing, if the member's budget would be exceeded. The entry of a
    reply that never left is replaced.
    """
    now = time.time() if now is None else now
    with _hold(own):
        ledger = PrivacyLedger.read(own)
        unsent = ledger.find_unsent(federation, round)
        if unsent is not None:
            ledger = ledger.without(unsent)
        spent = ledger.epsilon(now, releases)
        limit = own.max_epsilon_per_year
        if limit is not None and not spent <= limit:
            before = ledger.epsilon(now)
            raise BudgetSpent(
                f"round {round} would raise epsilon from {before:.4g} to {spent:.4g} within a "
                f"year, but this member's max-epsilon-per-year is {limit:g}"
            )
        entry = Entry(now, federation, round, tuple(releases))
        replace(ledger, entries=(*ledger.entries, entry)).write()
    return spent


def mark_as_sent(own: MemberSettings, federation: str, round: int) -> None:
    """Enter that the reply of a round may leave from now on; nothing if that is known already."""
    if not find_ledger(own).exists():  # nothing was ever private here
        return
    with _hold(own):
        ledger = PrivacyLedger.read(own)
        unsent = ledger.find_unsent(federation, round)
        if unsent is None:
            return
        entries = list(ledger.entries)
        entries[unsent] = entries[unsent]._replace(sent=True)
        replace(ledger, entries=tuple(entries)).write()


@contextmanager
def _hold(own: MemberSettings) -> Iterator[None]:
    """Be the only process that uses the ledger, which members with several states share."""
    path = find_ledger(own)
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_WAIT_SECONDS)
    try:
        with explain_write_errors(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.acquire()
    except Timeout as error:
        raise WriteError(f"{path} is in use by another process: wait for it") from error
    try:
        yield
    finally:
        lock.release()


def _describe_entry(entry: Entry) -> dict[str, Any]:
    """Return an entry for JSON."""
    releases = [release._asdict() for release in entry.releases]
    return entry._asdict() | {"releases": releases}


def _read_entry(stored: Any) -> Entry:
    """Return an entry of the file; ValueError, KeyError or TypeError if it is not one."""
    releases = []
    for each in stored["releases"]:
        release = Release(float(each["noise"]), int(each["times"]), float(each["sampling"]))
        if not (math.isfinite(release.noise) and release.noise >= 0 and release.times >= 0):
            raise ValueError(f"{release} is not a release")
        releases.append(release)
    return Entry(
        time=float(stored["time"]),
        federation=str(stored["federation"]),
        round=int(stored["round"]),
        releases=tuple(releases),
        sent=bool(stored["sent"]),
    )
