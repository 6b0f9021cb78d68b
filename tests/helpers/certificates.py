"""Certificates as keys.py makes them, of any age, and a TLS server that shows them."""

import contextlib
import datetime
import importlib.util
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

BEFORE_DAYS = 1000  # that the certificates of these tests were made ago


def make_keys(folder: Path, days: int = 825) -> None:
    """Make all certificates and keys anew, the server's valid for so many days from now on."""
    keys = _load_script(folder, days)
    keys.KEYS.mkdir(mode=0o700, exist_ok=True)
    for path in keys.KEYS.iterdir():
        path.unlink()
    keys.make_certificates(["localhost"])


def make_expired(folder: Path, hosts: list[str]) -> None:
    """Replace the server's certificate by one of its authority that ended yesterday."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    keys = _load_script(folder, days=-1)
    server_key, authority_key = (
        load_pem_private_key((keys.KEYS / name).read_bytes(), None)
        for name in ("server.key", "ca.key")
    )
    keys.KEYS = folder / "expired"
    keys.KEYS.mkdir(exist_ok=True)
    keys.write_server(server_key, authority_key, hosts)
    (keys.KEYS / "server.pem").replace(folder / "keys" / "server.pem")


def _load_script(folder: Path, days: int) -> ModuleType:
    """Return the folder's own keys.py as if it had been run long ago."""
    spec = importlib.util.spec_from_file_location("federation_keys", folder / "keys.py")
    assert spec is not None and spec.loader is not None
    keys = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(keys)
    keys.KEYS = folder / "keys"  # type: ignore[attr-defined]
    keys.NOW -= datetime.timedelta(days=BEFORE_DAYS)  # type: ignore[attr-defined]
    keys.CA_DAYS += BEFORE_DAYS  # type: ignore[attr-defined]
    keys.SERVER_DAYS = BEFORE_DAYS + days  # type: ignore[attr-defined]
    return keys


def make_server_context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "keys" / "server.pem", folder / "keys" / "server.key")
    return context


@contextlib.contextmanager
def tls_server(context: ssl.SSLContext) -> Iterator[int]:
    """A server that shakes hands with everybody, and its port."""
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            line, _ = listener.accept()
            with contextlib.suppress(OSError), context.wrap_socket(line, server_side=True) as safe:
                safe.recv(1)  # until the other side has gone

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        try:
            yield port
        finally:
            over.set()
            socket.create_connection(("127.0.0.1", port)).close()
            thread.join()


def see_certificate(folder: Path, port: int, host: str = "localhost") -> bytes:
    """Return what a member who has ca.crt is shown; ssl.SSLError if it would refuse it."""
    trust = ssl.create_default_context(cafile=folder / "keys" / "ca.crt")
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as line,
        trust.wrap_socket(line, server_hostname=host) as safe,
    ):
        shown = safe.getpeercert(binary_form=True)
        assert shown is not None
        return shown
