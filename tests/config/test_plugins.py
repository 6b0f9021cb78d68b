"""Plug-ins from outside: names in files run no code, the user's own names do.

Their module is looked for in the current folder, during the import only.
"""

import io
import json
import shutil
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.command_line import SMALL, fedproto, only_line

import fedproto as package
from fedproto.config import plugin_trust, plugins
from fedproto.config.options import Part, options_of
from fedproto.data import DataFolders
from fedproto.data.digits import digits
from fedproto.deploy.member import load_trained_member
from fedproto.deploy.settings import read_member, split_run_config
from fedproto.errors import ConfigError, RunFolderError
from fedproto.inference.export.read import read_exported
from fedproto.runs.experiment import reopen
from fedproto.runs.folder import RunFolder

#: A plug-in of each kind, of which all commands can make something.
CODE = """
from dataclasses import replace

from torch import nn

from fedproto.algorithms.fedproto import fedproto
from fedproto.data.digits import digits
from fedproto.partitions.nway import nway


class Net(nn.Module):
    def __init__(self, fit, width):
        super().__init__()
        dim = fit.dim or width
        self.body = nn.Linear(64, dim)
        self.head = nn.Linear(dim, fit.classes)

    def forward(self, x):
        features = self.body(x.flatten(1))
        return features, self.head(features)


def method(*, lam: float = 1.0):
    return replace(fedproto(lam=lam), name="method")


def net(fit, *, width: int = 6):
    return Net(fit, width)


def data(data_folders):
    return replace(digits(data_folders), name="theirs")


def rows(pool, *, shots: int = 5):
    return nway(pool, shots=shots)
"""
KINDS = {
    "algorithm": "sent:method",
    "model": "sent:net",
    "dataset": "sent:data",
    "partition": "sent:rows",
}


@contextmanager
def forgotten() -> Iterator[None]:
    """Forget the module, and where Python looked for it, at the end."""
    path = list(sys.path)
    sys.modules.pop("sent", None)
    try:
        with plugin_trust.own_trust():
            yield
    finally:
        sys.path[:] = path
        sys.modules.pop("sent", None)


