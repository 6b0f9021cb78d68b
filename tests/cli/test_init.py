"""`fedproto init`: what it finds in six kinds of data, what it writes, and what it refuses."""

import json
import statistics
import tomllib
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from helpers.command_line import Answer, fedproto, files_in, only_line
from helpers.six_kinds import KINDS, as_arrays, as_images, as_table
from sklearn.datasets import load_wine

from fedproto.data import Source, Split, from_arrays
from fedproto.setup.ease import measure_alone
from fedproto.setup.suggestions import Holdings, count_holdings, suggest_method
from fedproto.setup.survey import survey


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


def init(*arguments: str | Path) -> Answer:
    answer = fedproto("init", *arguments)
    assert answer.code == 0, answer.err
    return answer


def written(path: str = "federation.toml") -> dict:
    return tomllib.loads(Path(path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_six_kinds_of_data_lead_to_a_run_without_editing(kind: str, tmp_path: Path) -> None:
    if kind == "hf":
        pytest.importorskip("datasets")
    data = KINDS[kind](tmp_path / "data")
    init(data)
    assert written()["dataset"]["name"].startswith(f"{kind}:")
    assert files_in(Path.cwd()) == ["federation.schema.json", "federation.toml"]
    # Two rounds instead of fifty, to be quick; nothing else is changed.
    ran = fedproto("run", "federation.toml", "--rounds", "2", "--out", "run")
    assert ran.code == 0, ran.err
    assert json.loads(Path("run/result.json").read_text())["rounds"] == 2


def test_a_table_is_read_as_its_owner_would(tmp_path: Path) -> None:
    answer = init(as_table(tmp_path / "data"))
    dataset = written()["dataset"]
    assert dataset["label"] == "finding"
    assert dataset["client"] == "hospital"
    assert dataset["group"] == "PatientId"
    assert dataset["ignore"] == ["visit", "date"]
    assert "missing values: mean_radius 1" in answer.out
    assert written()["validation"] == 0.2


def test_images_of_several_sizes_are_resized_and_broken_files_named(tmp_path: Path) -> None:
    answer = init(as_images(tmp_path / "data"))
    dataset = written()["dataset"]
    assert (dataset["size"], dataset["broken"]) == (20, "skip")
    assert "none.png" in answer.out and "cut.png" in answer.out


def test_images_without_faults_get_no_options(tmp_path: Path) -> None:
    folder = as_images(tmp_path / "data")
    for name in ("0/none.png", "1/cut.png", "1/7.png"):
        (folder / name).unlink()
    init(folder)
    assert set(written()["dataset"]) == {"name"}


@pytest.mark.parametrize(
    ("holdings", "is_image", "suggested"),
    [
        (Holdings(1, 1.0, 500), True, {"algorithm": "local"}),
        (Holdings(5, 1.0, 500), True, {"algorithm": "fedavg"}),
        (Holdings(5, 0.3, 500), True, {"algorithm": "fedproto"}),
        (Holdings(5, 0.3, 20), True, {"algorithm": "local", "teacher": "lda"}),
        (Holdings(5, 0.3, 20), False, {"algorithm": "fedproto", "teacher": "lda"}),
        (Holdings(5, 1.0, 20), False, {"algorithm": "fedavg", "teacher": "lda"}),
    ],
)
def test_the_method_follows_what_clients_hold(
    holdings: Holdings, is_image: bool, suggested: dict[str, str]
) -> None:
    found = suggest_method(holdings, is_image=is_image)
    assert {each.key: each.value for each in found} == suggested


def test_where_a_client_alone_is_right_nothing_is_exchanged(tmp_path: Path) -> None:
    """Scikit-learn's wines, which name no clients: fedavg with a teacher was suggested."""
    load_wine(as_frame=True).frame.to_csv(tmp_path / "wine.csv", index=False)
    init(tmp_path / "wine.csv")
    settings = written()
    assert settings["algorithm"]["name"] == "local"
    assert "teacher" not in settings
    text = Path("federation.toml").read_text()
    assert "a linear classifier on the rows of one client alone is right for 9" in text


@pytest.mark.parametrize(
    ("holdings", "alone", "algorithm"),
    [
        (Holdings(5, 1.0, 20), 0.95, "local"),
        (Holdings(5, 1.0, 20), 0.94, "fedavg"),
        (Holdings(5, 1.0, 20), None, "fedavg"),
        # Its own few classes are easy, but it knows nothing of the others.
        (Holdings(5, 0.3, 20), 1.0, "fedproto"),
    ],
)
def test_the_method_follows_how_well_a_client_does_alone(
    holdings: Holdings, alone: float | None, algorithm: str
) -> None:
    (found, *_) = suggest_method(holdings, is_image=False, alone=alone)
    assert (found.key, found.value) == ("algorithm", algorithm)


def make_source(x: np.ndarray, y: np.ndarray, writer: np.ndarray | None = None) -> Source:
    split = Split(x.astype(np.float32), y, writer)
    return from_arrays("test", ("0", "1"), [split, split])


def test_a_client_alone_is_measured_on_rows_it_was_not_fitted_on() -> None:
    draw = np.random.default_rng(0)
    y = np.arange(200) % 2
    easy = draw.normal(size=(200, 3)) + 20 * y[:, None]
    assert measure_alone(make_source(easy, y), 4) == 1.0
    noise = measure_alone(make_source(draw.normal(size=(200, 60)), y), 2)
    assert noise is not None and noise < 0.7  # on its own rows it would be 1
    assert measure_alone(make_source(draw.normal(size=(8, 6, 6)), y[:8]), 2) is None
    one_class_each = make_source(easy, y, writer=y)
    assert measure_alone(one_class_each, 2) is None


def test_holdings_are_counted_by_client(tmp_path: Path) -> None:
    """Three clients with two of four classes each; a fifth of their rows is for tests."""
    source = survey(str(KINDS["pfllib"](tmp_path / "data")), {}).source
    clients, fraction, rows = count_holdings(source)
    assert (clients, fraction) == (3, 0.5)
    counts = []
    for client in range(3):
        labels = source.train.y[source.train.writer == client]
        counts += [int((labels == label).sum()) for label in set(labels.tolist())]
    assert rows == statistics.median(counts)


def test_flags_win_over_suggestions(tmp_path: Path) -> None:
    table = as_table(tmp_path / "data")
    flags = ("--algorithm", "fedper", "--rounds", "7", "--validation", "0.3", "--ignore", "visit")
    init(table, *flags, "--client", "PatientId", "--out", "other.toml")
    settings = written("other.toml")
    assert (settings["rounds"], settings["validation"]) == (7, 0.3)
    assert settings["algorithm"]["name"] == "fedper"
    assert settings["dataset"]["client"] == "PatientId"
    assert settings["dataset"]["ignore"] == ["visit", "date"]


def test_a_path_with_commas_and_brackets_and_a_hostile_class_name(tmp_path: Path) -> None:
    table = tmp_path / "a, (b)*2.csv"
    rows = [
        f"{number % 7}.5,{number % 5},{'odd # class' if number % 2 else 'x]'}"
        for number in range(60)
    ]
    table.write_text("\n".join(["height,width,label", *rows]) + "\n")
    init(table)
    ran = fedproto("run", "federation.toml", "--rounds", "1", "--out", "run")
    assert ran.code == 0, ran.err


# --- the schema


def test_the_schema_accepts_what_is_written_and_what_runs_write(tmp_path: Path) -> None:
    schema = json.loads(init("--schema").out)
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    for kind in ("csv", "folder", "pfllib"):
        init(KINDS[kind](tmp_path / kind), "--force")
        validator.validate(written())
        assert json.loads(Path("federation.schema.json").read_text()) == schema
    ran = fedproto("run", "federation.toml", "--rounds", "1", "--out", "run")
    assert ran.code == 0, ran.err
    validator.validate(written("run/config.toml"))


@pytest.mark.parametrize(
    "text",
    [
        "rounds = 0",
        "rounds = 'many'",
        "roundz = 3",
        "participation = 0",
        "momentum = 1.5",
        "optimiser = 'sdg'",
        "[algorithm]\nname = 'fedprox'\nlam = 1",
        "[algorithm]\nname = 'fedprox'\nmu = -1",
        "[model]\nname = 'mlp'\nchannels = 3",
    ],
)
def test_the_schema_refuses_what_a_run_refuses(text: str) -> None:
    validator = jsonschema.Draft7Validator(json.loads(init("--schema").out))
    assert not validator.is_valid(tomllib.loads(text))
    Path("wrong.toml").write_text(text)
    assert fedproto("run", "wrong.toml").code == 2


@pytest.mark.parametrize(
    "text",
    [
        "clients = 'none'",
        "lam = 0.5",
        "[algorithm]\nlam = 1",
        "validation = 0.2\nbaselines = true",
        "model = 'cnn*2,mlp*3'",
    ],
)
def test_the_schema_accepts_other_ways_to_write(text: str) -> None:
    validator = jsonschema.Draft7Validator(json.loads(init("--schema").out))
    validator.validate(tomllib.loads(text))


# --- refusals


def test_nothing_is_written_where_something_is_refused(tmp_path: Path) -> None:
    arrays = as_arrays(tmp_path / "data")
    cases = [
        ((), "name the data"),
        ((tmp_path / "missing",), "does not exist"),
        ((arrays, "--label", "digit"), "npz has no option 'label'"),
        ((arrays, "--algorithm", "fedprot"), "did you mean"),
        ((arrays, "--validation", "2"), "validation must be"),
        ((arrays, "--out", "federation.txt"), "must name a .toml file"),
        ((as_table(tmp_path / "t"), "--label", "diagnosis"), "unknown column"),
    ]
    for arguments, expected in cases:
        answer = fedproto("init", *arguments)
        assert answer.code == 2
        assert expected in only_line(answer.err)
    assert files_in(Path.cwd()) == []


def test_a_file_is_replaced_only_on_request(tmp_path: Path) -> None:
    arrays = as_arrays(tmp_path / "data")
    Path("federation.toml").write_text("mine")
    answer = fedproto("init", arrays)
    assert answer.code == 2 and "--force" in only_line(answer.err)
    assert Path("federation.toml").read_text() == "mine"
    init(arrays, "--force")
    assert written()["rounds"] == 100


def test_a_column_of_sites_at_the_end_is_not_taken_for_the_classes(tmp_path: Path) -> None:
    data = load_wine(as_frame=True)
    table = data.data.assign(cultivar=[f"kind {kind}" for kind in data.target])
    table["site"] = [("Alba", "Asti", "Bra")[row % 3] for row in range(len(table))]
    table.to_csv(tmp_path / "wine.csv", index=False)
    answer = init(tmp_path / "wine.csv")
    assert written()["dataset"]["label"] == "cultivar"
    assert written()["dataset"]["client"] == "site"
    assert "taken for the classes; --label names another" in " ".join(answer.out.split())
    init(tmp_path / "wine.csv", "--label", "site", "--out", "other.toml")
    assert written("other.toml")["dataset"]["label"] == "site"
