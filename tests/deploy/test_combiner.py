"""A deployed server with a combiner."""

import re
from typing import Any

import pytest
import torch
from helpers.deployment import EQUAL, MIXED, WEIGHTS, simulate

from fedproto.deploy.messages import Message
from fedproto.deploy.settings import split_run_config
from fedproto.errors import ConfigError


@pytest.mark.parametrize(
    ("algorithm", "combiner"),
    [
        ("fedproto", "median"),
        ("fedproto(absent=drop)", "geometric-median"),
        ("fedavg", "trimmed-mean(fraction=0.3)"),
        ("fedper", "median"),
    ],
)
def test_every_round_gives_the_simulators_numbers(
    algorithm: str, combiner: str, make_deployment: Any, member_files: dict[str, Any]
) -> None:
    models = EQUAL if algorithm in WEIGHTS else MIXED
    deployment = make_deployment(algorithm, names="abcd", combiner=combiner, rounds=2)
    plain, _, _ = simulate(member_files, algorithm, models, "abcd", count=2)
    servers, _, classes = simulate(
        member_files, algorithm, models, "abcd", count=2, combiner=combiner
    )
    assert classes == tuple("0123456")[: len(classes)]
    state = deployment.state(classes=",".join(classes))
    deployment.serve(state)
    assert state.round == 2
    differs = []
    for name, value in servers[-1].items():
        torch.testing.assert_close(state.server[name], value, rtol=0, atol=1e-6)
        differs.append(not torch.equal(value, plain[-1][name]))
    assert any(differs)


def flip_values(name: str, reply: Message, round: int) -> list[Message]:
    """Return the reply; that of the member a has all its values with the other sign."""
    if name != "a":
        return [reply]
    flipped = {key: -array if "value." in key else array for key, array in reply.arrays.items()}
    return [Message(reply.header, flipped)]


def test_a_wrong_reply_does_little_harm_with_a_median(make_deployment: Any) -> None:
    moved = {}
    for combiner in ("sum", "median"):
        options = {"names": "abcd", "combiner": combiner, "rounds": 1}
        honest = make_deployment("fedavg", where=f"{combiner}-honest", **options).serve()
        wrong = make_deployment("fedavg", where=f"{combiner}-wrong", **options)
        attacked = wrong.serve(rewrite=flip_values)
        assert attacked.round == 1
        squares = [
            float((attacked.server[name] - value).square().sum())
            for name, value in honest.server.items()
        ]
        moved[combiner] = sum(squares) ** 0.5
    assert moved["median"] < moved["sum"] / 10


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"combiner": "krum"},
            "combiner krum needs at least 5 replies, but a round may close with 3: raise `quorum`, "
            "or choose another combiner",
        ),
        ({"combiner": "mean"}, "unknown combiner 'mean'"),
        ({"combiner": "median,krum"}, "combiner takes one choice here, not 'median,krum'"),
        ({"combiner": "krum(attackers=0)"}, "krum's attackers must be a whole number of at least"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(
    settings: dict[str, str], sentence: str, make_deployment: Any
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make_deployment(**settings).state()


def test_krum_is_accepted_with_a_quorum_that_suffices(make_deployment: Any) -> None:
    state = make_deployment(combiner="krum", quorum=5).state()
    assert state.algorithm.name == "fedproto"


def test_code_for_the_server_needs_its_operators_word() -> None:
    with pytest.raises(ConfigError, match=r"nobody:evil.*trust-plugins = true"):
        split_run_config({"combiner": "nobody:evil"}, "pyproject.toml")
