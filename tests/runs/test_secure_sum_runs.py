"""Simulated runs with secure sums: the error, the bytes, lost uploads, and what is refused."""

import json

import pytest
import torch
from helpers.command_line import SMALL
from helpers.command_line import fedproto as command
from helpers.engine_comparison import TROUBLE, assert_engines_agree, largest_difference
from helpers.tiny import ALGORITHMS, build, experiment, finished

import fedproto
from fedproto.core.closed_form import CLASS_SUMS
from fedproto.core.tensors import flatten_state
from fedproto.errors import ConfigError, TrainingError

FEDPROTO = "fedproto(absent=drop)"
SMALL_MAP = "random-conv(filters=3, kernel=3, pool=2)"
PROTOCOL = "secure-sum(simulate=protocol)"
ADDITIVE = [
    name for name in ALGORITHMS if build(name).additive and name not in ("local", "closed-form")
]


def server_of(run) -> dict[str, torch.Tensor]:
    return flatten_state(run.progress.server)


def test_the_protocol_gives_what_rounding_gives_to_the_bit() -> None:
    """Masks cancel exactly, so the fast way stands for the protocol, lost uploads included."""
    settings = {"clients": 6, "lost_uploads": 0.2, "participation": 0.9}
    rounded, fast = finished(FEDPROTO, combiner="secure-sum", **settings)
    masked, slow = finished(FEDPROTO, combiner=PROTOCOL, **settings)
    for name, value in server_of(rounded).items():
        assert torch.equal(server_of(masked)[name], value)
    assert torch.equal(rounded.progress.ledger.counts, masked.progress.ledger.counts)
    assert fast.accuracy == slow.accuracy


@pytest.mark.parametrize("algorithm", [FEDPROTO, *ADDITIVE])
def test_a_run_differs_from_a_plain_one_by_the_rounding_only(algorithm) -> None:
    """Two rounds: training may enlarge the differences of the first, of 1e-9 per value."""
    settings = {"rounds": 2, "lost_uploads": 0.25}
    combiner = "secure-sum(error=1e-9,largest=1e5,threshold=0.5)"
    secure, _ = finished(algorithm, combiner=combiner, **settings)
    plain, _ = finished(algorithm, **settings)
    assert server_of(plain)
    difference = largest_difference(server_of(secure), server_of(plain))
    assert difference <= 1e-6
    assert list(server_of(secure)) == list(server_of(plain))


def test_the_error_of_one_round_is_within_the_stated_bound() -> None:
    """Numbers of 32 bits: each of four clients moves a sum by at most half of the last bit."""
    combiner = "secure-sum(error=1e-4,largest=1000)"
    secure, _ = finished("fedavg", combiner=combiner, rounds=1)
    plain, _ = finished("fedavg", rounds=1)
    samples = sum(len(member.train) for member in plain.federation.members)
    largest_weight = max(float(value.abs().max()) for value in server_of(plain).values())
    bits = 18  # 4 · 1000 · 2^18 < 2^31 < 4 · 1000 · 2^20
    bound = 4 * 2.0 ** -(bits + 1) * (1 + largest_weight) / samples
    difference = largest_difference(server_of(secure), server_of(plain))
    assert 0 < difference <= bound


@pytest.mark.parametrize("algorithm", [FEDPROTO, "fedavg"])
def test_engines_agree(algorithm) -> None:
    combiner = "secure-sum(error=1e-12,largest=1e4,threshold=0.5)"
    assert_engines_agree(algorithm, combiner=combiner, **TROUBLE)


# --- the ledger


def test_the_ledger_counts_all_stages_and_every_class_alike() -> None:
    """By hand: 4 clients, 10 classes of 8 values and a weight, numbers of 64 bits; one is lost."""
    run, result = finished(FEDPROTO, combiner="secure-sum", rounds=1, lost_uploads=0.25)
    plain, _ = finished(FEDPROTO, rounds=1, lost_uploads=0.25)
    columns = run.progress.ledger.COLUMNS
    counts = dict(zip(columns, run.progress.ledger.counts.T, strict=True))
    further = run.progress.ledger.counts - plain.progress.ledger.counts
    keys = 64
    shares = 32 + 3 * (2 + 2 * 17 + 16)
    masked = (10 * 8 + 10) * 8
    unmasking = 4 * (2 + 17)
    assert sorted(counts["bytes_up"].tolist()) == [
        keys + shares + masked,
        *[keys + shares + masked + unmasking] * 3,
    ]
    assert counts["values_up"].tolist() == [80] * 4
    received = 4 * (2 + 64) + 3 * (2 + 2 * 17 + 16)
    assert sorted(further[:, 3].tolist()) == [received, *[received + 3 * 2] * 3]
    assert result.communication["bytes_up"] == int(counts["bytes_up"].sum())
    # Without secure sums, what a client sends tells how many classes it has.
    assert len(set(plain.progress.ledger.counts[:, 1].tolist())) > 1


def test_everybody_downloads_all_classes_since_the_server_does_not_know_who_has_which() -> None:
    secure, _ = finished(FEDPROTO, combiner="secure-sum", rounds=2)
    plain, _ = finished(FEDPROTO, rounds=2)
    columns = secure.progress.ledger.COLUMNS
    down = columns.index("values_down")
    held = int((secure.progress.server["known"] > 0).sum())
    assert secure.progress.ledger.counts[:, down].tolist() == [8 * held] * 4
    assert len(set(plain.progress.ledger.counts[:, down].tolist())) > 1
    assert len(set(secure.progress.ledger.counts[:, columns.index("bytes_down")].tolist())) == 1


