"""Which code from outside the package may run, and where Python looks for it.

A plug-in from outside is Python code, named `package.module:function`. Names that the user types on
the command line or passes from Python are trusted. A name that was read from a file is not, because
anybody may have sent the file. Nothing is imported unless exactly its name is trusted: code that
reads a file and forgets to ask gets a refusal, and cannot run what it found.
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
class Trust:
    """What this process may load."""

    #: Names as the user gave them: `package.module:function`.
    names: set[str] = field(default_factory=set)
    #: Whether names from files are trusted, too: the user passed --trust-plugins.
    files: bool = False
    #: The folder that is searched first: the user passed --plugin-dir.
    folder: Path | None = None


_trust = Trust()
#: Top-level modules that were found in a folder which is not on sys.path, and that folder.
_module_folders: dict[str, Path] = {}


# --- trust


def trust_plugins(*names: str) -> None:
    """Let these plug-ins, each `package.module:function`, run wherever a file names them."""
    for name in names:
        module, _, function = name.partition(":")
        if not module or not function:
            raise ConfigError(f"{name!r} is not a plug-in: its name is 'package.module:function'")
    _trust.names.update(names)


def trust_files() -> None:
    """Let plug-ins that files name run, as `--trust-plugins` asks for."""
    _trust.files = True


def look_in(folder: Path) -> None:
    """Search this folder for plug-ins instead of the current one, as `--plugin-dir` asks for."""
    if not folder.is_dir():
        raise ConfigError(f"--plugin-dir {folder} is not a folder")
    _trust.folder = folder.absolute()


def is_trusted(name: str) -> bool:
    """Whether the user gave this name, or trusts the names in files."""
    return _trust.files or name in _trust.names


@contextmanager
def own_trust() -> Iterator[None]:
    """Forget at the end what was trusted inside: flags of one command do not affect the next."""
    global _trust
    before = _trust
    _trust = replace(before, names=set(before.names))
    try:
        yield
    finally:
        _trust = before


def current() -> Trust:
    """Return what this process may load, for another process that works for it."""
    return _trust


def adopt(trust: Trust) -> None:
    """Load what the process may load that this one works for."""
    global _trust
    _trust = trust


def refusal(kind: str, name: str, where: str, remedy: str | None = None) -> ConfigError:
    """Return the error for a plug-in that a file names.

    `where` says which file, and `remedy` how to trust the plug-in if not by --trust-plugins.
    """
    if remedy is None:
        in_python = f"fedproto.trust_plugins({name!r})"
        remedy = f"pass --trust-plugins (in Python, call {in_python} first)"
    return ConfigError(
        f"{where} names the {kind} {name!r}, a plug-in whose Python code would run here: "
        f"if you trust it, {remedy}"
    )


# --- loading


def load(kind: str, name: str) -> Callable:
    """Return the function of a trusted plug-in.

    Its module is imported from --plugin-dir, from sys.path, or from the current folder.
    """
    if not is_trusted(name):
        raise refusal(kind, name, "a file")
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(_import(module_name), function_name)
    except (Exception, SystemExit) as error:  # importing somebody's file can fail in any way
        folder = _trust.folder or "the current folder"
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{kind} {name!r} cannot be loaded from {folder} or PYTHONPATH: {reason}"
        ) from error
    if not callable(function):
        raise ConfigError(f"{kind} {name!r} is not a function but {type(function).__name__}")
    return function


@contextmanager
def reachable(name: str) -> Iterator[None]:
    """Let a plug-in's function import files from its own folder while it is called."""
    module = name.partition(":")[0]
    folder = _module_folders.get(_top_level(module))
    with _on_path(folder):
        yield


def _import(module: str) -> ModuleType:
    """Import a module; a folder outside sys.path is searched during this import only.

    Installed modules come before the current folder, so that a file there cannot replace an
    installed module. A folder that the user named comes first.
    """
    importlib.invalidate_caches()  # a file may have been written a moment ago
    top_level = _top_level(module)
    folder: Path | None
    if _trust.folder is not None and _is_in(_trust.folder, top_level):
        folder = _trust.folder
    elif _is_installed(top_level):
        folder = _module_folders.get(top_level)
    else:
        folder = _trust.folder or Path.cwd()
    with _on_path(folder):
        imported = importlib.import_module(module)
    if folder is not None:
        _module_folders[top_level] = folder
    return imported


def _top_level(module: str) -> str:
    return module.partition(".")[0]


def _is_installed(top_level: str) -> bool:
    """Whether Python has loaded a module, or finds it without looking in the current folder."""
    return top_level in sys.modules or importlib.util.find_spec(top_level) is not None


def _is_in(folder: Path, top_level: str) -> bool:
    """Whether a folder holds a package or a module file of this name."""
    if (folder / top_level).is_dir():
        return True
    endings = importlib.machinery.all_suffixes()
    return any((folder / f"{top_level}{ending}").is_file() for ending in endings)


@contextmanager
def _on_path(folder: Path | None) -> Iterator[None]:
    """Add a folder to sys.path inside the block: first if the user named it, otherwise last."""
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
