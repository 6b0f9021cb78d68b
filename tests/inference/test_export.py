"""An exported client comes back bit for bit, ONNX agrees with torch, and damage is refused."""

import copy
import hashlib
import json
import re
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from helpers.command_line import fedproto as command
from safetensors.torch import load_file
from torch import nn

import fedproto
from fedproto.config import plugin_trust, plugins
from fedproto.config.options import Part, parse
from fedproto.core.files import write_tensors
from fedproto.data.shared.feature_encoding import ENCODING
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, DataError, FedProtoError, MissingExtra, RunFolderError
from fedproto.inference.calibration import compute_threshold
from fedproto.inference.classifier import Classifier
from fedproto.inference.export import write
from fedproto.inference.export.manifest import CALIBRATION_FORMAT, FILES, MANIFEST, WEIGHTS_FORMAT
from fedproto.inference.export.read import read_exported
from fedproto.inference.export.write import export_client
from fedproto.inference.trained_client import TrainedClient, load_client
from fedproto.inference.ways import WAYS
from fedproto.models import Fit
from fedproto.runs.prototype_files import Prototypes, read_prototypes, write_prototypes
from fedproto.runs.teacher_files import TEACHER_FILE

SMALL = {"clients": 3, "rounds": 2, "shots": 4, "test_shots": 12}
BATCHES = (1, 3, 17)


def images(member, count, high=255):
    """Inputs in the units of the data set, the same every time."""
    return (
        np.random.default_rng(0)
        .integers(0, high, (count, *member.preprocessing.shape))
        .astype(np.float32)
    )


