"""A client after training: what its model makes of an input, and how near that is to each class."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedproto.config import plugins
from fedproto.config.choices import parse_choice
from fedproto.core import prototypes
from fedproto.core.client_names import find_client
from fedproto.core.closed_form import TEACHER, to_log_probabilities
from fedproto.core.federation import Member
from fedproto.core.tensors import find_mismatch
from fedproto.core.types import Tree
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, DataError, FedProtoError, RunFolderError
from fedproto.feature_maps import Compute, compute_features
from fedproto.inference.calibration import compute_novelty
from fedproto.inference.model_building import (
    build_model,
    drop_file_options,
    first_line,
    load_into_copy,
)
from fedproto.inference.temperature import fit_temperature
from fedproto.inference.training_rows import (
    TrainingSource,
    no_training_rows,
    training_rows_in,
    training_rows_of,
)
from fedproto.inference.ways import ALL_WAYS, By
from fedproto.models import Fit
from fedproto.runs.client_models import INDEX
from fedproto.runs.devices import torch_settings
from fedproto.runs.fixed_features import build_map, describe_preprocessed
from fedproto.runs.folder import RunFolder
from fedproto.runs.held_out import (
    MAX_HELD_OUT_ROWS,
    Outputs,
    compute_outputs,
    compute_rows,
    split_test_rows,
)
from fedproto.runs.prototype_files import Prototypes, read_prototypes
from fedproto.runs.result import Result
from fedproto.runs.stored_clients import ClientModels, StoredClient, find_most_experienced
from fedproto.runs.teacher_files import TEACHER_FILE, SolvedTeacher, read_teacher


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassScorer:
    """Scores classes by a model's outputs; it needs no model and no inputs.

    A way to classify is `by` ("prototype", "head" or "both", "teacher" or one of these three
    "+teacher") and `among` ("all" or "own" classes).
    """

    classes: tuple[str, ...]  # of the head's outputs
    own: tuple[str, ...]  # the classes the client was trained on
    prototypes: Prototypes | None  # the federation's; None if its algorithm has none
    about: dict[str, Any] = field(default_factory=dict)  # for people: data set, model, accuracy ...
    teacher: SolvedTeacher | None = None  # the closed form that the federation has, if any
    teacher_weight: float = 1.0  # the client's own, beside other scores

    @property
    def default_by(self) -> By:
        """What this client classifies by where nothing else is asked for.

        By prototypes if there are any, else by its head, and either with the teacher beside it.
        """
        if self.teacher is None:
            return "head" if self.prototypes is None else "prototype"
        if self.teacher.is_alone:
            return "teacher"
        return "head+teacher" if self.prototypes is None else "prototype+teacher"

    def list_ways(self) -> list[By]:
        """Return what is shown where nothing else is asked for: single opinions and their sums."""
        if self.teacher is not None and self.teacher.is_alone:
            return ["teacher"]
        ways: list[By] = ["head"] if self.prototypes is None else ["prototype", "head", "both"]
        if self.teacher is None:
            return ways
        return [*ways, "teacher", "head+teacher" if self.prototypes is None else "both+teacher"]

    def candidates(self, by: str, among: str) -> tuple[str, ...]:
        """Return the classes to choose among: all of the federation's, or the client's own."""
        if TEACHER in by:
            teacher = self._find_teacher()
            if by == TEACHER:
                known = teacher.known_classes()
                return tuple(name for name in known if among == "all" or name in self.own)
        by = by.removesuffix(f"+{TEACHER}")
        if self.teacher is not None and self.teacher.is_alone:
            raise ConfigError(
                f"{self._name_algorithm()} has trained no model: classify by teacher, not by {by}"
            )
        if by == "head":
            return self.classes if among == "all" else self.own
        if self.prototypes is None:
            raise ConfigError(f"{self._name_algorithm()} has no prototypes: classify by head")
        names = []
        known = self.prototypes.known.tolist()
        for name, is_known in zip(self.prototypes.classes, known, strict=True):
            is_in_head = by == "prototype" or name in self.classes
            if is_known and is_in_head and (among == "all" or name in self.own):
                names.append(name)
        return tuple(names)

    def _name_algorithm(self) -> str:
        return str(self.about.get("algorithm", "this algorithm"))

    def _find_teacher(self) -> SolvedTeacher:
        """Return the teacher; refused if there is none."""
        if self.teacher is None:
            raise ConfigError(
                "there is no teacher to classify by: it needs a run with --teacher, or of the "
                "algorithm closed-form"
            )
        return self.teacher

    def score(self, by: str, among: str, outputs: Outputs) -> Tensor:
        """Return (n, candidates): minus the distance (Eq. 4), or the logit; larger is likelier.

        By both, it is the sum of both log-probabilities over the candidates; with the teacher
        beside it, that of log-probabilities over all classes, as in training.
        """
        names = self.candidates(by, among)
        if by == TEACHER:
            assert outputs.teacher is not None, "the teacher has scored the rows"
            return self._find_teacher().select(outputs.teacher, names)
        if TEACHER in by:
            return self._add_teacher(by.removesuffix(f"+{TEACHER}"), names, outputs)
        if by == "prototype":
            return self._score_by_prototype(names, outputs)
        columns = [self.classes.index(name) for name in names]
        logits = outputs.logits[:, columns]
        if by == "head":
            return logits
        by_prototype = self._score_by_prototype(names, outputs)
        dim = outputs.features.shape[1]
        return prototypes.add_log_probabilities(logits, by_prototype, dim, self.measure_tau())

    def _add_teacher(self, by: str, names: tuple[str, ...], outputs: Outputs) -> Tensor:
        """Return the sum of the log-probabilities of a way and of the teacher: (n, names)."""
        assert outputs.teacher is not None, "the teacher has scored the rows"
        everything = self.candidates(by, "all")
        own = to_log_probabilities(self.score(by, "all", outputs))
        opinion = self._find_teacher().judge(outputs.teacher, everything)
        columns = [everything.index(name) for name in names]
        return (own + self.teacher_weight * opinion)[:, columns]

    def _score_by_prototype(self, names: tuple[str, ...], outputs: Outputs) -> Tensor:
        assert self.prototypes is not None, "`candidates` refuses that"
        values = self.prototypes.over(names).values.float()
        return -prototypes.distances(outputs.features, values, "l2")

    def measure_tau(self) -> Tensor:
        """Return τ of the prediction by both, as a number: ()."""
        assert self.prototypes is not None, "without prototypes there is no such prediction"
        shared = self.prototypes
        return shared.tau.measure(shared.values.float(), shared.known.float())

    def calibrate(self, outputs: Outputs) -> dict[str, np.ndarray]:
        """Return the novelty of held-out rows of the client's own classes, per way to classify."""
        if not len(outputs.features):
            return {}
        calibration = {}
        for by, among in self._possible_ways(outputs):
            scores = self.score(by, among, outputs)
            calibration[f"{by} {among}"] = compute_novelty(by, scores).numpy()
        return calibration

    def fit_temperatures(self, outputs: Outputs, labels: Tensor) -> dict[str, float]:
        """Return the temperature of each way to classify, fitted on validation rows.

        `labels` are places in `classes`. Rows of classes that are not among the candidates are left
        out; a way for which too few rows are left has no temperature.
        """
        temperatures = {}
        for by, among in self._possible_ways(outputs):
            candidates = self.candidates(by, among)
            column_of = {name: column for column, name in enumerate(candidates)}
            columns = torch.tensor([column_of.get(name, -1) for name in self.classes])[labels]
            is_candidate = columns >= 0
            scores = self.score(by, among, outputs)[is_candidate]
            temperature = fit_temperature(scores, columns[is_candidate])
            if temperature is not None:
                temperatures[f"{by} {among}"] = temperature
        return temperatures

    def _possible_ways(self, outputs: Outputs) -> list[tuple[str, str]]:
        """Return the ways to classify these rows that have something to choose among."""
        possible = []
        for way in ALL_WAYS:
            by, among = way.split()
            if TEACHER in by and (self.teacher is None or outputs.teacher is None):
                continue
            if TEACHER in by and self.teacher is not None and self.teacher.left:
                continue  # it has been solved again since it scored these rows
            if by != TEACHER and self.teacher is not None and self.teacher.is_alone:
                continue
            needs_prototypes = by.removesuffix(f"+{TEACHER}") in ("prototype", "both")
            if needs_prototypes and self.prototypes is None:
                continue
            if self.candidates(by, among):
                possible.append((by, among))
        return possible


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainedClient(ClassScorer):
    """A client of a federation after training: a scorer with its model and its preprocessing."""

    module: nn.Module  # in eval mode: preprocessed inputs -> (features, logits)
    preprocessing: Preprocessing
    calibration: dict[str, np.ndarray] = field(default_factory=dict)  # see `calibrate`
    temperatures: dict[str, float] = field(default_factory=dict)  # see `fit_temperatures`
    is_from_python: bool = False  # whether the module was passed from Python, so no text names it
    #: Makes the teacher's features of preprocessed inputs, if there is a teacher.
    feature_map: Compute | None = None
    #: Where its training rows come from, which only reasons need.
    training: TrainingSource = field(
        default_factory=lambda: no_training_rows("nothing says where its training rows are")
    )

    def __repr__(self) -> str:
        who = self.about.get("name", self.about.get("client", ""))
        model = self.about.get("model", type(self.module).__name__)
        dataset = self.about.get("dataset")
        data = f" on {dataset}" if dataset else ""
        return f"<client {who}: {model}{data}, {len(self.own)} of {len(self.classes)} classes>"

    def forward(self, x: Tensor) -> Outputs:
        """Return the model's outputs for preprocessed inputs, and the teacher's scores."""
        outputs = compute_outputs(self.module, x)
        if self.teacher is None or self.feature_map is None:
            return outputs
        features = compute_features(self.feature_map, x.to(self.teacher.vectors))
        return outputs._replace(teacher=self.teacher.score(features))

    @property
    def compares_fixed(self) -> bool:
        """Whether inputs are near or far by the teacher's features: no model was trained."""
        return self.teacher is not None and self.teacher.is_alone

    def embed(self, x: Tensor) -> Tensor:
        """Return preprocessed inputs in the space in which their reasons are sought: (n, d).

        These are the model's embeddings or, where no model was trained, the teacher's features.
        """
        if not self.compares_fixed:
            return compute_outputs(self.module, x).features
        assert self.teacher is not None and self.feature_map is not None, "there is a teacher"
        return compute_features(self.feature_map, x.to(self.teacher.vectors)).float()

    def forward_raw(self, x: np.ndarray) -> Outputs:
        """Return the model's outputs for inputs as the data set stores them."""
        return self.forward(self.preprocessing(x))

    def probe_outputs(self) -> Outputs:
        """Return the outputs for two inputs that any model takes.

        Their values lie between 0 and 1, so that they are ids of words, too.
        """
        shape = self.preprocessing.shape
        try:
            inputs = torch.linspace(0, 1, 2 * math.prod(shape)).reshape(2, *shape)
            return self.forward(inputs)
        except Exception as error:  # of any kind: the model may be a plug-in
            reason = first_line(error)
            raise DataError(f"the model fails on inputs of shape {shape}: {reason}") from error

    def refuse_other_sizes(self, dim: int) -> None:
        """Refuse outputs that do not fit `dim`, the classes and the prototypes.

        A file may be wrong about its model, and a plug-in may have changed since.
        """
        outputs = self.probe_outputs()
        found = (outputs.features.shape[1], outputs.logits.shape[1])
        if found != (dim, len(self.classes)):
            raise DataError(
                f"the model gives {found[0]} features and {found[1]} logits, "
                f"where {dim} and {len(self.classes)} are wanted"
            )
        if self.prototypes is not None and self.prototypes.values.shape[1] != dim:
            width = self.prototypes.values.shape[1]
            raise DataError(f"the prototypes have {width} values, and the features {dim}")


