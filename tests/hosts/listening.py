"""One rank that only holds a control channel: `listening.py FOLDER WHAT`.

The ranks exchange their addresses through FOLDER, which all hosts share here. Each rank prints lines of an
event and its time, by a clock that all hosts share too, and its error after the last line. Half a second
after the channel has formed, rank GUILTY does WHAT: kill, raise, leave, or nothing. If WHAT is "ask", each
rank asks for the state of the others when a file "ask" appears in FOLDER, and ends when a file "end" appears.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

from paceline.health.control_channel import ControlChannel, form_channel
from paceline.health.handshake import Facts
from paceline.rendezvous.secret import find_secret

GUILTY = 3
LISTENS_S = 60.0


class FolderExchange:
    """An `Exchange` through files."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._folder, self._round = folder, 0

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        self._round += 1
        own = self._folder / f"{self._round}-{self.rank}"
        own.with_suffix(".part").write_bytes(payload)
        own.with_suffix(".part").rename(own)
        paths = [self._folder / f"{self._round}-{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + timeout_s
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, paths
            time.sleep(0.01)
        return [path.read_bytes() for path in paths]


def say(event: str, text: str = "") -> None:
    print(f"{event} {time.monotonic():.3f}\n{text}", end="", flush=True)


def facts_of(layout: tuple[int, ...], secret: bytes) -> tuple[list[list[int]], Facts]:
    """The ranks of each host, and this rank's report of itself; `layout` is the host of each rank."""
    rank = int(os.environ["RANK"])
    hosts = [[r for r, host in enumerate(layout) if host == each] for each in sorted(set(layout))]
    facts = Facts(
        rank=rank,
        world_size=len(layout),
        host=socket.gethostname(),
        pid=os.getpid(),
        local_ranks=hosts[layout[rank]],
        paceline="0",
        framework="none",
        job="",
        generation="0",
        clock_s=time.time(),
        has_secret=bool(secret),
    )
    return hosts, facts


def form(folder: Path, layout: tuple[int, ...]) -> ControlChannel:
    """Form the channel of this rank; `layout` is the host of each rank."""
    secret = find_secret()
    hosts, facts = facts_of(layout, secret.key)
    exchange = FolderExchange(folder, facts.rank, facts.world_size)
    return form_channel(exchange, facts, hosts, secret.key, 60.0)


def until_there(path: Path) -> None:
    until_s = time.monotonic() + LISTENS_S
    while not path.exists():
        assert time.monotonic() < until_s, path
        time.sleep(0.01)


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    layout = tuple(int(host) for host in os.environ["LAYOUT"].split(","))
    channel = form(folder, layout)
    is_encrypted = all(each.is_encrypted for each in channel._connections.values())
    say("connected", "encrypted\n" if is_encrypted else "in clear\n")
    if what == "ask":
        until_there(folder / "ask")
        say("asked", f"{channel.late()}\n")
        until_there(folder / "end")
        return
    if what != "nothing" and int(os.environ["RANK"]) == GUILTY:
        time.sleep(0.5)
        say("guilty")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raise":
            raise ValueError("the cause")  # sys.excepthook reports it
        return
    error = channel.wait(LISTENS_S)
    say("noticed" if error else "nothing", f"{error}\n")
    with contextlib.suppress(OSError):
        say("used", f"{sum(os.times()[:2]):.3f}\n")


if __name__ == "__main__":
    main()
