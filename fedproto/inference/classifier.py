"""A trained client as a scikit-learn classifier: by prototypes or head, or "none of these"."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from fedproto.core import prototypes
from fedproto.data.shared.feature_encoding import Columns
from fedproto.data.shared.python_data import is_frame
from fedproto.errors import ConfigError, DataError
from fedproto.inference.calibration import compute_novelty
from fedproto.inference.input_files import encode_frame
from fedproto.inference.judgement import (
    Judgement,
    find_candidates,
    find_threshold,
    judge_scores,
    name_client,
)
from fedproto.inference.reasons import (
    DEFAULT_COUNT,
    ClassVectors,
    Explainer,
    Reason,
    Surroundings,
)
from fedproto.inference.trained_client import TrainedClient, load_client, take_client
from fedproto.inference.training_rows import TrainingRows, TrainingSource, keep_rows
from fedproto.inference.ways import Among, By
from fedproto.runs.result import Result


class _Fitted(NamedTuple):
    """What `fit` computed from samples."""

    classes: np.ndarray
    prototypes: Tensor  # (classes, dim)
    calibration: np.ndarray
    samples: TrainingSource


class Classifier(ClassifierMixin, BaseEstimator):
    """A trained client as a scikit-learn classifier; labels are class names.

    trained  a `TrainedClient`, as `Classifier.load(FOLDER)` or `Classifier.of(RUN, client)` give
             it. None: inputs are their own embedding, so that `fit` makes a nearest-class-mean
             classifier.
    by       "prototype": the nearest prototype, Eq. 4; "head": the client's own head; "both": the
             sum of their log-probabilities; "teacher": the run's closed form; one of the first
             three and "+teacher", as "head+teacher": the sum with the teacher's
    among    "all" classes of the federation, or the client's "own"
    reject   fraction of known inputs that may be called "none of these"; None or 0: none is.
             Refused if fewer than 1 / reject − 1 rows were held out, because such a calibration
             could reject nothing

    `fit` computes new prototypes from samples of any classes with the client's embedding as it
    is; nothing is trained.
    """

    _fitted: _Fitted | None  # absent until the classifier is ready

    def __init__(
        self,
        trained: TrainedClient | None = None,
        *,
        by: By = "prototype",
        among: Among = "all",
        reject: float | None = None,
    ) -> None:
        self.trained = trained
        self.by = by
        self.among = among
        self.reject = reject

    @classmethod
    def of(
        cls,
        run: str | Path | Result,
        client: int | str | None = None,
        *,
        module: nn.Module | None = None,
        by: By | None = None,
        **options: Any,
    ) -> Classifier:
        """Return a classifier for a client of a finished run, with the prototypes of now.

        Args:
            run: what `fedproto.run` returned, or a run folder; the data is not needed.
            client: its name, such as `"Ulm"`, or its number; None: the one that knows the most
                classes, and of these has the most training rows.
            module: the client's architecture, for the folder of a run that was started from Python
                with modules of its own; its weights come from the run folder.
            by: "prototype", "head" or "both", or with a teacher "teacher", "head+teacher" and so
                on; None: by prototypes if there are any, with the teacher if there is one.
            options: `among` and `reject`, as for `Classifier`.
        """
        return cls.from_trained(_find_trained(run, client, module), by=by, **options)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        module: nn.Module | None = None,
        by: By | None = None,
        **options: Any,
    ) -> Classifier:
        """Return a classifier for a client that `fedproto export` or `Result.export` wrote.

        `module` is the client's architecture, if it was passed from Python to the run.
        """
        from fedproto.inference.export.read import read_exported

        return cls.from_trained(read_exported(Path(folder), module), by=by, **options)

    @classmethod
    def from_trained(
        cls, trained: TrainedClient, *, by: By | None = None, **options: Any
    ) -> Classifier:
        """Return a classifier that is ready to predict.

        Unless `by` is given, it classifies by prototypes if the client has some, and else by head;
        with the teacher beside it if the run had one, and by that alone if no model was trained.
        """
        if by is None:
            by = trained.default_by
        classifier = cls(trained, by=by, **options)
        classifier.n_features_in_ = math.prod(trained.preprocessing.shape)
        classifier._fitted = None
        _ = classifier.classes_  # refuses if there is no class to choose among
        _ = classifier.threshold_  # refuses if `reject` would do nothing
        return classifier

    @property
    def classes_(self) -> np.ndarray:
        """The classes that `fit` saw, or else those of the client that are chosen among."""
        fitted = self._find_fitted()
        if fitted is not None:
            return fitted.classes
        if "_fitted" not in vars(self) or self.trained is None:
            raise AttributeError(
                "classes_ needs a classifier that is ready: fit it, or take a trained client"
            )
        return np.array(find_candidates(self.trained, self.by, self.among))

    @property
    def prototypes_(self) -> np.ndarray | None:
        """The prototypes that `fit` computed, in the order of `classes_`; None without `fit`."""
        fitted = self._find_fitted()
        return None if fitted is None else fitted.prototypes.numpy()

    @property
    def calibration_(self) -> np.ndarray:
        """The novelty of held-out inputs of known classes."""
        fitted = self._find_fitted()
        if fitted is not None:
            return fitted.calibration
        assert self.trained is not None, "the classifier is ready"
        return self.trained.calibration.get(f"{self.by} {self.among}", np.zeros(0))

    @property
    def threshold_(self) -> float:
        """The novelty above which an input is "none of these"; infinite without `reject`."""
        check_is_fitted(self, "classes_")
        threshold = self._find_threshold()
        return math.inf if threshold is None else threshold

    @property
    def temperature_(self) -> float | None:
        """What scores are divided by before the softmax; None if nothing was calibrated."""
        if self._find_fitted() is not None or self.trained is None:
            return None
        return self.trained.temperatures.get(f"{self.by} {self.among}")

    def fit(self, X: Any, y: Any) -> Classifier:
        """Compute a prototype per class of samples: the mean of their embeddings (Eq. 3).

        The calibration is each sample's distance to the nearest mean, where its own class's mean
        leaves the sample out: that distance is n/(n − 1) times the distance to the mean of all n.
        """
        if self.by != "prototype":
            raise ConfigError("fit computes prototypes: it is for by='prototype'")
        if self.trained is None:
            X, y = validate_data(self, X, y, dtype=np.float64)  # noqa: N806
        else:
            y = np.asarray(y)
            self.n_features_in_ = math.prod(self.trained.preprocessing.shape)
            if len(X) != len(y):
                raise DataError(f"{len(X)} inputs were given, but {len(y)} labels")
        check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        targets = torch.from_numpy(labels)
        features = self._embed(X)
        weights = torch.ones(len(labels)).to(features)
        means, counts = prototypes.class_means(features, targets, weights, len(classes))
        distances = prototypes.distances(features, means, "l2")
        # Infinite for a class of one sample, which says nothing about others.
        leave_one_out = (counts / (counts - 1))[targets]
        distances[torch.arange(len(labels)), targets] *= leave_one_out
        calibration = distances.amin(1)[torch.isfinite(leave_one_out)]
        samples = keep_rows(TrainingRows(features, y.tolist(), np.arange(len(y))))
        self._fitted = _Fitted(classes, means, calibration.numpy(), samples)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return class names; "none of these" where `reject` says so."""
        return self._judge(X).labels

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return (n, classes): softmaxes of the logits, of minus the distances, or of both.

        They are calibrated if the client has validation rows: see `temperature_`.
        """
        return self._judge(X).probabilities

    def distances(self, X: Any) -> np.ndarray:
        """Return (n, classes): the L2 distance to each prototype, in the order of `classes_`."""
        if self.by != "prototype":
            raise ConfigError(f"by={self.by!r} there are no distances: by='prototype' has some")
        return self._judge(X).distances

    def novelty(self, X: Any) -> np.ndarray:
        """Return how little each input looks like any class; see `threshold_`."""
        return compute_novelty(self.by, self._score(X)).numpy()

    def explain(self, X: Any, count: int = DEFAULT_COUNT) -> list[Reason]:
        """Return each answer with its reasons: what is near the input, at most `count` of a kind.

        These are prototypes, means of the training rows of the client's own classes, and training
        rows of the client by their number; after `fit`, the samples count as training rows. The
        answers are those of `predict`. Training rows need the data that the client was trained
        on: where it is gone, and of an exported client, `missing` says so in a sentence.
        """
        judged = self._judge(X)
        found, missing = self._find_surroundings(X, count)
        labels = judged.labels.tolist()
        reasons = []
        for number, near in enumerate(found):
            reason = Reason(
                **vars(near),
                label=labels[number],
                by=self.by,
                probabilities=self._rank(judged.probabilities[number]),
                missing=missing,
            )
            reasons.append(reason)
        return reasons

    def _rank(self, probabilities: np.ndarray) -> tuple[tuple[Any, float], ...]:
        """Return the classes with their probabilities, the most probable first."""
        classes = self.classes_.tolist()
        best_first = np.argsort(-probabilities, kind="stable").tolist()
        return tuple((classes[place], float(probabilities[place])) for place in best_first)

    def _find_surroundings(self, x: Any, count: int) -> tuple[list[Surroundings], str | None]:
        """Return what is near each input, and why there are no training rows, if there are none."""
        fitted = self._find_fitted()
        if fitted is not None:
            names = fitted.classes.tolist()
            means = ClassVectors(names, fitted.prototypes, names)
            explainer = Explainer(means, fitted.samples, count)
            return explainer.explain(self._embed(x)), explainer.missing
        assert self.trained is not None, "the classifier is ready"
        explainer = Explainer.of(self.trained, self.among, count)
        inputs = self.trained.preprocessing(_to_array(x, self.trained))
        return explainer.explain(self.trained.embed(inputs)), explainer.missing

    def _judge(self, x: Any) -> Judgement:
        scores = self._score(x)
        threshold = self._find_threshold()
        return judge_scores(scores, self.classes_, self.by, threshold, self.temperature_ or 1.0)

    def _find_fitted(self) -> _Fitted | None:
        return vars(self).get("_fitted")

    def _find_threshold(self) -> float | None:
        if self.reject is None:
            return None
        if self._find_fitted() is not None or self.trained is None:
            who = "what the classifier was fitted on"
        else:
            who = name_client(self.trained)
        return find_threshold(self.calibration_, self.reject, who)

    def _score(self, x: Any) -> Tensor:
        check_is_fitted(self, "classes_")
        if self.trained is None:
            x = validate_data(self, x, reset=False, dtype=np.float64)
        fitted = self._find_fitted()
        if fitted is not None:
            return -prototypes.distances(self._embed(x), fitted.prototypes, "l2")
        assert self.trained is not None, "the classifier is ready"
        outputs = self.trained.forward_raw(_to_array(x, self.trained))
        return self.trained.score(self.by, self.among, outputs)

    def _embed(self, x: Any) -> Tensor:
        if self.trained is None:
            return torch.from_numpy(np.array(x))
        return self.trained.forward_raw(_to_array(x, self.trained)).features


def _to_array(x: Any, trained: TrainedClient) -> np.ndarray:
    """Return inputs as an array; a DataFrame is encoded as the tables that the client knows."""
    encoding = trained.preprocessing.encoding
    if not is_frame(x) or not isinstance(encoding, Columns):
        return np.asarray(x)
    inputs, notices = encode_frame(x, encoding)
    for notice in notices:
        warnings.warn(notice, stacklevel=4)
    return inputs


def _find_trained(
    run: str | Path | Result, client: int | str | None, module: nn.Module | None
) -> TrainedClient:
    """Return a client of a result in memory, or of a run folder."""
    if not isinstance(run, Result):
        return load_client(Path(run), client, module)
    if run.trained is not None:
        return take_client(run, client)
    assert run.folder is not None, "the result was read from a folder"
    return load_client(run.folder, client, module)
