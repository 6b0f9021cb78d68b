"""Runs and deployed federations as one page, with figures beside it; only folders are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedproto.core.files import write_atomically
from fedproto.errors import ConfigError, RunFolderError, need
from fedproto.report.ownership import refuse_foreign, replace_own

if TYPE_CHECKING:
    from fedproto.report.figures.figure import Section
    from fedproto.report.groups import Group

#: The tag of the template by which an earlier report is recognised, near the start of its page.
SIGNATURE = b'<meta name="generator" content="fedproto report">'
SIGNATURE_SEARCH_BYTES = 2000


def write(
    runs: Sequence[str | Path], out: str | Path | None = None, notice: Callable[[str], None] = print
) -> Path:
    """Write a report and return the path of its page.

    The page FILE.html is accompanied by FILE.md and by the folder FILE-figures of PNG and CSV
    files. Files that no report wrote are kept; if one of them would have to be replaced, nothing
    is written and a RunFolderError names it.

    runs    run folders, folders that contain run folders, or folders of deployed servers. Runs that
            have not finished are on the page, and not among the figures
    out     FILE.html, or the folder for a report.html; by default the run, or the current folder
            if there are several runs
    notice  called with a sentence for each run that has not finished
    """
    if not runs:
        raise ConfigError("a report needs a run: name the folder of one, or several")
    from fedproto.report.groups import group_runs
    from fedproto.report.read import describe_unfinished, find_sources, read_run

    paths = [Path(run) for run in runs]
    page = page_path(paths, out)
    sources = find_sources(paths)
    finished_runs = [read_run(folder) for folder in sources.finished]
    for folder in sources.unfinished:
        notice(describe_unfinished(str(folder)))
    from fedproto.report.markdown import render_markdown
    from fedproto.report.page import make_report, render_report
    from fedproto.watch.freeze import freeze

    groups = group_runs(finished_runs)
    sections = _draw(groups) if groups else []
    frozen = freeze([*sources.finished, *sources.unfinished], sources.servers)
    unfinished = [describe_unfinished(folder.name) for folder in sources.unfinished]
    report = make_report(groups, unfinished, sections, frozen)
    figure_folder = page.with_name(f"{page.stem}-figures")
    markdown = render_markdown(report, figure_folder.name)
    files = {f"../{page.stem}.md": markdown.encode()}
    for figure in report.figures:
        files[f"{figure.name}.png"] = figure.png
        files[f"{figure.name}.csv"] = figure.csv.encode()
    write_files(page, render_report(report, frozen).encode(), figure_folder, files)
    return page


def _draw(groups: list[Group]) -> list[Section]:
    """Return the figures of finished runs, by section."""
    need("matplotlib", "'.[plots]'", "a report")
    from fedproto.report import figures

    return figures.draw_sections(groups)


def page_path(runs: Sequence[Path], out: str | Path | None, name: str = "report.html") -> Path:
    """Return where the page goes; raise if something else than a report is there already.

    name  of the page where `out` is a folder, or None
    """
    if out is not None:
        target = Path(out)
    elif len(runs) == 1:
        target = runs[0]
    else:
        target = Path()
    is_page = target.suffix.lower() in (".html", ".htm")
    page = target if is_page else target / name
    if page.exists() and not _is_report(page):
        raise RunFolderError(
            f"{page} is there already and is not a report: name another file with --out"
        )
    return page


def _is_report(page: Path) -> bool:
    """Whether a page was written by `write`, which may then replace it."""
    if page.is_dir():
        return False
    return SIGNATURE in page.read_bytes()[:SIGNATURE_SEARCH_BYTES]


def write_files(page: Path, html: bytes, figure_folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the page last: where it exists, everything that it mentions exists, too."""
    try:
        refuse_foreign(figure_folder, files)
        replace_own(figure_folder, files)
        write_atomically(page, html)
    except OSError as error:
        raise RunFolderError(
            f"{page} cannot be written: {error}; name another file with --out"
        ) from error
