"""How the ranks of several hosts connect to the hub of their control channel, and which ones it refuses.

Rank 0 listens on a free port until all ranks have connected, and sends its addresses to the others over the
group that exists already. Each rank tries all of them, because only that rank can find out which ones it can
reach. In a tree (`channel_tree`) the first rank of each host receives the ranks of its host in the same way.
It then connects to the hub with the facts of all of them, and welcomes them once the hub has welcomed it. The
connection of an unknown peer is dropped. A rank of this group that does not match ends the start-up of all
ranks, with the reason on every rank.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, RendezvousError, format_ranks
from paceline.health.channel_tree import HUB, Neighbours, neighbours_of
from paceline.health.handshake import (
    NONCE_BYTES,
    Facts,
    Handshake,
    Member,
    Mismatch,
    Seal,
    mismatch,
    read_challenge,
    read_members,
    secret_mismatch,
    write_challenge,
    write_members,
)
from paceline.rendezvous.acceptor import Acceptor
from paceline.rendezvous.addresses import addresses_for_others
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.frames import (
    LONGEST_HELLO,
    QUEUE,
    Frame,
    FrameStream,
    frame,
    receive_frame,
    send_frame,
)
from paceline.rendezvous.messages import (
    MessageError,
    join_payloads,
    read_object,
    read_of_ranks,
    split_payloads,
)

if TYPE_CHECKING:  # not every Python has `ssl`, and not every job needs it
    from paceline.health.tls import Certificate, Tls

_CONNECT_WITHIN_S = 2.0
_RETRY_S = 0.05
_GRACE_S = 5.0  # the hub knows which ranks are missing: the others wait this long for its report
_SHARE_OF_A_HOST = 0.8  # of the time until all have connected: how long a host's first rank waits
_FACTS_BYTES = 2048
_CHANNEL_BYTES = 16


class Connection:
    """One connection of the channel, after its handshake. Not for several threads at once."""

    def __init__(self, link: socket.socket, handshake: Handshake, tls: Tls | None, *, is_hub: bool) -> None:
        link.setblocking(False)
        self.socket = link
        self.is_encrypted = tls is not None
        self._tls = tls
        self._stream = FrameStream(LONGEST_HELLO)
        own, other = ("hub", "rank") if is_hub else ("rank", "hub")
        self._send_seal: Seal = handshake.seal(own)
        self._receive_seal: Seal = handshake.seal(other)

    @property
    def is_open(self) -> bool:
        """False while the other end's part of the TLS handshake is outstanding."""
        return self._tls is None or self._tls.is_open

    def say(self, kind: Frame, text: bytes) -> bytes:
        data = frame(kind, self._send_seal.close(kind, text))
        return data if self._tls is None else self._tls.encrypt(data)

    def decrypt(self, piece: bytes) -> tuple[bytes, bytes]:
        """The plain text, for `receive`, and the bytes to be sent in reply."""
        return (piece, b"") if self._tls is None else (self._tls.decrypt(piece), self._tls.encrypt(b""))

    def receive(self, plain: bytes) -> Iterator[tuple[Frame, bytes]]:
        """The frames that are complete with this data."""
        for kind, payload in self._stream.feed(plain):
            yield kind, self._receive_seal.open(kind, payload)


@dataclass(frozen=True)
class Place:
    """Where the hub listens.

    Attributes:
        channel: Random bytes that identify this channel.
        port: The port.
        addresses: All addresses through which other hosts may reach this one.
    """

    channel: bytes
    port: int
    addresses: list[str]

    def __str__(self) -> str:
        return f"port {self.port} of {', '.join(self.addresses)}"


def connect_ranks(
    exchange: Exchange, facts: Facts, hosts: Sequence[Sequence[int]], secret: bytes, timeout_s: float
) -> tuple[dict[int, Connection], tuple[Member, ...]]:
    """Connect all ranks with their neighbours. Collective; blocks at most `timeout_s` and some seconds.

    Returns:
        The connections of this rank, by the rank at the other end, and all members.
    """
    deadline = Deadline(timeout_s)
    listener = None
    neighbours = neighbours_of(facts.rank, hosts)
    try:
        own = b""
        if neighbours.below or facts.rank == HUB:
            listener, own = _listen()
        reported = exchange.all_gather(own, timeout_s)
        for rank, offer in enumerate(reported):
            if offer:  # a rank that cannot listen ends this on all ranks, not only on those that need it
                _read_place(reported, rank)
        join = None
        if neighbours.parent is not None:
            place = _read_place(reported, neighbours.parent)
            join = functools.partial(_join, place, neighbours.parent, secret=secret)
            if not own:
                return join([facts], deadline=deadline)
        place = _read_place(reported, facts.rank)
        assert listener is not None
        return _Reception(listener, place, facts, hosts, neighbours, secret, deadline).receive_all(join)
    finally:
        if listener is not None:
            listener.close()


