"""Normalisation, attention, recurrence and lookups: equal in both engines, or the reason why not.

All of torch's warnings are errors here: of operations that vmap runs for one client after the
other, of nested tensors, and of attention.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.engine_comparison import (
    Net,
    assert_engines_agree,
    assert_falls_back,
    make_clients,
    prepare,
)
from torch import nn

from fedproto.engines.reference import ReferenceEngine

pytestmark = pytest.mark.filterwarnings("error")

SETTINGS = {"clients": 3, "rounds": 1}


class Rows(nn.Module):
    """The rows of an image as tokens (n, 8, 8), for a layer."""

    def forward(self, x):
        return x.flatten(1).unflatten(1, (8, 8))


class Attention(nn.Module):
    """nn.MultiheadAttention over tokens, of which the last ones may be hidden."""

    def __init__(self, need_weights=False, masked=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.need_weights = need_weights
        self.masked = masked

    def forward(self, x):
        options = {"need_weights": self.need_weights}
        if self.masked:
            options["key_padding_mask"] = hide_last(x)
        return self.attention(x, x, x, **options)[0].mean(1)


class Encoder(nn.Module):
    """One encoder layer of torch, or several, over tokens, of which the last ones may be hidden."""

    def __init__(self, layers=0, masked=False, norm_first=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, layers) if layers else layer
        self.masked = masked

    def forward(self, x):
        hidden = hide_last(x) if self.masked else None
        return self.encoder(x, src_key_padding_mask=hidden).mean(1)


def hide_last(x):
    """Return which tokens are hidden: those at the end, one or two, as their values say."""
    count = 1 + (x.sum((1, 2)) > 10).long()
    return torch.arange(8) >= 8 - count[:, None]


class Product(nn.Module):
    """F.scaled_dot_product_attention of tokens with themselves."""

    def __init__(self, **options):
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.options = options

    def forward(self, x):
        heads = self.project(x).unflatten(-1, (2, 4)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(heads, heads, heads, **self.options)
        return seen.mean(2).flatten(1)


class Recurrent(nn.Module):
    """The last output of a recurrent layer over tokens."""

    def __init__(self, layer, **options):
        super().__init__()
        self.layer = layer(8, 6, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0][:, -1]


class Lookup(nn.Module):
    """Vectors of tokens that the values of an image number."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer(20, 6)

    def forward(self, x):
        vectors = self.layer(x.flatten(1).mul(10).long())
        return vectors.mean(1) if vectors.dim() == 3 else vectors


def make_net(*layers):
    """Return a module of these layers and linear ones after them."""
    torch.manual_seed(0)
    first = nn.Sequential(*layers, nn.Flatten())
    for layer in first.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    with torch.no_grad():
        width = first(torch.zeros(2, 1, 8, 8)).shape[1]
    return Net(nn.Sequential(first, nn.Linear(width, 6), nn.Tanh()), nn.Linear(6, 4))


STACKED = {
    "LayerNorm": lambda: make_net(Rows(), nn.LayerNorm(8)),
    "RMSNorm": lambda: make_net(Rows(), nn.RMSNorm(8)),
    "GroupNorm": lambda: make_net(Rows(), nn.GroupNorm(2, 8)),
    "attention": lambda: make_net(Rows(), Attention()),
    "attention and its weights": lambda: make_net(Rows(), Attention(need_weights=True)),
    "masked attention": lambda: make_net(Rows(), Attention(masked=True)),
    "encoder layer": lambda: make_net(Rows(), Encoder()),
    "masked encoder layer": lambda: make_net(Rows(), Encoder(masked=True, norm_first=True)),
    "masked encoder": lambda: make_net(Rows(), Encoder(layers=2, masked=True)),
    "product": lambda: make_net(Rows(), Product()),
    "causal product": lambda: make_net(Rows(), Product(is_causal=True)),
    "Embedding": lambda: make_net(Lookup(nn.Embedding)),
    "Conv1d": lambda: make_net(Rows(), nn.Conv1d(8, 4, 3)),
    "scaled images": lambda: make_net(nn.Upsample(scale_factor=2, mode="bilinear")),
}


@pytest.mark.parametrize("name", STACKED)
def test_engines_agree(name):
    settings = SETTINGS | {"data": make_clients((10, 7, 15)), "modules": STACKED[name]()}
    assert_engines_agree("fedproto", **settings)


NOT_STACKED = {
    "aten::lstm": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "aten::gru": lambda: Recurrent(nn.GRU),
    "aten::rnn_tanh": lambda: Recurrent(nn.RNN),
}


@pytest.mark.parametrize("operation", NOT_STACKED)
def test_recurrent_layers_are_left_to_the_reference_engine(operation):
    module = make_net(Rows(), NOT_STACKED[operation]())
    settings = SETTINGS | {"data": make_clients((10, 7, 15)), "modules": module}
    assert_falls_back(f"torch's vmap has no rule for {operation})", **settings)


def test_an_operation_that_vmap_runs_one_client_at_a_time_is_left_to_the_reference_engine():
    module = make_net(Lookup(nn.EmbeddingBag))
    settings = SETTINGS | {"data": make_clients((10, 7, 15)), "modules": module}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as where nobody turned warnings into errors
        run = prepare("fedproto", "vectorised", **settings)
    assert isinstance(run.engine, ReferenceEngine)
    assert "torch's vmap has no rule for aten::embedding_bag" in run.notices[0]
    assert_falls_back("aten::embedding_bag", **settings)


def test_attention_is_as_before_outside_of_a_stack():
    before = torch.backends.mha.get_fastpath_enabled()
    flash = torch.backends.cuda.flash_sdp_enabled()
    settings = SETTINGS | {"data": make_clients((10, 7, 15)), "modules": STACKED["attention"]()}
    prepare("fedproto", "vectorised", **settings).execute()
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert torch.backends.cuda.flash_sdp_enabled() == flash
