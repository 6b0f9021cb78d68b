"""From settings (TOML, flags, `--set`, Python keywords) to a checked configuration, and back."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, NamedTuple

from fedproto.config import plugins
from fedproto.config.choices import AUTO, complete, has_own_data, option_names, parse_choices
from fedproto.config.config_file import FROM_DATA, VERSION, format_value
from fedproto.config.options import (
    Bounds,
    Clients,
    File,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Part,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Rounds,
    Samples,
    Threads,
    Width,
    convert,
    explain_positional,
)
from fedproto.config.profiles import PROFILE_OPTIONS, PROFILES, ProfileName
from fedproto.core.optimisers import OptimiserName, ScheduleName
from fedproto.errors import ConfigError, unknown

#: The combiner that leaves every algorithm as it is.
SUM = Part("sum")
#: Seeds that a 64-bit generator can tell apart.
Seed = Annotated[int, Bounds(0, 2**63 - 1)]
#: More would leave too little to train with.
ValidationFraction = Annotated[float, Bounds(0, 0.9)]
#: The chance that a privacy claim fails; it should be far below one over the number of records.
Delta = Annotated[float, Bounds(0, 0.1, open=True)]


@dataclass(frozen=True)
class Config:
    """The complete configuration of a run.

    The first nine fields are choices of plug-ins with their options.
    """

    dataset: tuple[Part, ...]
    algorithm: Part
    model: tuple[Part, ...]
    partition: Part
    #: Metrics beside those that every run has.
    metric: tuple[Part, ...] = ()
    #: What the server makes of the uploads of a round: see core/combination.py.
    combiner: Part = SUM
    #: What is done to uploads before they travel, in this order: see core/transforms.py.
    transform: tuple[Part, ...] = ()
    #: A classifier that is solved from sums beside the algorithm, if any: see core/closed_form.py.
    teacher: tuple[Part, ...] = ()
    #: The features that it is solved over; none named: auto.
    feature_map: tuple[Part, ...] = ()
    #: Which reading of FedProto: see config/profiles.py.
    profile: ProfileName = "paper"
    #: None: DEFAULT_CLIENTS for nway and the package's data sets, else see runs/own_data.py.
    clients: Clients | None = None
    rounds: Rounds = 100
    batch: Samples = 8
    lr: PositiveFloat = 0.01
    momentum: Fraction = 0.5
    #: How a step follows the gradient: see core/optimisers.py, also for the four that follow.
    optimiser: OptimiserName = "sgd"
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: NonNegativeFloat = 0.0
    schedule: ScheduleName = "constant"
    warmup: NonNegativeInt = 0
    #: Whether rare classes of a client count or come as often as frequent ones.
    class_weights: Literal["none", "balanced"] = "none"
    sampling: Literal["shuffle", "balanced"] = "shuffle"
    epochs: Rounds = 1
    #: Batches of every client per round; None: those of its `epochs`.
    local_steps: Rounds | None = None
    #: What becomes of partial batches: see core/batches.py.
    last_batch: Literal["auto", "keep", "drop"] = "auto"
    dim: Width | None = None
    #: Initial weights: one draw per architecture, or one per client.
    start: Literal["shared", "own"] = "shared"
    #: Weights of the models' bodies to start from, instead of random ones.
    initial: File | None = None
    #: Train nothing of the models' bodies, whose features are then computed once.
    freeze: Literal["nothing", "body"] = "nothing"
    #: Global prototypes to start from: a file, or a run folder that holds one.
    prototypes: File | None = None
    participation: PositiveFraction = 1.0
    lost_uploads: Fraction = 0.0
    stragglers: Fraction = 0.0
    #: Uploads that an asynchronous round waits for; 0: rounds are synchronous. See
    #: core/asynchronous.py, also for the three that follow.
    buffer: NonNegativeInt = 0
    #: Clients that train at a time; None: participation × clients.
    concurrency: PositiveInt | None = None
    staleness: NonNegativeFloat = 0.5
    speed_spread: NonNegativeFloat = 0.0
    #: What is protected: nothing, a record in what is released, a record in all that depends on it,
    #: or a whole client. See docs/privacy.md, also for the eleven that follow.
    privacy: Literal["none", "release", "training", "client"] = "none"
    #: The budget of every record or client; None: whatever the noise costs.
    epsilon: PositiveFloat | None = None
    delta: Delta = 1e-5
    #: Standard deviation of the noise / sensitivity; None: what epsilon needs.
    noise_multiplier: NonNegativeFloat | None = None
    #: The L2 norm that an embedding (a client's values) is clipped to.
    clip: PositiveFloat | Literal["none"] = 1.0
    #: Of `training`: noise of each step / gradient_clip; None: what epsilon needs.
    step_noise: NonNegativeFloat | None = None
    #: Of `training`: the L2 norm that the gradient of each record is clipped to.
    gradient_clip: PositiveFloat | Literal["none"] = 1.0
    #: Who adds the noise; auto: clients, but for `privacy=client`.
    noise_at: Literal["auto", "client", "server"] = "auto"
    #: `seeded` noise can be repeated: for tests only, nothing is private then.
    noise_source: Literal["system", "seeded"] = "system"
    #: A class counts only above so many standard deviations of the noise on its count.
    count_threshold: NonNegativeFloat = 2.0
    #: Noise of one size for all coordinates of an embedding, or of a size that each client chooses
    #: by the mean squares of its coordinates.
    noise_shape: Literal["equal", "variance"] = "equal"
    #: Of `client`: cohorts of a fixed size, or each client independently with the probability
    #: `participation`, in secret, so that the sampling counts in its favour.
    client_sampling: Literal["fixed", "poisson"] = "fixed"
    seed: Seed = 0
    engine: Literal["auto", "reference", "vectorised", "processes"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "float64", "tf32", "bf16"] = "float32"
    #: Threads of torch on a CPU; small models gain nothing from a second one.
    threads: Threads = 1
    #: Processes of the engine `processes`; None: one per core.
    workers: Threads | None = None
    #: Clients that the vectorised engine trains at a time; None: as many as suit the device.
    stack: PositiveInt | None = None
    #: Where the vectorised engine keeps the clients' models between rounds.
    states: Literal["auto", "device", "host", "disk"] = "auto"
    #: Whether the vectorised engine fuses the kernels of a step: see engines/selection.py.
    compile: Literal["auto", "on", "off"] = "auto"
    eval_every: PositiveInt = 10
    #: Fraction of each client's training rows, per class, to choose the best round by. None: only
    #: where the data has a validation set of its own; 0: never.
    validation: ValidationFraction | None = None
    #: What the best round is chosen by: an accuracy of the algorithm, or a metric.
    select_by: str = "accuracy"
    #: Evaluations without improvement after which a run with validation ends; None: never early.
    patience: PositiveInt | None = None
    #: Whether a run with validation also measures its last round on test rows.
    report_last: bool = False
    #: Whether to train the same model locally and on the pooled rows, too: see runs/baselines.py.
    baselines: bool = False
    checkpoint_every: NonNegativeInt = 10
    data_dir: File | None = None

    def toml(self, from_data: Mapping[str, Any] | None = None) -> str:
        """Return the text of a config.toml from which the same run can be started again.

        `from_data` holds the partition's options that were left open, with the values that the
        data set gave them.
        """
        lines = [f"version = {VERSION}"]
        tables: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "epochs" and self.local_steps is not None:
                continue
            if field.name not in plugins.FOLDERS:
                if value is not None:
                    lines.append(f"{field.name} = {format_value(value)}")
                continue
            parts = value if isinstance(value, tuple) else (value,)
            if len(parts) == 1 and parts[0].count is None:
                is_filled = field.name == "partition" and from_data
                filled = from_data if is_filled else None
                tables += _format_table(field.name, parts[0], filled)
            elif parts:
                text = ",".join(str(part) for part in parts)
                lines.append(f"{field.name} = {format_value(text)}")
        return "\n".join(lines + tables) + "\n"


def _format_table(kind: str, part: Part, from_data: Mapping[str, Any] | None) -> list[str]:
    """Return the lines of the TOML table of one plug-in, after an empty line."""
    options = part.options
    if from_data:
        options = {**options, **from_data, FROM_DATA: list(from_data)}
    name = str(Part(part.name))
    lines = ["", f"[{kind}]", f"name = {format_value(name)}"]
    for option, value in options.items():
        lines.append(f"{option} = {format_value(value)}")
    return lines


RUN_FIELDS = {field.name for field in fields(Config)} - set(plugins.FOLDERS)
#: What a profile governs: another profile, named on the command line, sets these anew.
GOVERNED = {
    *(f"algorithm.{option}" for option in PROFILE_OPTIONS),
    "partition.test_shots",
    "model.fresh",
}
#: Clients of the data sets that come with the package, as in the paper.
DEFAULT_CLIENTS = 20
#: How texts of one's own are trained; with more rounds, word vectors learn the texts by heart.
TEXT_TRAINING: dict[str, Any] = {"optimiser": "adam", "lr": 0.001, "rounds": 20}
DEFAULTS: dict[str, Any] = {
    "dataset": "mnist5k",
    "algorithm": "fedproto",
    "model": AUTO,
    "metric": "",
    "transform": "",
    "teacher": "",
    "feature_map": "",
    "partition": AUTO,
    "combiner": SUM.name,
}


# --- from settings to configurations


def read_assignment(text: str) -> tuple[str, str]:
    """Split the argument of `--set`, such as `lam=0.1`, into key and value."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes KEY=VALUE, not {text!r}")
    return key.strip(), value.strip()


