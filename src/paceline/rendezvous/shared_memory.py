"""Which ranks share a host, found out by sharing memory; and that memory.

The hint (boot id, network namespace, user) only says who should try. The lowest rank of each such set makes
a region and hands its descriptor out over a Unix socket; two ranks are on one host only if the nonce
that the maker announced through the Exchange is really found in the memory. Who fails to get it is a host
of its own, and the rest try again without it.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline import _core
from paceline.errors import PacelineError, RegionError, format_ranks
from paceline.rendezvous import lifetime
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.frames import Frame, check_same_user, listen, receive_frame, send_frame
from paceline.rendezvous.limits import OUT_OF_ROOM, explain
from paceline.rendezvous.messages import gather_objects
from paceline.stacks import answer_requests

_NONCE_BYTES = 16
_RETRY_S = 0.01


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
    while True:
        with _RegionServer(exchange.world_size) as server:
            own = {"place": place, "address": server.address, "nonce": server.nonce}
            obstacle = obstacle if obstacle.problem else server.obstacle
            offers = _all_gather(exchange, own | obstacle.facts(), deadline)
            _raise_limits(offers, name)
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
        _raise_limits(states, name)
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
            name if len(hosts) == 1 else name_on_host(name, host_ranks, exchange.world_size),
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


def name_on_host(name: str, ranks: Sequence[int], world_size: int) -> str:
    """The name of the group of one host's ranks, where there are several hosts.

    Example:
        >>> name_on_host("DDP", [2, 3], 4)
        'DDP, ranks 2-3 of 4'
    """
    return f"{name}, {format_ranks(ranks)} of {world_size}"


@dataclass(frozen=True)
class _Obstacle:
    """Why a rank can't go on; no problem: it can.

    A limit of its own is told to all ranks, and ends the forming; whatever else keeps it from mapping
    another rank's memory makes it a host of its own.
    """

    problem: str = ""
    likely: str = ""
    remedy: str = ""
    is_limit: bool = False

    @classmethod
    def of(cls, error: PacelineError) -> _Obstacle:
        return cls(f"{error.summary} {error.seen}", error.likely, error.hint, is_limit=True)

    @classmethod
    def of_system(cls, error: OSError, doing: str) -> _Obstacle:
        likely, remedy = explain(error.errno or 0)
        return cls(f"could not {doing}: {error}", likely, remedy, is_limit=bool(likely))

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def _raise_limits(everybodys: list[dict[str, Any]], name: str) -> None:
    """The error of all ranks, if one of them has met a limit."""
    failed = [rank for rank, each in enumerate(everybodys) if each["is_limit"]]
    if failed:
        raise RegionError(
            f"{format_ranks(failed).capitalize()} could not take the shared memory of group {name!r}.",
            seen="\n".join(f"rank {rank}: {everybodys[rank]['problem']}" for rank in failed),
            likely=everybodys[failed[0]]["likely"],
            hint=f"on {format_ranks(failed)}: {everybodys[failed[0]]['remedy']}",
            ranks=tuple(failed),
        )


def _join(
    host_group: _core.HostGroup | None, exchange: Exchange, obstacle: _Obstacle, name: str, deadline: Deadline
) -> None:
    """Wait for the others in the memory, unless one of them could not map it."""
    try:
        _raise_limits(_all_gather(exchange, obstacle.facts(), deadline), name)
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


class _RegionServer:
    """Where a leader hands out its region: a socket, and a thread that serves it until the server closes."""

    def __init__(self, world_size: int) -> None:
        self.address = ""
        self.obstacle = _Obstacle()
        self.nonce = secrets.token_hex(_NONCE_BYTES)
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        try:
            self._listener = listen("", world_size)
            self.address = self._listener.getsockname()[1:].decode("ascii")
        except OSError as error:
            self.obstacle = _Obstacle.of_system(error, "open a socket")
            if not self.obstacle.is_limit:
                raise

    def serve(self, fd: int) -> None:
        self._thread = threading.Thread(
            target=self._hand_out, args=(fd,), name="paceline-server", daemon=True
        )
        self._thread.start()

    def _hand_out(self, fd: int) -> None:
        assert self._listener is not None
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if error.errno in OUT_OF_ROOM:
                    time.sleep(_RETRY_S)  # until somebody closes a file; else that rank gives up waiting
                    continue
                return  # the server was closed
            with peer:
                try:
                    check_same_user(peer)
                    socket.send_fds(peer, [b"r"], [fd])
                    receive_frame(peer, Deadline(5.0))  # keeps the descriptor in flight until it was taken
                except Exception:
                    continue  # that rank reports by itself that it got nothing

    def __enter__(self) -> _RegionServer:
        return self

    def close(self) -> None:
        if self._listener is None:
            return
        # shutdown() wakes a thread that sleeps in accept(); close() alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._thread is not None:
            self._thread.join(timeout=6.0)


def _region_fd(
    rank: int,
    host_ranks: tuple[int, ...],
    offer: Mapping[str, Any],
    server: _RegionServer,
    deadline: Deadline,
) -> tuple[int, _Obstacle]:
    """The region's descriptor, or -1 and why not."""
    if rank == host_ranks[0]:
        try:
            fd = _core.create_region(len(host_ranks), bytes.fromhex(server.nonce))
        except RegionError as error:
            server.close()
            return -1, _Obstacle.of(error)
        server.serve(fd)
        return fd, _Obstacle()
    fd = -1
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as hub:
            hub.settimeout(max(min(deadline.left_s(), 10.0), 1e-3))
            hub.connect("\0" + offer["address"])
            check_same_user(hub)
            fd = _receive_fd(hub)
            send_frame(hub, Frame.WELCOME, b"", deadline)
    except OSError as error:
        _close(fd)
        return -1, _Obstacle.of_system(error, f"take the region of rank {host_ranks[0]}")
    except Exception as error:  # whatever it is, this rank does not share the leader's memory
        _close(fd)
        return -1, _Obstacle(f"could not take the region of rank {host_ranks[0]}: {error}")
    if fd < 0:
        return -1, _Obstacle(f"got no descriptor from rank {host_ranks[0]}")
    return fd, _check_nonce(fd, offer["nonce"])


def _receive_fd(hub: socket.socket) -> int:
    """A descriptor, close-on-exec from the start: another thread may be starting a program just now.

    socket.recv_fds does not pass its flags on.
    """
    fds = array.array("i")
    _, messages, flags, _ = hub.recvmsg(1, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if not fds and flags & socket.MSG_CTRUNC:  # how the kernel says that there is no number left for it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return fds[0] if fds else -1


def _check_nonce(fd: int, nonce: str) -> _Obstacle:
    """Whether the memory is the one that its maker announced: the proof that it is shared."""
    try:
        found = _core.region_nonce(fd).hex()
    except RegionError as error:
        return _Obstacle(str(error))
    return _Obstacle("" if found == nonce else "the memory does not hold the announced nonce")
