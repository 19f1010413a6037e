"""Which ranks share a host, found out by sharing memory; and that memory.

The hint (boot id, network namespace, user) only says who should try. The lowest rank of each such set makes
a region and hands its descriptor out over a Unix socket; two ranks are on one host only if the nonce
that the maker announced through the Exchange is really found in the memory. Who fails to get it is a host
of its own, and the rest try again without it.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline import _core
from paceline.errors import PacelineError, RegionError, format_ranks
from paceline.observe.stacks import answer_requests
from paceline.rendezvous import lifetime
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.frames import Frame, check_same_user, listen, receive_frame, send_frame
from paceline.rendezvous.messages import gather_objects

_NONCE_BYTES = 16


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
        name: Of the group, for errors.
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
    hint = _host_hint()
    while True:
        with _Door(exchange.world_size) as door:
            offers = _all_gather(
                exchange, {"hint": hint, "address": door.address, "nonce": door.nonce}, deadline
            )
            mates = tuple(rank for rank, offer in enumerate(offers) if offer["hint"] == hint)
            leader = mates[0]
            fd, problem = _region_fd(exchange.rank, mates, offers[leader], door, deadline)
            try:
                states = _all_gather(exchange, {"problem": problem, "memory": problem == "memory"}, deadline)
            except BaseException:
                _close(fd)
                raise
        if not any(state["problem"] for state in states):
            break
        _close(fd)
        if any(states[rank]["memory"] for rank in mates):
            raise RegionError(
                f"Rank {leader} could not create the shared memory of group {name!r}.",
                seen=str([state["problem"] for state in states if state["problem"]]),
                hint=f"look at rank {leader}'s limits: `ulimit -a`, and the container's memory limit",
            )
        if problem:
            hint = f"alone-{exchange.rank}-{secrets.token_hex(8)}"
    host_group, problem = None, ""
    try:
        host_group = _core.HostGroup(
            fd,
            mates.index(exchange.rank),
            bytes.fromhex(offers[leader]["nonce"]),
            name,
            group_timeout_s if group_timeout_s is not None else timeout_s,
            warn_after_s,
            slow=slow,
        )
    except PacelineError as error:
        problem = f"{error.summary} {error.seen}"
    finally:
        _close(fd)
    _join(host_group, exchange, problem, name, deadline)
    assert host_group is not None
    lifetime.watch(host_group)
    hosts: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        hosts.setdefault(offer["hint"], []).append(rank)
    return HostMemory(host_group, tuple(tuple(ranks) for ranks in hosts.values()))


def _join(
    host_group: _core.HostGroup | None, exchange: Exchange, problem: str, name: str, deadline: Deadline
) -> None:
    """Wait for the others in the memory, unless one of them could not map it."""
    try:
        problems = [state["problem"] for state in _all_gather(exchange, {"problem": problem}, deadline)]
        failed = [rank for rank, each in enumerate(problems) if each]
        if failed or host_group is None:
            raise RegionError(
                f"{format_ranks(failed).capitalize()} could not take the shared memory of group {name!r}.",
                seen="\n".join(problems[rank] for rank in failed),
                likely="the machine or the container is out of memory",
                hint="`free -h`, `ulimit -a`, and the container's memory limit",
            )
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


def _host_hint() -> str:
    """Equal on ranks that could share memory over an abstract Unix socket; says nothing about others."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    network = os.stat("/proc/self/ns/net").st_ino
    return f"{boot_id}/{network}/{os.getuid()}"


class _Door:
    """Where a leader hands out its region: a socket, and a thread that serves it until the door closes."""

    def __init__(self, world_size: int) -> None:
        self._listener = listen("", world_size)
        self.address = self._listener.getsockname()[1:].decode("ascii")
        self.nonce = secrets.token_hex(_NONCE_BYTES)
        self._thread: threading.Thread | None = None

    def serve(self, fd: int) -> None:
        self._thread = threading.Thread(target=self._hand_out, args=(fd,), name="paceline-door", daemon=True)
        self._thread.start()

    def _hand_out(self, fd: int) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return  # the door was closed
            with peer:
                try:
                    check_same_user(peer)
                    socket.send_fds(peer, [b"r"], [fd])
                    receive_frame(peer, Deadline(5.0))  # keeps the descriptor in flight until it was taken
                except Exception:
                    continue  # that rank reports by itself that it got nothing

    def __enter__(self) -> _Door:
        return self

    def close(self) -> None:
        # shutdown() wakes a thread that sleeps in accept(); close() alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._thread is not None:
            self._thread.join(timeout=6.0)


def _region_fd(
    rank: int, mates: tuple[int, ...], offer: Mapping[str, Any], door: _Door, deadline: Deadline
) -> tuple[int, str]:
    """The region's descriptor, or -1 and why not."""
    if rank == mates[0]:
        try:
            fd = _core.create_region(len(mates), bytes.fromhex(door.nonce))
        except RegionError:
            door.close()
            return -1, "memory"
        door.serve(fd)
        return fd, ""
    fd = -1
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as hub:
            hub.settimeout(max(min(deadline.left_s(), 10.0), 1e-3))
            hub.connect("\0" + offer["address"])
            check_same_user(hub)
            fd = _receive_fd(hub)
            send_frame(hub, Frame.WELCOME, b"", deadline)
    except Exception as error:  # whatever it is, this rank does not share the leader's memory
        _close(fd)
        return -1, f"rank {rank} could not take the region of rank {mates[0]}: {error}"
    if fd < 0:
        return -1, f"rank {rank} got no descriptor from rank {mates[0]}"
    return fd, _check_nonce(fd, offer["nonce"])


def _receive_fd(hub: socket.socket) -> int:
    """A descriptor, close-on-exec from the start: another thread may be starting a program just now.

    socket.recv_fds does not pass its flags on.
    """
    fds = array.array("i")
    _, messages, _, _ = hub.recvmsg(1, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds[0] if fds else -1


def _check_nonce(fd: int, nonce: str) -> str:
    """Whether the memory is the one that its maker announced: the proof that it is shared."""
    try:
        found = _core.region_nonce(fd).hex()
    except RegionError as error:
        return str(error)
    return "" if found == nonce else "the memory does not hold the announced nonce"
