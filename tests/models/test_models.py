"""The models: layer sizes, arithmetic, weights from files, and which client gets which model."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import fedproto
from fedproto.config import plugins
from fedproto.config.choices import parse_choices
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.errors import ConfigError
from fedproto.models import Classifier, Fit
from fedproto.models.resnet18 import Block
from fedproto.runs.assemble import deal
from fedproto.runs.experiment import Experiment

WEIGHTS = Path(__file__).parents[3] / "shared/data/weights/resnet18-tiny-imagenet-32.safetensors"


def build(name, shape, classes=10, dim=None, seed=0, **options):
    torch.manual_seed(seed)
    return plugins.build("model", Part(name, options), Fit(shape, classes, dim))


def refusal(name, shape, **options):
    """The one sentence with which a model refuses."""
    with pytest.raises(ConfigError) as caught:
        build(name, shape, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


# --- cnn


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        # 21,840, the paper's "430 thousand" / 20
        ({}, {"conv1": 260, "conv2": 5_020, "fc1": 16_050, "fc2": 510}),
        ({"channels": 18}, {"conv1": 260, "conv2": 4_518, "fc1": 14_450, "fc2": 510}),
        ({"channels": 22}, {"conv1": 260, "conv2": 5_522, "fc1": 17_650, "fc2": 510}),
        ({"width": 32}, {"conv1": 260, "conv2": 5_020, "fc1": 10_272, "fc2": 330}),
    ],
)
def test_cnn_layers_have_the_papers_sizes(options, sizes):
    model = build("cnn", (1, 28, 28), **options)
    named = dict(model.body.named_children()) | dict(model.head.named_children())
    assert {name: size(named[name]) for name in sizes} == sizes
    assert size(model) == sum(sizes.values())


def test_cnn_has_21840_parameters():
    assert size(build("cnn", (1, 28, 28))) == 21_840


@pytest.mark.parametrize("channels", [18, 20, 22])
def test_cnn_second_convolution_has_the_channels_asked_for(channels):
    model = build("cnn", (1, 28, 28), channels=channels)
    assert model.body.conv2.weight.shape == (channels, 10, 5, 5)
    assert model.body.fc1.weight.shape == (50, channels * 4 * 4)


def test_cnn_with_kernel_3_fits_the_papers_femnist():
    model = build("cnn", (1, 128, 128), classes=62, kernel=3)
    assert model.body.conv1.weight.shape == (10, 1, 3, 3)
    assert (model.body.fc1.in_features, model.body.fc1.out_features) == (16_820, 50)
    assert model(torch.zeros(2, 1, 128, 128))[1].shape == (2, 62)


def papers_network(p, x):
    """The paper's network without dropout, as at test time: conv-pool-relu twice, fc-relu-fc."""
    x = F.relu(F.max_pool2d(F.conv2d(x, p["body.conv1.weight"], p["body.conv1.bias"]), 2))
    x = F.relu(F.max_pool2d(F.conv2d(x, p["body.conv2.weight"], p["body.conv2.bias"]), 2))
    features = F.relu(F.linear(x.reshape(len(x), -1), p["body.fc1.weight"], p["body.fc1.bias"]))
    return features, F.linear(features, p["head.fc2.weight"], p["head.fc2.bias"])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 28, 28), {}),
        ((1, 28, 28), {"channels": 18}),
        ((3, 32, 20), {}),
        ((1, 40, 41), {"kernel": 3}),
    ],
)
def test_cnn_computes_the_papers_network(shape, options):
    model = build("cnn", shape, **options).eval()
    x = torch.randn(3, *shape)
    for found, wanted in zip(model(x), papers_network(model.state_dict(), x), strict=True):
        torch.testing.assert_close(found, wanted)


