"""Run what a target still lacks, then write its table and figure."""

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
from fedproto.reproduce.plan import Narrowed, Planned, Spec, plan, read_spec, targets
from fedproto.reproduce.probes import look
from fedproto.reproduce.tables import gather, markdown
from fedproto.reproduce.verdict_page import write_verdicts
from fedproto.runs.experiment import OnRound
from fedproto.runs.folder import RunFolder
from fedproto.runs.sweep import Cell, run_sweep


class Teller(Protocol):
    """Tells a person how it goes."""

    def batch(self, cells: Sequence[Cell], done: int, notices: Sequence[str]) -> OnRound: ...

    def broken(self, cell: Cell, error: FedProtoError) -> None: ...


Bar = Callable[[Sequence[Cell], Path], AbstractContextManager[Teller]]


VERDICTS = "verdicts"
COMMAND = "fedproto reproduce"  # stands in every JSON file and in the page of verdicts


def named(target: str) -> list[str]:
    """The specs of a target; the verdicts have none of their own."""
    return targets() if target == "all" else [] if target == VERDICTS else [target]


def make(
    target: str, narrowed: Narrowed, out: Path, archive: Path | None, bar: Bar | None
) -> Iterator[Path]:
    """Make a target, or all; the files it wrote, one by one. Without a bar nothing is run, only shown."""
    runs = out / "runs"
    if any(name.startswith("fig-") for name in named(target)):
        need("matplotlib", "'fedproto[plots]'", "a figure")
    specs = [read_spec(name, narrowed) for name in named(target)]
    # Of all, before the first is run: what can be refused is refused now.
    plans = [plan(spec, finished=bar is None) for spec in specs]
    for spec in specs:
        _refuse_foreign(out, spec.name)
    if target in ("all", VERDICTS):
        _refuse_foreign_verdicts(out)
    if archive is not None and archive.exists():
        unpack(archive, runs)
    for spec, planned in zip(specs, plans, strict=True):
        if bar is not None:
            _run(spec, planned, runs, archive, bar)
        if narrowed.methods or narrowed.seeds:  # a page is never less than the runs there are
            spec = read_spec(spec.name, replace(narrowed, methods=(), seeds=None))
            planned = plan(spec, finished=bar is None)
        yield from write(spec, planned, narrowed, out)
    if target in ("all", VERDICTS):
        if not out.is_dir():
            raise RunFolderError(
                f"{out} does not exist: make some tables first, or name their folder with --out"
            )
        for name, text in write_verdicts(out).items():
            write_atomically(out / name, text.encode())
            yield out / name


def _refuse_foreign(out: Path, name: str) -> None:
    """Raise before anything is run where files of a target are there that `reproduce` did not write.

    What it wrote is known by its JSON file, which says by which command it was made.
    """
    endings = (".json", ".md", ".csv", ".png", "-measures.json")
    there = [out / f"{name}{ending}" for ending in endings if (out / f"{name}{ending}").exists()]
    if there and not _is_made_by_reproduce(out / f"{name}.json"):
        raise RunFolderError(
            f"{there[0]} is there already and was not written by `fedproto reproduce`: "
            "move it away, or name another folder with --out"
        )


def _is_made_by_reproduce(path: Path) -> bool:
    try:
        found = read_json(path)
    except RunFolderError:
        return False
    return isinstance(found, dict) and str(found.get("command")).startswith(COMMAND)


def _refuse_foreign_verdicts(out: Path) -> None:
    path = out / "VERDICTS.md"
    if path.exists() and (path.is_dir() or COMMAND.encode() not in path.read_bytes()):
        raise RunFolderError(
            f"{path} is there already and was not written by `fedproto reproduce`: "
            "move it away, or name another folder with --out"
        )


def _run(
    spec: Spec, planned: Sequence[Planned], runs: Path, archive: Path | None, bar: Bar
) -> None:
    """All cells, a row at a time, so that what is finished is kept whatever happens to the rest."""
    folder = runs / spec.name
    with bar([each.cell for each in planned], folder) as teller:
        for row in spec.rows:
            cells = [each.cell for each in planned if each.row is row]
            results = run_sweep(
                cells, folder, teller.batch, teller.broken, [each.cell for each in planned]
            )
            for cell, result in zip(cells, results, strict=True):
                if result is not None:
                    _close(RunFolder.open(folder / cell.name), spec)
            if archive is not None:
                pack(archive, runs)


def _close(folder: RunFolder, spec: Spec) -> None:
    """What is wanted of a finished run's models, and else their room."""
    if not spec.after and not folder.has_checkpoint():
        return
    with folder.hold():
        if spec.after:
            look(folder, spec.after)
        else:
            folder.drop_checkpoints()


def write(spec: Spec, planned: Sequence[Planned], narrowed: Narrowed, out: Path) -> Iterator[Path]:
    """The JSON, the Markdown and the figure of all that is finished."""
    name = spec.name
    said = " --quick" * narrowed.quick + (f" --rounds {narrowed.rounds}" if narrowed.rounds else "")
    found = gather(spec, planned, out / "runs" / name, f"{COMMAND} {name}{said}")
    if not any(cell["runs"] for cell in found["cells"]):
        raise RunFolderError(
            f"{out / 'runs' / name} holds no finished run of {name}: leave out --finished to run it"
        )
    for path, text in ((f"{name}.json", json.dumps(found) + "\n"), (f"{name}.md", markdown(found))):
        write_atomically(out / path, text.encode())
        yield out / path
    yield from _drawn(name, found, out)


def _drawn(name: str, found: dict[str, Any], out: Path) -> Iterator[Path]:
    """The figure; a table or study is complete without one, so it does not insist on matplotlib."""
    if find_spec("matplotlib") is not None:
        from fedproto.reproduce.pictures import draw

        yield from draw(name, found, out, out / "runs" / name)
