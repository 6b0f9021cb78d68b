"""Which clients share a stack, and modules with all kinds of layers."""

import pytest
import torch
import torch.nn.functional as F
from helpers.engine_comparison import (
    RAGGED,
    assert_engines_agree,
    assert_equal,
    largest_difference,
    make_clients,
    network,
    prepare,
    with_batch_norm,
)
from torch import nn

from fedproto.core.engine import Shard
from fedproto.engines.vectorised.architecture_groups import group_by_architecture


def group_ids(run):
    """Return the clients of each architecture group of a run."""
    groups = group_by_architecture([run.federation], Shard())
    return [_ids_of(group) for group in groups]


def _ids_of(group):
    return [client.member.id for client in group]


# --- users' modules


def test_equal_modules_with_other_weights_share_a_stack():
    modules = [with_batch_norm(seed) for seed in range(5)]
    (_, (run, result)) = assert_engines_agree(
        "fedproto", modules=modules, data=make_clients(RAGGED)
    )
    assert len(group_by_architecture([run.federation], Shard())) == 1
    assert largest_difference(result.states[0], result.states[1]) > 1e-3


class Scaled(nn.Module):
    """Multiplies by an attribute that is not a parameter."""

    def __init__(self, name, value):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 6)
        self.head = nn.Linear(6, 4)
        self.name = name
        if isinstance(value, torch.Tensor):
            self.register_buffer(name, value, persistent=False)
        else:
            setattr(self, name, value)

    def forward(self, x):
        features = torch.tanh(getattr(self, self.name) * self.first(x.flatten(1)))
        return features, self.head(features)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("scale", (1.0, 3.0)),
        pytest.param("_scale", (1.0, 3.0)),
        pytest.param("table", (torch.tensor(1.0), torch.tensor(3.0))),
    ],
    ids=["plain", "private", "buffer that is not saved"],
)
def test_modules_that_differ_in_an_attribute_are_two_stacks(name, values):
    """Otherwise one would be trained as the other."""
    modules = [Scaled(name, values[number % 2]) for number in range(5)]
    (_, (run, _)) = assert_engines_agree("fedproto", modules=modules, data=make_clients(RAGGED))
    assert group_ids(run) == [[0, 2, 4], [1, 3]]


def test_layers_with_other_settings_are_other_stacks():
    modules = [
        network(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(4), act)
        for act in (nn.ReLU(), nn.Tanh(), nn.ReLU())
    ]
    modules.append(network(nn.Conv2d(1, 2, 3, padding=1), nn.AvgPool2d(4), nn.ReLU()))
    modules.append(
        network(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.MaxPool2d(4), nn.ReLU())
    )
    (_, (run, _)) = assert_engines_agree("local", modules=modules, data=make_clients(RAGGED))
    assert group_ids(run) == [[0, 2], [1], [3], [4]]


class ByFunctions(nn.Module):
    """Calls convolution and pooling as functions, which are not in the table of layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.kernels = nn.Parameter(torch.randn(3, 1, 3, 3) / 3)
        self.conv = nn.Conv2d(3, 4, 2)
        self.fc = nn.Linear(16, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(F.conv2d(x, self.kernels, padding=1)), 2)
        x = F.avg_pool2d(self.conv(x), 2, 1)
        features = F.gelu(self.fc(x.flatten(1)))
        return features, self.head(features)


MODULES = {
    "functions": ByFunctions,
    "groups": lambda: network(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2)),
    "depthwise": lambda: network(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4, bias=False)
    ),
    "dilation": lambda: network(nn.Conv2d(1, 4, 3, dilation=2, padding=1), nn.ReLU()),
    "stride": lambda: network(nn.Conv2d(1, 4, (3, 2), stride=(2, 1), padding=(0, 1)), nn.ReLU()),
    "padding same": lambda: network(nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2)),
    "reflect": lambda: network(nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU()),
    "max pool": lambda: network(nn.Conv2d(1, 4, 3), nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)),
    "average pool": lambda: network(
        nn.Conv2d(1, 4, 3), nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)
    ),
    "adaptive pool": lambda: network(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((3, 2))),
    "dropout2d": lambda: network(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.5), nn.ReLU()),
    "nested": lambda: network(
        nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Sequential(nn.ReLU(), nn.Dropout(0.2)), nn.MaxPool2d(2)
        ),
        nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3)),
    ),
    "other layers": lambda: network(
        nn.Conv2d(1, 4, 3),
        nn.PReLU(4),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(4, 2, 2),
        nn.AdaptiveMaxPool2d(3),
    ),
    "one dimension": lambda: network(
        nn.Flatten(2), nn.Conv1d(1, 3, 5, 2), nn.BatchNorm1d(3), nn.MaxPool1d(2), nn.LayerNorm(15)
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_with_all_kinds_of_layers(name):
    assert_engines_agree(
        "fedproto", modules=MODULES[name](), data=make_clients(RAGGED), rounds=2, last_batch="keep"
    )


class View(nn.Module):
    def forward(self, x):
        return x.view(len(x), -1)


UNRULY = {
    "a view of a convolution": lambda: network(nn.Conv2d(1, 4, 3), View()),
    "GroupNorm": lambda: network(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)),
    "InstanceNorm": lambda: network(
        nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)
    ),
}


@pytest.mark.parametrize("name", UNRULY)
def test_modules_that_may_not_be_stackable_agree_too(name):
    """Whichever engine trains them in the end, the results are those of the reference engine."""
    settings = {"modules": UNRULY[name](), "data": make_clients(RAGGED), "rounds": 2}
    reference, run = (
        prepare("fedproto", engine, **settings) for engine in ("reference", "vectorised")
    )
    assert_equal((reference, reference.execute()), (run, run.execute()))


class ParameterNamedX(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.x = nn.Parameter(torch.randn(64, 6) / 8)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        features = torch.tanh(x.flatten(1) @ self.x)
        return features, self.head(features)


def test_a_parameter_may_be_named_x():
    """In evaluation its initial value was used, because the inputs had the same name."""
    assert_engines_agree("fedproto", modules=ParameterNamedX(), data=make_clients(RAGGED), lr=0.5)


# --- modules that look alike


class Plain(nn.Module):
    """Two layers of one shape, which may be the same layer."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Linear(64, 6)
        self.a = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)
        self.b = self.a if tied else nn.Linear(6, 6)

    def forward(self, x):
        features = self.b(torch.relu(self.a(torch.relu(self.inside(x.flatten(1))))))
        return features, self.head(features)


def doubling(module, arguments, output):
    return output * 2


def test_modules_with_other_hooks_are_other_groups():
    modules = [Plain() for _ in RAGGED]
    for module in modules[1:4]:
        module.a.register_forward_hook(doubling)
    assert_engines_agree("fedproto", modules=modules, data=make_clients(RAGGED))


@pytest.mark.parametrize("first", [True, False])
def test_tied_and_untied_layers_are_other_groups(first):
    modules = [Plain(tied=first if number % 2 else not first) for number in range(len(RAGGED))]
    assert_engines_agree("fedproto", modules=modules, data=make_clients(RAGGED))


def test_frozen_parameters_stay_as_they_are():
    module = Plain()
    module.a.requires_grad_(False)
    reference, vectorised = assert_engines_agree(
        "fedproto", modules=module, data=make_clients(RAGGED)
    )
    for _, result in (reference, vectorised):
        assert all(
            torch.equal(state["a.weight"], module.a.weight.detach().double())
            for state in result.states
        )
        assert not any(
            torch.equal(state["b.weight"], module.b.weight.detach().double())
            for state in result.states
        )
