"""The folder that `fedproto deploy init` writes."""

import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import EmailMessage
from pathlib import Path

import pytest
from helpers.deployment import (
    LocalTransport,
)

from fedproto.deploy import scaffold
from fedproto.deploy.round_protocol import serve
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.settings import (
    TrainingTerms,
    read_member,
    split_run_config,
)
from fedproto.deploy.status import read_status
from fedproto.errors import ConfigError, RunFolderError

POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"


def test_init_writes_a_federation_that_passes_its_own_checks(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "fed"
    scaffold.init(folder, ["a", "b-1", "c.d"], "digits", list("0123456789"))
    assert {path.name for path in folder.iterdir()} == {
        *(
            "admit.sh",
            "env.sh",
            "keys.py",
            "member.sh",
            "run.sh",
            "server.sh",
            "systemd",
            "pyproject.toml",
            ".gitignore",
            "README.md",
        ),
        *("a.toml", "b-1.toml", "c.d.toml"),
    }
    for path in filter(Path.is_file, folder.rglob("*")):
        assert os.access(path, os.X_OK) == (path.suffix == ".sh") or path.name == "env.sh", path
        text = path.read_text().replace('"$@"', "").replace("@app", "")
        assert "@" not in text.replace("fedproto-member@", ""), path
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    mine, theirs = split_run_config(config, "here")
    assert (
        mine.members == "a,b-1,c.d"
        and mine.state == str(folder / "server")
        and theirs == TrainingTerms()
    )
    state = ServerState(mine, theirs)
    assert state.classes == tuple("0123456789")
    own = [read_member(folder / f"{name}.toml") for name in ("a", "b-1", "c.d")]
    assert [each.name for each in own] == ["a", "b-1", "c.d"]
    assert {name for each in own for name in each.classes.split(",")} == set("0123456789")
    assert all(each.state == str(folder / f"state-{each.name}") for each in own)


#: Placeholders of the guide, and files that its commands make.
NOT_WRITTEN = {"NAME.toml", "IMAGE.png", "keys", "ca.crt", "keys/ca.key", "keys/server.key"}
FILE_NAME = re.compile(r"[\w./-]*\w\.(?:sh|py|toml|md|png|crt|pem|key)\b")


def find_named_files(text: str) -> set[str]:
    """Return the files that a text names in code: in backquotes or in a block of commands."""
    blocks = re.findall(r"```.*?```", text, re.DOTALL)
    quoted = re.findall(r"`[^`\n]+`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    names = set()
    for code in (*blocks, *quoted):
        names.update(FILE_NAME.findall(code))
    return {name.removeprefix("./") for name in names}


def test_every_file_that_the_guide_names_is_written(tmp_path: Path) -> None:
    """Everything a user needs is in the folder: an installed package has no docs beside it."""
    folder = tmp_path / "fed"
    scaffold.init(folder, ["a", "b"], "digits", ["0", "1"])
    named = find_named_files((folder / "README.md").read_text()) - NOT_WRITTEN
    assert {"pyproject.toml", "keys.py", "server.sh", "member.sh", "run.sh", "a.toml"} <= named
    missing = [name for name in sorted(named) if not (folder / name).exists()]
    assert missing == []


def test_no_file_of_the_folder_names_pages_of_the_repository(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    scaffold.init(folder, ["a", "b"], "digits", ["0", "1"])
    for path in filter(Path.is_file, folder.rglob("*")):
        text = re.sub(r"https?://\S+", "", path.read_text())
        assert "docs/" not in text, path
        assert "pip install 'fedproto" not in text, path
        lines = [line for line in text.splitlines() if str(folder) not in line]
        assert not [line for line in lines if len(line) > 100]


@pytest.mark.parametrize(
    ("urls", "sentence"),
    [
        (["Source, https://a.example", "Documentation, https://b.example"], "https://b.example"),
        (["Homepage, https://c.example/x,y"], "https://c.example/x,y"),
        (["Funding, https://d.example"], ""),
        (None, ""),
    ],
)
def test_the_guide_ends_with_the_projects_address_if_it_has_one(
    urls: list[str] | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = EmailMessage()
    for url in urls or []:
        package["Project-URL"] = url
    monkeypatch.setattr(scaffold.metadata, "metadata", lambda name: package)
    scaffold.init(tmp_path / "fed", ["a", "b"], "digits", ["0", "1"])
    guide = (tmp_path / "fed" / "README.md").read_text()
    assert "@" not in guide.replace("fedproto-member@", "")
    last_line = guide.splitlines()[-1]
    if sentence:
        assert last_line == f"More about all of this: {sentence}"
    else:
        assert "More about" not in guide


def test_scripts_read_what_flower_prints_without_colours(tmp_path: Path) -> None:
    """Notebooks and CI set these, and then Flower colours the JSON that run.sh reads."""
    scaffold.init(tmp_path / "fed", ["a", "b"], "digits", ["0", "1"])
    coloured = os.environ | {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"}
    command = ["bash", "-c", ". ./env.sh; env", "./run.sh"]
    done = subprocess.run(
        command, cwd=tmp_path / "fed", env=coloured, check=True, capture_output=True, text=True
    )
    assert "FLWR_HOME=" in done.stdout and "COLOR" not in done.stdout.replace("COLORTERM", "")


@pytest.mark.parametrize(("chosen", "expected"), [({}, "0.1"), ({POLL: "0.5"}, "0.5")])
def test_the_pause_between_two_looks_for_tasks_can_be_chosen(
    chosen: dict[str, str], expected: str, tmp_path: Path
) -> None:
    scaffold.init(tmp_path / "fed", ["a", "b"], "digits", ["0", "1"])
    environment = {name: value for name, value in os.environ.items() if name != POLL} | chosen
    done = subprocess.run(
        ["bash", "-c", f". ./env.sh; echo ${POLL}", "./member.sh"],
        cwd=tmp_path / "fed",
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == expected


def test_a_federation_from_the_template_trains(tmp_path: Path) -> None:
    scaffold.init(tmp_path / "fed", ["a", "b"], "digits", list("0123456789"))
    config = tomllib.loads((tmp_path / "fed" / "pyproject.toml").read_text())["tool"]["flwr"][
        "app"
    ]["config"]
    state = ServerState(*split_run_config(config | {"rounds": 1}, "here"))
    own = {name: read_member(tmp_path / "fed" / f"{name}.toml") for name in "ab"}
    serve(state, LocalTransport(own, state), lambda sentence: None)
    assert state.round == 1 and state.server["known"].all()


def test_the_status_of_a_folder_before_the_first_round_says_what_is_missing(tmp_path: Path) -> None:
    scaffold.init(tmp_path / "fed", ["a", "b"], "digits", ["0", "1"])
    with pytest.raises(RunFolderError, match=r"has not started: .* when \./run\.sh begins"):
        read_status(tmp_path / "fed")
    with pytest.raises(RunFolderError, match="name the folder that `fedproto deploy init` made"):
        read_status(tmp_path)


@pytest.mark.parametrize(
    "members",
    [
        [],
        ["a"],
        ["a", "a"],
        ["a", ""],
        ["a", ".b"],
        ["a", "b/c"],
        ["a", "b c"],
        ["a", "b\n"],
        ["a", "ä"],
        ["a", "b" * 65],
    ],
)
def test_init_refuses_bad_member_names(members: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        scaffold.init(tmp_path / "fed", members, "digits", ["0", "1"])
    assert not (tmp_path / "fed").exists() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["ca.crt", "ca.key", "server.key", "server.pem", "a.pub"])
def test_init_refuses_member_names_that_are_key_files(name: str, tmp_path: Path) -> None:
    """`keys/ca.crt` would be its key."""
    with pytest.raises(ConfigError):
        scaffold.init(tmp_path / "fed", ["a", name], "digits", ["0", "1"])


def test_init_does_not_touch_a_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="not empty"):
            scaffold.init(folder, ["a", "b"], "digits", ["0", "1"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    scaffold.init(tmp_path / "empty", ["a", "b"], "digits", ["0", "1"])


def test_init_in_an_unwritable_place_gives_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/fed cannot be created: .*; name another folder"):
        scaffold.init(tmp_path / "file" / "fed", ["a", "b"], "digits", ["0", "1"])


@pytest.mark.parametrize(
    ("folder", "data", "name"),
    [
        ("f", 'csv:my "own".csv', "0"),
        ("f", "folder:C:\\new\\scans", "0"),
        ("f", "digits", 'a"b'),
        ("f", "digits", "a\\b"),
        ("f", "digits", "a,b"),
        ("f", "digits", "@CLASSES@"),
        ('f"', "digits", "0"),
        ("f\\1", "digits", "0"),
    ],
)
def test_init_writes_any_path_and_class_or_refuses_it(
    folder: str, data: str, name: str, tmp_path: Path
) -> None:
    made = tmp_path / folder
    try:
        scaffold.init(made, ["a", "b"], data, [name, "1", "2"])
    except ConfigError:
        return
    config = tomllib.loads((made / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert split_run_config(config, "here")[0].classes.split(",") == [name, "1", "2"]
    assert read_member(made / "a.toml").data == data
    assert config["state"] == str(made / "server")


def test_flower_packs_only_the_settings(tmp_path: Path) -> None:
    """Not the members' files, nor keys, which lie in the same folder."""
    build = pytest.importorskip("flwr.cli.build")
    folder = tmp_path / "fed"
    scaffold.init(folder, ["a", "b"], "digits", ["0", "1"])
    (folder / "keys").mkdir()
    for name in ("keys/secret.json", "notes.md", "state-a.json"):
        (folder / name).write_text("secret")
    packed = build.build_fab_from_disk(folder)
    names = zipfile.ZipFile(io.BytesIO(packed)).namelist()
    assert "pyproject.toml" in names and all(
        name == "pyproject.toml" or name.startswith(".info") for name in names
    )


# --- the units of systemd


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """Also where the folder's name has a space and a percent sign."""
    folder = tmp_path / "100% our federation"
    scaffold.init(folder, ["a", "b"], "digits", ["0", "1"])
    units = folder / "systemd"
    member = units / "fedproto-member@a.service"  # as systemd names an instance
    member.write_text((units / "fedproto-member@.service").read_text())
    command = ["systemd-analyze", "verify", "--man=no", units / "fedproto-server.service", member]
    done = subprocess.run(command, capture_output=True, text=True)
    about_ours = [line for line in done.stderr.splitlines() if "fedproto-" in line]
    assert about_ours == [] and done.returncode == 0, done.stderr


# --- the script that makes keys


def run_keys_script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("cryptography")
    folder.mkdir(exist_ok=True)
    (folder / "keys.py").write_text((scaffold.TEMPLATE / "keys.py").read_text())
    command = [sys.executable, "keys.py", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_keys_script_prints_a_line_per_file(tmp_path: Path) -> None:
    done = run_keys_script(tmp_path, "localhost", "::1", "--", "a")
    assert done.returncode == 0, done.stderr
    written = {line.split()[1].rstrip(",") for line in done.stdout.splitlines()}
    made = {f"keys/{path.name}" for path in (tmp_path / "keys").iterdir()}
    assert written == made
    assert {"keys/a", "keys/a.pub", "keys/ca.crt"} < made
    again = run_keys_script(tmp_path, "--", "a", "b")
    assert again.stdout.splitlines() == [
        "keys/ca.crt exists, so no certificate is made",
        "a has keys already",
        "written: keys/b, which is secret",
        "written: keys/b.pub",
    ]


def test_the_servers_own_processes_reach_it_by_every_certificate(tmp_path: Path) -> None:
    """They connect to 127.0.0.1, whatever address the members know."""
    run_keys_script(tmp_path, "server.hospital.example")
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate((tmp_path / "keys" / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.hospital.example", "localhost"]
    assert [str(found) for found in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_the_keys_script_explains_itself_and_makes_nothing(tmp_path: Path) -> None:
    done = run_keys_script(tmp_path, "--help")
    assert done.returncode == 0 and "[-- MEMBER ...]" in done.stdout
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--hepl",),
        ("local host",),
        ("",),
        ("localhost", "--", "--help"),
        ("localhost", "--", "../a"),
        ("localhost", "--", "ca.crt"),
        ("localhost", "--", "a.pub"),
    ],
)
def test_the_keys_script_refuses_odd_names_and_makes_nothing(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    done = run_keys_script(tmp_path, *words)
    assert done.returncode == 2 and "error: " in done.stderr
    assert not (tmp_path / "keys").exists()


def test_a_member_can_make_its_own_keys(tmp_path: Path) -> None:
    """Its certificate authority is the server's, so none is made beside them."""
    done = run_keys_script(tmp_path, "--only-keys", "--", "a")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "keys").iterdir()} == {"a", "a.pub"}
