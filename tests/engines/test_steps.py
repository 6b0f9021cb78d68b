"""The SGD steps of a stack: traced, counted and with changing inputs."""

import warnings
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.engine_comparison import (
    RAGGED,
    assert_engines_agree,
    convolve_by_columns,
    largest_difference,
    make_clients,
    network,
    prepare,
    with_dropout,
)
from torch import nn
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fedproto.core.engine import Cohort
from fedproto.core.rounds import run_rounds
from fedproto.engines.gpu.graphs import STEP, rewind
from fedproto.engines.vectorised import layer_support
from fedproto.engines.vectorised import layers as stacked
from fedproto.engines.vectorised.plan import Plan
from fedproto.engines.vectorised.receiving import send_own_classes
from fedproto.engines.vectorised.steps import Steps


def load_workspace(stack, server):
    """Return the workspace of a stack's first phase, with all clients."""
    positions = torch.arange(len(stack.group))
    nobody_slow = torch.zeros(len(positions), dtype=torch.bool)
    received = send_own_classes(stack.algorithm, [server], stack.group, positions)
    state = vmap(stack.algorithm.adopt)(stack.group.states.take(positions), received)
    tables = stack.timetable.make_tables(1, positions, nobody_slow)
    return stack.steps.load(0, state, {}, received, tables[0])


# --- what a GPU does, on a CPU


def test_a_workspace_in_fixed_memory_has_the_same_values():
    """A GPU's recorded steps always work on the same memory; here it is filled on a CPU."""
    run = prepare("fedproto", "vectorised", data=make_clients(RAGGED))
    (stack,) = run.engine.stacks
    workspace = load_workspace(stack, run.progress.server)
    computed = ("velocity.", "terms.", "count", "collected")
    values = {name: v for name, v in workspace.items() if not name.startswith(computed)}
    del values[STEP]
    fixed = stack.steps._load_fixed_memory(0, values)
    assert largest_difference(fixed, workspace) == 0
    fixed["count"].add_(1)
    fewer = {name: value[:2] for name, value in values.items()}
    again = stack.steps._load_fixed_memory(0, fewer)
    assert again is fixed
    assert not again["count"].any()
    assert torch.equal(again["mask"][:2], workspace["mask"][:2])
    assert not again["mask"][2:].any()


@pytest.mark.parametrize(
    ("active", "size", "compiled_size"),
    [(100, 100, 100), (76, 100, 100), (75, 75, 100), (51, 56, 100), (50, 56, 50), (1, 15, 50)],
)
def test_a_gpu_records_steps_of_a_few_sizes(active, size, compiled_size):
    def round_up(compile):
        group = SimpleNamespace(device=torch.device("cuda"))
        steps = SimpleNamespace(group=group, capacity=100, plan=Plan(compile=compile))
        return Steps._round_up(steps, active)

    assert round_up(compile=False) == size
    assert round_up(compile=True) == compiled_size


# --- traced steps


#: Everything that a step may do beside SGD.
ADAM = {"optimiser": "adam", "weight_decay": 0.1, "clip_norm": 0.5}
ADAMW = {"optimiser": "adamw", "weight_decay": 0.1, "class_weights": "balanced"}


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("fedproto(collect=during)", {}),
        ("fedavg", {}),
        ("fedrep", {}),
        ("fedproto", ADAM),
        ("fedavg", ADAMW),
    ],
)
def test_a_traced_step_is_the_step(algorithm, options, monkeypatch):
    """Before a GPU's step is compiled, it is traced down to torch's own operations."""
    monkeypatch.setattr(stacked._Convolution, "vmap", staticmethod(convolve_by_columns))
    module = network(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
    )
    run = prepare(
        algorithm,
        "vectorised",
        modules=module,
        data=make_clients(RAGGED),
        last_batch="keep",
        **options,
    )
    (stack,) = run.engine.stacks
    workspace = load_workspace(stack, run.progress.server)
    names = list(workspace)
    step = stack.steps.recorded_step(0, len(RAGGED)).function

    def flat(*values):
        step(dict(zip(names, values, strict=True)))

    with layer_support.fusing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = make_fx(flat)(*(value.clone() for value in workspace.values()))
    traced = {name: value.clone() for name, value in workspace.items()}
    before = {name: value.clone() for name, value in workspace.items()}
    for _ in range(3):
        step(workspace)
        with torch.no_grad():
            program(*(traced[name] for name in names))
    assert largest_difference(workspace, traced) < 1e-12
    assert workspace["step"].item() == 3
    assert largest_difference(workspace, before) > 1e-3


def test_warming_up_never_runs_past_the_last_step():
    """A GPU's step is tried on copies before it is recorded, maybe when only one step is left."""
    run = prepare("fedproto", "vectorised", data=make_clients(RAGGED))
    (stack,) = run.engine.stacks
    workspace = load_workspace(stack, run.progress.server)
    workspace[STEP].fill_(workspace["at"].shape[1] - 1)
    aside = {name: value.clone() for name, value in workspace.items()}
    for _ in range(2):
        stack.steps.recorded_step(0, len(RAGGED)).function(rewind(aside))
    assert aside[STEP].item() == 1
    assert workspace[STEP].item() == workspace["at"].shape[1] - 1