def test_cnn_dropout_is_active_in_training_only():
    x = torch.randn(3, 1, 28, 28)
    model = build("cnn", (1, 28, 28))
    assert not model.train()(x)[1].equal(model(x)[1])
    assert model.eval()(x)[1].equal(model(x)[1])
    still = build("cnn", (1, 28, 28), dropout=0).train()
    assert still(x)[1].equal(still(x)[1])


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((1, 8, 8), {}, "needs larger images than 8x8: use mlp, or a smaller kernel"),
        ((1, 15, 28), {}, "needs larger images than 15x28"),
        ((1, 28, 28), {"kernel": 29}, "needs larger images than 28x28"),
        ((64,), {}, "takes images (channels, height, width), not inputs of shape (64,): use mlp"),
        ((2, 3, 28, 28), {}, "takes images (channels, height, width)"),
        ((1, 28, 28), {"channels": 0}, "channels must be a whole number of at least 1"),
        ((1, 28, 28), {"dropout": 1.5}, "dropout must be a number"),
    ],
)
def test_cnn_refuses_what_it_cannot_take(shape, options, words):
    assert words in refusal("cnn", shape, **options)


def test_cnn_takes_the_smallest_image_that_leaves_a_pixel():
    assert build("cnn", (1, 16, 16))(torch.zeros(1, 1, 16, 16))[0].shape == (1, 50)


# --- mlp, and what all models share


@pytest.mark.parametrize("shape", [(64,), (1, 8, 8), (3, 4, 2, 5)])
def test_mlp_takes_any_shape(shape):
    model = build("mlp", shape, classes=7)
    features, logits = model(torch.randn(3, *shape))
    assert features.shape == (3, 50) and logits.shape == (3, 7)


def test_mlp_computes_two_hidden_layers_and_a_head():
    model = build("mlp", (2, 3), hidden=5, width=4)
    p, x = model.state_dict(), torch.randn(3, 2, 3)
    hidden = (x.flatten(1) @ p["body.fc1.weight"].T + p["body.fc1.bias"]).clamp(min=0)
    wanted = (hidden @ p["body.fc2.weight"].T + p["body.fc2.bias"]).clamp(min=0)
    features, logits = model(x)
    torch.testing.assert_close(features, wanted)
    torch.testing.assert_close(logits, wanted @ p["head.fc3.weight"].T + p["head.fc3.bias"])


#: Models that are made elsewhere: test_hf.py and test_timm.py.
ELSEWHERE = ("hf", "timm")
OWN_MODELS = [name for name in plugins.names("model") if name not in ELSEWHERE]
#: An input shape for each model; a new model needs a line here.
SHAPES = {
    "textcnn": (20,),
    "textmean": (20,),
    "cnn": (1, 28, 28),
    "mlp": (1, 8, 8),
    "resnet18": (3, 32, 32),
}


@pytest.mark.parametrize("name", OWN_MODELS)
def test_dim_projects_the_features_of_every_model(name):
    features, logits = build(name, SHAPES[name], dim=17).eval()(torch.randn(2, *SHAPES[name]))
    assert features.shape == (2, 17) and logits.shape == (2, 10)


