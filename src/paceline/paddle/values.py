"""Rank 0's parameters and buffers on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import paddle

from paceline import _core


def broadcast_values(tensors: Iterable[paddle.Tensor], group: _core.HostGroup) -> None:
    """Replace the values of `tensors` by rank 0's. Collective.

    Args:
        tensors: On the CPU; the same shapes and dtypes on all ranks.
        group: All ranks.

    Example:
        Rank 0 passes [1.0, 2.0] and rank 1 passes [3.0, 4.0]; after the call both hold [1.0, 2.0].
    """
    with paddle.no_grad():
        for tensor in tensors:
            nbytes = int(tensor.size) * tensor.element_size()
            if nbytes == 0:
                continue
            flat = tensor if tensor.is_contiguous() else tensor.contiguous()
            group.broadcast(flat.data_ptr(), nbytes, 0)
            if flat is not tensor:
                paddle.assign(flat, tensor)
