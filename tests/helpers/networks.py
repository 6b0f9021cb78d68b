"""Federations whose server and members are in network namespaces of their own.

    server ── router ─┬─ link ── a member
                      └─ link ── a gateway (NAT) ── a member behind it

The router knows no way to the addresses behind a gateway, as on the Internet.
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from helpers.flower import Deployed
from helpers.flower_setups import path_with
from helpers.links import Link, in_namespace, run_ip

SERVER_NAME = "federation.test"
SERVER_ADDRESS = "10.77.0.2"
#: Each network of two or more addresses is a /24; `1` is the router or gateway in it.
_ROUTER_ADDRESS = "10.77.0.1"
BEHIND_ADDRESS = "192.168.7.2"
_GATEWAY_ADDRESS = "192.168.7.1"
_ETC = Path("/etc/netns")
_OURS = re.compile(r"fedproto-(\d+)-\w+")


class Network:
    """The namespaces and links; `close` removes them."""

    def __init__(self, members: list[str], behind_nat: str) -> None:
        _remove_leftovers()
        self.members = members
        self.behind_nat = behind_nat
        self.links: dict[str, Link] = {}
        self.namespaces: list[str] = []
        try:
            self._connect_server()
            for number, name in enumerate(members, 1):
                self._connect_member(number, name)
            self.name_server(SERVER_ADDRESS)
        except BaseException:
            self.close()
            raise

    def space(self, name: str) -> str:
        """Return the namespace of `server`, `router`, `gateway` or a member."""
        return f"fedproto-{os.getpid()}-{name}"

    def address(self, name: str) -> str:
        """Return the address by which the server first sees a member, or its gateway."""
        return f"10.77.{self.members.index(name) + 1}.2"

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        for name in self.namespaces:
            _remove(self.space(name))

    def find_peers(self, port: int) -> set[str]:
        """Return the addresses from which the server's port has connections."""
        words = ("ss", "-Htn", "state", "established", f"sport = :{port}")
        lines = run_ip("netns", "exec", self.space("server"), *words).splitlines()
        return {line.split()[3].rpartition(":")[0] for line in lines}

    # --- changes

    def name_server(self, address: str) -> None:
        """Let the server's name mean this address everywhere; processes see it at once."""
        for name in self.members:
            hosts = _ETC / self.space(name) / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            with hosts.open("w") as file:  # in place: `ip netns exec` mounts this very file
                file.write(f"127.0.0.1 localhost\n{address} {SERVER_NAME}\n")

    def move_server(self, address: str) -> None:
        """Give the server another address, and tell nobody."""
        self._ip("server", "addr", "flush", "dev", "out")
        self._ip("server", "addr", "add", f"{address}/24", "dev", "out")
        self._ip("server", "route", "replace", "default", "via", _ROUTER_ADDRESS)

    def move_member(self, name: str, address: str) -> None:
        """Give a member another address in its network, as a new lease does."""
        self._ip(name, "addr", "flush", "dev", "out")
        self._ip(name, "addr", "add", f"{address}/24", "dev", "out")
        self._ip(name, "route", "replace", "default", "dev", "out")

    def restart_gateway(self) -> None:
        """Make the gateway forget all connections, as Linux does when its device goes down."""
        self._ip("gateway", "link", "set", "dev", "out", "down")
        self._ip("gateway", "link", "set", "dev", "out", "up")
        self._ip("gateway", "route", "replace", "default", "dev", "out")

    # --- how it is made

    def _add(self, name: str) -> None:
        self.namespaces.append(name)
        run_ip("netns", "add", self.space(name))
        self._ip(name, "link", "set", "dev", "lo", "up")

    def _ip(self, name: str, *words: str) -> None:
        run_ip("-n", self.space(name), *words)

    def _execute(self, name: str, *words: str) -> None:
        run_ip("netns", "exec", self.space(name), *words)

    def _connect_server(self) -> None:
        self._add("router")
        self._execute("router", "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self._add("server")
        self._connect_cable("router", "server", "server", _ROUTER_ADDRESS, SERVER_ADDRESS)

    def _connect_member(self, number: int, name: str) -> None:
        self._add(name)
        end = name
        if name == self.behind_nat:
            end = "gateway"
            self._add(end)
            self._execute(end, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            masquerade = ("-A", "POSTROUTING", "-o", "out", "-j", "MASQUERADE")
            self._execute(end, "iptables", "-t", "nat", *masquerade)
            # Linux would take up connections that it has forgotten; other gateways drop them.
            self._execute(end, "sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_loose=0")
            self._connect_cable(end, name, name, _GATEWAY_ADDRESS, BEHIND_ADDRESS)
        ends = ((self.space("router"), name), (self.space(end), "out"))
        self.links[name] = Link(ends, seed=number)
        self._ip("router", "link", "set", "dev", name, "up")
        self._ip("router", "addr", "add", f"10.77.{number}.1/24", "dev", name)
        self._ip(end, "link", "set", "dev", "out", "up")
        self.move_member(end, self.address(name))

    def _connect_cable(
        self, near: str, far: str, device: str, near_address: str, far_address: str
    ) -> None:
        """Connect two namespaces by a veth pair; the near one is the way out of the far one."""
        peer = ("type", "veth", "peer", "name", "out", "netns", self.space(far))
        self._ip(near, "link", "add", device, *peer)
        for name, end, address in ((near, device, near_address), (far, "out", far_address)):
            self._ip(name, "addr", "add", f"{address}/24", "dev", end)
            self._ip(name, "link", "set", "dev", end, "up")
        self._ip(far, "route", "add", "default", "via", near_address)


def _remove(space: str) -> None:
    with contextlib.suppress(OSError):
        run_ip("netns", "del", space)
    shutil.rmtree(_ETC / space, ignore_errors=True)


def _remove_leftovers() -> None:
    """Remove what processes have left behind that were killed."""
    for line in run_ip("netns", "list").splitlines():
        found = _OURS.match(line)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(found[0])


class Networked(Deployed):
    """A federation in a network; members reach the server by its name."""

    def __init__(self, folder: Path, members: dict[str, dict[str, str]], network: Network) -> None:
        self.network = network
        super().__init__(folder, members, (SERVER_NAME, "localhost", "127.0.0.1"))

    def place(self, name: str) -> list[str]:
        space = name if name in self.network.members else "server"
        return ["ip", "netns", "exec", self.network.space(space)]

    def listens(self) -> bool:
        return in_namespace(self.network.space("server"), super().listens)

    def start_server(self, **environment: str) -> None:
        super().start_server(LISTEN="0.0.0.0", **environment)

    def start_member(self, name: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start it with its folder `odd`, by which a test holds it in a round."""
        own = {"SERVER": SERVER_NAME, "PYTHONPATH": path_with(self.odd(name))} | environment
        return super().start_member(name, **own)


@contextlib.contextmanager
def network(members: list[str], behind_nat: str) -> Iterator[Network]:
    """A network that is gone afterwards, whatever happens."""
    made = Network(members, behind_nat)
    try:
        yield made
    finally:
        made.close()
