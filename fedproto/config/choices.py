"""Choices of plug-ins: parsing them, and completing their options.

The text of a choice is parsed in options.py; here it meets the plug-ins that it names.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedproto.config import plugins
from fedproto.config.options import Part, check_options, options_of, parse
from fedproto.errors import ConfigError, shown, unknown

#: Stands for the model, or the partition, that suits the data.
AUTO = "auto"
#: The kinds of which nothing need be chosen.
MAY_BE_NONE = ("metric", "transform", "teacher", "feature_map")
#: Stands for data that is passed from Python, and that no file can name.
PYTHON = "python"


def parse_choices(kind: str, value: Any) -> list[Part]:
    """Parse a choice of plug-ins; model presets are written out, and paths made absolute."""
    if not isinstance(value, str):
        example = plugins.names(kind)[0]
        problem = f"{kind} must be text, such as {example!r}, not"
        if isinstance(value, (int, float, list, tuple, dict)):
            raise ConfigError(f"{problem} {shown(value, 80)}")
        advice = f"to use a function of your own, write it in a file and pass {'file:function'!r}"
        raise ConfigError(f"{problem} an object of type {type(value).__name__}; {advice}")
    if kind in MAY_BE_NONE and not value.strip():
        return []
    text = plugins.presets(kind).get(value, value)
    return [_check_part(kind, part) for part in parse(text, kind)]


def parse_choice(kind: str, value: Any) -> Part:
    """Parse a choice of exactly one plug-in."""
    parts = parse_choices(kind, value)
    if len(parts) != 1 or parts[0].count is not None:
        raise ConfigError(f"{kind} takes one choice here, not {value!r}")
    return parts[0]


def _check_part(kind: str, part: Part) -> Part:
    """Refuse a count where it has no meaning, and make a path after the colon absolute."""
    if part.count is not None and kind not in ("dataset", "model"):
        raise ConfigError(f"{kind} {str(part)!r}: a count has no meaning here")
    base, colon, argument = part.name.partition(":")
    hyphenated = base.replace("_", "-")
    if not colon and hyphenated in plugins.names(kind):
        return replace(part, name=hyphenated)  # as plug-ins are called: `trimmed-mean`
    if not colon or base not in plugins.names(kind):
        return part
    return replace(part, name=f"{base}:{_resolve_argument(kind, base, argument)}")


def _resolve_argument(kind: str, base: str, text: str) -> str:
    """Return what follows the colon: an absolute path, or a name as it is.

    A plug-in whose parameter is called `name` takes a name, or the path of a folder.
    """
    if not text:
        raise ConfigError(f"{kind} {base!r} needs something after its colon: '{base}:PATH'")
    path = Path(text).expanduser()  # a shell leaves ~ alone after a colon
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name longer than the file system takes
        raise ConfigError(
            f"{kind} {base}:{text[:60]}... is not a path: {error.strerror}"
        ) from error
    takes_name = "name" in inspect.signature(plugins.find(kind, base)).parameters
    if takes_name and not is_folder:
        return text
    return str(path.absolute())


def has_own_data(parts: Sequence[Part]) -> bool:
    """Return whether one of the data sets is the user's own: a path, a plug-in, data from Python.

    The names of the data sets that come with the package have no colon.
    """
    return any(":" in part.name or part.name == PYTHON for part in parts)


def complete(kind: str, part: Part, given: dict[str, Any], last: dict[str, Any]) -> Part:
    """Return a part with the checked values of all its options.

    Defaults are overridden by `given`, those by the options in the part itself, those by `last`.
    Options in `given` and `last` that the plug-in does not have are ignored.
    """
    known = option_names(kind, part)
    values = {name: value for name, value in given.items() if name in known}
    values |= part.options  # unknown ones too: `check_options` refuses them
    values |= {name: value for name, value in last.items() if name in known}
    if kind == "model" and part.name == AUTO:
        return replace(part, options=values)
    function = plugins.find(kind, part.name)
    base = part.name.partition(":")[0]
    return replace(part, options=check_options(function, values, f"{kind} {base}"))


def resolve_auto(part: Part, name: str) -> list[Part]:
    """Return the parts of the model `name` that `auto` stands for, with the options of `auto`."""
    parts = parse_choices("model", name)
    known: set[str] = set()
    for candidate in parts:
        known |= option_names("model", candidate)
    for option in part.options:
        if option not in known:
            raise unknown(f"option of model {name}", option, known)
    return [complete("model", candidate, {}, part.options) for candidate in parts]


def option_names(kind: str, part: Part) -> set[str]:
    """Return the names of a plug-in's options.

    For `auto` these are the options of all models, since the data set has not been read yet.
    """
    if kind == "model" and part.name == AUTO:
        names: set[str] = set()
        for model in plugins.names("model"):
            names |= option_names("model", Part(model))
        return names
    return set(options_of(plugins.find(kind, part.name)))
