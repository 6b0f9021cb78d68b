"""What the loop reports of each round, by hand-computed values."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.tiny import build, experiment

from fedproto.core.rounds import run_rounds
from fedproto.core.types import Algorithm
from fedproto.errors import TrainingError

#: A model so small that a round takes milliseconds.
TINY = {"clients": 3, "rounds": 5, "model": "mlp(hidden=2,width=2)", "shots": 2, "test_shots": 2}


def run_loop(algorithm: str | Algorithm = "local", **settings):
    """Yield the round's result and the chunks of each round."""
    name = algorithm if isinstance(algorithm, str) else algorithm.name
    run = experiment(name, **TINY | settings)
    value = run.algorithm if isinstance(algorithm, str) else algorithm
    run.engine.algorithm = value
    chunks = []
    train = run.engine.train

    def watch(*arguments):
        for chunk in train(*arguments):
            chunks.append(chunk)
            yield chunk

    run.engine.train = watch
    for results in run_rounds(value, run.engine, [run.federation_run()]):
        yield results[0], list(chunks)
        chunks.clear()


def test_every_second_round_and_the_last_one_are_evaluated() -> None:
    evaluated = [result.accuracy is not None for result, _ in run_loop(eval_every=2)]
    assert evaluated == [False, True, False, True, True]


def test_a_round_reports_the_accuracies_of_the_clients_and_their_summary() -> None:
    results = [result for result, _ in run_loop(rounds=1)]
    accuracies = results[0].clients["head"].numpy()
    assert accuracies.shape == (3,)
    assert results[0].accuracy["head"]["mean"] == pytest.approx(np.mean(accuracies))
    assert results[0].accuracy["head"]["std"] == pytest.approx(np.std(accuracies))
    assert "clients" not in results[0].line()


def test_losses_are_means_and_population_deviations_over_clients() -> None:
    for result, chunks in run_loop("fedproto", rounds=2):
        for term in ("supervised", "regulariser"):
            losses = np.array([float(chunk.loss[term]) for chunk in chunks])
            assert len(losses) == 3
            assert result.loss[term] == pytest.approx(losses.mean())
            assert result.loss_std[term] == pytest.approx(losses.std())


def test_a_loss_without_a_regulariser_reports_zero_for_it() -> None:
    result, _ = next(run_loop("local"))
    assert set(result.loss) == set(result.loss_std) == {"supervised", "regulariser"}
    assert result.loss["regulariser"] == result.loss_std["regulariser"] == 0.0


def test_a_loss_under_another_name_reports_zero_for_the_usual_terms() -> None:
    def loss(step):
        return {"margin": step.logits.square().mean()}

    result, _ = next(run_loop(replace(build("local"), loss=loss), rounds=1))
    assert result.loss["supervised"] == result.loss_std["supervised"] == 0.0
    assert result.loss["margin"] > 0


def test_the_seconds_of_a_round_are_shared_by_the_federations_trained_together(monkeypatch) -> None:
    clock = iter([10.0, 16.0])
    own_time = SimpleNamespace(perf_counter=lambda: next(clock))  # pytest needs the real one
    monkeypatch.setattr("fedproto.core.rounds.time", own_time)
    run = experiment("local", **TINY)
    both = [run.federation_run(), experiment("local", **TINY).federation_run()]

    def train_twice(round, servers, cohorts):
        for chunk in train(round, servers[:1], cohorts[:1]):
            yield chunk
            yield chunk._replace(federation=1)

    train = run.engine.train
    run.engine.train = train_twice
    first, second = next(run_rounds(run.algorithm, run.engine, both))
    assert first.seconds == second.seconds == 3.0


def fail(*arguments):
    raise ValueError("on purpose")


@pytest.mark.parametrize("name", ["fedavg", "fesem"])  # one that is additive, and one that is not
def test_an_error_of_the_server_names_its_round_and_algorithm(name) -> None:
    broken = replace(build(name), aggregate=fail)
    with pytest.raises(TrainingError, match=rf"^round 1, the server of {name}.*on purpose"):
        next(run_loop(broken))


def test_an_error_of_sending_names_its_round() -> None:
    with pytest.raises(TrainingError, match=r"^round 1, sending.*on purpose"):
        next(run_loop(replace(build("fedavg"), send=fail)))


@pytest.mark.parametrize("name", ["fedavg", "fesem"])
def test_a_server_state_that_is_not_a_tree_names_the_function_that_returned_it(name) -> None:
    wrong = replace(build(name), aggregate=lambda server, uploads: [1, 2])
    with pytest.raises(TrainingError, match=r"\baggregate\b"):
        next(run_loop(wrong))


def test_a_round_in_which_every_upload_is_lost_leaves_the_server_as_it_was() -> None:
    run = experiment("fesem", **TINY, lost_uploads=1.0)
    before = {name: value.clone() for name, value in run.progress.server.items()}
    next(run_rounds(run.algorithm, run.engine, [run.federation_run()]))
    for name, value in before.items():
        assert torch.equal(run.progress.server[name], value)
