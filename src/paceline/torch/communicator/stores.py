"""The store of a process group of torch, whichever torch it is."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import Store


def store_of(group: dist.ProcessGroup) -> Store | None:
    """The store through which the ranks of a group have met; None: it was made without one."""
    try:
        store: Store = dist.distributed_c10d._get_process_group_store(group)
        return store
    except (AttributeError, KeyError):  # another torch, or a group that torch did not make
        pass
    try:
        return group.get_group_store()  # which torch 2.6 lacks
    except (AttributeError, RuntimeError):
        return None
