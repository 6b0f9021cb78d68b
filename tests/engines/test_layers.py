"""Single layers for a stack of clients compute what each client's own layer computes."""

import pytest
import torch
import torch.nn.functional as F
from helpers.engine_comparison import (
    RAGGED,
    assert_engines_agree,
    convolve_by_columns,
    largest_difference,
    make_clients,
    network,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, vmap

from fedproto.engines.gpu.implicit_convolutions import StackedConvolution
from fedproto.engines.vectorised import layer_support
from fedproto.engines.vectorised import layers as stacked


def outcome_alone(layer, x, weights):
    """Return the output of a layer, and the gradients of x and of each parameter."""
    x = x.clone().requires_grad_()
    parameters = list(layer.parameters())
    out = layer(x)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [x, *parameters])]


def assert_stacked_is_each_alone(layers, x):
    """Compare a stack of layers on inputs (clients, batch, ...) with each layer on its own."""
    module, _ = stacked.make_stackable(layers[0])
    assert type(module) is stacked.STACKED_LAYERS[type(layers[0])]
    parameters = [dict(layer.named_parameters()) for layer in layers]
    state = {
        name: torch.stack([each[name].detach() for each in parameters]) for name in parameters[0]
    }
    leaves = {name: value.requires_grad_() for name, value in state.items()}
    inputs = x.clone().requires_grad_()
    out = vmap(lambda state, x: functional_call(module, state, (x,)))(leaves, inputs)
    weights = torch.randn(out.shape, dtype=out.dtype)
    found = [out.detach(), *torch.autograd.grad((out * weights).sum(), [inputs, *leaves.values()])]
    for number, layer in enumerate(layers):
        for mine, alone in zip(
            found, outcome_alone(layer, x[number], weights[number]), strict=True
        ):
            assert torch.allclose(mine[number], alone, rtol=0, atol=1e-10)


small = settings(max_examples=25)
upto_3 = st.integers(1, 3)
windows = st.tuples(upto_3, upto_3)
paddings = st.tuples(st.integers(0, 2), st.integers(0, 2))


@small
@given(
    clients=upto_3,
    batch=upto_3,
    inside=st.integers(1, 2),
    outside=st.integers(1, 2),
    kernel=windows,
    stride=windows,
    padding=paddings,
    dilation=windows,
    bias=st.booleans(),
    groups=st.integers(1, 2),
)
def test_a_stacked_convolution_is_each_clients(
    clients, batch, inside, outside, kernel, stride, padding, dilation, bias, groups
):
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(
            inside * groups, outside * groups, kernel, stride, padding, dilation, groups, bias
        ).double()
        for _ in range(clients)
    ]
    assert_stacked_is_each_alone(
        layers, torch.randn(clients, batch, inside * groups, 8, 7).double()
    )


@small
@given(
    clients=upto_3,
    batch=upto_3,
    channels=upto_3,
    kernel=windows,
    stride=windows,
    ceil_mode=st.booleans(),
    pool=st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]),
)
def test_stacked_pooling_is_each_clients(clients, batch, channels, kernel, stride, ceil_mode, pool):
    torch.manual_seed(0)
    padding = (kernel[0] // 2, kernel[1] // 2)
    layers = [pool(kernel, stride, padding, ceil_mode=ceil_mode)] * clients
    assert_stacked_is_each_alone(layers, torch.randn(clients, batch, channels, 6, 7).double())


@pytest.mark.parametrize("size", [1, (2, 3), (None, 1)])
def test_stacked_adaptive_pooling_is_each_clients(size):
    assert_stacked_is_each_alone(
        [nn.AdaptiveAvgPool2d(size)] * 3, torch.randn(3, 2, 4, 5, 7).double()
    )


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d, (5, 3)),
        (nn.BatchNorm1d, (5, 3, 4)),
        (nn.BatchNorm2d, (5, 3, 4, 2)),
        (nn.BatchNorm3d, (5, 3, 2, 3, 2)),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
def test_batchnorm_over_some_rows_is_batchnorm_of_those_rows(norm, shape, options):
    """Five rows, of which the last two are padding; twice, with other running statistics."""
    torch.manual_seed(0)
    layer, x = norm(3, **options).double(), torch.randn(shape).double()
    module, told = stacked.make_stackable(layer)
    assert told == ["rows"]
    rows = torch.tensor([1, 1, 1, 0, 0]).double()
    inputs = x.clone().requires_grad_()
    weights = torch.randn(3, *shape[1:]).double()
    for _ in range(2):  # the second batch finds statistics that are not the first ones
        module.rows = rows
        out = module(inputs)[:3]
        found = [
            out.detach(),
            *torch.autograd.grad((out * weights).sum(), [inputs, *module.parameters()]),
        ]
        expected = outcome_alone(layer, x[:3], weights)
        assert torch.allclose(found[1][:3], expected[1])
        assert not found[1][3:].any()
        for mine, alone in zip(found[:1] + found[2:], expected[:1] + expected[2:], strict=True):
            assert torch.allclose(mine, alone)
        assert (
            largest_difference(
                dict(module.named_buffers()), dict(layer.named_buffers()) | {"rows": rows}
            )
            < 1e-12
        )


