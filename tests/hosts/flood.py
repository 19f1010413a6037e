"""A foreign process that connects to each listening socket of its network namespace: `flood.py UID`.

For `test_floods.py`. It becomes user UID, finds abstract Unix sockets and TCP ports as any user can, and
connects as often as the listening sockets accept. Each connection stays open and sends nothing; beyond
MOST_HELD connections, the oldest ones are closed. The process runs until it is killed.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Iterator

MOST_HELD = 3000
AT_ONCE = 64
PAUSE_S = 0.0005
_LISTENS = "00010000"
_TCP_LISTENS = "0A"


def listeners() -> Iterator[tuple[int, object]]:
    """Yield the family and address of each listening socket."""
    with open("/proc/net/unix") as file:
        for fields in map(str.split, file):
            if len(fields) > 7 and fields[7].startswith("@") and fields[3] == _LISTENS:
                yield socket.AF_UNIX, "\0" + fields[7][1:]
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            for port in re.findall(rf": [0-9A-F]+:([0-9A-F]+) [0-9A-F:]+ {_TCP_LISTENS} ", file.read()):
                yield socket.AF_INET, ("127.0.0.1", int(port, 16))


def main() -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    os.setuid(int(sys.argv[1]))
    held: collections.deque[socket.socket] = collections.deque()
    print("ready", flush=True)
    while True:
        for family, address in listeners():
            for _ in range(AT_ONCE):
                caller = socket.socket(family, socket.SOCK_STREAM)
                caller.setblocking(False)
                try:
                    with contextlib.suppress(BlockingIOError if family == socket.AF_INET else ()):
                        caller.connect(address)
                except OSError:
                    caller.close()
                    break
                held.append(caller)
        while len(held) > MOST_HELD:
            held.popleft().close()
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
