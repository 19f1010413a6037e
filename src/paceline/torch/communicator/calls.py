"""Calls over the process group of torch that the user has, waited for up to a deadline.

The one idea: a process group says that a connection broke, or nothing at all, and not which rank it has lost.
So whoever waits for it here gives up at the deadline, looks at the ranks of the host meanwhile, and names the
rank that is lost wherever that can be known.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from paceline import _core
from paceline.errors import CollectiveError
from paceline.health.peer_monitor import ChannelPeerMonitor, PeerMonitor
from paceline.reducer.channels import known_channel
from paceline.reducer.plan import Plan
from paceline.reducer.process_group_waits import ProcessGroupWaits, is_of_a_late_peer, is_of_a_lost_peer
from paceline.reducer.sum_order import join_in_order
from paceline.torch.communicator.exchange import transport_device
from paceline.torch.communicator.peers import ProcessGroupPeers
from paceline.torch.model.parameters import dtype_name

_Options = TypeVar("_Options")
_Begun = TypeVar("_Begun")
_BRIEFLY = timedelta(milliseconds=20)


class Call(Protocol):
    """A call on its way; torch's own are `torch.distributed.Work`."""

    def is_completed(self) -> bool: ...

    def wait(self) -> Any:
        """Raise what the call raised; on a device let what is computed from now on wait for its result."""
        ...


