"""Names of clients: normalised, told apart, and found by text."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedproto.core.client_names import (
    MAX_NAME_CHARACTERS,
    chosen_name,
    client_name,
    find_client,
    refuse_equal_names,
)
from fedproto.errors import ConfigError, DataError

NAMES = ("Ulm", "Köln", "Gdańsk")


@pytest.mark.parametrize(("text", "number"), [("Ulm", 0), (" Köln", 1), ("0", 0), ("2", 2)])
def test_a_client_is_found_by_name_or_number(text, number):
    assert find_client(NAMES, text) == number


def test_a_name_wins_over_a_number():
    names = ("Ulm", "Köln", "1")
    assert find_client(names, "1") == 2
    assert find_client(names, 1) == 1  # a whole number from Python is not a name


def test_a_number_is_never_taken_for_that_of_a_client_that_left():
    with pytest.raises(ConfigError, match="there is no client 2: there are 0, 1, 3, Ulm"):
        find_client(("0", "1", "3", "Ulm"), "2")


def test_any_spelling_of_a_name_finds_the_client():
    assert find_client(NAMES, unicodedata.normalize("NFD", "Gdańsk")) == 2


@pytest.mark.parametrize("text", ["Ulmm", "4", "-1", "", "²", "9" * 30, "Ulm\n\x1b[31m"])
def test_a_client_that_is_not_there_is_refused_with_the_names(text):
    with pytest.raises(ConfigError, match="there are Ulm, Köln, Gdańsk") as refusal:
        find_client(NAMES, text, " in runs/a")
    assert "\n" not in str(refusal.value) and "\x1b" not in str(refusal.value)


def test_a_near_miss_is_suggested():
    with pytest.raises(ConfigError, match="did you mean 'Köln'"):
        find_client(NAMES, "Koln")


def test_clients_without_names_are_refused_by_number():
    with pytest.raises(ConfigError, match="there is no client 7: there are clients 0 to 1"):
        find_client(("0", "1"), "7")


def test_a_list_of_many_names_is_cut():
    with pytest.raises(ConfigError, match=r"and 980 more$"):
        find_client([f"site {number}" for number in range(1000)], "x")


@pytest.mark.parametrize("raw", ["", "  ", "a\nb", "a\x00", "\u202eUlm", "\ud800", "\u200b"])
def test_unusable_names_are_refused(raw):
    with pytest.raises(DataError, match="the data has a client"):
        client_name(raw, "the data has a client")


def test_a_chosen_name_must_not_be_long():
    assert chosen_name("é" * MAX_NAME_CHARACTERS, "--name is") == "é" * MAX_NAME_CHARACTERS
    with pytest.raises(DataError, match="which has 101 characters: at most 100"):
        chosen_name("é" * (MAX_NAME_CHARACTERS + 1), "--name is")


def test_equal_names_are_refused():
    with pytest.raises(DataError, match="clients 0 and 2 are both called 'Ulm'"):
        refuse_equal_names(["Ulm", "Köln", "Ulm"])


@given(st.text(max_size=20))
def test_a_normalised_name_is_normal(raw):
    try:
        name = client_name(raw, "a client")
    except DataError:
        return
    assert client_name(name, "a client") == name
    assert find_client(("other", name), name) == (0 if name == "other" else 1)
