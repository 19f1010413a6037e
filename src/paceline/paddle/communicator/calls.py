"""Calls of paddle.distributed that the caller can wait for up to a deadline.

The one idea: Paddle's Gloo does everything within the call, in C++, and takes no time-out from us. So on the
CPU a thread of their own makes these calls, one after another, while the caller computes or waits. Those of
NCCL, and of the engines of other devices, return at once. They are made where the caller is, and follow its
stream.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import paddle
import paddle.distributed as dist

from paceline import _core
from paceline.collectives.ops import DTYPE_NUMBERS, ReduceOp
from paceline.errors import CollectiveError, ConfigError
from paceline.health.peer_monitor import PeerMonitor
from paceline.paddle import internals
from paceline.paddle.internals import GLOO_LIMIT_S
from paceline.paddle.model.parameters import dtype_name, nbytes
from paceline.reducer.plan import Plan
from paceline.reducer.process_group_waits import ProcessGroupWaits
from paceline.rendezvous.limits import start_thread

WARN_AFTER_S = 10.0
_PATIENCE_S = 0.02


class Call(Protocol):
    """A call on its way."""

    def is_completed(self) -> bool: ...

    def wait(self) -> None:
        """Raise what the call raised; on a device let what is computed from now on wait for its result."""
        ...


class GroupCalls:
    """The calls of this rank on one group of paddle.distributed, in the order in which they are begun.

    Args:
        group: None: the default group.
        timeout_s: Most seconds of a wait.
        warn_after_s: Seconds after which a wait is reported.

    Attributes:
        group: Never None.
        on_host: Whether the group moves tensors of the CPU, or those of this process's device.
        peer_monitor: Names ranks that are lost or late, once there is one.

    Raises:
        ConfigError: This process is not in the group.
    """

    peer_monitor: PeerMonitor | None = None

    def __init__(self, group: Any, timeout_s: float, warn_after_s: float = WARN_AFTER_S) -> None:
        self.group: Any = dist.get_group() if group is None else group
        self.rank: int = self.group.rank
        self.world_size: int = self.group.nranks
        self.timeout_s = timeout_s
        self.warn_after_s = warn_after_s
        if self.rank < 0:
            raise ConfigError(
                "DataParallel: this process is not in the group.",
                got=f"rank {dist.get_rank()}, a group of ranks {self.group.ranks}",
                hint="wrap the model only on the ranks of the group",
            )
        self.backend: str = dist.get_backend(self.group)
        self.on_host = self.backend == "GLOO"
        self._device = None if self.on_host else internals.device_of_this_process()
        fixed = f", which gives up after {GLOO_LIMIT_S:g} s, whatever timeout_s" if self.on_host else ""
        self._engine = f"Paddle's {self.backend} group{fixed}"
        self._thread = _thread_of(self.group) if self.on_host and self.world_size > 1 else None

    def waits(self, plan: Plan | None = None, timeout_s: float | None = None) -> ProcessGroupWaits:
        """How this rank waits for these calls, and words their failures."""
        return ProcessGroupWaits(
            self.rank,
            self.world_size,
            engine=self._engine,
            timeout_s=timeout_s or self.timeout_s,
            warn_after_s=self.warn_after_s,
            plan=plan,
            peer_monitor=self.peer_monitor,
        )

    def all_reduce(self, tensor: paddle.Tensor) -> Call:
        """Begin to replace `tensor` by its sum over the ranks."""
        if self.on_host and tensor.dtype == paddle.float16:
            return self._begin(lambda: _WideSum(tensor, self.group))
        return self._begin(lambda: dist.all_reduce(tensor, group=self.group, sync_op=False))

    def broadcast(self, tensor: paddle.Tensor, root: int) -> Call:
        """Begin to replace `tensor` by that of the rank `root` of the group."""
        return self._begin(
            lambda: dist.broadcast(tensor, src=self.group.ranks[root], group=self.group, sync_op=False)
        )

    def all_gather(self, out: paddle.Tensor, tensor: paddle.Tensor) -> Call:
        """Begin to collect the `tensor` of every rank in `out`, one after another in dimension 0."""
        return self._begin(lambda: dist.stream.all_gather(out, tensor, group=self.group, sync_op=False))

    def complete(self, begin: Callable[[], Call], what: str, timeout_s: float | None = None) -> None:
        """Begin a call and wait for its end; see `start`."""
        self.start(begin, what, timeout_s)()

    def start(
        self, begin: Callable[[], Call], what: str, timeout_s: float | None = None
    ) -> Callable[[], None]:
        """Begin a call.

        Args:
            begin: Makes one of the calls above.
            what: It is, in words, for errors.
            timeout_s: Most seconds of the wait; None: as of all.

        Returns:
            What waits for its end.

        Raises:
            DeadlineError: It was not done in time.
            PeerLostError: The group lost a connection.
            CollectiveError: It failed otherwise.
        """
        waits = self.waits(timeout_s=timeout_s)

        def finish() -> None:
            with _worded(waits, what):
                waits.poll(call.is_completed, what)
                call.wait()

        with _worded(waits, what):
            call = begin()
        return finish

    def begin_gather_bytes(self, payload: bytes, what: str) -> Callable[[], list[bytes]]:
        """Begin to collect all ranks' payloads, of one length. Returns what waits for them. Collective."""
        wide = np.frombuffer(payload, np.uint8).astype(np.int32)  # not every engine moves bytes
        finish = self._begin_gather(wide, what, None)
        return lambda: [row.astype(np.uint8).tobytes() for row in finish()]

    def gather(
        self, array: np.ndarray[Any, Any], what: str, timeout_s: float | None = None
    ) -> np.ndarray[Any, Any]:
        """Arrays of all ranks, by rank, of one shape and dtype. Collective."""
        return self._begin_gather(array, what, timeout_s)()

    def _begin_gather(
        self, array: np.ndarray[Any, Any], what: str, timeout_s: float | None
    ) -> Callable[[], np.ndarray[Any, Any]]:
        own = self.to_wire(paddle.to_tensor(array.reshape(-1)))
        out = internals.empty_on(own.place, [self.world_size * array.size], own.dtype)
        wait = self.start(lambda: self.all_gather(out, own), what, timeout_s) if array.size else None

        def finish() -> np.ndarray[Any, Any]:
            if wait is not None:
                wait()
            return out.numpy().reshape(self.world_size, *array.shape)

        return finish

    def to_wire(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """The tensor where the group can move it: itself, or a copy."""
        if tensor.place.is_cpu_place() == self.on_host:
            return tensor
        return tensor.cpu() if self.on_host else internals.copy_to(tensor, self._device)

    def _begin(self, make: Callable[[], Any]) -> Call:
        if self._thread is None:
            task: Call = make()
            return task
        return self._thread.begin(make)


class LoneCalls(GroupCalls):
    """The calls of a process that is alone: every sum is what it has.

    Args:
        on_host: Whether it trains on the CPU.
    """

    def __init__(self, *, on_host: bool) -> None:
        self.group = None
        self.rank, self.world_size = 0, 1
        self.timeout_s, self.warn_after_s = math.inf, WARN_AFTER_S
        self.backend, self._engine = "missing", "this process alone"
        self.on_host = on_host
        self._device = None if on_host else internals.device_of_this_process()

    def all_gather(self, out: paddle.Tensor, tensor: paddle.Tensor) -> Call:
        paddle.assign(tensor, out)
        return _Done()

    def _begin(self, make: Callable[[], Any]) -> Call:
        return _Done()


class MemoryCalls(GroupCalls):
    """The calls of the ranks of one host, in the memory that they share: done when they return.

    Args:
        core: The memory.
    """

    def __init__(self, core: _core.HostGroup) -> None:
        self.group = None
        self.rank, self.world_size = core.rank, core.world_size
        self.timeout_s, self.warn_after_s = core.timeout_s, core.warn_after_s
        self.backend, self._engine = "shared memory", "the memory that the ranks share"
        self.on_host = True
        self._core = core

    def all_reduce(self, tensor: paddle.Tensor) -> Call:
        dtype = DTYPE_NUMBERS[dtype_name(tensor.dtype)]
        self._core.all_reduce(tensor.data_ptr(), int(tensor.size), dtype, ReduceOp.SUM)
        return _Done()

    def all_gather(self, out: paddle.Tensor, tensor: paddle.Tensor) -> Call:
        self._core.all_gather(tensor.data_ptr(), out.data_ptr(), nbytes(tensor))
        return _Done()


@contextlib.contextmanager
def _worded(waits: ProcessGroupWaits, what: str) -> Iterator[None]:
    """Failures of the engine become errors of ours."""
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise waits.failed(error, what) from error


class _Done:
    """A call that is done."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _WideSum:
    """A sum of float16 on its way in float32: of 1 and 1 in float16, Paddle's Gloo makes an infinity."""

    def __init__(self, tensor: paddle.Tensor, group: Any) -> None:
        self._tensor = tensor
        with paddle.no_grad():
            self._wide = tensor.cast("float32")
        self._call: Call = dist.all_reduce(self._wide, group=group, sync_op=False)

    def is_completed(self) -> bool:
        return self._call.is_completed()

    def wait(self) -> None:
        self._call.wait()
        with paddle.no_grad():
            self._tensor.copy_(self._wide.cast("float16"), True)


class _ThreadCall:
    """A call that another thread makes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = make
        self._error: BaseException | None = None
        self._is_done = threading.Event()

    def is_completed(self) -> bool:
        # Not at once if it is not: who asks would sleep, and longer than until the end.
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
    """Makes calls one after another, as long as this object lives."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_ThreadCall | None] = SimpleQueue()
        # A daemon: one that Gloo holds, for a rank that is gone, must not hold the end of this process. Nor
        # abort it, when Gloo lets it go in that very moment, because the other ranks end as well.
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
        del call  # and with it the tensors


_threads: weakref.WeakKeyDictionary[Any, _CallThread] = weakref.WeakKeyDictionary()


def _thread_of(group: Any) -> _CallThread:
    """One for each group: two would make its calls in an order that differs from rank to rank."""
    if group not in _threads:
        _threads[group] = _CallThread()
    return _threads[group]
