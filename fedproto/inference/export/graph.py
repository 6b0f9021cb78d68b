"""A trained client as ONNX: x, as the data set stores it -> features, logits and distances."""

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
from fedproto.inference.model_building import first_line
from fedproto.inference.trained_client import TrainedClient

#: Of ONNX, late 2022: newer versions have nothing our models need, and older runtimes read these.
OPSET_VERSION = 18
IR_VERSION = 8


class _Graph(nn.Module):
    """What model.onnx computes, in float32: preprocessing, model, and distances if there are any.

    The distances are those to the prototypes of `classes_with_prototype`.
    """

    mean: Tensor
    std: Tensor
    known_prototypes: Tensor | None

    def __init__(self, trained: TrainedClient) -> None:
        super().__init__()
        preprocessing = trained.preprocessing
        self.module = copy.deepcopy(trained.module).float()
        self.scale = float(preprocessing.scale)
        shape = (-1,) + (1,) * (len(preprocessing.shape) - 1)
        self.register_buffer("mean", torch.tensor(preprocessing.mean).reshape(shape))
        self.register_buffer("std", torch.tensor(preprocessing.std).reshape(shape))
        known = None
        if trained.prototypes is not None:
            names = classes_with_prototype(trained)
            known = trained.prototypes.over(names).values.float() if names else None
        self.register_buffer("known_prototypes", known)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        features, logits = self.module((x / self.scale - self.mean) / self.std)
        if self.known_prototypes is None:
            return features, logits
        return features, logits, prototypes.distances(features, self.known_prototypes, "l2")


def classes_with_prototype(trained: TrainedClient) -> tuple[str, ...]:
    """Return the classes to whose prototypes the graph gives distances."""
    if trained.prototypes is None:
        return ()
    return trained.candidates("prototype", "all")


def build_onnx(trained: TrainedClient) -> bytes:
    """Return the content of model.onnx; needs the packages onnx and onnxscript."""
    for package in ("onnx", "onnxscript"):
        need(package, "'.[onnx]'", f"{ONNX}, which --no-onnx leaves out,")
    graph = _Graph(trained).eval()
    outputs = ["features", "logits"]
    if graph.known_prototypes is not None:
        outputs.append("distances")
    example = torch.zeros(2, *trained.preprocessing.shape)
    try:
        with _silence_exporter():
            return _export_graph(graph, example, outputs)
    except Exception as error:  # of any kind: a plug-in may do what no graph can
        text = trained.about["model"]
        raise ConfigError(
            f"the model {text!r} cannot be written as ONNX: {first_line(error)}; "
            f"leave {ONNX} out with --no-onnx"
        ) from error


def _export_graph(graph: nn.Module, example: Tensor, outputs: list[str]) -> bytes:
    """Return the ONNX file of a module that takes batches like `example` of any size."""
    batch = ({0: torch.export.Dim("batch")},)
    # In two steps: if it does both, torch.onnx falls back to a fixed batch size without an error.
    program = torch.export.export(graph, (example,), dynamic_shapes=batch)
    written = torch.onnx.export(
        program,
        dynamo=True,
        input_names=["x"],
        output_names=outputs,
        dynamic_shapes=batch,
        opset_version=OPSET_VERSION,
        verbose=False,
    )
    assert written is not None, "that is what dynamo=True gives"
    proto = written.model_proto
    _remove_source_notes(proto.graph)
    proto.ir_version = IR_VERSION
    return proto.SerializeToString(deterministic=True)


def _remove_source_notes(graph: Any) -> None:
    """Remove the notes on nodes: they hold source lines and file paths, and IR 8 has no notes."""
    del graph.metadata_props[:]
    for part in (graph.node, graph.input, graph.output, graph.value_info, graph.initializer):
        for each in part:
            del each.metadata_props[:]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):  # the graph of a branch
                _remove_source_notes(attribute.g)
            for inner in attribute.graphs:
                _remove_source_notes(inner)


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Hide torch's warnings about unneeded packages, and the graphs it prints when it fails."""
    disabled_before = logging.root.manager.disable
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
        logging.disable(disabled_before)
