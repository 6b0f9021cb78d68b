"""Plug-ins by name: how they are found, and how they are called.

A plug-in of ours is one small file. The file's name is the plug-in's name (with `_` for `-`) and
its function's signature is the plug-in's configuration: `fedproto/algorithms/fedprox.py` holds
`fedprox(*, mu=0.1)`. A plug-in with an argument is written `npz:PATH`. A plug-in from outside is
written `package.module:function`; its code runs only if its name is trusted: see plugin_trust.py.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedproto.config import plugin_trust
from fedproto.config.options import Part, check_options, options_of, parse
from fedproto.config.own_files import suggest_dataset
from fedproto.errors import ConfigError, FedProtoError, locate, name_failure, unknown

#: kind -> the folder of its plug-ins
FOLDERS = {
    "algorithm": "algorithms",
    "dataset": "data",
    "model": "models",
    "partition": "partitions",
    "metric": "metrics",
    "combiner": "combiners",
    "transform": "transforms",
    "teacher": "teachers",
    "feature_map": "feature_maps",
}

#: kind -> module and class of what its plug-ins return
RETURNS = {
    "algorithm": ("fedproto.core.types", "Algorithm"),
    "dataset": ("fedproto.data", "Source"),
    "model": ("torch.nn", "Module"),
    "partition": ("collections.abc", "Sequence"),
    "metric": ("numbers", "Real"),
    "combiner": ("fedproto.core.combination", "Combiner"),
    "transform": ("fedproto.core.transforms", "Transform"),
    "teacher": ("fedproto.core.closed_form", "Teacher"),
    "feature_map": ("fedproto.feature_maps", "FeatureMap"),
}


# --- lookup


def names(kind: str) -> list[str]:
    """Return the names of our plug-ins of a kind, from the folder's files, importing none."""
    return list(_read_names(kind))


@functools.cache
def _read_names(kind: str) -> tuple[str, ...]:
    """Return the names of the folder's files: the package does not change while it is used."""
    folder = Path(__file__).parents[1] / FOLDERS[kind]
    files = folder.glob("[!_]*.py")
    return tuple(sorted(file.stem.replace("_", "-") for file in files))


def presets(kind: str) -> dict[str, str]:
    """Return the names that stand for a mix of plug-ins, and the mix as text."""
    if kind != "model":
        return {}
    return importlib.import_module("fedproto.models").PRESETS


def is_outside(kind: str, name: str) -> bool:
    """Whether a name is that of a plug-in from outside; `npz:PATH` is a source of ours."""
    module, _, function = name.partition(":")
    if not module or not function:
        return False
    return module not in names(kind)


def find(kind: str, name: str) -> Callable:
    """Return the function of a plug-in. An argument in the name (`npz:PATH`) is ignored."""
    if is_outside(kind, name):
        return plugin_trust.load(kind, name)
    base = name.partition(":")[0]
    if base in names(kind):
        stem = base.replace("-", "_")
        module = importlib.import_module(f"fedproto.{FOLDERS[kind]}.{stem}")
        return getattr(module, stem)
    if name in presets(kind):
        raise ConfigError(
            f"{kind} {name!r} is a mix itself, so it stands alone; "
            "options for it are given with --set"
        )
    own_data = suggest_dataset(name) if kind == "dataset" else None
    if own_data is not None:
        raise ConfigError(
            f"unknown dataset {name!r}: data of your own is named with its kind, {own_data!r}"
        )
    raise unknown(kind, name, [*names(kind), *presets(kind)])


def short(kind: str, part: Part) -> str:
    """Return the text of a part, only with the options that differ from their defaults."""
    known = options_of(find(kind, part.name))
    given = part.options.items()
    changed = {name: value for name, value in given if value != known[name].default}
    return str(Part(part.name, changed))


# --- trust


def trust_chosen(settings: Mapping[str, Any]) -> None:
    """Trust the plug-ins that the user's own settings name: flags, `--set`, or keywords."""
    for _, name in outside_names(settings):
        plugin_trust.trust_plugins(name)


