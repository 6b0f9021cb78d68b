"""What the server knows about one member."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from fedproto.core.metrics import ACCURACIES
from fedproto.deploy.messages import Header, Message, make_printable

#: The largest value of each metric that a member tells beside its accuracies; the smallest is 0.
TOLD_METRICS = {
    "balanced_accuracy": 1.0,
    "macro_f1": 1.0,
    "auroc": 1.0,
    "brier": 2.0,
    "ece": 1.0,
}


@dataclass
class MemberRecord:
    """One member, as the server knows it; `fedproto deploy status` shows it."""

    number: int  # its random numbers are drawn by this, as a client's in the simulator
    last_round: int = 0  # in which its reply counted
    staleness: int = 0  # rounds that this reply was late, if rounds are asynchronous
    last_seen: float = 0.0
    spoken: list[str] = field(default_factory=list)  # the classes of its latest upload
    brought: list[str] = field(default_factory=list)  # classes that it was the first to have
    bytes_up: int = 0  # of payload, as the simulator's ledger counts them
    bytes_down: int = 0
    beside_up: int = 0  # of headers, of what Flower adds, and of messages that no round needs
    beside_down: int = 0
    refused: int = 0  # replies that failed a check
    failed: int = 0  # rounds that it could not reply to, according to itself or to Flower
    late: int = 0  # rounds that it did not reply to in time
    late_seconds: float = 0.0  # by which its latest reply that came too late did so
    reason: str = ""  # why its last reply did not count, until one counts
    accuracy: dict[str, float] = field(default_factory=dict)
    #: Further metrics at the end of a run, by the way to predict: {"head": {"auroc": 0.9}}.
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    site: str = ""  # what people call it, as its latest reply says
    architecture: str = ""  # as its replies say, if members have several
    #: What its ledger says this federation has cost it within a year; None: it says nothing.
    #: With privacy=client: what the server's noise has.
    epsilon: float | None = None
    #: With privacy=client: Σ 1 / noise² over the rounds that it was asked in, their number, and the
    #: last of them.
    spent: float = 0.0
    charges: int = 0
    charged_round: int = 0

    def note_received(self, payload_bytes: int, other_bytes: int) -> None:
        """Record that the member replied."""
        self.last_seen = time.time()
        self.bytes_up += payload_bytes
        self.beside_up += other_bytes

    def note_sent(self, payload_bytes: int, other_bytes: int) -> None:
        """Record what the member was sent."""
        self.bytes_down += payload_bytes
        self.beside_down += other_bytes

    def note_accuracy(self, reply: Message) -> None:
        """Record the accuracies, metrics and epsilon that the member reports, if it reports any."""
        epsilon = reply.header.get("epsilon")
        if type(epsilon) is float and 0 <= epsilon < math.inf:
            self.epsilon = epsilon
        accuracies = read_accuracies(reply.header)
        if accuracies:
            self.accuracy = accuracies
        metrics = read_told_metrics(reply.header)
        if metrics:
            self.metrics = metrics

    def note_refusal(self, reason: str) -> None:
        """Record that the member's reply was refused."""
        self.refused += 1
        self.reason = make_printable(reason)

    def note_silence(self, timeout: float) -> None:
        """Record that the member did not reply within `timeout` seconds."""
        self.late += 1
        self.reason = f"it did not reply within {timeout:g} s"

    def note_lateness(self, seconds: float, timeout: float) -> None:
        """Record by how much the member's reply came too late."""
        self.late_seconds = seconds
        self.reason = (
            f"its reply came {seconds:.0f} s after the {timeout:g} s that a round waits; a longer "
            "`timeout` or asynchronous rounds (`buffer`) would count it"
        )

    def note_failure(self, reason: str) -> None:
        """Record that the member could not reply."""
        self.failed += 1
        self.reason = make_printable(reason)


def read_accuracies(header: Header) -> dict[str, float]:
    """Return the accuracies that a member reports: fractions, by the names that we know."""
    accuracies = {}
    for name in ACCURACIES:
        value = header.get(f"accuracy.{name}")
        if isinstance(value, (int, float)) and 0 <= value <= 1:
            accuracies[name] = float(value)
    return accuracies


def read_told_metrics(header: Header) -> dict[str, dict[str, float]]:
    """Return the metrics that a member reports, by the way to predict.

    Only names that we know and values that a metric can have are taken.
    """
    ways = {}
    for way in ACCURACIES:
        metrics = {}
        for name, largest in TOLD_METRICS.items():
            value = header.get(f"metric.{name}.{way}")
            if isinstance(value, (int, float)) and 0 <= value <= largest:
                metrics[name] = float(value)
        if metrics:
            ways[way] = metrics
    return ways
