"""Calls over a process group of torch, waited for up to a deadline; see `ProcessGroupCalls`."""

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
from paceline.reducer.channels import known_channel
from paceline.reducer.comm_hooks import CommHook, HookedBuckets
from paceline.reducer.communicator import ReductionOptions
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.process_group_calls import ProcessGroupCalls
from paceline.reducer.process_group_waits import ProcessGroupWaits, Rows
from paceline.torch.communicator.broadcast import PreparedBroadcast
from paceline.torch.communicator.comm_hook import TorchHook
from paceline.torch.communicator.transport import ProcessGroupTransport, asynchronous

_kept: deque[tuple[torch.Tensor, ...]] | None = deque(maxlen=64) if torch.__version__ < "2.8" else None
_BRIEFLY = timedelta(milliseconds=20)


class Patient(Protocol):
    rank: int
    world_size: int
    timeout_s: float
    warn_after_s: float


class GroupCalls(ProcessGroupCalls[torch.Tensor]):
    """See `ProcessGroupCalls`; over a process group of torch."""

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
        self._wakes = "gloo" in backends and backends <= {"gloo", "nccl"}  # none of NCCL's is waited for so

    def is_nccl(self, device: torch.device) -> bool:
        """Whether NCCL makes the calls for tensors of this device: one after the other, on one stream."""
        return backend_of(self.group, device) == "nccl"

    def runs_on_streams(self, device: torch.device) -> bool:
        return runs_on_streams(self.group, device)

    def wait(self, call: Work, what: int | str, *, on_host: bool = True, on_device: bool = False) -> None:
        try:
            if on_host and self._wakes and not on_device and not call.is_completed() and _is_over_soon(call):
                return
            # Polled, because Work.wait(timeout) is ignored by some backends and ends the group in others.
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
        """Name the lost rank in what a call of the framework's raises."""
        return _naming(self.waits, what)


_GATHERING = asynchronous(AllgatherOptions())


def gather_over(group: Any, device: torch.device, array: np.ndarray[Any, Any]) -> tuple[Work, Rows]:
    """Begin to collect the arrays of all ranks, of one shape and dtype. Collective, does not block."""
    own = torch.from_numpy(array.reshape(-1).view(np.uint8)).to(device)
    rows = [torch.empty_like(own) for _ in range(group.size())]
    keep(own, *rows)
    work: Work = group.allgather([rows], [own], _GATHERING)
    return work, lambda: np.stack([row.cpu().numpy().view(array.dtype).reshape(array.shape) for row in rows])


def keep(*tensors: torch.Tensor) -> None:
    """Keep the small tensors of a call until many others have been made.

    torch before 2.8 holds Python's lock while it waits for the threads of a group that is destroyed, and one
    of them needs the lock to free a tensor that nothing else holds any more. So whoever destroys a group
    right after a call over it, or after one that was given up, would wait for ever.
    """
    if _kept is not None:
        _kept.append(tensors)


def transport_device(group: dist.ProcessGroup) -> torch.device:
    """The CPU where the group serves it, else the current device of the kind that it serves."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    kind = min(kinds)
    return torch.device(kind, torch.accelerator.current_device_index())


class Patience(NamedTuple):
    """How a layer of the user's waits for other ranks.

    Attributes:
        timeout_s: Most seconds of a wait; None: as long as the group waits.
        peer_monitor: Names ranks that are lost or late; None: nothing does, unless the group has a channel.
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
    """Make a call of a layer of the user's over a process group of torch, and wait for its end. Collective.

    Raises:
        DeadlineError: It was not over in time.
        PeerLostError: The group lost a connection, and something knows of the ranks of the group. Else such a
            call raises what torch does.
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
    # In the memory of one host the errors of others show what a rank is in, which is to stay.
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
    except (RuntimeError, AttributeError):  # not for such a device; one that is written in Python
        return ""


def runs_on_streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether calls for tensors of this device run on a stream of it, for which others can wait.

    Else a thread that waits for one is blocked, and needs a deadline, whatever device the tensors are on.
    """
    return device.type != "cpu" and backend_of(group, device) not in ("", "gloo", "mpi", "ucc")


def _is_over_soon(work: Work) -> bool:
    """Wait briefly for a call of Gloo, whose end wakes this thread sooner than it would wake by the clock.

    Gloo raises when the time is over, and the call goes on.
    """
    if not isinstance(work, dist.Work):
        return False
    try:
        return bool(work.wait(_BRIEFLY))
    except RuntimeError:
        return False  # or the call has failed, which whoever polls finds out


def abort_on_devices(group: dist.ProcessGroup) -> None:
    """End what a process group has under way on other devices than the CPU. Does not block, not collective.

    For a rank that raises because a rank is lost: a kernel of NCCL that waits for that rank would keep the
    stream, and with it the end of this process, for ever. Only then, because what follows on the stream goes
    on with sums that are not complete.
    """
    found: dict[str, Any] = {}
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):  # it was never used there
            found[device.type] = group._get_backend(torch.device(device.type))
    on_cpu = found.pop("cpu", None)
    for backend in found.values():
        if backend is not on_cpu:
            # It waits for the device, and for threads of its own; see ProcessGroupNCCL::abort.
            threading.Thread(target=_abort, args=(backend,), name="paceline-abort", daemon=True).start()


def _abort(backend: Any) -> None:
    with contextlib.suppress(Exception):  # it has ended already, or cannot be ended
        backend.abort()
