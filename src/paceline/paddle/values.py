"""Values that are the same on every rank: parameters of one rank, buffers of one or of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import paddle

from paceline import _core
from paceline.collectives.ops import ReduceOp
from paceline.paddle.arena import dtype_name
from paceline.paddle.tensors import ManagedTensors
from paceline.reducer.buffer_policy import BufferPolicies
from paceline.reducer.host import CORE_DTYPES


class BufferSync:
    """Keeps the buffers and running statistics of one model in step.

    Args:
        tensors: The model's.
        group: All ranks.
        patterns: Policies by name pattern; the first match counts.
        broadcasts: Whether buffers that no pattern matches are broadcast after each pass.
    """

    def __init__(
        self, tensors: ManagedTensors, group: _core.HostGroup, patterns: Mapping[str, str], broadcasts: bool
    ) -> None:
        self._tensors = tensors
        self._group = group
        self._policies = BufferPolicies(tensors.buffers, patterns, broadcasts)
        self.is_needed = self._policies.is_needed

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
        broadcast_values(copied, self._group, root=active[0])
        for buffer in averaged:
            if buffer.is_floating_point():
                self._average(buffer, active)

    def _average(self, buffer: paddle.Tensor, active: Sequence[int]) -> None:
        dtype = "float64" if buffer.dtype == paddle.float64 else "float32"
        with paddle.no_grad():
            wide = buffer.astype(dtype).contiguous() * float(self._group.rank in active)
            self._group.all_reduce(
                wide.data_ptr(), int(wide.size), CORE_DTYPES[dtype_name(wide.dtype)], ReduceOp.SUM
            )
            paddle.assign((wide / len(active)).astype(buffer.dtype), buffer)


def broadcast_values(tensors: Iterable[paddle.Tensor], group: _core.HostGroup, *, root: int = 0) -> None:
    """Replace the values of `tensors` by those of the rank `root`. Collective.

    Args:
        tensors: On the CPU; the same shapes and dtypes on all ranks.
        group: All ranks.
        root: Whose values; the same on all ranks.

    Example:
        Rank 0 passes [1.0, 2.0] and rank 1 passes [3.0, 4.0]; after the call both hold [1.0, 2.0].
    """
    with paddle.no_grad():
        for tensor in tensors:
            nbytes = int(tensor.size) * tensor.element_size()
            if nbytes == 0:
                continue
            flat = tensor if tensor.is_contiguous() else tensor.contiguous()
            group.broadcast(flat.data_ptr(), nbytes, root)
            if flat is not tensor:
                paddle.assign(flat, tensor)
