"""Checks of the GPU's kernels that need no pytest, and the inputs they share with the tests."""

import torch
import torch.nn.functional as F

from fedproto.engines.gpu import fused_passes, implicit_convolutions, window_convolutions

LAYOUTS = {
    "as a matrix product leaves it": (0, 2, 1, 3, 4),  # channel by channel
    "as torch does": (0, 1, 2, 3, 4),
    "channels last": (0, 1, 3, 4, 2),
    "columns before rows": (0, 1, 2, 4, 3),
    "clients last": (1, 2, 3, 4, 0),
}


def random_in_layout(shape, order, dtype=torch.float64):
    """Return random values whose axes are in memory in this order, the last one contiguous."""
    back = [order.index(axis) for axis in range(len(shape))]
    return torch.randn([shape[axis] for axis in order], dtype=dtype).permute(back)


def layout_of(x, kernel, stride, padding):
    """Return the layout of windows that `window_convolutions.convolve` makes."""
    places = [(x.shape[3 + a] + 2 * padding[a] - kernel[a]) // stride[a] + 1 for a in (0, 1)]
    return [*x.shape[2:], *places, *kernel, *stride, *padding]


def outcome(out, leaves, seed=1):
    """Return the output, and the gradients of its product with random slopes."""
    torch.manual_seed(seed)
    # Not `randn_like`, whose order is that of the memory.
    slopes = torch.randn(out.shape, dtype=out.dtype)
    return [out, *torch.autograd.grad((out * slopes).sum(), leaves)]


#: clients, batch, channels, height, width, kernel, stride, padding
KERNEL_CASES = [
    (2, 3, 4, 8, 8, (3, 3), (2, 2), (1, 1)),
    (3, 1, 6, 1, 1, (3, 3), (1, 1), (1, 1)),
    (2, 2, 3, 9, 5, (5, 1), (2, 3), (3, 0)),
    (1, 2, 2, 3, 4, (1, 2), (1, 1), (2, 2)),
]


def check_kernels():
    """Compare kernels, launched as on a GPU but with tensors on a CPU, with their plain forms."""
    for dtype in (torch.float32, torch.float64):
        for n, b, c, h, w, *how in KERNEL_CASES:
            for order in list(LAYOUTS.values())[:3]:
                torch.manual_seed(0)
                x = random_in_layout((n, b, c, h, w), order, dtype)
                shape = layout_of(x, *how)
                seen = window_convolutions._unfold_plain(x, shape)
                assert torch.equal(window_convolutions._unfold(x, shape), seen)
            w = torch.randn_like(seen)
            assert_close_for(
                window_convolutions._fold(w, b, shape),
                window_convolutions._fold_plain(w, b, shape),
                dtype,
            )
            window_convolutions.MIN_FAR_PLACES = (
                0  # as if a client had more values than 32 bits can count
            )
            assert torch.equal(window_convolutions._unfold(x, shape), seen)
            assert_close_for(
                window_convolutions._fold(w, b, shape),
                window_convolutions._fold_plain(w, b, shape),
                dtype,
            )
            window_convolutions.MIN_FAR_PLACES = 2**31
    print("windows")
    for dtype in (torch.float32, torch.float64):
        for rows, values in ((37, 32), (3, 2048), (9, 1), (2, 1500)):
            x, dy = (torch.randn(rows, values, dtype=dtype) * 3 + 1 for _ in "xy")
            weight, bias = torch.randn(2, rows, dtype=dtype)
            for mine, theirs in zip(
                fused_passes._normalise(x, weight, bias, 1e-5),
                fused_passes._normalise_plain(x, weight, bias, 1e-5),
                strict=True,
            ):
                assert_close_for(mine, theirs, dtype)
            _, mean, variance = fused_passes._normalise_plain(x, weight, bias, 1e-5)
            given = (
                dy.T.contiguous().T,
                x,
                weight,
                mean,
                variance,
                1e-5,
            )  # a gradient may lie as it likes
            for mine, theirs in zip(
                fused_passes._normalise_back(*given),
                fused_passes._normalise_back_plain(*given),
                strict=True,
            ):
                assert_close_for(mine, theirs, dtype, 100)
        value, speed, gradient = torch.randn(3, 3, 30, 50, dtype=dtype)
        momentum, rate = torch.rand(2, 3, dtype=dtype)
        rate[1] = 0  # who has no batch left stays where it is
        new = momentum[:, None, None] * speed + gradient
        moved = value - rate[:, None, None] * new
        before = value[1].clone()
        fused_passes.descend(value, speed, gradient.mT.contiguous().mT, momentum, rate)
        assert_close_for(speed, new, dtype)
        assert_close_for(value, moved, dtype)
        assert torch.equal(value[1], before)
    fused_passes.normalise, fused_passes.normalise_back = (
        fused_passes._normalise,
        fused_passes._normalise_back,
    )
    for x in (torch.randn(6, 4).T, torch.randn(4, 9)[:, :6]):  # rows that do not lie in one piece
        leaves = [
            x.requires_grad_(),
            torch.randn(4, requires_grad=True),
            torch.randn(4, requires_grad=True),
        ]
        theirs = F.batch_norm(x.T, None, None, *leaves[1:], True, 0.1, 1e-5).T
        ours = outcome(fused_passes.NormalisedRows.apply(*leaves, 1e-5)[0], leaves)
        for mine, other in zip(ours, outcome(theirs, leaves), strict=True):
            assert_close_for(mine, other, torch.float32, 10)
    print("passes")
    for n, b, c, h, w, o, (i, j) in [(2, 3, 2, 6, 5, 5, (3, 2)), (3, 2, 1, 4, 4, 26, (4, 4))]:
        x, weight, bias = torch.randn(n, b, c, h, w), torch.randn(n, o, c, i, j), torch.randn(n, o)
        for some in (bias, None):
            assert_close_for(
                implicit_convolutions._forward(x, weight, some),
                implicit_convolutions._forward_plain(x, weight, some),
                x.dtype,
            )
        dy = torch.randn(n, b, o, h - i + 1, w - j + 1)
        assert_close_for(
            implicit_convolutions._input_gradient(dy, weight, h, w),
            implicit_convolutions._input_gradient_plain(dy, weight, h, w),
            x.dtype,
            10,
        )
    print("implicit")  # but for the weights' gradient, whose loop the interpreter does not run


def assert_close_for(mine, theirs, dtype, factor=1):
    tolerance = factor * (1e-5 if dtype == torch.float32 else 1e-12)
    assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
    assert torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance), (mine - theirs).abs().max()
