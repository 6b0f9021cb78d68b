"""A check that an algorithm which is declared additive is.

The uploads of an additive algorithm are summed as they arrive. If its `aggregate` needed single
uploads after all, a median would silently become a mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedproto.core.engine import errors_named
from fedproto.core.server import check_server_state
from fedproto.core.tensors import count_speakers, flatten_state, select_rows, sum_uploads
from fedproto.core.types import Algorithm, State, Tree, Upload
from fedproto.errors import ConfigError

#: How many uploads are aggregated singly and as their sum, to compare the results.
MAX_UPLOADS = 5
#: By how much the results may differ, as a fraction of the largest value.
TOLERANCE = 1e-3


class AdditivityCheck:
    """Compares, once in round 1, what a server makes of some uploads and of their sum."""

    def __init__(self, algorithm: Algorithm, server: State, round: int) -> None:
        self.algorithm = algorithm
        self.server = server
        is_summed = algorithm.additive or algorithm.summation is not None
        self.is_pending = is_summed and algorithm.repeatable and round == 1

    def __call__(self, uploads: Upload) -> None:
        """Raise ConfigError if the results differ; a single upload is not enough to compare."""
        count = min(count_speakers(uploads), MAX_UPLOADS)
        if not self.is_pending or count < 2:
            return
        self.is_pending = False
        some = select_rows(uploads, torch.arange(count))
        with errors_named(f"round 1, the server of {self.algorithm.name}"):
            separate = self._aggregate(some)
            summed = self._aggregate(sum_uploads(some))
        for name, value in summed.items():
            if not _is_close(separate[name], value):
                raise ConfigError(
                    f"algorithm {self.algorithm.name} is declared additive, but what it aggregates "
                    f"from {count} uploads differs from what it aggregates from their sum "
                    f"({name}): set additive=False"
                )

    def _aggregate(self, uploads: Upload) -> Tree:
        server = self.algorithm.aggregate(self.server, uploads)
        return flatten_state(check_server_state(server, "aggregate"))


def _is_close(separate: Tensor, summed: Tensor) -> bool:
    """Return whether two results are equal up to rounding; only finite values are compared."""
    if separate.shape != summed.shape:
        return False
    is_finite = separate.isfinite() & summed.isfinite()
    expected = summed[is_finite].double()
    if not len(expected):
        return True
    largest_difference = (separate[is_finite].double() - expected).abs().max()
    return bool(largest_difference <= TOLERANCE * expected.abs().max())
