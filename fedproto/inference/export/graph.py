"""A member as ONNX: x, as the data set stores it -> features, logits and, where there are prototypes, distances."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from fedproto.core import prototypes
from fedproto.errors import ConfigError, need
from fedproto.inference.export.manifest import ONNX
from fedproto.inference.export.models import first_line
from fedproto.inference.trained_client import Trained

OPSET, IR = (
    18,
    8,
)  # of ONNX, late 2022: newer ones have nothing our models need, and older runtimes read these


class _Graph(nn.Module):
    """What model.onnx computes, in float32: the preprocessing, the model, and the distances to the known prototypes."""

    mean: Tensor
    std: Tensor
    near: Tensor | None

    def __init__(self, member: Trained) -> None:
        super().__init__()
        self.module, self.scale = (
            copy.deepcopy(member.module).float(),
            float(member.preprocessing.scale),
        )
        shape = (-1,) + (1,) * (len(member.preprocessing.shape) - 1)
        self.register_buffer("mean", torch.tensor(member.preprocessing.mean).reshape(shape))
        self.register_buffer("std", torch.tensor(member.preprocessing.std).reshape(shape))
        names = near(member)
        self.register_buffer(
            "near", member.prototypes.over(names).values.float() if names else None
        )  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        features, logits = self.module((x / self.scale - self.mean) / self.std)
        if self.near is None:
            return features, logits
        return features, logits, prototypes.distances(features, self.near, "l2")


def near(member: Trained) -> tuple[str, ...]:
    """The classes to whose prototypes there are distances."""
    return () if member.prototypes is None else member.names("prototype", "all")


def onnx_of(member: Trained) -> bytes:
    for package in ("onnx", "onnxscript"):
        need(package, "'fedproto[onnx]'", f"{ONNX}, which --no-onnx leaves out,")
    graph = _Graph(member).eval()
    names = ["features", "logits", "distances"][: 2 if graph.near is None else 3]
    try:
        with _quiet():
            return _exported(graph, torch.zeros(2, *member.preprocessing.shape), names)
    except Exception as error:  # of any kind: a model from outside may do what no graph can
        name = member.about["model"]
        raise ConfigError(
            f"the model {name!r} cannot be written as ONNX: {first_line(error)}; leave {ONNX} out with --no-onnx"
        ) from error


def _exported(graph: nn.Module, example: Tensor, names: list[str]) -> bytes:
    batch = ({0: torch.export.Dim("batch")},)
    # In two steps: when it does both, torch.onnx goes on with a batch of fixed size where a model allows no other.
    program = torch.export.export(graph, (example,), dynamic_shapes=batch)
    written = torch.onnx.export(
        program,
        dynamo=True,
        input_names=["x"],
        output_names=names,
        dynamic_shapes=batch,
        opset_version=OPSET,
        verbose=False,
    )
    assert written is not None, "that is what dynamo=True gives"
    proto = written.model_proto
    _forget_origin(proto.graph)
    proto.ir_version = IR
    return proto.SerializeToString(deterministic=True)


def _forget_origin(graph: Any) -> None:
    """Notes on every node hold lines of source code and the paths of their files; IR 8 has no such notes."""
    del graph.metadata_props[:]
    for each in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del each.metadata_props[:]
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        for inner in (
            (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs
        ):  # of a branch
            _forget_origin(inner)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporter warns of packages nobody needs, and prints half a graph where it fails."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
