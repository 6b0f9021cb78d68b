"""What the theory proposes: by hand, and judged on validation rows beside a search."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedproto.cli.main import app
from fedproto.errors import ConfigError
from fedproto.theory.proposal import propose

FLAGS = ["--dataset", "digits", "--model", "mlp(hidden=16,width=8)", "--set", "clients=3"]
FLAGS += ["--set", "shots=6", "--rounds", "3", "--seeds", "1", "--budget", "2"]


def client(square_sum: float, drift: float) -> dict[str, Any]:
    """Return a client with L1 = 4, σ² = 3 and E = 10, as a measured round has it."""
    return {
        "square_sum": square_sum,
        "steps": 10,
        "smoothness": {"used": 4.0},
        "variance": {"largest": 3.0},
        "lemma_2": {"corrected_bound": drift},
    }


def measured(*clients: dict[str, Any], **changes: float) -> dict[str, Any]:
    record = {
        "prototypes_before": True,
        "constants": {"G": 5.0, "L2": 2.0},
        "clients": list(clients),
    }
    first = {"prototypes_before": False, "clients": [], "constants": {}}
    return {"eta": 0.02, "lam": 2.0, "momentum": 0.5, "rounds": [first, record]} | changes


def test_the_proposals_by_hand() -> None:
    """The best η are 20/(4·50) = 0.1 and 10/(4·40) = 0.0625; the smallest counts.

    There Lemma 1's total is −η Σ + L1η²(Σ + Eσ²)/2: for Σ = 10 it is −0.3125, for Σ = 20 −0.859375.
    The drift of 8 at λ = 2 and an effective rate of 0.04 is 4·0.0625/0.04 = 6.25 per λ.
    """
    every_client, federation = propose(measured(client(20.0, 8.0), client(10.0, 8.0)))
    assert every_client.lr == pytest.approx(0.0625 / 2)  # momentum 0.5
    assert every_client.lam == pytest.approx(0.5 * 0.3125 / 6.25)
    assert federation.lr == every_client.lr
    assert federation.lam == 2.0


def test_a_larger_drift_proposes_a_smaller_lambda() -> None:
    small, _ = propose(measured(client(20.0, 8.0)))
    large, _ = propose(measured(client(20.0, 80.0)))
    assert large.lam == pytest.approx(small.lam / 10)


def test_without_lambda_nothing_is_proposed() -> None:
    with pytest.raises(ConfigError, match="set lam"):
        propose(measured(client(20.0, 8.0), lam=0.0))


def test_proposals_are_judged_beside_a_search(tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    result = CliRunner().invoke(app, ["tune", "--by", "theory", *FLAGS, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "proposed by the convergence proof" in result.output
    found = json.loads((out / "proposals.json").read_text())["found"]
    assert [each["name"] for each in found] == ["theory, every client", "theory, federation"]
    assert found[1]["lam"] == 1.0
    assert 0 < found[0]["lam"] < 1
    assert all(0 <= each["validation"] <= 1 for each in found)
    search = json.loads((out / "tune.json").read_text())
    assert search["tried"] == 2  # proposals are no candidates of the search


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--by", "luck"], "way to tune"),
        (["--by", "theory", "--algorithm", "fedavg"], "is about the algorithm"),
        (["--by", "theory", "--set", "participation=0.5"], "participation=1.0"),
    ],
)
def test_what_the_theory_is_not_about_is_refused_before_anything_is_trained(
    tmp_path: Path, flags: list[str], words: str
) -> None:
    out = tmp_path / "tuned"
    result = CliRunner().invoke(app, ["tune", *FLAGS, *flags, "--out", str(out)])
    assert words in str(result.exception)
    assert not out.exists()
