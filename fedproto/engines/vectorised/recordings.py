"""Functions of tensors on a CPU, recorded once as a list of torch's operations and then replayed.

In a step of a small model, Python, `vmap` and automatic differentiation take a good part of the
time, and all they do is to call the same few hundred operations in every step. These are written
down, and from then on called directly: the same operations in the same order, and therefore the
same results to the bit. (A GPU has its own way, `gpu/graphs.py`.)

A replay cannot notice that a module would do something else this time. A function is therefore not
replayed if it draws random numbers from torch, reads a tensor's value in Python, or changes an
attribute of the module, nor if its first replay differs from the function itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from fedproto.core.rng import preserve_torch_generators
from fedproto.core.types import Tree

#: Recording and checking cost what some twenty replays save, so a layout must have come often.
CALLS_BEFORE_RECORDING = 10
#: Layouts that are remembered; where cohorts change, each round may bring new ones.
MAX_LAYOUTS = 256

#: What a function of tensors returns beside changing some in place: a tuple of tensors or nothing.
Result = TypeVar("Result", bound=tuple[Tensor, ...] | None)
#: Which function it is, and the names, shapes, strides and types of its tensors.
Layout = tuple[Any, ...]

#: Of operations whose results Python may act upon, or that draw random numbers.
_UNREPEATABLE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}
_PLAIN_TYPES = (bool, int, float, str, type(None))


class RecordedFunctions:
    """What has been recorded of a module's functions, by the layout of their tensors."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.functions: dict[Layout, RecordedFunction[Any]] = {}

    def clear(self) -> None:
        """Forget all recordings."""
        self.functions.clear()

    def find(
        self, name: Any, function: Callable[[Tree], Result], tensors: Tree
    ) -> RecordedFunction[Result]:
        """Return the function of a name for tensors of this layout."""
        layout: Layout = (name,)
        for key, value in tensors.items():
            layout += (key, value.shape, value.stride(), value.dtype)
        found = self.functions.pop(layout, None) or RecordedFunction(function, self.module)
        self.functions[layout] = found  # the last one is the one that was used last
        if len(self.functions) > MAX_LAYOUTS:
            self.functions.pop(next(iter(self.functions)))
        return found


class RecordedFunction(Generic[Result]):
    """Calls a function of tensors until it can be replayed instead.

    After some calls it is recorded with copies of the tensors. At the next call its replay with
    copies is compared with what the function does. `module` is what the function runs.
    """

    def __init__(self, function: Callable[[Tree], Result], module: nn.Module) -> None:
        self.function = function
        self.module = module
        self.calls = 0
        self.is_repeatable = True  # as far as is known
        self.recording: Recording[Result] | None = None
        self.is_checked = False

    def __call__(self, tensors: Tree) -> Result:
        """Return what the function returns for tensors of the layout that this was made for."""
        if self.is_checked:
            assert self.recording is not None
            return self.recording.replay(tensors)
        self.calls += 1
        if not self.is_repeatable or self.calls <= CALLS_BEFORE_RECORDING:
            return self.function(tensors)
        copies = {name: _copy(value) for name, value in tensors.items()}
        if self.recording is None:
            self._record(copies)
            return self.function(tensors)
        replayed = self._replay(copies)
        result = self.function(tensors)
        self.is_checked = self.is_repeatable and _are_equal(copies, replayed, tensors, result)
        self.is_repeatable = self.is_checked
        return result

    def _record(self, copies: Tree) -> None:
        """Record the function with copies of its tensors, if it can be repeated."""
        attributes = _list_attributes(self.module)
        try:
            with preserve_torch_generators(torch.device("cpu")):
                self.recording = Recording(self.function, copies)
        except Exception:  # a user's module may do anything; it goes on without a recording
            self.is_repeatable = False
        if _list_attributes(self.module) != attributes:
            self.is_repeatable = False

    def _replay(self, copies: Tree) -> Result | None:
        """Return what the first replay makes of copies; remember if it fails."""
        assert self.recording is not None
        try:
            return self.recording.replay(copies)
        except Exception:  # as above
            self.is_repeatable = False
            return None


