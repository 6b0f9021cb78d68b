"""From what a person wrote (TOML, flags, `--set`, Python keywords) to a checked configuration, and back to TOML."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fedproto.config import plugins
from fedproto.config.options import (
    Bounds,
    Clients,
    File,
    Fraction,
    NonNegativeInt,
    Part,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Rounds,
    Samples,
    Threads,
    Width,
    checked,
    convert,
    options_of,
    parse,
)
from fedproto.core.files import check_version, parse_toml
from fedproto.errors import ConfigError, RunFolderError, unknown

Seed = Annotated[int, Bounds(0, 2**63 - 1)]  # what a 64-bit generator can tell apart


@dataclass(frozen=True)
class Config:
    """A run, completely. The first four are choices of plug-ins with their options."""

    dataset: tuple[Part, ...]
    algorithm: Part
    model: tuple[Part, ...]
    partition: Part
    profile: Literal["paper", "released"] = "paper"
    clients: Clients = 20
    rounds: Rounds = 100
    batch: Samples = 8
    lr: PositiveFloat = 0.01
    momentum: Fraction = 0.5
    epochs: Rounds = 1
    last_batch: Literal["auto", "keep", "drop"] = (
        "auto"  # partial batches: see core/local_training.py
    )
    dim: Width | None = None
    start: Literal["shared", "own"] = (
        "shared"  # initial weights: one draw an architecture, or one a client
    )
    initial: File | None = (
        None  # weights of the models' bodies to start from, instead of drawn ones
    )
    prototypes: File | None = (
        None  # global prototypes to start from: a file, or a run folder that holds one
    )
    participation: PositiveFraction = 1.0
    lost_uploads: Fraction = 0.0
    stragglers: Fraction = 0.0
    seed: Seed = 0
    engine: Literal["auto", "reference", "vectorised", "processes"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "float64", "tf32", "bf16"] = "float32"
    threads: Threads = 1  # of torch on a CPU; small models gain nothing from a second one
    workers: Threads | None = None  # of the engine `processes`; None: one a core
    stack: PositiveInt | None = (
        None  # clients the vectorised engine trains at a time; None: as many as the device is good at
    )
    states: Literal["auto", "device", "host", "disk"] = (
        "auto"  # where it keeps the clients' models between rounds
    )
    compile: Literal["auto", "on", "off"] = (
        "auto"  # fuse the kernels of its step: see engines/selection.py
    )
    eval_every: PositiveInt = 10
    checkpoint_every: NonNegativeInt = 10
    data_dir: File | None = None

    def toml(self, from_data: Mapping[str, Any] | None = None) -> str:
        """Everything needed to run again.

        `from_data` are the partition's options that were left open, with the values the data set gave them.
        """
        filled = from_data or {}
        lines, tables = [f"version = {VERSION}"], []
        for field in fields(self):
            value = getattr(self, field.name)
            parts = value if isinstance(value, tuple) else (value,)
            if field.name not in plugins.FOLDERS:
                lines += [f"{field.name} = {_toml(value)}"] if value is not None else []
            elif len(parts) == 1 and parts[0].count is None:
                tables += ["", f"[{field.name}]", f"name = {_toml(str(Part(parts[0].name)))}"]
                options = parts[0].options
                if field.name == "partition" and filled:
                    options = options | filled | {FROM_DATA: list(filled)}
                tables += [f"{name} = {_toml(option)}" for name, option in options.items()]
            elif parts:
                lines.append(f"{field.name} = {_toml(','.join(map(str, parts)))}")
        return "\n".join(lines + tables) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if value is None:  # said, not left out: a profile would fill the gap with something else
        return '"none"'
    return json.dumps(
        value, ensure_ascii=False
    )  # JSON's escapes beyond \uFFFF are pairs, which TOML refuses


VERSION = 1  # of the format of config.toml
FROM_DATA = (
    "from_data"  # in [partition]: the options that were left open, and that the data set filled in
)
RUN_FIELDS = {field.name for field in fields(Config)} - set(plugins.FOLDERS)
#: What a profile governs: another profile, named on the command line, sets them anew.
GOVERNED = {
    "algorithm.weighting",
    "algorithm.collect",
    "algorithm.absent",
    "partition.test_shots",
    "model.fresh",
}
AUTO = "auto"  # the model that the data set names
DEFAULTS: dict[str, Any] = {
    "dataset": "mnist5k",
    "algorithm": "fedproto",
    "model": AUTO,
    "partition": "nway",
}


def read_toml(path: Path) -> dict[str, Any]:
    """A configuration file as flat settings, as they were asked for: `[algorithm] lam = 1` is `algorithm.lam`."""
    return flat(as_asked(read_tables(path)), str(path))


def read_run_toml(path: Path) -> dict[str, Any]:
    """The same of a run folder's config.toml, which must state the version of its format."""
    tables = read_tables(path)
    check_version(tables, VERSION, str(path))
    settings = flat(as_asked(tables), str(path))
    require_recorded(settings, path)
    return settings


