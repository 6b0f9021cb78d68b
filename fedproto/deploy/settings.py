"""The settings of the server and of each member: a small TOML file on each machine.

What all members train by is in the server's file, and travels in every request.
"""

from __future__ import annotations

import hashlib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fedproto.config import plugins
from fedproto.config.choices import AUTO, complete, parse_choice, parse_choices
from fedproto.config.config_file import read_tables
from fedproto.config.options import (
    Bounds,
    File,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Option,
    Part,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Rounds,
    Samples,
    Threads,
    convert,
    names_file,
    options_of,
    parse,
    words,
)
from fedproto.config.settings import Delta, Seed, refuse_contradictions, two_lengths
from fedproto.core.batches import Training
from fedproto.core.class_names import normalise_name
from fedproto.core.client_names import MAX_NAME_CHARACTERS, is_chosen_name
from fedproto.core.combination import with_combiner
from fedproto.core.optimisers import Optimiser, OptimiserName, RateSchedule, ScheduleName
from fedproto.core.private_steps import PrivateSteps
from fedproto.core.transform_chains import with_transforms
from fedproto.core.types import Algorithm, GroupLayout
from fedproto.errors import ConfigError, shown, unknown
from fedproto.feature_maps import Inputs
from fedproto.privacy.noisy_uploads import Protection
from fedproto.runs.composition import add_teacher

#: Ends the sentence that refuses a member's name or site.
NAMES_ACCEPTED = f"a line of at most {MAX_NAME_CHARACTERS} characters is accepted"
#: What can leave a member, beside names and accuracies.
SENDS = ("prototypes", "weights", "counts")
#: What a member may demand of `privacy`.
PROTECTIONS = ("none", "release", "training", "client")
#: Settings of a member that are paths, relative to the folder of its file.
_MEMBER_PATHS = ("state", "weights", "data_dir", "ledger")
#: Settings of a member that its saved state belongs to, in the order of its fingerprint.
IDENTITY = ("name", "data", "model", "classes")


@dataclass(frozen=True)
class TrainingTerms:
    """How all members of a federation train; the server states it in every request."""

    algorithm: str = "fedproto"
    transform: str = ""  # what is done to uploads before they travel; see docs/transforms.md
    teacher: str = ""  # solved from sums beside the algorithm; see docs/closed-form.md
    feature_map: str = ""  # the features of a closed form; it must be named
    dim: Annotated[int, Bounds(0, 10**6)] = 50  # values of a prototype; 0: that of the models
    batch: Samples = 8
    lr: PositiveFloat = 0.01
    momentum: Fraction = 0.5
    optimiser: OptimiserName = "sgd"
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: NonNegativeFloat = 0.0
    class_weights: Literal["none", "balanced"] = "none"
    sampling: Literal["shuffle", "balanced"] = "shuffle"
    epochs: Rounds = 1
    local_steps: Annotated[int, Bounds(0, 10**7)] = 0  # batches per member and round; 0: `epochs`
    last_batch: Literal["auto", "keep", "drop"] = "auto"
    seed: Seed = 0
    #: What a member protects before it sends, or what the server does with `client`: see
    #: docs/privacy.md, also for the five that follow.
    privacy: Literal["none", "release", "training", "client"] = "none"
    noise_multiplier: NonNegativeFloat = 0.0  # of sums, in units of what one record (member) moves
    clip: PositiveFloat = 1.0  # the largest length of an embedding, or of a member's values
    count_threshold: NonNegativeFloat = 2.0  # deviations of its noise that a count must exceed
    step_noise: NonNegativeFloat = 0.0  # of each step of training, in units of gradient_clip
    gradient_clip: PositiveFloat = 1.0  # the largest length of a record's gradient

    def training(self) -> Training:
        """Return the settings of local training."""
        private = None
        if self.privacy == "training":
            private = PrivateSteps(self.gradient_clip, self.step_noise)
        return Training(
            self.batch,
            self.lr,
            self.momentum,
            self.epochs,
            self.last_batch,
            self.seed,
            Optimiser(self.optimiser, self.weight_decay, self.clip_norm),
            class_weights=self.class_weights,
            sampling=self.sampling,
            local_steps=self.local_steps or None,
            private=private,
        )

    def part(self) -> Part:
        """Return the algorithm's name with all its options."""
        return complete("algorithm", parse_choice("algorithm", self.algorithm), {}, {})

    def build(self) -> Algorithm:
        """Return the algorithm; ConfigError if it cannot be deployed."""
        if self.part().options.get("fixed"):
            raise ConfigError(
                "the option fixed is for newcomers in the simulator: "
                "a deployed server makes its own prototypes"
            )
        if self.part().options.get("m") == "auto":
            raise ConfigError(
                "m=auto is chosen on validation rows, which deployed members do not set apart: "
                "name a number from 0 to 1"
            )
        algorithm = plugins.build("algorithm", self.part())
        if self.teacher:
            teacher = complete("teacher", parse_choice("teacher", self.teacher), {}, {})
            algorithm = add_teacher(algorithm, teacher)
        return algorithm

    def count_fixed(self, algorithm: Algorithm) -> int:
        """Return the number of features of a closed form; 0 if the algorithm has none.

        All members must compute the same features, so the map is named, and it is one that needs
        neither a file nor the shape of an input.
        """
        if not algorithm.uses_fixed:
            return 0
        accepted = "random-conv or hashed-ngrams"
        if not self.feature_map:
            raise ConfigError(
                f"{algorithm.name} with a closed form needs `feature_map` in a deployment, such as "
                f"{accepted}: all members must compute the same features"
            )
        part = self.map_part()
        if part.name not in ("random-conv", "hashed-ngrams"):
            raise ConfigError(f"feature_map {part.name} cannot be deployed: {accepted} is accepted")
        return plugins.build("feature_map", part).count(Inputs(()))

    def map_part(self) -> Part:
        """Return the feature map's name with all its options."""
        return complete("feature_map", parse_choice("feature_map", self.feature_map), {}, {})

    def transform_parts(self) -> list[Part]:
        """Return the names of the transforms with all their options, in order."""
        parts = parse_choices("transform", self.transform)
        return [complete("transform", part, {}, {}) for part in parts]

    def protection(self) -> Protection:
        """Return how members make what they send private, or bound it for the server's noise."""
        if self.privacy == "client":
            return Protection(unit="client", noise=0.0, clip=self.clip, at="server")
        return Protection(
            unit="record",
            noise=self.noise_multiplier,
            clip=self.clip,
            threshold=self.count_threshold,
        )

    def transform_uploads(
        self, algorithm: Algorithm, layouts: Mapping[str, GroupLayout]
    ) -> Algorithm:
        """Return the algorithm with its uploads transformed; ConfigError if that does not fit.

        `layouts` is what the algorithm declares. One with clusters of members, such as fesem, is
        refused, too.
        """
        if any(layout.per == "cluster" for layout in layouts.values()):
            raise ConfigError(
                f"{algorithm.name} finds clusters among the members: it runs in the simulator only"
            )
        transforms = [plugins.build("transform", part) for part in self.transform_parts()]
        return with_transforms(algorithm, transforms, layouts)


