"""What a GPU does for convolutions, BatchNorm and SGD.

Plain forms are compared with torch's own functions, and kernels, interpreted on the CPU, with them.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import LAYOUTS, layout_of, outcome, random_in_layout
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, vmap

from fedproto.engines.gpu import fused_passes, implicit_convolutions, window_convolutions
from fedproto.engines.vectorised import layer_support
from fedproto.engines.vectorised import layers as stacked
from fedproto.engines.vectorised.masked_norm import MaskedNorm

quickly = settings(max_examples=60, deadline=None)


@st.composite
def cases(draw):
    """Images, and a window that fits at least once."""
    clients, batch, channels = (draw(st.integers(1, 3)) for _ in range(3))
    kernel, stride, padding = (tuple(draw(st.integers(low, 3)) for _ in "ij") for low in (1, 1, 0))
    sides = [draw(st.integers(max(1, kernel[a] - 2 * padding[a]), 7)) for a in (0, 1)]
    torch.manual_seed(draw(st.integers(0, 2**31)))
    return (
        random_in_layout(
            (clients, batch, channels, *sides), draw(st.sampled_from(list(LAYOUTS.values())))
        ),
        kernel,
        stride,
        padding,
    )


def torchs_windows(x, kernel, stride, padding):
    """(clients, batch·places, channels·taps) by torch's unfold."""
    columns = F.unfold(
        x.flatten(0, 1), kernel, padding=padding, stride=stride
    )  # (n·b, channels·taps, places)
    return columns.transpose(1, 2).reshape(len(x), -1, columns.shape[1])


# --- windows, out and back


def test_windows_of_an_image_by_hand():
    image = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]).view(1, 1, 1, 3, 3)
    got = window_convolutions.unfold(image, layout_of(image, (2, 2), (2, 1), (1, 0)))
    # Two rows of places (from −1 and 1 on) by two columns; taps from left to right, then down.
    assert got.tolist() == [[[0, 0, 1, 2], [0, 0, 2, 3], [4, 5, 7, 8], [5, 6, 8, 9]]]
    back = window_convolutions.fold(
        torch.ones_like(got), 1, layout_of(image, (2, 2), (2, 1), (1, 0))
    )
    assert back.tolist() == [[[[[1, 2, 1], [1, 2, 1], [1, 2, 1]]]]]  # how often each pixel is seen


@given(cases())
@quickly
def test_unfold_is_torchs(case):
    x, *how = case
    assert torch.equal(window_convolutions.unfold(x, layout_of(x, *how)), torchs_windows(x, *how))


@given(cases())
@quickly
def test_fold_is_torchs(case):
    x, kernel, stride, padding = case
    seen = torch.randn_like(torchs_windows(x, kernel, stride, padding))
    columns = seen.reshape(x.shape[0] * x.shape[1], -1, seen.shape[2]).transpose(1, 2)
    theirs = F.fold(columns, tuple(x.shape[3:]), kernel, padding=padding, stride=stride)
    ours = window_convolutions.fold(seen, x.shape[1], layout_of(x, kernel, stride, padding))
    assert ours.is_contiguous()  # (clients, channels, batch, height, width): as BatchNorm wants it
    assert torch.allclose(ours.transpose(1, 2), theirs.view(x.shape), rtol=0, atol=1e-12)


@given(cases())
@quickly
def test_fold_is_the_adjoint_of_unfold(case):
    """<unfold x, w> = <x, fold w>."""
    x, *how = case
    seen = window_convolutions.unfold(x, layout_of(x, *how))
    w = torch.randn_like(seen)
    back = window_convolutions.fold(w, x.shape[1], layout_of(x, *how)).transpose(1, 2)
    assert torch.allclose((seen * w).sum(), (x * back).sum(), rtol=1e-12, atol=1e-12)


def test_folding_windows_that_are_no_block_of_memory():
    how = layout_of(torch.empty(2, 3, 2, 5, 4), (3, 2), (2, 1), (1, 1))
    w = torch.randn(18, 45, 2, dtype=torch.float64).permute(2, 1, 0)[:, :, 3:15]
    assert not w.is_contiguous()
    assert torch.equal(
        window_convolutions.fold(w, 3, how), window_convolutions.fold(w.contiguous(), 3, how)
    )


# --- convolutions


def assert_close(ours, theirs, tolerance=1e-10):
    assert len(ours) == len(theirs)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.shape == other.shape
        assert torch.allclose(mine, other, rtol=tolerance, atol=tolerance), (
            number,
            (mine - other).abs().max(),
        )


