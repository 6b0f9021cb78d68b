"""Notices modules that draw random numbers of their own, which engines cannot repeat."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

from fedproto.config import plugins
from fedproto.config.settings import Config
from fedproto.core import rng
from fedproto.core.federation import Federation, Member
from fedproto.runs.from_settings import FROM_PYTHON

#: Rows that a module is tried on: a rare draw must show.
TRIED_ROWS = 8


def describe_own_draws(config: Config, federation: Federation) -> list[str]:
    """Return a sentence for each module that draws by itself in training, as `F.dropout` does.

    Our own models have dropout layers, whose draws are handed in (core/dropout.py), so only
    modules from Python and plug-ins are tried.
    """
    if not any(_is_from_outside(part.name) for part in config.model):
        return []
    tried: set[nn.Module] = set()
    sentences: dict[str, None] = {}
    for member in federation.members:
        if member.module in tried:
            continue
        tried.add(member.module)
        if draws_by_itself(member):
            sentences[
                f"{member.model} draws random numbers of its own in training, as F.dropout does: "
                "they differ between engines, and so do results; layers such as nn.Dropout, each "
                "used once, give the same results in all engines"
            ] = None
    return list(sentences)


def _is_from_outside(name: str) -> bool:
    return name == FROM_PYTHON.name or plugins.is_outside("model", name)


@torch.no_grad()
def draws_by_itself(member: Member) -> bool:
    """Return whether a member's module gives other outputs with other states of torch's generator.

    Its dropout layers keep everything. A module that fails in training has other troubles.
    """
    x = member.train.x[member.train.rows[:TRIED_ROWS]]
    keep = {}
    for layer in member.dropped:
        keep[layer.name] = torch.ones(len(x), *layer.shape, dtype=torch.bool, device=x.device)
    outputs = []
    member.module.train()
    try:
        with rng.preserve_torch_generators(x.device):
            for seed in (0, 1):
                rng.seed_torch_generators(seed)
                state = {name: value.clone() for name, value in member.initial.items()}
                features, logits = functional_call(member.module, state | keep, (x,))
                outputs.append(torch.cat([features, logits], 1))
    except Exception:  # of any kind: the module is somebody's own
        return False
    finally:
        member.module.eval()
    return not torch.equal(outputs[0], outputs[1])
