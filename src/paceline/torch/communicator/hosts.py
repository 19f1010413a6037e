"""Connections between hosts through torch Gloo groups: two groups for each place in a host.

A `HostsTransport` of `paceline.reducer.between_hosts`. Gloo is in every torch wheel, it matches messages by
tags, and its own thread moves them, so that transfers continue while Python computes. The groups are created
here instead of using the user's group: their calls and tags do not mix with the user's, and the user's group
survives when they are aborted. They are not registered with torch as `new_group` would do: names of
registered groups depend on how many groups a rank is in, and those groups are never freed.

There are two groups so that each connection carries one direction. Gloo's thread cannot read from a
connection while another thread writes to it: it polls the kernel in a loop until the write is done. See
docs/design/hosts.md.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from paceline.collectives.formation import share_alone
from paceline.errors import RendezvousError
from paceline.health import exit_reports
from paceline.health.connections import (
    close_once_arrived,
    open_sockets,
    shut_down,
    sockets_to,
    wait_until_arrived,
)
from paceline.health.control_channel import ControlChannel
from paceline.reducer.between_hosts.hierarchical import Hosts
from paceline.reducer.between_hosts.message_headers import Message
from paceline.reducer.between_hosts.routes import num_shards, place_of
from paceline.rendezvous.shared_memory import HostMemory
from paceline.torch.communicator.find_peers import Peers, ProcessGroupPeers
from paceline.torch.communicator.store_exchange import store_of


def join_hosts(peers: Peers, memory: HostMemory) -> Hosts | None:
    """Connect this rank to its peers on the other hosts. Collective, over all ranks.

    Returns:
        The hosts, their ranks and the connections; None if all ranks are on one host, or the process group
        has no Gloo backend for the CPU.
    """
    if not isinstance(peers, ProcessGroupPeers) or len(memory.hosts) == 1 or not _has_gloo(peers):
        return None
    transport = connect_peers(peers, memory.hosts)
    return Hosts(
        rank=peers.rank,
        world_size=peers.world_size,
        ranks=memory.hosts,
        group=memory.host_group,
        transport=transport,
        control=peers.channel(memory.hosts),
        gather=lambda payload: peers.exchange.all_gather(payload, peers.timeout_s),
        timeout_s=peers.timeout_s,
    )


def join_peers(peers: ProcessGroupPeers, hosts: Sequence[Sequence[int]], control: ControlChannel) -> Hosts:
    """Connect this rank to its peers; each peer counts as a host of one rank. Collective, over all ranks.

    Raises:
        RendezvousError: A peer could not be reached in time.
    """
    transport = connect_peers(peers, hosts)
    assert transport is not None  # every rank has a shard
    name = f"shards of rank {peers.rank} of {peers.world_size} {secrets.token_hex(4)}"
    return Hosts(
        rank=transport.host,
        world_size=len(hosts),
        ranks=tuple((host,) for host in range(len(hosts))),
        group=share_alone(name, peers.rank, peers.world_size, peers.timeout_s, peers.warn_after_s),
        transport=transport,
        control=control,
        gather=None,
        timeout_s=peers.timeout_s,
        known_as=f"rank {peers.rank} of {peers.world_size}",
    )


def connect_peers(peers: ProcessGroupPeers, hosts: Sequence[Sequence[int]]) -> GlooTransport | None:
    """Collective, over all ranks."""
    rank = peers.rank
    own, place = place_of(hosts, rank)
    reported = [each.decode() for each in peers.exchange.all_gather(_own_name(), peers.timeout_s)]
    if place >= num_shards(hosts):
        sockets_to(peers.exchange, [], open_sockets(), peers.timeout_s)
        return None
    nonces, names = zip(*(each.split(" ", 1) for each in reported))
    same_place = [ranks[place] for ranks in hosts]
    # Keys that no other model, and no earlier start of these ranks, has used in the user's store.
    keys = f"paceline/hosts/{nonces[0]}/{place}"
    before = open_sockets()
    try:
        store = store_of(peers.process_group)
        if store is None:
            raise RuntimeError("the process group was made without a store")
        timeout = timedelta(seconds=peers.timeout_s)
        upwards, downwards = (
            dist.ProcessGroupGloo(PrefixStore(f"{keys}/{way}", store), own, len(same_place), timeout=timeout)
            for way in ("upwards", "downwards")
        )
    except RuntimeError as error:
        others = ", ".join(f"rank {each} ({names[each]})" for each in same_place if each != rank)
        raise RendezvousError(
            f"Rank {rank} of {peers.world_size} could not connect to its peers on the other hosts.",
            seen=f"{others}\n{str(error).splitlines()[0]}",
            likely="a firewall between the hosts, or an interface that the other host cannot reach",
            hint="GLOO_SOCKET_IFNAME names the interface to use, on each host; "
            'reduce_through="group" averages over the process group alone',
        ) from error
    sockets = sockets_to(peers.exchange, same_place, before, peers.timeout_s)
    return GlooTransport(upwards, downwards, own, same_place, names, sockets)


class GlooTransport:
    """A `paceline.reducer.between_hosts.message_headers.HostsTransport`."""

    def __init__(
        self,
        upwards: Any,
        downwards: Any,
        host: int,
        ranks: Sequence[int],
        names: Sequence[str],
        sockets: Sequence[socket.socket],
    ) -> None:
        self.host, self.ranks = host, ranks
        self.needs_headers = self.lets_signals_in = False
        self._upwards, self._downwards = upwards, downwards
        self._names = names
        self._sockets = sockets
        # Data that Gloo reports as sent may still be in this machine's socket buffers. A peer that has not
        # received it yet may already request the next backward over the same connection; closing the
        # connection would then reset it.
        weakref.finalize(self, close_once_arrived, sockets).atexit = False
        exit_reports.before_leaving(self.leave, is_last=True)

    # The two methods return torch's calls without a Python wrapper, whose cost every message would pay.

    def sending(self, host: int, message: Message, tag: int) -> Callable[[], dist.Work]:
        group = self._upwards if host > self.host else self._downwards
        return functools.partial(group.send, [torch.from_numpy(message)], host, tag)

    def receiving(self, host: int, message: Message, tag: int) -> Callable[[], dist.Work]:
        group = self._upwards if host < self.host else self._downwards
        return functools.partial(group.recv, [torch.from_numpy(message)], host, tag)

    def timeout_of(self, timeout_s: float) -> timedelta:
        return timedelta(seconds=timeout_s)

    def leave(self) -> None:
        wait_until_arrived(self._sockets)

    def name(self, host: int) -> str:
        return f"rank {self.ranks[host]} (host {host}, {self._names[self.ranks[host]]})"

    def abort(self) -> None:
        # With torch 2.13 neither abort() nor shutdown() of a Gloo group wakes a waiting thread. Shutting the
        # sockets down does: data that was written before still arrives, then the waits of the peer and of
        # this rank see the end of the stream.
        shut_down(self._sockets)


def _has_gloo(peers: ProcessGroupPeers) -> bool:
    try:
        backend = peers.process_group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False  # a group for GPUs only
    return bool(backend.name() == "gloo")


def _own_name() -> bytes:
    return f"{secrets.token_hex(8)} {socket.gethostname()}, pid {os.getpid()}".encode()
