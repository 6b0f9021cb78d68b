"""A million members through two levels of servers, against one flat server, in this process.

    python benchmarks/hierarchy.py --members 1000000 --per-region 1000

Each region's server keeps its members' uploads and adds them as a deployed server does
(`MemberUploads`), and sends one upload on; the server at the top does the same with the regions.
Members are synthetic: each has rows of some classes, with counts. The sums of float32 and float64
are compared with flat ones, and the whole numbers of secure sums must be equal. There are no
networks and no training here.
"""

import argparse
import json
import resource
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedproto.algorithms.fedproto import fedproto
from fedproto.core.types import Group, GroupLayout, Upload
from fedproto.deploy.member_uploads import MemberUploads
from fedproto.deploy.messages import pack_upload
from fedproto.deploy.row_sums import FAN_IN, add_rows
from fedproto.privacy.secure_sum.fixed_point import FixedPoint

GROUP = "prototypes"
LARGEST = 1e4  # of a member's weight × value, as of the fixed point
ERROR = 1e-6  # of one member's value in fixed point


class Shape(NamedTuple):
    """How many members there are, how they are divided, and what each has."""

    members: int
    per_region: int
    classes: int
    held: int
    dim: int

    @property
    def regions(self) -> int:
        return self.members // self.per_region


class Region(NamedTuple):
    """The uploads of a region's members: (m, held), (m, held) and (m, held, dim)."""

    places: Tensor
    weight: Tensor
    sums: Tensor


def draw_region(shape: Shape, number: int) -> Region:
    """Return the same members each time."""
    draw = np.random.default_rng(number)
    order = draw.random((shape.per_region, shape.classes)).argpartition(shape.held, axis=1)
    places = np.sort(order[:, : shape.held], axis=1)
    weight = draw.integers(5, 50, places.shape).astype(np.float32)
    means = draw.standard_normal((*places.shape, shape.dim), np.float32)
    sums = means * weight[:, :, None]
    return Region(torch.from_numpy(places), torch.from_numpy(weight), torch.from_numpy(sums))


def add_members(shape: Shape, region: Region) -> Upload:
    """Return the sum of a region's uploads, as its server makes it."""
    uploads = MemberUploads([GROUP], shape.classes, adds=True)
    uploads.add_clients(shape.per_region)
    for member, places in enumerate(region.places):
        group = Group({GROUP: region.sums[member]}, region.weight[member])
        uploads.put(member, {GROUP: group}, places, 1)
    total = uploads.recall()
    assert total is not None
    return total


def add_regions(shape: Shape, sums: list[Upload]) -> Upload:
    """Return the sum of the regions' uploads, as the server at the top makes it."""
    uploads = MemberUploads([GROUP], shape.classes, adds=True)
    uploads.add_clients(len(sums))
    everything = torch.arange(shape.classes)
    for number, total in enumerate(sums):
        group = total[GROUP]
        single = Group({GROUP: group.sums[GROUP][0]}, group.weight[0])
        uploads.put(number, {GROUP: single}, everything, 1)
    found = uploads.recall()
    assert found is not None
    return found


def add_flat(shape: Shape, dtype: torch.dtype) -> Upload:
    """Return the sum that one server over all members makes; members are drawn when needed."""

    def rows(kind: str) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(shape.regions):
            region = draw_region(shape, number)
            values = region.sums if kind == "sums" else region.weight
            yield from zip(region.places, values.to(dtype), strict=True)

    sums = add_rows(rows("sums"), torch.zeros(shape.classes, shape.dim, dtype=dtype))
    weight = add_rows(rows("weight"), torch.zeros(shape.classes, dtype=dtype))
    return {GROUP: Group({GROUP: sums[None]}, weight[None])}