@pytest.mark.parametrize("name", OWN_MODELS)
def test_a_models_own_dim_needs_no_projection(name):
    plain = build(name, SHAPES[name])
    own = plain.eval()(torch.randn(2, *SHAPES[name]))[0].shape[1]
    assert list(build(name, SHAPES[name], dim=own).state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("name", OWN_MODELS)
def test_every_model_is_a_body_and_a_head(name):
    model = build(name, SHAPES[name]).eval()
    x = torch.randn(2, *SHAPES[name])
    features, logits = model(x)
    assert features.equal(model.body(x)) and logits.equal(model.head(features))
    assert {key.split(".")[0] for key in model.state_dict()} == {"body", "head"}


# --- resnet18


def norm(name):
    return [
        f"{name}.{end}"
        for end in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ]


def torchvision_keys():
    """The names in torchvision's resnet18, in order, as its weights files have them."""
    keys = ["conv1.weight", *norm("bn1")]
    for layer in (1, 2, 3, 4):
        for block in (f"layer{layer}.0", f"layer{layer}.1"):
            keys += [
                f"{block}.conv1.weight",
                *norm(f"{block}.bn1"),
                f"{block}.conv2.weight",
                *norm(f"{block}.bn2"),
            ]
            if layer > 1 and block.endswith("0"):
                keys += [f"{block}.downsample.0.weight", *norm(f"{block}.downsample.1")]
    return [*keys, "fc.weight", "fc.bias"]


def plain_keys(model):
    return [key.removeprefix("body.").removeprefix("head.") for key in model.state_dict()]


def test_resnet18_has_torchvisions_names_and_number_of_parameters():
    model = build("resnet18", (3, 224, 224), classes=1000)
    assert plain_keys(model) == torchvision_keys()
    assert len(plain_keys(model)) == 122
    assert size(model) == 11_689_512


def batch_norm(p, name, x, training=False):
    running = (None, None) if training else (p[f"{name}.running_mean"], p[f"{name}.running_var"])
    return F.batch_norm(x, *running, p[f"{name}.weight"], p[f"{name}.bias"], training=training)


def basic_block(p, name, x, stride, training=False):
    """He et al. 2016, figure 5 left: conv-bn-relu-conv-bn, plus x (projected if need be), relu."""
    y = F.relu(
        batch_norm(
            p, f"{name}bn1", F.conv2d(x, p[f"{name}conv1.weight"], None, stride, 1), training
        )
    )
    y = batch_norm(p, f"{name}bn2", F.conv2d(y, p[f"{name}conv2.weight"], None, 1, 1), training)
    if f"{name}downsample.0.weight" in p:
        x = F.conv2d(x, p[f"{name}downsample.0.weight"], None, stride)
        x = batch_norm(p, f"{name}downsample.1", x, training)
    return F.relu(y + x)


def unlike_the_start(module):
    """Batch normalisation starts as the identity; random values show whether it is used at all."""
    for name, value in module.state_dict().items():
        if "bn" in name or "downsample.1" in name:
            value.copy_(torch.rand(value.shape) + 0.5)
    return module


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("in_channels", "out_channels", "stride"), [(4, 4, 1), (4, 8, 2), (4, 8, 1), (4, 4, 2)]
)
def test_resnet18_block_computes_the_papers_block(in_channels, out_channels, stride, training):
    torch.manual_seed(0)
    block = unlike_the_start(Block(in_channels, out_channels, stride)).double().train(training)
    x = torch.randn(3, in_channels, 6, 6, dtype=torch.float64)
    wanted = basic_block(block.state_dict(), "", x, stride, training)
    torch.testing.assert_close(block(x), wanted)


def whole_resnet18(p, x, strides):
    x = F.relu(batch_norm(p, "bn1", F.conv2d(x, p["conv1.weight"], None, strides[0], 3)))
    x = F.max_pool2d(x, 3, strides[1], 1)
    for layer in (1, 2, 3, 4):
        x = basic_block(p, f"layer{layer}.0.", x, 1 if layer == 1 else 2)
        x = basic_block(p, f"layer{layer}.1.", x, 1)
    features = x.mean((2, 3))
    return features, features @ p["fc.weight"].T + p["fc.bias"]


@pytest.mark.parametrize("strides", [(1, 4), (2, 2)])
def test_resnet18_computes_the_papers_network_with_both_strides(strides):
    model = unlike_the_start(build("resnet18", (3, 32, 32), strides=strides)).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    stored = dict(zip(plain_keys(model), model.state_dict().values(), strict=True))
    for found, wanted in zip(model(x), whole_resnet18(stored, x, strides), strict=True):
        torch.testing.assert_close(found, wanted)
    assert model(x)[0].shape == (2, 512)


@pytest.mark.parametrize(("strides", "side"), [((1, 4), 32), ((2, 2), 16), ("1,4", 32)])
def test_resnet18_strides_are_those_of_conv1_and_the_pool(strides, side):
    body = build("resnet18", (3, 32, 32), strides=strides).body
    x = torch.zeros(1, 3, 32, 32)
    assert body.conv1(x).shape[-1] == side
    assert body.maxpool(body.conv1(x)).shape[-1] == 8  # both give the stages equal images


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((64,), {}, "takes images and two strides, not inputs of shape (64,)"),
        ((3, 32, 32), {"strides": "2"}, "takes images and two strides"),
        ((3, 32, 32), {"strides": "1,2,3"}, "takes images and two strides"),
        ((3, 32, 32), {"strides": "0,2"}, "strides must be a whole number of at least 1"),
    ],
)
def test_resnet18_refuses_what_it_cannot_take(shape, options, words):
    assert words in refusal("resnet18", shape, **options)


