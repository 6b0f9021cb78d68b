"""From settings to a checked configuration, and back to TOML."""

import string
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fedproto.algorithms.fedavg import fedavg
from fedproto.config import plugins
from fedproto.config.choices import resolve_auto
from fedproto.config.config_file import flatten_tables, read_toml
from fedproto.config.options import (
    File,
    Fraction,
    NonNegativeFloat,
    Part,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    check_options,
    convert,
    parse,
)
from fedproto.config.plugin_trust import trust_plugins
from fedproto.config.profiles import PROFILES
from fedproto.config.settings import RUN_FIELDS, Config, configure, read_assignment
from fedproto.errors import ConfigError, unknown

# --- the text form of a choice

NAMES = st.text(string.ascii_lowercase + "-_", min_size=1)
#: What has a meaning in a choice comes often; any other text comes, too.
TEXTS = st.text("ab:/\\.,()*='\" \té") | st.text()
PARTS = st.builds(
    Part,
    st.one_of(NAMES, st.builds("{}:{}".format, NAMES, TEXTS), TEXTS.filter(bool)),
    st.dictionaries(NAMES, TEXTS, max_size=3),
    st.none() | st.integers(1, 99),
)


@given(st.lists(PARTS, min_size=1, max_size=4))
def test_parts_written_out_are_read_back(parts: list[Part]) -> None:
    assert parse(",".join(map(str, parts)), "model") == parts


@given(TEXTS | st.text("ab(=),*' \"\\"))
def test_what_was_read_is_written_in_one_way(text: str) -> None:
    try:
        parts = parse(text, "model")
    except ConfigError:
        return
    canonical = ",".join(map(str, parts))
    assert ",".join(map(str, parse(canonical, "model"))) == canonical
    assert parse(canonical, "model") == parts


@given(st.lists(TEXTS, max_size=4))
def test_a_list_of_any_texts_is_read_back(texts: list[str]) -> None:
    part = Part("csv:a", {"ignore": tuple(texts)})
    (read,) = parse(str(part), "dataset")
    assert convert("ignore", read.options["ignore"], tuple[str, ...]) == tuple(texts)


@hypothesis_settings(max_examples=30)
@given(TEXTS)
def test_an_option_of_any_text_survives_a_configuration_file(text: str) -> None:
    choice = str(Part("fedper", {"personal": text}))
    (config,) = configure({"algorithm": choice})
    assert config.algorithm.options["personal"] == text
    settings = flatten_tables(tomllib.loads(config.toml()), "config.toml")
    assert configure(settings) == [config]
    (from_set,) = configure({"algorithm": "fedper"}, {"personal": text})
    assert from_set == config


@given(TEXTS | st.text("a(=),*' \"\\"))
def test_any_text_is_parts_or_one_clear_error(text: str) -> None:
    try:
        assert all(part.name for part in parse(text, "model"))
    except ConfigError as error:
        assert "model" in str(error) or "count" in str(error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cnn", [Part("cnn")]),
        (" cnn , mlp ", [Part("cnn"), Part("mlp")]),
        ("cnn(channels=18)*7,mlp*13", [Part("cnn", {"channels": "18"}, 7), Part("mlp", {}, 13)]),
        ("cnn ( channels = 18 ) * 7", [Part("cnn", {"channels": "18"}, 7)]),
        (
            'resnet18(strides="1,4", fresh=fc)',
            [Part("resnet18", {"strides": "1,4", "fresh": "fc"})],
        ),
        ("fedper(personal='fc1,fc2')", [Part("fedper", {"personal": "fc1,fc2"})]),
        ('fedper( personal = "fc1,fc2" )', [Part("fedper", {"personal": "fc1,fc2"})]),
        ("fedper(personal='fc1')", [Part("fedper", {"personal": "fc1"})]),
        (
            "clip(norm=1),quantise(bits=8)",
            [Part("clip", {"norm": "1"}), Part("quantise", {"bits": "8"})],
        ),
        (r'a(x="say \"no\" \\ C:\new")', [Part("a", {"x": r'say "no" \ C:\new'})]),
        (r"a(x='it\'s', y=it's)", [Part("a", {"x": "it's", "y": "it's"})]),
        (r"npz:C:\new\it's.npz", [Part(r"npz:C:\new\it's.npz")]),
        ("npz:'a (1), b*.npz'", [Part("npz:a (1), b*.npz")]),
        ('a(x=" ( = ", y=\'"\')*2', [Part("a", {"x": " ( = ", "y": '"'}, 2)]),
        ("a(x='')", [Part("a", {"x": ""})]),
        ("a(x=f(1,2))", [Part("a", {"x": "f(1,2)"})]),
        ("cnn()", [Part("cnn")]),
        ('npz:"/a,b (1).npz"*2', [Part("npz:/a,b (1).npz", {}, 2)]),
    ],
)
def test_a_choice_is_parsed_into_parts(text: str, expected: list[Part]) -> None:
    assert parse(text, "model") == expected


