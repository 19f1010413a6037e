"""An Exchange for the ranks of one host, over an abstract Unix socket: rank 0 is the hub.

Used if nothing else connects the ranks yet (`paceline.init` under `paceline run`, torchrun, Slurm on one
host). The address is derived from the job. Every connection sends its rank, world size and job id, and a
process that does not match is refused with the reason; rank 0 raises if the whole job cannot work. There is
no thread: the hub works inside rank 0's own calls.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from dataclasses import asdict
from typing import NoReturn

from paceline.errors import RendezvousError, format_ranks
from paceline.rendezvous.acceptor import FLOODED, FLOODED_HINT, RETRY_S, Acceptor
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.frames import (
    LONGEST_HELLO,
    Frame,
    connect_local,
    listen,
    peer_credentials,
    receive_frame,
    send_frame,
)
from paceline.rendezvous.messages import (
    Hello,
    MessageError,
    join_payloads,
    read_failure,
    read_hello,
    split_payloads,
    unreadable,
    write_failure,
    write_object,
)
from paceline.rendezvous.rendezvous_address import hub_address, taken_error, unknown_peer_error
from paceline.rendezvous.resource_limits import explain

# Rank 0 knows which ranks are missing: after their own deadline, the others wait this long for its report.
_GRACE_S = 5.0
_SAY_EVERY_S = 10.0
# How long a rank waits for room in rank 0's queue before it checks its deadline.
_DIAL_S = 0.5


class UnixSocketExchange:
    """A context manager; closing it ends the connections.

    Args:
        rank: The rank of this process.
        world_size: Number of ranks.
        key: What the ranks of a job have in common: "host:port", or the job id.
        job_id: Refuses unknown peers that use the same key.
        name: The name of the group that is being formed.
        timeout_s: Seconds within which every rank must have connected.
        secret: Known only to the ranks of this job, so that no other process can compute the address.
        note: Appended to the message that says for which ranks this one waits.

    Raises:
        RendezvousError: The address is in use, a rank is missing at the deadline (the error names it), or
            this rank does not match the job.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        key: str,
        job_id: str,
        name: str,
        timeout_s: float,
        secret: str = "",
        note: str = "",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._hello = Hello(rank, world_size, job_id, name, os.getpid())
        self._key = key
        self._peers: dict[int, socket.socket] = {}
        self._note = note
        self._begun_s = self._said_s = time.monotonic()
        deadline = Deadline(timeout_s)
        address = hub_address(key, name, secret)
        try:
            if rank == 0:
                self._serve(address, deadline)
            else:
                self._connect(address, deadline)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> UnixSocketExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _where(self) -> str:
        return f"group {self._hello.name!r} at {self._key}"

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        deadline = Deadline(timeout_s)
        if self.rank == 0:
            return self._gather_and_spread(payload, deadline)
        hub = self._peers[0]
        try:
            # Rank 0 may have failed and closed; a report that it sent before can still be read.
            with contextlib.suppress(ConnectionError):
                send_frame(hub, Frame.PAYLOAD, payload, deadline)
            kind, answer = receive_frame(hub, Deadline(deadline.left_s() + _GRACE_S))
        except OSError as error:
            raise self._lost_hub(error) from error
        try:
            if kind is not Frame.ALL_PAYLOADS:
                raise _failure_in(kind, answer)
            return split_payloads(answer, self.world_size)
        except MessageError as error:
            raise unreadable(0, self.world_size, error) from error

    # --- rank 0 ---

    def _serve(self, address: str, deadline: Deadline) -> None:
        if self.world_size == 1:
            return
        try:
            listener = listen(address)
        except OSError as error:
            self._raise_if_limit(error)
            hello = write_object(asdict(self._hello))
            raise taken_error(error, self.world_size, self._where(), address, hello) from error
        with listener, Acceptor(listener, self.world_size, LONGEST_HELLO, _no_greeting) as acceptor:
            self._admit_all(acceptor, deadline)
        for peer in self._peers.values():
            _try_send(peer, Frame.WELCOME, b"", deadline)

    def _admit_all(self, acceptor: Acceptor[None], deadline: Deadline) -> None:
        """Wait until all ranks have connected. Connections that send nothing, or garbage, delay no rank."""
        while len(self._peers) < self.world_size - 1:
            if deadline.is_over():
                self._fail_missing(deadline, acceptor)
            missing = sorted(set(range(1, self.world_size)) - set(self._peers))
            self._say_for_whom_it_waits(format_ranks(missing))
            for caller in acceptor.poll(min(deadline.left_s(), _SAY_EVERY_S)):
                self._admit(caller.peer, caller.kind, caller.raw)

    def _admit(self, peer: socket.socket, kind: Frame, raw: bytes) -> None:
        """Accept a connection, or refuse it; raises only if the whole job cannot work."""
        hello = None
        with contextlib.suppress(MessageError):
            hello = read_hello(raw) if kind is Frame.HELLO else None
        problem = "it does not speak Paceline's protocol" if hello is None else self._mismatch(hello)
        if not problem:
            assert hello is not None
            self._peers[hello.rank] = peer
            return
        _try_send(peer, Frame.REFUSED, problem.encode())
        peer.close()
        if hello is not None and hello.job_id == self._hello.job_id and hello.world_size != self.world_size:
            self._fail(
                RendezvousError(
                    f"Rank {hello.rank} and rank 0 disagree on the number of ranks.",
                    where=self._where(),
                    expected=f"world_size {self.world_size} (rank 0)",
                    got=f"world_size {hello.world_size} (rank {hello.rank}, pid {hello.pid})",
                    hint="give every process the same WORLD_SIZE",
                )
            )

    def _mismatch(self, hello: Hello) -> str:
        mine = self._hello
        if hello.job_id != mine.job_id:
            ours, theirs = mine.job_id or "(none)", hello.job_id or "(none)"
            return f"this is job {ours!r}, the caller belongs to job {theirs!r}"
        if hello.world_size != mine.world_size:
            return f"rank 0 has world_size {mine.world_size}, the caller has {hello.world_size}"
        if not 0 <= hello.rank < mine.world_size:
            return f"rank {hello.rank} is not one of 0 to {mine.world_size - 1}"
        if hello.rank in (0, *self._peers):
            return f"rank {hello.rank} has joined already; two processes have the same rank"
        return ""

    def _fail_missing(self, deadline: Deadline, acceptor: Acceptor[None]) -> NoReturn:
        if acceptor.no_room is not None:
            self._raise_if_limit(acceptor.no_room)
        count = acceptor.num_unknown_peers
        unknown_peers = f"; {count} connections of other users were turned away" if count else ""
        missing = sorted(set(range(1, self.world_size)) - set(self._peers))
        self._fail(
            RendezvousError(
                f"{format_ranks(missing).capitalize()} of {self.world_size} did not come within "
                f"{deadline.timeout_s:.1f} s.",
                where=self._where(),
                seen=f"{format_ranks([0, *self._peers])} came{unknown_peers}",
                likely="the process did not start, died while importing, or has another address or job id",
                hint="look at the missing rank's output; `timeout_s` gives slow starters longer",
                missing=tuple(missing),
            )
        )

    def _fail(self, error: RendezvousError) -> NoReturn:
        for peer in self._peers.values():
            _try_send(peer, Frame.FAILED, write_failure(error))
        raise error

    def _gather_and_spread(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        payloads = {0: payload}
        for rank, peer in sorted(self._peers.items()):
            payloads[rank] = self._receive_payload(rank, peer, deadline)
        ordered = [payloads[rank] for rank in range(self.world_size)]
        joined = join_payloads(ordered)
        for peer in self._peers.values():
            _try_send(peer, Frame.ALL_PAYLOADS, joined, deadline)
        return ordered

    def _receive_payload(self, rank: int, peer: socket.socket, deadline: Deadline) -> bytes:
        try:
            kind, payload = receive_frame(peer, deadline)
            if kind is not Frame.PAYLOAD:
                raise ConnectionError(f"unexpected {kind.name} message")
        except OSError as error:
            self._fail(
                RendezvousError(
                    f"Rank {rank} of {self.world_size} was lost while the group was being formed.",
                    where=self._where(),
                    seen=str(error) or type(error).__name__,
                    likely="it died, or is stuck before the same point of the program",
                    hint="look at that rank's output",
                    missing=(rank,),
                )
            )
        return payload

    # --- the other ranks ---

    def _connect(self, address: str, deadline: Deadline) -> None:
        hello = write_object(asdict(self._hello))
        kind = Frame.FULL
        while kind is Frame.FULL:  # too many other connections have sent nothing yet
            self._peers[0] = hub = self._dial(address, deadline)
            try:
                pid, uid = peer_credentials(hub)
                if uid != os.getuid():
                    raise unknown_peer_error(pid, uid, self.rank, self.world_size, self._where())
                with contextlib.suppress(ConnectionError):  # an answer that rank 0 sent before can be read
                    send_frame(hub, Frame.HELLO, hello, deadline)
                kind, answer = receive_frame(hub, Deadline(deadline.left_s() + _GRACE_S))
            except OSError as error:
                raise self._lost_hub(error) from error
            if kind is Frame.FULL:
                hub.close()
                if deadline.is_over():
                    raise self._not_found(BlockingIOError("rank 0 has too many connections"), deadline)
                time.sleep(RETRY_S)
        if kind is Frame.REFUSED:
            raise RendezvousError(
                f"Rank {self.rank} of {self.world_size} was refused by rank 0.",
                where=self._where(),
                seen=answer.decode(errors="replace"),
                likely="two jobs share one address, or the ranks were started with different settings",
                hint="give each job its own MASTER_PORT or PACELINE_JOB_ID, and each process its own rank",
            )
        if kind is not Frame.WELCOME:
            try:
                raise _failure_in(kind, answer)
            except MessageError as error:
                raise unreadable(0, self.world_size, error) from error

    def _dial(self, address: str, deadline: Deadline) -> socket.socket:
        while True:
            try:
                return connect_local(address, min(deadline.left_s(), _DIAL_S))
            except OSError as error:
                self._raise_if_limit(error)
                if deadline.is_over():
                    raise self._not_found(error, deadline) from error
            self._say_for_whom_it_waits("rank 0 to come on this host")
            time.sleep(RETRY_S)  # there is no way to be notified of an abstract address

    def _not_found(self, error: OSError, deadline: Deadline) -> RendezvousError:
        likely = "rank 0 did not start, died, is on another host, or has another address or job id"
        hint = "look at rank 0's output; `timeout_s` gives slow starters longer"
        if isinstance(error, BlockingIOError):
            likely, hint = FLOODED, FLOODED_HINT
        return RendezvousError(
            f"Rank {self.rank} of {self.world_size} did not find rank 0 within {deadline.timeout_s:.1f} s.",
            where=self._where(),
            seen=str(error),
            likely=likely,
            hint=hint,
            missing=(0,),
        )

    def _say_for_whom_it_waits(self, whom: str) -> None:
        now = time.monotonic()
        if now - self._said_s >= _SAY_EVERY_S:
            self._said_s = now
            print(
                f"paceline: rank {self.rank} of {self.world_size} on host {socket.gethostname()} "
                f"(pid {os.getpid()}) has waited {now - self._begun_s:.0f} s for {whom}{self._note}",
                file=sys.stderr,
                flush=True,
            )

    def _raise_if_limit(self, error: OSError) -> None:
        likely, hint = explain(error.errno or 0)
        if likely:
            self._fail(
                RendezvousError(
                    f"Rank {self.rank} of {self.world_size} can't open a socket to meet the others.",
                    where=self._where(),
                    seen=str(error),
                    likely=f"on rank {self.rank}, {likely}",
                    hint=hint,
                )
            )

    def _lost_hub(self, error: OSError) -> RendezvousError:
        return RendezvousError(
            f"Rank {self.rank} of {self.world_size} lost rank 0 while the group was being formed.",
            where=self._where(),
            seen=str(error) or type(error).__name__,
            likely="rank 0 died, raised, or waits for another rank that is late",
            hint="look at rank 0's output",
            missing=(0,),
        )


def _failure_in(kind: Frame, answer: bytes) -> RendezvousError:
    """The failure in an answer. Raises MessageError if it holds none."""
    if kind is not Frame.FAILED:
        raise MessageError(f"an unexpected {kind.name} message")
    return read_failure(answer)


def _try_send(peer: socket.socket, kind: Frame, payload: bytes, deadline: Deadline | None = None) -> None:
    try:
        send_frame(peer, kind, payload, deadline or Deadline(1.0))
    except OSError:
        return  # it is gone, or does not read: the next exchange with it reports that


def _no_greeting(_: socket.socket) -> None: ...
