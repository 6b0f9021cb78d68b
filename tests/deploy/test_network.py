"""Deployed federations whose server and members are in network namespaces of their own.

Real processes with TLS and keys, on lines that are slow, lossy or broken. Member `c` is behind NAT.
"""

import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("flwr")

from helpers.certificates import make_expired, see_certificate
from helpers.flower import Run, digits, replayed, running, server_of, until
from helpers.flower_setups import Setup, simulated
from helpers.links import explain_missing, in_namespace
from helpers.network_drill import Drill
from helpers.networks import BEHIND_ADDRESS, SERVER_NAME, network

from fedproto.core.types import Tree
from fedproto.deploy.certificates import renew_certificate
from fedproto.deploy.supervisor import STATUS_FILE

pytestmark = pytest.mark.slow

MEMBERS = ["a", "b", "c"]
DELAY_SECONDS = 0.1  # in each direction
LOSS = 0.05


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    missing = explain_missing()
    if missing:
        pytest.skip(missing)
    with network([*MEMBERS, "d"], behind_nat="c") as net:
        made = Drill(tmp_path_factory.mktemp("network"), net)
        with running(made.federation):
            made.federation.start_server()
            made.federation.admit(*MEMBERS)
            made.federation.bring(*MEMBERS)
            yield made


def assert_equal(found: Tree, expected: Tree) -> None:
    """To the bit."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def assert_like_the_simulator(run: Run, drill: Drill, rounds: int) -> None:
    """The prototypes after every round, and that every reply counted once."""
    assert run.status == "finished:completed", run.log
    assert set(run.rounds) - {0} == set(range(1, rounds + 1)), "a round's state was missed"
    for number in range(1, rounds + 1):
        expected = simulated(drill.arrays, number).prototypes
        assert_equal(server_of(run.rounds[number][0]), expected)
        seats = run.rounds[number][1]["members"]
        counted = {name: seat["last_round"] for name, seat in seats.items()}
        assert counted == dict.fromkeys(MEMBERS, number)


def test_slow_and_lossy_lines_change_no_bit(drill: Drill) -> None:
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


def test_a_member_that_is_cut_off_in_a_round_counts_again_when_its_line_is_back(
    drill: Drill,
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
    there = drill.there(run)
    in_vain = drill.in_vain(run)
    assert all({"a", "b"} <= set(names) for names in there), "the others go on"
    assert there[:3] == ["abc", "ab", "ab"] and "c" in there[-1]
    assert in_vain[1] == "c", "it trained round 2 while it was cut off"
    for number in range(1, 8):
        expected = replayed(
            drill.federation, drill.setup.files, there[:number], in_vain[:number]
        ).server
        assert_equal(server_of(run.rounds[number][0]), expected)
    assert run.rounds[7][1]["members"]["c"]["late"] >= 2


def test_a_member_behind_nat_takes_part_and_survives_a_gateway_that_forgets(
    drill: Drill,
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


def test_member_and_server_may_change_their_addresses_between_rounds(drill: Drill) -> None:
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
    assert_like_the_simulator(run, drill, 4)


def find_processes(drill: Drill, name: str) -> list[int]:
    """The processes that a supervisor has started."""
    status = json.loads((drill.federation.folder / f".flwr-{name}" / STATUS_FILE).read_text())
    return [each["process"] for each in status["processes"]]


def ask_health(drill: Drill, name: str, path: str) -> tuple[int, str]:
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


def test_a_certificate_that_is_renewed_in_mid_round_stops_nothing(drill: Drill) -> None:
    config = drill.fresh("renewed")
    federation = drill.federation
    processes = find_processes(drill, "server")
    look = functools.partial(see_certificate, federation.folder, federation.port)

    def renew() -> None:
        drill.wait_until_asked("a", 2)
        before = in_namespace(drill.net.space("server"), look)
        done = federation.call("fedproto", "deploy", "renew", ".")
        assert done.returncode == 0, done.stdout + done.stderr
        assert in_namespace(drill.net.space("server"), look) != before
        drill.release("a")

    drill.hold("a", 2)
    run = federation.run(renew, rounds=3, quorum=3, **config)
    assert_like_the_simulator(run, drill, 3)
    assert find_processes(drill, "server") == processes, "the server was not started again"


def test_members_refuse_an_expired_certificate_and_return_when_it_is_renewed(drill: Drill) -> None:
    """By themselves, each with its state; the next run goes on with the next round.

    b is started while the certificate is expired; c runs, and has to connect anew.
    """
    config = drill.fresh("expired")
    federation, folder = drill.federation, drill.federation.folder
    first = federation.run(rounds=1, quorum=3, **config)
    before = {name: len(federation.log(name)) for name in MEMBERS}

    def says(name: str, sentence: str) -> bool:
        return sentence in federation.log(name)[before[name] :]

    try:
        make_expired(folder, [SERVER_NAME, "localhost", "127.0.0.1"])
        federation.stop("b")
        federation.start_member("b")
        drill.net.restart_gateway()
        for name in "bc":
            until(lambda name=name: says(name, "keeps trying"), f"{name} is not let in")
            assert says(name, "certificate has expired")
        code, said = ask_health(drill, "b", "b.toml")
        assert code == 3 and "is refused: certificate has expired" in said, said
        code, said = ask_health(drill, "server", ".")
        assert code == 3 and "the server's certificate expired on" in said, said
    finally:
        renew_certificate(folder, [])
    until(lambda: federation.online() == set(MEMBERS), "all are online again")
    _, said = ask_health(drill, "b", "b.toml")
    assert "is reached, and is the server" in said, said
    _, said = ask_health(drill, "server", ".")
    assert "the server's certificate is valid until" in said, said
    run = federation.run(rounds=3, quorum=3, **config)
    assert_like_the_simulator(run._replace(rounds=first.rounds | run.rounds), drill, 3)


def test_members_come_and_go_while_a_run_goes_on(drill: Drill) -> None:
    """d is new, b leaves and comes back, d's key is withdrawn, and d comes back with another one.

    a is held in the rounds in which that happens. A withdrawn key is refused for ever.
    """
    federation = drill.federation
    files, _ = digits(federation.folder.parent, "abcd")
    drill.fresh("crowd")
    config = Setup(federation, files, drill.arrays).fresh("crowd")

    def while_a_is_held(number: int, change: Callable[[], object]) -> None:
        drill.hold("a", number)
        drill.wait_until_asked("a", number)
        change()
        drill.release("a")

    def make_key() -> None:
        command = [sys.executable, "keys.py", "--", "d"]
        subprocess.run(command, cwd=federation.folder, check=True)

    def add() -> None:
        make_key()
        federation.admit("d")
        federation.bring("d")

    def withdraw() -> None:
        until(lambda: 8 in drill.trained("d"), "d has trained round 8")
        (node,) = [node for node, name in federation.nodes.items() if name == "d"]
        done = federation.flwr("supernode", "unregister", node, "federation")
        assert done.returncode == 0, done.stdout + done.stderr
        until(lambda: "d keeps trying" in federation.log("d"), "d is refused")

    def come_back_with_another_key() -> None:
        refused = federation.call("./admit.sh", "d")
        assert refused.returncode != 0 and "already in use" in refused.stdout + refused.stderr
        for name in ("d", "d.pub"):
            (federation.folder / "keys" / name).unlink()
        make_key()
        federation.admit("d")
        until(lambda: "d" in federation.online(), "d is back by itself")

    def come_and_go() -> None:
        while_a_is_held(2, add)
        while_a_is_held(4, lambda: federation.stop("b"))
        while_a_is_held(6, lambda: federation.bring("b"))
        while_a_is_held(8, withdraw)
        while_a_is_held(10, come_back_with_another_key)

    try:
        run = federation.run(come_and_go, rounds=11, quorum=2, timeout=120.0, members="", **config)
    finally:
        if "d" in federation.processes:
            federation.kill("d")
    assert run.status == "finished:completed", run.log
    there = drill.there(run)
    assert there[:3] == ["abc", "abc", "abcd"] and there[4:7] == ["acd", "acd", "abcd"]
    assert there[8:] == ["abc", "abc", "abcd"]
    in_vain = drill.in_vain(run)
    for number in range(1, 12):
        state = replayed(federation, files, there[:number], in_vain[:number], members="")
        assert_equal(server_of(run.rounds[number][0]), state.server)
