"""Specs: they are the paper's settings, can all be configured, and may be run in part."""

import functools
import json
import os
import tomllib
from pathlib import Path

import pytest
from helpers.command_line import fedproto, only_line

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DataFolders
from fedproto.errors import DataError
from fedproto.reproduce import plan
from fedproto.reproduce.plan import Request, read_spec
from fedproto.reproduce.tables import paper_rows
from fedproto.runs import assemble
from fedproto.runs.experiment import Experiment

TABLES = {"table-mnist": "MNIST", "table-femnist": "FEMNIST", "table-cifar10": "CIFAR10"}
METHODS = ("Local", "FeSEM", "FedProx", "FedPer", "FedAvg", "FedRep", "FedProto", "FedProto-mh")
SHARED = Path(__file__).resolve().parents[3] / "shared"

SPEC_KEYS = {"title", "paper", "seeds", "settings", "columns", "rows", "after", "quick", "note"}
QUICK_KEYS = {"seeds", "rounds", "columns", "rows", "settings", "without"}
PROBES = {"embeddings", "travel", "before"}

every_target = pytest.mark.parametrize("target", plan.targets())
every_table = pytest.mark.parametrize("target", TABLES)


@functools.cache
def load_source(dataset):
    return plugins.build("dataset", Part(dataset), DataFolders())


def divide_data(config):
    (part,) = config.dataset
    sources = [load_source(part.name)] * config.clients
    return assemble.divide(sources, config.partition, config.seed)


@functools.cache
def plan_target(target, **request):
    """Planned once per target: a table has hundreds of configurations."""
    return plan.plan(read_spec(target, Request(**request)))


# --- all specs


def test_every_table_and_figure_of_the_paper_has_a_target():
    assert {*TABLES, "fig-lambda", "fig-shots", "fig-tsne"} < set(plan.targets())


@every_target
@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_every_cell_can_be_configured(target, quick, weights_file):
    spec = read_spec(target, Request(quick=quick))
    planned = plan_target(target, quick=quick)
    assert len(planned) > 0
    assert len(planned) == sum(len(row.columns) * len(row.seeds) for row in spec.rows)
    assert all(each.cell.config.seed == each.seed for each in planned)
    checkpoints = {each.cell.config.checkpoint_every for each in planned}
    if spec.after:  # probes need the last round's checkpoint
        assert checkpoints == {each.cell.config.rounds for each in planned}
    else:
        assert checkpoints <= {0, 25}


@every_target
def test_cells_have_different_folders_and_settings(target, weights_file):
    planned = plan_target(target, quick=False)
    folders = {each.cell.name.lower() for each in planned}
    configurations = {each.cell.config.toml() for each in planned}
    assert len(folders) == len(configurations) == len(planned)


@every_target
def test_quick_cells_have_different_folders(target):
    planned = plan_target(target, quick=True)
    assert len({each.cell.name.lower() for each in planned}) == len(planned)


@every_target
def test_specs_have_no_unknown_keys(target):
    spec = tomllib.loads((plan.SPECS / f"{target}.toml").read_text())
    assert spec.keys() <= SPEC_KEYS
    assert spec["quick"].keys() <= QUICK_KEYS
    assert spec.get("after", {}).keys() <= PROBES
    for row in spec["rows"].values():
        assert set(row.get("columns", ())) <= spec["columns"].keys()
    assert set(spec["quick"].get("columns", ())) <= spec["columns"].keys()
    assert set(spec["quick"].get("rows", ())) <= spec["rows"].keys()


