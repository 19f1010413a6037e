"""Several hosts on one machine: each rank says on which one it is; ranks of two hosts share no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from paceline.rendezvous import shared_memory


def be_on_host(number: int) -> None:
    """Have this rank tell others, from now on, that it is on that host."""
    shared_memory._host_hint = lambda: (f"host {number}", shared_memory._Obstacle())


@contextlib.contextmanager
def on_host(number: int) -> Iterator[None]:
    """Within it, this rank is on that host."""
    before = shared_memory._host_hint
    be_on_host(number)
    try:
        yield
    finally:
        shared_memory._host_hint = before