def configure(
    settings: Mapping[str, Any], assigned: Mapping[str, Any] | None = None
) -> list[Config]:
    """Return one checked configuration per algorithm that the settings name.

    `settings` come from TOML, flags or keywords; None means not given. `assigned` are those of
    `--set`, which win over all others.
    """
    assigned = assigned or {}
    wanted = DEFAULTS | {key: value for key, value in settings.items() if value is not None}
    # At the end, where it wins: `--set ways=5` over a flag's `partition.ways` and a file's `ways`.
    for key, value in assigned.items():
        wanted.pop(key, None)
        wanted[key] = value
    chosen = {kind: parse_choices(kind, wanted.pop(kind)) for kind in plugins.FOLDERS}
    for kind in ("partition", "combiner", "teacher", "feature_map"):
        if len(chosen[kind]) > 1:
            raise ConfigError(f"{kind} takes one choice, not a list")
    if chosen["partition"][0].name == AUTO:
        chosen["partition"] = [_choose_partition(chosen, wanted)]
        wanted |= _choose_training(chosen, wanted)
    owned = _find_owners(wanted, chosen, assigned)
    run_values = _convert_run_values(owned.run)
    if run_values.get("local_steps") is not None and "epochs" in run_values:
        raise two_lengths(run_values["local_steps"], run_values["epochs"])
    is_paper_setting = chosen["partition"][0].name == "nway" or not has_own_data(chosen["dataset"])
    if run_values.get("clients") is None and is_paper_setting:
        run_values["clients"] = DEFAULT_CLIENTS
    profile = run_values.get("profile", "paper")
    completed: dict[str, list[Part]] = {}
    for kind, parts in chosen.items():
        completed[kind] = []
        for part in parts:
            of_profile = _profile_options(profile, chosen["dataset"], kind, part)
            given = of_profile | owned.options[kind]
            completed[kind].append(complete(kind, part, given, owned.assigned[kind]))
    configs = []
    for algorithm in completed["algorithm"]:
        config = Config(
            dataset=tuple(completed["dataset"]),
            algorithm=algorithm,
            model=tuple(completed["model"]),
            partition=completed["partition"][0],
            metric=tuple(completed["metric"]),
            combiner=completed["combiner"][0],
            transform=tuple(completed["transform"]),
            teacher=tuple(completed["teacher"]),
            feature_map=tuple(completed["feature_map"]),
            **run_values,
        )
        refuse_contradictions(config.rounds, config.warmup, config.class_weights, config.sampling)
        _refuse_idle_asynchrony(config)
        _refuse_idle_privacy(config)
        configs.append(config)
    return configs


