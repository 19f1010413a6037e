"""Anonymous files in memory that children inherit: no name, no disk, freed with their last process."""

from __future__ import annotations

import errno
import os
import tempfile

from paceline.errors import ConfigError
from paceline.rendezvous.resource_limits import explain

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
    # Without memfd_create (kernel, seccomp filter): a file without a name, or one that is unlinked at once.
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


def read_memory_file(fd: int) -> bytes:
    """The content. Leaves the position alone, which is shared with all processes that inherited the file."""
    data, size = bytearray(), os.fstat(fd).st_size
    # In chunks: Python allocates each before it reads, and address space may be limited.
    while piece := os.pread(fd, min(_PIECE_BYTES, size - len(data)), len(data)):
        data += piece
    return bytes(data)