# --- groups that are sent once


def test_a_teacher_is_solved_from_the_secure_sum() -> None:
    settings = {"rounds": 2, "feature_map": SMALL_MAP}
    secure, _ = finished("fedavg", teacher="lda", combiner=PROTOCOL, **settings)
    plain, _ = finished("fedavg", teacher="lda", **settings)
    assert largest_difference(server_of(secure), server_of(plain)) <= 1e-5
    stored = secure.progress.once_uploads.uploads[CLASS_SUMS]
    held = [bool(row.any()) for row in stored.weight]
    assert held == [True, False, False, False]  # the sum of all, and nothing of single clients


def test_latecomers_of_what_is_sent_once_are_left_out_until_they_are_enough() -> None:
    """A sum over one latecomer would be its own upload."""
    settings = {"clients": 5, "rounds": 3, "lost_uploads": 0.2, "seed": 1}
    settings["feature_map"] = SMALL_MAP
    combiner = "secure-sum(threshold=0.5)"
    secure, _ = finished("closed-form", combiner=combiner, **settings)
    plain, _ = finished("closed-form", **settings)
    assert sorted(secure.progress.once_uploads.last_round.tolist()) == [0, 1, 1, 1, 1]
    assert 0 not in plain.progress.once_uploads.last_round.tolist()
    assert float(secure.progress.server["teacher"]["counts"].sum()) < float(
        plain.progress.server["teacher"]["counts"].sum()
    )


# --- refused in one sentence


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "with absent=remember keeps single uploads, .* set absent=drop"),
        ({"algorithm": "fesem"}, "fesem needs single uploads, which secure-sum hides"),
        ({"algorithm": "fedgh"}, "fedgh needs single uploads, which secure-sum hides"),
        ({"algorithm": "fedavg", "buffer": 2}, "asynchronous rounds take them one by one"),
        (
            {"algorithm": "fedavg", "transform": "quantise(bits=8)"},
            "transform quantise sends codes or single values",
        ),
        (
            {"algorithm": "fedavg", "transform": "clip(norm=1),top-k(fraction=0.1)"},
            "transform top-k sends codes or single values",
        ),
        (
            {"algorithm": "fedavg", "model": "mlp(hidden=16,width=8)*2,mlp(hidden=8,width=8)*2"},
            "would tell which one a client has",
        ),
        (
            {"algorithm": "closed-form(individual=0.5)"},
            "individual needs the sums of single clients, .* set individual=0",
        ),
        ({"algorithm": "fedavg", "clients": 2}, "needs from 3 to 65535 members, not 2"),
        (
            {"algorithm": "fedavg", "lost_uploads": 0.5},
            "of 4 uploads 2 arrive, but secure-sum needs 3 to unmask a sum: lose fewer uploads",
        ),
        (
            {"algorithm": "fedavg", "participation": 0.5},
            "needs from 3 to 65535 members, not 2",
        ),
        (
            {"algorithm": "fedavg", "combiner": "secure-sum(largest=1e12,error=1e-9)"},
            "no number of 64 bits holds the sum of 4 values up to 1e\\+12",
        ),
        ({"algorithm": "fedavg", "combiner": "secure-sum(threshold=1.2)"}, "threshold"),
        ({"algorithm": "fedavg", "combiner": "secure-sum(error=0)"}, "error"),
    ],
)
def test_what_needs_single_uploads_is_refused(settings, sentence) -> None:
    settings = {"algorithm": "fedproto", "combiner": "secure-sum"} | settings
    algorithm = settings.pop("algorithm")
    with pytest.raises(ConfigError, match=sentence):
        experiment(algorithm, **settings)


def test_a_transform_of_values_is_fine() -> None:
    run, _ = finished(
        "fedavg", transform="clip(norm=0.5)", combiner="secure-sum(error=1e-9,largest=1e5)"
    )
    plain, _ = finished("fedavg", transform="clip(norm=0.5)")
    assert largest_difference(server_of(run), server_of(plain)) <= 1e-6


def test_an_overflow_ends_the_run_and_says_in_which_round() -> None:
    run = experiment("fedavg", combiner="secure-sum(largest=0.5)")
    with pytest.raises(TrainingError, match=r"round 1: a value of .* does not fit a secure sum"):
        run.execute()


# --- where it is chosen


def test_it_is_chosen_on_the_command_line_and_resumed(tmp_path) -> None:
    out = tmp_path / "run"
    chosen = ["--combiner", PROTOCOL, "--algorithm", FEDPROTO, "--out", str(out)]
    done = command("run", *SMALL, *chosen)
    assert done.code == 0, done.err
    written = json.loads((out / "result.json").read_text())
    again = fedproto.resume(out)
    assert again.communication == written["communication"]
    assert 'name = "secure-sum"' in (out / "config.toml").read_text()


def test_a_refusal_on_the_command_line_is_one_sentence(tmp_path) -> None:
    done = command("run", *SMALL, "--combiner", "secure-sum", "--out", str(tmp_path / "run"))
    assert done.code == 2
    assert "set absent=drop" in done.err
    assert not (tmp_path / "run").exists()