@given(cases(), st.integers(1, 3), st.booleans())
@quickly
def test_a_convolution_is_each_clients_own(case, outputs, with_bias):
    x, kernel, stride, padding = case
    clients, _, channels = x.shape[:3]
    shapes = [(clients, outputs, channels, *kernel)] + ([(clients, outputs)] if with_bias else [])
    leaves = [x.requires_grad_()] + [
        torch.randn(s, dtype=x.dtype, requires_grad=True) for s in shapes
    ]
    weight, bias = leaves[1], leaves[2] if with_bias else None
    alone = torch.stack(
        [
            F.conv2d(x[n], weight[n], bias[n] if with_bias else None, stride, padding)
            for n in range(clients)
        ]
    )
    assert_close(
        outcome(window_convolutions.convolve(x, weight, bias, stride, padding), leaves),
        outcome(alone, leaves),
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=str)
def test_a_convolution_of_one_pixel_gives_only_the_gradients_that_are_wanted(layout, wanted):
    torch.manual_seed(0)
    leaves = [
        random_in_layout((3, 4, 2, 1, 1), layout),
        torch.randn(3, 5, 2, 3, 3).double(),
        torch.randn(3, 5).double(),
    ]
    for number in wanted:
        leaves[number].requires_grad_()
    some = [leaves[number] for number in wanted]
    x, weight, bias = leaves
    alone = torch.stack([F.conv2d(x[n], weight[n], bias[n], 2, 1) for n in range(3)])
    assert_close(
        outcome(window_convolutions.convolve(*leaves, (2, 2), (1, 1)), some), outcome(alone, some)
    )


@pytest.mark.parametrize(
    ("stride", "padding"), [((1, 1), (1, 1)), ((2, 1), (0, 2)), ((3, 2), (2, 0))], ids=str
)
def test_the_gradient_of_a_convolution_is_the_numerical_one(stride, padding):
    torch.manual_seed(0)
    shapes = (2, 2, 2, 4, 3), (2, 3, 2, 3, 2), (2, 3)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(
        lambda x, w, b: window_convolutions.convolve(x, w, b, stride, padding), leaves
    )


def test_a_convolution_leaves_images_channel_by_channel():
    """So that BatchNorm's rows are a view of them."""
    x, weight = torch.randn(2, 3, 4, 5, 5), torch.randn(2, 6, 4, 3, 3)
    assert (
        window_convolutions.convolve(x, weight, None, (1, 1), (1, 1))
        .transpose(1, 2)
        .is_contiguous()
    )


def test_a_convolution_of_images_that_all_clients_share():
    x, weight = (
        torch.randn(1, 3, 2, 4, 4).double().expand(3, -1, -1, -1, -1),
        torch.randn(3, 4, 2, 3, 3).double(),
    )
    alone = torch.stack([F.conv2d(x[0], each, None, 1, 1) for each in weight])
    assert torch.allclose(window_convolutions.convolve(x, weight, None, (1, 1), (1, 1)), alone)


def test_a_convolution_in_half_precision_is_torchs():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 4, 6, 6), torch.randn(2, 5, 4, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        ours = window_convolutions.convolve(x, weight, None, (1, 1), (1, 1))
        theirs = torch.stack([F.conv2d(x[n], weight[n], None, 1, 1) for n in range(2)])
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert torch.allclose(ours.float(), theirs.float(), rtol=0.02, atol=0.05)


SAMPLES = {
    "unfold": lambda: (
        window_convolutions.unfold,
        (torch.randn(2, 3, 2, 4, 5), [2, 4, 5, 2, 5, 3, 3, 2, 1, 1, 1]),
    ),
    "fold": lambda: (
        window_convolutions.fold,
        (torch.randn(2, 30, 18), 3, [2, 4, 5, 2, 5, 3, 3, 2, 1, 1, 1]),
    ),
    "normalise": lambda: (
        fused_passes.normalise,
        (torch.randn(4, 6), torch.randn(4), torch.randn(4), 1e-5),
    ),
    "normalise_back": lambda: (
        fused_passes.normalise_back,
        (torch.randn(4, 6), torch.randn(4, 6), torch.randn(4), torch.randn(4), torch.rand(4), 1e-5),
    ),
    "forward": lambda: (
        implicit_convolutions.operations.forward,
        (torch.randn(2, 3, 2, 5, 4), torch.randn(2, 3, 2, 3, 2), torch.randn(2, 3)),
    ),
    "input gradient": lambda: (
        implicit_convolutions.operations.input_gradient,
        (torch.randn(2, 3, 3, 3, 3), torch.randn(2, 3, 2, 3, 2), 5, 4),
    ),
    "weight gradient": lambda: (
        implicit_convolutions.operations.weight_gradient,
        (torch.randn(2, 3, 3, 3, 3), torch.randn(2, 3, 2, 5, 4), 3, 2, False),
    ),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_what_a_tracer_is_told_of_an_operation_is_so(sample):
    """Shapes, types and strides, and that nothing it is given is changed."""
    operation, arguments = sample()
    found = torch.library.opcheck(
        operation, arguments, test_utils=("test_schema", "test_faketensor")
    )
    assert set(found.values()) == {"SUCCESS"}


# --- BatchNorm, a row a channel


@pytest.mark.parametrize("shape", [(4, 6), (1, 2), (5, 33), (7, 1)], ids=str)
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_normalised_rows_are_batchnorms(shape, eps):
    torch.manual_seed(0)
    leaves = [torch.randn(s, dtype=torch.float64) * 3 + 1 for s in (shape, shape[:1], shape[:1])]
    x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    out, mean, variance = fused_passes.NormalisedRows.apply(x, weight, bias, eps)
    assert torch.allclose(mean, x.mean(1)) and torch.allclose(variance, x.var(1, correction=0))
    assert not mean.requires_grad and not variance.requires_grad
    if shape[1] == 1:  # torch refuses one value
        assert torch.allclose(out, bias[:, None])
        return
    theirs = F.batch_norm(x.T, None, None, weight, bias, True, 0.1, eps).T
    assert_close(outcome(out, leaves), outcome(theirs, leaves))


def test_the_gradient_of_normalised_rows_is_the_numerical_one():
    torch.manual_seed(0)
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (3,), (3,))]
    assert torch.autograd.gradcheck(
        lambda x, w, b: fused_passes.NormalisedRows.apply(x, w, b, 1e-3)[0], leaves
    )


