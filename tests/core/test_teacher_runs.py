"""Teachers beside every algorithm, in every engine."""

import pytest
import torch
from helpers.engine_comparison import TROUBLE, assert_engines_agree, assert_equal, finish, prepare
from helpers.tiny import SETTINGS, experiment, finished

from fedproto.config import plugins
from fedproto.config.settings import configure
from fedproto.core import closed_form
from fedproto.core.closed_form import CLASS_SUMS, GRAM, TEACHER, Sums, solve_known
from fedproto.core.tensors import flatten_state
from fedproto.engines.vectorised import receiving
from fedproto.errors import ConfigError
from fedproto.runs.execution import execute
from fedproto.runs.experiment import Experiment
from fedproto.teachers.lda import lda

SMALL_MAP = "random-conv(filters=3, kernel=3, pool=2)"
WITH_TEACHER = {"teacher": "lda", "feature_map": SMALL_MAP}
PERSONAL = WITH_TEACHER | {"teacher": "lda(individual=0.5)"}
VALIDATED = WITH_TEACHER | {"validation": 0.4, "shots": 8, "rounds": 3}
#: Without those whose clients, or servers, need more than two rounds of digits.
ALGORITHMS = [name for name in plugins.names("algorithm") if name != "closed-form"]


@pytest.mark.parametrize("settings", [TROUBLE, {}], ids=["trouble", "calm"])
@pytest.mark.parametrize("solve", ["lda", "ridge", "ncm"])
def test_engines_agree_on_the_closed_form_alone(solve, settings):
    settings = settings | {"feature_map": SMALL_MAP, "validation": 0.3, "shots": 6}
    (run, result), _ = assert_engines_agree(f"closed-form(solve={solve})", **settings)
    assert list(result.data["accuracy"]) == ["teacher", "teacher_own"]
    assert run.progress.server[TEACHER]["counts"].sum() > 0


@pytest.mark.parametrize("settings", [TROUBLE, {}], ids=["trouble", "calm"])
def test_engines_agree_on_solutions_of_each_client(settings):
    settings = settings | {"feature_map": SMALL_MAP, "validation": 0.3, "shots": 6}
    (run, _), _ = assert_engines_agree("closed-form(individual=0.5)", **settings)
    server = run.progress.server[TEACHER]
    assert_own_solutions(run, run.progress.once_uploads.clients())
    assert server["own_vectors"].shape[1] == len(run.federation.members)


def assert_own_solutions(run, clients):
    """Assert that these clients have solutions of their own, made from their rows directly."""
    server = run.progress.server[TEACHER]
    rows = []
    for client in clients:
        train = run.federation.members[client].train
        rows.append((train.fixed[train.rows].double(), train.y[train.rows]))
    sums = [sum_rows(x, y, len(run.federation.classes)) for x, y in rows]
    pooled = Sums(*(sum(parts) for parts in zip(*sums, strict=True)))
    for client, own in zip(clients, sums, strict=True):
        expected = solve_known(lda(individual=0.5), pooled, own)
        found = server["own_vectors"][:, client].double()
        largest = expected.vectors.abs().max()
        assert torch.allclose(found, expected.vectors, rtol=0, atol=1e-4 * largest)
        assert not torch.allclose(found, server["vectors"].double(), rtol=0, atol=1e-4 * largest)


def sum_rows(x, y, classes):
    membership = torch.nn.functional.one_hot(y, classes).double()
    return Sums(membership.T @ x, membership.sum(0), x.T @ x)


def test_every_client_predicts_by_its_own_solution():
    """It downloads as much as it would of the pooled one, and keeps it."""
    run, result = finished("local", rounds=3, **PERSONAL)
    _, pooled = finished("local", rounds=3, **WITH_TEACHER)
    for name in ("bytes_up", "bytes_down"):
        assert [line[name] for line in result.metrics] == [line[name] for line in pooled.metrics]
    server = run.progress.server[TEACHER]
    for client, state in enumerate(run.engine.states[0]):
        assert torch.equal(state["client/teacher/head.vectors"], server["own_vectors"][:, client])
        assert torch.equal(state["client/teacher/head.bias"], server["own_bias"][:, client])


