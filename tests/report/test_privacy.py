"""Reports of private runs: the claim word by word, and nothing where there is none."""

import pytest
from helpers.tiny import SETTINGS

import fedproto as package
from fedproto.report.groups import group_runs
from fedproto.report.page import make_report, render_report
from fedproto.report.privacy import list_claims
from fedproto.report.read import read_run
from fedproto.watch.freeze import freeze

PRIVATE = SETTINGS | {"algorithm": "fedproto", "freeze": "body", "privacy": "release", "rounds": 2}


@pytest.mark.parametrize("source", ["system", "seeded"])
def test_a_report_has_the_claim(tmp_path, source):
    package.run(**PRIVATE, epsilon=3.0, noise_source=source, out=tmp_path / "run")
    groups = group_runs([read_run(tmp_path / "run")])
    frozen = freeze([tmp_path / "run"], [])
    page = render_report(make_report(groups, [], [], frozen), frozen)
    assert '<h2 id="privacy">Privacy</h2>' in page
    if source == "system":
        assert "(3, 1e-05)-differential privacy of one record of one client" in page
        assert "at most 2 releases of the same data" in page
        assert "It does not cover losses, accuracies and other metrics" in page
    else:
        assert "no privacy is claimed" in page and "It does not cover" not in page


def test_a_report_of_a_plain_run_says_nothing_of_privacy(tmp_path):
    package.run(**SETTINGS, algorithm="local", out=tmp_path / "run")
    groups = group_runs([read_run(tmp_path / "run")])
    assert list_claims(groups) == []
    frozen = freeze([tmp_path / "run"], [])
    assert "Privacy" not in render_report(make_report(groups, [], [], frozen), frozen)
