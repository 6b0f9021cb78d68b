"""`fedproto reproduce`: that its specs are the paper's settings, that its numbers are those of the runs, and that what
is finished is never run again. A tiny target of two methods goes the whole way."""

import contextlib
import functools
import io
import json
import math
import os
import re
import statistics
import tarfile
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto, files_in, only_line
from helpers.tiny import experiment, finished
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.func import functional_call

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DataFolders
from fedproto.errors import ConfigError, DataError, RunFolderError
from fedproto.reproduce import archive as archives
from fedproto.reproduce import make, plan, probes, tables
from fedproto.reproduce.plan import Narrowed, read_spec
from fedproto.runs import assemble, sweep
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import RunFolder

TABLES = {"table-mnist": "MNIST", "table-femnist": "FEMNIST", "table-cifar10": "CIFAR10"}
METHODS = ("Local", "FeSEM", "FedProx", "FedPer", "FedAvg", "FedRep", "FedProto", "FedProto-mh")
SHARED = Path(__file__).resolve().parents[3] / "shared"
WEIGHTS = "weights/resnet18-tiny-imagenet-32.safetensors"

every_target = pytest.mark.parametrize("target", plan.targets())
every_table = pytest.mark.parametrize("target", TABLES)


@pytest.fixture
def weights_somewhere(tmp_path, monkeypatch):
    """A file where the weights of CIFAR-10's model are looked for: planning asks for its place, not for its content."""
    if "FEDPROTO_DATA" not in os.environ:
        (tmp_path / "data" / WEIGHTS).parent.mkdir(parents=True)
        (tmp_path / "data" / WEIGHTS).touch()
        monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path / "data"))


@functools.cache
def source_of(dataset):
    return plugins.build("dataset", Part(dataset), DataFolders())


def shared_out(config):
    (part,) = config.dataset
    return assemble.divide([source_of(part.name)] * config.clients, config.partition, config.seed)


# --- the specs


def test_every_table_and_figure_of_the_paper_has_a_target():
    assert {*TABLES, "fig-lambda", "fig-shots", "fig-tsne"} < set(plan.targets())


@every_target
@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_every_cell_can_be_configured(target, quick, weights_somewhere):
    spec = read_spec(target, Narrowed(quick=quick))
    planned = plan.plan(spec)
    assert len(planned) == sum(len(row.columns) * len(row.seeds) for row in spec.rows) > 0
    assert len({each.cell.name.lower() for each in planned}) == len(planned)  # a folder each
    if not quick:
        assert len({each.cell.config.toml() for each in planned}) == len(
            planned
        )  # and none is run twice
    assert all(each.cell.config.seed == each.seed for each in planned)
    kept = {each.cell.config.checkpoint_every for each in planned}
    if spec.after:  # the last round's, for whoever looks at the models afterwards
        assert kept == {each.cell.config.rounds for each in planned}
    else:
        assert kept <= {0, 25}


@every_target
def test_nothing_in_a_spec_is_passed_over(target):
    tables_of = tomllib.loads((plan.SPECS / f"{target}.toml").read_text())
    assert tables_of.keys() <= {
        "title",
        "paper",
        "seeds",
        "settings",
        "columns",
        "rows",
        "after",
        "quick",
        "note",
    }
    assert tables_of.get("quick", {}).keys() <= {
        "seeds",
        "rounds",
        "columns",
        "rows",
        "settings",
        "without",
    }
    for row in tables_of["rows"].values():
        assert set(row.get("columns", ())) <= tables_of["columns"].keys()
    assert set(tables_of["quick"].get("columns", ())) <= tables_of["columns"].keys()
    assert set(tables_of["quick"].get("rows", ())) <= tables_of["rows"].keys()
    assert tables_of.get("after", {}).keys() <= {"embeddings", "travel", "before"}


@every_target
def test_the_quick_version_needs_no_data_and_can_be_prepared(target, monkeypatch, tmp_path):
    """Layers that methods name are there, and no class runs out of images."""
    monkeypatch.delenv("FEDPROTO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = read_spec(target, Narrowed(quick=True))
    assert spec.paper is None  # other settings than the paper's are not held against its numbers
    planned = plan.plan(spec)
    for each in planned:
        assert len(shared_out(each.cell.config)) == each.cell.config.clients
    loaded = {"mnist5k": source_of("mnist5k")}
    for row in spec.rows:
        (first, *_) = [each for each in planned if each.row is row]
        assert len(Experiment.prepare(first.cell.config, loaded=loaded).federation.members) == 20


@every_target
def test_no_class_runs_out_of_images(target):
    if "FEDPROTO_DATA" not in os.environ:
        pytest.skip("the data sets themselves are not here")
    configs = {
        str((each.cell.config.partition, each.seed)): each.cell.config
        for each in planned_of(target)
    }
    try:
        source_of(next(iter(configs.values())).dataset[0].name)
    except DataError as error:  # CIFAR-10 has to be unpacked first
        pytest.skip(str(error))
    for config in configs.values():
        assert len(shared_out(config)) == 20


def planned_of(target, **narrowed):
    return plan.plan(read_spec(target, Narrowed(**narrowed)))


def test_a_row_may_be_of_some_columns_and_seeds(weights_somewhere):
    found = [
        (p.column, p.seed) for p in planned_of("table-cifar10") if p.row.name == "FedProto, batch 8"
    ]
    assert found == [("n = 3, stdev 1", 0)]


def test_data_that_is_not_there_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDPROTO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"resnet18-tiny-imagenet-32\.safetensors was not found in"):
        planned_of("table-cifar10")
    answer = fedproto("reproduce", "all", "--out", tmp_path / "out")
    assert answer.code == 2 and "was not found" in only_line(answer.err)
    assert not (tmp_path / "out").exists()  # refused before the first target is run
    answer = fedproto(
        "reproduce", "table-cifar10", "--finished", "--out", tmp_path / "out"
    )  # which needs no data
    assert answer.code == 2 and "holds no finished run of table-cifar10" in only_line(answer.err)


# --- the tables are the paper's


def paper_rows():
    return json.loads((Path(tables.__file__).parent / "paper.json").read_text())["rows"]


def test_the_papers_numbers_are_all_there():
    path = SHARED / "paper" / "tables.json"
    if not path.exists():
        pytest.skip("the paper is not here")
    assert paper_rows() == json.loads(path.read_text())["rows"] == tables.paper_rows()


def test_a_few_of_the_papers_numbers_by_eye():
    """Tables 2 to 4, as printed."""
    found = {(r["dataset"], r["method"], r["n"], r["stdev"]): r for r in paper_rows()}
    assert len(found) == len(paper_rows()) == 144
    assert found["MNIST", "Local", 3, 2]["accuracy"] == 94.05
    assert found["MNIST", "FeSEM", 4, 3]["accuracy"] == 95.82
    assert found["MNIST", "FedProto", 3, 2]["params_per_round"] == 4000
    assert found["MNIST", "FedAvg", 3, 2]["params_per_round"] == 430000
    assert found["CIFAR10", "FedProto", 3, 1]["rounds"] == 110


