"""A way for the reports of ranks on a pass that does not go through the device: Gloo beside NCCL.

The one idea: a report says what the host knows. Through NCCL it would come back only when the device has done
all that lies before it on its streams, and each backward would end with a wait for the device. So a process
group without a backend for the CPU gets a group of Gloo beside it, which all models that are averaged over it
share: their reports pair in the order of calls, as their buckets do.
"""

from __future__ import annotations

import secrets
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from paceline.torch.link.peers import ProcessGroupPeers
from paceline.torch.link.stores import store_of

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def group_for_reports(peers: ProcessGroupPeers) -> Any:
    """A ProcessGroupGloo beside the group of these ranks, which has no backend for the CPU. Collective.

    torch's stubs lack its `allgather`.

    Returns:
        The same for all models over one group; None: some rank could not connect, and reports go through the
        device on all of them.
    """
    group = peers.process_group
    if group not in _groups:
        _groups[group] = _connect(peers)
    return _groups[group]


def _connect(peers: ProcessGroupPeers) -> Any:
    # Keys that no other group of these ranks, and no earlier life of theirs, has used in the user's store.
    nonces = peers.exchange.all_gather(secrets.token_hex(8).encode(), peers.timeout_s)
    made = None
    try:
        store = store_of(peers.process_group)
        if store is not None:
            keys = PrefixStore(f"paceline/reports/{nonces[0].decode()}", store)
            timeout = timedelta(seconds=peers.timeout_s)
            made = dist.ProcessGroupGloo(keys, peers.rank, peers.world_size, timeout=timeout)
    except (AttributeError, RuntimeError):  # a torch without Gloo; an interface that others cannot reach
        pass
    told = peers.exchange.all_gather(b"0" if made is None else b"1", peers.timeout_s)
    return made if all(each == b"1" for each in told) else None
