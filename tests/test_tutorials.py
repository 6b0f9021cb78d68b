"""The tutorials in docs/, run as a reader would: every command and Python block, in order, in one empty folder."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.command_line import fedproto
from PIL import Image

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DataFolders

DOCS = Path(__file__).parent.parent / "docs"
TUTORIALS = ("classify", "join", "extend", "export")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files that the pages speak of: one image of a seven, images with their labels, and two tables."""
    path = tmp_path_factory.mktemp("tutorials")
    source = plugins.build("dataset", Part("mnist5k"), DataFolders(None))
    test = source.test
    Image.fromarray(test.x[np.flatnonzero(test.y == 7)[0]]).save(path / "seven.png")
    np.save(path / "images.npy", test.x[::10])
    np.save(path / "labels.npy", np.array(source.classes)[test.y[::10]])
    bottles = [f"{number % 7},{'red' if number % 2 else 'white'}" for number in range(60)]
    (path / "wine.csv").write_text("\n".join(["acid,kind", *bottles]) + "\n")
    (path / "bottles.csv").write_text("acid\n3\n6\n")
    return path


def test_the_tutorials_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other: later ones use the runs of earlier ones."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    for page in TUTORIALS:
        blocks = BLOCK.findall((DOCS / f"{page}.md").read_text())
        assert blocks, f"{page}.md has no command to run"
        for language, block in blocks:
            if language == "python":
                exec(compile(block, f"{page}.md", "exec"), names)
            else:
                for line in block.splitlines():
                    run_line(line, page)


def run_line(line: str, page: str) -> None:
    command, *arguments = line.split()
    assert command == "fedproto", f"{page}.md: {line}"
    done = fedproto(*arguments)
    assert done.code == 0, f"{page}.md: {line}\n{done.err}"