@every_table
def test_a_table_has_the_papers_methods_settings_and_rounds(target, weights_somewhere):
    wanted = {
        (r["method"], r["n"], r["stdev"]): r["rounds"]
        for r in paper_rows()
        if r["dataset"] == TABLES[target]
    }
    assert len(wanted) == 48
    for n, stdev in {key[1:] for key in wanted}:
        assert wanted["Local", n, stdev] == 0  # the paper gives none: as many as FedProto
        wanted["Local", n, stdev] = wanted["FedProto", n, stdev]
    planned = [p for p in planned_of(target) if p.row.name in METHODS]
    found = {
        (
            p.row.name,
            p.cell.config.partition.options["ways"],
            p.cell.config.partition.options["stdev"],
        ): (p.cell.config.rounds)
        for p in planned
    }
    assert found == wanted
    assert read_spec(target, Narrowed()).paper == TABLES[target]
    assert [row.name for row in read_spec(target, Narrowed()).rows[: len(METHODS)]] == list(METHODS)
    # A column's name says what it is, and no seed is left out.
    for p in planned:
        options = p.cell.config.partition.options
        assert p.column == f"n = {options['ways']}, stdev {options['stdev']:g}"
    assert {
        len({q.seed for q in planned if (q.row, q.column) == (p.row, p.column)}) for p in planned
    } == ({3} if target == "table-cifar10" else {5})


@every_table
def test_hyper_parameters_are_the_papers(target, weights_somewhere):
    """../shared/paper/NOTES.md; CIFAR-10's batch is the authors' own command's, as its spec says."""
    for p in planned_of(target):
        config, options = p.cell.config, p.cell.config.algorithm.options
        batch = 32 if target == "table-cifar10" and p.row.name != "FedProto, batch 8" else 8
        assert (config.clients, config.participation, config.lost_uploads, config.stragglers) == (
            20,
            1.0,
            0.0,
            0.0,
        )
        assert (config.batch, config.lr, config.momentum, config.epochs) == (batch, 0.01, 0.5, 1)
        assert config.partition.options["shots"] == 100
        assert config.partition.options["noise"] == "uniform"
        assert config.partition.options["shots_stdev"] is None  # the same as of n
        assert config.start == "shared"
        name = config.algorithm.name
        if name.startswith("fedproto"):
            assert options["lam"] == (0.1 if target == "table-cifar10" else 1)
            assert options["distance"] == "mse" and options["regularise"] == "sample"
        assert name != "fedprox" or options["mu"] == 0.1
        assert name != "fesem" or options["clusters"] == 3
        if name in ("fedper", "fedrep"):
            (head,) = (
                {"head"}
                if target == "table-cifar10" or p.row.name.endswith("personal")
                else {"fc1,fc2"}
            )
            assert options["personal"] == head
        assert name != "fedrep" or (options["head_epochs"], options["body_epochs"]) == (1, 1)
        released = config.profile == "released"
        assert released == (p.row.name == "FedProto, released")
        shots = {"table-mnist": 40}.get(target, 15) if released else None
        assert config.partition.options["test_shots"] == shots
        if name.startswith("fedproto"):
            expected = (
                ("uniform", "during", "drop") if released else ("samples", "after", "remember")
            )
            assert (options["weighting"], options["collect"], options["absent"]) == expected


def test_methods_of_a_table_share_their_partitions(weights_somewhere):
    """What is compared is the method: all rows of a column draw the same images for a seed."""
    by_column = {}
    for p in planned_of("table-mnist"):
        if p.row.name != "FedProto, released":  # which is tested on fewer images
            by_column.setdefault((p.column, p.seed), set()).add(str(p.cell.config.partition))
    assert {len(partitions) for partitions in by_column.values()} == {1}


# --- less of a target


def names(target, **narrowed):
    return [row.name for row in read_spec(target, Narrowed(**narrowed)).rows]


@pytest.mark.parametrize(
    ("methods", "rows"),
    [
        (("fedproto",), ["FedProto", "FedProto, released"]),
        (("FedProto-mh",), ["FedProto-mh"]),
        (("local", "FeSEM"), ["Local", "FeSEM"]),
        (("FeSEM", "local"), ["Local", "FeSEM"]),  # in the table's order
        (("fedrep",), ["FedRep", "FedRep, head personal"]),
        (("FedProto, released",), ["FedProto, released"]),
        (("FedProto", " released"), ["FedProto, released"]),  # as a list with commas is split
        (("local", " FedProto", "released", "fedavg "), ["Local", "FedAvg", "FedProto, released"]),
        (("FedPer", " head personal"), ["FedPer, head personal"]),
    ],
    ids=str,
)
def test_methods_are_named_by_row_or_algorithm(methods, rows):
    assert names("table-mnist", methods=methods) == rows


def test_rows_whose_names_hold_commas_can_be_asked_for(weights_somewhere):
    """Each row of each target by its own name, as the command line splits it."""
    for target in plan.targets():
        spec = read_spec(target, Narrowed())
        for row in spec.rows:
            found = names(target, methods=tuple(row.name.split(",")))
            assert row.name in found
            same = [r.name for r in spec.rows if r.settings["algorithm"] == row.name.lower()]
            assert set(found) == {row.name, *same}


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_seeds_are_the_first_of_the_specs(seeds):
    assert {tuple(row.seeds) for row in read_spec("table-mnist", Narrowed(seeds=seeds)).rows} == {
        tuple(range(seeds))
    }


def test_more_seeds_than_the_spec_has(weights_somewhere):
    spec = read_spec("table-cifar10", Narrowed(seeds=4))
    assert {row.name: row.seeds for row in spec.rows}["FedProto"] == [0, 1, 2, 3]
    assert {row.name: row.seeds for row in spec.rows}["FedProto, batch 8"] == [0]


@every_target
def test_rounds_are_of_every_run(target, weights_somewhere):
    spec = read_spec(target, Narrowed(rounds=7))
    assert {each.cell.config.rounds for each in plan.plan(spec)} == {7}
    assert spec.settings["rounds"] == 7  # the JSON says what was done
    if spec.after:
        assert {each.cell.config.checkpoint_every for each in plan.plan(spec)} == {7}


@pytest.mark.parametrize("quick", [False, True])
def test_narrowing_goes_together(quick):
    spec = read_spec("fig-tsne", Narrowed(quick=quick, seeds=2, rounds=4, methods=("fedper",)))
    assert [
        (p.row.name, p.seed, p.cell.config.rounds, p.cell.config.checkpoint_every)
        for p in plan.plan(spec)
    ] == [
        ("FedPer", 0, 4, 4),
        ("FedPer", 1, 4, 4),
    ]


