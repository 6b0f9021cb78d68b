"""Classifying by both prototypes and head: τ goes wherever the prototypes go."""

import json

import numpy as np
import pytest
from helpers.tiny import SETTINGS

import fedproto
from fedproto import Classifier
from fedproto.errors import DataError
from fedproto.inference.export.read import read_exported
from fedproto.inference.trained_client import load_client, take_client
from fedproto.runs.prototype_files import read_prototypes

TRAINED = SETTINGS | {"algorithm": "fedproto", "precision": "float32", "contrast": 1}
TAUS = [{}, {"tau": 2.5}, {"tau": 0.07, "tau_unit": "absolute"}]


@pytest.fixture(scope="module", params=TAUS, ids=["default", "relative", "absolute"])
def trained(request, tmp_path_factory):
    """A run's settings of τ, its result and its folder."""
    folder = tmp_path_factory.mktemp("both") / "run"
    return request.param, fedproto.run(**TRAINED, **request.param, out=folder), folder


def own_test_rows(result, client):
    member = result.trained.federation.members[client]
    preprocessing = member.preprocessing
    x = member.test.x[member.test.rows].cpu().numpy()
    raw = (x * np.float32(preprocessing.std[0]) + np.float32(preprocessing.mean[0])) * (
        preprocessing.scale
    )
    names = np.array(result.trained.federation.classes)
    return raw, names[member.test.y[member.test.rows].cpu().numpy()]


def test_a_run_in_memory_its_folder_and_its_export_have_one_tau(trained, tmp_path):
    options, result, folder = trained
    in_memory = take_client(result, 1).measure_tau()
    assert read_prototypes(folder).tau == (
        options.get("tau", 0.3),
        options.get("tau_unit", "relative"),
    )
    result.export(tmp_path / "exported", client=1, onnx=False)
    stated = json.loads((tmp_path / "exported" / "manifest.json").read_text())["tau"]
    assert float(in_memory) == float(load_client(folder, 1).measure_tau()) == stated
    assert float(read_exported(tmp_path / "exported").measure_tau()) == stated


def test_answers_by_both_have_the_accuracy_of_the_run(trained):
    _, result, folder = trained
    for client in range(4):
        x, y = own_test_rows(result, client)
        for among, name in (("all", "both"), ("own", "both_own")):
            classifier = Classifier.of(folder, client, by="both", among=among)
            expected = result.clients[client]["accuracy"][name]
            assert classifier.score(x, y) == pytest.approx(expected)


def change_manifest(folder, tau):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["tau"]
    path.write_text(json.dumps(manifest | tau))


@pytest.mark.parametrize("tau", [0, -1.0, "1", None, True])
def test_a_tau_that_is_no_positive_number_is_refused(trained, tmp_path, tau):
    _, result, _ = trained
    result.export(tmp_path / "exported", client=0, onnx=False)
    change_manifest(tmp_path / "exported", {"tau": tau})
    with pytest.raises(DataError, match="'tau' must be a positive number, not"):
        read_exported(tmp_path / "exported")


def test_an_older_export_has_the_default_tau(trained, tmp_path):
    _, result, _ = trained
    result.export(tmp_path / "exported", client=0, onnx=False)
    change_manifest(tmp_path / "exported", {})
    assert read_exported(tmp_path / "exported").prototypes.tau == (0.3, "relative")


def test_a_run_folder_with_a_broken_tau_is_refused(trained):
    _, _, folder = trained
    path = folder / "config.toml"
    text = path.read_text()
    try:
        for wrong in ("tau = -1.0", 'tau = "much"', "tau = inf"):
            lines = [wrong if line.startswith("tau =") else line for line in text.splitlines()]
            path.write_text("\n".join(lines))
            with pytest.raises(DataError, match="has a tau that is not a positive number"):
                read_prototypes(folder)
    finally:
        path.write_text(text)
