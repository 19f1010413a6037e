"""Chooses what carries the gradients of a model: shared memory, a process group, or both between hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from paceline import _core
from paceline.errors import ConfigError
from paceline.health.peer_monitor import ChannelSource, PeerMonitor
from paceline.reducer.between_hosts.hierarchical import Hosts
from paceline.reducer.between_hosts.hosts_communicator import HostsCommunicator
from paceline.reducer.between_hosts.options import BetweenHosts
from paceline.reducer.communicator import Communicator, GroupCommunicator, MemoryCommunicator
from paceline.reducer.framework_ops import FrameworkOps
from paceline.reducer.peers import GroupPeers
from paceline.reducer.process_group_calls import ProcessGroupCalls
from paceline.reducer.process_group_peers import ProcessGroupPeers
from paceline.rendezvous.shared_memory import HostMemory

_Tensor = TypeVar("_Tensor")


def connect(
    peers: ProcessGroupPeers[_Tensor] | GroupPeers,
    ops: FrameworkOps[_Tensor],
    *,
    owner: str,
    on_host: bool,
    reduce_through: str,
    between_hosts: BetweenHosts | None,
    join_hosts: Callable[[HostMemory], Hosts | None],
    why_not_joined: str,
    calls_of_hooks: Callable[[_core.HostGroup], ProcessGroupCalls[_Tensor]] | None = None,
) -> Communicator[_Tensor]:
    """The best communicator between these ranks. Collective.

    Args:
        peers: The ranks that train the model.
        ops: The framework's functions.
        owner: The class to name in errors.
        on_host: Whether all trainable parameters are on the CPU; the same on all ranks.
        reduce_through: "memory", "group", "hosts", or "auto": the best one that needs no explicit request;
            the same on all ranks.
        between_hosts: The options for sums between hosts; the same on all ranks. None: the communicator is
            only for values.
        join_hosts: Connects the ranks of several hosts, given the memory of this one; returns None if it
            cannot. Collective.
        why_not_joined: The reason if it cannot, in words.
        calls_of_hooks: See `MemoryCommunicator`.
    """
    memory = peers.share_hosts() if on_host and reduce_through != "group" else None
    if memory is not None and len(memory.hosts) == 1:
        return MemoryCommunicator(memory.host_group, ops, calls_of_hooks)
    check_group(peers, ops, owner, on_host=on_host, reduce_through=reduce_through)
    assert isinstance(peers, ProcessGroupPeers)
    hosts = join_hosts(memory) if memory is not None and between_hosts is not None else None
    peers.check_calls(owner, on_host=on_host, reduce_through=reduce_through, between_hosts=hosts is not None)
    if memory is None:
        peers.calls.peer_monitor = peers.find_peer_monitor()
    else:
        peers.calls.peer_monitor = PeerMonitor(ChannelSource(peers.channel(memory.hosts)))
    communicator = GroupCommunicator(peers.calls, ops)
    if hosts is not None and between_hosts is not None:
        return HostsCommunicator(communicator, ops, hosts, between_hosts)
    if memory is not None:
        memory.host_group.close()
    if between_hosts is not None and peers.world_size > 1:
        if not on_host:
            between_hosts.refuse(f"parameters on {ops.names.device}")
        is_asked_for = reduce_through == "group"
        between_hosts.refuse('reduce_through="group"' if is_asked_for else why_not_joined)
    return communicator


def check_group(
    peers: object, ops: FrameworkOps[Any], owner: str, *, on_host: bool, reduce_through: str
) -> None:
    """Refuse a request for shared memory, and ranks that no process group connects."""
    on_device = f"parameters on {ops.names.device}"
    if reduce_through == "memory":
        raise ConfigError(
            f'{owner}: reduce_through="memory" is not possible here.',
            seen="ranks on several hosts" if on_host else on_device,
            hint='leave reduce_through at "auto"',
        )
    if not isinstance(peers, ProcessGroupPeers):
        raise ConfigError(
            f"{owner}: a paceline.Group works in host memory only.",
            seen=f"reduce_through={reduce_through!r}" if on_host else on_device,
            hint=ops.names.forming,
        )
