"""The connections between hosts through Gloo groups of Paddle: two for each pair of peers and direction.

Paddle's Gloo has `send` and `recv` for tensors of the CPU. Each call blocks until it is complete, without
Python's lock, and gives up after 30 s. The n-th call of one rank on a group pairs with the n-th call of the
other. So a group of two ranks in which one only sends is a connection for `piped_transport` of
`paceline.reducer.between_hosts`, which does the rest. Paddle never frees a group's threads and descriptors,
so each group lives as long as the process, and all models that are wrapped over one group of the user's share
these connections.
"""

from __future__ import annotations

import json
import socket
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import RendezvousError
from paceline.health.connections import open_sockets, sockets_to
from paceline.health.control_channel import ControlChannel
from paceline.paddle.communicator.find_peers import PaddlePeers, Peers
from paceline.paddle.internals import GLOO_LIMIT_S, make_pair
from paceline.reducer.between_hosts.hierarchical import Hosts
from paceline.reducer.between_hosts.piped_transport import Carry, PipedTransport, Pipes
from paceline.reducer.between_hosts.routes import num_shards
from paceline.reducer.peers import Ranks
from paceline.rendezvous.addresses import addresses_for_others
from paceline.rendezvous.deadline import Deadline, call_within
from paceline.rendezvous.messages import read_object, read_of_ranks
from paceline.rendezvous.shared_memory import HostMemory

MOST_HOSTS = 16
"""With more hosts there would be too many threads and connections: about fourteen threads for each peer."""
LANES = 2
"""Connections to a peer in each direction. Gloo sends a request to the receiver before each message, and the
request queues behind earlier messages: with one connection, a 100 Mbit/s network was idle for a seventh of
the time."""
_CONNECT_WITHIN_S = 60.0
_TRY_S = 2.0
_RETRY_S = 0.02
_FIRST_ID = 1 << 30  # the first id of our groups; Paddle counts its own from 0
_Layout = tuple[tuple[int, ...], ...]

_next_id = _FIRST_ID
_pipes: weakref.WeakKeyDictionary[Any, dict[_Layout, Pipes | None]] = weakref.WeakKeyDictionary()
_kept: list[Pipes] = []  # until the end of the process, which closes them; their groups may be gone before


def join_hosts(peers: Peers, memory: HostMemory) -> Hosts | None:
    """Connect this rank to its peers on the other hosts. Collective, over all ranks.

    Returns:
        The hosts, their ranks and the transport; None: these ranks cannot be connected so. They need a group
        of Paddle over Gloo, and at most MOST_HOSTS hosts.
    """
    if not isinstance(peers, PaddlePeers) or not peers.calls.on_host or len(memory.hosts) > MOST_HOSTS:
        return None
    hosts = memory.hosts
    control = peers.channel(hosts)
    known = _pipes.setdefault(peers.process_group, {})
    if hosts not in known:
        known[hosts] = _connect(peers, hosts, control)
    pipes, model = known[hosts], 0
    if pipes is not None:
        model = pipes.num_models
        pipes.num_models += 1
    return Hosts(
        rank=peers.rank,
        world_size=peers.world_size,
        ranks=hosts,
        group=memory.host_group,
        transport=None if pipes is None else PipedTransport(pipes, model),
        control=control,
        gather=lambda payload: peers.exchange.all_gather(payload, peers.timeout_s),
        timeout_s=peers.timeout_s,
        model=model,
    )


@dataclass(frozen=True)
class _Offer:
    """The message that a rank publishes before it connects.

    Attributes:
        next_id: Paddle has no group with this id or a higher one in this process.
        addresses: The addresses of its host for other hosts.
        ports: The ports of the stores over which it connects to peers: by the peer's rank, one for each
            connection.
    """

    next_id: int
    addresses: list[str]
    ports: dict[str, list[int]]


