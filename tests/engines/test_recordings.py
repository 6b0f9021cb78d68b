"""Functions that are recorded and replayed: to the bit what they do, or not replayed at all."""

import random
import subprocess
import sys
import textwrap
from unittest import mock

import pytest
import torch
from helpers.engine_comparison import (
    RAGGED,
    TROUBLE,
    assert_equal,
    finish,
    make_clients,
    network,
    prepare,
    recording_at_once,
    with_batch_norm,
    with_dropout,
)
from torch import nn

from fedproto.engines.vectorised import recordings
from fedproto.engines.vectorised.recordings import (
    RecordedFunction,
    RecordedFunctions,
    Recording,
)

NOTHING = nn.Identity()


@pytest.fixture(autouse=True)
def _record_at_once():
    with recording_at_once():
        yield


def make_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, generator=generator)
    return {"x": x, "total": torch.zeros(4), "rows": torch.tensor([[0], [2], [1], [0]])}


def call(function, calls, module=NOTHING):
    """Return the function as it was recorded, and what each call returned and left behind."""
    recorded = RecordedFunction(function, module)
    outcomes = []
    for number in range(calls):
        tensors = make_tensors(number)
        result = recorded(tensors)
        outcomes.append((result, tensors))
    return recorded, outcomes


def assert_never_replayed(recorded, outcomes):
    assert not recorded.is_repeatable
    assert not recorded.is_checked
    assert len({float(result[0].sum()) for result, _ in outcomes}) == len(outcomes)


# --- what is replayed


def test_replays_change_and_return_what_the_function_would():
    ran = []

    def function(tensors):
        ran.append(len(ran))
        x = tensors["x"]
        exponentials = torch.exp(x - x.amax(1, keepdim=True))
        softmax = exponentials / exponentials.sum(1, keepdim=True)
        tensors["total"][1:].add_(softmax.gather(1, tensors["rows"])[1:, 0])
        first, *_ = softmax.unbind(1)
        return first, softmax.detach()

    recorded, outcomes = call(function, 6)
    assert recorded.is_checked
    assert ran == [0, 1, 2]  # recorded, called, called beside the first replay
    for number, (result, tensors) in enumerate(outcomes):
        expected_tensors = make_tensors(number)
        expected = function(expected_tensors)
        assert all(map(torch.equal, result, expected))
        assert all(torch.equal(tensors[name], expected_tensors[name]) for name in tensors)
        assert torch.allclose(result[1], torch.softmax(make_tensors(number)["x"], 1))


def test_gradients_and_vmap_are_replayed_below_them():
    """Of the gradient of sum x⁴, which is 4 x³, only products are left."""

    def function(tensors):
        leaf = tensors["x"].detach().requires_grad_()
        loss = torch.func.vmap(lambda row: row.pow(4).sum())(leaf).sum()
        tensors["x"].copy_(*torch.autograd.grad(loss, [leaf]))

    recorded, outcomes = call(function, 5)
    assert recorded.is_checked
    for number, (result, tensors) in enumerate(outcomes):
        assert result is None
        assert torch.allclose(tensors["x"], 4 * make_tensors(number)["x"] ** 3)


def test_tensors_from_outside_are_read_anew():
    outside = torch.ones(3)
    recorded = RecordedFunction(lambda tensors: (tensors["x"] @ outside,), NOTHING)
    for number in range(5):
        outside.fill_(number)
        tensors = make_tensors(number)
        (result,) = recorded(tensors)
        assert torch.allclose(result, number * tensors["x"].sum(1))
    assert recorded.is_checked


def test_a_method_with_other_arguments_than_its_operation_is_not_taken_for_it():
    """`x.where(condition, y)` is the operation `where(condition, x, y)`."""

    def function(tensors):
        x = tensors["x"]
        return (torch.where(x > 0, x, -x),)

    recorded, outcomes = call(function, 4)
    assert recorded.is_checked
    assert torch.equal(outcomes[3][0][0], make_tensors(3)["x"].abs())


def test_each_layout_has_its_own_recording():
    """A view that an expanded tensor allows may be impossible for a dense one."""
    functions = RecordedFunctions(NOTHING)

    def function(tensors):
        return (tensors["x"].reshape(-1) * 2,)

    expanded = torch.arange(3.0).expand(4, 3)
    for x in (expanded, expanded.clone(), expanded.double(), expanded.clone().t()):
        for number in range(4):
            value = x + number if x.is_contiguous() else x
            (result,) = functions.find("twice", function, {"x": value})({"x": value})
            assert torch.equal(result, value.flatten() * 2)
    assert len(functions.functions) == 4
    assert all(function.is_checked for function in functions.functions.values())


def test_only_the_layouts_used_last_are_remembered():
    functions = RecordedFunctions(NOTHING)
    with mock.patch.object(recordings, "MAX_LAYOUTS", 3):
        for length in (1, 2, 3, 1, 4):
            tensors = {"x": torch.zeros(length)}
            functions.find("nothing", lambda tensors: None, tensors)(tensors)
    lengths = [layout[2][0] for layout in functions.functions]
    assert lengths == [3, 1, 4]


