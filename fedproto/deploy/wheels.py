"""A folder of wheels from which fedproto installs on machines without a network."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from fedproto.errors import ConfigError
from fedproto.runs.folder import is_taken

INSTALL_FILE = "install.sh"
_INSTALL = """#!/usr/bin/env bash
# Install fedproto from this folder, without a network: ./install.sh, in an activated environment.
exec python -m pip install --no-index --find-links "$(dirname "$0")" {requirement}
"""


def collect_wheels(
    folder: Path, source: str, extras: Sequence[str], pip_options: Sequence[str] = ()
) -> int:
    """Fill a new folder with wheels of `source`, its extras and all they need; return their number.

    `source` is a checkout, a wheel or a name that pip knows. The wheels fit machines like this one:
    the same operating system, processor and Python. What is installed here is taken in the version
    that is installed here, so a torch for CPUs stays one. `pip_options` are passed on to pip.
    """
    if is_taken(folder):
        raise ConfigError(f"{folder} is not empty: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    requirement = f"{source}[{','.join(extras)}]" if extras else source
    command = [sys.executable, "-m", "pip", "wheel", "--wheel-dir", str(folder)]
    with tempfile.TemporaryDirectory() as temporary:
        constraints = Path(temporary) / "installed.txt"
        constraints.write_text("".join(f"{line}\n" for line in list_installed()))
        constrained = ["--constraint", str(constraints), requirement]
        done = subprocess.run([*command, *pip_options, *constrained])
    if done.returncode != 0:
        raise ConfigError(
            f"pip could not make the wheels of {requirement}: its reason is above; "
            f"{folder} is incomplete"
        )
    name = Path(source).name if not Path(source).is_dir() else "fedproto"
    if name.endswith(".whl"):
        name = name.partition("-")[0]
    installed = f"'{name}[{','.join(extras)}]'" if extras else name
    script = folder / INSTALL_FILE
    script.write_text(_INSTALL.format(requirement=installed))
    script.chmod(0o755)
    return len(list(folder.glob("*.whl")))


def list_installed() -> list[str]:
    """Return `name==version` of every package that is installed here, but for fedproto itself."""
    versions = {each.name: each.version for each in distributions() if each.name}
    versions.pop("fedproto", None)
    return sorted(f"{name}=={version}" for name, version in versions.items())
