"""Finished runs as one page: tables, figures, configuration. Everything is read from the run folders alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedproto.core.files import write_atomically
from fedproto.errors import ConfigError, RunFolderError, need
from fedproto.report.ownership import refuse_foreign, replace_own

GENERATOR = '<meta name="generator" content="fedproto report">'


def write(
    runs: Sequence[str | Path], out: str | Path | None = None, notice: Callable[[str], None] = print
) -> Path:
    """Write FILE.html, its twin FILE.md and the folder FILE-figures of PNG and CSV files; gives the page's path.

    Files that no report wrote are kept; where one of them is in the way, nothing is written. `runs` are run folders or
    folders of them. `notice` is told what was left out, a sentence each.
    """
    if not runs:
        raise ConfigError("a report needs a run: name the folder of one, or several")
    from fedproto.report.read import group, read_all

    paths = [Path(run) for run in runs]
    page = _page(paths, out)
    found, left_out = read_all(paths)
    for sentence in left_out:
        notice(sentence)
    need("matplotlib", "'fedproto[plots]'", "a report")
    from fedproto.report.figures import draw
    from fedproto.report.page import html, markdown, report_of

    report = report_of(group(found), left_out, draw)
    _write_files(
        page, html(report, GENERATOR), markdown(report, _figures(page).name), report.figures
    )
    return page


def _page(runs: Sequence[Path], out: str | Path | None) -> Path:
    """Where the page goes; what is there already is replaced only if it is a report."""
    target = Path(out) if out is not None else runs[0] if len(runs) == 1 else Path()
    page = target if target.suffix.lower() in (".html", ".htm") else target / "report.html"
    if page.is_dir() or (page.exists() and GENERATOR.encode() not in page.read_bytes()[:2000]):
        raise RunFolderError(
            f"{page} is there already and is not a report: name another file with --out"
        )
    return page


def _figures(page: Path) -> Path:
    return page.with_name(f"{page.stem}-figures")


def _write_files(page: Path, html: str, markdown: str, figures: Sequence) -> None:
    """The page last: where it is, everything it speaks of is there too."""
    files = {f"../{page.stem}.md": markdown.encode()}
    for figure in figures:
        files[f"{figure.name}.png"] = figure.png
        files[f"{figure.name}.csv"] = figure.csv.encode()
    try:
        refuse_foreign(_figures(page), files)
        replace_own(_figures(page), files)
        write_atomically(page, html.encode())
    except OSError as error:
        raise RunFolderError(
            f"{page} cannot be written: {error}; name another file with --out"
        ) from error
