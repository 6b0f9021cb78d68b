"""The typed keywords of `fedproto.run` are the settings and options that really exist."""

import inspect
import re
import shutil
import subprocess
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Union

import pytest

import fedproto
from fedproto.config import plugins
from fedproto.config.options import FilePath, options_of
from fedproto.config.settings import DEFAULTS, RUN_FIELDS, Config
from fedproto.errors import ConfigError
from fedproto.runs import keywords
from fedproto.runs.keywords import FileName, RunKeywords

CLASSES = {
    "algorithm": keywords.AlgorithmOptions,
    "dataset": keywords.DatasetOptions,
    "model": keywords.ModelOptions,
    "partition": keywords.PartitionOptions,
    "combiner": keywords.CombinerOptions,
    "transform": keywords.TransformOptions,
    "teacher": keywords.TeacherOptions,
    "feature_map": keywords.FeatureMapOptions,
}


def as_keyword(kind: Any) -> Any:
    """The type of a setting without its bounds; file names may be paths, and tuples sequences."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        is_file = isinstance(arguments[1], FilePath)
        return FileName if is_file else as_keyword(arguments[0])
    if typing.get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(as_keyword(each) for each in arguments)]  # noqa: UP007
    if typing.get_origin(kind) is tuple:
        return Sequence[as_keyword(arguments[0])]
    return kind


LONGEST_COMMENT = 59  # letters that fit behind every key


def stated_defaults(typed_dict: type) -> dict[str, str]:
    """The comment behind each key."""
    source = inspect.getsource(typed_dict)
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.MULTILINE))


def options_by_name(kind: str) -> dict[str, list[tuple[str, Any]]]:
    """The options of all plug-ins of a kind: for each name the plug-ins that have it."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for plugin in plugins.names(kind):
        for name, option in options_of(plugins.find(kind, plugin)).items():
            found.setdefault(name, []).append((plugin, option))
    return found


def test_the_settings_of_a_run_have_their_keys_types_and_defaults():
    hints = typing.get_type_hints(Config, include_extras=True)
    expected = {name: as_keyword(hints[name]) for name in RUN_FIELDS}
    expected |= {"partition": str, "metric": str, "transform": str, "combiner": str}
    expected |= {"teacher": str, "feature_map": str}
    assert typing.get_type_hints(keywords.RunSettings) == expected
    defaults = {field.name: str(field.default) for field in fields(Config)} | DEFAULTS
    defaults |= {"metric": "''", "transform": "''", "teacher": "''", "feature_map": "''"}
    assert stated_defaults(keywords.RunSettings) == {name: defaults[name] for name in expected}


@pytest.mark.parametrize("kind", CLASSES)
def test_the_options_of_plugins_have_their_keys_types_and_defaults(kind):
    expected_types = {}
    expected_defaults = {}
    for name, options in options_by_name(kind).items():
        expected_types[name] = Union[tuple(as_keyword(option.kind) for _, option in options)]  # noqa: UP007
        defaults = {str(option.default) or "''" for _, option in options}
        by_plugin = ", ".join(f"{option.default} ({plugin})" for plugin, option in options)
        if len(by_plugin) > LONGEST_COMMENT:
            by_plugin = "one per plug-in"
        expected_defaults[name] = defaults.pop() if len(defaults) == 1 else by_plugin
    assert typing.get_type_hints(CLASSES[kind]) == expected_types
    assert stated_defaults(CLASSES[kind]) == expected_defaults


@pytest.mark.parametrize("function", [fedproto.run, fedproto.stream])
def test_run_and_stream_take_these_keywords(function):
    assert inspect.signature(function).parameters["options"].annotation == "Unpack[RunKeywords]"
    hints = typing.get_type_hints(function)
    assert typing.get_args(hints["options"]) == (RunKeywords,)


def test_a_type_checker_refuses_a_misspelt_keyword_and_a_wrong_type(tmp_path):
    """On a copy of the module alone: with the package, mypy reads all of torch."""
    shutil.copy(keywords.__file__, tmp_path / "keywords.py")
    (tmp_path / "snippet.py").write_text(
        "from typing import Unpack\n"
        "from keywords import RunKeywords\n"
        "def run(**options: Unpack[RunKeywords]) -> None: ...\n"
        "run(rounds=3, lam=0.1, ways=4, weights='w.npz')\n"
        "run(round=3)\n"
        "run(rounds='three')\n"
    )
    command = [sys.executable, "-m", "mypy", "--cache-dir", "cache", "snippet.py"]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    errors = re.findall(r"snippet\.py:(\d+): error: (.*)", checked.stdout)
    assert [line for line, _ in errors] == ["5", "6"], checked.stdout
    assert 'Unexpected keyword argument "round"' in errors[0][1]


def test_several_algorithms_are_refused_with_what_to_do_instead():
    with pytest.raises(ConfigError, match=r"takes one algorithm, .*: call it in a loop"):
        fedproto.run(algorithm="local,fedavg", dataset="digits")
