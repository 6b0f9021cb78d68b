"""What a member may say about its own errors: a code out of this table.

With `server-behind` goes the member's last round; nothing else leaves it.

The sentences of our errors name files, columns and values, which are the member's own. They go to
the member's log. The server is told a code, and shows the sentence that this table has for it.
"""

from __future__ import annotations

import errno

from fedproto.errors import (
    BudgetSpent,
    ConfigError,
    DataError,
    MessageError,
    MissingExtra,
    ProtectionTooWeak,
    Refused,
    RefusedByMember,
    RunFolderError,
    ServerBehind,
    TrainingError,
    WriteError,
)

SERVER_BEHIND = "server-behind"
SENTENCES = {
    "budget-spent": "its privacy budget for a year would be exceeded",
    "config-unusable": "its own settings cannot be used",
    "data-unusable": "its data cannot be used",
    "disk-full": "its disk is full",
    "internal-error": "it failed for a reason that is in its own log",
    "message-unusable": "it cannot use the server's message",
    "package-missing": "it lacks a Python package",
    "protection-too-weak": "its own settings demand more protection than was asked for",
    "refused-by-member": "its own settings do not allow what was asked",
    "server-behind": "it has trained a later round than the server asks for",
    "state-unusable": (
        "its saved state is corrupted, in use, or belongs to another member or federation"
    ),
    "state-unwritable": "it cannot write its state",
    "training-failed": "its training broke down",
    "unreachable": "Flower cannot reach it",
    "app-failed": "Flower could not run its app",
}

#: The first class that fits decides, so a subclass stands before its base.
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (BudgetSpent, "budget-spent"),
    (ProtectionTooWeak, "protection-too-weak"),
    (RefusedByMember, "refused-by-member"),
    (MessageError, "message-unusable"),
    (Refused, "message-unusable"),
    (WriteError, "state-unwritable"),
    (ServerBehind, SERVER_BEHIND),
    (RunFolderError, "state-unusable"),
    (TrainingError, "training-failed"),
    (ConfigError, "config-unusable"),
    (DataError, "data-unusable"),
    (MissingExtra, "package-missing"),
)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def choose_code(error: BaseException) -> str:
    """Return the code that leaves a member instead of this error."""
    if _is_disk_full(error):
        return "disk-full"
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return "internal-error"


def describe_error(error: BaseException) -> dict[str, str | int]:
    """Return what leaves a member instead of this error, for the header of its reply."""
    told: dict[str, str | int] = {"error": choose_code(error)}
    if isinstance(error, ServerBehind):
        told["trained"] = error.trained
    return told


def describe_code(code: object) -> str:
    """Return `code: sentence`.

    An unknown code is not repeated, since a member may write anything there.
    """
    if isinstance(code, str) and code in SENTENCES:
        return f"{code}: {SENTENCES[code]}"
    return "it reported an error with an unknown code"


def _is_disk_full(error: BaseException | None) -> bool:
    """Return whether a full disk is among the causes of an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        error = error.__cause__
    return False
