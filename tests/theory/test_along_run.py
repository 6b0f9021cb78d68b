"""Measuring a run: what is measured is what the engine trains, and the statements hold there."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import SETTINGS, build, experiment, finished
from typer.testing import CliRunner

import fedproto
from fedproto.cli.main import app
from fedproto.config.settings import configure
from fedproto.core.batches import count_round_steps
from fedproto.core.local_training import train
from fedproto.errors import ConfigError, RunFolderError
from fedproto.report import write as write_report
from fedproto.runs.folder import RunFolder
from fedproto.runs.restarting import restart
from fedproto.runs.training_settings import training_of
from fedproto.theory.along_run import TheoryOptions, measure_experiment, measure_folder
from fedproto.theory.conditions import list_departures, make_proof_config, refuse_unsuited
from fedproto.theory.files import read_theory
from fedproto.theory.measured_round import MeasureOptions
from fedproto.theory.objectives import LocalObjectives, add_terms, group_by_module, stack_states
from fedproto.theory.replays import ReplayPlan, replay_round
from fedproto.theory.words import explain, list_rows, percent

FEW = TheoryOptions(rounds=2, measure=MeasureOptions(replays=8, hessian_rows=8, iterations=6))


def measure(**settings: Any) -> dict[str, Any]:
    return measure_experiment(experiment("fedproto", **settings), FEW)


@pytest.fixture(scope="module")
def proof() -> dict[str, Any]:
    return measure(distance="l2", momentum=0.0, lr=0.02)


@pytest.fixture(scope="module")
def practical() -> dict[str, Any]:
    return measure(lr=0.02)


# --- the objectives are the engine's


def test_the_whole_objective_is_the_algorithms_loss_over_all_rows() -> None:
    run, _ = finished("fedproto", distance="l2")
    (group,) = group_by_module(run.federation, run.algorithm)
    states = run.client_states()
    received = []
    for member in run.federation.members:
        recipient = run.federation.recipient(member.id)
        received.append(run.algorithm.send(run.progress.server, recipient))
    params = stack_states(states)
    who = torch.arange(len(group))
    outputs = group.outputs(params, who)
    found = add_terms(group.terms_of_outputs(params, outputs, stack_states(received)))
    for member, state, each in zip(run.federation.members, states, received, strict=True):
        member.module.eval()
        x, y = member.train.x[member.train.rows], member.train.y[member.train.rows]
        features, logits = torch.func.functional_call(member.module, state, (x,))
        distances = (features - each["prototypes"][y]).norm(dim=1)
        expected = torch.nn.functional.cross_entropy(logits, y) + distances.mean()
        assert float(found[member.id]) == pytest.approx(float(expected))


def test_the_full_gradient_is_that_of_finite_differences() -> None:
    run, _ = finished("fedproto", distance="l2")
    (group,) = group_by_module(run.federation, run.algorithm)
    params = stack_states(run.client_states())
    received = stack_states(
        [
            run.algorithm.send(run.progress.server, run.federation.recipient(member.id))
            for member in run.federation.members
        ]
    )
    who = torch.arange(len(group))
    gradient = group.full_gradient(params, received, who)
    name = group.trained[0]
    nudge = 1e-6

    def loss(shift: float) -> torch.Tensor:
        moved = params | {name: params[name].clone()}
        moved[name][:, 1, 2] += shift
        return add_terms(group.terms_of_outputs(moved, group.outputs(moved, who), received))

    slope = (loss(nudge) - loss(-nudge)) / (2 * nudge)
    torch.testing.assert_close(gradient[name][:, 1, 2], slope, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_replay_of_single_rows_is_what_the_engine_trains(momentum: float) -> None:
    """With one row per client every batch is that row twice, drawn with replacement or not."""
    run = experiment("fedproto", momentum=momentum, distance="l2", shots=1, ways=1, stdev=0)
    (group,) = group_by_module(run.federation, run.algorithm)
    training = training_of(run.config)
    steps = torch.tensor(
        [count_round_steps(each, run.algorithm, training) for each in run.federation.members]
    )
    received = []
    ends = []
    for member in run.federation.members:
        each = run.algorithm.send(run.progress.server, run.federation.recipient(member.id))
        received.append(each)
        ends.append(train(member, run.algorithm, member.initial, each, training, 1).state)
    plan = ReplayPlan(2, run.config.batch, run.config.lr, momentum, seed=0, round=1)
    params = stack_states([member.initial for member in run.federation.members])
    replays = replay_round(group, params, stack_states(received), steps, plan)
    assert steps.tolist() == [1] * 4
    for client, end in enumerate(ends):
        for name in group.trained:
            torch.testing.assert_close(replays.ends[0][name][client], end[name])


def test_uploads_are_the_engines() -> None:
    run, _ = finished("fedproto")
    (group,) = group_by_module(run.federation, run.algorithm)
    params = stack_states(run.client_states())
    zeros = stack_states(
        [
            run.algorithm.send(run.progress.server, run.federation.recipient(member.id))
            for member in run.federation.members
        ]
    )
    uploads = group.upload(params, group.outputs(params, torch.arange(len(group))), zeros)
    found = run.algorithm.aggregate(run.progress.server, uploads)["prototypes"]
    # The last round's aggregation of the same models.
    torch.testing.assert_close(found, run.progress.server["prototypes"])


# --- what the measurements say


def test_the_statements_hold_in_the_proofs_setting(proof: dict[str, Any]) -> None:
    summary = proof["summary"]
    assert summary["client_rounds"] == 8
    for name in ("lemma_1", "lemma_2", "theorem_1"):
        assert summary["statements"][name]["clearly_violated"] == 0
    assert summary["statements"]["lemma_2"]["holds"] == 1
    assert summary["statements"]["lemma_2"]["holds_with_means"] == 1


def test_round_1_has_no_lemma_2(proof: dict[str, Any]) -> None:
    first, second = proof["rounds"]
    assert all(client["lemma_2"] is None for client in first["clients"])
    assert all(client["lemma_2"] is not None for client in second["clients"])
    assert proof["summary"]["statements"]["lemma_2"]["checks"] == 4


def test_the_movement_of_prototypes_is_below_each_step_of_lemma_2(proof: dict[str, Any]) -> None:
    """Change ≤ λ ‖C̄' − C̄‖ ≤ λ L2 η E G."""
    for client in proof["rounds"][1]["clients"]:
        lemma_2 = client["lemma_2"]
        assert lemma_2["change"] <= client["movement"] <= lemma_2["bound"]


