"""Errors, as a tree. Each message is one sentence: what is wrong, where, and what is accepted.

FedProtoError
├── ConfigError      a name, key or value that cannot be used
├── DataError        a data file or array that cannot be used
│   └── MessageError       a message of the server that a deployed member cannot use
├── RunFolderError   a run folder that is in the way, damaged, or not one
│   └── WriteError         a file or folder that cannot be written (disk full, read-only, forbidden)
├── TrainingError    training broke down in a named round, client and stage
│   ├── DivergedError      a client's numbers are no longer finite
│   └── LostProcessError   one of several processes of a run is gone
├── Refused          an answer of a member that the server does not believe, or one of the server's
├── RefusedByMember  what the server asks for, and a member's own file does not allow
├── KnownToAllError  carries an error of one of several processes, once all of them know of it
└── MissingExtra     a Python package that is not installed
"""

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class FedProtoError(Exception):
    """Base of all errors meant for people; the command line prints it and exits with 2."""


class ConfigError(FedProtoError):
    pass


class DataError(FedProtoError):
    pass


class MessageError(DataError):
    pass


class RunFolderError(FedProtoError):
    pass


class WriteError(RunFolderError):
    pass


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


def unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """`unknown algorithm 'fedprot': did you mean 'fedproto'? (accepted: ...)`"""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]!r}?" if near else ","
    return ConfigError(f"unknown {what} {name!r}{hint} accepted: {', '.join(known) or 'none'}")


def need(module: str, install: str, purpose: str) -> ModuleType:
    """Import a package that not every installation has, or say in one sentence how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{purpose} needs the package {module.split('.')[0]!r}: pip install {install}"
        ) from error
