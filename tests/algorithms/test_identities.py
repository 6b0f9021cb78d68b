"""Exact identities between algorithms, and with plain SGD that does not use this package."""

import pytest
import torch
from helpers.tiny import (
    ALGORITHMS,
    TRAINED,
    experiment,
    finished,
    largest_difference,
    scored_states,
)
from torch import nn

from fedproto.core import rng
from fedproto.core.engine import Cohort

ALMOST = 1e-12  # float64, where (n * w) / n need not be w to the last bit

FAULTS = {"participation": 0.5, "lost_uploads": 0.3, "stragglers": 0.5}

IDENTITIES = [
    ("fedprox(mu=0)", "fedavg", {}),
    ("fedprox(mu=0)", "fedavg", FAULTS),
    ("moon(mu=0)", "fedavg", {}),
    ("fedtgp(lam=0)", "local", {}),
    ("fedtgp(lam=0)", "local", FAULTS),
    ("fedproto(lam=0)", "local", {}),
    ("fedproto(lam=0)", "local", FAULTS),
    ("fedproto-mh(lam=0)", "local", {"model": "mlp(hidden=5),mlp(hidden=9)"}),
    ("fesem(clusters=1)", "fedavg", {}),
    ("fesem(clusters=1)", "fedavg", FAULTS),
    ('fedper(personal="")', "fedavg", {}),
    ('fedrep(personal="")', "fedavg", {}),
    ('fedper(personal="body,head")', "local", {}),
    ('fedrep(personal="body,head")', "local", {}),
    ("fedproto-mh", "fedproto", {}),
    ("fedproto(absent=remember)", "fedproto(absent=drop)", {}),
    ("fedproto(absent=remember)", "fedproto(absent=drop)", {"stragglers": 0.5}),
    ("fedproto(distance=l2,regularise=class)", "fedproto(distance=l2)", {"batch": 1}),
    ("fedproto(weighting=samples)", "fedproto(weighting=uniform)", {"clients": 1}),
    ("fedproto(weighting=samples)", "fedproto(weighting=eq6)", {"clients": 1}),
    (
        "fedproto(distance=mse,lam=8)",
        "fedproto(distance=sql2,lam=1)",
        {},
    ),  # the tiny model embeds in 8 values
    ('lg-fedavg(personal="")', "fedavg", {}),
    ('lg-fedavg(personal="body,head")', "local", {}),
    ("feddistill(gamma=0)", "local", {}),
    ("feddistill(gamma=0)", "local", FAULTS),
    ("feddistill(gamma=0)", "local", {"model": "mlp(hidden=5),mlp(hidden=9)"}),
    ("fedavgm(server_momentum=0)", "fedavg", {}),
    ("fedavgm(server_momentum=0)", "fedavg", FAULTS),
    ("scaffold", "fedavg", {"rounds": 1}),  # all control variates are 0 yet
    ("scaffold", "fedavg", {"clients": 1}),  # the server's is the only client's
    ("ditto(lam=0)", "local", {}),
    ("ditto(lam=0)", "local", FAULTS),
    ("fedavgm", "fedavg", {"rounds": 1}),  # there is no earlier step yet
    ("fedavg", "local", {"clients": 1}),
    ("fedper", "local", {"clients": 1}),
    ("fesem(clusters=1)", "local", {"clients": 1}),
    ("fedblend(m=0)", "fedproto(contrast=1,absent=drop)", {}),
    ("fedblend(m=0)", "fedproto(contrast=1,absent=drop)", FAULTS),
    ("fedblend(m=0,absent=remember)", "fedproto(contrast=1)", FAULTS),
    ("fedblend(m=1,lam=0,contrast=0)", "fedper", {}),
    ("fedblend(m=1,lam=0,contrast=0)", "fedper", FAULTS),
    ("fedblend(m=1,lam=0,contrast=0,personal=fc2)", "fedper(personal=fc2)", {}),
    ("fedblend(m=0.3)", "fedproto(contrast=1)", {"clients": 1}),
]


