"""Make certificates and keys: `python keys.py HOST... -- MEMBER...`, once, at the server.

Writes keys/ca.crt (for everybody), keys/server.pem and keys/server.key (for the server), and a pair
of keys for each member: keys/NAME, which is secret, and keys/NAME.pub. Give each member ca.crt and
its own key in a way you trust, and delete that key here. Files that exist stay as they are.

keys/ca.key is secret, too: whoever has it can pose as the server. Only `fedproto deploy renew`
needs it, so it may be kept elsewhere until then.

A member can make its own keys instead: `python keys.py --only-keys -- NAME` on its own machine. It
sends keys/NAME.pub to the server, and gets ca.crt from there.
"""

import argparse
import datetime
import ipaddress
import os
import re
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

KEYS = Path(__file__).parent / "keys"
NOW = datetime.datetime.now(datetime.UTC)
PEM = serialization.Encoding.PEM
OPENSSH = serialization.Encoding.OpenSSH
UNENCRYPTED = serialization.NoEncryption()
CA_NAME = "federation CA"
CA_DAYS = 3650
SERVER_DAYS = 825
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}")
MEMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: By which the server's own processes reach it.
OWN_HOSTS = ("localhost", "127.0.0.1")
#: Names of files beside the members' keys.
TAKEN = ("ca.crt", "ca.key", "server.key", "server.pem")


def main(words: list[str]) -> None:
    """Make what does not exist yet of the certificates and the members' keys."""
    hosts = words
    members: list[str] = []
    if "--" in words:
        place = words.index("--")
        hosts = words[:place]
        members = words[place + 1 :]
    parser = argparse.ArgumentParser(
        usage="python keys.py [--only-keys] [HOST ...] [-- MEMBER ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "hosts",
        metavar="HOST",
        nargs="*",
        default=["localhost", "127.0.0.1"],
        help="names and addresses of the server (default: localhost 127.0.0.1)",
    )
    parser.add_argument(
        "--only-keys", action="store_true", help="make members' keys, and no certificates"
    )
    given = parser.parse_args(hosts)
    for host in given.hosts:
        if not is_host(host):
            parser.error(f"{host!r} is neither a host name nor an address")
    for name in members:
        if not MEMBER.fullmatch(name) or name in TAKEN or name.endswith(".pub"):
            parser.error(
                f"{name!r} cannot be the name of a member: letters, digits, '.', '_' and '-' are "
                "accepted, other than the names of key files"
            )
    make_missing_files(given.hosts, members, with_certificates=not given.only_keys)


def make_missing_files(hosts: list[str], members: list[str], with_certificates: bool) -> None:
    KEYS.mkdir(mode=0o700, exist_ok=True)
    if with_certificates:
        if (KEYS / "ca.crt").exists():
            print("keys/ca.crt exists, so no certificate is made")
        else:
            make_certificates(hosts)
    for name in members:
        if (KEYS / name).exists() or (KEYS / f"{name}.pub").exists():
            print(f"{name} has keys already")
        else:
            make_member_keys(name)


def is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return HOST.fullmatch(text) is not None
    return True


def make_certificates(hosts: list[str]) -> None:
    """Make an authority, and the server's certificate for these names and addresses."""
    root_key = ec.generate_private_key(ec.SECP256R1())
    write_authority(root_key)
    server_key = ec.generate_private_key(ec.SECP256R1())
    write_server(server_key, root_key, hosts)
    write_private("ca.key", root_key)
    write_private("server.key", server_key)


def write_private(name: str, key: ec.EllipticCurvePrivateKey) -> None:
    content = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, UNENCRYPTED)
    write(name, content, secret=True)


def write_authority(root_key: ec.EllipticCurvePrivateKey) -> None:
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(root_key.public_key())
    builder = begin_certificate(CA_NAME, root_key, CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(identifier, critical=False)
    write("ca.crt", builder.sign(root_key, hashes.SHA256()).public_bytes(PEM))


def write_server(
    server_key: ec.EllipticCurvePrivateKey, root_key: ec.EllipticCurvePrivateKey, hosts: list[str]
) -> None:
    all_hosts = dict.fromkeys([*hosts, *OWN_HOSTS])
    names = x509.SubjectAlternativeName([parse_host(host) for host in all_hosts])
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key())
    builder = begin_certificate("federation server", server_key, SERVER_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
    builder = builder.add_extension(names, critical=False)
    builder = builder.add_extension(usage, critical=False)
    builder = builder.add_extension(authority, critical=False)
    write("server.pem", builder.sign(root_key, hashes.SHA256()).public_bytes(PEM))


def begin_certificate(
    name: str, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    """Return the certificate of a key, issued by our authority, still without extensions."""
    builder = x509.CertificateBuilder(
        issuer_name=make_name(CA_NAME),
        subject_name=make_name(name),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
    )
    builder = builder.not_valid_before(NOW - datetime.timedelta(minutes=5))
    return builder.not_valid_after(NOW + datetime.timedelta(days))


def make_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def parse_host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def make_member_keys(name: str) -> None:
    """Make a member's private key, and its public one with the ending .pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, UNENCRYPTED)
    write(name, private, secret=True)
    public = key.public_key().public_bytes(OPENSSH, serialization.PublicFormat.OpenSSH)
    write(f"{name}.pub", public)


def write(name: str, content: bytes, secret: bool = False) -> None:
    """Write a new file; only its owner can read a secret one."""
    mode = 0o600 if secret else 0o644
    descriptor = os.open(KEYS / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    note = ", which is secret" if secret else ""
    print(f"written: keys/{name}{note}")


if __name__ == "__main__":
    main(sys.argv[1:])
