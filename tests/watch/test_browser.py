"""A real browser shows the live page: it follows a run, stays fluid, and takes names as text."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.browser import Browser, open_browser
from helpers.reports import read_metrics, read_result
from helpers.watching import Watched, watching

from fedproto.partitions.file import hash_partition
from fedproto.runs.folder import RunFolder

HOSTILE = "<img src=x onerror=alert(1)>" + "long" * 20
SHOWN = "document.querySelector('.plot canvas') !== null"
#: Counts the work of the page from now on: nodes that are added, and points that are drawn.
COUNT_WORK = """(() => {
  window.work = {nodes: 0, points: 0};
  const size = node => 1 + (node.querySelectorAll?.("*").length ?? 0);
  const count = list => list.forEach(each => each.addedNodes.forEach(node => {
    work.nodes += size(node);
  }));
  new MutationObserver(count).observe(document, {childList: true, subtree: true});
  for (const kind of [Path2D, CanvasRenderingContext2D]) {
    for (const name of ["lineTo", "moveTo", "arc", "rect", "fillRect"]) {
      const draw = kind.prototype[name];
      if (draw === undefined) continue;
      kind.prototype[name] = function (...where) {
        work.points += 1;
        return draw.apply(this, where);
      };
    }
  }
  return true;
})()"""


#: Keeps the words that are drawn on charts from now on, where each begins, and its alignment.
KEEP_WORDS = """(() => {
  window.words = [];
  const draw = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const width = this.measureText(text).width;
    const share = {right: 1, end: 1, center: 0.5}[this.textAlign] ?? 0;
    if (this.getTransform().b === 0) words.push([text, x - share * width, this.textAlign]);
    return draw.call(this, text, x, y);
  };
  return true;
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def watched(runs: Path) -> Iterator[Watched]:
    with watching(runs) as server:
        yield server


def open_page(browser: Browser, address: str, width: int = 1280, scheme: str = "light") -> None:
    browser.open(address, width, scheme)
    browser.wait_for(SHOWN)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_and_has_no_complaint(
    browser: Browser, watched: Watched, width: int, scheme: str
) -> None:
    both = ",".join(run["id"] for run in watched.get("api/runs").json())
    open_page(browser, f"{watched.address}#compare={both}", width, scheme)
    browser.wait_for("document.querySelector('.gains') !== null")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert (np.median(browser.picture()) > 128) == (scheme == "light")
    assert browser.find_accessibility_problems() == []
    assert browser.messages() == []


def test_a_comparison_says_how_a_run_without_prototypes_predicts(
    browser: Browser, watched: Watched
) -> None:
    runs = watched.get("api/runs").json()
    both = ",".join(run["id"] for run in runs)
    open_page(browser, f"{watched.address}#compare={both}")
    browser.wait_for("document.querySelector('.gains') !== null")
    texts = "[...document.querySelector('[aria-labelledby=compare]').querySelectorAll('{}')]"
    names = browser.ask(f"{texts.format('tbody th')}.map(cell => cell.innerText)")
    ways = browser.ask(f"{texts.format('button')}.map(button => button.innerText)")
    assert "nearest prototype" in ways
    for run in runs:
        predicts = "" if "prototype" in run["accuracy"] else " (classifier head)"
        assert run["name"] + predicts in names


def test_long_numbers_beside_a_chart_are_not_cut(
    browser: Browser, runs: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs / "fedproto", tmp_path / "runs" / "run"))
    lines = read_metrics(run)
    (run / "metrics.jsonl").unlink()
    for line in lines:
        line["bytes_up"] = 975_000_000 + line["round"]
        line["bytes_down"] = 976_000_000
        RunFolder(run).add_metrics(line)
    with watching(tmp_path / "runs") as server:
        open_page(browser, server.address)
        browser.ask(KEEP_WORDS)
        draw_anew = "document.querySelectorAll('button.log').forEach(x => (x.click(), x.click()))"
        browser.ask(draw_anew)
        browser.wait_for("words.some(word => word[0].endsWith('MB'))")
        words = browser.ask("words")
    starts = [start for text, start, _ in words if text.endswith("MB")]
    assert starts and min(starts) >= 0


