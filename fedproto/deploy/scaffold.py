"""`fedproto deploy init`: a folder from which a federation is started."""

from __future__ import annotations

import re
from pathlib import Path

from fedproto.errors import ConfigError
from fedproto.runs.folder import is_taken, whole_folder

TEMPLATE = Path(__file__).parent / "template"


def init(folder: Path, members: list[str], data: str, classes: list[str]) -> None:
    """Write it, or nothing; each member starts with a share of the classes, to be changed in its file."""
    for name in members:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise ConfigError(
                f"a member's name is of letters, digits, '.', '_' and '-', not {name!r}"
            )
        if name in ("ca.crt", "server.key", "server.pem") or name.endswith(".pub"):
            raise ConfigError(f"a member cannot be called {name!r}, as files of keys are")
    odd = [each for each in (*classes, data, str(folder)) if re.search(r'["\\,\n]', each)]
    if odd:
        raise ConfigError(
            f"{odd[0]!r} holds a comma, a quote, a backslash or a line's end, which the files cannot hold"
        )
    if len(set(members)) < max(2, len(members)):
        raise ConfigError("a federation needs two members or more, of different names")
    if is_taken(folder):
        raise ConfigError(f"{folder} is not empty: name another folder")
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder.absolute()) as made:
            _fill(made, folder.absolute(), members, data, classes)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {error.strerror or error}; name another folder"
        ) from error


def _fill(made: Path, folder: Path, members: list[str], data: str, classes: list[str]) -> None:
    words = {
        "NAMES": " ".join(members),
        "FIRST": members[0],
        "SECOND": members[1],
        "MEMBERS": ",".join(members),
    }
    common = words | {"STATE": str(folder / "server"), "CLASSES": ",".join(classes)}
    for file in (*TEMPLATE.glob("*.sh"), TEMPLATE / "keys.py", TEMPLATE / "pyproject.toml"):
        _write(made / file.name, file, common)
    _write(made / ".gitignore", TEMPLATE / "gitignore", {})
    _write(made / "README.md", TEMPLATE / "guide.md", common | {"STATE": "server"})
    for place, name in enumerate(members):
        own = [
            each for number, each in enumerate(classes) if number % (len(members) + 1) != place
        ] or classes
        _write(
            made / f"{name}.toml",
            TEMPLATE / "member.toml",
            {"NAME": name, "DATA": data, "CLASSES": ",".join(own)},
        )


def _write(path: Path, template: Path, words: dict[str, str]) -> None:
    text = template.read_text()
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    path.write_text(text)
    path.chmod(template.stat().st_mode & 0o777)
