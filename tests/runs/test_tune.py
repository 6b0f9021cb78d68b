"""Searches: their spaces, who is stopped when, and that nothing but validation rows decides."""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.command_line import fedproto
from helpers.killed_runs import Killed
from helpers.tiny import ALGORITHMS, SETTINGS
from hypothesis import given
from hypothesis import strategies as st

from fedproto import tune
from fedproto.config import plugin_trust
from fedproto.config.config_file import read_toml
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.engines.reference import ReferenceEngine
from fedproto.errors import ConfigError, RunFolderError, TrainingError
from fedproto.runs.tune.candidates import draw_candidates, draw_settings, group_size
from fedproto.runs.tune.default_spaces import OPTIONS, default_space
from fedproto.runs.tune.halving import choose_survivors, count_rounds, plan_rungs, rank
from fedproto.runs.tune.search import Search, SearchOptions
from fedproto.runs.tune.space import Range, Values, describe_space, read_search

#: Ten classes with five rows each per client, of which one is for validation.
EVEN = SETTINGS | {"ways": 10, "stdev": 0, "shots": 5}


@pytest.fixture
def oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An algorithm that is right about the classes below 10 × aim, and about no other."""
    (tmp_path / "oracles.py").write_text(
        "from dataclasses import replace\n"
        "import torch\n"
        "from torch.nn.functional import one_hot\n"
        "from fedproto.algorithms.local import local\n"
        "def oracle(*, aim: float = 0.5, bad: bool = False):\n"
        "    def predict(step):\n"
        "        y = step.batch.y\n"
        "        guess = torch.where(y < 10 * aim, y, (y + 1) % 10)\n"
        "        return {'head': one_hot(guess, 10).to(step.logits)}\n"
        "    def loss(step):\n"
        "        return {'supervised': step.logits.sum() * (float('nan') if bad else 0)}\n"
        "    return replace(local(), name='oracle', predict=predict, loss=loss)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "oracles", raising=False)
    with plugin_trust.own_trust():
        plugin_trust.trust_plugins("oracles:oracle")
        yield "oracles:oracle"


class Quiet:
    """Notes what a search announces."""

    def __init__(self, die_in: tuple[int, int] | None = None) -> None:
        self.rungs: list[tuple[int, int, int]] = []
        self.trained: list[tuple[str, int]] = []  # cell and the round it went on from
        self.broke: list[str] = []
        self.die_in = die_in  # a round, and in which federation's the process is killed
        self.finished: Counter[int] = Counter()  # federations by round

    @contextmanager
    def open(self) -> Iterator["Quiet"]:
        yield self

    def batch(self, cells, done, notices):
        self.trained += [(cell.name, done) for cell in cells]
        return self.note

    def note(self, result):
        self.finished[result.round] += 1
        if self.die_in == (result.round, self.finished[result.round]):
            raise Killed

    def broken(self, cell, error):
        self.broke.append(cell.name)

    def rung(self, candidates, until, rounds_left):
        self.rungs.append((candidates, until, rounds_left))


def prepare(settings, search, **options) -> Search:
    return Search.prepare(settings, {}, SearchOptions(search, **options))


# --- the space


def test_a_search_is_read_from_text() -> None:
    assert read_search("lam=0.1..10:log, lr=0.003..0.1 ,tau=0.1|0.3|1") == {
        "lam": Range(0.1, 10, log=True),
        "lr": Range(0.003, 0.1),
        "tau": Values(("0.1", "0.3", "1")),
    }
    assert read_search({"lam": "0.1..10:log", "tau": [0.1, 1], "mu": 3}) == {
        "lam": Range(0.1, 10, log=True),
        "tau": Values((0.1, 1)),
        "mu": Values((3,)),
    }


def test_what_is_picked_by_hand() -> None:
    assert Range(1, 3).pick(0.25) == 1.5
    assert Range(0.01, 100, log=True).pick(0.5) == 1
    assert Range(0.01, 100, log=True).pick(0.25) == 0.1
    assert [Range(1, 3, whole=True).pick(f) for f in (0, 0.33, 0.34, 0.66, 0.67, 0.99)] == [
        1, 1, 2, 2, 3, 3
    ]  # fmt: skip
    assert [Values(("a", "b")).pick(f) for f in (0, 0.49, 0.5, 0.99)] == ["a", "a", "b", "b"]


@given(st.floats(1e-6, 1e3), st.floats(1.01, 1e3), st.booleans(), st.floats(0, 1, exclude_max=True))
def test_what_is_picked_lies_in_the_range(
    low: float, factor: float, log: bool, fraction: float
) -> None:
    range = Range(low, low * factor, log)
    assert low <= range.pick(fraction) <= low * factor
    assert read_search({"x": str(Range(0.5, 8, log))}) == {"x": Range(0.5, 8, log)}


@pytest.mark.parametrize(
    ("search", "sentence"),
    [
        ("", r"takes SETTING=VALUES, as in lam=0.1..10:log"),
        ({}, r"the search names no setting"),
        ("lam", r"takes SETTING=VALUES, .* not 'lam'"),
        ("lam=", r"takes SETTING=VALUES, .* not 'lam='"),
        ("lam=1..1", r"the range of lam is empty: 1 is not less than 1"),
        ("lam=2..1:log", r"the range of lam is empty: 2 is not less than 1"),
        ("lam=0..1:log", r"begins at 0, but a logarithmic one must begin above 0"),
        ("lam=a..b", r"the range of lam must be two numbers, as in 0.1..10:log, not a..b"),
        ("lam=1..inf", r"the range of lam must be two numbers"),
        ("lam=1|", r"the search of lam has an empty value: '1|'"),
        ("lam=1|2,lam=3", r"the search names lam twice"),
        ({"lam": []}, r"the search lists no value of lam"),
        ({"lam": None}, r"the search of lam must be a range such as '0.1..10:log' or a list"),
        ("lamb=1|2", r"unknown key 'lamb'.*lam"),
        ("lam=-1|2", r"lam must be a number of at least 0, not '-1'"),
        ("lam=-1..2", r"lam must be a number of at least 0, not -1"),
        ("algorithm.mu=1|2", r"unknown option of algorithm fedproto 'mu'"),
        ("ways=3|5", r"ways cannot be searched: tunable are batch, .*, and the options of the alg"),
        ("partition.ways=3|5", r"partition.ways cannot be searched"),
        ("seed=0|1", r"seed cannot be searched"),
        ("rounds=5|9", r"rounds cannot be searched"),
        ("run.seed=0|1", r"run.seed cannot be searched"),
        ("algorithm=local|fedproto", r"algorithm cannot be searched"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(search, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        prepare(SETTINGS, search)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": 0}, "budget must be a whole number of at least 1, not 0"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1, not 0"),
        ({"seeds": -1}, "seeds must be a whole number of at least 1, not -1"),
        ({"strategy": "grid"}, "unknown strategy 'grid'.*halving, random"),
        ({"halve_after": 21}, "halve_after must be a round from 1 to 20, not 21"),
        (
            {"halve_after": 2, "strategy": "random"},
            "halve_after is for successive halving, not for a random search",
        ),
    ],
)
def test_counts_that_make_no_sense_are_refused(options, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        prepare(SETTINGS, "lr=0.1|1", **options)


def test_settings_that_do_not_fit_the_search_are_refused() -> None:
    with pytest.raises(ConfigError, match="validation is 0, but settings are chosen by valid"):
        prepare(SETTINGS | {"validation": 0}, "lr=0.1|1")
    with pytest.raises(ConfigError, match="warmup must be less than the 3 rounds, not 5"):
        prepare(SETTINGS | {"warmup": 5, "rounds": 9}, "lr=0.1|1", rounds=3)
    with pytest.raises(ConfigError, match="a search takes one algorithm, not several"):
        prepare(SETTINGS | {"algorithm": "local,fedavg"}, "lr=0.1|1")


# --- the candidates


def test_the_same_seed_draws_the_same_candidates_and_another_seed_others() -> None:
    space = read_search("lr=0.003..0.1:log,lam=0.1..10:log")
    drawn = [draw_candidates(SETTINGS, {}, space, 6, seed) for seed in (0, 0, 1)]
    first, again, other = ([each.settings for each in some] for some in drawn)
    assert first == again
    assert first[0] == other[0] == {"lr": 0.05, "lam": 1}
    assert all(mine != theirs for mine, theirs in zip(first[1:], other[1:], strict=True))


def test_a_larger_budget_draws_the_same_candidates_first_where_nothing_is_shared() -> None:
    space = read_search("lam=0.1..10:log")
    few = draw_candidates(SETTINGS, {}, space, 4, 0)
    many = draw_candidates(SETTINGS, {}, space, 9, 0)
    assert [each.settings for each in few] == [each.settings for each in many[:4]]


def test_candidates_share_what_cannot_be_stacked() -> None:
    """Ten draws in groups of four: the learning rates differ, and lam within a group does not."""
    space = read_search("lr=0.003..0.1:log,lam=0.1..10:log")
    assert group_size(space, 10) == 4
    drawn = [draw_settings(space, 0, number, 4) for number in range(10)]
    lams = [each["lam"] for each in drawn]
    assert [lams.count(lam) for lam in dict.fromkeys(lams)] == [4, 4, 2]
    assert len({each["lr"] for each in drawn}) == 10


@pytest.mark.parametrize(
    "search", ["lr=0.1..1,momentum=0.1|0.9", "lam=0.1..1", "lam=1|2,batch=4|8"]
)
def test_candidates_share_nothing_where_all_or_nothing_can_be_stacked(search: str) -> None:
    assert group_size(read_search(search), 10) == 1


def test_a_small_space_is_exhausted_without_repeating_a_setting() -> None:
    space = read_search("lam=1|2|3,lr=0.05|0.1")
    candidates = draw_candidates(SETTINGS, {}, space, 16, 0)
    settings = {(each.settings["lam"], each.settings["lr"]) for each in candidates}
    assert settings == {(lam, lr) for lam in (1, 2, 3) for lr in (0.05, 0.1)}
    assert len(candidates) == 6


def test_whole_numbers_are_drawn_where_a_setting_takes_no_others() -> None:
    candidates = draw_candidates(SETTINGS, {}, read_search("epochs=1..3,lam=1..3"), 12, 0)
    assert {each.settings["epochs"] for each in candidates} == {1, 2, 3}
    assert any(each.settings["lam"] % 1 for each in candidates[1:])


def test_drawn_values_win_over_set_and_options_of_models_are_searched() -> None:
    space = read_search({"lam": [7.0], "model.hidden": [11]})
    _, drawn = draw_candidates(SETTINGS, {"lam": "3"}, space, 2, 0)
    assert drawn.settings == {"lam": 7, "model.hidden": 11}
    assert drawn.config.algorithm.options["lam"] == 7


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_a_default_space_that_fits_it(algorithm: str) -> None:
    space = default_space(Part(algorithm))
    assert "lr" in space
    settings = {"algorithm": algorithm, "dataset": "digits"}
    candidates = draw_candidates(settings, {}, space, 4, 0)
    assert len(candidates) == 4
    assert describe_space(read_search(describe_space(space))) == describe_space(space)


def test_the_table_of_default_spaces_names_algorithms_of_the_package() -> None:
    assert set(OPTIONS) <= set(ALGORITHMS)


# --- halving


@pytest.mark.parametrize(
    ("arguments", "rungs"),
    [
        (("halving", 20), [5, 10, 20]),
        (("halving", 20, 3), [3, 6, 12, 20]),
        (("halving", 16, 1), [1, 2, 4, 8, 16]),
        (("halving", 1), [1]),
        (("halving", 3), [1, 2, 3]),
        (("halving", 20, 20), [20]),
        (("random", 20), [20]),
    ],
)
def test_the_schedule_by_hand(arguments, rungs) -> None:
    assert plan_rungs(*arguments) == rungs


def test_the_better_half_goes_on_and_the_default_with_it() -> None:
    scores = {0: 0.1, 1: 0.5, 2: 0.9, 3: 0.4, 4: 0.9}
    assert rank(scores) == [2, 4, 1, 3, 0]
    assert choose_survivors(scores) == [0, 1, 2, 4]  # three of five, and the default
    assert choose_survivors({0: 0.9, 1: 0.5}) == [0]
    assert choose_survivors({1: 0.5, 2: None, 3: None, 4: None}) == [1]  # of two, one broke down
    assert choose_survivors({0: None, 1: 0.5}) == [1]


def test_rounds_are_counted_by_hand() -> None:
    """After 5 rounds of 16, at most 9 go on for 5 rounds, then at most 6 for 10."""
    assert count_rounds(16, [5, 10, 20]) == 9 * 5 + 6 * 10
    assert count_rounds(16, [20]) == 0


# --- a search whose accuracies are known


def test_a_search_finds_the_best_setting_of_a_known_function(oracle, tmp_path) -> None:
    """Validation accuracy is ceil(10 aim) / 10 in every round, so the largest aim must win."""
    settings = EVEN | {"algorithm": oracle}
    seen = Quiet()
    search = prepare(settings, {"aim": [0.15, 0.25, 0.35, 0.75, 0.95]}, rounds=4, seeds=2)
    content = search.run(tmp_path / "found", seen.open)
    by_aim = {each["settings"]["aim"]: each for each in content["candidates"]}
    for aim, candidate in by_aim.items():
        accuracy = math.ceil(10 * aim) / 10
        assert candidate["validation"] == pytest.approx(accuracy, abs=1e-6)
        for judged in candidate["judged"]:
            assert judged["seeds"] == pytest.approx([accuracy, accuracy], abs=1e-6)
    # Six candidates; 0.95, 0.75 and 0.5 (the default) go on, then 0.95, 0.75 and the default.
    reached = {aim: candidate["rounds"] for aim, candidate in by_aim.items()}
    assert reached == {0.5: 4, 0.15: 1, 0.25: 1, 0.35: 1, 0.75: 4, 0.95: 4}
    assert content["candidates"][content["best"]]["settings"] == {"aim": 0.95}
    assert content["tried"] == 6
    assert content["complete"]
    assert [(candidates, until) for candidates, until, _ in seen.rungs] == [(6, 1), (3, 2), (3, 4)]
    # Everybody goes on from its checkpoint, never from the start.
    assert sorted({done for _, done in seen.trained}) == [0, 1, 2]
    assert len(seen.trained) == 2 * (6 + 3 + 3)
    settings_of_best = read_toml(tmp_path / "found/best.toml")
    (config,) = configure(settings_of_best)
    assert config.algorithm.options["aim"] == 0.95
    assert (config.rounds, config.seed, config.validation) == (SETTINGS["rounds"], 0, None)


def test_a_random_search_trains_everybody_to_the_end(oracle, tmp_path) -> None:
    search = prepare(
        EVEN | {"algorithm": oracle}, {"aim": [0.2, 0.8]}, rounds=2, seeds=1, strategy="random"
    )
    content = search.run(tmp_path / "found", Quiet().open)
    assert [each["rounds"] for each in content["candidates"]] == [2, 2, 2]


def test_test_rows_are_never_looked_at(tmp_path, monkeypatch) -> None:
    parts = []
    evaluate = ReferenceEngine.evaluate

    def watched(self, servers, part="test"):
        parts.append(part)
        return evaluate(self, servers, part)

    def refuse(self, servers, part="test"):
        raise AssertionError("a search measures nothing")

    monkeypatch.setattr(ReferenceEngine, "evaluate", watched)
    monkeypatch.setattr(ReferenceEngine, "measure", refuse)
    search = prepare(SETTINGS, "lr=0.01|0.1", rounds=2, seeds=1)
    search.run(tmp_path / "found", Quiet().open)
    assert set(parts) == {"validation"}
    lines = [
        json.loads(line) for line in (tmp_path / "found").rglob("metrics.jsonl").__next__().open()
    ]
    assert all(line["accuracy"] is None for line in lines)
    assert not list((tmp_path / "found").rglob("result.json"))
    assert not list((tmp_path / "found").rglob("*.safetensors"))  # models are not kept


def test_a_candidate_that_diverges_is_ranked_last(oracle, tmp_path) -> None:
    search = prepare(EVEN | {"algorithm": oracle}, {"bad": [True]}, rounds=2, seeds=1)
    seen = Quiet()
    content = search.run(tmp_path / "found", seen.open)
    bad = content["candidates"][1]
    assert (bad["validation"], bad["rounds"]) == (None, 0)
    assert "the supervised loss is nan" in bad["broken"]
    assert content["best"] == 0
    assert seen.broke == ["001-seed=0"]
    with pytest.raises(TrainingError, match=r"every candidate broke down: .*loss is nan"):
        prepare(
            EVEN | {"algorithm": oracle, "algorithm.bad": True}, {"aim": [1]}, rounds=1, seeds=1
        ).run(tmp_path / "other", Quiet().open)


# --- going on


def search_to_kill() -> Search:
    return prepare(SETTINGS, "lam=0.1..10:log", budget=3, rounds=4, seeds=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a search that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "found"
    search_to_kill().run(folder, Quiet().open)
    return folder


@pytest.mark.parametrize("die_in", [(1, 1), (1, 4), (2, 3), (3, 1), (4, 2)])
def test_a_search_that_was_killed_goes_on_to_the_same_result(tmp_path, whole, die_in) -> None:
    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        search_to_kill().run(folder, Quiet(die_in).open)
    stopped = json.loads((folder / "tune.json").read_text())
    assert not stopped["complete"]
    assert not (folder / "best.toml").exists()
    search_to_kill().run(folder, Quiet().open)
    for name in ("tune.json", "best.toml"):
        assert (folder / name).read_text() == (whole / name).read_text()
    again = Quiet()
    search_to_kill().run(folder, again.open)
    assert again.trained == []  # everything is known


def test_a_folder_with_something_else_is_refused(tmp_path) -> None:
    first = prepare(SETTINGS, "lr=0.01|0.1", rounds=1, seeds=1)
    first.run(tmp_path / "a", Quiet().open)
    with pytest.raises(RunFolderError, match="holds another search, with a different seeds"):
        prepare(SETTINGS, "lr=0.01|0.1", rounds=1, seeds=2).run(tmp_path / "a", Quiet().open)
    with pytest.raises(RunFolderError, match="holds another search, with a different config"):
        other = SETTINGS | {"clients": 3}
        prepare(other, "lr=0.01|0.1", rounds=1, seeds=1).run(tmp_path / "a", Quiet().open)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/note.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="holds something else than a search"):
        first.run(tmp_path / "b", Quiet().open)
    # How it is computed may change.
    prepare(SETTINGS | {"data_dir": str(tmp_path)}, "lr=0.01|0.1", rounds=1, seeds=1).run(
        tmp_path / "a", Quiet().open
    )


# --- engines, Python and the command


def test_engines_find_the_same(tmp_path) -> None:
    found = []
    for engine in ("reference", "vectorised"):
        settings = SETTINGS | {"engine": engine}
        search = prepare(settings, "lr=0.003..0.3:log,lam=0.1..10:log", budget=4, rounds=2, seeds=2)
        found.append(search.run(tmp_path / engine, Quiet().open))
    first, second = found
    assert first["candidates"] == second["candidates"]
    assert first["best"] == second["best"]


def test_tune_from_python(tmp_path) -> None:
    tuned = tune({"lam": [0.1, 10]}, out=tmp_path / "found", seeds=1, **(SETTINGS | {"rounds": 2}))
    assert tuned.tried == 3
    assert tuned.data["rungs"] == [1, 2]
    assert set(tuned.best) == {"lam"}
    assert tuned.default is not None
    assert tuned.validation >= tuned.default
    assert "on validation rows, of 3 settings" in repr(tuned)
    assert read_toml(tuned.folder / "best.toml")["rounds"] == 100


def test_the_command(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'dataset = "digits"\nclients = 4\nrounds = 7\n[partition]\nname = "nway"\nshots = 5\n'
        '[search]\nlr = [0.01, 0.1]\n[search.algorithm]\nlam = "0.1..10:log"\n'
    )
    out = tmp_path / "found"
    done = fedproto("tune", path, "--budget", "3", "--rounds", "2", "--seeds", "1", "--out", out)
    assert done.code == 0, done.err
    assert "fedproto: accuracy on validation rows" in done.out
    assert "3 settings tried" in done.out
    assert "default" in done.out
    assert f"fedproto run {out}/best.toml" in done.out.replace("\n", "")
    content = json.loads((out / "tune.json").read_text())
    assert content["search"] == {"lr": "0.01|0.1", "algorithm.lam": "0.1..10:log"}
    ran = fedproto("run", out / "best.toml", "--rounds", "1", "--out", tmp_path / "run")
    assert ran.code == 0, ran.err


def test_the_command_works_with_no_flag_but_an_algorithm(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--set", "clients=2", "--set", "shots=5", "--dataset", "digits"]
    counts = ["--budget", "2", "--rounds", "1", "--seeds", "1"]
    done = fedproto("tune", "--algorithm", "moon", *small, *counts)
    assert done.code == 0, done.err
    content = json.loads(Path("runs/tune-moon/tune.json").read_text())
    assert set(content["search"]) == {"lr", "mu"}


def test_the_command_says_what_is_wrong_in_one_sentence(tmp_path) -> None:
    for arguments, sentence in [
        (("--search", "lam=0..1:log"), "a logarithmic one must begin above 0"),
        (("--budget", "0"), "budget must be a whole number of at least 1, not 0"),
        (("--search", "ways=1|2"), "ways cannot be searched"),
        (("--validation", "0"), "validation is 0, but settings are chosen by validation rows"),
    ]:
        done = fedproto("tune", "--dataset", "digits", *arguments, "--out", tmp_path / "x")
        assert done.code == 2
        assert sentence in done.err
        assert len(done.err.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()
