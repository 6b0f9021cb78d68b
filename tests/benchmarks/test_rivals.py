"""The comparison with other libraries: data in their formats, turns, tables, wrong checkouts.

None of the other libraries is needed; small scripts take their place.
"""

import gzip
import importlib
import json
import pickle
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks import rivals
from benchmarks.rival_processes import paper_cnn
from benchmarks.rivals_data import (
    DividedData,
    Rows,
    divide,
    find_released_seed,
    write_fl_bench,
    write_idx,
    write_npz,
)
from benchmarks.rivals_page import make_table
from benchmarks.rivals_turns import Contender, Lap, take_turns
from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DIGITS, DataFolders, Source, Split
from fedproto.models import Fit


@pytest.fixture
def data():
    """Two clients' rows of 6 training and 4 test images of 28x28 pixels."""
    generator = np.random.default_rng(0)
    train = Split(generator.integers(0, 256, (6, 28, 28), dtype=np.uint8), np.arange(6))
    test = Split(generator.integers(0, 256, (4, 28, 28), dtype=np.uint8), np.arange(4))
    source = Source("small", DIGITS, train, test, mean=(0.1307,), std=(0.3081,))
    clients = [Rows(np.array([0, 1, 2]), np.array([0, 1])), Rows(np.array([4, 5]), np.array([3]))]
    return DividedData(source, clients)


# --- data


def test_idx_files_have_the_bytes_that_are_specified(data, tmp_path):
    write_idx(tmp_path, data.source)
    raw = tmp_path / "MNIST" / "raw"
    images = (raw / "train-images-idx3-ubyte").read_bytes()
    # The magic number 2051, then 6 images of 28 rows and 28 columns, as big-endian integers.
    assert images[:16].hex() == "00000803" + "00000006" + "0000001c" + "0000001c"
    assert images[16:] == data.source.train.x.tobytes()
    labels = (raw / "t10k-labels-idx1-ubyte").read_bytes()
    assert labels.hex() == "00000801" + "00000004" + "00010203"


def test_idx_files_are_read_again_as_mnist(data, tmp_path):
    write_idx(tmp_path, data.source)
    for path in (tmp_path / "MNIST" / "raw").iterdir():
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    source = plugins.build("dataset", Part("mnist"), DataFolders(str(tmp_path)))
    assert np.array_equal(source.train.x, data.source.train.x)
    assert np.array_equal(source.test.y, data.source.test.y)


def test_clients_of_pfllib_get_their_own_normalised_rows(data, tmp_path):
    write_npz(tmp_path, data)
    with np.load(tmp_path / "train" / "1.npz", allow_pickle=True) as archive:  # as PFLlib reads it
        content = archive["data"].tolist()
    expected = (data.source.train.x[[4, 5]] / 255 - 0.1307) / 0.3081
    assert content["x"].shape == (2, 1, 28, 28)
    assert np.allclose(content["x"][:, 0], expected, atol=1e-6)
    assert content["y"].tolist() == [4, 5]
    assert (tmp_path / "test" / "0.npz").exists()


def test_fl_bench_numbers_test_rows_after_training_rows(data, tmp_path):
    write_fl_bench(tmp_path, data)
    partition = pickle.loads((tmp_path / "partition.pkl").read_bytes())
    indices = partition["data_indices"]
    assert indices[0]["train"].tolist() == [0, 1, 2]
    assert indices[0]["test"].tolist() == [6, 7]
    assert indices[1]["test"].tolist() == [9]
    assert partition["separation"]["train"] == [0, 1]
    assert partition["separation"]["total"] == 2
    assert json.loads((tmp_path / "args.json").read_text())["split"] == "sample"


def test_the_division_is_that_of_our_own_run():
    settings = {"dataset": "mnist5k", "clients": 4, "ways": 3, "shots": 20, "stdev": 0}
    divided = divide(settings | {"test_shots": 5, "seed": 1})
    labels = [np.asarray(divided.source.train.y)[client.train] for client in divided.clients]
    for held in labels:
        assert np.unique(held, return_counts=True)[1].tolist() == [20, 20, 20]
    rows = np.concatenate([client.train for client in divided.clients])
    assert len(set(rows.tolist())) == 240
    assert len(divided.clients[0].test) == 15


