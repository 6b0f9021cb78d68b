"""The features of a feature map, which are computed once for all rows of a federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core.federation import Examples, Federation, Member
from fedproto.data.shared.feature_encoding import Words
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError
from fedproto.feature_maps import Compute, FeatureMap, Inputs, compute_features
from fedproto.runs.needed_rows import NeededRows

#: The map where none is named.
AUTO_MAP = Part("auto")


def build_map(chosen: Sequence[Part]) -> FeatureMap:
    """Return the feature map that is chosen, or `auto`."""
    (part,) = chosen or (AUTO_MAP,)
    return plugins.build("feature_map", part)


def add_fixed_features(federation: Federation, feature_map: FeatureMap) -> Federation:
    """Return the federation whose examples have the features of the map.

    Members that share a pool of inputs share its features. Raises ConfigError where the inputs are
    not for the map, or members would have different numbers of features.
    """
    pools = _FeaturePools(feature_map, federation.members)
    members = []
    first = federation.members[0]
    width = feature_map.count(describe_inputs(first))
    for member in federation.members:
        inputs = describe_inputs(member)
        if feature_map.count(inputs) != width:
            raise ConfigError(
                f"feature map {feature_map.name} has {width} values for client {first.name} and "
                f"{feature_map.count(inputs)} for client {member.name}: choose a map with the same "
                "number for all, such as hashed-ngrams or random-conv"
            )
        validation = member.validation
        if validation is not None:
            validation = pools.add_features(validation, inputs)
        members.append(
            replace(
                member,
                train=pools.add_features(member.train, inputs),
                test=pools.add_features(member.test, inputs),
                validation=validation,
            )
        )
    task = federation.task._replace(fixed=width)
    return replace(federation, members=tuple(members), task=task)


def describe_inputs(member: Member) -> Inputs:
    """Return what a member's inputs are."""
    return describe_preprocessed(member.preprocessing)._replace(shape=member.input_shape)


def describe_preprocessed(preprocessing: Preprocessing) -> Inputs:
    """Return what preprocessed inputs are."""
    encoding = preprocessing.encoding
    words = encoding.words if isinstance(encoding, Words) else None
    return Inputs(preprocessing.shape, words)


class _FeaturePools:
    """The features of pools of inputs."""

    def __init__(self, feature_map: FeatureMap, members: Sequence[Member]) -> None:
        self.map = feature_map
        self._needed = NeededRows(members)
        self._computes: dict[Inputs, Compute] = {}
        self._features: dict[tuple[int, Inputs], Tensor] = {}

    def add_features(self, examples: Examples, inputs: Inputs) -> Examples:
        """Return examples with the features of their pool."""
        key = (id(examples.x), inputs)
        if key not in self._features:
            if inputs not in self._computes:
                self._computes[inputs] = self.map.build(inputs)
            compute = partial(compute_features, self._computes[inputs])
            self._features[key] = self._needed.compute(compute, examples.x)
        return Examples(examples.x, examples.y, examples.rows, self._features[key])