@every_target
def test_quick_versions_need_no_data_and_can_be_prepared(target, monkeypatch, tmp_path):
    """Layers that methods name exist, and no class runs out of images."""
    monkeypatch.delenv("FEDPROTO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = read_spec(target, Request(quick=True))
    assert spec.paper is None  # other settings than the paper's are not compared with its numbers
    planned = plan.plan(spec)
    for each in planned:
        assert len(divide_data(each.cell.config)) == each.cell.config.clients
    loaded = {"mnist5k": load_source("mnist5k")}
    for row in spec.rows:
        first = next(each for each in planned if each.row is row)
        experiment = Experiment.prepare(first.cell.config, loaded=loaded)
        assert len(experiment.federation.members) == first.cell.config.clients


@every_target
def test_no_class_runs_out_of_images(target):
    if "FEDPROTO_DATA" not in os.environ:
        pytest.skip("the data sets themselves are not here")
    configs = {}
    for each in plan_target(target, quick=False):
        configs[str(each.cell.config.partition), each.seed] = each.cell.config
    try:
        load_source(next(iter(configs.values())).dataset[0].name)
    except DataError as error:  # CIFAR-10 has to be unpacked first
        pytest.skip(str(error))
    for config in configs.values():
        assert len(divide_data(config)) == 20


def test_rows_may_have_their_own_columns_and_seeds(weights_file):
    planned = plan_target("table-cifar10", quick=False)
    cells = [(each.column, each.seed) for each in planned if each.row.name == "FedProto, batch 8"]
    assert cells == [("n = 3, stdev 1", 0)]


def test_missing_data_is_refused_before_anything_is_run(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDPROTO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"resnet18-tiny-imagenet-32\.safetensors was not found in"):
        plan.plan(read_spec("study-before", Request()))
    answer = fedproto("reproduce", "all", "--seeds", "1", "--out", tmp_path / "out")
    assert answer.code == 2
    assert "was not found" in only_line(answer.err)
    assert not (tmp_path / "out").exists()


def test_finished_runs_need_no_data(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDPROTO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answer = fedproto("reproduce", "study-before", "--finished", "--out", tmp_path / "out")
    assert answer.code == 2
    assert "holds no finished run of study-before" in only_line(answer.err)


# --- the tables are the paper's


def test_the_papers_numbers_are_complete():
    path = SHARED / "paper" / "tables.json"
    if not path.exists():
        pytest.skip("the paper is not here")
    assert paper_rows() == json.loads(path.read_text())["rows"]


def test_some_of_the_papers_numbers_are_as_printed():
    """Tables 2 to 4."""
    rows = {(r["dataset"], r["method"], r["n"], r["stdev"]): r for r in paper_rows()}
    assert len(rows) == len(paper_rows()) == 144
    assert rows["MNIST", "Local", 3, 2]["accuracy"] == 94.05
    assert rows["MNIST", "FeSEM", 4, 3]["accuracy"] == 95.82
    assert rows["MNIST", "FedProto", 3, 2]["params_per_round"] == 4000
    assert rows["MNIST", "FedAvg", 3, 2]["params_per_round"] == 430000
    assert rows["CIFAR10", "FedProto", 3, 1]["rounds"] == 110


def papers_rounds(dataset):
    """Return the paper's rounds by method, n and stdev."""
    rounds = {}
    for row in paper_rows():
        if row["dataset"] == dataset:
            rounds[row["method"], row["n"], row["stdev"]] = row["rounds"]
    assert len(rounds) == 48
    for method, n, stdev in rounds:
        if method == "Local":
            assert rounds[method, n, stdev] == 0  # not given: as many as FedProto
            rounds[method, n, stdev] = rounds["FedProto", n, stdev]
    return rounds


@every_table
def test_tables_have_the_papers_methods_settings_and_rounds(target, weights_file):
    spec = read_spec(target, Request())
    assert spec.paper == TABLES[target]
    assert [row.name for row in spec.rows[: len(METHODS)]] == list(METHODS)
    rounds = {}
    for each in plan_target(target, quick=False):
        if each.row.name in METHODS:
            options = each.cell.config.partition.options
            key = each.row.name, options["ways"], options["stdev"]
            rounds[key] = each.cell.config.rounds
            assert each.column == f"n = {options['ways']}, stdev {options['stdev']:g}"
    assert rounds == papers_rounds(TABLES[target])


@every_table
def test_every_method_of_a_table_is_run_with_all_seeds(target, weights_file):
    seeds = {}
    for each in plan_target(target, quick=False):
        if each.row.name in METHODS:
            seeds.setdefault((each.row.name, each.column), set()).add(each.seed)
    expected = 3 if target == "table-cifar10" else 5
    assert {len(each) for each in seeds.values()} == {expected}


@every_table
def test_training_settings_are_the_papers(target, weights_file):
    """shared/paper/NOTES.md; CIFAR-10's batch is that of the authors' command, as its spec says."""
    for each in plan_target(target, quick=False):
        config = each.cell.config
        uses_batch_32 = target == "table-cifar10" and each.row.name != "FedProto, batch 8"
        assert config.batch == (32 if uses_batch_32 else 8)
        assert (config.lr, config.momentum, config.epochs) == (0.01, 0.5, 1)
        assert (config.clients, config.participation) == (20, 1.0)
        assert (config.lost_uploads, config.stragglers) == (0.0, 0.0)
        assert config.start == "shared"


@every_table
def test_partitions_are_the_papers(target, weights_file):
    for each in plan_target(target, quick=False):
        options = each.cell.config.partition.options
        assert options["shots"] == 100
        assert options["noise"] == "uniform"
        assert options["shots_stdev"] is None  # the same as that of n
        test_shots = None
        if each.row.name == "FedProto, released":
            test_shots = 40 if target == "table-mnist" else 15
        assert options["test_shots"] == test_shots


@every_table
def test_options_of_the_algorithms_are_the_papers(target, weights_file):
    for each in plan_target(target, quick=False):
        config = each.cell.config
        options = config.algorithm.options
        name = config.algorithm.name
        is_released = each.row.name == "FedProto, released"
        assert (config.profile == "released") == is_released
        if name.startswith("fedproto"):
            assert options["lam"] == (0.1 if target == "table-cifar10" else 1)
            assert (options["distance"], options["regularise"]) == ("mse", "sample")
            choices = (options["weighting"], options["collect"], options["absent"])
            if is_released:
                assert choices == ("uniform", "during", "drop")
            else:
                assert choices == ("samples", "after", "remember")
        if name == "fedprox":
            assert options["mu"] == 0.1
        if name == "fesem":
            assert options["clusters"] == 3
        if name in ("fedper", "fedrep"):
            head_only = target == "table-cifar10" or each.row.name.endswith("personal")
            assert options["personal"] == ("head" if head_only else "fc1,fc2")
        if name == "fedrep":
            assert (options["head_epochs"], options["body_epochs"]) == (1, 1)


def test_methods_of_a_table_share_their_partitions(weights_file):
    """Only the methods are compared: all rows of a column draw the same images for a seed."""
    partitions = {}
    for each in plan_target("table-mnist", quick=False):
        if each.row.name != "FedProto, released":  # which is tested on fewer images
            shared = partitions.setdefault((each.column, each.seed), set())
            shared.add(str(each.cell.config.partition))
    assert {len(shared) for shared in partitions.values()} == {1}


def test_own_initial_weights_are_used_only_where_no_weights_are_sent():
    for name in plan.targets():
        for row in read_spec(name, Request()).rows:
            if row.settings.get("start") == "own":
                algorithm = row.settings["algorithm"].partition("(")[0]
                assert algorithm in ("fedproto", "local")


# --- a part of a target


def row_names(target, **request):
    return [row.name for row in read_spec(target, Request(**request)).rows]


@pytest.mark.parametrize(
    ("methods", "rows"),
    [
        (("fedproto",), ["FedProto", "FedProto, released"]),
        (("FedProto-mh",), ["FedProto-mh"]),
        (("local", "FeSEM"), ["Local", "FeSEM"]),
        (("FeSEM", "local"), ["Local", "FeSEM"]),  # in the table's order
        (("fedrep",), ["FedRep", "FedRep, head personal"]),
        (("FedProto, released",), ["FedProto, released"]),
        (("FedProto", " released"), ["FedProto, released"]),  # as a list is split at commas
        (("local", " FedProto", "released", "fedavg "), ["Local", "FedAvg", "FedProto, released"]),
        (("FedPer", " head personal"), ["FedPer, head personal"]),
    ],
    ids=str,
)
def test_methods_are_named_by_row_or_algorithm(methods, rows):
    assert row_names("table-mnist", methods=methods) == rows


@every_target
def test_rows_can_be_asked_for_though_their_names_hold_commas(target):
    """Each row by its own name, as the command line splits it."""
    rows = read_spec(target, Request()).rows
    for row in rows:
        of_algorithm = [r.name for r in rows if r.settings["algorithm"] == row.name.lower()]
        found = row_names(target, methods=tuple(row.name.split(",")))
        assert set(found) == {row.name, *of_algorithm}


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_fewer_seeds_are_the_first_of_the_spec(seeds):
    for row in read_spec("table-mnist", Request(seeds=seeds)).rows:
        assert row.seeds == list(range(seeds))


def test_there_may_be_more_seeds_than_the_spec_has():
    rows = {row.name: row for row in read_spec("table-cifar10", Request(seeds=4)).rows}
    assert rows["FedProto"].seeds == [0, 1, 2, 3]
    assert rows["FedProto, batch 8"].seeds == [0]


@every_target
def test_rounds_apply_to_every_run(target, weights_file):
    spec = read_spec(target, Request(rounds=7, seeds=1))
    assert spec.settings["rounds"] == 7  # so the JSON says what was done
    planned = plan.plan(spec)
    assert {each.cell.config.rounds for each in planned} == {7}
    if spec.after:
        assert {each.cell.config.checkpoint_every for each in planned} == {7}


@pytest.mark.parametrize("quick", [False, True])
def test_restrictions_combine(quick):
    request = Request(quick=quick, seeds=2, rounds=4, methods=("fedper",))
    planned = plan.plan(read_spec("fig-tsne", request))
    assert [(each.row.name, each.seed) for each in planned] == [("FedPer", 0), ("FedPer", 1)]
    for each in planned:
        assert (each.cell.config.rounds, each.cell.config.checkpoint_every) == (4, 4)


def test_device_and_data_folder_apply_to_every_cell(tmp_path):
    computed = (("device", "cpu"), ("data_dir", str(tmp_path)))
    for each in plan_target("table-mnist", settings=computed, seeds=1):
        assert (each.cell.config.device, each.cell.config.data_dir) == ("cpu", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["table-mnis"], "unknown target 'table-mnis': did you mean 'table-mnist'?"),
        (["../specs/table-mnist"], "unknown target '../specs/table-mnist'"),
        (
            ["table-mnist", "--methods", "fedprot"],
            "unknown method 'fedprot': did you mean 'fedproto'?",
        ),
        (
            ["table-mnist", "--methods", "local,fedavgg"],
            "unknown method 'fedavgg': did you mean 'fedavg'?",
        ),
        (["fig-lambda", "--methods", "fedavg"], "unknown method 'fedavg'"),
        (["table-mnist", "--methods", "FedProto, batch 8"], "unknown method 'batch 8'"),
        (["table-mnist", "--device", "gpu"], "unknown value of device 'gpu'"),
    ],
    ids=str,
)
def test_unknown_names_are_refused(arguments, sentence, tmp_path):
    answer = fedproto("reproduce", *arguments, "--quick", "--out", tmp_path / "out")
    assert answer.code == 2
    assert sentence in only_line(answer.err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag", ["--seeds", "--rounds"])
@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_counts_must_be_positive_whole_numbers(flag, value, tmp_path):
    answer = fedproto("reproduce", "table-mnist", flag, value, "--out", tmp_path / "out")
    assert answer.code == 2
    assert not (tmp_path / "out").exists()
