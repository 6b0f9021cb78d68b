"""A trained client as ONNX: x, as the data set stores it -> features, logits and distances."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedproto.core import prototypes
from fedproto.core.closed_form import judge
from fedproto.errors import ConfigError, need
from fedproto.inference.export.manifest import ONNX
from fedproto.inference.model_building import first_line
from fedproto.inference.trained_client import TrainedClient

#: Of ONNX, late 2022: newer versions have nothing our models need, and older runtimes read these.
OPSET_VERSION = 18
IR_VERSION = 8


class _Graph(nn.Module):
    """What model.onnx computes, in float32: preprocessing, model, distances and the teacher.

    The distances are those to the prototypes of `classes_with_prototype`. The teacher's output are
    its log-probabilities over all classes, to be added to those of others with the client's weight.
    """

    mean: Tensor
    std: Tensor
    known_prototypes: Tensor | None
    vectors: Tensor
    bias: Tensor
    is_unknown: Tensor

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
        self.teacher = trained.teacher
        self.feature_map = trained.feature_map
        self.columns = _name_columns(trained)
        if self.teacher is not None:
            self.register_buffer("vectors", self.teacher.vectors.float())
            self.register_buffer("bias", self.teacher.bias.float())
            self.register_buffer("is_unknown", self.teacher.known == 0)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        inputs = (x / self.scale - self.mean) / self.std
        found: list[Tensor] = []
        if self.teacher is None or not self.teacher.is_alone:
            features, logits = self.module(inputs)
            found += [features, logits]
            if self.known_prototypes is not None:
                found.append(prototypes.distances(features, self.known_prototypes, "l2"))
        if self.teacher is not None and self.feature_map is not None:
            scores = self.feature_map(inputs) @ self.vectors.T + self.bias
            masked = scores.masked_fill(self.is_unknown, -torch.inf)
            found.append(judge(masked, self.teacher.scale))
        return tuple(found)


def _name_columns(trained: TrainedClient) -> dict[str, list[str]]:
    """Return the outputs whose columns are classes, with the names of these."""
    teacher = trained.teacher
    if teacher is not None and teacher.is_alone:
        return {"logits": [], "distances": [], "teacher": list(teacher.classes)}
    distances = list(classes_with_prototype(trained))
    columns = {"logits": list(trained.classes), "distances": distances}
    if teacher is not None:
        columns["teacher"] = list(teacher.classes)
    return columns


def classes_with_prototype(trained: TrainedClient) -> tuple[str, ...]:
    """Return the classes to whose prototypes the graph gives distances."""
    if trained.prototypes is None:
        return ()
    return trained.candidates("prototype", "all")


class OnnxGraph(NamedTuple):
    """What was written as ONNX."""

    content: bytes
    columns: dict[str, list[str]]  # the classes of each output that has one column per class
    teacher_obstacle: str | None = None  # why the teacher is not part of the graph


def build_onnx(trained: TrainedClient) -> OnnxGraph:
    """Return model.onnx; needs the packages onnx and onnxscript.

    A teacher whose feature map cannot be written as ONNX is left out.
    """
    for package in ("onnx", "onnxscript"):
        need(package, "'.[onnx]'", f"{ONNX}, which --no-onnx leaves out,")
    teacher = trained.teacher
    if teacher is None:
        return _build(trained)
    try:
        return _build(trained)
    except ConfigError as error:
        if teacher.is_alone:
            raise
        without = _build(replace(trained, teacher=None, feature_map=None))
        reason = first_line(error)
        obstacle = f"feature map {teacher.feature_map} cannot be written as ONNX ({reason})"
        return without._replace(teacher_obstacle=obstacle)


def _build(trained: TrainedClient) -> OnnxGraph:
    """Return the graph of a client; ConfigError if it cannot be written as ONNX."""
    graph = _Graph(trained).eval()
    outputs = ["features", "logits"]
    if graph.known_prototypes is not None:
        outputs.append("distances")
    if trained.teacher is not None:
        outputs = ["teacher"] if trained.teacher.is_alone else [*outputs, "teacher"]
    example = torch.zeros(2, *trained.preprocessing.shape)
    try:
        with _silence_exporter():
            return OnnxGraph(_export_graph(graph, example, outputs), graph.columns)
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
