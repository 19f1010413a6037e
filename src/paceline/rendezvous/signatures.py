"""Signs the values that ranks write into a framework's store, which is open to every process that reaches its
port.

Each value carries a code over itself and its key, made with the job's secret. Values without a code, or with
a wrong one, are ignored. Counters are not signed: a process that changes them can make ranks wait, up to
their deadline.
"""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass, field
from typing import Protocol

from paceline.rendezvous.messages import join_payloads

_CODE_BYTES = 16
_NO_CODE = b"-"
_PURPOSE = b"paceline: a value in a store, 1"

LOSSLESS = "surrogateescape"  # an unknown peer's bytes need not be UTF-8

_log = logging.getLogger("paceline")


class ForeignValueError(ValueError):
    """A value that no rank with this rank's secret has written.

    Attributes:
        value: The unsigned value; for messages only.
        reason: Why it is foreign, as a predicate of the process that wrote it ("has no secret, ..."); "" if
            it is nothing that Paceline writes.
    """

    def __init__(self, value: bytes, reason: str) -> None:
        super().__init__(reason or "something else than Paceline writes")
        self.value, self.reason = value, reason


@dataclass(frozen=True)
class Signatures:
    """Makes and checks the codes of one job.

    Attributes:
        secret: The job's secret; if it is empty, values carry no code, and those of every rank are accepted.
        scope: The group that a key belongs to; it separates equal keys of different groups. The key must
            identify the attempt of a restarted job, and the rank, unless the value does.

    Example:
        Signatures(b"secret of the job", "world").sign("place/1", b"node0/4711") is read by an equal object of
        another rank as b"node0/4711". At another key, or after a change, reading it raises.
    """

    secret: bytes = field(repr=False)
    scope: str

    def sign(self, key: str, value: bytes) -> bytes:
        """The code in ASCII, a space, and the value."""
        return (self._code(key, value) if self.secret else _NO_CODE) + b" " + value

    def read(self, key: str, raw: bytes) -> bytes:
        """The value. Raises ForeignValueError if no rank of this job wrote it at this key."""
        code, space, value = raw.partition(b" ")
        if not space or (code != _NO_CODE and len(code) != 2 * _CODE_BYTES):
            raise ForeignValueError(raw, "")
        if not self.secret:
            if code == _NO_CODE:
                return value
            raise ForeignValueError(value, "has a secret, and this rank has none")
        if code == _NO_CODE:
            raise ForeignValueError(value, "has no secret, and this rank has one")
        if not hmac.compare_digest(code, self._code(key, value)):
            raise ForeignValueError(value, "has another secret than this rank")
        return value

    def _code(self, key: str, value: bytes) -> bytes:
        words = join_payloads([_PURPOSE, self.scope.encode(), key.encode(), value])
        return hmac.digest(self.secret, words, "sha256")[:_CODE_BYTES].hex().encode()


class KeyStore(Protocol):
    """A framework's store: text by key, for all ranks.

    Both calls may raise RuntimeError (the store is gone), and may block forever if the process that serves
    the store is stopped.
    """

    def write(self, key: str, value: str) -> None: ...

    def read(self, key: str) -> str | None:
        """The text at `key`; None if there is none yet. Does not wait for it."""


class SignedKeyStore:
    """A `KeyStore` in which text of unknown peers counts as not written; the first such text is reported in
    a warning.
    """

    def __init__(self, key_store: KeyStore, signatures: Signatures) -> None:
        self._key_store, self._signatures = key_store, signatures
        self._has_warned = False

    def write(self, key: str, value: str) -> None:
        """See `KeyStore.write`."""
        self._key_store.write(key, self._signatures.sign(key, value.encode()).decode())

    def read(self, key: str) -> str | None:
        """See `KeyStore.read`."""
        text = self._key_store.read(key)
        if text is None:
            return None
        try:
            return self._signatures.read(key, text.encode(errors=LOSSLESS)).decode(errors=LOSSLESS)
        except ForeignValueError as error:
            self._warn(key, error)
            return None

    def _warn(self, key: str, error: ForeignValueError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "paceline: what the store of this job holds at %s is ignored: %s",
                key,
                f"the process that wrote it {error.reason}" if error.reason else error,
            )
