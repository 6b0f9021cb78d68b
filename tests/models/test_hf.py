"""Backbones of transformers, from folders with tiny random weights as `save_pretrained` writes."""

import json
import shutil
import socket
import warnings

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto
from helpers.engine_comparison import assert_engines_agree, assert_falls_back, make_clients
from torch.testing import assert_close

import fedproto as package
from fedproto.config import plugins
from fedproto.config.choices import parse_choice
from fedproto.config.options import Part
from fedproto.errors import ConfigError, MissingExtra
from fedproto.models import Fit

transformers = pytest.importorskip("transformers")

TINY = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
IMAGES = Fit((1, 8, 8), 4)
TEXTS = Fit((7,), 3)


def make_tokens(count=60):
    """Return rows of seven token numbers, of which the last ones are often padding; and labels."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 30, (count, 7)).astype(np.float64)
    x[np.arange(7) >= rng.integers(3, 8, count)[:, None]] = 0
    return x, np.arange(count) % 3


def make_token_clients():
    x, y = make_tokens()
    return [(x[:40], y[:40]), (x[20:], y[20:])]


def save(folder, module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.save_pretrained(folder)
    return folder


def make_bert(**changes):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **TINY, vocab_size=30, max_position_embeddings=16, num_labels=3, **changes
    )
    return transformers.BertForSequenceClassification(config)


def make_vit(**changes):
    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 8, "num_channels": 3, "num_labels": 5} | changes
    return transformers.ViTForImageClassification(transformers.ViTConfig(**TINY, **sizes))


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "bert", make_bert())


@pytest.fixture(scope="session")
def vit(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "vit", make_vit())


@pytest.fixture(scope="session")
def gpt(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 30}
    config = transformers.GPT2Config(**sizes, pad_token_id=0, num_labels=3)
    module = transformers.GPT2ForSequenceClassification(config)
    return save(tmp_path_factory.mktemp("models") / "gpt", module)


@pytest.fixture
def strict():
    """Turn all warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_):
        raise AssertionError("something connects to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def build(folder, fit, **options):
    return plugins.build("model", Part(f"hf:{folder}", options), fit)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- what is built


def test_logits_of_texts_are_those_of_transformers_itself(bert):
    x, _ = make_tokens(9)
    ids = torch.from_numpy(x).long()
    own = transformers.BertForSequenceClassification.from_pretrained(bert).eval()
    with torch.no_grad():
        expected = own(input_ids=ids, attention_mask=(ids != 0).long())
        pooled = own.bert(input_ids=ids, attention_mask=(ids != 0).long()).pooler_output
        features, logits = build(bert, TEXTS).eval()(torch.from_numpy(x).float())
    assert_close(logits, expected.logits)
    assert_close(features, pooled)


def test_logits_of_images_are_those_of_transformers_for_the_scaled_images(vit):
    images = torch.rand(3, 1, 8, 8)
    own = transformers.ViTForImageClassification.from_pretrained(vit).eval()
    scaled = torch.nn.functional.interpolate(images, (16, 16), mode="bilinear")
    with torch.no_grad():
        expected = own(pixel_values=scaled.repeat(1, 3, 1, 1)).logits
        _, logits = build(vit, IMAGES._replace(classes=5)).eval()(images)
    assert_close(logits, expected)


def test_padding_changes_nothing(bert):
    model = build(bert, TEXTS).eval()
    x = torch.tensor([[5.0, 6, 7, 0, 0, 0, 0]])
    with torch.no_grad():
        assert_close(model(x)[1], model(x[:, :3])[1])


def test_untrained_weights_depend_on_the_seed_and_not_on_the_files(bert):
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(build(bert, TEXTS, pretrained=False).state_dict())
    name = "body.backbone.bert.embeddings.word_embeddings.weight"
    assert torch.equal(drawn[0][name], drawn[1][name])
    assert not torch.equal(drawn[0][name], drawn[2][name])
    assert not torch.equal(drawn[0][name], build(bert, TEXTS).state_dict()[name])


def test_a_checkpoint_without_a_head_gets_a_new_one(tmp_path, bert):
    base = transformers.BertModel.from_pretrained(bert)
    model = build(save(tmp_path / "base", base), Fit((7,), 6))
    assert_close(
        model.state_dict()["body.backbone.bert.embeddings.word_embeddings.weight"],
        base.embeddings.word_embeddings.weight,
    )


def test_a_model_in_the_cache_is_found_by_its_name(tmp_path, monkeypatch, bert, offline):
    hub = pytest.importorskip("huggingface_hub")
    snapshot = tmp_path / "models--tiny--bert" / "snapshots" / ("0" * 40)
    shutil.copytree(bert, snapshot)
    references = tmp_path / "models--tiny--bert" / "refs"
    references.mkdir()
    (references / "main").write_text("0" * 40)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    real = hub.snapshot_download
    monkeypatch.setattr(
        hub, "snapshot_download", lambda *a, **k: real(*a, cache_dir=str(tmp_path), **k)
    )
    cached = build("tiny/bert", TEXTS).state_dict()
    name = "body.backbone.bert.pooler.dense.weight"
    assert torch.equal(cached[name], build(bert, TEXTS).state_dict()[name])


def test_a_folder_becomes_an_absolute_path_and_a_name_stays_one(bert, monkeypatch):
    monkeypatch.chdir(bert.parent)
    assert parse_choice("model", "hf:bert").name == f"hf:{bert}"
    assert parse_choice("model", "hf:owner/bert").name == "hf:owner/bert"


# --- runs


def test_engines_agree_about_a_text_model(bert, strict):
    clients = make_token_clients()
    assert_engines_agree("fedproto", data=clients, model=f"hf:{bert}", clients=2, rounds=2)


def test_engines_agree_about_an_image_model_that_is_averaged(vit, strict):
    clients = make_clients((10, 7, 15))
    settings = {"model": f"hf:{vit}", "clients": 3, "rounds": 2}
    assert_engines_agree("fedavg", data=clients, **settings)


def test_a_model_whose_tokens_see_only_earlier_ones_falls_back(gpt, strict):
    clients = make_token_clients()
    settings = {"model": f"hf:{gpt}", "clients": 2, "rounds": 1}
    assert_falls_back("cannot be run for many clients at once", data=clients, **settings)


def test_a_run_from_the_command_line_is_predicted_with(tmp_path, vit, strict):
    x, y = np.random.default_rng(0).random((40, 1, 8, 8)), np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    data = ("--dataset", f"npz:{tmp_path / 'a.npz'}", "--ways", "2", "--shots", "5", "--stdev", "0")
    run = ("--clients", "2", "--rounds", "1", "--batch", "4", "--out", tmp_path / "run")
    answer = fedproto("run", *data, "--model", f"hf:{vit}", *run)
    assert answer.code == 0, answer.err
    classifier = package.Classifier.of(tmp_path / "run", client=0, by="head")
    assert len(classifier.predict(x[:4])) == 4


def test_a_frozen_body_is_trained_from_its_features(vit):
    settings = {"dataset": make_clients((10, 7)), "model": f"hf:{vit}", "rounds": 1}
    result = package.run(freeze="body", **settings)
    own = build(vit, IMAGES).state_dict()
    for name, value in result.states[0].items():
        if name.startswith("body."):
            assert_close(value, own[name], check_dtype=False)


# --- what is refused


def test_a_name_that_is_nowhere_is_refused_without_a_download(offline):
    with pytest.raises(ConfigError, match=r"finds no folder 'owner/none'.*hf download owner/none"):
        build("owner/none", TEXTS)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 8, 8), "takes images of 3 channels, or grey ones, not inputs of shape"),
        ((8, 8), "takes images .* or rows of token numbers, not inputs of shape"),
        ((7,), "is a vit, for which transformers has no ModelForSequenceClassification"),
    ],
)
def test_inputs_that_do_not_suit_an_image_model_are_refused(vit, shape, words):
    with pytest.raises(ConfigError, match=words):
        build(vit, Fit(shape, 4))


