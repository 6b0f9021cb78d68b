"""The setting `combiner`: how it is chosen, written down, and refused."""

import re

import pytest

from fedproto.config import plugins
from fedproto.config.config_file import flatten_tables
from fedproto.config.options import Part
from fedproto.config.settings import SUM, configure
from fedproto.core.files import parse_toml
from fedproto.errors import ConfigError


def chosen(**settings) -> Part:
    (config,) = configure({"dataset": "digits"} | settings)
    return config.combiner


def test_uploads_are_added_unless_something_else_is_chosen() -> None:
    assert chosen() == SUM


def test_a_combiner_is_chosen_with_its_options() -> None:
    assert chosen(combiner="trimmed-mean(fraction=0.2)").options == {"fraction": 0.2}
    assert chosen(combiner="krum", attackers="2").options == {"attackers": 2, "chosen": 1}
    assert chosen(**{"combiner": "krum", "combiner.chosen": 3}).options["chosen"] == 3


def test_a_name_may_be_spelled_with_underscores() -> None:
    assert chosen(combiner="trimmed_mean").name == "trimmed-mean"
    assert chosen(combiner="geometric_median") == chosen(combiner="geometric-median")


def test_all_combiners_are_found() -> None:
    assert plugins.names("combiner") == [
        "geometric-median",
        "krum",
        "median",
        "secure-sum",
        "sum",
        "trimmed-mean",
    ]
    for name in plugins.names("combiner"):
        assert plugins.build("combiner", Part(name)).name == name


@pytest.mark.parametrize("text", ["median", "krum(attackers=2)", "trimmed-mean(fraction=0.3)"])
def test_the_file_of_a_run_states_its_combiner(text) -> None:
    (config,) = configure({"dataset": "digits", "combiner": text})
    tables = parse_toml(config.toml().encode(), "config.toml", ConfigError)
    (again,) = configure(flatten_tables(tables, "config.toml"))
    assert again.combiner == config.combiner


def test_a_file_without_a_combiner_means_the_sum() -> None:
    (config,) = configure(flatten_tables({"version": 1, "dataset": "digits"}, "config.toml"))
    assert config.combiner == SUM


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"combiner": "mean"}, "unknown combiner 'mean'"),
        ({"combiner": "median,krum"}, "combiner takes one choice, not a list"),
        ({"combiner": "median*3"}, "combiner 'median*3': a count has no meaning here"),
        ({"combiner": "median(fraction=1)"}, "unknown option of combiner median 'fraction'"),
        (
            {"combiner": "trimmed-mean(fraction=0.6)"},
            "combiner trimmed-mean's fraction must be a number of at least 0 and at most 0.5, "
            "not '0.6'",
        ),
        (
            {"combiner": "krum(attackers=-1)"},
            "combiner krum's attackers must be a whole number of at least 1, not '-1'",
        ),
        ({"combiner": "krum(attackers=some)"}, "krum's attackers must be a whole number"),
        ({"combiner": "krum(chosen=0)"}, "krum's chosen must be a whole number of at least 1"),
        (
            {"combiner": "geometric-median(iterations=0)"},
            "geometric-median's iterations must be a whole number of at least 1",
        ),
        ({"combiner": "geometric-median(smoothing=0)"}, "smoothing must be a number above 0"),
        ({"combiner": 3}, "combiner must be text, such as 'geometric-median', not 3"),
        ({"attackers": 2}, "unknown key 'attackers'"),
    ],
)
def test_bad_choices_are_one_sentence(settings, sentence) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        chosen(**settings)
    assert "\n" not in str(caught.value)


def test_code_from_outside_needs_trust() -> None:
    with pytest.raises(ConfigError, match="nobody:evil"):
        plugins.refuse_plugins({"combiner": "nobody:evil"}, "config.toml")
