"""Counts the tensors in one storage: autograd may let a gradient share its memory with any tensor."""

from __future__ import annotations

import functools

import torch

from paceline import _core


@functools.cache
def uses_of_storages() -> _core.CountedStorageUses | None:
    """Counts the uses of a tensor's storage; None: this torch has no such count.

    Every backward needs the count of each gradient, so the core finds out where torch keeps the number.
    """
    if not hasattr(torch._C, "_storage_Use_Count"):
        return None
    first, second = torch.empty(1, device="cpu"), torch.empty(2, device="cpu")
    alias = second.detach()
    return _core.CountedStorageUses([first, second, alias], _describe)


def _describe(tensor: torch.Tensor) -> tuple[int, int, int]:
    if not torch._C._has_storage(tensor):
        return tensor._cdata, 0, 0
    storage = tensor.untyped_storage()
    # The Python object of the storage counts as one use.
    return tensor._cdata, storage._cdata, torch._C._storage_Use_Count(storage._cdata) - 1
