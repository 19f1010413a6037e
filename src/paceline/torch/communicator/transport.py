"""Buckets through the process group that the user has: Gloo, NCCL, MPI, or ours.

A `Transport` of `reducer.process_group`: the gradient buffer is ordinary tensors on the parameters' own
devices, and a bucket is one asynchronous all-reduce of a flat range of it. The group is called itself, as
`torch.distributed.all_reduce` does after its checks, with options that are made once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline import _core
from paceline.health.peer_monitor import PeerMonitor
from paceline.reducer.call_order import call_order_of
from paceline.reducer.plan import pieces_in
from paceline.reducer.process_group import Pending, may_overflow, overflowed_in
from paceline.reducer.process_group_waits import STATUS
from paceline.torch.communicator.calls import Call, GroupCalls, asynchronous
from paceline.torch.communicator.finite import FiniteChecks
from paceline.torch.communicator.gradient_buffer import GradientBuffer
from paceline.torch.communicator.peers import ProcessGroupPeers
from paceline.torch.communicator.reports import reports_of
from paceline.torch.communicator.streams import Streams
from paceline.torch.model.parameters import DTYPES

_CODES = {DTYPES[name]: code for name, code in _core.DTYPES.items() if name in DTYPES}


class ProcessGroupTransport:
    """One rank's gradient buffer, and the process group that sums ranges of it.

    Args:
        gradient_buffer: The gradient buffer of this rank.
        peers: The process group.
        checks_finite: Look at every gradient before it is reduced, to tell whose holds an infinity or a NaN.
        waits_for_finite: Tell of those on a device in the same backward, too, which waits for the device.
        peer_monitor: Names ranks that are lost or late.

    Attributes:
        note_stream: Called when a gradient has come to its place; None: all are on the CPU.
    """

    def __init__(
        self,
        gradient_buffer: GradientBuffer,
        peers: ProcessGroupPeers,
        *,
        checks_finite: bool,
        waits_for_finite: bool = True,
        peer_monitor: PeerMonitor | None = None,
    ) -> None:
        self.rank = peers.rank
        self.world_size = peers.world_size
        self.is_serial = self.is_in_order = False
        self._gradient_buffer = gradient_buffer
        on_host = all(section.is_cpu for section in gradient_buffer.sections)
        self.pointers: Sequence[int] = gradient_buffer.pointers if on_host else ()
        self._calls = GroupCalls(peers, peer_monitor, gradient_buffer.plan)
        self._group = self._calls.group
        self.order = call_order_of(self._group)
        self._checks_finite = checks_finite
        numbers = range(len(gradient_buffer.plan.buckets))
        self._buckets = [gradient_buffer.bucket(number) for number in numbers]
        self._sent = [[as_real(flat)] for flat in self._buckets]
        self._wide = [_wide(flat.dtype) for (flat,) in self._sent]
        self._sums = asynchronous(dist.AllreduceOptions())
        self._pieces = [
            pieces_in(gradient_buffer.plan, gradient_buffer.sections, number) for number in numbers
        ]
        self._nonfinite: set[int] = set()
        self._reports = reports_of(peers)
        devices = {section.device for section in gradient_buffer.sections}
        # A stream waits for these buckets, and the host need not.
        self._are_on_streams = bool(devices) and all(map(self._calls.runs_on_streams, devices))
        self.is_in_order = self._are_on_streams and len(devices) == 1 and self._calls.is_nccl(*devices)
        self._on_device = FiniteChecks(
            list(zip(self._buckets, self._pieces)), waits=waits_for_finite or not self._are_on_streams
        )
        self._is_narrow = any(section.dtype == torch.float16 for section in gradient_buffer.sections)
        self._streams = next((made for each in devices if (made := Streams.of(each)) is not None), None)
        self.note_stream = None if self._streams is None else self._streams.note

    def launch(self, bucket: int, scale: float) -> Pending:
        self._prepare(bucket, scale)
        try:
            work = self._group.allreduce(self._sent[bucket], self._sums)
        except RuntimeError as error:
            raise self._calls.waits.failed(error, bucket) from error
        return BucketWork(self, work, bucket)

    def _prepare(self, bucket: int, scale: float) -> torch.Tensor:
        """This rank's part of a bucket, complete on the current stream, looked at, and scaled."""
        flat = self._complete(bucket)
        if self._checks_finite and scale:
            self._note_nonfinite(bucket, flat)
        if scale == 0.0:
            flat.zero_()
        elif scale != 1.0:
            flat.mul_(scale)
        return flat

    def _complete(self, bucket: int) -> torch.Tensor:
        """The bucket, with all its gradients, on the current stream."""
        flat = self._buckets[bucket]
        gradients, places = (
            self._gradient_buffer.take_waiting(bucket) if self._gradient_buffer.waiting else ((), ())
        )
        if self._streams is not None:
            self._streams.join(flat.device, gradients)
        if gradients:
            with torch.no_grad():
                torch._foreach_copy_(places, gradients)
        return flat

    def rescale(self, factor: float) -> None:
        for section in self._gradient_buffer.sections:
            scale_alike(section, factor)

    def clear(self, param: int) -> None:
        self._gradient_buffer.waiting.pop(param, None)  # of a backward that an exception has ended
        self._gradient_buffer.views[param].zero_()

    def take_nonfinite(self) -> list[int]:
        if self._streams is not None:  # some are on a device
            self._streams.forget()
            if self._checks_finite and not self._is_captured():
                self._nonfinite.update(self._on_device.take())
        if not self._nonfinite:
            return []
        found, self._nonfinite = sorted(self._nonfinite), set()
        return found

    def may_have_overflowed(self, scale: float) -> bool:
        if not self._on_device.waits and not self._is_narrow:
            # To look would wait for the device. It takes gradients near 3e38.
            return False
        return self._checks_finite and may_overflow(scale, self.world_size)

    def find_overflowed(self) -> list[int]:
        return overflowed_in(self._buckets, self._pieces, lambda flat: bool(torch.isfinite(flat).all()))

    def squared_norm(self) -> float:
        sections = [as_real(section) for section in self._gradient_buffer.sections]
        return sum(float(section.double().square().sum()) for section in sections)

    def begin_all_gather(self, payload: bytes) -> Callable[[], list[bytes]]:
        try:
            call, rows = self._reports.begin(payload)
        except RuntimeError as error:
            raise self._calls.waits.failed(error, STATUS) from error

        def finish() -> list[bytes]:
            # The end of a backward needs the reports at once, and nothing has been computed from the means
            # yet: here a rank that is lost can be told, wherever the reports lie.
            self._calls.wait(call, STATUS, on_host=True)
            return rows()

        return finish

    def wait(self, work: Call, bucket: int) -> None:
        """Block until the work on a bucket is done, at most until the deadline; on streams, let these wait.

        Raises:
            DeadlineError: It was not done in time.
            PeerLostError: The process group lost a connection.
            CollectiveError: It failed otherwise.
        """
        self._calls.wait(work, bucket, on_host=not self._are_on_streams, on_device=not self.pointers)

    def _is_captured(self) -> bool:
        """Whether a CUDA graph is being made, which can hold no question of the host."""
        is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return self._are_on_streams and is_initialized and torch.cuda.is_current_stream_capturing()

    def _note_nonfinite(self, bucket: int, flat: torch.Tensor) -> None:
        if not flat.is_cpu:
            if not self._is_captured():
                self._on_device.look(bucket)
            return
        # A finite sum proves that all is finite; another may be an overflow, so look at each element then.
        (real,) = self._sent[bucket]
        if not math.isfinite(real.sum(dtype=self._wide[bucket]).item()):
            pieces = self._pieces[bucket]
            self._nonfinite.update(param for param, piece in pieces if not torch.isfinite(piece).all())


class BucketWork:
    """A bucket on its way through the process group."""

    def __init__(self, transport: ProcessGroupTransport, work: dist.Work, bucket: int) -> None:
        self._transport = transport
        self._work = work
        self._bucket = bucket

    def wait(self) -> None:
        self._transport.wait(self._work, self._bucket)


def scale_alike(flat: torch.Tensor, factor: float) -> None:
    """Multiply a contiguous tensor in place, so that equal tensors stay equal on all ranks.

    torch's own threads, which share the work on large tensors, round and flush subnormals as each of them was
    told, and so differ where one rank has called `torch.set_flush_denormal(True)`. On other devices nobody
    sets this.
    """
    if flat.device.type != "cpu":
        flat.mul_(factor)
        return
    flat = as_real(flat)
    _core.scale_array(_CODES[flat.dtype], flat.data_ptr(), flat.numel(), factor)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
