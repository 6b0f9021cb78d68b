"""Reports of runs with a closed-form teacher, and of a closed form alone."""

import pytest
from helpers.tiny import SETTINGS

import fedproto
from fedproto.report import write
from fedproto.report.figures.curves import list_series
from fedproto.report.groups import group_runs, list_shown_accuracies
from fedproto.report.read import read_run
from fedproto.report.summary import describe_groups, make_table

SMALL_MAP = "random-conv(filters=3,kernel=3,pool=2)"
TAUGHT = SETTINGS | {"precision": "float32", "rounds": 2, "feature_map": SMALL_MAP}
RUNS = {
    "closed-form": {"algorithm": "closed-form"},
    "local": {"algorithm": "local", "teacher": "lda"},
    "fedproto": {"algorithm": "fedproto", "teacher": "lda"},
}
SHOWN = {
    "closed-form": ["teacher"],
    "local": ["head", "teacher", "head+teacher"],
    "fedproto": ["head", "prototype", "both", "teacher", "both+teacher"],
}


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    """The name of a run, and its folder."""
    folder = tmp_path_factory.mktemp("report") / "run"
    fedproto.run(**TAUGHT | RUNS[request.param], out=folder)
    return request.param, folder


def test_a_report_shows_the_teacher_and_one_sum(run):
    name, folder = run
    groups = group_runs([read_run(folder)])
    shown = [each for each in groups[0].accuracies if not each.endswith("_own")]
    assert shown == SHOWN[name]
    header = make_table(groups).header
    assert [way for way in SHOWN[name] if f"{way}, %" in header] == SHOWN[name]
    labels = [series.label for series in list_series(groups, own=False)]
    assert len(set(labels)) == len(SHOWN[name])
    dashes = {series.dashes for series in list_series(groups, own=False)}
    assert len(dashes) == len(SHOWN[name])
    sentence = describe_groups(groups)
    assert "by the teacher" in sentence and "+" not in sentence


def test_a_page_is_written(run, tmp_path):
    name, folder = run
    text = write([folder], tmp_path / "report.html").with_suffix(".md").read_text()
    assert "by the teacher" in text
    assert ("head+teacher" in text) == (name != "closed-form")


def test_of_the_sums_the_largest_is_shown():
    present = ["head", "head+teacher", "both+teacher", "prototype+teacher", "teacher"]
    assert list_shown_accuracies(present) == ["head", "teacher", "both+teacher"]
    assert list_shown_accuracies(["head", "head_own"]) == ["head", "head_own"]
