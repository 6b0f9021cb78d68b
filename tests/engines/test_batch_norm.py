"""BatchNorm in stacks of clients leaves out what pads a batch."""

import pytest
import torch
from helpers.engine_comparison import (
    FULL,
    RAGGED,
    TROUBLE,
    assert_engines_agree,
    assert_falls_back,
    make_clients,
    with_batch_norm,
    with_flat_batch_norm,
)

from fedproto.core.tensors import flatten_state


@pytest.mark.parametrize("build", [with_batch_norm, with_flat_batch_norm], ids=["2d", "1d"])
@pytest.mark.parametrize(
    ("sizes", "last_batch"),
    [(RAGGED, "keep"), (RAGGED, "drop"), (RAGGED, "auto"), (FULL, "keep")],
    ids=["kept", "dropped", "auto", "full"],
)
def test_batchnorm_leaves_padding_out(build, sizes, last_batch):
    for algorithm in ("local", "fedavg"):
        _, (_, result) = assert_engines_agree(
            algorithm,
            modules=build(),
            data=make_clients(sizes),
            last_batch=last_batch,
            epochs=2,
            rounds=2,
        )
        layer = "body.1" if build is with_batch_norm else "body.2"
        assert min(state[f"{layer}.num_batches_tracked"] for state in result.states) > 0


@pytest.mark.parametrize("build", [with_batch_norm, with_flat_batch_norm], ids=["2d", "1d"])
@pytest.mark.parametrize(
    "options", [{"momentum": None}, {"affine": False}, {"momentum": 0.3, "eps": 0.01}], ids=str
)
def test_batchnorm_with_options(build, options):
    assert_engines_agree(
        "local",
        modules=build(**options),
        data=make_clients(RAGGED),
        last_batch="keep",
        **TROUBLE | {"clients": 5},
    )


def test_batchnorm_without_running_statistics_is_left_to_the_reference_engine():
    """It normalises by the images it is tested with, and those depend on the engine."""
    settings = {
        "modules": with_batch_norm(track_running_stats=False),
        "data": make_clients(RAGGED),
        "last_batch": "keep",
    }
    assert_falls_back("Net normalises by the batch it is tested in", **settings)


def test_a_frozen_batchnorm_keeps_its_running_statistics():
    """FedRep's first phase trains the head only; the body's statistics must not change in it."""
    for personal in ("head", "body.1", "body.1,head"):
        assert_engines_agree(
            f'fedrep(personal="{personal}",head_epochs=2)',
            modules=with_batch_norm(),
            data=make_clients(RAGGED),
            epochs=1,
            rounds=2,
        )


def test_batchnorm_with_slow_and_absent_clients():
    assert_engines_agree(
        "fedavg", modules=with_batch_norm(), data=make_clients(RAGGED), **TROUBLE | {"clients": 5}
    )
    assert_engines_agree(
        "fesem(clusters=2)", modules=with_batch_norm(), data=make_clients(RAGGED), last_batch="keep"
    )


@pytest.mark.parametrize("algorithm", ["scaffold", "ditto", "fedadam"])
def test_batchnorm_beside_what_clients_and_servers_keep(algorithm):
    """Only trained weights have control variates and moments; Ditto's two models, two statistics.

    Averages of statistics stay averages: a variance that Adam moves could fall below zero.
    """
    _, (run, _) = assert_engines_agree(
        algorithm, modules=with_batch_norm(), data=make_clients(RAGGED), last_batch="keep", rounds=2
    )
    server = flatten_state(run.progress.server)
    moments = [name for name in server if name.startswith(("control/", "mean/", "square/"))]
    assert not any("running" in name for name in moments)
    variances = [name for name in server if name.endswith("running_var")]
    assert variances and all((server[name] > 0).all() for name in variances)
    if algorithm == "ditto":
        states = run.engine.export(0)
        for client in range(len(RAGGED)):
            own = states[f"{client}.body.1.running_mean"]
            assert not torch.equal(own, states[f"{client}.client/global/body.1.running_mean"])