@dataclass(frozen=True)
class ServerSettings:
    """The server's `[tool.flwr.app.config]`, possibly changed by `flwr run --run-config`.

    Names are separated by commas.
    """

    state: File = "server"  # the folder of everything the server keeps
    rounds: Rounds = 100
    #: How the learning rate changes over the rounds; a request states the rate of its round.
    schedule: ScheduleName = "constant"
    warmup: NonNegativeInt = 0
    #: The models that members may have, separated by commas, and the shape of their inputs, needed
    #: where weights travel: the server does not take them from a member.
    model: str = ""
    shape: str = ""
    classes: str = ""  # more may come if new_classes is true
    members: str = ""  # empty: everybody whom Flower lets in
    combiner: str = "sum"  # what becomes of the uploads of a round; see docs/combiners.md
    quorum: PositiveInt = 2  # members needed to begin a round, and replies needed to close it
    #: Fraction of the members present that are asked in a round, `quorum` of them at least; who
    #: that is depends on the seed, the round and who is present.
    participation: PositiveFraction = 1.0
    #: Seconds that a round waits for replies; an asynchronous one, that a request stays open.
    timeout: PositiveFloat = 600.0
    patience: PositiveFloat = 600.0  # seconds to wait for a quorum
    buffer: NonNegativeInt = 0  # replies that close an asynchronous round; 0: synchronous rounds
    staleness: NonNegativeFloat = 0.5  # exponent by which late replies count less
    max_staleness: NonNegativeInt = 100  # rounds since its request after which a reply is refused
    new_classes: bool = False
    max_bytes: PositiveInt = 64 * 2**20  # of one reply's arrays
    max_count: PositiveFloat = 1e7  # weight of a class, or of a member
    max_norm: PositiveFloat = 1e4  # root mean square of a prototype, or of one tensor of weights
    #: Weight and root mean square of a class, divided by the median of the other members'.
    max_count_ratio: PositiveFloat = 100.0
    max_norm_ratio: PositiveFloat = 5.0
    max_classes: PositiveInt = 1000  # of the federation
    max_new_classes: PositiveInt = 100  # brought by one member, in all rounds together
    trust_plugins: bool = False  # whether code that these settings name may run at the server
    #: With privacy=client: the most that a member may spend on this federation; 0: any.
    epsilon: NonNegativeFloat = 0.0
    delta: Delta = 1e-5

    def combine(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm with the server's combiner; ConfigError if they do not fit."""
        part = complete("combiner", parse_choice("combiner", self.combiner), {}, {})
        combiner = plugins.build("combiner", part)
        if self.quorum < combiner.needs:
            raise ConfigError(
                f"combiner {combiner.name} needs at least {combiner.needs} replies, but a round "
                f"may close with {self.quorum}: raise `quorum`, or choose another combiner"
            )
        return with_combiner(algorithm, combiner)

    def rate_factor(self, round: int) -> float:
        """Return what the schedule makes of the learning rate in a round, as a factor of it."""
        return RateSchedule(self.schedule, self.warmup, self.rounds).factor(round)


@dataclass(frozen=True)
class MemberSettings:
    """A member's own TOML file. Of its text, only names leave it: its own and those of classes.

    What training makes of the data leaves it as `sends` and `tell_accuracy` allow. Names are
    separated by commas.
    """

    name: str
    data: str  # any source: folder:scans, csv:PATH, ...
    state: File  # the folder of the member's model and round
    model: str = "auto"
    classes: str = ""  # those it takes part with; empty: all classes of its data
    site: str = ""  # what people call it, such as "Uniklinik Köln"; empty: its name
    weights: File | None = None
    data_dir: File | None = None
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    threads: Threads = 1
    tell_accuracy: bool = True
    trust_plugins: bool = False  # whether code that this file names may run at the member
    algorithms: str = ""  # those it takes part in; empty: all that `sends` allows
    sends: str = "prototypes,counts"  # what may leave it: prototypes, weights, counts
    #: The least protection it accepts: see docs/privacy.md, also for the five that follow.
    privacy: str = ""  # which settings of `privacy` a server may ask for; empty: any, also none
    max_epsilon_per_year: PositiveFloat | None = None  # over all federations
    epsilon_delta: Delta = 1e-5  # the delta that goes with this epsilon
    min_noise: NonNegativeFloat = 0.0  # the least noise multiplier of anything it releases
    secure_aggregation: Literal["accepted", "required"] = "accepted"
    ledger: File | None = None  # the file of epsilon spent; None: beside `state`

    @property
    def title(self) -> str:
        """What people call the member."""
        return self.site or self.name

    def identity(self) -> dict[str, str]:
        """Return the settings that are fixed from the member's first round on."""
        return {key: getattr(self, key) for key in IDENTITY}

    def fingerprint(self) -> str:
        """Return a short hash that changes if a saved state is no longer this member's."""
        return hashlib.sha256("\0".join(self.identity().values()).encode()).hexdigest()[:16]


def parse_settings(kind: type, given: Mapping[str, Any], where: str) -> Any:
    """Return an instance of one of these classes, with checked values.

    Keys may be spelled with hyphens. Raises ConfigError about unknown or missing keys and wrong
    values; `where` names the place they come from.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    given = _with_underscores(given)
    values = {}
    for key, value in given.items():
        if key not in hints:
            raise unknown(f"key in {where}", key, hints)
        values[key] = convert(key, value, hints[key])
    for field in fields(kind):
        is_required = field.default is MISSING and field.default_factory is MISSING
        if is_required and field.name not in values:
            raise ConfigError(f"{where} lacks {field.name!r}")
    return kind(**values)


def _with_underscores(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in given.items()}


def read_member(path: Path, operated: bool = False) -> MemberSettings:
    """Return the settings in a member's file; paths in it are relative to the file's folder.

    With `operated`, the member's operator started it with this file. Only then does its key
    `trust-plugins` count: a file that somebody sent cannot vouch for itself.
    """
    given = _with_underscores(read_tables(path))
    settings: MemberSettings = parse_settings(MemberSettings, given, str(path))
    if not settings.name.strip():
        raise ConfigError(f"{path} gives the member no name")
    if not is_chosen_name(settings.name):
        raise ConfigError(f"{path} has the name {shown(settings.name, 60)}: {NAMES_ACCEPTED}")
    site = normalise_name(settings.site)
    if site and not is_chosen_name(site):
        raise ConfigError(f"{path} has the site {shown(settings.site, 60)}: {NAMES_ACCEPTED}")
    chosen = {"dataset": settings.data, "model": settings.model}
    if operated:
        _trust_if_allowed(chosen, settings.trust_plugins, str(path))
    else:
        plugins.refuse_plugins(chosen, path)
    algorithms = plugins.names("algorithm")
    _refuse_unknown(words(settings.algorithms), algorithms, f"algorithm in {path}")
    _refuse_unknown(words(settings.sends), SENDS, f"word in `sends` in {path}")
    _refuse_unknown(words(settings.privacy), PROTECTIONS, f"word in `privacy` in {path}")
    folder = path.absolute().parent
    located: dict[str, Any] = {"site": site, "data": _locate_data(folder, settings.data)}
    located["model"] = _locate_options(folder, "model", settings.model)
    for key in _MEMBER_PATHS:
        if getattr(settings, key) is not None:
            located[key] = str(folder / given[key])
    return replace(settings, **located)


def _refuse_large_buffer(settings: ServerSettings) -> None:
    """Raise ConfigError if a round would wait for more replies than there are members."""
    members = len(words(settings.members))
    if members and settings.buffer > members:
        raise ConfigError(
            f"buffer is {settings.buffer}, but `members` lists only {members}: a round would wait "
            "for ever"
        )


def _refuse_idle_participation(settings: ServerSettings) -> None:
    """Raise ConfigError if members would be sampled for rounds that have no beginning."""
    if settings.buffer and settings.participation < 1:
        raise ConfigError(
            f"participation is {settings.participation:g}, but asynchronous rounds ask every "
            "member that has answered its last request: leave buffer or participation out"
        )


def _trust_if_allowed(chosen: Mapping[str, str], allowed: bool, where: str) -> None:
    """Trust the plug-ins that an operator's own settings name, or say which key is missing."""
    if allowed:
        plugins.trust_chosen(chosen)
    plugins.refuse_plugins(chosen, where, "write trust-plugins = true there")


def _refuse_unknown(names: list[str], known: Iterable[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise unknown(what, name, known)


def _locate_data(folder: Path, data: str) -> str:
    """Return a source such as `csv:scans.csv` with its path in the folder, if it exists there.

    Options may follow the path, as in `csv:scans.csv(label=finding)`; files that they name are in
    the folder.
    """
    kind, colon, path = data.partition(":")
    if colon and not Path(path).is_absolute() and (folder / path).exists():
        return f"{kind}:{folder / path}"
    data = _locate_options(folder, "dataset", data)
    parts = parse(data, "data")
    kind, colon, path = parts[0].name.partition(":")
    is_one_path = len(parts) == 1 and colon and not Path(path).is_absolute()
    if is_one_path and (folder / path).exists():
        return str(replace(parts[0], name=f"{kind}:{folder / path}"))
    return data


def _locate_options(folder: Path, kind: str, choice: str) -> str:
    """Return the choice of a plug-in such that files that its options name are in the folder."""
    parts = parse(choice, kind)
    if not any(part.options for part in parts):
        return choice
    located = []
    for part in parts:
        options = dict(part.options)
        for name in _find_file_options(kind, part) & set(options):
            if options[name].lower() != "none":
                options[name] = str(folder / options[name])
        located.append(replace(part, options=options))
    return choice if located == parts else ",".join(str(part) for part in located)


def _find_file_options(kind: str, part: Part) -> set[str]:
    """Return the options of a plug-in that name files; for `auto`, those of all models."""
    names = plugins.names(kind) if part.name == AUTO else [part.name]
    options: dict[str, Option] = {}
    for name in names:
        options |= options_of(plugins.find(kind, name))
    return {name for name, option in options.items() if names_file(option.kind)}


def split_run_config(config: Mapping[str, Any], where: str) -> tuple[ServerSettings, TrainingTerms]:
    """Return Flower's one table of settings as the server's own and those it states to members."""
    term_names = {field.name for field in fields(TrainingTerms)}
    for_server = {}
    for_members = {}
    for key, value in _with_underscores(config).items():
        if key in term_names:
            for_members[key] = value
        else:
            for_server[key] = value
    settings = parse_settings(ServerSettings, for_server, where)
    terms = parse_settings(TrainingTerms, for_members, where)
    refuse_contradictions(settings.rounds, settings.warmup, terms.class_weights, terms.sampling)
    _refuse_large_buffer(settings)
    _refuse_idle_participation(settings)
    if terms.local_steps and terms.epochs > 1:
        raise two_lengths(terms.local_steps, terms.epochs)
    chosen = {
        "algorithm": terms.algorithm,
        "model": settings.model,
        "combiner": settings.combiner,
        "transform": terms.transform,
        "teacher": terms.teacher,
        "feature_map": terms.feature_map,
    }
    _trust_if_allowed(chosen, settings.trust_plugins, where)
    return settings, terms
