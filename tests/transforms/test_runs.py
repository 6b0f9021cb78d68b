"""Runs with transforms: engines, resuming, traffic, and settings that cannot be meant."""

import sys

import pytest
import torch
from helpers.command_line import fedproto, only_line
from helpers.engine_comparison import TROUBLE, assert_engines_agree, assert_equal, finish, prepare
from helpers.killed_runs import killed_run, left_behind
from helpers.tiny import ALGORITHMS, SETTINGS, experiment, finished

import fedproto as package
from fedproto.config import plugin_trust, plugins
from fedproto.config.config_file import read_toml
from fedproto.config.settings import configure
from fedproto.core import codec
from fedproto.core.local_training import train
from fedproto.core.tensors import flatten_upload
from fedproto.core.types import Group, Recipient
from fedproto.errors import ConfigError
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder

CHAIN = "clip(norm=3),top_k(fraction=0.3),quantise(bits=4)"


# --- engines


@pytest.mark.parametrize("algorithm", ["fedproto(weighting=eq6)", "fedavg"])
def test_engines_agree_with_a_chain_whatever_happens(algorithm):
    assert_engines_agree(algorithm, transform=CHAIN, **TROUBLE)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_engines_agree_with_a_chain(algorithm):
    assert_engines_agree(algorithm, transform=CHAIN, rounds=2)


@pytest.mark.parametrize("algorithm", ["fedproto", "fedper"])
def test_processes_agree_with_a_chain(algorithm):
    settings = {"transform": CHAIN, "workers": 2, **TROUBLE}
    reference = finish(prepare(algorithm, "reference", **settings))
    assert_equal(reference, finish(prepare(algorithm, "processes", **settings)))


def test_an_algorithm_that_sends_nothing_ignores_transforms():
    plain = finished("local")
    assert_equal(plain, finished("local", transform=CHAIN), tolerance=0)


@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg"])
def test_a_transform_that_changes_nothing_changes_nothing(algorithm):
    _, plain = finished(algorithm)
    _, clipped = finished(algorithm, transform="clip(norm=1e9)")
    for state, other in zip(plain.states, clipped.states, strict=True):
        for name, value in state.items():
            assert value.double().sub(other[name].double()).abs().max() < 1e-9


def test_fedavg_of_eight_bits_is_close_to_fedavg():
    settings = {"rounds": 10, "shots": 20, "test_shots": 20, "eval_every": 10}
    _, plain = finished("fedavg", **settings)
    _, quantised = finished("fedavg", transform="quantise", **settings)
    difference = plain.accuracy["head"]["mean"] - quantised.accuracy["head"]["mean"]
    assert abs(difference) < 0.03
    assert quantised.communication["bytes_up"] < plain.communication["bytes_up"] / 3


@pytest.mark.parametrize("algorithm", ["fedavg", "fedproto"])
def test_engines_agree_with_a_chain_in_asynchronous_rounds(algorithm):
    """Late changes are changes of what their sender had received."""
    settings = {"buffer": 2, "concurrency": 4, "speed_spread": 1.0, "rounds": 4}
    assert_engines_agree(algorithm, transform=CHAIN, **settings)


def test_transforms_and_combiners_are_used_together():
    settings = {"transform": "quantise", "combiner": "median", "rounds": 2}
    (run, result), _ = assert_engines_agree("fedproto", **settings)
    assert run.algorithm.encode is not None
    assert result.data["transform"] == "quantise(bits=8)"
    _, plain = finished("fedproto", rounds=2, transform="quantise")
    assert not torch.equal(result.prototypes["prototypes"], plain.prototypes["prototypes"])


# --- traffic


@pytest.mark.parametrize("transform", ["clip", "quantise", "quantise(bits=4)", "top_k", CHAIN])
@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg"])
def test_the_ledger_counts_the_bytes_of_the_real_messages(algorithm, transform):
    """One round by hand, every message built, against what the round loop wrote down."""
    run = experiment(algorithm, rounds=1, transform=transform)
    bytes_up = 0
    for member, state in zip(run.federation.members, run.engine.states[0], strict=True):
        classes = run.federation.own_classes[member.id]
        recipient = Recipient(classes.new_tensor(member.id), classes)
        received = run.algorithm.send(run.progress.server, recipient)
        outcome = train(member, run.algorithm, state, received, run.engine.trainings[0], 1)
        for message in codec.encode_upload(outcome.wire).values():
            bytes_up += len(message)
    assert run.execute().communication["bytes_up"] == bytes_up


