"""Deployed federations whose server and members are in network namespaces of their own.

Real processes with TLS and keys, on lines that are slow, lossy or broken. Member `c` is behind NAT.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from helpers.certificates import make_expired
from helpers.flower import Run, digits, replayed, running, server_of, until
from helpers.flower_setups import Setup, simulated
from helpers.links import explain_missing, in_namespace
from helpers.networks import BEHIND_ADDRESS, SERVER_NAME, Network, Networked, network

from fedproto.core.types import Tree
from fedproto.deploy.certificates import renew_certificate
from fedproto.deploy.server_state import STATE_FILE, read_state
from fedproto.deploy.supervisor import STATUS_FILE

_MISSING = explain_missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING),
]

MEMBERS = ["a", "b", "c"]
DELAY_SECONDS = 0.1  # in each direction
LOSS = 0.05


class NetworkSetup:
    """A federation in a network, started anew for each test by `fresh`."""

    def __init__(self, folder: Path, net: Network) -> None:
        files, self.arrays = digits(folder)
        self.federation = Networked(folder / "federation", files, net)
        self.setup = Setup(self.federation, files, self.arrays)
        self.net = net
        self.state = Path()

    def fresh(self, tag: str) -> dict[str, Any]:
        """Return the settings of a new federation over sound lines; nobody is held."""
        for name in MEMBERS:
            for file in ("asked", "hold", "trained"):
                (self.federation.odd(name) / file).unlink(missing_ok=True)
        config = self.setup.fresh(tag)
        self.state = Path(config["state"]) / STATE_FILE
        return config

    def hold(self, name: str, number: int) -> None:
        """Let a member wait in this round, before it trains, until `release`."""
        (self.federation.odd(name) / "hold").write_text(str(number))

    def release(self, name: str) -> None:
        (self.federation.odd(name) / "hold").unlink()

    def wait_until_asked(self, name: str, number: int) -> None:
        asked = self.federation.odd(name) / "asked"
        until(
            lambda: asked.exists() and asked.read_text() == str(number),
            f"{name} is asked for round {number}",
        )

    def wait_for_round(self, number: int) -> None:
        until(
            lambda: self.state.exists() and read_state(self.state)[1]["round"] >= number,
            f"round {number} is over",
        )

    def there(self, run: Run) -> list[str]:
        """The members whose replies counted, of each round."""
        counted = []
        for number in range(1, max(run.rounds) + 1):
            seats = run.rounds[number][1]["members"]
            names = [name for name in sorted(seats) if seats[name]["last_round"] == number]
            counted.append("".join(names))
        return counted

    def find_peers(self) -> set[str]:
        """The addresses that the server's connections come from."""
        return self.net.find_peers(self.federation.port)

    def trained(self, name: str) -> set[int]:
        """The rounds that a member has trained."""
        path = self.federation.odd(name) / "trained"
        return {int(word) for word in path.read_text().split()} if path.exists() else set()


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkSetup]:
    with network([*MEMBERS, "d"], behind_nat="c") as net:
        setup = NetworkSetup(tmp_path_factory.mktemp("network"), net)
        with running(setup.federation):
            setup.federation.start_server()
            setup.federation.admit(*MEMBERS)
            setup.federation.bring(*MEMBERS)
            yield setup