def test_personal_0_is_the_pooled_solution_bit_for_bit():
    run, result = finished("fedproto", rounds=2, **WITH_TEACHER)
    settings = WITH_TEACHER | {"teacher": "lda(individual=0)"}
    other, other_result = finished("fedproto", rounds=2, **settings)
    first = flatten_state(run.progress.server)
    second = flatten_state(other.progress.server)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert result.data["accuracy"] == other_result.data["accuracy"]


@pytest.mark.parametrize("algorithm", ["local", "fedproto", "fedavg", "ditto", "scaffold"])
def test_engines_agree_with_a_teacher(algorithm):
    assert_engines_agree(algorithm, **TROUBLE | VALIDATED)


@pytest.mark.parametrize("teacher", ["lda", "lda(individual=0.5)"])
def test_processes_agree_with_a_teacher(teacher):
    settings = VALIDATED | {"teacher": teacher, "clients": 5, "participation": 0.6}
    first = finish(prepare("fedproto", "reference", **settings))
    assert_equal(first, finish(prepare("fedproto", "processes", **settings)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_takes_a_teacher_and_trains_as_without(algorithm):
    """The teacher adds scores and nothing else: models are those of a run without it."""
    _, result = finished(algorithm, rounds=2)
    _, taught = finished(algorithm, rounds=2, **WITH_TEACHER)
    names = list(result.data["accuracy"])
    for name in names:
        assert taught.data["accuracy"][name] == pytest.approx(result.data["accuracy"][name])
        way = name.removesuffix("_own")
        suffix = name.removeprefix(way)
        assert f"{way}+teacher{suffix}" in taught.data["accuracy"]
    assert {"teacher", "teacher_own"} <= taught.data["accuracy"].keys()
    for state, other in zip(result.states, taught.states, strict=True):
        for name, value in state.items():
            assert torch.allclose(value, other[name], atol=1e-9), name


def pooled_solution(run):
    """Solve over all training rows at once."""
    x = torch.cat([member.train.fixed[member.train.rows] for member in run.federation.members])
    y = torch.cat([member.train.y[member.train.rows] for member in run.federation.members])
    classes = len(run.federation.classes)
    membership = torch.nn.functional.one_hot(y, classes).double()
    return solve_known(lda(), Sums(membership.T @ x, membership.sum(0), x.T @ x))


def test_the_sums_of_all_clients_are_those_of_the_pooled_rows():
    run, _ = finished("local", rounds=1, **WITH_TEACHER)
    expected = pooled_solution(run)
    own = run.progress.server[TEACHER]
    assert torch.allclose(own["vectors"], expected.vectors, rtol=1e-6, atol=1e-6)
    assert torch.allclose(own["bias"], expected.bias, rtol=1e-6, atol=1e-6)


def test_sums_travel_once_and_solutions_only_when_they_changed():
    run, result = finished("local", rounds=4, **WITH_TEACHER)
    up = [line["bytes_up"] for line in result.metrics]
    down = [line["bytes_down"] for line in result.metrics]
    assert up[0] > 0 and up[1:] == [0, 0, 0]
    assert down[0] == 0 and down[1] > 0 and down[2:] == [0, 0]
    values = run.progress.ledger.counts
    assert values.sum() > 0


def test_who_was_absent_gets_the_solution_later():
    """With one of four clients per round, a client may miss several solutions; it has the last."""
    run = experiment("local", rounds=12, participation=0.25, eval_every=1, **WITH_TEACHER)
    result = run.execute()
    first_round = {}
    for line in result.metrics:
        for client in line["participants"]:
            first_round.setdefault(client, line["round"])
    last_change = max(first_round.values())
    told = set()
    for line in result.metrics:
        (client,) = line["participants"]
        is_told = line["bytes_down"] > 0
        if line["round"] > last_change:
            assert is_told == (client not in told)
            told.add(client)
    assert len(first_round) == 4 and told
    state = run.engine.states[0][next(iter(told))]
    server = run.progress.server[TEACHER]
    assert torch.equal(state["client/teacher/head.vectors"], server["vectors"])


def test_nothing_is_solved_again_while_the_sums_stay(monkeypatch):
    solved = []

    def count(teacher, sums):
        solved.append(teacher.name)
        return solve_known(teacher, sums)

    monkeypatch.setattr(closed_form, "solve_known", count)
    run, _ = finished("local", rounds=4, **WITH_TEACHER)
    assert solved == ["lda"]
    assert run.progress.server[TEACHER]["solved"] == 1


@pytest.mark.parametrize("teacher", ["lda", "lda(individual=0.5)"])
def test_a_resumed_run_knows_who_has_the_solution(teacher):
    settings = WITH_TEACHER | {"teacher": teacher, "rounds": 6, "participation": 0.5}
    whole, expected = finished("fedproto", **settings)
    first = experiment("fedproto", **settings | {"rounds": 3})
    first.execute()
    again = experiment("fedproto", **settings)
    again._restore_tree(first._export(), 3, "here")
    assert torch.equal(again.progress.last_heard, first.progress.last_heard)
    result = again.execute()
    assert result.data["accuracy"] == expected.data["accuracy"]
    assert torch.equal(again.progress.ledger.counts, whole.progress.ledger.counts)
    expected_server = flatten_state(whole.progress.server)
    found_server = flatten_state(again.progress.server)
    assert all(torch.equal(found_server[name], expected_server[name]) for name in expected_server)


def test_a_run_without_a_teacher_stores_nothing_of_it():
    run, _ = finished("fedproto", rounds=1)
    assert "heard" not in run.progress.export()
    assert TEACHER not in run.progress.server
    assert "teacher" not in run.config.toml()


def test_the_weight_is_chosen_on_validation_rows():
    run, _ = finished("local", **VALIDATED)
    weights = [float(state["client/teacher/weight"]) for state in run.engine.states[0]]
    assert set(weights) <= {0.0, 0.25, 0.5, 1.0, 2.0}
    without, _ = finished("local", rounds=2, **WITH_TEACHER)
    assert {float(state["client/teacher/weight"]) for state in without.engine.states[0]} == {1.0}


def test_only_what_is_needed_is_declared():
    run = experiment("local", teacher="ncm", feature_map=SMALL_MAP)
    assert list(run.progress.layouts) == [CLASS_SUMS]
    run = experiment("local", **WITH_TEACHER)
    assert list(run.progress.layouts) == [CLASS_SUMS, GRAM]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"teacher": "lda,ncm"}, "teacher takes one choice, not a list"),
        ({"teacher": "qda"}, "unknown teacher 'qda'"),
        ({"teacher": "lda(shrinkage=2)"}, "shrinkage"),
        ({"teacher": "lda(individual=1.5)"}, "individual"),
        ({"teacher": "ridge(individual=0.5)"}, "individual"),
        (
            {"algorithm": "closed-form(solve=ncm,individual=0.5)"},
            "takes individual=0.5 with solve=lda only, not with ncm",
        ),
        ({"feature_map": "flat"}, "feature_map is flat, but local has no use for it"),
        ({"algorithm": "closed-form", "combiner": "median"}, "cannot be used with the combiner"),
        ({"algorithm": "closed-form", "teacher": "lda"}, "is a closed form itself"),
        ({"teacher": "lda", "feature_map": "hashed-ngrams"}, "hashed-ngrams is for texts"),
        ({"teacher": "lda", "feature_map": "frozen"}, "frozen needs a file"),
        ({"teacher": "lda", "feature_map": "random-conv(kernel=9)"}, "at least 12 pixels"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(settings, sentence):
    settings = dict(settings)
    algorithm = settings.pop("algorithm", "local")
    with pytest.raises(ConfigError, match=sentence):
        experiment(algorithm, **settings)


def test_a_singular_matrix_is_refused_with_what_to_do():
    run = experiment("closed-form(shrinkage=0)", feature_map="flat", rounds=1)
    with pytest.raises(ConfigError, match="64 features is singular; raise shrinkage"):
        run.execute()
    assert flatten_state(run.progress.server)


def test_beside_a_teacher_uploads_are_still_summed():
    """Only what is sent once is kept singly."""
    run, _ = finished("fedavg", rounds=2, **WITH_TEACHER)
    assert run.algorithm.additive and run.algorithm.combinable
    assert run.progress.latest_uploads.uploads is None
    assert list(run.progress.once_uploads.uploads) == [CLASS_SUMS, GRAM]


@pytest.mark.parametrize("engine", ["reference", "vectorised", "processes"])
def test_beside_a_teacher_uploads_are_still_combined(engine):
    """A median of the models, and the teacher of all sums."""
    settings = {"rounds": 2, "combiner": "median", "clients": 4}
    _, plain = finish(prepare("fedavg", engine, **settings))
    run, taught = finish(prepare("fedavg", engine, **settings | WITH_TEACHER))
    assert taught.data["accuracy"]["head"] == pytest.approx(plain.data["accuracy"]["head"])
    expected = pooled_solution(run)
    found = run.progress.server[TEACHER]["vectors"]
    assert torch.allclose(found, expected.vectors, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedproto"])
def test_processes_sum_and_gather(algorithm):
    """Models are summed within a process; what is sent once comes singly."""
    settings = WITH_TEACHER | {"clients": 5, "rounds": 3, "participation": 0.6}
    first = finish(prepare(algorithm, "reference", **settings))
    assert_equal(first, finish(prepare(algorithm, "processes", **settings)))


@pytest.mark.parametrize("algorithm", ["fedavg", "fedblend", "fedper"])
def test_clients_of_all_architectures_share_one_teacher(algorithm):
    """Weights are shared within an architecture, the sums of a teacher across all."""
    models = {"model": "mlp(hidden=16,width=8)*3,mlp(hidden=12,width=8)*3", "clients": 6}
    (run, _), _ = assert_engines_agree(algorithm, **VALIDATED | models)
    found = run.progress.server[TEACHER]
    expected = pooled_solution(run)
    assert list(run.progress.layouts).count(GRAM) == 1
    assert torch.allclose(found["vectors"], expected.vectors, rtol=1e-6, atol=1e-6)


def test_clients_of_all_architectures_have_solutions_of_their_own():
    """The numbers of clients are those of the federation, not those within an architecture."""
    models = {"model": "mlp(hidden=16,width=8)*2,mlp(hidden=12,width=8)*3", "clients": 5}
    settings = PERSONAL | models | {"shots": 8, "rounds": 2}
    (run, _), _ = assert_engines_agree("fedavg", **settings)
    assert run.federation.architectures
    assert_own_solutions(run, range(5))


@pytest.mark.parametrize("largest", [None, 0], ids=["copied", "apart"])
@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg"])
def test_stacked_federations_have_solutions_of_their_own(algorithm, largest, monkeypatch):
    """A sweep trains several federations at once; a client is sent that of its own server."""
    if largest is not None:
        monkeypatch.setattr(receiving, "MAX_COPIED_VALUES", largest)
    seeds = [3, 4, 5]
    settings = SETTINGS | PERSONAL | {"algorithm": algorithm, "engine": "vectorised", "rounds": 3}
    configs = [configure(settings | {"seed": seed})[0] for seed in seeds]
    together = Experiment.prepare_together(configs)
    results = execute(together, [None] * len(seeds))
    for seed, run, result in zip(seeds, together, results, strict=True):
        single = finish(prepare(algorithm, "vectorised", **PERSONAL | {"seed": seed, "rounds": 3}))
        assert_equal((run, result), single)


def test_stacked_federations_may_have_different_numbers_of_clients():
    """The servers' states have different shapes then, so that each sends apart."""
    settings = SETTINGS | PERSONAL | {"algorithm": "fedproto", "engine": "vectorised"}
    configs = [configure(settings | {"clients": clients})[0] for clients in (3, 4)]
    runs = Experiment.prepare_together(configs)
    results = execute(runs, [None, None])
    for run, result, clients in zip(runs, results, (3, 4), strict=True):
        assert run.progress.server[TEACHER]["own_bias"].shape[1] == clients
        single = finish(prepare("fedproto", "vectorised", **PERSONAL | {"clients": clients}))
        assert_equal((run, result), single)
