"""The files of the page, and the page itself: live, or frozen into one file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

#: The scripts in the order in which each one's imports are defined.
SCRIPTS = (
    "format.js",
    "dom.js",
    "source.js",
    "charts.js",
    "runs.js",
    "quality.js",
    "reasons.js",
    "clients.js",
    "map.js",
    "client.js",
    "sweep.js",
    "compare.js",
    "run.js",
    "app.js",
)
CHART_SCRIPT = "uPlot.iife.min.js"
STYLES = ("uPlot.min.css", "style.css")
_SCRIPT = "text/javascript"
#: Everything that can be asked for by name, with its media type.
ASSETS = {
    **dict.fromkeys((CHART_SCRIPT, *SCRIPTS), _SCRIPT),
    **dict.fromkeys(STYLES, "text/css"),
}
_IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


@cache
def read_asset(name: str) -> str:
    """Return the text of one of the page's files."""
    folder = files("fedproto.watch") / "page"
    if name.startswith("uPlot"):
        folder = folder / "vendor"
    return (folder / name).read_text(encoding="utf-8")


def render_live() -> str:
    """Return the page that loads its parts and numbers from the server."""
    styles = [f'<link rel="stylesheet" href="assets/{name}">' for name in STYLES]
    scripts = [
        f'<script src="assets/{CHART_SCRIPT}"></script>',
        '<script type="module" src="assets/app.js"></script>',
    ]
    head = [*styles, *scripts]
    parts = {"head": "\n".join(head), "data": "", "before": "", "after": ""}
    return _fill("fedproto watch", parts)


def render_frozen(
    data: dict[str, Any], title: str, generator: str = "", before: str = "", after: str = ""
) -> str:
    """Return the page as one file that holds its scripts, styles and numbers.

    Its policy allows these scripts, by their hashes, and no others. `generator` is a tag for the
    head; `before` and `after` are HTML around what the scripts draw.
    """
    bundle = bundle_scripts()
    chart = read_asset(CHART_SCRIPT)
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in (chart, bundle))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    styles = "\n".join(read_asset(name) for name in STYLES)
    head = [
        generator,
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<style>\n{styles}\n</style>",
    ]
    # Inside a script, only "<" could end it or begin a comment.
    content = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    body = [
        f'<script type="application/json" id="frozen">{content}</script>',
        f"<script>{chart}</script>",
        f'<script type="module">{bundle}</script>',
    ]
    parts = {"head": "\n".join(head), "data": "\n".join(body), "before": before, "after": after}
    return _fill(title, parts)


def bundle_scripts() -> str:
    """Return all scripts as one, without their imports and exports."""
    parts = []
    for name in SCRIPTS:
        text = _IMPORT.sub("", read_asset(name))
        parts.append(_EXPORT.sub("", text))
    return "\n".join(parts)


@cache
def _read_template() -> str:
    """Return the page before its head, its title and its numbers are filled in."""
    return (files("fedproto.watch") / "page" / "page.html").read_text(encoding="utf-8")


def _fill(title: str, parts: dict[str, str]) -> str:
    """Return the page with its title and the parts that are HTML already."""
    values = {**parts, "title": html.escape(title)}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], _read_template())


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