def test_how_it_is_computed_goes_to_every_cell(tmp_path):
    narrowed = (("device", "cpu"), ("data_dir", str(tmp_path)))
    configs = [each.cell.config for each in planned_of("table-mnist", settings=narrowed)]
    assert {(config.device, config.data_dir) for config in configs} == {("cpu", str(tmp_path))}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("table-mnis",), "unknown target 'table-mnis': did you mean 'table-mnist'?"),
        (("../specs/table-mnist",), "unknown target '../specs/table-mnist'"),
        (
            ("table-mnist", "--methods", "fedprot"),
            "unknown method 'fedprot': did you mean 'fedproto'?",
        ),
        (
            ("table-mnist", "--methods", "local,fedavgg"),
            "unknown method 'fedavgg': did you mean 'fedavg'?",
        ),
        (("fig-lambda", "--methods", "fedavg"), "unknown method 'fedavg'"),
        (("table-mnist", "--methods", "FedProto, batch 8"), "unknown method 'batch 8'"),
        (("table-mnist", "--device", "gpu"), "unknown value of device 'gpu'"),
    ],
    ids=str,
)
def test_what_is_refused(arguments, sentence, tmp_path):
    answer = fedproto("reproduce", *arguments, "--quick", "--out", tmp_path / "out")
    assert answer.code == 2
    assert sentence in only_line(answer.err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag", ["--seeds", "--rounds"])
@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_numbers_that_are_none_are_refused(flag, value, tmp_path):
    answer = fedproto("reproduce", "table-mnist", flag, value, "--out", tmp_path / "out")
    assert answer.code == 2
    assert not (tmp_path / "out").exists()


# --- numbers


def test_a_summary_by_hand():
    # Means 0.6 and 0.8; deviations over clients 0.1 and 0.2. t(0.975, 1) = 12.7062, s.e. = (0.2 / √2) / √2 = 0.1.
    found = tables.summary([[0.5, 0.7], [0.6, 1.0]])
    assert found == pytest.approx({"mean": 0.7, "std_clients": 0.15, "interval": 1.27062}, abs=1e-5)
    # t(0.975, 4) = 2.77645; means 1 to 5: standard deviation √2.5, over √5.
    found = tables.summary([[value] for value in (1.0, 2.0, 3.0, 4.0, 5.0)])
    assert found == pytest.approx(
        {"mean": 3, "std_clients": 0, "interval": 2.77645 * math.sqrt(0.5)}, abs=1e-4
    )
    assert tables.summary([[0.5, 0.7]]) == pytest.approx(
        {"mean": 0.6, "std_clients": 0.1}
    )  # no interval of one seed
    assert tables.summary([[0.5], [0.5]]) == {"mean": 0.5, "std_clients": 0.0, "interval": 0.0}


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_summary_is_numpys(clients):
    found = tables.summary(clients)
    assert found["mean"] == pytest.approx(np.mean(clients), abs=1e-12)
    assert found["std_clients"] == pytest.approx(np.std(clients, axis=1).mean(), abs=1e-9)
    assert ("interval" in found) == (len(clients) > 1)
    json.loads(json.dumps(found), parse_constant=pytest.fail)  # no NaN


@pytest.mark.parametrize(
    ("values", "round"),
    [
        ([0.5, 0.9, 0.98, 1.0], 40),
        ([0.5, 0.9, 0.991, 1.0], 30),
        ([0.5, 1.0, 0.2, 0.5], 10),  # of the last round's, not the best
        ([0.99, 1.0, 1.0, 1.0], 10),  # 99% is enough
        ([0.0, 0.0, 0.0, 0.0], 10),
        ([0.7], 10),
    ],
    ids=str,
)
def test_the_first_round_that_is_close_to_the_last(values, round):
    curve = {
        "round": [10, 20, 30, 40][: len(values)],
        "head": [0.0] * len(values),
        "prototype": values,
    }
    assert tables.rounds_to_close(curve, "prototype") == round


# --- a tiny target, the whole way

TINY = """
title = "Tiny"
paper = "MNIST"
seeds = [0, 1]

[settings]
dataset = "digits"
model = "mlp(hidden=16,width=8)"
clients = 4
shots = 5
test_shots = 5
batch = 4
lr = 0.05
rounds = 3
eval_every = 1
checkpoint_every = 0
precision = "float64"
engine = "vectorised"

[columns]
"n = 3, stdev 2" = { ways = 3, stdev = 2 }
"n = 4, stdev 2" = { ways = 4, stdev = 2 }

[rows.Local]
algorithm = "local"

[rows.FedProto]
algorithm = "fedproto"
"""

SEEN = """
title = "Seen"
seeds = [3]

[settings]
dataset = "digits"
model = "mlp(hidden=16,width=8)"
algorithm = "fedproto"
clients = 4
shots = 5
ways = 3
stdev = 1
batch = 4
lr = 0.05
rounds = 3
precision = "float64"
engine = "vectorised"

[columns]
"all" = {}

[rows.FedProto]

[rows."FedProto, own start"]
start = "own"

[after]
embeddings = true
travel = true
"""


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """Tiny targets in the place of the real ones, without figures, which have tests of their own."""
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "tiny.toml").write_text(TINY)
    (folder / "seen.toml").write_text(SEEN)
    monkeypatch.setattr(plan, "SPECS", folder)
    monkeypatch.setattr(make, "_draw_figure", lambda *how: iter(()), raising=False)
    return folder


class Quiet:
    """A teller that says nothing, remembers what was trained, and may stop it all."""

    def __init__(self, stop_at=None):
        self.trained, self.done, self.broke, self.stop_at = [], [], [], stop_at

    def batch(self, cells, done, notices):
        self.trained.append([cell.name for cell in cells])
        self.done.append(done)
        return self.round

    def round(self, result):
        if self.stop_at == (len(self.trained), result.round):
            raise Killed

    def broken(self, cell, error):
        self.broke.append((cell.name, str(error)))

    def bar(self, cells, out):
        return contextlib.nullcontext(self)


class Killed(BaseException):
    """Stands for SIGKILL inside this process."""


def made(out, target="tiny", archive=None, stop_at=None, **narrowed):
    """Make a target; the teller, and the files written."""
    teller = Quiet(stop_at)
    files = list(make.make(target, Narrowed(**narrowed), out, archive, teller.bar))
    return teller, files


def content(out, name="tiny"):
    """The JSON of a target, without what a stopwatch measured."""
    found = json.loads((out / f"{name}.json").read_text(), parse_constant=pytest.fail)
    for run in (run for cell in found["cells"] for run in cell["runs"]):
        assert run.pop("seconds") >= 0
    assert found.pop("seconds") >= 0
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The tiny target, made once by the command line; tests that change it work on a copy."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("specs")
        (folder / "tiny.toml").write_text(TINY)
        patch.setattr(plan, "SPECS", folder)
        patch.setattr(make, "_draw_figure", lambda *how: iter(()), raising=False)
        out = tmp_path_factory.mktemp("done")
        answer = fedproto("reproduce", "tiny", "--out", out, "--archive", out / "cells.tgz")
    assert answer.code == 0, answer.err
    return out, answer


CELLS = [
    f"{method}-n={n}_stdev_2-seed={seed}"
    for method in ("Local", "FedProto")
    for n in (3, 4)
    for seed in (0, 1)
]


def test_the_command_line_writes_table_numbers_and_runs(done):
    out, answer = done
    assert [line for line in answer.out.splitlines() if line.startswith("written")] == [
        f"written to {out / 'tiny.json'}",
        f"written to {out / 'tiny.md'}",
    ]
    assert sorted(path.name for path in out.iterdir()) == [
        "cells.tgz",
        "runs",
        "tiny.json",
        "tiny.md",
    ]
    assert sorted(path.name for path in (out / "runs" / "tiny").iterdir()) == sorted(CELLS)
    assert "4 federations together" in answer.out  # a row is one stack


def test_the_json_holds_what_the_runs_found(done):
    out, _ = done
    found = json.loads((out / "tiny.json").read_text())
    assert (found["title"], found["command"]) == ("Tiny", "fedproto reproduce tiny")
    assert found["settings"] == tomllib.loads(TINY)["settings"]
    assert [(cell["method"], cell["n"], cell["stdev"]) for cell in found["cells"]] == [
        (method, n, 2) for method in ("Local", "FedProto") for n in (3, 4)
    ]
    for cell in found["cells"]:
        assert (cell["dataset"], cell["rounds"], cell["seeds"]) == ("digits", 3, [0, 1])
        assert cell["score"] == ("prototype" if cell["method"] == "FedProto" else "head")
        for run in cell["runs"]:
            folder = RunFolder(
                out / "runs" / "tiny" / f"{cell['method']}-n={cell['n']}_stdev_2-seed={run['seed']}"
            )
            result, lines = folder.result(), folder.metrics()
            assert (run["partition"], run["rounds"]) == (result["partition"], 3)
            for key, values in run["accuracy"].items():
                assert values == [round(client["accuracy"][key], 5) for client in result["clients"]]
            assert run["accuracy"].keys() == result["accuracy"].keys()
            assert run["curve"]["round"] == [1, 2, 3]
            for key in set(run["curve"]) - {"round"}:
                assert run["curve"][key] == [
                    round(line["accuracy"][key]["mean"], 5) for line in lines
                ]
                assert run["curve"][key][-1] == pytest.approx(
                    statistics.fmean(run["accuracy"][key]), abs=1e-5
                )
            assert run["communication"] == result["communication"]
            assert run["communication"]["bytes_up"] == sum(line["bytes_up"] for line in lines)
            assert run["loss"] == {
                name: round(value, 6) for name, value in lines[-1]["loss"].items()
            }
    # The methods of a column had the same images.
    stamps = {}
    for cell in found["cells"]:
        for run in cell["runs"]:
            stamps.setdefault((cell["column"], run["seed"]), set()).add(run["partition"])
    assert len(stamps) == 4 and all(len(same) == 1 for same in stamps.values())


