"""The Dockerfile and the compose file, where there is no Docker.

They are parsed and checked, and their own commands are run in an empty virtual environment, with
the paths of a container mapped to a temporary folder.
"""

import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from dockerfile_parse import DockerfileParser
from helpers.flower import _end, _free_port, _listens, until

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "tests" / "vendor" / "compose-spec" / "compose_spec.json"
#: Instructions that have no counterpart outside of a container.
NOT_RUN = ("FROM", "ARG", "USER", "CMD", "COMMENT")


def read_dockerfile(folder: Path) -> list[dict[str, Any]]:
    """Return the instructions; the parser keeps a file of its own in a folder."""
    shutil.copy(ROOT / "Dockerfile", folder)
    return DockerfileParser(path=str(folder)).structure


def read_compose() -> dict[str, Any]:
    """Return the compose file with `$$` as `$`, as compose reads it."""
    return yaml.safe_load((ROOT / "compose.yaml").read_text().replace("$$", "$"))


def documented_commands() -> list[list[str]]:
    """Return the commands after `docker compose` in the first block of docs/docker.md."""
    page = (ROOT / "docs" / "docker.md").read_text()
    block = re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    lines = [shlex.split(line) for line in block.splitlines()]
    return [words[2:] for words in lines if words[:2] == ["docker", "compose"]]


