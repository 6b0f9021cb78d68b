"""Attacks on finished runs: what a server, a member or an outsider learns about clients' data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedproto.audit.attacked_run import open_run
from fedproto.audit.attacks import ATTACKS, Audit, Effort, audit_run
from fedproto.errors import ConfigError, need, unknown
from fedproto.report import page_path, write_files

PAGE = "audit.html"
FORMAT = "audit"
VERSION = 1


def write(
    runs: Sequence[str | Path],
    out: str | Path | None = None,
    attacks: Sequence[str] = (),
    effort: Effort | None = None,
    notice: Callable[[str], None] = print,
) -> Path:
    """Attack finished runs, write what is found, and return the path of the page.

    FILE.html is accompanied by FILE.json with every number, FILE.md, and the folder FILE-figures of
    PNG and CSV files. A run is attacked as it is: with the noise, the secure sums and the other
    settings that it has. Runs with different settings are compared by naming them all.

    runs     finished run folders
    out      FILE.html, or the folder for an audit.html; by default the run, or the current folder
             if there are several runs
    attacks  some of ATTACKS; by default all that apply
    effort   how much is tried
    notice   called with a sentence before each attack
    """
    if not runs:
        raise ConfigError("an audit needs a run: name the folder of one, or several")
    for attack in attacks:
        if attack not in ATTACKS:
            raise unknown("attack", attack, ATTACKS)
    effort = effort or Effort()
    _refuse_little(effort)
    paths = [Path(run) for run in runs]
    page = page_path(paths, out, PAGE)
    names = _name_runs(paths)
    opened = [open_run(path, name) for path, name in zip(paths, names, strict=True)]
    need("matplotlib", "'.[plots]'", "an audit")
    audits = [audit_run(run, attacks or ATTACKS, effort, notice) for run in opened]
    _refuse_nothing(audits, attacks)
    from fedproto.audit.page import make_page
    from fedproto.report.markdown import render_markdown
    from fedproto.report.page import render_html

    report = make_page(audits, [(run.path / "config.toml").read_text() for run in opened])
    figure_folder = page.with_name(f"{page.stem}-figures")
    contents = json.dumps(describe_audits(audits), indent=1)
    files = {
        f"../{page.stem}.json": contents.encode(),
        f"../{page.stem}.md": render_markdown(report, figure_folder.name).encode(),
    }
    for figure in report.figures:
        files[f"{figure.name}.png"] = figure.png
        files[f"{figure.name}.csv"] = figure.csv.encode()
    write_files(page, render_html(report).encode(), figure_folder, files)
    return page


def describe_audits(audits: Sequence[Audit]) -> dict[str, Any]:
    """Return the content of the JSON file."""
    listed = [
        {"name": audit.name, **audit.about, "attacks": audit.found, "left_out": audit.left_out}
        for audit in audits
    ]
    return {"format": FORMAT, "version": VERSION, "runs": listed}


def _name_runs(paths: Sequence[Path]) -> list[str]:
    """Return the names of the run folders; whole paths where two are called alike."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise ConfigError("a run is named twice: name each run once")
    return names


def _refuse_little(effort: Effort) -> None:
    """Refuse an effort that cannot measure anything."""
    if effort.federations < 6:
        raise ConfigError(
            f"federations is {effort.federations}, but a membership attack needs 6 or more"
        )


def _refuse_nothing(audits: Sequence[Audit], attacks: Sequence[str]) -> None:
    """Refuse an attack that was asked for by name and applies to no run."""
    for attack in attacks:
        if all(attack in audit.left_out for audit in audits):
            first = audits[0]
            raise ConfigError(
                f"the attack {attack} does not apply to {first.name}: {first.left_out[attack]}"
            )
