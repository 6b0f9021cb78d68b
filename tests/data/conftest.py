"""What the tests of several data sources share."""

import pytest


@pytest.fixture
def only_own_files(monkeypatch, tmp_path):
    """Let a test find only the files it writes: no real data, no cache of the user."""
    monkeypatch.delenv("FEDPROTO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no cache"))