def list_context() -> set[str]:
    """Return the tracked files at the root, and folders, that .dockerignore lets into the build."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    allowed = set()
    for name in {path.partition("/")[0] for path in tracked.stdout.splitlines()}:
        is_in = True
        for pattern in patterns:
            if fnmatch.fnmatch(name, pattern.removeprefix("!")):
                is_in = pattern.startswith("!")
        if is_in:
            allowed.add(name)
    return allowed


# --- the files


def test_the_compose_file_fits_the_published_schema():
    schema = jsonschema.Draft201909Validator(json.loads(SCHEMA.read_text()))
    assert [error.message for error in schema.iter_errors(read_compose())] == []


def test_the_image_runs_as_somebody_and_copies_only_what_it_may(tmp_path):
    instructions = read_dockerfile(tmp_path)
    users = [line["value"] for line in instructions if line["instruction"] == "USER"]
    assert users == ["1000:1000"]
    copied = set()
    for line in instructions:
        if line["instruction"] == "COPY" and not line["value"].startswith("--from"):
            copied.update(line["value"].split()[:-1])
    assert copied == list_context()
    assert copied == {"constraints.txt", "pyproject.toml", "README.md", "LICENSE", "fedproto"}


def test_every_service_is_confined():
    for name, service in read_compose()["services"].items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["user"].startswith("${FEDPROTO_UID"), name
        assert "privileged" not in service and "ports" not in service, name


def test_a_member_is_given_its_own_folder_only():
    services = read_compose()["services"]
    for name in ("north", "south"):
        assert services[name]["volumes"] == [f"./deployment/{name}:/deployment/hospitals"]
        assert services[name]["command"] == ["./member.sh", name]


def test_the_documented_commands_name_services_of_the_file():
    services = set(read_compose()["services"])
    commands = documented_commands()
    assert [words[0] for words in commands] == ["build", "run", "up", *["exec"] * 3, "down"]
    for command, *words in commands:
        named = [word for word in words if not word.startswith("-")]
        if command == "up":
            assert set(named) == services - {"setup"}
        elif command in ("run", "exec"):
            assert named[0] in services


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing():
    subprocess.run(["hadolint", str(ROOT / "Dockerfile")], check=True)


# --- the steps of the Dockerfile


class Image:
    """What the Dockerfile makes, in a folder that stands for the root of the file system."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        }
        # A machine without the network has torch somewhere that pip knows of.
        self.environment["TORCH_INDEX"] = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
        self.environment["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        self.work = self.root
        for line in read_dockerfile(folder):
            self.follow(line["instruction"], line["value"])

    def map_paths(self, text: str) -> str:
        """Return a text with the container's own folders in this one."""
        return re.sub(r"(?<![\w.])/(opt|src|deployment)\b", rf"{self.root}/\1", text)

    def follow(self, instruction: str, value: str) -> None:
        if instruction in NOT_RUN or "useradd" in value or "--from=build" in value:
            return
        if instruction == "WORKDIR":
            self.work = Path(self.map_paths(value))
            self.work.mkdir(parents=True)
        elif instruction == "COPY":
            *names, target = value.split()
            for name in names:
                self.copy(ROOT / name, self.work / target)
        elif instruction == "ENV":
            for word in shlex.split(value):
                name, _, text = word.partition("=")
                old = self.environment["PATH"]
                self.environment[name] = self.map_paths(text).replace("$PATH", old)
        elif instruction == "RUN":
            self.run("bash", "-ec", self.map_paths(value))
        else:
            raise AssertionError(f"the test does not know {instruction}")

    def copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)

    def run(self, *command: str, folder: Path | None = None, **variables: str) -> str:
        done = subprocess.run(
            command,
            cwd=folder or self.work,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


# --- the services of the compose file


class Services:
    """The services as processes on this machine, each in the folder that is mounted for it."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.services = read_compose()["services"]
        self.port = str(_free_port())
        self.folder = image.root / "deployment"
        self.running: dict[str, subprocess.Popen] = {}

    def mounted(self, name: str) -> Path:
        """Return the folder on this machine that the service works in."""
        (volume,) = self.services[name]["volumes"]
        outside, inside = volume.split(":")[:2]
        rest = Path(self.services[name]["working_dir"]).relative_to(inside)
        return self.folder.parent / outside.removeprefix("./") / rest

    def variables(self, name: str) -> dict[str, str]:
        """Return its environment; containers have addresses of their own, processes have ports."""
        stated = self.services[name].get("environment", {})
        own = {"SERVER": "127.0.0.1"} if "SERVER" in stated else {}
        return {**stated, **own, "PORT": self.port, "LOCAL_PORT": str(_free_port()), "RETRY": "2"}

    def command(self, name: str) -> list[str]:
        return [self.image.map_paths(word) for word in self.services[name]["command"]]

    def run(self, name: str) -> None:
        self.image.run(*self.command(name), folder=self.mounted(name), **self.variables(name))

    def execute(self, name: str, *command: str) -> str:
        return self.image.run(*command, folder=self.mounted(name), **self.variables(name))

    def up(self, *names: str) -> None:
        """Start services; those that others wait for come first."""
        for name in sorted(names, key=lambda name: "depends_on" in self.services[name]):
            with (self.folder / f"{name}.log").open("wb") as log:
                self.running[name] = subprocess.Popen(
                    self.command(name),
                    cwd=self.mounted(name),
                    env=self.image.environment | self.variables(name),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            if "healthcheck" in self.services[name]:
                until(lambda: _listens(int(self.port)), f"{name} is healthy")
                self.check_health(name)

    def check_health(self, name: str) -> None:
        kind, *test = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        self.image.run(*(word.replace("9443", self.port) for word in test))

    def down(self) -> None:
        for process in reversed(self.running.values()):
            os.killpg(process.pid, signal.SIGTERM)
        for process in self.running.values():
            process.wait(timeout=60)
        self.running.clear()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return Image(tmp_path_factory.mktemp("image"))


@pytest.fixture
def services(image: Image) -> Iterator[Services]:
    found = Services(image)
    try:
        yield found
    finally:
        for process in found.running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        until(lambda: not _end(str(found.folder)), "nothing is left", 30)


@pytest.mark.slow
def test_the_documented_commands_take_a_federation_through_its_rounds(services):
    """Build, set up, start, admit, run, look, and stop, in the order of docs/docker.md."""
    printed = []
    for command, *words in documented_commands():
        named = [word for word in words if not word.startswith("-")]
        if command == "run":
            services.run(named[0])
        elif command == "up":
            services.up(*named)
        elif command == "exec":
            printed.append(services.execute(*named))
        elif command == "down":
            services.down()
    status = printed[-1]
    assert re.search(r"north.*south", status, re.DOTALL) and "round 2" in status.lower()
    secrets = services.folder / "hospitals" / "keys"
    assert not (secrets / "north").exists() and (secrets / "north.pub").exists()
    key = services.folder / "north" / "keys" / "north"
    assert key.stat().st_mode & 0o077 == 0
    assert not (services.folder / "north" / "south.toml").exists()
    assert (services.folder / "north" / "state-north" / "member.safetensors").exists()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(services.port))) != 0
