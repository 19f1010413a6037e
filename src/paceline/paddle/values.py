"""Buffers and running statistics that are the same on every rank: those of one, or the mean of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import paddle

from paceline.paddle.links import Link
from paceline.paddle.tensors import ManagedTensors
from paceline.reducer.buffer_policy import BufferPolicies


class BufferSync:
    """Keeps the buffers and running statistics of one model in step.

    Args:
        tensors: The model's.
        link: Between all ranks.
        patterns: Policies by name pattern; the first match counts.
        broadcasts: Whether buffers that no pattern matches are broadcast after each pass.

    Attributes:
        in_step: Names of those that are the same on all ranks after a pass.
    """

    def __init__(
        self, tensors: ManagedTensors, link: Link, patterns: Mapping[str, str], broadcasts: bool
    ) -> None:
        self._tensors = tensors
        self._link = link
        self._policies = BufferPolicies(tensors.buffers, patterns, broadcasts)
        self.is_needed = self._policies.is_needed
        self.in_step = self._policies.in_step

    def sync(self, active: Sequence[int], *, on_demand: bool) -> None:
        """Bring the buffers in step. Collective.

        Args:
            active: Ranks whose values count; the first is the one that broadcasts.
            on_demand: Include buffers that are left alone after a pass, but for those that a pattern says
                to leave alone.
        """
        now = self._tensors.current_buffers()
        chosen = self._policies.broadcast(on_demand=on_demand)
        copied = [buffer for name, buffer in now.items() if name in chosen]
        averaged = [buffer for name, buffer in now.items() if name in self._policies.averaged]
        # Counters and other integers have no mean.
        copied += [buffer for buffer in averaged if not buffer.is_floating_point()]
        self._link.broadcast(copied, active[0])
        for buffer in averaged:
            if buffer.is_floating_point():
                self._average(buffer, active)

    def _average(self, buffer: paddle.Tensor, active: Sequence[int]) -> None:
        dtype = "float64" if buffer.dtype == paddle.float64 else "float32"
        with paddle.no_grad():
            wide = buffer.astype(dtype).contiguous() * float(self._link.rank in active)
            self._link.sum(wide)
            paddle.assign((wide / len(active)).astype(buffer.dtype), buffer)
