"""Finds out which ranks share a host, by sharing memory between them, and sets up that memory.

Ranks with the same hint (boot id, network namespace, user) are on one host. The lowest rank of each host
creates a region and sends its descriptor over a Unix socket. The nonce that this rank announced through the
Exchange proves that the memory is its own. If a rank does not get the memory, all ranks raise: if it went on
as a host of its own, it would train over another path, with other last bits. The hint can only be equal on
two machines if the boot id cannot be read. In that case a rank that does not get the memory becomes a host of
its own, with a warning, and the others try again without it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import _core
from paceline.errors import PacelineError, RegionError, format_ranks
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.descriptors import SHARE_OF_TAKING, DescriptorServer, take_descriptor
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.messages import gather_objects
from paceline.rendezvous.shared_memory_failure import SharedMemoryFailure
from paceline.rendezvous.shared_memory_failure import raise_limits as _raise_limits
from paceline.stacks import answer_requests

_log = logging.getLogger("paceline")

NONCE_BYTES = 16
_reported: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class HostMemory:
    """The region that this rank's host shares, and the ranks of each host.

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
        """The memory if all ranks share it. If there are several hosts, release it and return None."""
        if len(self.hosts) == 1:
            return self.host_group
        self.host_group.close()
        return None


def share_memory(
    exchange: Exchange,
    *,
    name: str,
    timeout_s: float,
    warn_after_s: float,
    group_timeout_s: float | None = None,
    slow: Callable[[Mapping[str, Any]], None] | None = None,
) -> HostMemory:
    """Find the ranks of this host and map one region with them. Collective; blocks at most `timeout_s`.

    Raises:
        RendezvousError: A rank did not take part in time.
        RegionError: There is not enough memory; on every rank of that host.
        ConfigError: PACELINE_ISA names no instruction set.
    """
    _core.best_isa()  # raises now, not in the middle of the first collective
    answer_requests()  # ranks that wait for this one may ask for its stack
    deadline = Deadline(timeout_s)
    place, reason = _host_hint()
    is_certain = not reason.problem
    what = _words_for(name)
    while True:
        with DescriptorServer(exchange.world_size) as server:
            nonce = secrets.token_hex(NONCE_BYTES)
            own = {"place": place, "address": server.address, "nonce": nonce}
            reason = reason if reason.problem else server.reason
            offers = _all_gather(exchange, own | reason.facts(), deadline)
            _raise_limits(offers, what)
            host_ranks = tuple(rank for rank, offer in enumerate(offers) if offer["place"] == place)
            leader = host_ranks[0]
            fd, reason = _region_fd(
                exchange.rank, host_ranks, offers[leader], server, deadline, is_certain=is_certain
            )
            try:
                states = _all_gather(exchange, reason.facts(), deadline)
            except BaseException:
                _close(fd)
                raise
        if not any(state["problem"] for state in states):
            break
        _close(fd)
        _raise_limits(states, what)
        if reason.problem:
            _log.warning(
                "paceline: rank %d of %d counts as a host of its own, although it seems to be on the host of "
                "rank %d (only the boot id would prove it): it %s. Likely %s. If both are on one host: %s",
                exchange.rank,
                exchange.world_size,
                leader,
                reason.problem,
                reason.likely,
                reason.remedy,
            )
            place = f"alone-{exchange.rank}-{secrets.token_hex(8)}"
    hosts: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        hosts.setdefault(offer["place"], []).append(rank)
    if exchange.rank == 0:
        _report_split(hosts)
    host_group, reason = None, SharedMemoryFailure()
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
        reason = SharedMemoryFailure.of(error)
    finally:
        _close(fd)
    _join(host_group, exchange, reason, name, deadline)
    assert host_group is not None
    return HostMemory(host_group, tuple(tuple(ranks) for ranks in hosts.values()))


def _report_split(hosts: Mapping[str, Sequence[int]]) -> None:
    """Warn once if ranks of one machine count as several hosts, which may be unintended."""
    machines: dict[str, list[tuple[str, Sequence[int]]]] = {}
    for place, ranks in hosts.items():
        boot_id, _, rest = place.partition("/")
        if boot_id and rest:
            machines.setdefault(boot_id, []).append((rest, ranks))
    for parts in machines.values():
        (first, some), (other, others) = parts[0], parts[-1]
        if first == other or (first, other) in _reported:
            continue
        _reported.add((first, other))
        is_network = first.partition("/")[0] != other.partition("/")[0]
        _log.warning(
            "paceline: %s and %s are on one machine, and count as %d hosts, because their %s differ: they "
            "share no memory. %s",
            format_ranks(some),
            format_ranks(others),
            len(parts),
            "network namespaces" if is_network else "users",
            "Containers that share the network of one of them (docker run --network=container:...) can."
            if is_network
            else "Start all ranks as the same user.",
        )


def name_on_host(name: str, ranks: Sequence[int], world_size: int, host: str) -> str:
    return f"{name}, {format_ranks(ranks)} of {world_size} on host {host}"


def _words_for(name: str) -> str:
    return f"the shared memory of group {name!r}"


def _join(
    host_group: _core.HostGroup | None,
    exchange: Exchange,
    reason: SharedMemoryFailure,
    name: str,
    deadline: Deadline,
) -> None:
    try:
        _raise_limits(_all_gather(exchange, reason.facts(), deadline), _words_for(name))
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


def _host_hint() -> tuple[str, SharedMemoryFailure]:
    """A hint that is equal on ranks that can share memory, and the reason if it is not certain.

    Memory is shared over an abstract Unix socket. With a reason, the hint may be equal on other ranks too.
    """
    reason, boot_id = SharedMemoryFailure(), ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
    except OSError as error:  # a sandbox may not have the file
        reason = SharedMemoryFailure.of_system(error, "read the boot id")
    network = 0
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError as error:
        reason = SharedMemoryFailure.of_system(error, "learn in which network namespace it is")
    return f"{boot_id}/{network}/{os.getuid()}", reason


def _region_fd(
    rank: int,
    host_ranks: tuple[int, ...],
    offer: Mapping[str, Any],
    server: DescriptorServer,
    deadline: Deadline,
    *,
    is_certain: bool,
) -> tuple[int, SharedMemoryFailure]:
    if rank == host_ranks[0]:
        fd = -1
        try:
            fd = _core.create_region(len(host_ranks), bytes.fromhex(offer["nonce"]))
            server.serve(fd)
        except RegionError as error:
            _close(fd)
            server.close()
            return -1, SharedMemoryFailure.of(error)
        return fd, SharedMemoryFailure()
    fd, leader = -1, host_ranks[0]
    try:
        fd = take_descriptor(offer["address"], Deadline(SHARE_OF_TAKING * deadline.left_s()), leader)
        _check_nonce(fd, offer["nonce"])
    except (PacelineError, OSError) as error:
        _close(fd)
        return -1, SharedMemoryFailure.of_transfer(error, leader, is_certain=is_certain)
    except BaseException:
        _close(fd)
        raise
    return fd, SharedMemoryFailure()


def _check_nonce(fd: int, nonce: str) -> None:
    """Prove that the memory comes from the rank that announced it."""
    if _core.region_nonce(fd).hex() != nonce:
        raise RegionError("The memory does not hold the announced nonce.")
