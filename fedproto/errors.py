"""Errors, as a tree. Each message is one sentence: what is wrong, where, and what is accepted.

FedProtoError
├── ConfigError      a name, key or value that cannot be used
├── DataError        a data file or array that cannot be used
│   ├── ColumnsError       columns of a table that tell rows apart instead of describing them
│   ├── ImageSizesError    images of several sizes, where all must have one
│   └── MessageError       a message of the server that a deployed member cannot use
├── RunFolderError   a run folder that is in the way, damaged, or not one
│   ├── WriteError         a file or folder that cannot be written (disk full, read-only, forbidden)
│   └── ServerBehind       a server that asks a member for a round before its last one
├── TrainingError    training broke down in a named round, client and stage
│   ├── DivergedError      a client's numbers are no longer finite
│   └── LostProcessError   one of several processes of a run is gone
├── Refused          an answer of a member that the server does not believe, or one of the server's
├── RefusedByMember  what the server asks for, and a member's own file does not allow
│   ├── BudgetSpent        it would exceed the member's privacy budget
│   └── ProtectionTooWeak  it protects less than the member demands
├── DoesNotApply     an attack that cannot be tried on a run
├── KnownToAllError  carries an error of one of several processes, once all of them know of it
└── MissingExtra     a Python package that is not installed
"""

import difflib
import importlib
import importlib.util
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


class FedProtoError(Exception):
    """Base of all errors meant for people; the command line prints it and exits with 2."""


class ConfigError(FedProtoError):
    pass


class DataError(FedProtoError):
    pass


class ColumnsError(DataError):
    def __init__(self, message: str, columns: tuple[str, ...]) -> None:
        super().__init__(message)
        self.columns = columns


class ImageSizesError(DataError):
    def __init__(self, message: str, sizes: list[tuple[int, int]]) -> None:
        super().__init__(message)
        self.sizes = sizes  # (height, width) of every file


class MessageError(DataError):
    pass


class RunFolderError(FedProtoError):
    pass


class WriteError(RunFolderError):
    pass


class ServerBehind(RunFolderError):
    def __init__(self, message: str, trained: int) -> None:
        super().__init__(message)
        self.trained = trained  # the member's last round


class TrainingError(FedProtoError):
    pass


class DivergedError(TrainingError):
    def __init__(self, message: str, round: int, client: int) -> None:
        super().__init__(message)
        self.round = round
        self.client = client


class LostProcessError(TrainingError):
    pass


class Refused(FedProtoError):
    pass


class RefusedByMember(FedProtoError):
    pass


class BudgetSpent(RefusedByMember):
    pass


class ProtectionTooWeak(RefusedByMember):
    pass


class DoesNotApply(FedProtoError):
    """Its text says why, without a stop, so that it can end a sentence."""


class KnownToAllError(FedProtoError):
    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class MissingExtra(FedProtoError):
    pass


def shown(value: object, most: int) -> str:
    """Somebody else's value in a sentence of ours: on one line, and short."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def locate(error: BaseException) -> str | None:
    """Return where somebody's own code failed, as in `mine.py, line 3`; None if only ours did.

    That is the innermost place outside fedproto, torch and Python's standard library.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_own_code(frame.filename):
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return None


def _is_own_code(filename: str) -> bool:
    """Return whether a source file belongs to a user: to a plug-in, a script or a session."""
    if filename.startswith(("<frozen", "<eval_with_key")):
        return False
    path = Path(filename)
    folders = [Path(__file__).parent]
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is not None and torch_spec.origin is not None:
        folders.append(Path(torch_spec.origin).parent)
    if any(path.is_relative_to(folder) for folder in folders):
        return False
    is_of_python = path.is_relative_to(sysconfig.get_path("stdlib"))
    return not is_of_python or "site-packages" in path.parts


def name_failure(error: BaseException) -> str:
    """Return kind and message of an error in one line, as in `KeyError: 'x'`."""
    lines = str(error).strip().splitlines()
    kind = type(error).__name__
    return f"{kind}: {lines[0]}" if lines else kind


#: How alike two names are (difflib's ratio) if one may be meant by the other: `mes` and `mse` are.
NEAR = 0.65
#: The least letters of a part of a name that may stand for it, as `Dirichlet` in longer names.
MIN_PART = 3


def find_near(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that may be meant by another one, or None if none is near.

    Near is what is alike whatever the case or, if nothing is, what holds the name as a part.
    """
    spelling = {each.casefold(): each for each in known}
    wanted = name.casefold()
    near = difflib.get_close_matches(wanted, spelling, n=1, cutoff=NEAR)
    if not near and len(wanted) >= MIN_PART:
        holding = [each for each in spelling if wanted in each]
        near = difflib.get_close_matches(wanted, holding, n=1, cutoff=0)
    return spelling[near[0]] if near else None


def unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """`unknown algorithm 'fedprot': did you mean 'fedproto'? (accepted: ...)`"""
    known = sorted(known)
    near = find_near(name, known)
    hint = "," if near is None else f": did you mean {near!r}?"
    return ConfigError(f"unknown {what} {name!r}{hint} accepted: {', '.join(known) or 'none'}")


def need(module: str, install: str, purpose: str) -> ModuleType:
    """Import a package that not every installation has, or say in one sentence how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{purpose} needs the package {module.split('.')[0]!r}: pip install {install}"
        ) from error