def assert_equal(found: Tree, expected: Tree) -> None:
    """To the bit."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def assert_like_the_simulator(run: Run, drill: NetworkSetup, rounds: int) -> None:
    """The prototypes after every round, and that every reply counted once."""
    assert run.status == "finished:completed", run.log
    assert set(run.rounds) - {0} == set(range(1, rounds + 1)), "a round's state was missed"
    for number in range(1, rounds + 1):
        expected = simulated(drill.arrays, number).prototypes
        assert_equal(server_of(run.rounds[number][0]), expected)
        seats = run.rounds[number][1]["members"]
        counted = {name: seat["last_round"] for name, seat in seats.items()}
        assert counted == dict.fromkeys(MEMBERS, number)


def test_slow_and_lossy_lines_change_no_bit(drill: NetworkSetup) -> None:
    config = drill.fresh("slow")
    for link in drill.net.links.values():
        link.delay_seconds = DELAY_SECONDS
        link.loss = LOSS
        link.passed = link.lost = 0
    try:
        run = drill.federation.run(rounds=3, quorum=3, **config)
    finally:
        for link in drill.net.links.values():
            link.delay_seconds = link.loss = 0.0
    assert_like_the_simulator(run, drill, 3)
    for name in MEMBERS:
        link = drill.net.links[name]
        assert link.lost > 0, f"nothing was lost on the way to {name}"
        print(name, link.passed, link.lost, run.times)


def test_a_member_that_is_cut_off_in_a_round_counts_again_when_its_line_is_back(
    drill: NetworkSetup,
) -> None:
    """It trains while it is cut off; what it sends too late counts in no round."""
    config = drill.fresh("cut")
    drill.hold("c", 2)

    def cut_and_mend() -> None:
        drill.wait_until_asked("c", 2)
        drill.net.links["c"].is_up = False
        drill.release("c")
        drill.wait_for_round(3)
        drill.net.links["c"].is_up = True

    try:
        run = drill.federation.run(cut_and_mend, rounds=7, quorum=2, timeout=15.0, **config)
    finally:
        drill.net.links["c"].is_up = True
    assert run.status == "finished:completed", run.log
    print(run.log)
    there = drill.there(run)
    in_vain = []
    for number, names in enumerate(there, 1):
        assert {"a", "b"} <= set(names), "the others go on"
        in_vain.append("c" if "c" not in names and number in drill.trained("c") else "")
    print(there, in_vain, run.times)
    assert there[:3] == ["abc", "ab", "ab"] and "c" in there[-1]
    assert in_vain[1] == "c", "it trained round 2 while it was cut off"
    for number in range(1, 8):
        expected = replayed(
            drill.federation, drill.setup.files, there[:number], in_vain[:number]
        ).server
        assert_equal(server_of(run.rounds[number][0]), expected)
    assert run.rounds[7][1]["members"]["c"]["late"] >= 2


def test_a_member_behind_nat_takes_part_and_survives_a_gateway_that_forgets(
    drill: NetworkSetup,
) -> None:
    config = drill.fresh("nat")
    listener = in_namespace(drill.net.space("c"), lambda: socket.create_server(("", 7000)))

    def connect() -> None:
        socket.create_connection((BEHIND_ADDRESS, 7000), timeout=5).close()

    with listener:
        in_namespace(drill.net.space("gateway"), connect)  # the listener works
        with pytest.raises(OSError, match="unreachable"):
            in_namespace(drill.net.space("server"), connect)
    drill.hold("c", 2)

    def forget() -> None:
        drill.wait_until_asked("c", 2)
        drill.net.restart_gateway()
        drill.release("c")

    run = drill.federation.run(forget, rounds=3, quorum=3, **config)
    assert_like_the_simulator(run, drill, 3)
    until(
        lambda: drill.net.address("c") in drill.find_peers(), "c is seen by its gateway's address"
    )
    assert BEHIND_ADDRESS not in drill.find_peers()


def test_member_and_server_may_change_their_addresses_between_rounds(drill: NetworkSetup) -> None:
    """Members know the server by its name; a name server tells them another address later."""
    config = drill.fresh("moved")
    drill.hold("b", 2)
    drill.hold("a", 3)

    def move() -> None:
        drill.wait_until_asked("b", 2)
        drill.net.move_member("b", "10.77.2.99")
        drill.release("b")
        drill.wait_until_asked("a", 3)
        assert "10.77.2.99" in drill.find_peers()
        drill.net.move_server("10.77.0.99")
        drill.net.name_server("10.77.0.99")
        drill.release("a")

    try:
        run = drill.federation.run(move, rounds=4, quorum=3, timeout=120.0, **config)
    finally:
        drill.net.move_server("10.77.0.2")
        drill.net.name_server("10.77.0.2")
        drill.net.move_member("b", drill.net.address("b"))
    print(run.times)
    assert_like_the_simulator(run, drill, 4)


def find_processes(drill: NetworkSetup, name: str) -> list[int]:
    """The processes that a supervisor has started."""
    status = json.loads((drill.federation.folder / f".flwr-{name}" / STATUS_FILE).read_text())
    return [each["process"] for each in status["processes"]]


def ask_health(drill: NetworkSetup, name: str, path: str) -> tuple[int, str]:
    """What `fedproto deploy health` says on the machine of a member or of the server."""
    home = str(drill.federation.folder / f".flwr-{name}")
    words = ["deploy", "health", path, "--home", home, "--port", str(drill.federation.port)]
    done = subprocess.run(
        [*drill.federation.place(name), sys.executable, "-m", "fedproto", *words, "--json"],
        cwd=drill.federation.folder,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_an_expired_certificate_is_refused_and_its_renewal_stops_nothing(
    drill: NetworkSetup,
) -> None:
    """Neither the run nor the server's processes end; members return by themselves."""
    config = drill.fresh("expired")
    federation, folder = drill.federation, drill.federation.folder
    log_before = len(federation.log("b"))
    processes = find_processes(drill, "server")
    drill.hold("a", 2)

    def expire_and_renew() -> None:
        drill.wait_until_asked("a", 2)
        until(lambda: federation.member_round("b") == 2, "b has trained round 2")
        make_expired(folder, [SERVER_NAME, "localhost", "127.0.0.1"])
        federation.stop("b")
        federation.start_member("b")
        until(lambda: "keeps trying" in federation.log("b")[log_before:], "b is not let in")
        assert "certificate has expired" in federation.log("b")[log_before:]
        code, said = ask_health(drill, "b", "b.toml")
        assert code == 3 and "is refused: certificate has expired" in said, said
        code, said = ask_health(drill, "server", ".")
        assert code == 3 and "the server's certificate expired on" in said, said
        assert federation.call("fedproto", "deploy", "renew", ".").returncode == 0
        until(lambda: federation.online() == set(MEMBERS), "all are online again")
        code, said = ask_health(drill, "b", "b.toml")
        assert code != 3 and "is reached, and is the server" in said, said
        code, said = ask_health(drill, "server", ".")
        assert code == 0, said
        drill.release("a")

    try:
        run = federation.run(expire_and_renew, rounds=4, quorum=3, timeout=45.0, **config)
    finally:
        renew_certificate(folder, [])
    assert_like_the_simulator(run, drill, 4)
    assert find_processes(drill, "server") == processes, "the server was not started again"