def by_onnx(folder, *batches):
    """What onnxruntime makes of each batch: its outputs by name."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = (
        1  # its threads wait for each other by turning round, on cores that others want
    )
    session = onnxruntime.InferenceSession(
        folder / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(None, {"x": x}), strict=True)) for x in batches]


def assert_agree(member, x, outputs):
    features, logits = member.forward_raw(x)[:2]
    np.testing.assert_allclose(outputs["features"], features, atol=1e-4)
    np.testing.assert_allclose(outputs["logits"], logits, atol=1e-4)
    np.testing.assert_allclose(
        outputs["distances"], Classifier.from_trained(member).distances(x), atol=1e-4
    )


OF_IMAGES = [name for name in FILES if name not in (ENCODING, TEACHER_FILE)]


def manifest_of(folder):
    return json.loads((folder / MANIFEST).read_text())


def rewrite(folder, **changes):
    """Another manifest, in which every file is stamped as it is now."""
    files = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in manifest_of(folder)["files"]
    }
    (folder / MANIFEST).write_text(json.dumps(manifest_of(folder) | {"files": files} | changes))


def state_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def hand_made(model, shape, classes=("cat", "dog", "eel"), scale=255.0, module=None, **about):
    """A member that no run made: drawn weights, running statistics of noise, prototypes but one."""
    torch.manual_seed(0)
    (part,) = parse(model, "model")
    part = Part(
        part.name, {name: value for name, value in part.options.items() if name != "weights"}
    )
    module = module or plugins.build("model", part, Fit(shape, len(classes), None))
    with torch.no_grad():
        for _ in range(2):
            features, _ = module.train()(torch.rand(8, *shape) * 3)
    wide = Prototypes(("cat", "dog", "eel", "fly"), features[:4] + 1, torch.tensor([1.0, 0, 1, 1]))
    prepared = Preprocessing(shape, (0.4,) * shape[0] if len(shape) == 3 else (0.0,), (0.3,), scale)
    calibration = {"prototype all": np.linspace(0, 1, 30, dtype=np.float32)}
    about = {"model": model, "dataset": "csv:/home/me/secret/animals.csv", **about}
    return TrainedClient(
        classes=classes,
        own=classes[:2],
        prototypes=wide,
        about=about,
        module=module.eval(),
        preprocessing=prepared,
        calibration=calibration,
    )


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def cnn(places):
    """A run of convolutional networks with dropout, and its client 1 as a folder."""
    fedproto.run(dataset="mnist5k", model="cnn(channels=12)", out=places / "cnn-run", **SMALL)
    export_client(load_client(places / "cnn-run", 1), places / "cnn")
    return places / "cnn-run", places / "cnn"


@pytest.fixture(scope="module")
def plain(places):
    """A folder to spoil copies of; in float64 and without ONNX."""
    fedproto.run(
        dataset="digits",
        precision="float64",
        model="mlp(hidden=9)",
        out=places / "mlp-run",
        **SMALL,
    )
    export_client(load_client(places / "mlp-run", 0), places / "mlp", onnx=False)
    return places / "mlp-run", places / "mlp"


@pytest.fixture
def spoilt(plain, tmp_path):
    return Path(shutil.copytree(plain[1], tmp_path / "member"))


# --- it comes back as it was


@pytest.mark.parametrize(("by", "among"), [way.split() for way in WAYS])
@pytest.mark.parametrize(("made", "client", "high"), [("cnn", 1, 255), ("plain", 0, 17)])
def test_a_loaded_client_answers_bit_for_bit(request, made, client, high, by, among):
    run, folder = request.getfixturevalue(made)
    mine, theirs = (
        Classifier.of(run, client, by=by, among=among, reject=0.2),
        Classifier.load(folder, by=by, among=among, reject=0.2),
    )
    x = images(mine.trained, 40, high)
    assert (mine.predict(x) == theirs.predict(x)).all()
    assert (mine.predict_proba(x) == theirs.predict_proba(x)).all()
    assert (mine.novelty(x) == theirs.novelty(x)).all()
    assert mine.threshold_ == theirs.threshold_ < np.inf
    assert by != "prototype" or (mine.distances(x) == theirs.distances(x)).all()


def test_a_loaded_client_equals_the_exported_one(cnn):
    mine, theirs = load_client(cnn[0], 1), read_exported(cnn[1])
    assert (mine.preprocessing, mine.classes, mine.own) == (
        theirs.preprocessing,
        theirs.classes,
        theirs.own,
    )
    assert mine.about == theirs.about
    assert mine.calibration.keys() == theirs.calibration.keys() == set(WAYS)
    assert all((mine.calibration[way] == theirs.calibration[way]).all() for way in WAYS)
    assert mine.prototypes.classes == theirs.prototypes.classes
    assert mine.prototypes.values.equal(theirs.prototypes.values)
    assert not any(layer.training for layer in theirs.module.modules())


def test_weights_keep_their_type(plain):
    mine, theirs = (
        state_of(member.module) for member in (load_client(plain[0], 0), read_exported(plain[1]))
    )
    assert {value.dtype for value in theirs.values()} == {torch.float64}
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)


def test_loading_does_not_change_torchs_generator(plain):
    before = torch.get_rng_state()
    read_exported(plain[1])
    assert before.equal(torch.get_rng_state())


def test_a_client_without_prototypes_classifies_by_head(tmp_path):
    fedproto.run(algorithm="fedavg", dataset="digits", out=tmp_path / "run", **SMALL)
    export_client(load_client(tmp_path / "run", 2), tmp_path / "member")
    mine, theirs = Classifier.of(tmp_path / "run", 2), Classifier.load(tmp_path / "member")
    x = images(mine.trained, 20, 17)
    assert theirs.by == "head" and (mine.predict_proba(x) == theirs.predict_proba(x)).all()
    assert not (tmp_path / "member" / "prototypes.safetensors").exists()
    assert manifest_of(tmp_path / "member")["onnx"]["distances"] == []
    assert by_onnx(tmp_path / "member", x)[0].keys() == {"features", "logits"}


def test_a_loaded_client_can_be_exported_again(plain, tmp_path):
    export_client(read_exported(plain[1]), tmp_path / "again", onnx=False)
    for name in ("manifest.json", "model.safetensors", "prototypes.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (plain[1] / name).read_bytes()


def test_an_empty_folder_is_filled_and_nothing_is_left_beside_it(plain, tmp_path):
    (tmp_path / "deep" / "member").mkdir(parents=True)
    export_client(read_exported(plain[1]), tmp_path / "deep" / "member", onnx=False)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["member"]
    assert {path.name for path in (tmp_path / "deep" / "member").iterdir()} == {
        MANIFEST,
        *OF_IMAGES,
    } - {"model.onnx"}


# --- the manifest


def test_the_manifest_describes_the_client(cnn):
    member, found = load_client(cnn[0], 1), manifest_of(cnn[1])
    assert (found["fedproto"], found["version"], found["model"]) == (
        "member",
        1,
        "cnn(channels=12)",
    )
    assert found["classes"] == [str(digit) for digit in range(10)] and found["own"] == list(
        member.own
    )
    assert found["input"] == {
        "shape": [1, 28, 28],
        "mean": [0.1307],
        "std": [0.3081],
        "scale": 255.0,
    }
    assert (found["dim"], found["distance"]) == (50, "l2")
    assert found["versions"]["fedproto"] == fedproto.__version__
    assert found["thresholds"] == {
        way: compute_threshold(values, 0.05) for way, values in member.calibration.items()
    }
    assert found["calibration"] == {way: len(values) for way, values in member.calibration.items()}
    for name in OF_IMAGES:
        assert found["files"][name] == hashlib.sha256((cnn[1] / name).read_bytes()).hexdigest()


def test_the_threshold_is_null_with_too_few_images(plain, tmp_path):
    """JSON has no infinity, and other readers than Python's stop at one."""
    few = replace(
        read_exported(plain[1]),
        calibration={"head all": np.arange(10.0), "head own": np.arange(20.0)},
    )
    export_client(few, tmp_path / "member", onnx=False)
    found = json.loads((tmp_path / "member" / MANIFEST).read_text(), parse_constant=pytest.fail)
    assert found["thresholds"] == {"head all": None, "head own": 19}
    assert "has 10 held-out rows" in found["cannot_reject"] and "needs 19" in found["cannot_reject"]


