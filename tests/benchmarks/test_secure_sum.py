"""The measurement of secure sums: its small form, and the page and figure it writes."""

import json
import sys

from benchmarks import secure_sum


def test_the_small_form_measures_and_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["secure_sum", "--quick", "--out", str(tmp_path)])
    secure_sum.main()
    found = json.loads((tmp_path / "secure-sum.json").read_text())
    assert len(found["measured"]) == 6
    for measured in found["measured"]:
        error = measured["largest_error"]
        assert error is None or error <= measured["error_bound"]
        assert measured["bytes_up"] > found["plain_bytes"][measured["case"]["vector"]]
    page = (tmp_path / "secure-sum.md").read_text()
    assert "| FedAvg, weights of the CNN | 12 | 6 neighbours |" in page
    assert (tmp_path / "secure-sum.png").read_bytes().startswith(b"\x89PNG")


def test_the_bytes_of_a_sample_are_those_of_a_whole_sum():
    vector = "FedProto, 10 × 50 prototypes"
    whole = secure_sum.measure(secure_sum.Case(vector, 11))
    sample = secure_sum.measure(secure_sum.Case(vector, 11, sampled=1))
    assert (sample.bytes_up, sample.bytes_down) == (whole.bytes_up, whole.bytes_down)
