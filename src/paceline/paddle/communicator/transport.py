"""Buckets through a group of paddle.distributed, between hosts and on GPUs.

A `Transport` of `reducer.process_group`: the gradient buffer is ordinary tensors on the parameters' own
device, and a bucket is one asynchronous `paddle.distributed.all_reduce` of a flat range of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import paddle

from paceline.errors import CollectiveError
from paceline.paddle.communicator.calls import Call, GroupCalls
from paceline.paddle.communicator.comm_hook import BucketHook, HookedCall
from paceline.paddle.communicator.gradient_buffer import GradientBuffer
from paceline.reducer.call_order import call_order_of
from paceline.reducer.plan import pieces_in
from paceline.reducer.process_group import ROUNDING, may_overflow, overflowed_in
from paceline.reducer.process_group_waits import STATUS, ProcessGroupWaits


class PaddleTransport:
    """One rank's gradient buffer, and the group that sums ranges of it.

    Args:
        gradient_buffer: The gradient buffer of this rank.
        calls: On the group.
        checks_finite: Look at every gradient before it is reduced, to tell whose holds an infinity or a NaN.
        hook: Averages buckets instead of the group.
    """

    def __init__(
        self,
        gradient_buffer: GradientBuffer,
        calls: GroupCalls,
        *,
        checks_finite: bool,
        hook: BucketHook | None = None,
    ) -> None:
        self.rank = calls.rank
        self.world_size = calls.world_size
        self._gradient_buffer = gradient_buffer
        self._calls = calls
        self.order = call_order_of(calls.group)
        self._hook = hook
        self.is_serial = hook is not None
        self.is_in_order = False
        self.pointers: Sequence[int] = ()
        self.note_stream: Callable[[], None] | None = None  # Paddle computes on one stream
        self._waits = calls.waits(gradient_buffer.plan)
        self._checks_finite = checks_finite
        numbers = range(len(gradient_buffer.plan.buckets))
        self._buckets = [gradient_buffer.bucket(number) for number in numbers]
        self._pieces = [
            pieces_in(gradient_buffer.plan, gradient_buffer.sections, number) for number in numbers
        ]
        self._suspects: list[tuple[int, paddle.Tensor]] = []  # and whether all is finite

    def launch(self, bucket: int, scale: float) -> BucketCall | HookedCall:
        flat = self._buckets[bucket]
        if self._checks_finite and scale:
            self._note_nonfinite(bucket, flat)
        if self._hook is not None:  # which divides by the number of ranks; the rest of `scale` is a weight
            scale *= self.world_size
            scale = 1.0 if math.isclose(scale, 1.0, rel_tol=ROUNDING) else scale  # 1 / 49 * 49 is not 1
        with paddle.no_grad():
            if scale == 0.0:
                flat.zero_()  # 0 * NaN would be NaN
            elif scale != 1.0:
                flat.scale_(scale)
        if self._hook is not None:
            return self._hook.launch(bucket, flat, scale)
        try:
            return BucketCall(self._calls.all_reduce(flat), self._waits, bucket)
        except RuntimeError as error:
            raise self._waits.failed(error, bucket) from error

    def rescale(self, factor: float) -> None:
        with paddle.no_grad():
            for section in self._gradient_buffer.sections:
                section.scale_(factor)

    def clear(self, param: int) -> None:
        with paddle.no_grad():
            self._gradient_buffer.places[param].zero_()

    def take_nonfinite(self) -> list[int]:
        found = []
        if self._suspects:  # one copy from a GPU for all of them
            flags = paddle.stack([is_finite for _, is_finite in self._suspects]).numpy()
            found = sorted({param for (param, _), each in zip(self._suspects, flags) if not each})
        self._suspects.clear()
        if self._hook is not None:
            self._hook.forget()
        return found

    def may_have_overflowed(self, scale: float) -> bool:
        is_possible = self._hook is not None or may_overflow(scale, self.world_size)
        return self._checks_finite and is_possible

    def find_overflowed(self) -> list[int]:
        return overflowed_in(self._buckets, self._pieces, lambda flat: bool(paddle.isfinite(flat).all()))

    def squared_norm(self) -> float:
        return sum(
            float(section.astype("float64").square().sum()) for section in self._gradient_buffer.sections
        )

    def begin_all_gather(self, payload: bytes) -> Callable[[], list[bytes]]:
        return self._calls.begin_gather_bytes(payload, STATUS)

    def _note_nonfinite(self, bucket: int, flat: paddle.Tensor) -> None:
        # On the CPU, a finite sum proves that all is finite; another may be an overflow. On a GPU to look at
        # it now would wait for the device.
        if flat.place.is_cpu_place():
            wide = flat if flat.dtype in (paddle.float32, paddle.float64) else flat.astype("float32")
            if math.isfinite(float(wide.sum())):
                return
        self._suspects += [(param, paddle.isfinite(piece).all()) for param, piece in self._pieces[bucket]]


class BucketCall:
    """A bucket on its way."""

    def __init__(self, call: Call, waits: ProcessGroupWaits, bucket: int) -> None:
        self._call = call
        self._waits = waits
        self._bucket = bucket

    def wait(self) -> None:
        """Block until the bucket holds the sum, at most until the deadline.

        Raises:
            DeadlineError: It was not done in time.
            PeerLostError: The group lost a connection.
            CollectiveError: It failed otherwise.
        """
        try:
            self._waits.poll(self._call.is_completed, self._bucket)
            self._call.wait()
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self._waits.failed(error, self._bucket) from error
