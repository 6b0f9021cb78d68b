"""How long tests wait for other processes and threads: a busy machine is no failure."""

import time
from collections.abc import Callable

import pytest

PATIENCE_SECONDS = 300.0


def wait_until(happened: Callable[[], object], what: str) -> None:
    """Look again and again until something has happened."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {PATIENCE_SECONDS:.0f} seconds")
        time.sleep(0.02)
