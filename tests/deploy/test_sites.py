"""A deployed member's file says what people call its site; the server checks and shows it."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.deployment import with_header

from fedproto import Classifier
from fedproto.deploy import scaffold
from fedproto.deploy.member import load_trained_member
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.settings import read_member
from fedproto.deploy.status import make_rows, read_status
from fedproto.errors import ConfigError

FILE = 'name = "koeln"\ndata = "digits"\nstate = "state"\n'


def test_the_site_is_in_status_logs_and_predictions(make_deployment: Any) -> None:
    deployment = make_deployment()
    deployment.members["a"] = replace(deployment.members["a"], site="Köln")

    def silent_in_round_2(name: str, round: int) -> bool:
        return (name, round) != ("a", 2)

    deployment.settings = replace(deployment.settings, rounds=2, quorum=2)
    state = deployment.serve(heard=silent_in_round_2)
    assert state.members["a"].site == "Köln"
    assert any("Köln (a) did not reply" in line for line in deployment.said)
    status = read_status(Path(deployment.settings.state))
    assert status["members"]["a"]["site"] == "Köln"
    assert [row[0] for row in make_rows(status)] == ["Köln (a)", "b", "c"]
    assert load_trained_member(deployment.members["a"]).about["name"] == "Köln"
    assert load_trained_member(deployment.members["b"]).about["name"] == "b"


def test_a_members_reasons_are_its_own_training_rows(make_deployment: Any) -> None:
    deployment = make_deployment()
    deployment.settings = replace(deployment.settings, rounds=1)
    deployment.serve()
    trained = load_trained_member(deployment.members["a"])
    rows = trained.training.load(trained)
    assert set(rows.labels) == set(trained.own)
    arrays = np.load(deployment.data / "a.npz")
    first = rows.numbers[:2].tolist()
    places = [int(rows.place(number).split()[1]) for number in first]  # row N of the array
    for reason, place in zip(
        Classifier.from_trained(trained).explain(arrays["x"][places], count=1), places, strict=True
    ):
        (near,) = reason.rows
        assert near.distance < 1e-4
        assert near.place == f"row {place} of the array"


@pytest.mark.parametrize(
    "site", ["x" * 101, "a\nb", "\x1b[31mUlm", "\u202eUlm", " Ulm", 3, ["Ulm"]]
)
def test_a_bad_site_is_refused_by_the_server(site: Any, make_deployment: Any) -> None:
    deployment = make_deployment()
    deployment.settings = replace(deployment.settings, rounds=1, quorum=2)

    def rewrite(name: str, reply: Any, round: int) -> list[Any]:
        return [with_header(site=site)(reply) if name == "a" else reply]

    state: ServerState = deployment.serve(rewrite=rewrite)
    assert state.members["a"].refused == 1 and state.members["a"].site == ""
    assert "which has more than 100 characters or is not plain text" in state.members["a"].reason
    assert state.members["b"].refused == 0


def test_a_state_of_an_older_server_has_no_sites(make_deployment: Any) -> None:
    deployment = make_deployment()
    deployment.settings = replace(deployment.settings, rounds=1)
    status = read_status(Path(deployment.serve().settings.state))
    for record in status["members"].values():
        del record["site"]
    assert [row[0] for row in make_rows(status)] == ["a", "b", "c"]


def test_a_members_file_gives_its_site(tmp_path: Path) -> None:
    path = tmp_path / "koeln.toml"
    path.write_text(FILE + 'site = " Ko\u0308ln "\n', encoding="utf-8")
    assert read_member(path).title == read_member(path).site == "Köln"
    path.write_text(FILE, encoding="utf-8")
    assert read_member(path).title == "koeln"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (FILE + 'site = "a\\nb"\n', "has the site"),
        (FILE + f'site = "{"x" * 101}"\n', "a line of at most 100 characters is accepted"),
        (FILE.replace("koeln", "a\\tb"), "has the name"),
        (FILE.replace("koeln", "x" * 101), "has the name"),
    ],
)
def test_a_bad_site_or_name_in_a_members_file_is_refused(
    text: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "member.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint):
        read_member(path)


def test_init_writes_sites_whose_names_are_plain_letters(tmp_path: Path) -> None:
    scaffold.init(tmp_path / "fed", ["Ulm", "Köln", "Gdańsk", "Łódź"], "digits", ["0", "1"])
    found = {}
    for path in (tmp_path / "fed").glob("*.toml"):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        if "site" in content:
            found[path.stem] = (content["name"], content["site"])
    assert found == {
        "Ulm": ("Ulm", ""),
        "Koln": ("Koln", "Köln"),
        "Gdansk": ("Gdansk", "Gdańsk"),
        "Lodz": ("Lodz", "Łódź"),
    }
    with pytest.raises(ConfigError, match="different names"):
        scaffold.init(tmp_path / "twice", ["Koln", "Köln"], "digits", ["0", "1"])
