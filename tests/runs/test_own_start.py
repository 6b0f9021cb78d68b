"""`start = "own"`: every client starts from initial weights of its own."""

import pytest
import torch
from helpers.command_line import fedproto, only_line
from helpers.engine_comparison import assert_same_clients
from helpers.tiny import experiment, finished

from fedproto.errors import ConfigError
from fedproto.runs.experiment import reopen
from fedproto.runs.folder import RunFolder


class Killed(BaseException):
    """Stands for SIGKILL inside this process."""


def initial_states(**settings):
    return [member.initial for member in experiment("fedproto", **settings).federation.members]


def are_equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def share_no_tensor(first, second):
    return not any(torch.equal(first[name], second[name]) for name in first)


def largest_difference(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_shared_weights_are_the_same_for_all_clients():
    shared = initial_states(start="shared")
    assert all(are_equal(shared[0], state) for state in shared)


def test_own_weights_differ_between_clients_and_seeds():
    shared = initial_states(start="shared")[0]
    own = initial_states(start="own", seed=0)
    repeated = initial_states(start="own", seed=0)
    other_seed = initial_states(start="own", seed=1)
    for number, state in enumerate(own):
        assert state.keys() == shared.keys()
        assert are_equal(state, repeated[number])
        assert share_no_tensor(state, other_seed[number])
        assert share_no_tensor(state, shared)
        assert all(share_no_tensor(state, earlier) for earlier in own[:number])


def test_own_weights_depend_on_the_client_alone():
    """Not on how many others there are, on their models, or on torch's own generator."""
    few = initial_states(start="own", clients=4)
    many = initial_states(start="own", clients=5)
    torch.manual_seed(99)
    models = "mlp(hidden=5,width=8)*2,mlp(hidden=16,width=8)*2"
    mixed = initial_states(start="own", clients=4, model=models)
    assert all(are_equal(one, other) for one, other in zip(few, many, strict=False))
    assert are_equal(few[2], mixed[2])
    assert are_equal(few[3], mixed[3])
    assert share_no_tensor(mixed[0], mixed[1])


def test_own_weights_are_drawn_from_the_distribution_of_shared_ones():
    settings = {"dataset": "mnist5k", "model": "cnn", "test_shots": 3, "precision": "float32"}
    own = initial_states(start="own", **settings)
    shared = initial_states(start="shared", **settings)
    for name, value in shared[0].items():
        if value.numel() > 1000:
            assert float(own[1][name].std()) == pytest.approx(float(value.std()), rel=0.15)


@pytest.mark.parametrize("algorithm", ["fedproto", "local"])
def test_both_engines_start_from_own_weights(algorithm):
    settings = {"start": "own", "participation": 0.75}
    reference_run, reference = finished(algorithm, engine="reference", **settings)
    vectorised_run, vectorised = finished(algorithm, engine="vectorised", **settings)
    for first, second in zip(reference.states, vectorised.states, strict=True):
        assert largest_difference(first, second) <= 1e-8
    server = reference_run.progress.server
    if server:
        assert largest_difference(server, vectorised_run.progress.server) <= 1e-8
    assert_same_clients(reference.clients, vectorised.clients)
    _, shared = finished(algorithm, participation=0.75)
    pairs = zip(reference.states, shared.states, strict=True)
    assert any(largest_difference(first, second) > 1e-3 for first, second in pairs)


def test_a_run_with_own_weights_continues_from_its_checkpoint(tmp_path):
    settings = {"start": "own", "checkpoint_every": 1, "participation": 0.5}
    whole = experiment("fedproto", **settings)
    expected = whole.execute(whole.new_folder(tmp_path / "whole"))

    def stop(result):
        if result.round == 2:
            raise Killed

    stopped = experiment("fedproto", **settings)
    with pytest.raises(Killed):
        stopped.execute(stopped.new_folder(tmp_path / "stopped"), stop)
    assert 'start = "own"' in (tmp_path / "stopped" / "config.toml").read_text()
    continued, folder = reopen(RunFolder(tmp_path / "stopped"))
    assert continued.progress.round in (1, 2)
    states = continued.execute(folder).states
    for first, second in zip(states, expected.states, strict=True):
        assert are_equal(first, second)


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "fedprox", "fesem(clusters=2)", "fedper", "fedrep"]
)
def test_own_weights_are_refused_where_weights_are_sent(algorithm, tmp_path):
    """Clients adopt the server's weights before their first step, so own ones change nothing."""
    sentence = r"start=own has no meaning for fe\w+: every client begins with"
    with pytest.raises(ConfigError, match=sentence):
        experiment(algorithm, start="own")
    answer = fedproto(
        "run", "--algorithm", algorithm, "--set", "start=own", "--out", tmp_path / "run"
    )
    assert answer.code == 2
    assert "start=own has no meaning for" in only_line(answer.err)
    assert not (tmp_path / "run").exists()


def test_other_values_of_start_are_refused():
    with pytest.raises(ConfigError, match="unknown value of start 'mine', accepted: own, shared"):
        experiment("local", start="mine")
