"""What a secure sum costs each member: bytes and seconds, for 20, 100 and 1,000 members.

The vectors are an upload of FedProto (10 classes of 50 values) and of FedAvg (the weights of the
CNN). One member in ten is gone after the shares. With 20 and 100 members, and with 1,000 on a
sparse graph, all members and the server run here, and the sum is compared with the plain one. With
1,000 members that all share with all, only some of them are run, and the server's time is that for
some of the secrets, multiplied. results/secure-sum.md was written by this script.

    python3 -m benchmarks.secure_sum                          # ten minutes on one core
    python3 -m benchmarks.secure_sum --quick --out runs/quick # seconds
    python3 -m benchmarks.secure_sum --draw                   # page and figure, from the .json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import fedproto
from benchmarks.secure_sum_page import draw_figure, make_page
from fedproto.config.settings import configure
from fedproto.core.codec import upload_size
from fedproto.core.files import write_atomically
from fedproto.core.tensors import map_upload
from fedproto.privacy.secure_sum import messages
from fedproto.privacy.secure_sum.flat_uploads import count_values, make_zeros
from fedproto.privacy.secure_sum.member import (
    KeyStage,
    masking_private,
    own_mask,
    pair_mask,
    place_of,
    start_member,
)
from fedproto.privacy.secure_sum.server import STAGES, SumServer
from fedproto.privacy.secure_sum.shamir import recover_secret, share_secret
from fedproto.privacy.secure_sum.simulated import SecureSum
from fedproto.privacy.secure_sum.terms import SumTerms, count_threshold
from fedproto.runs.experiment import Experiment

RESULTS = Path(__file__).resolve().parent.parent / "results"
NAME = "secure-sum"
#: Values of an upload, weights among them: 10 × (50 + 1), and those of the CNN and one weight.
VECTORS = {"FedProto, 10 × 50 prototypes": 510, "FedAvg, weights of the CNN": 21_841}
#: What makes these uploads, of clients with all ten classes.
ALGORITHMS = {
    "FedProto, 10 × 50 prototypes": "fedproto(absent=drop)",
    "FedAvg, weights of the CNN": "fedavg",
}
THRESHOLD = 0.67
GONE = 0.1  # of the members, after the shares


@dataclass(frozen=True)
class Case:
    """A federation whose sum is measured."""

    vector: str
    members: int
    neighbours: int = 0  # 0: all with all
    sampled: int = 0  # members that are run; 0: all of them


@dataclass
class Measured:
    """What one case costs."""

    case: Case
    bits: int
    threshold: int
    bytes_up: float  # of a member that stays
    bytes_down: float
    seconds: dict[str, float]  # of a member, by stage: the median
    server_seconds: float
    largest_error: float | None  # of the sum; None: not all members were run
    error_bound: float


def list_cases(quick: bool) -> list[Case]:
    """Return what is measured."""
    cases = []
    for vector in VECTORS:
        if quick:
            cases += [Case(vector, 6), Case(vector, 12, neighbours=6)]
            cases.append(Case(vector, 12, sampled=2))
        else:
            cases += [Case(vector, 20), Case(vector, 100), Case(vector, 1000, sampled=5)]
            cases.append(Case(vector, 1000, neighbours=100))
    return cases


def make_terms(case: Case) -> SumTerms:
    """Return the terms of the combiner's default settings."""
    summation = SecureSum(threshold=THRESHOLD)
    terms = summation.make_terms(case.members, VECTORS[case.vector])
    if not case.neighbours:
        return terms
    needed = count_threshold(case.neighbours + 1, THRESHOLD)
    return SumTerms(terms.session, needed, terms.length, terms.fixed_point)


