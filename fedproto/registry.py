"""Plug-ins by name: one small file each, whose file name is its name and whose function's signature its configuration.

`fedproto/algorithms/fedprox.py` holds `fedprox(*, mu=0.1)`; `-` in a name is `_` in its file. A source with an argument
is written `npz:PATH`. `package.module:function` names a plug-in from outside.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedproto.errors import ConfigError, unknown
from fedproto.options import Part, checked, options_of

#: kind -> the folder of its plug-ins
FOLDERS = {"algorithm": "algorithms", "dataset": "data", "model": "models", "partition": "partitions"}

#: kind -> module and class of what its plug-ins return, imported when one has
RETURNS = {
    "algorithm": ("fedproto.types", "Algorithm"),
    "dataset": ("fedproto.data", "Source"),
    "model": ("torch.nn", "Module"),
    "partition": ("collections.abc", "Sequence"),
}


def names(kind: str) -> list[str]:
    """All plug-ins of a kind, read from the folder without importing any."""
    files = (Path(__file__).parent / FOLDERS[kind]).glob("[!_]*.py")
    return sorted(file.stem.replace("_", "-") for file in files)


def presets(kind: str) -> dict[str, str]:
    """Names that stand for a mix of plug-ins, and the mix."""
    return importlib.import_module("fedproto.models").PRESETS if kind == "model" else {}


def find(kind: str, name: str) -> Callable:
    """The plug-in's function. A name may carry an argument (`npz:PATH`), which is not looked at here."""
    base, colon, rest = name.partition(":")
    if base in names(kind):
        stem = base.replace("-", "_")
        return getattr(importlib.import_module(f"fedproto.{FOLDERS[kind]}.{stem}"), stem)
    if colon and rest:
        return _external(kind, base, rest)
    if name in presets(kind):
        raise ConfigError(f"{kind} {name!r} is a mix itself, so it stands alone; options for it are given with --set")
    raise unknown(kind, name, [*names(kind), *presets(kind)])


def _external(kind: str, module: str, function: str) -> Callable:
    if "" not in sys.path:
        sys.path.insert(0, "")  # a file beside where the command was typed
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # a file of somebody else's can fail in any way while it is imported
        raise ConfigError(
            f"{kind} '{module}:{function}' cannot be loaded from the current folder or PYTHONPATH: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(f"{kind} '{module}:{function}' is no function but {type(found).__name__}")
    return found


def build(kind: str, part: Part, *context: Any) -> Any:
    """Call a plug-in with its context, its argument after the colon if it has one, and its checked options."""
    function = find(kind, part.name)
    base, colon, argument = part.name.partition(":")
    arguments = (argument,) if colon and base in names(kind) else ()
    options = checked(function, part.options, f"{kind} {base}")
    try:
        inspect.signature(function).bind(*context, *arguments, **options)
    except TypeError as error:
        raise _misfit(kind, part.name, len(context), error) from error
    return _expected(kind, part.name, function(*context, *arguments, **options))


def _misfit(kind: str, name: str, context: int, error: TypeError) -> ConfigError:
    """Why a plug-in cannot be called with what it is given."""
    base, colon, _ = name.partition(":")
    if base not in names(kind):
        return ConfigError(f"{kind} {name!r} must take {context} positional arguments, and options after `*`: {error}")
    return ConfigError(f"{kind} {base!r} takes no path" if colon else f"{kind} {base!r} needs a path: '{base}:PATH'")


def short(kind: str, part: Part) -> str:
    """A part as a person would write it: only the options that differ from their defaults."""
    defaults = {name: option.default for name, option in options_of(find(kind, part.name)).items()}
    return str(Part(part.name, {name: value for name, value in part.options.items() if value != defaults[name]}))


def _expected(kind: str, name: str, made: Any) -> Any:
    """What a plug-in made; one from outside may have forgotten its `return`."""
    module, wanted = RETURNS[kind]
    if not isinstance(made, getattr(importlib.import_module(module), wanted)):
        raise ConfigError(f"{kind} {name!r} returned {type(made).__name__}, where {module}.{wanted} is wanted")
    return made
