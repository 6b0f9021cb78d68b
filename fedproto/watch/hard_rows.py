"""The test rows that a client finds hardest, from what its run folder keeps of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.errors import RunFolderError
from fedproto.runs.folder import CLIENT_MODELS
from fedproto.runs.hard_rows import HARD
from fedproto.watch.client_tensors import read_client_tensors
from fedproto.watch.numbers import to_number

#: What a file may hold of a client, by the number of axes.
_PER_ROW = ("rows", "labels", "answers", "probabilities")
_PROTOTYPES = ("prototypes", "prototype_distances")
_TRAINING = ("training", "training_labels", "training_distances")
#: More rows than a run keeps are not shown: a file may come from anybody.
MAX_ROWS = 20


def describe_hard_rows(
    folder: Path, name: str, client: int, classes: Sequence[str]
) -> dict[str, Any] | None:
    """Return a client's hardest test rows and what is near each; None if the run kept none.

    Rows have numbers, classes have names and distances are plain: no data is there to be shown.
    """
    names = (*_PER_ROW, *_PROTOTYPES, *_TRAINING)
    found = read_client_tensors(folder, name, client, HARD, names)
    if found is None or not set(_PER_ROW) <= found.keys():
        return None
    _check(found, f"{name}/{CLIENT_MODELS}", len(classes))
    rows = []
    for number in range(min(MAX_ROWS, len(found["rows"]))):
        row = {
            "row": int(found["rows"][number]),
            "class": classes[int(found["labels"][number])],
            "answer": classes[int(found["answers"][number])],
            "probability": to_number(float(found["probabilities"][number])),
            "prototypes": _list_near(found, _PROTOTYPES, number, classes),
            "training": _list_near(found, _TRAINING, number, classes),
        }
        rows.append(row)
    return {"rows": rows, "has_training": _TRAINING[0] in found}


def _list_near(
    found: dict[str, np.ndarray], names: tuple[str, ...], number: int, classes: Sequence[str]
) -> list[dict[str, Any]]:
    """Return what is near a test row: classes, or training rows with their numbers."""
    if names[0] not in found:
        return []
    *numbers, distances = (found[name][number] for name in names)
    listed = []
    for place, distance in enumerate(distances):
        entry = {
            "class": classes[int(numbers[-1][place])],
            "distance": to_number(float(distance)),
        }
        if len(numbers) == 2:
            entry["row"] = int(numbers[0][place])
        listed.append(entry)
    return listed


def _check(found: dict[str, np.ndarray], where: str, classes: int) -> None:
    """Refuse tensors that do not fit each other, or numbers that mean nothing."""
    rows = len(found["rows"]) if found["rows"].ndim == 1 else -1
    fits = all(found[name].shape == (rows,) for name in _PER_ROW)
    for names in (_PROTOTYPES, _TRAINING):
        present = [found[name] for name in names if name in found]
        if not present:
            continue
        shapes = {values.shape for values in present}
        fits = fits and len(present) == len(names) and len(shapes) == 1
        fits = fits and present[0].ndim == 2 and len(present[0]) == rows
    for name in ("labels", "answers", "prototypes", "training_labels"):
        values = found.get(name, np.zeros(0))
        fits = fits and bool(((values >= 0) & (values < classes)).all())
    for name in ("rows", "training"):
        values = found.get(name, np.zeros(0))
        fits = fits and bool((np.isfinite(values) & (values >= 0)).all())
    if not fits:
        raise RunFolderError(f"{where} has hard test rows that do not fit")
