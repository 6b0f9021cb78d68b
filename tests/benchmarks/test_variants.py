"""benchmarks/variants.py, in its quick form."""

import json
import runpy
from pathlib import Path

from fedproto.config.profiles import PROFILES

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "variants.py"


def test_all_profiles_are_measured_by_their_own_and_by_one_convention(tmp_path):
    main = runpy.run_path(str(SCRIPT))["main"]
    main([str(tmp_path), "--quick"])
    measured = json.loads((tmp_path / "variants.json").read_text())
    profiles = measured["profiles"]
    assert list(profiles) == list(PROFILES)
    for profile in profiles.values():
        assert [run["seed"] for run in profile["runs"]] == [0, 1]
        for run in profile["runs"]:
            for accuracy in run["accuracy"].values():
                assert 0 <= accuracy["last"] <= accuracy["best"] <= 100
                assert 1 <= accuracy["best_round"] <= 3
    partitions = {run["partition"] for each in profiles.values() for run in each["runs"]}
    assert len(partitions) == 2  # one per seed: all profiles have the same rows
    # The same training, reported in three ways; other losses train otherwise.
    assert (
        profiles["released"]["runs"] == profiles["pfllib"]["runs"] == profiles["fl-bench"]["runs"]
    )
    assert profiles["pfllib"]["runs"] != profiles["htfllib"]["runs"]
    page = (tmp_path / "variants.md").read_text()
    assert all(f"| `{name}` |" in page for name in PROFILES)
    (tmp_path / "variants.md").unlink()
    main([str(tmp_path), "--finished"])
    assert (tmp_path / "variants.md").read_text() == page
