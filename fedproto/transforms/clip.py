import torch

from fedproto.config.options import PositiveFloat
from fedproto.core.tensors import align_axes
from fedproto.core.transforms import Context, Encoded, Transform
from fedproto.core.types import Tree
from fedproto.transforms import flatten_rows


def clip(*, norm: PositiveFloat = 1.0) -> Transform:
    """Bound the length of what a client sends: v ← v · min(1, norm / ||v||).

    ||v|| is the L2 norm of each row of the group's weight, over all tensors of the row together:
    of each class's prototype, or of a client's whole model. Of a model, v is the change from what
    the client received.
    """

    def encode(values: Tree, context: Context) -> Encoded:
        squares = [
            flatten_rows(value, context.row_axes).square().sum(-1) for value in values.values()
        ]
        length = torch.stack(squares).sum(0).sqrt()
        factor = norm / length.clamp(min=norm)
        clipped = {}
        for name, value in values.items():
            clipped[name] = value * align_axes(factor, value)
        return Encoded(clipped, {})

    return Transform(name="clip", encode=encode)