def _refuse_idle_asynchrony(config: Config) -> None:
    """Refuse settings of asynchronous rounds in a run without them, and stragglers in one."""
    if config.buffer:
        if config.stragglers:
            raise ConfigError(
                "stragglers do half their steps so that a round need not wait for them, and "
                "asynchronous rounds wait for nobody: leave stragglers or buffer out"
            )
        return
    idle = {
        "concurrency": config.concurrency is not None,
        "staleness": config.staleness != Config.staleness,
        "speed_spread": config.speed_spread > 0,
    }
    for name, is_given in idle.items():
        if is_given:
            raise ConfigError(
                f"{name} is for asynchronous rounds: set buffer, the number of uploads that a "
                "round waits for, too"
            )


#: Settings that mean nothing without `privacy`.
PRIVACY_SETTINGS = (
    "epsilon",
    "delta",
    "noise_multiplier",
    "clip",
    "step_noise",
    "gradient_clip",
    "noise_at",
    "noise_source",
    "count_threshold",
    "noise_shape",
    "client_sampling",
)


def _refuse_idle_privacy(config: Config) -> None:
    """Refuse settings of noise in a run without any, and a run whose noise nobody states."""
    if config.privacy != "none":
        is_training = config.privacy == "training"
        noise = "step_noise" if is_training else "noise_multiplier"
        if config.epsilon is None and getattr(config, noise) is None:
            raise ConfigError(f"privacy={config.privacy} needs epsilon, the budget, or {noise}")
        for name in ("step_noise", "gradient_clip"):
            if not is_training and getattr(config, name) != getattr(Config, name):
                raise ConfigError(f"{name} is for steps of training: set privacy to training, too")
        if config.client_sampling == "poisson" and config.privacy != "client":
            raise ConfigError(
                "client_sampling=poisson is counted in favour of whole clients, which "
                f"privacy={config.privacy} does not protect: set privacy to client, or leave "
                "client_sampling out"
            )
        return
    for name in PRIVACY_SETTINGS:
        if getattr(config, name) != getattr(Config, name):
            raise ConfigError(
                f"{name} is for runs with differential privacy: set privacy to release, training "
                "or client, too"
            )


