"""The communicator between the ranks of a replica group in local SGD: those of a host, or a single rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from paceline import _core
from paceline.collectives.failures import number_ranks
from paceline.collectives.formation import form_core, share_on_each_host
from paceline.errors import ConfigError
from paceline.reducer.communicator import Communicator
from paceline.rendezvous.exchange import Exchange

_Communicator = TypeVar("_Communicator", bound=Communicator[Any])
ReplicaGroups = tuple[tuple[int, ...], ...]
"""The ranks of each replica group."""


def join_replica_group(
    communicator: _Communicator,
    exchange: Exchange,
    between: str,
    make_communicator: Callable[[_core.HostGroup], _Communicator],
    *,
    owner: str,
    on_host: bool,
    timeout_s: float,
    warn_after_s: float,
) -> tuple[_Communicator, ReplicaGroups]:
    """The communicator between the ranks of this rank's replica group, and the ranks of each group.
    Collective, over all ranks.
    """
    if not on_host:
        raise ConfigError(
            f"{owner}: local_sgd is not possible here.",
            expected="parameters on the CPU",
            seen="parameters on a GPU",
            hint="leave it out",
            argument="local_sgd",
        )
    if communicator.path == "memory" and (between == "hosts" or communicator.world_size == 1):
        return communicator, (tuple(range(communicator.world_size)),)
    core, members = share_in_replica_group(exchange, between, timeout_s, warn_after_s)
    return make_communicator(core), members


def share_in_replica_group(
    exchange: Exchange, between: str, timeout_s: float, warn_after_s: float
) -> tuple[_core.HostGroup, ReplicaGroups]:
    """The shared memory of this rank's replica group, and the ranks of each. Collective, over all ranks."""
    if between == "hosts":
        memory = share_on_each_host(
            exchange, name="local SGD on one host", timeout_s=timeout_s, warn_after_s=warn_after_s
        )
        return memory.host_group, memory.hosts
    name = f"local SGD of rank {exchange.rank}"
    core = form_core(_Alone(), name=name, timeout_s=timeout_s, warn_after_s=warn_after_s)
    number_ranks(name, (exchange.rank,), exchange.world_size)
    return core, tuple((each,) for each in range(exchange.world_size))


class _Alone:
    rank, world_size = 0, 1

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        return [payload]
