"""Averages buckets over a group of paddle.distributed, between hosts and on GPUs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import paddle

from paceline.health.store_check import Work
from paceline.reducer.comm_hooks import HookedBuckets
from paceline.reducer.communicator import ReductionOptions
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.process_group import Transport

if TYPE_CHECKING:
    from paceline.paddle.communicator.calls import GroupCalls


class PaddleTransport(Transport[paddle.Tensor]):
    """Paddle computes on one stream, so no further synchronisation is needed."""

    _calls: GroupCalls

    def __init__(
        self,
        gradient_buffer: GradientBuffer[paddle.Tensor],
        calls: GroupCalls,
        options: ReductionOptions,
        hook: HookedBuckets[paddle.Tensor] | None = None,
    ) -> None:
        super().__init__(gradient_buffer, calls, checks_finite=options.checks_finite, hook=hook)
        self._suspects: list[tuple[int, paddle.Tensor]] = []  # (parameter, whether it is finite)

    def launch(self, bucket: int, scale: float) -> Any:
        with paddle.no_grad():
            return super().launch(bucket, scale)

    def _start(self, bucket: int, flat: paddle.Tensor) -> Work:
        return self._calls.all_reduce(flat)

    def _multiply(self, flat: paddle.Tensor, factor: float) -> None:
        flat.scale_(factor)

    def rescale(self, factor: float) -> None:
        with paddle.no_grad():
            for section in self._gradient_buffer.sections:
                section.scale_(factor)

    def clear(self, param: int) -> None:
        with paddle.no_grad():
            super().clear(param)

    def take_nonfinite(self) -> list[int]:
        found = []
        if self._suspects:  # one copy from the GPU for all flags
            flags = paddle.stack([is_finite for _, is_finite in self._suspects]).numpy()
            found = sorted({param for (param, _), each in zip(self._suspects, flags) if not each})
        self._suspects.clear()
        if self.hook is not None:
            self.hook.forget()
        return found

    def squared_norm(self) -> float:
        return sum(
            float(section.astype("float64").square().sum()) for section in self._gradient_buffer.sections
        )

    def _is_finite(self, flat: paddle.Tensor) -> bool:
        return bool(paddle.isfinite(flat).all())

    def _note_nonfinite(self, bucket: int, flat: paddle.Tensor) -> None:
        # On the CPU, a finite sum proves that all values are finite; an infinite sum may be an overflow. On a
        # GPU, reading the sum now would wait for the device.
        if flat.place.is_cpu_place():
            wide = flat if flat.dtype in (paddle.float32, paddle.float64) else flat.astype("float32")
            if math.isfinite(float(wide.sum())):
                return
        self._suspects += [(param, paddle.isfinite(piece).all()) for param, piece in self._pieces[bucket]]