def count_additions(numbers: int) -> int:
    """Return how often a value is rounded on its way into a sum of so many, at most."""
    return 3 * FAN_IN + -(-numbers // FAN_IN**3) + 3


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(shape: Shape, dtypes: list[torch.dtype], flat: bool) -> dict[str, float]:
    """Return times, sizes, and the differences between two levels and one."""
    torch.set_num_threads(1)
    seconds: Counter[str] = Counter()
    fixed_point = FixedPoint.choose(shape.members, LARGEST, ERROR)
    of_regions = np.zeros((shape.classes, shape.dim), fixed_point.dtype)
    of_members = np.zeros_like(of_regions)
    exact = torch.zeros(shape.classes, shape.dim, dtype=torch.float64)
    magnitude = torch.zeros(shape.classes, shape.dim, dtype=torch.float64)
    sums: dict[torch.dtype, list[Upload]] = {dtype: [] for dtype in dtypes}
    found: dict[str, float] = {"members": shape.members, "per_region": shape.per_region}
    before = peak_megabytes()
    for number in range(shape.regions):
        region = draw_region(shape, number)
        for dtype, of_dtype in sums.items():
            typed = Region(region.places, region.weight.to(dtype), region.sums.to(dtype))
            start = time.thread_time()
            of_dtype.append(add_members(shape, typed))
            seconds[f"regions in {dtype}"] += time.thread_time() - start
        places = region.places.reshape(-1)
        rows = region.sums.reshape(-1, shape.dim)
        start = time.thread_time()
        encoded = fixed_point.encode(rows.numpy())
        of_region = np.zeros_like(of_regions)
        np.add.at(of_region, places.numpy(), encoded)
        of_regions += of_region
        seconds["regions in whole numbers"] += time.thread_time() - start
        np.add.at(of_members, places.numpy(), encoded)  # the flat sum
        exact.index_add_(0, places, rows.double())
        magnitude.index_add_(0, places, rows.double().abs())
        if not number:
            found["MB of the first region"] = peak_megabytes() - before
    if not np.array_equal(of_regions, of_members):
        raise SystemExit("the sum of the regions' whole numbers is not that of the members'")
    levels = {}
    for dtype, of_dtype in sums.items():
        start = time.thread_time()
        levels[dtype] = add_regions(shape, of_dtype)
        seconds[f"top in {dtype}"] += time.thread_time() - start
    found["MB of all"] = peak_megabytes() - before
    found["bytes from a region"] = count_bytes(shape, sums[dtypes[0]][0])
    found["bytes from a region in whole numbers"] = of_regions.nbytes
    found["fraction bits"] = fixed_point.fraction_bits
    found |= seconds
    decoded = torch.from_numpy(fixed_point.decode(of_regions))
    found["whole numbers, error"] = largest(decoded - exact)
    found["whole numbers, bound"] = fixed_point.rounding_error(shape.members)
    for dtype, two_levels in levels.items():
        found |= compare(shape, dtype, two_levels, exact, magnitude, flat)
    return found


def compare(
    shape: Shape,
    dtype: torch.dtype,
    two_levels: Upload,
    exact: Tensor,
    magnitude: Tensor,
    flat: bool,
) -> dict[str, float]:
    """Return how far sums are from the exact ones, as fractions of the sums of absolute values."""
    rounding = torch.finfo(dtype).eps / 2
    additions = count_additions(shape.per_region) + count_additions(shape.regions)
    found = {
        f"two levels in {dtype}, error": measure_error(two_levels, exact, magnitude),
        f"two levels in {dtype}, bound": additions * rounding,
    }
    if not flat:
        return found
    one_level = add_flat(shape, dtype)
    found[f"one level in {dtype}, error"] = measure_error(one_level, exact, magnitude)
    found[f"one level in {dtype}, bound"] = count_additions(shape.members) * rounding
    difference = measure_error(two_levels, one_level[GROUP].sums[GROUP][0], magnitude)
    found[f"two levels and one in {dtype}, difference"] = difference
    prototypes = make_prototypes(shape, two_levels) - make_prototypes(shape, one_level)
    found[f"prototypes in {dtype}, difference"] = largest(prototypes)
    return found


def measure_error(upload: Upload, expected: Tensor, magnitude: Tensor) -> float:
    return largest((upload[GROUP].sums[GROUP][0].double() - expected) / magnitude)


def make_prototypes(shape: Shape, upload: Upload) -> Tensor:
    """Return what FedProto's server makes of a sum."""
    like = upload[GROUP].weight
    server = {
        GROUP: like.new_zeros(shape.classes, shape.dim),
        "known": like.new_zeros(shape.classes),
    }
    return fedproto().aggregate(server, upload)[GROUP]


def count_bytes(shape: Shape, total: Upload) -> int:
    """Return the bytes of the message with which a region's sum goes to the next level."""
    group = total[GROUP]
    single = {GROUP: Group({GROUP: group.sums[GROUP][0]}, group.weight[0])}
    classes = tuple(f"class-{number}" for number in range(shape.classes))
    layouts = {GROUP: GroupLayout({GROUP: (shape.dim,)}, "class", shape.classes)}
    return pack_upload(single, classes, layouts).count_bytes()


def largest(values: Tensor) -> float:
    return float(values.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, default=1_000_000)
    parser.add_argument("--per-region", type=int, default=1_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--held", type=int, default=10)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    parser.add_argument("--flat", action="store_true", help="also add all members in one server")
    given = parser.parse_args()
    shape = Shape(given.members, given.per_region, given.classes, given.held, given.dim)
    dtypes = [getattr(torch, name) for name in given.dtypes]
    print(json.dumps(measure(shape, dtypes, given.flat), indent=1))


if __name__ == "__main__":
    main()
