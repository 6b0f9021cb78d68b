"""Deployed rounds whose uploads are transformed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deployment import EQUAL, MIXED, WEIGHTS, Deployment, simulate

from fedproto.config import plugins
from fedproto.deploy.member import train_round
from fedproto.deploy.messages import Message
from fedproto.deploy.settings import split_run_config
from fedproto.errors import ConfigError, FedProtoError, RefusedByMember, RunFolderError

CHAIN = "clip(norm=3),top_k(fraction=0.4),quantise(bits=4)"


def with_transform(deployment: Deployment, transform: str) -> Deployment:
    """The deployment, with a transform among what the server states to its members."""
    deployment.terms = replace(deployment.terms, transform=transform)
    return deployment


@pytest.mark.parametrize("transform", ["quantise(bits=8)", CHAIN])
@pytest.mark.parametrize("algorithm", ["fedproto", "fedproto(weighting=eq6,absent=drop)", "fedavg"])
def test_every_round_gives_the_simulators_numbers(
    algorithm: str, transform: str, make_deployment: Any, member_files: dict[str, Any]
) -> None:
    deployment = with_transform(make_deployment(algorithm), transform)
    models = EQUAL if algorithm in WEIGHTS else MIXED
    servers, result, _ = simulate(member_files, algorithm, models, count=3, transform=transform)
    for number, expected in enumerate(servers, 1):
        state = deployment.state(rounds=number)
        deployment.serve(state)
        assert state.round == number and set(state.server) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(state.server[name], value, rtol=0, atol=1e-7)
    for member, client in zip(state.members.values(), result.clients, strict=True):
        assert member.bytes_up == client["communication"]["bytes_up"]


HOSTILE = {
    "a place that does not exist": ("/index", 10**6, "places outside of 0 to"),
    "a place below 0": ("/index", -1, "places outside of 0 to"),
    "a scale that is infinite": ("/scale", np.inf, "not a finite number"),
    "a scale that is no number": ("/scale", np.nan, "not a finite number"),
    "a scale below 0": ("/scale", -1.0, "must be finite and at least 0"),
    "a scale that is huge": ("/scale", 1e30, "root mean square"),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg"])
def test_a_reply_that_cannot_be_decoded_costs_its_sender_the_round(
    algorithm: str, hostile: tuple[str, float, str], make_deployment: Any
) -> None:
    ending, value, sentence = hostile
    deployment = with_transform(make_deployment(algorithm, quorum=2, rounds=1), CHAIN)

    def rewrite(name: str, reply: Message, round: int) -> list[Message]:
        if name != "b":
            return [reply]
        arrays = {key: array.copy() for key, array in reply.arrays.items()}
        key = next(key for key in arrays if key.endswith(ending))
        arrays[key].flat[0] = value
        return [Message(reply.header, arrays)]

    state = deployment.serve(rewrite=rewrite)
    assert sentence in state.members["b"].reason
    assert state.members["b"].last_round == 0
    assert state.members["a"].last_round == 1
    for tensor in state.server.values():
        assert tensor.isfinite().all()


def test_a_state_of_other_transforms_is_refused(make_deployment: Any) -> None:
    deployment = with_transform(make_deployment(rounds=1), "quantise")
    deployment.serve()
    with pytest.raises(RunFolderError, match=r"belongs to fedproto\(.*\) with quantise\(bits=8\)"):
        with_transform(deployment, "").state()


def test_a_member_imports_no_transform_that_a_server_names(make_deployment: Any) -> None:
    deployment = make_deployment()
    request = deployment.state().make_request("a")
    for transform, error in (
        ("evil:transform", RefusedByMember),
        ("no-such", FedProtoError),
        ("quantise(bits=5)", FedProtoError),
    ):
        changed = Message(request.header | {"transform": transform}, request.arrays)
        with pytest.raises(error, match=r"a transform of its own module|no-such|8 or 4"):
            train_round(changed, deployment.members["a"])


@pytest.mark.parametrize("transform", ["no-such", "quantise(bits=3)", "quantise,clip"])
def test_a_transform_that_cannot_work_is_refused_before_anything_starts(
    transform: str, make_deployment: Any
) -> None:
    deployment = with_transform(make_deployment(), transform)
    with pytest.raises(ConfigError, match="transform"):
        deployment.state()
    assert not Path(deployment.settings.state).exists()


def test_a_servers_transform_from_outside_needs_its_operators_word() -> None:
    with pytest.raises(ConfigError, match="trust-plugins = true"):
        split_run_config({"transform": "evil:transform"}, "pyproject.toml")
    assert plugins.names("transform")
