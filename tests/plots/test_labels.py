"""Names and sizes as figures and tables show them."""

import doctest

import pytest

from fedproto.plots import labels
from fedproto.plots.labels import format_bytes, is_own_accuracy, score_name, shorten


def test_the_examples_in_docstrings_are_true() -> None:
    result = doctest.testmod(labels)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (19_336, "19.3 kB"), (2.5e9, "2.5 GB")],
)
def test_bytes_have_a_unit(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_very_large_counts_are_terabytes() -> None:
    assert format_bytes(2e15) == "2e+03 TB"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("cat", "cat"),
        ("two\nlines\tand\x00zero", "two lines and zero"),
        ("abcdefghij", "abcdefghij"),
        ("abcdefghijk", "abcdefghi…"),
        ("_hidden", " _hidden"),  # matplotlib leaves labels with a leading underscore out
    ],
)
def test_a_name_is_shortened_to_one_printable_line(name: str, shown: str) -> None:
    assert shorten(name, max_letters=10 if len(name) < 12 else 40) == shown


def test_an_accuracy_belongs_to_a_score() -> None:
    assert score_name("prototype_own") == score_name("prototype") == "prototype"
    assert is_own_accuracy("prototype_own")
    assert not is_own_accuracy("prototype")
