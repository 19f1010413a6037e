"""Bugs that are injected into a rank, to test that the fuzzer finds them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import paddle

from paceline.paddle.backward.gradients import Gradients
from paceline.paddle.communicator.flat_buckets import PaddleTransport
from paceline.paddle.ddp import parallel
from paceline.reducer.backward.backward_sync import BackwardSync
from paceline.reducer.buffers import BufferSync

_is_in = False


def put_in(name: str, rank: int) -> None:
    """Inject the bug; it stays."""
    global _is_in
    if not _is_in:
        _is_in = True
        MUTATIONS[name](rank)


def _wrong_mean_on_one(rank: int) -> None:
    """The mean is another number on rank 1."""
    _after_backward(lambda tensors: tensors[0].grad.scale_(0.5) if rank == 1 else None)


def _wrong_mean_everywhere(rank: int) -> None:
    """Every rank has the same wrong mean."""
    _after_backward(lambda tensors: tensors[-1].grad.scale_(1.02))


def _hang(rank: int) -> None:
    """Rank 1 never comes back from its first backward."""
    _after_backward(lambda tensors: threading.Event().wait() if rank == 1 else None)


def _die(rank: int) -> None:
    """Rank 1 dies of a signal."""
    _after_backward(lambda tensors: os.kill(os.getpid(), signal.SIGSEGV) if rank == 1 else None)


def _wrong_sum_over_a_group(rank: int) -> None:
    """A rank passes wrong values to paddle.distributed."""
    real = PaddleTransport.launch

    def launch(self: Any, bucket: int, scale: float) -> Any:
        return real(self, bucket, 1.02 * scale)

    PaddleTransport.launch = launch  # type: ignore[method-assign]


def _wrong_cast(rank: int) -> None:
    """Means that come in another dtype lose a quarter."""
    real = Gradients._in_own_dtype

    def in_own_dtype(self: Any, index: int) -> paddle.Tensor:
        mean, place = real(self, index), self._places[index]
        return mean if mean is place else 0.75 * mean

    Gradients._in_own_dtype = in_own_dtype  # type: ignore[method-assign]


def _join_counts_ranks_with_data(rank: int) -> None:
    """Within join(), the mean is that of the ranks with data, as after finish()."""
    real = parallel.joining

    def joining(
        backward_sync: Any, *, divide_by_all: bool, throws: bool
    ) -> contextlib.AbstractContextManager[None]:
        return real(backward_sync, divide_by_all=False, throws=throws)

    parallel.joining = joining


def _reports_no_writes(rank: int) -> None:
    """No rank reports that its program has written to a buffer between two steps."""
    BufferSync.has_writes = False  # type: ignore[method-assign, assignment]


def _after_backward(change: Callable[[Any], Any]) -> None:
    real = BackwardSync._write_back_means

    def write_back_means(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        with paddle.no_grad():
            change([p for p in self._tensors.trainable if p.grad is not None])

    BackwardSync._write_back_means = write_back_means  # type: ignore[method-assign]


MUTATIONS = {
    "wrong mean on one rank": _wrong_mean_on_one,
    "wrong mean everywhere": _wrong_mean_everywhere,
    "hang": _hang,
    "die": _die,
    "wrong sum over a group": _wrong_sum_over_a_group,
    "wrong cast": _wrong_cast,
    "join counts who has data": _join_counts_ranks_with_data,
    "reports no writes": _reports_no_writes,
}