@pytest.mark.parametrize("text", ['a(x="b)', "a(x='b)", "'a", 'npz:a"b', r'a(x="b\")', "a(x='b\")"])
def test_a_quote_that_is_not_closed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^model .* has a quote that is not closed: write"):
        parse(text, "model")


def test_a_value_with_a_comma_and_without_quotes_is_refused() -> None:
    wanted = "'fc2' in .* is not an option; write 'name=value', with quotes around a value"
    with pytest.raises(ConfigError, match=wanted):
        parse("fedper(personal=fc1,fc2)", "algorithm")


@pytest.mark.parametrize(
    "text",
    [
        "cnn(a=1)(b=2)",
        "cnn(=1)",
        "cnn((a)=1)",
        "cnn(a=1))(b=2",
        '""',
        "",
        "cnn,",
        "cnn(",
        "cnn)",
        "*3",
        "cnn(3)",
        "cnn*",
        "cnn*0",
        "cnn*-1",
        "cnn*x",
        "a*2*3",
    ],
)
def test_a_choice_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read|is not an option|the count in"):
        parse(text, "model")


# --- values and their bounds


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("3", PositiveInt, 3),
        (3.0, PositiveInt, 3),
        (str(10**400), PositiveInt, 10**400),  # more than a float holds
        ("0.5", PositiveFloat, 0.5),
        (1, PositiveFloat, 1.0),
        ("1", Fraction, 1.0),
        ("0", Fraction, 0.0),
        ("1", PositiveFraction, 1.0),
        ("true", bool, True),
        ("False", bool, False),
        ("none", PositiveInt | None, None),
        (None, PositiveInt | None, None),
        ("4", PositiveInt | None, 4),
        ("1,4", tuple[PositiveInt, ...], (1, 4)),
        ([1, 4], tuple[PositiveInt, ...], (1, 4)),
        ("'a, b', c", tuple[str, ...], ("a, b", "c")),
        ("", tuple[str, ...], ()),
        (2, tuple[PositiveInt, ...], (2,)),
        ("mse", Literal["mse", "l2"], "mse"),
        ("x", str, "x"),
    ],
)
def test_values_are_converted(value: Any, kind: Any, expected: Any) -> None:
    result = convert("it", value, kind)
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind", "accepted"),
    [
        ("0", PositiveInt, "a whole number of at least 1"),
        ("-3", PositiveInt, "a whole number of at least 1"),
        ("2.5", PositiveInt, "a whole number"),
        (2.5, PositiveInt, "a whole number"),
        ("three", PositiveInt, "a whole number"),
        (True, PositiveInt, "a whole number"),  # python thinks True is 1; a person does not
        ([3], PositiveInt, "a whole number"),
        (float("nan"), PositiveInt, "a whole number"),
        (float("inf"), PositiveInt, "a whole number"),
        ("0", PositiveFloat, "a number above 0"),
        ("nan", PositiveFloat, "a number"),
        ("inf", PositiveFloat, "a number"),
        ("1e400", PositiveFloat, "a number"),
        (float("nan"), Fraction, "a number"),
        ("-1", NonNegativeFloat, "a number of at least 0"),
        ("1.01", Fraction, "a number of at least 0 and at most 1"),
        ("0", PositiveFraction, "a number above 0 and at most 1"),
        ("yes", bool, "true or false"),
        (1, bool, "true or false"),
        (5, str, "text"),
        ("0", tuple[PositiveInt, ...], "a whole number of at least 1"),
        ("mes", Literal["mse", "l2"], "did you mean 'mse'"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_what_is_accepted(
    value: Any, kind: Any, accepted: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        convert("the thing", value, kind)
    assert "the thing" in str(refused.value)
    assert accepted in str(refused.value)
    assert str(value) in str(refused.value)


@given(st.integers())
def test_counts_are_the_whole_numbers_from_one(number: int) -> None:
    if number >= 1:
        assert convert("it", str(number), PositiveInt) == number
        return
    with pytest.raises(ConfigError):
        convert("it", str(number), PositiveInt)


@given(st.floats())
def test_fractions_are_the_numbers_from_zero_to_one(number: float) -> None:
    if 0 <= number <= 1:
        assert convert("it", repr(number), Fraction) == number
        return
    with pytest.raises(ConfigError):
        convert("it", repr(number), Fraction)


def test_a_file_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the run can be resumed from another folder."""
    monkeypatch.chdir(tmp_path)
    assert convert("weights", "a/b.pth", File) == str(tmp_path / "a/b.pth")


def test_a_plug_in_may_leave_types_out() -> None:
    def untyped(*, mu=0.1, steps=2, loud=False, name="x", other=None):  # type: ignore[no-untyped-def]
        pass

    given = {"mu": "1", "steps": "3", "loud": "true", "name": "5", "other": "y"}
    expected = {"mu": 1.0, "steps": 3, "loud": True, "name": "5", "other": "y"}
    assert check_options(untyped, given, "algorithm mine") == expected


def test_an_option_without_default_must_be_given() -> None:
    def somebody_elses(*, mu: PositiveFloat) -> None: ...

    assert check_options(somebody_elses, {"mu": "2"}, "algorithm mine") == {"mu": 2.0}
    with pytest.raises(ConfigError, match="algorithm mine needs its option 'mu'"):
        check_options(somebody_elses, {}, "algorithm mine")


# --- nearest names


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "fedprot"}, "unknown algorithm 'fedprot': did you mean 'fedproto'"),
        ({"dataset": "digit"}, "did you mean 'digits'"),
        ({"model": "cmn"}, "did you mean 'cnn'"),
        ({"partition": "n-way"}, "did you mean 'nway'"),
        ({"profile": "realeased"}, "did you mean 'released'"),
        ({"engine": "referense"}, "did you mean 'reference'"),
        ({"round": 3}, "unknown key 'round': did you mean 'rounds'"),
        ({"algorithm.lamb": 3}, "unknown option of algorithm fedproto 'lamb': did you mean 'lam'"),
        ({"partition.way": 3}, "unknown option of partition nway 'way': did you mean 'ways'"),
        ({"algorithm": "fedproto(lamb=3)"}, "did you mean 'lam'"),
        ({"distance": "mes"}, "did you mean 'mse'"),
        ({"algorithm": "fedavg", "mu": 1}, "unknown key 'mu'"),
        ({"algorithms.lam": 1}, "unknown key 'algorithms.lam'"),
        ({"model": "cnn-mh,mlp"}, "stands alone"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(settings)


def test_every_accepted_name_is_listed_where_none_is_near() -> None:
    message = str(unknown("algorithm", "xyzzy", plugins.names("algorithm")))
    assert "did you mean" not in message
    assert all(name in message for name in plugins.names("algorithm"))


# --- whose option a name is


def only(settings: dict[str, Any], assigned: dict[str, Any] | None = None) -> Config:
    (config,) = configure(settings, assigned)
    return config


def test_a_bare_name_goes_to_what_alone_has_it() -> None:
    config = only({"lam": 0.5, "ways": 4, "channels": 18, "model": "cnn", "lr": 0.1})
    assert config.algorithm.options["lam"] == 0.5
    assert config.partition.options["ways"] == 4
    assert config.model[0].options["channels"] == 18
    assert config.lr == 0.1


@pytest.fixture
def model_with_lr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's own model with an option that the run has, too."""
    (tmp_path / "with_lr.py").write_text("def with_lr(fit, *, lr: float = 0.5):\n    ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    trust_plugins("with_lr:with_lr")
    return "with_lr:with_lr"


def test_an_ambiguous_assignment_is_refused_with_both_ways_to_write_it(model_with_lr: str) -> None:
    with pytest.raises(ConfigError, match=r"'lr' is ambiguous: write model.lr or run.lr"):
        only({"model": model_with_lr}, {"lr": "0.1"})


@pytest.mark.parametrize(
    ("key", "of_the_run", "of_the_model"), [("model.lr", 0.01, 0.1), ("run.lr", 0.1, 0.5)]
)
def test_a_dotted_name_says_whose_it_is(
    key: str, of_the_run: float, of_the_model: float, model_with_lr: str
) -> None:
    config = only({"model": model_with_lr}, {key: "0.1"})
    assert (config.lr, config.model[0].options["lr"]) == (of_the_run, of_the_model)


def test_a_key_of_a_file_that_the_run_has_is_the_runs(model_with_lr: str) -> None:
    config = only({"model": model_with_lr, "lr": 0.1})
    assert (config.lr, config.model[0].options["lr"]) == (0.1, 0.5)


def test_what_is_assigned_wins_over_every_other_way_to_write_it() -> None:
    """A file's bare `ways` and a flag's `partition.ways` are two keys of one option."""
    settings = {"ways": 3, "partition.ways": "4"}
    assert only(settings).partition.options["ways"] == 4
    assert only(settings, {"ways": "5"}).partition.options["ways"] == 5
    assert only(settings, {"partition.ways": "6"}).partition.options["ways"] == 6


@pytest.mark.parametrize("text", ["lam", "=1", " =1", ""])
def test_an_assignment_needs_key_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match="--set takes KEY=VALUE"):
        read_assignment(text)


def test_an_assigned_value_may_hold_an_equals_sign() -> None:
    assert read_assignment(" model = npz(a=b) ") == ("model", "npz(a=b)")


def test_several_algorithms_are_as_many_configurations() -> None:
    first, second = configure({"algorithm": "local,fedproto(lam=2)", "rounds": 5})
    assert (first.algorithm.name, second.algorithm.name) == ("local", "fedproto")
    assert second.algorithm.options["lam"] == 2.0
    assert first.rounds == second.rounds == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": "nway,iid"}, "one choice"),
        ({"partition": "nway*2"}, "a count has no meaning"),
        ({"algorithm": "local*2"}, "a count has no meaning"),
        ({"dataset": 5}, "dataset must be text"),
        ({"model": ["cnn"]}, "model must be text"),
        (
            {"algorithm": fedavg()},
            "not an object of type Algorithm; to use a function of your own, write it in a file "
            "and pass 'file:function'",
        ),
    ],
)
def test_a_choice_of_the_wrong_kind_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(settings)


def test_options_of_a_mix_apply_to_those_that_have_them() -> None:
    """`channels` is the cnn's alone, `width` both have, and what stands in the part itself wins."""
    config = only({"model": "cnn*10,mlp(width=7)*10", "channels": 18, "width": 40})
    cnn, mlp = config.model
    assert (cnn.options["channels"], cnn.options["width"]) == (18, 40)
    assert "channels" not in mlp.options and mlp.options["width"] == 7


def test_an_option_that_no_plug_in_of_the_mix_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key 'strides'"):
        only({"model": "cnn,mlp", "strides": "1,4"})


@pytest.mark.parametrize("preset", plugins.presets("model"))
def test_a_preset_is_written_out(preset: str) -> None:
    assert len(only({"model": preset}).model) > 1


def test_the_automatic_model_takes_options() -> None:
    """The model is not known before the data is read, so any model's option may be given."""
    config = only({"width": 40, "channels": 18})
    (part,) = config.model
    assert (part.name, part.options) == ("auto", {"width": 40, "channels": 18})
    assert [p.options["channels"] for p in resolve_auto(part, "cnn")] == [18]
    # What was asked for wins over what the preset says.
    assert [(p.options["channels"], p.options["width"]) for p in resolve_auto(part, "cnn-mh")] == [
        (18, 40)
    ] * 3


# --- profiles


@pytest.mark.parametrize(
    ("dataset", "test_shots"),
    [("mnist", 40), ("mnist5k", 40), ("digits", 15), ("cifar10", 15), ("mnist5k,digits", 15)],
)
def test_the_released_profile_does_what_the_released_code_does(
    dataset: str, test_shots: int
) -> None:
    config = only({"profile": "released", "dataset": dataset})
    options = config.algorithm.options
    assert [options[name] for name in ("weighting", "collect", "absent")] == [
        "uniform",
        "during",
        "drop",
    ]
    assert config.partition.options["test_shots"] == test_shots


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_sets_its_options_of_fedproto_alone(name: str) -> None:
    profile = PROFILES[name]
    options = only({"profile": name, "dataset": "mnist5k"}).algorithm.options
    assert {key: options[key] for key in profile.options} == dict(profile.options)
    paper = only({"dataset": "mnist5k"}).algorithm.options
    unchanged = [key for key in paper if key not in profile.options]
    assert all(options[key] == paper[key] for key in unchanged)
    ditto = only({"profile": name, "algorithm": "ditto", "dataset": "digits"})
    assert ditto.algorithm.options == {"lam": 1.0}
    assert only({"profile": name, "lam": 3}).algorithm.options["lam"] == 3


def test_explicit_settings_win_over_the_profile() -> None:
    config = only(
        {"profile": "released", "weighting": "eq6", "partition.test_shots": "7"},
        {"absent": "remember"},
    )
    options = config.algorithm.options
    assert [options[name] for name in ("weighting", "collect", "absent")] == [
        "eq6",
        "during",
        "remember",
    ]
    assert config.partition.options["test_shots"] == 7


def test_the_paper_profile_is_the_defaults() -> None:
    assert only({"profile": "paper"}) == only({})


def test_a_profile_is_silent_about_plug_ins_without_its_options() -> None:
    config = only({"profile": "released", "algorithm": "fedavg", "partition": "iid"})
    assert config.algorithm.options == {} and config.partition.options == {"test_shots": 40}


# --- TOML

WORTH_WRITING = {
    "the defaults": {},
    "numbers": {"rounds": 7, "lr": 1e-05, "participation": 0.3, "seed": 2**63 - 1, "momentum": 0},
    "a mix of models": {"model": "cnn(channels=18)*7,mlp(hidden=30)*13", "dim": 20},
    "a preset": {"model": "cnn-mh"},
    "one model with a count": {"model": "mlp*20"},
    "a mix of data sets": {"dataset": "digits*5,mnist5k*15"},
    "tuples": {"model": "resnet18", "strides": "1,4"},
    "tuples in a mix": {"model": 'resnet18(strides="1,4"),resnet18(strides="2,2")'},
    "paths": {
        "dataset": "npz:some/file.npz",
        "data_dir": "some/where",
        "model": "resnet18(weights=w.pth)",
    },
    "paths with commas": {
        "dataset": 'npz:"a,b (1)*[2].npz"',
        "data_dir": "a,b",
        "partition": 'file:"a,b.json"',
    },
    "paths beyond ASCII": {"dataset": "npz:données/😀.npz", "data_dir": 'a "quoted" \\ folder'},
    "a mix of paths": {"dataset": 'npz:a.npz(augment=true, mean="0.5,0.4,0.3")*5,"npz:b,c.npz"*15'},
    "text options": {"algorithm": 'fedper(personal="fc1,fc2")'},
    "an empty text": {"algorithm": "fedper", "personal": ""},
    "an open choice": {"width": 40},
    "the released profile": {"profile": "released"},
    "a profile overruled by none": {"profile": "released", "test_shots": "none"},
    "a plug-in from outside, without types": {"model": "json:dumps", "sort_keys": "true"},
}


@pytest.mark.parametrize("settings", WORTH_WRITING.values(), ids=WORTH_WRITING)
def test_a_configuration_written_out_is_read_back(settings: dict[str, Any], tmp_path: Path) -> None:
    plugins.trust_chosen(settings)
    config = only(settings)
    path = tmp_path / "config.toml"
    path.write_text(config.toml(), encoding="utf-8")
    assert only(read_toml(path)) == config


def test_a_configuration_written_out_says_everything(tmp_path: Path) -> None:
    """A default that changes in a later version must not change an old run."""
    path = tmp_path / "config.toml"
    path.write_text(only({"model": "cnn"}).toml())
    written = read_toml(path)
    for kind in plugins.FOLDERS:
        part = getattr(only({"model": "cnn"}), kind)
        parts = part if isinstance(part, tuple) else (part,)
        for one in parts:
            assert {f"{kind}.{name}" for name in one.options} <= set(written)
    # Those that are none.
    unsaid = {"dim", "data_dir", "initial", "prototypes", "stack", "workers"}
    unsaid |= {"validation", "patience", "local_steps", "concurrency"}
    unsaid |= {"epsilon", "noise_multiplier", "step_noise"}
    assert RUN_FIELDS - unsaid <= set(written)


def test_tables_name_a_plug_in_and_its_options(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        'rounds = 3\nmodel = "mlp"\n[algorithm]\nname = "fedprox"\nmu = 1\n[partition]\nways = 4\n'
    )
    config = only(read_toml(path))
    assert config.algorithm == Part("fedprox", {"mu": 1.0})
    assert (config.rounds, config.model[0].name, config.partition.options["ways"]) == (3, "mlp", 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds = ", "is not valid TOML"),
        (b"\xff\xfe", "is not valid TOML"),
        (b"[algoritm]\nlam = 1\n", "unknown table in .*'algoritm': did you mean 'algorithm'"),
        (b"rouns = 3", "did you mean 'rounds'"),
        (b"[algorithm]\nlamb = 1", "did you mean 'lam'"),
        (b"[algorithm.lam]\nx = 1", "lam must be a number"),
        (b"rounds = 1979-05-27", "rounds must be a whole number"),
        (b"lr = nan", "lr must be a number"),
        (b"lr = [0.1]", "lr must be a number"),
        (b"rounds = true", "rounds must be a whole number"),
        (b"algorithm = 3", "algorithm must be text"),
    ],
)
def test_an_invalid_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        configure(read_toml(tmp_path / "config.toml"))


