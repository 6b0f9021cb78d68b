"""benchmarks/server_scale.py and benchmarks/hierarchy.py, in small."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not a package
from benchmarks import hierarchy, server_scale


def test_a_servers_rounds_are_measured_by_their_parts() -> None:
    found = server_scale.measure_case(members=4, classes=4)
    assert set(server_scale.PARTS) <= found.keys()
    assert all(found[part] > 0 for part in server_scale.PARTS)
    row = server_scale.describe((4, 4), found, found)
    assert row.count("|") == 10 and "| 1.0 |" in row  # the ratio to itself
    with pytest.raises(SystemExit, match="is not"):
        server_scale.describe((4, 4), found, found | {"checksum": 0.5})


def test_two_levels_of_servers_are_compared_with_one() -> None:
    shape = hierarchy.Shape(members=60, per_region=20, classes=7, held=3, dim=4)
    found = hierarchy.measure(shape, [torch.float32, torch.float64], flat=True)
    compared = [name.removesuffix(", error") for name in found if name.endswith(", error")]
    assert len(compared) == 5
    for name in compared:
        assert 0 <= found[f"{name}, error"] <= found[f"{name}, bound"], name
    assert found["two levels in torch.float32, error"] > 0


def test_the_sum_of_a_region_is_that_of_its_members() -> None:
    shape = hierarchy.Shape(members=40, per_region=20, classes=6, held=2, dim=3)
    region = hierarchy.draw_region(shape, 1)
    expected = torch.zeros(6, 3, dtype=torch.float64)
    for places, rows in zip(region.places, region.sums, strict=True):
        for place, row in zip(places.tolist(), rows, strict=True):
            expected[place] += row
    found = hierarchy.add_members(shape, region)["prototypes"].sums["prototypes"][0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
