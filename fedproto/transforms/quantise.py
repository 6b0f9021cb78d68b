import torch
from torch import Tensor

from fedproto.core import rng
from fedproto.core.tensors import align_axes
from fedproto.core.transforms import Context, Encoded, Shapes, Transform
from fedproto.core.types import Tree
from fedproto.errors import ConfigError
from fedproto.transforms import flatten_rows

#: How far a quotient may lie from a whole number by rounding, in units of its type's precision.
ROUNDING = 4


def quantise(*, bits: int = 8) -> Transform:
    """Send codes of 8 or 4 bits, rounded at random such that their mean is right.

    With L = 2^(bits-1) - 1 and s = max |v| of each row and tensor, q = L v / s is rounded up with
    probability q - floor(q), else down; the server takes v = s q / L. E[v] is the value itself
    (Alistarh et al. 2017, QSGD). The codes travel as int8, or two per byte, with one s.
    """
    if bits not in (4, 8):
        raise ConfigError(f"transform quantise's bits must be 8 or 4, not {bits}")
    levels = 2 ** (bits - 1) - 1

    def encode(values: Tree, context: Context) -> Encoded:
        travelling: Tree = {}
        scales: Tree = {}
        for name, value in values.items():
            flat = flatten_rows(value, context.row_axes)
            scale = _largest(flat)
            draws = rng.uniform(rng.fold(context.key, name).to(flat.device), flat.numel())
            codes = _round(flat, scale, draws.reshape(flat.shape), levels)
            travelling[name] = codes.reshape(value.shape) if bits == 8 else _pack(codes)
            scales[f"{name}/scale"] = scale
        return Encoded(travelling, scales)

    def decode(values: Tree, side: Tree, shapes: Shapes) -> Tree:
        decoded = {}
        for name, value in values.items():
            scale = side[f"{name}/scale"]
            codes = _unpack(value, shapes[name]) if bits == 4 else value
            fractions = codes.to(scale.dtype) / levels  # 1 for the largest value, which is exact
            decoded[name] = fractions * align_axes(scale, codes)
        return decoded

    def check(values: Tree, side: Tree, shapes: Shapes) -> None:
        for name, value in values.items():
            scale = side[f"{name}/scale"]
            if not scale.isfinite().all() or (scale < 0).any():
                raise ValueError(f"{name}/scale must be finite and at least 0")
            codes = _unpack(value, shapes[name]) if bits == 4 else value
            if (codes < -levels).any():
                raise ValueError(f"{name} has codes below {-levels}")

    return Transform(name="quantise", encode=encode, decode=decode, check=check)


def _largest(flat: Tensor) -> Tensor:
    """Return the largest magnitude along the last axis; 0 if it is empty."""
    if not flat.shape[-1]:
        return flat.new_zeros(flat.shape[:-1])
    return flat.abs().amax(-1)


def _round(flat: Tensor, scale: Tensor, draws: Tensor, levels: int) -> Tensor:
    """Return the codes of values, int8; a value that a code stands for exactly has that code."""
    divisor = torch.where(scale > 0, scale, 1)
    exact = flat / divisor[..., None] * levels
    nearest = exact.round()
    noise = ROUNDING * torch.finfo(flat.dtype).eps * levels
    low = exact.floor()
    drawn = low + (draws < exact - low).to(flat.dtype)
    codes = torch.where((exact - nearest).abs() <= noise, nearest, drawn)
    return codes.clamp(-levels, levels).to(torch.int8)


def _pack(codes: Tensor) -> Tensor:
    """Return codes of four bits along the last axis as bytes: the first is the lower half."""
    shifted = (codes + 8).to(torch.uint8)
    if shifted.shape[-1] % 2:
        shifted = torch.nn.functional.pad(shifted, (0, 1), value=8)
    return shifted[..., 0::2] + shifted[..., 1::2] * 16


def _unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the codes that `_pack` was given; `shape` is that of one row's values."""
    low = packed % 16
    high = packed // 16
    codes = torch.stack([low, high], -1).to(torch.int8) - 8
    count = torch.Size(shape).numel()
    flat = codes.flatten(-2)[..., :count]
    return flat.reshape((*packed.shape[:-1], *shape))