@pytest.mark.parametrize("fusing", [False, True], ids=["plain", "fusing"])
@small
@given(
    clients=upto_3,
    batch=upto_3,
    inside=upto_3,
    outside=upto_3,
    kernel=windows,
    stride=windows,
    padding=paddings,
    bias=st.booleans(),
)
def test_convolution_by_columns_is_each_clients(
    fusing, clients, batch, inside, outside, kernel, stride, padding, bias
):
    """As on a GPU; at stride 1 the backward pass is another one while a compiler traces it."""
    torch.manual_seed(0)
    if fusing:
        stride = (1, 1)
    x = torch.randn(clients, batch, inside, 6, 5).double().requires_grad_()
    weight = torch.randn(clients, outside, inside, *kernel).double().requires_grad_()
    shift = torch.randn(clients, outside).double().requires_grad_() if bias else None
    leaves = [leaf for leaf in (x, weight, shift) if leaf is not None]

    def outcome(out):
        torch.manual_seed(1)
        return [out, *torch.autograd.grad((out * torch.randn_like(out)).sum(), leaves)]

    if fusing:
        with layer_support.fusing():
            ours = outcome(stacked.convolve(x, weight, shift, stride, padding))
    else:
        ours = outcome(stacked.convolve(x, weight, shift, stride, padding))
    biases = [None] * clients if shift is None else shift
    alone = [F.conv2d(x[n], weight[n], biases[n], stride, padding) for n in range(clients)]
    for mine, theirs in zip(ours, outcome(torch.stack(alone)), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("fusing", [False, True], ids=["plain", "fusing"])
def test_the_gradient_of_convolution_by_columns_is_the_numerical_one(fusing, monkeypatch):
    monkeypatch.setattr(layer_support, "_fusing", fusing)
    torch.manual_seed(0)
    shapes = (2, 2, 2, 4, 5), (2, 3, 2, 3, 2), (2, 3)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(
        lambda x, w, b: stacked.convolve(x, w, b, (1, 1), (1, 0)), leaves
    )


def test_fusing_ends_with_its_block_even_after_an_error():
    with pytest.raises(ValueError, match="boom"), layer_support.fusing():
        assert layer_support.is_fusing()
        raise ValueError("boom")
    assert not layer_support.is_fusing()


def test_a_model_with_convolutions_by_columns_agrees(monkeypatch):
    monkeypatch.setattr(stacked._Convolution, "vmap", staticmethod(convolve_by_columns))
    modules = network(
        nn.Conv2d(1, 3, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2, bias=False)
    )
    assert_engines_agree("fedproto", modules=modules, data=make_clients(RAGGED))


def test_the_gpus_convolution_has_the_gradients_of_the_columns():
    """Its operations have a plain form for the CPU; this tests how they are combined."""
    leaves = [
        torch.rand(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 2, 2, 6, 5), (3, 4, 2, 3, 2), (3, 4))
    ]
    ours, theirs = StackedConvolution.apply(*leaves), stacked.convolve(*leaves, (1, 1), (0, 0))
    assert torch.allclose(ours, theirs)
    weights = torch.rand_like(ours)
    pairs = zip(
        *(torch.autograd.grad((out * weights).sum(), leaves) for out in (ours, theirs)), strict=True
    )
    assert all(torch.allclose(a, b) for a, b in pairs)


class _Scaled(layer_support.StackedFunction):
    """Multiplies by a number."""

    @staticmethod
    def forward(x, factor):
        return x * factor

    @staticmethod
    def vmap(info, in_dims, x, factor):
        assert in_dims == (0, None)
        return x * factor, 0


@pytest.mark.parametrize("levels", [1, 2])
def test_a_function_of_a_stack_is_the_same_by_the_short_way(levels, monkeypatch):
    by_apply = []
    original = _Scaled.apply
    monkeypatch.setattr(_Scaled, "apply", lambda *args: by_apply.append(1) or original(*args))

    def call(x):
        return _Scaled.call(x, 3.0)

    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    function = call
    for _ in range(levels):
        function = vmap(function)
    out = function(x)
    assert torch.equal(out, x * 3)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full_like(x, 3))
    assert len(by_apply) == (0 if levels == 1 else 1)


def test_a_function_of_a_stack_within_a_gradient_takes_torchs_way():
    x = torch.randn(2, 4, dtype=torch.float64)
    gradient = torch.func.grad(lambda x: vmap(lambda row: _Scaled.call(row, 3.0))(x).sum())(x)
    assert torch.equal(gradient, torch.full_like(x, 3))