# --- resnet18: weights from a file


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A weights file with torchvision's names, in half precision, for other classes."""
    path = tmp_path_factory.mktemp("weights") / "made.safetensors"
    model = unlike_the_start(build("resnet18", (3, 32, 32), classes=200, seed=1))
    tensors = {
        key: value.half()
        for key, value in zip(plain_keys(model), model.state_dict().values(), strict=True)
    }
    save_file(tensors, path)
    return path


def layers_equal(model, other):
    """The names of tensors that are equal in both, without the counters of batches."""
    pairs = zip(plain_keys(model), model.state_dict().values(), other, strict=True)
    return {
        key
        for key, a, b in pairs
        if a.is_floating_point() and a.shape == b.shape and a.equal(b.float())
    }


FLOATS = {key for key in torchvision_keys() if not key.endswith("num_batches_tracked")}


@pytest.mark.parametrize("fresh", ["fc", "conv1,bn1,fc", "conv1, bn1, layer4, fc"])
def test_resnet18_reads_all_layers_from_the_file_but_the_fresh_ones(stored, fresh):
    model = build("resnet18", (3, 32, 32), weights=str(stored), fresh=fresh)
    untouched = {key for key in FLOATS if key.split(".")[0] in fresh.replace(" ", "").split(",")}
    file = load_file(stored)
    assert layers_equal(model, [file[key] for key in torchvision_keys()]) == FLOATS - untouched
    drawn = build("resnet18", (3, 32, 32)).state_dict().values()  # the same seed without the file
    assert untouched <= layers_equal(model, drawn)


def test_resnet18_with_nothing_fresh_reads_the_head_too(stored):
    model = build("resnet18", (3, 32, 32), classes=200, weights=str(stored), fresh="")
    assert model.head.fc.weight.equal(load_file(stored)["fc.weight"].float())


def test_resnet18_that_projects_reads_the_rest_from_the_file(stored):
    model = build("resnet18", (3, 32, 32), dim=16, weights=str(stored))
    assert model.body.layer4[1].conv2.weight.equal(
        load_file(stored)["layer4.1.conv2.weight"].float()
    )


def test_resnet18_reads_pth_files_as_torchvision_ships_them(stored, tmp_path):
    torch.save(load_file(stored), tmp_path / "made.pth")
    a, b = (
        build("resnet18", (3, 32, 32), weights=str(path))
        for path in (stored, tmp_path / "made.pth")
    )
    assert all(
        first.equal(second) for first, second in zip(a.parameters(), b.parameters(), strict=True)
    )


CONV1 = torch.zeros(64, 3, 7, 7)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {"conv2.weight": CONV1},
            "hold no tensor 'conv1.weight'; torchvision's resnet18 names are accepted",
        ),
        ({"conv1.weight": CONV1}, "hold no tensor 'bn1.weight'"),
        (
            {"conv1.weight": CONV1[:, :1]},
            "conv1.weight has shape (64, 1, 7, 7), the model wants (64, 3, 7, 7)",
        ),
    ],
)
@pytest.mark.parametrize(("end", "save"), [("safetensors", save_file), ("pth", torch.save)])
def test_resnet18_weights_that_do_not_fit_are_refused(tmp_path, tensors, words, end, save):
    path = tmp_path / f"made.{end}"
    save({key: value.contiguous() for key, value in tensors.items()}, path)
    assert words in refusal("resnet18", (3, 32, 32), weights=str(path))


def test_resnet18_weights_of_another_number_of_classes_are_refused_unless_fc_is_fresh(stored):
    message = refusal("resnet18", (3, 32, 32), weights=str(stored), fresh="conv1")
    assert "fc.weight has shape (200, 512), the model wants (10, 512)" in message


