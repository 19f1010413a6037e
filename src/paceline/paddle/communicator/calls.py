"""Calls of paddle.distributed that the caller can wait for up to a deadline.

Paddle's Gloo does all its work within the call, in C++, and takes no time-out from us. So on the CPU a
separate thread makes these calls, one after another, while the caller computes or waits. Calls of NCCL, and
of the libraries of other devices, return at once; they are made in the caller's thread, and follow its
stream.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paceline import _core
from paceline.collectives.ops import DTYPE_NUMBERS, ReduceOp
from paceline.collectives.straggler_warning import DEFAULT_WARN_AFTER_S
from paceline.errors import ConfigError
from paceline.health.store_check import Work
from paceline.paddle import internals
from paceline.paddle.communicator.comm_hook import PaddleHook
from paceline.paddle.communicator.flat_buckets import PaddleTransport
from paceline.paddle.internals import GLOO_LIMIT_S
from paceline.paddle.model.parameters import dtype_name
from paceline.paddle.ops import OPS
from paceline.reducer.comm_hooks import CommHook, HookedBuckets
from paceline.reducer.communicator import ReductionOptions, pack
from paceline.reducer.framework_ops import nbytes
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.process_group_calls import ProcessGroupCalls
from paceline.reducer.process_group_waits import ProcessGroupWaits, Rows
from paceline.rendezvous.resource_limits import start_thread

_PATIENCE_S = 0.02


class GroupCalls(ProcessGroupCalls[paddle.Tensor]):
    """See `ProcessGroupCalls`; over a group of paddle.distributed, in the order in which they are begun.

    Attributes:
        backend: The communication backend, as Paddle names it.
        on_host: Whether the group moves tensors of the CPU, or those of this process's device.
    """

    _thread: _CallThread | None = None

    def __init__(self, group: Any, timeout_s: float, warn_after_s: float = DEFAULT_WARN_AFTER_S) -> None:
        group = dist.get_group() if group is None else group
        if group.rank < 0:
            raise ConfigError(
                "DataParallel: this process is not in the group.",
                got=f"rank {dist.get_rank()}, a group of ranks {group.ranks}",
                hint="wrap the model only on the ranks of the group",
            )
        self.backend: str = dist.get_backend(group)
        on_host = self.backend == "GLOO"
        fixed = f", which gives up after {GLOO_LIMIT_S:g} s, whatever timeout_s" if on_host else ""
        words, patience = f"Paddle's {self.backend} group{fixed}", (timeout_s, warn_after_s)
        self._begin_with(group, group.rank, group.nranks, words, *patience, on_host=on_host)
        if on_host and self.world_size > 1:
            self._thread = _thread_of(group)

    def _begin_with(
        self,
        group: Any,
        rank: int,
        world_size: int,
        words: str,
        timeout_s: float,
        warn_after_s: float,
        *,
        on_host: bool,
    ) -> None:
        waits = ProcessGroupWaits(
            rank, world_size, words=words, timeout_s=timeout_s, warn_after_s=warn_after_s
        )
        super().__init__(group, rank, world_size, waits)
        self.on_host = on_host
        self._device = None if on_host else internals.device_of_this_process()

    def all_reduce(self, tensor: paddle.Tensor) -> Work:
        if self.on_host and tensor.dtype == paddle.float16:
            return self._make(lambda: _WideSum(tensor, self.group))
        return self._make(lambda: dist.all_reduce(tensor, group=self.group, sync_op=False))

    def all_gather(self, out: paddle.Tensor, tensor: paddle.Tensor) -> Work:
        return self._make(lambda: dist.stream.all_gather(out, tensor, group=self.group, sync_op=False))

    def sum(self, tensor: paddle.Tensor, timeout_s: float | None = None) -> None:
        calls, what = (self if timeout_s is None else self.but(timeout_s=timeout_s)), "a sum of values"
        wire = self._to_wire(tensor)
        calls.wait(calls.begin(lambda: self.all_reduce(wire), what), what)
        if wire is not tensor:
            OPS.copy(wire, tensor)

    def prepare_broadcast(self, tensors: Sequence[paddle.Tensor]) -> Callable[[int], None]:
        def broadcast(root: int) -> None:
            with paddle.no_grad():
                wires = [(tensor, self._to_wire(_as_bytes(tensor))) for tensor in tensors if tensor.size]
                for run in pack(int(wire.size) for _, wire in wires):
                    self._broadcast([wires[index][1] for index in run], root)
                for tensor, wire in wires:
                    if wire.data_ptr() != tensor.data_ptr():
                        OPS.copy(internals.from_bytes(wire, tensor.dtype).reshape(tensor.shape), tensor)

        return broadcast

    def _broadcast(self, pieces: list[paddle.Tensor], root: int) -> None:
        packed, what = pieces[0] if len(pieces) == 1 else paddle.concat(pieces), "a broadcast of values"

        def broadcast() -> Any:
            return dist.broadcast(packed, src=self.group.ranks[root], group=self.group, sync_op=False)

        self.wait(self.begin(lambda: self._make(broadcast), what), what)
        if packed is not pieces[0]:
            begin = 0
            for piece in pieces:  # paddle.split() of Paddle 3.2 warns about torch's function of that name
                end = begin + int(piece.size)
                paddle.assign(packed[begin:end], piece)
                begin = end

    def make_transport(
        self,
        gradient_buffer: GradientBuffer[paddle.Tensor],
        options: ReductionOptions,
        hook: HookedBuckets[paddle.Tensor] | None = None,
    ) -> PaddleTransport:
        return PaddleTransport(gradient_buffer, self, options, hook)

    def make_hooked(
        self,
        hook: CommHook,
        gradient_buffer: GradientBuffer[paddle.Tensor],
        parameters: Sequence[paddle.Tensor],
        process_group: Any,
    ) -> PaddleHook:
        return PaddleHook(hook, gradient_buffer, parameters, self, process_group)

    def begin_gather(self, array: np.ndarray[Any, Any]) -> tuple[Work, Rows]:
        words = np.zeros(-(-array.nbytes // 4), np.int32)  # because not every backend moves uint8
        words.view(np.uint8)[: array.nbytes] = array.reshape(-1).view(np.uint8)
        own = self._to_wire(paddle.to_tensor(words))
        out = internals.empty_on(own.place, [self.world_size * len(words)], own.dtype)

        def rows() -> np.ndarray[Any, Any]:
            of_ranks = out.numpy().reshape(self.world_size, len(words)).view(np.uint8)
            whole = np.ascontiguousarray(of_ranks[:, : array.nbytes])
            return whole.view(array.dtype).reshape(self.world_size, *array.shape)

        return self.all_gather(out, own), rows

    def _to_wire(self, tensor: paddle.Tensor) -> paddle.Tensor:
        if tensor.place.is_cpu_place() == self.on_host:
            return tensor
        return tensor.cpu() if self.on_host else internals.copy_to(tensor, self._device)

    def _make(self, call: Callable[[], Any]) -> Work:
        if self._thread is None:
            task: Work = call()
            return task
        return self._thread.begin(call)


class LoneCalls(GroupCalls):
    """The calls of a single process: every sum is the process's own value."""

    def __init__(self, *, on_host: bool) -> None:
        self.backend, patience = "missing", (math.inf, DEFAULT_WARN_AFTER_S)
        self._begin_with(None, 0, 1, "this process alone", *patience, on_host=on_host)

    def all_gather(self, out: paddle.Tensor, tensor: paddle.Tensor) -> Work:
        paddle.assign(tensor, out)
        return _Done()

    def _make(self, call: Callable[[], Any]) -> Work:
        return _Done()


