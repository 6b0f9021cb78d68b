"""One thread for every process: the suite runs a process a core, and tiny models gain nothing from a second thread."""

import os
import signal

os.environ["OMP_NUM_THREADS"] = (
    "1"  # before torch is imported, here and in the processes that tests start
)

from pathlib import Path

from hypothesis import settings

# A shell's background job begins with Ctrl-C ignored, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


settings.register_profile("noisy machine", deadline=None)
settings.load_profile("noisy machine")

beside = Path(__file__).resolve().parents[2] / "shared" / "data"
if beside.exists():
    os.environ.setdefault("FEDPROTO_DATA", str(beside))


def pytest_make_parametrize_id(config, val):
    """Bytes are named by their number: an archive holds the time it was made at, and workers must agree on names."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def pytest_itemcollected(item):
    """`make mutants`: mutmut 3.8 reads a test's name from `_nodeid`, which pytest no longer has."""
    item._nodeid = item.nodeid
