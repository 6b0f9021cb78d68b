"""Plug-ins by name: one small file each, whose file name is its name and whose function's signature its configuration.

`fedproto/algorithms/fedprox.py` holds `fedprox(*, mu=0.1)`; `-` in a name is `_` in its file. A source with an argument
is written `npz:PATH`. `package.module:function` names a plug-in from outside, whose code runs only if its
name is trusted: see plugin_trust.py.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedproto.config import plugin_trust
from fedproto.config.options import Part, checked, options_of, parse
from fedproto.errors import ConfigError, FedProtoError, unknown

#: kind -> the folder of its plug-ins
FOLDERS = {
    "algorithm": "algorithms",
    "dataset": "data",
    "model": "models",
    "partition": "partitions",
}

#: kind -> module and class of what its plug-ins return
RETURNS = {
    "algorithm": ("fedproto.core.types", "Algorithm"),
    "dataset": ("fedproto.data", "Source"),
    "model": ("torch.nn", "Module"),
    "partition": ("collections.abc", "Sequence"),
}


def names(kind: str) -> list[str]:
    """All plug-ins of a kind, read from the folder without importing any."""
    files = (Path(__file__).parents[1] / FOLDERS[kind]).glob("[!_]*.py")
    return sorted(file.stem.replace("_", "-") for file in files)


def presets(kind: str) -> dict[str, str]:
    """Names that stand for a mix of plug-ins, and the mix."""
    return importlib.import_module("fedproto.models").PRESETS if kind == "model" else {}


def is_outside(kind: str, name: str) -> bool:
    """Whether a name is that of a plug-in from outside; `npz:PATH` is a source of ours and its argument."""
    module, colon, function = name.partition(":")
    return bool(module and colon and function) and module not in names(kind)


def find(kind: str, name: str) -> Callable:
    """The plug-in's function. A name may carry an argument (`npz:PATH`), which is not looked at here."""
    if is_outside(kind, name):
        return plugin_trust.load(kind, name)
    base = name.partition(":")[0]
    if base in names(kind):
        stem = base.replace("-", "_")
        return getattr(importlib.import_module(f"fedproto.{FOLDERS[kind]}.{stem}"), stem)
    if name in presets(kind):
        raise ConfigError(
            f"{kind} {name!r} is a mix itself, so it stands alone; options for it are given with --set"
        )
    raise unknown(kind, name, [*names(kind), *presets(kind)])


def trust_chosen(settings: Mapping[str, Any]) -> None:
    """Trust the plug-ins that the user's own settings name: flags, `--set`, or keywords in Python."""
    plugin_trust.trust_plugins(*(name for _, name in outside_names(settings)))


def refuse_plugins(
    settings: Mapping[str, Any], where: str | Path, remedy: str | None = None
) -> None:
    """Refuse settings that were read from a file if they name a plug-in that the user does not trust.

    `remedy` says how to trust it where that is not by the flag --trust-plugins.
    """
    for kind, name in outside_names(settings):
        if not plugin_trust.is_trusted(name):
            raise plugin_trust.refusal(kind, name, str(where), remedy)


def outside_names(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Kind and name of each plug-in from outside that flat settings choose; a sweep has a list of choices."""
    for kind in FOLDERS:
        value = settings.get(kind)
        for choice in value if isinstance(value, list) else [value]:
            if isinstance(choice, str) and ":" in choice:
                yield from (
                    (kind, part.name) for part in parse(choice, kind) if is_outside(kind, part.name)
                )


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
    if is_outside(kind, part.name):
        return _made_outside(kind, part.name, function, context, options)
    return function(*context, *arguments, **options)


def _made_outside(
    kind: str, name: str, function: Callable, context: tuple, options: dict[str, Any]
) -> Any:
    """What a plug-in from outside returns, if it is of use."""
    try:
        with plugin_trust.reachable(name):
            made = function(*context, **options)
    except FedProtoError:
        raise
    except (Exception, SystemExit) as error:  # somebody's function can fail in any way
        raise ConfigError(f"{kind} {name!r} failed{_line_of(error)}: {_told(error)}") from error
    _expected(kind, name, made)
    if kind == "algorithm":
        _refuse_wrong_functions(name, made)
    if kind == "dataset":  # a trusted source says which models suit it, and may bring its own
        for model in (made.model, made.mixed_model):
            trust_chosen({"model": model})
    return made


def _line_of(error: BaseException) -> str:
    """Where an error was raised, for whoever wrote the plug-in."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _misfit(kind: str, name: str, context: int, error: TypeError) -> ConfigError:
    """Why a plug-in cannot be called with what it is given."""
    base, colon, _ = name.partition(":")
    if base not in names(kind):
        return ConfigError(
            f"{kind} {name!r} must take {context} positional arguments, and options after `*`: {error}"
        )
    return ConfigError(
        f"{kind} {base!r} takes no path"
        if colon
        else f"{kind} {base!r} needs a path: '{base}:PATH'"
    )


def short(kind: str, part: Part) -> str:
    """A part as a person would write it: only the options that differ from their defaults."""
    defaults = {name: option.default for name, option in options_of(find(kind, part.name)).items()}
    return str(
        Part(
            part.name,
            {name: value for name, value in part.options.items() if value != defaults[name]},
        )
    )


def _expected(kind: str, name: str, made: Any) -> None:
    """Refuse what is not of the kind's type; a plug-in from outside may have forgotten its `return`."""
    module, wanted = RETURNS[kind]
    if not isinstance(made, getattr(importlib.import_module(module), wanted)):
        raise ConfigError(
            f"{kind} {name!r} returned {type(made).__name__}, where {module}.{wanted} is wanted"
        )


#: The functions of an algorithm, and what each is called with: see `types.Algorithm`.
_CALLED_WITH = {
    "shared": ("name",),
    "init": ("parameters", "task"),
    "send": ("server", "classes"),
    "adopt": ("parameters", "received"),
    "loss": ("step",),
    "upload": ("step",),
    "aggregate": ("server", "uploads"),
    "predict": ("step",),
    "notes": ("server",),
}


def _refuse_wrong_functions(name: str, algorithm: Any) -> None:
    """Refuse a method from outside whose functions cannot be called as they will be."""
    for field, arguments in _CALLED_WITH.items():
        function = getattr(algorithm, field)
        wanted = f"a function of ({', '.join(arguments)})"
        if not callable(function):
            raise ConfigError(
                f"algorithm {name!r}: {field} must be {wanted}, not {type(function).__name__}"
            )
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise ConfigError(f"algorithm {name!r}: {field} must be {wanted}: {error}") from error
        except ValueError:  # a function written in C may not tell
            continue
    if not isinstance(algorithm.name, str) or not algorithm.name.strip():
        raise ConfigError(
            f"algorithm {name!r} must have a name that is text, not {algorithm.name!r}"
        )
    phase = importlib.import_module("fedproto.core.types").Phase
    if not isinstance(algorithm.phases, tuple) or not all(
        isinstance(each, phase) for each in algorithm.phases
    ):
        raise ConfigError(f"algorithm {name!r}: phases must be a tuple of fedproto.Phase")
    if algorithm.collects not in ("nothing", "after", "during"):
        raise ConfigError(
            f"algorithm {name!r}: collects must be nothing, after or during, not {algorithm.collects!r}"
        )