class MemoryCalls(GroupCalls):
    """The calls of the ranks of one host, in the memory that they share: complete when they return."""

    def __init__(self, core: _core.HostGroup) -> None:
        self.backend, words = "shared memory", "the memory that the ranks share"
        patience = core.timeout_s, core.warn_after_s
        self._begin_with(None, core.rank, core.world_size, words, *patience, on_host=True)
        self._core = core

    def all_reduce(self, tensor: paddle.Tensor) -> Work:
        dtype = DTYPE_NUMBERS[dtype_name(tensor.dtype)]
        self._core.all_reduce(tensor.data_ptr(), int(tensor.size), dtype, ReduceOp.SUM)
        return _Done()

    def all_gather(self, out: paddle.Tensor, tensor: paddle.Tensor) -> Work:
        self._core.all_gather(tensor.data_ptr(), out.data_ptr(), nbytes(tensor))
        return _Done()


def _as_bytes(tensor: paddle.Tensor) -> paddle.Tensor:
    whole = tensor.detach().contiguous().reshape([-1])
    # paddle.view() takes the offset of a slice in elements of the new dtype, so a slice is copied first.
    return paddle.view(whole.clone() if whole.offset else whole, "uint8")


class _Done:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _WideSum:
    def __init__(self, tensor: paddle.Tensor, group: Any) -> None:
        self._tensor = tensor
        with paddle.no_grad():
            self._wide = tensor.cast("float32")
        self._call: Work = dist.all_reduce(self._wide, group=group, sync_op=False)

    def is_completed(self) -> bool:
        return self._call.is_completed()

    def wait(self) -> None:
        self._call.wait()
        with paddle.no_grad():
            self._tensor.copy_(self._wide.cast("float16"), True)


class _ThreadCall:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = make
        self._error: BaseException | None = None
        self._is_done = threading.Event()

    def is_completed(self) -> bool:
        # Wait a little: a caller that gets False sleeps, probably past the end of the call.
        return self._is_done.wait(_PATIENCE_S)

    def run(self) -> None:
        make, self._make = self._make, None
        try:
            assert make is not None
            make().wait()
        except BaseException as error:
            self._error = error
        self._is_done.set()

    def wait(self) -> None:
        self._is_done.wait()
        if self._error is not None:
            raise self._error


class _CallThread:
    def __init__(self) -> None:
        self._calls: SimpleQueue[_ThreadCall | None] = SimpleQueue()
        # A daemon thread, because Gloo may block it for a lost rank, and it must not keep this process from
        # exiting. hold_late_threads() keeps it from aborting the process if Gloo returns during the exit,
        # when the other ranks exit as well.
        _core.hold_late_threads()
        calls = (self._calls,)
        start_thread(threading.Thread(target=_make_calls, args=calls, name="paceline-paddle", daemon=True))
        weakref.finalize(self, self._calls.put, None).atexit = False

    def begin(self, make: Callable[[], Any]) -> _ThreadCall:
        call = _ThreadCall(make)
        self._calls.put(call)
        return call


def _make_calls(calls: SimpleQueue[_ThreadCall | None]) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        call.run()
        del call  # frees its tensors


_threads: weakref.WeakKeyDictionary[Any, _CallThread] = weakref.WeakKeyDictionary()


def _thread_of(group: Any) -> _CallThread:
    """The one thread of a group: with two, the order of calls would differ between ranks."""
    if group not in _threads:
        _threads[group] = _CallThread()
    return _threads[group]
