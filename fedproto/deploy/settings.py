"""What the server and each member are told: one small TOML file on each machine, and the run's settings by message."""

from __future__ import annotations

import hashlib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from fedproto.config import plugins
from fedproto.config.choices import complete, parse_choice
from fedproto.config.config_file import read_tables
from fedproto.config.options import (
    Bounds,
    File,
    Fraction,
    Part,
    PositiveFloat,
    PositiveInt,
    Rounds,
    Samples,
    Threads,
    convert,
    words,
)
from fedproto.config.settings import Seed
from fedproto.core.local_training import Training
from fedproto.core.types import Algorithm
from fedproto.errors import ConfigError, unknown

SENDS = ("prototypes", "weights", "counts")  # what can leave a member, beside names and accuracies


@dataclass(frozen=True)
class TrainingTerms:
    """What all members of a federation train by; the server states it in every message."""

    algorithm: str = "fedproto"
    dim: Annotated[int, Bounds(0, 10**6)] = 50  # values of a prototype; 0: the models' own
    batch: Samples = 8
    lr: PositiveFloat = 0.01
    momentum: Fraction = 0.5
    epochs: Rounds = 1
    last_batch: Literal["auto", "keep", "drop"] = "auto"
    seed: Seed = 0

    def training(self) -> Training:
        return Training(self.batch, self.lr, self.momentum, self.epochs, self.last_batch, self.seed)

    def part(self) -> Part:
        return complete("algorithm", parse_choice("algorithm", self.algorithm), {}, {})

    def build(self) -> Algorithm:
        if self.part().options.get("fixed"):
            raise ConfigError(
                "fixed prototypes are for a newcomer in the simulator: a server makes its own"
            )
        algorithm = plugins.build("algorithm", self.part())
        if not (algorithm.additive or algorithm.remembers):
            raise ConfigError(
                f"{algorithm.name} seeds its server from all members at once: it runs in the simulator only"
            )
        return algorithm


@dataclass(frozen=True)
class ServerSettings:
    """The server's `[tool.flwr.app.config]`, and what `flwr run --run-config` changes of it."""

    state: File = "server"  # the folder in which it keeps all it knows
    rounds: Rounds = 100
    model: str = (
        ""  # and the inputs' shape, where weights travel: the server takes no member's word for it
    )
    shape: str = ""
    classes: str = ""  # names, with commas; more may come where new-classes is true
    members: str = ""  # names, with commas; empty: whoever Flower lets in
    quorum: PositiveInt = (
        2  # members without whom no round is begun, and answers without which none is closed
    )
    timeout: PositiveFloat = 600.0  # seconds a round waits for answers
    patience: PositiveFloat = 600.0  # seconds to wait for a quorum
    new_classes: bool = False
    max_bytes: PositiveInt = 64 * 2**20
    max_count: PositiveFloat = 1e7
    max_norm: PositiveFloat = 1e4
    max_count_ratio: PositiveFloat = (
        100.0  # count and norm of a class beside the median of the other members'
    )
    max_norm_ratio: PositiveFloat = 5.0
    max_classes: PositiveInt = 1000  # of the federation
    max_new_classes: PositiveInt = 100  # that one member may bring, in all rounds together
    trust_plugins: bool = (
        False  # whether the server may run the code of the plug-ins that its settings name
    )


@dataclass(frozen=True)
class MemberSettings:
    """A member's own TOML file; nothing in it leaves its machine but the names of its classes."""

    name: str
    data: str  # any source: folder:scans, csv:PATH, ...
    state: File  # the folder in which its model and round live
    model: str = "auto"
    classes: str = ""  # those it takes part with, with commas; empty: all of its data
    weights: File | None = None
    data_dir: File | None = None
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    threads: Threads = 1
    tell_accuracy: bool = True
    trust_plugins: bool = False  # whether the code of the plug-ins that this file names may run
    algorithms: str = ""  # those it takes part in, with commas; empty: any that `sends` allows
    sends: str = "prototypes,counts"  # what may leave it, with commas: prototypes, weights, counts

    def fingerprint(self) -> str:
        """Tells whether the member is still the one whose state was kept."""
        kept = (self.name, self.data, self.model, self.classes)
        return hashlib.sha256("\0".join(kept).encode()).hexdigest()[:16]


def checked(kind: type, given: Mapping[str, Any], where: str) -> Any:
    """An instance of one of these out of what somebody wrote; `new-classes` is `new_classes`."""
    hints = typing.get_type_hints(kind, include_extras=True)
    values = {key.replace("-", "_"): value for key, value in given.items()}
    for key in values:
        if key not in hints:
            raise unknown(f"key in {where}", key, hints)
    needed = {
        field.name for field in fields(kind) if field.default is field.default_factory
    }  # both are MISSING
    for key in needed - set(values):
        raise ConfigError(f"{where} lacks {key!r}")
    return kind(**{key: convert(key, value, hints[key]) for key, value in values.items()})


def read_member(path: Path, operated: bool = False) -> MemberSettings:
    """A member's file; paths in it are seen from the folder it lies in.

    `operated`: its operator started the member with it. Only then does its key `trust-plugins` count: a file that
    somebody sent cannot vouch for itself.
    """
    tables = {key.replace("-", "_"): value for key, value in read_tables(path).items()}
    settings: MemberSettings = checked(MemberSettings, tables, str(path))
    if not settings.name.strip():
        raise ConfigError(f"{path} gives the member no name")
    chosen = {"dataset": settings.data, "model": settings.model}
    if operated:
        _trust_if_told(chosen, settings.trust_plugins, str(path))
    else:
        plugins.refuse_plugins(chosen, path)
    _refuse_unknown(words(settings.algorithms), plugins.names("algorithm"), f"algorithm in {path}")
    _refuse_unknown(words(settings.sends), SENDS, f"word after `sends` in {path}")
    here = path.absolute().parent
    moved = {
        key: str(here / tables[key]) for key in ("state", "weights", "data_dir") if key in tables
    }
    return checked(
        MemberSettings,
        vars(settings) | moved | {"data": _seen_from(here, settings.data)},
        str(path),
    )


def _trust_if_told(chosen: Mapping[str, str], told: bool, where: str) -> None:
    """Trust the plug-ins that an operator's own settings name, or refuse them with the key that is missing."""
    if told:
        plugins.trust_chosen(chosen)
    plugins.refuse_plugins(chosen, where, "write trust-plugins = true there")


def _refuse_unknown(names: list[str], known: Iterable[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise unknown(what, name, known)


def _seen_from(here: Path, data: str) -> str:
    """`csv:scans.csv` as a path from the member's folder, if there is such a file; a name stays as it is."""
    base, colon, rest = data.partition(":")
    return (
        f"{base}:{here / rest}"
        if colon and not Path(rest).is_absolute() and (here / rest).exists()
        else data
    )


def divided(config: Mapping[str, Any], where: str) -> tuple[ServerSettings, TrainingTerms]:
    """Flower's one table of settings as the server's own and those it states to members."""
    terms = {field.name for field in fields(TrainingTerms)}
    mine = {key: value for key, value in config.items() if key.replace("-", "_") not in terms}
    theirs = {key: value for key, value in config.items() if key.replace("-", "_") in terms}
    settings, stated = checked(ServerSettings, mine, where), checked(TrainingTerms, theirs, where)
    _trust_if_told(
        {"algorithm": stated.algorithm, "model": settings.model}, settings.trust_plugins, where
    )
    return settings, stated