def _listen() -> tuple[socket.socket | None, bytes]:
    try:
        ipv6 = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if ipv6 else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=ipv6, backlog=QUEUE)
    except OSError as error:
        return None, json.dumps({"channel": str(error), "port": 0, "addresses": []}).encode()
    reported = {
        "channel": secrets.token_hex(_CHANNEL_BYTES),
        "port": listener.getsockname()[1],
        "addresses": addresses_for_others(),
    }
    return listener, json.dumps(reported).encode()


def _read_place(payloads: list[bytes], rank: int) -> Place:
    def read(raw: bytes) -> dict[str, Any]:
        return read_object(raw, {"channel": str, "port": int, "addresses": list}) if raw else {}

    reported = read_of_ranks(payloads[: rank + 1], read)[rank]
    if not reported or not reported["port"]:
        raise RendezvousError(
            f"Rank {rank} could not listen for the other ranks.",
            seen=reported["channel"] if reported else "it did not say where it listens",
            likely="a limit of open files, or a sandbox that lets no process listen",
            hint=f"`ulimit -n` on the host of rank {rank}",
        )
    return Place(
        bytes.fromhex(reported["channel"]), reported["port"], [str(each) for each in reported["addresses"]]
    )


# --- the hub, and in a tree the first rank of each host ---


