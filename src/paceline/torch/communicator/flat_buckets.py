"""Reduces buckets over a torch process group: Gloo, NCCL, MPI, or Paceline's.

Calls the group's backend directly, with options that are created once. `torch.distributed.all_reduce` makes
the same call, after its checks and torch's dispatcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from paceline import _core
from paceline.health.store_check import Work
from paceline.reducer.comm_hooks import HookedBuckets
from paceline.reducer.communicator import ReductionOptions
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.process_group import Transport
from paceline.torch.communicator.device_nonfinite import FiniteChecks
from paceline.torch.communicator.streams import Streams
from paceline.torch.model.parameters import DTYPES

if TYPE_CHECKING:
    from paceline.torch.communicator.calls import GroupCalls

_Options = TypeVar("_Options")

_CODES = {DTYPES[name]: code for name, code in _core.DTYPES.items() if name in DTYPES}


class ProcessGroupTransport(Transport[torch.Tensor]):
    """A `Transport` over a torch process group.

    Gradients that wait to be copied to their places are copied in one call for each bucket, once it is
    complete: on a GPU each copy launches a kernel, and a model of many small parameters would spend its
    backward on launches.
    """

    _calls: GroupCalls
    waiting: dict[int, torch.Tensor]

    def __init__(
        self,
        gradient_buffer: GradientBuffer[torch.Tensor],
        calls: GroupCalls,
        options: ReductionOptions,
        hook: HookedBuckets[torch.Tensor] | None = None,
    ) -> None:
        super().__init__(gradient_buffer, calls, checks_finite=options.checks_finite, hook=hook)
        sections = gradient_buffer.sections
        if hook is None and all(section.is_cpu for section in sections):  # hooks may move the memory
            self.pointers = gradient_buffer.addresses()
        self.waiting = {}
        # The targets of copies, which must not count as changes of gradients that live in their places.
        self._targets = [place.data for place in gradient_buffer.places]
        self._sent = [[as_real(flat)] for flat in self._buckets]
        self._backends = [_backend(self._calls.group, flat.device) for flat in self._buckets]
        self._sums = asynchronous(dist.AllreduceOptions())
        self._nonfinite: set[int] = set()
        devices = {section.device for section in sections}
        # A stream waits for these buckets, so the host need not.
        self._are_on_streams = bool(devices) and all(map(self._calls.runs_on_streams, devices))
        is_one_stream = self._are_on_streams and len(devices) == 1
        self.is_in_order = is_one_stream and hook is None and self._calls.is_nccl(*devices)
        self._on_device = FiniteChecks(
            list(zip(self._buckets, self._pieces)),
            waits=options.waits_for_finite or hook is not None or not self._are_on_streams,
        )
        self._is_narrow = any(section.dtype == torch.float16 for section in sections)
        self._streams = next((made for each in devices if (made := Streams.of(each)) is not None), None)
        self.note_stream = None if self._streams is None else self._streams.note

    def _start(self, bucket: int, flat: torch.Tensor) -> Work:
        work: Work = self._backends[bucket].allreduce(self._sent[bucket], self._sums)
        return work

    def _complete(self, bucket: int) -> torch.Tensor:
        """The bucket with all its gradients copied to it, on the current stream."""
        flat: torch.Tensor = self._buckets[bucket]
        gradients, targets = self._take_waiting(bucket) if self.waiting else ([], [])
        if self._streams is not None:
            self._streams.join(flat.device, gradients)
        if gradients:
            with torch.no_grad():
                torch._foreach_copy_(targets, gradients)
        return flat

    def _take_waiting(self, bucket: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The gradients of a bucket that wait to be copied, and their places.

        Gradients of other buckets may still be added. A gradient in several buckets is copied with the first
        of them.
        """
        indices = [n for n in self._gradient_buffer.plan.buckets[bucket].parameters if n in self.waiting]
        return [self.waiting.pop(index) for index in indices], [self._targets[index] for index in indices]

    def _multiply(self, flat: torch.Tensor, factor: float) -> None:
        flat.mul_(factor)

    def _wait(self, call: Work, bucket: int) -> None:
        self._calls.wait(call, bucket, on_host=not self._are_on_streams, on_device=not self.pointers)

    def rescale(self, factor: float) -> None:
        for section in self._gradient_buffer.sections:
            scale_alike(section, factor)

    def clear(self, param: int) -> None:
        self.waiting.pop(param, None)  # from a backward that an exception has ended
        super().clear(param)

    def take_nonfinite(self) -> list[int]:
        if self.hook is not None:
            self.hook.forget()
        if self._streams is not None:  # some gradients are on a device
            self._streams.forget()
            if self._checks_finite and not self._is_captured():
                self._nonfinite.update(self._on_device.take())
        if not self._nonfinite:
            return []
        found, self._nonfinite = sorted(self._nonfinite), set()
        return found

    def may_have_overflowed(self, scale: float) -> bool:
        if not self._on_device.waits and not self._is_narrow:
            # A check would wait for the device, and only gradients near 3e38 overflow.
            return False
        return super().may_have_overflowed(scale)

    def squared_norm(self) -> float:
        sections = [as_real(section) for section in self._gradient_buffer.sections]
        return sum(float(section.double().square().sum()) for section in sections)

    def _is_finite(self, flat: torch.Tensor) -> bool:
        return bool(torch.isfinite(flat).all())

    def _is_captured(self) -> bool:
        """Whether a CUDA graph is being captured, during which the host cannot read values of the device."""
        is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return self._are_on_streams and is_initialized and torch.cuda.is_current_stream_capturing()

    def _note_nonfinite(self, bucket: int, flat: torch.Tensor) -> None:
        if not flat.is_cpu:
            if not self._is_captured():
                self._on_device.look(bucket)
            return
        (real,) = self._sent[bucket]
        if not _core.is_finite(_CODES[real.dtype], real.data_ptr(), real.numel()):
            pieces = self._pieces[bucket]
            self._nonfinite.update(param for param, piece in pieces if not self._is_finite(piece))


def _backend(group: Any, device: torch.device) -> Any:
    """The backend for tensors of a device; the group itself, if it is written in Python."""
    try:
        return group._get_backend(device)
    except (RuntimeError, AttributeError):
        return group


def asynchronous(options: _Options) -> _Options:
    """Make options those of an asynchronous call; torch before 2.8 has no other calls."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def scale_alike(flat: torch.Tensor, factor: float) -> None:
    """Multiply a contiguous tensor in place, so that equal tensors stay equal on all ranks.

    torch's own threads divide the work on large tensors, and each of them has its own settings for rounding
    and subnormals. Results would differ if one rank has called `torch.set_flush_denormal(True)`. Other
    devices have no such setting.
    """
    if flat.device.type != "cpu":
        flat.mul_(factor)
        return
    flat = as_real(flat)
    _core.scale_array(_CODES[flat.dtype], flat.data_ptr(), flat.numel(), factor)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
