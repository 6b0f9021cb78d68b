"""Renewing the server's certificate: what is written, what is refused, and who sees it when."""

import datetime
import ssl
import stat
from pathlib import Path

import pytest
from helpers.certificates import (
    make_expired,
    make_keys,
    make_server_context,
    see_certificate,
    tls_server,
)
from helpers.command_line import fedproto

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fedproto.deploy import scaffold
from fedproto.deploy.certificates import CurrentCertificate, renew_certificate
from fedproto.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A federation whose server's certificate ended yesterday."""
    folder = tmp_path / "fed"
    scaffold.init(folder, ["a", "b"], "digits", ["0", "1"])
    make_keys(folder, days=-1)
    return folder


def read(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "keys" / "server.pem").read_bytes())


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "keys").iterdir()}


def names_of(certificate: x509.Certificate) -> list[str]:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def test_a_renewed_certificate_says_what_the_old_one_said_for_longer(folder: Path) -> None:
    old, files = read(folder), read_all(folder)
    ends = renew_certificate(folder, [])
    new = read(folder)
    assert (new.subject, new.issuer, new.public_key()) == (
        old.subject,
        old.issuer,
        old.public_key(),
    )
    assert list(new.extensions) == list(old.extensions)
    assert new.serial_number != old.serial_number
    now = datetime.datetime.now(datetime.UTC)
    assert old.not_valid_after_utc < now and new.not_valid_before_utc < now
    assert ends == new.not_valid_after_utc and (ends - now).days in (824, 825)
    assert {name for name, content in read_all(folder).items() if content != files.get(name)} == {
        "server.pem"
    }
    mode = stat.S_IMODE((folder / "keys" / "server.pem").stat().st_mode)
    assert mode == 0o644, "the server's user reads it, whoever has renewed it"


def test_members_refuse_an_expired_certificate_and_accept_the_renewed_one(folder: Path) -> None:
    with (
        tls_server(make_server_context(folder)) as port,
        pytest.raises(ssl.SSLCertVerificationError, match="expired"),
    ):
        see_certificate(folder, port)
    renew_certificate(folder, [])
    with tls_server(make_server_context(folder)) as port:
        see_certificate(folder, port)


def test_a_certificate_can_be_renewed_for_other_addresses(folder: Path) -> None:
    renew_certificate(folder, ["new.hospital.example", "10.0.0.7"])
    expected = ["new.hospital.example", "10.0.0.7", "localhost", "127.0.0.1"]
    assert names_of(read(folder)) == expected
    with (
        tls_server(make_server_context(folder)) as port,
        pytest.raises(ssl.SSLCertVerificationError, match="mismatch"),
    ):
        see_certificate(folder, port, "old.hospital.example")


def replace_by_another(folder: Path, name: str) -> None:
    """Take a file from a federation with other keys."""
    other = folder.parent / "other"
    scaffold.init(other, ["a", "b"], "digits", ["0", "1"])
    make_keys(other)
    (folder / "keys" / name).write_bytes((other / "keys" / name).read_bytes())


def test_what_does_not_fit_together_is_refused_and_nothing_written(folder: Path) -> None:
    """The authority is another one: members would not believe what it issues."""
    replace_by_another(folder, "ca.key")
    before = read_all(folder)
    with pytest.raises(ConfigError, match=r"ca\.key is not the key of .*ca\.crt"):
        renew_certificate(folder, [])
    assert read_all(folder) == before


def test_a_certificate_of_somebody_elses_authority_is_not_renewed(folder: Path) -> None:
    replace_by_another(folder, "server.pem")
    (folder / "keys" / "server.key").write_bytes(
        (folder.parent / "other" / "keys" / "server.key").read_bytes()
    )
    with pytest.raises(ConfigError, match=r"was not issued by .*ca\.crt: renew it where"):
        renew_certificate(folder, [])


def test_a_servers_key_that_is_another_one_is_refused(folder: Path) -> None:
    replace_by_another(folder, "server.key")
    with pytest.raises(ConfigError, match=r"server\.key is not the key of .*server\.pem"):
        renew_certificate(folder, [])


@pytest.mark.parametrize("content", [b"", b"not a key", None])
def test_a_missing_or_damaged_authority_is_named(content: bytes | None, folder: Path) -> None:
    path = folder / "keys" / "ca.key"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    sentence = r"ca\.key is missing: put it there" if content is None else r"ca\.key is not a priv"
    with pytest.raises(ConfigError, match=sentence):
        renew_certificate(folder, [])


def test_an_address_that_is_none_is_refused_and_nothing_written(folder: Path) -> None:
    before = read_all(folder)
    done = fedproto("deploy", "renew", folder, "zürich spital")
    assert done.code == 2 and "neither a host name nor an address" in done.err
    assert read_all(folder) == before


def test_the_command_says_until_when(folder: Path) -> None:
    done = fedproto("deploy", "renew", folder)
    assert done.code == 0, done.err
    assert f"is valid until {read(folder).not_valid_after_utc:%Y-%m-%d}" in done.out


def test_a_running_server_shows_a_renewed_certificate_at_the_next_connection(
    folder: Path,
) -> None:
    """By name, and by address, for which clients do not say whom they want."""
    paths = [folder / "keys" / "server.pem", folder / "keys" / "server.key"]
    current = CurrentCertificate(paths, lambda: make_server_context(folder))
    with tls_server(current.port_context) as port:
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            see_certificate(folder, port)
        renew_certificate(folder, [])
        for host in ("localhost", "127.0.0.1"):
            assert see_certificate(folder, port, host) == read(folder).public_bytes(Encoding.DER)
        make_expired(folder, ["localhost"])
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            see_certificate(folder, port, "127.0.0.1")


def test_a_running_server_keeps_its_certificate_while_the_file_cannot_be_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renew_certificate(folder, [])
    paths = [folder / "keys" / "server.pem", folder / "keys" / "server.key"]
    good = {path: path.read_bytes() for path in paths}
    current = CurrentCertificate(paths, lambda: make_server_context(folder))
    with tls_server(current.port_context) as port:
        shown = see_certificate(folder, port)
        paths[0].write_bytes(b"half a file")
        assert see_certificate(folder, port) == shown
        paths[0].unlink()
        assert see_certificate(folder, port) == shown
        replace_by_another(folder, "server.key")  # a new pair, of which the key came first
        paths[0].write_bytes(good[paths[0]])
        assert see_certificate(folder, port) == shown
        paths[1].write_bytes(good[paths[1]])
        renew_certificate(folder, [])
        assert see_certificate(folder, port) == read(folder).public_bytes(Encoding.DER) != shown
    assert "cannot be used, so the older ones stay" in capsys.readouterr().err
