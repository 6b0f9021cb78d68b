"""FedBlend: class means go across all architectures, bodies are mixed within each."""

import pytest
import torch
from helpers.tiny import build, experiment, send, step

from fedproto.algorithms.fedblend import SHARES
from fedproto.core.tensors import flatten_state, map_upload
from fedproto.core.types import Group, Task
from fedproto.deploy.settings import TrainingTerms
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


# --- m=auto

VALIDATED = {"validation": 0.4, "shots": 8, "rounds": 3}


def chosen_shares(run: Experiment) -> list[float]:
    return [float(state["client/blend/m"]) for state in run.engine.states[0]]


def test_a_client_chooses_the_share_with_the_smallest_validation_loss():
    """The mean body maps both samples to their classes; the own one to nothing."""
    algorithm = build("fedblend", m="auto")
    own = {"body.w": torch.zeros(2, 2), "head.v": torch.eye(2)}
    received = {"model": {"body.w": torch.eye(2) * 5}, "known": torch.zeros(2)}
    x, y = torch.eye(2), torch.arange(2)
    kept = algorithm.client_init(own, TASK)
    assert float(kept["blend"]["m"]) == pytest.approx(0.1)
    of_step = step(own, received, x, y, state=kept)
    chosen = algorithm.client_validate(of_step)
    assert float(chosen["blend"]["m"]) == 1
    assert torch.equal(chosen["before"]["body.w"], own["body.w"])
    moved = algorithm.client_adopt(own, received, chosen)
    assert torch.equal(moved["body.w"], received["model"]["body.w"])
    worse = algorithm.client_validate(step(own, received, x, 1 - y, state=kept))
    assert float(worse["blend"]["m"]) == 0
    assert torch.equal(algorithm.client_adopt(own, received, worse)["body.w"], own["body.w"])
    same = {"model": {"body.w": own["body.w"]}, "known": torch.zeros(2)}
    unsure = algorithm.client_validate(step(own, same, x, y, state=kept))
    assert float(unsure["blend"]["m"]) == pytest.approx(0.1)


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
def test_engines_agree_in_what_clients_choose(engine):
    reference = run_mixed("fedblend(m=auto)", **VALIDATED)
    shares = chosen_shares(reference)
    assert set(shares) <= set(SHARES)
    assert shares != [0.1] * 4
    other = run_mixed("fedblend(m=auto)", engine=engine, **VALIDATED)
    exported = other.engine.export(0)
    assert [float(exported[f"{client}.client/blend/m"]) for client in range(4)] == shares
    wanted = flatten_state(reference.progress.server)
    found = flatten_state(other.progress.server)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=0, atol=ALMOST), name


def test_a_chosen_model_is_evaluated_and_stored_as_chosen():
    run = run_mixed("fedblend(m=auto)", **VALIDATED)
    for member, own, share in zip(
        run.federation.members, run.client_states(), chosen_shares(run), strict=True
    ):
        mean = run.progress.server[f"@{member.architecture}"]["model"]["body.fc1.weight"]
        expected = (1 - share) * own["body.fc1.weight"] + share * mean
        found = run.as_evaluated(member, own)["body.fc1.weight"]
        assert torch.allclose(found, expected, rtol=0, atol=ALMOST)


def test_shares_are_chosen_on_validation_rows_only():
    with pytest.raises(ConfigError, match=r"fedblend choose on validation rows.*set validation"):
        experiment("fedblend(m=auto)")
    with pytest.raises(ConfigError, match="m=auto is chosen on validation rows"):
        TrainingTerms(algorithm="fedblend(m=auto)").build()
    with pytest.raises(ConfigError, match="or auto"):
        experiment("fedblend(m=some)")


def test_shares_are_chosen_beside_a_teacher():
    run = run_mixed("fedblend(m=auto)", **VALIDATED, teacher="lda")
    assert set(chosen_shares(run)) <= set(SHARES)
    other = run_mixed("fedblend(m=auto)", **VALIDATED, teacher="lda", engine="vectorised")
    exported = other.engine.export(0)
    found = [float(exported[f"{client}.client/blend/m"]) for client in range(4)]
    assert found == chosen_shares(run)
