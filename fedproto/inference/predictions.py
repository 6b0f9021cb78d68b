"""Classifies many inputs, a chunk at a time, and scores the answers whose true class is known."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedproto.core.csv_cells import write_csv
from fedproto.core.files import write_atomically
from fedproto.core.measurement import Measurement, measure_predictions
from fedproto.errors import ConfigError, DataError, need
from fedproto.inference.judgement import Judgement, judge_inputs
from fedproto.inference.labelled_inputs import LabelledInput
from fedproto.inference.reasons import Explainer, Surroundings
from fedproto.inference.trained_client import TrainedClient
from fedproto.inference.ways import Among, By

#: Inputs that are classified at a time; a longer list is read and answered piece by piece.
INPUTS_PER_CHUNK = 1000
#: The ends of the files that answers can be written to.
ANSWER_ENDINGS = (".csv", ".parquet")


class _Scored(NamedTuple):
    """The inputs of a chunk whose true class is known."""

    probabilities: np.ndarray  # (rows, classes)
    labels: np.ndarray  # (rows,) places in the list of all classes


class Predictor:
    """Collects the answers of a trained client, by one or several ways to classify.

    `answers` holds one object per input, as `fedproto predict --json` prints it: its place as
    `input`, its `id` if it has another, its `class` if that is stated, and for each way the `label`
    and the `top` candidates. With an `explainer`, `why` holds what is near the input.
    """

    def __init__(
        self,
        trained: TrainedClient,
        ways: Sequence[By],
        among: Among = "all",
        reject: float | None = None,
        top: int = 1,
        explainer: Explainer | None = None,
    ) -> None:
        self.trained = trained
        self.ways = tuple(ways)
        self.among = among
        self.reject = reject
        self.top = top
        self.explainer = explainer
        self.answers: list[dict[str, Any]] = []
        #: Inputs whose stated class is none that the client can answer; they are not scored.
        self.unknown_labels = 0
        names = list(trained.classes)
        if trained.prototypes is not None:
            names += trained.prototypes.classes
        self.classes = tuple(dict.fromkeys(names))
        self._scored: dict[str, list[_Scored]] = {way: [] for way in self.ways}

    def add(self, inputs: Sequence[LabelledInput]) -> None:
        """Classify inputs in chunks, and keep the answers in their order."""
        for start in range(0, len(inputs), INPUTS_PER_CHUNK):
            self._add_chunk(inputs[start : start + INPUTS_PER_CHUNK])

    def _add_chunk(self, inputs: Sequence[LabelledInput]) -> None:
        answers: list[dict[str, Any]] = []
        for each in inputs:
            answer: dict[str, Any] = {"input": each.input.name}
            if each.id != each.input.name:
                answer["id"] = each.id
            if each.label is not None:
                answer["class"] = each.label
                self.unknown_labels += each.label not in self.classes
            answers.append(answer)
        stacked = np.stack([each.input.x for each in inputs])
        x = self.trained.preprocessing.normalise(stacked)
        for way in self.ways:
            names, judged = judge_inputs(self.trained, x, way, self.among, self.reject)
            _refuse_infinite(judged, inputs)
            for row, answer in enumerate(answers):
                answer[way] = {
                    "label": str(judged.labels[row]),
                    "candidates": self._list_candidates(judged, row, way, names),
                }
            self._scored[way].append(self._keep_for_score(inputs, names, judged))
        if self.explainer is not None:
            found = self.explainer.explain(self.trained.embed(x))
            for answer, near in zip(answers, found, strict=True):
                answer["why"] = describe_surroundings(near)
        self.answers += answers

    def _list_candidates(
        self, judged: Judgement, row: int, way: By, names: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return the `top` most probable classes of one input."""
        probabilities = judged.probabilities[row]
        # The first of equals, as `predict` of the classifier chooses.
        best_first = np.argsort(-probabilities, kind="stable")
        candidates = []
        for column in best_first[: self.top]:
            name = names[column]
            candidate: dict[str, Any] = {"class": name, "own": name in self.trained.own}
            if way == "prototype":
                candidate["distance"] = float(judged.distances[row, column])
            candidate["probability"] = float(probabilities[column])
            candidates.append(candidate)
        return candidates

    def _keep_for_score(
        self, inputs: Sequence[LabelledInput], names: Sequence[str], judged: Judgement
    ) -> _Scored:
        """Return the probabilities over all classes of the inputs whose true class is known."""
        place_of = {name: place for place, name in enumerate(self.classes)}
        rows = [row for row, each in enumerate(inputs) if each.label in place_of]
        labels = [place_of[str(inputs[row].label)] for row in rows]
        columns = [place_of[name] for name in names]
        probabilities = np.zeros((len(rows), len(self.classes)))
        probabilities[:, columns] = judged.probabilities[rows]
        return _Scored(probabilities, np.array(labels, np.int64))

    def measure(self) -> dict[str, Measurement]:
        """Return the metrics of each way over the inputs whose true class is known.

        It is empty if there is no such input. A class that cannot be chosen has the probability 0,
        and "none of these" is not counted: the most probable class is.
        """
        measured = {}
        for way, chunks in self._scored.items():
            labels = np.concatenate([chunk.labels for chunk in chunks])
            probabilities = np.concatenate([chunk.probabilities for chunk in chunks])
            if len(labels):
                measured[way] = measure_predictions(probabilities, labels, self.classes)
        return measured

    @property
    def is_calibrated(self) -> bool:
        """Whether all probabilities are calibrated on validation rows."""
        return all(f"{way} {self.among}" in self.trained.temperatures for way in self.ways)