class _Reception:
    def __init__(
        self,
        listener: socket.socket,
        place: Place,
        facts: Facts,
        hosts: Sequence[Sequence[int]],
        neighbours: Neighbours,
        secret: bytes,
        deadline: Deadline,
    ) -> None:
        self._below = neighbours.below
        self._longest_hello = LONGEST_HELLO + _FACTS_BYTES * max(map(len, self._below.values()), default=0)
        self._place, self._facts = place, facts
        self._host_of = {rank: list(ranks) for ranks in hosts for rank in ranks}
        self._secret, self._deadline = secret, deadline
        self._came: dict[int, tuple[socket.socket, Handshake]] = {}
        self._facts_of: list[Facts] = []  # of all ranks that have connected, and of those behind them
        self._acceptor = Acceptor(listener, facts.world_size, self._longest_hello, self._challenge)
        self._certificate: Certificate | None = None
        self._refusal = b""  # what every rank receives, once the start-up has failed
        self._refused: set[int] = set()

    def receive_all(
        self, join: Callable[..., tuple[dict[int, Connection], tuple[Member, ...]]] | None
    ) -> tuple[dict[int, Connection], tuple[Member, ...]]:
        """Receive all ranks below this one, then join the parent."""
        # The hub must receive which ranks are missing here before its own deadline passes.
        until = self._deadline if join is None else Deadline(_SHARE_OF_A_HOST * self._deadline.left_s())
        if self._secret:  # made while the others connect
            with contextlib.suppress(ImportError):
                from paceline.health import tls

                self._certificate = tls.own_certificate()
        try:
            while len(self._came) < len(self._below):
                if until.is_over():
                    raise self._missing(until)
                self._receive(until)
            reported = [self._facts, *self._facts_of]
            if join is None:
                return self._welcome({}, reported)
            up, join = join, None
            return self._welcome(*up(reported, deadline=self._deadline))
        except BaseException as error:
            self._turn_away(error, join)
            raise
        finally:
            self._acceptor.close()

    def _receive(self, deadline: Deadline) -> None:
        for caller in self._acceptor.poll(min(deadline.left_s(), 1.0)):
            if not self._admit(caller.peer, caller.greeting, caller.kind, caller.raw):
                caller.peer.close()

    def _challenge(self, link: socket.socket) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        with contextlib.suppress(OSError):
            link.send(frame(Frame.CHALLENGE, write_challenge(self._place.channel, nonce)))
        return nonce

    def _admit(self, link: socket.socket, nonce: bytes, kind: Frame, raw: bytes) -> bool:
        """Whether this is a rank of the group. Raises RendezvousError if it is one that does not match."""
        try:
            is_hello = kind in (Frame.HELLO, Frame.FAILED)
            reported, rank_nonce, membership, proof = split_payloads(raw if is_hello else b"", 4)
            *rows, last = reported.split(b"\n")
            complaint = Mismatch.unpack(last) if kind is Frame.FAILED else None
            came = [Facts.unpack(row) for row in ([*rows, last] if complaint is None else rows[:1])]
            rank = came[0].rank
        except (MessageError, IndexError):
            return False
        handshake = Handshake(self._secret, self._place.channel, nonce, rank_nonce)
        if len(rank_nonce) != NONCE_BYTES or not secrets.compare_digest(membership, handshake.membership):
            return False
        if self._refusal:
            self._refuse(link, rank)
            return True
        is_proof = handshake.is_proof(proof, "rank", reported)
        problem = None if is_proof else secret_mismatch(self._facts, came[0])
        problem = problem or complaint or self._mismatch(came)
        if problem is not None:
            self._refusal = problem.pack()
            self._refuse(link, rank)
            raise refusal(self._facts, problem, str(self._place))
        self._came[rank] = link, handshake
        self._facts_of += came
        return True

    def _mismatch(self, came: Sequence[Facts]) -> Mismatch | None:
        own = replace(self._facts, clock_s=time.time())
        for index, facts in enumerate(came):
            members = [own, *self._facts_of, *came[:index]]
            if problem := mismatch(own, facts, members, self._host_of.get(facts.rank, [])):
                return problem
        if self._below.get(came[0].rank, frozenset()) != frozenset(facts.rank for facts in came):
            ranks = format_ranks([facts.rank for facts in came])
            return Mismatch(
                f"{came[0].describe()} came to {own.describe()} for {ranks}, which do not belong there",
                "install the same version of Paceline on all hosts",
            )
        return None

    def _welcome(
        self, connections: dict[int, Connection], members: Sequence[Facts] | Sequence[Member]
    ) -> tuple[dict[int, Connection], tuple[Member, ...]]:
        table = write_members(members)
        shown = b"" if self._certificate is None else self._certificate.fingerprint
        welcome = join_payloads([table, shown])
        for link, handshake in self._came.values():
            _try_send(link, Frame.WELCOME, join_payloads([table, shown, handshake.prove("hub", welcome)]))
        for rank, (link, handshake) in self._came.items():
            connections[rank] = Connection(link, handshake, self._tls(), is_hub=True)
        return connections, read_members(table, self._facts.world_size)

    def _tls(self) -> Tls | None:
        if self._certificate is None:
            return None
        from paceline.health import tls

        return tls.Tls(self._certificate)

    def _turn_away(self, error: BaseException, join: Callable[..., object] | None) -> None:
        summary = error.summary if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        reported = Mismatch(getattr(error, "seen", "") or summary, getattr(error, "hint", ""))
        self._refusal = self._refusal or reported.pack()
        for rank, (link, _) in self._came.items():
            self._refuse(link, rank)
        is_ours = isinstance(error, PacelineError)  # else the user wants to end it, for example with Ctrl-C
        if join is not None and is_ours:
            with contextlib.suppress(RendezvousError):  # it repeats what was just reported to the hub
                join([self._facts], deadline=Deadline(_GRACE_S), problem=Mismatch.unpack(self._refusal))
        deadline = Deadline(_GRACE_S)
        while is_ours and len(self._refused) < len(self._below) and not deadline.is_over():
            self._receive(deadline)

    def _refuse(self, link: socket.socket, rank: int) -> None:
        _try_send(link, Frame.FAILED, self._refusal)
        link.close()
        self._refused.add(rank)

    def _missing(self, until: Deadline) -> RendezvousError:
        below = [rank for child in self._below.keys() - self._came.keys() for rank in self._below[child]]
        missing = sorted(below)
        return RendezvousError(
            f"{format_ranks(missing).capitalize()} of {self._facts.world_size} did not come to the control "
            f"channel within {until.timeout_s:.0f} s.",
            where=f"{self._facts.describe()}, {self._place}",
            seen=f"{format_ranks(missing)} did not come to {self._place} on host {self._facts.host}; "
            f"{format_ranks(sorted([self._facts.rank, *(each.rank for each in self._facts_of)]))} came",
            likely="a firewall between the hosts, or an interface that the other host cannot reach",
            hint="let the hosts of a job reach each other on all ports",
            missing=tuple(missing),
        )


def refusal(own: Facts, problem: Mismatch, where: str) -> RendezvousError:
    return RendezvousError(
        "The ranks of this job do not fit together.",
        where=f"{own.describe()} of {own.world_size}, at the start of the control channel ({where})",
        seen=problem.seen,
        hint=problem.hint,
        rank=own.rank,
    )


def _try_send(link: socket.socket, kind: Frame, payload: bytes) -> None:
    with contextlib.suppress(OSError):  # a rank that is gone needs no message
        send_frame(link, kind, payload, Deadline(1.0))


# --- the other ranks ---