def _connect(peers: Ranks, hosts: _Layout, control: ControlChannel) -> Pipes | None:
    """Collective, over all ranks."""
    global _next_id
    own = next(host for host, ranks in enumerate(hosts) if peers.rank in ranks)
    place, shards = hosts[own].index(peers.rank), num_shards(hosts)
    same_place = [ranks[place] for ranks in hosts] if place < shards else []
    # Of two peers, the one on the host with the lower number runs the stores.
    reserved = {rank: [_reserve_port() for _ in range(2 * LANES)] for rank in same_place[own + 1 :]}
    ports = {str(rank): [each.getsockname()[1] for each in row] for rank, row in reserved.items()}
    offers = _gather_offers(peers, _Offer(_next_id, addresses_for_others(), ports))
    first_id = max(offer.next_id for offer in offers)
    _next_id = first_id + shards * len(hosts) ** 2 * LANES
    before = open_sockets()
    outgoing: dict[int, list[Carry]] = {}
    incoming: dict[int, list[Carry]] = {}
    # All ranks connect to their peers in one order, so that there is no deadlock.
    for other, peer in enumerate(same_place):
        if other == own:
            continue
        low, high = min(own, other), max(own, other)
        for index, (sender, receiver) in enumerate([(low, high), (high, low)] * LANES):
            number = (place * len(hosts) + sender) * len(hosts) + receiver
            number = first_id + number * LANES + index // 2
            offer = offers[same_place[low]]
            store = offer.addresses, offer.ports[str(same_place[high])][index]
            held = reserved[peer][index] if own == low else None
            carry = _RendezvousPoint(peers, control, peer, *store, held).connect(
                number, receives=own == receiver
            )
            (outgoing if own == sender else incoming).setdefault(other, []).append(carry)
    sockets = sockets_to(peers.exchange, same_place, before, peers.timeout_s)
    if not same_place:
        return None
    names = [f"rank {rank} (host {host}, {_where(control, rank)})" for host, rank in enumerate(same_place)]
    _kept.append(Pipes(own, same_place, names, outgoing, incoming, sockets, GLOO_LIMIT_S))
    return _kept[-1]


def _reserve_port() -> socket.socket:
    reserved = socket.socket()
    reserved.bind(("", 0))
    return reserved


def _gather_offers(peers: Ranks, own: _Offer) -> list[_Offer]:
    """Collective."""
    rows = peers.exchange.all_gather(json.dumps(asdict(own)).encode(), peers.timeout_s)
    fields = {"next_id": int, "addresses": list, "ports": dict}
    return read_of_ranks(rows, lambda raw: _Offer(**read_object(raw, fields)))


@dataclass(frozen=True)
class _RendezvousPoint:
    peers: Ranks
    control: ControlChannel
    rank: int
    addresses: Sequence[str]
    port: int
    held: socket.socket | None

    def connect(self, number: int, *, receives: bool) -> Carry:
        within_s = min(self.peers.timeout_s, _CONNECT_WITHIN_S)
        made: list[Carry] = []

        def make() -> None:
            address = self._reachable(Deadline(within_s)) if self.held is None else "127.0.0.1"
            if self.held is not None:
                self.held.close()
            made.append(
                make_pair(number, address, self.port, keeps_store=self.held is not None, receives=receives)
            )

        try:
            call_within(within_s, make)  # because some waits of Paddle have no time-out
        except (OSError, RuntimeError, ValueError) as error:
            if self.control.failure is not None:
                raise self.control.failure from error
            peers, reason = self.peers, str(error).strip() or type(error).__name__
            raise RendezvousError(
                f"Rank {peers.rank} of {peers.world_size} could not connect to its peer on another host.",
                seen=f"rank {self.rank} ({_where(self.control, self.rank)})\n{reason.splitlines()[-1]}",
                likely="a firewall between the hosts, or an interface that the other host cannot reach",
                hint="GLOO_SOCKET_IFNAME names the interface to use, on each host; "
                'reduce_through="group" averages over the process group alone',
            ) from error
        return made[0]

    def _reachable(self, deadline: Deadline) -> str:
        reasons: list[str] = []
        while not reasons or not deadline.is_over():
            reasons.clear()
            for address in self.addresses:
                if not (reason := _reason(address, self.port)):
                    return address
                reasons.append(reason)
            time.sleep(_RETRY_S)
        raise OSError("; ".join(reasons))


def _reason(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), _TRY_S).close()
    except OSError as error:
        return f"{address}, port {port}: {error.strerror or error}"
    return ""


def _where(control: ControlChannel, rank: int) -> str:
    member = control.members[rank]
    return f"{member.host}, pid {member.pid}"
