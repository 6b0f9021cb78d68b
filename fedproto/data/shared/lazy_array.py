"""Inputs that stay on disk: they look like an array and are read when rows are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class LazyArray:
    """An array whose rows are read by a function; it has what `Split.x` needs, and no more.

    `read` takes row numbers, (m,), and returns those rows, (m, *shape[1:]).
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        read: Callable[[np.ndarray], np.ndarray],
        dtype: Any = np.uint8,
    ) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._read = read

    @staticmethod
    def wrap(array: LazyArray | np.ndarray) -> LazyArray:
        """Return a memory-mapped array as a lazy one; a lazy array is returned as it is."""
        if isinstance(array, LazyArray):
            return array
        return LazyArray(array.shape, array.__getitem__, array.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read rows by number, slice, list of numbers or mask, as numpy does."""
        rows = np.arange(len(self))[index]
        values = np.asarray(self._read(np.atleast_1d(rows)))
        return values if rows.ndim else values[0]

    def subset(self, index: np.ndarray) -> LazyArray:
        """Return some of the rows, still unread."""
        rows = np.arange(len(self))[index]

        def read(wanted: np.ndarray) -> np.ndarray:
            return self._read(rows[wanted])

        return LazyArray((len(rows), *self.shape[1:]), read, self.dtype)
