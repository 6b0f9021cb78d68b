"""How much a client can learn from its own rows alone, measured before anything is suggested."""

from __future__ import annotations

import warnings

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score

from fedproto.core import rng
from fedproto.data import Source
from fedproto.data.shared.feature_encoding import Words

#: Clients that are tried, and what of their rows is looked at.
MAX_TRIED_CLIENTS = 5
MAX_ROWS_PER_CLIENT = 1000
MAX_COLUMNS = 1000
FOLDS = 3


def measure_alone(source: Source, clients: int) -> float | None:
    """Return the accuracy of a linear classifier that knows the rows of one client only.

    It is cross-validated on training rows, the mean over a few clients: those that the data names,
    or `clients` that get equal shares. None if the inputs are not those of a table, or if no client
    has FOLDS rows of each of two classes.
    """
    x = source.train.x
    if len(x.shape) != 2 or x.shape[1] > MAX_COLUMNS or isinstance(source.encoding, Words):
        return None
    scores = []
    for rows in _list_rows(source, clients)[:MAX_TRIED_CLIENTS]:
        labels = source.train.y[rows]
        names, counts = np.unique(labels, return_counts=True)
        kept = np.isin(labels, names[counts >= FOLDS])
        if len(np.unique(labels[kept])) < 2:
            continue
        inputs = source.tensor(source.train, rows[kept]).numpy()
        scores.append(_cross_validate(inputs, labels[kept]))
    return float(np.mean(scores)) if scores else None


def _list_rows(source: Source, clients: int) -> list[np.ndarray]:
    """Return the training rows of each client, at most MAX_ROWS_PER_CLIENT random ones."""
    order = rng.generator(0, "ease").permutation(len(source.train.y))
    writers = source.train.writer
    if writers is None:
        shares = np.array_split(order, clients)
    else:
        shares = [order[writers[order] == name] for name in np.unique(writers)[:MAX_TRIED_CLIENTS]]
    return [share[:MAX_ROWS_PER_CLIENT] for share in shares]


def _cross_validate(x: np.ndarray, y: np.ndarray) -> float:
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a rough answer is enough
        scores = cross_val_score(LogisticRegression(max_iter=200), x, y, cv=folds)
    return float(scores.mean())