@pytest.mark.parametrize("path", ["nowhere.toml", "."])
def test_a_missing_file_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"does not exist|cannot be read|is not valid TOML"):
        read_toml(Path(path))


@pytest.mark.parametrize(("kind", "name"), [("dataset", "npz:x.npz"), ("partition", "file:x.npz")])
def test_a_relative_path_is_made_absolute(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    part = getattr(only({kind: name}), kind)
    part = part[0] if isinstance(part, tuple) else part
    assert part.name == f"{name.partition(':')[0]}:{tmp_path / 'x.npz'}"


@pytest.mark.parametrize("key", ["mu", "algorithm.mu"])
def test_set_wins_over_the_options_in_a_choice(key: str) -> None:
    (config,) = configure({"algorithm": "fedprox(mu=0.01)"}, {key: "0.5"})
    assert config.algorithm.options["mu"] == 0.5


def test_set_reaches_every_part_of_a_mix() -> None:
    (config,) = configure({"model": "cnn(dropout=0.5)*7,cnn*13"}, {"model.dropout": "0"})
    assert [part.options["dropout"] for part in config.model] == [0, 0]


def test_cifar10_has_the_papers_lambda_and_released_its_fresh_layers() -> None:
    assert only({"dataset": "cifar10"}).algorithm.options["lam"] == 0.1
    assert only({"dataset": "cifar10", "lam": 2}).algorithm.options["lam"] == 2
    released = only({"dataset": "cifar10", "profile": "released", "model": "resnet18"})
    assert released.model[0].options["fresh"] == "conv1,bn1,fc"


# --- how texts of one's own are trained


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dataset": "text:a.jsonl"}, ("adam", 0.001, 20)),
        ({"dataset": "text:a.jsonl", "lr": 0.1}, ("adam", 0.1, 20)),
        ({"dataset": "text:a.jsonl", "rounds": 3}, ("adam", 0.001, 3)),
        ({"dataset": "text:a.jsonl", "optimiser": "sgd"}, ("sgd", 0.01, 100)),
        ({"dataset": "text:a.jsonl", "optimiser": "adamw"}, ("adamw", 0.01, 100)),
        ({"dataset": "text:a.jsonl", "partition": "iid"}, ("sgd", 0.01, 100)),
        ({"dataset": "text:a.jsonl", "ways": 2}, ("sgd", 0.01, 100)),
        ({"dataset": "csv:a.csv"}, ("sgd", 0.01, 100)),
        ({"dataset": "mnist5k"}, ("sgd", 0.01, 100)),
    ],
    ids=str,
)
def test_texts_left_to_fedproto_are_trained_with_adam(
    settings: dict[str, Any], expected: tuple[str, float, int]
) -> None:
    (config,) = configure(settings)
    assert (config.optimiser, config.lr, config.rounds) == expected
    (from_set,) = configure({}, settings)
    assert (from_set.optimiser, from_set.lr, from_set.rounds) == expected


