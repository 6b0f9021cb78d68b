"""Which code from outside the package may run, and where Python looks for it.

A plug-in is Python code, named `package.module:function`. The user's own names, typed on the command line
or passed from Python, are trusted. A name that was read from a file is not: the file may have been sent by
anybody. Nothing is imported unless exactly its name is trusted, so a reader of files that forgets to ask
refuses; it cannot run what it found.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

from fedproto.errors import ConfigError


@dataclass
class _Trust:
    """What this process may load."""

    names: set[str] = field(default_factory=set)  # as the user gave them: `package.module:function`
    files: bool = False  # names from files, too: the user passed --trust-plugins
    folder: Path | None = None  # looked in first: the user passed --plugin-dir


_trust = _Trust()
#: Top-level modules that were found in a folder which is not on sys.path, and that folder.
_folders: dict[str, Path] = {}


# --- trust


def trust_plugins(*names: str) -> None:
    """Let these plug-ins, each `package.module:function`, run wherever a file names them."""
    for name in names:
        module, colon, function = name.partition(":")
        if not (module and colon and function):
            raise ConfigError(f"{name!r} is not a plug-in: its name is 'package.module:function'")
    _trust.names.update(names)


def trust_files() -> None:
    """Let plug-ins that files name run, as `--trust-plugins` asks for."""
    _trust.files = True


def look_in(folder: Path) -> None:
    """Look for plug-ins in this folder instead of the current one, as `--plugin-dir` asks for."""
    if not folder.is_dir():
        raise ConfigError(f"--plugin-dir {folder} is not a folder")
    _trust.folder = folder.absolute()


def is_trusted(name: str) -> bool:
    """Whether the user gave this name, or trusts those in files."""
    return _trust.files or name in _trust.names


@contextmanager
def own_trust() -> Iterator[None]:
    """Forget at the end what was trusted within: one command's flags say nothing about the next command."""
    global _trust
    before = _trust
    _trust = replace(before, names=set(before.names))
    try:
        yield
    finally:
        _trust = before


def refusal(kind: str, name: str, where: str, remedy: str | None = None) -> ConfigError:
    """The sentence about a plug-in that a file names; `where` says which file."""
    flag = f"pass --trust-plugins (in Python, call fedproto.trust_plugins({name!r}) first)"
    return ConfigError(
        f"{where} names the {kind} {name!r}, a plug-in whose Python code would run here: "
        f"if you trust it, {remedy or flag}"
    )


# --- loading


def load(kind: str, name: str) -> Callable:
    """The function of a trusted plug-in, imported from --plugin-dir, from where Python looks, or from the current
    folder."""
    if not is_trusted(name):
        raise refusal(kind, name, "a file")
    module, _, function = name.partition(":")
    try:
        found = getattr(_imported(module), function)
    except (
        Exception,
        SystemExit,
    ) as error:  # somebody's file can fail in any way while it is imported
        raise ConfigError(
            f"{kind} {name!r} cannot be loaded from {_places()}: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(f"{kind} {name!r} is not a function but {type(found).__name__}")
    return found


@contextmanager
def reachable(name: str) -> Iterator[None]:
    """Let a plug-in's function import files beside it while it is called."""
    module = name.partition(":")[0]
    folder = _folders.get(module.partition(".")[0])
    with _on_path(folder):
        yield


def _places() -> str:
    return f"{_trust.folder or 'the current folder'} or PYTHONPATH"


def _imported(module: str) -> ModuleType:
    """The module, looked for outside sys.path only while it is imported.

    What is installed comes before the current folder, so that nobody's folder can take the place of an
    installed module; a folder that the user named comes first.
    """
    importlib.invalidate_caches()  # a file may have been written a moment ago
    top = module.partition(".")[0]
    if _trust.folder is not None and _is_in(_trust.folder, top):
        folder: Path | None = _trust.folder
    elif _is_installed(top):
        folder = _folders.get(top)
    else:
        folder = _trust.folder or Path.cwd()
    with _on_path(folder):
        found = importlib.import_module(module)
    if folder is not None:
        _folders[top] = folder
    return found


def _is_installed(top: str) -> bool:
    """Whether Python finds a module, or has it already, without looking in the current folder."""
    return top in sys.modules or importlib.util.find_spec(top) is not None


def _is_in(folder: Path, top: str) -> bool:
    files = (folder / f"{top}{ending}" for ending in importlib.machinery.all_suffixes())
    return (folder / top).is_dir() or any(file.is_file() for file in files)


@contextmanager
def _on_path(folder: Path | None) -> Iterator[None]:
    """Add a folder to sys.path for a moment: first where the user named it, else last."""
    if folder is None or str(folder) in sys.path:
        yield
        return
    position = 0 if folder == _trust.folder else len(sys.path)
    sys.path.insert(position, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:  # the plug-in may have removed it
            sys.path.remove(str(folder))
