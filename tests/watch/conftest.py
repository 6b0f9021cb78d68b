"""Run folders that the tests of `watch` share."""

from pathlib import Path

import pytest
from helpers.reports import make_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two methods on one partition."""
    folder = tmp_path_factory.mktemp("watched")
    make_run(folder / "local", algorithm="local")
    make_run(folder / "fedproto", algorithm="fedproto", checkpoint_every=1)
    return folder
