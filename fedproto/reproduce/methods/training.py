"""Makes the table of methods: tunes, or runs what is missing until the time is up, then writes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from fedproto.core.files import write_atomically
from fedproto.errors import RunFolderError
from fedproto.reproduce.make import OpenReporter, refuse_foreign_files
from fedproto.reproduce.methods.benchmark import (
    TARGET,
    BenchmarkRun,
    plan_groups,
    read_benchmark,
)
from fedproto.reproduce.methods.gathering import gather
from fedproto.reproduce.methods.page import render_page
from fedproto.reproduce.methods.records import Records
from fedproto.reproduce.methods.tuning import count_trials, read_tuned, tune_methods
from fedproto.reproduce.plan import Request
from fedproto.runs.sweep import Cell, run_groups
from fedproto.runs.tune.search import OpenReporter as OpenSearchReporter

#: An archive is written anew as a whole, and workers wait meanwhile.
SECONDS_BETWEEN_ARCHIVES = 20

Only = Mapping[str, Sequence[str]]
#: Is told a sentence on how far the table is.
Say = Callable[[str], None]


def deadline_after(minutes: float | None) -> Callable[[], bool]:
    """Return what says whether so many minutes have passed since now; None: they never have."""
    started = time.monotonic()
    return lambda: minutes is not None and time.monotonic() - started >= 60 * minutes


def tune_all(
    request: Request,
    only: Only,
    out: Path,
    minutes: float | None,
    open_reporter: OpenSearchReporter,
    size: str | None = None,
    jobs: int = 1,
) -> Iterator[str]:
    """Choose the settings of the methods asked for; yield a sentence after each search."""
    benchmark = read_benchmark(request, only, size)
    is_over = deadline_after(minutes)
    for dataset, method in tune_methods(benchmark, out, open_reporter, is_over, jobs):
        yield f"{method} is tuned on {dataset}"


def make_methods(
    request: Request,
    only: Only,
    out: Path,
    archive: Path | None,
    minutes: float | None,
    open_reporter: OpenReporter | None,
    say: Say,
    size: str | None = None,
    jobs: int = 1,
) -> Iterator[Path]:
    """Run what is missing of the part that is asked for; write all that is finished.

    Without a reporter nothing is run. No group is begun once the minutes have passed. Without a
    size, all of the benchmark is meant, or its quick version if the request is for that. `jobs`
    processes share the groups.
    """
    benchmark = read_benchmark(request, only, size)
    stem = benchmark.stem
    tuned = read_tuned(out, stem) if benchmark.is_tuned else {}
    groups = plan_groups(benchmark, tuned, finished=open_reporter is None)
    refuse_foreign_files(out, stem)
    records = Records(out / "runs", stem)
    if archive is not None and archive.exists():
        records.unpack(archive)
    if open_reporter is not None:
        _run_groups(groups, records, archive, deadline_after(minutes), open_reporter, jobs)
        runs = [run for group in groups for run in group]
        finished = [run for run in runs if records.find(run) is not None]
        if len(finished) < len(runs):
            say(f"{len(finished):,} of {len(runs):,} federations are finished; run it again")
    # The page shows all finished runs, also those that were not asked for this time.
    whole = read_benchmark(replace(request, methods=(), seeds=None), size=size)
    planned = []
    for group in plan_groups(whole, tuned, finished=True):
        planned += group
    content = gather(whole, planned, records, count_trials(out, stem) if whole.is_tuned else 0)
    if not content["cells"]:
        raise RunFolderError(f"{records.folder} holds no finished run of {TARGET}")
    texts = {
        f"{stem}.json": json.dumps(content) + "\n",
        f"{stem}.md": render_page(content),
    }
    for name, text in texts.items():
        write_atomically(out / name, text.encode())
        yield out / name
    if find_spec("matplotlib") is not None:
        from fedproto.reproduce.pictures.methods import draw_datasets

        yield from draw_datasets(content, out, stem)


def _run_groups(
    groups: Sequence[Sequence[BenchmarkRun]],
    records: Records,
    archive: Path | None,
    is_over: Callable[[], bool],
    open_reporter: OpenReporter,
    jobs: int,
) -> None:
    """Run what has no record yet, group by group, and archive the records now and then.

    A federation that diverged before is not tried again.
    """
    waiting: list[list[Cell]] = []
    runs: dict[str, BenchmarkRun] = {}
    for group in groups:
        missing = [run for run in group if records.find(run) is None]
        if missing:
            waiting.append([run.cell for run in missing])
        runs |= {run.cell.name: run for run in missing}

    packed = time.monotonic()

    def keep(cells: Sequence[Cell]) -> None:
        nonlocal packed
        for cell in cells:
            records.keep(runs[cell.name])
        if archive is not None and time.monotonic() - packed > SECONDS_BETWEEN_ARCHIVES:
            records.pack(archive)
            packed = time.monotonic()

    cells = [cell for group in waiting for cell in group]
    with open_reporter(cells, records.runs) as reporter:
        try:
            keep(cells)  # what an earlier call finished, but did not keep
            run_groups(waiting, records.runs, reporter.batch, reporter.broken, jobs, keep, is_over)
        finally:
            if archive is not None and records.folder.exists():
                records.pack(archive)
