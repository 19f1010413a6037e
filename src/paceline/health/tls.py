"""TLS 1.3 for the control channel, so that no other process can read it.

A job has a secret but no certificates. So the hub makes a certificate for this run, and the ranks receive its
fingerprint with a proof that only the secret can make (`handshake`). The ranks need no certificate: each
frame carries a code made with the secret. This module touches no socket.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import logging
import os
import shutil
import ssl
import subprocess
from dataclasses import dataclass, field

_MAKE_WITHIN_S = 20.0
_PIECE_BYTES = 1 << 16
# Used instead of the installation's own file, which may be missing or contain other rules.
_OPENSSL_CONF = "[req]\ndistinguished_name = name\n[name]\n"
_COMMAND = (
    "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout - -subj /CN=paceline "
    "-days 3650 -config /dev/stdin"
)
_BEGIN = "-----BEGIN CERTIFICATE-----"

_log = logging.getLogger("paceline")


@dataclass(frozen=True)
class Certificate:
    fingerprint: bytes
    context: ssl.SSLContext = field(repr=False)


@functools.cache
def own_certificate() -> Certificate | None:
    """This process's certificate, made by the program `openssl` at the first call; None if that failed.

    Starts that program, and blocks for at most 20 s.
    """
    program = shutil.which("openssl")
    if program is None:
        _warn_unencrypted("the program openssl is not installed on this host")
        return None
    try:
        made = subprocess.run(
            [program, *_COMMAND.split()],
            input=_OPENSSL_CONF,
            capture_output=True,
            text=True,
            timeout=_MAKE_WITHIN_S,
        )
        if made.returncode or _BEGIN not in made.stdout:
            _warn_unencrypted(f"{program} made no certificate: {' '.join(made.stderr.split())[:200]}")
            return None
        return _load(made.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _warn_unencrypted(f"{type(error).__name__}: {error}")
        return None


def _load(pem: str) -> Certificate:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # connections are never resumed
    fd = os.memfd_create("paceline-key", os.MFD_CLOEXEC)  # `ssl` reads keys only from files
    with open(fd, "wb") as file:
        file.write(pem.encode())
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    der = ssl.PEM_cert_to_DER_cert(pem[pem.index(_BEGIN) :])
    return Certificate(hashlib.sha256(der).digest(), context)


def _warn_unencrypted(reason: str) -> None:
    _log.warning(
        "paceline: what ranks of different hosts send each other on the control channel is authenticated, "
        "but not encrypted, because %s",
        reason,
    )


class Tls:
    """One end of an encrypted connection. Not for several threads at once."""

    def __init__(self, certificate: Certificate | None = None) -> None:
        self.is_open = False
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._held = b""  # data to be sent once the other end has the key
        context = _rank_context() if certificate is None else certificate.context
        self._ends = context.wrap_bio(self._coming, self._going, server_side=certificate is not None)

    def encrypt(self, data: bytes) -> bytes:
        """The bytes to send now. Holds `data` back if the other end has no key yet."""
        self._held += data
        if self.is_open and self._held:
            held, self._held = self._held, b""
            self._ends.write(held)
        return self._going.read()

    def decrypt(self, piece: bytes) -> bytes:
        """The plain text in these bytes. Afterwards `encrypt(b"")` may return an answer to be sent."""
        self._coming.write(piece)
        plain = b""
        try:
            with contextlib.suppress(ssl.SSLWantReadError):
                if not self.is_open:
                    self._ends.do_handshake()
                    self.is_open = True
                while part := self._ends.read(_PIECE_BYTES):
                    plain += part
        except ssl.SSLError as error:
            raise ConnectionError(f"TLS: {error.reason or error}") from None
        return plain

    def check(self, fingerprint: bytes) -> None:
        """Raise ConnectionError unless the other end's certificate has this fingerprint."""
        shown = hashlib.sha256(self._ends.getpeercert(binary_form=True) or b"").digest()
        if not hmac.compare_digest(shown, fingerprint):
            raise ConnectionError("the other end shows another certificate than it has announced")


@functools.cache
def _rank_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # `check` compares the fingerprint instead
    return context