def measure(case: Case) -> Measured:
    """Return what a case costs."""
    return _measure_some(case) if case.sampled else _measure_all(case)


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return what a function returns, and the seconds of processor time that it took."""
    started = time.process_time()
    found = function(*arguments)
    return found, time.process_time() - started


def _measure_all(case: Case) -> Measured:
    """Run all members and the server."""
    terms = make_terms(case)
    values = np.random.default_rng(0).normal(size=(case.members, terms.length))
    gone = set(range(0, case.members, round(1 / GONE)))
    server = SumServer(terms, case.members, case.neighbours)
    stages: dict[int, Any] = {}
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    bytes_up = np.zeros(case.members)
    bytes_down = np.zeros(case.members)
    server_seconds = 0.0
    replies = dict.fromkeys(range(case.members), b"")
    for stage in STAGES:
        for number, reply in replies.items():
            if stage == "masked" and number in gone:
                continue
            if stage == "keys":
                found, spent = timed(start_member, terms, number)
            elif stage == "shares":
                found, spent = timed(stages[number].share, reply)
            elif stage == "masked":
                found, spent = timed(stages[number].mask, values[number], reply)
            else:
                message, spent = timed(stages[number].unmask, reply)
                found = (None, message)
            stages[number], message = found
            seconds[stage].append(spent)
            bytes_up[number] += len(message)
            _, spent = timed(server.receive, number, message)
            server_seconds += spent
        replies, spent = timed(server.close)
        server_seconds += spent
        for number, reply in replies.items():
            bytes_down[number] += len(reply)
    assert server.total is not None
    plain = values[server.arrived].sum(0)
    return Measured(
        case,
        terms.fixed_point.bits,
        terms.threshold,
        float(bytes_up[server.arrived].mean()),
        float(bytes_down[server.arrived].mean()),
        {stage: median(spent) for stage, spent in seconds.items()},
        server_seconds,
        float(np.abs(server.total - plain).max()),
        terms.fixed_point.rounding_error(len(server.arrived)),
    )


def _measure_some(case: Case) -> Measured:
    """Run some members of a sum of all with all, given the keys and shares of all others."""
    terms = make_terms(case)
    key_seconds = []
    stages: dict[int, KeyStage] = {}
    keys = {}
    for number in range(case.members):
        found, spent = timed(start_member, terms, number)
        stages[number], keys[number] = found
        key_seconds.append(spent)
    key_list = messages.pack_entries(keys)
    arrived = [number for number in range(case.members) if number % round(1 / GONE)]
    seconds: dict[str, list[float]] = {"keys": key_seconds, "shares": [], "masked": []}
    seconds["unmasking"] = []
    values = np.random.default_rng(0).normal(size=terms.length)
    for number in arrived[: case.sampled]:
        (sharing, shares), spent = timed(stages[number].share, key_list)
        seconds["shares"].append(spent)
        delivered = _deliver(stages, key_list, number)
        (masking, masked), spent = timed(sharing.mask, values, delivered)
        seconds["masked"].append(spent)
        arrived_list = messages.pack_numbers(arrived)
        unmasking, spent = timed(masking.unmask, arrived_list)
        seconds["unmasking"].append(spent)
    sent = [keys[0], shares, masked, unmasking]
    received = [key_list, delivered, arrived_list]
    return Measured(
        case,
        terms.fixed_point.bits,
        terms.threshold,
        float(sum(len(message) for message in sent)),
        float(sum(len(message) for message in received)),
        {stage: median(spent) for stage, spent in seconds.items()},
        _estimate_server(terms, case.members, len(arrived), case.sampled),
        None,
        terms.fixed_point.rounding_error(len(arrived)),
    )


def _deliver(stages: dict[int, KeyStage], key_list: bytes, recipient: int) -> bytes:
    """Return the shares that all others give one member.

    Each is cut out of a real message, which is for two neighbours and the sender only.
    """
    entries = messages.unpack_entries(key_list, messages.KEYS_BYTES)
    delivered = {}
    for number, stage in stages.items():
        if number == recipient:
            continue
        third = next(each for each in stages if each not in (number, recipient))
        few = {each: entries[each] for each in (number, recipient, third)}
        small_terms = SumTerms(stage.terms.session, 2, stage.terms.length, stage.terms.fixed_point)
        small = KeyStage(small_terms, number, stage.sharing_private, stage.masking_seed)
        _, message = small.share(messages.pack_entries(few))
        sealed = messages.unpack_entries(
            message[messages.COMMITMENT_BYTES :], messages.SEALED_BYTES
        )
        delivered[number] = sealed[recipient]
    return messages.pack_entries(delivered)


def _estimate_server(terms: SumTerms, members: int, arrived: int, sampled: int) -> float:
    """Return the seconds that unmasking takes, from those of some secrets and masks."""
    places = [place_of(number) for number in range(members)]
    shares = share_secret(os.urandom(16), terms.threshold, places, os.urandom)
    few = dict(list(shares.items())[: terms.threshold])
    recover_secret(few)  # the factors are the same for all members, and computed once
    _, recover_seconds = timed(lambda: [recover_secret(few) for _ in range(sampled)])
    seed = os.urandom(16)
    _, own_seconds = timed(lambda: [own_mask(terms, seed) for _ in range(sampled)])
    private = masking_private(seed, terms)
    _, keys = start_member(terms, 1)
    public = messages.unpack_keys(keys).masking
    _, pair_seconds = timed(lambda: [pair_mask(terms, private, public) for _ in range(sampled)])
    gone = members - arrived
    total = members * recover_seconds + arrived * own_seconds + gone * arrived * pair_seconds
    return total / sampled


def count_plain_bytes() -> dict[str, int]:
    """Return the bytes of the same uploads as they travel without secure sums."""
    sizes = {}
    for vector, algorithm in ALGORITHMS.items():
        settings = {"dataset": "mnist5k", "algorithm": algorithm, "model": "cnn", "rounds": 1}
        settings |= {"clients": 3, "ways": 10, "stdev": 0}
        layouts = Experiment.prepare(configure(settings)[0]).progress.layouts
        assert count_values(layouts)[0] == VECTORS[vector]
        upload = map_upload(make_zeros(layouts), lambda value: value[0] + 1)
        sizes[vector] = upload_size(upload).bytes
    return sizes


def describe_machine() -> dict[str, str]:
    """Return what the figures were measured on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "fedproto": fedproto.__version__,
    }


def main() -> None:
    """Measure, and write the numbers, the page and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few members, in seconds")
    parser.add_argument("--draw", action="store_true", help="only write the page and the figure")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder [results]")
    arguments = parser.parse_args()
    numbers = arguments.out / f"{NAME}.json"
    if arguments.draw:
        found = json.loads(numbers.read_text())
    else:
        started = time.perf_counter()
        measured = []
        for case in list_cases(arguments.quick):
            measured.append(asdict(measure(case)))
            print(json.dumps(measured[-1]), flush=True)
        seconds = time.perf_counter() - started
        found = {
            "measured": measured,
            "plain_bytes": count_plain_bytes(),
            "seconds": seconds,
            "machine": describe_machine(),
        }
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_atomically(numbers, (json.dumps(found, indent=1) + "\n").encode())
    write_atomically(numbers.with_suffix(".md"), make_page(found).encode())
    write_atomically(numbers.with_suffix(".png"), draw_figure(found))


if __name__ == "__main__":
    main()