def read_markdown(text):
    """All tables of a page, by the heading they stand under: a list of {head: entry} each."""
    found, heading = {}, ""
    for block in text.split("\n\n"):
        if block.startswith("#"):
            heading = block.lstrip("# ")
        if block.startswith("The same, "):
            heading = "own classes"
        if block.startswith("|"):
            head, _, *lines = (
                [entry.strip() for entry in line.strip("|").split("|")]
                for line in block.splitlines()
            )
            found[heading] = [dict(zip(head, line, strict=True)) for line in lines]
    return found


#: t(0.975, 1), from a printed table
T1 = 12.7062


def test_every_number_of_the_page_can_be_computed_from_the_json(done):
    out, _ = done
    found = json.loads((out / "tiny.json").read_text())
    page = (out / "tiny.md").read_text()
    shown = read_markdown(page)
    for column in ("n = 3, stdev 2", "n = 4, stdev 2"):
        held = [
            run["classes"]
            for cell in found["cells"]
            if cell["column"] == column
            for run in cell["runs"]
        ]
        shown[column] = shown.pop(f"{column} ({statistics.fmean(held):.1f} classes a client)")
    assert list(shown) == ["Tiny", "own classes", "n = 3, stdev 2", "n = 4, stdev 2"]
    paper = {
        (row["method"], row["n"]): row
        for row in paper_rows()
        if (row["dataset"], row["stdev"]) == ("MNIST", 2)
    }
    for cell in found["cells"]:
        theirs = paper[cell["method"], cell["n"]]
        (line,) = [each for each in shown[cell["column"]] if each["method"] == cell["method"]]
        for key in ("head", "head_own", "prototype", "prototype_own"):
            entry = line[key.replace("_own", ", own")]
            clients = [run["accuracy"].get(key) for run in cell["runs"]]
            if None in clients:
                assert (cell["method"], entry) == ("Local", "–")
                continue
            a, b = (100 * sum(each) / 4 for each in clients)
            spread = [
                math.sqrt(sum((100 * v - m) ** 2 for v in each) / 4)
                for each, m in zip(clients, (a, b), strict=True)
            ]
            numbers = [float(number) for number in re.findall(r"\d+\.\d+", entry)]
            assert entry == "{:.2f} ± {:.2f} [± {:.2f}]".format(*numbers)
            assert numbers == pytest.approx(
                [(a + b) / 2, sum(spread) / 2, T1 * abs(a - b) / 2], abs=0.006
            )
            if key.startswith(cell["score"]):
                table = shown["own classes" if key.endswith("_own") else "Tiny"]
                (overview,) = [each for each in table if each["method"] == cell["method"]]
                assert overview[cell["column"]] == (
                    f"{numbers[0]:.2f} ± {numbers[2]:.2f} ({theirs['accuracy']:.2f})"
                )
            column = {cell["score"]: "difference", f"{cell['score']}_own": "difference, own"}.get(
                key
            )
            if column:
                assert float(line[column]) == pytest.approx(
                    (a + b) / 2 - theirs["accuracy"], abs=0.011
                )
        curves = [run["curve"][cell["score"]] for run in cell["runs"]]
        reached = [next(n for n, value in enumerate(c, 1) if value >= 0.99 * c[-1]) for c in curves]
        assert line["to 99%"] == f"{sum(reached) / 2:.0f}"
        assert (line["seeds"], line["rounds"]) == ("2", "3")
        assert float(line["paper"]) == theirs["accuracy"]
        assert int(line["paper's"].replace(",", "")) == theirs["params_per_round"]
        values = [run["communication"]["values_per_round"] for run in cell["runs"]]
        assert int(line["values a round"].replace(",", "")) == pytest.approx(
            sum(values) / 2, abs=0.5
        )
        sent = [run["communication"]["bytes_up"] / 3 for run in cell["runs"]]
        assert int(line["bytes a round"].replace(",", "")) == pytest.approx(sum(sent) / 2, abs=0.5)
        for run in cell["runs"]:
            assert f"{cell['column']}, seed {run['seed']}: {run['partition'][:12]}" in page
    seconds = sum(run["seconds"] for cell in found["cells"] for run in cell["runs"])
    assert found["seconds"] == pytest.approx(seconds, abs=0.06)
    assert f"Made by `fedproto reproduce tiny`: {found['seconds']:,.0f} s of runs" in page
    assert page.startswith("# Tiny\n\nSeeds 0, 1, fixed before looking")


def test_values_a_round_are_the_prototypes_the_clients_hold(done):
    """By hand, from the partition: eight values a class and client."""
    out, _ = done
    for cell in content(out)["cells"]:
        for run in cell["runs"]:
            folder = (
                out / "runs" / "tiny" / f"{cell['method']}-n={cell['n']}_stdev_2-seed={run['seed']}"
            )
            clients = json.loads((folder / "partition.json").read_text())["clients"]
            held = sum(len(client["classes"]) for client in clients)
            assert run["communication"]["values_per_round"] == (
                8 * held if cell["method"] == "FedProto" else 0
            )


@pytest.mark.parametrize("method", ["local", "fedproto"])
def test_a_cell_is_what_run_gives_with_the_same_settings(method, done, tmp_path):
    """By the command line alone, and settings written by hand."""
    out, _ = done
    flags = {
        "dataset": "digits", "algorithm": method, "model": "mlp(hidden=16,width=8)", "clients": 4, "shots": 5,
        "test-shots": 5, "batch": 4, "lr": 0.05, "rounds": 3, "eval-every": 1, "ways": 4, "stdev": 2, "seed": 1,
    }  # fmt: skip
    given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    answer = fedproto(
        "run",
        *given,
        "--set",
        "precision=float64",
        "--engine",
        "reference",
        "--out",
        tmp_path / "run",
    )
    assert answer.code == 0, answer.err
    alone = json.loads((tmp_path / "run" / "result.json").read_text())
    (cell,) = [c for c in content(out)["cells"] if (c["method"].lower(), c["n"]) == (method, 4)]
    (run,) = [run for run in cell["runs"] if run["seed"] == 1]
    assert run["partition"] == alone["partition"]
    assert run["accuracy"] == {
        key: [round(client["accuracy"][key], 5) for client in alone["clients"]]
        for key in alone["accuracy"]
    }
    assert run["communication"] == alone["communication"]


# --- run again


def fail(*anything, **else_):
    pytest.fail("something was trained again")


def test_run_again_nothing_is_trained(done, specs, monkeypatch):
    out, _ = done
    before = {name: (out / "runs" / name).stat().st_mtime_ns for name in files_in(out / "runs")}
    pages = [(out / name).read_bytes() for name in ("tiny.json", "tiny.md")]
    monkeypatch.setattr(sweep, "execute", fail)
    monkeypatch.setattr(Experiment, "prepare_together", fail)
    answer = fedproto("reproduce", "tiny", "--out", out)
    assert answer.code == 0, answer.err
    assert {
        name: (out / "runs" / name).stat().st_mtime_ns for name in files_in(out / "runs")
    } == before
    assert [(out / name).read_bytes() for name in ("tiny.json", "tiny.md")] == pages


