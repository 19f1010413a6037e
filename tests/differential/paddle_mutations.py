"""Bugs that are put into a rank, to see that the fuzzer finds them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import paddle

from paceline.reducer.passes import Passes

_is_in = False


def put_in(name: str, rank: int) -> None:
    """Put the bug in, for good."""
    global _is_in
    if not _is_in:
        _is_in = True
        _after_pass(lambda tensors: MUTATIONS[name](tensors, rank))


def _wrong_mean_on_one(tensors: Any, rank: int) -> None:
    """The mean is another number on rank 1."""
    if rank == 1:
        tensors[0].grad.scale_(0.5)


def _wrong_mean_everywhere(tensors: Any, rank: int) -> None:
    """Every rank has the same wrong mean."""
    tensors[-1].grad.scale_(1.02)


def _hang(tensors: Any, rank: int) -> None:
    """Rank 1 never comes back from its first pass."""
    if rank == 1:
        threading.Event().wait()


def _die(tensors: Any, rank: int) -> None:
    """Rank 1 dies of a signal."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def _after_pass(change: Callable[[Any], None]) -> None:
    real = Passes._write_back_means

    def write_back_means(self: Any) -> None:
        real(self)
        with paddle.no_grad():
            change([p for p in self._tensors.trainable if p.grad is not None])

    Passes._write_back_means = write_back_means  # type: ignore[method-assign]


MUTATIONS = {
    "wrong mean on one rank": _wrong_mean_on_one,
    "wrong mean everywhere": _wrong_mean_everywhere,
    "hang": _hang,
    "die": _die,
}
