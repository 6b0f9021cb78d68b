"""Modules with a parameter that no loss reaches, and with a buffer that changes in eval mode."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.tiny import build, experiment
from torch import Tensor, nn

from fedproto.core import local_training
from fedproto.core.local_training import embed
from fedproto.core.types import Tree
from fedproto.runs.training_settings import training_of


class Odd(nn.Module):
    """A module that counts its calls, and never uses one of its parameters."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.inner(x)


@pytest.fixture(scope="module")
def run() -> Any:
    return experiment("local", ways=2, shots=3, stdev=0, clients=1, batch=4)


def make_odd(run: Any) -> tuple[Any, Tree]:
    """Return a client with such a module, and the module's state."""
    member = run.federation.members[0]
    state = {f"inner.{name}": value for name, value in member.initial.items()}
    state |= {"unused": torch.ones(2), "calls": torch.zeros(())}
    return replace(member, module=Odd(member.module), initial=state), state


def test_a_parameter_that_no_loss_reaches_stays_as_it_was(run: Any) -> None:
    member, state = make_odd(run)
    training = replace(training_of(run.config), epochs=2)
    outcome = local_training.train(member, build("local"), state, {}, training, round=1)
    assert outcome.state["unused"].tolist() == [1.0, 1.0]
    moved = [name for name, value in state.items() if not torch.equal(value, outcome.state[name])]
    assert any(name.startswith("inner.") for name in moved)


def test_an_embedding_leaves_the_buffers_of_the_state_as_they_were(run: Any) -> None:
    member, state = make_odd(run)
    features, classes = embed(member.module, state, member.train)
    again, _ = embed(member.module, state, member.train)
    assert torch.equal(features, again)
    assert len(features) == len(classes) == len(member.train.rows)
    assert state["calls"].item() == 0