def test_the_released_seed_gives_the_steps_of_w20():
    seed = find_released_seed(clients=20, batch=8, steps=740)
    # What the released code draws: classes per client, then images per class.
    np.random.seed(seed)
    ways = np.random.randint(max(2, 3 - 2), min(10, 3 + 2 + 1), 20)
    shots = np.random.randint(100 - 2 + 1, 100 + 2 - 1, 20)
    assert sum(int(n * k) // 8 for n, k in zip(ways, shots, strict=True)) == 740


# --- the paper's network in other forms


@pytest.mark.parametrize("channels", [18, 20, 22])
def test_the_network_is_ours(channels):
    ours = plugins.build("model", Part("cnn", {"channels": channels}), Fit((1, 28, 28), 10))
    theirs = paper_cnn.BodyAndFc(channels)
    shapes = [tuple(parameter.shape) for parameter in ours.parameters()]
    assert [tuple(parameter.shape) for parameter in theirs.parameters()] == shapes
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.copy_(mine)
    images = torch.randn(5, 1, 28, 28)
    features, logits = ours.eval()(images)
    assert torch.equal(theirs.eval()(images), logits)
    assert torch.equal(theirs.body(images), features)


def test_the_head_drops_inputs_only_in_training():
    head = paper_cnn.Head(50, 10)
    features = torch.ones(4, 50)
    assert torch.equal(head.eval()(features), torch.nn.Linear.forward(head, features))
    assert not torch.equal(head.train()(features), torch.nn.Linear.forward(head, features))


# --- what is started in the processes


@pytest.fixture
def launch(monkeypatch):
    """The script that starts the others, imported as if it were run."""
    monkeypatch.syspath_prepend(rivals.PROCESSES)
    module = importlib.import_module("launch")
    yield module
    for library in module.DECLARED:
        library._destroy()
    for name in ("launch", "paper_cnn"):
        del sys.modules[name]


def add_module(monkeypatch, name: str, **contents) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


IMAGES = torch.zeros(2, 1, 28, 28)


def test_pfllib_builds_the_papers_network_and_takes_its_head_off(launch, monkeypatch):
    models = add_module(monkeypatch, "flcore.trainmodel.models", FedAvgCNN=None)
    launch.use_in_pfllib([20] * 20)
    model = models.FedAvgCNN(in_features=1, num_classes=10, dim=1024)
    assert model(IMAGES).shape == (2, 10)
    model.fc = torch.nn.Identity()
    assert model(IMAGES).shape == (2, 50)


def test_htfllib_finds_a_model_per_client(launch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launch.use_in_htfllib([18, 22])
    for number, channels in enumerate((18, 22)):
        path = tmp_path / launch.MODELS_FOLDER / f"Client_{number}_model.pt"
        model = torch.load(path, weights_only=False)  # written just above
        assert model.base[3].out_channels == channels
        assert model.head(model.base(IMAGES)).shape == (2, 10)


def test_fl_bench_knows_the_papers_network_as_custom(launch, monkeypatch):
    models = add_module(
        monkeypatch, "src.utils.models", DecoupledModel=torch.nn.Module, MODELS={"lenet5": None}
    )
    launch.use_in_fl_bench([20] * 20)
    model = models.MODELS["custom"](dataset="mnist", pretrained=True)
    assert model.classifier.in_features == 50
    assert model.classifier(model.base(IMAGES)).shape == (2, 10)


def test_the_script_is_run_with_its_arguments_and_neighbours(launch, tmp_path, monkeypatch, capsys):
    add_module(monkeypatch, "torchvision")
    (tmp_path / "rivals_test_neighbour.py").write_text("GREETING = 'found'\n")
    script = tmp_path / "main.py"
    script.write_text(
        "import sys\nfrom rivals_test_neighbour import GREETING\n"
        "if __name__ == '__main__':\n    print(GREETING, sys.argv[1:])\n"
    )
    command = ["launch.py", "released", "20,20", str(script), "--rounds", "3"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(sys, "path", list(sys.path))
    launch.main()
    assert capsys.readouterr().out == "found ['--rounds', '3']\n"


def test_operators_that_torchvision_misses_are_declared(launch, tmp_path, monkeypatch):
    package = tmp_path / "torchvision"
    package.mkdir()
    package.joinpath("__init__.py").write_text(
        "import torch\n"
        "for name in ('nms', 'qnms'):\n"
        "    if not hasattr(torch.ops.torchvision, name):\n"
        "        raise RuntimeError(f'operator torchvision::{name} does not exist')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    launch.import_torchvision()
    assert len(launch.DECLARED) == 1
    assert "torchvision" in sys.modules
    monkeypatch.delitem(sys.modules, "torchvision")


def test_our_own_process_prints_a_mark_per_round(monkeypatch, capsys):
    settings = {"dataset": "mnist5k", "clients": 2, "ways": 2, "shots": 4, "stdev": 0}
    settings |= {"rounds": 2, "test_shots": 2, "engine": "vectorised"}
    monkeypatch.setattr(sys, "argv", ["ours.py", json.dumps(settings)])
    runpy.run_path(str(rivals.PROCESSES / "ours.py"), run_name="__main__")
    assert capsys.readouterr().out == "round 1 is done\nround 2 is done\n"


# --- marks


def count_marks(name: str, printed: str) -> int:
    mark = re.compile(rivals.RIVALS[name].mark)
    return sum(mark.search(line) is not None for line in printed.splitlines())


def test_marks_are_found_once_per_round():
    released = (
        "\n | Global Training Round : 1 |\n\n 50%|#####     | 1/2\n | Global Training Round : 2 |\n"
    )
    assert count_marks("released", released) == 2
    rounds = "\n-------------Round number: 0-------------\nEvaluate\n" + "-" * 50 + " 2.3456\n"
    assert count_marks("pfllib", rounds + "-" * 50 + " 0.98\n") == 2
    assert count_marks("htfllib", rounds) == 1
    line = "-" * 28 + " TRAINING EPOCH: 3 " + "-" * 28
    assert count_marks("fl-bench", f"Experiment\n{line}\nFedProto's average time\n") == 1


# --- turns


def write_contender(folder: Path, name: str, code: str) -> Contender:
    path = folder / f"{name}.py"
    path.write_text(code)
    return Contender(name, [sys.executable, str(path)], folder, r"^mark \d+$")


BUSY = """
import os, time
for number in range(100):
    {work}
    print("noise")
    print("mark", number)
"""
BURN = "begin = time.process_time()\n    while time.process_time() < begin + 0.3: pass"
#: A worker burns the time, and is gone when the mark is printed.
BURN_IN_WORKER = (
    "worker = os.fork()\n"
    "    if worker == 0:\n"
    "        while time.process_time() < 0.3: pass\n"
    "        os._exit(0)\n"
    "    os.waitpid(worker, 0)"
)


def test_each_contender_does_its_rounds(tmp_path):
    contenders = [
        write_contender(tmp_path, "burning", BUSY.format(work=BURN)),
        write_contender(tmp_path, "with a worker", BUSY.format(work=BURN_IN_WORKER)),
        write_contender(tmp_path, "idle", BUSY.format(work="time.sleep(0.02)")),
    ]
    said = []
    found = take_turns(contenders, 3, tmp_path, said.append)
    assert [len(laps) for laps in found.values()] == [3, 3, 3]
    # At least what was burned, less the ticks of the clock.
    assert all(lap.cpu_seconds > 0.25 for lap in found["burning"])
    assert all(lap.cpu_seconds > 0.25 for lap in found["with a worker"])
    assert all(lap.seconds > 0 for lap in found["idle"])
    assert said == [
        "starting burning",
        "starting with a worker",
        "starting idle",
        "turn 1 of 3",
        "turn 2 of 3",
        "turn 3 of 3",
    ]
    assert "noise\nmark 0\nnoise\nmark 1\n" in (tmp_path / "idle.log").read_text()


def test_a_contender_that_ends_has_its_reason_and_the_others_go_on(tmp_path):
    broken = "print('mark 0')\nimport no_such_module\n"
    short = "for number in range(3): print('mark', number)\n"
    contenders = [
        write_contender(tmp_path, "broken", broken),
        write_contender(tmp_path, "short", short),
        write_contender(tmp_path, "good", BUSY.format(work="time.sleep(0.02)")),
    ]
    found = take_turns(contenders, 2, tmp_path, lambda line: None)
    assert found["broken"] == "exit code 1: ModuleNotFoundError: No module named 'no_such_module'"
    assert found["short"] == "it ended after too few rounds"
    assert len(found["good"]) == 2


# --- the table


def test_ratios_are_of_medians():
    found = {
        "ours": [Lap(1.0, 0.5), Lap(9.0, 0.7), Lap(2.0, 0.6)],
        "theirs": [Lap(5.0, 1.5), Lap(6.0, 1.4), Lap(7.0, 3.0)],
        "broken": "exit code 1: a | b",
    }
    table = make_table(found, {"another": "it gives all clients the same model"}, "ours")
    assert table.splitlines()[2:] == [
        "| ours | 0.60 (0.50 to 0.70) | 2.00 | 1.0 | 1.0 |",
        "| theirs | 1.50 (1.40 to 3.00) | 6.00 | 2.5 | 3.0 |",
        "| broken | did not run: exit code 1: a / b | | | |",
        "| another | did not run: it gives all clients the same model | | | |",
    ]


def test_without_our_own_time_there_are_no_ratios():
    table = make_table({"ours": "exit code 1: x", "theirs": [Lap(2.0, 1.0)]}, {}, "ours")
    assert table.splitlines()[-1] == "| theirs | 1.00 (1.00 to 1.00) | 2.00 | - | - |"


# --- the command line


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--pfllib", "here"], "here is not a checkout of PFLlib: it has no system/main.py"),
        (["--fl-bench", "here"], "here is not a checkout of FL-bench: it has no main.py"),
        ([], "name at least one checkout: --released, --pfllib, --htfllib, --fl-bench"),
        (["--turns", "0"], "--turns and --threads are whole numbers of at least 1"),
        (["--python", "./none"], "--python is ./none, which is not a program that can be run"),
    ],
)
def test_wrong_arguments_are_refused(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(SystemExit) as ended:
        rivals.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_a_working_copy_leaves_the_checkout_alone(data, tmp_path):
    checkout = tmp_path / "checkout"
    (checkout / "system" / "flcore").mkdir(parents=True)
    (checkout / "system" / "main.py").write_text("print('started')\n")
    rivals.check_checkout("pfllib", checkout)
    before = sorted(checkout.rglob("*"))
    folder = tmp_path / "work"
    workshop = rivals.Workshop(rivals.WORKS["w20"], folder, data, 25, 1)
    (contender,), refused = rivals.list_rivals({"pfllib": checkout}, "python-x", workshop)
    assert refused == {}
    assert sorted(checkout.rglob("*")) == before
    assert contender.command[0] == "python-x"
    assert contender.command[2:5] == [
        "pfllib",
        ",".join(["20"] * 20),
        str(folder / "pfllib" / "system" / "main.py"),
    ]
    assert contender.environment["OMP_NUM_THREADS"] == "1"
    assert (contender.folder / ".." / "dataset" / "MNIST" / "train" / "0.npz").exists()


def test_a_library_with_one_model_cannot_mix(data, tmp_path):
    workshop = rivals.Workshop(rivals.WORKS["mixed"], tmp_path, data, 25, 1)
    checkouts = {"pfllib": tmp_path / "a", "fl-bench": tmp_path / "b"}
    contenders, refused = rivals.list_rivals(checkouts, sys.executable, workshop)
    assert contenders == []
    assert refused == dict.fromkeys(["PFLlib", "FL-bench"], "it gives all clients the same model")
