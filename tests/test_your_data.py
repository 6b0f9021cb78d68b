"""docs/your-data.md, followed literally from an empty folder; what the page shows is what comes."""

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
from helpers.command_line import fedproto

PAGE = Path(__file__).resolve().parents[1] / "docs" / "your-data.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_page_is_followed_from_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = ""
    for language, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(text, PAGE.name, "exec"), {})
        elif language == "text":  # what the command before it printed
            assert text in printed
        else:
            assert language == "sh"
            program, *arguments = shlex.split(text)
            assert program == "fedproto"
            answer = fedproto(*arguments)
            assert answer.code == 0, answer.err
            printed = answer.out

    # The last command classified and scored the new visits.
    assert "by prototype, 29 inputs: accuracy" in printed
    with Path("predictions.csv").open(encoding="utf-8") as file:
        answers = list(csv.DictReader(file))
    assert [answer["id"] for answer in answers] == [f"V{number:04}" for number in range(540, 569)]
    result = json.loads(Path("runs/visits/result.json").read_text())
    assert [client["name"] for client in result["clients"]] == ["Aachen", "Köln", "Ulm"]
    assert result["accuracy"]["prototype"]["mean"] > 0.9
    assert result["rows"]["test"]["used"] == result["rows"]["test"]["there"]
    assert set(result["baselines"]) >= {"majority", "local", "pooled"}
    assert Path("report.html").exists()