# --- from a run folder


def load_client(
    run: Path, client: int | str | None = None, module: nn.Module | None = None
) -> TrainedClient:
    """Return a client of a finished run, as it is evaluated; the run's data is not needed.

    `client` is its name, such as "Ulm", or its number; None: the one with the most classes, and of
    these the most training rows. `module` is the client's architecture, if it was passed from
    Python when the run was started.
    """
    models = ClientModels.open(RunFolder.open(run))
    stored = models.read(models.find_most_experienced() if client is None else client)
    with torch_settings(
        models.threads, models.precision
    ):  # distances to the bit of those in training
        scorer = make_scorer(models, stored)
        held_out = stored.held_out
        calibration = scorer.calibrate(held_out.calibration)
        temperatures = scorer.fit_temperatures(held_out.validation, held_out.validation_labels)
    try:
        trained = TrainedClient(
            **vars(scorer),
            module=_restore_module(models, stored, module),
            preprocessing=stored.preprocessing,
            calibration=calibration,
            temperatures=temperatures,
            is_from_python=stored.is_from_python,
            feature_map=build_teacher_map(scorer.teacher, stored.preprocessing),
            training=training_rows_in(models.folder.path, stored.id),
        )
        trained.refuse_other_sizes(models.dim)
    except DataError as error:
        index = models.folder.path / INDEX
        raise RunFolderError(
            f"client {stored.name} cannot be restored from {index}: {error}"
        ) from error
    return trained