def succeed(*arguments: str | Path) -> str:
    result = fedproto(*arguments)
    assert result.code == 0, result.err
    return result.out


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What somebody might send: runs with a plug-in of each kind, and what was made of them."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "sent.py").write_text(CODE)
    np.save(folder / "two.npy", digits(DataFolders()).test.x[:2])
    with pytest.MonkeyPatch.context() as patch, forgotten():
        patch.chdir(folder)
        for kind, name in KINDS.items():
            succeed("run", *SMALL, f"--{kind}", name, "--out", kind)
        shutil.copytree("algorithm", "changed")
        succeed("members", "changed", "--remove", "3", "--trust-plugins")
        succeed("export", "model", "--to", "exported", "--no-onnx", "--trust-plugins")
        for kind in KINDS:
            shutil.copytree(kind, f"stopped-{kind}")
            Path(f"stopped-{kind}/result.json").unlink()
    (folder / "sent.py").unlink()
    return folder


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that appears when the module beside us is imported."""
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "it ran"
    (tmp_path / "sent.py").write_text(
        f"{CODE}\nfrom pathlib import Path\nPath({str(trace)!r}).touch()\n"
    )
    with forgotten():
        yield trace


@pytest.fixture
def sent(theirs: Path, trace: Path) -> Path:
    """A copy of all that, for a command to work on."""
    return shutil.copytree(theirs, trace.parent / "inbox")


COMMANDS = {
    "resume, algorithm": ("resume", "{}/stopped-algorithm"),
    "resume, model": ("resume", "{}/stopped-model"),
    "resume, dataset": ("resume", "{}/stopped-dataset"),
    "predict, model": ("predict", "{}/model", "{}/two.npy"),
    "predict, exported": ("predict", "{}/exported", "{}/two.npy"),
    "export, model": ("export", "{}/model", "--to", "new", "--no-onnx"),
    "export, exported": ("export", "{}/exported", "--to", "new", "--no-onnx"),
    "members": ("members", "{}/algorithm"),
    "members, changed again": ("members", "{}/changed", "--remove", "2"),
    "extend, algorithm": ("extend", "{}/algorithm", "--out", "new", "--rounds", "1"),
    "extend, model": ("extend", "{}/model", "--out", "new", "--rounds", "1"),
    "extend, changed": ("extend", "{}/changed", "--out", "new", "--rounds", "1"),
    "run, algorithm": ("run", "{}/algorithm/config.toml", "--out", "new"),
    "run, model": ("run", "{}/model/config.toml", "--out", "new"),
    "run, dataset": ("run", "{}/dataset/config.toml", "--out", "new"),
    "run, partition": ("run", "{}/partition/config.toml", "--out", "new"),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_on_what_somebody_sent_runs_none_of_its_code(
    command: tuple[str, ...], sent: Path, trace: Path
) -> None:
    arguments = [argument.format(sent) for argument in command]
    refused = fedproto(*arguments)
    line = only_line(refused.err)
    assert refused.code == 2 and not trace.exists()
    assert (
        "a plug-in" in line and "'sent:" in line and "--trust-plugins" in line and str(sent) in line
    )
    assert not Path("new").exists()
    assert fedproto(*arguments, "--trust-plugins").code == 0
    assert trace.exists()


#: A trained client needs its model only, so the other plug-ins of its run are not looked up.
COMMANDS_WITHOUT_PLUG_INS = {
    "predict, algorithm": ("predict", "{}/algorithm", "{}/two.npy"),
    "predict, dataset": ("predict", "{}/dataset", "{}/two.npy"),
    "export, algorithm": ("export", "{}/algorithm", "--to", "new", "--no-onnx"),
    "export, dataset": ("export", "{}/dataset", "--to", "new", "--no-onnx"),
}


@pytest.mark.parametrize(
    "command", COMMANDS_WITHOUT_PLUG_INS.values(), ids=COMMANDS_WITHOUT_PLUG_INS
)
def test_a_command_that_needs_no_plug_in_works_and_runs_no_code(
    command: tuple[str, ...], sent: Path, trace: Path
) -> None:
    answer = fedproto(*[argument.format(sent) for argument in command])
    assert answer.code == 0, answer.err
    assert not trace.exists()


@pytest.mark.parametrize("command", [("members",), ("report", "--out", "new.html")])
def test_the_members_that_a_file_lists_run_no_code(
    command: tuple[str, ...], sent: Path, trace: Path
) -> None:
    refused = fedproto(*command, sent / "changed")
    assert (
        refused.code == 2
        and "members.safetensors names the algorithm 'sent:method'" in only_line(refused.err)
    )
    assert not trace.exists() and not Path("new.html").exists()


@pytest.mark.parametrize(
    "command",
    {
        "report": ("report", "{}/algorithm", "--out", "new.html"),
        "join": (
            "join",
            "--prototypes",
            "{}/changed",
            "--data",
            "digits",
            "--epochs",
            "1",
            "--out",
            "new",
        ),
        "resume, finished": ("resume", "{}/algorithm"),
        "resume, partition": ("resume", "{}/stopped-partition"),
        "predict, partition": ("predict", "{}/partition", "{}/two.npy"),
        "run, another name": (
            "run",
            "{}/algorithm/config.toml",
            "--algorithm",
            "local",
            "--out",
            "new",
        ),
        "run, another name assigned": (
            "run",
            "{}/model/config.toml",
            "--set",
            "model=mlp",
            "--out",
            "new",
        ),
        "list": ("list", "models"),
    }.values(),
)
def test_what_needs_no_code_of_a_plug_in_works_without_it(
    command: tuple[str, ...], sent: Path, trace: Path
) -> None:
    assert fedproto(*(argument.format(sent) for argument in command)).code == 0
    assert not trace.exists()


def test_what_a_manifest_says_about_itself_runs_no_code(sent: Path, trace: Path) -> None:
    """`export` builds the model that `about` names, which may differ from that of `predict`."""
    succeed("run", *SMALL, "--model", "mlp", "--out", "plain")
    succeed("export", "plain", "--to", "exported", "--no-onnx")
    manifest = json.loads(Path("exported/manifest.json").read_text())
    manifest["about"]["model"] = "sent:net"
    Path("exported/manifest.json").write_text(json.dumps(manifest))
    refused = fedproto("export", "exported", "--to", "new", "--no-onnx")
    assert refused.code == 2 and "a plug-in" in only_line(refused.err)
    assert not trace.exists() and not Path("new").exists()


def test_a_module_that_is_loaded_already_is_not_called(sent: Path) -> None:
    """Nothing would be imported, but called: `os:system` takes a text."""
    manifest = json.loads((sent / "exported/manifest.json").read_text())
    (sent / "exported/manifest.json").write_text(json.dumps(manifest | {"model": "os:getcwd"}))
    refused = fedproto("predict", sent / "exported", sent / "two.npy")
    assert refused.code == 2 and "'os:getcwd', a plug-in" in only_line(refused.err)


def test_names_in_a_partition_are_not_looked_up(sent: Path, trace: Path) -> None:
    from fedproto.partitions.file import hash_partition

    content = json.loads((sent / "partition/partition.json").read_text())
    for client in content["clients"]:
        client["dataset"] = "sent:data"
    path = Path("partition.json")
    path.write_text(json.dumps(content | {"sha256": hash_partition(content)}))
    succeed(
        "run",
        "--dataset",
        "digits",
        "--clients",
        "4",
        "--rounds",
        "1",
        "--partition",
        f"file:{path}",
        "--out",
        "new",
    )
    assert not trace.exists()


# --- sweeps and archives


@pytest.mark.parametrize(
    "text",
    [
        'dataset = "digits"\nalgorithm = "sent:method"\n[sweep]\nseed = [0]',
        'dataset = "digits"\n[sweep]\nalgorithm = ["local", "sent:method(lam=2)"]',
        'dataset = "digits"\nmodel = "mlp*2,sent:net*2"\ndim = 6\n[sweep]\nseed = [0]',
        'dataset = "sent:data"\n[sweep]\nseed = [0]',
        'dataset = "digits"\n[partition]\nname = "sent:rows"\n[sweep]\nseed = [0]',
    ],
)
def test_a_sweep_that_somebody_sent_runs_no_code(text: str, trace: Path) -> None:
    Path("s.toml").write_text(f"rounds = 1\nclients = 4\n{text}")
    refused = fedproto("sweep", "s.toml", "--out", "new")
    assert refused.code == 2 and "s.toml names the" in only_line(refused.err)
    assert not trace.exists() and not Path("new").exists()
    succeed("sweep", "s.toml", "--out", "new", "--trust-plugins")
    assert trace.exists()


def archive_of(run: Path, cell: str, path: Path) -> None:
    """A finished run as `fedproto reproduce` packs a cell."""
    stamp = json.loads((run / "result.json").read_text())["partition"]
    with tarfile.open(path, "w:gz") as tar:
        for name in ("config.toml", "metrics.jsonl", "result.json"):
            tar.add(run / name, f"{cell}/{name}")
        content = (run / "partition.json").read_bytes()
        entry = tarfile.TarInfo(f"partitions/{stamp}.json")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_that_somebody_sent_runs_no_code(kind: str, sent: Path, trace: Path) -> None:
    from fedproto.reproduce.plan import Request, plan, read_spec

    first = plan(read_spec("table-mnist", Request(quick=True)))[0].cell
    archive_of(sent / kind, f"table-mnist/{first.name}", Path("cells.tgz"))
    refused = fedproto(
        "reproduce", "table-mnist", "--quick", "--archive", "cells.tgz", "--out", "new"
    )
    line = only_line(refused.err)
    assert refused.code == 2 and f"holds a run with the {kind} '{KINDS[kind]}'" in line
    assert not trace.exists()
    fedproto(
        "reproduce",
        "table-mnist",
        "--quick",
        "--finished",
        "--archive",
        "cells.tgz",
        "--out",
        "new",
    )
    assert not trace.exists()


# --- Python


def test_in_python_names_in_files_are_refused_and_the_users_own_are_not(
    sent: Path, trace: Path
) -> None:
    for reading in (
        lambda: package.Classifier.load(sent / "exported"),
        lambda: package.Classifier.of(sent / "model"),
        lambda: read_exported(sent / "exported"),
        lambda: reopen(RunFolder.open(sent / "algorithm")),
        lambda: plugins.find("model", "sent:net"),
        lambda: plugins.build("model", Part("sent:net"), None),
        lambda: plugins.short("model", Part("sent:net")),
    ):
        with pytest.raises(ConfigError, match=r"a plug-in .* fedproto.trust_plugins\('sent:"):
            reading()
    assert not trace.exists()
    small: dict[str, Any] = {"dataset": "digits", "clients": 4, "rounds": 1, "shots": 5}
    package.run(model="sent:net", out="mine", **small)
    assert trace.exists()
    assert len(package.Classifier.of("mine").classes_) == 9  # the same name, which the user gave
    with pytest.raises(ConfigError, match="sent:method"):  # another function of the same module
        reopen(RunFolder.open(sent / "algorithm"))


def test_a_name_can_be_trusted_from_python(sent: Path, trace: Path) -> None:
    package.trust_plugins("sent:net")
    assert len(package.Classifier.load(sent / "exported").classes_) == 9
    assert trace.exists()


@pytest.mark.parametrize("name", ["mlp", "sent", "sent:", ":net", ""])
def test_only_a_plug_in_can_be_trusted(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a plug-in"):
        package.trust_plugins(name)


def test_trust_ends_with_the_command(sent: Path) -> None:
    """Flags of one command say nothing about the next in the same process."""
    succeed("predict", sent / "exported", sent / "two.npy", "--trust-plugins")
    assert fedproto("predict", sent / "exported", sent / "two.npy").code == 2


# --- deployment

MEMBER = 'name = "a"\nstate = "kept"\n'


@pytest.mark.parametrize(
    "chosen", ['data = "digits"\nmodel = "sent:net"\n', 'data = "sent:data"\n']
)
@pytest.mark.parametrize("key", ["", "trust-plugins = true\n"])
@pytest.mark.parametrize(
    "command", [("predict", "a.toml", "x.npy"), ("export", "a.toml", "--to", "new")]
)
def test_a_members_file_that_somebody_sent_cannot_vouch_for_itself(
    command: tuple[str, ...], key: str, chosen: str, trace: Path
) -> None:
    Path("a.toml").write_text(MEMBER + chosen + key)
    refused = fedproto(*command)
    assert (
        refused.code == 2
        and "a.toml names the" in only_line(refused.err)
        and "--trust-plugins" in refused.err
    )
    assert not trace.exists()
    allowed = fedproto(*command, "--trust-plugins")
    assert allowed.code == 2 and "has not trained yet" in only_line(allowed.err)


@pytest.mark.parametrize(
    "chosen", ['data = "digits"\nmodel = "sent:net"\n', 'data = "sent:data"\n']
)
def test_an_operator_allows_plug_ins_in_the_members_own_file(chosen: str, trace: Path) -> None:
    path = Path("a.toml")
    path.write_text(MEMBER + chosen)
    with pytest.raises(
        ConfigError,
        match=r"a\.toml names the .*: if you trust it, write trust-plugins = true there$",
    ):
        read_member(path, operated=True)
    path.write_text(MEMBER + chosen + "trust-plugins = true\n")
    with pytest.raises(RunFolderError, match="has not trained yet"):
        load_trained_member(read_member(path, operated=True))


@pytest.mark.parametrize("settings", [{"algorithm": "sent:method"}, {"model": "sent:net"}])
def test_a_server_runs_plug_ins_where_its_operator_says_so(
    settings: dict[str, Any], trace: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"^its table names the .* write trust-plugins = true there$"
    ):
        split_run_config(settings, "its table")
    assert not trace.exists()
    _, terms = split_run_config(settings | {"trust-plugins": True}, "its table")
    assert terms.build().name in ("method", "fedproto")


# --- where they are found


def test_the_current_folder_is_searched_for_one_import_only(trace: Path) -> None:
    before = list(sys.path)
    succeed("run", *SMALL, "--algorithm", "sent:method", "--out", "new")
    assert trace.exists() and sys.path == before and "" not in sys.path


def test_the_path_is_as_before_when_the_import_fails(trace: Path) -> None:
    Path("sent.py").write_text("raise ZeroDivisionError('at once')")
    before = list(sys.path)
    assert "ZeroDivisionError: at once" in only_line(
        fedproto("run", *SMALL, "--algorithm", "sent:f").err
    )
    assert sys.path == before


@pytest.mark.parametrize("lazily", [False, True])
def test_a_plug_in_may_import_files_beside_it(
    lazily: bool, tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its top, or when its function is called."""
    monkeypatch.delitem(sys.modules, "sent_beside", raising=False)
    Path("sent_beside.py").write_text("from fedproto.algorithms.fedavg import fedavg")
    load = "from sent_beside import fedavg"
    Path("sent.py").write_text(
        f"def f():\n    {load}\n    return fedavg()"
        if lazily
        else f"{load}\ndef f(): return fedavg()"
    )
    before = list(sys.path)
    succeed("run", *SMALL, "--algorithm", "sent:f", "--out", "new")
    assert sys.path == before
    monkeypatch.delitem(sys.modules, "sent_beside")


