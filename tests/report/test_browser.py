"""A real browser shows a report without complaint: on phones and desktops, light and dark."""

import base64
import contextlib
import io
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.reports import read_result
from PIL import Image

from fedproto.report import write
from fedproto.runs.folder import RunFolder

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
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base + path, data, headers, method=method)
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
        # Without leaving the page first, the browser may not wait until it is shown again.
        self.post("/url", {"url": "about:blank"})
        self.post("/url", {"url": page.as_uri()})
        decode_images = "Promise.all([...document.images].map(image => image.decode()))"
        assert self.ask(f"{decode_images}.then(() => true)")

    def picture(self) -> np.ndarray:
        data = base64.b64decode(self.tool("Page.captureScreenshot")["data"])
        return np.asarray(Image.open(io.BytesIO(data)).convert("L"))


def wait_for_port(output: Iterable[str]) -> int:
    """The port that a starting chromedriver prints."""
    for line in output:
        found = re.search(r"successfully on port (\d+)", line)
        if found:
            return int(found[1])
    raise AssertionError("chromedriver did not start")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or chromium is None:
        pytest.skip("chromium and chromedriver are not installed")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = wait_for_port(process.stdout)
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
    resources = browser.ask("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in resources if not name.startswith("data:")] == []


@pytest.mark.usefixtures("one_figure")
def test_a_browser_shows_a_hostile_name_as_it_is(
    browser: Browser, runs: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs / "local", tmp_path / "run"))
    hostile = "<img src=x onerror=alert(1)>" + "long" * 40
    RunFolder(run).write_json("result.json", read_result(run) | {"dataset": hostile})
    page = write([run])
    # The small figure of the fixture is no picture that a browser could decode.
    page.write_text(re.sub("<picture>.*?</picture>", "", page.read_text(), flags=re.DOTALL))
    browser.show(page, 390, "light")
    assert "<img src=x onerror=alert(1)>" in browser.ask("document.querySelector('h1').textContent")
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    assert browser.post("/se/log", {"type": "browser"}) == []
