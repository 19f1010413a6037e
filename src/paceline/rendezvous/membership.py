"""Checks the ranks of a job before the framework forms a group: ranks that do not match raise at once.

If a framework is given different world sizes, or the same rank twice, it waits for a process that never
comes. Here each rank writes its facts into a store, reads those of all ranks, and checks them. All ranks read
the same facts, so all come to the same result.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from paceline.errors import RendezvousError, format_ranks
from paceline.rendezvous.addresses import no_way_to
from paceline.rendezvous.deadline import call_within
from paceline.rendezvous.signatures import LOSSLESS, ForeignValueError, KeyStore, Signatures

_SHORTEST_NAP_S = 0.002
_LONGEST_NAP_S = 0.05
_LINGER_S = 2.0
_ANSWER_WITHIN_S = 5.0  # after the deadline: by then a working store has shown the rank which others are late
_LONGEST_ARRIVAL = 4096  # characters
_SAY_EVERY_S = 10.0
_ONE_VERSION = "install the same versions on all hosts"


class MembershipStore(KeyStore, Protocol):
    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0; returns its new value."""
        ...


@dataclass(frozen=True)
class Arrival:
    """One process that has arrived.

    Attributes:
        rank: The rank that it claims.
        world_size: The number of ranks that it expects.
        host: The name of its host.
        pid: Its process id on that host.
        job: A digest of the launcher's id of the job; "" if it has none.
        paceline: Its version of Paceline.
        framework: Name and version: "torch 2.13.0".
        problem: Why it cannot go on, in words; "" if it can.
        unreachable: Why no other host could reach it; "" if no reason is known.
        address: The address at which it was configured to listen; "" if none was configured.
        interface: A description of that.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    job: str
    paceline: str
    framework: str
    problem: str = ""
    unreachable: str = ""
    address: str = ""
    interface: str = ""

    @staticmethod
    def read(text: str) -> Arrival | None:
        try:
            reported = json.loads(text) if len(text) <= _LONGEST_ARRIVAL else None
        except (ValueError, RecursionError):
            return None
        if (
            not isinstance(reported, dict)
            or {name: type(value) for name, value in reported.items()} != _KINDS
        ):
            return None
        return Arrival(**reported)

    def write(self) -> str:
        reported = asdict(self)
        reported |= {
            name: reported[name][: _LONGEST_ARRIVAL // 8] for name in ("problem", "unreachable", "interface")
        }
        return json.dumps(reported)

    def describe(self) -> str:
        return f"rank {self.rank} on host {self.host} (pid {self.pid})"


_KINDS = {
    "rank": int,
    "world_size": int,
    "host": str,
    "pid": int,
    "job": str,
    "paceline": str,
    "framework": str,
    "problem": str,
    "unreachable": str,
    "address": str,
    "interface": str,
}


@dataclass(frozen=True)
class Membership:
    """All ranks of a job, once they have arrived, and the store that they used.

    Attributes:
        membership_store: Shared by all ranks.
        prefix: Begins the keys.
        own: This process.
        arrivals: All ranks, in the order of arrival.
        signatures: Make and check the codes of what is written there.
    """

    membership_store: MembershipStore
    prefix: str
    own: Arrival
    arrivals: tuple[Arrival, ...]
    signatures: Signatures

    @property
    def local_ranks(self) -> list[int]:
        return sorted(each.rank for each in self.arrivals if each.host == self.own.host)

    def latecomer(self) -> RendezvousError | None:
        """Why a process that has arrived since does not match, or None. Blocks 5 s at most.

        Two jobs without an id that use the same master address can only be told apart in this way.
        """
        found: list[str | None] = [None]
        key = f"{self.prefix}/arrival/{len(self.arrivals) + 1}"
        with contextlib.suppress(TimeoutError, RuntimeError):  # the store is gone: other calls report that
            call_within(_ANSWER_WITHIN_S, lambda: found.append(self.membership_store.read(key)))
        came = None if found[-1] is None else self._rank_in(key, found[-1])
        return None if came is None else mismatch(self.own, [*self.arrivals, came])

    def _rank_in(self, key: str, text: str) -> Arrival | None:
        raw = text.encode(errors=LOSSLESS)
        try:
            raw = self.signatures.read(key, raw)
        except ForeignValueError as error:
            if self.signatures.secret:
                return None
            raw = error.value
        return Arrival.read(raw.decode(errors=LOSSLESS))


def attend(
    membership_store: MembershipStore, prefix: str, own: Arrival, timeout_s: float, secret: bytes = b""
) -> Membership:
    """Wait until all ranks have arrived, and check that they match.

    Collective; blocks at most `timeout_s` and 5 s more. Every 10 s, rank 0 prints to standard error for which
    ranks it waits.

    Raises:
        RendezvousError: Two processes claim one rank, or expect different numbers of ranks, or have different
            secrets or versions, or are of different jobs; one of them cannot go on; a rank has not arrived in
            time; an unknown peer has written into the membership store; or the membership store does not
            answer.
    """
    arrivals: list[Arrival] = []
    signatures = Signatures(secret, "membership")
    try:
        # Calls of the membership store block forever while the process that serves it is stopped.
        call_within(
            timeout_s + _ANSWER_WITHIN_S,
            lambda: _see_all_reached(membership_store, prefix, own, timeout_s, arrivals, signatures),
        )
    except TimeoutError:
        raise _unanswered(own, arrivals, timeout_s) from None
    except RendezvousError:
        raise
    except RuntimeError as error:
        raise _lost(own, arrivals, error) from error
    return Membership(membership_store, prefix, own, tuple(arrivals), signatures)


def _see_all_reached(
    membership_store: MembershipStore,
    prefix: str,
    own: Arrival,
    timeout_s: float,
    arrivals: list[Arrival],
    signatures: Signatures,
) -> None:
    """Like `_see_all_come`. If a rank has a configured address, also check that all other hosts can reach it.

    Only each host itself knows its routes. So all ranks arrive a second time, with the problems found.
    """
    _see_all_come(membership_store, prefix, own, timeout_s, arrivals, signatures)
    others = {each.address: each for each in arrivals if each.host != own.host and each.address}
    if not any(each.address for each in arrivals):
        return
    problem = ""
    for address, other in others.items():
        if reason := no_way_to(address):
            problem = (
                f"there is no way to {other.describe()}: {reason}; that rank uses "
                f"{other.interface}; GLOO_SOCKET_IFNAME names the interface that leads to all other hosts"
            )
            break
    again = replace(own, problem=problem)
    _see_all_come(
        membership_store, f"{prefix}/ways", again, timeout_s, [], signatures, num_sure=own.world_size
    )


def _see_all_come(
    membership_store: MembershipStore,
    prefix: str,
    own: Arrival,
    timeout_s: float,
    arrivals: list[Arrival],
    signatures: Signatures,
    num_sure: int = 0,
) -> None:
    """Append each rank that arrives to `arrivals`, until all have. `num_sure` ranks are known to arrive."""
    key = f"{prefix}/arrival/{membership_store.add(f'{prefix}/arrivals', 1)}"
    membership_store.write(key, signatures.sign(key, own.write().encode()).decode())
    begun = printed_at = time.monotonic()
    nap_s = _SHORTEST_NAP_S
    while True:
        key = f"{prefix}/arrival/{len(arrivals) + 1}"
        while (text := membership_store.read(key)) is not None:
            try:
                arrivals.append(_read(own, signatures, key, text))
            except RendezvousError:
                _leave(membership_store, prefix, own, num_sure)
                raise
            key = f"{prefix}/arrival/{len(arrivals) + 1}"
            nap_s = _SHORTEST_NAP_S
        now = time.monotonic()
        is_late = now > begun + timeout_s
        error = mismatch(own, arrivals) or (_late(own, arrivals, timeout_s) if is_late else None)
        if error is not None:
            _leave(membership_store, prefix, own, num_sure)
            raise error
        if len(arrivals) == own.world_size:
            return
        if own.rank == 0 and now >= printed_at + _SAY_EVERY_S:
            printed_at = now
            _say_who_is_missing(own, arrivals, now - begun)
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)


def _read(own: Arrival, signatures: Signatures, key: str, text: str) -> Arrival:
    """Raises RendezvousError if a process without this rank's secret has written this."""
    raw, foreign = text.encode(errors=LOSSLESS), None
    try:
        raw = signatures.read(key, raw)
    except ForeignValueError as error:
        raw, foreign = error.value, error.reason
    came = Arrival.read(raw.decode(errors=LOSSLESS)) if foreign != "" else None
    if came is None:
        raise _unknown_peer(own, text)
    if foreign is not None:
        raise _refusal(
            own,
            "The ranks of this job do not have the same secret.",
            seen=f"{came.describe()} {foreign.replace('this rank', own.describe())}"
            + (f"\n{came.describe()}: {came.problem}" if came.problem else ""),
            likely="PACELINE_SECRET_FILE or PACELINE_SECRET is set on some hosts only, or the files differ; "
            "or an unknown peer claims to be this rank",
            hint="PACELINE_SECRET_FILE names a file of mode 0600 with the same content on all hosts; Open "
            "MPI hands the variable on to other hosts with `mpirun -x PACELINE_SECRET_FILE`",
            ranks=(own, came),
        )
    return came


