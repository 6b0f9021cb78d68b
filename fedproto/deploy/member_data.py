"""A member's own data and model, as a federation of one client."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedproto.config import plugins
from fedproto.config.choices import AUTO, complete, parse_choice, resolve_auto
from fedproto.config.options import Part, words
from fedproto.core.federation import Federation
from fedproto.core.files import explain_write_errors, write_atomically
from fedproto.data import DataFolders, Source
from fedproto.data.shared.feature_encoding import ENCODING, to_json
from fedproto.deploy.settings import MemberSettings, TrainingTerms
from fedproto.errors import RefusedByMember
from fedproto.partitions import PartitionRequest
from fedproto.partitions.classes import classes as select_classes
from fedproto.runs.assemble import assemble
from fedproto.runs.devices import device_of
from fedproto.runs.fixed_features import add_fixed_features, build_map


def build_federation(
    own: MemberSettings, terms: TrainingTerms, known: tuple[str, ...]
) -> Federation:
    """Return a federation of this one member.

    Its classes are those that all members `known`, and those that this member brings.
    """
    source = load_source(own)
    request = PartitionRequest(
        source.train.y, source.test.y, source.classes, 1, source.shots, np.random.default_rng(0), ""
    )
    rows = select_classes(request, names=own.classes)[0]
    labels = np.unique(source.train.y[rows.train])
    held = {source.classes[label] for label in labels}
    classes = tuple(name for name in source.classes if name in held)
    if not words(own.classes):
        _refuse_unlisted(classes, known)
    federation = assemble(
        [_restrict_classes(source, classes)],
        [rows._replace(name=own.title)],
        [_choose_model(own, source)],
        dim=terms.dim or None,
        seed=terms.seed,
        device=device_of(own.device),
        dtype=torch.float32,
        known=known,
        weights=Path(own.weights) if own.weights else None,
    )
    if not terms.feature_map:
        return federation
    return add_fixed_features(federation, build_map([terms.map_part()]))


def count_rows(federation: Federation) -> dict[str, int]:
    """Return how many training rows a federation's only member has of each of its classes."""
    labels = federation.members[0].train.y.cpu().numpy()
    counts = {}
    for label, count in zip(*np.unique(labels, return_counts=True), strict=True):
        counts[federation.classes[label]] = int(count)
    return counts


def _choose_model(own: MemberSettings, source: Source) -> Part:
    """Return the member's model with all options; `auto` is the one that the source names."""
    model = parse_choice("model", own.model)
    if model.name == AUTO:
        (model,) = resolve_auto(model, source.model)
    return complete("model", model, {}, {})


def _refuse_unlisted(names: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Refuse to send a class name that neither the federation nor the member's file lists."""
    for name in names:
        if name not in known:
            raise RefusedByMember(
                f"the data has the class {name!r}, which is not a class of the federation: "
                "name in `classes` those that this member takes part with"
            )


def load_source(own: MemberSettings) -> Source:
    """Return the member's data.

    How columns of a table or words of a text are encoded is kept from the first time on: the data
    may grow, but a model's inputs stay the same.
    """
    part = complete("dataset", parse_choice("dataset", own.data), {}, {})
    encoding = Path(own.state) / ENCODING
    if encoding.exists():
        part = replace(part, options=part.options | {"encoding": str(encoding)})
    source = plugins.build("dataset", part, DataFolders(own.data_dir))
    if source.encoding is not None and not encoding.exists():
        content = json.dumps(to_json(source.encoding)).encode()
        with explain_write_errors(encoding):
            encoding.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(encoding, content, private=True)
    return source


def _restrict_classes(source: Source, classes: tuple[str, ...]) -> Source:
    """Return the source with these classes only.

    Rows of other classes, which are not used, get the label of the first one.
    """
    new_label = {name: label for label, name in enumerate(classes)}
    relabel = np.array([new_label.get(name, 0) for name in source.classes])
    train = replace(source.train, y=relabel[source.train.y])
    test = replace(source.test, y=relabel[source.test.y])
    return replace(source, classes=classes, train=train, test=test, validation=None)
