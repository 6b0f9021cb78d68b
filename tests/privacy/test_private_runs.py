"""Runs with differential privacy: engines agree, budgets hold, and claims are exact."""

import json
import math

import pytest
import torch
from helpers.tiny import experiment, finished

import fedproto
from fedproto.core.tensors import flatten_state
from fedproto.errors import ConfigError, RunFolderError
from fedproto.privacy.accounting import Release, compute_epsilon
from fedproto.runs.execution import execute
from fedproto.runs.experiment import reopen

RELEASE = {"privacy": "release", "noise_multiplier": 0.7}
CLOSED = {"feature_map": "flat", "rounds": 2}
KINDS = {
    "prototypes, noise at clients": ("fedproto", RELEASE | {"freeze": "body"}),
    "prototypes, shaped noise": (
        "fedproto",
        RELEASE | {"freeze": "body", "noise_shape": "variance"},
    ),
    "prototypes, noise at the server": (
        "fedproto",
        RELEASE | {"freeze": "body", "noise_at": "server", "absent": "drop"},
    ),
    "closed form, noise at clients": ("closed-form", RELEASE | CLOSED),
    "closed form, noise at the server": ("closed-form", RELEASE | CLOSED | {"noise_at": "server"}),
    "class means alone": ("closed-form", RELEASE | CLOSED | {"solve": "ncm"}),
    "prototypes and a teacher": (
        "fedproto",
        RELEASE | {"freeze": "body", "teacher": "lda", "feature_map": "flat"},
    ),
    "one mixture": ("fedre", RELEASE | {"freeze": "body"}),
    "clients' models": ("fedavg", {"privacy": "client", "noise_multiplier": 0.3}),
    "clients' prototypes": (
        "fedproto",
        {"privacy": "client", "noise_multiplier": 0.3, "absent": "drop"},
    ),
    "clients' sums": ("closed-form", CLOSED | {"privacy": "client", "noise_multiplier": 0.1}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_engines_agree_on_seeded_noise(kind):
    algorithm, settings = KINDS[kind]
    settings = settings | {"noise_source": "seeded"}
    reference, first = finished(algorithm, **settings)
    vectorised, second = finished(algorithm, **settings, engine="vectorised")
    one = flatten_state(reference.progress.server)
    other = flatten_state(vectorised.progress.server)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-8, atol=1e-8)
    assert first.data["privacy"]["epsilon"] == second.data["privacy"]["epsilon"]
    for one_client, other_client in zip(first.states, second.states, strict=True):
        for name, value in one_client.items():
            torch.testing.assert_close(other_client[name], value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_without_clipping_and_noise_a_run_is_the_plain_one_to_the_bit(kind, engine):
    algorithm, settings = KINDS[kind]
    plain_settings = {
        name: value
        for name, value in settings.items()
        if name not in ("privacy", "noise_multiplier", "noise_at", "noise_shape")
    }
    none = settings | {"noise_multiplier": 0, "clip": "none", "engine": engine}
    plain, plain_result = finished(algorithm, **plain_settings, engine=engine)
    private, result = finished(algorithm, **none)
    assert result.accuracy == plain_result.accuracy
    before = flatten_state(plain.progress.server)
    after = flatten_state(private.progress.server)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not result.data["privacy"]["holds"]
    assert result.data["privacy"]["epsilon"] is None


def test_noise_of_the_operating_system_differs_between_runs_and_between_clients():
    first, _ = finished("fedproto", **RELEASE, freeze="body", rounds=1)
    second, _ = finished("fedproto", **RELEASE, freeze="body", rounds=1)
    one = first.progress.server["prototypes"]
    other = second.progress.server["prototypes"]
    assert not torch.equal(one, other)


# --- budgets


def test_the_noise_that_is_found_for_an_epsilon_lasts_for_all_rounds_and_not_for_more():
    run, result = finished("fedproto", privacy="release", epsilon=3.0, freeze="body", rounds=4)
    assert result.data["rounds"] == 4
    spent = [line["epsilon"] for line in result.metrics]
    assert all(max(line) <= 3.0 for line in spent)
    assert max(spent[-1]) > 2.99
    noise = run.algorithm.privacy.protection.noise
    assert spent[1][0] == pytest.approx(compute_epsilon([Release(noise, 2)], 1e-5))
    assert compute_epsilon([Release(noise, 5)], 1e-5) > 3.0


def test_a_client_pays_for_the_rounds_that_it_takes_part_in():
    run, result = finished(
        "fedproto", **RELEASE, freeze="body", rounds=4, participation=0.5, engine="vectorised"
    )
    taken = [sum(number in line["participants"] for line in result.metrics) for number in range(4)]
    assert run.budget.rounds.tolist() == taken
    noise = run.algorithm.privacy.protection.noise
    for number, rounds in enumerate(taken):
        wanted = compute_epsilon([Release(noise, rounds)], 1e-5)
        assert result.metrics[-1]["epsilon"][number] == pytest.approx(wanted)


def test_a_run_stops_before_its_budget_is_exceeded():
    epsilon = compute_epsilon([Release(2.0, 3)], 1e-5) + 1e-6
    _, result = finished(
        "fedproto",
        privacy="release",
        noise_multiplier=2.0,
        epsilon=epsilon,
        freeze="body",
        rounds=10,
        eval_every=10,
    )
    assert result.data["rounds"] == 3
    assert max(result.metrics[-1]["epsilon"]) <= epsilon
    assert result.metrics[-1]["accuracy"] is not None  # the last round is evaluated
    assert result.data["privacy"]["releases"] == 3


def test_what_is_sent_once_is_paid_for_once():
    run, result = finished("closed-form", **RELEASE, feature_map="flat", rounds=5)
    assert run.budget.once.tolist() == [1, 1, 1, 1]
    epsilons = [line["epsilon"][0] for line in result.metrics]
    assert epsilons == [epsilons[0]] * 5


def test_latecomers_of_a_noisy_closed_form_are_in_one_release_each():
    run, _ = finished(
        "closed-form",
        **RELEASE,
        noise_at="server",
        feature_map="flat",
        rounds=6,
        participation=0.5,
        noise_source="seeded",
    )
    kept = run.progress.server["privacy"]
    assert kept["seen"].all() and 1 < int(kept["releases"]) <= 4
    assert run.budget.once.tolist() == [1, 1, 1, 1]


def test_a_stopped_run_resumes_with_what_it_has_spent(tmp_path):
    run = experiment("fedproto", privacy="release", epsilon=3.0, freeze="body", rounds=4)
    folder = run.new_folder(tmp_path / "run")
    execute([run], [folder], until=2)
    stored = json.loads((tmp_path / "run/privacy.json").read_text())
    assert [client["rounds"] for client in stored["clients"]] == [2] * 4
    resumed, reopened = reopen(folder)
    assert resumed.budget.rounds.tolist() == [2] * 4
    result = resumed.execute(reopened)
    assert result.data["rounds"] == 4
    final = json.loads((tmp_path / "run/privacy.json").read_text())
    assert final["claim"] == result.data["privacy"]
    assert max(client["epsilon"] for client in final["clients"]) <= 3.0


def test_a_round_that_was_paid_for_and_lost_is_not_free_the_second_time(tmp_path):
    run = experiment("fedproto", privacy="release", epsilon=3.0, freeze="body", rounds=4)
    folder = run.new_folder(tmp_path / "run")
    execute([run], [folder], until=2)
    run.budget.charge(torch.arange(4), torch.ones(4, dtype=torch.bool))  # killed in round 3
    resumed, reopened = reopen(folder)
    result = resumed.execute(reopened)
    assert result.data["rounds"] == 3  # the fourth round would exceed the budget
    assert max(result.metrics[-1]["epsilon"]) <= 3.0


def test_a_record_of_spending_that_does_not_fit_is_refused(tmp_path):
    run = experiment("fedproto", privacy="release", epsilon=3.0, freeze="body")
    folder = run.new_folder(tmp_path / "run")
    path = tmp_path / "run/privacy.json"
    content = folder.read_json("privacy.json")
    folder.write_json("privacy.json", content | {"clients": content["clients"][1:]})
    with pytest.raises(RunFolderError, match="does not fit the run"):
        reopen(folder)
    folder.write_json("privacy.json", content | {"clients": [{"rounds": "x"}]})
    with pytest.raises(RunFolderError, match="does not say what was spent"):
        reopen(folder)
    path.unlink()
    with pytest.raises(RunFolderError):
        reopen(folder)


def test_noise_on_a_secure_sum_covers_its_rounding():
    settings = {"privacy": "client", "noise_multiplier": 1.0, "combiner": "secure-sum(error=1e-4)"}
    assert experiment("fedavg", **settings).algorithm.privacy.protection.rounding == 1e-4
    settings["combiner"] = "sum"
    assert experiment("fedavg", **settings).algorithm.privacy.protection.rounding == 0


# --- claims


def test_a_claim_says_what_it_covers_and_what_it_does_not(tmp_path):
    run = experiment("fedproto", privacy="release", epsilon=2.0, freeze="body")
    result = run.execute(run.new_folder(tmp_path / "run"))
    claim = result.data["privacy"]
    assert claim["holds"] and claim["delta"] == 1e-5 and claim["releases"] == 3
    assert "one record" in claim["unit"] and "add or remove" in claim["neighbours"]
    assert "accuracies" in claim["does_not_cover"][0]
    assert any("list of classes is public" in line for line in claim["assumes"])
    stored = json.loads((tmp_path / "run/result.json").read_text())
    assert stored["privacy"] == claim


def test_a_claim_on_a_table_leaves_out_an_encoding_made_from_its_rows(tmp_path):
    row = "{age},{colour},{label}"
    lines = [
        row.format(age=30 + n % 7, colour=("red", "blue")[n % 2], label=("ill", "well")[n // 2 % 2])
        for n in range(40)
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["age,colour,label", *lines]))
    settings = {"algorithm": "closed-form", "feature_map": "flat", "rounds": 1, "clients": 2}
    settings |= {"privacy": "release", "noise_multiplier": 1.0, "clip": 1.0, "device": "cpu"}
    table = f"csv:{tmp_path / 'rows.csv'}"
    own = fedproto.run(dataset=table, out=tmp_path / "own", **settings).data["privacy"]
    assert own["statement"].endswith(
        "the encoding of the rows was made from them and is not covered"
    )
    assert any("encoding=FILE" in line for line in own["does_not_cover"])
    assert not any("encoding" in line for line in own["assumes"])
    encoding = tmp_path / "encoding.json"
    (stored,) = json.loads((tmp_path / "own" / "encoding.json").read_text())["encodings"]
    encoding.write_text(json.dumps(stored))
    public = fedproto.run(dataset=f"{table}(encoding={encoding})", **settings).data["privacy"]
    assert "encoding" not in public["statement"]
    assert not any("encoding" in line for line in public["does_not_cover"])
    assert any("encoding" in line for line in public["assumes"])


def test_seeded_noise_is_never_claimed_to_protect():
    _, result = finished("fedproto", **RELEASE, freeze="body", noise_source="seeded")
    assert not result.data["privacy"]["holds"]
    assert result.data["privacy"]["statement"].startswith("no privacy is claimed")


# --- what is refused

FROZEN = {"freeze": "body"}


@pytest.mark.parametrize(
    "algorithm, settings, sentence",
    [
        ("fedproto", {"epsilon": 0} | RELEASE, "epsilon must be a number above 0"),
        ("fedproto", {"epsilon": -1} | RELEASE, "epsilon must be a number above 0"),
        ("fedproto", RELEASE | {"delta": 0}, "delta must be a number above 0"),
        ("fedproto", RELEASE | {"delta": 1}, "delta must be a number above 0 and at most 0.1"),
        ("fedproto", RELEASE | {"clip": 0}, "clip must be a number above 0"),
        ("fedproto", RELEASE | {"noise_multiplier": -1}, "noise_multiplier must be"),
        ("fedproto", {"privacy": "secret"}, "unknown value of privacy"),
        ("fedproto", {"privacy": "release"}, "needs epsilon, the budget, or noise_multiplier"),
        ("fedproto", {"epsilon": 1}, "set privacy to release, training or client"),
        ("fedproto", {"noise_source": "seeded"}, "noise_source is for runs with"),
        ("fedproto", RELEASE, "needs an encoder that no private row has trained"),
        ("fedproto", RELEASE | FROZEN | {"dim": 5}, "is trained on private rows: leave dim out"),
        ("fedproto", RELEASE | FROZEN | {"weighting": "uniform"}, "needs weighting=samples"),
        ("fedproto", RELEASE | FROZEN | {"collect": "during"}, "needs collect=after"),
        ("fedavg", RELEASE | FROZEN, "those of fedavg are not known to be"),
        ("fedproto", RELEASE | FROZEN | {"validation": 0.4}, "set validation to 0"),
        ("fedproto", RELEASE | FROZEN | {"buffer": 2}, "leave buffer or privacy out"),
        ("fedproto", RELEASE | FROZEN | {"baselines": True}, "leave baselines or privacy out"),
        ("fedproto", RELEASE | FROZEN | {"clip": "none"}, "no noise hides it"),
        (
            "fedproto",
            RELEASE | FROZEN | {"noise_multiplier": 0, "epsilon": 1},
            "no epsilon can be kept",
        ),
        ("fedproto", RELEASE | FROZEN | {"epsilon": 0.1}, "the first round with"),
        ("fedproto", RELEASE | FROZEN | {"noise_at": "server"}, "such as absent=drop"),
        (
            "fedproto",
            RELEASE | FROZEN | {"noise_at": "server", "absent": "drop", "noise_shape": "variance"},
            "chosen by each client for the noise that it adds itself",
        ),
        (
            "closed-form",
            RELEASE | CLOSED | {"noise_shape": "variance"},
            "use fedproto without a teacher",
        ),
        ("fedproto", {"noise_shape": "variance"}, "noise_shape is for runs with"),
        ("local", RELEASE, "sends nothing"),
        (
            "closed-form",
            RELEASE | CLOSED | {"noise_at": "server", "individual": 0.5},
            "individual solves from each client's own sums",
        ),
        (
            "closed-form",
            RELEASE | CLOSED | {"noise_at": "server", "transform": "quantise"},
            "transform quantise changes uploads after they were clipped",
        ),
        (
            "fedavg",
            {"privacy": "client", "epsilon": 1, "combiner": "median"},
            "makes something else of the uploads",
        ),
        ("fedavg", {"privacy": "client", "epsilon": 1, "noise_at": "client"}, "leave noise_at out"),
        ("fedproto", {"privacy": "client", "epsilon": 1}, "such as absent=drop"),
        ("fesem", {"privacy": "client", "epsilon": 1}, "further counts or clusters"),
        ("fedre", {"privacy": "client", "epsilon": 1}, "works on single uploads"),
        ("fedavg", {"privacy": "client", "epsilon": 1, "clip": "none"}, "no noise hides it"),
        ("fedavg", {"privacy": "client", "epsilon": 1, "delta": 0.5}, "at most 0.1"),
    ],
)
def test_what_no_claim_covers_is_refused_in_one_sentence(algorithm, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        experiment(algorithm, **settings)


def test_transforms_of_clients_come_after_the_noise():
    settings = RELEASE | FROZEN | {"transform": "quantise(bits=8)", "noise_source": "seeded"}
    _, result = finished("fedproto", **settings)
    assert math.isfinite(result.data["privacy"]["epsilon"])
