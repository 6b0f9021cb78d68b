"""The page of an audit: what was found, in tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedproto.audit.attacks import Audit
from fedproto.audit.figures.curves import draw_counts, draw_curves, list_curves
from fedproto.audit.figures.images import draw_inversions, draw_reconstructions
from fedproto.audit.membership import THREATS
from fedproto.plots.style import figure_style
from fedproto.report.configuration import Block
from fedproto.report.figures.figure import Figure, Section
from fedproto.report.page import Report
from fedproto.report.summary import Cell, Table, join_names

HEADINGS = {
    "classes": "Classes and counts",
    "reconstruction": "Images from prototypes",
    "gradients": "Images from updates",
    "membership": "Membership",
}


def make_page(audits: Sequence[Audit], settings: Sequence[str]) -> Report:
    """Return the page on some audited runs; `settings` are their configurations as TOML."""
    names = [audit.name for audit in audits]
    with figure_style():
        sections = [
            _describe_classes(audits),
            _describe_reconstruction(audits),
            _describe_gradients(audits),
            _describe_membership(audits),
        ]
    blocks = []
    for name, text in zip(names, settings, strict=True):
        blocks.append(Block(name, settings=text))
    return Report(
        title=f"Audit of {join_names(names)}",
        summary="What attackers learn about the clients' data, measured on runs that are finished.",
        table=make_summary(audits),
        notes=[
            "An attack that fails here is no proof: others may succeed. A success is one.",
            "Every number is of the attacker that its section describes, who may know more than "
            "yours.",
        ],
        sections=[section for section in sections if section.figures or section.notes],
        configuration=blocks,
    )


def make_summary(audits: Sequence[Audit]) -> Table:
    """Return one row per run with the strongest result of each attack."""
    header = [
        "run",
        "protection",
        "classes read",
        "rank of the client's image",
        "PSNR from an update",
        "true positives at 1% false",
        "epsilon at least",
    ]
    return Table(header, [_summarise(audit) for audit in audits])


def _summarise(audit: Audit) -> list[Cell]:
    """Return the row of a run."""
    return [
        Cell(audit.name),
        Cell(_name_protection(audit)),
        _summarise_classes(audit),
        _summarise_reconstruction(audit),
        _summarise_gradients(audit),
        *_summarise_membership(audit),
    ]


NOTHING = Cell("–")


def _name_protection(audit: Audit) -> str:
    algorithm = audit.about["algorithm"]
    return f"{algorithm}; {audit.about['protection']}"


def _summarise_classes(audit: Audit) -> Cell:
    found = audit.found.get("classes")
    if found is None:
        return NOTHING
    return Cell(f"{found['right_classes']:.1%}", f"guessing: {found['guessing']:.1%}")


def _summarise_reconstruction(audit: Audit) -> Cell:
    found = audit.found.get("reconstruction")
    if found is None:
        return NOTHING
    baseline, *attackers = found["attackers"]
    best = min(attackers, key=lambda each: each["all"]["rank"])
    detail = f"class name: {baseline['all']['rank']:.1f}"
    return Cell(f"{best['all']['rank']:.1f} of {best['all']['candidates']:.0f}", detail)


def _summarise_gradients(audit: Audit) -> Cell:
    found = audit.found.get("gradients")
    if found is None:
        return NOTHING
    best = max(found["cases"], key=lambda case: case["psnr"] - case["baseline_psnr"])
    detail = f"class name: {best['baseline_psnr']:.1f}, {best['case']}"
    return Cell(f"{best['psnr']:.1f} dB", detail)


def _summarise_membership(audit: Audit) -> list[Cell]:
    found = audit.found.get("membership")
    if found is None:
        return [NOTHING, NOTHING]
    best = max(found["attackers"], key=lambda each: each["true_positives_at"]["0.01"]["value"])
    rate = best["true_positives_at"]["0.01"]
    return [
        Cell(
            f"{rate['value']:.1%}", f"{rate['low']:.1%} to {rate['high']:.1%}, {best['attacker']}"
        ),
        _summarise_epsilon(audit),
    ]


def _summarise_epsilon(audit: Audit) -> Cell:
    """Return the largest lower bound on epsilon, of what is claimed to be private if anything is.

    Beside it is what is claimed of the federations that were attacked.
    """
    attackers = audit.found["membership"]["attackers"]
    covered = [each for each in attackers if each["promised"] is not None]
    strongest = max(covered or attackers, key=lambda each: each["epsilon_at_least"])
    detail = strongest["attacker"]
    if covered:
        unit = audit.about["claim"]["unit"]
        detail = f"claimed: {strongest['promised']:.3g}, {unit}; {detail}"
    return Cell(f"{strongest['epsilon_at_least']:.2f}", detail)


# --- sections


def _left_out(audits: Sequence[Audit], attack: str) -> list[str]:
    """Return a sentence for each run on which the attack could not be tried."""
    missing = [audit for audit in audits if attack in audit.left_out]
    return [f"{audit.name}: {audit.left_out[attack]}." for audit in missing]


def _with(audits: Sequence[Audit], attack: str) -> list[Audit]:
    return [audit for audit in audits if attack in audit.found]


def _describe_classes(audits: Sequence[Audit]) -> Section:
    chosen = _with(audits, "classes")
    rows = []
    for audit in chosen:
        found = audit.found["classes"]
        error = found["count_error"]
        rows.append(
            [
                Cell(audit.name),
                Cell(found["how"]),
                Cell(f"{found['right_classes']:.1%}"),
                Cell(f"{found['guessing']:.1%}"),
                Cell(f"{found['exact_clients']:.1%}"),
                Cell("–" if error is None else f"{error:.2f}"),
            ]
        )
    header = [
        "run",
        "read from",
        "pairs of client and class right",
        "by guessing",
        "clients whose list is right",
        "mean error of a count",
    ]
    notes = [chosen[0].found["classes"]["threat"]] if chosen else []
    counts = draw_counts(chosen)
    figures = [] if counts is None else [counts]
    notes += _left_out(audits, "classes")
    return Section(HEADINGS["classes"], figures, notes, Table(header, rows) if rows else None)


def _describe_reconstruction(audits: Sequence[Audit]) -> Section:
    chosen = _with(audits, "reconstruction")
    rows = []
    figures: list[Figure] = []
    for audit in chosen:
        figures.append(draw_reconstructions(audit, len(figures) + 1))
        for attacker in audit.found["reconstruction"]["attackers"]:
            for which, label in (("all", "all"), ("one_image", "one image")):
                if attacker[which] is not None:
                    rows.append(_reconstruction_row(audit, attacker, which, label))
    header = [
        "run",
        "attacker",
        "classes",
        "PSNR, nearest image",
        "SSIM, nearest image",
        "PSNR, mean image",
        "rank of the nearest",
        "identified",
    ]
    notes = []
    if chosen:
        notes += list(chosen[0].found["reconstruction"]["threat"].values())
        notes.append(
            "Nearest and mean image are those of the client's own images of the class. The rank is "
            "that of the client's nearest image among about a hundred images of the class, "
            "beginning with 0; a client is identified at rank 0."
        )
    notes += _left_out(audits, "reconstruction")
    table = Table(header, rows) if rows else None
    return Section(HEADINGS["reconstruction"], figures, notes, table)


def _reconstruction_row(
    audit: Audit, attacker: dict[str, Any], which: str, label: str
) -> list[Cell]:
    means = attacker[which]
    return [
        Cell(audit.name),
        Cell(attacker["attacker"]),
        Cell(f"{label} ({means['targets']})"),
        Cell(f"{means['psnr_own']:.1f}"),
        Cell(f"{means['ssim_own']:.2f}"),
        Cell(f"{means['psnr_mean']:.1f}"),
        Cell(f"{means['rank']:.1f} of {means['candidates']:.0f}"),
        Cell(f"{means['identified']:.0%}"),
    ]


def _describe_gradients(audits: Sequence[Audit]) -> Section:
    chosen = _with(audits, "gradients")
    rows = []
    figures = []
    for number, audit in enumerate(chosen, 1):
        for case in audit.found["gradients"]["cases"]:
            figures.append(draw_inversions(audit, case["case"], number))
            images = case["images"]
            count = str(images[0]) if len(images) == 1 else f"{images[0]} to {images[-1]}"
            rows.append(
                [
                    Cell(audit.name),
                    Cell(case["case"]),
                    Cell(count),
                    Cell(f"{case['psnr']:.1f}"),
                    Cell(f"{case['baseline_psnr']:.1f}"),
                    Cell(f"{case['ssim']:.2f}"),
                    Cell(f"{case['baseline_ssim']:.2f}"),
                ]
            )
    header = ["run", "update of", "images", "PSNR", "class name", "SSIM", "class name"]
    notes = [chosen[0].found["gradients"]["threat"]] if chosen else []
    notes += _left_out(audits, "gradients")
    return Section(HEADINGS["gradients"], figures, notes, Table(header, rows) if rows else None)


def _describe_membership(audits: Sequence[Audit]) -> Section:
    chosen = _with(audits, "membership")
    rows = []
    for audit in chosen:
        attackers = audit.found["membership"]["attackers"]
        rows += [_membership_row(audit, found) for found in attackers]
    drawn = [attacker for attacker in THREATS if list_curves(chosen, attacker)]
    figures = [draw_curves(chosen, attacker) for attacker in drawn]
    header = [
        "run",
        "from the",
        "area under the curve",
        "true positives at 0.1% false",
        "at 1% false",
        "advantage",
        "epsilon at least",
        "claimed",
    ]
    notes = []
    if chosen:
        notes += [_describe_trials(audit) for audit in chosen]
        notes.append(
            "Intervals are Clopper-Pearson's at 95%, as if trials were independent; those of one "
            "federation share its models. The lower bound on epsilon (add or remove one record, "
            "delta 0, 95%) holds without that: Steinke, Nasr and Jagielski, 2023."
        )
    if any(audit.about["claim"] is not None for audit in chosen):
        notes.append(
            "Claimed is the largest epsilon of any client of the attacked federations, whose noise "
            "is the run's, but whose clients have other numbers of records. These numbers are "
            "taken to be public, and depend on the coins. – means that the run claims nothing "
            "about what this attacker sees."
        )
    notes += _left_out(audits, "membership")
    return Section(HEADINGS["membership"], figures, notes, Table(header, rows) if rows else None)


def _describe_trials(audit: Audit) -> str:
    """Return how the membership of records was attacked."""
    found = audit.found["membership"]
    return (
        f"{audit.name}: {found['federations']} federations of {found['rounds']} rounds, in each of "
        f"which a fair coin decides about each of {found['records']} records; {found['shadows']} "
        "are the attacker's shadows, the others are attacked."
    )


def _membership_row(audit: Audit, found: dict[str, Any]) -> list[Cell]:
    rates = found["true_positives_at"]
    cells = [Cell(audit.name), Cell(found["attacker"]), Cell(f"{found['area']:.3f}")]
    for level in ("0.001", "0.01"):
        rate = rates[level]
        detail = f"{rate['low']:.2%} to {rate['high']:.2%}"
        cells.append(Cell(f"{rate['value']:.2%}", detail))
    advantage = found["advantage"]
    detail = f"{advantage['low']:+.3f} to {advantage['high']:+.3f}"
    cells.append(Cell(f"{advantage['value']:+.3f}", detail))
    cells.append(Cell(f"{found['epsilon_at_least']:.2f}"))
    promised = found["promised"]
    cells.append(NOTHING if promised is None else Cell(f"{promised:.3g}"))
    return cells