def _say_who_is_missing(own: Arrival, arrivals: Sequence[Arrival], waited_s: float) -> None:
    missing = sorted(set(range(own.world_size)) - {each.rank for each in arrivals})
    hosts = sorted({each.host for each in arrivals})
    print(
        f"paceline: {own.describe()} has waited {waited_s:.0f} s for {format_ranks(missing)} of "
        f"{own.world_size}; {len(arrivals)} came, of {', '.join(hosts[:8])}",
        file=sys.stderr,
        flush=True,
    )


def mismatch(own: Arrival, arrivals: Sequence[Arrival]) -> RendezvousError | None:
    by_rank: dict[int, Arrival] = {}
    # In the order of ranks, so that the error does not depend on the order of arrival.
    arrivals = sorted(arrivals, key=lambda each: each.rank)
    for each in arrivals:
        first = arrivals[0]
        if each.job != first.job:
            return _refusal(
                own,
                "Two jobs meet at one address.",
                seen=f"{first.describe()} is of {_job(first)}, {each.describe()} of {_job(each)}",
                likely="both were given the same MASTER_ADDR and MASTER_PORT; or PACELINE_JOB_ID is not the "
                "same on all hosts",
                hint="give each job a MASTER_PORT of its own",
                ranks=(first, each),
            )
        if each.world_size != first.world_size:
            return _refusal(
                own,
                "Ranks disagree about the world size.",
                seen=f"{first.describe()} expects {first.world_size} ranks, {each.describe()} expects "
                f"{each.world_size}",
                likely="WORLD_SIZE, or the number of hosts or of ranks on each, differs between the hosts; "
                "or two jobs meet at one address",
                hint="start all hosts with the same numbers, and each job with a MASTER_PORT of its own",
                ranks=(first, each),
            )
        for what in ("paceline", "framework"):
            one, other = getattr(first, what), getattr(each, what)
            if one != other:
                name = "Paceline " if what == "paceline" else ""
                return _refusal(
                    own,
                    "Ranks have different versions.",
                    seen=f"{first.describe()} has {name}{one}, {each.describe()} has {name}{other}",
                    likely="the hosts have different environments",
                    hint=_ONE_VERSION,
                    ranks=(first, each),
                )
        holder = by_rank.setdefault(each.rank, each)
        if holder is not each:
            return _refusal(
                own,
                f"Two processes claim rank {each.rank} of {own.world_size}.",
                seen=f"{holder.describe()}, and {each.describe()}",
                likely="RANK, or the number of the host (--node-rank), was given twice; or two jobs meet at "
                "one address",
                hint="give each process a rank of its own, and each job a MASTER_PORT of its own",
                ranks=(holder, each),
            )
        problem = each.problem or (each.unreachable if any(one.host != each.host for one in arrivals) else "")
        if problem:
            return _refusal(
                own,
                f"Rank {each.rank} of {own.world_size} cannot join.",
                seen=f"{each.describe()}: {problem}",
                likely=f"host {each.host} is set up in another way than the others",
                hint=f"mend it on host {each.host}",
                ranks=(each, each),
            )
    return None


