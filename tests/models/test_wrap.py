"""Modules that return logits only, as federations use them after `fedproto.wrap`."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.engine_comparison import assert_engines_agree
from torch import nn

import fedproto
from fedproto.config import plugin_trust
from fedproto.errors import ConfigError
from fedproto.models.shared.wrap import Wrapped

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.random((60, 1, 8, 8), np.float32)
LABELS = np.arange(60) % 3
WORDS = GENERATOR.integers(0, 20, (60, 5)).astype(np.float32)
CLIENTS = [(IMAGES[:40], LABELS[:40]), (IMAGES[20:], LABELS[20:])]


class Block(nn.Module):
    """A residual block as torchvision writes it, with one ReLU that is used twice."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.bn1(self.conv1(x)) + x)


class ResNet(nn.Module):
    """The shape of torchvision's ResNets: `fc` after pooling and flattening."""

    def __init__(self, channels=6, classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1)
        self.layer1 = nn.Sequential(Block(channels), Block(channels))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x):
        return self.fc(torch.flatten(self.avgpool(self.layer1(self.conv1(x))), 1))


class VGG(nn.Module):
    """The shape of torchvision's VGG and MobileNet: the last layer of a `classifier`."""

    def __init__(self, width=7, classes=3):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU())
        self.classifier = nn.Sequential(
            nn.Linear(12, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, classes)
        )

    def forward(self, x):
        return self.classifier(self.features(x))


class VisionTransformer(nn.Module):
    """The shape of torchvision's transformers: `heads.head`, over the first token."""

    def __init__(self, classes=4):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.norm = nn.LayerNorm(8)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(8, classes))

    def forward(self, x):
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1)
        mixed = tokens + tokens.mean(1, keepdim=True)
        return self.heads(self.norm(mixed)[:, 0])


class ForSequenceClassification(nn.Module):
    """The shape of transformers' models: ids in, an object with `logits` out."""

    def __init__(self, classes=2, output=SimpleNamespace):
        super().__init__()
        self.embeddings = nn.Embedding(20, 6)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(6, classes)
        self.output = output

    def forward(self, input_ids):
        pooled = self.dropout(torch.tanh(self.embeddings(input_ids).mean(1)))
        return self.output(loss=None, logits=self.classifier(pooled))


MODULES = {
    "fc": ResNet,
    "classifier.3": VGG,
    "heads.head": VisionTransformer,
}


# --- what a wrapped module returns


@pytest.mark.parametrize("head", MODULES)
def test_logits_are_the_same_to_the_bit_before_and_after(head):
    module = MODULES[head]().eval()
    inputs = torch.from_numpy(IMAGES[:5])
    before = module(inputs)
    features, logits = fedproto.wrap(module, head=head)(inputs)
    assert torch.equal(logits, before)
    assert torch.equal(module.get_submodule(head)(features), before)
    assert torch.equal(module(inputs), before), "the module itself stays as it is"


@pytest.mark.parametrize("output", [SimpleNamespace, dict, lambda loss, logits: (logits, loss)])
def test_logits_in_an_object_a_mapping_or_a_tuple_are_found(output):
    module = ForSequenceClassification(output=output).eval()
    ids = torch.from_numpy(WORDS[:4])
    whole = module(ids.long())
    if output is SimpleNamespace:
        expected = whole.logits
    else:
        expected = whole["logits"] if output is dict else whole[0]
    _, logits = fedproto.wrap(module, head="classifier", tokens=True)(ids)
    assert torch.equal(logits, expected)


def test_features_are_the_inputs_of_the_last_layer():
    module = VGG().eval()
    inputs = torch.from_numpy(IMAGES[:5])
    features, _ = fedproto.wrap(module, head="classifier.3")(inputs)
    assert torch.equal(features, module.classifier[:3](module.features(inputs)))


# --- heads and projections


def test_a_head_with_as_many_classes_is_kept_and_any_other_is_drawn():
    module = VGG(classes=3)
    kept = fedproto.wrap(module, head="classifier.3", classes=3)
    assert torch.equal(kept.head.weight, module.classifier[3].weight)
    drawn = fedproto.wrap(module, head="classifier.3", classes=5)
    assert drawn.head.weight.shape == (5, 7)
    assert not torch.equal(drawn.head.weight[:3], module.classifier[3].weight)


def test_a_projection_leads_to_dim():
    wrapped = fedproto.wrap(VGG(), head="classifier.3", dim=4)
    features, logits = wrapped(torch.from_numpy(IMAGES[:5]))
    assert (features.shape, logits.shape) == ((5, 4), (5, 3))
    names = [name for name, _ in wrapped.named_parameters() if not name.startswith("body.")]
    assert names == ["project.weight", "project.bias", "head.weight", "head.bias"]


def test_fitting_again_changes_nothing_and_another_dim_draws_anew():
    wrapped = fedproto.wrap(VGG(), head="classifier.3", classes=5, dim=4)
    state = copy.deepcopy(wrapped.state_dict())
    wrapped.fit(5, 4)
    assert all(torch.equal(value, state[name]) for name, value in wrapped.state_dict().items())
    wrapped.fit(5, None)
    assert wrapped.project is None and wrapped.head.weight.shape == (5, 7)


