"""A real browser for tests of pages, by WebDriver, which is JSON over HTTP."""

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
from helpers.patience import PATIENCE_SECONDS, wait_until
from PIL import Image

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
AXE = Path(__file__).parents[1] / "vendor" / "axe-core" / "axe.min.js"


class Browser:
    """One tab."""

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
        return json.load(DIRECT.open(request, timeout=PATIENCE_SECONDS))["value"]

    def tool(self, command: str, **parameters: Any) -> Any:
        return self.post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def ask(self, script: str) -> Any:
        return self.post("/execute/sync", {"script": f"return {script}", "args": []})

    def ask_later(self, script: str) -> Any:
        """The value of a promise."""
        code = f"const done = arguments[0]; ({script}).then(done, error => done(String(error)))"
        return self.post("/execute/async", {"script": code, "args": []})

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        wait_until(lambda: self.ask(condition), condition)

    def open(self, address: str, width: int, scheme: str) -> None:
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
        self.messages()
        self.post("/url", {"url": address})

    def show(self, page: Path, width: int, scheme: str) -> None:
        self.open(page.as_uri(), width, scheme)
        decode_images = "Promise.all([...document.images].map(image => image.decode()))"
        assert self.ask(f"{decode_images}.then(() => true)")

    def messages(self) -> list[str]:
        """What the console said since the last time."""
        return [each["message"] for each in self.post("/se/log", {"type": "browser"})]

    def picture(self) -> np.ndarray:
        data = base64.b64decode(self.tool("Page.captureScreenshot")["data"])
        return np.asarray(Image.open(io.BytesIO(data)).convert("L"))

    def save_whole_page(self, path: Path) -> None:
        taken = self.tool("Page.captureScreenshot", captureBeyondViewport=True, clip=self._whole())
        path.write_bytes(base64.b64decode(taken["data"]))

    def _whole(self) -> dict[str, float]:
        width, height = self.ask("[innerWidth, document.documentElement.scrollHeight]")
        return {"x": 0, "y": 0, "width": width, "height": min(height, 12000), "scale": 1}

    def find_accessibility_problems(self) -> list[str]:
        """The serious problems that axe-core finds, each with where it is."""
        # As the browser's own tools do, past the page's policy for scripts.
        self.tool("Runtime.evaluate", expression=AXE.read_text())
        script = "axe.run(document, {resultTypes: ['violations']}).then(found => found.violations)"
        problems = []
        for each in self.ask_later(script):
            if each["impact"] in ("serious", "critical"):
                places = [node["html"][:150] for node in each["nodes"][:3]]
                problems.append(f"{each['id']}: {places}")
        return problems


def wait_for_port(output: Iterable[str]) -> int:
    """The port that a starting chromedriver prints."""
    for line in output:
        found = re.search(r"successfully on port (\d+)", line)
        if found:
            return int(found[1])
    raise AssertionError("chromedriver did not start")


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A browser for a `with` block; a test is skipped only where none is installed."""
    driver = shutil.which("chromedriver")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or chromium is None:
        pytest.skip("chromium and chromedriver are not installed")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            opened = Browser(wait_for_port(process.stdout), chromium, profile)
            yield opened
            with contextlib.suppress(OSError):
                opened.post("", {}, "DELETE")
        finally:
            process.terminate()
