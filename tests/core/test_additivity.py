"""The check in round 1 that an algorithm which is declared additive is."""

from dataclasses import replace

import pytest
import torch
from helpers.tiny import build

from fedproto.core.additivity import TOLERANCE, AdditivityCheck, _is_close
from fedproto.core.types import Group, Tree, Upload
from fedproto.errors import ConfigError, TrainingError

#: Three clients whose weighted mean is (1 + 2 + 6) / 3.
UPLOADS = {"model": Group({"w": torch.tensor([[1.0], [2.0], [6.0]])}, torch.ones(3))}


def count_calls(aggregate):
    """Return an aggregate that counts its calls, and the list of how many uploads each saw."""
    seen: list[int] = []

    def counted(server: Tree, uploads: Upload) -> Tree:
        seen.append(len(uploads["model"].weight))
        return aggregate(server, uploads)

    return counted, seen


def median(server: Tree, uploads: Upload) -> Tree:
    return {"w": uploads["model"].sums["w"].median(0).values}


@pytest.mark.parametrize(("round", "calls"), [(1, [3, 1]), (2, [])])
def test_it_compares_uploads_with_their_sum_in_round_1_only(round, calls) -> None:
    algorithm = build("fedavg")
    aggregate, seen = count_calls(algorithm.aggregate)
    check = AdditivityCheck(replace(algorithm, aggregate=aggregate), {"w": torch.zeros(1)}, round)
    check(UPLOADS)
    check(UPLOADS)  # it compares once
    assert seen == calls
    assert check.is_pending is False


def test_a_single_upload_is_not_enough_and_the_next_two_are_compared() -> None:
    check = AdditivityCheck(replace(build("fedavg"), aggregate=median), {"w": torch.zeros(1)}, 1)
    one = {"model": Group({"w": torch.tensor([[1.0]])}, torch.ones(1))}
    check(one)
    assert check.is_pending
    with pytest.raises(ConfigError, match=r"is declared additive.*from 3 uploads.*\(w\)"):
        check(UPLOADS)


def test_an_algorithm_that_is_not_additive_is_not_checked() -> None:
    algorithm = replace(build("fedavg"), aggregate=median, additive=False)
    AdditivityCheck(algorithm, {"w": torch.zeros(1)}, 1)(UPLOADS)


def test_errors_of_the_server_name_the_round_and_the_algorithm() -> None:
    def fail(server: Tree, uploads: Upload) -> Tree:
        raise ValueError("on purpose")

    check = AdditivityCheck(replace(build("fedavg"), aggregate=fail), {"w": torch.zeros(1)}, 1)
    with pytest.raises(TrainingError, match=r"^round 1, the server of fedavg.*on purpose"):
        check(UPLOADS)
    wrong = replace(build("fedavg"), aggregate=lambda server, uploads: [1])
    with pytest.raises(TrainingError, match=r"\baggregate\b"):
        AdditivityCheck(wrong, {"w": torch.zeros(1)}, 1)(UPLOADS)


INFINITE = float("inf")


@pytest.mark.parametrize(
    ("separate", "summed", "expected"),
    [
        ([1.0, 2.0], [1.0], False),  # another shape
        ([100.0, 0.0], [100.0, 100 * TOLERANCE], True),  # relative to the largest value
        ([100.0, 0.0], [100.0, 101 * TOLERANCE], False),
        ([0.5, 0.0], [0.5, 0.6 * TOLERANCE], False),
        ([INFINITE, 1.0], [1.0, 1.0], True),  # only values that are finite on both sides
        ([INFINITE, 1.0], [1.0, 3.0], False),
        ([INFINITE], [1.0], True),
        ([], [], True),
    ],
)
def test_results_are_equal_up_to_rounding(separate, summed, expected) -> None:
    first = torch.tensor(separate, dtype=torch.float64)
    second = torch.tensor(summed, dtype=torch.float64)
    assert _is_close(first, second) is expected
