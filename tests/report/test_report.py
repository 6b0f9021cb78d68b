"""`fedproto report`: what the page says is what the run folders hold, and a real browser shows it without complaint."""

import base64
import contextlib
import csv
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto, only_line
from helpers.tiny import SETTINGS
from PIL import Image
from safetensors import safe_open

import fedproto as package
from fedproto.config.settings import flat
from fedproto.core.files import write_atomically
from fedproto.core.types import Upload
from fedproto.core.uploads import LatestUploads
from fedproto.errors import ConfigError, RunFolderError
from fedproto.plots.labels import format_bytes
from fedproto.plots.marks import pareto_front
from fedproto.report import SIGNATURE, ownership, write
from fedproto.report.configuration import common_settings, own_settings
from fedproto.report.groups import group_runs
from fedproto.report.ownership import RECORD, refuse_foreign, replace_own
from fedproto.report.read import read_runs
from fedproto.runs.folder import RunFolder

RUN = SETTINGS | {"eval_every": 1, "rounds": 3, "ways": 3}
NASTY = '<script>alert("1")</script>|`$x$`'


def make(out: Path, **settings: Any) -> Path:
    package.run(out=out, **(RUN | settings))
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two methods, one of them with two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    make(folder / "local", algorithm="local")
    make(folder / "fedavg", algorithm="fedavg")
    for seed in (0, 1):
        make(folder / f"fedproto-{seed}", algorithm="fedproto", seed=seed)
    return folder


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write([runs], tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def alone(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write([runs / "fedproto-0"], tmp_path_factory.mktemp("alone") / "one.html")


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers(page: Path, name: str) -> list[dict[str, str]]:
    with (page.with_name(f"{page.stem}-figures") / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


class Cells(HTMLParser):
    """The rows of the page's tables, and all attributes of its tags."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.within = False
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.append((tag, dict(attributes)))
        self.rows += [[]] if tag == "tr" else []
        self.within = tag in ("td", "th", "small")
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.within = self.within and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.within:
            self.rows[-1][-1] += data


def table(page: Path) -> dict[str, dict[str, str]]:
    header, *rows = Cells(page).rows
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


# --- what runs write for it


def test_a_line_of_metrics_has_the_deviation_of_each_loss_over_clients() -> None:
    (line,) = package.run(**(RUN | {"rounds": 1, "clients": 1})).metrics
    assert line["loss_std"] == {"supervised": 0, "regulariser": 0}
    *_, line = package.run(**RUN).metrics
    assert set(line["loss_std"]) == set(line["loss"])
    assert line["loss_std"]["supervised"] > 0


def test_the_clients_last_prototypes_lie_beside_the_global_ones(runs: Path) -> None:
    with safe_open(runs / "fedproto-0" / "prototypes.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    held, clients = stored["held"], result(runs / "fedproto-0")["clients"]
    assert [row[row > 0].tolist() for row in held] == [client["images"] for client in clients]
    assert not stored["local"][held == 0].any()
    means = (stored["local"] * held[..., None]).sum(0) / held.sum(0).clamp(min=1)[:, None]
    known = stored["known"] > 0
    assert torch.allclose(means[known], stored["prototypes"][known])


def test_a_result_keeps_to_the_servers_prototypes() -> None:
    assert set(package.run(**RUN).prototypes) == {"prototypes", "known"}


def test_so_many_local_prototypes_that_a_file_would_be_large_are_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = LatestUploads(2)
    upload = Upload({"prototypes": torch.ones(1, 3, 4)}, {"weight": torch.tensor([[2.0, 0, 1]])})
    assert memory.local_prototypes() == {}
    memory.store(torch.tensor([1]), upload, round=1)
    found = memory.local_prototypes()
    assert found["held"].tolist() == [[0, 0, 0], [2, 0, 1]]
    assert found["local"][1, :, 0].tolist() == [0.5, 0, 1]
    assert torch.isfinite(found["local"]).all()
    monkeypatch.setattr("fedproto.core.uploads.LARGEST_LOCAL_VALUES", 23)
    assert memory.local_prototypes() == {}


def test_a_client_says_how_many_images_of_each_class_it_has(runs: Path) -> None:
    for client in result(runs / "local")["clients"]:
        assert len(client["images"]) == len(client["classes"])
        assert sum(client["images"]) == client["train"]
        assert min(client["images"]) > 0


# --- the page says what the files hold


def figure_names(folder: Path) -> set[str]:
    """The names of the figures, each of which is there as an image and as numbers, and nothing else is."""
    names = {path.stem for path in folder.glob("*.png")}
    files = {f"{name}{end}" for name in names for end in (".png", ".csv")}
    assert {path.name for path in folder.iterdir()} == files | {RECORD}
    return names


def test_there_are_a_page_its_twin_and_a_folder_of_figures(page: Path) -> None:
    assert sorted(path.name for path in page.parent.iterdir()) == [
        "report-figures",
        "report.html",
        "report.md",
    ]
    figures = figure_names(page.parent / "report-figures")
    wanted = {
        "accuracy",
        "accuracy-own",
        "loss-supervised",
        "loss-regulariser",
        "classes-1",
        "prototypes-1",
        "traffic",
    }
    assert figures == wanted | {"clients-1", "clients-2", "clients-3"}
    for name in figures:
        assert f"](report-figures/{name}.png)" in page.with_suffix(".md").read_text()
        assert f"](report-figures/{name}.csv)" in page.with_suffix(".md").read_text()


def test_the_table_has_the_numbers_of_a_run(runs: Path, alone: Path) -> None:
    (row,), stored = table(alone).values(), result(runs / "fedproto-0")
    for way, header in {
        "head": "head, %",
        "head_own": "head, own classes, %",
        "prototype": "prototype, %",
        "prototype_own": "prototype, own classes, %",
    }.items():
        accuracy = stored["accuracy"][way]
        assert row[header] == f"{100 * accuracy['mean']:.2f} ± {100 * accuracy['std']:.2f}"
    assert row["method"] == "fedproto"
    assert row["data set"] == "digits"
    assert (row["clients"], row["rounds"]) == ("4", "3")
    sent = stored["communication"]
    assert row["values per round"] == f"{sent['values_per_round']:,.0f}"
    assert (row["bytes up"], row["bytes down"]) == (
        f"{sent['bytes_up']:,}",
        f"{sent['bytes_down']:,}",
    )
    assert row["seconds"] == f"{stored['seconds']['total']:.1f}"


def test_runs_that_differ_only_in_seed_share_a_row_of_means(runs: Path, page: Path) -> None:
    rows = table(page)
    assert list(rows) == ["local", "fedavg", "fedproto"]
    assert [row["seeds"] for row in rows.values()] == ["1", "1", "2"]
    seeds = [result(runs / f"fedproto-{seed}") for seed in (0, 1)]
    means = [100 * each["accuracy"]["head"]["mean"] for each in seeds]
    std = np.mean([100 * each["accuracy"]["head"]["std"] for each in seeds])
    assert (
        rows["fedproto"]["head, %"]
        == f"{np.mean(means):.2f} ± {std:.2f}seeds ± {np.std(means, ddof=1):.2f}"
    )
    assert (
        rows["fedproto"]["bytes up"]
        == f"{np.mean([each['communication']['bytes_up'] for each in seeds]):,.0f}"
    )
    assert rows["local"]["prototype, %"] == "–"


def test_the_twin_has_the_same_table(page: Path) -> None:
    rows = [
        line for line in page.with_suffix(".md").read_text().splitlines() if line.startswith("| ")
    ]
    cells = [
        [cell.strip().replace("; ", "") for cell in row.strip("|").split(" | ")] for row in rows
    ]
    assert [cells[0], *cells[2:]] == Cells(page).rows


def test_the_curves_numbers_are_those_of_the_metrics(runs: Path, page: Path) -> None:
    for name, key, what in (
        ("accuracy", "head", "accuracy"),
        ("loss-supervised", "supervised", "loss"),
    ):
        rows = [
            row
            for row in numbers(page, name)
            if (row["run"], row["seed"], row[what]) == ("fedproto", "1", key)
        ]
        for row, line in zip(rows, lines(runs / "fedproto-1"), strict=True):
            mean, std = (
                (line[what][key][k] for k in ("mean", "std"))
                if what == "accuracy"
                else (
                    line["loss"][key],
                    line["loss_std"][key],
                )
            )
            assert (int(row["round"]), float(row["mean"]), float(row["std"])) == (
                line["round"],
                mean,
                std,
            )


def test_the_mean_over_seeds_is_a_curve_too(runs: Path, page: Path) -> None:
    rows = [
        row
        for row in numbers(page, "accuracy")
        if row["seed"] == "mean" and row["accuracy"] == "prototype"
    ]
    pairs = zip(lines(runs / "fedproto-0"), lines(runs / "fedproto-1"), strict=True)
    means = [np.mean([line["accuracy"]["prototype"]["mean"] for line in pair]) for pair in pairs]
    assert [float(row["mean"]) for row in rows] == pytest.approx(means, rel=1e-15)


def test_the_clients_numbers_are_those_of_the_result(runs: Path, page: Path) -> None:
    rows = [row for row in numbers(page, "clients-3") if row["seed"] == "1"]
    for row, client in zip(rows, result(runs / "fedproto-1")["clients"], strict=True):
        assert (int(row["client"]), row["model"]) == (client["id"], client["model"])
        assert int(row["classes"]) == len(client["classes"])
        assert {way: float(row[way]) for way in client["accuracy"]} == client["accuracy"]


def test_the_map_of_classes_counts_training_images(runs: Path, page: Path) -> None:
    for row, client in zip(
        numbers(page, "classes-1"), result(runs / "local")["clients"], strict=True
    ):
        assert int(row.pop("client")) == client["id"]
        images = {name: int(count) for name, count in row.items() if int(count)}
        assert images == dict(zip(client["classes"], client["images"], strict=True))


def test_the_map_of_prototypes_has_all_of_them(runs: Path, alone: Path) -> None:
    rows = numbers(alone, "prototypes-1")
    own_classes = [client["classes"] for client in result(runs / "fedproto-0")["clients"]]
    assert sum(row["client"] != "global" for row in rows) == sum(map(len, own_classes))
    assert {row["class"] for row in rows if row["client"] == "global"} == {
        n for names in own_classes for n in names
    }
    assert ("by t-SNE" in alone.read_text()) or ("by PCA" in alone.read_text())


def test_bytes_add_up_over_the_rounds(runs: Path, alone: Path) -> None:
    rows = [row for row in numbers(alone, "traffic") if row["accuracy"] == "head"]
    sent = np.cumsum([line["bytes_up"] for line in lines(runs / "fedproto-0")])
    assert [float(row["bytes_up"]) for row in rows] == sent.tolist()
    assert float(rows[-1]["bytes_up"]) == result(runs / "fedproto-0")["communication"]["bytes_up"]


def test_nobody_on_the_pareto_front_is_beaten() -> None:
    nothing = (0, 0.5)
    worse = (10, 0.4)
    better = (10, 0.7)
    equal_but_dearer = (20, 0.7)
    best = (30, 0.9)
    points = [best, equal_but_dearer, better, worse, nothing]
    assert [points[i] for i in pareto_front(points)] == [nothing, better, best]


def test_the_front_is_named_where_several_are_compared(page: Path, alone: Path) -> None:
    on_front = {row["run"] for row in numbers(page, "traffic") if row["on_front"] == "True"}
    (named,) = re.findall(
        "On the Pareto front, the cheapest first: (.*?)</figcaption>", page.read_text()
    )
    assert "local" in on_front
    assert all(name in named for name in on_front)
    assert "Pareto" not in alone.read_text()


def test_sizes_are_said_as_people_do() -> None:
    assert [format_bytes(count) for count in (0, 999, 1000, 19_336, 2.5e9)] == [
        "0 B",
        "999 B",
        "1 kB",
        "19.3 kB",
        "2.5 GB",
    ]


# --- figures


def test_every_figure_is_a_picture_with_something_on_it(page: Path) -> None:
    files = list((page.parent / "report-figures").glob("*.png"))
    assert files
    for file in files:
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("L"))
        assert pixels.max() == 255
        assert 0.001 < (pixels < 200).mean() < 0.9


def test_every_figure_of_the_page_has_a_light_and_a_dark_form_and_says_what_it_shows(
    page: Path,
) -> None:
    tags = Cells(page).tags
    images = [attributes for tag, attributes in tags if tag == "img"]
    sources = [attributes for tag, attributes in tags if tag == "source"]
    assert len(images) == len(sources) == len(list((page.parent / "report-figures").glob("*.png")))
    for image, source in zip(images, sources, strict=True):
        assert len(image["alt"]) > 20
        light, dark = (
            base64.b64decode(uri.partition("base64,")[2]).decode()
            for uri in (image["src"], source["srcset"])
        )
        assert light.startswith("<svg") and light != dark
        assert "#1b1f24" in light and "#1b1f24" not in dark


def test_the_same_run_gives_the_same_report(runs: Path, alone: Path, tmp_path: Path) -> None:
    again = write([runs / "fedproto-0"], tmp_path / "one.html")
    assert again.read_bytes() == alone.read_bytes()
    for file in (alone.parent / "one-figures").iterdir():
        assert (tmp_path / "one-figures" / file.name).read_bytes() == file.read_bytes()


# --- nothing from outside, nothing unescaped


def test_the_page_asks_for_nothing(page: Path) -> None:
    text = page.read_text()
    assert "://" not in text
    assert (
        "<script" not in text
        and "<link" not in text
        and "@import" not in text
        and "url(" not in text
    )
    for _, attributes in Cells(page).tags:
        for name in ("src", "srcset", "href"):
            assert attributes.get(name, "data:").startswith(("data:", "#"))


def test_names_from_files_are_escaped(tmp_path: Path) -> None:
    run = make(tmp_path / "run", algorithm="fedproto", shots=3, test_shots=3)
    text = (
        (run / "result.json")
        .read_text()
        .replace('"3"', json.dumps(NASTY))
        .replace('"digits"', json.dumps(NASTY))
    )
    RunFolder(run).write_json(
        "result.json", json.loads(text.replace('"mlp(hidden=16, width=8)"', json.dumps(NASTY)))
    )
    assert NASTY in result(run)["classes"]
    page = write([run], tmp_path / "out")
    html = page.read_text()
    assert "<script" not in html
    assert NASTY in unescape(html)
    assert not re.search(r"(?<!\\)<script", page.with_suffix(".md").read_text())
    assert NASTY in numbers(page, "classes-1")[0]


# --- one run, many, and what does not apply


def test_a_run_alone_is_shown_with_its_whole_configuration(runs: Path, alone: Path) -> None:
    text = unescape(alone.read_text())
    assert (runs / "fedproto-0" / "config.toml").read_text().strip() in text
    assert f"fedproto run {runs / 'fedproto-0' / 'config.toml'}" in text
    assert "over seeds" not in text
    assert sorted(path.name for path in alone.parent.iterdir()) == [
        "one-figures",
        "one.html",
        "one.md",
    ]


def test_a_method_without_prototypes_has_no_map_of_them(runs: Path, tmp_path: Path) -> None:
    page = write([runs / "local"], tmp_path)
    text = page.read_text()
    assert "No method here has prototypes, so there is no map of them." in text
    assert "Nothing was sent" in text
    names = figure_names(tmp_path / "report-figures")
    assert names == {"accuracy", "accuracy-own", "loss-supervised", "clients-1", "classes-1"}
    assert "prototype, %" not in Cells(page).rows[0]


def test_what_is_common_and_what_is_a_runs_own_are_together_its_configuration(runs: Path) -> None:
    groups = group_runs(read_runs([runs])[0])
    for each in groups:
        for run in each.runs:
            seed = f"seed = {run.seed}\n" if len(each.runs) > 1 else ""
            settings = flat(
                tomllib.loads(f"{common_settings(groups)}\n{own_settings(each, groups)}\n{seed}"),
                "both",
            )
            assert settings == run.config
    assert "algorithm" not in common_settings(groups) and "rounds = 3" in common_settings(groups)


def test_runs_of_one_method_are_told_apart_by_what_they_differ_in(
    runs: Path, tmp_path: Path
) -> None:
    make(tmp_path / "other", algorithm="fedproto(lam=0.5)", ways=2)
    page = write([runs / "fedproto-0", tmp_path / "other"], tmp_path / "out.html")
    assert list(table(page)) == ["fedproto, lam=1.0, ways=3", "fedproto, lam=0.5, ways=2"]
    assert "different tasks, so they share no Pareto front" in page.read_text()
    assert (tmp_path / "out-figures" / "classes-2.png").exists()


def labels(*paths: Path) -> list[str]:
    return [each.label for each in group_runs(read_runs(paths)[0])]


def test_a_run_named_twice_is_shown_once_and_a_copy_of_it_by_its_folder(
    runs: Path, tmp_path: Path
) -> None:
    first, copy = runs / "local", tmp_path / "copy"
    shutil.copytree(first, copy)
    assert labels(first, first, runs / "fedavg" / ".." / "local") == ["local"]
    assert labels(first, copy) == [f"local, {first}", f"local, {copy}"]


def test_many_clients_are_ranked_and_not_named(tmp_path: Path) -> None:
    run = make(
        tmp_path / "run", algorithm="local", clients=50, rounds=1, shots=2, stdev=0, test_shots=2
    )
    assert "from best to worst" in write([run]).read_text()
    assert (run / "report.html").exists() and (run / "report-figures" / "clients-1.png").exists()


def test_a_run_of_an_older_version_is_shown_without_what_it_does_not_say(
    runs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "old"
    shutil.copytree(runs / "fedavg", run)
    stored = result(run)
    for client in stored["clients"]:
        del client["images"]
    RunFolder(run).write_json("result.json", stored)
    kept = [{key: value for key, value in line.items() if key != "loss_std"} for line in lines(run)]
    (run / "metrics.jsonl").unlink()
    for line in kept:
        RunFolder(run).add_metrics(line)
    page = write([run], tmp_path / "out")
    assert "Filled: the client has training images of the class." in page.read_text()
    assert numbers(page, "loss-supervised")[0]["std"] == ""


@pytest.mark.filterwarnings("error")
def test_the_smallest_run_there_is_can_be_drawn(tmp_path: Path) -> None:
    run = make(tmp_path / "run", algorithm="fedproto", clients=1, rounds=1, ways=1, stdev=0)
    page = write([run])
    assert {"clients-1", "classes-1", "accuracy"} <= {
        path.stem for path in (run / "report-figures").iterdir()
    }
    assert "too few or too alike for a map" in page.read_text() or "by PCA" in page.read_text()


# --- the command, and what it refuses


def test_nobody_else_waits_for_matplotlib() -> None:
    code = "import sys, fedproto.cli.main, fedproto.runs.experiment, fedproto.report; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "fedproto.report" in loaded
    assert "matplotlib" not in loaded


def test_without_matplotlib_the_command_says_how_to_get_it(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refused(runs / "local").endswith(
        "a report needs the package 'matplotlib': pip install 'fedproto[plots]'"
    )


def test_the_command_says_where_the_page_is(runs: Path, tmp_path: Path) -> None:
    answer = fedproto(
        "report", runs / "local", runs / "fedavg", "--out", tmp_path / "new" / "page.html"
    )
    assert (answer.code, answer.err) == (0, "")
    assert only_line(answer.out) == f"written to {tmp_path / 'new' / 'page.html'}"
    assert (tmp_path / "new" / "page.md").exists()


def refused(*arguments: str | Path) -> str:
    answer = fedproto("report", *arguments)
    assert (answer.code, answer.out) == (2, "")
    return only_line(answer.err)


@pytest.fixture
def broken(runs: Path, tmp_path: Path) -> Path:
    """A copy of a run, to be damaged."""
    shutil.copytree(runs / "fedproto-0", tmp_path / "runs" / "broken")
    return tmp_path / "runs" / "broken"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "is not a run" in refused(tmp_path)
    assert "does not exist" in refused(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "is not a folder" in refused(tmp_path / "file")


def test_an_unfinished_run_is_refused_and_one_among_others_left_out(
    broken: Path, runs: Path
) -> None:
    (broken / "result.json").unlink()
    assert refused(broken).endswith(
        f"has not finished its rounds: finish it with `fedproto resume {broken}`"
    )
    assert "fedproto resume" in refused(broken.parent)
    shutil.copytree(runs / "local", broken.parent / "local")
    answer = fedproto("report", broken.parent)
    assert answer.code == 0
    assert f"`fedproto resume {broken}`" in answer.out
    assert (
        "has not finished its rounds, so it is left out"
        in (broken.parent / "report.html").read_text()
    )


@pytest.mark.parametrize(
    "name", ["result.json", "metrics.jsonl", "config.toml", "prototypes.safetensors"]
)
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[]\n", b'{"clients": [1]}\n'])
def test_a_damaged_file_is_named(broken: Path, name: str, content: bytes) -> None:
    (broken / name).write_bytes(content)
    line = refused(broken)
    assert name in line
    assert any(
        words in line
        for words in ("damaged", "is corrupted", "(or is corrupted)", "states no version")
    )
    assert not (broken / "report.html").exists()


def test_metrics_that_lack_a_round_and_a_result_that_lacks_a_key_are_damaged(broken: Path) -> None:
    whole = (broken / "metrics.jsonl").read_text()
    (broken / "metrics.jsonl").write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert "a line for each" in refused(broken)
    (broken / "metrics.jsonl").write_text(whole)
    RunFolder(broken).write_json(
        "result.json", {k: v for k, v in result(broken).items() if k != "seconds"}
    )
    assert "result.json is damaged: it lacks 'seconds'" in refused(broken)


def test_nothing_to_report_on_is_refused() -> None:
    assert fedproto("report").code == 2
    with pytest.raises(ConfigError, match="a report needs a run"):
        write([])


def test_only_a_report_is_written_over(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    assert "is there already and is not a report" in refused(runs / "local", "--out", page)
    assert page.read_text() == "mine"
    page.write_bytes(SIGNATURE)
    assert write([runs / "local"], page) == page
    assert page.read_bytes() != SIGNATURE
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(runs / "local", "--out", tmp_path / "file" / "page.html")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    "name", ["page.md", "page-figures/accuracy.png", "page-figures/accuracy.csv"]
)
def test_somebodys_file_in_the_way_is_refused_before_anything_is_written(
    runs: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    message = refused(runs / "local", "--out", tmp_path / "page.html")
    assert f"{tmp_path / name} is there already and was not written by a report" in message
    assert contents(tmp_path) == before


def test_other_files_among_the_figures_are_kept(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "page-figures").mkdir()
    own = {
        "page-figures/thesis.png": b"mine",
        "page-figures/thesis.csv": b"also mine",
        "page-notes.md": b"notes",
    }
    for name, content in own.items():
        (tmp_path / name).write_bytes(content)
    for _ in range(2):
        write([runs / "local"], tmp_path / "page.html")
        assert own.items() <= contents(tmp_path).items()


def test_figures_of_an_earlier_report_go_and_changed_ones_stay(tmp_path: Path) -> None:
    """Of three figures the next report has one; of the others one was retouched by hand."""
    folder = tmp_path / "x-figures"
    first = {"../x.md": b"text", "a.png": b"1", "b.png": b"2", "c.png": b"3"}
    replace_own(folder, first)
    (folder / "c.png").write_bytes(b"retouched")
    second = {"../x.md": b"new text", "a.png": b"4"}
    refuse_foreign(folder, second)
    replace_own(folder, second)
    found = contents(tmp_path)
    assert found.pop(f"x-figures/{RECORD}")
    assert found == {"x.md": b"new text", "x-figures/a.png": b"4", "x-figures/c.png": b"retouched"}
    with pytest.raises(
        RunFolderError,
        match=r"c\.png is there already and was not written by a report, or was changed",
    ):
        refuse_foreign(folder, {"c.png": b"5"})


def test_a_report_that_was_killed_half_way_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x-figures"
    replace_own(folder, {"../x.md": b"1", "a.png": b"1", "b.png": b"1"})

    def full(path: Path, content: bytes) -> None:
        if path.name == "b.png":
            raise OSError("disk full")
        write_atomically(path, content)

    monkeypatch.setattr(ownership, "write_atomically", full)
    with pytest.raises(OSError, match="disk full"):
        replace_own(folder, {"../x.md": b"2", "a.png": b"2", "b.png": b"2"})
    monkeypatch.undo()
    third = {"../x.md": b"3", "a.png": b"3", "b.png": b"3"}
    refuse_foreign(folder, third)
    replace_own(folder, third)
    assert (folder / "b.png").read_bytes() == (tmp_path / "x.md").read_bytes() == b"3"


def test_a_record_that_somebody_sent_deletes_nothing_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "x-figures"
    folder.mkdir()
    (tmp_path / "letter.png").write_bytes(b"mine")
    (folder / "notes.txt").write_bytes(b"mine")
    digest = hashlib.sha256(b"mine").hexdigest()
    names = ["../letter.png", str(tmp_path / "letter.png"), "notes.txt"]
    record = {
        "format": "files of a report",
        "version": 1,
        "files": {name: [digest] for name in names},
    }
    (folder / RECORD).write_text(json.dumps(record))
    replace_own(folder, {"a.png": b"new"})
    assert (tmp_path / "letter.png").read_bytes() == (folder / "notes.txt").read_bytes() == b"mine"


@pytest.mark.parametrize("content", ["{", "[]", '{"files": {"a.png": "x"}}', "\xff", "[" * 10_000])
def test_a_record_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_bytes(content.encode("latin-1"))
    with pytest.raises(RunFolderError, match=RECORD):
        refuse_foreign(tmp_path, {"a.png": b""})


# --- in a real browser


FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Browser:
    """A browser by WebDriver, which is JSON over HTTP."""

    def __init__(self, port: int, chromium: str, profile: Path) -> None:
        self.base = f"http://127.0.0.1:{port}/session"
        chrome = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL"},
            "goog:chromeOptions": chrome,
        }
        self.base += "/" + self.post("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def post(self, path: str, body: dict[str, Any], method: str = "POST") -> Any:
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base + path, data, kind, method=method)
        return json.load(DIRECT.open(request, timeout=60))["value"]

    def tool(self, command: str, **parameters: Any) -> Any:
        return self.post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def ask(self, script: str) -> Any:
        return self.post("/execute/sync", {"script": f"return {script}", "args": []})

    def show(self, page: Path, width: int, scheme: str) -> None:
        self.tool(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.tool(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.post(
            "/url", {"url": "about:blank"}
        )  # or the same page again, in other clothes, may not be waited for
        self.post("/url", {"url": page.as_uri()})
        assert self.ask(
            "Promise.all([...document.images].map(image => image.decode())).then(() => true)"
        )

    def picture(self) -> np.ndarray:
        data = base64.b64decode(self.tool("Page.captureScreenshot")["data"])
        return np.asarray(Image.open(io.BytesIO(data)).convert("L"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver, chromium = (
        shutil.which("chromedriver"),
        shutil.which("chromium") or shutil.which("google-chrome"),
    )
    if not (driver and chromium):
        pytest.skip("no chromium and chromedriver here")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = (re.search(r"successfully on port (\d+)", line) for line in process.stdout)
            port = next(int(found[1]) for found in ready if found)
            opened = Browser(port, chromium, tmp_path_factory.mktemp("profile"))
            yield opened
            with contextlib.suppress(OSError):
                opened.post("", {}, "DELETE")
        finally:
            process.terminate()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_page_without_complaint(
    browser: Browser, page: Path, width: int, scheme: str
) -> None:
    browser.show(page, width, scheme)
    assert browser.ask("innerWidth") == width
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask("[...document.images].every(image => image.naturalWidth > 100)")
    shown = browser.ask("[...document.images].map(image => image.currentSrc === image.src)")
    assert set(shown) == {scheme == "light"}
    assert (np.median(browser.picture()) > 128) == (scheme == "light")
    assert browser.post("/se/log", {"type": "browser"}) == []
    assert (
        browser.ask(
            "performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length"
        )
        == 0
    )


def test_a_browser_shows_an_alien_name_as_it_is(
    browser: Browser, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "local", tmp_path / "run")
    stored = result(tmp_path / "run")
    alien = "<img src=x onerror=alert(1)>" + "long" * 40
    RunFolder(tmp_path / "run").write_json("result.json", stored | {"dataset": alien})
    browser.show(write([tmp_path / "run"]), 390, "light")
    assert "<img src=x onerror=alert(1)>" in browser.ask("document.querySelector('h1').textContent")
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    assert browser.post("/se/log", {"type": "browser"}) == []