def test_a_client_opens_by_keyboard_with_its_confusion_matrix(
    browser: Browser, watched: Watched
) -> None:
    open_page(browser, watched.address)
    browser.ask("document.querySelector('[data-key=\"client-1\"]').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.tool("Input.dispatchKeyEvent", type=kind, key="Enter", text="\r")
    browser.wait_for("document.getElementById('client').open")
    assert browser.ask("document.getElementById('client-title').textContent") == "Client 1"
    assert browser.ask("document.querySelectorAll('dialog .matrix td').length") > 0
    (run,) = [run for run in watched.get("api/runs").json() if run["method"] == "fedproto"]
    told = watched.get(f"api/runs/{run['id']}/clients/1").json()["hard_rows"]["rows"]
    shown = browser.ask(
        "[...document.querySelectorAll('.reasons tbody tr')].map(row => row.innerText)"
    )
    assert len(shown) == len(told) > 2
    for text, row in zip(shown, told, strict=True):
        assert text.split()[:2] == [str(row["row"]), f"{row['class']}:"]
        is_right = row["answer"] == row["class"]
        assert ("recognised" if is_right else f"taken for {row['answer']}") in text
        for near in row["training"]:
            assert f"row {near['row']}, {near['class']} at " in text
        for near in row["prototypes"]:
            assert f"{near['class']} at " in text
    assert browser.find_accessibility_problems() == []
    for kind in ("keyDown", "keyUp"):
        browser.tool("Input.dispatchKeyEvent", type=kind, key="Escape", windowsVirtualKeyCode=27)
    browser.wait_for("!document.getElementById('client').open")
    assert browser.messages() == []


def test_tables_sort_and_filter(browser: Browser, watched: Watched) -> None:
    open_page(browser, watched.address)
    rows = "[...document.querySelectorAll('.grid tbody tr')].map(row => row.cells[1].textContent)"
    browser.ask("document.querySelector('[data-key=\"grid-accuracy\"]').click()")
    ascending = browser.ask(rows)
    browser.ask("document.querySelector('[data-key=\"grid-accuracy\"]').click()")
    values = [float(text.rstrip("%")) for text in ascending]
    assert values == sorted(values)
    assert [float(text.rstrip("%")) for text in browser.ask(rows)] == sorted(values, reverse=True)
    browser.ask(
        "(() => { const search = document.querySelector('[aria-label=\"Filter clients\"]');"
        "search.value = 'no such client'; search.dispatchEvent(new Event('input')); })()"
    )
    assert browser.ask(rows) == []


def test_a_run_in_progress_updates_the_page(browser: Browser, runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "fedproto", tmp_path / "runs" / "run"))
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    result = (run / "result.json").read_bytes()
    (run / "result.json").unlink()
    (run / "metrics.jsonl").write_bytes(lines[0])
    lead = "document.querySelector('.lead').textContent"
    with watching(tmp_path / "runs") as server, RunFolder(run).hold():
        open_page(browser, server.address)
        browser.wait_for(f"{lead}.includes('round 1 of 3')")
        assert "left at" in browser.ask(lead)
        nodes = browser.ask("document.querySelector('.plot canvas').isConnected")
        browser.ask(KEEP_WORDS)
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(lines[1])
        browser.wait_for(f"{lead}.includes('round 2 of 3')")
        second = "words.filter(([text, _, align]) => text === '2' && align === 'center').length"
        charts = browser.ask("document.querySelectorAll('.plot canvas').length")
        browser.wait_for(f"{second} >= {charts}")
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(lines[2])
        (run / "result.json").write_bytes(result)
        browser.wait_for(f"{lead}.includes('finished')")
        browser.wait_for("document.querySelector('.matrix') !== null")
        assert nodes and browser.messages() == []


def make_large_run(run: Path, clients: int, rounds: int) -> None:
    """Turn a finished run into one of many clients and rounds, with the same kind of numbers."""
    result = read_result(run)
    line = read_metrics(run)[0]
    folder = RunFolder(run)
    some = result["clients"]
    result["clients"] = [
        some[number % len(some)] | {"id": number, "name": str(number)} for number in range(clients)
    ]
    result["rounds"] = rounds
    folder.write_json("result.json", result)
    draw = np.random.default_rng(0)
    (run / "metrics.jsonl").unlink()
    for round in range(1, rounds + 1):
        for spread in line["accuracy"].values():
            spread["mean"] = float(draw.uniform(0.5, 1))
        folder.add_metrics(line | {"round": round, "participants": list(range(clients))})


def test_200_clients_and_1000_rounds_stay_fluid(
    browser: Browser, runs: Path, tmp_path: Path
) -> None:
    """The work of an update is of the size of the page, not of the run.

    The run has 200,000 values; a page that showed all of them again at each round would stutter.
    """
    run = Path(shutil.copytree(runs / "fedproto", tmp_path / "runs" / "large"))
    make_large_run(run, clients=200, rounds=1000)
    with watching(tmp_path / "runs") as server:
        open_page(browser, server.address)
        browser.wait_for("document.querySelectorAll('.grid tbody tr').length === 25")
        nodes = browser.ask("document.querySelectorAll('*').length")
        assert nodes < 5000
        assert browser.ask(COUNT_WORK)
        line = read_metrics(run)[-1]
        for round in range(1001, 1004):
            RunFolder(run).add_metrics(line | {"round": round})
            text = f"round {round}"
            browser.wait_for(f"document.querySelector('.lead').textContent.includes('{text}')")
        browser.ask("document.querySelector('[data-key=\"pager-on\"]').click()")
        first = "document.querySelector('.grid tbody th').textContent"
        assert browser.ask(first) == "25"
        work = browser.ask("work")
        assert 0 < work["nodes"] < 10 * nodes and 0 < work["points"] < 200_000, work
        assert browser.ask("document.querySelectorAll('*').length") < nodes + 200
        assert browser.messages() == []