def _join(
    place: Place,
    parent: int,
    reported: Sequence[Facts],
    secret: bytes,
    deadline: Deadline,
    problem: Mismatch | None = None,
) -> tuple[dict[int, Connection], tuple[Member, ...]]:
    facts = reported[0]
    reasons: dict[str, list[str]] = {}  # by address: the first reason, and the last one that differs from it
    while True:
        for address in place.addresses:
            try:
                link = socket.create_connection(
                    (address, place.port), timeout=max(min(_CONNECT_WITHIN_S, deadline.left_s()), 1e-3)
                )
            except OSError as error:
                _note(reasons, address, error.strerror or str(error))
                continue
            try:
                return _introduce(link, place, parent, reported, secret, deadline, problem)
            except (MessageError, OSError) as error:
                _note(reasons, address, str(error) or type(error).__name__)
                link.close()
            except BaseException:
                link.close()
                raise
        if deadline.is_over():
            raise RendezvousError(
                f"Rank {facts.rank} of {facts.world_size} on host {facts.host} could not reach the control "
                f"channel at rank {parent} within {deadline.timeout_s:.0f} s.",
                where=str(place),
                seen="\n".join(f"{address}: {'; later: '.join(each)}" for address, each in reasons.items()),
                likely="a firewall between the hosts, or addresses that lead elsewhere on this host",
                hint="let the hosts of a job reach each other on all ports",
                missing=(parent,),
            )
        time.sleep(_RETRY_S)


def _note(reasons: dict[str, list[str]], address: str, reason: str) -> None:
    first = reasons.setdefault(address, [reason])[0]
    reasons[address] = [first] if reason == first else [first, reason]


def _introduce(
    link: socket.socket,
    place: Place,
    parent: int,
    reported: Sequence[Facts],
    secret: bytes,
    deadline: Deadline,
    problem: Mismatch | None,
) -> tuple[dict[int, Connection], tuple[Member, ...]]:
    """Raises OSError or MessageError if another process listens there."""
    kind, raw = receive_frame(link, Deadline(_CONNECT_WITHIN_S), LONGEST_HELLO)
    hub_nonce = read_challenge(raw if kind is Frame.CHALLENGE else b"", place.channel)
    handshake = Handshake(secret, place.channel, hub_nonce, secrets.token_bytes(NONCE_BYTES))
    facts = replace(reported[0], clock_s=time.time())
    # One row for each rank; JSON has no line breaks of its own.
    own = b"\n".join(each.pack() for each in (facts, *(reported[1:] if problem is None else (problem,))))
    hello = join_payloads([own, handshake.rank_nonce, handshake.membership, handshake.prove("rank", own)])
    send_frame(link, Frame.HELLO if problem is None else Frame.FAILED, hello, deadline)
    kind, raw = receive_frame(link, Deadline(deadline.left_s() + _GRACE_S), _longest_welcome(facts))
    if kind is Frame.FAILED:
        raise refusal(facts, Mismatch.unpack(raw), str(place))
    table, fingerprint, proof = split_payloads(raw if kind is Frame.WELCOME else b"", 3)
    if not handshake.is_proof(proof, "hub", join_payloads([table, fingerprint])):
        raise refusal(
            facts,
            Mismatch(
                f"the process that answers at {link.getpeername()[0]} does not know the secret of "
                f"{facts.describe()}",
                f"another process answers in the place of rank {parent}: look at what listens there",
            ),
            str(place),
        )
    members = read_members(table, facts.world_size)
    try:
        tls = _encrypt(link, fingerprint, deadline) if fingerprint else None
    except OSError as error:  # not retried: the other end counts this rank as connected already
        raise RendezvousError(
            f"Rank {facts.rank} of {facts.world_size} on host {facts.host} could not encrypt its connection "
            f"to rank {parent}.",
            where=f"the start of the control channel ({place})",
            seen=str(error) or type(error).__name__,
            likely="the connection was cut, or something between the hosts answers in the place of that rank",
            hint=f"look at the output of rank {parent}, and at what lies between the hosts",
            rank=facts.rank,
        ) from error
    return {parent: Connection(link, handshake, tls, is_hub=False)}, members


def _encrypt(link: socket.socket, fingerprint: bytes, deadline: Deadline) -> Tls:
    """Raises ConnectionError (an OSError) if the other end is not the hub."""
    from paceline.health import tls

    ours, piece = tls.Tls(), b""
    while not ours.is_open:
        ours.decrypt(piece)  # the first call, with no data, begins the handshake
        link.settimeout(max(deadline.left_s(), 1e-3))
        link.sendall(ours.encrypt(b""))
        if not ours.is_open and not (piece := link.recv(LONGEST_HELLO)):
            raise ConnectionError("the hub closed the connection")
    ours.check(fingerprint)
    return ours


def _longest_welcome(facts: Facts) -> int:
    return LONGEST_HELLO + 400 * facts.world_size  # a host's name has 255 bytes at most
