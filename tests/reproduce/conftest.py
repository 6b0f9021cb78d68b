"""Tiny targets in the place of the real ones, made once for all tests of `fedproto reproduce`."""

import os
from typing import NamedTuple

import pytest
from helpers.command_line import Answer, fedproto
from helpers.reproduction import PROBED, TINY, make_target

from fedproto.reproduce import make, plan

WEIGHTS = "weights/resnet18-tiny-imagenet-32.safetensors"


@pytest.fixture(scope="session")
def weights_folder(tmp_path_factory):
    """A data folder with an empty file of weights."""
    folder = tmp_path_factory.mktemp("data")
    (folder / WEIGHTS).parent.mkdir(parents=True)
    (folder / WEIGHTS).touch()
    return folder


@pytest.fixture
def weights_file(weights_folder, monkeypatch):
    """The weights of CIFAR-10's model exist: planning needs their path, not their content."""
    if "FEDPROTO_DATA" not in os.environ:
        monkeypatch.setenv("FEDPROTO_DATA", str(weights_folder))


def _replace_targets(folder, monkeypatch):
    """Replace the real targets by tiny ones, without figures, which have their own tests."""
    (folder / "tiny.toml").write_text(TINY)
    (folder / "probed.toml").write_text(PROBED)
    monkeypatch.setattr(plan, "SPECS", folder)
    monkeypatch.setattr(make, "_draw_figure", lambda *arguments: iter(()))


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """The folder of the tiny targets' specs, which a test may change."""
    folder = tmp_path / "specs"
    folder.mkdir()
    _replace_targets(folder, monkeypatch)
    return folder


class MadeByCommand(NamedTuple):
    """The folder of a target, and what the command that made it printed."""

    out: object
    answer: Answer


@pytest.fixture(scope="session")
def tiny_by_command(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        _replace_targets(tmp_path_factory.mktemp("specs"), patch)
        out = tmp_path_factory.mktemp("tiny")
        answer = fedproto("reproduce", "tiny", "--out", out, "--archive", out / "cells.tgz")
    assert answer.code == 0, answer.err
    return MadeByCommand(out, answer)


@pytest.fixture(scope="session")
def tiny(tiny_by_command):
    """The folder of the tiny target, with its archive; tests that change it work on a copy."""
    return tiny_by_command.out


@pytest.fixture(scope="session")
def probed(tmp_path_factory):
    """The folder of the probed target, with its archive; tests that change it work on a copy."""
    with pytest.MonkeyPatch.context() as patch:
        _replace_targets(tmp_path_factory.mktemp("specs"), patch)
        out = tmp_path_factory.mktemp("probed")
        make_target(out, "probed", archive=out / "cells.tgz")
    return out
