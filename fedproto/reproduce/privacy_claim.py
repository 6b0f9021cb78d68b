"""The paper's claim about privacy, judged by the attacks of an audit (results/audit.json)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedproto.core.files import read_json
from fedproto.reproduce.claims import FAILS, HOLDS, IN_PART, NOT_MEASURED, Claim
from fedproto.reproduce.evidence import not_a_targets_file

AUDIT = "audit.json"
NO_PROTECTION = "none"
OTHER_MODEL = "other member's model, decoder"
#: Another member's decoder must bring the rank down to this part before it counts as a success.
MUCH_NEARER = 0.8


def judge_privacy(folder: Path) -> Claim:
    """Judge whether prototypes alone protect data, by attacks on FedProto without protection.

    The paper says two things: averaging embeddings cannot be undone, and without the local model
    nothing can be reconstructed. The first fails if an attack finds images, members or classes
    better than somebody who guesses; the second if another member's decoder does.
    """
    runs = _read_unprotected(folder / AUDIT)
    texts = []
    is_leaking = False
    is_inverted_blindly = False
    for run in runs:
        attacks = run["attacks"]
        found, leaks = _read_classes(attacks.get("classes"))
        texts += found
        is_leaking |= leaks
        found, leaks, blindly = _read_images(attacks.get("reconstruction"))
        texts += found
        is_leaking |= leaks
        is_inverted_blindly |= blindly
        found, leaks = _read_members(attacks.get("membership"))
        texts += found
        is_leaking |= leaks
    verdict = HOLDS if not is_leaking else IN_PART
    if is_leaking and is_inverted_blindly:
        verdict = FAILS
    return Claim(
        "privacy",
        "Prototypes protect privacy by themselves, and without the local model cannot be inverted",
        verdict if runs else NOT_MEASURED,
        unit="",
        figures=" ".join(texts),
        picture="audit-figures/reconstruction-1.png" if runs else "",
        note="Attacks on one run without protection, one seed, whose clients have 1 to 5 images of "
        "a class (audit.md). It holds in part if only the second half does.",
    )


def _read_unprotected(path: Path) -> list[dict[str, Any]]:
    """Return the audited runs of FedProto that nothing protects."""
    if not path.exists():
        return []
    content = read_json(path)
    runs = content.get("runs") if isinstance(content, dict) else None
    if not isinstance(runs, list):
        raise not_a_targets_file(path)
    chosen = []
    for run in runs:
        is_plain = run.get("protection") == NO_PROTECTION and run.get("algorithm") == "fedproto"
        if is_plain and run.get("freeze") == "nothing":
            chosen.append(run)
    return chosen


def _read_classes(found: dict[str, Any] | None) -> tuple[list[str], bool]:
    if found is None:
        return [], False
    text = (
        f"The server reads {found['right_classes']:.0%} of the clients' classes right "
        f"(guessing: {found['guessing']:.0%})."
    )
    return [text], found["right_classes"] > found["guessing"]


def _read_images(found: dict[str, Any] | None) -> tuple[list[str], bool, bool]:
    """Return what reconstructed images show; whether they leak with a model, and without it."""
    if found is None:
        return [], False, False
    baseline, *others = found["attackers"]
    known = [each for each in others if each["attacker"] != OTHER_MODEL]
    blind = [each for each in others if each["attacker"] == OTHER_MODEL]
    best = min(known, key=lambda each: each["all"]["rank"])
    text = (
        f"With the client's model, its image has rank {_rank(best)} among images of its class "
        f"(by the class's name alone: {_rank(baseline)}"
    )
    if blind:
        text += f"; with another member's model: {_rank(blind[0])}"
    leaks = best["all"]["rank"] < baseline["all"]["rank"]
    limit = MUCH_NEARER * baseline["all"]["rank"]
    blindly = any(each["all"]["rank"] < limit for each in blind)
    return [f"{text})."], leaks, blindly


def _rank(attacker: dict[str, Any]) -> str:
    means = attacker["all"]
    return f"{means['rank']:.0f} of {means['candidates']:.0f}"


def _read_members(found: dict[str, Any] | None) -> tuple[list[str], bool]:
    if found is None:
        return [], False
    by_name = {each["attacker"]: each for each in found["attackers"]}
    seen = by_name.get("prototypes")
    if seen is None:
        return [], False
    rate = seen["true_positives_at"]["0.01"]
    text = (
        f"From its prototypes, {rate['value']:.1%} of a client's records are recognised at 1% "
        f"false positives, and epsilon is at least {seen['epsilon_at_least']:.2f}."
    )
    return [text], seen["epsilon_at_least"] > 0
