"""A trained member as a folder of its own, which needs neither the run nor its data.

manifest.json            what the member is, what it takes and gives, and the SHA-256 of the other files
model.safetensors        its parameters and buffers, by name
prototypes.safetensors   the federation's prototypes, where its method has any; in the form of a run's
calibration.safetensors  how far held-out images lie, for "none of these"; where some were held out
encoding.json            how rows of a table, or texts, become numbers; where it was trained on such
model.onnx               x, as the data set stores it -> features, logits and, where there are prototypes, distances

Files of the machine that wrote it are not named: not the data set's folder, nor weights that training began with.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import logging
import math
import platform
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedproto import prototypes, randomness, registry
from fedproto.bank import PROTOTYPES, read_prototypes
from fedproto.encoding import Encoding, from_json, to_json
from fedproto.errors import ConfigError, DataError, FedProtoError, RunFolderError, need
from fedproto.models import Fit
from fedproto.options import FilePath, Part, options_of, parse
from fedproto.preparation import Preparation
from fedproto.runfolder import RunFolder, whole_folder, write_atomically
from fedproto.trained import WAYS, Trained, threshold
from fedproto.types import Tree

MANIFEST, WEIGHTS, CALIBRATION, ONNX = "manifest.json", "model.safetensors", "calibration.safetensors", "model.onnx"
ENCODING = "encoding.json"
FILES = (WEIGHTS, PROTOTYPES, CALIBRATION, ENCODING, ONNX)
KIND, VERSION = "member", 1
SHOWN_REJECT = 0.05  # the share of known images for which the manifest states thresholds
OPSET, IR = 18, 8  # of ONNX, late 2022: newer ones have nothing our models need, and older runtimes read these


# --- writing


def write_member(member: Trained, folder: Path, onnx: bool = True) -> None:
    """The folder appears with everything in it, or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} is not empty: name another folder with --to")
    rebuilt = _rebuilt_from_name(member)
    graph = _onnx(rebuilt) if onnx else None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as temporary:
            _fill(RunFolder(temporary), rebuilt, graph)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be made: {error}; name another folder with --to") from error


def _fill(folder: RunFolder, member: Trained, graph: bytes | None) -> None:
    folder.write_tensors(WEIGHTS, member.module.state_dict(), {})
    if member.prototypes is not None:
        tensors = {"prototypes": member.prototypes.values, "known": member.prototypes.known}
        folder.write_tensors(PROTOTYPES, tensors, {"classes": "\n".join(member.prototypes.classes)})
    if member.calibration:
        folder.write_tensors(CALIBRATION, {way: torch.tensor(v) for way, v in member.calibration.items()}, {})
    if member.preparation.encoding is not None:
        folder.write_json(ENCODING, to_json(member.preparation.encoding))
    if graph is not None:
        write_atomically(folder.path / ONNX, graph)
    files = {name: _sha256(folder.path / name) for name in FILES if (folder.path / name).exists()}
    folder.write_json(MANIFEST, _checked(_manifest(member, files), "the member"))


