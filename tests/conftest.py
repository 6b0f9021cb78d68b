"""One thread per process: the suite runs one process per core, and tiny models need no more."""

import gc
import os
import random
import signal
import sys
import zlib

# Before torch is imported, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# A background job of a shell ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# No test pulls the plug, so none needs to wait for the disk; those of broken disks patch it anew.
os.fsync = lambda descriptor: None

# How long anything takes says nothing on a machine that does other things, too. Those who use a
# folder in a property know that its examples share it.
ignored = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
patient = settings(deadline=None, suppress_health_check=ignored)
#: The same examples every time: whoever changes something else never meets a rare one.
settings.register_profile("repeatable", patient, derandomize=True)
#: New examples every time, for `make test-all`, whose failures somebody has time to look at.
settings.register_profile("exploring", patient, print_blob=True)
settings.register_profile("mutants", patient, max_examples=10, derandomize=True)
settings.load_profile("mutants" if "MUTANT_UNDER_TEST" in os.environ else "repeatable")

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


def seed_generators(name):
    """Seed what tests draw from without saying so: else it depends on which tests ran before."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def pytest_fixture_setup(fixturedef):
    seed_generators(fixturedef.argname)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    seed_generators(item.nodeid)


@pytest.fixture
def repeatable_entropy(monkeypatch):
    """The operating system's draws are the same every time, for tests that judge by statistics."""
    generator = np.random.default_rng(0)
    monkeypatch.setattr("fedproto.core.entropy.os", SimpleNamespace(urandom=generator.bytes))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Leave modules and collected tests, which stay until the end, out of garbage collections.

    There are 750,000 such objects, and looking through them again and again took a quarter of the
    time.
    """
    gc.collect()
    gc.freeze()
