"""The server's certificate: a new one from the same authority, used without a restart.

`fedproto deploy renew` writes it. A running server looks at its file at each new connection, so
that members who could not connect any more are let in again, and a run goes on.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedproto.core.files import explain_write_errors, write_atomically
from fedproto.errors import ConfigError, RunFolderError, need

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, GeneralName

DAYS = 825  # that a certificate is valid, as in the template keys.py
MINUTES_BEFORE = 5  # for members whose clocks are late
#: By which the server's own processes reach it.
OWN_HOSTS = ("localhost", "127.0.0.1")


def renew_certificate(folder: Path, hosts: list[str]) -> datetime.datetime:
    """Write a new certificate of the server's key; return until when it is valid.

    It is issued by the authority whose ca.crt the members have, for the same names and addresses,
    or for `hosts`. One file is replaced, atomically. ConfigError if the files do not fit together.
    """
    need("cryptography", "'fedproto[flower]'", "a new certificate")
    keys = folder / "keys"
    authority = _read_certificate(keys / "ca.crt")
    authority_key = _read_key(keys / "ca.key")
    old = _read_certificate(keys / "server.pem")
    if authority_key.public_key() != authority.public_key():
        raise ConfigError(f"{keys / 'ca.key'} is not the key of {keys / 'ca.crt'}")
    if _read_key(keys / "server.key").public_key() != old.public_key():
        raise ConfigError(f"{keys / 'server.key'} is not the key of {keys / 'server.pem'}")
    _check_issuer(old, authority, keys)
    new = _sign_again(old, authority, authority_key, hosts)
    _replace(keys / "server.pem", new)
    return new.not_valid_after_utc


def _check_issuer(certificate: Certificate, authority: Certificate, keys: Path) -> None:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise ConfigError(
            f"{keys / 'server.pem'} was not issued by {keys / 'ca.crt'}: renew it where it was "
            "issued, and replace the file"
        ) from error


def _sign_again(
    old: Certificate,
    authority: Certificate,
    authority_key: EllipticCurvePrivateKey,
    hosts: list[str],
) -> Certificate:
    """Return a certificate that is valid from now on, and else says what the old one says."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    now = datetime.datetime.now(datetime.UTC)
    ends = min(now + datetime.timedelta(DAYS), authority.not_valid_after_utc)
    if ends <= now:
        raise ConfigError(
            f"the authority itself expired on {ends:%Y-%m-%d}: make a new one with keys.py, and "
            "give its ca.crt to every member"
        )
    builder = x509.CertificateBuilder(
        issuer_name=authority.subject,
        subject_name=old.subject,
        public_key=old.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(minutes=MINUTES_BEFORE),
        not_valid_after=ends,
    )
    names = [_parse_host(host) for host in dict.fromkeys([*hosts, *OWN_HOSTS])]
    for extension in old.extensions:
        value: Any = extension.value
        if hosts and isinstance(value, x509.SubjectAlternativeName):
            value = x509.SubjectAlternativeName(names)
        builder = builder.add_extension(value, extension.critical)
    return builder.sign(authority_key, SHA256())


def _parse_host(host: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"{host!r} is neither a host name nor an address") from error


def _read_certificate(path: Path) -> Certificate:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not a certificate (or is corrupted)") from error


def _read_key(path: Path) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a private key (or is encrypted or corrupted)") from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is not a key of an elliptic curve, as keys.py makes them")
    return key


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        hint = ": put it there while you renew" if path.name == "ca.key" else ""
        raise ConfigError(f"{path} is missing{hint}") from error
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from error


def _replace(path: Path, certificate: Certificate) -> None:
    """Replace the certificate's file; the server's user can still read it if root does this."""
    from cryptography.hazmat.primitives.serialization import Encoding

    owner = path.stat()
    with explain_write_errors(path):
        write_atomically(path, certificate.public_bytes(Encoding.PEM))
        path.chmod(0o644)
        if os.geteuid() == 0:
            os.chown(path, owner.st_uid, owner.st_gid)


# --- the running server


class CurrentCertificate:
    """The TLS contexts of a server whose files may be replaced while it runs.

    The context that `make` returns first stays the one of the open port; at each new connection
    Python asks `choose`, which switches to a context of the files as they are now.
    """

    def __init__(self, paths: list[Path], make: Callable[[], ssl.SSLContext]) -> None:
        self.paths = paths  # of the certificate and its key
        self.make = make
        self.loaded = self._look()
        self.failed: object = None  # what the files were like when they could not be used
        self.port_context = make()
        self.port_context.sni_callback = self.choose
        self.context = self.port_context

    def choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """Let a connection use the certificate that is in the file now, if it can be used."""
        self.refresh()
        connection.context = self.context

    def refresh(self) -> None:
        """Load the files again if they were replaced; what cannot be used changes nothing."""
        seen = self._look()
        if seen in (self.loaded, self.failed):
            return
        names = " and ".join(str(path) for path in self.paths)
        try:
            self.context = self.make()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            self.failed = seen
            print(f"{names} cannot be used, so the older ones stay: {error}", file=sys.stderr)
            return
        self.loaded = seen
        print(f"{names} were replaced, and new connections use them", file=sys.stderr)

    def _look(self) -> list[tuple[int, ...]]:
        """Return what changes when a file is replaced."""
        seen: list[tuple[int, ...]] = []
        for path in self.paths:
            try:
                found = path.stat()
            except OSError:
                seen.append(())
            else:
                seen.append((found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size))
        return seen


def make_current_context(config: Any, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Return a context for uvicorn's `ssl_context_factory` that follows its files."""
    paths = [Path(config.ssl_certfile), Path(config.ssl_keyfile)]
    return CurrentCertificate(paths, make).port_context