def _manifest(member: Trained, files: dict[str, str]) -> dict[str, Any]:
    prepared = member.preparation
    thresholds = {way: threshold(values, SHOWN_REJECT) for way, values in member.calibration.items()}
    return {
        "fedproto": KIND,
        "version": VERSION,
        "classes": list(member.classes),
        "own": list(member.own),
        "model": member.about["model"],
        "input": {
            "shape": list(prepared.shape),
            "mean": [float(value) for value in prepared.mean],
            "std": [float(value) for value in prepared.std],
            "scale": float(prepared.scale),
        },
        "dim": _tried(member)[0].shape[1],
        "distance": "l2",
        "calibration": {way: len(values) for way, values in member.calibration.items()},  # held-out images
        "thresholds": {way: v if math.isfinite(v) else None for way, v in thresholds.items()},  # JSON has no infinity
        **({"onnx": {"logits": list(member.classes), "distances": list(_near(member))}} if ONNX in files else {}),
        "about": member.about,
        "versions": {
            "fedproto": sys.modules[__package__].__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "files": files,
    }


def _rebuilt_from_name(member: Trained) -> Trained:
    """The member with its architecture built anew from its name alone, as it will be where the folder is read."""
    name, seen = str(member.about.get("model")), _tried(member)
    _refuse_broken(member, seen)
    try:
        model = _without_files(name)
        fit = Fit(member.preparation.shape, len(member.classes), seen[0].shape[1])
        again = replace(member, module=_built(model, fit, member.module.state_dict()))
        same = all(map(_close, _tried(again), seen))
    except FedProtoError as error:
        raise ConfigError(
            f"the model {name!r} cannot be built again from its name, as one that was given as a module cannot, so it "
            f"cannot be exported: {error}"
        ) from error
    if not same:
        raise ConfigError(f"the model {name!r}, built again from its name, gives other outputs: it cannot be exported")
    dataset = {"dataset": _without_folder(str(member.about["dataset"]))} if "dataset" in member.about else {}
    return replace(again, about=member.about | {"model": model} | dataset)


def _refuse_broken(member: Trained, seen: tuple[Tensor, Tensor]) -> None:
    """What `read_member` would refuse is not written: numbers of a training that diverged."""
    shared = [] if member.prototypes is None else [member.prototypes.values]
    finite = [bool(torch.isfinite(each).all()) for each in (*seen, *shared)]
    if not all(finite) or not all(np.isfinite(each).all() for each in member.calibration.values()):
        raise DataError("the member's outputs or prototypes are not finite: its training diverged, export another")


def _without_files(text: str) -> str:
    """The text of a model less the options that name files: its weights are exported, and need no others."""
    part = _one_part(text)
    options = options_of(registry.find("model", part.name))
    named = {name for name, option in options.items() if _names_a_file(option.kind)}
    return str(Part(part.name, {name: value for name, value in part.options.items() if name not in named}))


def _names_a_file(kind: Any) -> bool:
    return isinstance(kind, FilePath) or any(map(_names_a_file, typing.get_args(kind)))


def _without_folder(dataset: str) -> str:
    """`csv:/home/me/flowers.csv` is `csv:flowers.csv` to others."""
    base, colon, path = dataset.partition(":")
    return f"{base}:{PurePath(path).name}" if colon and PurePath(path).is_absolute() else dataset


# --- reading


def read_member(folder: Path) -> Trained:
    """A member that `write_member` wrote; refused where a file is not the one that was written.

    No file of the folder is code. A model of the form `package.module:function` is imported from where Python finds it.
    """
    manifest = _read_manifest(folder / MANIFEST)
    _check_files(folder, manifest["files"])
    shared = read_prototypes(folder / PROTOTYPES) if PROTOTYPES in manifest["files"] else None
    calibration = _read_calibration(folder / CALIBRATION) if CALIBRATION in manifest["files"] else {}
    encoding = _read_encoding(folder / ENCODING) if ENCODING in manifest["files"] else None
    preparation, state = _preparation(manifest["input"], encoding), _tensors(folder / WEIGHTS)
    classes, own = tuple(manifest["classes"]), tuple(manifest["own"])
    try:
        module = _built(manifest["model"], Fit(preparation.shape, len(classes), manifest["dim"]), state)
        member = Trained(module, preparation, classes, own, shared, calibration, manifest["about"])
        _refuse_other_sizes(member, manifest["dim"])
    except FedProtoError as error:
        raise DataError(f"{folder / MANIFEST} and the files beside it do not go together: {error}") from error
    return member


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise DataError(f"{path.parent} is no exported member: it holds no {MANIFEST}, as `fedproto export` writes it")
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("fedproto") != KIND:
        raise DataError(f"{path} is not the manifest of an exported member: its 'fedproto' must be {KIND!r}")
    version = manifest.get("version")
    if version != VERSION:
        raise DataError(f"{path} is of version {_shown(version)}, and this fedproto reads version {VERSION} only")
    return _checked(manifest, str(path))


def _preparation(given: dict[str, Any], encoding: Encoding | None) -> Preparation:
    if encoding is not None and given["shape"] != [encoding.width]:
        raise DataError(
            f"{ENCODING} makes inputs of shape ({encoding.width},), where {tuple(given['shape'])} is wanted"
        )
    return Preparation(tuple(given["shape"]), tuple(given["mean"]), tuple(given["std"]), given["scale"], encoding)


def _read_encoding(path: Path) -> Encoding:
    try:
        return from_json(json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error


def _check_files(folder: Path, files: dict[str, str]) -> None:
    for name, digest in files.items():
        try:
            found = _sha256(folder / name)
        except OSError as error:
            raise DataError(f"{folder / name}, which {MANIFEST} names, cannot be read: {error.strerror}") from error
        if found != digest:
            raise DataError(f"{folder / name} is damaged or of another export: its SHA-256 is not that in {MANIFEST}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tensors(path: Path) -> Tree:
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a safetensors file: {error}") from error


def _read_calibration(path: Path) -> dict[str, np.ndarray]:
    tensors = _tensors(path)
    for way, values in tensors.items():
        if way not in WAYS or values.dim() != 1 or not (values.is_floating_point() and torch.isfinite(values).all()):
            raise DataError(f"{path}: {way!r} must be one of {', '.join(WAYS)}, and a row of finite numbers")
    return {way: tensors[way].numpy() for way in WAYS if way in tensors}


def _refuse_other_sizes(member: Trained, dim: int) -> None:
    """A manifest may be wrong about its files, and a model from outside may have changed since."""
    features, logits = (each.shape[1] for each in _tried(member))
    if (features, logits) != (dim, len(member.classes)):
        wanted = f"{dim} and {len(member.classes)}"
        raise DataError(f"the model gives {features} features and {logits} logits, where {wanted} are wanted")
    if member.prototypes is not None and member.prototypes.values.shape[1] != dim:
        raise DataError(f"the prototypes have {member.prototypes.values.shape[1]} values, and the features {dim}")


# --- what a manifest must hold


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != "" and "\n" not in value  # prototypes.safetensors has one a line


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_name, value)) and len(set(value)) == len(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < sys.float_info.max


def _is_input(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(value.get(key), list) for key in ("shape", "mean", "std")):
        return False
    shape, sides = value["shape"], (value["mean"], value["std"])
    return (
        bool(shape)
        and all(map(_is_count, shape))
        and all(len(side) in (1, shape[0]) and all(map(_is_number, side)) for side in sides)
        and all(each > 0 for each in value["std"])
        and _is_number(value.get("scale"))
        and value["scale"] > 0
    )


def _is_files(value: Any) -> bool:
    digests = isinstance(value, dict) and all(
        isinstance(each, str) and re.fullmatch("[0-9a-f]{64}", each) for each in value.values()
    )
    return digests and {WEIGHTS} <= value.keys() <= set(FILES)


#: What `read_member` looks at; the other keys are for people.
_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "classes": (_is_names, "a list of different names of one line each"),
    "own": (_is_names, "a list of some of the classes"),
    "model": (_is_name, "a model's name and options, such as 'cnn(channels=18)'"),
    "input": (_is_input, "the inputs' `shape`, and `mean`, `std` and `scale`, which make x (x / scale - mean) / std"),
    "dim": (_is_count, "the number of features"),
    "distance": (lambda value: value == "l2", "'l2'"),
    "about": (lambda value: isinstance(value, dict), "an object"),
    "files": (_is_files, f"the SHA-256 of {WEIGHTS} and of what else there is of {', '.join(FILES[1:])}"),
}


def _checked(manifest: dict[str, Any], where: str) -> dict[str, Any]:
    for key, (accepts, wanted) in _WANTED.items():
        if key not in manifest:
            raise DataError(f"{where} lacks {key!r}: {wanted}")
        if not accepts(manifest[key]):
            raise DataError(f"{where}: {key!r} must be {wanted}, not {_shown(manifest[key])}")
    strangers = set(manifest["own"]) - set(manifest["classes"])
    if strangers:
        raise DataError(f"{where}: 'own' names {_shown(min(strangers))}, which is none of its classes")
    return manifest


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- the model, of its name and its weights


def _one_part(text: str) -> Part:
    parts = parse(text, "model")
    if len(parts) != 1 or parts[0].count is not None:
        raise ConfigError(f"{text!r} names several models, and a member has one")
    return parts[0]


def _built(model: str, fit: Fit, state: Tree) -> nn.Module:
    """The architecture with these weights, in eval mode; of the type that the weights have.

    `dim` was perhaps not asked for when the model was trained; ours do not care, but one from outside may project then.
    """
    part, misfits = _one_part(model), []
    for asked in (fit, fit._replace(dim=None)):
        module = _drawn(part, asked).to(_dtype(state)).eval()
        misfit = _misfit(module.state_dict(), state)
        if misfit is None:
            module.load_state_dict(state)
            return module
        misfits.append(misfit)
    raise DataError(f"the weights are not those of {part}: {misfits[0]}")


def _drawn(part: Part, fit: Fit) -> nn.Module:
    """A model with weights of no meaning, whose drawing leaves torch's generator as it was."""
    with randomness.torchs_own_put_aside(torch.device("cpu")):
        try:
            return registry.build("model", part, fit)
        except FedProtoError:
            raise
        except Exception as error:  # a layer larger than the memory, or whatever a model from outside may raise
            raise ConfigError(f"{part} refuses inputs of shape {fit.shape}: {_first_line(error)}") from error


def _dtype(state: Tree) -> torch.dtype:
    return next((value.dtype for value in state.values() if value.is_floating_point()), torch.float32)


def _misfit(wanted: Tree, found: Tree) -> str | None:
    """The first thing that tells the weights that were found from those of the model."""
    for name in sorted(wanted.keys() ^ found.keys()):
        return f"there is no {name}" if name in wanted else f"it has no {name}"
    for name, value in wanted.items():
        if (value.shape, value.dtype) != (found[name].shape, found[name].dtype):
            kinds = (f"{tuple(each.shape)} of {each.dtype}" for each in (found[name], value))
            return "{} is {}, where {} is wanted".format(name, *kinds)
    return None


def _tried(member: Trained) -> tuple[Tensor, Tensor]:
    """Features and logits of two inputs that any model takes: between 0 and 1, so that they are ids of words, too."""
    shape = member.preparation.shape
    try:
        return member.see_prepared(torch.linspace(0, 1, 2 * math.prod(shape)).reshape(2, *shape))
    except Exception as error:  # of any kind: the model may be from outside
        raise DataError(f"the model fails on inputs of shape {shape}: {_first_line(error)}") from error


def _close(a: Tensor, b: Tensor) -> bool:
    """Up to the order of sums, which may change with the way that weights lie in memory."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)


# --- ONNX


class _Graph(nn.Module):
    """What model.onnx computes, in float32: the preparation, the model, and the distances to the known prototypes."""

    mean: Tensor
    std: Tensor
    near: Tensor | None

    def __init__(self, member: Trained) -> None:
        super().__init__()
        self.module, self.scale = copy.deepcopy(member.module).float(), float(member.preparation.scale)
        shape = (-1,) + (1,) * (len(member.preparation.shape) - 1)
        self.register_buffer("mean", torch.tensor(member.preparation.mean).reshape(shape))
        self.register_buffer("std", torch.tensor(member.preparation.std).reshape(shape))
        names = _near(member)
        self.register_buffer("near", member.prototypes.over(names).values.float() if names else None)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        features, logits = self.module((x / self.scale - self.mean) / self.std)
        if self.near is None:
            return features, logits
        return features, logits, prototypes.distances(features, self.near, "l2")


def _near(member: Trained) -> tuple[str, ...]:
    """The classes to whose prototypes there are distances."""
    return () if member.prototypes is None else member.names("prototype", "all")


def _onnx(member: Trained) -> bytes:
    for package in ("onnx", "onnxscript"):
        need(package, "'fedproto[onnx]'", f"{ONNX}, which --no-onnx leaves out,")
    graph = _Graph(member).eval()
    names = ["features", "logits", "distances"][: 2 if graph.near is None else 3]
    try:
        with _quiet():
            return _exported(graph, torch.zeros(2, *member.preparation.shape), names)
    except Exception as error:  # of any kind: a model from outside may do what no graph can
        name = member.about["model"]
        raise ConfigError(
            f"the model {name!r} cannot be written as ONNX: {_first_line(error)}; leave {ONNX} out with --no-onnx"
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
        for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:  # of a branch
            _forget_origin(inner)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporter warns of packages nobody needs, and prints half a graph where it fails."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _first_line(error: BaseException) -> str:
    """Of where it began: the exporter wraps it in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".!")
