"""The memory of those ranks that train as one in local SGD: of a host, or of a single rank.

Imports `collectives`, `rendezvous`, the core and the standard library.
"""

from __future__ import annotations

from paceline import _core
from paceline.collectives.failures import number_ranks
from paceline.collectives.formation import form_core
from paceline.collectives.member_exchange import MemberExchange
from paceline.rendezvous.shared_memory import HostMemory


def share_in_member(
    memory: HostMemory, rank: int, world_size: int, between: str, timeout_s: float
) -> tuple[_core.HostGroup, tuple[tuple[int, ...], ...]]:
    """The memory of this rank's member, and the ranks of each member. Collective, over all ranks.

    Args:
        memory: What this rank's host shares; it is given back where ranks are members.
        rank: Number of this rank, among all.
        world_size: The number of all ranks.
        between: A `LocalSGD.between`.
        timeout_s: Deadline of its calls.

    Example:
        Ranks 0 and 1 are on one host, 2 and 3 on another. With "hosts" rank 3 has the memory that it shares
        with rank 2, and ((0, 1), (2, 3)); with "ranks" memory of its own, and ((0,), (1,), (2,), (3,)).
    """
    if between == "hosts":
        return memory.host_group, memory.hosts
    alone = MemberExchange(memory.host_group, [memory.host_group.rank], [])
    name = f"{memory.host_group.name}, rank {rank} alone"
    core = form_core(alone, name=name, timeout_s=timeout_s)
    number_ranks(name, (rank,), world_size)
    memory.host_group.close()
    return core, tuple((each,) for each in range(world_size))
