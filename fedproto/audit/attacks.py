"""All attacks on one run, with what they measured as plain values for JSON, and their pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from sklearn.metrics import roc_curve
from torch import Tensor

from fedproto.audit import class_counts, gradient_inversion, membership, reconstruction
from fedproto.audit import statistics as tests
from fedproto.audit.attacked_run import AttackedRun, PlayedRound
from fedproto.audit.decoder import THREAT as DECODER_THREAT
from fedproto.audit.promises import is_promised, promised_epsilon
from fedproto.audit.shadows import choose_records, train_shadows
from fedproto.audit.white_box import THREAT as WHITE_BOX_THREAT
from fedproto.config.settings import Config
from fedproto.errors import DoesNotApply

#: The attacks by their names in `--attack`.
ATTACKS = ("classes", "reconstruction", "gradients", "membership")
FALSE_POSITIVE_RATES = (0.001, 0.01)
#: Points of a ROC curve that are kept.
ROC_POINTS = 200
#: The part of the federations that are the attacker's shadows; the others are attacked.
SHADOW_FRACTION = 2 / 3


@dataclass(frozen=True)
class Effort:
    """How much an audit tries."""

    federations: int = 48  # of a membership attack
    rounds: int | None = None  # of each of them; None: the run's
    targets: int = reconstruction.MAX_TARGETS
    victims: int = gradient_inversion.VICTIMS
    steps: int = gradient_inversion.STEPS  # of a gradient inversion


@dataclass
class Audit:
    """What was found about one run.

    found     measurements by attack, ready for JSON
    left_out  attacks that do not apply, and why
    pictures  what figures show, by attack
    """

    name: str
    about: dict[str, Any]
    found: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, Any] = field(default_factory=dict)


def audit_run(
    run: AttackedRun, attacks: Sequence[str], effort: Effort, notice: Callable[[str], None]
) -> Audit:
    """Return what the attacks find about a run; `notice` is told what is being tried."""
    audit = Audit(run.name, describe_run(run))
    played = run.play_round()
    tried: dict[str, Callable[[], tuple[Any, Any]]] = {
        "classes": lambda: _read_classes(run, played),
        "reconstruction": lambda: _reconstruct(run, played, effort),
        "gradients": lambda: _invert_gradients(run, effort),
        "membership": lambda: _infer_membership(run, effort),
    }
    for attack in attacks:
        notice(f"{run.name}: {attack}")
        try:
            with run.computing():
                audit.found[attack], audit.pictures[attack] = tried[attack]()
        except DoesNotApply as reason:
            audit.left_out[attack] = str(reason)
    return audit


def describe_run(run: AttackedRun) -> dict[str, Any]:
    """Return what a reader must know of a run."""
    config = run.config
    return {
        "run": str(run.path),
        "algorithm": run.algorithm.name,
        "dataset": ",".join(str(part) for part in config.dataset),
        "model": ",".join(str(part) for part in config.model),
        "clients": len(run.members),
        "rounds": config.rounds,
        "freeze": config.freeze,
        "protection": describe_protection(config),
        "claim": _read_claim(run),
    }


def describe_protection(config: Config) -> str:
    """Return everything in the settings that protects uploads, in words."""
    parts = []
    if config.privacy != "none":
        budget = "" if config.epsilon is None else f", epsilon {config.epsilon:g}"
        noise = "" if config.noise_multiplier is None else f", noise {config.noise_multiplier:g}"
        parts.append(f"privacy={config.privacy}{budget}{noise}")
    parts += [f"transform {part}" for part in config.transform]
    if config.combiner.name != "sum":
        parts.append(f"combiner {config.combiner.name}")
    return "; ".join(parts) or "none"


def _read_claim(run: AttackedRun) -> dict[str, Any] | None:
    """Return what a run claims about its privacy, if anything."""
    claim = run.experiment.claim()
    return None if claim is None else claim.describe()


# --- single attacks


def _read_classes(run: AttackedRun, played: PlayedRound) -> tuple[Any, Any]:
    read = class_counts.attack(run, played.uploads)
    found = {
        "threat": class_counts.THREAT.describe(),
        "how": read.how,
        "right_classes": read.right_classes,
        "exact_clients": read.exact_clients,
        "guessing": read.guessing,
        "count_error": read.count_error,
    }
    return found, read


def _reconstruct(run: AttackedRun, played: PlayedRound, effort: Effort) -> tuple[Any, Any]:
    targets = reconstruction.find_targets(run, played, effort.targets)
    attempts = [
        reconstruction.guess_class_means(run, targets),
        reconstruction.optimise_with_model(run, played, targets),
        reconstruction.decode_with_model(run, played, targets),
    ]
    with suppress(DoesNotApply):  # a single client of its data set
        attempts.append(reconstruction.decode_without_model(run, played, targets))
    names = run.federation.classes
    listed = []
    for target in targets:
        client = run.members[target.client].name
        listed.append(
            {"client": client, "class": names[target.label], "images": len(target.images)}
        )
    found = {
        "threat": {
            "with the client's model": WHITE_BOX_THREAT.describe(),
            "with another member's model": DECODER_THREAT.describe(),
        },
        "targets": listed,
        "attackers": [_describe_attempt(attempt, targets) for attempt in attempts],
    }
    return found, (targets, attempts)


def _describe_attempt(
    attempt: reconstruction.Reconstruction, targets: Sequence[reconstruction.Target]
) -> dict[str, Any]:
    """Return the scores of an attacker, their means, and the means over one-image classes."""
    single = []
    for score, target in zip(attempt.scores, targets, strict=True):
        if len(target.images) == 1:
            single.append(score)
    return {
        "attacker": attempt.name,
        "all": average_scores(attempt.scores),
        "one_image": average_scores(single),
        "scores": [asdict(score) for score in attempt.scores],
    }


def average_scores(scores: Sequence[reconstruction.Score]) -> dict[str, float] | None:
    """Return the mean of each measure; None without any score."""
    if not scores:
        return None
    means = {}
    for name in ("psnr_own", "ssim_own", "psnr_mean", "ssim_mean", "rank", "candidates"):
        means[name] = float(np.mean([getattr(score, name) for score in scores]))
    means["identified"] = float(np.mean([score.identifies for score in scores]))
    means["targets"] = len(scores)
    return means


def _invert_gradients(run: AttackedRun, effort: Effort) -> tuple[Any, Any]:
    if run.hides_uploads:
        raise DoesNotApply("the server sees only the sum of all clients' weights")
    inversions = []
    cases = []
    for case in gradient_inversion.CASES:
        made = gradient_inversion.attack(run, case, effort.victims, steps=effort.steps)
        inversions += made
        found = np.mean([each.scores(each.found_images) for each in made], axis=0)
        baseline = np.mean([each.scores(each.baseline) for each in made], axis=0)
        images = sorted({len(each.labels) for each in made})
        cases.append(
            {
                "case": case.name,
                "images": images,
                "clients": len(made),
                "psnr": float(found[0]),
                "ssim": float(found[1]),
                "baseline_psnr": float(baseline[0]),
                "baseline_ssim": float(baseline[1]),
            }
        )
    found = {"threat": gradient_inversion.THREAT.describe(), "cases": cases}
    return found, inversions


def _infer_membership(run: AttackedRun, effort: Effort) -> tuple[Any, Any]:
    records = choose_records(run)
    rounds = effort.rounds or run.config.rounds
    shadows = max(2, round(SHADOW_FRACTION * effort.federations))
    seen = train_shadows(run, records, effort.federations, rounds)
    trials = membership.infer_membership(seen, shadows)
    promised = promised_epsilon(run, records, seen.included[shadows:], rounds)
    attackers = []
    for name, each in trials.items():
        described = describe_trials(name, each)
        described["promised"] = promised if is_promised(run, name) else None
        attackers.append(described)
    found = {
        "records": len(records),
        "federations": effort.federations,
        "shadows": shadows,
        "rounds": rounds,
        "attackers": attackers,
    }
    return found, trials


def describe_trials(name: str, trials: membership.Trials) -> dict[str, Any]:
    """Return everything that the trials of one attacker say."""
    scores = trials.scores
    included = trials.included
    rates = {}
    for level in FALSE_POSITIVE_RATES:
        rates[f"{level:g}"] = tests.true_positives_at(scores, included, level)._asdict()
    false_rates, true_rates, _ = roc_curve(included, scores)
    kept = np.unique(np.geomspace(1, len(false_rates), ROC_POINTS).astype(int) - 1)
    return {
        "attacker": name,
        "threat": membership.THREATS[name].describe(),
        "trials": len(scores),
        "area": tests.area_under_curve(scores, included),
        "true_positives_at": rates,
        "advantage": tests.advantage_at(scores, included)._asdict(),
        "epsilon_at_least": tests.epsilon_bound_of_scores(scores, included),
        "roc": [false_rates[kept].tolist(), true_rates[kept].tolist()],
    }


def to_arrays(images: Tensor) -> np.ndarray:
    """Return images (n, channels, h, w) as arrays that can be drawn: (n, h, w) or (n, h, w, 3)."""
    array = images.detach().cpu().numpy()
    return array[:, 0] if array.shape[1] == 1 else np.moveaxis(array, 1, -1)
