"""The algorithms of docs/plugins.md: the same in every engine, and what they say they are."""

import re
from pathlib import Path

import pytest
import torch
from helpers.engine_comparison import (
    RAGGED,
    TROUBLE,
    assert_engines_agree,
    make_clients,
    with_batch_norm,
)
from helpers.tiny import finished, largest_difference, scored_states

from fedproto.config.plugin_trust import trust_plugins

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plugins.md"
BLOCK = re.compile(r"^```python title=\"(.+?)\"\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ALGORITHMS = ["mymethods:prox", "both:protoper", "momentum:heavy_ball", "variates:scaffold"]


@pytest.fixture(autouse=True)
def _written_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in BLOCK.findall(PAGE.read_text()):
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    trust_plugins(*ALGORITHMS, "mycombiners:midrange", "mytransforms:halves")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_engines_agree(name: str) -> None:
    assert_engines_agree(name, **TROUBLE)


@pytest.mark.parametrize("name", ["both:protoper", "variates:scaffold"])
def test_engines_agree_on_local_steps_of_unequal_clients(name: str) -> None:
    """SCAFFOLD divides by `step.steps`, which differs for slow clients."""
    settings = {"local_steps": 5, "stragglers": 0.5, "data": make_clients(RAGGED)}
    assert_engines_agree(name, **settings)


@pytest.mark.parametrize("name", ["fedavg", "fedproto", "variates:scaffold"])
def test_engines_agree_with_a_combiner(name: str) -> None:
    assert_engines_agree(name, combiner="mycombiners:midrange", **TROUBLE)


def test_half_precision_halves_what_is_sent() -> None:
    single, _ = finished("fedavg", precision="float32", rounds=1)
    half, _ = finished("fedavg", precision="float32", rounds=1, transform="mytransforms:halves")
    assert_engines_agree("fedavg", 1e-4, precision="float32", transform="mytransforms:halves")
    sent = single.progress.ledger.of(0)
    saved = sent["bytes_up"] - half.progress.ledger.of(0)["bytes_up"]
    assert saved == 2 * sent["values_up"]


def test_the_middle_of_two_uploads_is_their_unweighted_mean() -> None:
    run, _ = finished("fedavg", combiner="mycombiners:midrange", clients=2, rounds=1)
    states = run.engine.states[0]
    for name, value in run.progress.server.items():
        expected = (states[0][name] + states[1][name]) / 2
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_engines_agree_with_batch_norm(name: str) -> None:
    assert_engines_agree(name, modules=with_batch_norm(), data=make_clients(RAGGED))


def test_proximal_training_is_that_of_the_package() -> None:
    own, _ = finished("mymethods:prox(mu=0.3)")
    shipped, _ = finished("fedprox(mu=0.3)")
    assert largest_difference(own, shipped) == 0


def test_momentum_and_control_variates_are_those_of_the_package() -> None:
    """Two writers' SCAFFOLD; that of the page has no regard to momentum, so there is none."""
    faults = {"participation": 0.5, "stragglers": 0.5}
    own, _ = finished("variates:scaffold", momentum=0.0, **faults)
    shipped, _ = finished("scaffold", momentum=0.0, **faults)
    assert largest_difference(own, shipped) < 1e-12
    own, _ = finished("momentum:heavy_ball(beta=0.5)", **faults)
    shipped, _ = finished("fedavgm(server_momentum=0.5)", **faults)
    assert largest_difference(own, shipped) < 1e-12


def test_a_server_without_momentum_averages() -> None:
    own, _ = finished("momentum:heavy_ball(beta=0)")
    average, _ = finished("fedavg")
    assert largest_difference(own, average) < 1e-12


def test_two_groups_are_those_of_the_methods_they_come_from() -> None:
    """Without a pull towards prototypes, the body is FedPer's."""
    own, result = finished("both:protoper(lam=0)")
    body, _ = finished("fedper")
    assert largest_difference(own, body) < 1e-12
    assert result.accuracy.keys() >= {"head", "prototype"}
    prototypes, _ = finished("both:protoper(lam=1)", rounds=1)
    shipped, _ = finished("fedproto(absent=drop)", rounds=1)
    assert torch.equal(
        prototypes.progress.server["prototypes"], shipped.progress.server["prototypes"]
    )


def test_variates_that_are_zero_correct_nothing() -> None:
    """In round 1 all variates are zero, so SCAFFOLD is FedAvg; afterwards it is not."""
    settings = {"momentum": 0.0}
    own, _ = finished("variates:scaffold", rounds=1, **settings)
    average, _ = finished("fedavg", rounds=1, **settings)
    assert largest_difference(own, average) < 1e-12
    later, _ = finished("variates:scaffold", rounds=3, **settings)
    average_later, _ = finished("fedavg", rounds=3, **settings)
    assert largest_difference(later, average_later) > 1e-6


def test_a_clients_variate_is_its_mean_gradient_and_the_servers_their_mean() -> None:
    """After round 1, c_i = (w_g − w_i) / (K · lr) by hand, and c is the mean of all c_i."""
    run, _ = finished("variates:scaffold", rounds=1, momentum=0.0)
    name = "head.fc3.bias"
    variates = []
    for member, state in zip(run.federation.members, run.engine.states[0], strict=True):
        steps = -(-len(member.train) // run.config.batch)
        by_hand = (member.initial[name] - state[name]) / (steps * run.config.lr)
        torch.testing.assert_close(state[f"client/control/{name}"], by_hand, rtol=0, atol=1e-12)
        variates.append(by_hand)
    server = run.progress.server["control"][name]
    torch.testing.assert_close(server, torch.stack(variates).mean(0), rtol=0, atol=1e-12)
    assert len(scored_states(run)) == 4
