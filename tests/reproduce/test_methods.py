"""The table of all methods: what is planned, tuned, run, kept and said."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from helpers.command_line import fedproto
from helpers.reproduction import QuietReporter
from helpers.tiny import ALGORITHMS

from fedproto.config.config_file import read_tables
from fedproto.config.settings import configure
from fedproto.errors import ConfigError, RunFolderError
from fedproto.reproduce.evidence import measure_accuracy, read_results
from fedproto.reproduce.methods import benchmark, records, tuning
from fedproto.reproduce.methods.benchmark import (
    choose_size,
    plan_groups,
    read_benchmark,
    read_only,
)
from fedproto.reproduce.methods.page import compare_with, find_best, render_page
from fedproto.reproduce.methods.records import Records, identify
from fedproto.reproduce.methods.training import make_methods, tune_all
from fedproto.reproduce.plan import Request
from fedproto.reproduce.statistics import Outcome
from fedproto.runs.experiment import Experiment

WHOLE = read_benchmark(Request())
#: Everything that is tuned, with a learning rate that is not the default.
TUNED = {
    dataset: {method.name: {"lr": 0.02} for method in WHOLE.methods}
    for dataset in ("mnist", "fashion-mnist", "chars74k", "cifar10")
}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The quick version on 8x8 digits; return a folder for its files."""
    text = benchmark.SPEC.read_text()
    text = text.replace('dataset = "mnist5k"', 'dataset = "digits"')
    about = 'title = "MNIST, 5,000 images"\nmixed = "cnn-mh"'
    text = text.replace(about, 'title = "Digits"\nmixed = "mlp-mh"')
    text = text.replace("budget = 10", "budget = 2").replace("rounds = 20  ", "rounds = 1  ")
    text = text.replace('["dirichlet0.1", 100]', '["dirichlet0.5", 20]')
    path = tmp_path / "methods.toml"
    path.write_text(text)
    monkeypatch.setattr(benchmark, "SPEC", path)
    return tmp_path / "out"


def make(out: Path, archive=None, minutes=None, only=None, reporter=None, run=True, **request):
    """Make the quick table; return the reporter, the files and what was said."""
    said: list[str] = []
    reporter = reporter or QuietReporter()
    files = list(
        make_methods(
            Request(quick=True, **request),
            read_only(only),
            out,
            archive,
            minutes,
            reporter.open if run else None,
            said.append,
        )
    )
    return reporter, files, said


# --- the plan


def test_every_algorithm_of_the_package_competes() -> None:
    algorithms = {method.settings["algorithm"] for method in WHOLE.methods}
    assert algorithms == set(ALGORITHMS) - {"fedproto-mh"}  # FedProto on mixed architectures


@pytest.fixture(scope="module")
def groups():
    return plan_groups(WHOLE, TUNED, finished=True)


def test_every_federation_of_the_issue_is_planned(groups) -> None:
    """Four data sets, four partitions, two kinds of architectures, two k, 5 seeds or 3."""
    columns = {column.name: column for column in WHOLE.columns}
    assert len(columns) == 4 * 4 * 2 * 2
    runs = [run for group in groups for run in group]
    assert len(runs) == len(WHOLE.methods) * 4 * 2 * 2 * (5 + 5 + 5 + 3)
    assert len({run.cell.name for run in runs}) == len(runs)
    assert len({identify(run.cell.config) for run in runs[::11]}) == len(runs[::11])
    for run in runs[::97]:
        config = run.cell.config
        assert config.lr == 0.02
        assert config.validation == 0.2
        assert config.report_last
        assert config.select_by == f"{run.method.score}_own"
        if run.method.name != "Closed form":
            assert config.rounds == (60 if run.column.dataset == "cifar10" else 100)
        if run.column.partition.startswith("nway"):
            assert config.partition.options["shots"] == run.column.k
        else:
            assert config.partition.options["rows"] == 3 * run.column.k