def refuse_contradictions(rounds: int, warmup: int, class_weights: str, sampling: str) -> None:
    """Refuse settings of local training that cannot be meant together."""
    if warmup and warmup >= rounds:
        raise ConfigError(
            f"warmup must be less than the {rounds} rounds, not {warmup}: the learning rate would "
            "only rise"
        )
    if class_weights == sampling == "balanced":
        raise ConfigError(
            "class_weights and sampling both balance the classes, which would favour rare ones: "
            "set one of them to balanced"
        )


def two_lengths(local_steps: int, epochs: int) -> ConfigError:
    """Return the error for settings that say twice how long a client trains."""
    return ConfigError(
        f"local_steps ({local_steps}) and epochs ({epochs}) both say how long a client trains per "
        "round: leave one of them out"
    )


def _choose_partition(chosen: dict[str, list[Part]], settings: Mapping[str, Any]) -> Part:
    """Return `nway` for the data sets of the package, and where an option says so; else `auto`.

    An option says so if `nway` has it, and neither `auto` nor another chosen plug-in does.
    """
    auto = chosen["partition"][0]
    nway = replace(auto, name="nway")
    if not has_own_data(chosen["dataset"]):
        return nway
    of_others = option_names("partition", auto) | RUN_FIELDS
    for kind, parts in chosen.items():
        if kind != "partition":
            for part in parts:
                of_others |= option_names(kind, part)
    only_nway = option_names("partition", nway) - option_names("partition", auto)
    named = {f"partition.{name}" for name in only_nway} | (only_nway - of_others)
    is_meant = not named.isdisjoint(settings) or not only_nway.isdisjoint(auto.options)
    return nway if is_meant else auto


