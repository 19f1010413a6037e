"""Rank 0's parameters and buffers on every rank, many tensors in one broadcast.

The one idea: tensors of any dtype travel as bytes, packed into pieces of a bounded size, so that a model of
a thousand small tensors costs a few broadcasts, and a large tensor no second copy of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.reducer.link import BROADCAST_BYTES, pack
from paceline.torch.model.inner_tensors import is_dense, plain_tensors


def broadcast_tensors(
    tensors: Sequence[torch.Tensor],
    rank: int,
    broadcast: Callable[[torch.Tensor], None],
    piece_bytes: int = BROADCAST_BYTES,
    *,
    root: int = 0,
) -> None:
    """Replace the values of `tensors` by those of the rank `root`. Collective.

    Args:
        tensors: The same kinds, shapes, strides and dtypes on all ranks.
        rank: The rank of this process.
        broadcast: Replaces a flat uint8 tensor by that of `root`.
        piece_bytes: Most bytes of one broadcast.
        root: Whose values; the same on all ranks.

    Example:
        Rank 0 passes [1.0, 2.0] and rank 1 passes [3.0, 4.0]; after the call both hold [1.0, 2.0].
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in plain_tensors(tensors):
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    with torch.no_grad():
        for group in by_device.values():
            copies = [(tensor, tensor.contiguous()) for tensor in group if not is_dense(tensor)]
            flat = [_as_bytes(tensor) for tensor in group if is_dense(tensor)]
            flat += [_as_bytes(copy) for _, copy in copies]
            parts = [part for each in flat for part in torch.split(each, piece_bytes)]
            for run in pack((part.numel() for part in parts), piece_bytes):
                _broadcast_piece([parts[index] for index in run], rank == root, broadcast)
            for tensor, copy in copies:
                tensor.copy_(copy)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory as flat bytes, whatever the order of its dimensions.

    A tensor may be the conjugate, or the negative, of what lies in its memory: these are the bytes there.
    """
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    if flat.is_conj():
        flat = flat.conj()
    if flat.is_neg():
        flat = flat._neg_view()
    return flat.view(torch.uint8)


def _broadcast_piece(
    parts: list[torch.Tensor], is_root: bool, broadcast: Callable[[torch.Tensor], None]
) -> None:
    if len(parts) == 1:
        broadcast(parts[0])
        return
    packed = torch.cat(parts)
    broadcast(packed)
    if not is_root:
        for part, received in zip(parts, torch.split(packed, [part.numel() for part in parts])):
            part.copy_(received)
