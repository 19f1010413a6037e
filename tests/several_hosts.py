"""Simulates several hosts on one machine: each rank declares its host; ranks of two hosts share no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from paceline.reducer.between_hosts import routes
from paceline.reducer.between_hosts.message_headers import Begin, Message, Transfer
from paceline.rendezvous import shared_memory
from tests.harness.rank_main import after_test


def be_on_host(number: int) -> None:
    """Make this rank report, from now on, that it is on that host."""
    after_test(lambda: setattr(shared_memory, "_host_hint", _usual_host_hint))
    shared_memory._host_hint = lambda: (f"host {number}", shared_memory.SharedMemoryFailure())


_usual_host_hint = shared_memory._host_hint


@contextlib.contextmanager
def on_host(number: int) -> Iterator[None]:
    """A context in which this rank is on that host."""
    before = shared_memory._host_hint
    be_on_host(number)
    try:
        yield
    finally:
        shared_memory._host_hint = before


def send_values(*, of_small_models: bool) -> None:
    """Send gradients of one-rank hosts between hosts uncopied, however small they are; or as usual.

    For models that are wrapped from now on; the same on all ranks.
    """
    after_test(lambda: setattr(routes, "VALUES_BYTES", _USUAL_VALUES_BYTES))
    routes.VALUES_BYTES = 1 if of_small_models else _USUAL_VALUES_BYTES


_USUAL_VALUES_BYTES = routes.VALUES_BYTES


def noting(
    prepare: Callable[..., Begin], note: Callable[[Message, Transfer], object]
) -> Callable[..., Begin]:
    """Replaces a transport's `sending` or `receiving`, and reports each message that is begun."""

    def prepared(transport: Any, host: int, message: Message, tag: int) -> Begin:
        begin = prepare(transport, host, message, tag)

        def noted() -> Transfer:
            transfer = begin()
            note(message, transfer)
            return transfer

        return noted

    return prepared