def test_the_manifest_says_that_a_client_without_held_out_images_cannot_reject(plain, tmp_path):
    export_client(replace(read_exported(plain[1]), calibration={}), tmp_path / "member", onnx=False)
    assert "no held-out rows" in manifest_of(tmp_path / "member")["cannot_reject"]
    enough = {"head all": np.arange(19.0), "head own": np.arange(19.0)}
    export_client(
        replace(read_exported(plain[1]), calibration=enough), tmp_path / "able", onnx=False
    )
    assert "cannot_reject" not in manifest_of(tmp_path / "able")


def test_export_says_that_a_client_cannot_reject(tmp_path):
    settings = {
        "dataset": "digits",
        "clients": 2,
        "rounds": 1,
        "shots": 5,
        "test_shots": 4,
        "engine": "reference",
    }
    fedproto.run(**settings, model="mlp(hidden=16,width=8)", out=tmp_path / "run")
    answer = command("export", tmp_path / "run", "--to", tmp_path / "member", "--no-onnx")
    assert answer.code == 0
    most_experienced = Classifier.of(tmp_path / "run").trained.about["client"]
    assert f"client {most_experienced} has" in answer.err and "states no threshold" in answer.err
    assert answer.out == f"client {most_experienced} written to {tmp_path / 'member'}\n"
    np.save(tmp_path / "x.npy", np.full((1, 8, 8), 10**6))
    refused = command("predict", tmp_path / "member", tmp_path / "x.npy", "--reject", "0.05")
    assert refused.code == 2 and refused.out == "" and "needs 19" in refused.err


def test_the_prototypes_of_an_exported_folder_are_read_like_those_of_a_run(cnn):
    mine, theirs = (read_prototypes(folder) for folder in cnn)
    assert (
        mine.classes == theirs.classes
        and mine.values.equal(theirs.values)
        and mine.known.equal(theirs.known)
    )


# --- ONNX