def test_groups_come_in_an_order_that_compares_all_methods_early(groups) -> None:
    first = [group[0].method.name for group in groups[: len(WHOLE.methods)]]
    assert first == [method.name for method in WHOLE.methods]
    assert {len(group) for group in groups} == {4 * 5, 3}  # partitions x seeds; CIFAR-10 alone
    for group in groups[::7]:
        assert len({(run.method.name, run.column.group) for run in group}) == 1
    architectures = [group[0].column.architecture for group in groups]
    assert architectures == sorted(architectures)  # equal, then mixed


@pytest.mark.parametrize("method", WHOLE.methods, ids=lambda method: method.name)
def test_every_method_can_be_judged_on_mixed_architectures(method) -> None:
    """By the accuracy that the table selects by, which must be one of its own."""
    settings = {"dataset": "digits", "clients": 9, "shots": 5, "model": "mlp-mh", "validation": 0.2}
    settings |= {"rounds": 1, "select_by": f"{method.score}_own", "engine": "reference"}
    (config,) = configure(settings | method.settings)
    result = Experiment.prepare(config).execute()
    assert result.data["validation"]["select_by"] == f"{method.score}_own"


def test_only_a_part_is_planned_on_request() -> None:
    only = read_only("dataset=mnist|cifar10, k=20")
    assert only == {"dataset": ["mnist", "cifar10"], "k": ["20"]}
    part = read_benchmark(Request(methods=("fedproto",), seeds=2), only)
    assert {column.dataset for column in part.columns} == {"mnist", "cifar10"}
    assert {column.k for column in part.columns} == {20}
    names = [method.name for method in part.methods]
    assert names == ["FedProto", "Contrast", "Contrast + teacher"]
    assert {run.seed for group in plan_groups(part, TUNED, True) for run in group} == {0, 1}


