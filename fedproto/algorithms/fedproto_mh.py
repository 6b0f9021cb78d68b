from dataclasses import replace
from functools import wraps
from typing import Any

from fedproto.algorithms.fedproto import fedproto
from fedproto.core.types import Algorithm


@wraps(fedproto)
def fedproto_mh(**options: Any) -> Algorithm:
    return replace(fedproto(**options), name="fedproto-mh", mixed=True)


fedproto_mh.__doc__ = """FedProto over a mix of architectures.

The mix is the data set's `-mh` preset, unless `--model` names another.
"""
