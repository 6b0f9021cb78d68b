"""Certificates and keys: `python keys.py HOST... -- MEMBER...`, once, where the server is.

Makes keys/ca.crt (for everybody), keys/server.pem and server.key (the server's), and a key pair a member. Give each
member ca.crt and its own key, by a way you trust, and delete that key here.
"""

import datetime
import ipaddress
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

KEYS = Path(__file__).parent / "keys"
NOW = datetime.datetime.now(datetime.UTC)
PEM = serialization.Encoding.PEM


def write(name: str, content: bytes, secret: bool = False) -> None:
    file = os.open(KEYS / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(file, "wb") as opened:
        opened.write(content)


def called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name, days: int
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(
        issuer, called(name), key.public_key(), x509.random_serial_number()
    )
    return builder.not_valid_before(NOW - datetime.timedelta(minutes=5)).not_valid_after(
        NOW + datetime.timedelta(days)
    )


def host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def authority_and_server(hosts: list[str]) -> None:
    root, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = called("federation CA")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = certificate("federation CA", root, issuer, 3650).add_extension(
        x509.BasicConstraints(True, 0), True
    )
    ca = ca.add_extension(usage, True)
    ca = ca.add_extension(x509.SubjectKeyIdentifier.from_public_key(root.public_key()), False)
    write("ca.crt", ca.sign(root, hashes.SHA256()).public_bytes(PEM))
    server = certificate("federation server", own, issuer, 825).add_extension(
        x509.BasicConstraints(False, None), True
    )
    server = server.add_extension(x509.SubjectAlternativeName(list(map(host, hosts))), False)
    server = server.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
    server = server.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), False
    )
    write("server.pem", server.sign(root, hashes.SHA256()).public_bytes(PEM))
    plain = serialization.NoEncryption()
    write(
        "server.key", own.private_bytes(PEM, serialization.PrivateFormat.PKCS8, plain), secret=True
    )


def member(name: str) -> None:
    key, plain = ec.generate_private_key(ec.SECP384R1()), serialization.NoEncryption()
    write(name, key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, plain), secret=True)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    write(f"{name}.pub", public)


def main(words: list[str]) -> None:
    hosts, _, members = (
        (words[: words.index("--")], None, words[words.index("--") + 1 :])
        if "--" in words
        else (words, None, [])
    )
    KEYS.mkdir(mode=0o700, exist_ok=True)
    if not (KEYS / "ca.crt").exists():
        authority_and_server(hosts or ["localhost", "127.0.0.1"])
    for name in members:
        if not (KEYS / name).exists() and not (KEYS / f"{name}.pub").exists():
            member(name)


if __name__ == "__main__":
    main(sys.argv[1:])