def test_members_come_and_go_while_a_run_goes_on(drill: NetworkSetup) -> None:
    """d is new, b leaves and comes back, d's key is withdrawn; a is held so that each is seen."""
    federation = drill.federation
    files, _ = digits(federation.folder.parent, "abcd")
    setup = Setup(federation, files, drill.arrays)
    drill.fresh("crowd")
    config = setup.fresh("crowd")
    subprocess.run([sys.executable, "keys.py", "--", "d"], cwd=federation.folder, check=True)

    def while_a_is_held(number: int, change: Callable[[], object]) -> None:
        drill.hold("a", number)
        drill.wait_until_asked("a", number)
        for name in "bcd":
            if name in federation.online():
                until(lambda name=name: federation.member_round(name) == number, f"{name} {number}")
        change()
        drill.release("a")

    def withdraw() -> None:
        (node,) = [node for node, name in federation.nodes.items() if name == "d"]
        done = federation.flwr("supernode", "unregister", node, "federation")
        assert done.returncode == 0, done.stdout + done.stderr
        until(lambda: "d keeps trying" in federation.log("d"), "d is refused")

    def add() -> None:
        federation.admit("d")
        federation.bring("d")

    def come_and_go() -> None:
        while_a_is_held(2, add)
        while_a_is_held(4, lambda: federation.stop("b"))
        while_a_is_held(6, lambda: federation.bring("b"))
        while_a_is_held(8, withdraw)

    drill.hold("a", 2)
    run = federation.run(come_and_go, rounds=9, quorum=2, timeout=120.0, members="", **config)
    federation.stop("d")
    assert run.status == "finished:completed", run.log
    print(run.log, run.times)
    there = drill.there(run)
    print(there)
    assert there == ["abc", "abc", "abcd", "abcd", "acd", "acd", "abcd", "abcd", "abc"]
    for number in range(1, 10):
        state = replayed(federation, files, there[:number], members="")
        assert_equal(server_of(run.rounds[number][0]), state.server)