@pytest.mark.parametrize(
    ("only", "sentence"),
    [
        ("data=mnist", r"unknown axis of --only 'data'.*dataset"),
        ("dataset", r"--only takes AXIS=VALUE, as in dataset=mnist,k=20, not 'dataset'"),
        ("dataset=mnist6k", r"unknown value of dataset 'mnist6k'.*mnist"),
        ("k=30", r"unknown value of k '30'.*20"),
    ],
)
def test_an_unknown_part_is_refused(only, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_benchmark(Request(), read_only(only))


def test_the_form_for_a_cpu_is_the_same_benchmark_with_less_of_everything() -> None:
    small = read_benchmark(Request(), size="cpu")
    assert (small.size, small.stem, small.is_tuned) == ("cpu", "table-methods-cpu", True)
    assert [method.name for method in small.methods] == [method.name for method in WHOLE.methods]
    names = {column.name for column in WHOLE.columns}
    assert {column.name for column in small.columns} < names
    assert small.tuning["budget"] < WHOLE.tuning["budget"]
    assert small.tuning["seed"] == WHOLE.tuning["seed"]
    only = {"dataset": ["mnist", "cifar10"], "architecture": ["equal"], "k": ["20"]}
    part = read_benchmark(Request(methods=("local",)), only, "cpu")
    rounds = {}
    for group in plan_groups(part, TUNED, finished=True):
        config = group[0].cell.config
        rounds[group[0].column.dataset] = config.rounds
        assert config.rounds < 60
        assert config.partition.options["test_shots"] is not None
    assert rounds == {"mnist": 40, "cifar10": 40}  # the size's win over those of a data set
    assert part.columns[-1].settings["dataset"].startswith("npz:")  # but for what it says of one
    assert "perceptrons" in part.title_of("datasets", "cifar10")
    assert "perceptrons" not in WHOLE.title_of("datasets", "cifar10")
    with pytest.raises(ConfigError, match=r"--size cpu --tune --only dataset=mnist --methods 'Loc"):
        plan_groups(part, {})


def test_closed_forms_have_features_of_their_data_set() -> None:
    """On CIFAR-10 those of the network that everybody starts from; elsewhere random filters."""
    for group in plan_groups(WHOLE, TUNED, finished=True):
        run = group[0]
        config = run.cell.config
        if run.method.has_closed_form and run.column.dataset == "cifar10":
            assert config.feature_map[0].name == "frozen"
        else:
            assert config.feature_map == ()
    closed = [method.name for method in WHOLE.methods if method.has_closed_form]
    assert closed == ["Closed form", "Local + teacher", "Contrast + teacher", "FedBlend + teacher"]


def test_sizes_are_named_in_a_sentence() -> None:
    assert choose_size(None, False) == "full"
    assert choose_size("cpu", False) == "cpu"
    assert choose_size(None, True) == "quick"
    with pytest.raises(ConfigError, match=r"unknown size 'small', accepted: cpu, full"):
        choose_size("small", False)
    with pytest.raises(ConfigError, match="--size and --quick exclude each other"):
        choose_size("cpu", True)


def test_a_method_that_was_not_tuned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Local has no chosen settings on mnist: run `fedproto"):
        plan_groups(WHOLE, {})
    with pytest.raises(ConfigError, match=r"unknown method 'fedproxy'.*fedprox"):
        read_benchmark(Request(methods=("fedproxy",)))


def test_a_record_is_known_on_another_machine() -> None:
    settings = {"dataset": "cifar10", "model": "resnet18"}
    here, there, other = (
        configure(settings | changes)[0]
        for changes in (
            {"model.weights": "/a/w.safetensors", "device": "cuda", "data_dir": "/a"},
            {"model.weights": "/b/w.safetensors", "device": "cpu", "stack": 7},
            {"model.weights": "/a/w.safetensors", "lr": 0.5},
        )
    )
    assert identify(here) == identify(there) != identify(other)
    first, second, third = (
        configure({"dataset": f"npz:{path}", "partition": "nway"})[0]
        for path in ("/a/features.npz", "data:features.npz", "/a/others.npz")
    )
    assert identify(first) == identify(second) != identify(third)


def test_a_setting_with_its_default_is_not_part_of_what_a_record_is(monkeypatch) -> None:
    """So a setting that the package gains later leaves all records as they are."""
    (plain,) = configure({"dataset": "digits"})
    (changed,) = configure({"dataset": "digits", "epochs": 2})
    before = identify(plain)
    assert before != identify(changed)
    others = [setting for setting in fields(plain) if setting.name != "epochs"]
    monkeypatch.setattr(records, "fields", lambda _: others)
    assert identify(plain) == before == identify(changed)


# --- running


def test_the_quick_table(tiny: Path) -> None:
    archive = tiny.parent / "cells.gz"
    reporter, files, said = make(tiny, archive)
    assert said == []
    assert [len(names) for names in reporter.trained] == [4, 4, 4, 4]  # partitions x seeds
    assert [path.name for path in files][:2] == ["table-methods.json", "table-methods.md"]
    content = json.loads((tiny / "table-methods.json").read_text())
    assert len(content["cells"]) == 2 * 2 * 2
    assert sum(len(cell["runs"]) for cell in content["cells"]) == 16
    run = content["cells"][0]["runs"][0]
    assert run["accuracy"].keys() == {"head", "head_own"}
    assert len(run["accuracy"]["head"]) == len(run["last"]["accuracy"]["head_own"]) == 4
    assert 1 <= run["best_round"] <= run["rounds"] == 2
    assert run["bytes_up"] == run["bytes_down"] == 0  # Local
    assert 0 <= run["macro_f1"] <= 1
    assert archive.stat().st_size < 16 * 1000
    page = (tiny / "table-methods.md").read_text()
    for words in (
        "### n = 3",
        "**Mixed architectures, k = 20**",
        "minus Local",
        "nothing was tuned",
    ):
        assert words in page
    # Nothing but records is kept, and they are all that another machine needs.
    assert list((tiny / "runs/table-methods").iterdir()) == []
    elsewhere = tiny.parent / "elsewhere"
    reporter, _, _ = make(elsewhere, archive, run=False)
    assert (elsewhere / "table-methods.json").read_text() == (
        tiny / "table-methods.json"
    ).read_text()
    assert make(elsewhere, archive)[0].trained == []
    # The verdicts' reader takes it, once it is not the quick version.
    whole = content | {"quick": False}
    (elsewhere / "table-methods.json").write_text(json.dumps(whole))
    results = read_results(elsewhere)["table-methods"]
    assert results.methods() == ["Local", "FedProto"]
    measured = results.measure("FedProto", measure_accuracy)
    assert len(measured) == 8


def test_it_stops_in_time_and_goes_on_where_it_stopped(tiny: Path) -> None:
    reporter, files, said = make(tiny, only="architecture=equal", methods=("local",))
    assert [len(names) for names in reporter.trained] == [4]
    assert len(json.loads(files[0].read_text())["cells"]) == 2
    reporter, _, said = make(tiny, minutes=0.0)
    assert reporter.trained == []
    assert said == ["4 of 16 federations are finished; run it again"]
    reporter, _, _ = make(tiny, only="partition=nway3,architecture=equal")
    assert reporter.trained == [
        ["FedProto-mnist5k_nway3_equal_k=20-seed=0", "FedProto-mnist5k_nway3_equal_k=20-seed=1"]
    ]


def test_nothing_finished_is_said_in_a_sentence(tiny: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no finished run of table-methods"):
        make(tiny, run=False)
    broken = tiny.parent / "broken.gz"
    broken.write_bytes(b"no archive")
    with pytest.raises(RunFolderError, match=r"broken\.gz is not an archive of records"):
        make(tiny, broken)


def test_archives_of_several_calls_add_up(tiny: Path) -> None:
    first, second = tiny.parent / "a.gz", tiny.parent / "b.gz"
    make(tiny.parent / "a", first, only="architecture=equal", methods=("local",))
    make(tiny.parent / "b", second, only="architecture=equal", methods=("fedproto",))
    kept = Records(tiny / "runs")
    assert (kept.unpack(first), kept.unpack(second), kept.unpack(first)) == (4, 4, 0)
    _, files, _ = make(tiny, run=False)
    assert len(json.loads(files[0].read_text())["cells"]) == 4


# --- tuning


def test_methods_are_tuned_once_and_the_table_takes_what_was_chosen(tiny: Path) -> None:
    reporter = SearchReporter()
    request = Request(quick=True)
    only = read_only("architecture=equal")
    assert list(tune_all(request, only, tiny, None, reporter.open)) == [
        "Local is tuned on mnist5k",
        "FedProto is tuned on mnist5k",
    ]
    # Two candidates, each on two partitions, of which the default has its own stack or none.
    assert sorted(set(reporter.trained)) == [
        "000-seed=1000",
        "000-seed=1000-partition=1",
        "001-seed=1000",
        "001-seed=1000-partition=1",
    ]
    stored = json.loads((tiny / tuning.name_tuned()).read_text())
    found = stored["datasets"]["mnist5k"]["FedProto"]
    assert set(found["settings"]) == {"lr", "lam"}
    assert found["tried"] == 2
    assert found["validation"] >= found["default_validation"]
    assert tuning.read_tuned(tiny)["mnist5k"]["FedProto"] == found["settings"]
    assert tuning.count_trials(tiny) == 4
    assert list(tune_all(request, only, tiny, None, SearchReporter().open)) == []
    assert list(tune_all(request, only, tiny.parent / "late", 0.0, SearchReporter().open)) == []
    # It lies beside the results, whose reader passes over it.
    assert read_results(tiny) == {}


class SearchReporter(QuietReporter):
    """Notes the federations that searches train."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = []

    def batch(self, cells, done, notices):
        self.trained += [cell.name for cell in cells]
        return lambda result: None

    def rung(self, candidates, until, rounds_left):
        pass

    def open(self):
        return super().open((), Path())


# --- the page


def cell(method: str, own: list[list[float]], **changes):
    """A cell of one column, with two clients' accuracies for each seed."""
    runs = [
        {
            "seed": seed,
            "rounds": 10,
            "seconds": 1.0,
            "bytes_up": 1000,
            "bytes_down": 20_000,
            "macro_f1": 0.5,
            "accuracy": {"head": [0.1, 0.3], "head_own": clients},
            "last": {"accuracy": {"head": [0.1, 0.3], "head_own": [0.2, 0.4]}, "macro_f1": 0.4},
        }
        for seed, clients in enumerate(own)
    ]
    place = {"dataset": "mnist", "partition": "nway3", "architecture": "equal", "k": 20}
    about = {"method": method, "column": "c", "score": "head", "runs": runs, "diverged": []}
    return about | place | changes


def test_the_page_by_hand() -> None:
    """Local: 50, 60; Best: 70.1, 80; the difference is 20.1 and 20, so 20.05 ± 0.64."""
    cells = [
        cell("Local", [[0.4, 0.6], [0.5, 0.7]]),
        cell("Best", [[0.602, 0.8], [0.7, 0.9]]),
        cell("Lost", [], diverged=[{"seed": 0, "reason": "nan"}]),
    ]
    assert find_best(cells[:2]) == "Best"
    decision = compare_with(cells[:2], "Local")["Best"]
    assert decision.comparison.effect == pytest.approx(20.05)
    assert decision.comparison.half_width == pytest.approx(12.706 * 0.05, abs=1e-3)
    assert decision.outcome is Outcome.BETTER
    content = {
        "title": "T",
        "machines": ["M"],
        "seconds": 4,
        "command": "fedproto reproduce table-methods",
        "trials": 40,
        "tuning": {"budget": 10, "rounds": 20},
        "size": "cpu",
        "settings": {"rounds": 10, "batch": 8},
        "methods": ["Local", "Best", "Late"],
        "titles": {"datasets": {"mnist": "MNIST"}, "partitions": {"nway3": "n = 3"}},
        "cells": cells,
    }
    page = render_page(content)
    assert (
        "| Best | 75.05 | 20.00 | 50.00 | 65.10 | 30.00 | +20.05 ± 0.64, better |  "
        "| 1 kB | 20 kB | 1.0 | 2 |" in page
    )
    assert "| Local | 55.00 | 20.00 | 50.00 | 45.00 | 30.00 |  | -20.05 ± 0.64, worse |" in page
    assert "10 settings per method and data set, up to 20 rounds, 40 in all" in page
    assert "They are in `table-methods-cpu-tuned.json`" in page
    assert "Settings of all runs, unless a data set has its own: rounds 10, batch 8." in page
    assert "**Not run yet**: Late." in page
    assert "**Diverged** and without a result: Lost (c), seed 0." in page


# --- the command


def test_the_command_refuses_what_only_the_table_of_methods_has(tmp_path) -> None:
    for flag in (["--tune"], ["--only", "k=20"], ["--minutes", "1"], ["--size", "cpu"]):
        done = fedproto("reproduce", "table-mnist", "--quick", *flag, "--out", tmp_path)
        assert done.code == 2
        assert f"{flag[0]} is for table-methods, not for table-mnist" in done.err
    done = fedproto("reproduce", "table-methods", "--only", "k=3", "--out", tmp_path)
    assert done.code == 2
    assert "unknown value of k '3'" in done.err


def test_the_command(tiny: Path) -> None:
    done = fedproto(
        "reproduce", "table-methods", "--quick", "--only", "partition=nway3,architecture=equal",
        "--methods", "local", "--out", tiny, "--archive", tiny.parent / "a.gz",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert f"written to {tiny}/table-methods.md" in done.out


def test_the_list_of_methods_is_one_table() -> None:
    tables = read_tables(benchmark.SPEC)
    assert set(tables["methods"]) == {method.name for method in WHOLE.methods}