def rename(value: Any, old: str, new: str) -> Any:
    """Replace a class name wherever a result has it, as a key or as a value."""
    if isinstance(value, dict):
        return {(new if key == old else key): rename(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [rename(each, old, new) for each in value]
    return new if value == old else value


def test_hostile_names_stay_text(browser: Browser, runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "fedproto", tmp_path / "runs" / "<b>run</b>&amp;"))
    folder = RunFolder(run)
    result = read_result(run)
    hostile_class = result["clients"][0]["classes"][0]
    result = rename(result, hostile_class, HOSTILE)
    result["clients"][0]["name"] = "</script><svg onload=alert(2)>"
    result["clients"][0]["model"] = "javascript:alert(3)"
    result["dataset"] = HOSTILE
    folder.write_json("result.json", result)
    line = read_metrics(run)[-1]
    folder.add_metrics(line | {"round": 4, "notes": ["<iframe src=//evil.example>"]})
    partition = json.loads((run / "partition.json").read_text())
    partition["sha256"] = hash_partition(partition)
    (run / "partition.json").write_text(json.dumps(partition))
    with watching(tmp_path / "runs") as server:
        open_page(browser, server.address, 390)
        assert "<b>run</b>&amp;" in browser.ask("document.getElementById('run').textContent")
        browser.ask("document.querySelector('[data-key=\"client-0\"]').click()")
        browser.wait_for("document.getElementById('client').open")
        assert "</script><svg onload" in browser.ask(
            "document.getElementById('client-title').textContent"
        )
        assert HOSTILE in browser.ask("document.body.textContent")
        assert HOSTILE in browser.ask("document.querySelector('.reasons').textContent")
        assert browser.ask("document.querySelectorAll('img, iframe, b, svg[onload]').length") == 0
        assert browser.ask("document.documentElement.scrollWidth") <= 390
        assert browser.messages() == []


def test_scripts_from_elsewhere_do_not_run(browser: Browser, watched: Watched) -> None:
    """The policy is enforced: a script that gets into the page by any way is refused."""
    open_page(browser, watched.address)
    browser.ask(
        "(() => { const script = document.createElement('script');"
        "script.textContent = 'window.taken = 1'; document.body.append(script); })()"
    )
    assert browser.ask("window.taken === undefined")
    assert any("Content Security Policy" in message for message in browser.messages())


def copy_with_settings(run: Path, out: Path, **settings: str) -> None:
    """Copy a run, and write other numbers into its configuration."""
    shutil.copytree(run, out)
    text = (out / "config.toml").read_text()
    for name, value in settings.items():
        text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
    (out / "config.toml").write_text(text)


def open_comparison(browser: Browser, server: Watched) -> None:
    everything = ",".join(run["id"] for run in server.get("api/runs").json())
    open_page(browser, f"{server.address}#compare={everything}")


def test_a_sweep_has_its_axis(browser: Browser, runs: Path, tmp_path: Path) -> None:
    for lr in ("0.01", "0.1", "1.0"):
        copy_with_settings(runs / "local", tmp_path / lr, lr=lr)
    with watching(tmp_path) as server:
        open_comparison(browser, server)
        captions = "[...document.querySelectorAll('#compare ~ * figcaption')].map(e => e.innerText)"
        browser.wait_for(f"{captions}.some(text => text.startsWith('Accuracy against lr'))")
        assert browser.messages() == []


def test_a_sweep_of_two_numbers_is_a_heat_map(browser: Browser, runs: Path, tmp_path: Path) -> None:
    for lr in ("0.01", "0.1"):
        for batch in ("2", "4", "8"):
            copy_with_settings(runs / "local", tmp_path / f"{lr}-{batch}", lr=lr, batch=batch)
    with watching(tmp_path) as server:
        open_comparison(browser, server)
        table = "document.querySelector('[aria-label^=\"Accuracy, mean over clients and seeds\"]')"
        browser.wait_for(f"{table} !== null")
        shape = f"[...{table}.querySelectorAll('tbody tr')].map(row => row.cells.length)"
        assert browser.ask(shape) in ([3, 3, 3], [4, 4])
        assert browser.find_accessibility_problems() == []
        assert browser.messages() == []
