"""A trained member as a scikit-learn classifier: by the nearest prototype, or by its head, or "none of these"."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from fedproto.core import prototypes
from fedproto.errors import ConfigError, DataError
from fedproto.inference.trained_client import (
    Trained,
    can_reject,
    member_of,
    novelty,
    scores_of,
    threshold,
    why_not_rejecting,
)

NONE_OF_THESE = "none of these"

By = Literal["prototype", "head"]
Among = Literal["all", "own"]


class Judgement(NamedTuple):
    """Of some inputs, a row each."""

    labels: np.ndarray
    shares: np.ndarray  # (n, classes)
    distances: np.ndarray  # (n, classes); of a head, minus its logits


class _Fitted(NamedTuple):
    """What `fit` made."""

    classes: np.ndarray
    prototypes: Tensor
    calibration: np.ndarray


class Classifier(ClassifierMixin, BaseEstimator):
    """A trained member as a scikit-learn classifier; labels are class names.

    member   a `Trained` one, as `Classifier.load(FOLDER)` or `Classifier.of(RUN, client)` find it. None: inputs are
             their own embedding, so that `fit` makes a nearest-class-mean classifier.
    by       "prototype": the nearest prototype, Eq. 4; "head": the member's own classifier
    among    "all" classes of the federation, or the member's "own"
    reject   share of known images that may be called "none of these"; None or 0: none is. Refused where fewer than
             1 / reject − 1 images were held out, since such a calibration could reject nothing

    `fit` makes new prototypes of the given samples, with the member's embedding as it is: no gradient, any classes.
    """

    def __init__(
        self,
        member: Trained | None = None,
        *,
        by: By = "prototype",
        among: Among = "all",
        reject: float | None = None,
    ) -> None:
        self.member = member
        self.by = by
        self.among = among
        self.reject = reject

    @classmethod
    def of(
        cls, run: str | Path, client: int = 0, *, by: By | None = None, **options: Any
    ) -> Classifier:
        """A client of a run folder, with the prototypes the federation has now."""
        return cls.from_member(member_of(Path(run), client), by=by, **options)

    @classmethod
    def load(cls, folder: str | Path, *, by: By | None = None, **options: Any) -> Classifier:
        """A member that `fedproto export` wrote."""
        from fedproto.inference.export import read_member

        return cls.from_member(read_member(Path(folder)), by=by, **options)

    @classmethod
    def from_member(cls, member: Trained, *, by: By | None = None, **options: Any) -> Classifier:
        """Ready to predict; by prototypes where the member has some, unless told otherwise."""
        chosen: By = by or ("head" if member.prototypes is None else "prototype")
        return cls(member, by=chosen, **options)._ready()

    def _ready(self) -> Classifier:
        assert self.member is not None
        if self.by not in ("prototype", "head") or self.among not in ("all", "own"):
            raise ConfigError(
                f"by is prototype or head and among is all or own, not {self.by!r} and {self.among!r}"
            )
        self.n_features_in_ = math.prod(self.member.preprocessing.shape)
        self._fitted: _Fitted | None = None
        _ = self.classes_  # refused now where there is none to choose among
        _ = self.threshold_  # and where `reject` would do nothing
        return self

    @property
    def classes_(self) -> np.ndarray:
        """Those that `fit` saw, or else those of the member that are chosen among."""
        if vars(self).get("_fitted") is not None:
            return self._fitted.classes  # type: ignore[union-attr]
        if "_fitted" not in vars(self) or self.member is None:
            raise AttributeError(
                "classes_ is there when the classifier is ready: fit it, or take a trained member"
            )
        names = self.member.names(self.by, self.among)
        if not names:
            raise DataError(
                "none of the classes to choose among has a prototype: classify among all, or by head"
            )
        return np.array(names)

    @property
    def prototypes_(self) -> np.ndarray | None:
        """Those that `fit` made, in the order of `classes_`; None where the member's are used."""
        return None if self._fitted is None else self._fitted.prototypes.numpy()

    @property
    def calibration_(self) -> np.ndarray:
        """How far images of known classes lie."""
        if self._fitted is not None:
            return self._fitted.calibration
        assert self.member is not None, "it is ready"
        return self.member.calibration.get(f"{self.by} {self.among}", np.zeros(0))

    def fit(self, X: Any, y: Any) -> Classifier:
        """Class means of the embeddings (Eq. 3) as prototypes; the threshold comes from each sample's distance to the
        mean of the others of its class, n/(n − 1) times that to the mean of all."""
        if self.by != "prototype":
            raise ConfigError("fit makes prototypes: it is for by='prototype'")
        if self.member is None:
            X, y = validate_data(self, X, y, dtype=np.float64)  # noqa: N806
        else:
            y, self.n_features_in_ = np.asarray(y), math.prod(self.member.preprocessing.shape)
            if len(X) != len(y):
                raise DataError(f"{len(X)} inputs were given, but {len(y)} labels")
        check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        features, targets = self._embedded(X), torch.from_numpy(labels)
        means, counts = prototypes.class_means(
            features, targets, torch.ones(len(labels)).to(features), len(classes)
        )
        apart = prototypes.distances(features, means, "l2")
        others = (counts / (counts - 1))[
            targets
        ]  # infinite for a class of one, whose sample says nothing
        apart[torch.arange(len(labels)), targets] *= others
        self._fitted = _Fitted(classes, means, apart.amin(1)[torch.isfinite(others)].numpy())
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Names; "none of these" where `reject` says so."""
        return self._judged(self._scores(X)).labels

    def predict_proba(self, X: Any) -> np.ndarray:
        """The softmax of the logits, or of minus the distances; in the order of `classes_`. Not calibrated."""
        return self._judged(self._scores(X)).shares

    def distances(self, X: Any) -> np.ndarray:
        """L2 to each prototype, in the order of `classes_`."""
        if self.by != "prototype":
            raise ConfigError("a head has no distances: by='prototype' has")
        return self._judged(self._scores(X)).distances

    def novelty(self, X: Any) -> np.ndarray:
        """How little each sample looks like any of the classes; above `threshold_` it is none of these."""
        return novelty(self.by, self._scores(X)).numpy()

    def judge(self, prepared: Tensor) -> Judgement:
        """All of these at once, of inputs that are as the member's model sees them."""
        assert self.member is not None and self._fitted is None, (
            "only a trained member has preprocessing"
        )
        return self._judged(
            scores_of(self.by, self.among, self.member, self.member.see_prepared(prepared))
        )

    def _judged(self, scores: Tensor) -> Judgement:
        shares = scores.double().softmax(1).numpy()
        labels = self.classes_[scores.argmax(1).numpy()]
        if self.reject is not None:
            labels = labels.astype(object)
            labels[(novelty(self.by, scores) > self.threshold_).numpy()] = NONE_OF_THESE
        return Judgement(labels, shares, -scores.numpy())

    @property
    def threshold_(self) -> float:
        check_is_fitted(self, "classes_")
        if self.reject is None:
            return math.inf
        if not 0 <= self.reject <= 1:
            raise ConfigError(f"reject is a share of 0 to 1, not {self.reject}")
        if not len(self.calibration_):
            raise DataError(
                "nothing was held out to calibrate `reject` on: classify without it, or fit on samples"
            )
        if not can_reject(self.calibration_, self.reject):
            raise DataError(why_not_rejecting(self._name(), len(self.calibration_), self.reject))
        return threshold(self.calibration_, self.reject)

    def _name(self) -> str:
        """Who is calibrated, for a sentence."""
        if self._fitted is not None or self.member is None:
            return "what the classifier was fitted on"
        return f"client {self.member.about.get('client', 'of this folder')}"

    def _scores(self, x: Any) -> Tensor:
        check_is_fitted(self, "classes_")
        if self.member is None:
            x = validate_data(self, x, reset=False, dtype=np.float64)
        if self._fitted is not None:
            return -prototypes.distances(self._embedded(x), self._fitted.prototypes, "l2")
        return scores_of(self.by, self.among, self.member, self.member.see(np.asarray(x)))  # type: ignore[arg-type, union-attr]

    def _embedded(self, x: Any) -> Tensor:
        return (
            torch.from_numpy(np.array(x))
            if self.member is None
            else self.member.see(np.asarray(x))[0]
        )
