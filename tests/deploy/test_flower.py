"""Deployed federations in real processes, with TLS and keys, against the simulator."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from helpers import flower
from helpers.deployment import simulate
from helpers.flower import CLASSES, MODELS, Run, deployed, digits, replayed, same, server_of, until
from helpers.flower_setups import Setup, assert_like_the_simulator, path_with, simulated

import fedproto
from fedproto.core.files import read_tensors
from fedproto.core.tensors import flatten_state, flatten_upload, split_client
from fedproto.core.types import Tree
from fedproto.deploy.member_checkpoint import STATE_FORMAT
from fedproto.deploy.messages import Message
from fedproto.deploy.secure_stages import make_dense
from fedproto.deploy.server_state import ServerState, read_state
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.deploy.supervisor import STATUS_FILE
from fedproto.errors import Refused
from fedproto.privacy.accounting import Release, compute_epsilon

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes are found by /proc"
)

#: What a member does wrong in each round, and what the server says of it.
TRICKS = {
    "nan": "not a finite number",
    "shape": "of shape (3, 51)",
    "huge": "root mean square",
    "many": "bytes beside its arrays",
    "crowd": "100000 classes",
    "round": "it is of round 7, but this is round 6",
    "name": "it claims to be from 'a', but d sent it",
    "weight": "it has a weight that is not above 0",
    "raise": "internal-error: it failed for a reason that is in its own log",
}


#: Answers that could end the server, were they believed: of arrays' types, and of headers.
TYPES = ["float16", "float64", "longdouble", ">f4", "complex64", "int32", "bool", "S4"]
HEADERS: dict[str, dict[str, Any]] = {
    "a number without end": {"accuracy.head": 10**400},
    "words for numbers": {"accuracy.head": ["high"], "loss.total": {}},
    "ten thousand accuracies": {f"accuracy.\x1b[31m{number}": 1.0 for number in range(10_000)},
    "no name": {"member": None},
    "a list for a name": {"member": ["a"]},
    "a word for a round": {"round": "1"},
    "no round": {"round": float("nan")},
    "no classes": {"spoken": []},
    "numbers for classes": {"spoken": [0]},
    "a class twice": {"spoken": ["0", "0"]},
    "half a letter": {"spoken": ["\ud800"]},
}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("flower")
    files, arrays = digits(folder)
    with deployed(folder / "federation", files) as federation:
        yield Setup(federation, files, arrays)


def assert_servers_like_the_simulators(
    run: Run, setup: Setup, algorithm: str, models: dict[str, str], rounds: int
) -> fedproto.Result:
    """All that the server keeps after each round, and the last accuracies; returns the result."""
    files = {"arrays": dict(zip(setup.files, setup.arrays, strict=True))}
    names = "".join(setup.files)
    servers, result, _ = simulate(files, algorithm, models, names, rounds, dim=50)
    for number, expected in enumerate(servers, 1):
        found = server_of(run.rounds[number][0])
        assert same(found, flatten_state(expected)), f"round {number}"
    for place, (name, seat) in enumerate(run.rounds[rounds][1]["members"].items()):
        assert seat["accuracy"] == pytest.approx(result.clients[place]["accuracy"]), name
    return result


def state_of(setup: Setup, tag: str, name: str) -> Tree:
    tensors, _ = read_tensors(
        setup.federation.folder / tag / name / "member.safetensors", STATE_FORMAT
    )
    return {
        key.removeprefix("state."): value
        for key, value in tensors.items()
        if key.startswith("state.")
    }


def test_a_deployed_federation_equals_the_simulator_in_every_round(setup: Setup) -> None:
    run = setup.federation.run(rounds=2, quorum=3, **setup.fresh("fedproto"))
    assert_like_the_simulator(run, setup.arrays, range(1, 3))
    expected, seats = simulated(setup.arrays, 2), run.rounds[2][1]["members"]
    for place, (name, seat) in enumerate(seats.items()):
        assert (seat["last_round"], seat["refused"], seat["reason"]) == (2, 0, ""), name
        assert seat["accuracy"] == pytest.approx(expected.clients[place]["accuracy"]), name
        assert same(state_of(setup, "fedproto", name), expected.states[place]), name
        assert setup.federation.member_round(name) == 2


@pytest.mark.parametrize("odd", [*TYPES, *HEADERS])
def test_no_answer_ends_the_server(odd: str, tmp_path: Path) -> None:
    server_state = ServerState(
        ServerSettings(state=str(tmp_path), classes="0,1"), TrainingTerms(dim=4)
    )
    expected = [server_state.make_request(name) for name in "ab"] and server_state.expect_replies(
        frozenset("ab")
    )
    arrays = {
        "prototypes/value.prototypes": np.ones((1, 4), np.float32),
        "prototypes/extra.weight": np.ones(1, np.float32),
    }
    arrays |= {"prototypes/extra.rows": np.zeros(1, np.int32)}
    header = {"member": "a", "round": 1, "spoken": ["0"]}
    odd_types = {
        name: value.astype(odd)
        for name, value in arrays.items()
        if odd in TYPES and name != "prototypes/extra.rows"
    }
    changed = arrays | odd_types
    with contextlib.suppress(Refused):
        server_state.accept_reply("a", Message(header | HEADERS.get(odd, {}), changed), expected)
    server_state.accept_reply("b", Message(header | {"member": "b"}, arrays), expected)
    server_state.close_round()
    server_state.save()
    assert server_state.server["prototypes"].dtype == torch.float32
    assert server_state.server["prototypes"].tolist() == [[1.0] * 4, [0.0] * 4]
    assert len(server_state.members["a"].accuracy) <= 4, "there are four kinds of accuracy"
    again = ServerState(server_state.settings, server_state.terms)
    again.load()
    assert same(again.server, server_state.server)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam", "scaffold", "ditto"])
def test_weights_travel_as_in_the_simulator(setup: Setup, algorithm: str) -> None:
    """With what the server keeps (Adam's moments) and what the members keep (control variates)."""
    alike = {name: {"model": "mlp", "sends": "weights,counts"} for name in setup.files}
    config = {"algorithm": algorithm, "model": "mlp", "shape": "1,8,8", "quorum": 3, "rounds": 3}
    run = setup.federation.run(**config, **setup.fresh(algorithm, **alike))
    assert run.status == "finished:completed", run.log
    models = dict.fromkeys(setup.files, "mlp")
    result = assert_servers_like_the_simulators(run, setup, algorithm, models, rounds=3)
    for place, name in enumerate(setup.files):
        params, _ = split_client(state_of(setup, algorithm, name))
        assert same(params, result.states[place]), name


@pytest.mark.slow
def test_members_of_two_architectures_share_as_in_the_simulator(setup: Setup) -> None:
    """Prototypes go across both architectures, bodies within each."""
    algorithm, sends = "fedblend(m=0.5)", "weights,prototypes,counts"
    models = {name: ("mlp", "mlp(hidden=30)")[place % 2] for place, name in enumerate(setup.files)}
    own = {name: {"model": model, "sends": sends} for name, model in models.items()}
    config = {"algorithm": algorithm, "model": "mlp,mlp(hidden=30)", "shape": "1,8,8"}
    run = setup.federation.run(**config, quorum=3, rounds=2, **setup.fresh("fedblend", **own))
    assert run.status == "finished:completed", run.log
    result = assert_servers_like_the_simulators(run, setup, algorithm, models, rounds=2)
    assert {"@mlp/model/body.fc1.weight", "prototypes"} <= server_of(run.rounds[2][0]).keys()
    for place, name in enumerate(setup.files):
        assert same(state_of(setup, "fedblend", name), result.states[place]), name


@pytest.mark.slow
def test_transformed_uploads_travel_as_in_the_simulator(setup: Setup) -> None:
    transform = "clip(norm=3),top_k(fraction=0.4),quantise(bits=4)"
    config = {"transform": transform, "quorum": 3, "rounds": 2}
    run = setup.federation.run(**config, **setup.fresh("transformed"))
    assert run.status == "finished:completed", run.log
    for number in (1, 2):
        expected = simulated(setup.arrays, number, transform=transform)
        assert same(server_of(run.rounds[number][0]), expected.prototypes), f"round {number}"
    for place, seat in enumerate(run.rounds[2][1]["members"].values()):
        assert seat["bytes_up"] == expected.clients[place]["communication"]["bytes_up"]


@pytest.mark.slow
def test_a_server_trains_prototypes_as_in_the_simulator(setup: Setup) -> None:
    algorithm = "fedtgp(server_epochs=5)"
    config = {"algorithm": algorithm, "quorum": 3, "rounds": 3}
    run = setup.federation.run(**config, **setup.fresh("fedtgp"))
    assert run.status == "finished:completed", run.log
    result = assert_servers_like_the_simulators(run, setup, algorithm, MODELS, rounds=3)
    for place, name in enumerate(setup.files):
        assert same(state_of(setup, "fedtgp", name), result.states[place]), name


@pytest.mark.slow
def test_a_member_killed_in_a_round_is_gone_without_and_returns_with_its_model(
    setup: Setup,
) -> None:
    federation, odd = setup.federation, setup.odd("c")
    config = setup.fresh("killed") | {"quorum": 2, "timeout": 45.0}
    (odd / "hold").write_text("2")

    def in_the_middle() -> None:
        until(
            lambda: (odd / "asked").exists() and (odd / "asked").read_text() == "2",
            "c is asked for round 2",
        )
        federation.kill("c")

    run = federation.run(in_the_middle, rounds=3, **config)
    assert run.status == "finished:completed", run.log
    assert run.rounds[3][1]["round"] == 3
    assert {name: seat["last_round"] for name, seat in run.rounds[3][1]["members"].items()} == {
        "a": 3,
        "b": 3,
        "c": 1,
    }
    assert "round 2: 2 of 3 replies accepted" in run.log
    assert federation.member_round("c") == 1

    (odd / "hold").unlink()
    federation.bring("c", PYTHONPATH=path_with(odd))
    run = federation.run(rounds=5, **config | {"quorum": 3})
    assert run.status == "finished:completed", run.log
    assert {
        name: seat["last_round"] for name, seat in run.rounds[5][1]["members"].items()
    } == dict.fromkeys("abc", 5)
    assert {federation.member_round(name) for name in "abc"} == {5}
    server_state = replayed(federation, setup.files, ["abc", "ab", "ab", "abc", "abc"])
    assert same(server_of(run.rounds[5][0]), server_state.server)


@pytest.mark.slow
def test_a_member_that_cannot_train_says_why_and_others_go_on(setup: Setup) -> None:
    config = setup.fresh("nodata", c={"data": "npz:/nowhere/at/all.npz"}) | {"quorum": 2}
    run = setup.federation.run(rounds=2, **config)
    assert run.status == "finished:completed", run.log
    assert same(
        server_of(run.rounds[2][0]), replayed(setup.federation, setup.files, ["ab", "ab"]).server
    )
    seat = run.rounds[2][1]["members"]["c"]
    assert (seat["failed"], seat["refused"], seat["last_round"]) == (2, 0, 0)
    assert seat["reason"] == "data-unusable: its data cannot be used"
    assert "c failed: data-unusable" in run.log and "nowhere" not in run.log
    told = setup.federation.log("c")
    assert "/nowhere/at/all.npz" in told
    assert "This member cannot reply" in told and "The last reply did not count" in told


@pytest.mark.slow
def test_a_server_killed_in_a_round_loses_none_and_counts_none_twice(setup: Setup) -> None:
    federation, odd = setup.federation, setup.odd("c")
    config = setup.fresh("restarted") | {"quorum": 3}
    state = Path(config["state"]) / flower.STATE_FILE
    (odd / "hold").write_text("2")
    first = federation.submit(rounds=4, **config)
    until(
        lambda: federation.member_round("a") == federation.member_round("b") == 2,
        "a and b have trained round 2",
    )
    until(lambda: (odd / "asked").read_text() == "2", "c is asked for round 2")
    federation.kill("server")
    assert flower.read_state(state)[1]["round"] == 1
    assert [federation.member_round(name) for name in "abc"] == [2, 2, 1]

    (odd / "hold").unlink()
    federation.start_server()
    federation.bring("a", "b", "c", PYTHONPATH=path_with(odd))
    run = federation.run(rounds=4, **config)
    assert (
        federation.status(first)["status"] != "finished:completed"
    )  # Flower takes a minute to call it failed
    run.rounds.pop(1, None)  # the file as the first run left it
    assert_like_the_simulator(run, setup.arrays, range(2, 5))
    assert {
        name: seat["last_round"] for name, seat in run.rounds[4][1]["members"].items()
    } == dict.fromkeys("abc", 4)
    assert {federation.member_round(name) for name in "abc"} == {4}
    expected = simulated(setup.arrays, 4)
    assert all(
        same(state_of(setup, "restarted", name), expected.states[place])
        for place, name in enumerate("abc")
    )


@pytest.mark.slow
def test_strangers_are_refused(setup: Setup, tmp_path: Path) -> None:
    federation = setup.federation
    keys, before = federation.folder / "keys", federation.online()
    make = [sys.executable, "keys.py", "--"]
    subprocess.run([*make, "stranger"], cwd=federation.folder, check=True)
    (tmp_path / "keys.py").write_text((federation.folder / "keys.py").read_text())
    subprocess.run(make, cwd=tmp_path, check=True)  # somebody else's authority

    def starts(name: str, ca: Path, *key: str) -> subprocess.Popen[bytes]:
        address = (
            "--superlink",
            f"127.0.0.1:{federation.port}",
            "--port",
            str(flower._free_port()),
        )
        return federation.start(
            name, "flower-supernode", *address, "--root-certificates", str(ca), *key
        )

    with_key = ("--auth-supernode-private-key", str(keys / "stranger"))
    strangers = {
        "another authority": starts("ca", tmp_path / "keys" / "ca.crt", *with_key),
        "no key": starts("nokey", keys / "ca.crt"),
        "a key that was not admitted": starts("key", keys / "ca.crt", *with_key),
    }
    federation.write_member("stranger", data="mnist5k")
    federation.start_member("stranger")
    for what, process in strangers.items():
        assert process.wait(flower.PATIENCE) == 1, what
    assert "CERTIFICATE_VERIFY_FAILED" in federation.log("ca")
    assert "authentication is enabled" in federation.log("nokey")
    assert "Failed to activate SuperNode" in federation.log("key")
    until(
        lambda: "stranger keeps trying" in federation.log("stranger"),
        "the script says that it was refused",
    )
    assert "Failed to activate SuperNode" in federation.log("stranger")
    assert federation.online() == before
    federation.kill("stranger")


@pytest.mark.slow
def test_hostile_answers_reach_no_sum(setup: Setup) -> None:
    federation = setup.federation
    folder = Path(setup.files["a"]["data"].removeprefix("npz:")).parent
    files, arrays = digits(folder, "abcd")
    rogue = Setup(federation, files, arrays)
    subprocess.run([sys.executable, "keys.py", "--", "d"], cwd=federation.folder, check=True)
    federation.admit("d")
    config = rogue.fresh("hostile") | {"quorum": 3, "members": "a,b,c,d"}
    (rogue.odd("d") / "tricks").write_text(" ".join(TRICKS))
    last = len(TRICKS) + 1
    run = federation.run(rounds=last, **config)
    federation.stop("d")
    honest = {number: state for number, state in run.rounds.items() if number < last}
    assert_like_the_simulator(run._replace(rounds=honest), arrays[:3], range(1, last))
    for number, (trick, reason) in enumerate(TRICKS.items(), 1):
        seat = run.rounds[number][1]["members"]["d"]
        assert (seat["refused"] + seat["failed"], seat["last_round"]) == (number, 0), trick
        assert reason in seat["reason"], trick
        assert len(seat["reason"]) < 500, trick
        assert f"round {number}: d {'failed' if trick == 'raise' else 'was refused'}" in run.log, (
            trick
        )
    seat = run.rounds[last][1]["members"]["d"]
    counts = seat["refused"], seat["failed"], seat["last_round"]
    assert (*counts, seat["reason"]) == (len(TRICKS) - 1, 1, last, ""), "now it behaves"
    assert run.rounds[last][1]["classes"] == list(CLASSES)


@pytest.mark.slow
def test_the_script_tells_how_a_run_ended(setup: Setup) -> None:
    config = setup.fresh("script")
    done = setup.federation.call("./run.sh", f'rounds=1 quorum=3 state="{config["state"]}"')
    assert done.returncode == 0 and "round 1: 3 of 3 replies accepted" in done.stdout, (
        done.stdout + done.stderr
    )
    done = setup.federation.call(
        "./run.sh", f'rounds=2 quorum=9 patience=1.0 state="{config["state"]}"'
    )
    assert done.returncode == 1 and "9 are needed" in done.stdout, done.stdout + done.stderr
    done = setup.federation.call("./run.sh", "no-such-setting=1")
    assert done.returncode == 2 and "Invalid run configuration" in done.stdout + done.stderr, (
        done.stdout + done.stderr
    )


@pytest.mark.slow
def test_malformed_flower_objects_cost_their_sender_the_round_and_nobody_else(setup: Setup) -> None:
    """One member sends objects that Flower's decoder fails on, or repeats one chunk endlessly."""
    odd = setup.odd("c")
    (odd / "objects").write_text("json repeat deep")
    config = setup.fresh("objects") | {"quorum": 2}
    run = setup.federation.run(rounds=4, **config)
    assert run.status == "finished:completed", run.log
    server_state = replayed(setup.federation, setup.files, ["ab", "ab", "ab"])
    assert same(server_of(run.rounds[3][0]), server_state.server), "as if c had not answered"
    reasons = {number: run.rounds[number][1]["members"]["c"]["reason"] for number in range(1, 5)}
    assert (
        "JSON" in reasons[1]
        and "bytes of arrays" in reasons[2]
        and "nested" in reasons[3]
        and not reasons[4]
    )
    last = run.rounds[4][1]["members"]["c"]
    assert (last["refused"], last["last_round"]) == (3, 4), "then it behaves, and counts"
    assert "Traceback" not in run.log


@pytest.mark.slow
def test_a_member_that_is_always_late_counts_in_asynchronous_rounds(setup: Setup) -> None:
    """b, which alone has class 3, answers its first request when two rounds are over."""
    federation = setup.federation
    where = setup.fresh("asynchronous")
    folder = setup.odd("b")
    (folder / "hold").write_text("1")
    state_file = Path(where["state"]) / "server.safetensors"

    def server_round() -> int:
        return read_state(state_file)[1]["round"] if state_file.exists() else 0

    def release_late() -> None:
        until(lambda: server_round() >= 2, "two rounds are over")
        (folder / "hold").unlink()

    try:
        run = federation.run(release_late, rounds=8, quorum=3, buffer=2, **where)
    finally:
        (folder / "hold").unlink(missing_ok=True)
        federation.stop("b")
        federation.bring("b")
    assert run.status == "finished:completed", run.log
    tensors, header = run.rounds[8]
    record = header["members"]["b"]
    assert record["last_round"] >= 3 and record["refused"] == record["failed"] == 0
    assert "late: b by" in run.log
    assert tensors["server.known"][header["classes"].index("3")] == 1


SECURE = "secure-sum(threshold=0.5,error=1e-9,largest=1e5)"


def sum_of_uploads(setup: Setup, tag: str, names: str) -> Tree:
    """Return the plain sum of what members trained last, which only their own files hold."""
    total: Tree = {}
    for name in names:
        path = setup.federation.folder / tag / name / "member.safetensors"
        tensors, header = read_tensors(path, STATE_FORMAT)
        arrays = {
            key.removeprefix("reply."): value.numpy()
            for key, value in tensors.items()
            if key.startswith("reply.")
        }
        upload = make_dense(Message(header["reply"], arrays), CLASSES)
        for key, value in flatten_upload(upload).items():
            total[key] = total.get(key, torch.zeros(())) + value.double()
    return total


def run_with_a_killed_member(setup: Setup, tag: str, **config: Any) -> Run:
    """Run one secure round in which c is killed after keys and shares, while it trains."""
    odd = setup.odd("c")
    (odd / "hold").write_text("1")

    def in_the_middle() -> None:
        until(lambda: (odd / "asked").exists(), "c is asked to train", 2 * flower.PATIENCE)
        setup.federation.kill("c")

    run = setup.federation.run(
        in_the_middle, rounds=1, quorum=3, timeout=120.0, combiner=SECURE, **config
    )
    (odd / "hold").unlink()
    setup.federation.bring("c", PYTHONPATH=path_with(odd))
    return run


@pytest.mark.slow
def test_a_member_killed_after_the_key_exchange_leaves_the_sum_of_the_others(
    setup: Setup,
) -> None:
    algorithm = "fedproto(absent=drop)"
    config = setup.fresh("secure") | {"algorithm": algorithm}
    run = run_with_a_killed_member(setup, "secure", **config)
    assert run.status == "finished:completed", run.log
    assert "the uploads of 2 of 3 members were added in a secure sum" in run.log
    found = server_of(run.rounds[1][0])
    expected = replayed(setup.federation, setup.files, ["ab"], algorithm=algorithm).server
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    total = sum_of_uploads(setup, "secure", "ab")
    means = total["prototypes/sums/prototypes"] / total["prototypes/weight"].clamp(min=1)[:, None]
    torch.testing.assert_close(found["prototypes"].double(), means, rtol=0, atol=1e-6)

    run = setup.federation.run(rounds=2, quorum=3, combiner=SECURE, **config)
    assert run.status == "finished:completed", run.log
    seats = run.rounds[2][1]["members"]
    assert {name: seat["last_round"] for name, seat in seats.items()} == dict.fromkeys("abc", 2)
    assert all(seat["spoken"] == [] for seat in seats.values())  # nobody's classes are known


@pytest.mark.slow
def test_noise_secure_sums_and_a_dropout_together(setup: Setup) -> None:
    """Every member trains with noise of its own; the server gets the sum of those that stay."""
    own = {"model": "mlp(hidden=30)", "sends": "weights,counts", "privacy": "training"}
    own["secure-aggregation"] = "required"
    config = setup.fresh("noisy", a=own, b=own, c=own)
    config |= {"algorithm": "fedavg", "model": "mlp(hidden=30)", "shape": "1,8,8"}
    config |= {"privacy": "training", "step_noise": 1.0, "gradient_clip": 1.0}
    run = run_with_a_killed_member(setup, "noisy", **config)
    assert run.status == "finished:completed", run.log
    assert "the uploads of 2 of 3 members were added in a secure sum" in run.log
    found = server_of(run.rounds[1][0])
    total = sum_of_uploads(setup, "noisy", "ab")
    for name, value in found.items():
        mean = total[f"model/sums/{name}"] / total["model/weight"]
        torch.testing.assert_close(value.double(), mean, rtol=0, atol=1e-6)
    quiet = config | {"privacy": "none", "step_noise": 0.0}
    plain = replayed(
        setup.federation,
        {
            name: setup.files[name] | own | {"privacy": "", "secure-aggregation": "accepted"}
            for name in "ab"
        },
        ["ab"],
        **{key: value for key, value in quiet.items() if key not in ("state",)},
    ).server
    differences = [float((found[name] - value).abs().max()) for name, value in plain.items()]
    assert max(differences) > 0.01  # the noise is in the sum
    seats = run.rounds[1][1]["members"]
    assert seats["a"]["epsilon"] > 0


@pytest.mark.slow
def test_central_noise_on_a_secure_sum_with_a_dropout_and_a_budget(setup: Setup) -> None:
    """The server adds noise to the sum of those that stay, and ends before its budget is spent."""
    own = {"model": "mlp(hidden=30)", "sends": "weights,counts", "privacy": "client"}
    limit = compute_epsilon([Release(2.0, 2)], 1e-5) + 1e-6
    config = setup.fresh("central", a=own, b=own, c=own)
    config |= {"algorithm": "fedavg", "model": "mlp(hidden=30)", "shape": "1,8,8"}
    config |= {"privacy": "client", "noise_multiplier": 2.0, "clip": 0.5, "epsilon": limit}
    run = run_with_a_killed_member(setup, "central", **config)
    assert run.status == "finished:completed", run.log
    assert "the uploads of 2 of 3 members were added in a secure sum" in run.log
    before = server_of(run.rounds[0][0])
    after = server_of(run.rounds[1][0])
    total = sum_of_uploads(setup, "central", "ab")
    noise = []
    for name, value in before.items():
        if not name.startswith("privacy/"):
            expected = value.double() + total[f"model/sums/{name}"] / 2
            noise.append((after[name].double() - expected).flatten())
    assert float(torch.cat(noise).std()) == pytest.approx(2.0 * 0.5 / 2, rel=0.1)
    one = compute_epsilon([Release(2.0)], 1e-5)
    seats = run.rounds[1][1]["members"]
    assert [seat["epsilon"] for seat in seats.values()] == [pytest.approx(one)] * 3

    run = setup.federation.run(rounds=9, quorum=3, combiner=SECURE, **config)
    assert run.status == "finished:completed", run.log
    assert "round 3 would exceed the epsilon" in run.log
    header = run.rounds[max(run.rounds)][1]
    assert header["round"] == 2 and header["privacy"]["claim"]["holds"]
    assert all(one < seat["epsilon"] <= limit for seat in header["members"].values())


@pytest.mark.slow
def test_a_member_whose_worker_is_killed_comes_back_by_itself(setup: Setup) -> None:
    """Flower alone would say for ever that it is there, and every round would wait for it."""
    federation = setup.federation

    def find_worker() -> int | None:
        status = json.loads((federation.folder / ".flwr-c" / STATUS_FILE).read_text())
        workers = [each for each in status["processes"] if each["name"] == "warm_worker"]
        return workers[0]["process"] if workers else None

    killed = find_worker()
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    until(lambda: find_worker() not in (killed, None), "the worker is started again")
    until(lambda: "c" in federation.online(), "c is online again")
    run = federation.run(rounds=2, **setup.fresh("worker") | {"quorum": 3, "timeout": 60.0})
    assert_like_the_simulator(run, setup.arrays, range(1, 3))
    seats = run.rounds[2][1]["members"]
    assert {name: seat["late"] for name, seat in seats.items()} == {"a": 0, "b": 0, "c": 0}


def find_message_processes(worker: int) -> list[int]:
    """Return the forks of a worker that answer messages; its first child asks for them."""
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    return sorted(int(child) for child in children)[1:]


@pytest.mark.slow
def test_a_member_whose_message_is_ended_comes_back_by_itself(setup: Setup) -> None:
    """Flower's process of a message obeys SIGTERM, and its SuperNode would wait for ever."""
    federation, odd = setup.federation, setup.odd("c")
    config = setup.fresh("ended") | {"quorum": 2, "timeout": 45.0}
    (odd / "hold").write_text("2")

    def in_the_middle() -> None:
        until(
            lambda: (odd / "asked").exists() and (odd / "asked").read_text() == "2",
            "c is asked for round 2",
        )
        status = json.loads((federation.folder / ".flwr-c" / STATUS_FILE).read_text())
        workers = {each["name"]: each["process"] for each in status["processes"]}
        (process,) = find_message_processes(workers["warm_worker"])
        os.kill(process, signal.SIGTERM)
        (odd / "hold").unlink()

    run = federation.run(in_the_middle, rounds=2, **config)
    assert run.status == "finished:completed", run.log
    assert run.rounds[2][1]["members"]["c"]["last_round"] == 1
    assert "the process of a message ended without an answer" in federation.log("c")
    federation.bring("c", PYTHONPATH=path_with(odd))
    run = federation.run(rounds=3, **config | {"quorum": 3})
    assert run.status == "finished:completed", run.log
    server_state = replayed(federation, setup.files, ["abc", "ab", "abc"])
    assert same(server_of(run.rounds[3][0]), server_state.server)


@pytest.mark.slow
def test_a_reply_counts_if_the_answer_to_its_announcement_is_lost(setup: Setup) -> None:
    """Flower alone would never send its arrays, and the round would wait for them to the end."""
    odd = setup.odd("c")
    config = setup.fresh("lost") | {"quorum": 3, "timeout": 60.0}
    (odd / "lose").touch()
    run = setup.federation.run(rounds=2, **config)
    assert not (odd / "lose").exists(), "no answer was lost"
    assert_like_the_simulator(run, setup.arrays, range(1, 3))
    seat = run.rounds[2][1]["members"]["c"]
    assert (seat["refused"], seat["late"]) == (0, 0), seat["reason"]
