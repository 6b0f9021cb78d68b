"""Whether a server or a member is well, for monitoring: a list of findings, and a verdict.

It reads files and the supervisor's lock, connects to the server's port, and changes nothing.
"""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import ssl
import time
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from fedproto.core.files import is_locked, read_json
from fedproto.deploy.supervisor import STATUS_FILE
from fedproto.errors import ConfigError, RunFolderError

RESTARTS_PER_HOUR = 3  # from which on they are worth a look
DAYS_LEFT = 30  # of a certificate, from which on it should be renewed
FREE_BYTES = 10**9
ROUNDS_BEHIND = 3  # since a member's reply last counted
CONNECT_SECONDS = 5.0


class Verdict(IntEnum):
    """How something is; the exit codes of `fedproto deploy health`, in which 2 is bad input."""

    HEALTHY = 0
    DEGRADED = 1
    DOWN = 3


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    verdict: Verdict
    why: str


def judge(findings: list[Finding]) -> Verdict:
    """Return the worst of all findings."""
    return max((finding.verdict for finding in findings), default=Verdict.HEALTHY)


def check_health(path: Path, home: Path | None = None, port: int = 0) -> list[Finding]:
    """Return the findings about a server's folder, or about a member by its TOML file.

    `home` is the folder that Flower writes to, if it is not the scripts' own; `port` the server's.
    """
    if path.suffix == ".toml" and path.is_file():
        return _check_member(path, home)
    if (path / "server.sh").exists():
        return _check_server(path, home, port)
    raise ConfigError(
        f"{path} is neither a folder that `fedproto deploy init` made nor a member's TOML file"
    )


def _check_server(folder: Path, home: Path | None, port: int) -> list[Finding]:
    findings = _check_supervisor(home or folder / ".flwr")
    findings.append(_check_port(port))
    certificate = folder / "keys" / "server.pem"
    advice = f"; `fedproto deploy renew {folder}` writes a new one"
    findings += _check_certificate(certificate, "the server's certificate", advice)
    findings.append(_check_disk(folder))
    findings += _check_members(folder)
    return findings


def _check_member(path: Path, home: Path | None) -> list[Finding]:
    from fedproto.deploy.settings import read_member

    own = read_member(path, operated=True)
    home = home or path.parent / f".flwr-{path.stem}"
    findings = _check_supervisor(home)
    authority = path.parent / "keys" / "ca.crt"
    findings += _check_server_from_member(home, authority)
    findings += _check_certificate(authority, "the federation's authority")
    findings.append(_check_disk(path.parent))
    findings.append(_check_training(Path(own.state)))
    return findings


def _check_supervisor(home: Path) -> list[Finding]:
    """Say whether the supervisor and its processes run, and how often they were started again."""
    if not is_locked(home):
        return [Finding("supervisor", Verdict.DOWN, "it does not run: start its script")]
    try:
        status = read_json(home / STATUS_FILE)
        processes = {str(each["name"]): int(each["process"]) for each in status["processes"]}
        failures = [float(moment) for moment in status["failures"]]
        last_failure = str(status["last_failure"])
    except (RunFolderError, KeyError, TypeError, ValueError):
        return [Finding("supervisor", Verdict.DEGRADED, f"{home / STATUS_FILE} cannot be read")]
    findings = [_check_restarts(failures, last_failure)]
    ended = [name for name, process in processes.items() if not _lives(process)]
    if not processes or ended:
        names = ", ".join(ended) or "its processes"
        why = f"{names} ended and will be started again"
        findings.append(Finding("processes", Verdict.DOWN, why))
    else:
        findings.append(Finding("processes", Verdict.HEALTHY, f"{', '.join(processes)} run"))
    return findings