def test_the_type_and_a_missing_bias_of_the_head_are_kept():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 3, bias=False)).double()
    wrapped = fedproto.wrap(module, head="1", classes=5, dim=2)
    assert wrapped.head.bias is None and wrapped.head.weight.dtype == torch.float64


# --- runs


@pytest.mark.parametrize("head", MODULES)
def test_engines_agree_about_wrapped_modules(head):
    module = fedproto.wrap(MODULES[head](), head=head)
    settings = {"rounds": 2, "batch": 8, "last_batch": "drop"}
    assert_engines_agree("fedproto", data=CLIENTS, modules=module, clients=2, **settings)


def test_engines_agree_about_ids_and_weights_that_are_averaged():
    module = fedproto.wrap(ForSequenceClassification(), head="classifier", tokens=True)
    clients = [(WORDS[:40], LABELS[:40]), (WORDS[20:], LABELS[20:])]
    assert_engines_agree("fedper", data=clients, modules=module, clients=2, rounds=2)


def test_clients_with_modules_of_different_widths_are_told_to_set_dim_and_are_projected():
    modules = [fedproto.wrap(ResNet(), head="fc"), fedproto.wrap(VGG(), head="classifier.3")]
    with pytest.raises(ConfigError, match="VGG in 7: set dim, and models project to it"):
        fedproto.run(dataset=CLIENTS, model=modules, rounds=1)
    result = fedproto.run(dataset=CLIENTS, model=modules, rounds=1, dim=5)
    assert [client["model"] for client in result.clients] == ["ResNet", "VGG"]
    assert [state["head.weight"].shape for state in result.states] == [(3, 5), (3, 5)]


def test_a_new_head_depends_on_the_seed_alone():
    module = fedproto.wrap(ResNet(), head="fc")
    torch.manual_seed(1)
    first = fedproto.run(dataset=CLIENTS, model=module, rounds=1)
    torch.manual_seed(2)
    second = fedproto.run(dataset=CLIENTS, model=copy.deepcopy(module), rounds=1)
    for one, other in zip(first.states, second.states, strict=True):
        assert torch.equal(one["head.weight"], other["head.weight"])


def test_a_run_with_a_wrapped_module_is_classified_with_the_module_as_it_was_passed(tmp_path):
    module = fedproto.wrap(ResNet(), head="fc")
    result = fedproto.run(dataset=CLIENTS, model=module, rounds=1, out=tmp_path / "run", dim=5)
    classifier = fedproto.Classifier.of(tmp_path / "run", client=1, module=module, by="head")
    assert torch.equal(classifier.trained.module.head.weight, result.states[1]["head.weight"])
    assert len(classifier.predict(IMAGES[:4])) == 4


PLUGIN = '''
from torch import nn

import fedproto


def net(fit, *, hidden: int = 9):
    """Flatten the input; one hidden layer."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 7))
    return fedproto.wrap(module, head="3")
'''


def test_a_plugin_may_return_a_wrapped_module(tmp_path, monkeypatch):
    (tmp_path / "wrappednets.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    settings = {"dataset": "digits", "clients": 2, "shots": 5, "rounds": 1, "dim": 6}
    result = fedproto.run(model="wrappednets:net(hidden=8)", out="run", **settings)
    assert result.states[0]["head.weight"].shape == (10, 6)
    assert plugin_trust.is_trusted("wrappednets:net")
    classifier = fedproto.Classifier.of("run", client=0, by="head")
    assert isinstance(classifier.trained.module, Wrapped)


# --- what is refused


class Softmax(ResNet):
    """A module that does not end in its last layer."""

    def forward(self, x):
        return super().forward(x).log_softmax(1)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("head", "ResNet has no layer 'head': head must name its last layer, an nn.Linear; its"),
        ("conv1", "ResNet has Conv2d as its layer 'conv1'"),
        ("", "the last one first, are fc"),
        ("fc.weight", "ResNet has no layer 'fc.weight'"),
    ],
)
def test_a_head_that_is_not_a_linear_layer_is_refused(head, words):
    with pytest.raises(ConfigError) as caught:
        fedproto.wrap(ResNet(), head=head)
    assert words in str(caught.value)


def test_what_is_no_module_or_wrapped_already_is_refused():
    with pytest.raises(ConfigError, match="wrap takes a module, not str"):
        fedproto.wrap("resnet18", head="fc")
    with pytest.raises(ConfigError, match="wrapped already"):
        fedproto.wrap(fedproto.wrap(ResNet(), head="fc"), head="head")


def test_a_module_that_goes_on_after_its_head_is_refused():
    module = fedproto.wrap(Softmax(), head="fc")
    with pytest.raises(ConfigError, match="Softmax does not return what its layer 'fc' makes"):
        fedproto.run(dataset=CLIENTS, model=module, rounds=1)


@pytest.mark.parametrize("module", [ResNet(classes=3), ForSequenceClassification(classes=3)])
def test_a_module_that_returns_logits_only_is_told_of_wrap(module):
    if isinstance(module, ForSequenceClassification):
        forward = module.forward
        module.forward = lambda x: forward(x.flatten(1).long())
    with pytest.raises(ConfigError, match=r"logits only.*fedproto\.wrap\(module, head=\"fc\"\)"):
        fedproto.run(dataset=CLIENTS, model=module, rounds=1)
