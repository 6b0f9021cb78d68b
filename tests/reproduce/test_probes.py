"""Probes of trained models, computed once more by hand from the run folders."""

import json
import math

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto, only_line
from helpers.reproduction import (
    PROBED,
    PROBED_CELLS,
    Killed,
    make_target,
    read_content,
    refuse_to_train,
)
from safetensors.torch import load_file
from torch.func import functional_call

from fedproto.reproduce import archive, make, probes
from fedproto.runs.experiment import reopen
from fedproto.runs.folder import RunFolder

CLIENTS = range(4)


def cell_folder(out, cell):
    return out / "runs" / "probed" / cell


def read_prototypes(folder):
    tensors = load_file(folder / "prototypes.safetensors")
    return {name: value.numpy() for name, value in tensors.items()}


def read_classes(folder):
    """Return the classes of each client."""
    clients = json.loads((folder / "partition.json").read_text())["clients"]
    return [[int(name) for name in client["classes"]] for client in clients]


def embed_by_hand(module, state, examples):
    """Return the embeddings and classes of all examples, as numpy arrays."""
    with torch.no_grad():
        features, _ = functional_call(module.eval(), state, (examples.x[examples.rows],))
    return features.numpy(), examples.y[examples.rows].numpy()


def stored_states(folder):
    """Yield each client with its own model's state from the checkpoint."""
    experiment, _ = reopen(RunFolder(folder))
    (path,) = (folder / "checkpoint").iterdir()
    stored = load_file(path)
    for member in experiment.federation.members:
        prefix = f"client.{member.id}."
        names = [name for name in stored if name.startswith(prefix)]
        yield member, {name.removeprefix(prefix): stored[name] for name in names}


# --- travel


def average_prototypes(folder, classes, clients):
    """Return the |D_ij|-weighted mean prototype of each class that one of these clients holds."""
    tensors = read_prototypes(folder)
    local = tensors["local"]
    counts = tensors["held"]
    means = {}
    for label in classes:
        holders = [client for client in clients if counts[client, label] > 0]
        if holders:
            weighted = sum(counts[client, label] * local[client, label] for client in holders)
            means[label] = weighted / sum(counts[holders, label])
    return means


def accuracy_by_hand(features, y, prototypes):
    """Return the fraction of embeddings whose nearest prototype is that of their class."""
    correct = 0
    for x, label in zip(features, y, strict=True):
        nearest = min(prototypes, key=lambda each: math.dist(x, prototypes[each]), default=None)
        correct += nearest == label
    return correct / len(y)


@pytest.mark.parametrize("cell", PROBED_CELLS)
def test_travel_is_as_computed_by_hand(cell, probed):
    folder = cell_folder(probed, cell)
    travel = json.loads((folder / "travel.json").read_text())["clients"]
    assert [client["id"] for client in travel] == [0, 1, 2, 3]
    result = RunFolder(folder).result()
    classes = read_classes(folder)
    for member, state in stored_states(folder):
        features, y = embed_by_hand(member.module, state, member.test)
        found = travel[member.id]
        own_classes = classes[member.id]
        of_all = average_prototypes(folder, own_classes, CLIENTS)
        others = [client for client in CLIENTS if client != member.id]
        of_others = average_prototypes(folder, own_classes, others)
        with_own = accuracy_by_hand(features, y, of_all)
        without_own = accuracy_by_hand(features, y, of_others)
        covered = len(of_others) / len(own_classes)
        scored = result["clients"][member.id]["accuracy"]["prototype_own"]
        assert found["with_own"] == pytest.approx(with_own, abs=1e-12)
        assert found["with_own"] == pytest.approx(scored, abs=1e-12)
        assert found["without_own"] == pytest.approx(without_own, abs=1e-12)
        assert found["covered"] == pytest.approx(covered, abs=1e-6)
    # Some classes have one holder, others several, and removing a share makes a difference.
    covered = [client["covered"] for client in travel]
    assert min(covered) < 1
    assert max(covered) > 0
    assert any(client["with_own"] != client["without_own"] for client in travel)


@pytest.mark.parametrize("cell", PROBED_CELLS)
def test_the_holders_of_a_class_are_those_of_the_partition(cell, probed):
    folder = cell_folder(probed, cell)
    counts = read_prototypes(folder)["held"]
    for client, classes in enumerate(read_classes(folder)):
        assert np.flatnonzero(counts[client]).tolist() == sorted(classes)


@pytest.fixture
def without_second():
    """The prototypes of three clients without those of the second, which alone holds class 1."""
    sums = torch.tensor(
        [[[2.0, 4.0], [0.0, 0.0]], [[3.0, 3.0], [5.0, 5.0]], [[1.0, 2.0], [0.0, 0.0]]]
    )
    weights = torch.tensor([[2.0, 0.0], [3.0, 5.0], [1.0, 0.0]])
    return probes._aggregate_without(sums, weights, 1)


def test_prototypes_without_one_client(without_second):
    assert without_second["prototypes"].tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert without_second["known"].tolist() == [1.0, 0.0]


def test_a_class_without_a_prototype_is_never_predicted(without_second):
    """Not even where the client has no other class."""
    features = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    y = torch.tensor([0, 1])
    assert probes._measure_accuracy(features, y, without_second, [0, 1]) == 0.5
    assert probes._measure_accuracy(features, y, without_second, [1]) == 0.0


# --- embeddings


def read_embeddings(folder):
    with np.load(folder / "embeddings.npz") as file:
        return dict(file)


def choose_images(features, y, label, client):
    """Return the embeddings of a class that are kept: different images for each client."""
    of_class = features[y == label]
    return np.roll(of_class, -client * probes.IMAGES_PER_CLASS, 0)[: probes.IMAGES_PER_CLASS]


