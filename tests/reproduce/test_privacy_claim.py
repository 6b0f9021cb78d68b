"""The verdict on the paper's claim about privacy, on hand-made audits."""

import json
from pathlib import Path

import pytest

from fedproto.errors import RunFolderError
from fedproto.reproduce.claims import FAILS, HOLDS, IN_PART, NOT_MEASURED
from fedproto.reproduce.privacy_claim import OTHER_MODEL, judge_privacy


def attacker(name: str, rank: float) -> dict:
    return {"attacker": name, "all": {"rank": rank, "candidates": 100}}


def audit(right: float, ranks: tuple[float, float, float], epsilon: float) -> dict:
    """Return a run: classes that are read, ranks by name, with and without the model, epsilon."""
    by_name, with_model, without = ranks
    attackers = [
        attacker("class name only", by_name),
        attacker("client's model, decoder", with_model),
        attacker(OTHER_MODEL, without),
    ]
    member = {
        "attacker": "prototypes",
        "true_positives_at": {"0.01": {"value": 0.05}},
        "epsilon_at_least": epsilon,
    }
    return {
        "name": "plain",
        "algorithm": "fedproto",
        "protection": "none",
        "freeze": "nothing",
        "attacks": {
            "classes": {"right_classes": right, "guessing": 0.6},
            "reconstruction": {"attackers": attackers},
            "membership": {"attackers": [member]},
        },
    }


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        (audit(0.6, (40, 41, 42), 0.0), HOLDS),
        (audit(1.0, (40, 41, 42), 0.0), IN_PART),
        (audit(0.6, (40, 10, 42), 0.0), IN_PART),
        (audit(0.6, (40, 41, 42), 0.4), IN_PART),
        (audit(1.0, (40, 10, 12), 0.4), FAILS),
        (audit(1.0, (40, 10, 12), 0.4) | {"protection": "privacy=client"}, NOT_MEASURED),
    ],
)
def test_the_verdict_follows_from_the_attacks(run: dict, verdict: str, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text(json.dumps({"runs": [run]}))
    assert judge_privacy(tmp_path).verdict == verdict


def test_what_was_measured_is_in_the_text(tmp_path: Path) -> None:
    run = audit(1.0, (40, 10, 42), 0.4)
    (tmp_path / "audit.json").write_text(json.dumps({"runs": [run]}))
    figures = judge_privacy(tmp_path).figures
    assert "rank 10 of 100" in figures
    assert "epsilon is at least 0.40" in figures


def test_without_an_audit_nothing_is_measured(tmp_path: Path) -> None:
    assert judge_privacy(tmp_path).verdict == NOT_MEASURED
    (tmp_path / "audit.json").write_text("[]")
    with pytest.raises(RunFolderError, match=r"audit\.json"):
        judge_privacy(tmp_path)
