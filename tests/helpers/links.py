"""Network namespaces, and links between them that delay, lose or withhold IP packets.

Linux has netem for that, but not in every kernel. Here both ends of a link are TUN devices, and a
thread of this process passes each packet from one to the other. TCP sees what it would see on a
bad line: it sends lost packets again, later each time.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

#: ioctl's number for giving a TUN device its name, and the flags of plain IP packets.
_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_CLONE_NEWNET = 0x40000000
_MAX_PACKET_BYTES = 2**16


def explain_missing() -> str:
    """Return why this machine cannot make network namespaces and links; empty if it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "ss", "iptables") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} is not installed"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    name = f"fedproto-{os.getpid()}-trial"
    try:
        run_ip("netns", "add", name)
        in_namespace(name, lambda: os.close(open_tun("trial")))
        masquerade = ("-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE")
        run_ip("netns", "exec", name, "iptables", *masquerade)
    except OSError as error:
        return f"this machine makes no network namespaces: {error}"
    finally:
        with suppress(OSError):
            run_ip("netns", "del", name)
    return ""


def run_ip(*words: str) -> str:
    """Return what a command of iproute2 prints; raises OSError if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def in_namespace(name: str, function: Callable[[], Any]) -> Any:
    """Return what a function returns in a network namespace; sockets that it opens stay there."""
    results: list[Any] = []
    errors: list[OSError] = []

    def enter_and_call() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            with open(f"/run/netns/{name}") as namespace:
                if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter {name}")
            results.append(function())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=enter_and_call)  # a thread has a namespace of its own
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def open_tun(device: str) -> int:
    """Return a new TUN device, which is gone when its descriptor is closed."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    request = struct.pack("16sH22x", device.encode(), _IFF_TUN_WITHOUT_HEADER)
    fcntl.ioctl(descriptor, _TUNSETIFF, request)
    return descriptor


class Link:
    """A line between two namespaces; what it does to packets may be changed at any time."""

    def __init__(self, ends: tuple[tuple[str, str], tuple[str, str]], seed: int) -> None:
        self.delay_seconds = 0.0  # of a packet, in each direction
        self.loss = 0.0  # the share of packets that are lost
        self.is_up = True
        self.passed = 0
        self.lost = 0
        self._random = random.Random(seed)
        self._ends: list[int] = []
        for namespace, device in ends:
            self._ends.append(in_namespace(namespace, lambda device=device: open_tun(device)))
        self._stopped, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._pass_packets, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._stop)
        self._thread.join()
        for descriptor in (*self._ends, self._stopped):
            os.close(descriptor)

    def _pass_packets(self) -> None:
        queue: list[tuple[float, int, int, bytes]] = []  # when, a number, to which end, a packet
        while True:
            wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
            ready, _, _ = select.select([*self._ends, self._stopped], [], [], wait)
            if self._stopped in ready:
                return
            for end in ready:
                packet = os.read(end, _MAX_PACKET_BYTES)
                if not self.is_up or self._random.random() < self.loss:
                    self.lost += 1
                    continue
                (other,) = [each for each in self._ends if each != end]
                due = time.monotonic() + self.delay_seconds
                heapq.heappush(queue, (due, self.passed, other, packet))
                self.passed += 1
            while queue and queue[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(queue)
                if self.is_up:
                    with suppress(OSError):  # the device is down
                        os.write(other, packet)