def build_teacher_map(
    teacher: SolvedTeacher | None, preprocessing: Preprocessing
) -> Compute | None:
    """Return what makes the teacher's features of preprocessed inputs; None without a teacher.

    Raises DataError if the map does not give as many values as the teacher has.
    """
    if teacher is None:
        return None
    inputs = describe_preprocessed(preprocessing)
    try:
        feature_map = build_map([parse_choice("feature_map", teacher.feature_map)])
        count = feature_map.count(inputs)
        compute = feature_map.build(inputs)
    except ConfigError as error:
        raise DataError(f"the teacher's features cannot be computed: {error}") from error
    width = teacher.vectors.shape[1]
    if count != width:
        raise DataError(
            f"the teacher takes {width} features, but {teacher.feature_map} gives {count}"
        )
    return compute


def make_scorer(models: ClientModels, stored: StoredClient) -> ClassScorer:
    """Return a client's scorer, with the prototypes that the federation has now."""
    path = models.folder.path
    shared = read_prototypes(path) if models.has_prototypes else None
    if shared is not None and shared.values.shape[1] != models.dim:
        width = shared.values.shape[1]
        raise RunFolderError(
            f"the prototypes in {path} have {width} values, and its models give {models.dim}"
        )
    about = {
        "run": path.name,
        "client": stored.id,
        "name": stored.name,
        "algorithm": models.algorithm,
        "dataset": stored.dataset,
        "model": stored.model,
        "round": models.round,
        "accuracy": stored.accuracy,
    }
    return ClassScorer(
        classes=models.classes,
        own=stored.own_classes,
        prototypes=shared,
        about=about,
        teacher=_read_run_teacher(models, stored.id),
        teacher_weight=stored.teacher_weight,
    )


