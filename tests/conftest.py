"""One thread per process: the suite runs one process per core, and tiny models need no more."""

import os
import signal

# Before torch is imported, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

from pathlib import Path

from hypothesis import settings

# A background job of a shell ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# No test pulls the plug, so none needs to wait for the disk; those of broken disks patch it anew.
os.fsync = lambda descriptor: None

settings.register_profile("noisy machine", deadline=None)
settings.register_profile("mutants", deadline=None, max_examples=10, derandomize=True)
settings.load_profile("mutants" if "MUTANT_UNDER_TEST" in os.environ else "noisy machine")

beside = Path(__file__).resolve().parents[2] / "shared" / "data"
if beside.exists():
    os.environ.setdefault("FEDPROTO_DATA", str(beside))
# Data sets that a package of the system installed would be found where a test expects none.
os.environ["XDG_DATA_DIRS"] = str(Path(__file__).parent / "no-system-data")


def pytest_make_parametrize_id(config, val):
    """Name bytes by their number: archives hold times, and all workers must agree on names."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def pytest_itemcollected(item):
    """`make mutants`: mutmut 3.8 reads a test's name from `_nodeid`, which pytest no longer has."""
    item._nodeid = item.nodeid


def pytest_collection_modifyitems(items):
    """Begin with Flower's tests: they wait for processes while the other worker goes on."""
    items.sort(key=lambda item: item.path.name != "test_flower.py")