def test_aggregation_never_increases_the_squared_distance_of_all(practical: dict[str, Any]) -> None:
    federation = practical["rounds"][1]["federation"]
    assert federation["largest_aggregation_change"] <= 1e-12


def test_the_corrected_lemma_2_holds_in_the_practical_setting(practical: dict[str, Any]) -> None:
    assert practical["summary"]["statements"]["lemma_2"]["holds_corrected"] == 1


def test_the_sum_of_squared_gradients_begins_with_the_exact_one(proof: dict[str, Any]) -> None:
    """With replays the estimate at the first step has the expectation of the full gradient."""
    run = experiment("fedproto", distance="l2", momentum=0.0, lr=0.02)
    (group,) = group_by_module(run.federation, run.algorithm)
    received = stack_states(
        [
            run.algorithm.send(run.progress.server, run.federation.recipient(member.id))
            for member in run.federation.members
        ]
    )
    params = stack_states([member.initial for member in run.federation.members])
    plan = ReplayPlan(800, 4, 0.02, 0.0, seed=0, round=1)
    replays = replay_round(group, params, received, torch.ones(4, dtype=torch.int64), plan)
    for client in proof["rounds"][0]["clients"]:
        estimates = replays.squares[client["client"], :, 0]
        error = float(estimates.std()) / math.sqrt(len(estimates))
        assert abs(float(estimates.mean()) - client["square_start"]) < 4 * error


def test_measuring_does_not_change_the_run() -> None:
    """Between the replays, the rounds are those of the run itself."""
    measured = experiment("fedproto")
    measure_experiment(measured, FEW._replace(rounds=3))
    plain = experiment("fedproto", rounds=2)
    plain.execute()
    assert measured.progress.round == 2
    assert torch.equal(measured.progress.server["prototypes"], plain.progress.server["prototypes"])


def test_several_architectures_are_measured_together() -> None:
    mixed = "mlp(hidden=16,width=8)*2,mlp(hidden=12,width=8)*2"
    found = measure(model=mixed, distance="l2", momentum=0.0, lr=0.02)
    clients = found["rounds"][1]["clients"]
    assert [client["client"] for client in clients] == [0, 1, 2, 3]
    assert all(client["lemma_2"]["holds"] for client in clients)


def test_rounds_are_chosen() -> None:
    options = FEW._replace(rounds=3, first=2)
    found = measure_experiment(experiment("fedproto"), options)
    assert [record["round"] for record in found["rounds"]] == [2, 3]


# --- words and files


def test_departures_are_said(practical: dict[str, Any], proof: dict[str, Any]) -> None:
    said = " ".join(practical["departures"])
    assert "its square" in said and "momentum is 0.5" in said
    assert "momentum" not in " ".join(proof["departures"])
    config = configure(SETTINGS | {"algorithm": "fedproto"})[0]
    assert any("dropout" in sentence for sentence in list_departures(config, True, False))


