"""Pickles of arrays read without running code, and without letting a file describe memory to numpy.

CIFAR's python batches and PFLlib's files are pickles, which may call anything. Even numpy's own
functions are not safe to call for a file from outside: a data type that hides an object field makes
numpy take raw bytes for pointers. Therefore no function of numpy is called while a pickle is read.
Stand-ins take the arguments of numpy's functions, and arrays are made only from bytes of plain
numbers.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

import numpy as np

_NUMERIC = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248])")
_OBJECT = re.compile(r"[=|]?O8?")
_NUMPY_NAMES = ("ndarray", "dtype", "_reconstruct", "_frombuffer", "scalar")


def load_arrays(content: bytes, encoding: str = "ASCII") -> Any:
    """Return what a pickle of numbers, text, lists, dictionaries and numeric arrays holds.

    Arrays come back as `StoredArray`, which `np.asarray` turns into an array. Everything else is
    refused by an exception; a damaged file may raise one of any kind.
    """
    return _ArrayUnpickler(io.BytesIO(content), encoding=encoding).load()


class StoredArray:
    """An array of a pickle: numbers as raw bytes, or a list of Python objects."""

    def __init__(self) -> None:
        self.values: np.ndarray | list[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        """Take numpy's (version, shape, data type, is in Fortran's order, content)."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise UnpicklingError("the state of an array has five entries")
        _, shape, dtype, is_fortran, content = state
        if not isinstance(dtype, _DataType):
            raise UnpicklingError("an array lacks its data type")
        if isinstance(content, list) and dtype.is_object:
            if math.prod(_check_shape(shape)) != len(content):
                raise UnpicklingError("an array of objects has another shape than content")
            self.values = content
        else:
            self.values = _to_array(content, dtype, shape, "F" if is_fortran else "C")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not isinstance(self.values, np.ndarray):
            raise UnpicklingError("an array holds objects, but numbers are needed")
        return self.values if dtype is None else self.values.astype(dtype)

    def item(self) -> Any:
        """Return the only object of an array of one, as numpy's `item` does."""
        values = self.values if isinstance(self.values, list) else []
        if len(values) != 1:
            raise UnpicklingError("an array of one object is needed")
        return values[0]


class _DataType:
    """A data type by its code: `<f4`, or `O` for objects that the pickle itself lists."""

    def __init__(self, code: Any, *numpys_own: Any) -> None:
        self.code = _to_text(code)
        self.is_object = _OBJECT.fullmatch(self.code) is not None
        if not self.is_object and not _NUMERIC.fullmatch(self.code):
            raise UnpicklingError(f"its array is of type {self.code[:20]!r}, not of numbers")

    def __setstate__(self, state: Any) -> None:
        """Take the order of bytes; a structure with fields is refused."""
        if not isinstance(state, tuple) or len(state) < 5 or state[2:5] != (None, None, None):
            raise UnpicklingError("its array has fields, but plain numbers are needed")
        order = _to_text(state[1])
        if order not in ("<", ">", "=", "|"):
            raise UnpicklingError(f"its array has bytes in the order {order[:5]!r}")
        self.code = order + self.code.lstrip("<>=|")

    def numpy_type(self) -> np.dtype:
        """Return the type of numbers, or raise UnpicklingError for objects."""
        if self.is_object:
            raise UnpicklingError("its array holds raw bytes as objects, but numbers are needed")
        return np.dtype(self.code)


class _ArrayUnpickler(pickle._Unpickler):
    """Knows five names of numpy and one of Python, and calls a stand-in for each.

    It is Python's own unpickler, not the one in C, which allocates memory for as many values as a
    file claims to have.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name, or raise UnpicklingError."""
        if module.split(".")[0] == "numpy" and name in _NUMPY_NAMES:
            stand_ins: dict[str, Callable[..., Any]] = {
                "ndarray": StoredArray,
                "dtype": _DataType,
                "_reconstruct": self._reconstruct,
                "_frombuffer": self._from_buffer,
                "scalar": self._scalar,
            }
            return stand_ins[name]
        if (module, name) == ("_codecs", "encode"):  # how protocol 2 writes bytes
            return self._encode
        raise UnpicklingError(f"it asks for {module}.{name}, which a data file must not use")

    # Bound methods, since a pickle can set attributes of what `find_class` returns, but not of
    # these.

    def _reconstruct(self, kind: Any, shape: Any, code: Any) -> StoredArray:
        """Stand in for numpy's `_reconstruct`: return an array that waits for its state."""
        if kind is not StoredArray:
            raise UnpicklingError("it reconstructs something other than an array")
        return StoredArray()

    def _from_buffer(self, content: Any, dtype: Any, shape: Any, order: Any) -> StoredArray:
        """Stand in for numpy's `_frombuffer`, which newer pickles use."""
        stored = StoredArray()
        stored.__setstate__((1, shape, dtype, _to_text(order) == "F", content))
        return stored

    def _scalar(self, dtype: Any, content: Any) -> Any:
        """Stand in for numpy's `scalar`: return a plain Python number."""
        if not isinstance(dtype, _DataType):
            raise UnpicklingError("a number lacks its data type")
        return _to_array(content, dtype, (), "C").item()

    def _encode(self, text: Any, encoding: Any = "latin1") -> bytes:
        """Stand in for `_codecs.encode`: return the bytes that are written as text."""
        if not isinstance(text, str) or _to_text(encoding) not in ("latin1", "latin-1"):
            raise UnpicklingError("it encodes something other than bytes")
        return text.encode("latin1")


def _to_array(content: Any, dtype: _DataType, shape: Any, order: Any) -> np.ndarray:
    """Return raw bytes as an array of numbers, or raise UnpicklingError."""
    if not isinstance(content, (bytes, bytearray)):
        raise UnpicklingError("an array has content that is not bytes")
    sides = _check_shape(shape)
    kind = dtype.numpy_type()
    if math.prod(sides) * kind.itemsize != len(content):
        raise UnpicklingError(f"an array of shape {sides} and type {kind} has {len(content)} bytes")
    return np.frombuffer(bytes(content), kind).reshape(sides, order=order)


def _check_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple of whole numbers, or raise UnpicklingError."""
    sides = shape if isinstance(shape, tuple) else (shape,)
    if not all(type(side) is int and side >= 0 for side in sides):
        raise UnpicklingError("an array has a shape that is not made of whole numbers")
    return sides


def _to_text(value: Any) -> str:
    """Return the text of a word that Python 2 wrote as bytes."""
    if isinstance(value, bytes):
        return value.decode("latin1")
    if not isinstance(value, str):
        raise UnpicklingError(f"it has a {type(value).__name__} where a word is needed")
    return value