def _list_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the plain values among the attributes of a module and of its layers.

    All functions set `training` themselves.
    """
    found = []
    for layer in module.modules():
        for name, value in vars(layer).items():
            if type(value) in _PLAIN_TYPES and name != "training":
                found.append((name, value))
    return found


def _copy(value: Tensor) -> Tensor:
    """Return a copy of a tensor with the same strides, of one that is expanded, too."""
    unexpanded = value
    for axis, stride in enumerate(value.stride()):
        if stride == 0:
            unexpanded = unexpanded.narrow(axis, 0, 1)
    copy = value.new_empty_strided(unexpanded.shape, unexpanded.stride())
    return copy.copy_(unexpanded).expand_as(value)


def _are_equal(
    copies: Tree,
    replayed: Sequence[Tensor] | None,
    tensors: Tree,
    result: Sequence[Tensor] | None,
) -> bool:
    """Return whether a replay made of copies what the function made of the tensors, to the bit."""
    ours = [*copies.values(), *(replayed or ())]
    theirs = [*tensors.values(), *(result or ())]
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# --- a recording


class Recording(Generic[Result]):
    """The operations that a function does with its tensors.

    Raises RuntimeError for a function that draws random numbers or reads values of tensors.
    """

    def __init__(self, function: Callable[[Tree], Result], tensors: Tree) -> None:
        recorder = _Recorder(list(tensors.values()))
        with recorder:
            result = function(tensors)
        self.program = recorder.make_program(result)

    @torch.no_grad()
    def replay(self, tensors: Tree) -> Result:
        """Do the operations again, with tensors of the same layout; return their result."""
        result: Result = self.program(*tensors.values())
        return result


class _Recorder(TorchDispatchMode):
    """Writes down the operations that torch does while it is active, below vmap and gradients."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants = nn.Module()
        self.nodes: dict[int, fx.Node] = {}  # by the identity of a tensor
        self.tensors: list[Tensor] = []  # kept, so that no other one gets its identity
        self.changes: set[fx.Node] = set()  # the calls that change tensors in place
        for number, value in enumerate(inputs):
            self._name(value, self.graph.placeholder(f"input_{number}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to hide this from torch's compiler, torch would import it, for a second."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _UNREPEATABLE_TAGS.intersection(operation.tags):
            raise RuntimeError(f"{operation} may give another result the next time")
        result = operation(*args, **kwargs)
        if args and _is_same_view(result, args[0]) and not operation._schema.is_mutable:
            self._name(result, self._find(args[0]))
            return result
        node = self._write_down(operation, args, kwargs)
        if isinstance(result, Tensor):
            self._name(result, node)
        elif isinstance(result, tuple | list):
            for place, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._name(part, self.graph.call_function(operator.getitem, (node, place)))
        return result

    def _write_down(self, operation: Any, args: Any, kwargs: Any) -> fx.Node:
        """Add the call of an operation to the graph.

        Where torch has a method for it, that is what is called: Python gets there faster.
        """
        nodes = map_aggregate(args, self._find)
        named_nodes = map_aggregate(kwargs, self._find)
        if nodes and isinstance(nodes[0], fx.Node) and _is_method(operation):
            name = operation._schema.name.removeprefix("aten::")
            node = self.graph.call_method(name, nodes, named_nodes)
        else:
            node = self.graph.call_function(operation, nodes, named_nodes)
        if operation._schema.is_mutable:
            self.changes.add(node)
        return node

    def _name(self, value: Tensor, node: fx.Node) -> None:
        """Remember which node stands for a tensor; one that was changed in place has its own."""
        if id(value) not in self.nodes:
            self.nodes[id(value)] = node
            self.tensors.append(value)

    def _find(self, value: Any) -> Any:
        """Return the node that stands for a tensor, and other values as they are.

        A tensor that is neither given nor computed, such as the clients' images, is a constant.
        """
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.nodes:
            name = f"constant_{len(self.nodes)}"
            self.constants.register_buffer(name, value, persistent=False)
            self._name(value, self.graph.get_attr(name))
        return self.nodes[id(value)]

    def make_program(self, result: tuple[Tensor, ...] | None) -> Callable[..., Any]:
        """Return a function of the inputs that does what was recorded and returns this result."""
        self.graph.output(map_aggregate(result, self._find))
        for node in reversed(self.graph.nodes):
            is_call = node.op in ("call_function", "call_method")
            if is_call and not node.users and node not in self.changes:
                self.graph.erase_node(node)
        # The function that torch writes needs the constants only; its graph is half a megabyte.
        written = fx.GraphModule(self.constants, self.graph)
        return partial(type(written).forward, self.constants)


def _is_method(operation: Any) -> bool:
    """Return whether torch's tensors have a method that takes what an operation takes."""
    schema = operation._schema
    name = schema.name.removeprefix("aten::")
    return name in vars(torch._C.TensorBase) and schema.arguments[0].name == "self"


def _is_same_view(result: Any, argument: Any) -> bool:
    """Return whether a result is its argument, seen in the same way, as after `detach`."""
    if not (isinstance(result, Tensor) and isinstance(argument, Tensor)):
        return False
    return (
        result.data_ptr() == argument.data_ptr()
        and result.shape == argument.shape
        and result.stride() == argument.stride()
        and result.dtype == argument.dtype
    )
