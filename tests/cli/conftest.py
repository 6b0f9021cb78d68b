"""Trained federations for the tests of commands that use them."""

import shutil
from functools import cache

import pytest
from helpers.trained_runs import DIGITS, NEWCOMER, succeed

import fedproto


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run folders by the method's name and options; each is run once, and none may be changed."""

    @cache
    def make(algorithm="fedproto", **options):
        folder = tmp_path_factory.mktemp("runs") / "run"
        fedproto.run(**DIGITS, algorithm=algorithm, out=folder, **options)
        return folder

    return make


@pytest.fixture(scope="module")
def run(runs):
    return runs()


@pytest.fixture
def own_run(run, tmp_path):
    """A copy that may be changed."""
    return shutil.copytree(run, tmp_path / "federation")


@pytest.fixture(scope="module")
def newcomer(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("newcomers") / "hospital"
    succeed("join", "--prototypes", run, *NEWCOMER, "--out", folder)
    return folder