def _check_restarts(failures: list[float], last_failure: str) -> Finding:
    recent = [moment for moment in failures if time.time() - moment < 3600]
    if not recent:
        return Finding("supervisor", Verdict.HEALTHY, "nothing was restarted in the last hour")
    verdict = Verdict.DEGRADED if len(recent) >= RESTARTS_PER_HOUR else Verdict.HEALTHY
    why = f"restarts in the last hour: {len(recent)}; the last one because {last_failure}"
    return Finding("supervisor", verdict, why)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _check_port(port: int) -> Finding:
    """Say whether the server accepts connections on this machine."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=CONNECT_SECONDS):
            return Finding("port", Verdict.HEALTHY, f"{port} accepts connections")
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding("port", Verdict.DOWN, f"{port} does not accept connections: {reason}")


def _check_server_from_member(home: Path, authority: Path) -> list[Finding]:
    """Say whether a member reaches its server, and believes its certificate.

    The server's address is the one that the member was started with; nothing is said without it.
    """
    address = _find_server(home)
    if address is None:
        return []
    host, _, port = address.rpartition(":")
    try:
        trust = ssl.create_default_context(cafile=authority)
        with (
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as line,
            trust.wrap_socket(line, server_hostname=host.strip("[]")),
        ):
            return [Finding("server", Verdict.HEALTHY, f"{address} is reached, and is the server")]
    except ssl.SSLCertVerificationError as error:
        why = f"the certificate of {address} is refused: {error.verify_message}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        why = f"{address} cannot be reached: {reason}"
    return [Finding("server", Verdict.DOWN, why)]


def _find_server(home: Path) -> str | None:
    """Return the address that a member's SuperNode was started with."""
    try:
        for words in read_json(home / STATUS_FILE)["commands"]:
            if "--superlink" in words:
                return str(words[words.index("--superlink") + 1])
    except (RunFolderError, KeyError, TypeError, IndexError):
        pass
    return None


def _check_certificate(path: Path, title: str, advice: str = "") -> list[Finding]:
    """Say how long a certificate is still valid; nothing if it or its library is missing."""
    try:
        from cryptography import x509

        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except ImportError:
        return []
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a certificate"
        return [Finding("certificate", Verdict.DOWN, f"{path} cannot be read: {reason}")]
    ends = certificate.not_valid_after_utc
    days = (ends - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400
    if days < 0:
        why = f"{title} expired on {ends:%Y-%m-%d}{advice}"
        return [Finding("certificate", Verdict.DOWN, why)]
    why = f"{title} is valid until {ends:%Y-%m-%d}"
    if days < DAYS_LEFT:
        return [Finding("certificate", Verdict.DEGRADED, f"{why}{advice}")]
    return [Finding("certificate", Verdict.HEALTHY, why)]


def _check_disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    verdict = Verdict.HEALTHY if free >= FREE_BYTES else Verdict.DEGRADED
    return Finding("disk", verdict, f"{free / 1e9:.1f} GB are free")


def _check_members(folder: Path) -> list[Finding]:
    """Name the members whose reply has not counted for some rounds, and why."""
    from fedproto.deploy.status import read_status

    try:
        status = read_status(folder)
    except RunFolderError as error:
        if (folder / "server" / "server.safetensors").exists():
            return [Finding("state", Verdict.DOWN, str(error))]
        return [Finding("state", Verdict.HEALTHY, "no round has begun yet")]
    findings = [Finding("state", Verdict.HEALTHY, f"round {status['round']} is done")]
    for name, record in status["members"].items():
        behind = status["round"] - record["last_round"]
        if behind >= ROUNDS_BEHIND:
            why = f"its reply has not counted for {behind} rounds"
            if record["reason"]:
                why = f"{why}: {record['reason']}"
            findings.append(Finding(f"member {name}", Verdict.DEGRADED, why))
    return findings


def _check_training(state: Path) -> Finding:
    """Say when a member last trained."""
    from fedproto.deploy.member_checkpoint import STATE_FILE

    try:
        age = time.time() - (state / STATE_FILE).stat().st_mtime
    except FileNotFoundError:
        return Finding("state", Verdict.HEALTHY, "it has not trained yet")
    except OSError as error:
        return Finding("state", Verdict.DOWN, f"{state} cannot be read: {error.strerror}")
    return Finding("state", Verdict.HEALTHY, f"it last trained {age / 3600:.1f} h ago")


def describe(findings: list[Finding]) -> dict[str, Any]:
    """Return the verdict and the findings for JSON."""
    rows = []
    for finding in findings:
        verdict = finding.verdict.name.lower()
        rows.append({"what": finding.what, "verdict": verdict, "why": finding.why})
    return {"verdict": judge(findings).name.lower(), "findings": rows}