def test_rows_reach_the_kernel_in_one_piece(monkeypatch):
    """The kernel reads a row's values one after the other, but some rows are not contiguous.

    Such as of images of one pixel, as a small convolution leaves them, or of part of a batch.
    """
    seen = []

    def looked_at(x, *others):
        seen.append(x.is_contiguous())
        return fused_passes._normalise_plain(x, *others)

    monkeypatch.setattr(fused_passes, "normalise", looked_at)
    one_pixel = torch.randn(1, 6, 4, 1, 1).transpose(1, 2).reshape(4, -1)
    first_images = torch.randn(2, 3, 8, 5, 5)[:, :, :4].reshape(6, -1)
    for x in (one_pixel, first_images):
        assert not x.is_contiguous()
        fused_passes.NormalisedRows.apply(x, torch.ones(len(x)), torch.zeros(len(x)), 1e-5)
    assert seen == [True, True]


def as_on_a_gpu(monkeypatch):
    """Have layers take their forms for a GPU, with torch's arithmetic; count BatchNorm's forms."""
    chosen = {"_normalise_rows": 0, "_apply_statistics": 0}
    monkeypatch.setattr(layer_support, "on_gpu", lambda x: True)
    for name in chosen:
        before = getattr(MaskedNorm, name)

        def counted(self, x, name=name, before=before):
            chosen[name] += 1
            return before(self, x)

        monkeypatch.setattr(MaskedNorm, name, counted)
    return chosen


def norms(clients, channels, **options):
    """BatchNorm layers of other weights and statistics each."""
    found = []
    for number in range(clients):
        layer = nn.BatchNorm2d(channels, **options).double()
        torch.manual_seed(number)
        for value in (*layer.parameters(), layer.running_mean):
            value.data = torch.randn(channels, dtype=torch.float64)
        layer.running_var = torch.rand(channels, dtype=torch.float64) + 0.5
        found.append(layer)
    return found


