"""Options: a function's keyword-only parameters, with types that carry their bounds, and the text form of a choice.

def fedprox(*, mu: NonNegative = 0.1): ...        ->  --algorithm fedprox --set mu=0.1
                                                  ->  --algorithm 'fedprox(mu=0.1)'
"""

from __future__ import annotations

import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from fedproto.errors import ConfigError, FedProtoError, unknown


@dataclass(frozen=True)
class Bounds:
    low: float = -math.inf
    high: float = math.inf
    open: bool = False  # the lower end itself is refused

    def accept(self, value: float) -> bool:
        return (self.low < value if self.open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        low = f" above {_plain(self.low)}" if self.open else f" of at least {_plain(self.low)}"
        return low + (f" and at most {_plain(self.high)}" if self.high < math.inf else "")


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


class FilePath:
    """Marks text that names a file; it is made absolute, so that a run can be resumed from another folder."""


PositiveInt = Annotated[int, Bounds(1)]
NonNegativeInt = Annotated[int, Bounds(0)]
#: Counts of what takes memory or processes, with bounds beyond all use: a slip of the keyboard ends in a sentence.
Clients = Annotated[int, Bounds(1, 10**6)]
Rounds = Annotated[int, Bounds(1, 10**7)]
Samples = Annotated[int, Bounds(1, 10**7)]
Width = Annotated[int, Bounds(1, 10**6)]
Threads = Annotated[int, Bounds(1, 1024)]
PositiveFloat = Annotated[float, Bounds(0, open=True)]
NonNegativeFloat = Annotated[float, Bounds(0)]
Fraction = Annotated[float, Bounds(0, 1)]
PositiveFraction = Annotated[float, Bounds(0, 1, open=True)]
File = Annotated[str, FilePath()]


def convert(name: str, value: Any, kind: Any) -> Any:
    """`value`, from a command line, TOML or Python, as the type `kind`, or one sentence that says what is accepted."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        value = value.item()
    if origin is Annotated:
        if isinstance(args[1], FilePath):
            return str(
                Path(
                    convert(name, str(value) if isinstance(value, os.PathLike) else value, args[0])
                ).absolute()
            )
        number = convert(name, value, args[0])
        if not args[1].accept(number):
            raise ConfigError(f"{name} must be {_describe(kind)}, not {value!r}")
        return number
    if origin in (Union, types.UnionType):
        return _convert_optional(name, value, args)
    if origin is Literal:
        if value not in args:
            raise unknown(f"value of {name}", str(value), args)
        return value
    if origin is tuple:
        parts = (
            value.split(",")
            if isinstance(value, str)
            else value
            if isinstance(value, (list, tuple))
            else [value]
        )
        return tuple(convert(name, part, args[0]) for part in parts)
    return _convert_scalar(name, value, kind)


def _convert_optional(name: str, value: Any, args: tuple) -> Any:
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        return None
    return convert(name, value, next(arg for arg in args if arg is not type(None)))


def _convert_scalar(name: str, value: Any, kind: type) -> Any:
    refusal = ConfigError(f"{name} must be {_describe(kind)}, not {value!r}")
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if kind in (int, float) and (
        isinstance(value, bool) or not isinstance(value, (int, float, str))
    ):
        raise refusal
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise refusal
    if kind in (bool, str) and not isinstance(value, kind):
        raise refusal
    try:
        result = kind(value)
    except (ValueError, OverflowError) as error:
        raise refusal from error
    if kind is float and not math.isfinite(result):
        raise refusal
    return result


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is Annotated:
        base, bounds = typing.get_args(kind)
        return _describe(base) + str(bounds)
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        kind, str(kind)
    )


@dataclass(frozen=True)
class Option:
    name: str
    kind: Any
    default: Any

    def __str__(self) -> str:
        """`distance=mse` and, where there is a choice, the other words that are accepted."""
        others = [word for word in typing.get_args(self.kind) if word != self.default]
        choice = f" (or {', '.join(others)})" if typing.get_origin(self.kind) is Literal else ""
        return f"{self.name}={_text(self.default)}{choice}"


def options_of(function: Callable) -> dict[str, Option]:
    """The keyword-only parameters of a plug-in: its configuration."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
    except Exception as error:  # annotations of a plug-in from outside may be anything
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(
            f"the parameters of {name} cannot be read: {type(error).__name__}: {error}"
        ) from error
    return {
        name: Option(name, hints.get(name) or _kind_of(parameter.default), parameter.default)
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def _kind_of(default: Any) -> Any:
    """The type of a parameter that states none, as plug-ins from outside may: that of its default."""
    return type(default) if isinstance(default, (bool, int, float, str)) else str | None


def checked(function: Callable, given: dict[str, Any], what: str) -> dict[str, Any]:
    """All options of a plug-in: those given, converted and checked, and the defaults of the others."""
    known = options_of(function)
    for name in given:
        if name not in known:
            raise unknown(f"option of {what}", name, known)
    for name, option in known.items():
        if option.default is inspect.Parameter.empty and name not in given:
            raise ConfigError(f"{what} needs its option {name!r}: set it with --set {name}=VALUE")
    values = {}
    for name, option in known.items():
        where = f"{what}'s {name}"
        values[name] = (
            _converted(where, given[name], option.kind) if name in given else option.default
        )
        if not _is_writable(values[name]):
            raise ConfigError(
                f"{where} must be a number, text, true, false or a list of these, not {values[name]!r}"
            )
    return values


def _converted(where: str, value: Any, kind: Any) -> Any:
    """A value of an option; its type may be one that a plug-in from outside made up."""
    try:
        return convert(where, value, kind)
    except FedProtoError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where} cannot be {value!r}: {type(error).__name__}: {error}"
        ) from error