# --- local steps


def test_local_steps_stand_in_a_configuration_file_in_place_of_epochs() -> None:
    (config,) = configure({"local_steps": "10"})
    assert config.local_steps == 10
    tables = tomllib.loads(config.toml())
    assert tables["local_steps"] == 10 and "epochs" not in tables
    assert configure(flatten_tables(tables, "config.toml")) == [config]
    (plain,) = configure({})
    assert plain.local_steps is None and "local_steps" not in tomllib.loads(plain.toml())


@pytest.mark.parametrize("epochs", [1, 3])
def test_local_steps_beside_epochs_are_refused(epochs: int) -> None:
    message = rf"^local_steps \(10\) and epochs \({epochs}\) both say .* leave one of them out$"
    with pytest.raises(ConfigError, match=message):
        configure({"local_steps": 10, "epochs": epochs})
    with pytest.raises(ConfigError, match=message):
        configure({"epochs": epochs}, {"run.local_steps": "10"})
    (config,) = configure({"local_steps": 10, "epochs": epochs}, {"local_steps": "none"})
    assert (config.local_steps, config.epochs) == (None, epochs)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", "1e9", 10**12])
def test_a_number_of_local_steps_that_cannot_be_is_refused(value: Any) -> None:
    accepted = "a whole number( of at least 1 and at most 10000000)?"
    with pytest.raises(ConfigError, match=f"^local_steps must be {accepted}, not {value!r}$"):
        configure({"local_steps": value})
