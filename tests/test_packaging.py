"""The package as people install it: its metadata, and the wheel in an empty environment."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import venv
from importlib.metadata import metadata, packages_distributions, requires
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


def test_every_link_of_the_long_description_is_absolute() -> None:
    description = metadata("fedproto").get_payload()
    targets = re.findall(r"\]\(([^)]+)\)", str(description))
    assert len(targets) > 10
    for target in targets:
        assert target.startswith(("https://", "#")), target


#: Prints the files of the package that `fedproto --help` imports.
IMPORTED_FILES = """
import sys
import fedproto.cli.main
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "fedproto":
        print(module.__file__)
"""


def list_imports(path: Path) -> set[str]:
    """Return the packages that a file imports when it is imported itself."""
    packages = set()
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            packages.add(statement.module.split(".")[0])
    return packages - set(sys.stdlib_module_names) - {"fedproto"}


def test_what_the_command_line_imports_is_a_requirement() -> None:
    """`click` was missing: a newer typer came without it, and no command started."""
    found = subprocess.run(
        [sys.executable, "-c", IMPORTED_FILES], check=True, text=True, capture_output=True
    )
    imported = set().union(*(list_imports(Path(line)) for line in found.stdout.splitlines()))
    required = set()
    for requirement in requires("fedproto") or []:
        if "extra ==" not in requirement:
            required.add(re.split(r"[^\w.-]", requirement)[0].lower())
    assert "typer" in imported
    for package in imported:
        names = {name.lower() for name in packages_distributions()[package]}
        assert names & required, f"{package} is imported, and not required"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment that holds the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(PROJECT)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=True)
    binaries = folder / "env" / "bin"
    constraints = str(PROJECT / "constraints.txt")
    pip = [str(binaries / "pip"), "install", "--quiet", "--constraint", constraints]
    subprocess.run([*pip, f"{wheel}[plots]"], check=True)
    return binaries


def run_installed(binaries: Path, folder: Path, *arguments: str) -> str:
    """Return what the installed `fedproto` prints when it is run in `folder`."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "FEDPROTO_DATA")
    }
    command = [str(binaries / "fedproto"), *arguments]
    finished = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=600
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.slow
def test_a_federation_is_trained_and_reported_from_the_wheel(
    installed: Path, tmp_path: Path
) -> None:
    run_installed(
        installed, tmp_path, "run", "--rounds", "2", "--clients", "3", "--out", "runs/first"
    )
    assert (tmp_path / "runs" / "first" / "result.json").exists()
    run_installed(installed, tmp_path, "report", "runs/first", "--out", "page")
    assert list(tmp_path.glob("page*"))


@pytest.mark.slow
def test_the_benchmark_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    arguments = ("bench", "--clients", "4", "--model", "mlp", "--rounds", "1", "--json", "b.json")
    run_installed(installed, tmp_path, *arguments)
    assert (tmp_path / "b.json").exists()


@pytest.mark.slow
def test_deploy_init_from_the_wheel_names_only_files_that_it_writes(
    installed: Path, tmp_path: Path
) -> None:
    run_installed(installed, tmp_path, "deploy", "init", "hospitals")
    guide = (tmp_path / "hospitals" / "README.md").read_text()
    named = set(re.findall(r"[\w./-]+\.(?:sh|py|toml|md)\b", guide))
    assert {"./server.sh", "./run.sh"} <= named
    for name in named:
        name = name.replace("NAME", "hospital-a")
        assert (tmp_path / "hospitals" / name).exists(), name


@pytest.mark.slow
def test_every_plug_in_and_file_of_the_package_is_in_the_wheel(
    installed: Path, tmp_path: Path
) -> None:
    (site,) = installed.parent.glob("lib/python*/site-packages/fedproto")
    tracked = subprocess.run(
        ["git", "ls-files", "fedproto"], cwd=PROJECT, check=True, capture_output=True, text=True
    ).stdout.split()
    for name in tracked:
        assert (site.parent / name).exists(), name