def _refusal(
    own: Arrival, summary: str, *, seen: str, likely: str, hint: str, ranks: tuple[Arrival, Arrival]
) -> RendezvousError:
    return RendezvousError(
        summary,
        where=f"{own.describe()} of {own.world_size}, before a group is formed",
        seen=seen,
        likely=likely,
        hint=hint,
        hosts=tuple(each.host for each in ranks),
        ranks=tuple(each.rank for each in ranks),
    )


def _unknown_peer(own: Arrival, text: str) -> RendezvousError:
    return RendezvousError(
        "The store of this job holds what no rank of Paceline has written.",
        where=f"{own.describe()} of {own.world_size}, before a group is formed",
        expected="who a rank is",
        got=ascii(text if len(text) <= 80 else f"{text[:80]}..."),
        likely="another program, or another version of Paceline, uses the same address",
        hint="give each job a MASTER_PORT of its own, and install one version of Paceline on all hosts",
    )


def _job(arrival: Arrival) -> str:
    return f"the job with digest {arrival.job}" if arrival.job else "a job without an id"


def _late(own: Arrival, arrivals: Sequence[Arrival], timeout_s: float) -> RendezvousError:
    missing = sorted(set(range(own.world_size)) - {each.rank for each in arrivals})
    came = "; ".join(each.describe() for each in sorted(arrivals, key=lambda each: each.rank)[:8])
    return RendezvousError(
        f"Rank {own.rank} of {own.world_size} gave up waiting for {format_ranks(missing)} "
        f"after {timeout_s:.1f} s.",
        where=f"{own.describe()}, before a group is formed",
        seen=f"{len(arrivals)} came: {came}{', ...' if len(arrivals) > 8 else ''}",
        likely="these ranks were not started, died, or cannot reach the address of rank 0",
        hint="look at their output; `timeout` gives them longer",
        missing=tuple(missing),
    )


