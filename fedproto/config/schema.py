"""A JSON schema of configuration files, by which editors check them while they are written."""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from typing import Annotated, Any, Literal, Union

from fedproto.config import plugins
from fedproto.config.choices import AUTO
from fedproto.config.config_file import FROM_DATA, VERSION
from fedproto.config.options import Bounds, options_of
from fedproto.config.settings import RUN_FIELDS, Config

DRAFT = "http://json-schema.org/draft-07/schema#"  # which editors of TOML know
_PLAIN = {int: "integer", float: "number", bool: "boolean", str: "string"}


def json_schema() -> dict[str, Any]:
    """Return the schema of a configuration file of `fedproto run`.

    Tables of plug-ins from outside the package, and of `auto`, may have any option.
    """
    hints = typing.get_type_hints(Config, include_extras=True)
    properties: dict[str, Any] = {"version": {"const": VERSION}}
    for name in Config.__dataclass_fields__:
        if name in RUN_FIELDS:
            properties[name] = describe_type(hints[name])
    for kind in plugins.FOLDERS:
        properties[kind] = _describe_kind(kind)
        for plugin in plugins.names(kind):
            for option in options_of(plugins.find(kind, plugin)).values():
                properties.setdefault(option.name, {})  # a bare name belongs to what has it
    return {
        "$schema": DRAFT,
        "title": "A federation of fedproto",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _describe_kind(kind: str) -> dict[str, Any]:
    """Return the schema of a choice of plug-ins: text, or a table with a name and options."""
    rules = []
    for plugin in plugins.names(kind):
        if (kind, plugin) == ("model", AUTO):
            continue
        function = plugins.find(kind, plugin)
        options: dict[str, Any] = {"name": {}}
        if kind == "partition":
            options[FROM_DATA] = {"type": "array", "items": {"type": "string"}}
        for option in options_of(function).values():
            options[option.name] = describe_type(option.kind)
        is_named = {"pattern": f"^{re.escape(plugin)}(:|$)"}
        rules.append(
            {
                "if": {"properties": {"name": is_named}, "required": ["name"]},
                "then": {"properties": options, "additionalProperties": False},
            }
        )
    described = {name: _first_line(kind, name) for name in plugins.names(kind)}
    listed = "; ".join(f"{name}: {line}" for name, line in described.items())
    table = {
        "type": "object",
        "properties": {"name": {"type": "string", "description": listed}},
        "allOf": rules,
    }
    return {"anyOf": [{"type": "string"}, table]}


def _first_line(kind: str, name: str) -> str:
    documentation = inspect.getdoc(plugins.find(kind, name)) or ""
    return documentation.partition("\n")[0]


def describe_type(kind: Any) -> dict[str, Any]:
    """Return the schema of the values that `options.convert` accepts of a type, as TOML has them.

    Numbers in quotes, which are accepted too, are not offered.
    """
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is Annotated:
        schema = describe_type(arguments[0])
        if isinstance(arguments[1], Bounds):
            schema |= _describe_bounds(arguments[1])
        return schema
    if origin in (Union, types.UnionType):
        kinds = [describe_type(each) for each in arguments if each is not type(None)]
        if type(None) in arguments:
            kinds.append({"const": "none"})
        return {"anyOf": kinds}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        element = describe_type(arguments[0])
        return {"anyOf": [{"type": "array", "items": element}, element, {"type": "string"}]}
    return {"type": _PLAIN[kind]} if kind in _PLAIN else {}


def _describe_bounds(bounds: Bounds) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    if math.isfinite(bounds.low):
        schema["exclusiveMinimum" if bounds.open else "minimum"] = bounds.low
    if math.isfinite(bounds.high):
        schema["maximum"] = bounds.high
    return schema
