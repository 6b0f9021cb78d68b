"""A server of `fedproto watch` for tests, with requests as anybody could send them."""

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from helpers.patience import PATIENCE_SECONDS

from fedproto.watch.server import Watch


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Watched:
    """A running server: its address, and requests to it."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        assert parts.hostname is not None and parts.port is not None
        self.address = address
        self.host = parts.hostname
        self.port = parts.port
        self.prefix = parts.path

    def raw(self, path: str, method: str = "GET", host: str | None = None) -> Answer:
        """The answer to a path that is sent as it is."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_SECONDS)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"{self.host}:{self.port}")
        connection.endheaders()
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        found = Answer(answer.status, headers, answer.read())
        connection.close()
        return found

    def get(self, path: str) -> Answer:
        return self.raw(self.prefix + path)

    def first_event(self) -> Any:
        """The first event of the stream."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_SECONDS)
        connection.request("GET", f"{self.prefix}api/events")
        answer = connection.getresponse()
        assert answer.headers["content-type"].startswith("text/event-stream")
        line = answer.readline()
        connection.close()
        return json.loads(line.removeprefix(b"data: "))


@contextlib.contextmanager
def watching(folder: Path) -> Iterator[Watched]:
    server = Watch(folder, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield Watched(server.address)
    finally:
        server.stop()
        thread.join(timeout=PATIENCE_SECONDS)
        assert not thread.is_alive()
