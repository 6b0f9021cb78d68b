"""The settings that a search tries: drawn, checked, and made into the cells of a sweep.

The first candidate is the default: the settings without the search. Drawn candidates share the
values of settings that the engine cannot vary within a stack, such as an algorithm's options, in
about as many groups as a group has candidates, so that a group is trained as one stack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedproto.config.choices import option_names
from fedproto.config.options import Part
from fedproto.config.settings import RUN_FIELDS, Config, configure, refuse_contradictions
from fedproto.core import rng
from fedproto.errors import ConfigError
from fedproto.runs.sweep import STACKED_SETTINGS, Cell
from fedproto.runs.tune.space import Dimension, Range, Space

#: Settings of a run that are searched; the others say what the data is, or how it is computed.
TUNABLE_SETTINGS = (
    "batch",
    "class_weights",
    "clip_norm",
    "dim",
    "epochs",
    "local_steps",
    "lr",
    "momentum",
    "optimiser",
    "sampling",
    "schedule",
    "staleness",
    "start",
    "warmup",
    "weight_decay",
)
#: Kinds of plug-ins whose options are searched.
TUNABLE_KINDS = ("algorithm", "model", "combiner", "transform", "teacher", "feature_map")
FIXED_KINDS = ("dataset", "partition", "metric")
#: Draws per candidate after which a space counts as exhausted.
MAX_DRAWS_PER_CANDIDATE = 100
#: Where a whole number would be met by chance only.
ODD_FRACTION = 0.381966


@dataclass(frozen=True)
class Candidate:
    """Settings that are tried.

    number    0 is the default
    settings  the values of what is searched, as the run's configuration has them
    config    the whole configuration, as it was asked for
    """

    number: int
    settings: dict[str, Any]
    config: Config

    def cell(self, seed: int, rounds: int, judged_every: int, validation: float | None) -> Cell:
        """Return the federation with a seed, which is judged on validation rows only."""
        config = replace(
            self.config,
            seed=seed,
            rounds=rounds,
            eval_every=judged_every,
            checkpoint_every=judged_every,
            validation=validation,
            patience=None,
            baselines=False,
        )
        refuse_contradictions(rounds, config.warmup, config.class_weights, config.sampling)
        varied = self.settings | {"seed": seed}
        return Cell(f"{self.number:03d}-seed={seed}", varied, config)


def draw_candidates(
    settings: Mapping[str, Any],
    assigned: Mapping[str, Any],
    space: Space,
    budget: int,
    seed: int,
) -> list[Candidate]:
    """Return the default and up to `budget` - 1 different candidates, by their numbers.

    There are fewer where the space has fewer points. `settings` and `assigned` are those of
    `configure`; the drawn values win over both.
    """
    default = _configure(settings, assigned)
    space = _check_space(settings, assigned, space, default)
    candidates = [Candidate(0, _values_of(default, space), default)]
    seen = {_identify(candidates[0].settings)}
    drawn_before = set()
    size = group_size(space, budget - 1)
    for draw in range(MAX_DRAWS_PER_CANDIDATE * (budget - 1)):
        if len(candidates) == budget:
            break
        drawn = draw_settings(space, seed, draw, size)
        if _identify(drawn) in drawn_before:
            continue
        drawn_before.add(_identify(drawn))
        config = _configure(settings, {**assigned, **drawn})
        values = _values_of(config, space)
        if _identify(values) not in seen:
            seen.add(_identify(values))
            candidates.append(Candidate(len(candidates), values, config))
    return candidates


def group_size(space: Space, candidates: int) -> int:
    """Return how many candidates share what cannot be varied within a stack.

    It is the square root of their number, rounded up, so that there are as many groups; 1 where
    nothing, or everything, can be varied within a stack.
    """
    stacked = [key for key in space if _is_stacked(key)]
    if not stacked or len(stacked) == len(space) or candidates < 1:
        return 1
    return math.isqrt(candidates - 1) + 1


def draw_settings(space: Space, seed: int, draw: int, size: int) -> dict[str, Any]:
    """Return the values of one draw: a pure function of the seed, its number and the space.

    `size` draws in a row share what cannot be varied within a stack.
    """
    drawn = {}
    for key, dimension in space.items():
        number = draw if _is_stacked(key) else draw // size
        stream = rng.key(seed, f"tune {key}", number)
        fraction = float(rng.uniform(stream, 1))
        drawn[key] = dimension.pick(fraction)
    return drawn


def _is_stacked(key: str) -> bool:
    """Return whether the federations of one stack may differ in a setting."""
    return key.removeprefix("run.") in STACKED_SETTINGS


def _identify(values: Mapping[str, Any]) -> str:
    return repr(list(values.items()))


def _configure(settings: Mapping[str, Any], assigned: Mapping[str, Any]) -> Config:
    """Return the one configuration of some settings."""
    configs = configure(settings, assigned)
    if len(configs) != 1:
        raise ConfigError("a search takes one algorithm, not several with commas")
    return configs[0]


# --- what may be searched


def _check_space(
    settings: Mapping[str, Any], assigned: Mapping[str, Any], space: Space, default: Config
) -> Space:
    """Return the space, with ranges of whole numbers marked; refuse what cannot be searched."""
    checked: Space = {}
    for key, dimension in space.items():
        _refuse_fixed(key, default)
        for value in dimension.examples():
            _configure(settings, {**assigned, key: _whole_if_integral(value)})
        checked[key] = dimension
        if isinstance(dimension, Range):
            checked[key] = _mark_whole(settings, assigned, key, dimension)
    return checked


def _whole_if_integral(value: Any) -> Any:
    """Return 3 for 3.0, which a setting of whole numbers would also take."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _mark_whole(
    settings: Mapping[str, Any], assigned: Mapping[str, Any], key: str, dimension: Range
) -> Dimension:
    """Return the range, of whole numbers only if the setting refuses a fraction in it."""
    inside = dimension.low + ODD_FRACTION * (dimension.high - dimension.low)
    try:
        _configure(settings, {**assigned, key: inside})
    except ConfigError:
        return replace(dimension, whole=True)
    return dimension


