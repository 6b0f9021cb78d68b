"""Configuration files: TOML tables read as flat settings.

In a file, `[algorithm]` with `name = "fedproto"` and `lam = 1` is the same as the flat settings
`algorithm = "fedproto"` and `algorithm.lam = 1`, which flags and Python keywords use, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedproto.config import plugins
from fedproto.core.files import check_version, parse_toml
from fedproto.errors import ConfigError, RunFolderError, unknown

#: The version of the format of config.toml.
VERSION = 1
#: The key in [partition] that lists the options which were left open and which the data set set.
FROM_DATA = "from_data"
#: What the config.toml of every run folder states. A default in place of a missing one of these
#: would describe another run.
RECORDED = ("algorithm", "dataset", "model", "partition", "clients", "rounds", "seed")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a configuration file as flat settings, without values that came from the data set."""
    return flatten_tables(drop_values_from_data(read_tables(path)), str(path))


def read_run_toml(path: Path) -> dict[str, Any]:
    """Read a run folder's config.toml like `read_toml`; it must be complete and state a version."""
    tables = read_tables(path)
    check_version(tables, VERSION, str(path))
    settings = flatten_tables(drop_values_from_data(tables), str(path))
    require_recorded(settings, path)
    return settings


def read_tables(path: Path) -> dict[str, Any]:
    """Read a TOML file as it is."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return parse_toml(content, str(path), ConfigError)


def drop_values_from_data(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables without the partition's options that the data set set.

    The next run may have another data set, which sets them anew.
    """
    partition = tables.get("partition")
    if not isinstance(partition, dict):
        return tables
    from_data = partition.get(FROM_DATA)
    dropped = {FROM_DATA}
    if isinstance(from_data, list):
        dropped.update(str(name) for name in from_data)
    kept = {name: value for name, value in partition.items() if name not in dropped}
    return {**tables, "partition": kept}


def require_recorded(settings: Mapping[str, Any], path: Path) -> None:
    """Refuse incomplete settings of a run folder, such as those of an empty file."""
    for key in RECORDED:
        if key not in settings:
            raise RunFolderError(f"{path} is damaged: it lacks {key!r}")


def flatten_tables(tables: dict[str, Any], where: str) -> dict[str, Any]:
    """Turn the tables of a file into flat settings; a version that the file states is checked."""
    if "version" in tables:
        check_version(tables, VERSION, where, ConfigError)
    settings: dict[str, Any] = {}
    for key, value in tables.items():
        if key == "version":
            continue
        if isinstance(value, dict):
            settings.update(_flatten_table(key, value, where))
        else:
            settings[key] = value
    return settings


def _flatten_table(kind: str, table: dict[str, Any], where: str) -> dict[str, Any]:
    """Turn the table of one kind of plug-in into flat settings."""
    if kind == "sweep":
        raise ConfigError(f"{where} has a table [sweep]: run it with `fedproto sweep {where}`")
    if kind not in plugins.FOLDERS:
        raise unknown(f"table in {where}", kind, plugins.FOLDERS)
    settings = {}
    for name, value in table.items():
        if kind == "partition" and name == FROM_DATA:
            continue
        key = kind if name == "name" else f"{kind}.{name}"
        settings[key] = value
    return settings


def format_value(value: Any) -> str:
    """Write a value as TOML; None becomes "none"."""
    if isinstance(value, (list, tuple)):
        elements = ", ".join(format_value(element) for element in value)
        return f"[{elements}]"
    if value is None:  # written, not left out: a profile would fill the gap with something else
        return '"none"'
    # Unescaped, because JSON escapes characters beyond \uFFFF as pairs, which TOML refuses.
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # the one control character that JSON leaves as it is
