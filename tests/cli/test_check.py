"""`fedproto check`: who would have what, what it costs, and what is suspicious."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import Answer, fedproto, files_in
from helpers.six_kinds import DIGITS, as_images, as_pfllib, as_table


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def check(target: str | Path, *flags: str, code: int = 0) -> Answer:
    answer = fedproto("check", target, *flags)
    assert answer.code == code, answer.err
    return answer


def write_config(*lines: str) -> Path:
    path = Path("federation.toml")
    path.write_text("\n".join(lines) + "\n")
    return path


DIGIT_LINES = (
    'dataset = "digits"',
    "clients = 4",
    "rounds = 3",
    'engine = "reference"',
    "[partition]",
    'name = "nway"',
    "shots = 5",
)


def test_it_says_what_a_run_then_has_and_sends() -> None:
    """Rows and bytes are those of the real run; the time is only that some time passes."""
    config = write_config(*DIGIT_LINES)
    found = json.loads(check(config, "--json").out)
    assert files_in(Path.cwd()) == ["federation.toml"]
    ran = fedproto("run", config, "--out", "run")
    assert ran.code == 0, ran.err
    result = json.loads(Path("run/result.json").read_text())
    (run,) = found["runs"]
    for said, client in zip(run["clients"], result["clients"], strict=True):
        assert (said["name"], said["classes"]) == (client["name"], client["classes"])
        assert (said["train"], said["test"]) == (client["train"], client["test"])
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    cost = run["cost"]
    assert cost["first_bytes_up"] == lines[0]["bytes_up"]
    assert (cost["bytes_up"], cost["bytes_down"]) == (lines[1]["bytes_up"], lines[1]["bytes_down"])
    assert cost["seconds_per_round"] > 0
    assert found["errors"] == []


def test_a_teacher_sends_more_in_the_first_round() -> None:
    config = write_config(
        'algorithm = "local"', 'teacher = "lda"', 'feature_map = "flat"', *DIGIT_LINES
    )
    cost = json.loads(check(config, "--json").out)["runs"][0]["cost"]
    assert cost["first_bytes_up"] > cost["bytes_up"] == 0


def test_several_methods_are_checked_at_once() -> None:
    config = write_config('algorithm = "local,fedavg"', *DIGIT_LINES)
    out = check(config).out
    assert "local: 0 bytes up" in out
    assert "fedavg: a round takes about" in out


def test_broken_files_and_sizes_are_reported_together(tmp_path: Path) -> None:
    folder = as_images(tmp_path / "data")
    answer = check(folder, "--no-times", code=2)
    assert "none.png" in answer.out and "cut.png" in answer.out
    assert "set size = 20" in answer.out and "set broken = skip" in answer.out
    assert "2 problems" in answer.err
    config = write_config("[dataset]", f'name = "folder:{folder}"', "size = 20")
    answer = check(config, "--no-times", code=2)
    assert "set broken = skip" in answer.out and "set size" not in answer.out


def test_all_telling_columns_are_reported_at_once(tmp_path: Path) -> None:
    table = as_table(tmp_path / "data")
    config = write_config("[dataset]", f'name = "csv:{table}"', 'group = "PatientId"')
    answer = check(config, "--no-times", code=2)
    assert "set ignore = visit, date" in answer.out
    # The rest is checked as if that was mended.
    assert "rows used:" in answer.out


def test_another_unit_with_one_client_is_suspicious(tmp_path: Path) -> None:
    table = as_table(tmp_path / "data")
    lines = table.read_text(encoding="utf-8").splitlines()
    place = lines[0].split(",").index("mean_area")
    for number, line in enumerate(lines):
        cells = line.split(",")
        if cells[3] == "Ulm":
            cells[place] = str(float(cells[place]) * 10_000)
            lines[number] = ",".join(cells)
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    init = fedproto("init", table)
    assert init.code == 0, init.err
    out = check("federation.toml", "--no-times").out
    assert "column 'mean_area' has another range with client Ulm" in out
    assert out.count("has another range") == 1


def test_images_scaled_differently_are_suspicious(tmp_path: Path) -> None:
    images = DIGITS.images[:300] / 16
    clients = np.arange(300) % 3
    images[clients == 1] *= 255
    np.savez(tmp_path / "own.npz", x=images, y=DIGITS.target[:300], client=clients)
    out = check(tmp_path / "own.npz", "--no-times").out
    assert "the inputs have another range with client 1 (mean" in out


def test_rows_that_are_there_twice_and_lonely_classes_are_suspicious(tmp_path: Path) -> None:
    out = check(as_pfllib(tmp_path / "data"), "--no-times").out
    assert "training rows are with two or more clients" in out
    assert "have training rows with one client alone ('0', '3')" in out


def test_a_configuration_that_would_be_refused_is_refused() -> None:
    config = write_config("roundz = 3")
    answer = check(config, code=2)
    assert "unknown key 'roundz'" in answer.err
    answer = check(Path("missing.toml"), code=2)
    assert "does not exist" in answer.err
    answer = check("missing", code=2)
    assert "does not exist" in answer.err


def test_nothing_suspicious_is_said_of_good_data() -> None:
    Path("small.toml").write_text('dataset = "digits"\nrounds = 2\nclients = 3\n')
    out = check("small.toml", "--no-times").out
    assert "nothing suspicious was found" in out
