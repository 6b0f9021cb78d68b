"""The hardest test rows of a client: chosen by probability, with the reasons of `explain`."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.reports import RUN, make_run, read_result

from fedproto import Classifier
from fedproto.core.files import read_tensors, write_tensors
from fedproto.data import DataFolders
from fedproto.data.digits import digits
from fedproto.errors import RunFolderError
from fedproto.runs.client_models import SHARD_FORMAT
from fedproto.runs.folder import RunFolder
from fedproto.runs.hard_rows import MAX_HARD_ROWS
from fedproto.runs.stored_clients import ClientModels
from fedproto.watch import freeze
from fedproto.watch.discovery import Place
from fedproto.watch.hard_rows import describe_hard_rows
from fedproto.watch.run_view import RunView

SMALL_MAP = "random-conv(filters=3,kernel=3,pool=2)"


def tell(run: Path, client: int) -> dict[str, Any]:
    """What a page is told of a client; it must be JSON without NaN."""
    view = RunView(Place("id", "run", run))
    view.refresh()
    told = view.describe_client(client)
    assert told is not None
    json.dumps(told, allow_nan=False)
    return told


def compare_with_classifier(run: Path, client: int, by: str) -> None:
    """All that is told of the hard rows is what the classifier says of the same inputs."""
    rows = tell(run, client)["hard_rows"]["rows"]
    test = digits(DataFolders()).test
    numbers = [row["row"] for row in rows]
    partition = json.loads((run / "partition.json").read_text())["clients"][client]
    assert set(numbers) <= set(partition["test"])
    classifier = Classifier.of(run, client, by=by)
    classes = digits(DataFolders()).classes
    assert [row["class"] for row in rows] == [classes[label] for label in test.y[numbers]]
    for row, reason in zip(rows, classifier.explain(test.x[numbers]), strict=True):
        assert row["answer"] == reason.label
        wanted = dict(reason.probabilities).get(row["class"], 0.0)
        assert row["probability"] == pytest.approx(wanted, rel=1e-3, abs=1e-5)
        assert [near["class"] for near in row["prototypes"]] == [
            near.name for near in reason.prototypes
        ]
        gaps = [near["distance"] for near in row["prototypes"]]
        assert gaps == pytest.approx([near.distance for near in reason.prototypes], rel=1e-4)
        assert [(near["row"], near["class"]) for near in row["training"]] == [
            (near.row, near.name) for near in reason.rows
        ]
        gaps = [near["distance"] for near in row["training"]]
        wanted = [near.distance for near in reason.rows]
        assert gaps == pytest.approx(wanted, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("client", [0, 2])
def test_reasons_are_those_of_the_classifier(runs: Path, client: int) -> None:
    compare_with_classifier(runs / "fedproto", client, "prototype")
    compare_with_classifier(runs / "local", client, "head")


@pytest.mark.parametrize(
    ("by", "settings"),
    [
        ("teacher", {"algorithm": "closed-form", "feature_map": SMALL_MAP}),
        ("prototype", {"algorithm": "fedproto", "freeze": "body"}),
    ],
)
def test_reasons_of_other_methods(tmp_path: Path, by: str, settings: dict[str, Any]) -> None:
    run = make_run(tmp_path / "run", **settings)
    compare_with_classifier(run, 1, by)
    rows = tell(run, 1)["hard_rows"]["rows"]
    assert all(bool(row["prototypes"]) == (by == "prototype") for row in rows)


def test_hardest_are_those_whose_class_is_least_probable(runs: Path) -> None:
    stored = ClientModels.open(RunFolder.open(runs / "local")).read(1)
    known = stored.held_out
    probabilities = known.known.logits.double().softmax(1).numpy()
    of_truth = probabilities[np.arange(len(probabilities)), known.known_labels.numpy()]
    told = [row["probability"] for row in tell(runs / "local", 1)["hard_rows"]["rows"]]
    assert len(told) == min(MAX_HARD_ROWS, len(of_truth))
    assert told == pytest.approx(sorted(of_truth)[: len(told)], rel=1e-4)


def test_a_private_run_keeps_nothing_of_single_training_rows(tmp_path: Path) -> None:
    """What noise does not protect must not be on a page that is sent around."""
    pytest.importorskip("dp_accounting")
    private = {"freeze": "body", "privacy": "release", "epsilon": 3.0, "rounds": 2}
    run = make_run(tmp_path / "run", algorithm="fedproto", **private)
    told = tell(run, 0)["hard_rows"]
    assert told["rows"]
    assert told["has_training"] is False
    assert all(row["training"] == [] for row in told["rows"])
    tensors, _ = read_tensors(find_shard(run), SHARD_FORMAT)
    assert not [name for name in tensors if ".hard.training" in name]


def find_shard(run: Path) -> Path:
    (shard,) = (run / "models").glob("*.safetensors")
    return shard


def test_a_run_without_models_has_no_hard_rows(tmp_path: Path, runs: Path) -> None:
    run = Path(shutil.copytree(runs / "fedproto", tmp_path / "run"))
    shutil.rmtree(run / "models")
    told = tell(run, 0)
    assert told["hard_rows"] is None
    assert told["problem"] is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("labels", torch.full((5,), 99)),
        ("answers", torch.full((5,), -1)),
        ("prototypes", torch.full((5, 3), 99)),
        ("training", torch.full((5, 3), -5)),
        ("training_distances", torch.zeros(2, 2)),
        ("training_labels", torch.zeros(5, 3, 3)),
        ("rows", torch.zeros(5, 5)),
        ("rows", torch.full((5,), float("nan"))),
        ("probabilities", torch.zeros(1)),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    name: str, value: torch.Tensor, runs: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs / "fedproto", tmp_path / "run"))
    shard = find_shard(run)
    tensors, header = read_tensors(shard, SHARD_FORMAT)
    assert tensors["0.hard.rows"].shape == (5,)
    write_tensors(shard, tensors | {f"0.hard.{name}": value}, SHARD_FORMAT, header)
    with pytest.raises(RunFolderError, match="has hard test rows that do not fit"):
        describe_hard_rows(run, "run", 0, read_result(run)["classes"])
    assert "do not fit" in tell(run, 0)["problem"]


def test_infinite_distances_are_not_numbers(runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "fedproto", tmp_path / "run"))
    shard = find_shard(run)
    tensors, header = read_tensors(shard, SHARD_FORMAT)
    infinite = torch.full_like(tensors["0.hard.training_distances"], torch.inf)
    replaced = tensors | {"0.hard.training_distances": infinite}
    write_tensors(shard, replaced, SHARD_FORMAT, header)
    (row, *_) = tell(run, 0)["hard_rows"]["rows"]
    assert [near["distance"] for near in row["training"]] == [None] * 3


def test_a_frozen_page_holds_a_bounded_number_of_them(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = freeze.freeze([runs / "fedproto"], [])["clients"]["run-0"]
    counts = [len(found["hard_rows"]["rows"]) for found in everything.values()]
    assert len(counts) == RUN["clients"] > 2
    monkeypatch.setattr(freeze, "MAX_HARD_ROWS", counts[0] + counts[1])
    details = freeze.freeze([runs / "fedproto"], [])["clients"]["run-0"]
    kept = [found["hard_rows"] is not None for found in details.values()]
    assert kept == [True, True] + [False] * (len(counts) - 2)
