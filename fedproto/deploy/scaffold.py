"""`fedproto deploy init`: write a folder from which a federation is started.

Files of the folder `template` are copied; words such as `@NAMES@` in them are replaced.
"""

from __future__ import annotations

import getpass
import re
import sys
import unicodedata
from importlib import metadata
from pathlib import Path

from fedproto.errors import ConfigError
from fedproto.runs.folder import is_taken, whole_folder

TEMPLATE = Path(__file__).parent / "template"
#: Letters that are no plain letter with a mark, and what is written where they cannot be.
_LETTERS = {"ß": "ss", "ł": "l", "Ł": "L", "ø": "o", "Ø": "O", "æ": "ae", "Æ": "AE"}
_MEMBER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Files that keys.py writes beside the members' keys.
_KEY_FILES = ("ca.crt", "ca.key", "server.key", "server.pem")


def init(folder: Path, members: list[str], data: str, classes: list[str]) -> None:
    """Write the folder, or nothing if something is wrong with these values (ConfigError).

    Each member starts with some of the classes, which its file can change. The names of files and
    keys are plain letters: `Köln` is the site of a member called `Koln`.
    """
    sites = _name_sites(members)
    members = list(sites)
    _check_texts([*classes, data, str(folder)])
    if is_taken(folder):
        raise ConfigError(f"{folder} is not empty: name another folder")
    target = folder.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(target) as temporary:
            _write_shared_files(temporary, target, members, classes)
            for number, (name, site) in enumerate(sites.items()):
                own = _choose_classes(classes, number, len(members))
                values = {"NAME": name, "SITE": site, "DATA": data, "CLASSES": ",".join(own)}
                _copy(TEMPLATE / "member.toml", temporary / f"{name}.toml", values)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{folder} cannot be created: {reason}; name another folder") from error


def _name_sites(members: list[str]) -> dict[str, str]:
    """Return each member's site by its name in plain letters; the site is empty if it is equal."""
    sites: dict[str, str] = {}
    names = []
    for site in members:
        name = _plain_letters(site)
        names.append(name)
        sites[name] = "" if name == site else unicodedata.normalize("NFC", site)
    _check_names(names)
    return sites


def _plain_letters(site: str) -> str:
    """Return a name with letters of the Latin alphabet without their marks; others stay."""
    for letter, plain in _LETTERS.items():
        site = site.replace(letter, plain)
    decomposed = unicodedata.normalize("NFD", site)
    return "".join(letter for letter in decomposed if not unicodedata.combining(letter))


def _check_names(members: list[str]) -> None:
    for name in members:
        if not _MEMBER_NAME.fullmatch(name):
            raise ConfigError(
                "a member's name consists of letters, digits, '.', '_' and '-', "
                f"which {name!r} does not"
            )
        if name in _KEY_FILES or name.endswith(".pub"):
            raise ConfigError(
                f"a member cannot be called {name!r}, which is the name of a key file"
            )
    if len(members) < 2 or len(set(members)) < len(members):
        raise ConfigError("a federation needs at least two members, with different names")


def _check_texts(texts: list[str]) -> None:
    for text in texts:
        if re.search(r'["\\,\n]', text):
            raise ConfigError(
                f"{text!r} has a comma, a quote, a backslash or a line break, "
                "which the files cannot hold"
            )


def _choose_classes(classes: list[str], member: int, members: int) -> list[str]:
    """Return the classes that a member starts with: all but every (members + 1)-th one."""
    chosen = []
    for number, name in enumerate(classes):
        if number % (members + 1) != member:
            chosen.append(name)
    return chosen or classes


def _write_shared_files(
    temporary: Path, target: Path, members: list[str], classes: list[str]
) -> None:
    """Write all files but the members' own."""
    values = {
        "NAMES": " ".join(members),
        "FIRST": members[0],
        "SECOND": members[1],
        "MEMBERS": ",".join(members),
        "CLASSES": ",".join(classes),
        "STATE": str(target / "server"),
        "DOCUMENTATION": _describe_documentation(),
    }
    for name in ("keys.py", "pyproject.toml"):
        _copy(TEMPLATE / name, temporary / name, values)
    for script in TEMPLATE.glob("*.sh"):
        _copy(script, temporary / script.name, values)
    _write_units(temporary / "systemd", target)
    _copy(TEMPLATE / "gitignore", temporary / ".gitignore", {})
    _copy(TEMPLATE / "guide.md", temporary / "README.md", values)


def _write_units(folder: Path, target: Path) -> None:
    """Write the units of systemd, which name this user, this Python and the folder's final place.

    Of a path, systemd takes `%` for the beginning of a specifier.
    """
    programs = Path(sys.executable).parent
    values = {
        "FOLDER": str(target).replace("%", "%%"),
        "USER": getpass.getuser(),
        "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin".replace("%", "%%"),
    }
    folder.mkdir()
    for unit in (TEMPLATE / "systemd").iterdir():
        _copy(unit, folder / unit.name, values)


def _describe_documentation() -> str:
    """Return a sentence with the project's address, if the installed package states one."""
    try:
        entries = metadata.metadata("fedproto").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    addresses = {}
    for entry in entries:
        label, _, address = entry.partition(",")
        addresses[label.strip().lower()] = address.strip()
    for label in ("documentation", "homepage", "repository", "source"):
        if label in addresses:
            return f"More about all of this: {addresses[label]}"
    return ""


def _copy(template: Path, path: Path, values: dict[str, str]) -> None:
    """Write a template with its words replaced, and with its permissions."""
    text = template.read_text()
    for word, value in values.items():
        text = text.replace(f"@{word}@", value)
    path.write_text(text.rstrip() + "\n")
    path.chmod(template.stat().st_mode & 0o777)
