"""The connections between hosts through Gloo groups of torch: one for each place in a host.

A `paceline.reducer.hosts.HostsTransport`. Gloo is in every wheel of torch, its messages pair by tags, and its
own thread moves them, so that they travel while Python computes. A group of our own, and not the user's: its
calls and tags are ours alone, and when it has to be ended the user's goes on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.errors import RendezvousError
from paceline.reducer.hierarchical import Hosts, is_regular
from paceline.reducer.host_exchange import FailureNotes
from paceline.reducer.hosts import Message
from paceline.rendezvous.host import HostMemory
from paceline.torch.link.peers import Peers, ProcessGroupPeers


def join_hosts(peers: Peers, memory: HostMemory) -> Hosts | None:
    """Connect this rank to its partners on the other hosts. Collective, over all ranks.

    Returns:
        Who is where; None: not between these ranks. They need several hosts with as many ranks each, and a
        process group that has a Gloo backend for the CPU.

    Raises:
        RendezvousError: A partner could not be reached in time.
    """
    if not isinstance(peers, ProcessGroupPeers) or not is_regular(memory.hosts) or not _has_gloo(peers):
        return None
    rank = peers.rank
    own = next(host for host, ranks in enumerate(memory.hosts) if rank in ranks)
    place = memory.hosts[own].index(rank)
    partners = [ranks[place] for ranks in memory.hosts]
    names = [each.decode() for each in peers.exchange.all_gather(_own_name(), peers.timeout_s)]
    world = [dist.get_global_rank(peers.process_group, partner) for partner in partners]
    try:
        group = dist.new_group(
            world,
            timeout=timedelta(seconds=peers.timeout_s),
            backend="gloo",
            use_local_synchronization=True,
            group_desc="paceline between hosts",
        )
    except RuntimeError as error:
        others = ", ".join(f"rank {partner} ({names[partner]})" for partner in partners if partner != rank)
        raise RendezvousError(
            f"Rank {rank} of {peers.world_size} could not connect to its partners on the other hosts.",
            seen=f"{others}\n{str(error).splitlines()[0]}",
            likely="a firewall between the hosts, or an interface that the other host cannot reach",
            hint="GLOO_SOCKET_IFNAME names the interface to use, on each host; "
            'reduce_through="group" averages over the process group alone',
        ) from error
    transport = GlooTransport(
        group, own, partners, [dist.get_group_rank(group, each) for each in world], names
    )
    return Hosts(
        rank=rank,
        world_size=peers.world_size,
        ranks=memory.hosts,
        group=memory.host_group,
        transport=transport,
        notes=FailureNotes(transport),
        gather=lambda payload: peers.exchange.all_gather(payload, peers.timeout_s),
        timeout_s=peers.timeout_s,
    )


class GlooTransport:
    """See `paceline.reducer.hosts.HostsTransport`.

    Args:
        group: This rank and its partners, over Gloo.
        host: Number of this rank's host.
        ranks: The partner on each host, and this rank.
        in_group: Their numbers in the group.
        names: Host and process of each rank, in words.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        host: int,
        ranks: Sequence[int],
        in_group: Sequence[int],
        names: Sequence[str],
    ) -> None:
        self.host, self.ranks = host, ranks
        self._group = group
        self._in_group = in_group
        self._names = names

    def send(self, host: int, message: Message, tag: int) -> GlooTransfer:
        tensor = torch.from_numpy(message)
        return GlooTransfer(self._group.send([tensor], self._in_group[host], tag), tensor)

    def receive(self, host: int, message: Message, tag: int) -> GlooTransfer:
        tensor = torch.from_numpy(message)
        return GlooTransfer(self._group.recv([tensor], self._in_group[host], tag), tensor)

    def name(self, host: int) -> str:
        return f"rank {self.ranks[host]} (host {host}, {self._names[self.ranks[host]]})"

    def abort(self) -> None:
        self._group.abort()


class GlooTransfer:
    """A message on its way. `tensor` keeps its memory."""

    __slots__ = ("_tensor", "_work")

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, timeout_s: float) -> None:
        self._work.wait(timedelta(seconds=timeout_s))


def _has_gloo(peers: ProcessGroupPeers) -> bool:
    try:
        backend = peers.process_group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False  # of GPUs alone
    return bool(backend.name() == "gloo")


def _own_name() -> bytes:
    return f"{socket.gethostname()}, pid {os.getpid()}".encode()
