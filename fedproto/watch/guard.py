"""Who may see the page: those who know its address, through a name that cannot be forged.

A page of somebody else, open in the same browser, can send requests to any port of this machine.
It cannot guess the token. It cannot use a name of its own for this machine either ("DNS
rebinding"), since the Host header must be an address, `localhost` or the name that was asked for.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_BYTES = 24
#: Scripts, styles and data come from this server only, and nothing is written inside the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def make_token() -> str:
    """Return a random token for an address, from the operating system's entropy."""
    return secrets.token_urlsafe(TOKEN_BYTES)


class Guard:
    """Lets requests pass whose host and token are right, and adds headers to every answer."""

    def __init__(self, app: ASGIApp, token: str, host: str) -> None:
        self._app = app
        self._token = token
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        refusal = self._find_refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send_with_headers)
            return
        prefix = f"/{self._token}"
        inner: dict[str, Any] = dict(scope)
        inner["path"] = scope["path"].removeprefix(prefix) or "/"
        inner.pop("raw_path", None)
        await self._app(inner, receive, send_with_headers)

    def _find_refusal(self, scope: Scope) -> PlainTextResponse | None:
        hosts = Headers(scope=scope).getlist("host")
        if len(hosts) != 1 or not is_allowed_host(hosts[0], self._host):
            return PlainTextResponse("unknown host\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page can only be read\n", 405)
        first = scope["path"].removeprefix("/").partition("/")[0]
        if not hmac.compare_digest(first.encode(), self._token.encode()):
            return PlainTextResponse("the address lacks its token\n", 403)
        if scope["path"] == f"/{self._token}":
            return PlainTextResponse("", 307, {"location": f"/{self._token}/"})
        return None


def is_allowed_host(header: str, host: str) -> bool:
    """Whether a Host header names this machine in a way that no stranger can arrange.

    >>> is_allowed_host("127.0.0.1:8123", "127.0.0.1"), is_allowed_host("evil.example:8123", "::1")
    (True, False)
    """
    name = header.rpartition(":")[0] if _has_port(header) else header
    name = name.removeprefix("[").removesuffix("]").lower()
    if name in ("localhost", host.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _has_port(header: str) -> bool:
    return header.rpartition(":")[2].isdecimal() and not header.endswith("]")
