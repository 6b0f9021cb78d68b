"""Options of plug-ins: their types and bounds, and the text form of a choice.

An option is a keyword-only parameter of a plug-in's function; its annotation carries the bounds:

    def fedprox(*, mu: NonNegativeFloat = 0.1): ...

A user sets it with `--algorithm fedprox --set mu=0.1` or with `--algorithm 'fedprox(mu=0.1)'`; in
the latter, a value with a comma, a bracket or a quote is quoted: `fedper(personal="fc1,fc2")`.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from fedproto.config.quoting import Marked, quote, quote_if, read_quotes, split_elements
from fedproto.errors import ConfigError, FedProtoError, unknown

# --- types with bounds


@dataclass(frozen=True)
class Bounds:
    """The numbers that an option accepts: from `low` to `high`, both included unless `open`."""

    low: float = -math.inf
    high: float = math.inf
    #: Whether `low` itself is refused.
    open: bool = False

    def accept(self, value: float) -> bool:
        """Whether a number lies within the bounds."""
        if self.open and value == self.low:
            return False
        return self.low <= value <= self.high

    def __str__(self) -> str:
        """The end of a sentence such as `a number above 0 and at most 1`."""
        lowest = f" above {self.low}" if self.open else f" of at least {self.low}"
        if self.high == math.inf:
            return lowest
        return f"{lowest} and at most {self.high}"


class FilePath:
    """Marks text that names a file.

    The path is made absolute, so that a run can be resumed from another folder.
    """


PositiveInt = Annotated[int, Bounds(1)]
NonNegativeInt = Annotated[int, Bounds(0)]
PositiveFloat = Annotated[float, Bounds(0, open=True)]
NonNegativeFloat = Annotated[float, Bounds(0)]
Fraction = Annotated[float, Bounds(0, 1)]
#: What is kept of an old value when a new one is mixed in; with 1, nothing ever would be.
Decay = Annotated[float, Bounds(0, 0.9999)]
PositiveFraction = Annotated[float, Bounds(0, 1, open=True)]
File = Annotated[str, FilePath()]

# Counts that cost memory or processes. Their upper bounds are far beyond any use, so that a typing
# error ends in one sentence instead of a full memory.
Clients = Annotated[int, Bounds(1, 10**6)]
Rounds = Annotated[int, Bounds(1, 10**7)]
Samples = Annotated[int, Bounds(1, 10**7)]
Width = Annotated[int, Bounds(1, 10**6)]
Threads = Annotated[int, Bounds(1, 1024)]


# --- conversion


def convert(name: str, value: Any, kind: Any) -> Any:
    """Convert a value from a command line, TOML or Python to the type `kind`.

    Raises a ConfigError that calls the value `name` and says what is accepted.
    """
    is_number_of_numpy_or_torch = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    if is_number_of_numpy_or_torch:
        value = value.item()
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is Annotated:
        if isinstance(arguments[1], FilePath):
            return _convert_path(name, value, arguments[0])
        return _convert_bounded(name, value, kind)
    if origin in (Union, types.UnionType):
        return _convert_optional(name, value, arguments)
    if origin is Literal:
        if value not in arguments:
            raise unknown(f"value of {name}", str(value), arguments)
        return value
    if origin is tuple:
        return _convert_tuple(name, value, arguments[0])
    return _convert_scalar(name, value, kind)


def names_file(kind: Any) -> bool:
    """Return whether a type is `File`, or `File` or nothing."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        return any(names_file(each) for each in typing.get_args(kind))
    return any(isinstance(mark, FilePath) for mark in typing.get_args(kind))


def _convert_path(name: str, value: Any, kind: type) -> str:
    """Return a path, given as text or as a Path, as absolute text."""
    text = str(value) if isinstance(value, os.PathLike) else value
    path = Path(convert(name, text, kind))
    return str(path.absolute())


def _convert_bounded(name: str, value: Any, kind: Any) -> float:
    """Convert a value to the number type of `Annotated[type, Bounds]` and check its bounds."""
    base, bounds = typing.get_args(kind)
    number: float = convert(name, value, base)
    if not bounds.accept(number):
        raise ConfigError(f"{name} must be {_describe(kind)}, not {value!r}")
    return number


