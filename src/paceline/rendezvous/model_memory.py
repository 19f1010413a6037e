"""Memory for the one copy of a model that the ranks of each host share.

It is a file without a name, separate from the region: it is as large as the model, and outlives the group.
Each rank reserves the memory of its own shard, and shards are in the order of ranks. A sharded optimizer
deals parameters in the same order, so each rank writes to memory of its own NUMA node.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from paceline import _core
from paceline.errors import PacelineError
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.descriptors import SHARE_OF_TAKING, DescriptorServer, take_descriptor
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.messages import gather_objects
from paceline.rendezvous.shared_memory_failure import SharedMemoryFailure, raise_limits


def share_model_memory(
    exchange: Exchange, host_ranks: Sequence[int], nbytes: int, *, timeout_s: float
) -> _core.ModelMemory:
    """Map one file of zeros on each host. Collective over the ranks of all hosts; blocks at most `timeout_s`.

    Raises:
        RegionError: There is not enough memory, or a rank reached a limit of its own; on every rank.
        RendezvousError: A rank did not take part in time.
    """
    deadline, first = Deadline(timeout_s), host_ranks[0]
    what = f"the {nbytes} bytes of the model's parameters, one copy for each host"
    fd, memory = -1, None
    try:
        with DescriptorServer(len(host_ranks)) as server:
            reason = server.reason
            if exchange.rank == first and not reason.problem:
                try:
                    fd = _core.create_model_memory(nbytes)
                    server.serve(fd)
                except PacelineError as error:
                    reason = SharedMemoryFailure.of(error)
            reported = {"address": server.address, **reason.facts()}
            offers = gather_objects(exchange, reported, max(deadline.left_s(), 1e-3))
            raise_limits(offers, what)
            try:
                if exchange.rank != first:
                    patience = Deadline(SHARE_OF_TAKING * deadline.left_s())
                    fd = take_descriptor(offers[first]["address"], patience, first)
                memory = _core.ModelMemory(fd)
                memory.reserve_share(host_ranks.index(exchange.rank), len(host_ranks))
            except (PacelineError, OSError) as error:
                reason = SharedMemoryFailure.of_transfer(error, first)
            states = gather_objects(exchange, reason.facts(), max(deadline.left_s(), 1e-3))
        raise_limits(states, what)
    finally:
        if fd >= 0:
            os.close(fd)
    assert memory is not None
    return memory