def _refuse_infinite(judged: Judgement, inputs: Sequence[LabelledInput]) -> None:
    is_finite = np.isfinite(judged.distances).all(1)
    if not is_finite.all():
        first = inputs[int(np.argmin(is_finite))]
        raise DataError(f"{first.id} is out of range: the model's output for it is not finite")


def describe_surroundings(near: Surroundings) -> dict[str, list[dict[str, Any]]]:
    """Return what is near an input as an answer states it; kinds that are not there are left out.

    A place is left out where nobody knows it.
    """
    described: dict[str, list[dict[str, Any]]] = {}
    for kind, classes in (("prototypes", near.prototypes), ("means", near.means)):
        described[kind] = [
            {"class": each.name, "own": each.own, "distance": each.distance} for each in classes
        ]
    described["rows"] = []
    for row in near.rows:
        entry = {"row": row.row, "class": row.name, "distance": row.distance}
        if row.place is not None:
            entry["place"] = row.place
        described["rows"].append(entry)
    return {kind: listed for kind, listed in described.items() if listed}


# --- writing answers


def check_answer_path(path: Path) -> None:
    """Refuse a file that answers cannot be written to, before anything is classified."""
    if not path.name.lower().endswith(ANSWER_ENDINGS):
        accepted = " or ".join(ANSWER_ENDINGS)
        raise ConfigError(f"--out {path}: answers are written to a file that ends in {accepted}")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path}: the folder {path.parent} does not exist")
    if path.suffix.lower() == ".parquet":
        need("pyarrow", "'.[tables]'", f"--out {path}, a Parquet file,")


def write_answers(path: Path, answers: Sequence[dict[str, Any]], ways: Sequence[By]) -> None:
    """Write one row per input to a CSV or Parquet file, which is replaced if it is there.

    The columns are `id`, `class` (the true one, if any is stated) and, for each way, its answer,
    its probability and, by prototype, the distance; then what is near the input, if the answers
    state it. In a CSV file, a name that a spreadsheet would
    take for a formula gets an apostrophe before it.
    """
    columns = _make_columns(answers, ways)
    if path.suffix.lower() == ".parquet":
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
        buffer = io.BytesIO()
        parquet.write_table(pyarrow.table(columns), buffer)
        write_atomically(path, buffer.getvalue())
        return
    rows = zip(*columns.values(), strict=True)
    write_atomically(path, write_csv([list(columns), *rows]).encode())


def _make_columns(answers: Sequence[dict[str, Any]], ways: Sequence[By]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "id": [answer.get("id", answer["input"]) for answer in answers]
    }
    if any("class" in answer for answer in answers):
        columns["class"] = [answer.get("class", "") for answer in answers]
    for way in ways:
        best = [answer[way]["candidates"][0] for answer in answers]
        columns[way] = [answer[way]["label"] for answer in answers]
        columns[f"{way}_probability"] = [candidate["probability"] for candidate in best]
        if way == "prototype":
            columns["prototype_distance"] = [candidate["distance"] for candidate in best]
    return columns | _make_columns_of_reasons(answers)


#: What columns of reasons are called, by their kind.
_NEAR = {"prototypes": "near_prototype", "means": "near_mean", "rows": "near_row"}


def _make_columns_of_reasons(answers: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of what is near: `near_row_1`, `near_row_1_class` and so on.

    All answers have equally many of each kind.
    """
    columns: dict[str, list[Any]] = {}
    for kind, near in answers[0].get("why", {}).items():
        key = "row" if kind == "rows" else "class"
        for rank, first in enumerate(near):
            for name in first:
                if name == "own":
                    continue
                title = f"{_NEAR[kind]}_{rank + 1}"
                title += "" if name == key else f"_{name}"
                columns[title] = [answer["why"][kind][rank][name] for answer in answers]
    return columns
