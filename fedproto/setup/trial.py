"""Experiments prepared from the text of a configuration file, which nobody has written yet."""

from __future__ import annotations

from fedproto.config.config_file import flatten_tables
from fedproto.config.settings import configure
from fedproto.core.files import parse_toml
from fedproto.errors import ConfigError
from fedproto.runs.experiment import Experiment
from fedproto.setup.survey import Survey

WHERE = "the configuration"  # in errors


def prepare_text(text: str, found: Survey) -> list[Experiment]:
    """Return the experiments that a configuration describes, one per algorithm.

    Raises what a run would raise.
    """
    settings = flatten_tables(parse_toml(text.encode(), WHERE, ConfigError), WHERE)
    configs = configure(settings)
    loaded = {str(configs[0].dataset[0]): found.source}
    return [Experiment.prepare(config, loaded=loaded) for config in configs]
