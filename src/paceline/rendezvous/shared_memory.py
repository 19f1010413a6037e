"""Which ranks share a host, found out by sharing memory; and that memory.

The hint (boot id, network namespace, user) only says who should try. The lowest rank of each such set makes
a region and hands its descriptor out over a Unix socket; two ranks are on one host only if the nonce
that the maker announced through the Exchange is really found in the memory. Who fails to get it is a host
of its own, and the rest try again without it.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import _core
from paceline.errors import PacelineError, RegionError, format_ranks
from paceline.rendezvous import lifetime
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.descriptors import DescriptorServer, take_descriptor
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.messages import gather_objects
from paceline.rendezvous.obstacles import Obstacle as _Obstacle
from paceline.rendezvous.obstacles import raise_limits as _raise_limits
from paceline.stacks import answer_requests

NONCE_BYTES = 16


@dataclass(frozen=True)
class HostMemory:
    """The region that this rank's host shares, and who is on which host.

    Attributes:
        host_group: This rank's end of its host's region; ranks in it count from 0, in rank order.
        hosts: The ranks of each host, ordered by their lowest rank.

    Example:
        Ranks 0 and 1 on one machine, 2 and 3 on another: hosts == ((0, 1), (2, 3)), and rank 3 has
        host_group.rank == 1, host_group.world_size == 2.
    """

    host_group: _core.HostGroup
    hosts: tuple[tuple[int, ...], ...]

    def of_all_ranks(self) -> _core.HostGroup | None:
        """The memory, if all ranks share it; None: they are on several hosts, and it is given back."""
        if len(self.hosts) == 1:
            return self.host_group
        self.host_group.close()
        return None


def share_memory(
    exchange: Exchange,
    *,
    name: str,
    timeout_s: float,
    warn_after_s: float = 10.0,
    group_timeout_s: float | None = None,
    slow: Callable[[Mapping[str, Any]], None] | None = None,
) -> HostMemory:
    """Find the ranks of this host and map one region with them. Collective; blocks at most `timeout_s`.

    Args:
        exchange: Connects all ranks of the group that is being formed.
        name: The name of the group, for errors.
        timeout_s: For the whole of it.
        warn_after_s: After how long a wait in the new group reports whom it waits for.
        group_timeout_s: Deadline of each later call on the group; None: `timeout_s`.
        slow: Called with the facts of a wait that has lasted `warn_after_s`.

    Raises:
        RendezvousError: A rank did not take part in time.
        RegionError: There is not enough memory; on every rank of that host.
        ConfigError: PACELINE_ISA names no instruction set.
    """
    _core.best_isa()  # raises now, not in the middle of the first collective
    answer_requests()  # whoever will wait for this rank may ask where it is
    deadline = Deadline(timeout_s)
    place, obstacle = _host_hint()
    what = _words_for(name)
    while True:
        with DescriptorServer(exchange.world_size) as server:
            nonce = secrets.token_hex(NONCE_BYTES)
            own = {"place": place, "address": server.address, "nonce": nonce}
            obstacle = obstacle if obstacle.problem else server.obstacle
            offers = _all_gather(exchange, own | obstacle.facts(), deadline)
            _raise_limits(offers, what)
            host_ranks = tuple(rank for rank, offer in enumerate(offers) if offer["place"] == place)
            leader = host_ranks[0]
            fd, obstacle = _region_fd(exchange.rank, host_ranks, offers[leader], server, deadline)
            try:
                states = _all_gather(exchange, obstacle.facts(), deadline)
            except BaseException:
                _close(fd)
                raise
        if not any(state["problem"] for state in states):
            break
        _close(fd)
        _raise_limits(states, what)
        if obstacle.problem:
            place = f"alone-{exchange.rank}-{secrets.token_hex(8)}"
    hosts: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        hosts.setdefault(offer["place"], []).append(rank)
    host_group, obstacle = None, _Obstacle()
    try:
        host_group = _core.HostGroup(
            fd,
            host_ranks.index(exchange.rank),
            bytes.fromhex(offers[leader]["nonce"]),
            name
            if len(hosts) == 1
            else name_on_host(name, host_ranks, exchange.world_size, socket.gethostname()),
            group_timeout_s if group_timeout_s is not None else timeout_s,
            warn_after_s,
            slow=slow,
        )
    except PacelineError as error:
        obstacle = _Obstacle.of(error)
    finally:
        _close(fd)
    _join(host_group, exchange, obstacle, name, deadline)
    assert host_group is not None
    lifetime.watch(host_group)
    return HostMemory(host_group, tuple(tuple(ranks) for ranks in hosts.values()))


def name_on_host(name: str, ranks: Sequence[int], world_size: int, host: str) -> str:
    """The name of the group of one host's ranks, where there are several hosts.

    Example:
        >>> name_on_host("DDP", [2, 3], 4, "node1")
        'DDP, ranks 2-3 of 4 on host node1'
    """
    return f"{name}, {format_ranks(ranks)} of {world_size} on host {host}"


def _words_for(name: str) -> str:
    return f"the shared memory of group {name!r}"


def _join(
    host_group: _core.HostGroup | None, exchange: Exchange, obstacle: _Obstacle, name: str, deadline: Deadline
) -> None:
    """Wait for the others in the memory, unless one of them could not map it."""
    try:
        _raise_limits(_all_gather(exchange, obstacle.facts(), deadline), _words_for(name))
        assert host_group is not None
        host_group.join()
    except BaseException:
        if host_group is not None:
            host_group.close()
        raise


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _all_gather(exchange: Exchange, facts: dict[str, Any], deadline: Deadline) -> list[dict[str, Any]]:
    return gather_objects(exchange, facts, max(deadline.left_s(), 1e-3))


def _host_hint() -> tuple[str, _Obstacle]:
    """Equal on ranks that could share memory over an abstract Unix socket; says nothing about others."""
    obstacle, boot_id = _Obstacle(), ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
    except OSError as error:  # a sandbox may not have the file
        obstacle = _Obstacle.of_system(error, "open a file")
    network = os.stat("/proc/self/ns/net").st_ino
    return f"{boot_id}/{network}/{os.getuid()}", obstacle if obstacle.is_limit else _Obstacle()


def _region_fd(
    rank: int,
    host_ranks: tuple[int, ...],
    offer: Mapping[str, Any],
    server: DescriptorServer,
    deadline: Deadline,
) -> tuple[int, _Obstacle]:
    """The region's descriptor, or -1 and why not."""
    if rank == host_ranks[0]:
        try:
            fd = _core.create_region(len(host_ranks), bytes.fromhex(offer["nonce"]))
        except RegionError as error:
            server.close()
            return -1, _Obstacle.of(error)
        server.serve(fd)
        return fd, _Obstacle()
    try:
        fd = take_descriptor(offer["address"], deadline)
    except OSError as error:
        return -1, _Obstacle.of_system(error, f"take the region of rank {host_ranks[0]}")
    except Exception as error:  # whatever it is, this rank does not share the leader's memory
        return -1, _Obstacle(f"could not take the region of rank {host_ranks[0]}: {error}")
    if fd < 0:
        return -1, _Obstacle(f"got no descriptor from rank {host_ranks[0]}")
    return fd, _check_nonce(fd, offer["nonce"])


def _check_nonce(fd: int, nonce: str) -> _Obstacle:
    """Whether the memory is the one that its maker announced: the proof that it is shared."""
    try:
        found = _core.region_nonce(fd).hex()
    except RegionError as error:
        return _Obstacle(str(error))
    return _Obstacle("" if found == nonce else "the memory does not hold the announced nonce")
