"""The secret of a job, with which its ranks recognise each other.

It is in a file of mode 0600, or in memory that a launcher passes on to its ranks. It is never sent over a
network: each side answers the other's challenge (`handshake`).
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError

FILE_VARIABLE = "PACELINE_SECRET_FILE"
TEXT_VARIABLE = "PACELINE_SECRET"
MEMORY_VARIABLE = "PACELINE_SECRET_FD"
"""The number of a file descriptor; the number is no secret."""
_LEAST_BYTES = 16
_MOST_BYTES = 4096
_MADE_BYTES = 32
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_HINT = (
    "openssl rand -hex 32 > job.secret && chmod 600 job.secret, the same file on all hosts, and "
    f"{FILE_VARIABLE}=job.secret for all ranks"
)


@dataclass(frozen=True)
class JobSecret:
    """A secret, and where it comes from.

    Attributes:
        key: The bytes; empty if there is no secret.
        source: In words, for messages.
    """

    key: bytes
    source: str

    def __repr__(self) -> str:  # an error's traceback must not show it
        return f"JobSecret(source={self.source!r})"


NO_SECRET = JobSecret(b"", "no secret")

_inherited = b""  # this process's secret, kept here because its program may close unknown descriptors


def find_secret(environ: Mapping[str, str] | None = None) -> JobSecret:
    """The secret of this process's job; NO_SECRET if it has none.

    A file that the user names in PACELINE_SECRET_FILE comes before the text of PACELINE_SECRET. Both come
    before a secret that `paceline run`, `spawn` or `paceline.ray.run` has made; programs that a rank starts
    do not inherit that one.

    Example:
        >>> find_secret({"PACELINE_SECRET": "correct horse battery staple"}).source
        'PACELINE_SECRET'
    """
    global _inherited
    variables = os.environ if environ is None else environ
    secret = users_secret(variables)
    if secret is not NO_SECRET:
        return secret
    key = _read_inherited(variables.get(MEMORY_VARIABLE, ""))
    if environ is None:
        _inherited = key = key or _inherited
    return JobSecret(key, MEMORY_VARIABLE) if key else NO_SECRET


def adopt_secret(secret: JobSecret) -> None:
    """Use the secret that this process's launcher has passed to it, unless the user names one here."""
    global _inherited
    _inherited = secret.key


def users_secret(environ: Mapping[str, str]) -> JobSecret:
    """The secret that the user gave; NO_SECRET if there is none. Raises like `find_secret`."""
    if path := environ.get(FILE_VARIABLE, ""):
        return _checked(_read_private(path), f"{FILE_VARIABLE}={path}")
    if text := environ.get(TEXT_VARIABLE, ""):
        return _checked(os.fsencode(text), TEXT_VARIABLE)  # its bytes, even if they are not UTF-8
    return NO_SECRET


def new_secret(source: str) -> JobSecret:
    """A new random secret."""
    return JobSecret(os.urandom(_MADE_BYTES).hex().encode(), source)


def make_secret() -> int:
    """Write a new secret into anonymous memory that cannot be changed any more; returns a close-on-exec
    descriptor.
    """
    fd = os.memfd_create("paceline-secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, new_secret(MEMORY_VARIABLE).key)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_inherited(text: str) -> bytes:
    fd = int(text) if text.isascii() and text.isdigit() else -1
    try:
        if fd < 0 or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            return b""
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)  # programs that this one starts do not need it
        key = os.pread(fd, _MOST_BYTES, 0)
    except (OSError, OverflowError):  # another file, or none: the variable was inherited without the memory
        return b""
    return key if len(key) == 2 * _MADE_BYTES else b""


def _read_private(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # so that a pipe does not block
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The job's secret cannot be read from {path!r}.",
            seen=str(error),
            expected=f"the file that {FILE_VARIABLE} names, on this host",
            hint=_HINT,
            variable=FILE_VARIABLE,
        ) from None
    try:
        facts = os.fstat(fd)
        mode = stat.S_IMODE(facts.st_mode)
        if not stat.S_ISREG(facts.st_mode) or mode & 0o077 or facts.st_uid not in (os.getuid(), 0):
            raise ConfigError(
                f"The file of the job's secret is not this user's alone: {path!r}.",
                expected=f"a regular file of uid {os.getuid()} with mode 0600",
                got=f"mode {mode:04o}, uid {facts.st_uid}",
                hint=f"chmod 600 {path}; if others may have read it, make another: {_HINT}",
                variable=FILE_VARIABLE,
            )
        return os.read(fd, _MOST_BYTES)
    finally:
        os.close(fd)


def _checked(key: bytes, source: str) -> JobSecret:
    key = key.strip()
    if len(key) < _LEAST_BYTES:
        raise ConfigError(
            f"The job's secret is too short: {source.partition('=')[0]}.",
            expected=f"{_LEAST_BYTES} bytes or more that no other user can guess",
            got=f"{len(key)} bytes",
            hint=_HINT,
            variable=source.partition("=")[0],
        )
    return JobSecret(key, source)