@pytest.mark.parametrize(
    "stop_at", [(2, 1), (2, 3), (1, 2)], ids=["row 2", "its last round", "row 1"]
)
def test_what_was_stopped_goes_on(stop_at, done, specs, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Killed):
        made(out, stop_at=stop_at)
    assert not (out / "tiny.json").exists()  # a table is of finished runs
    teller, files = made(out)
    rows = [CELLS[:4], CELLS[4:]]
    assert teller.trained == rows[stop_at[0] - 1 :]  # a finished row is not begun again
    assert [path.name for path in files] == ["tiny.json", "tiny.md"]
    assert content(out) == content(done[0])


def test_a_row_goes_on_from_its_checkpoint_and_keeps_none(done, specs, tmp_path):
    (specs / "tiny.toml").write_text(TINY.replace("checkpoint_every = 0", "checkpoint_every = 1"))
    out = tmp_path / "out"
    with pytest.raises(Killed):
        made(out, stop_at=(2, 3))
    assert [RunFolder(out / "runs" / "tiny" / name).checkpoint_round() for name in CELLS] == [
        0
    ] * 4 + [3, 2, 2, 2]
    teller, _ = made(out, archive=tmp_path / "cells.tgz")
    assert sorted(zip(teller.done, teller.trained, strict=True)) == [
        (2, CELLS[5:]),
        (3, CELLS[4:5]),
    ]
    assert not list(out.glob("runs/tiny/*/checkpoint/*"))
    assert content(out)["cells"] == content(done[0])["cells"]
    assert archives.unpack(tmp_path / "cells.tgz", tmp_path / "runs") == 8


def test_another_row_column_or_seed_leaves_what_is_there(done, specs, tmp_path):
    out = tmp_path / "out"
    assert made(out, seeds=1, methods=("local",))[0].trained == [[CELLS[0], CELLS[2]]]
    assert made(out, seeds=1)[0].trained == [[CELLS[4], CELLS[6]]]
    assert made(out)[0].trained == [[CELLS[1], CELLS[3]], [CELLS[5], CELLS[7]]]
    assert content(out) == content(done[0])


def test_other_rounds_in_the_same_folder_are_refused(done, specs):
    out, _ = done
    answer = fedproto("reproduce", "tiny", "--rounds", "2", "--out", out)
    assert answer.code == 2
    assert "holds a run with rounds 3, not 2: name another folder with --out" in only_line(
        answer.err
    )


def test_a_run_that_breaks_down_is_left_out_and_said(specs, tmp_path):
    broken = TINY.replace(
        '"n = 4, stdev 2" = { ways = 4, stdev = 2 }', '"wild" = { ways = 4, stdev = 2, lr = 1e300 }'
    )
    (specs / "tiny.toml").write_text(broken)
    answer = fedproto("reproduce", "tiny", "--methods", "fedproto", "--out", tmp_path / "out")
    assert len(re.findall("seed=[01] broke down: round 1, client", answer.out)) == 2
    assert answer.code == 2
    calm, wild = [
        cell for cell in content(tmp_path / "out")["cells"] if cell["method"] == "FedProto"
    ]
    assert (calm["seeds"], wild["seeds"], wild["runs"]) == ([0, 1], [], [])
    assert calm["diverged"] == [] and [each["seed"] for each in wild["diverged"]] == [0, 1]
    assert all(each["reason"].startswith("round 1, client") for each in wild["diverged"])
    page = (tmp_path / "out" / "tiny.md").read_text()
    assert [heading.partition(" (")[0] for heading in read_markdown(page)] == ["n = 3, stdev 2"]
    assert "**Not run yet:** Local." in page
    assert (
        "**Diverged**, so the means below are of the other seeds: FedProto (wild), seed 0: round 1, client"
        in page
    )


def test_less_asked_for_is_no_less_on_the_page(done, specs):
    """A page is made of all runs that are finished, whatever was narrowed this time."""
    out, _ = done
    before = (out / "tiny.json").read_bytes(), (out / "tiny.md").read_bytes()
    assert (
        fedproto(
            "reproduce", "tiny", "--methods", "local", "--seeds", "1", "--finished", "--out", out
        ).code
        == 0
    )
    assert ((out / "tiny.json").read_bytes(), (out / "tiny.md").read_bytes()) == before


def test_all_targets_are_planned_before_the_first_is_run(specs, tmp_path):
    teller = Quiet()
    with pytest.raises(
        ConfigError, match="unknown method 'local'"
    ):  # which the first target, `seen`, lacks
        list(make.make("all", Narrowed(methods=("local",)), tmp_path / "out", None, teller.bar))
    (specs / "seen.toml").rename(specs / "zzz.toml")
    with pytest.raises(ConfigError, match="unknown method 'local'"):
        list(make.make("all", Narrowed(methods=("local",)), tmp_path / "out", None, teller.bar))
    assert teller.trained == [] and not (tmp_path / "out").exists()


def test_all_makes_every_target(specs, tmp_path):
    answer = fedproto("reproduce", "all", "--seeds", "1", "--rounds", "1", "--out", tmp_path)
    assert answer.code == 0, answer.err
    for name in ("seen", "tiny"):  # each page says how it alone is made
        assert content(tmp_path, name)["command"] == f"fedproto reproduce {name} --rounds 1"
    assert content(tmp_path)["settings"]["rounds"] == 1


# --- the archive


def test_cells_travel_in_an_archive(done, specs, tmp_path, monkeypatch):
    out, _ = done
    assert archives.unpack(out / "cells.tgz", tmp_path / "out" / "runs") == 8
    assert archives.unpack(out / "cells.tgz", tmp_path / "out" / "runs") == 0
    monkeypatch.setattr(sweep, "execute", fail)
    monkeypatch.setattr(Experiment, "prepare_together", fail)
    teller, _ = made(tmp_path / "out", archive=out / "cells.tgz")
    assert teller.trained == []
    assert content(tmp_path / "out") == content(out)
    for cell in CELLS:
        for name in ("config.toml", "partition.json", "metrics.jsonl", "result.json"):
            here, there = (
                folder / "runs" / "tiny" / cell / name for folder in (tmp_path / "out", out)
            )
            assert here.read_bytes() == there.read_bytes()


@pytest.mark.parametrize(
    ("target", "name", "content"),
    [
        ("table-mnist", "table-mnist.md", "my own table"),
        ("table-mnist", "table-mnist.png", "a picture"),
        ("table-mnist", "table-mnist.json", '{"command": "something else"}'),
        ("fig-tsne", "fig-tsne-measures.json", "{}"),
        ("verdicts", "VERDICTS.md", "# What the jury said"),
    ],
)
def test_somebodys_file_in_the_way_is_refused_before_anything_is_run(
    target, name, content, tmp_path
):
    (tmp_path / name).write_text(content)
    answer = fedproto("reproduce", target, "--quick", "--out", tmp_path)
    assert answer.code == 2
    assert (
        f"{tmp_path / name} exists already and was not written by `fedproto reproduce`"
        in only_line(answer.err)
    )
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == content


def test_the_committed_results_are_known_as_ours():
    """Or they could not be made again where they lie."""
    results = Path(__file__).parents[2] / "results"
    for name in plan.targets():
        if (results / f"{name}.json").exists():
            make._refuse_foreign_files(results, name)
    make._refuse_foreign_verdicts(results)


