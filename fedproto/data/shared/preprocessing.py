"""From inputs as files and arrays hold them to what a model sees."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedproto.data.shared.feature_encoding import Encoding
from fedproto.errors import DataError


@dataclass(frozen=True)
class Preprocessing:
    """From inputs as a data set stores them to what the model sees: x ← (x / scale − mean) / std."""

    shape: tuple[int, ...]  # of one input, channels first
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 1.0
    encoding: Encoding | None = (
        None  # of rows of a table, or texts: how they become numbers, before all this
    )

    def __call__(self, x: np.ndarray) -> Tensor:
        """Of inputs that anybody may have given."""
        return self.normalised(self.shaped(x))

    def normalised(self, x: np.ndarray) -> Tensor:
        """In place, of a float32 array of this shape: a million images fill memory once."""
        shape = (-1,) + (1,) * (len(self.shape) - 1)
        mean, std = torch.tensor(self.mean).reshape(shape), torch.tensor(self.std).reshape(shape)
        return torch.from_numpy(x).div_(self.scale).sub_(mean).div_(std)

    def shaped(self, x: np.ndarray) -> np.ndarray:
        """A float32 copy, (n, *shape): rows may come flat, without their one channel, or with the channels last."""
        x = np.asarray(x)
        self._refuse(x)
        n, flat = len(x), math.prod(self.shape)
        if (
            x.shape[1:] == (*self.shape[1:], self.shape[0]) != self.shape
        ):  # as pillow and most files have images
            x = np.moveaxis(x, -1, 1)
        if x.shape[1:] not in (
            self.shape,
            (flat,),
            self.shape[1:] if self.shape[0] == 1 else self.shape,
        ):
            raise DataError(
                f"inputs of shape {x.shape[1:]} were given, where {self.shape} is wanted"
            )
        return np.array(x, np.float32, order="C").reshape(n, *self.shape)

    def _refuse(self, x: np.ndarray) -> None:
        if x.ndim < 2 or x.dtype.kind not in "fiub":
            raise DataError(
                f"inputs must be numbers with one row a sample, not {x.dtype} of shape {x.shape}"
            )
        with np.errstate(over="ignore"):
            finite = x.dtype.kind != "f" or np.isfinite(x.astype(np.float32, copy=False)).all()
        if not finite:
            raise DataError("inputs hold a value that is not a finite number (NaN or infinite)")
        if self.scale > 1 and x.dtype.kind == "f" and x.size and 0 < np.abs(x).max() <= 1:
            raise DataError(
                f"inputs are at most 1 in size, but those of 0 to {self.scale:g} are wanted: multiply by {self.scale:g}"
            )
