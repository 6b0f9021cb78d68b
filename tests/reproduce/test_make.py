"""Making a target: what is finished is never run again, and nobody's files are overwritten."""

import re
from pathlib import Path

import pytest
from helpers.command_line import fedproto, files_in, only_line
from helpers.reproduction import (
    CELLS,
    FEDPROTO_CELLS,
    LOCAL_CELLS,
    TINY,
    Killed,
    QuietReporter,
    make_target,
    read_content,
    read_markdown,
    refuse_to_train,
)

from fedproto.errors import ConfigError
from fedproto.reproduce import archive, make, plan
from fedproto.reproduce.plan import Request
from fedproto.runs import sweep
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder

PAGES = ("tiny.json", "tiny.md")


def read_pages(out):
    return [(out / name).read_bytes() for name in PAGES]


def modification_times(folder):
    return {name: (folder / name).stat().st_mtime_ns for name in files_in(folder)}


# --- making it again


def test_nothing_is_trained_again(tiny, specs, monkeypatch):
    times = modification_times(tiny / "runs")
    pages = read_pages(tiny)
    monkeypatch.setattr(sweep, "execute", refuse_to_train)
    monkeypatch.setattr(Experiment, "prepare_together", refuse_to_train)
    answer = fedproto("reproduce", "tiny", "--out", tiny)
    assert answer.code == 0, answer.err
    assert modification_times(tiny / "runs") == times
    assert read_pages(tiny) == pages


@pytest.mark.parametrize(
    ("stop_at", "remaining"),
    [
        ((2, 1), [FEDPROTO_CELLS]),
        ((2, 3), [FEDPROTO_CELLS]),
        ((1, 2), [LOCAL_CELLS, FEDPROTO_CELLS]),
    ],
    ids=["row 2", "last round of row 2", "row 1"],
)
def test_a_stopped_target_is_continued(stop_at, remaining, tiny, specs, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Killed):
        make_target(out, stop_at=stop_at)
    assert not (out / "tiny.json").exists()  # a page is of finished runs
    reporter, files = make_target(out)
    assert reporter.trained == remaining  # a finished row is not begun again
    assert [path.name for path in files] == list(PAGES)
    assert read_content(out) == read_content(tiny)


def test_a_row_continues_from_its_checkpoint_and_keeps_none(tiny, specs, tmp_path):
    spec = TINY.replace("checkpoint_every = 0", "checkpoint_every = 1")
    (specs / "tiny.toml").write_text(spec)
    out = tmp_path / "out"
    with pytest.raises(Killed):
        make_target(out, stop_at=(2, 3))
    folders = [RunFolder(out / "runs" / "tiny" / name) for name in CELLS]
    assert [folder.checkpoint_round() for folder in folders] == [0, 0, 0, 0, 3, 2, 2, 2]
    reporter, _ = make_target(out, archive=tmp_path / "cells.tgz")
    continued = sorted(zip(reporter.rounds_done, reporter.trained, strict=True))
    assert continued == [(2, FEDPROTO_CELLS[1:]), (3, FEDPROTO_CELLS[:1])]
    assert not list(out.glob("runs/tiny/*/checkpoint/*"))
    assert read_content(out)["cells"] == read_content(tiny)["cells"]
    assert archive.unpack(tmp_path / "cells.tgz", tmp_path / "runs") == 8


def test_further_rows_and_seeds_keep_the_finished_ones(tiny, specs, tmp_path):
    out = tmp_path / "out"
    reporter, _ = make_target(out, seeds=1, methods=("local",))
    assert reporter.trained == [LOCAL_CELLS[::2]]
    reporter, _ = make_target(out, seeds=1)
    assert reporter.trained == [FEDPROTO_CELLS[::2]]
    reporter, _ = make_target(out)
    assert reporter.trained == [LOCAL_CELLS[1::2], FEDPROTO_CELLS[1::2]]
    assert read_content(out) == read_content(tiny)


def test_another_number_of_rounds_in_the_same_folder_is_refused(tiny, specs):
    answer = fedproto("reproduce", "tiny", "--rounds", "2", "--out", tiny)
    assert answer.code == 2
    sentence = "holds a run with rounds 3, not 2: name another folder with --out"
    assert sentence in only_line(answer.err)


