import pytest
import torch
from helpers.tiny import ALGORITHMS, experiment
from hypothesis import given
from hypothesis import strategies as st

from fedproto.core import codec
from fedproto.core.local_training import train
from fedproto.core.types import Group


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 600))
def test_only_rows_that_speak_travel_and_arrive(speaks, dim):
    weight = torch.tensor([3.0 if row else 0.0 for row in speaks])
    group = Group({"prototypes": torch.randn(len(speaks), dim) * weight[:, None]}, weight)
    upload = {"prototypes": group}
    size = codec.upload_size(upload)
    if not any(speaks):
        assert size == (0, 0)
        return
    message = codec.encode_upload(upload)["prototypes"]
    sums, weights = codec.unpack(message, len(speaks))
    assert torch.equal(sums["prototypes"], group.sums["prototypes"])
    assert torch.equal(weights["weight"], weight)
    assert size == (sum(speaks) * dim, len(message))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_ledger_counts_the_bytes_of_the_real_messages(name):
    """One round by hand, every message built, against what the round loop wrote down."""
    run = experiment(name, rounds=1)
    up = down = 0
    for member, state in zip(run.federation.members, run.engine.states[0], strict=True):
        received = run.algorithm.send(run.progress.server, run.federation.recipient(member.id))
        outcome = train(member, run.algorithm, state, received, run.engine.trainings[0], 1)
        messages = codec.encode_upload(outcome.wire)
        up += sum(len(message) for message in messages.values())
        if codec.download_size(received).values:
            down += sum(len(message) for message in codec.encode_download(received).values())
    result = run.execute()
    assert (result.communication["bytes_up"], result.communication["bytes_down"]) == (up, down)


def test_a_download_holds_the_prototypes_of_own_classes_only():
    received = {"prototypes": torch.randn(10, 50), "known": torch.tensor([1.0, 1.0] + [0.0] * 8)}
    values, _ = codec.unpack(codec.encode_download(received)[""], 10)
    assert torch.equal(values["prototypes"][:2], received["prototypes"][:2])
    assert not values["prototypes"][2:].any()
    assert codec.download_size(received) == (100, len(codec.encode_download(received)[""]))
