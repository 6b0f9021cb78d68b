"""`fedproto.members` and `fedproto.extend`: clients that come and go, from Python."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from fedproto.core.files import explain_write_errors
from fedproto.errors import ConfigError
from fedproto.membership import extend as extension
from fedproto.membership.contribution import Contribution
from fedproto.membership.membership import Membership
from fedproto.membership.teachers import describe_newcomers, solve_without_leavers
from fedproto.runs.announcements import announce_rounds
from fedproto.runs.execution import OnRound
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import read_prototypes, write_prototypes
from fedproto.runs.result import Result
from fedproto.runs.teacher_files import TEACHER_FILE, write_teacher


def members(
    run: str | Path,
    *,
    add: Sequence[str | Path] = (),
    remove: Sequence[str] = (),
    write: str | Path | None = None,
) -> Membership:
    """Return who contributed to a federation's prototypes, after members joined and left.

    `members(run).members` are the names, and `.held_by(name)` the classes of one of them.

    Args:
        run: the folder of a finished run of fedproto.
        add: newcomers to fold in: their run folders, or the files they sent.
        remove: names of members that leave.
        write: a new file for the global prototypes, and nothing else, as a newcomer needs them.
    """
    if write is not None:
        refuse_target(Path(write), Path(run))
    membership = change_members(Path(run), [Path(path) for path in add], remove)
    for notice in list_notices(Path(run), membership):
        warnings.warn(notice, stacklevel=2)
    if write is not None:
        write_global_prototypes(Path(run), Path(write))
    return membership


def change_members(run: Path, add: Sequence[Path], remove: Sequence[str]) -> Membership:
    """Let members leave and join, save that if anybody does, and return who is there now."""
    folder = RunFolder.open(run)
    is_change = bool(add or remove)
    with folder.hold() if is_change else nullcontext():
        membership = Membership.of(folder)
        for name in remove:
            membership = membership.without(name)
        for path in add:
            membership = membership.with_member(Contribution.load(path))
        if is_change:
            teacher = solve_without_leavers(folder, membership)
            if teacher is not None:
                write_teacher(folder.path / TEACHER_FILE, teacher)
            membership.save(folder)
    return membership


def list_notices(run: Path, membership: Membership) -> list[str]:
    """Return what the user should know about the members of a run."""
    return [*membership.notices(), *describe_newcomers(RunFolder.open(run), membership)]


def refuse_target(path: Path, run: Path) -> None:
    """Refuse a file that exists, or that would be taken for one of the run's own."""
    if path.exists():
        raise ConfigError(f"{path} exists already: name another file")
    if path.resolve().parent == run.resolve():
        raise ConfigError(f"{path} is in the run folder: name a file outside of it")


def write_global_prototypes(run: Path, path: Path) -> None:
    """Write a run's present global prototypes, without what single members sent."""
    shared = read_prototypes(run)
    tensors = {"prototypes": shared.values, "known": shared.known}
    with explain_write_errors(path):
        write_prototypes(path, tensors, shared.classes)


def extend(
    run: str | Path,
    newcomers: Sequence[str | Path] = (),
    *,
    out: str | Path,
    rounds: int = 10,
    on_round: OnRound | None = None,
    progress: bool = False,
) -> Result:
    """Continue to train a federation with its newcomers, and without members that left.

    Args:
        run: the folder of a finished run of fedproto.
        newcomers: the run folders of `fedproto.join`.
        out: a new folder for the run.
        rounds: number of further rounds.
        on_round: is called with the result of each round.
        progress: print a line to stderr for each evaluated round.
    """
    paths = [Path(path) for path in newcomers]
    experiment, folder = extension.extend(Path(run), paths, Path(out), rounds)
    for notice in experiment.notices:
        warnings.warn(notice, stacklevel=2)
    return experiment.execute(
        folder, announce_rounds(experiment.algorithm.name, on_round, progress=progress)
    )