def _is_writable(value: Any) -> bool:
    """Whether a value can be written to a configuration file and read back."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_writable, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


@dataclass(frozen=True)
class Part:
    """One choice of a plug-in, such as `cnn(channels=18)*7`: name, argument after a colon, options, repetitions."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    count: int | None = None

    def __str__(self) -> str:
        inside = ", ".join(
            f"{key}={_text(value)}" for key, value in self.options.items() if value is not None
        )
        name = (
            f'"{self.name}"' if re.search(r"[,()*]", self.name) else self.name
        )  # a path may hold any of these
        return (
            name
            + (f"({inside})" if inside else "")
            + (f"*{self.count}" if self.count is not None else "")
        )


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return '"' + ",".join(str(v) for v in value) + '"'
    if isinstance(value, str) and (not value or re.search(r"[,()=\s']", value)):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def words(text: str) -> list[str]:
    """`a, b` as names."""
    return [word for word in map(str.strip, text.split(",")) if word]


def parse(text: str, what: str) -> list[Part]:
    """`a(x=1)*2,b` as parts. Commas inside brackets or double quotes do not separate.

    >>> parse("cnn(channels=18)*7, mlp", "model")
    [Part(name='cnn', options={'channels': '18'}, count=7), Part(name='mlp', options={}, count=None)]
    """
    return [_parse_part(piece, what) for piece in _split(text)]


def _split(text: str) -> list[str]:
    pieces, depth, quoted = [""], 0, False
    for character in text:
        quoted ^= character == '"'
        depth += 0 if quoted else {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0 and not quoted:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces]


def _parse_part(text: str, what: str) -> Part:
    match = re.fullmatch(
        r'((?:"[^"]*"|[^()*"])+)(?:\((.*)\))?(?:\s*\*\s*([^()*]+))?', text, re.DOTALL
    )
    if not match:
        raise ConfigError(
            f"{what} {text!r} cannot be read; write it like 'name', 'name(option=value)' or 'name*7'"
        )
    name, inside, count = match.groups()
    options = {}
    for piece in _split(inside) if inside and inside.strip() else []:
        key, equals, value = piece.partition("=")
        if not equals:
            raise ConfigError(f"{piece!r} in {what} {text!r} is no option; write 'name=value'")
        options[key.strip()] = _unquoted(value.strip())
    times = None if count is None else convert(f"the count in {text!r}", count, PositiveInt)
    return Part(name.replace('"', "").strip(), options, times)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