def test_resnet18_with_an_unknown_fresh_layer_is_refused(stored):
    # A typing error would else load a layer that was meant to stay random.
    assert "did you mean 'conv1'?" in refusal(
        "resnet18", (3, 32, 32), weights=str(stored), fresh="cnv1,fc"
    )


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "content", [[1, 2], torch.zeros(3), RunsCode], ids=["list", "tensor", "code"]
)
def test_resnet18_refuses_pth_files_of_other_things_and_runs_no_code(tmp_path, content):
    victim = tmp_path / "victim"
    torch.save(content(victim) if content is RunsCode else content, tmp_path / "made.pth")
    message = refusal("resnet18", (3, 32, 32), weights=f"{tmp_path}/made.pth")
    assert "made.pth' are not a .safetensors or .pth file of named tensors" in message
    assert not victim.exists()


@pytest.mark.parametrize("name", ["made.safetensors", "made.pth", "made"])
@pytest.mark.parametrize("raw", [b"", b"text", None], ids=["empty", "text", "absent"])
def test_resnet18_refuses_files_that_hold_no_weights(tmp_path, name, raw):
    if raw is not None:
        (tmp_path / name).write_bytes(raw)
    words = "cannot be read: " if raw is None else "are not a .safetensors or .pth file"
    assert f"{name}' {words}" in refusal("resnet18", (3, 32, 32), weights=str(tmp_path / name))


@pytest.mark.skipif(not WEIGHTS.exists(), reason="no ResNet18 weights in ../shared/data")
def test_resnet18_loads_the_real_file():
    model = build("resnet18", (3, 32, 32), weights=str(WEIGHTS))
    file = load_file(WEIGHTS)
    wanted = [file.get(key, torch.zeros(0)) for key in torchvision_keys()]
    assert layers_equal(model, wanted) == FLOATS - {"fc.weight", "fc.bias"}
    assert model.eval()(torch.randn(2, 3, 32, 32))[1].isfinite().all()


# --- which client gets which model, and which initial weights


def federation(**options):
    defaults = {"dataset": "digits", "clients": 4, "shots": 5, "stdev": 0, "device": "cpu"}
    return Experiment.prepare(configure(defaults | options)[0]).federation


def equal_trees(a, b):
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def test_equal_architectures_share_their_initial_weights():
    a, b, c, d = federation(model="mlp(hidden=30),mlp,mlp(hidden=30),mlp(hidden=100)").members
    assert equal_trees(a.initial, c.initial)
    # 100 is the default, so this is the same architecture.
    assert equal_trees(b.initial, d.initial)
    assert a.initial["body.fc1.weight"].shape != b.initial["body.fc1.weight"].shape


def test_initial_weights_depend_on_the_seed_and_on_nothing_else():
    first, again, other = (
        federation(model="mlp", seed=seed).members[0].initial for seed in (3, 3, 4)
    )
    torch.manual_seed(99)  # nor on what torch drew before
    moved = federation(model="mlp", seed=3, ways=2).members[0].initial
    assert equal_trees(first, again) and equal_trees(first, moved)
    assert not first["body.fc1.weight"].equal(other["body.fc1.weight"])


def channels_of(text, clients):
    return [
        part.options["channels"] for part in deal(parse_choices("model", text), clients, "model")
    ]


def test_a_mix_of_models_is_dealt_in_order():
    text = "cnn(channels=18)*7,cnn(channels=20)*7,cnn(channels=22)*6"
    assert channels_of(text, 20) == ["18"] * 7 + ["20"] * 7 + ["22"] * 6


@pytest.mark.parametrize(
    ("clients", "blocks"), [(20, (7, 7, 6)), (3, (1, 1, 1)), (2, (1, 1, 0)), (100, (34, 33, 33))]
)
def test_preset_cnn_mh_is_dealt_in_equal_blocks(clients, blocks):
    wanted = [c for c, count in zip(("18", "20", "22"), blocks, strict=True) for _ in range(count)]
    assert channels_of("cnn-mh", clients) == wanted


def test_preset_cnn_mh_on_20_clients_gives_7_7_and_6(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((600, 28, 28), np.uint8), y=np.arange(600) % 3)
    made = federation(dataset=f"npz:{tmp_path}/own.npz", model="cnn-mh", clients=20)
    models = [member.model for member in made.members]
    channels = [member.initial["body.conv2.bias"].numel() for member in made.members]
    # 20 channels are the default.
    assert models == ["cnn(channels=18)"] * 7 + ["cnn"] * 7 + ["cnn(channels=22)"] * 6
    assert channels == [18] * 7 + [20] * 7 + [22] * 6


