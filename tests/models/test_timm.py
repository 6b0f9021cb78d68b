"""Backbones of timm, with its own small test models; skipped where timm cannot be imported.

timm imports torchvision, which must have been built for the installed torch.
"""

import json

import pytest
import torch
from helpers.engine_comparison import assert_engines_agree, make_clients
from safetensors.torch import save_file
from torch.testing import assert_close

from fedproto.config import plugins
from fedproto.config.choices import parse_choice
from fedproto.config.options import Part
from fedproto.errors import ConfigError, MissingExtra
from fedproto.models import Fit

FIT = Fit((3, 32, 32), 7)


def build(name, fit=FIT, **options):
    return plugins.build("model", Part(f"timm:{name}", options), fit)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(MissingExtra, match=r"model timm needs the package 'timm': pip install"):
        build("resnet18")


@pytest.fixture(scope="module")
def timm():
    try:
        return pytest.importorskip("timm")
    except RuntimeError as error:
        pytest.skip(f"torchvision does not fit torch: {error}")


def save_model(folder, module, architecture, **config):
    """Write a model as timm's `save_for_hf` does: config.json and model.safetensors."""
    folder.mkdir()
    save_file(module.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architecture": architecture} | config))
    return folder


@pytest.fixture(scope="module")
def resnet(timm, tmp_path_factory):
    torch.manual_seed(0)
    module = timm.create_model("test_resnet", num_classes=7)
    folder = tmp_path_factory.mktemp("timm") / "resnet"
    return save_model(folder, module, "test_resnet", num_classes=7), module.eval()


def test_logits_are_those_of_timm_itself(resnet):
    folder, module = resnet
    images = torch.rand(2, 3, 32, 32)
    features, logits = build(folder).eval()(images)
    assert_close(logits, module(images))
    assert_close(features, module.forward_head(module.forward_features(images), pre_logits=True))


def test_a_model_of_one_size_gets_scaled_images(timm):
    model = build("test_vit", Fit((1, 28, 28), 4), pretrained=False)
    assert model(torch.rand(2, 1, 28, 28))[0].shape == (2, 64)
    assert model.body.size == (160, 160)


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_efficientnet_gn"])
def test_engines_agree(timm, name):
    model = f"timm:{name}(pretrained=false, input_size={160 if name == 'test_vit' else 32})"
    data = make_clients((5, 3), (2, 2))
    assert_engines_agree("fedproto", data=data, model=model, clients=2, rounds=1)


def test_a_folder_becomes_an_absolute_path_and_a_name_stays_one(resnet, monkeypatch):
    folder, _ = resnet
    monkeypatch.chdir(folder.parent)
    assert parse_choice("model", "timm:resnet").name == f"timm:{folder}"
    assert parse_choice("model", "timm:resnet18.a1_in1k").name == "timm:resnet18.a1_in1k"


def test_weights_that_are_not_in_the_cache_are_not_downloaded(timm, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    real = hub.snapshot_download
    monkeypatch.setattr(
        hub, "snapshot_download", lambda *a, **k: real(*a, cache_dir=str(tmp_path), **k)
    )
    with pytest.raises(ConfigError, match=r"hf download timm/test_resnet\.r160_in1k"):
        build("test_resnet")


@pytest.mark.parametrize("name", ["nosuchnet", "hf-hub:timm/test_resnet", "local-dir:/tmp"])
def test_a_name_that_timm_does_not_know_is_refused(timm, name):
    with pytest.raises(ConfigError, match="timm has no model"):
        build(name)


def test_what_a_configuration_may_not_say_is_refused(resnet, tmp_path):
    _, module = resnet
    arguments = {"checkpoint_path": "/tmp/evil.pth"}
    folder = save_model(tmp_path / "evil", module, "test_resnet", model_args=arguments)
    with pytest.raises(ConfigError, match=r"config\.json has 'checkpoint_path' in model_args"):
        build(folder)


def test_weights_of_another_model_are_refused(resnet, tmp_path):
    _, module = resnet
    folder = save_model(tmp_path / "other", module, "test_convnext", num_classes=7)
    with pytest.raises(ConfigError, match="do not fit: Error"):
        build(folder)


def test_rows_of_a_table_are_refused(timm):
    with pytest.raises(ConfigError, match=r"takes images .*, not inputs of shape \(5,\)"):
        build("test_resnet", Fit((5,), 2))
