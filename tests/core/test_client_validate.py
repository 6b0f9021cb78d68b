"""What a client chooses by its own validation rows, in every engine."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.engine_comparison import (
    TROUBLE,
    assert_equal,
    finish,
    make_clients,
    prepare,
    with_dropout,
)
from helpers.tiny import SETTINGS

from fedproto.algorithms.fedavg import fedavg
from fedproto.algorithms.fedproto import fedproto
from fedproto.config.settings import configure
from fedproto.core.tensors import split_client
from fedproto.errors import TrainingError
from fedproto.runs import composition
from fedproto.runs.experiment import Experiment

VALIDATED = {"validation": 0.4, "shots": 8, "rounds": 2}


def zeros_like_model(params, task):
    like = next(value for value in params.values() if value.is_floating_point())
    return {"chosen": {"share": like.new_full((), -1.0), "loss": like.new_zeros(())}}


def validation_loss(step, logits):
    losses = F.cross_entropy(logits, step.batch.y, reduction="none")
    return (losses * step.batch.mask).sum() / step.batch.mask.sum()


def choose_share(step):
    """Choose how much of the received model to mix in, by the loss on validation rows."""
    shares = step.lr.new_tensor([0.0, 0.5, 1.0])
    losses = []
    for share in shares:
        mixed = {}
        for name, value in step.received.items():
            mixed[name] = (1 - share) * step.params[name] + share * value
        _, logits = step.forward(mixed)
        losses.append(validation_loss(step, logits))
    best = torch.stack(losses).argmin()
    return {"chosen": {"share": shares[best], "loss": torch.stack(losses).min()}}


def with_choice(algorithm, choose=choose_share):
    return replace(algorithm, client_init=zeros_like_model, client_validate=choose)


@pytest.fixture
def choosing(monkeypatch):
    """Let the algorithm of every run be this one, which chooses by validation rows."""
    build = composition.plugins.build

    def patch(algorithm, choose=choose_share):
        chosen = with_choice(algorithm, choose)

        def build_instead(kind, part, *context):
            return chosen if kind == "algorithm" else build(kind, part, *context)

        monkeypatch.setattr(composition.plugins, "build", build_instead)

    return patch


def states_of(run):
    """Return each client's model and what it chose, after the last round."""
    states = [{} for _ in run.federation.members]
    for name, value in run.engine.export(0).items():
        client, _, inner = name.partition(".")
        states[int(client)][inner] = value
    divided = [split_client(state) for state in states]
    return [(params, kept["chosen"]) for params, kept in divided]


def list_shares(run):
    return [float(chosen["share"]) for _, chosen in states_of(run)]


def test_the_engines_choose_alike(choosing):
    choosing(fedavg())
    settings = TROUBLE | VALIDATED | {"rounds": 3}
    first = finish(prepare("fedavg", "reference", **settings))
    second = finish(prepare("fedavg", "vectorised", **settings))
    assert type(second[0].engine).__name__ == "VectorisedEngine", second[0].notices
    assert_equal(first, second)
    assert list_shares(first[0]) == list_shares(second[0])
    assert set(list_shares(first[0])) - {-1.0}


def test_worker_processes_choose_alike(choosing):
    choosing(fedavg())
    first = finish(prepare("fedavg", "reference", **VALIDATED))
    second = finish(prepare("fedavg", "processes", **VALIDATED))
    assert_equal(first, second)
    assert list_shares(first[0]) == list_shares(second[0])


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_the_step_is_over_the_validation_rows_after_training_in_eval_mode(choosing, engine):
    """The loss that a client keeps is that of its final model on its validation rows."""

    def note_loss(step):
        assert step.batch.x.shape[0] == step.logits.shape[0]
        _, again = step.forward({})
        loss = validation_loss(step, step.logits) + (again - step.logits).abs().sum()
        return {"chosen": {"share": step.batch.mask.sum(), "loss": loss}}

    choosing(fedproto(), note_loss)
    modules = [with_dropout(seed=seed) for seed in range(3)]
    settings = {"data": make_clients((12, 9, 12)), "modules": modules, "clients": 3}
    run = prepare("fedproto", engine, validation=0.4, rounds=2, **settings)
    run.execute()
    for member, (params, chosen) in zip(run.federation.members, states_of(run), strict=True):
        rows = member.validation.rows
        member.module.eval()
        _, logits = torch.func.functional_call(member.module, params, (member.validation.x[rows],))
        expected = F.cross_entropy(logits, member.validation.y[rows])
        assert chosen["loss"].item() == pytest.approx(expected.item(), abs=1e-9)
        assert chosen["share"] == len(rows)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_without_validation_rows_nothing_is_chosen(choosing, engine):
    choosing(fedavg())
    run = prepare("fedavg", engine, rounds=1)
    run.execute()
    assert set(list_shares(run)) == {-1}


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_a_client_without_validation_rows_keeps_what_it_has(choosing, engine):
    choosing(fedavg())
    few = {"ways": 3, "shots": 2, "stdev": 0, "shots_stdev": 1, "noise": "uniform"}
    run = prepare("fedavg", engine, **few, validation=0.2, rounds=1)
    rows = [len(member.validation) for member in run.federation.members]
    assert 0 in rows and any(rows)
    run.execute()
    for count, share in zip(rows, list_shares(run), strict=True):
        assert (share == -1) == (count == 0)


def test_what_is_chosen_has_the_form_of_what_is_kept(choosing):
    choosing(fedavg(), lambda step: {})
    run = Experiment.prepare(configure(SETTINGS | VALIDATED | {"algorithm": "fedavg"})[0])
    with pytest.raises(TrainingError, match="client_validate must return what client_init does"):
        run.execute()