def test_preset_resnet18_mh_deals_the_papers_strides():
    strides = [
        part.options["strides"] for part in deal(parse_choices("model", "resnet18-mh"), 20, "model")
    ]
    assert strides == ["1,4"] * 10 + ["2,2"] * 10


def test_clients_name_their_models_without_default_options():
    members = federation(model="mlp(hidden=30)*1,mlp*3").members
    assert [member.model for member in members] == ["mlp(hidden=30)", "mlp", "mlp", "mlp"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("mlp*3", "the counts of model add up to 3, but there are 4 clients"),
        ("mlp*3,mlp(hidden=9)*2", "the counts of model add up to 5, but there are 4 clients"),
        ("mlp*3,mlp(hidden=9)", "give each part a count, as in 'a*7,b*13', or none"),
        ("mlp*0,mlp*4", "must be a whole number of at least 1, not '0'"),
        ("mlp*x", "the count in 'mlp*x' must be a whole number"),
        ("mpl", "did you mean 'mlp'?"),
        ("mlp(hiden=9)", "did you mean 'hidden'?"),
        ("cnn", "needs larger images than 8x8"),
        (
            "mlp,mlp(width=9)",
            "client 0's mlp embeds in 50 values but client 2's mlp(width=9) in 9: set dim",
        ),
    ],
)
def test_impossible_models_are_refused(model, words):
    with pytest.raises(ConfigError) as caught:
        federation(model=model)
    assert words in str(caught.value)


def test_dim_brings_models_of_different_widths_together():
    made = federation(model="mlp,mlp(width=9)", dim=16)
    assert made.task.dim == 16
    assert {tuple(member.initial["head.fc3.weight"].shape) for member in made.members} == {(10, 16)}


# --- a user's own module

X = np.random.default_rng(0).random((30, 6), np.float32)
Y = np.arange(30) % 3


class Own(nn.Module):
    """Six inputs, three classes; `outputs` says what forward makes of the inputs and the logits."""

    def __init__(self, outputs, inputs=6):
        super().__init__()
        self.layer = nn.Linear(inputs, 3)
        self.outputs = outputs

    def forward(self, x):
        return self.outputs(x, self.layer(x))


def run(model):
    return fedproto.run(dataset=[(X, Y), (X, Y)], model=model, rounds=1, device="cpu")


def test_a_users_module_runs():
    result = run(Own(lambda x, logits: (x, logits)))
    assert [client["model"] for client in result.clients] == ["Own", "Own"]


def test_a_list_of_modules_of_another_length_is_refused_with_the_number_of_clients():
    with pytest.raises(ConfigError, match=r"list of 20 modules, one per client \(clients is 20\)"):
        fedproto.run(dataset="digits", model=[Own(lambda x, logits: (x, logits))] * 3)


def test_modules_of_ones_own_that_embed_in_different_lengths_are_not_told_to_set_dim():
    modules = [Own(lambda x, logits: (x, logits)), Own(lambda x, logits: (x[:, :4], logits))]
    with pytest.raises(ConfigError, match="one length, and models of your own are not projected"):
        run(modules)


