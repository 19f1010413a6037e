"""The handshake of two ends of a control connection, in which each proves that it knows the job's secret.

    hub                                          rank
    CHALLENGE  protocol, channel's digest, nonce  ->
                                                  <-  HELLO  facts, nonce, that it knows the channel, proof
    (checks the proof, then the facts)
    WELCOME    all members, certificate, proof    ->         (checks the proof)
    TLS 1.3, if there is a certificate           <->         (checks that it is this one)

A proof is an HMAC-SHA256 with the job's secret over the sender's role, the channel, both nonces and the whole
message, so it is useless at another time, for another rank, or in the other direction. After the handshake
each frame carries a code over its kind, text and number, with a key derived from both nonces: no frame can be
altered, left out or repeated. If there is a secret, `tls` encrypts everything. A job without a secret uses an
empty one: the same steps then keep out unknown peers that connect by mistake, but no attacker.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.rendezvous.frames import Frame
from paceline.rendezvous.messages import (
    MessageError,
    join_payloads,
    read_object,
    split_payloads,
)

PROTOCOL = 3
NONCE_BYTES = 16
MOST_CLOCK_OFFSET_S = 600.0
"""Above this, logs and time stamps of checkpoints are useless; training itself would not be affected."""
_CODE_BYTES = 16
_ONE_JOB = "give each process a rank of its own, and each job a MASTER_PORT of its own"
_ONE_VERSION = "install the same versions on all hosts"


@dataclass(frozen=True)
class Facts:
    """What a rank reports about itself when it connects.

    Attributes:
        rank: In the group that the channel serves.
        world_size: Number of ranks in that group.
        host: The name of its host.
        pid: Its process id on that host.
        local_ranks: The ranks of its host, as it sees them.
        paceline: Version.
        framework: Name and version: "torch 2.13.0".
        job: A digest of the launcher's id of the job; "" if it has none.
        generation: How often its launcher has restarted it; each agent of torchrun counts its own restarts.
        clock_s: Seconds since 1970.
        has_secret: Whether it was given a secret.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    local_ranks: list[int]
    paceline: str
    framework: str
    job: str
    generation: str
    clock_s: float
    has_secret: bool

    def describe(self) -> str:
        return f"rank {self.rank} on host {self.host} (pid {self.pid})"

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> Facts:
        """Raises MessageError if `raw` does not hold facts."""
        facts = cls(**read_object(raw, _FIELDS))
        if not all(type(each) is int for each in facts.local_ranks):
            raise MessageError("local_ranks holds something else than numbers")
        return facts


_FIELDS: Mapping[str, type] = {
    "rank": int,
    "world_size": int,
    "host": str,
    "pid": int,
    "local_ranks": list,
    "paceline": str,
    "framework": str,
    "job": str,
    "generation": str,
    "clock_s": float,
    "has_secret": bool,
}


@dataclass(frozen=True)
class Handshake:
    """What both ends of a connection know before they prove anything.

    Attributes:
        secret: The job's secret; empty if it has none.
        channel: Random bytes that the ranks have exchanged over their group.
        hub_nonce: Chosen by the hub for this connection.
        rank_nonce: Chosen by the rank for it.
    """

    secret: bytes
    channel: bytes
    hub_nonce: bytes
    rank_nonce: bytes

    @property
    def membership(self) -> bytes:
        """Proves that a process is of this group and no unknown peer, even if it has another secret."""
        return hmac.digest(self.channel, self.hub_nonce + self.rank_nonce, "sha256")

    def prove(self, speaker: str, text: bytes) -> bytes:
        parts = (speaker.encode(), b"%d" % PROTOCOL, self.channel, self.hub_nonce, self.rank_nonce, text)
        return hmac.digest(self.secret, join_payloads(parts), "sha256")

    def is_proof(self, proof: bytes, speaker: str, text: bytes) -> bool:
        return hmac.compare_digest(proof, self.prove(speaker, text))

    def seal(self, speaker: str) -> Seal:
        return Seal(self.prove(f"frames of the {speaker}", b""))


class Seal:
    """Makes and checks the codes of one direction of a connection; each of its ends has one."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def close(self, kind: Frame, text: bytes) -> bytes:
        """The payload of a frame: the code, then the text."""
        code = self._code(kind, text)
        self._number += 1
        return code + text

    def open(self, kind: Frame, payload: bytes) -> bytes:
        """The text. Raises ConnectionError if it is not the other end's next message."""
        code, text = payload[:_CODE_BYTES], payload[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(kind, text)):
            raise ConnectionError("a message of the control channel was altered, repeated or left out")
        self._number += 1
        return text

    def _code(self, kind: Frame, text: bytes) -> bytes:
        head = self._number.to_bytes(8, "little") + bytes([kind])
        return hmac.digest(self._key, head + text, "sha256")[:_CODE_BYTES]


