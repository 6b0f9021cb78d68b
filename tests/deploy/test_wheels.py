"""`fedproto deploy wheels`: what it makes installs where there is no network."""

import os
import subprocess
import venv
from pathlib import Path

import pytest
from helpers.command_line import fedproto

from fedproto.deploy.wheels import collect_wheels
from fedproto.errors import ConfigError

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedproto"
version = "9"
dependencies = []

[project.optional-dependencies]
small = []

[tool.hatch.build.targets.wheel]
packages = ["fedproto"]
"""


def make_checkout(folder: Path) -> Path:
    """Write a checkout of a package of the same name that needs nothing."""
    (folder / "fedproto").mkdir(parents=True)
    (folder / "fedproto" / "__init__.py").write_text("answer = 42\n")
    (folder / "pyproject.toml").write_text(PROJECT)
    return folder


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = fedproto("deploy", "wheels", tmp_path)
    assert done.code == 2 and "is not empty: name another folder" in done.err


def test_pips_failure_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip could not make the wheels"):
        collect_wheels(tmp_path / "wheels", str(tmp_path / "nothing.whl"), [], ["--no-index"])


@pytest.mark.slow
def test_what_it_makes_installs_without_a_network(tmp_path: Path) -> None:
    """A tiny checkout, built here without a network, and installed into an empty environment."""
    pytest.importorskip("hatchling")
    checkout = make_checkout(tmp_path / "checkout")
    wheels = tmp_path / "wheels"
    options = ["--no-index", "--no-build-isolation", "--quiet"]
    assert collect_wheels(wheels, str(checkout), ["small"], options) == 1
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    programs = environment / "bin"
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "PIP_CONFIG_FILE": os.devnull}
    subprocess.run([wheels / "install.sh"], env=own, check=True, cwd=tmp_path)
    command = [programs / "python", "-c", "import fedproto; print(fedproto.answer)"]
    done = subprocess.run(command, env=own, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "42\n", done.stderr
