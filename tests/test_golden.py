"""Fixed runs whose numbers never change: all algorithms, engines and kinds of data, one sweep.

`golden.json` was recorded before the package was rearranged. Partitions, traffic and accuracies are
compared exactly; losses and prototypes to 1e-9, because another processor adds in another order.
`python tests/test_golden.py` prints the numbers, to compare two versions to the bit.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedproto
from fedproto.cli.main import app

RECORDED = Path(__file__).parent / "golden.json"
SMALL = {"clients": 5, "rounds": 3, "shots": 10, "eval_every": 1, "precision": "float64", "seed": 3}
ALGORITHMS = ["local", "fedavg", "fedprox", "fesem", "fedper", "fedrep", "fedproto", "fedproto-mh"]
ENGINES = ["reference", "vectorised", "processes"]

#: name -> settings of `fedproto.run`; FILES stands for the folder of `make_files`
CASES: dict[str, dict[str, Any]] = {}
for _algorithm in ALGORITHMS:
    CASES[f"{_algorithm}, digits"] = {"algorithm": _algorithm, "dataset": "digits"}
for _engine in ENGINES:
    CASES[f"engine {_engine}"] = {"dataset": "mnist5k", "engine": _engine}
CASES |= {
    "mnist5k, cnn": {"dataset": "mnist5k"},
    "released profile": {"dataset": "mnist5k", "profile": "released", "shots": 10},
    "lost uploads and stragglers": {
        "dataset": "digits",
        "participation": 0.6,
        "lost_uploads": 0.3,
        "stragglers": 0.3,
    },
    "dirichlet": {"dataset": "digits", "partition": "dirichlet"},
    "iid": {"dataset": "digits", "partition": "iid"},
    "distance l2": {"dataset": "digits", "distance": "l2"},
    "npz": {"dataset": "npz:FILES/data.npz"},
    "csv": {"dataset": "csv:FILES/data.csv", "partition": "iid"},
    "text": {"dataset": "text:FILES/data.jsonl", "partition": "iid"},
    "mixed data": {"dataset": "digits*3,npz:FILES/data.npz*2", "model": "mlp", "dim": 20},
}
NOT_SHOTS = {"iid", "csv", "text", "dirichlet"}


def make_files(folder: Path) -> None:
    """Write a small data set of each kind of file."""
    rng = np.random.default_rng(7)
    labels = np.repeat(np.arange(4), 150)
    images = (rng.random((600, 16, 16)) * 60 + labels[:, None, None] * 40).astype(np.uint8)
    order = rng.permutation(600)
    np.savez(folder / "data.npz", x=images[order], y=labels[order])
    rows = ["height,width,colour,label"]
    for label in labels[order]:
        height, width = rng.normal(label, 1, 2).round(3)
        colour = ["red", "green", "blue"][rng.integers(3)]
        rows.append(f"{height},{width},{colour},class{label}")
    (folder / "data.csv").write_text("\n".join(rows) + "\n")
    words = ["sun", "rain", "snow", "wind", "fog", "hail"]
    lines = []
    for label in labels[order]:
        chosen = [words[(label + rng.integers(3)) % 6] for _ in range(6)]
        lines.append(json.dumps({"text": " ".join(chosen), "label": f"topic{label}"}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")


def settings_of(name: str, files: Path) -> dict[str, Any]:
    settings = SMALL | CASES[name]
    if name in NOT_SHOTS:
        settings.pop("shots", None)
    return {
        key: value.replace("FILES", str(files)) if isinstance(value, str) else value
        for key, value in settings.items()
    }


def numbers_of(result: fedproto.Result) -> dict[str, Any]:
    """What must not change about a run, as plain JSON."""
    last = result.metrics[-1]
    prototypes = result.prototypes.get("prototypes")
    described = {
        "classes": result.data["classes"],
        "models": [client["model"] for client in result.clients],
        "accuracies": [client["accuracy"] for client in result.clients],
        "traffic": [client["communication"] for client in result.clients],
        "communication": result.communication,
        "participants": [line["participants"] for line in result.metrics],
        "loss": last["loss"],
        "loss_std": last["loss_std"],
    }
    if ":" not in result.data["dataset"]:  # the hash covers the names of files
        described["partition"] = result.data["partition"]
    if prototypes is not None:
        values = prototypes.double()
        described["prototypes"] = {
            "sum": float(values.sum()),
            "squares": float(values.square().sum()),
            "known": result.prototypes["known"].tolist(),
        }
    states = {}
    for client, state in enumerate(result.states):
        states[str(client)] = sum(float(value.double().square().sum()) for value in state.values())
    described["states"] = states
    return described


def bits_of(result: fedproto.Result) -> str:
    """A hash over every bit of the models and prototypes."""
    digest = hashlib.sha256()
    trees = [result.prototypes, *result.states]
    for tree in trees:
        for name in sorted(tree):
            digest.update(name.encode() + tree[name].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def assert_same(found: Any, wanted: Any, where: str) -> None:
    if isinstance(wanted, dict):
        assert isinstance(found, dict) and found.keys() >= wanted.keys(), where
        for key, value in wanted.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for position, value in enumerate(wanted):
            assert_same(found[position], value, f"{where}[{position}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12), where
    else:
        assert found == wanted, where


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_fixed_run_gives_the_recorded_numbers(name: str, files: Path) -> None:
    wanted = json.loads(RECORDED.read_text())[name]
    assert_same(numbers_of(fedproto.run(**settings_of(name, files))), wanted, name)


def test_the_engines_give_the_same_numbers() -> None:
    recorded = json.loads(RECORDED.read_text())
    for engine in ENGINES[1:]:
        assert_same(recorded[f"engine {engine}"], recorded["engine reference"], engine)


def sweep_numbers(folder: Path) -> dict[str, Any]:
    """Accuracies of a sweep of four federations."""
    file = folder / "sweep.toml"
    file.write_text(
        'dataset = "digits"\nclients = 4\nrounds = 2\nshots = 10\nprecision = "float64"\n'
        '[sweep]\nalgorithm = ["local", "fedproto"]\nseed = [0, 1]\n'
    )
    outcome = CliRunner().invoke(app, ["sweep", str(file), "--out", str(folder / "sweep")])
    assert outcome.exit_code == 0, outcome.output
    found = {}
    for path in sorted((folder / "sweep").glob("*/result.json")):
        found[path.parent.name] = json.loads(path.read_text())["accuracy"]
    return found


def test_a_fixed_sweep_gives_the_recorded_numbers(tmp_path: Path) -> None:
    wanted = json.loads(RECORDED.read_text())["sweep"]
    assert_same(sweep_numbers(tmp_path), wanted, "sweep")


def record() -> tuple[dict[str, Any], dict[str, str]]:
    numbers: dict[str, Any] = {}
    bits: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_files(folder)
        for name in CASES:
            result = fedproto.run(**settings_of(name, folder))
            numbers[name] = numbers_of(result)
            bits[name] = bits_of(result)
        numbers["sweep"] = sweep_numbers(folder)
    return numbers, bits


if __name__ == "__main__":
    recorded, bits = record()
    if "--record" in sys.argv:
        RECORDED.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")
    print(json.dumps({"numbers": recorded, "bits": bits}, indent=1, sort_keys=True))