def test_too_many_tokens_are_refused(bert):
    with pytest.raises(ConfigError, match="takes at most 16 tokens, not 17"):
        build(bert, Fit((17,), 3))


def test_only_safetensors_are_read(tmp_path, bert):
    folder = shutil.copytree(bert, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"finds no \.safetensors file .* pretrained=false"):
        build(folder, TEXTS)
    build(folder, TEXTS, pretrained=False)


EVIL = 'open(r"{marker}", "w").close()\n'


def test_code_in_a_folder_never_runs(tmp_path, bert, capfd):
    folder = shutil.copytree(bert, tmp_path / "evil")
    marker = tmp_path / "ran"
    for file in ("configuration_evil.py", "modeling_evil.py"):
        (folder / file).write_text(EVIL.format(marker=marker))
    classes = {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForSequenceClassification": "modeling_evil.EvilModel",
    }
    edit_config(folder, auto_map=classes)
    build(folder, TEXTS)  # the package's own classes are taken
    edit_config(folder, model_type="evil")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build(folder, TEXTS)
    assert not marker.exists()


def test_kernels_that_a_configuration_names_are_not_fetched(tmp_path, bert, offline):
    folder = shutil.copytree(bert, tmp_path / "kernels")
    edit_config(folder, _attn_implementation="somebody/kernel", attn_implementation="somebody/k")
    assert build(folder, TEXTS).body.backbone.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"load_in_8bit": True}}, "is quantised"),
        ({"model_type": "resnet"}, "is a resnet, for which transformers has no"),
        ({"num_hidden_layers": 3}, "its files lack 16 tensors of the model, such as bert.encoder"),
        ({"hidden_size": "many"}, "cannot be loaded"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(tmp_path, bert, changes, words):
    folder = shutil.copytree(bert, tmp_path / "changed")
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=words):
        build(folder, TEXTS)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_configuration_is_refused(tmp_path, bert, content):
    folder = shutil.copytree(bert, tmp_path / "damaged")
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        build(folder, TEXTS)


def test_damaged_weights_and_infinite_ones_are_refused(tmp_path, bert):
    folder = shutil.copytree(bert, tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build(folder, TEXTS)
    module = make_bert()
    module.bert.pooler.dense.weight.data[0, 0] = torch.inf
    with pytest.raises(ConfigError, match=r"pooler\.dense\.weight with values that are not finite"):
        build(save(tmp_path / "infinite", module), TEXTS)


def test_without_the_package_the_extra_is_named(monkeypatch, bert):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"model hf needs the package 'transformers': pip"):
        build(bert, TEXTS)


def test_words_numbered_by_the_data_are_refused_for_a_trained_model(tmp_path, bert):
    lines = ["text,label", *(f"word{number % 5} thing,{number % 2}" for number in range(40))]
    (tmp_path / "texts.csv").write_text("\n".join(lines) + "\n")
    settings = {"dataset": f"text:{tmp_path / 'texts.csv'}(length=7)", "clients": 2, "rounds": 1}
    with pytest.raises(ConfigError, match="with the numbers of its own tokenizer: pass these in"):
        package.run(model=f"hf:{bert}", **settings)
    result = package.run(model=f"hf:{bert}(pretrained=false)", **settings)
    assert result.states[0]["head.weight"].shape == (2, 8)
