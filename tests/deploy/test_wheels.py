"""`fedproto deploy wheels`: what it makes installs where there is no network."""

import os
import subprocess
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from helpers.command_line import fedproto

from fedproto.deploy.wheels import collect_wheels, list_installed
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


def make_checkout(folder: Path, dependencies: str = "") -> Path:
    """Write a checkout of a package of the same name that needs nothing, or what is named."""
    (folder / "fedproto").mkdir(parents=True)
    (folder / "fedproto" / "__init__.py").write_text("answer = 42\n")
    project = PROJECT.replace("dependencies = []", f"dependencies = [{dependencies}]")
    (folder / "pyproject.toml").write_text(project)
    return folder


def write_wheel(folder: Path, name: str, number: str) -> None:
    """Write a wheel of a package that holds nothing."""
    folder.mkdir(exist_ok=True)
    about = f"{name}-{number}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{number}-py3-none-any.whl", "w") as wheel:
        named = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        wheel.writestr(f"{about}/METADATA", named)
        kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{about}/WHEEL", kind)
        wheel.writestr(f"{about}/RECORD", "")


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = fedproto("deploy", "wheels", tmp_path)
    assert done.code == 2 and "is not empty: name another folder" in done.err


def test_pips_failure_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip could not make the wheels"):
        collect_wheels(tmp_path / "wheels", str(tmp_path / "nothing.whl"), [], ["--no-index"])


def test_packages_keep_the_version_that_is_installed_here(tmp_path: Path) -> None:
    """A newer version can be had, and is not taken: with torch it would bring CUDA along."""
    pytest.importorskip("hatchling")
    installed = version("iniconfig")
    for number in (installed, "999"):
        write_wheel(tmp_path / "index", "iniconfig", number)
    checkout = make_checkout(tmp_path / "checkout", '"iniconfig"')
    wheels = tmp_path / "wheels"
    options = ["--no-index", "--find-links", str(tmp_path / "index")]
    options += ["--no-build-isolation", "--quiet"]
    assert collect_wheels(wheels, str(checkout), [], options) == 2
    assert (wheels / f"iniconfig-{installed}-py3-none-any.whl").exists()


def test_what_is_installed_is_listed_without_fedproto() -> None:
    installed = list_installed()
    assert f"torch=={torch.__version__}" in installed
    assert not any(line.startswith("fedproto==") for line in installed)


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


@pytest.mark.slow
def test_the_real_package_installs_and_trains_without_a_network(tmp_path: Path) -> None:
    """Some minutes and 0.5 GB: pip downloads here what is installed, and nothing there."""
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        pytest.skip("only root can take the network away")
    wheels = tmp_path / "wheels"
    checkout = Path(__file__).parents[2]
    collect_wheels(wheels, str(checkout), ["flower", "privacy"], ["--quiet"])
    assert not list(wheels.glob("nvidia*")) or torch.version.cuda
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    programs = environment / "bin"
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    for command in (
        [str(wheels / "install.sh"), "--quiet"],
        ["fedproto", "run", "--rounds", "1", "--out", "run"],
        ["fedproto", "deploy", "init", "hospitals", "--members", "north,south"],
        ["flower-superlink", "--help"],
    ):
        subprocess.run(["unshare", "--net", *command], env=own, check=True, cwd=tmp_path)
    assert (tmp_path / "run" / "result.json").exists()
