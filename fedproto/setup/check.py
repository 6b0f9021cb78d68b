"""Checks of a configuration and its data, without training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedproto.config import plugins
from fedproto.config.choices import has_own_data
from fedproto.config.config_file import read_toml
from fedproto.config.options import Part
from fedproto.config.settings import Config, configure
from fedproto.core.federation import Federation
from fedproto.data import Source
from fedproto.errors import FedProtoError
from fedproto.runs.experiment import Experiment
from fedproto.setup.cost import Cost, estimate_cost
from fedproto.setup.survey import Survey, name_data, survey
from fedproto.setup.suspicions import find_suspicions

CONFIG_ENDING = ".toml"
#: Options that a data set needs, and why it would be refused without them.
NEEDED = {
    "ignore": "these columns hold names, ids or dates",
    "size": "the images have several sizes",
    "broken": "some files cannot be read",
}


@dataclass
class CheckedRun:
    """What a run of one algorithm would be."""

    algorithm: str
    federation: Federation
    cost: Cost | None


@dataclass
class Check:
    """What was found."""

    runs: list[CheckedRun] = field(default_factory=list)
    #: Why a run would be refused; one sentence each.
    errors: list[str] = field(default_factory=list)
    #: What is suspicious, but can be trained on.
    warnings: list[str] = field(default_factory=list)


def check(target: str, *, times: bool = True) -> Check:
    """Return what a run of a configuration file, or of data read as `fedproto init` does, would be.

    What a run would refuse is among the errors, all at once; the rest is checked as if those were
    mended. With `times`, some batches are trained.
    """
    found = Check()
    loaded: dict[str, Source] = {}
    if target.endswith(CONFIG_ENDING):
        path = Path(target)
        settings = read_toml(path)
        plugins.refuse_plugins(settings, path)
        configs = configure(settings)
        configs = [_mend(config, found, loaded) for config in configs]
    else:
        part = name_data(target)
        surveyed = survey(target, {})
        found.errors += _explain_needs(part.name, _needed_options(part, surveyed))
        configs = configure({"dataset": str(surveyed.part)})
    notices: dict[str, None] = {}
    for config in configs:
        try:
            experiment = Experiment.prepare(config, loaded=loaded)
        except FedProtoError as error:
            found.errors.append(str(error))
            continue
        notices |= dict.fromkeys(experiment.notices)
        if not found.runs:
            notices |= dict.fromkeys(find_suspicions(experiment.federation))
        cost = estimate_cost(experiment) if times else None
        checked = CheckedRun(experiment.algorithm.name, experiment.federation, cost)
        found.runs.append(checked)
    found.errors = list(dict.fromkeys(found.errors))
    found.warnings = list(notices)
    return found


def _mend(config: Config, found: Check, loaded: dict[str, Source]) -> Config:
    """Return a configuration whose data can be read; what had to be mended is an error."""
    if not has_own_data(config.dataset):
        return config
    parts = []
    for part in config.dataset:
        try:
            surveyed = survey(str(Part(part.name, part.options)), {}, config.data_dir)
        except FedProtoError as error:
            found.errors.append(str(error))
            parts.append(part)
            continue
        needed = _needed_options(part, surveyed)
        found.errors += _explain_needs(part.name, needed)
        parts.append(Part(part.name, {**part.options, **needed}, part.count))
    return replace(config, dataset=tuple(parts))


def _needed_options(part: Part, surveyed: Survey) -> dict[str, Any]:
    """Return the options without which the data set could not be read."""
    needed = {}
    for name in NEEDED:
        value = surveyed.part.options.get(name)
        if name in surveyed.reasons and value != part.options.get(name):
            needed[name] = value
    return needed


def _explain_needs(name: str, needed: Mapping[str, Any]) -> list[str]:
    sentences = []
    for option, value in needed.items():
        written = ", ".join(value) if isinstance(value, tuple) else value
        sentences.append(f"{name}: {NEEDED[option]}: set {option} = {written}")
    return sentences