def _convert_optional(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    """Convert a value of the type `kind | None`; the text `none` is None, too.

    The type may also be `kind | Literal[...]`, whose words are accepted beside it.
    """
    accepted = words_beside(kinds)
    if accepted and value in accepted:
        return value
    is_none = value is None or (isinstance(value, str) and value.lower() == "none")
    if is_none and type(None) in kinds:
        return None
    others = [each for each in kinds if typing.get_origin(each) is not Literal]
    kind = next(each for each in others if each is not type(None))
    if not accepted:
        return convert(name, value, kind)
    try:
        return convert(name, value, kind)
    except ConfigError as error:
        raise ConfigError(f"{error}, or {' or '.join(accepted)}") from error


def words_beside(kinds: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the words that a union such as `float | Literal["auto"]` accepts; none in most."""
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            return typing.get_args(kind)
    return ()


def _convert_tuple(name: str, value: Any, kind: Any) -> tuple[Any, ...]:
    """Convert `"1,4"`, a list or a single value to a tuple of values of one type.

    In text, an element that holds a comma is quoted, and empty text is an empty list of texts.
    """
    if value == "" and kind is str:
        return ()
    if isinstance(value, str):
        elements: typing.Sequence[Any] = split_elements(value, f"{name} {value!r}")
    elif isinstance(value, (list, tuple)):
        elements = value
    else:
        elements = [value]
    return tuple(convert(name, element, kind) for element in elements)


def _convert_scalar(name: str, value: Any, kind: type) -> Any:
    """Convert a value to a plain type."""
    converted: Any = None
    if kind is bool:
        converted = _read_bool(value)
    elif kind is int or kind is float:
        converted = _read_number(value, kind)
    elif kind is str:
        converted = value if isinstance(value, str) else None
    else:
        converted = kind(value)  # a type that a plug-in from outside made up
    if converted is None:
        raise ConfigError(f"{name} must be {_describe(kind)}, not {value!r}")
    return converted


def _read_bool(value: Any) -> bool | None:
    """Return a truth value, also from the texts `true` and `false`; None for anything else."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        return None
    return {"true": True, "false": False}.get(value.lower())


def _read_number(value: Any, kind: type[int] | type[float]) -> float | None:
    """Return a finite number, also from text, or None.

    True and false are not numbers, and fractions are not rounded to whole numbers.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if kind is int and isinstance(value, float) and not value.is_integer():
        return None
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        return None
    if isinstance(number, float) and not math.isfinite(number):
        return None
    return number


_DESCRIPTIONS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}


def _describe(kind: Any) -> str:
    """Say what a type accepts, as in `a whole number of at least 1`."""
    if typing.get_origin(kind) is Annotated:
        base, bounds = typing.get_args(kind)
        return _describe(base) + str(bounds)
    return _DESCRIPTIONS.get(kind, str(kind))


# --- options of a function


@dataclass(frozen=True)
class Option:
    """A keyword-only parameter of a plug-in's function."""

    name: str
    kind: Any
    default: Any

    def __str__(self) -> str:
        """`distance=mse (or l2)`: the default, and the other words that are accepted."""
        assignment = f"{self.name}={_format_value(self.default)}"
        if typing.get_origin(self.kind) is not Literal:
            return assignment
        others = [word for word in typing.get_args(self.kind) if word != self.default]
        return f"{assignment} (or {', '.join(others)})"


def options_of(function: Callable) -> dict[str, Option]:
    """Return the options of a plug-in's function, its keyword-only parameters, by name."""
    if isinstance(function, types.FunctionType):
        return dict(_read_options_once(function))
    return _read_options(function)  # any other object of somebody's own may change, or not hash


def _read_options(function: Callable) -> dict[str, Option]:
    """Return the options of a function from its signature and its annotations."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
    except Exception as error:  # annotations of a plug-in from outside may be anything
        name = getattr(function, "__name__", repr(function))
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the parameters of {name} cannot be read: {reason}") from error
    options = {}
    for name, parameter in parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            kind = hints.get(name) or _guess_kind(parameter.default)
            options[name] = Option(name, kind, parameter.default)
    return options


_read_options_once = functools.lru_cache(maxsize=1024)(_read_options)


def explain_positional(function: Callable, name: str, what: str) -> ConfigError | None:
    """Return the error for a parameter with a default that is no option for want of a `*`, or None.

    `what` names the plug-in, such as `algorithm 'mine:fedmedian'`.
    """
    parameter = inspect.signature(function).parameters.get(name)
    if parameter is None or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
        return None
    if parameter.default is parameter.empty:
        return None
    return ConfigError(
        f"{name!r} cannot be set: the function of {what} takes it as a positional parameter, and "
        "options are keyword-only, so write `*` before it, as in `def function(*, option=1)`"
    )


def _guess_kind(default: Any) -> Any:
    """Return the type of a default; a plug-in from outside need not annotate its parameters."""
    if isinstance(default, (bool, int, float, str)):
        return type(default)
    return str | None


def check_options(function: Callable, given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the values of all options of a plug-in: those given, converted, and the defaults.

    `what` names the plug-in in errors, such as `algorithm fedprox`.
    """
    options = options_of(function)
    for name in given:
        if name not in options:
            positional = explain_positional(function, name, what)
            raise positional or unknown(f"option of {what}", name, options)
    values = {}
    for name, option in options.items():
        where = f"{what}'s {name}"
        if name in given:
            value = _convert_option(where, given[name], option.kind)
        elif option.default is inspect.Parameter.empty:
            raise ConfigError(f"{what} needs its option {name!r}: set it with --set {name}=VALUE")
        else:
            value = option.default
        if not _is_storable(value):
            accepted = "a number, text, true, false or a list of these"
            raise ConfigError(f"{where} must be {accepted}, not {value!r}")
        values[name] = value
    return values


def _convert_option(where: str, value: Any, kind: Any) -> Any:
    """Convert a value to the type of an option, which a plug-in from outside may have made up."""
    try:
        return convert(where, value, kind)
    except FedProtoError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where} cannot be {value!r}: {reason}") from error


def _is_storable(value: Any) -> bool:
    """Whether a value can be written to a configuration file and read back."""
    if isinstance(value, (list, tuple)):
        return all(_is_storable(element) for element in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


# --- the text form of a choice


@dataclass(frozen=True)
class Part:
    """One choice of a plug-in, such as `cnn(channels=18)*7`."""

    #: The name, with what follows its colon, as in `npz:PATH`.
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    #: The number of clients that use the choice, or None where the text states none.
    count: int | None = None

    def __str__(self) -> str:
        """The text from which `parse` makes an equal part."""
        text = quote_if(_NEEDS_QUOTES_IN_NAME, self.name)
        assignments = []
        for name, value in self.options.items():
            if value is not None:
                assignments.append(f"{name}={_format_value(value)}")
        if assignments:
            text += f"({', '.join(assignments)})"
        if self.count is not None:
            text += f"*{self.count}"
        return text


#: What a name has that must be quoted; a path may hold any of these.
_NEEDS_QUOTES_IN_NAME = r"""[,()*"]|^'|[:=]\s*'|^\s|\s$"""
_NEEDS_QUOTES_IN_VALUE = r"""[,()=\s"']|^$"""


def _format_value(value: Any) -> str:
    """Write the value of an option such that `parse` reads it back; quoted where need be."""
    if isinstance(value, (list, tuple)):
        elements = [_format_value(element) for element in value]
        return quote(",".join(elements))
    if isinstance(value, bool):
        return str(value).lower()
    return quote_if(_NEEDS_QUOTES_IN_VALUE, str(value))


def words(text: str) -> list[str]:
    """Split `a, b` into its names; empty ones are left out."""
    names = [name.strip() for name in text.split(",")]
    return [name for name in names if name]


def parse(text: str, what: str) -> list[Part]:
    """Split `a(x=1)*2,b` into parts. Commas inside brackets or quotes do not separate.

    `what` says in errors what the text chooses.

    >>> cnn, mlp = parse("cnn(channels=18)*7, mlp", "model")
    >>> cnn
    Part(name='cnn', options={'channels': '18'}, count=7)
    >>> mlp
    Part(name='mlp', options={}, count=None)
    >>> parse("fedper(personal='fc1,fc2')", "algorithm")
    [Part(name='fedper', options={'personal': 'fc1,fc2'}, count=None)]
    """
    where = f"{what} {text!r}"
    pieces = _split_at_commas(read_quotes(text, where), where)
    return [_parse_part(piece, what) for piece in pieces]


def _split_at_commas(marked: Marked, where: str) -> list[Marked]:
    """Split a text at its commas, except those inside brackets or quotes."""
    commas = []
    depth = 0
    for place, character in enumerate(marked.syntax):
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == "," and depth == 0:
            commas.append(place)
        if depth < 0:
            break
    if depth:
        raise _unreadable(where)
    return marked.split(commas)


_PART = re.compile(
    r"""
    (?P<name>    [^()*]+ )
    (?: \( (?P<options> .* ) \) )?
    (?: \s* \* \s* (?P<count> [^()*]+ ) )?
    """,
    re.DOTALL | re.VERBOSE,
)


def _parse_part(piece: Marked, what: str) -> Part:
    """Parse one choice, such as `cnn(channels=18)*7`."""
    where = f"{what} {piece.text!r}"
    match = _PART.fullmatch(piece.syntax)
    if match is None:
        raise _unreadable(where)
    name = piece.slice(*match.span("name")).text
    if not name:
        raise _unreadable(where)
    options = {}
    if match["options"] is not None:
        options = _parse_options(piece.slice(*match.span("options")), where)
    count = None
    if match["count"] is not None:
        count = convert(f"the count in {piece.text!r}", match["count"], PositiveInt)
    return Part(name, options, count)


def _parse_options(text: Marked, where: str) -> dict[str, str]:
    """Parse `a=1, b="x,y"`."""
    options = {}
    if not text.syntax:
        return {}
    for piece in _split_at_commas(text, where):
        assignment = re.match(r"([\w-]+)\s*=", piece.syntax)
        if assignment is None:
            raise ConfigError(
                f"{piece.text!r} in {where} is not an option; write 'name=value', with quotes "
                "around a value that holds a comma"
            )
        value = piece.slice(assignment.end(), len(piece.text))
        options[assignment[1]] = value.text
    return options


def _unreadable(where: str) -> ConfigError:
    """Return the error for a choice that has no form of a choice."""
    return ConfigError(
        f"{where} cannot be read; write it like 'name', 'name(option=value)' or 'name*7', with "
        "quotes around a path or value that holds a comma, a bracket or a star"
    )
