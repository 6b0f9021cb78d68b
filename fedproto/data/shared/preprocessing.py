"""From inputs as files and arrays hold them to what a model sees."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedproto.data.shared.channel_order import Order
from fedproto.data.shared.dicom import Window
from fedproto.data.shared.feature_encoding import Encoding
from fedproto.errors import DataError


@dataclass(frozen=True)
class Preprocessing:
    """Turns stored inputs into what the model sees: x ← (x / scale − mean) / std.

    `encoding` says how rows of a table, or texts, become numbers before all this. `channel_order`
    says where the channels were in the arrays that the model was trained on, and so how flat rows
    are read, and images whose shape fits both orders. `window` is for DICOM files, instead of their
    own.
    """

    shape: tuple[int, ...]  # of one input, channels first
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 1.0
    encoding: Encoding | None = None
    channel_order: Order = "first"
    window: Window | None = None

    def __call__(self, x: np.ndarray) -> Tensor:
        """Return inputs from outside as the model sees them: float32, (n, *shape).

        Raises DataError if they do not fit.
        """
        return self.normalise(self.reshape(x))

    def normalise(self, x: np.ndarray) -> Tensor:
        """Normalise a float32 array, (n, *shape), in place: a million images fill memory once."""
        per_channel = (-1,) + (1,) * (len(self.shape) - 1)
        mean = torch.tensor(self.mean).reshape(per_channel)
        std = torch.tensor(self.std).reshape(per_channel)
        result = torch.from_numpy(x)
        result.div_(self.scale)
        result.sub_(mean)
        result.div_(std)
        return result

    def reshape(self, x: np.ndarray) -> np.ndarray:
        """Return a float32 copy, (n, *shape), of inputs from outside.

        Rows may be flat, lack their single channel, or have the channels last. Raises DataError if
        they have another shape or hold values that do not fit.
        """
        x = np.asarray(x)
        channels_last = (*self.shape[1:], self.shape[0])
        accepted = [self.shape, (math.prod(self.shape),), channels_last]
        if self.shape[0] == 1:
            accepted.append(self.shape[1:])
        if x.shape[1:] not in accepted and x.shape in accepted:
            raise DataError(
                f"a single input of shape {x.shape} was given, but inputs need a leading axis: "
                "pass x[None] instead of x"
            )
        self._check_values(x)
        if x.shape[1:] not in accepted:
            raise DataError(f"inputs of shape {x.shape[1:]} were given, but {self.shape} is needed")
        if self.channel_order == "last" and x.ndim == 2:
            x = x.reshape(len(x), *channels_last)
        # Pillow and most files have the channels last.
        is_either = channels_last == self.shape
        if x.shape[1:] == channels_last and (not is_either or self.channel_order == "last"):
            x = np.moveaxis(x, -1, 1)
        return np.array(x, np.float32, order="C").reshape(len(x), *self.shape)

    def _check_values(self, x: np.ndarray) -> None:
        """Raise DataError unless inputs are finite numbers in the range of the data set."""
        if x.ndim < 2 or x.dtype.kind not in "fiub":
            raise DataError(
                f"inputs must be numbers with one row per sample, not {x.dtype} of shape {x.shape}"
            )
        if x.dtype.kind != "f":
            return
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(x.astype(np.float32, copy=False))
        if not is_finite.all():
            raise DataError("inputs hold a value that is not a finite number (NaN or infinite)")
        if self.scale > 1 and x.size and 0 < np.abs(x).max() <= 1:
            raise DataError(
                f"inputs are at most 1 in size, but values from 0 to {self.scale:g} are needed: "
                f"multiply by {self.scale:g}"
            )
