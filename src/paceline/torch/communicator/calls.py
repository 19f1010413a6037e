"""Calls over a torch process group, with a deadline for each wait; see `ProcessGroupCalls`."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from paceline.errors import CollectiveError
from paceline.health.peer_errors import is_of_a_late_peer, is_of_a_lost_peer
from paceline.health.peer_monitor import ChannelSource, PeerMonitor
from paceline.health.store_check import Work
from paceline.reducer.comm_hooks import CommHook, HookedBuckets
from paceline.reducer.communicator import ReductionOptions
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.process_group_calls import ProcessGroupCalls
from paceline.reducer.process_group_channels import known_channel
from paceline.reducer.process_group_waits import ProcessGroupWaits, Rows
from paceline.torch.communicator.broadcast import PreparedBroadcast
from paceline.torch.communicator.comm_hook import TorchHook
from paceline.torch.communicator.flat_buckets import ProcessGroupTransport, asynchronous

_kept: deque[tuple[torch.Tensor, ...]] | None = deque(maxlen=64) if torch.__version__ < "2.8" else None
_BRIEFLY = timedelta(milliseconds=20)


class Patient(Protocol):
    rank: int
    world_size: int
    timeout_s: float
    warn_after_s: float


class GroupCalls(ProcessGroupCalls[torch.Tensor]):
    """`ProcessGroupCalls` over a torch process group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Patient,
        peer_monitor: PeerMonitor | None = None,
        words: str | None = None,
    ) -> None:
        waits = ProcessGroupWaits(
            ranks.rank,
            ranks.world_size,
            words=words or f"torch's {dist.get_backend(group)} process group",
            timeout_s=ranks.timeout_s,
            warn_after_s=ranks.warn_after_s,
            peer_monitor=peer_monitor,
        )
        super().__init__(group, ranks.rank, ranks.world_size, waits)
        self.serves_cpu = "cpu" in {device.type for device in group._device_types}
        backends = {backend_of(group, torch.device(each.type)) for each in group._device_types}
        # Whether `_is_over_soon` may wait for calls on the CPU: they are Gloo's.
        self._wakes = "gloo" in backends and backends <= {"gloo", "nccl"}

    def is_nccl(self, device: torch.device) -> bool:
        """Whether NCCL runs the calls for tensors of this device: one after the other, on one stream."""
        return backend_of(self.group, device) == "nccl"

    def runs_on_streams(self, device: torch.device) -> bool:
        return runs_on_streams(self.group, device)

    def wait(self, call: Work, what: int | str, *, on_host: bool = True, on_device: bool = False) -> None:
        try:
            if on_host and self._wakes and not on_device and not call.is_completed() and _is_over_soon(call):
                return
            # Polls, because some backends ignore the timeout of Work.wait(), and others abort the group.
            super().wait(call, what, on_host=on_host)
        except CollectiveError:
            abort_on_devices(self.group)
            raise

    def _complete(self, tensor: torch.Tensor, start: Callable[[], Any], what: str) -> None:
        on_host = not self.runs_on_streams(tensor.device)
        self.wait(self.begin(start, what), what, on_host=on_host, on_device=not tensor.is_cpu)

    def sum(self, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        calls = self if timeout_s is None else self.but(timeout_s=timeout_s)
        calls._complete(
            tensor, lambda: dist.all_reduce(tensor, group=self.group, async_op=True), "a sum of values"
        )

    def prepare_broadcast(self, tensors: Sequence[torch.Tensor]) -> Callable[[int], None]:
        return PreparedBroadcast(tensors, self.rank, self.broadcast)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        source = dist.get_global_rank(self.group, root)
        self._complete(
            tensor,
            lambda: dist.broadcast(tensor, source, group=self.group, async_op=True),
            "a broadcast of values",
        )

    def make_transport(
        self,
        gradient_buffer: GradientBuffer[torch.Tensor],
        options: ReductionOptions,
        hook: HookedBuckets[torch.Tensor] | None = None,
    ) -> ProcessGroupTransport:
        return ProcessGroupTransport(gradient_buffer, self, options, hook)

    def make_hooked(
        self,
        hook: CommHook,
        gradient_buffer: GradientBuffer[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        process_group: Any,
    ) -> TorchHook:
        return TorchHook(hook, gradient_buffer, parameters, self, process_group)

    def begin_gather(self, array: np.ndarray[Any, Any]) -> tuple[Work, Rows]:
        return gather_over(self.group, transport_device(self.group), array)

    def naming(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A context in which the error of a framework call names the rank that was lost."""
        return _naming(self.waits, what)


_GATHERING = asynchronous(AllgatherOptions())


def gather_over(group: Any, device: torch.device, array: np.ndarray[Any, Any]) -> tuple[Work, Rows]:
    """Start an all-gather of arrays, which have the same shape and dtype on all ranks.

    Collective, does not block.
    """
    own = torch.from_numpy(array.reshape(-1).view(np.uint8)).to(device)
    rows = [torch.empty_like(own) for _ in range(group.size())]
    keep(own, *rows)
    work: Work = group.allgather([rows], [own], _GATHERING)
    return work, lambda: np.stack([row.cpu().numpy().view(array.dtype).reshape(array.shape) for row in rows])


def keep(*tensors: torch.Tensor) -> None:
    """Keep the small tensors of a call alive until many other calls have been made.

    torch before 2.8 holds the GIL while it waits for the threads of a group that is being destroyed. A thread
    that drops the last reference to a tensor needs the GIL to free it. So destroying a group right after a
    call over it, or after an abandoned call, would deadlock.
    """
    if _kept is not None:
        _kept.append(tensors)


def transport_device(group: dist.ProcessGroup) -> torch.device:
    """The CPU if the group supports it, else the current device of a type that it supports."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    kind = min(kinds)
    return torch.device(kind, torch.accelerator.current_device_index())


class Patience(NamedTuple):
    """How a layer in the user's model waits for other ranks.

    Attributes:
        timeout_s: The longest wait in seconds; None: the group's own timeout.
        peer_monitor: Names ranks that are lost or late; None: the group's own channel does, if it has one.
    """

    timeout_s: float | None
    peer_monitor: PeerMonitor | None


def exchange_over(
    group: dist.ProcessGroup,
    start: Callable[[bool], dist.Work | None],
    what: str,
    patience: Patience,
    device: torch.device,
    *,
    is_read: bool = False,
) -> None:
    """Run a call of a layer in the user's model over a torch process group, and wait for it. Collective.

    Args:
        is_read: The host reads the result, so wait until it is there, also if the call runs on a stream.

    Raises:
        DeadlineError: The call did not finish in time.
        PeerLostError: The group lost a connection, and a peer monitor watches its ranks. Without a monitor,
            torch's own error is raised.
    """
    timeout_s, peer_monitor = patience
    if peer_monitor is None and (channel := known_channel(group)) is not None:
        peer_monitor = PeerMonitor(ChannelSource(channel))
    if peer_monitor is None and timeout_s is None:
        start(False)
        return
    waits = ProcessGroupWaits(
        group.rank(),
        group.size(),
        words=f"torch's {dist.get_backend(group)} process group",
        timeout_s=math.inf if timeout_s is None else timeout_s,
        warn_after_s=math.inf,
        peer_monitor=peer_monitor,
    )
    with _naming(waits, what):
        if timeout_s is None:
            start(False)
            return
        work = start(True)
        assert work is not None  # this process is in the group
        try:
            if is_read or not runs_on_streams(group, device):
                waits.poll(work.is_completed, what)
            work.wait()
        except CollectiveError:
            abort_on_devices(group)
            raise


@contextlib.contextmanager
def _naming(waits: ProcessGroupWaits, what: str) -> Iterator[None]:
    # A monitor over one host's shared memory already publishes what this rank is doing; leave that as it is.
    peer_monitor = waits.peer_monitor
    if peer_monitor is not None and peer_monitor.core is not None:
        peer_monitor = None
    try:
        if peer_monitor is not None:
            peer_monitor.publish_waiting()
        yield
        if peer_monitor is not None:
            peer_monitor.publish_done()
    except CollectiveError:
        raise
    except RuntimeError as error:
        text = str(error)
        if is_of_a_lost_peer(text) or is_of_a_late_peer(text):
            raise waits.failed(error, what) from error
        raise


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        return str(group._get_backend(device).name()).lower()
    except (RuntimeError, AttributeError):  # no backend for this device, or a group written in Python
        return ""


def runs_on_streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether calls for tensors of this device run on one of its streams, which other streams can wait for.

    Otherwise a wait blocks the calling thread and needs a deadline, even if the tensors are on a device.
    """
    return device.type != "cpu" and backend_of(group, device) not in ("", "gloo", "mpi", "ucc")


def _is_over_soon(work: Work) -> bool:
    """Wait briefly for a Gloo call: its end wakes this thread sooner than polling would notice it.

    Gloo raises when the time is over, and the call continues.
    """
    if not isinstance(work, dist.Work):
        return False
    try:
        return bool(work.wait(_BRIEFLY))
    except RuntimeError:
        return False  # or the call has failed, which the polling that follows finds out


def abort_on_devices(group: dist.ProcessGroup) -> None:
    """Abort a process group's calls in progress on devices other than the CPU.

    Does not block, not collective. Called when this rank raises because another rank is lost: an NCCL kernel
    that waits for the lost rank would block the stream, and so the exit of this process, for ever. Called
    only then, because later work on the stream continues with incomplete sums.
    """
    found: dict[str, Any] = {}
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):  # the group was never used on this device
            found[device.type] = group._get_backend(torch.device(device.type))
    on_cpu = found.pop("cpu", None)
    for backend in found.values():
        if backend is not on_cpu:
            # In a thread, because it waits for the device and for NCCL's threads: ProcessGroupNCCL::abort.
            threading.Thread(target=_abort, args=(backend,), name="paceline-abort", daemon=True).start()


def _abort(backend: Any) -> None:
    with contextlib.suppress(Exception):  # it was aborted already, or cannot be aborted
        backend.abort()