class GroupCalls:
    """One rank's calls over a process group of torch.

    Args:
        peers: The ranks of the group.
        peer_monitor: Names ranks that are lost or late; None: nobody does.
        plan: The plan of the buckets that are summed over the group, if there are any.
        within: A group of some of these ranks that makes the calls, and what it is in words; None: the group
            of all makes them.
        timeout_s: Most seconds of one wait; None: as the peers say.

    Attributes:
        group: The process group.
        serves_cpu: Whether the group moves tensors of the CPU.
        waits: How this rank waits for these calls, and words their failures.
    """

    def __init__(
        self,
        peers: ProcessGroupPeers,
        peer_monitor: PeerMonitor | None,
        plan: Plan | None = None,
        within: tuple[dist.ProcessGroup, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.group, engine = within or (
            peers.process_group,
            f"torch's {dist.get_backend(peers.process_group)} process group",
        )
        self.serves_cpu = "cpu" in {device.type for device in self.group._device_types}
        engines = {engine_of(self.group, torch.device(each.type)) for each in self.group._device_types}
        self._wakes = "gloo" in engines and engines <= {"gloo", "nccl"}  # none of NCCL's is waited for so
        self.waits = ProcessGroupWaits(
            peers.rank,
            peers.world_size,
            engine=engine,
            timeout_s=timeout_s or peers.timeout_s,
            warn_after_s=peers.warn_after_s,
            plan=plan,
            peer_monitor=peer_monitor,
        )

    def is_nccl(self, device: torch.device) -> bool:
        """Whether NCCL makes the calls for tensors of this device: one after the other, on one stream."""
        return engine_of(self.group, device) == "nccl"

    def runs_on_streams(self, device: torch.device) -> bool:
        """See the function of this name."""
        return runs_on_streams(self.group, device)

    def begin(self, start: Callable[[], _Begun], what: int | str) -> _Begun:
        """Begin a call.

        Args:
            start: Makes the call, with `async_op=True`.
            what: The number of the bucket that it sums, or what it is in words.

        Raises:
            PeerLostError: The process group lost a connection.
            CollectiveError: It failed otherwise.
        """
        try:
            return start()
        except RuntimeError as error:
            raise self.waits.failed(error, what) from error

    def wait(self, work: Call, what: int | str, *, on_host: bool, on_device: bool = False) -> None:
        """Block until a call is over, at most until the deadline.

        Args:
            work: The call.
            what: As for `begin`.
            on_host: Whether this thread has to wait. Else, on a GPU, what is computed from now on waits.
            on_device: Whether its tensors are on a device: Gloo ignores the time of a wait for those.

        Raises:
            DeadlineError: It was not over in time.
            PeerLostError: The process group lost a connection.
            CollectiveError: It failed otherwise.
        """
        try:
            if on_host and not work.is_completed():
                if self._wakes and not on_device and _is_over_soon(work):
                    return
                # Polled, because Work.wait(timeout) is ignored by some backends and ends the group in others.
                self.waits.poll(work.is_completed, what)
            try:
                work.wait()
            except RuntimeError as error:
                raise self.waits.failed(error, what) from error
        except CollectiveError:
            abort_on_devices(self.group)
            raise

    def _wait_for(self, tensor: torch.Tensor, work: dist.Work, what: str) -> None:
        on_host = not self.runs_on_streams(tensor.device)
        self.wait(work, what, on_host=on_host, on_device=not tensor.is_cpu)

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over the ranks. Collective."""
        what = "a sum of values"
        work = self.begin(lambda: dist.all_reduce(tensor, group=self.group, async_op=True), what)
        self._wait_for(tensor, work, what)

    def sum_in_order(self, tensor: torch.Tensor) -> None:
        """As `sum`, with the bits of a sum in the memory of one host. Collective; the group serves the CPU.

        Everybody gets the tensors of all ranks, which is fit for what is small.

        Args:
            tensor: Contiguous, of float32 or float64.
        """
        what = "a sum of values in the order of ranks"
        own = tensor.cpu()
        rows = [torch.empty_like(own) for _ in range(self.group.size())]
        work = self.begin(lambda: dist.all_gather(rows, own, group=self.group, async_op=True), what)
        self.wait(work, what, on_host=True)
        dtype, sums = _core.DTYPES[dtype_name(tensor.dtype)], _core.REDUCE_OPS["sum"]

        def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            pointers = [left.data_ptr(), right.data_ptr()]
            _core.reduce_arrays(dtype, sums, pointers, pointers[:1], left.numel())
            return left

        with _core.DefaultFloats():
            tensor.copy_(join_in_order(rows, add))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Replace a tensor by that of the rank `root`. Collective."""
        what = "a broadcast of values"
        source = dist.get_global_rank(self.group, root)
        work = self.begin(lambda: dist.broadcast(tensor, source, group=self.group, async_op=True), what)
        self._wait_for(tensor, work, what)

    def gather(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Arrays of all ranks, by rank, of one shape and dtype. Collective."""
        what = "an exchange of facts"
        own = torch.from_numpy(array.reshape(-1).view(np.uint8)).to(transport_device(self.group))
        rows = [torch.empty_like(own) for _ in range(self.group.size())]
        work = self.begin(lambda: dist.all_gather(rows, own, group=self.group, async_op=True), what)
        self.wait(work, what, on_host=True)
        return np.stack([row.cpu().numpy().view(array.dtype).reshape(array.shape) for row in rows])

    def naming(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Name the lost rank in what a call of somebody else's raises, where it has lost one.

        Args:
            what: The call, in words.
        """
        return _naming(self.waits, what)


def asynchronous(options: _Options) -> _Options:
    """Options of a call that is waited for later; torch before 2.8 calls none otherwise."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


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

    Args:
        start: Makes the call, given whether `async_op` is to be True.
        what: The call, in words.
        patience: How to wait for it.
        device: Where its tensors lie. If calls run on streams there, what is computed from now on waits.
        is_read: Whether this thread reads the result next, so that it waits in any case.

    Raises:
        DeadlineError: It was not over in time.
        PeerLostError: The group lost a connection, and something knows of the ranks of the group. Else such a
            call raises what torch does.
    """
    timeout_s, peer_monitor = patience
    if peer_monitor is None and (channel := known_channel(group)) is not None:
        peer_monitor = ChannelPeerMonitor(channel)
    if peer_monitor is None and timeout_s is None:
        start(False)
        return
    waits = ProcessGroupWaits(
        group.rank(),
        group.size(),
        engine=f"torch's {dist.get_backend(group)} process group",
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
    peer_monitor = waits.peer_monitor if isinstance(waits.peer_monitor, ChannelPeerMonitor) else None
    try:
        if peer_monitor is not None:
            peer_monitor.tell_waiting()
        yield
        if peer_monitor is not None:
            peer_monitor.tell_done()
    except CollectiveError:
        raise
    except RuntimeError as error:
        text = str(error)
        if is_of_a_lost_peer(text) or is_of_a_late_peer(text):
            raise waits.failed(error, what) from error
        raise


def engine_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that a process group has for a device, as "nccl"; empty: none that is known."""
    try:
        return str(group._get_backend(device).name()).lower()
    except (RuntimeError, AttributeError):  # not for such a device; one that is written in Python
        return ""


def runs_on_streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether calls for tensors of this device run on a stream of it, for which others can wait.

    Else a thread that waits for one is blocked, and needs a deadline, whatever device the tensors are on.
    """
    return device.type != "cpu" and engine_of(group, device) not in ("", "gloo", "mpi", "ucc")


def _is_over_soon(work: Call) -> bool:
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

    For whoever raises because a rank is lost: a kernel of NCCL that waits for that rank would keep the
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