def test_recording_does_not_import_torchs_compiler():
    """That takes a second, as long as the import of torch, and no run without a GPU needs it."""
    code = """
        import sys, torch
        from fedproto.engines.vectorised.recordings import Recording
        Recording(lambda tensors: (tensors["x"] + 1,), {"x": torch.zeros(1)})
        print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- what is not


def test_random_numbers_are_drawn_anew():
    recorded, outcomes = call(lambda tensors: (torch.rand_like(tensors["x"]),), 5)
    assert_never_replayed(recorded, outcomes)


def test_trying_to_record_draws_no_random_number():
    """What a module draws depends on how often it drew before."""

    def function(tensors):
        return (nn.functional.dropout(tensors["x"]),)

    torch.manual_seed(3)
    expected = [function(make_tensors(number)) for number in range(4)]
    torch.manual_seed(3)
    _, outcomes = call(function, 4)
    for (result, _), (wanted,) in zip(outcomes, expected, strict=True):
        assert torch.equal(result[0], wanted)


def test_values_that_python_reads_are_read_anew():
    recorded, outcomes = call(lambda tensors: (tensors["x"] * float(tensors["x"][0, 0]),), 5)
    assert_never_replayed(recorded, outcomes)


@pytest.mark.parametrize("compare", [torch.equal, torch.allclose])
def test_tensors_that_python_compares_are_compared_anew(compare):
    """They differ in the first calls, in which the function is recorded and checked."""
    recorded = RecordedFunction(
        lambda tensors: (tensors["x"] + compare(tensors["x"], tensors["y"]),), NOTHING
    )
    x = torch.zeros(2)
    for number in (1.0, 2.0, 3.0, 0.0):
        (result,) = recorded({"x": x, "y": torch.full((2,), number)})
        assert torch.equal(result, x + (number == 0))


def test_a_module_that_counts_its_calls_goes_on_counting():
    module = nn.Identity()
    module.calls = 0

    def function(tensors):
        module.calls += 1
        return (torch.full((), float(module.calls)),)

    assert_never_replayed(*call(function, 5, module))


def test_what_differs_from_call_to_call_is_noticed_at_the_first_replay():
    numbers = random.Random(0)
    recorded, outcomes = call(lambda tensors: (torch.zeros(2) + numbers.random(),), 6)
    assert recorded.recording is not None
    assert_never_replayed(recorded, outcomes)


def test_what_cannot_be_recorded_goes_on_without():
    calls = []

    def function(tensors):
        calls.append(len(calls))
        if len(calls) == 1:
            raise ValueError("not now")
        return (tensors["x"] + len(calls),)

    recorded, outcomes = call(function, 4)
    assert_never_replayed(recorded, outcomes)


# --- in an engine


def run_twice(algorithm, **settings):
    """Return finished runs without and with recordings, and how much was replayed in the second."""
    runs = []
    replayed = {"steps": 0, "passes": 0}
    replay = Recording.replay

    def count_and_replay(recording, tensors):
        result = replay(recording, tensors)
        replayed["steps" if result is None else "passes"] += 1
        return result

    for calls_before_recording in (10**9, 0):
        with (
            mock.patch.object(recordings, "CALLS_BEFORE_RECORDING", calls_before_recording),
            mock.patch.object(Recording, "replay", count_and_replay),
        ):
            assert replayed == {"steps": 0, "passes": 0}
            run = prepare(algorithm, "vectorised", rounds=4, eval_every=1, **settings)
            runs.append(finish(run))
    return *runs, replayed


@pytest.mark.parametrize("modules", [None, with_dropout(), with_batch_norm()])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedproto(collect=during)", "scaffold", "ditto"])
def test_a_run_is_the_same_to_the_bit(algorithm, modules):
    settings = {"data": make_clients(RAGGED), "modules": modules, "optimiser": "sgd"}
    plain, recorded, replayed = run_twice(algorithm, **settings)
    assert_equal(plain, recorded, 0.0)
    assert replayed["steps"] > 4
    assert replayed["passes"] > 1


def test_a_run_with_changing_cohorts_is_the_same_to_the_bit():
    settings = TROUBLE | {"data": make_clients(RAGGED), "clients": 5, "optimiser": "adam"}
    plain, recorded, replayed = run_twice("fedrep", **settings)
    assert_equal(plain, recorded, 0.0)
    assert replayed["steps"] > 0


class DrawsForItself(nn.Module):
    """A layer with dropout of its own, which the engines do not know about."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.3, self.training)


def test_a_module_that_draws_for_itself_is_replayed_in_evaluation_only():
    module = network(nn.Flatten(), nn.Linear(64, 8), DrawsForItself())
    plain, recorded, replayed = run_twice("fedavg", data=make_clients(RAGGED), modules=module)
    assert_equal(plain, recorded, 0.0)
    assert replayed["steps"] == 0
    assert replayed["passes"] > 0
