"""Broadcasts one rank's parameters and buffers to all ranks, many tensors in one message.

Tensors of any dtype are sent as bytes, packed into messages of a bounded size. So a model of a thousand small
tensors takes a few broadcasts, and a large dense tensor is not copied as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.reducer.communicator import BROADCAST_BYTES, pack
from paceline.torch.model.inner_tensors import is_dense, plain_tensors

_KEPT_BYTES = 1 << 20


class PreparedBroadcast:
    """Replaces the values of tensors by those of a root. The tensors must stay in the same memory.

    Example:
        Rank 0 passes [1.0, 2.0] and rank 1 [3.0, 4.0]; after a call with root 0 both hold [1.0, 2.0].
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        rank: int,
        broadcast: Callable[[torch.Tensor, int], None],
        message_bytes: int = BROADCAST_BYTES,
    ) -> None:
        self._rank = rank
        self._broadcast = broadcast
        # Tensors with gaps between their elements, and contiguous copies of them.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._messages: list[_Message] = []
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in plain_tensors(tensors):
            if tensor.numel():
                by_device.setdefault(tensor.device, []).append(tensor)
        with torch.no_grad():
            for group in by_device.values():
                whole = [tensor if is_dense(tensor) else tensor.contiguous() for tensor in group]
                self._copies += [(tensor, copy) for tensor, copy in zip(group, whole) if copy is not tensor]
                parts = [part for each in whole for part in torch.split(_as_bytes(each), message_bytes)]
                packed = pack((part.numel() for part in parts), message_bytes)
                self._messages += [_Message([parts[index] for index in indices]) for indices in packed]

    def __call__(self, root: int) -> None:
        with torch.no_grad():
            for tensor, copy in self._copies:
                copy.copy_(tensor)
            for message in self._messages:
                message.broadcast(self._broadcast, root, is_root=self._rank == root)
            for tensor, copy in self._copies:
                tensor.copy_(copy)


class _Message:
    """Tensors that are sent in one broadcast.

    A small message keeps its packed memory and the views of it: making them takes as long as copying the
    tensors.
    """

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self._parts = parts
        self._sizes = [part.numel() for part in parts]
        self._packed: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    def broadcast(self, broadcast: Callable[[torch.Tensor, int], None], root: int, *, is_root: bool) -> None:
        parts = self._parts
        if len(parts) == 1:
            broadcast(parts[0], root)
            return
        whole, cuts = self._packed or self._pack()
        if is_root:
            torch.cat(parts, out=whole)
        broadcast(whole, root)
        if not is_root:
            torch._foreach_copy_(parts, cuts)

    def _pack(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        whole = torch.empty(sum(self._sizes), dtype=torch.uint8, device=self._parts[0].device)
        packed = whole, list(torch.split(whole, self._sizes))
        if whole.numel() <= _KEPT_BYTES:
            self._packed = packed
        return packed


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes in a tensor's memory, without the conjugation or negation that torch keeps in flags."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    if flat.is_conj():
        flat = flat.conj()
    if flat.is_neg():
        flat = flat._neg_view()
    return flat.view(torch.uint8)