@pytest.mark.parametrize("cell", PROBED_CELLS)
def test_embeddings_of_test_images_are_as_computed_by_hand(cell, probed):
    folder = cell_folder(probed, cell)
    classes = read_classes(folder)
    features = []
    labels = []
    clients = []
    for member, state in stored_states(folder):
        test_features, y = embed_by_hand(member.module, state, member.test)
        for label in classes[member.id]:
            chosen = choose_images(test_features, y, label, member.id)
            assert len(chosen) == min(probes.IMAGES_PER_CLASS, (y == label).sum())
            assert len(chosen) > 0
            features.append(chosen)
            labels += [label] * len(chosen)
            clients += [member.id] * len(chosen)
    embeddings = read_embeddings(folder)
    assert embeddings["x"] == pytest.approx(np.concatenate(features), abs=1e-12)
    assert embeddings["x"].shape[1] == 8
    assert embeddings["y"].tolist() == labels
    assert embeddings["client"].tolist() == clients


@pytest.mark.parametrize("cell", PROBED_CELLS)
def test_class_means_are_as_computed_by_hand(cell, probed):
    folder = cell_folder(probed, cell)
    uploaded = read_prototypes(folder)["local"]
    classes = read_classes(folder)
    means = []
    labels = []
    clients = []
    for member, state in stored_states(folder):
        features, y = embed_by_hand(member.module, state, member.train)
        for label in classes[member.id]:
            mean = features[y == label].mean(0)
            assert mean == pytest.approx(uploaded[member.id, label], abs=1e-9)
            means.append(mean)
            labels.append(label)
            clients.append(member.id)
    embeddings = read_embeddings(folder)
    assert embeddings["local"] == pytest.approx(np.stack(means), abs=1e-12)
    assert embeddings["local_y"].tolist() == labels
    assert embeddings["local_client"].tolist() == clients


@pytest.mark.parametrize("cell", PROBED_CELLS)
def test_global_prototypes_are_stored_with_the_embeddings(cell, probed):
    folder = cell_folder(probed, cell)
    embeddings = read_embeddings(folder)
    prototypes = read_prototypes(folder)
    assert embeddings["prototypes"].shape == (10, 8)
    assert embeddings["prototypes"] == pytest.approx(prototypes["prototypes"])
    assert embeddings["known"].tolist() == prototypes["known"].tolist()


def test_models_are_probed_as_they_are_evaluated(specs, tmp_path):
    """A method that averages weights is evaluated with the server's, not with the client's own."""
    spec = PROBED.replace("travel = true", "").replace('start = "own"', "")
    (specs / "probed.toml").write_text(spec.replace('"fedproto"', '"fedavg"'))
    make_target(tmp_path, "probed")
    folder = cell_folder(tmp_path, PROBED_CELLS[0])
    experiment, _ = reopen(RunFolder(folder))
    model = experiment.progress.server  # FedAvg's server state is a model
    own = experiment.client_states()[0]
    assert any(not torch.equal(model[name], own[name]) for name in model)
    member = experiment.federation.members[0]
    features, y = embed_by_hand(member.module, model, member.test)
    expected = [choose_images(features, y, label, 0) for label in member.classes]
    embeddings = read_embeddings(folder)
    of_first = embeddings["x"][embeddings["client"] == 0]
    assert of_first == pytest.approx(np.concatenate(expected), abs=1e-12)
    assert "prototypes" not in embeddings


# --- when models are probed


def test_probes_are_in_the_json(probed):
    for cell, name in zip(read_content(probed, "probed")["cells"], PROBED_CELLS, strict=True):
        travel = json.loads((cell_folder(probed, name) / "travel.json").read_text())
        assert [run["travel"] for run in cell["runs"]] == [travel["clients"]]


def test_probes_are_moved_by_an_archive(probed, specs, tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "reopen", refuse_to_train)  # the models are not in the archive
    out = tmp_path / "out"
    reporter, _ = make_target(out, "probed", archive=probed / "cells.tgz")
    assert reporter.trained == []
    assert read_content(out, "probed") == read_content(probed, "probed")
    for cell in PROBED_CELLS:
        copy = cell_folder(out, cell) / "embeddings.npz"
        original = cell_folder(probed, cell) / "embeddings.npz"
        assert copy.read_bytes() == original.read_bytes()


def test_a_run_stopped_before_its_probes_is_probed_later(probed, specs, tmp_path, monkeypatch):
    def stop(*arguments):
        raise Killed

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(make, "probe_models", stop)
        with pytest.raises(Killed):
            make_target(out, "probed")
    # It is not archived yet: without its models it could never be probed elsewhere.
    archive.pack(tmp_path / "cells.tgz", out / "runs")
    assert archive.unpack(tmp_path / "cells.tgz", tmp_path / "empty") == 0
    reporter, _ = make_target(out, "probed")
    assert reporter.trained == [[PROBED_CELLS[1]]]
    assert read_content(out, "probed") == read_content(probed, "probed")


def test_a_finished_run_without_its_models_is_not_probed(specs, tmp_path):
    """Otherwise untrained models would be."""
    make_target(tmp_path, "probed")
    for cell in PROBED_CELLS:
        folder = cell_folder(tmp_path, cell)
        RunFolder(folder).drop_checkpoints()
        (folder / "travel.json").unlink()
        (folder / "embeddings.npz").unlink()
    answer = fedproto("reproduce", "probed", "--out", tmp_path)
    assert answer.code == 2
    assert "has no checkpoint to make embeddings.npz from" in only_line(answer.err)
