"""benchmarks/published_global.py: its partition, its test images, and the study in small."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not a package
from benchmarks import published_global
from benchmarks.published_global import (
    METHODS,
    QUICK,
    divide_by_two_classes,
    draw_clients,
    draw_model,
    make_page,
    read_images,
)

LABELS = np.repeat(np.arange(10), 60)


def test_every_client_has_its_own_class_and_another() -> None:
    divided = divide_by_two_classes(LABELS, 10, np.random.default_rng(0))
    assert sorted(np.concatenate(divided).tolist()) == list(range(len(LABELS)))
    holders = np.zeros(10, int)
    for client, rows in enumerate(divided):
        labels = set(LABELS[rows].tolist())
        assert client in labels
        assert len(labels) == 2
        holders[list(labels)] += 1
    for client, rows in enumerate(divided):
        for label, count in zip(*np.unique(LABELS[rows], return_counts=True), strict=True):
            assert count in (60 // holders[label], -(-60 // holders[label])), (client, label)


@pytest.mark.parametrize("partition", ["two classes", "Dirichlet(0.5)"])
def test_together_the_clients_have_every_image_once(partition: str) -> None:
    images = read_images(QUICK)
    clients = draw_clients(QUICK, partition, 0, images)
    for given, parts in (
        (images.x, [client.x for client in clients]),
        (images.x_test, [client.x_test for client in clients]),
    ):
        sums = np.concatenate(parts).sum((1, 2, 3))
        assert sorted(sums.tolist()) == sorted(given.sum((1, 2, 3)).tolist())
    assert {len(client.y_test) for client in clients} == {10}


def test_the_model_is_the_published_one() -> None:
    convolutions = (3 * 25 + 1) * 6 + (6 * 25 + 1) * 16
    layers = (400 + 1) * 120 + (120 + 1) * 84 + (84 + 1) * 10
    assert sum(value.numel() for value in draw_model(0).parameters()) == convolutions + layers


def test_the_page_compares_the_last_round() -> None:
    runs = []
    for seed, last in enumerate((60.0, 62.0)):
        run = {"method": "SCAFFOLD", "seed": seed, "curve": [70.0, last]}
        runs += [run | {"partition": partition} for partition in METHODS["SCAFFOLD"].published]
    study = {"dataset": "noise", "seeds": 2}
    found = {"study": study, "source": "a page", "torch": "2", "device": "a", "measured": runs}
    page = make_page(found)
    assert "| Dirichlet(0.5) | SCAFFOLD | 69.8 | 61.0 | -8.8 | 70.0 | 2 |" in page
    assert "This was not the default study" in page


def test_the_quick_study_runs_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_global, "QUICK", replace(QUICK, batch=16))
    command = ["published_global", "--quick", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--methods", "SCAFFOLD"])
    published_global.main()
    first = json.loads((tmp_path / "published-global.json").read_text())
    assert [run["method"] for run in first["measured"]] == ["SCAFFOLD", "SCAFFOLD"]
    monkeypatch.setattr(sys, "argv", [*command, "--methods", "SCAFFOLD,FedProx"])
    published_global.main()
    found = json.loads((tmp_path / "published-global.json").read_text())
    assert found["measured"][:2] == first["measured"]
    assert len(found["measured"]) == 4
    assert (tmp_path / "published-global.md").exists()
    monkeypatch.setattr(sys, "argv", [*command, "--seeds", "2"])
    with pytest.raises(SystemExit, match="another study"):
        published_global.main()


def test_an_unknown_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["published_global", "--quick", "--methods", "MOON"])
    with pytest.raises(SystemExit, match="'MOON' is none of FedAvg"):
        published_global.main()
