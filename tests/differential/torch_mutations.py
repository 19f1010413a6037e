"""Bugs that are injected into a rank, to test that the fuzzer finds them."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from paceline.reducer.backward.backward_sync import BackwardSync
from paceline.torch.backward import gradients
from paceline.torch.communicator.calls import GroupCalls

_is_in = False


def put_in(name: str, rank: int) -> None:
    """Inject the bug; it stays."""
    global _is_in
    if not _is_in:
        _is_in = True
        MUTATIONS[name](rank)


def _skip_parameter(rank: int) -> None:
    """The first parameter keeps this rank's own gradient, as if it had never been averaged."""
    real = gradients.pointer_hook

    def make(state: Any, index: int, name: str, view: torch.Tensor, reducer: Any, dtype: Any) -> Any:
        if index:
            return real(state, index, name, view, reducer, dtype)
        kept = real(state, index, name, view, reducer, dtype)

        def hand_over(parameter: torch.Tensor) -> None:
            true = parameter.grad.clone()
            kept(parameter)
            # After the end of the backward, which was queued before.
            Variable._execution_engine.queue_callback(lambda: parameter.grad.data.copy_(true))

        return hand_over

    gradients.pointer_hook = make


def _wrong_mean_on_one(rank: int) -> None:
    """The mean is divided by another number on rank 1."""
    _after_backward(lambda tensors: tensors[0].grad.mul_(0.5) if rank == 1 else None)


def _wrong_mean_everywhere(rank: int) -> None:
    """Every rank has the same wrong mean."""
    _after_backward(lambda tensors: tensors[-1].grad.mul_(1.02))


def _raise_alone(rank: int) -> None:
    """Rank 1 raises at the end of a backward that is good for the others, in every backward but the first."""
    count = 0

    def check(tensors: Any) -> None:
        nonlocal count
        count += 1
        if rank == 1 and count > 1:
            raise RuntimeError("rank 1 alone")

    _after_backward(check)


def _hang(rank: int) -> None:
    """Rank 1 never comes back from its first backward."""
    import threading

    _after_backward(lambda tensors: threading.Event().wait() if rank == 1 else None)


def _die(rank: int) -> None:
    """Rank 1 dies of a signal."""
    import os
    import signal

    _after_backward(lambda tensors: os.kill(os.getpid(), signal.SIGSEGV) if rank == 1 else None)


def _torch_alone(rank: int) -> None:
    """torch's own DDP does not average."""
    real = DistributedDataParallel.forward

    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        with self.no_sync():
            return real(self, *inputs, **options)

    DistributedDataParallel.forward = forward  # type: ignore[method-assign]


def _after_backward(change: Any) -> None:
    real = BackwardSync._write_back_means

    def write_back_means(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        with torch.no_grad():
            change([p for p in self._tensors.trainable if p.grad is not None])

    BackwardSync._write_back_means = write_back_means  # type: ignore[method-assign]


def _streams_do_not_wait(rank: int) -> None:
    """Work after a collective on a device does not wait for it."""
    real = GroupCalls.wait

    def wait(
        calls: GroupCalls, work: Any, what: Any, *, on_host: bool = True, on_device: bool = False
    ) -> None:
        if on_host:
            real(calls, work, what, on_host=True, on_device=on_device)

    GroupCalls.wait = wait  # type: ignore[method-assign]


MUTATIONS = {
    "streams do not wait": _streams_do_not_wait,
    "skip a parameter": _skip_parameter,
    "wrong mean on one rank": _wrong_mean_on_one,
    "wrong mean everywhere": _wrong_mean_everywhere,
    "raise alone": _raise_alone,
    "hang": _hang,
    "die": _die,
    "torch averages nothing": _torch_alone,
}
