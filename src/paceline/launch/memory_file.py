"""Anonymous files in memory that children inherit: no name, no disk, gone with the last one that holds it."""

from __future__ import annotations

import errno
import os
import tempfile

from paceline.errors import ConfigError
from paceline.rendezvous.limits import explain

_PIECE_BYTES = 1 << 24
_REFUSED = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})


def write_memory_file(name: str, data: bytes) -> int:
    fd = -1
    try:
        fd = _open(name)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        likely, hint = explain(error.errno or 0)
        if not likely:
            raise
        raise ConfigError(
            f"The ranks can't be given what they are to do: {len(data)} bytes in a file in memory.",
            seen=str(error),
            likely=likely,
            hint=hint,
        ) from error
    return fd


def _open(name: str) -> int:
    try:
        return os.memfd_create(name)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
    # A kernel or a seccomp filter without memfd_create: a file that has no name, or loses it at once.
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


def read_memory_file(fd: int) -> bytes:
    """Its position is shared with whoever inherited it, and left alone."""
    data, size = bytearray(), os.fstat(fd).st_size
    # In pieces, for each of which Python takes memory before it reads: addresses may be limited.
    while piece := os.pread(fd, min(_PIECE_BYTES, size - len(data)), len(data)):
        data += piece
    return bytes(data)
