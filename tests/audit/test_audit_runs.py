"""The command on real runs, and on what it must refuse."""

import json
from pathlib import Path

import pytest
from helpers.trained_runs import fail, succeed

SMALL = ("--dataset", "digits", "--clients", "4", "--rounds", "2", "--shots", "5", "--stdev", "1")
LITTLE = (
    *("--federations", "6", "--rounds", "2"),
    *("--targets", "2", "--victims", "1", "--steps", "3"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with prototypes, with weights, with secure sums and with nothing that travels."""
    folder = tmp_path_factory.mktemp("runs")
    succeed("run", *SMALL, "--out", folder / "proto")
    succeed("run", *SMALL, "--algorithm", "fedavg", "--out", folder / "weights")
    succeed("run", *SMALL, "--algorithm", "local", "--out", folder / "alone")
    hidden = ("--combiner", "secure-sum", "--set", "absent=drop")
    succeed("run", *SMALL, *hidden, "--out", folder / "hidden")
    return folder


def test_several_runs_are_attacked_and_compared(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    names = ("proto", "weights", "hidden", "alone")
    answer = succeed("audit", *[runs / name for name in names], *LITTLE, "--out", page)
    found = {run["name"]: run for run in json.loads(page.with_suffix(".json").read_text())["runs"]}
    assert list(found) == list(names)
    assert set(found["proto"]["attacks"]) == {"classes", "reconstruction", "membership"}
    assert set(found["weights"]["attacks"]) == {"classes", "gradients", "membership"}
    assert set(found["alone"]["attacks"]) == {"membership"}
    assert set(found["hidden"]["left_out"]) == {"gradients"}
    assert "does not apply" in answer.out
    html = page.read_text()
    for name in names:
        assert name in html
    assert (tmp_path / "audit-figures" / "reconstruction-1.png").stat().st_size > 5000
    classes = found["proto"]["attacks"]["classes"]
    assert (classes["right_classes"], classes["count_error"]) == (1, 0)
    hidden = found["hidden"]["attacks"]["classes"]
    assert hidden["right_classes"] == hidden["guessing"]
    attackers = [each["attacker"] for each in found["proto"]["attacks"]["membership"]["attackers"]]
    assert attackers == ["prototypes", "global prototypes", "trained model"]
    attackers = [each["attacker"] for each in found["hidden"]["attacks"]["membership"]["attackers"]]
    assert attackers == ["global prototypes", "trained model"]
    # Writing again replaces its own files.
    succeed("audit", runs / "proto", "--attack", "classes", "--out", page)


def test_an_audit_of_one_run_lies_in_it(runs: Path) -> None:
    succeed("audit", runs / "proto", "--attack", "classes")
    assert (runs / "proto" / "audit.html").exists()


def test_membership_is_left_out_for_a_closed_form(tmp_path: Path) -> None:
    closed_form = ("--algorithm", "closed-form", "--feature-map", "random-projection(values=8)")
    succeed("run", *SMALL, *closed_form, "--out", tmp_path / "closed")
    answer = fail("audit", tmp_path / "closed", "--attack", "membership")
    assert "does not apply to closed: shadow federations do not solve closed forms" in answer.err


def test_what_cannot_be_audited_is_refused(runs: Path, tmp_path: Path) -> None:
    answer = fail("audit", runs / "weights", "--attack", "reconstruction", writes=runs)
    assert "fedavg send no prototypes" in answer.err
    assert "accepted: classes" in fail("audit", runs / "proto", "--attack", "guess").err
    assert "6 or more" in fail("audit", runs / "proto", "--federations", "2").err
    assert "twice" in fail("audit", runs / "proto", runs / "proto", "--out", tmp_path).err
    assert "is not a run folder" in fail("audit", tmp_path).err
    (tmp_path / "server.safetensors").write_bytes(b"")
    assert "deployed server" in fail("audit", tmp_path).err


def test_a_run_without_models_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    succeed("run", *SMALL, "--checkpoint-every", "0", "--out", out)
    assert "keeps no models" in fail("audit", out, writes=tmp_path).err