def narrow(fit):
    """A model of one's own that embeds in seven values, whatever `dim` is."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
    return Classifier(body, nn.Linear(7, fit.classes))


@pytest.mark.parametrize("order", ["{},mlp", "mlp,{}"])
def test_a_model_of_ones_own_beside_a_built_in_one_is_told_which_dim_to_set(order, monkeypatch):
    module = types.ModuleType("narrowmodels")
    module.narrow = narrow
    monkeypatch.setitem(sys.modules, "narrowmodels", module)
    model = order.format("narrowmodels:narrow")
    with pytest.raises(ConfigError, match="set dim to 7, and mlp projects to it"):
        fedproto.run(dataset="digits", model=model, clients=4, shots=5, rounds=1)


def test_modules_may_differ_between_clients():
    class Other(Own):
        pass

    result = run([Own(lambda x, logits: (x, logits)), Other(lambda x, logits: (x * 2, logits))])
    assert [client["model"] for client in result.clients] == ["Own", "Other"]


CONTRACT = (
    "client 0's model must take a batch of inputs of shape (6,) and return (features, logits)"
)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Own(lambda x, logits: logits), CONTRACT),
        (Own(lambda x, logits: None), CONTRACT),
        (Own(lambda x, logits: (x, logits, logits)), CONTRACT),
        (Own(lambda x, logits: (x[:, 0], logits)), CONTRACT),
        (Own(lambda x, logits: (x[:, :, None], logits)), CONTRACT),
        (Own(lambda x, logits: (x, logits[:, 0])), CONTRACT),
        (Own(lambda x, logits: (x, None)), CONTRACT),
        (Own(lambda x, logits: (x, logits), inputs=5), CONTRACT),
        (
            Own(lambda x, logits: (x, logits[:, :2])),
            "client 0's model gives 2 logits for 3 classes",
        ),
        (nn.Linear(6, 3), CONTRACT),
        (
            [Own(lambda x, logits: (x, logits))],
            "model must be text, a module, or a list of 2 modules",
        ),
        ([nn.Identity(), "mlp"], "model must be text, a module, or a list of 2 modules"),
    ],
)
def test_a_users_module_with_a_wrong_forward_is_refused(module, words):
    with pytest.raises(ConfigError) as caught:
        run(module)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [Own, 5, [nn.Linear(6, 3)], [1, 2]])
def test_a_model_that_is_not_a_module_is_refused(model):
    with pytest.raises(ConfigError, match="model must be text, a module, or a list of 2 modules"):
        run(model)


class Bare(nn.Module):
    """Weights that `repr` does not show."""

    def __init__(self, hidden):
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, hidden))
        self.second = nn.Parameter(torch.randn(hidden, 3))

    def forward(self, x):
        return x, x @ self.first @ self.second


def test_modules_that_differ_only_in_shape_are_not_averaged():
    with pytest.warns(UserWarning, match="within each of 2 architectures"):
        result = fedproto.run(
            algorithm="fedavg", dataset=[(X, Y), (X, Y)], model=[Bare(5), Bare(4)], rounds=1
        )
    assert [state["first"].shape for state in result.states] == [(6, 5), (6, 4)]


def test_a_users_module_stays_as_it_was():
    module = Own(lambda x, logits: (x, logits)).train()
    fedproto.run(dataset=[(X, Y), (X, Y)], model=module, rounds=1, precision="float64")
    assert module.training
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


def test_trained_models_come_back():
    result = run(Own(lambda x, logits: (x, logits)))
    assert len(result.states) == 2
    assert not torch.equal(*(next(iter(state.values())) for state in result.states))


def test_dim_is_not_ignored_for_a_users_module():
    with pytest.raises(ConfigError, match="dim is 4, but client 0's Own embeds in 6 values"):
        fedproto.run(
            dataset=[(X, Y), (X, Y)], model=Own(lambda x, logits: (x, logits)), rounds=1, dim=4
        )


@pytest.mark.parametrize(
    "option", [{"ways": 2}, {"partition": "iid"}, {"clients": 7}, {"partition.shots": 3}]
)
def test_a_partition_of_arrays_is_refused(option):
    with pytest.raises(ConfigError, match="has no meaning for a list of arrays"):
        fedproto.run(dataset=[(X, Y), (X, Y)], rounds=1, **option)


def test_a_layer_larger_than_the_memory_is_refused():
    with pytest.raises(ConfigError, match=r"model mlp.* cannot be built"):
        fedproto.run(dataset="digits", model="mlp(hidden=99999999999)", rounds=1)


def test_options_of_auto_go_to_their_own_clients():
    settings = {"dataset": "digits", "clients": 4, "model": "auto(hidden=10)*2,auto(hidden=20)*2"}
    members = Experiment.prepare(configure(settings)[0]).federation.members
    assert [member.model for member in members] == ["mlp(hidden=10)"] * 2 + ["mlp(hidden=20)"] * 2