def _choose_training(chosen: dict[str, list[Part]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of training that fedproto chooses where the partition is left to it, too.

    Texts need an adaptive optimiser: most words are in few texts, and SGD hardly moves their
    vectors.
    """
    is_own = chosen["partition"][0].name == AUTO
    is_text = all(part.name.startswith("text:") for part in chosen["dataset"])
    is_named = not {"optimiser", "run.optimiser"}.isdisjoint(settings)
    if is_named or not is_own or not is_text:
        return {}
    given = {key.removeprefix("run.") for key in settings}
    return {name: value for name, value in TEXT_TRAINING.items() if name not in given}


# --- which key belongs to what


class _OwnedSettings(NamedTuple):
    """Settings by what they belong to: the run, or a kind of plug-in."""

    run: dict[str, Any]
    options: dict[str, dict[str, Any]]
    #: Options of plug-ins that `--set` assigned, which win over those written in a choice.
    assigned: dict[str, dict[str, Any]]


def _find_owners(
    settings: Mapping[str, Any], chosen: dict[str, list[Part]], assigned: Mapping[str, Any]
) -> _OwnedSettings:
    """Sort settings by what they belong to; a bare name belongs to what alone has it."""
    accepted: dict[str, set[str]] = {}
    for kind, parts in chosen.items():
        accepted[kind] = set()
        for part in parts:
            accepted[kind] |= option_names(kind, part)
    options: dict[str, dict[str, Any]] = {kind: {} for kind in chosen}
    assigned_options: dict[str, dict[str, Any]] = {kind: {} for kind in chosen}
    owned = _OwnedSettings({}, options, assigned_options)
    for key, value in settings.items():
        owner, dot, name = key.partition(".")
        if not dot:
            owner = _owner_of(key, accepted, is_assigned=key in assigned)
            name = key
        if owner == "run" and name in RUN_FIELDS:
            owned.run[name] = value
        elif name not in accepted.get(owner, ()):
            raise _unknown_key(key, owner, accepted, chosen)
        elif key in assigned:
            owned.assigned[owner][name] = value
        else:
            owned.options[owner][name] = value
    return owned


def _owner_of(key: str, accepted: dict[str, set[str]], *, is_assigned: bool) -> str:
    """Return the kind of plug-in that has an option of this name, or `run`.

    Outside `--set`, a name that the run has means the run's.
    """
    if key in RUN_FIELDS and not is_assigned:
        return "run"
    owners = [kind for kind, names in accepted.items() if key in names]
    if key in RUN_FIELDS:
        owners.append("run")
    if len(owners) > 1:
        ways_to_write = " or ".join(f"{owner}.{key}" for owner in owners)
        raise ConfigError(f"{key!r} is ambiguous: write {ways_to_write}")
    return owners[0] if owners else "run"


def _unknown_key(
    key: str, owner: str, accepted: dict[str, set[str]], chosen: dict[str, list[Part]]
) -> ConfigError:
    """Return the error for a key that neither the run nor a chosen plug-in has."""
    if "." in key and owner in accepted:
        plugin_names = ", ".join(part.name for part in chosen[owner])
        option = key.partition(".")[2]
        return unknown(f"option of {owner} {plugin_names}", option, accepted[owner])
    for kind, parts in chosen.items():
        for part in parts:
            if plugins.is_outside(kind, part.name):
                function = plugins.find(kind, part.name)
                positional = explain_positional(function, key, f"{kind} {part.name!r}")
                if positional is not None:
                    return positional
    known = RUN_FIELDS | set(plugins.FOLDERS)
    for names in accepted.values():
        known |= names
    return unknown("key", key, known)


def _convert_run_values(values: dict[str, Any]) -> dict[str, Any]:
    """Convert the run's own settings to the types of their fields."""
    hints = typing.get_type_hints(Config, include_extras=True)
    return {name: convert(name, value, hints[name]) for name, value in values.items()}


def _profile_options(
    profile: ProfileName, datasets: Sequence[Part], kind: str, part: Part
) -> dict[str, Any]:
    """Return the options that a profile sets of one plug-in.

    `paper` and `released` have the paper's λ on CIFAR-10. `released` is what the released code
    does, with its accuracies counted correctly. The others are about FedProto alone.
    """
    is_cifar = all(each.name == "cifar10" for each in datasets)
    is_mnist = all(each.name.startswith("mnist") for each in datasets)
    is_authors = profile in ("paper", "released")
    if kind == "algorithm":
        options = {"lam": 0.1} if is_cifar and is_authors else {}
        is_meant = is_authors or part.name in ("fedproto", "fedproto-mh")
        return options | dict(PROFILES[profile].options) if is_meant else options
    if profile != "released":
        return {}
    if kind == "partition":
        return {"test_shots": 40 if is_mnist else 15}
    return {"fresh": "conv1,bn1,fc"} if kind == "model" and is_cifar else {}
