"""Where tensors are made: a machine without a GPU can still see that code stays on one device."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class no_other_device(TorchDispatchMode):
    """A block in which every operation must give tensors of one kind of device."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                assert value.device.type == self.kind, f"{func} makes a tensor on {value.device}"
        return result