def as_asked(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables without the values that the data set filled in: on the next run it may fill them in again."""
    partition = tables.get("partition")
    if not isinstance(partition, dict):
        return tables
    filled = partition.get(FROM_DATA)
    left_open = (
        {FROM_DATA, *(str(name) for name in filled)} if isinstance(filled, list) else {FROM_DATA}
    )
    kept = {name: value for name, value in partition.items() if name not in left_open}
    return tables | {"partition": kept}


def read_tables(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return parse_toml(content, str(path), ConfigError)


#: What the config.toml of every run folder says; without one of these, a default would be another run.
RECORDED = ("algorithm", "dataset", "model", "partition", "clients", "rounds", "seed")


def require_recorded(settings: Mapping[str, Any], path: Path) -> None:
    """Refuse the settings of a run folder that are not all there: an empty file is not a run."""
    for key in RECORDED:
        if key not in settings:
            raise RunFolderError(f"{path} is damaged: it lacks {key!r}")


def flat(tables: dict[str, Any], where: str) -> dict[str, Any]:
    """Tables of a file as flat settings; a version that the file states is checked."""
    settings: dict[str, Any] = {}
    if "version" in tables:
        check_version(tables, VERSION, where, ConfigError)
    for key, value in tables.items():
        if key == "version":
            continue
        if not isinstance(value, dict):
            settings[key] = value
            continue
        if key == "sweep":
            raise ConfigError(f"{where} has a table [sweep]: run it with `fedproto sweep {where}`")
        if key not in plugins.FOLDERS:
            raise unknown(f"table in {where}", key, plugins.FOLDERS)
        for name, option in value.items():
            if (key, name) != ("partition", FROM_DATA):
                settings[key if name == "name" else f"{key}.{name}"] = option
    return settings


def read_assignment(text: str) -> tuple[str, str]:
    """`lam=0.1` of `--set`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes KEY=VALUE, not {text!r}")
    return key.strip(), value.strip()


def configure(
    settings: Mapping[str, Any], assigned: Mapping[str, Any] | None = None
) -> list[Config]:
    """Settings (TOML, flags, keywords) and what `--set` assigned, which wins, as one configuration an algorithm."""
    settings = DEFAULTS | {key: value for key, value in settings.items() if value is not None}
    assigned = assigned or {}
    # Moved to the end, where it wins: `--set ways=5` over the `partition.ways` of a flag and the `ways` of a file.
    settings = {key: value for key, value in settings.items() if key not in assigned} | dict(
        assigned
    )
    chosen = {kind: parts_of(kind, settings.pop(kind)) for kind in plugins.FOLDERS}
    if len(chosen["partition"]) > 1:
        raise ConfigError("partition takes one choice, not a list")
    run, options, last = _sort(settings, chosen, assigned)
    values = _checked_run(run)
    profile = _profile(values.get("profile", "paper"), chosen["dataset"])
    done = {
        kind: [
            complete(kind, part, profile.get(kind, {}) | options[kind], last[kind])
            for part in chosen[kind]
        ]
        for kind in plugins.FOLDERS
    }
    dataset, model, (partition,) = tuple(done["dataset"]), tuple(done["model"]), done["partition"]
    return [
        Config(dataset, algorithm, model, partition, **values) for algorithm in done["algorithm"]
    ]


def parts_of(kind: str, value: Any) -> list[Part]:
    """A choice as text, with model presets written out and paths made absolute."""
    if not isinstance(value, str):
        raise ConfigError(
            f"{kind} must be text, such as {DEFAULTS.get(kind, 'cnn')!r}, not {value!r}"
        )
    parts = parse(plugins.presets(kind).get(value, value), kind)
    for position, part in enumerate(parts):
        base, colon, argument = part.name.partition(":")
        if colon and base in plugins.names(kind):
            parts[position] = replace(part, name=f"{base}:{_argument(kind, base, argument)}")
        if part.count is not None and kind in ("algorithm", "partition"):
            raise ConfigError(f"{kind} {str(part)!r}: a count has no meaning here")
    return parts


def one_part(kind: str, value: Any) -> Part:
    """A choice that can only be one."""
    parts = parts_of(kind, value)
    if len(parts) != 1 or parts[0].count is not None:
        raise ConfigError(f"{kind} takes one choice here, not {value!r}")
    return parts[0]


def _argument(kind: str, base: str, text: str) -> str:
    """What stands after the colon: a path, made absolute, unless the plug-in calls it a name and no folder has it."""
    if not text:
        raise ConfigError(f"{kind} {base!r} needs something after its colon: '{base}:PATH'")
    takes_name = "name" in inspect.signature(plugins.find(kind, base)).parameters
    path = Path(text).expanduser()  # a shell leaves ~ alone after a colon
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name longer than the file system takes
        raise ConfigError(f"{kind} {base}:{text[:60]}... is no path: {error.strerror}") from error
    return text if takes_name and not (kind == "dataset" and is_folder) else str(path.absolute())


def _sort(
    settings: Mapping[str, Any], chosen: dict[str, list[Part]], assigned: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Settings of the run, of each kind of plug-in, and those of `--set` among the latter, which win over all.

    A bare name belongs to whoever alone has an option of it.
    """
    accepted = {
        kind: {name for part in parts for name in _options(kind, part)}
        for kind, parts in chosen.items()
    }
    run: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {kind: {} for kind in plugins.FOLDERS}
    last: dict[str, dict[str, Any]] = {kind: {} for kind in plugins.FOLDERS}
    for key, value in settings.items():
        kind, dot, name = key.partition(".")
        if not dot:
            kind, name = _owner(key, accepted, key in assigned), key
        if kind == "run" and name in RUN_FIELDS:
            run[name] = value
        elif name in accepted.get(kind, ()):
            (last if key in assigned else options)[kind][name] = value
        else:
            raise _unknown_key(key, kind, accepted, chosen)
    return run, options, last


def _options(kind: str, part: Part) -> set[str]:
    """The names of a plug-in's options; of `auto`, those of all models, since the data set has not been read yet."""
    if kind == "model" and part.name == AUTO:
        return {
            option for name in plugins.names("model") for option in _options("model", Part(name))
        }
    return set(options_of(plugins.find(kind, part.name)))


def _owner(key: str, accepted: dict[str, set[str]], assigned: bool) -> str:
    """Whose option a bare name is. As a flag, a keyword or a TOML key, a run's own name can only mean the run's."""
    owners = [kind for kind, names in accepted.items() if key in names]
    if key in RUN_FIELDS and assigned:
        owners.append("run")
    elif key in RUN_FIELDS:
        return "run"
    if len(owners) > 1:
        raise ConfigError(
            f"{key!r} is ambiguous: write {' or '.join(f'{kind}.{key}' for kind in owners)}"
        )
    return owners[0] if owners else "run"


def _unknown_key(
    key: str, kind: str, accepted: dict[str, set[str]], chosen: dict[str, list[Part]]
) -> ConfigError:
    if "." in key and kind in accepted:
        who = ", ".join(part.name for part in chosen[kind])
        return unknown(f"option of {kind} {who}", key.partition(".")[2], accepted[kind])
    return unknown(
        "key",
        key,
        RUN_FIELDS | set(plugins.FOLDERS) | {name for names in accepted.values() for name in names},
    )


def _checked_run(run: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(Config, include_extras=True)
    return {name: convert(name, value, hints[name]) for name, value in run.items()}


def _profile(name: str, datasets: Sequence[Part]) -> dict[str, dict[str, Any]]:
    """`paper` is the defaults, with the paper's λ; `released` what the released code does, counted correctly."""
    is_cifar = all(part.name == "cifar10" for part in datasets)
    best = {"lam": 0.1} if is_cifar else {}
    if name == "paper":
        return {"algorithm": best}
    test_shots = 40 if all(part.name.startswith("mnist") for part in datasets) else 15
    return {
        "algorithm": best | {"weighting": "uniform", "collect": "during", "absent": "drop"},
        "partition": {"test_shots": test_shots},
        "model": {"fresh": "conv1,bn1,fc"} if is_cifar else {},
    }


def complete(kind: str, part: Part, given: dict[str, Any], last: dict[str, Any]) -> Part:
    """A part with all its options: defaults < `given` < those in the part itself < `last`, as far as it has them."""
    known = _options(
        kind, part
    )  # an option written in the part itself stays even if unknown, to be refused below
    layers = (given, part.options, last)
    layered = {
        k: v for layer in layers for k, v in layer.items() if k in known or layer is part.options
    }
    if kind == "model" and part.name == AUTO:
        return replace(part, options=layered)
    function = plugins.find(kind, part.name)
    return replace(
        part, options=checked(function, layered, f"{kind} {part.name.partition(':')[0]}")
    )


def resolve_auto(part: Part, name: str) -> list[Part]:
    """The parts of the model `name` that stand for `auto`, with the options that were given to it."""
    parts = parts_of("model", name)
    for option in part.options:
        if not any(option in _options("model", candidate) for candidate in parts):
            raise unknown(
                f"option of model {name}",
                option,
                {o for candidate in parts for o in _options("model", candidate)},
            )
    return [complete("model", candidate, {}, part.options) for candidate in parts]
