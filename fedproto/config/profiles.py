"""What is called FedProto elsewhere, as sets of settings: `--profile NAME`.

A profile governs the method alone: the loss, the prototypes, and for the authors' code its test
rows. Model, learning rate, batches and data are the run's own, so that profiles can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

ProfileName = Literal["paper", "released", "pfllib", "htfllib", "fl-bench", "euclidean"]

#: What a round's prototypes are in all public code that was read: means over the batches as they
#: pass, of the clients of the round, each client counting once.
_PASSING_MEANS = {"weighting": "uniform", "collect": "during", "absent": "drop"}


@dataclass(frozen=True)
class Profile:
    """One reading of FedProto."""

    meaning: str  # ends the sentence "It follows ..."
    source: str  # what was read
    options: Mapping[str, Any] = field(default_factory=dict)  # of the algorithm
    #: The accuracy that its authors report: the name in result.json.
    accuracy: str = "prototype"
    #: After which round: the last one, or the one with the best test accuracy.
    reported: Literal["last", "best"] = "last"


PROFILES: dict[ProfileName, Profile] = {
    "paper": Profile(
        "the paper's text: means over all samples of a class, of the trained models, where absent "
        "clients still count",
        "Tan et al. 2022, Algorithm 1",
    ),
    "released": Profile(
        "the authors' code: plain means over clients of the batches as they pass, predictions "
        "among a client's own classes",
        "github.com/yuetan031/FedProto",
        _PASSING_MEANS,
        accuracy="prototype_own",
    ),
    "pfllib": Profile(
        "PFLlib: trained as the authors' code, predictions among all classes, the best test round "
        "reported",
        "github.com/TsingZ0/PFLlib, clientproto.py and serverproto.py",
        _PASSING_MEANS,
        reported="best",
    ),
    "htfllib": Profile(
        "HtFLlib: as PFLlib, and λ = 10 in its scripts",
        "github.com/TsingZ0/HtFLlib, clientproto.py, serverproto.py and total.sh",
        _PASSING_MEANS | {"lam": 10.0},
        reported="best",
    ),
    "fl-bench": Profile(
        "FL-bench: trained as the authors' code, predictions by the head",
        "github.com/KarhouTam/FL-bench, src/client/fedproto.py and issue 78",
        _PASSING_MEANS,
        accuracy="head",
    ),
    "euclidean": Profile(
        "the paper's text with the Euclidean distance itself in the loss, not the mean of squares, "
        "and λ = 0.1",
        "Tan et al. 2022, which names the L2 distance as one of several for Eq. 8",
        {"distance": "l2", "lam": 0.1},
    ),
}
assert get_args(ProfileName) == tuple(PROFILES)

#: The options of the algorithm that some profile sets.
PROFILE_OPTIONS = frozenset(option for profile in PROFILES.values() for option in profile.options)
