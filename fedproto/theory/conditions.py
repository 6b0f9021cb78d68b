"""Which settings the proof is about, and in what a run departs from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedproto.config.choices import AUTO
from fedproto.config.options import Part
from fedproto.config.settings import Config
from fedproto.errors import ConfigError

#: The algorithms whose objective is the proof's.
ALGORITHMS = ("fedproto", "fedproto-mh")
#: The distances for which Lemma 2 holds as printed, or as we correct it.
DISTANCES = ("l2", "sql2", "mse")
#: What the run must have so that a round can be replayed, with the value and its reason.
NEEDED: dict[str, tuple[Any, str]] = {
    "optimiser": ("sgd", "the proof is about SGD"),
    "weight_decay": (0.0, "the objective has no such term"),
    "privacy": ("none", "noise on uploads moves prototypes by itself"),
    "clip_norm": (0.0, "a clipped gradient is biased"),
    "class_weights": ("none", "the objective is a mean over samples"),
    "sampling": ("shuffle", "the objective is a mean over samples"),
    "participation": (1.0, "Lemma 2 needs everybody's prototypes: see docs/theory.md"),
    "lost_uploads": (0.0, "Lemma 2 needs everybody's prototypes: see docs/theory.md"),
    "stragglers": (0.0, "all clients take their own number of steps"),
    "buffer": (0, "rounds are synchronous"),
}
#: The same for the options of the algorithm.
NEEDED_OPTIONS: dict[str, tuple[Any, str]] = {
    "regularise": ("sample", "the distances of a batch's means are not a mean over samples"),
    "collect": ("after", "prototypes must be those of the weights after local training"),
    "fixed": (False, "prototypes must move"),
    "contrast": (0.0, "the measured bounds leave the contrast term out: see docs/theory.md"),
}


def refuse_unsuited(config: Config) -> None:
    """Raise ConfigError where the statements say nothing about a run, not even approximately."""
    name = config.algorithm.name
    if name not in ALGORITHMS:
        raise ConfigError(
            f"the theory is about the algorithm {' and '.join(ALGORITHMS)}, not {name}"
        )
    for setting, (value, reason) in NEEDED.items():
        found = getattr(config, setting)
        if found != value:
            raise ConfigError(f"theory needs {setting}={value}, not {found}: {reason}")
    options = config.algorithm.options
    for option, (value, reason) in NEEDED_OPTIONS.items():
        if options[option] != value:
            found = options[option]
            raise ConfigError(f"theory needs {option}={value}, not {found}: {reason}")
    if options["distance"] not in DISTANCES:
        accepted = ", ".join(DISTANCES)
        raise ConfigError(
            f"theory knows the distances {accepted}, not {options['distance']}: Lemma 2 is about "
            "a Euclidean distance"
        )
    if config.transform or config.teacher or config.combiner.name != "sum":
        raise ConfigError("theory needs uploads as they are: no transform, teacher or combiner")
    if config.batch < 2:
        raise ConfigError("theory needs batches of at least 2, to compare their halves, not 1")


def make_proof_config(config: Config) -> Config:
    """Return the settings of a run, changed to those of the proof.

    Plain SGD without momentum and dropout, and the norm as the distance.

    Raises ConfigError for a model that the data set is yet to name: it may have dropout.
    """
    if any(part.name == AUTO for part in config.model):
        raise ConfigError("the proof's own setting needs a model by its name, not auto")
    options = config.algorithm.options | {"distance": "l2"}
    return replace(
        config,
        momentum=0.0,
        schedule="constant",
        warmup=0,
        algorithm=replace(config.algorithm, options=options),
        model=tuple(_without_dropout(part) for part in config.model),
    )


def _without_dropout(part: Part) -> Part:
    if "dropout" not in part.options:
        return part
    return replace(part, options=part.options | {"dropout": 0.0})


def list_departures(config: Config, has_dropout: bool, unequal_steps: bool) -> list[str]:
    """Return in sentences where the run is outside what the proof assumes."""
    departures = []
    options = config.algorithm.options
    if options["distance"] == "l2":
        departures.append(
            "Assumption 1: the norm has no derivative where an embedding equals its prototype, so "
            "no L1 holds everywhere; the estimate is that of the path."
        )
    else:
        departures.append(
            "Lemma 2 takes the norm, but this run minimises its square: Eq. 22 does not follow."
        )
    if config.momentum:
        departures.append(
            f"Lemma 1 is about plain SGD, but the momentum is {config.momentum:g}; Lemma 2 needs "
            f"η / (1 − momentum) = {config.lr / (1 - config.momentum):g} in place of η."
        )
    if has_dropout:
        departures.append(
            "Assumption 2: with dropout a batch's gradient is an unbiased one of another "
            "objective, the mean over dropout's draws."
        )
    if unequal_steps:
        departures.append(
            "The paper has one E; here each client has its own, and Lemma 2 needs the largest."
        )
    departures.append(
        "The run itself shuffles its epochs; the replays draw batches with replacement, as "
        "Assumption 2 needs."
    )
    departures.append("Round 1 has no prototypes before it, so Lemma 2 says nothing about it.")
    return departures
