"""Runs from arrays and modules, and what is done with them afterwards, from Python alone."""

import copy
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedproto
from fedproto.errors import ConfigError, RunFolderError

GENERATOR = np.random.default_rng(0)
X = GENERATOR.random((60, 6), np.float32)
Y = np.arange(60) % 3
X[np.arange(60), Y] += 1
CLIENTS = [(X[:40], Y[:40]), (X[20:], Y[20:])]
SETTINGS = {"rounds": 4, "lr": 0.1, "checkpoint_every": 1, "eval_every": 2, "device": "cpu"}


def make_net():
    """Return a module that embeds in four values, with dropout; always the same one."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    return fedproto.wrap(body, head="3")


def run(**settings):
    return fedproto.run(dataset=CLIENTS, model=make_net(), **(SETTINGS | settings))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of arrays and a module, with its folder."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    return run(out=folder)


def assert_same_result(one, other):
    for state, other_state in zip(one.states, other.states, strict=True):
        assert state.keys() == other_state.keys()
        assert all(torch.equal(value, other_state[name]) for name, value in state.items())
    assert torch.equal(one.prototypes["prototypes"], other.prototypes["prototypes"])
    assert one.accuracy == other.accuracy
    assert [line["loss"] for line in one.metrics] == [line["loss"] for line in other.metrics]


# --- resume


def stop_after(round, folder, **settings):
    """Begin the run of `finished` and leave it after some rounds."""
    rounds = fedproto.stream(dataset=CLIENTS, model=make_net(), out=folder, **(SETTINGS | settings))
    for result in rounds:
        if result.round == round:
            rounds.close()


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_a_run_of_arrays_and_modules_is_resumed_to_the_bit(engine, tmp_path):
    whole = run(engine=engine)
    stop_after(2, tmp_path / "run", engine=engine)
    resumed = fedproto.resume(tmp_path / "run", dataset=CLIENTS, model=make_net())
    assert [line["round"] for line in resumed.metrics] == [1, 2, 3, 4]
    assert_same_result(resumed, whole)


@pytest.mark.parametrize(
    ("data", "other"),
    [
        ((X, Y), (X[::-1].copy(), Y)),
        ({"Ulm": CLIENTS[0], "Köln": CLIENTS[1]}, {"Ulm": CLIENTS[0], "Köln": (X[:40], Y[:40])}),
    ],
    ids=["a pair", "named clients"],
)
def test_other_kinds_of_python_data_are_resumed_too(data, other, tmp_path):
    settings = SETTINGS | {"model": "mlp(hidden=8,width=4)", "clients": 2}
    whole = fedproto.run(dataset=data, **settings)
    rounds = fedproto.stream(dataset=data, out=tmp_path / "run", **settings)
    next(rounds)
    rounds.close()
    with pytest.raises(RunFolderError, match="other"):
        fedproto.resume(tmp_path / "run", dataset=other)
    assert_same_result(fedproto.resume(tmp_path / "run", dataset=data), whole)


def test_a_finished_run_is_read_and_needs_neither_arrays_nor_modules(finished):
    read = fedproto.resume(finished.folder)
    assert_same_result(read, finished)
    assert read.data == finished.data and read.folder == finished.folder


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"dataset": None},
            RunFolderError,
            r"with arrays of its own.*resume\('run', dataset=\.\.\.\)",
        ),
        ({"model": None}, RunFolderError, r"with modules of its own.*model=\.\.\."),
        (
            {"dataset": [(X[:40] + 1, Y[:40]), CLIENTS[1]]},
            RunFolderError,
            "began with other arrays",
        ),
        ({"dataset": CLIENTS[::-1]}, RunFolderError, "other"),
        ({"dataset": [(X[:40], Y[:40][::-1]), CLIENTS[1]]}, RunFolderError, "other labels"),
        ({"model": nn.Linear(6, 3)}, ConfigError, "fedproto.wrap"),
    ],
)
def test_other_arrays_and_modules_are_refused(changes, error, words, tmp_path):
    stop_after(1, tmp_path / "run")
    given = {"dataset": CLIENTS, "model": make_net()} | changes
    with pytest.raises(error, match=words):
        fedproto.resume(tmp_path / "run", **given)


def test_arrays_for_a_run_of_a_named_data_set_are_refused(tmp_path):
    rounds = fedproto.stream(
        dataset="digits", clients=2, shots=5, rounds=2, checkpoint_every=1, out=tmp_path / "run"
    )
    next(rounds)
    rounds.close()
    with pytest.raises(ConfigError, match="was started with the dataset 'digits', not with arrays"):
        fedproto.resume(tmp_path / "run", dataset=CLIENTS)
    assert len(fedproto.resume(tmp_path / "run").metrics) == 2


# --- classify, export and report


def test_a_classifier_of_a_result_is_that_of_its_folder(finished):
    at_hand = fedproto.Classifier.of(finished, client=1)
    stored = fedproto.Classifier.of(finished.folder, client=1, module=make_net())
    assert at_hand.predict(X).tolist() == stored.predict(X).tolist()
    assert np.array_equal(at_hand.predict_proba(X), stored.predict_proba(X))
    assert np.array_equal(at_hand.calibration_, stored.calibration_)


def test_a_result_without_a_folder_classifies_as_it_was_evaluated():
    result = run()
    classifier = fedproto.Classifier.of(result, client=0, by="head")
    net = make_net()
    net.load_state_dict(result.states[0])
    _, logits = net.eval()(torch.from_numpy(X))
    assert classifier.predict(X).tolist() == [str(label) for label in logits.argmax(1).tolist()]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper"])
def test_the_servers_weights_are_adopted(algorithm, tmp_path):
    result = run(algorithm=algorithm, out=tmp_path / "run")
    at_hand = fedproto.Classifier.of(result, client=1)
    stored = fedproto.Classifier.of(tmp_path / "run", client=1, module=make_net())
    assert np.array_equal(at_hand.predict_proba(X), stored.predict_proba(X))


def test_clients_with_names_are_found_by_them(tmp_path):
    sites = ("Ulm", "Köln")
    rows = [f"{row % 5},{row % 3},{row % 2},{sites[row % 4 // 2]}" for row in range(60)]
    (tmp_path / "sites.csv").write_text("\n".join(["a,b,label,site", *rows]))
    result = fedproto.run(
        dataset=f"csv:{tmp_path / 'sites.csv'}",
        partition="natural",
        clients=2,
        rounds=1,
        out=tmp_path / "run",
        **{"dataset.client": "site"},
    )
    ulm = fedproto.Classifier.of(result, client="Ulm")
    assert "client Ulm" in repr(ulm)
    assert ulm.trained.about["client"] == [each["name"] for each in result.clients].index("Ulm")
    for run in (result, tmp_path / "run"):
        with pytest.raises(ConfigError, match="there are Köln, Ulm"):
            fedproto.Classifier.of(run, client="Bonn")


def test_a_module_from_python_is_exported_and_read_with_the_module_at_hand(finished, tmp_path):
    folder = finished.export(tmp_path / "exported", client=1, onnx=False)
    with pytest.raises(ConfigError, match=r"Classifier\.load\('exported', module=\.\.\.\)"):
        fedproto.Classifier.load(folder)
    read = fedproto.Classifier.load(folder, module=make_net())
    expected = fedproto.Classifier.of(finished, client=1)
    assert np.array_equal(read.predict_proba(X), expected.predict_proba(X))
    assert np.array_equal(read.calibration_, expected.calibration_)
    again = read.trained
    assert again.is_from_python


def test_another_module_than_the_exported_one_is_refused(finished, tmp_path):
    folder = finished.export(tmp_path / "exported", onnx=False)
    with pytest.raises(fedproto.DataError, match="not those of the module"):
        fedproto.Classifier.load(folder, module=nn.Linear(6, 3))


def test_a_module_from_python_is_exported_with_its_onnx_graph(finished, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    folder = finished.export(tmp_path / "exported", client=0)
    session = runtime.InferenceSession(str(folder / "model.onnx"))
    outputs = session.run(["logits"], {session.get_inputs()[0].name: X[:5]})
    classifier = fedproto.Classifier.of(finished, client=0, by="head")
    labels = classifier.classes_[outputs[0].argmax(1)]
    assert labels.tolist() == classifier.predict(X[:5]).tolist()


def test_a_result_that_was_read_is_exported_with_the_module_at_hand(finished, tmp_path):
    read = fedproto.resume(finished.folder)
    with pytest.raises(ConfigError, match="pass the module again"):
        read.export(tmp_path / "a", onnx=False)
    assert (read.export(tmp_path / "b", module=make_net(), onnx=False) / "manifest.json").exists()


def test_a_run_of_arrays_and_modules_is_reported(finished, tmp_path):
    pytest.importorskip("matplotlib")
    page = finished.report(tmp_path / "page.html")
    assert "started from Python" in page.read_text()


def test_a_result_without_a_folder_has_no_report():
    with pytest.raises(RunFolderError, match=r"pass out=FOLDER to fedproto\.run"):
        run(rounds=1).report()


# --- sweep, members and extend

DIGITS = {
    "dataset": "digits",
    "clients": 2,
    "shots": 5,
    "rounds": 1,
    "model": "mlp(hidden=8,width=4)",
    "engine": "reference",
}


def test_a_sweep_returns_every_combination_and_skips_what_is_finished(tmp_path):
    over = {"algorithm": ("fedproto", "local"), "seed": [0, 1]}
    swept = fedproto.sweep(over, out=tmp_path, **DIGITS)
    names = ["fedproto-seed=0", "fedproto-seed=1", "local-seed=0", "local-seed=1"]
    assert [each.name for each in swept] == names
    assert swept[1].varied == {"algorithm": "fedproto", "seed": 1}
    alone = fedproto.run(algorithm="local", seed=1, **DIGITS)
    assert swept[3].result.accuracy == alone.accuracy
    written = (tmp_path / names[0] / "result.json").stat().st_mtime_ns
    again = fedproto.sweep(over, out=tmp_path, **DIGITS)
    assert [each.result.data for each in again] == [each.result.data for each in swept]
    assert (tmp_path / names[0] / "result.json").stat().st_mtime_ns == written


@pytest.mark.parametrize("over", [{}, {"seed": 3}, {"seed": []}, {"seed": "01"}, {"seed": [1, 1]}])
def test_a_sweep_over_no_lists_is_refused(over, tmp_path):
    with pytest.raises(ConfigError, match=r"fedproto\.sweep"):
        fedproto.sweep(over, out=tmp_path / "sweep", **DIGITS)
    assert not (tmp_path / "sweep").exists()


def test_a_federation_grows_and_shrinks_from_python(tmp_path, monkeypatch):
    fedproto.run(out=tmp_path / "run", **DIGITS)
    settings = {"model": DIGITS["model"], "shots": 2, "epochs": 1}
    monkeypatch.chdir(tmp_path)
    rows = [f"{row % 5},{row % 3},{row % 2}" for row in range(40)]
    Path("new.csv").write_text("\n".join(["a,b,label", *rows]))
    joined = fedproto.join(
        tmp_path / "run", "csv:new.csv", out=tmp_path / "new", name="Ulm", **settings
    )
    assert "Ulm joined" in repr(joined)
    membership = fedproto.members(tmp_path / "run", add=[tmp_path / "new"])
    assert list(membership.members) == ["0", "1", "Ulm"]
    assert repr(membership) == "<3 members: 0, 1, Ulm>"
    fedproto.members(tmp_path / "run", remove=["0"], write=tmp_path / "shared.safetensors")
    assert (tmp_path / "shared.safetensors").exists()
    result = fedproto.extend(
        tmp_path / "run", [tmp_path / "new"], out=tmp_path / "extended", rounds=1
    )
    assert len(result.clients) == 2
    with pytest.raises(ConfigError, match="exists already"):
        fedproto.members(tmp_path / "run", write=tmp_path / "shared.safetensors")


# --- progress and reprs


def test_every_round_is_logged_and_progress_prints_those_that_are_evaluated(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="fedproto"):
        run(progress=True)
    assert len([record for record in caplog.records if "round" in record.message]) == 4
    printed = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in printed] == ["2", "4"]
    assert all("accuracy by head" in line for line in printed)


def test_progress_prints_the_rounds_that_are_evaluated_on_validation_rows(capsys, tmp_path):
    run(progress=True, validation=0.2)
    printed = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in printed] == ["2", "4"]
    assert all("validation accuracy by head" in line for line in printed)

    fedproto.sweep({"seed": [0]}, out=tmp_path, progress=True, validation=0.2, **DIGITS)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2 and "from round 1" in printed[0]
    assert "validation accuracy by head" in printed[1]


def test_nothing_is_printed_unless_it_is_asked_for(capsys):
    run(rounds=1)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_reprs_are_short(finished):
    rounds = []
    result = run(rounds=1, on_round=rounds.append)
    federation = result.trained.federation
    classifier = fedproto.Classifier.of(result)
    for value in (
        rounds[0],
        result,
        result.trained,
        federation,
        federation.members[0],
        federation.members[0].train,
        classifier,
        classifier.trained,
    ):
        assert len(repr(value)) < 200 and "tensor" not in repr(value)
    assert repr(federation) == "<federation of 2 clients and 3 classes>"
    assert repr(copy.copy(rounds[0])).startswith("<round 1: loss ")
