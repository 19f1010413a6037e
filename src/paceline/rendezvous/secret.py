"""The secret of a job: what its ranks know and nobody else, by which they recognise each other.

Its one idea: it lies where only this user can read it, in a file of mode 0600, and crosses no network; each
side shows that it knows it by answering the other's challenge (see `handshake`). May import errors.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError

FILE_VARIABLE = "PACELINE_SECRET_FILE"
TEXT_VARIABLE = "PACELINE_SECRET"
_LEAST_BYTES = 16
_MOST_BYTES = 4096
_HINT = (
    "openssl rand -hex 32 > job.secret && chmod 600 job.secret, the same file on all hosts, and "
    f"{FILE_VARIABLE}=job.secret for all ranks"
)


@dataclass(frozen=True)
class JobSecret:
    """A secret, and where it is from.

    Attributes:
        key: The bytes; empty: there is none.
        source: In words, for messages.
    """

    key: bytes
    source: str

    def __repr__(self) -> str:  # an error's traceback must not show it
        return f"JobSecret(source={self.source!r})"


NO_SECRET = JobSecret(b"", "no secret")


def find_secret(environ: Mapping[str, str] | None = None) -> JobSecret:
    """The secret of this process's job; NO_SECRET if nobody gave it one.

    A file that the user names in PACELINE_SECRET_FILE comes before the text of PACELINE_SECRET.

    Raises:
        ConfigError: What the user named cannot be read, others can read it, or it is too short.

    Example:
        >>> find_secret({"PACELINE_SECRET": "correct horse battery staple"}).source
        'PACELINE_SECRET'
    """
    environ = os.environ if environ is None else environ
    if path := environ.get(FILE_VARIABLE, ""):
        return _checked(_read_private(path), f"{FILE_VARIABLE}={path}")
    if text := environ.get(TEXT_VARIABLE, ""):
        return _checked(text.encode(), TEXT_VARIABLE)
    return NO_SECRET


def _read_private(path: str) -> bytes:
    """The content of a file that only this user can read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # which does not wait at a pipe
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
            expected=f"{_LEAST_BYTES} bytes or more, that nobody can guess",
            got=f"{len(key)} bytes",
            hint=_HINT,
            variable=source.partition("=")[0],
        )
    return JobSecret(key, source)
