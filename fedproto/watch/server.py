"""The web server of `fedproto watch`: one process, one port, and nothing but GET."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from fedproto.errors import ConfigError
from fedproto.watch.collection import Collection
from fedproto.watch.guard import Guard, make_token
from fedproto.watch.page_files import ASSETS, read_asset, render_live

POLL_SECONDS = 1.0
LOOKS_PER_POLL = 4  # whether the server ends, so that Ctrl-C need not wait for open pages
BEAT_SECONDS = 15.0  # after which a silent stream says that it is alive
MAX_STREAMS = 32
SHUTDOWN_SECONDS = 5


class Pages:
    """The answers to requests; what they ask for is looked up, never taken as a path."""

    def __init__(self, collection: Collection, is_ending: Callable[[], bool]) -> None:
        self._collection = collection
        self._is_ending = is_ending
        self._streams = 0

    async def index(self, request: Request) -> Response:
        return Response(render_live(), media_type="text/html")

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return _not_found()
        return Response(read_asset(name), media_type=ASSETS[name])

    async def runs(self, request: Request) -> Response:
        return _to_json(await run_in_threadpool(self._collection.list))

    async def run(self, request: Request) -> Response:
        after = _read_number(request.query_params.get("after", "0"))
        epoch = _read_number(request.query_params.get("epoch", "0"))
        if after is None or epoch is None:
            return _not_found()
        run = request.path_params["run"]
        if "epoch" not in request.query_params:
            epoch = -1
        found = await run_in_threadpool(self._collection.describe, run, after, epoch)
        return _not_found() if found is None else _to_json(found)

    async def client(self, request: Request) -> Response:
        run = request.path_params["run"]
        number = _read_number(request.path_params["client"])
        if number is None:
            return _not_found()
        found = await run_in_threadpool(self._collection.describe_client, run, number)
        return _not_found() if found is None else _to_json(found)

    async def events(self, request: Request) -> Response:
        if self._streams >= MAX_STREAMS:
            return PlainTextResponse("too many pages are open\n", 503)
        return StreamingResponse(self._stream(request), media_type="text/event-stream")

    async def _stream(self, request: Request) -> AsyncIterator[str]:
        """Yield the summaries of runs that changed since the last time, as events."""
        self._streams += 1
        try:
            sent: dict[str, Any] = {}
            silent_seconds = 0.0
            while not await request.is_disconnected():
                summaries = await run_in_threadpool(self._collection.list)
                found = {summary["id"]: summary for summary in summaries}
                if found != sent:
                    changed = [each for each in summaries if each != sent.get(each["id"])]
                    event = {"runs": changed, "ids": list(found)}
                    yield f"data: {json.dumps(event, allow_nan=False)}\n\n"
                    sent = found
                    silent_seconds = 0.0
                elif silent_seconds >= BEAT_SECONDS:
                    yield ": still here\n\n"
                    silent_seconds = 0.0
                for _ in range(LOOKS_PER_POLL):
                    if self._is_ending():
                        return
                    await asyncio.sleep(POLL_SECONDS / LOOKS_PER_POLL)
                silent_seconds += POLL_SECONDS
        finally:
            self._streams -= 1


def make_app(
    collection: Collection, token: str, host: str, is_ending: Callable[[], bool]
) -> ASGIApp:
    """Return the application that serves a collection to those who know the token."""
    pages = Pages(collection, is_ending)
    routes = [
        Route("/", pages.index),
        Route("/assets/{name}", pages.asset),
        Route("/api/runs", pages.runs),
        Route("/api/runs/{run}", pages.run),
        Route("/api/runs/{run}/clients/{client}", pages.client),
        Route("/api/events", pages.events),
    ]
    return Guard(Starlette(routes=routes), token, host)


class Watch:
    """A server that is ready to start; its socket is bound, so that its address is known."""

    def __init__(self, folder: Path, host: str, port: int) -> None:
        collection = Collection(folder)
        collection.open()
        token = make_token()
        config = uvicorn.Config(
            make_app(collection, token, host, lambda: self._server.should_exit),
            host=host,
            port=port,
            log_level="error",
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        self._server = uvicorn.Server(config)
        try:
            self._socket = config.bind_socket()
        except SystemExit as error:  # uvicorn's answer to a port that is taken
            raise ConfigError(
                f"port {port} of {host} cannot be used: name another with --port, or 0 for any"
            ) from error
        self._socket.listen()  # the address is printed before the first answer is ready
        shown_host = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown_host}:{self._socket.getsockname()[1]}/{token}/"

    def serve(self) -> None:
        """Answer until Ctrl-C."""
        self._server.run([self._socket])

    def stop(self) -> None:
        """End `serve`, from another thread."""
        self._server.should_exit = True


def _read_number(text: str) -> int | None:
    """Return a whole number of at most nine digits; None for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _to_json(value: Any) -> Response:
    content = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(content, media_type="application/json")


def _not_found() -> Response:
    return PlainTextResponse("there is no such thing here\n", 404)
