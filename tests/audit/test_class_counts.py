"""Classes and counts that are read from uploads."""

import torch

from fedproto.audit.class_counts import guess_from_sum, read_counts, read_head
from fedproto.core.types import Group

COUNTS = torch.tensor([[3, 0, 1], [0, 2, 0]])


def upload(weight: torch.Tensor) -> dict[str, Group]:
    return {"prototypes": Group({"prototypes": torch.zeros(2, 3, 4)}, weight)}


def test_plain_uploads_say_everything() -> None:
    read = read_counts(upload(COUNTS.double()), COUNTS)
    assert (read.right_classes, read.exact_clients, read.count_error) == (1, 1, 0)
    assert read.guessing == 0.5


def test_noisy_counts_are_wrong_by_the_noise() -> None:
    noise = torch.tensor([[0.4, 0.6, -0.8], [0.2, -0.4, -3.0]])
    read = read_counts(upload(COUNTS + noise), COUNTS)
    assert read.right_classes == 4 / 6  # 0.6 is taken for a class, 1 − 0.8 is not
    assert read.exact_clients == 0.5
    assert read.count_error is not None
    assert abs(read.count_error - noise.abs().double().mean()) < 1e-6


def test_clipped_counts_still_tell_the_classes() -> None:
    read = read_counts(upload(COUNTS * 0.1), COUNTS)
    assert read.right_classes == 1


def test_uploads_in_which_all_classes_count_alike_hold_no_counts() -> None:
    read = read_counts(upload((COUNTS > 0).double()), COUNTS)
    assert read.right_classes == 1
    assert read.count_error is None


def test_the_bias_of_a_head_rises_for_the_classes_trained_on() -> None:
    server = {"head.bias": torch.zeros(3)}
    change = torch.tensor([[0.1, -0.2, 0.1], [-0.1, 0.3, -0.2]])
    uploads = {"model": Group({"head.bias": change * 5}, torch.tensor([5.0, 5.0]))}
    assert read_head(uploads, server, ["head.bias"], COUNTS).exact_clients == 1


def test_a_sum_says_nothing_about_single_clients() -> None:
    read = guess_from_sum(COUNTS)
    assert read.right_classes == read.guessing
    assert read.count_error is None
