"""What is promised of attacked federations: the run's claim, at their own numbers of records."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fedproto
from fedproto.audit.attacked_run import AttackedRun, open_run
from fedproto.audit.attacks import Audit
from fedproto.audit.page import make_summary
from fedproto.audit.promises import is_promised, promised_epsilon
from fedproto.audit.shadows import choose_records
from fedproto.privacy.accounting import Release, compute_epsilon

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "clients": 3,
    "shots": 6,
    "rounds": 2,
    "batch": 8,
    "model": "mlp(hidden=4,width=4)",
    "absent": "drop",
}
NOISE = 4.0
STEP_NOISE = 2.0
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "training": {"privacy": "training", "step_noise": STEP_NOISE, "noise_multiplier": NOISE},
    "release": {"privacy": "release", "freeze": "body", "noise_multiplier": NOISE},
    "client": {"privacy": "client", "noise_multiplier": NOISE},
    "weights": {"algorithm": "fedavg", "privacy": "training", "step_noise": STEP_NOISE},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AttackedRun]:
    """One small run of each setting."""
    folder: Path = tmp_path_factory.mktemp("runs")
    opened = {}
    for name, settings in SETTINGS.items():
        chosen = SMALL | settings
        if name == "weights":
            del chosen["absent"]
        fedproto.run(**chosen, out=folder / name)
        opened[name] = open_run(folder / name)
    return opened


@pytest.mark.parametrize("setting", ["training", "release", "client", "weights"])
def test_with_the_clients_own_records_it_is_the_claim_of_the_run(
    setting: str, runs: dict[str, AttackedRun]
) -> None:
    run = runs[setting]
    records = choose_records(run)
    own = torch.zeros(1, len(records), dtype=torch.bool)
    for member in run.members:
        own |= (records.client == member.id) & torch.isin(records.row, member.train.rows)
    claim = run.experiment.claim()
    assert claim is not None
    promised = promised_epsilon(run, records, own, rounds=2)
    assert promised == pytest.approx(claim.epsilon, rel=1e-9)


def test_a_client_with_fewer_records_pays_more(runs: dict[str, AttackedRun]) -> None:
    """Four records in batches of 8: each is in the only step of both rounds."""
    run = runs["weights"]
    records = choose_records(run)
    few = torch.zeros(1, len(records), dtype=torch.bool)
    for member in run.members:
        few[0, (records.client == member.id).nonzero().flatten()[:4]] = True
    promised = promised_epsilon(run, records, few, rounds=2)
    assert promised == pytest.approx(compute_epsilon([Release(STEP_NOISE, 2)], 1e-5))


def test_without_a_claim_nothing_is_promised(runs: dict[str, AttackedRun]) -> None:
    run = runs["none"]
    records = choose_records(run)
    everything = torch.ones(1, len(records), dtype=torch.bool)
    assert promised_epsilon(run, records, everything, rounds=2) is None
    assert not is_promised(run, "prototypes")


@pytest.mark.parametrize(
    ("setting", "covered"),
    [
        ("training", {"prototypes", "global prototypes", "trained model"}),
        ("release", {"prototypes", "global prototypes"}),
        ("client", {"global prototypes"}),
    ],
)
def test_a_claim_covers_what_its_setting_protects(
    setting: str, covered: set[str], runs: dict[str, AttackedRun]
) -> None:
    attackers = ("prototypes", "global prototypes", "trained model")
    found = {name for name in attackers if is_promised(runs[setting], name)}
    assert found == covered


def test_sent_weights_of_private_steps_are_covered(runs: dict[str, AttackedRun]) -> None:
    assert is_promised(runs["weights"], "sent weights")


def test_the_summary_puts_the_bound_of_what_is_claimed_beside_the_claim() -> None:
    """A stronger attack on what the claim does not cover is in the table of attacks only."""
    rates = {"0.01": {"value": 0.02, "low": 0.01, "high": 0.03}}
    attackers = []
    for name, bound, promised in (("prototypes", 0.25, 7.5), ("trained model", 0.8, None)):
        attackers.append(
            {
                "attacker": name,
                "epsilon_at_least": bound,
                "promised": promised,
                "true_positives_at": rates,
            }
        )
    about = {
        "algorithm": "fedproto",
        "protection": "privacy=release",
        "claim": {"unit": "one record"},
    }
    audit = Audit("release", about, found={"membership": {"attackers": attackers}})
    cell = make_summary([audit]).rows[0][-1]
    assert cell.text == "0.25"
    assert cell.detail == "claimed: 7.5, one record; prototypes"
    for attacker in attackers:
        attacker["promised"] = None
    cell = make_summary([audit]).rows[0][-1]
    assert (cell.text, cell.detail) == ("0.80", "trained model")