def test_onnx_agrees_with_torch(cnn):
    member, found = load_client(cnn[0], 1), manifest_of(cnn[1])["onnx"]
    batches, classifier = (
        [images(member, size) for size in BATCHES],
        Classifier.from_trained(member),
    )
    for x, outputs in zip(batches, by_onnx(cnn[1], *batches), strict=True):
        assert_agree(member, x, outputs)
        nearest = [found["distances"][place] for place in outputs["distances"].argmin(1)]
        assert nearest == classifier.predict(x).tolist()
    assert (
        found["logits"] == list(member.classes)
        and found["distances"] == classifier.classes_.tolist()
    )


def test_onnx_is_valid_and_names_nothing_of_this_machine(cnn):
    proto = onnx.load(cnn[1] / "model.onnx")
    onnx.checker.check_model(proto, full_check=True)
    (x,) = proto.graph.input
    assert x.name == "x" and [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim] == [
        "batch",
        1,
        28,
        28,
    ]
    assert not re.search(rb"\.py|/fedproto|stack_trace", (cnn[1] / "model.onnx").read_bytes())


@pytest.mark.parametrize(
    ("model", "shape", "scale"),
    [
        pytest.param(
            'resnet18(strides="1,2", weights=/home/me/imagenet.pth, fresh="conv1,fc")',
            (3, 32, 32),
            255.0,
            marks=pytest.mark.slow,
        ),
        ("textcnn(words=200, filters=6)", (12,), 1.0),
        ("textmean(words=200)", (12,), 1.0),
    ],
    ids=["resnet18", "textcnn", "textmean"],
)
def test_onnx_of_other_models_agrees_and_is_written_in_silence(
    model, shape, scale, tmp_path, capfd
):
    member = hand_made(model, shape, scale=scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_client(member, tmp_path / "member")
    assert capfd.readouterr() == ("", "")
    assert "/home/me" not in (tmp_path / "member" / MANIFEST).read_text()
    loaded, batches = read_exported(tmp_path / "member"), [images(member, size) for size in BATCHES]
    for x, outputs in zip(batches, by_onnx(tmp_path / "member", *batches), strict=True):
        assert_agree(loaded, x, outputs)
        assert all(
            a.equal(b)
            for a, b in zip(member.forward_raw(x)[:2], loaded.forward_raw(x)[:2], strict=True)
        )
    assert manifest_of(tmp_path / "member")["onnx"]["distances"] == ["cat", "eel", "fly"]


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_without_its_packages_onnx_is_refused_in_a_sentence(package, plain, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    sentence = (
        f"model.onnx, which --no-onnx leaves out, needs the package '{package}': "
        "pip install '.[onnx]'"
    )
    with pytest.raises(MissingExtra, match=re.escape(sentence)):
        export_client(read_exported(plain[1]), tmp_path / "member")
    assert not any(tmp_path.iterdir())
    export_client(read_exported(plain[1]), tmp_path / "member", onnx=False)
    assert not (tmp_path / "member" / "model.onnx").exists() and "onnx" not in manifest_of(
        tmp_path / "member"
    )


# --- models from outside


OUTSIDE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, fit, fixed):
        super().__init__()
        self.inner, self.fixed = nn.Linear(fit.shape[0], 5), fixed
        self.project = nn.Linear(5, fit.dim) if fit.dim else nn.Identity()
        self.head = nn.Linear(fit.dim or 5, fit.classes)

    def forward(self, x):
        features = self.project(self.inner(x.reshape(2, -1) if self.fixed else x))
        return features, self.head(features)

def net(fit, *, fixed: bool = False):
    return Net(fit, fixed)

def broken(fit):
    raise ZeroDivisionError("nothing\\nto divide")
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    (tmp_path / "theirmodels.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    with plugin_trust.own_trust():
        plugin_trust.trust_plugins("theirmodels:net", "theirmodels:broken")
        yield "theirmodels:net"
    sys.modules.pop("theirmodels", None)


def test_a_plug_in_model_is_found_by_its_name(outside, tmp_path):
    """The run did not ask it for a `dim`; asked for the one it has, it would add a projection."""
    member = hand_made(outside, (6,), scale=1.0)
    export_client(member, tmp_path / "member", onnx=False)
    x = images(member, 4)
    assert all(
        a.equal(b)
        for a, b in zip(
            member.forward_raw(x)[:2],
            read_exported(tmp_path / "member").forward_raw(x)[:2],
            strict=True,
        )
    )


def test_a_model_that_onnx_cannot_express_is_refused_in_a_sentence(outside, tmp_path, capfd):
    """It takes batches of two only."""
    torch.manual_seed(0)
    module = plugins.build("model", Part(outside), Fit((6,), 3, None))
    member = hand_made(outside, (6,), module=module)
    module.fixed = True
    member = replace(member, about=member.about | {"model": f"{outside}(fixed=true)"})
    with pytest.raises(
        ConfigError, match=r"cannot be written as ONNX: .*; leave model.onnx out with --no-onnx$"
    ):
        export_client(member, tmp_path / "member")
    assert not (tmp_path / "member").exists() and capfd.readouterr() == ("", "")


def test_a_failing_plug_in_model_is_refused_in_a_sentence(outside, plain, spoilt):
    rewrite(spoilt, model="theirmodels:broken")
    sentence = (
        r"model 'theirmodels:broken' failed \(theirmodels.py, line \d+\): "
        "ZeroDivisionError: nothing$"
    )
    with pytest.raises(DataError, match=sentence):
        read_exported(spoilt)


# --- what cannot be written


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        (
            {"model": "Sequential"},
            "'Sequential' cannot be exported, because .* module .*unknown model",
        ),
        ({}, "'None' cannot be exported"),
        (
            {"model": "mlp(hidden=8)"},
            r"the weights are not those of mlp\(hidden=8\): body.fc1.weight is \(9, 64\)",
        ),
        ({"model": "cnn(kernel=2, width=9)"}, "cannot be exported"),
        ({"model": "mlp*2"}, "names several models"),
        ({"model": "nosuchmodule:net"}, "'nosuchmodule:net', a plug-in"),
    ],
)
def test_a_model_that_cannot_be_built_from_its_name_is_refused(about, sentence, plain, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        export_client(
            replace(read_exported(plain[1]), about=about), tmp_path / "member", onnx=False
        )
    assert not any(tmp_path.iterdir())


def test_a_module_that_computes_something_else_is_refused(plain, tmp_path):
    """Equal names and shapes of weights are not yet an equal model."""
    member = read_exported(plain[1])
    other = copy.deepcopy(member.module)
    other.body.relu1 = nn.Tanh()
    with pytest.raises(ConfigError, match="gives other outputs"):
        export_client(replace(member, module=other), tmp_path / "member", onnx=False)


def test_numbers_that_are_not_finite_are_refused(plain, tmp_path):
    member = read_exported(plain[1])
    nothing = replace(member.prototypes, values=member.prototypes.values * torch.nan)
    for broken in (
        replace(member, prototypes=nothing),
        replace(member, calibration={"head all": np.array([np.inf])}),
    ):
        with pytest.raises(DataError, match="not finite: its training diverged"):
            export_client(broken, tmp_path / "member", onnx=False)


def test_a_name_of_two_lines_is_refused(plain, tmp_path):
    member = read_exported(plain[1])
    with pytest.raises(
        DataError, match="'classes' must be a list of different names of one line each"
    ):
        export_client(
            replace(member, classes=("a\nb", *member.classes[1:])), tmp_path / "member", onnx=False
        )
    assert not any(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_not_touched(plain, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for taken in (tmp_path / "full", tmp_path / "full" / "mine.txt", plain[1]):
        with pytest.raises(RunFolderError, match="is not empty: name another folder with --to"):
            export_client(read_exported(plain[1]), taken, onnx=False)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_an_unwritable_place_is_refused(plain, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot be made: .*; name another folder with --to"):
        export_client(read_exported(plain[1]), tmp_path / "file" / "member", onnx=False)


def test_nothing_is_left_of_a_folder_that_was_interrupted(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(
        write, "_make_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())
    )
    with pytest.raises(KeyboardInterrupt):
        export_client(read_exported(plain[1]), tmp_path / "member", onnx=False)
    assert not any(tmp_path.iterdir())


# --- what cannot be read


@pytest.mark.parametrize("name", OF_IMAGES)
def test_a_file_that_was_changed_or_lost_is_refused(cnn, tmp_path, name):
    folder = Path(shutil.copytree(cnn[1], tmp_path / "member"))
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(
        DataError,
        match=f"{name} is corrupted or from another export: its SHA-256 is not the one in manifest",
    ):
        read_exported(folder)
    (folder / name).unlink()
    with pytest.raises(
        DataError, match=f"{name}, which manifest.json names, cannot be read: No such file"
    ):
        read_exported(folder)


def test_a_missing_folder_or_a_file_is_refused(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(
            DataError,
            match=r"is not an exported client: it holds no manifest.json, which `fedproto export`",
        ):
            Classifier.load(path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"fedproto": "member"']
)
def test_a_manifest_that_is_not_json_is_refused(spoilt, content):
    (spoilt / MANIFEST).write_bytes(content)
    with pytest.raises(DataError, match=r"manifest.json is not valid JSON"):
        read_exported(spoilt)


@pytest.mark.parametrize("content", ["[]", "null", "{}", '{"fedproto": "run"}', '"member"'])
def test_a_manifest_of_something_else_is_refused(spoilt, content):
    (spoilt / MANIFEST).write_text(content)
    with pytest.raises(
        DataError,
        match=r"is not the manifest of an exported client: its 'fedproto' must be 'member'",
    ):
        read_exported(spoilt)


@pytest.mark.parametrize("version", [2, 0, "1", None, [1]])
def test_a_manifest_of_another_version_is_refused(spoilt, version):
    rewrite(spoilt, version=version)
    with pytest.raises(
        DataError,
        match=rf"has version {re.escape(repr(version))}; this fedproto reads version 1",
    ):
        read_exported(spoilt)


@pytest.mark.parametrize(
    "key", ["classes", "own", "model", "input", "dim", "distance", "about", "files"]
)
def test_a_manifest_that_lacks_a_key_is_refused(spoilt, key):
    (spoilt / MANIFEST).write_text(
        json.dumps({k: v for k, v in manifest_of(spoilt).items() if k != key})
    )
    with pytest.raises(DataError, match=f"manifest.json lacks '{key}': "):
        read_exported(spoilt)


DIGEST = "0" * 64
INPUT = {"shape": [1, 8, 8], "mean": [0.5], "std": [0.5], "scale": 16}
SPOILT = {
    "classes": [None, [], "abc", ["a", "a"], ["a", 1], ["a", ""], [["a"]], {"a": 1}],
    "own": [None, [], ["a", "a"], [1]],
    "model": [None, "", 3, ["mlp"]],
    "input": [
        None,
        [],
        {},
        *(INPUT | {"shape": shape} for shape in ([], [0], [8.0], [True], "8", [-1, 8])),
    ]
    + [
        INPUT | {"mean": mean}
        for mean in ([], [1, 2], ["a"], [None], [float("nan")], 0.5, [10**400])
    ]
    + [INPUT | {"std": std} for std in ([0], [-1], [float("inf")])]
    + [INPUT | {"scale": scale} for scale in (0, -1, None, "1", float("inf"), [1])],
    "dim": [None, 0, -1, 1.5, "50", True],
    "distance": [None, "l1", 2],
    "about": [None, [], "x"],
    "files": [
        None,
        [],
        {},
        {"model.safetensors": 1},
        {"model.safetensors": "abc"},
        {"model.onnx": DIGEST},
    ]
    + [
        {"model.safetensors": DIGEST, name: DIGEST}
        for name in ("../../etc/passwd", "manifest.json", "")
    ],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in SPOILT.items() for value in values]
)
def test_a_manifest_with_a_value_of_another_kind_is_refused(spoilt, key, value):
    rewrite(spoilt, **{key: value})
    with pytest.raises(DataError, match=f"manifest.json: '{key}' must be .*, not ") as caught:
        read_exported(spoilt)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"own": ["zebra"]}, "'own' names 'zebra', which is not among its classes"),
        ({"model": "mpl"}, "do not go together: unknown model 'mpl': did you mean 'mlp'"),
        ({"model": "mlp(hiden=9)"}, "unknown option of model mlp 'hiden'"),
        ({"model": "mlp(hidden=9"}, "cannot be read; write it like"),
        ({"model": "mlp, mlp"}, "names several models"),
        (
            {"model": "mlp"},
            r"body.fc1.weight is \(9, 64\) of torch.float64, "
            r"where \(100, 64\) of torch.float64 is wanted",
        ),
        ({"model": "cnn(kernel=2)"}, "do not go together"),
        (
            {"model": "mlp(hidden=1000000000000)"},
            r"mlp\(hidden=1000000000000\) refuses inputs of shape",
        ),
        ({"classes": [*"0123456789", "a"]}, r"head.fc3.weight is \(10, 50\)"),
        ({"dim": 7}, "the model gives 50 features and 10 logits, where 7 and 10 are wanted"),
        ({"input": INPUT | {"shape": [10**30]}}, "refuses inputs of shape"),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused(spoilt, changes, sentence):
    rewrite(spoilt, **changes)
    with pytest.raises(DataError, match=sentence) as caught:
        read_exported(spoilt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda w: w | {"body.fc1.weight": torch.zeros(9, 63).double()},
            r"body.fc1.weight is \(9, 63\)",
        ),
        (
            lambda w: w | {"body.fc1.bias": torch.zeros(9)},
            r"body.fc1.weight is \(9, 64\) of torch.float64, where",
        ),
        (lambda w: w | {"extra": torch.zeros(1).double()}, "it has no 'extra'"),
        (
            lambda w: {name: value for name, value in w.items() if name != "head.fc3.bias"},
            "there is no head.fc3.bias",
        ),
        (lambda w: {}, "there is no body.fc1.bias"),
    ],
)
def test_weights_of_another_model_are_refused(spoilt, change, sentence):
    changed = change(load_file(spoilt / "model.safetensors"))
    write_tensors(spoilt / "model.safetensors", changed, WEIGHTS_FORMAT, {})
    rewrite(spoilt)
    with pytest.raises(
        DataError, match=rf"the weights are not those of mlp\(hidden=9\): {sentence}"
    ):
        read_exported(spoilt)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "prototypes.safetensors", "calibration.safetensors"]
)
def test_a_file_of_another_format_with_the_right_hash_is_refused(spoilt, name):
    (spoilt / name).write_bytes(b"\x08")
    rewrite(spoilt)
    with pytest.raises(DataError, match=f"{name} is not a valid safetensors file"):
        read_exported(spoilt)


@pytest.mark.parametrize(
    "tensors",
    [
        {"prototype some": torch.zeros(3)},
        {"head all": torch.zeros(3, 1)},
        {"head all": torch.tensor([1])},
        {"head all": torch.tensor([torch.nan])},
    ],
)
def test_a_calibration_of_other_numbers_is_refused(spoilt, tensors):
    write_tensors(spoilt / "calibration.safetensors", tensors, CALIBRATION_FORMAT, {})
    rewrite(spoilt)
    with pytest.raises(
        DataError, match=r"must be one of prototype all, .*, and a row of finite numbers"
    ):
        read_exported(spoilt)


def test_prototypes_of_another_size_are_refused(spoilt):
    tensors = {"prototypes": torch.zeros(2, 3), "known": torch.ones(2)}
    write_prototypes(spoilt / "prototypes.safetensors", tensors, ("a", "b"))
    rewrite(spoilt)
    with pytest.raises(FedProtoError, match="the prototypes have 3 values, and the features 50"):
        read_exported(spoilt)
