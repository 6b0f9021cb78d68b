"""FedBlend: class means go across all architectures, bodies are mixed within each."""

import pytest
import torch
from helpers.tiny import build, experiment, send

from fedproto.core.tensors import flatten_state, map_upload
from fedproto.core.types import Group, Task
from fedproto.errors import ConfigError
from fedproto.runs.experiment import Experiment

ALMOST = 1e-9
MIXED = "mlp(hidden=5,width=8),mlp(hidden=9,width=8)"
SMALL, LARGE = "mlp-hidden-5-width-8", "mlp-hidden-9-width-8"
TASK = Task(classes=2, dim=2, clients=2, seed=0)
PARAMS = {"body.w": torch.tensor([[2.0, 4.0]]), "head.v": torch.tensor([[1.0], [1.0]])}


def run_mixed(algorithm: str, **settings: object) -> Experiment:
    run = experiment(algorithm, **{"model": MIXED, "rounds": 2, **settings})
    run.execute()
    return run


def test_a_body_moves_a_part_of_the_way_and_the_head_stays():
    algorithm = build("fedblend", m=0.25)
    server = algorithm.init(PARAMS, TASK)
    server = server | {"model": {"body.w": torch.tensor([[6.0, 0.0]])}}
    received = send(algorithm, server, torch.ones(2))
    started = algorithm.adopt(PARAMS, received)
    assert started["body.w"].tolist() == [[3.0, 3.0]]
    assert started["head.v"] is PARAMS["head.v"]


def test_the_server_divides_bodies_by_samples_and_prototypes_by_class():
    algorithm = build("fedblend")
    server = algorithm.init(PARAMS, TASK)
    means = torch.tensor([[[6.0, 3.0], [0.0, 0.0]], [[2.0, 1.0], [5.0, 5.0]]])
    uploads = {
        "prototypes": Group({"prototypes": means}, torch.tensor([[3.0, 0.0], [1.0, 5.0]])),
        "model": Group({"body.w": torch.tensor([[[3.0, 0.0]], [[6.0, 12.0]]])}, torch.ones(2) * 3),
    }
    after = algorithm.aggregate(server, uploads)
    assert after["prototypes"].tolist() == [[2.0, 1.0], [1.0, 1.0]]
    assert after["known"].tolist() == [1.0, 1.0]
    assert after["model"]["body.w"].tolist() == [[1.5, 2.0]]
    summed = map_upload(uploads, lambda value: value.sum(0, keepdim=True))
    assert torch.equal(algorithm.aggregate(server, summed)["prototypes"], after["prototypes"])


def test_with_one_architecture_there_is_one_body():
    run = experiment("fedblend", rounds=1)
    assert list(run.progress.layouts) == ["prototypes", "model"]
    assert list(run.progress.server) == ["prototypes", "known", "model"]


def test_prototypes_go_across_architectures_and_bodies_do_not():
    run = run_mixed("fedblend(m=0.5)")
    server = run.progress.server
    assert list(run.progress.layouts) == ["prototypes", f"model@{SMALL}", f"model@{LARGE}"]
    assert set(server) == {"prototypes", "known", f"@{SMALL}", f"@{LARGE}"}
    held = set()
    for member in run.federation.members:
        held |= set(member.classes)
    assert server["known"].nonzero().flatten().tolist() == sorted(held)
    for name, width in ((SMALL, 5), (LARGE, 9)):
        assert server[f"@{name}"]["model"]["body.fc1.weight"].shape == (width, 64)
        assert not any("head" in key for key in server[f"@{name}"]["model"])


def test_without_mixing_it_is_fedproto_whatever_the_architectures():
    blended = run_mixed("fedblend(m=0)")
    plain = run_mixed("fedproto(contrast=1,absent=drop)")
    for name in ("prototypes", "known"):
        found = blended.progress.server[name]
        assert torch.allclose(found, plain.progress.server[name], rtol=0, atol=ALMOST)
    for one, other in zip(blended.engine.states[0], plain.engine.states[0], strict=True):
        assert all(torch.allclose(one[name], other[name], rtol=0, atol=ALMOST) for name in other)


def test_fully_mixed_it_is_fedper_within_each_architecture():
    blended = run_mixed("fedblend(m=1,lam=0,contrast=0)")
    plain = run_mixed("fedper")
    for name in (SMALL, LARGE):
        body = plain.progress.server[f"@{name}"]
        found = blended.progress.server[f"@{name}"]["model"]
        assert found.keys() == body.keys()
        assert all(torch.allclose(found[key], body[key], rtol=0, atol=ALMOST) for key in body)
    first = blended.engine.evaluate([blended.progress.server])[0]["head"]
    assert torch.equal(first, plain.engine.evaluate([plain.progress.server])[0]["head"])


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"algorithm": "fedblend(m=0.5,absent=remember)", "participation": 0.5, "rounds": 3}],
)
def test_engines_agree(engine, settings):
    settings = {"algorithm": "fedblend(m=0.5)"} | settings
    algorithm = settings.pop("algorithm")
    reference = run_mixed(algorithm, **settings)
    other = run_mixed(algorithm, engine=engine, **settings)
    wanted = flatten_state(reference.progress.server)
    found = flatten_state(other.progress.server)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=0, atol=ALMOST), name
    assert torch.equal(reference.progress.ledger.counts, other.progress.ledger.counts)


def test_frozen_bodies_are_refused():
    with pytest.raises(ConfigError, match="fedblend averages bodies, so they cannot be frozen"):
        experiment("fedblend", freeze="body")


@pytest.mark.parametrize("m", ["-0.1", "1.5", "some"])
def test_what_m_can_be(m):
    with pytest.raises(ConfigError, match="m"):
        experiment(f"fedblend(m={m})")


def test_an_architecture_whose_clients_are_absent_keeps_its_body():
    run = run_mixed("fedblend(m=0.5)", participation=0.25, rounds=1)
    (client,) = run.progress.ledger.counts.sum(1).nonzero().flatten().tolist()
    member = run.federation.members[client]
    for name, initial in run.federation.initial.items():
        body = run.progress.server[f"@{name}"]["model"]
        has_moved = not torch.equal(body["body.fc1.weight"], initial["body.fc1.weight"])
        assert has_moved == (name == member.architecture)
    known = run.progress.server["known"].nonzero().flatten().tolist()
    assert known == sorted(member.classes)