def test_a_phase_may_have_another_order_of_steps_than_the_first():
    """Half of 5 steps is 3, as many as another client's 3; half of 10 is 5, less than its 6."""
    data = make_clients((20, 12, 20, 12), tests=(4,) * 4)
    assert_engines_agree("fedrep(head_epochs=1,body_epochs=2)", data=data, stragglers=0.5, rounds=4)


# --- one step for all clients


class Operations(TorchDispatchMode):
    """Counts torch's operations, and lists the types of values that are read."""

    def __init__(self):
        super().__init__()
        self.counted, self.read = Counter(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counted[str(function)] += 1
        if function is torch.ops.aten._local_scalar_dense.default:
            self.read.append(args[0].dtype)
        return function(*args, **kwargs or {})


def operations(algorithm, clients, **settings):
    data = make_clients((7,) * clients, tests=(3,) * clients)
    run = prepare(algorithm, "vectorised", data=data, stack=100, **settings)
    everyone, nobody = torch.arange(clients), torch.tensor([], dtype=torch.int64)
    slow = torch.tensor([0, 3])
    list(
        run.engine.train(1, [run.progress.server], [Cohort(everyone, nobody, slow)])
    )  # what is made once is made
    with Operations() as seen:
        list(run.engine.train(2, [run.progress.server], [Cohort(everyone, nobody, slow)]))
    return seen


@pytest.mark.parametrize(
    "algorithm", ["local", "fedavg", "fedrep", "fesem", "fedproto", "fedproto(collect=during)"]
)
def test_twice_as_many_clients_need_as_many_operations(algorithm):
    """There is no loop over clients above a kernel, and no trained number is read."""
    six, twelve = (
        operations(algorithm, clients, modules=with_dropout(), epochs=2) for clients in (6, 12)
    )
    assert six.counted == twelve.counted
    assert not any(dtype.is_floating_point for dtype in six.read)


@pytest.mark.parametrize("options", [ADAM, ADAMW, {"sampling": "balanced"}], ids=str)
def test_no_setting_of_training_loops_over_clients_or_reads_a_number(options):
    """A GPU could not record such a step."""
    six, twelve = (
        operations("fedproto", clients, modules=with_dropout(), **options) for clients in (6, 12)
    )
    assert six.counted == twelve.counted
    assert not any(dtype.is_floating_point for dtype in six.read)


def test_evaluation_has_no_loop_over_clients():
    found = []
    for clients in (6, 12):
        data = make_clients((7,) * clients, tests=(3,) * clients)
        run = prepare("fedproto", "vectorised", data=data, stack=100)
        with Operations() as seen:
            run.engine.evaluate([run.progress.server])
        found.append(seen.counted)
    assert found[0] == found[1]


# --- losses and servers of other kinds


def test_a_loss_may_divide_by_the_number_of_samples():
    """A client that has no batch left is not shown an empty one."""

    def loss(step):
        each = (
            nn.functional.cross_entropy(step.logits, step.batch.y, reduction="none")
            * step.batch.mask
        )
        return {"supervised": each.sum() / step.batch.mask.sum()}

    run = prepare("local", "vectorised", data=make_clients(RAGGED))
    (stack,) = run.engine.stacks
    stack.steps.algorithm = replace(stack.algorithm, loss=loss)
    workspace = load_workspace(stack, run.progress.server)
    for _ in range(workspace["at"].shape[1]):
        stack.steps.recorded_step(0, len(RAGGED)).function(
            workspace
        )  # all of them in every step, as on a GPU
    assert all(torch.isfinite(value).all() for value in workspace.values())


def test_a_server_may_begin_to_send_something_else():
    """From the second round on it sends other prototypes too, and the loss has a term for them."""

    def aggregate(server, uploads):
        made = original.aggregate(server, uploads)
        return made | {"second": made["prototypes"]}

    def send(server, recipient):
        return original.send(server, recipient) | {
            name: server[name] for name in server if name == "second"
        }

    def loss(step):
        if "second" not in step.received:
            return original.loss(step)
        apart = (step.features - step.received["second"][step.batch.y]).square().mean(1)
        return original.loss(step) | {
            "another": (apart * step.batch.mask).sum() / step.batch.mask.sum()
        }

    original = prepare("fedproto", "reference", data=make_clients(RAGGED)).algorithm
    algorithm = replace(original, aggregate=aggregate, send=send, loss=loss)
    found = []
    for engine in ("reference", "vectorised"):
        run = prepare("fedproto", engine, data=make_clients(RAGGED))
        run.algorithm = run.engine.algorithm = algorithm
        for stack in getattr(run.engine, "stacks", []):
            stack.algorithm = stack.steps.algorithm = algorithm
        federation_runs = [run.federation_run()]
        losses = [result.loss for (result,) in run_rounds(algorithm, run.engine, federation_runs)]
        found.append((losses, run.engine.export(0)))
    assert [set(loss) for loss in found[0][0]] == [set(loss) for loss in found[1][0]]
    assert largest_difference(found[0][1], found[1][1]) < 1e-8