def stack_of(layers):
    state = [dict(layer.state_dict()) for layer in layers]
    return {name: torch.stack([each[name] for each in state]) for name in state[0]}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"momentum": 0.7, "eps": 0.01}], ids=str
)
@pytest.mark.parametrize("size", [(2, 5, 5), (6, 1, 1), (1, 2, 3)], ids=str)
def test_batchnorm_as_on_a_gpu_is_each_clients_own(size, options, layout, monkeypatch):
    """In training for several steps, then in evaluation, with gradients and running statistics."""
    chosen = as_on_a_gpu(monkeypatch)
    clients, channels = 3, 4
    alone = norms(clients, channels, **options)
    state = stack_of(alone)
    module, told = stacked.make_stackable(alone[0])
    assert told == ["rows"]

    def run(state, x):
        return functional_call(module, state, (x,))

    for number in range(4):
        training = number < 3
        module.train(training)
        torch.manual_seed(number)
        x = random_in_layout((clients, size[0], channels, *size[1:]), layout).requires_grad_()
        leaves = [x] + [state[name].requires_grad_() for name in ("weight", "bias")]
        ours = outcome(vmap(run)(state, x), leaves)
        torch.manual_seed(number)
        theirs_x = x.detach().clone().requires_grad_()
        outs = torch.stack([layer.train(training)(theirs_x[n]) for n, layer in enumerate(alone)])
        parameters = [p for layer in alone for p in (layer.weight, layer.bias)]
        out, dx, *slopes = outcome(outs, [theirs_x, *parameters])
        assert_close(ours, [out, dx, torch.stack(slopes[::2]), torch.stack(slopes[1::2])], 1e-9)
        for name, value in stack_of(alone).items():
            assert torch.allclose(state[name].double(), value.double(), rtol=1e-12, atol=1e-12), (
                name
            )
    assert chosen == {"_normalise_rows": 3, "_apply_statistics": 1}


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")], ids=str)
def test_frozen_weights_of_batchnorm_have_no_gradient_and_images_still_do(frozen, monkeypatch):
    as_on_a_gpu(monkeypatch)
    alone = norms(2, 3)
    state = stack_of(alone)
    module, _ = stacked.make_stackable(alone[0])
    x = torch.randn(2, 4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    free = [name for name in ("weight", "bias") if name not in frozen]
    leaves = [x] + [state[name].requires_grad_() for name in free]
    ours = outcome(vmap(lambda state, x: functional_call(module, state, (x,)))(state, x), leaves)
    outs = torch.stack([layer(x[n]) for n, layer in enumerate(alone)])
    out, dx, *slopes = outcome(
        outs, [x, *(getattr(layer, name) for name in free for layer in alone)]
    )
    assert_close(
        ours, [out, dx, *(torch.stack(slopes[2 * n : 2 * n + 2]) for n in range(len(free)))]
    )


@pytest.mark.parametrize("options", [{"track_running_stats": False}, {"affine": False}], ids=str)
def test_batchnorm_without_statistics_or_weights_as_on_a_gpu(options, monkeypatch):
    as_on_a_gpu(monkeypatch)
    alone = [nn.BatchNorm2d(3, **options).double() for _ in range(2)]
    module, _ = stacked.make_stackable(alone[0])
    state = stack_of(alone)
    for training in (True, True, False):
        x = torch.randn(2, 4, 3, 2, 2, dtype=torch.float64) * 3 + 1
        module.train(training)
        ours = vmap(lambda state, x: functional_call(module, state, (x,)))(state, x)
        theirs = torch.stack([layer.train(training)(x[n]) for n, layer in enumerate(alone)])
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    for name, value in stack_of(alone).items():
        assert torch.allclose(state[name].double(), value.double(), rtol=0, atol=1e-12), name


def test_a_network_as_on_a_gpu_is_each_clients_own(monkeypatch):
    """Convolutions, BatchNorm, pooling and a shortcut, in the layouts they leave to each other."""
    as_on_a_gpu(monkeypatch)
    # The first convolution is small, the others are not.
    monkeypatch.setattr(stacked, "MAX_SMALL_WEIGHTS", 60)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.second, self.again = nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6)
            self.short = nn.Conv2d(4, 6, 1, 2)
            self.pool = nn.AdaptiveAvgPool2d(1)

        def forward(self, x):
            x = F.relu(self.norm(self.first(x)))
            return self.pool(F.relu(self.again(self.second(x)) + self.short(x))).flatten(1)

    torch.manual_seed(0)
    alone = [Block().double() for _ in range(3)]
    module, _ = stacked.make_stackable(alone[0])
    state = stack_of(alone)
    names = [name for name, _ in alone[0].named_parameters()]
    x = torch.randn(3, 5, 1, 7, 6, dtype=torch.float64)
    leaves = [state[name].requires_grad_() for name in names]
    ours = outcome(vmap(lambda state, x: functional_call(module, state, (x,)))(state, x), leaves)
    outs = torch.stack([block(x[n]) for n, block in enumerate(alone)])
    own = [dict(block.named_parameters()) for block in alone]
    out, *slopes = outcome(outs, [each[name] for name in names for each in own])
    assert_close(
        ours, [out, *(torch.stack(slopes[3 * n : 3 * n + 3]) for n in range(len(names)))], 1e-9
    )


# --- the kernels themselves, by Triton's interpreter


def test_the_kernels_are_their_plain_forms():
    """Runs in another process, because Triton must be told to interpret before it is imported.

    Without a GPU, FEDPROTO_TRITON may name a folder into which `pip install --target` has put it.
    """
    folder = os.environ.get("FEDPROTO_TRITON")
    if folder is None and importlib.util.find_spec("triton") is None:
        pytest.skip("there is no Triton here: FEDPROTO_TRITON may name a folder that holds it")
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(tests.parent)]
    if folder is not None:
        paths.append(folder)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", "from helpers.kernels import *; check_kernels()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["windows", "passes", "implicit"]