def test_an_archive_packed_again_holds_the_same(done, tmp_path):
    out, _ = done
    archives.unpack(out / "cells.tgz", tmp_path / "runs")
    archives.pack(tmp_path / "again.tgz", tmp_path / "runs")
    assert archives._read_files(tmp_path / "again.tgz") == archives._read_files(out / "cells.tgz")
    partitions = [
        path for path in archives._read_files(out / "cells.tgz") if path.parts[0] == "partitions"
    ]
    assert len(partitions) == 4  # of eight cells: methods share them


def test_what_an_archive_lacks_is_run_and_put_there(done, specs, tmp_path):
    teller, _ = made(tmp_path / "one", archive=tmp_path / "cells.tgz", methods=("local",))
    assert teller.trained == [CELLS[:4]]
    teller, _ = made(tmp_path / "other", archive=tmp_path / "cells.tgz")
    assert teller.trained == [CELLS[4:]]
    assert content(tmp_path / "other") == content(done[0])
    teller, _ = made(tmp_path / "third", archive=tmp_path / "cells.tgz")
    assert teller.trained == []


def test_an_archive_may_lie_in_a_folder_that_is_to_be_made(done, tmp_path):
    archives.pack(tmp_path / "new" / "folder" / "cells.tgz", done[0] / "runs")
    assert archives.unpack(tmp_path / "new" / "folder" / "cells.tgz", tmp_path / "runs") == 8
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="cannot be written"):
        archives.pack(tmp_path / "file" / "cells.tgz", done[0] / "runs")


def test_an_archive_does_not_overwrite_what_is_there(done, tmp_path):
    out, _ = done
    newer = tmp_path / "runs" / "tiny" / CELLS[0]
    newer.mkdir(parents=True)
    (newer / "config.toml").write_text("rounds = 4")  # of another run, not even finished
    also = tmp_path / "runs" / "tiny" / CELLS[1]
    archives.unpack(out / "cells.tgz", tmp_path / "elsewhere")
    also.mkdir()
    (also / "result.json").write_text("mine")
    assert archives.unpack(out / "cells.tgz", tmp_path / "runs") == 6
    assert (
        files_in(newer) == ["config.toml"] and (newer / "config.toml").read_text() == "rounds = 4"
    )
    assert files_in(also) == ["result.json"] and (also / "result.json").read_text() == "mine"


def test_a_begun_run_of_other_settings_is_somebodys_work(done, specs, tmp_path):
    """Even one of as many rounds; how it is computed, and where its weights lie, do not tell runs apart."""
    place = tmp_path / "runs" / "tiny" / CELLS[0]
    place.mkdir(parents=True)
    stored = (done[0] / "runs" / "tiny" / CELLS[0] / "config.toml").read_text()
    (place / "config.toml").write_text(stored.replace("lr = 0.05", "lr = 5.0"))
    assert archives.unpack(done[0] / "cells.tgz", tmp_path / "runs") == 7
    (place / "config.toml").write_text(re.sub("engine = .*", 'engine = "reference"', stored))
    assert archives.unpack(done[0] / "cells.tgz", tmp_path / "runs") == 1


def test_a_place_that_cannot_be_written_is_one_sentence(done, tmp_path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    stored = (done[0] / "runs" / "tiny" / CELLS[0] / "config.toml").read_text()
    (tmp_path / "elsewhere" / "config.toml").write_text(stored)
    (tmp_path / "runs" / "tiny" / CELLS[0]).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match="cannot be written: "):
        archives.unpack(done[0] / "cells.tgz", tmp_path / "runs")
    assert (tmp_path / "elsewhere" / "config.toml").read_text() == stored


def test_what_was_begun_here_gives_way_to_what_was_finished_elsewhere(done, specs, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Killed):
        made(out, stop_at=(1, 2))
    begun = RunFolder(out / "runs" / "tiny" / CELLS[0])
    assert begun.result() is None
    assert archives.unpack(done[0] / "cells.tgz", out / "runs") == 8
    assert begun.result() == RunFolder(done[0] / "runs" / "tiny" / CELLS[0]).result()
    assert made(out)[0].trained == []
    assert content(out) == content(done[0])


def bytes_of(done):
    return bytearray((done[0] / "cells.tgz").read_bytes())


def cut(content, position):
    del content[int(len(content) * position) :]


def change(content, position):
    """Some bytes: a single one may mean another copy of the same zeros, and so nothing."""
    for place in range(int(len(content) * position), len(content))[:8]:
        content[place] ^= 0x55


@pytest.mark.parametrize("damage", [cut, change])
@pytest.mark.parametrize("position", [0.0, 0.01, 0.2, 0.5, 0.8, 0.99, 0.9999])
def test_a_damaged_archive_is_one_sentence(damage, position, done, specs, tmp_path):
    """Wherever the damage is; nothing of it is used."""
    content = bytes_of(done)
    damage(content, position)
    path = tmp_path / "cells.tgz"
    path.write_bytes(content)
    answer = fedproto("reproduce", "tiny", "--out", tmp_path / "out", "--archive", path)
    assert answer.code == 2
    assert f"{path} is not an archive of finished cells" in only_line(answer.err)
    assert not (tmp_path / "out").exists()
    assert path.read_bytes() == bytes(content)


@pytest.mark.parametrize("text", [b"", b"not an archive", b"\x1f\x8b"], ids=repr)
def test_what_is_no_archive_is_one_sentence(text, tmp_path):
    (tmp_path / "cells.tgz").write_bytes(text)
    with pytest.raises(RunFolderError, match="is not an archive of finished cells") as caught:
        archives.unpack(tmp_path / "cells.tgz", tmp_path / "runs")
    assert "\n" not in str(caught.value)
    with pytest.raises(RunFolderError, match="is not an archive of finished cells"):
        archives.unpack(tmp_path, tmp_path / "runs")  # a folder


def packed(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return path


WHOLE = {
    "tiny/a/config.toml": b"",
    "tiny/a/metrics.jsonl": b"",
    "tiny/a/result.json": b'{"partition": "x"}',
    "partitions/x.json": b"{}",
}


def test_the_smallest_archive(tmp_path):
    assert archives.unpack(packed(tmp_path / "cells.tgz", WHOLE), tmp_path / "runs") == 1
    assert files_in(tmp_path / "runs" / "tiny") == sorted(
        ["a", "a/config.toml", "a/metrics.jsonl", "a/result.json", "a/partition.json"]
    )


@pytest.mark.parametrize(
    "place", ["../a", "../../a", "tiny/..", "{}/a", "/a", "tiny/a/b", ".", "tiny/../.."], ids=str
)
def test_paths_that_lead_out_of_the_folder_are_not_followed(place, tmp_path):
    place = place.format(tmp_path / "elsewhere")
    files = {name.replace("tiny/a", place): text for name, text in WHOLE.items()}
    path = packed(tmp_path / "cells.tgz", files)
    assert archives.unpack(path, tmp_path / "deep" / "runs") == 0
    assert files_in(tmp_path) == ["cells.tgz"]


def test_a_single_absolute_folder_is_not_followed(tmp_path, monkeypatch):
    """`/a/result.json` has three parts, too: the root is one."""
    placed = []
    monkeypatch.setattr(archives, "_place", lambda target, *how: placed.append(target))
    archives.unpack(
        packed(
            tmp_path / "cells.tgz",
            {name.replace("tiny/a", "/a"): text for name, text in WHOLE.items()},
        ),
        tmp_path / "runs",
    )
    assert placed == []


def test_links_in_an_archive_are_not_followed(tmp_path):
    path = tmp_path / "cells.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name in ("tiny/a/result.json", "tiny/a"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            tar.addfile(member)
    assert archives.unpack(path, tmp_path / "runs") == 0
    assert files_in(tmp_path) == ["cells.tgz"]


@pytest.mark.parametrize(
    "lost", ["tiny/a/config.toml", "tiny/a/metrics.jsonl", "partitions/x.json"]
)
def test_an_archive_that_lacks_a_part_is_one_sentence(lost, tmp_path):
    path = packed(
        tmp_path / "cells.tgz", {name: text for name, text in WHOLE.items() if name != lost}
    )
    with pytest.raises(RunFolderError, match="does not hold all of tiny/a"):
        archives.unpack(path, tmp_path / "runs")
    assert [name for name in files_in(tmp_path / "runs") if name != "tiny"] == []


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"3", b"\xff"], ids=repr)
def test_an_archive_with_a_result_that_is_none_is_one_sentence(text, tmp_path):
    path = packed(tmp_path / "cells.tgz", WHOLE | {"tiny/a/result.json": text})
    with pytest.raises(RunFolderError, match="does not hold all of tiny/a"):
        archives.unpack(path, tmp_path / "runs")


