"""The study of combiners, in its smallest form: it runs, and its page and figure are complete."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not a package
from benchmarks import robustness
from benchmarks.robustness import QUICK, Cell, Study, draw_attackers, list_cells

TINY = replace(
    QUICK, clients=5, shots=4, test_shots=4, attackers=(2,), attacks=("flipped",), rounds=1
)


def test_the_study_is_what_the_issue_asks_for() -> None:
    cells = list_cells(Study())
    assert len(set(cells)) == len(cells) == 3 * 6 * (1 + 5 * 4)
    assert {cell.attackers / Study().clients for cell in cells} == {0, 0.1, 0.2, 0.3, 0.4}


def test_more_attackers_are_the_same_and_others() -> None:
    few = draw_attackers(Cell("sum", "flipped", 2, seed=1), 20)
    many = draw_attackers(Cell("median", "scaled", 8, seed=1), 20)
    assert len(few) == 2
    assert len(many) == 8
    assert set(few) < set(many)


def test_it_runs_and_writes_its_page_and_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robustness, "QUICK", TINY)
    monkeypatch.setattr(sys, "argv", ["robustness", "--quick", "--out", str(tmp_path)])
    robustness.main()
    found = json.loads((tmp_path / "robustness.json").read_text())
    # Algorithms, combiners, and with or without attackers.
    assert len(found["measured"]) == 2 * 3 * 2
    for cell in found["measured"]:
        assert all(0 <= value <= 1 for value in cell["accuracy"].values())
    page = (tmp_path / "robustness.md").read_text()
    assert page.count("| flipped | 40% |") == 3
    assert (tmp_path / "robustness.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "robustness.md").unlink()
    monkeypatch.setattr(sys, "argv", ["robustness", "--draw", "--out", str(tmp_path)])
    robustness.main()
    assert (tmp_path / "robustness.md").read_text() == page


def test_a_stack_of_federations_computes_what_each_does_alone() -> None:
    """Attacks and combiners are a part of each server's state, and of nobody else's."""
    together = robustness.measure(TINY, "fedavg", {})
    for wanted in together[:: len(together) - 1]:  # the first and the last
        alone = replace(TINY, combiners=(wanted["combiner"],), attackers=(2,))
        (found,) = [
            cell
            for cell in robustness.measure(alone, "fedavg", {})
            if cell["attack"] == wanted["attack"]
        ]
        assert found["accuracy"] == pytest.approx(wanted["accuracy"])
