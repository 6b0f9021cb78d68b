"""benchmarks/published.py: its partitions, its model, its accuracy, and the study in small."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not a package
from benchmarks import published
from benchmarks.published import (
    METHODS,
    QUICK,
    SETTINGS,
    Study,
    count_steps,
    divide_by_classes,
    divide_by_dirichlet,
    draw_clients,
    draw_model,
    make_page,
    pool_accuracy,
)

LABELS = np.repeat(np.arange(10), 700)


def is_every_row_dealt_once(divided) -> bool:
    return sorted(np.concatenate(divided).tolist()) == list(range(len(LABELS)))


def test_blocks_of_four_clients_share_two_classes_unequally() -> None:
    divided = divide_by_classes(LABELS, 20, 2, np.random.default_rng(0))
    assert is_every_row_dealt_once(divided)
    for client, rows in enumerate(divided):
        first = client // 4 * 2
        assert set(LABELS[rows].tolist()) == {first, first + 1}
        counts = np.bincount(LABELS[rows])[first:]
        if client % 4 < 3:  # between a tenth of an equal part, 175, and an equal part
            assert all(17 <= count < 175 for count in counts)
        else:
            assert all(count > 175 for count in counts)


def test_a_client_with_its_equal_part_gets_no_more_classes() -> None:
    divided = divide_by_dirichlet(LABELS, 20, 0.1, 40, np.random.default_rng(0))
    assert is_every_row_dealt_once(divided)
    for rows in divided:
        assert len(rows) >= 40
        counts = np.bincount(LABELS[rows], minlength=10)
        last = np.flatnonzero(counts)[-1]
        assert counts[:last].sum() < 350


def test_a_client_keeps_three_quarters_of_its_images_for_training() -> None:
    x = np.arange(len(LABELS))
    for setting in SETTINGS:
        clients = draw_clients(Study(), setting, 0, x, LABELS)
        again = draw_clients(Study(), setting, 0, x, LABELS)
        assert sum(len(client.y) + len(client.y_test) for client in clients) == len(LABELS)
        for client, same in zip(clients, again, strict=True):
            images = len(client.y) + len(client.y_test)
            assert len(client.y) == int(0.75 * images)
            assert np.array_equal(client.x, same.x)
            assert np.array_equal(LABELS[client.x], client.y)


def test_the_model_is_the_published_one() -> None:
    model = draw_model(Study(), 0)
    convolutions = (1 * 25 + 1) * 32 + (32 * 25 + 1) * 64
    layers = (1024 + 1) * 512 + (512 + 1) * 10
    assert sum(value.numel() for value in model.parameters()) == convolutions + layers
    features, logits = model(torch.zeros(3, 1, 28, 28))
    assert features.shape == (3, 512)
    assert logits.shape == (3, 10)


def test_a_client_with_more_test_images_counts_more() -> None:
    members = [SimpleNamespace(test=range(1)), SimpleNamespace(test=range(3))]
    result = SimpleNamespace(clients={"head": torch.tensor([1.0, 1 / 3], dtype=torch.float64)})
    federation = SimpleNamespace(members=members)
    assert pool_accuracy(federation, result, "head") == pytest.approx(50)


def test_steps_are_those_of_the_largest_client_one_after_the_other() -> None:
    study = replace(Study(), rounds=1, global_rounds=2)
    steps = count_steps(study, np.zeros(len(LABELS)), LABELS)
    largest = 0
    for setting in SETTINGS:
        clients = draw_clients(study, setting, 0, np.zeros(len(LABELS)), LABELS)
        largest = max(largest, *(len(client.y) for client in clients))
    assert steps == {"per pass": largest // 10, "passes": 11, "all": largest // 10 * 11}


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_the_page_compares_the_best_round(precision: str) -> None:
    run = {"method": "FedPer", "seed": 0, "curve": [90.0, 98.0, 97.0]}
    run |= {"precision": precision, "device": "a machine", "torch": "2"}
    runs = [run | {"setting": setting} for setting in SETTINGS]
    found = {
        "study": {"dataset": "mnist5k", "seeds": 1},
        "source": "a paper",
        "measured": runs,
    }
    page = make_page(found)
    assert f"| FedPer | 99.47 ± 0.03 | 98.00 | -1.47 | 97.00 | 3 | a machine, {precision} |" in page
    assert f"| FedPer | 97.44 ± 0.06 | 98.00 | +0.56 | 97.00 | 3 | a machine, {precision} |" in page
    assert "This was not the default study" in page
    assert ("matrices in TF32" in page) == (precision == "tf32")


def test_the_quick_study_runs_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = replace(QUICK, images=250, rounds=1, global_rounds=1, channels=(2, 2), width=4)
    monkeypatch.setattr(published, "QUICK", tiny)
    command = ["published", "--quick", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--methods", "FedProto"])
    published.main()
    first = json.loads((tmp_path / "published.json").read_text())
    monkeypatch.setattr(sys, "argv", command)
    published.main()
    found = json.loads((tmp_path / "published.json").read_text())
    assert found["measured"][:2] == first["measured"]
    assert {run["method"] for run in found["measured"]} == set(METHODS)
    assert len(found["measured"]) == 2 * len(METHODS)
    for run in found["measured"]:
        assert len(run["curve"]) == 1
        assert all(0 <= value <= 100 for value in run["curve"])
    monkeypatch.setattr(sys, "argv", [*command, "--rounds", "2", "--methods", "FedPer"])
    published.main()
    found = json.loads((tmp_path / "published.json").read_text())
    rounds = {run["method"]: len(run["curve"]) for run in found["measured"]}
    assert rounds == dict.fromkeys(METHODS, 1) | {"FedPer": 2}
    monkeypatch.setattr(sys, "argv", [*command, "--seeds", "2"])
    with pytest.raises(SystemExit, match="another study"):
        published.main()


def test_an_unknown_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["published", "--quick", "--methods", "FedNone"])
    with pytest.raises(SystemExit, match="'FedNone' is not one of FedProto"):
        published.main()