def test_a_plug_in_may_be_a_package(trace: Path) -> None:
    Path("sent.py").unlink()
    Path("sent/deep").mkdir(parents=True)
    Path("sent/deep/er.py").write_text(CODE)
    try:
        succeed("run", *SMALL, "--algorithm", "sent.deep.er:method", "--out", "new")
    finally:
        for name in [name for name in sys.modules if name.startswith("sent.")]:
            del sys.modules[name]


def test_a_folder_may_be_named(trace: Path) -> None:
    """Then the current one is not searched."""
    Path("mine").mkdir()
    Path("mine/sent.py").write_text(CODE)
    succeed("run", *SMALL, "--algorithm", "sent:method", "--plugin-dir", "mine", "--out", "new")
    assert not trace.exists()
    sys.modules.pop("sent")
    Path("mine/sent.py").unlink()
    refused = fedproto(
        "run", *SMALL, "--algorithm", "sent:method", "--plugin-dir", "mine", "--out", "newer"
    )
    assert (
        refused.code == 2
        and "cannot be loaded from" in only_line(refused.err)
        and not trace.exists()
    )


def test_a_named_folder_must_be_one(trace: Path) -> None:
    refused = fedproto("run", *SMALL, "--algorithm", "sent:method", "--plugin-dir", "nowhere")
    assert (
        refused.code == 2
        and only_line(refused.err) == "error: --plugin-dir nowhere is not a folder"
    )