def write_challenge(channel: bytes, hub_nonce: bytes) -> bytes:
    return join_payloads([b"%d" % PROTOCOL, _digest(channel), hub_nonce])


def read_challenge(raw: bytes, channel: bytes) -> bytes:
    """The hub's nonce. Raises MessageError if `raw` is no challenge, or of another version or channel."""
    protocol, digest, nonce = split_payloads(raw, 3)
    if protocol != b"%d" % PROTOCOL or len(nonce) != NONCE_BYTES:
        raise MessageError("the process that listens there speaks another version of Paceline's protocol")
    if digest != _digest(channel):
        raise MessageError("the process that listens there is of another job")
    return nonce


def _digest(channel: bytes) -> bytes:
    return hashlib.sha256(channel).digest()[:8]


@dataclass(frozen=True)
class Mismatch:
    seen: str
    hint: str

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> Mismatch:
        """Raises MessageError if `raw` is not a mismatch."""
        return cls(**read_object(raw, {"seen": str, "hint": str}))


def secret_mismatch(hub: Facts, came: Facts) -> Mismatch:
    has = {True: "has a secret", False: "has none"}
    both = "have secrets that differ"
    words = f"{hub.describe()} {has[hub.has_secret]}, {came.describe()} {has[came.has_secret]}"
    if hub.has_secret and came.has_secret:
        words = f"{hub.describe()} and {came.describe()} {both}"
    return Mismatch(
        words,
        "give all ranks of the job the same secret: PACELINE_SECRET_FILE names a file of mode 0600 with the "
        "same content on all hosts",
    )


def mismatch(
    hub: Facts, came: Facts, members: Sequence[Facts], ranks_of_host: Sequence[int]
) -> Mismatch | None:
    """Why a rank that has connected does not belong to this job; None if it does."""
    one, other = hub.describe(), came.describe()
    if came.world_size != hub.world_size or not 0 <= came.rank < hub.world_size:
        return Mismatch(
            f"{one} expects {hub.world_size} ranks, {other} expects {came.world_size}",
            "start all hosts with the same WORLD_SIZE",
        )
    for what, mine, theirs, hint in (
        ("is of job", hub.job or "without an id", came.job or "without an id", _ONE_JOB),
        ("has Paceline", hub.paceline, came.paceline, f"pip install paceline=={hub.paceline} on all hosts"),
        ("has", hub.framework, came.framework, _ONE_VERSION),
    ):
        if mine != theirs:
            return Mismatch(f"{one} {what} {mine}, {other} {what} {theirs}", hint)
    for member in members:
        if member.rank == came.rank:
            return Mismatch(
                f"two processes claim rank {came.rank}: {member.describe()}, and {other}", _ONE_JOB
            )
    if list(ranks_of_host) != came.local_ranks:
        return Mismatch(
            f"{other} takes ranks {came.local_ranks} for those of its host, {one} ranks {[*ranks_of_host]}",
            _ONE_VERSION,
        )
    offset_s = came.clock_s - hub.clock_s
    if not abs(offset_s) <= MOST_CLOCK_OFFSET_S:
        return Mismatch(
            f"the clock of {other} is {offset_s:+.0f} s from that of {one}",
            "set the clocks of all hosts (timedatectl, chrony)",
        )
    return None


@dataclass(frozen=True)
class Member:
    rank: int
    host: str
    pid: int

    def describe(self) -> str:
        return f"rank {self.rank} on host {self.host} (pid {self.pid})"


def write_members(members: Sequence[Facts] | Sequence[Member]) -> bytes:
    return json.dumps([[each.rank, each.host, each.pid] for each in members]).encode()


def read_members(raw: bytes, world_size: int) -> tuple[Member, ...]:
    """The members by rank. Raises MessageError if `raw` is no such list."""
    try:
        rows: list[Any] = json.loads(raw)
        found = sorted(
            (Member(int(rank), str(host), int(pid)) for rank, host, pid in rows), key=lambda each: each.rank
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise MessageError(f"no list of members ({type(error).__name__})") from error
    if [each.rank for each in found] != list(range(world_size)):
        raise MessageError(f"a list of other members than {world_size} ranks")
    return tuple(found)