def refuse_plugins(
    settings: Mapping[str, Any], where: str | Path, remedy: str | None = None
) -> None:
    """Refuse settings from a file if they name a plug-in that the user does not trust.

    `remedy` says how to trust it where that is not by the flag --trust-plugins.
    """
    for kind, name in outside_names(settings):
        if not plugin_trust.is_trusted(name):
            raise plugin_trust.refusal(kind, name, str(where), remedy)


def outside_names(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield kind and name of each plug-in from outside that flat settings choose.

    In the settings of a sweep, a value may be a list of choices.
    """
    for kind in FOLDERS:
        value = settings.get(kind)
        choices = value if isinstance(value, list) else [value]
        for choice in choices:
            if not isinstance(choice, str) or ":" not in choice:
                continue
            for part in parse(choice, kind):
                if is_outside(kind, part.name):
                    yield kind, part.name


# --- calls


def build(kind: str, part: Part, *context: Any) -> Any:
    """Call a plug-in and return what it returns.

    It is given its context, its argument after the colon if it has one, and its checked options.
    """
    function = find(kind, part.name)
    base, colon, argument = part.name.partition(":")
    has_argument = colon and base in names(kind)
    positional = [*context, argument] if has_argument else [*context]
    options = check_options(function, part.options, f"{kind} {base}")
    try:
        inspect.signature(function).bind(*positional, **options)
    except TypeError as error:
        raise _explain_misfit(kind, part.name, len(context), error) from error
    if not is_outside(kind, part.name):
        return function(*positional, **options)
    built = _call_outside(kind, part.name, function, positional, options)
    _check_outside(kind, part.name, built)
    return built


def _explain_misfit(kind: str, name: str, context_size: int, error: TypeError) -> ConfigError:
    """Return the error for a plug-in that cannot be called with what it is given."""
    base, colon, _ = name.partition(":")
    if base not in names(kind):
        wanted = f"{context_size} positional arguments, and options after `*`"
        return ConfigError(f"{kind} {name!r} must take {wanted}: {error}")
    if colon:
        return ConfigError(f"{kind} {base!r} takes no path")
    return ConfigError(f"{kind} {base!r} needs a path: '{base}:PATH'")


# --- plug-ins from outside, which may be wrong in any way

#: The functions of an algorithm, and what each is called with: see `core.types.Algorithm`.
_ALGORITHM_ARGUMENTS = {
    "shared": ("name",),
    "init": ("parameters", "task"),
    "declare": ("parameters", "task"),
    "send": ("server", "recipient"),
    "adopt": ("parameters", "received"),
    "loss": ("step",),
    "upload": ("step",),
    "aggregate": ("server", "uploads"),
    "aggregate_once": ("server", "sent_once"),
    "predict": ("step",),
    "client_init": ("parameters", "task"),
    "client_start": ("kept", "received"),
    "client_adopt": ("parameters", "received", "kept"),
    "client_update": ("step",),
    "client_validate": ("step",),
    "upload_once": ("step",),
    "notes": ("server",),
    "metrics": ("server",),
}
#: Those that may be None.
_OPTIONAL_FUNCTIONS = ("client_adopt", "client_validate", "upload_once", "aggregate_once")
#: The same of a transform: see `core.transforms.Transform`.
_TRANSFORM_ARGUMENTS = {
    "encode": ("values", "context"),
    "decode": ("values", "side", "shapes"),
    "check": ("values", "side", "shapes"),
    "server": ("state", "uploads", "context"),
    "init": ("task",),
    "metrics": ("state",),
}


def _call_outside(
    kind: str, name: str, function: Callable, positional: list[Any], options: dict[str, Any]
) -> Any:
    """Call a plug-in from outside; whatever it raises becomes one sentence."""
    try:
        with plugin_trust.reachable(name):
            return function(*positional, **options)
    except FedProtoError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{kind} {name!r} failed{_describe_failure(error)}") from error


def _describe_failure(error: BaseException) -> str:
    """Say where an error was raised and what it says: ` (mine.py, line 3): KeyError: 'x'`."""
    place = locate(error)
    location = "" if place is None else f" ({place})"
    return f"{location}: {name_failure(error)}"


def _check_outside(kind: str, name: str, built: Any) -> None:
    """Check what a plug-in from outside returned."""
    _check_type(kind, name, built)
    if kind == "algorithm":
        _check_algorithm(name, built)
    if kind == "transform":
        _check_transform(name, built)
    if kind == "dataset":  # a trusted source says which models suit it, and may bring its own
        for model in (built.model, built.mixed_model):
            trust_chosen({"model": model})


def _check_type(kind: str, name: str, built: Any) -> None:
    """Refuse what is not of the kind's type; a plug-in may have forgotten its `return`."""
    module, class_name = RETURNS[kind]
    wanted = getattr(importlib.import_module(module), class_name)
    if not isinstance(built, wanted):
        found = type(built).__name__
        raise ConfigError(
            f"{kind} {name!r} returned {found}, where {module}.{class_name} is wanted"
        )


def _check_algorithm(name: str, algorithm: Any) -> None:
    """Refuse an algorithm whose fields cannot be used as they will be."""
    for field, arguments in _ALGORITHM_ARGUMENTS.items():
        function = getattr(algorithm, field)
        if function is None and field in _OPTIONAL_FUNCTIONS:
            continue
        _check_function(f"algorithm {name!r}: {field}", function, arguments)
    if not isinstance(algorithm.name, str) or not algorithm.name.strip():
        raise ConfigError(
            f"algorithm {name!r} must have a name that is text, not {algorithm.name!r}"
        )
    if not _is_tuple_of_phases(algorithm.phases):
        raise ConfigError(f"algorithm {name!r}: phases must be a tuple of fedproto.Phase")
    for phase in algorithm.phases:
        if phase.loss is not None:
            _check_function(f"algorithm {name!r}: a phase's loss", phase.loss, ("step",))
    if not _is_tuple_of_texts(algorithm.once):
        raise ConfigError(
            f"algorithm {name!r}: once must be a tuple of names of groups, not {algorithm.once!r}"
        )
    if algorithm.collects not in ("nothing", "after", "during"):
        accepted = "nothing, after or during"
        raise ConfigError(
            f"algorithm {name!r}: collects must be {accepted}, not {algorithm.collects!r}"
        )


def _check_transform(name: str, transform: Any) -> None:
    """Refuse a transform whose fields cannot be used as they will be."""
    for field, arguments in _TRANSFORM_ARGUMENTS.items():
        function = getattr(transform, field)
        if function is None and field in ("encode", "server"):
            continue
        _check_function(f"transform {name!r}: {field}", function, arguments)
    if not isinstance(transform.name, str) or not transform.name.strip():
        raise ConfigError(
            f"transform {name!r} must have a name that is text, not {transform.name!r}"
        )
    if transform.encode is None and transform.server is None:
        raise ConfigError(f"transform {name!r} has neither a client part nor a server part")
    if transform.needs not in ("sum", "each"):
        raise ConfigError(f"transform {name!r}: needs must be sum or each, not {transform.needs!r}")


def _check_function(where: str, function: Any, arguments: tuple[str, ...]) -> None:
    """Refuse a field that cannot be called with these arguments."""
    wanted = f"a function of ({', '.join(arguments)})"
    if not callable(function):
        raise ConfigError(f"{where} must be {wanted}, not {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C may have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{where} must be {wanted}: {error}") from error


def _is_tuple_of_texts(names: Any) -> bool:
    return isinstance(names, tuple) and all(isinstance(name, str) for name in names)


def _is_tuple_of_phases(phases: Any) -> bool:
    phase_type = importlib.import_module("fedproto.core.types").Phase
    if not isinstance(phases, tuple):
        return False
    return all(isinstance(phase, phase_type) for phase in phases)
