"""Uploads as tests make them by hand."""

from torch import Tensor

from fedproto.core.types import Group, Tree, Upload


def prototype_upload(sums: Tensor, weight: Tensor, counts: Tree | None = None) -> Upload:
    """Return the upload of one group of prototypes, given weight × prototype per class."""
    return {"prototypes": Group({"prototypes": sums}, weight, counts or {})}
