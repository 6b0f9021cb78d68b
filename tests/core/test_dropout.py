"""Dropout whose draws are passed in: the layers, the draws, and what the draws depend on."""

import math

import pytest
import torch
from helpers.tiny import SETTINGS
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from fedproto.config.settings import configure
from fedproto.core import dropout, rng
from fedproto.core.dropout import Dropped, HandedDropout, draw, hand_in_dropout
from fedproto.runs.experiment import Experiment


def key(*parts, seed=0):
    return rng.key(seed, "dropout", *parts)


class Twice(nn.Module):
    """One layer used in two places, one in a single place, and one never."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.often, self.once, self.never = nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        return self.once(self.often(self.fc(self.often(x))))


@pytest.mark.parametrize(
    ("layer", "sample", "shape"),
    [
        (nn.Dropout(0.3), (5,), (5,)),
        (nn.Dropout(0.3), (2, 3, 4), (2, 3, 4)),
        (nn.Dropout1d(0.3), (3, 4), (3, 1)),
        (nn.Dropout2d(0.3), (3, 4, 5), (3, 1, 1)),
        (nn.Dropout3d(0.3), (3, 2, 4, 5), (3, 1, 1, 1)),
    ],
    ids=str,
)
def test_every_kind_of_dropout_is_replaced(layer, sample, shape):
    module, layers = hand_in_dropout(nn.Sequential(nn.ReLU(), layer), torch.ones(1, *sample))
    assert type(module[1]) is HandedDropout
    assert layers == (Dropped("1.keep", shape, 0.3),)
    keep = draw(layers, key(1, 2, 0), 6)
    assert keep["1.keep"].shape == (6, *shape)
    x = torch.rand(6, *sample).double()
    assert torch.equal(functional_call(module.train(), keep, (x,)), x * keep["1.keep"] * (1 / 0.7))


def test_a_channel_shares_one_draw():
    module, layers = hand_in_dropout(nn.Sequential(nn.Dropout2d(0.5)), torch.ones(1, 8, 3, 3))
    out = functional_call(module.train(), draw(layers, key(1), 10), (torch.ones(10, 8, 3, 3),))
    assert torch.equal(out, out[:, :, :1, :1].expand_as(out))
    assert out.unique().tolist() == [0, 2]


def test_a_layer_that_is_used_twice_stays_torchs():
    """It would want two draws, and a buffer holds one; a layer that is never used needs none."""
    module, layers = hand_in_dropout(Twice(), torch.ones(1, 4))
    assert [each.name for each in layers] == ["once.keep"]
    assert type(module.often) is type(module.never) is nn.Dropout
    assert type(module.once) is HandedDropout


def test_nested_layers_are_found_by_their_full_names():
    inner = nn.Sequential(
        nn.Linear(4, 6), nn.Sequential(nn.Dropout(0.1), nn.ReLU()), nn.Dropout(0.2)
    )
    _, layers = hand_in_dropout(nn.Sequential(inner, nn.Dropout(0.3)), torch.ones(1, 4))
    assert layers == (
        Dropped("0.1.0.keep", (6,), 0.1),
        Dropped("0.2.keep", (6,), 0.2),
        Dropped("1.keep", (6,), 0.3),
    )


def test_the_names_of_parameters_and_the_module_itself_stay_as_they_are():
    original = nn.Sequential(
        nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(0.1))
    )
    module, _ = hand_in_dropout(original, torch.ones(1, 3))
    assert list(module.state_dict()) == list(original.state_dict())
    assert [name for name, _ in module.named_parameters()] == [
        name for name, _ in original.named_parameters()
    ]
    assert type(original[1]) is nn.Dropout
    assert original.training


def test_a_module_that_is_itself_a_dropout_layer_stays_torchs():
    module, layers = hand_in_dropout(nn.Dropout(0.5), torch.ones(1, 3))
    assert (type(module), layers) == (nn.Dropout, ())


def test_a_module_without_dropout_draws_nothing():
    _, layers = hand_in_dropout(nn.Linear(3, 4), torch.ones(1, 3))
    assert layers == ()
    assert draw(layers, key(1), 5) == {}


def test_evaluated_it_changes_nothing():
    module, layers = hand_in_dropout(nn.Sequential(nn.Dropout(0.9)), torch.ones(1, 7))
    x = torch.rand(5, 7)
    assert torch.equal(module.eval()(x), x)
    assert torch.equal(functional_call(module.eval(), draw(layers, key(1), 5), (x,)), x)


@pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.Dropout2d(0.4)], ids=str)
def test_without_draws_it_does_what_torchs_does(layer):
    original = nn.Sequential(layer)
    module, _ = hand_in_dropout(original, torch.ones(1, 3, 4, 4))
    x = torch.rand(6, 3, 4, 4)
    outs = []
    for each in (original, module):
        torch.manual_seed(5)
        outs.append(each.train()(x))
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], x)


@given(st.floats(0.01, 0.99), st.integers(0, 2**31))
def test_values_are_dropped_as_often_as_p_says(p, seed):
    """The share kept is within five deviations of 1 − p."""
    (keep,) = draw((Dropped("keep", (50,), p),), key(1, 2, 3, seed=seed), 200).values()
    assert abs(keep.double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / keep.numel())


def test_with_p_of_nothing_all_is_kept_and_with_p_of_one_nothing():
    layers = Dropped("none", (9,), 0.0), Dropped("all", (9,), 1.0)
    keep = draw(layers, key(4), 20)
    assert keep["none"].all() and keep["none"].shape == (20, 9)
    assert not keep["all"].any()


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_at_both_ends_it_is_torchs(p):
    module, layers = hand_in_dropout(nn.Sequential(nn.Dropout(p)), torch.ones(1, 7))
    x = torch.rand(5, 7)
    handed = functional_call(module.train(), draw(layers, key(1), 5), (x,))
    assert torch.equal(handed, nn.Dropout(p)(x))


LAYERS = Dropped("a", (3, 1, 1), 0.5), Dropped("b", (4,), 0.3)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 9))
def test_a_sample_draws_the_same_however_many_there_are(some, more, client):
    few, many = (draw(LAYERS, key(3, client, 0), count) for count in (some, some + more))
    assert all(torch.equal(few[name], many[name][:some]) for name in ("a", "b"))


def test_clients_drawn_together_draw_what_each_draws_alone():
    together = draw(LAYERS, key(3, torch.arange(5)[:, None], torch.arange(2)), 7)
    assert together["a"].shape == (5, 2, 7, 3, 1, 1)
    for client in range(5):
        for epoch in range(2):
            alone = draw(LAYERS, key(3, client, epoch), 7)
            assert all(torch.equal(together[name][client, epoch], alone[name]) for name in alone)


def test_seed_round_client_epoch_sample_and_layer_all_draw_differently():
    layers = Dropped("a", (64,), 0.5), Dropped("b", (64,), 0.5)
    keys = [key(1, 2, 0), key(1, 2, 0, seed=1), key(2, 2, 0), key(1, 3, 0), key(1, 2, 1)]
    draws = [keep for each in keys for keep in draw(layers, each, 4).values()]
    rows = torch.cat(draws)
    assert len(rows.unique(dim=0)) == len(rows) == 5 * 2 * 4


def test_draws_do_not_touch_torchs_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    draw(LAYERS, key(1), 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_gradient_flows_through_what_is_kept():
    module, layers = hand_in_dropout(nn.Sequential(nn.Dropout(0.5)), torch.ones(1, 6))
    keep = draw(layers, key(1), 4)
    x = torch.rand(4, 6, requires_grad=True)
    functional_call(module.train(), keep, (x,)).sum().backward()
    assert torch.equal(x.grad, keep["0.keep"] * 2.0)
    assert x.grad.unique().tolist() == [0, 2]


def test_draws_made_in_pieces_are_those_made_at_once(monkeypatch):
    whole = draw(LAYERS, key(3, torch.arange(4)[:, None], torch.arange(2)), 9)
    monkeypatch.setattr(
        dropout, "DRAWS_AT_ONCE", 2 * 8 * 7
    )  # two samples of eight streams of seven draws
    pieces = draw(LAYERS, key(3, torch.arange(4)[:, None], torch.arange(2)), 9)
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


class TokensFirst(nn.Module):
    """Its dropout sees (tokens, samples, values): the first axis is not that of the samples."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_dropout_along_another_axis_stays_torchs(tokens):
    module, layers = hand_in_dropout(TokensFirst(), torch.ones(1, tokens, 4))
    assert layers == () and type(module.drop) is nn.Dropout
    assert module.train()(torch.ones(7, tokens, 4)).shape == (7, tokens, 4)


class InTrainingOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(x) if self.training else x


def test_dropout_that_is_called_in_training_only_is_found():
    assert hand_in_dropout(InTrainingOnly(), torch.ones(1, 4))[1] == (
        Dropped("drop.keep", (4,), 0.5),
    )


def test_the_table_knows_every_layer_of_torch_that_drops_zeros():
    assert set(dropout._DRAWN_AXES) == {nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d}


class ByFunction(nn.Module):
    """Dropout that no table of layers sees."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        features = nn.functional.dropout(self.fc(x.flatten(1)), 0.5, self.training)
        return features, self.head(features)


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_dropout_called_as_a_function_repeats_in_an_equal_run(engine):
    config = configure(SETTINGS | {"algorithm": "local", "engine": engine, "rounds": 1})[0]
    module = ByFunction()
    first, second = (Experiment.prepare(config, modules=module).execute() for _ in range(2))
    assert all(
        torch.equal(value, second.states[0][name]) for name, value in first.states[0].items()
    )