def _refuse_fixed(key: str, config: Config) -> None:
    """Refuse a setting that says what the data is or how it is computed, and not what is learnt."""
    owner, dot, name = key.partition(".")
    if not dot:
        owner, name = _find_owner(key, config), key
    is_fixed_setting = owner == "run" and name in RUN_FIELDS and name not in TUNABLE_SETTINGS
    if is_fixed_setting or owner in FIXED_KINDS or key in (*TUNABLE_KINDS, *FIXED_KINDS):
        listed = ", ".join(TUNABLE_SETTINGS)
        raise ConfigError(
            f"{key} cannot be searched: tunable are {listed}, and the options of the algorithm, "
            "the model, the combiner, the transforms, the teacher and the feature map"
        )


def _find_owner(key: str, config: Config) -> str:
    """Return the fixed kind of plug-in whose option this is, or `run`."""
    if key in RUN_FIELDS:
        return "run"
    for kind in (*TUNABLE_KINDS, *FIXED_KINDS):
        for part in _parts(config, kind):
            if key in option_names(kind, part):
                return kind
    return "run"


def _parts(config: Config, kind: str) -> tuple[Part, ...]:
    chosen = getattr(config, kind)
    return chosen if isinstance(chosen, tuple) else (chosen,)


def _values_of(config: Config, space: Space) -> dict[str, Any]:
    """Return the values that a configuration has of what is searched."""
    return {key: _value_of(config, key) for key in space}


def _value_of(config: Config, key: str) -> Any:
    """Return the value of a setting, or of the option of the first plug-in that has it."""
    owner, dot, name = key.partition(".")
    if not dot:
        owner, name = _find_owner(key, config), key
    if owner == "run":
        return getattr(config, name)
    for part in _parts(config, owner):
        if name in part.options:
            return part.options[name]
    return None
