"""Make a target: run what is missing, then write its numbers, page and figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from fedproto.core.files import read_json, write_atomically
from fedproto.errors import FedProtoError, RunFolderError, need
from fedproto.reproduce.archive import pack, unpack
from fedproto.reproduce.plan import PlannedRun, Request, Spec, plan, read_spec, targets
from fedproto.reproduce.probes import probe_models
from fedproto.reproduce.table_page import render_page
from fedproto.reproduce.tables import gather
from fedproto.reproduce.verdict_page import render_verdicts
from fedproto.runs.execution import OnRound
from fedproto.runs.folder import RunFolder
from fedproto.runs.sweep import Cell, run_groups


class ProgressReporter(Protocol):
    """Tells a person how the runs of a target proceed."""

    def batch(self, cells: Sequence[Cell], done: int, notices: Sequence[str]) -> OnRound:
        """Announce cells that are trained together, of which `done` rounds were done before.

        Returns the function that is called with the result of each round.
        """
        ...

    def broken(self, cell: Cell, error: FedProtoError) -> None:
        """Report that the training of a cell broke down."""
        ...


#: Opens the reporter for a target's cells, which are run in a folder.
OpenReporter = Callable[[Sequence[Cell], Path], AbstractContextManager[ProgressReporter]]

ALL = "all"
VERDICTS = "verdicts"
#: How the command begins that every JSON file and the page of verdicts name.
COMMAND = "fedproto reproduce"
#: The endings of a target's files.
ENDINGS = (".json", ".md", ".csv", ".png", "-measures.json")


def make(
    target: str,
    request: Request,
    out: Path,
    archive: Path | None,
    open_reporter: OpenReporter | None,
    jobs: int = 1,
) -> Iterator[Path]:
    """Make a target, or all of them; yield each file once it is written.

    Without a reporter nothing is run: pages are made of what is finished. Finished cells are taken
    from the archive, if one is given, and added to it. Everything that can be refused is refused
    before the first run. `jobs` processes share the runs.
    """
    has_verdicts = target in (ALL, VERDICTS)
    finished_only = open_reporter is None
    names = _list_specs(target)
    if any(name.startswith("fig-") for name in names):
        need("matplotlib", "'.[plots]'", "a figure")
    specs = [read_spec(name, request) for name in names]
    plans = [plan(spec, finished_only) for spec in specs]
    for name in names:
        refuse_foreign_files(out, name)
    if has_verdicts:
        _refuse_foreign_verdicts(out)

    runs = out / "runs"
    if archive is not None and archive.exists():
        unpack(archive, runs)
    for spec, planned in zip(specs, plans, strict=True):
        if open_reporter is not None:
            _run_missing(spec, planned, runs, archive, open_reporter, jobs)
        if request.methods or request.seeds:
            # A page shows all finished runs, also those that were not asked for this time.
            spec = read_spec(spec.name, replace(request, methods=(), seeds=None))
            planned = plan(spec, finished_only)
        yield from _write_target(spec, planned, request, out)
    if has_verdicts:
        yield from _write_verdicts(out)


def _list_specs(target: str) -> list[str]:
    """Return the names of a target's specs; the verdicts have none of their own."""
    if target == ALL:
        return targets()
    if target == VERDICTS:
        return []
    return [target]


# --- files that somebody else wrote


def refuse_foreign_files(out: Path, name: str) -> None:
    """Raise RunFolderError if there are files named like a target's that `reproduce` did not write.

    Its own are known by the target's JSON file, which names the command that made it.
    """
    paths = [out / f"{name}{ending}" for ending in ENDINGS]
    existing = [path for path in paths if path.exists()]
    if existing and not _is_made_by_reproduce(out / f"{name}.json"):
        raise _foreign_file_error(existing[0])


def _is_made_by_reproduce(path: Path) -> bool:
    """Return whether a JSON file names our command as the one that made it."""
    try:
        content = read_json(path)
    except RunFolderError:
        return False
    return isinstance(content, dict) and str(content.get("command")).startswith(COMMAND)


