import torch
from torch import Tensor

from fedproto.config.options import PositiveFraction
from fedproto.core.transforms import Context, Encoded, Shapes, Transform
from fedproto.core.types import Tree
from fedproto.transforms import flatten_rows


def top_k(*, fraction: PositiveFraction = 0.1) -> Transform:
    """Send only the values of largest magnitude, and their places.

    Of d values in each row and tensor, k = max(1, round(fraction d)) travel; the server takes 0 for
    the others. Of a model, these are changes from what the client received, so that the others
    stay as they were. The places are int32 and rise. Of magnitudes that are equal, or that differ
    by less than a part in some thousand (float32), the first ones travel.
    """

    def encode(values: Tree, context: Context) -> Encoded:
        kept: Tree = {}
        places: Tree = {}
        for name, value in values.items():
            flat = flatten_rows(value, context.row_axes)
            count = min(flat.shape[-1], max(1, round(fraction * flat.shape[-1])))
            order = _rank(flat).argsort(dim=-1, descending=True, stable=True)
            index = order[..., :count].sort(dim=-1).values
            kept[name] = flat.gather(-1, index)
            places[f"{name}/index"] = index.to(torch.int32)
        return Encoded(kept, places)

    def decode(values: Tree, side: Tree, shapes: Shapes) -> Tree:
        decoded = {}
        for name, value in values.items():
            rows = value.shape[:-1]
            index = side[f"{name}/index"].long()
            flat = value.new_zeros(*rows, torch.Size(shapes[name]).numel())
            decoded[name] = flat.scatter(-1, index, value).reshape((*rows, *shapes[name]))
        return decoded

    def check(values: Tree, side: Tree, shapes: Shapes) -> None:
        for name in values:
            index = side[f"{name}/index"]
            size = torch.Size(shapes[name]).numel()
            if (index < 0).any() or (index >= size).any():
                raise ValueError(f"{name}/index has places outside of 0 to {size - 1}")
            if (index.diff(dim=-1) <= 0).any():
                raise ValueError(f"the places in {name}/index must rise")

    return Transform(name="top-k", encode=encode, decode=decode, check=check)


def _rank(flat: Tensor) -> Tensor:
    """Return numbers that order values by magnitude; nearly equal ones have the same number.

    Weights of two pixels that never differ move alike, but for rounding errors, which differ
    between engines and devices. They must not decide.
    """
    steps_per_octave = torch.finfo(flat.dtype).eps ** -0.5
    return (flat.abs().log2() * steps_per_octave).round()