def test_a_page_shows_all_finished_runs_whatever_is_asked_for(tiny, specs):
    pages = read_pages(tiny)
    answer = fedproto(
        "reproduce", "tiny", "--methods", "local", "--seeds", "1", "--finished", "--out", tiny
    )
    assert answer.code == 0
    assert read_pages(tiny) == pages


# --- runs that diverge


@pytest.fixture
def diverging(specs, tmp_path):
    """The folder and the printed lines of a target with a column in which all runs diverge."""
    calm = '"n = 4, stdev 2" = { ways = 4, stdev = 2 }'
    assert calm in TINY
    wild = '"wild" = { ways = 4, stdev = 2, lr = 1e300 }'
    (specs / "tiny.toml").write_text(TINY.replace(calm, wild))
    out = tmp_path / "out"
    return out, fedproto("reproduce", "tiny", "--methods", "fedproto", "--out", out)


def test_diverged_runs_are_reported_and_left_out(diverging):
    out, answer = diverging
    assert answer.code == 2
    assert len(re.findall("seed=[01] broke down: round 1, client", answer.out)) == 2
    cells = [cell for cell in read_content(out)["cells"] if cell["method"] == "FedProto"]
    calm, wild = cells
    assert (calm["seeds"], calm["diverged"]) == ([0, 1], [])
    assert (wild["seeds"], wild["runs"]) == ([], [])
    assert [each["seed"] for each in wild["diverged"]] == [0, 1]
    assert all(each["reason"].startswith("round 1, client") for each in wild["diverged"])
    page = (out / "tiny.md").read_text()
    assert [heading.partition(" (")[0] for heading in read_markdown(page)] == ["n = 3, stdev 2"]
    assert "**Not run yet:** Local." in page
    sentence = "**Diverged**, so the means below are over the other seeds: FedProto (wild), seed 0"
    assert f"{sentence}: round 1, client" in page


# --- all targets


@pytest.mark.parametrize("first", ["probed", "a"])
def test_all_targets_are_planned_before_the_first_is_run(first, specs, tmp_path):
    """The method asked for is missing in the first target, or in the last one."""
    if first == "a":
        (specs / "tiny.toml").rename(specs / "a.toml")
    reporter = QuietReporter()
    request = Request(methods=("local",))
    with pytest.raises(ConfigError, match="unknown method 'local'"):
        list(make.make("all", request, tmp_path / "out", None, reporter.open))
    assert reporter.trained == []
    assert not (tmp_path / "out").exists()


def test_all_makes_every_target(specs, tmp_path):
    answer = fedproto("reproduce", "all", "--seeds", "1", "--rounds", "1", "--out", tmp_path)
    assert answer.code == 0, answer.err
    for name in ("probed", "tiny"):  # each page says how it alone is made
        content = read_content(tmp_path, name)
        assert content["command"] == f"fedproto reproduce {name} --rounds 1"
        assert content["settings"]["rounds"] == 1


# --- files that somebody else wrote


@pytest.mark.parametrize(
    ("target", "name", "text"),
    [
        ("table-mnist", "table-mnist.md", "my own table"),
        ("table-mnist", "table-mnist.png", "a picture"),
        ("table-mnist", "table-mnist.json", '{"command": "something else"}'),
        ("fig-tsne", "fig-tsne-measures.json", "{}"),
        ("verdicts", "VERDICTS.md", "# What the jury said"),
    ],
)
def test_foreign_files_are_refused_before_anything_is_run(target, name, text, tmp_path):
    (tmp_path / name).write_text(text)
    answer = fedproto("reproduce", target, "--quick", "--out", tmp_path)
    assert answer.code == 2
    sentence = f"{tmp_path / name} exists already and was not written by `fedproto reproduce`"
    assert sentence in only_line(answer.err)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == text


def test_the_committed_results_are_recognised_as_our_own():
    """Otherwise they could not be made again in their folder."""
    results = Path(__file__).parents[2] / "results"
    for name in plan.targets():
        if (results / f"{name}.json").exists():
            make.refuse_foreign_files(results, name)
    make._refuse_foreign_verdicts(results)
