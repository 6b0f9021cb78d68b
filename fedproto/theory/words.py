"""What was measured, as the rows of a table and as sentences; for people, files and reports."""

from __future__ import annotations

from typing import Any

from fedproto.theory.summary import STATEMENTS, TITLES

#: The names of the settings for people.
SETTING_TITLES = {"run": "as the run is", "proof": "the proof's own setting"}
HEADERS = (
    "statement",
    "checked",
    "holds",
    "holds with means",
    "clearly violated",
    "median change",
    "median bound",
    "looseness",
)
#: Said with every table: nobody knows the suprema that the statements are about.
CAVEAT = (
    "Constants are the largest values observed, so every bound is an estimate, from below. "
    "Expectations are means over replays. Holds with means: with the means along the paths in "
    "place of the largest values. Looseness: (bound − change) / |change|, the median."
)


def list_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Return a row of the table for each statement, in the order of HEADERS."""
    rows = []
    for name in STATEMENTS:
        found = summary["statements"][name]
        if found is None:
            rows.append([TITLES[name], "0", *[""] * (len(HEADERS) - 2)])
            continue
        rows.append(
            [
                TITLES[name],
                str(found["checks"]),
                percent(found["holds"]),
                percent(found["holds_with_means"]),
                percent(found["clearly_violated"]),
                short(found["median_change"]),
                short(found["median_bound"]),
                short(found["median_looseness"]),
            ]
        )
    return rows


def explain(setting: dict[str, Any]) -> list[str]:
    """Return sentences about Corollary 1, Theorem 2 and the whole federation in one setting."""
    summary = setting["summary"]
    sentences = []
    theorem_1 = summary["statements"]["theorem_1"]
    if theorem_1 is not None:
        dominant = max(theorem_1["dominant"], key=lambda name: theorem_1["dominant"][name])
        sentences.append(
            f"Theorem 1 proves a decrease in {percent(theorem_1['proves_decrease'])} of the "
            f"client-rounds; the loss decreases in {percent(theorem_1['decreases'])}. The "
            f"{dominant} term is the largest in {percent(theorem_1['dominant'][dominant])}."
        )
    sentences += _explain_corollary(summary["corollary_1"], setting["eta"], setting["lam"])
    sentences += _explain_theorem_2(summary["theorem_2"])
    sentences += _explain_lemma_2(summary["statements"]["lemma_2"])
    federation = summary["federation"]
    if federation is not None:
        sentences.append(
            "Over all clients together, weighted by their rows, aggregation lowers the objective "
            f"in {percent(federation['aggregation_decreases'])} of the rounds, and Theorem 1 "
            f"without its drift term holds in {percent(federation['holds_without_drift'])}."
        )
    return sentences


def _explain_corollary(found: dict[str, Any] | None, eta: float, lam: float) -> list[str]:
    if found is None:
        return []
    return [
        f"Corollary 1 allows λ below {short(found['median_lambda_first'])} (median; at most "
        f"{short(found['largest_lambda_first'])}): λ = {lam:g} is allowed in "
        f"{percent(found['lambda_holds'])} of the client-rounds. With λ = 0 it allows η below "
        f"{short(found['median_eta_without_lambda'])}: η = {eta:g} is allowed in "
        f"{percent(found['eta_without_lambda_holds'])}, with λ as it is in "
        f"{percent(found['eta_holds'])}."
    ]


def _explain_theorem_2(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    vacuous = found["predicted"]["vacuous"]
    if vacuous == 1:
        return [
            "Theorem 2 predicts no number of rounds for any client's measured mean squared "
            f"gradient ({found['words']})."
        ]
    return [
        f"Theorem 2 predicts {short(found['predicted']['median'])} rounds (median) for the mean "
        f"squared gradients measured in {found['rounds_measured']}; it is vacuous for "
        f"{percent(vacuous)} of the clients."
    ]


def _explain_lemma_2(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    return [
        f"Lemma 2 for the distance and the momentum in use holds in "
        f"{percent(found['holds_corrected'])}, with a median bound of "
        f"{short(found['median_corrected_bound'])}; a client's global prototypes move by "
        f"{short(found['median_movement'])} (median of the largest of its classes)."
    ]


def percent(share: float) -> str:
    """Return a share as text; only what is exactly 100% is called so.

    >>> percent(0.9996), percent(1.0), percent(0.0004)
    ('99.9%', '100%', '0.1%')
    """
    value = 100 * share
    if 0 < value < 100:
        value = min(max(round(value, 1), 0.1), 99.9)
    return f"{value:g}%"


def short(value: float | None) -> str:
    """Return a number with three digits; nothing for None."""
    return "" if value is None else f"{value:.3g}"