def test_a_cell_is_unpacked_whole_or_not_at_all(done, tmp_path, monkeypatch):
    written = []

    def stops(path, content, write=archives.write_atomically):
        written.append(path.name)
        if len(written) == 3:
            raise Killed
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(archives, "write_atomically", stops)
        with pytest.raises(Killed):
            archives.unpack(done[0] / "cells.tgz", tmp_path / "runs")
    assert files_in(tmp_path / "runs") == ["tiny"]
    assert archives.unpack(done[0] / "cells.tgz", tmp_path / "runs") == 8


# --- looking at the trained models


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("specs")
        (folder / "seen.toml").write_text(SEEN)
        patch.setattr(plan, "SPECS", folder)
        patch.setattr(make, "_draw_figure", lambda *how: iter(()), raising=False)
        out = tmp_path_factory.mktemp("seen")
        made(out, "seen", archive=out / "cells.tgz")
    return out


LOOKED_AT = ("FedProto-all-seed=3", "FedProto_own_start-all-seed=3")


def features_of(folder):
    """Each client's own model, from the checkpoint, over its own test images: (features, labels), as numpy."""
    run, _ = reopen(RunFolder(folder))
    (path,) = (folder / "checkpoint").iterdir()
    stored = load_file(path)
    found = []
    for member in run.federation.members:
        start = f"client.{member.id}."
        state = {
            name.removeprefix(start): value
            for name, value in stored.items()
            if name.startswith(start)
        }
        pairs = []
        for part in (member.test, member.train):
            with torch.no_grad():
                features, _ = functional_call(member.module.eval(), state, (part.x[part.rows],))
            pairs += [features.numpy(), part.y[part.rows].numpy()]
        found.append(pairs)
    return found


def nearest_own(x, prototypes):
    """The class of the nearest of these prototypes, one after the other."""
    return min(prototypes, key=lambda label: math.dist(x, prototypes[label]), default=None)


@pytest.mark.parametrize("cell", LOOKED_AT)
def test_travel_by_hand(cell, seen):
    folder = seen / "runs" / "seen" / cell
    found = json.loads((folder / "travel.json").read_text())["clients"]
    tensors = {
        name: value.numpy() for name, value in load_file(folder / "prototypes.safetensors").items()
    }
    local, held = tensors["local"], tensors["held"]
    clients = json.loads((folder / "partition.json").read_text())["clients"]
    result = RunFolder(folder).result()
    assert [each["id"] for each in found] == [0, 1, 2, 3]
    for me, (x, y, *_) in enumerate(features_of(folder)):
        own = [int(name) for name in clients[me]["classes"]]
        with_own, others = {}, {}
        for label in own:
            holders = [i for i in range(4) if str(label) in clients[i]["classes"]]
            assert [i for i in range(4) if held[i, label] > 0] == holders
            for kept, into in ((holders, with_own), ([i for i in holders if i != me], others)):
                if kept:  # |D_ij|-weighted
                    into[label] = sum(held[i, label] * local[i, label] for i in kept) / sum(
                        held[kept, label]
                    )
        for name, prototypes in (("with_own", with_own), ("without_own", others)):
            right = [
                nearest_own(image, prototypes) == label for image, label in zip(x, y, strict=True)
            ]
            assert found[me][name] == pytest.approx(sum(right) / len(right), abs=1e-12), (me, name)
        assert found[me]["covered"] == pytest.approx(len(others) / len(own), abs=1e-6)
        assert found[me]["with_own"] == pytest.approx(
            result["clients"][me]["accuracy"]["prototype_own"], abs=1e-12
        )
    covered = [each["covered"] for each in found]
    assert min(covered) < 1 and max(covered) > 0  # some classes have one holder, some several
    assert any(each["with_own"] != each["without_own"] for each in found)


def test_prototypes_without_one_by_hand():
    sums = torch.tensor(
        [[[2.0, 4.0], [0.0, 0.0]], [[3.0, 3.0], [5.0, 5.0]], [[1.0, 2.0], [0.0, 0.0]]]
    )
    weights = torch.tensor([[2.0, 0.0], [3.0, 5.0], [1.0, 0.0]])
    rest = probes._aggregate_without(sums, weights, 1)
    assert rest["prototypes"].tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert rest["known"].tolist() == [1.0, 0.0]
    # A class without a prototype is never right, not even where all others are foreign.
    x, y = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([0, 1])
    assert probes._measure_accuracy(x, y, rest, [0, 1]) == 0.5
    assert probes._measure_accuracy(x, y, rest, [1]) == 0.0


@pytest.mark.parametrize("cell", LOOKED_AT)
def test_embeddings_by_hand(cell, seen):
    folder = seen / "runs" / "seen" / cell
    with np.load(folder / "embeddings.npz") as file:
        found = dict(file)
    clients = json.loads((folder / "partition.json").read_text())["clients"]
    tensors = {
        name: value.numpy() for name, value in load_file(folder / "prototypes.safetensors").items()
    }
    expected = features_of(folder)
    position = held = 0
    for me, (x, y, trained, labels) in enumerate(expected):
        for label in map(int, clients[me]["classes"]):
            some = np.roll(x[y == label], -me * probes.IMAGES_PER_CLASS, 0)[
                : probes.IMAGES_PER_CLASS
            ]  # other images for each client
            here = slice(position, position + len(some))
            assert len(some) == min(probes.IMAGES_PER_CLASS, (y == label).sum()) > 0
            assert found["x"][here] == pytest.approx(some, abs=1e-12)
            assert (found["y"][here] == label).all() and (found["client"][here] == me).all()
            position += len(some)
            mean = trained[labels == label].mean(0)
            assert found["local"][held] == pytest.approx(mean, abs=1e-12)
            assert found["local"][held] == pytest.approx(tensors["local"][me, label], abs=1e-9)
            assert (found["local_y"][held], found["local_client"][held]) == (label, me)
            held += 1
    assert len(found["x"]) == len(found["y"]) == len(found["client"]) == position
    assert len(found["local"]) == len(found["local_y"]) == len(found["local_client"]) == held
    assert found["x"].shape[1] == found["local"].shape[1] == 8
    assert found["prototypes"] == pytest.approx(tensors["prototypes"]) and found[
        "prototypes"
    ].shape == (10, 8)
    assert found["known"].tolist() == tensors["known"].tolist()


