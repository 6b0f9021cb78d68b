"""From the choices of a configuration to the algorithm that is run, with everything around it."""

from __future__ import annotations

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core.combination import with_combiner
from fedproto.core.types import Algorithm


def build_algorithm(algorithm: Part, combiner: Part) -> Algorithm:
    """Return an algorithm whose server combines uploads as chosen; ConfigError if it cannot."""
    return with_combiner(plugins.build("algorithm", algorithm), plugins.build("combiner", combiner))