def test_the_current_folder_cannot_replace_an_installed_module(
    trace: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path_factory.mktemp("installed")
    (installed / "sent.py").write_text(CODE)
    monkeypatch.syspath_prepend(installed)
    succeed("run", *SMALL, "--algorithm", "sent:method", "--out", "new")
    assert not trace.exists()


def test_a_source_of_ones_own_may_bring_its_model(trace: Path) -> None:
    Path("sent.py").write_text(CODE.replace('name="theirs"', 'name="theirs", model="sent:net"'))
    succeed("run", *SMALL, "--dataset", "sent:data", "--out", "new")
    assert json.loads(Path("new/result.json").read_text())["clients"][0]["model"] == "sent:net"


def test_several_processes_have_the_plug_ins(trace: Path) -> None:
    """They are forked, so that what was imported is there, and nothing is looked for."""
    chosen = (
        "--algorithm",
        "sent:method",
        "--model",
        "sent:net",
        "--dataset",
        "sent:data",
        "--clients",
        "4",
    )
    shape = ("--rounds", "2", "--shots", "5", "--set", "workers=2")
    succeed("run", *chosen, *shape, "--engine", "processes", "--out", "several")
    succeed("run", *chosen, *shape, "--engine", "reference", "--out", "one")
    several, one = (json.loads(Path(run, "result.json").read_text()) for run in ("several", "one"))
    assert several["accuracy"] == one["accuracy"]


# --- plug-ins that do not keep to the contract

WRONG = {
    "a model of no arguments": ("model", "def f(): pass", "must take 1 positional arguments"),
    "a model of two arguments": (
        "model",
        "def f(fit, more): pass",
        "must take 1 positional arguments",
    ),
    "a model that fails": (
        "model",
        "def f(fit): return 1 / 0",
        "failed (sent.py, line 1): ZeroDivisionError",
    ),
    "a model that ends the program": (
        "model",
        "import sys\ndef f(fit): sys.exit(3)",
        "failed",
        "SystemExit: 3",
    ),
    "a model that returns nothing": (
        "model",
        "def f(fit): pass",
        "returned NoneType",
        "torch.nn.Module",
    ),
    "a model of one output": (
        "model",
        "from torch import nn\n"
        "def f(fit): return nn.Sequential(nn.Flatten(), nn.Linear(64, fit.classes))",
        "must take a batch of inputs of shape (1, 8, 8) and return (features, logits)",
    ),
    "a model for other inputs": (
        "model",
        "from torch import nn\nclass N(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.l = nn.Linear(3, 2)\n    def forward(self, x): return self.l(x), self.l(x)\n"
        "def f(fit): return N()",
        "must take a batch of inputs of shape (1, 8, 8)",
    ),
    "a model that returns whole numbers": (
        "model",
        "from torch import nn\nclass N(nn.Module):\n    def forward(self, x):\n"
        "        x = x.flatten(1)[:, :10].long()\n        return x, x\ndef f(fit): return N()",
        "features are torch.int64",
    ),
    "a model that loses rows": (
        "model",
        "from torch import nn\nclass N(nn.Module):\n    def forward(self, x):\n"
        "        x = x.flatten(1)[:, :10]\n        return x[:1], x\ndef f(fit): return N()",
        "1 and 2 rows came back for 2 samples",
    ),
    "a model that fails in training": (
        "model",
        "from torch import nn\nclass N(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.drop = nn.Dropout()\n    def forward(self, x):\n"
        "        if self.training: raise RuntimeError('not now')\n"
        "        x = x.flatten(1)[:, :10]\n        return x, x\ndef f(fit): return N()",
        "client 0's model cannot be trained: RuntimeError: not now",
    ),
    "annotations of nothing": (
        "model",
        "def f(fit: 'Fit'): pass",
        "the parameters of f cannot be read",
        "NameError",
    ),
    "no signature": ("model", "f = iter", "the parameters of iter cannot be read"),
    "an option without a default": (
        "model",
        "def f(fit, *, width): pass",
        "needs its option 'width'",
    ),
    "an option of no known type": (
        "model(x=1)",
        "import torch\ndef f(fit, *, x: torch.nn.Linear = None): pass",
        "model sent's x cannot be '1'",
    ),
    "a default that no file can hold": (
        "model",
        "def f(fit, *, x=object()): pass",
        "sent's x must be a number, text",
    ),
    "an infinite default": (
        "model",
        "def f(fit, *, x=float('inf')): pass",
        "sent's x must be a number, text",
    ),
    "a method with an argument": (
        "algorithm",
        "def f(lam): pass",
        "must take 0 positional arguments",
    ),
    "an option that is not keyword-only": (
        "algorithm(lam=2)",
        "def f(lam=1.0): pass",
        "'lam' cannot be set: the function of algorithm sent takes it as a positional parameter",
        "write `*` before it",
    ),
    "a method whose loss takes two": (
        "algorithm",
        "from dataclasses import replace\nfrom fedproto.algorithms.fedavg import fedavg\n"
        "def f(): return replace(fedavg(), loss=lambda step, more: {})",
        "loss must be a function of (step): missing a required argument: 'more'",
    ),
    "a method whose loss is a number": (
        "algorithm",
        "from dataclasses import replace\nfrom fedproto.algorithms.fedavg import fedavg\n"
        "def f(): return replace(fedavg(), loss=3)",
        "loss must be a function of (step), not int",
    ),
    "a method without a name": (
        "algorithm",
        "from dataclasses import replace\nfrom fedproto.algorithms.fedavg import fedavg\n"
        "def f(): return replace(fedavg(), name=None)",
        "must have a name that is text, not None",
    ),
    "a method of no phases": (
        "algorithm",
        "from dataclasses import replace\nfrom fedproto.algorithms.fedavg import fedavg\n"
        "def f(): return replace(fedavg(), phases=[1])",
        "phases must be a tuple of fedproto.Phase",
    ),
    "a method that collects something": (
        "algorithm",
        "from dataclasses import replace\nfrom fedproto.algorithms.fedavg import fedavg\n"
        "def f(): return replace(fedavg(), collects='before')",
        "collects must be nothing, after or during, not 'before'",
    ),
    "a method whose server is nothing": (
        "algorithm",
        "from dataclasses import replace\nfrom fedproto.algorithms.fedavg import fedavg\n"
        "def f(): return replace(fedavg(), init=lambda parameters, task: None)",
        "init must return a dict of tensors by name, not NoneType",
    ),
    "a source with an argument": ("dataset", "def f(): pass", "must take 1 positional arguments"),
    "a source of lists": (
        "dataset",
        "from fedproto.data import Source, Split\n"
        "def f(data_folders):\n    s = Split([[1.0]], [0])\n"
        "    return Source('s', ('a',), s, s)",
        "dataset 'sent:f' failed",
    ),
    "a partition that is text": (
        "partition",
        "def f(pool): return 'rows'",
        "client 0's portion must be",
    ),
    "a partition of too few": (
        "partition",
        "def f(pool): return []",
        "returned 0 portions for 4 clients",
    ),
    "a partition of fractions": (
        "partition",
        "def f(pool): return [([0.5], [0])] * 4",
        "client 0's training rows must be a list of whole numbers",
    ),
    "a partition beyond the data": (
        "partition",
        "def f(pool): return [([0], [10**9])] * 4",
        "client 0's test rows must lie between 0 and",
    ),
    "a partition that gives a row twice": (
        "partition",
        "def f(pool): return [([0], [0])] * 4",
        "gives client 1 a training row twice, or one that another client has",
    ),
}


@pytest.mark.parametrize(
    ("kind", "code", "words"), [(k, c, w) for k, c, *w in WRONG.values()], ids=WRONG
)
def test_a_plug_in_that_breaks_the_contract_is_one_sentence(
    kind: str, code: str, words: list[str], trace: Path
) -> None:
    Path("sent.py").write_text(code)
    flag, bracket, options = kind.partition("(")
    settings = {"dataset": "digits", "clients": "4", "rounds": "1"} | {
        flag: f"sent:f{bracket}{options}"
    }
    arguments = [word for key, value in settings.items() for word in (f"--{key}", value)]
    refused = fedproto("run", *arguments, "--out", "new")
    assert refused.code == 2, refused.err
    assert all(word in only_line(refused.err) for word in words), refused.err
    assert not Path("new").exists()


def test_a_method_whose_aggregate_returns_nothing_is_one_sentence(trace: Path) -> None:
    Path("sent.py").write_text(
        "from dataclasses import replace\nfrom fedproto.algorithms.fedavg import fedavg\n"
        "def f(): return replace(fedavg(), aggregate=lambda server, uploads: None)"
    )
    refused = fedproto("run", *SMALL, "--algorithm", "sent:f", "--out", "new")
    assert refused.code == 2
    assert "round 1, the server of fedavg: aggregate must return a dict of tensors" in only_line(
        refused.err
    )


def test_a_key_that_a_plug_in_takes_by_position_is_refused_with_the_reason(trace: Path) -> None:
    Path("sent.py").write_text("def f(lam=1.0): pass")
    refused = fedproto("run", *SMALL, "--algorithm", "sent:f", "--set", "lam=2", "--out", "new")
    assert refused.code == 2
    words = "the function of algorithm 'sent:f' takes it as a positional parameter"
    assert words in only_line(refused.err)


LOSS_THAT_FAILS = """
from dataclasses import replace

from fedproto.algorithms.fedproto import fedproto


def loss(step):
    return {"distance": step.received["protos"].sum()}


def f():
    return replace(fedproto(), name="mine", loss=loss)
"""


def test_a_method_that_fails_is_named_with_its_file_and_line(trace: Path) -> None:
    Path("sent.py").write_text(LOSS_THAT_FAILS)
    engine = ("--engine", "vectorised")
    refused = fedproto("run", *SMALL, *engine, "--algorithm", "sent:f", "--out", "new")
    assert refused.code == 2
    cause = "algorithm mine cannot be run for many clients at once (sent.py, line 8: KeyError"
    assert cause in " ".join(refused.out.split())
    assert ", training (sent.py, line 8): KeyError: 'protos'" in only_line(refused.err)


# --- what is read once


def test_the_options_that_a_caller_gets_are_its_own():
    """They are read once for each function, and no caller can change them for the next."""
    function = plugins.find("algorithm", "fedprox")
    options_of(function).clear()
    assert "mu" in options_of(function)
    plugins.names("algorithm").clear()
    assert "fedprox" in plugins.names("algorithm")