def test_what_was_seen_is_in_the_json_and_travels(seen, specs, tmp_path, monkeypatch):
    for cell, name in zip(content(seen, "seen")["cells"], LOOKED_AT, strict=True):
        stored = json.loads((seen / "runs" / "seen" / name / "travel.json").read_text())
        assert [run["travel"] for run in cell["runs"]] == [stored["clients"]]
    monkeypatch.setattr(probes, "reopen", fail)  # the models stayed at home
    teller, _ = made(tmp_path / "out", "seen", archive=seen / "cells.tgz")
    assert teller.trained == []
    assert content(tmp_path / "out", "seen") == content(seen, "seen")
    for cell in LOOKED_AT:
        here, there = (
            folder / "runs" / "seen" / cell / "embeddings.npz"
            for folder in (tmp_path / "out", seen)
        )
        assert here.read_bytes() == there.read_bytes()


def test_a_run_stopped_before_it_was_looked_at_is_looked_at_later(
    seen, specs, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(make, "probe_models", lambda *how: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            made(tmp_path / "out", "seen")
    archives.pack(tmp_path / "cells.tgz", tmp_path / "out" / "runs")
    # Without its models nobody could look at it any more, so it does not travel yet.
    assert archives.unpack(tmp_path / "cells.tgz", tmp_path / "nothing") == 0
    teller, _ = made(tmp_path / "out", "seen")
    assert teller.trained == [[LOOKED_AT[1]]]
    assert content(tmp_path / "out", "seen") == content(seen, "seen")


def test_a_finished_run_whose_models_are_gone_is_not_looked_at(seen, specs, tmp_path):
    """Or untrained ones would be."""
    made(tmp_path, "seen")
    for cell in LOOKED_AT:
        folder = tmp_path / "runs" / "seen" / cell
        for path in (
            *(folder / "checkpoint").iterdir(),
            folder / "travel.json",
            folder / "embeddings.npz",
        ):
            path.unlink()
    answer = fedproto("reproduce", "seen", "--out", tmp_path)
    assert answer.code == 2
    assert "has no checkpoint to make embeddings.npz from" in only_line(answer.err)


def test_models_are_looked_at_as_they_are_scored(specs, tmp_path):
    """A method that averages weights is scored with the server's, not with what each client trained last."""
    (specs / "seen.toml").write_text(
        SEEN.replace("travel = true", "")
        .replace('"fedproto"', '"fedavg"')
        .replace('start = "own"', "")
    )
    made(tmp_path, "seen")
    folder = tmp_path / "runs" / "seen" / LOOKED_AT[0]
    run, _ = reopen(RunFolder(folder))
    with np.load(folder / "embeddings.npz") as file:
        found = dict(file)
    assert "prototypes" not in found
    member = run.federation.members[0]
    state = run.progress.server  # FedAvg's is a model
    assert not equal(state, run.client_states()[0])
    with torch.no_grad():
        features, _ = functional_call(
            member.module.eval(), state, (member.test.x[member.test.rows],)
        )
    labels = member.test.y[member.test.rows]
    some = torch.cat(
        [features[labels == label][: probes.IMAGES_PER_CLASS] for label in member.classes]
    )
    assert found["x"][found["client"] == 0] == pytest.approx(some.numpy(), abs=1e-12)


# --- initial weights of each client's own


def initial(**settings):
    return [member.initial for member in experiment("fedproto", **settings).federation.members]


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_own_initial_weights_differ_and_repeat():
    own, again, other = (initial(start="own", seed=seed) for seed in (0, 0, 1))
    shared = initial(start="shared")
    assert all(equal(shared[0], each) for each in shared)
    for number, state in enumerate(own):
        assert state.keys() == shared[0].keys()
        assert equal(state, again[number])
        assert not any(torch.equal(state[name], other[number][name]) for name in state)
        for neighbour in (*own[:number], shared[0]):
            assert not any(torch.equal(state[name], neighbour[name]) for name in state)


def test_own_initial_weights_depend_on_the_client_alone():
    """Not on how many others there are, on their models, or on torch's own generator."""
    few, many = (initial(start="own", clients=clients) for clients in (4, 5))
    torch.manual_seed(99)
    mixed = initial(
        start="own", clients=4, model="mlp(hidden=5,width=8)*2,mlp(hidden=16,width=8)*2"
    )
    assert all(equal(one, other) for one, other in zip(few, many, strict=False))
    assert equal(few[2], mixed[2]) and equal(few[3], mixed[3])
    assert not any(torch.equal(mixed[0][name], mixed[1][name]) for name in mixed[0])


def test_own_initial_weights_are_drawn_as_shared_ones_are():
    """From the same distribution, and dropout and BatchNorm start alike."""
    settings = {"dataset": "mnist5k", "model": "cnn", "test_shots": 3, "precision": "float32"}
    own, shared = (initial(start=start, **settings) for start in ("own", "shared"))
    for name, value in shared[0].items():
        if value.numel() > 1000:
            assert float(own[1][name].std()) == pytest.approx(float(value.std()), rel=0.15)


@pytest.mark.parametrize("algorithm", ["fedproto", "local"])
def test_both_engines_start_from_own_initial_weights(algorithm):
    (one, first), (other, second) = (
        finished(algorithm, start="own", engine=engine, participation=0.75)
        for engine in ("reference", "vectorised")
    )
    for a, b in zip(first.states, second.states, strict=True):
        assert all(float((a[name] - b[name]).abs().max()) <= 1e-8 for name in a)
    for name, value in one.progress.server.items():
        assert float((value - other.progress.server[name]).abs().max()) <= 1e-8
    assert first.clients == second.clients
    shared = finished(algorithm, participation=0.75)[1]
    assert any(
        float((a[n] - b[n]).abs().max()) > 1e-3
        for a, b in zip(first.states, shared.states, strict=True)
        for n in a
    )


def test_a_run_with_own_initial_weights_goes_on_from_its_checkpoint(tmp_path):
    settings = {"start": "own", "checkpoint_every": 1, "participation": 0.5}
    whole = experiment("fedproto", **settings)
    expected = whole.execute(whole.new_folder(tmp_path / "whole"))

    def stop(result):
        if result.round == 2:
            raise Killed

    cut_off = experiment("fedproto", **settings)
    with pytest.raises(Killed):
        cut_off.execute(cut_off.new_folder(tmp_path / "cut"), stop)
    again, folder = reopen(RunFolder(tmp_path / "cut"))
    assert 'start = "own"' in (tmp_path / "cut" / "config.toml").read_text()
    assert again.progress.round in (1, 2)
    assert all(
        equal(a, b) for a, b in zip(again.execute(folder).states, expected.states, strict=True)
    )


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "fedprox", "fesem(clusters=2)", "fedper", "fedrep"]
)
def test_own_initial_weights_are_refused_where_weights_travel(algorithm, tmp_path):
    """Clients adopt the server's weights before their first step, so own ones would change nothing."""
    with pytest.raises(
        ConfigError, match=r"start=own has no meaning for fe\w+: every client begins with"
    ):
        experiment(algorithm, start="own")
    answer = fedproto(
        "run", "--algorithm", algorithm, "--set", "start=own", "--out", tmp_path / "run"
    )
    assert answer.code == 2 and "start=own has no meaning for" in only_line(answer.err)
    assert not (tmp_path / "run").exists()


def test_no_spec_asks_for_own_weights_where_weights_travel():
    for name in plan.targets():
        rows = read_spec(name, Narrowed()).rows
        own = [row.settings["algorithm"] for row in rows if row.settings.get("start") == "own"]
        assert {algorithm.partition("(")[0] for algorithm in own} <= {"fedproto", "local"}


def test_what_a_start_may_be():
    with pytest.raises(ConfigError, match="unknown value of start 'mine', accepted: own, shared"):
        experiment("local", start="mine")
