"""benchmarks/traffic_8bit.py, in its tiny form."""

import json
import runpy
from pathlib import Path
from statistics import fmean

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "traffic_8bit.py"


def test_the_study_of_traffic_writes_numbers_a_page_and_a_figure(tmp_path):
    main = runpy.run_path(str(SCRIPT))["main"]
    main([str(tmp_path), "--tiny", "--measure"])
    assert [path.name for path in tmp_path.iterdir()] == ["traffic-8bit.json"]
    main([str(tmp_path), "--finished"])
    measured = json.loads((tmp_path / "traffic-8bit.json").read_text())
    (study,) = measured["studies"].values()
    sent = {}
    for arm, runs in study["runs"].items():
        sent[arm] = fmean(run["bytes_up_per_round"] for run in runs)
    assert sent["float32"] > sent["8 bits"] > sent["4 bits"]
    page = (tmp_path / "traffic-8bit.md").read_text()
    assert "| 8 bits |" in page
    assert f"| {sent['float32']:,.0f} | 100.0% |" in page
    assert (tmp_path / "traffic-8bit.png").read_bytes().startswith(b"\x89PNG")