def _read_run_teacher(models: ClientModels, client: int) -> SolvedTeacher | None:
    """Return the teacher that a client has now; None if the federation has none."""
    teacher = read_teacher(models.folder.path)
    if teacher is None:
        return None
    own = teacher.own_bias
    if teacher.classes != models.classes or (own is not None and own.shape[1] != len(models)):
        raise RunFolderError(
            f"{models.folder.path / TEACHER_FILE} has other classes or clients than the run"
        )
    return teacher.of_client(client)


def _restore_module(
    models: ClientModels, stored: StoredClient, module: nn.Module | None
) -> nn.Module:
    """Return the client's model: the module given, or else built from its text, with its weights.

    A plug-in model is imported only if it is trusted.
    """
    path = models.folder.path
    fit = Fit(stored.preprocessing.shape, len(models.classes), models.dim)
    if module is not None:
        return load_into_copy(module, stored.state, fit)
    if stored.is_from_python:
        raise ConfigError(
            f"client {stored.name} of {path} has a module that was passed from Python "
            f"({stored.model}), whose code no file holds: pass the module again, "
            "as in fedproto.Classifier.of(RUN, module=...)"
        )
    plugins.refuse_plugins({"model": stored.model}, path / INDEX)
    try:
        return build_model(drop_file_options(stored.model), fit, stored.state)
    except FedProtoError as error:
        raise DataError(str(error)) from error