@pytest.mark.parametrize("transform", ["quantise(bits=4)", CHAIN])
@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg"])
def test_the_real_messages_are_decoded_to_the_same_bits(algorithm, transform):
    run = experiment(algorithm, rounds=1, transform=transform)
    member = run.federation.members[0]
    classes = run.federation.own_classes[0]
    received = run.algorithm.send(run.progress.server, Recipient(torch.tensor(0), classes))
    states = run.engine.states[0]
    outcome = train(member, run.algorithm, states[0], received, run.engine.trainings[0], 1)
    arrived = {}
    for name, message in codec.encode_upload(outcome.wire).items():
        sums, extras = codec.unpack(message, len(classes))
        arrived[name] = Group(sums, extras.pop("weight"), extras)
    run.algorithm.check(arrived)
    decoded = run.algorithm.decode(arrived, received)
    for path, value in flatten_upload(outcome.upload).items():
        assert torch.equal(flatten_upload(decoded)[path], value)


def test_bytes_of_a_row_are_those_of_the_documentation():
    """On top of one header: d values take 4 d bytes, d + 4 or d / 2 + 4, or 8 k."""
    sizes = {}
    for transform in ("", "quantise", "quantise(bits=4)", "top_k(fraction=0.25)"):
        for width in (40, 400):
            settings = {"precision": "float32", "clients": 1, "rounds": 1, "transform": transform}
            _, result = finished("fedproto", model=f"mlp(width={width})", **settings)
            classes = len(result.clients[0]["classes"])
            sizes[transform, width] = (result.communication["bytes_up"], classes)
    expected = {"": 4.0, "quantise": 1.0, "quantise(bits=4)": 0.5, "top_k(fraction=0.25)": 2.0}
    for transform, bytes_per_value in expected.items():
        large, classes = sizes[transform, 400]
        small, _ = sizes[transform, 40]
        # Safetensors pads a header to a multiple of eight bytes.
        assert large - small == pytest.approx(360 * classes * bytes_per_value, abs=16)


# --- resuming, sweeps and settings


def test_a_killed_run_with_a_chain_resumes_to_the_same_bits(tmp_path):
    settings = SETTINGS | {"algorithm": "fedproto", "transform": CHAIN, "checkpoint_every": 1}
    (config,) = configure(settings)
    whole = Experiment.prepare(config)
    whole.execute(whole.new_folder(tmp_path / "whole"))
    killed_run(tmp_path / "killed", settings, round=2)
    package.resume(tmp_path / "killed")
    assert left_behind(tmp_path / "killed") == left_behind(tmp_path / "whole")
    assert RunFolder.open(tmp_path / "whole").result()["transform"] == (
        "clip(norm=3.0),top-k(fraction=0.3),quantise(bits=4)"
    )


@pytest.mark.parametrize("text", ["", "quantise(bits=4)", CHAIN])
def test_a_setting_written_out_is_read_back(text, tmp_path):
    (config,) = configure({"dataset": "digits", "transform": text})
    path = tmp_path / "config.toml"
    path.write_text(config.toml())
    (again,) = configure(read_toml(path))
    assert again.transform == config.transform


def test_a_sweep_varies_transforms(tmp_path):
    over = {"transform": ["", "quantise", "top_k,quantise"], "seed": [0, 1]}
    settings = SETTINGS | {"rounds": 1, "model": "mlp(hidden=16,width=200)"}
    swept = package.sweep(over, out=tmp_path, **settings)
    sent = [run.result.communication["bytes_up"] for run in swept]
    assert sent[0] > sent[2] > sent[4]
    settings |= {"transform": "quantise", "seed": 1}
    alone = package.run(**settings)
    assert swept[3].result.communication == alone.communication


BAD = {
    "no-such": "unknown transform 'no-such', accepted: ",
    "quantise*2": "transform 'quantise*2': a count has no meaning here",
    "quantise(bits=-8)": "transform quantise's bits must be 8 or 4, not -8",
    "quantise(bits=3)": "transform quantise's bits must be 8 or 4, not 3",
    "quantise(bit=4)": "unknown option of transform quantise 'bit'",
    "clip(norm=0)": "transform clip's norm must be a number above 0",
    "top_k(fraction=1.5)": "transform top-k's fraction must be a number above 0 and at most 1",
    "quantise,clip": "transform clip cannot follow quantise",
}