def _lost(own: Arrival, arrivals: Sequence[Arrival], error: RuntimeError) -> RendezvousError:
    return RendezvousError(
        f"Rank {own.rank} of {own.world_size} lost the store of this job.",
        where=f"{own.describe()}, before a group is formed",
        seen=f"{str(error).splitlines()[0] if str(error) else type(error).__name__}; {len(arrivals)} of "
        f"{own.world_size} ranks had come when it last answered",
        likely="the process that serves it has ended: rank 0, or torchrun's agent on the first host",
        hint="look at that process's output first",
    )


def _unanswered(own: Arrival, arrivals: Sequence[Arrival], timeout_s: float) -> RendezvousError:
    return RendezvousError(
        f"Rank {own.rank} of {own.world_size} gave up after {timeout_s + _ANSWER_WITHIN_S:g} s: the store of "
        "this job does not answer.",
        where=f"{own.describe()}, before a group is formed",
        seen=f"{len(arrivals)} of {own.world_size} ranks had come when it last answered",
        likely="the process that serves it is stopped: rank 0, or torchrun's agent on the first host; or the "
        "network does not reach that host any more",
        hint="look at that process (state T in `ps`), and at the link to its host",
    )


def _leave(membership_store: MembershipStore, prefix: str, own: Arrival, num_sure: int) -> None:
    """Let the other ranks read the store, too, before rank 0 ends, which ends the store."""
    left = membership_store.add(f"{prefix}/left", 1)
    deadline = time.monotonic() + _LINGER_S
    # Wait for all ranks that have arrived or are known to arrive, not only for those that this rank had read
    # when it found one that does not match.
    while (
        own.rank == 0
        and left < max(num_sure, membership_store.add(f"{prefix}/arrivals", 0))
        and time.monotonic() < deadline
    ):
        time.sleep(_LONGEST_NAP_S)
        left = membership_store.add(f"{prefix}/left", 0)