def test_tables_and_sentences_are_complete(proof: dict[str, Any]) -> None:
    rows = list_rows(proof["summary"])
    assert [row[0] for row in rows] == ["Lemma 1", "Lemma 2", "Theorem 1"]
    sentences = " ".join(explain(proof))
    assert "Corollary 1 allows λ below" in sentences
    assert "Theorem 2 predicts" in sentences


def test_a_first_round_alone_has_an_empty_table() -> None:
    found = measure_experiment(experiment("fedproto"), FEW._replace(rounds=1))
    assert list_rows(found["summary"])[1][1] == "0"
    assert explain(found) == []


def test_percent_is_100_only_where_nothing_is_missing() -> None:
    assert percent(0.99999) == "99.9%"
    assert percent(1.0) == "100%"
    assert percent(1e-9) == "0.1%"
    assert percent(0.0) == "0%"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theory") / "run"
    settings = SETTINGS | {"algorithm": "fedproto", "out": path}
    fedproto.run(**settings)
    return path


def test_a_restarted_run_trains_the_same_models(folder: Path) -> None:
    again = restart(RunFolder.open(folder))
    result = again.execute()
    stored = fedproto.resume(folder)
    for first, second in zip(result.states, stored.states, strict=True):
        for name in first:
            assert torch.equal(first[name], second[name])


def test_the_proofs_setting_starts_from_the_same_weights(folder: Path) -> None:
    again = restart(RunFolder.open(folder), make_proof_config)
    assert again.config.momentum == 0
    assert again.config.algorithm.options["distance"] == "l2"


def test_the_command_measures_both_settings_and_the_report_shows_them(folder: Path) -> None:
    arguments = ["theory", str(folder), "--rounds", "2", "--replays", "2", "--hessian-rows", "4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "the proof's own setting" in result.output
    content = read_theory(folder)
    assert content is not None
    assert list(content["settings"]) == ["run", "proof"]
    assert (folder / "theory.png").read_bytes().startswith(b"\x89PNG")
    page = write_report([folder], folder.parent / "report.html").read_text()
    assert "the proof&#39;s own setting" in page
    assert page.count('<th scope="row">Theorem 1</th>') == 2


def test_a_folder_without_measurements_has_none(tmp_path: Path) -> None:
    assert read_theory(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"settings": {"run": 3}}',
        '{"settings": {}}',
        '{"version": 1, "settings": {"run": {"summary": {}, "rounds": [], "eta": 1, "lam": 1}}}',
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "theory.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"theory\.json"):
        read_theory(tmp_path)


# --- what is refused


def test_a_run_that_the_statements_are_not_about_is_refused() -> None:
    with pytest.raises(ConfigError, match="is about the algorithm"):
        measure_experiment(experiment("fedavg"), FEW)


def test_the_proofs_setting_has_no_dropout() -> None:
    settings = SETTINGS | {"algorithm": "fedproto", "dataset": "mnist5k", "model": "cnn"}
    changed = make_proof_config(configure(settings)[0])
    assert [part.options["dropout"] for part in changed.model] == [0.0]
    with pytest.raises(ConfigError, match="by its name"):
        make_proof_config(configure(settings | {"model": "auto"})[0])


def test_batch_norm_is_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64))
    (member,) = [experiment("fedproto").federation.members[0]]
    with pytest.raises(ConfigError, match="BatchNorm"):
        LocalObjectives.build([replace(member, module=module)], build("fedproto"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": "fedavg"}, "is about the algorithm"),
        ({"participation": 0.5}, "participation=1.0"),
        ({"optimiser": "adam"}, "optimiser=sgd"),
        ({"clip_norm": 1.0}, "clip_norm=0.0"),
        ({"privacy": "release", "noise_multiplier": 1.0}, "privacy=none"),
        ({"regularise": "class"}, "regularise=sample"),
        ({"collect": "during"}, "collect=after"),
        ({"contrast": 1.0}, "contrast=0.0"),
        ({"distance": "l1"}, "distances l2, sql2, mse"),
        ({"batch": 1}, "batches of at least 2"),
        ({"transform": "clip(norm=1)"}, "no transform"),
    ],
)
def test_runs_that_the_statements_are_not_about_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    config = configure(SETTINGS | {"algorithm": "fedproto"} | settings)[0]
    with pytest.raises(ConfigError, match=words):
        refuse_unsuited(config)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--replays", "1"], "replays must be at least 2"),
        (["--first", "9"], "must not be after"),
        (["--setting", "paper"], "setting"),
        (["--hessian-rows", "0"], "hessian_rows must be at least 1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(folder: Path, flags: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["theory", str(folder), *flags])
    assert words in str(result.exception)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        measure_folder(tmp_path, FEW)


def test_what_is_written_is_json(proof: dict[str, Any]) -> None:
    assert json.loads(json.dumps(proof, allow_nan=False)) == proof