@pytest.mark.parametrize("text", BAD)
def test_a_transform_that_cannot_work_is_refused_before_anything_starts(text, tmp_path):
    out = tmp_path / "run"
    small = ("--dataset", "digits", "--clients", "4", "--shots", "5", "--rounds", "1")
    done = fedproto("run", *small, "--transform", text, "--out", out)
    assert done.code == 2
    assert BAD[text] in only_line(done.err)
    assert not out.exists()


OUTSIDE = """
from fedproto import Transform


def keep(state, uploads, context):
    return state, uploads


def median():
    return Transform("median", server=keep, needs="each")


def nothing():
    return Transform("nothing")


def forgets():
    Transform("forgets")


def narrow():
    return Transform("narrow", encode=lambda values: values)


def wrong():
    return Transform("wrong", server=keep, needs="all")
"""


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("median", "transform median needs single uploads, but fedavg gives the server only their"),
        ("nothing", "transform 'outside:nothing' has neither a client part nor a server part"),
        ("forgets", "transform 'outside:forgets' returned NoneType, where fedproto.core.transform"),
        ("narrow", "transform 'outside:narrow': encode must be a function of (values, context)"),
        ("wrong", "transform 'outside:wrong': needs must be sum or each, not 'all'"),
    ],
)
def test_a_transform_from_outside_that_cannot_work_is_refused(
    function, sentence, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside.py").write_text(OUTSIDE)
    small = ("--dataset", "digits", "--clients", "4", "--shots", "5", "--rounds", "1")
    command = ("run", *small, "--algorithm", "fedavg", "--transform", f"outside:{function}")
    done = fedproto(*command, "--out", "run")
    assert done.code == 2
    assert sentence in only_line(done.err)
    assert not (tmp_path / "run").exists()


def test_a_plug_in_that_a_file_names_is_not_run():
    with pytest.raises(ConfigError, match="if you trust it"):
        configure({"dataset": "digits", "transform": "nobody:evil"})


def test_transforms_are_listed():
    done = fedproto("list", "transforms")
    for text in ("clip", "quantise", "top-k", "bits=8", "norm=1.0", "fraction=0.1"):
        assert text in done.out


# --- a part at the server

NOISE = """
import torch

from fedproto import Transform
from fedproto.core import rng


def noise(*, size: float = 0.01):
    def server(state, uploads, context):
        changed = {}
        for name, group in uploads.items():
            sums = {}
            for tensor, value in group.sums.items():
                draws = rng.uniform(rng.fold(context.key, tensor), value.numel())
                sums[tensor] = value + size * (draws.reshape(value.shape) - 0.5).to(value)
            changed[name] = group._replace(sums=sums)
        return {"spent": state["spent"] + size}, changed

    return Transform(
        "noise",
        server=server,
        init=lambda task: {"spent": torch.tensor(0.0, dtype=torch.float64)},
        metrics=lambda state: {"spent": float(state["spent"])},
    )
"""


@pytest.fixture
def noise_module(tmp_path, monkeypatch):
    """The current folder, with a module that holds a transform with a part at the server."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noise_module.py").write_text(NOISE)
    with plugin_trust.own_trust():
        plugins.trust_chosen({"transform": "noise_module:noise"})
        yield tmp_path
    sys.modules.pop("noise_module", None)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedproto"])
def test_a_part_at_the_server_is_resumed_and_reported(algorithm, noise_module):
    transform = "quantise,noise_module:noise(size=0.5)"
    changes = {"algorithm": algorithm, "transform": transform, "checkpoint_every": 1}
    settings = SETTINGS | changes
    (config,) = configure(settings)
    whole = Experiment.prepare(config)
    result = whole.execute(whole.new_folder(noise_module / "whole"))
    assert [line["server"]["spent"] for line in result.metrics] == [0.5, 1.0, 1.5]
    killed_run(noise_module / "killed", settings, round=2)
    package.resume(noise_module / "killed")
    assert left_behind(noise_module / "killed") == left_behind(noise_module / "whole")


def test_engines_agree_with_a_part_at_the_server(noise_module):
    for algorithm in ("fedproto", "fedavg"):
        assert_engines_agree(algorithm, transform="top_k,noise_module:noise", rounds=2)
