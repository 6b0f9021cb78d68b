"""The teacher of a run whose members come and go.

A teacher is solved from sums that every client has sent once, and the checkpoint of a run keeps
those of each client apart. So a member that leaves is gone exactly. A newcomer, which joins by
prototypes, has sent none: the teacher hears of its rows when all train on with `extend`.
"""

from __future__ import annotations

import torch

from fedproto.config import plugins
from fedproto.core.class_names import list_names
from fedproto.core.closed_form import TEACHER
from fedproto.core.server import ONCE
from fedproto.core.tensors import select_rows, split_groups, unflatten_state
from fedproto.core.types import SentOnce
from fedproto.core.uploads import LatestUploads
from fedproto.errors import RunFolderError
from fedproto.membership.membership import Membership, read_choice
from fedproto.runs.composition import add_teacher
from fedproto.runs.folder import RunFolder
from fedproto.runs.teacher_files import (
    TEACHER_FILE,
    SolvedTeacher,
    read_teacher,
    without_clients,
)


def solve_without_leavers(folder: RunFolder, membership: Membership) -> SolvedTeacher | None:
    """Return the run's teacher as if those that have left had sent nothing; None if it has none.

    Raises RunFolderError if the checkpoint has no sums, and ConfigError where what remains cannot
    be solved.
    """
    teacher = read_teacher(folder.path)
    if teacher is None or set(teacher.left) == membership.left():
        return teacher
    checkpoint = folder.load_checkpoint()
    groups = {} if checkpoint is None else split_groups(checkpoint[1])
    if checkpoint is None or ONCE not in groups:
        raise RunFolderError(f"{folder.path} has no checkpoint with the sums of its teacher")
    try:
        once = LatestUploads.restore(groups[ONCE])
    except ValueError as error:
        raise RunFolderError(f"the checkpoint of {folder.path} is corrupted: {error}") from error
    numbers = set(membership.members.values())
    stayed = torch.tensor([client for client in once.clients() if client in numbers])
    algorithm = plugins.build("algorithm", membership.algorithm)
    algorithm = add_teacher(algorithm, read_choice(folder, TEACHER))
    assert algorithm.aggregate_once is not None and once.uploads is not None
    sent_once = SentOnce(select_rows(once.uploads, stayed.long()), stayed.long(), checkpoint[0])
    server = unflatten_state(groups["server"])
    solved = algorithm.aggregate_once({TEACHER: server[TEACHER]}, sent_once)[TEACHER]
    assert isinstance(solved, dict), "the teacher's part of a server's state is a tree"
    return without_clients(teacher, solved, sorted(membership.left()))


def describe_newcomers(folder: RunFolder, membership: Membership) -> list[str]:
    """Return a sentence about members whose rows the run's teacher does not know, if any."""
    added = list(membership.added())
    if not added or not (folder.path / TEACHER_FILE).exists():
        return []
    return [
        f"the teacher of {folder.path} knows nothing of the rows of {list_names(added)}, which "
        "joined by prototypes: `fedproto extend` solves it for all"
    ]