def _refuse_foreign_verdicts(out: Path) -> None:
    """Raise RunFolderError if there is a page of verdicts that `reproduce` did not write."""
    path = out / "VERDICTS.md"
    if not path.exists():
        return
    if path.is_dir() or COMMAND.encode() not in path.read_bytes():
        raise _foreign_file_error(path)


def _foreign_file_error(path: Path) -> RunFolderError:
    """Return the error for a file that is in the way."""
    return RunFolderError(
        f"{path} exists already and was not written by `fedproto reproduce`: "
        "move it away, or name another folder with --out"
    )


# --- running


def _run_missing(
    spec: Spec,
    planned: Sequence[PlannedRun],
    runs: Path,
    archive: Path | None,
    open_reporter: OpenReporter,
    jobs: int,
) -> None:
    """Run all cells that are not finished, and probe their models.

    Cells of one row are trained together at most, so that finished rows are kept and archived
    whatever happens later.
    """
    folder = runs / spec.name
    all_cells = [each.cell for each in planned]
    rows: dict[str, list[Cell]] = {}
    for each in planned:
        rows.setdefault(each.row.name, []).append(each.cell)

    def finish(cells: Sequence[Cell]) -> None:
        for cell in cells:
            path = folder / cell.name
            if path.exists() and RunFolder.open(path).result() is not None:
                _finish_cell(RunFolder.open(path), spec)
        if archive is not None:
            pack(archive, runs)

    with open_reporter(all_cells, folder) as reporter:
        finish(all_cells)
        run_groups(list(rows.values()), folder, reporter.batch, reporter.broken, jobs, finish)


def _finish_cell(folder: RunFolder, spec: Spec) -> None:
    """Make the spec's probes of a finished run, or delete its checkpoint if it has none."""
    if spec.after:
        with folder.hold():
            probe_models(folder, spec.after)
    elif folder.has_checkpoint():
        with folder.hold():
            folder.drop_checkpoints()


# --- writing


def _write_target(
    spec: Spec, planned: Sequence[PlannedRun], request: Request, out: Path
) -> Iterator[Path]:
    """Write the JSON, the page and the figure of all planned runs that are finished."""
    name = spec.name
    runs = out / "runs" / name
    content = gather(spec, planned, runs, _name_command(name, request))
    if not any(cell["runs"] for cell in content["cells"]):
        raise RunFolderError(
            f"{runs} holds no finished run of {name}: leave out --finished to run it"
        )
    texts = {f"{name}.json": json.dumps(content) + "\n", f"{name}.md": render_page(content)}
    yield from _write_texts(texts, out)
    yield from _draw_figure(name, content, out)


def _name_command(name: str, request: Request) -> str:
    """Return the command that makes the target with the same version and rounds."""
    command = f"{COMMAND} {name}"
    if request.quick:
        command += " --quick"
    if request.rounds:
        command += f" --rounds {request.rounds}"
    return command


def _draw_figure(name: str, content: dict[str, Any], out: Path) -> Iterator[Path]:
    """Draw the figure; a table or study is complete without it, so matplotlib is not required."""
    if find_spec("matplotlib") is not None:
        from fedproto.reproduce.pictures import draw

        yield from draw(name, content, out, out / "runs" / name)


def _write_verdicts(out: Path) -> Iterator[Path]:
    """Judge the claims by the targets in the folder, and write the page and the CSV."""
    if not out.is_dir():
        raise RunFolderError(
            f"{out} does not exist: make some tables first, or name their folder with --out"
        )
    yield from _write_texts(render_verdicts(out), out)


def _write_texts(texts: dict[str, str], out: Path) -> Iterator[Path]:
    """Write files atomically; yield the path of each once it is written."""
    for name, text in texts.items():
        path = out / name
        write_atomically(path, text.encode())
        yield path