@pytest.mark.parametrize(("one", "other", "settings"), IDENTITIES)
def test_identity(one, other, settings):
    a, b = experiment(one, **settings), experiment(other, **settings)
    first, second = a.execute(), b.execute()
    assert largest_difference(a, b) < ALMOST
    both = first.accuracy.keys() & second.accuracy.keys()
    assert {key: first.accuracy[key] for key in both} == {key: second.accuracy[key] for key in both}


def test_lg_fedavg_averages_the_heads_of_different_bodies():
    """Embeddings have one length, so the heads fit; the bodies stay as different as they were."""
    mixed = {"model": "mlp(hidden=5,width=8),mlp(hidden=9,width=8)"}
    run, _ = finished("lg-fedavg", **mixed)
    vectorised, _ = finished("lg-fedavg", engine="vectorised", **mixed)
    assert {name.partition(".")[0] for name in run.progress.server} == {"head"}
    for name, value in run.progress.server.items():
        assert torch.allclose(value, vectorised.progress.server[name], rtol=0, atol=ALMOST)
    widths = {len(state["body.fc1.weight"]) for state in scored_states(run)}
    assert widths == {5, 9}
    assert len(experiment("lg-fedavg(personal=head)", **mixed).federation.architectures) == 2


def test_the_methods_differ_where_they_should():
    """Otherwise the identities above would show nothing."""
    runs = [
        finished(name)[0] for name in ("local", "fedavg", "fedprox", "fedper", "fedrep", "fedproto")
    ]
    runs += [finished(name)[0] for name in ("lg-fedavg", "feddistill", "fedavgm", "fedadam")]
    runs += [finished(name)[0] for name in ("scaffold", "ditto")]
    runs.append(finished("fesem", clusters=2)[0])
    for position, run in enumerate(runs):
        for other in runs[:position]:
            assert largest_difference(run, other) > 1e-6


def plain_sgd(run, rounds):
    """Train one client as a tutorial would: a module, an optimiser, a loop over batches."""
    member, training = run.federation.members[0], run.engine.trainings[0]
    x, y = member.train.x[member.train.rows], member.train.y[member.train.rows]
    width = member.initial["body.fc1.weight"].shape[1]
    model = nn.Sequential(
        nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 10)
    ).double()
    model.load_state_dict(dict(zip(model.state_dict(), member.initial.values(), strict=True)))
    for round in range(1, rounds + 1):
        optimiser = torch.optim.SGD(model.parameters(), lr=training.lr, momentum=training.momentum)
        order = rng.permutation(rng.key(training.seed, "shuffle", round, 0, 0), len(y))
        for rows in order.split(training.batch):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[rows].flatten(1)), y[rows]).backward()
            optimiser.step()
    return list(model.state_dict().values())


def test_one_client_is_plain_sgd():
    run, _ = finished("local", clients=1, rounds=4, batch=3)
    (state,) = scored_states(run)
    for ours, theirs in zip(state.values(), plain_sgd(run, 4), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=ALMOST)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_order_of_clients_does_not_matter(name):
    """The same round trained backwards leaves every client where it was."""
    forwards, backwards = experiment(name), experiment(name)
    nobody = torch.tensor([], dtype=torch.int64)
    for run, order in ((forwards, [0, 1, 2, 3]), (backwards, [3, 2, 1, 0])):
        list(
            run.engine.train(
                1, [run.progress.server], [Cohort(torch.tensor(order), nobody, nobody)]
            )
        )
    for a, b in zip(forwards.engine.states[0], backwards.engine.states[0], strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_everyone_speaking_is_nobody_absent():
    """With full participation only this round's uploads are remembered."""
    run, _ = finished("fedproto")
    assert run.progress.latest_uploads.last_round.tolist() == [3] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_every_method_learns(name):
    """The accuracy among own classes is well above 1/ways after a few rounds of a tiny model."""
    settings = {"clients": 8, "rounds": 25, "shots": 20, "test_shots": 20, "precision": "float32"}
    _, result = finished(name, model="mlp", **settings)
    assert result.accuracy["head_own"]["mean"] > 0.8
    first, last = result.metrics[0]["loss"]["supervised"], result.metrics[-1]["loss"]["supervised"]
    assert last < 0.7 * first
