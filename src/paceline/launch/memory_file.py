"""Anonymous memory files that children inherit: no name, no disk, gone with the last one that holds it."""

from __future__ import annotations

import os


def write_memory_file(name: str, data: bytes) -> int:
    """The descriptor of a new file that holds `data`; `name` is what /proc shows."""
    fd = os.memfd_create(name)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return fd


def read_memory_file(fd: int) -> bytes:
    """All of the file. Its position is shared with whoever inherited it, and left alone."""
    data = bytearray()
    while piece := os.pread(fd, 1 << 30, len(data)):  # Linux reads 2 GiB at most at once
        data += piece
    return bytes(data)
