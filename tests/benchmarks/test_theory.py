"""The study of the convergence proof, in its smallest form, and the verdicts that follow."""

import json
import sys
from pathlib import Path

import pytest

from fedproto.errors import RunFolderError
from fedproto.reproduce.claims import NOT_MEASURED
from fedproto.reproduce.theory_claims import judge_aggregation, judge_theory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not a package
from benchmarks import theory

#: Three clients of 8x8 digits in place of MNIST.
TINY = {
    "dataset": "digits",
    "model": "mlp(hidden=16,width=8)",
    "clients": 3,
    "shots": 6,
    "batch": 4,
    "engine": "reference",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theory, "SETTINGS", theory.SETTINGS | TINY)
        patch.setattr(theory, "ROUNDS", 4)
        patch.setattr(theory, "SEEDS", (0, 1))
        patch.setattr(theory, "PASSES", (2, 3))
        theory.measure(folder / "raw")
    results = folder / "results"
    results.mkdir()
    theory.page(folder / "raw", results)
    return results


def test_the_passes_of_a_seed_are_put_together(results: Path) -> None:
    measured = json.loads((results / "theory.json").read_text())["measured"]
    for setting in ("proof", "norm", "run"):
        assert measured[setting]["rounds_measured"] == [2, 3, 4]
        assert measured[setting]["seeds"] == [0, 1]
        assert measured[setting]["summary"]["client_rounds"] == 2 * 3 * 3


def test_the_page_has_both_settings_and_the_figure_is_there(results: Path) -> None:
    page = (results / "theory.md").read_text()
    assert "## The norm, plain SGD, no dropout" in page
    assert "## The mean square, momentum, dropout" in page
    assert "| L2, Jacobian |" in page
    assert (results / "theory.png").read_bytes().startswith(b"\x89PNG")


def test_every_statement_has_a_verdict(results: Path) -> None:
    claims = {claim.key: claim for claim in judge_theory(results)}
    assert list(claims) == ["lemma 1", "lemma 2", "theorem 1", "corollary 1", "theorem 2"]
    assert claims["lemma 2"].verdict == "holds"
    assert claims["theorem 1"].verdict == "holds, and proves no decrease"
    assert claims["corollary 1"].verdict == "does not hold in any client-round"
    assert NOT_MEASURED not in {claim.verdict for claim in claims.values()}
    assert judge_aggregation(results).verdict == "holds"


def test_a_verdict_follows_from_the_shares(results: Path, tmp_path: Path) -> None:
    content = json.loads((results / "theory.json").read_text())
    statements = content["measured"]["proof"]["summary"]["statements"]
    statements["lemma_1"] |= {"holds": 0.9, "clearly_violated": 0.0}
    statements["lemma_2"] |= {"holds": 0.9, "clearly_violated": 0.1}
    content["measured"]["run"]["summary"]["federation"]["largest_aggregation_change"] = 0.1
    (tmp_path / "theory.json").write_text(json.dumps(content))
    lemma_1, lemma_2, *_ = judge_theory(tmp_path)
    assert lemma_1.verdict == "holds, within the spread of the replays"
    assert lemma_2.verdict == "holds in part"
    assert judge_aggregation(tmp_path).verdict == "does not hold"


def test_without_measurements_there_is_no_verdict(tmp_path: Path) -> None:
    assert {claim.verdict for claim in judge_theory(tmp_path)} == {NOT_MEASURED}
    assert judge_aggregation(tmp_path).verdict == NOT_MEASURED


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"measured": {"proof": {"title": "x", "summary": {}}}}']
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "theory.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"theory\.json"):
        judge_theory(tmp_path)