# --- from a client at hand, with its data


def take_client(result: Result, client: int | str | None = None) -> TrainedClient:
    """Return a client of a finished run that is still in memory, with its data.

    `client` is as for `load_client`.
    """
    trained = result.trained
    assert trained is not None, "the result was not read from a folder"
    federation = trained.federation
    if client is None:
        experience = [(len(each.classes), len(each.train)) for each in federation.members]
        client = find_most_experienced(experience)
    names = [member.name for member in federation.members]
    member = federation.members[find_client(names, client)]
    about = {
        "client": member.id,
        "name": member.name,
        "algorithm": trained.algorithm.name,
        "dataset": member.dataset,
        "model": member.model,
        "round": result.data["rounds"],
        "accuracy": result.clients[member.id]["accuracy"],
    }
    shared = None
    if result.prototypes:
        values = result.prototypes["prototypes"]
        known = result.prototypes["known"]
        shared = Prototypes(federation.classes, values, known, tau=trained.tau)
    state = trained.as_evaluated(member, result.states[member.id])
    teacher = None if trained.teacher is None else trained.teacher.of_client(member.id)
    weight = trained.teacher_weights[member.id] if trained.teacher_weights else 1.0
    calibrated = calibrate_client(member, state, federation.classes, shared, about, teacher, weight)
    return replace(
        calibrated,
        is_from_python=trained.has_own_modules,
        training=training_rows_of(federation, member),
    )


def calibrate_client(
    member: Member,
    state: Tree,
    classes: tuple[str, ...],
    shared: Prototypes | None,
    about: dict[str, Any],
    teacher: SolvedTeacher | None = None,
    teacher_weight: float = 1.0,
) -> TrainedClient:
    """Return a client with this state, calibrated on one half of its test rows."""
    mismatch = find_mismatch(member.whole_state(member.initial), state)
    if mismatch is not None:
        raise RunFolderError(
            f"the state of client {member.name} does not fit its model: {mismatch}"
        )
    trained = TrainedClient(
        classes=classes,
        own=tuple(classes[label] for label in member.classes),
        prototypes=shared,
        about=about,
        module=load_into_copy(member.whole_module, state),
        preprocessing=member.preprocessing,
        teacher=teacher,
        teacher_weight=teacher_weight,
        feature_map=build_teacher_map(teacher, member.preprocessing),
    )
    module = trained.module
    if member.frozen is not None:  # its examples are features
        trained_part = {name: state[name] for name in member.initial}
        module = load_into_copy(member.module, trained_part)
    if member.validation is not None:
        rows = member.validation.rows[:MAX_HELD_OUT_ROWS]
        outputs = compute_rows(module, member.validation, rows, teacher)
        labels = member.validation.y[rows].cpu()
        trained = replace(trained, temperatures=trained.fit_temperatures(outputs, labels))
    held_out, _ = split_test_rows(member)
    rows = held_out.rows[:MAX_HELD_OUT_ROWS]
    if not len(rows):
        return trained
    outputs = compute_rows(module, held_out, rows, teacher)
    return replace(trained, calibration=trained.calibrate(outputs))
