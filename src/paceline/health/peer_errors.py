"""Errors about ranks that are dead, late or have left, in the same words whichever detector found them.

The memory of a host holds the state of its ranks' processes and what each is doing (`records` of the core).
The control channel between hosts knows which connections were lost and how (`Loss`), and what ranks answer
when one is late (`Seen`). This module turns each of these into an error, or into the ranks that an error
names (`LateRanks`).

A failure travels as text: the ranks of a host report it through an abort word in their memory, those of
several hosts over the control channel. Both carry the same text (`pack_failure`), so that an error is the
same wherever it came from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from paceline.errors import (
    CollectiveError,
    DeadlineError,
    MismatchError,
    PacelineError,
    PeerLostError,
    format_ranks,
)
from paceline.health.channel_tree import HUB
from paceline.health.handshake import Member
from paceline.health.liveness_check import ASK_WITHIN_S, Answer, Seen
from paceline.rendezvous.messages import read_object
from paceline.stacks import STOPPED, process_state

SILENCE_VARIABLE = "PACELINE_SILENCE_S"
ACTIVITY_BYTES = 127
"""Most bytes of the activity that a rank publishes."""
RAISED = "raised "
"""Prefix of the activity of a rank whose last call of Paceline raised."""
FAILURE_BYTES = 1016
"""Most bytes of a packed failure. It fits into the message that the ranks of a host publish to each other."""
_PREFIX = "between hosts: "
_KINDS = {kind.__name__: kind for kind in (CollectiveError, PeerLostError, DeadlineError, MismatchError)}
_FIELDS = ("lost", "late")
_FAILURE_RANKS = 32
_SIGNS_OF_A_LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "roken pipe",
    "onnection closed",
    "onnection refused",
)
_SIGNS_OF_A_LATE_PEER = ("TIMEOUT", "Timed out", "Application timeout")


# --- the process group's own errors ---


def is_of_a_lost_peer(text: str) -> bool:
    """Whether the process group's own error reports a connection that broke."""
    return any(sign in text for sign in _SIGNS_OF_A_LOST_PEER)


def is_of_a_late_peer(text: str) -> bool:
    """Whether the process group's own error reports its deadline."""
    return any(sign in text for sign in _SIGNS_OF_A_LATE_PEER)


# --- late ---


def stacks_hint(rank: int, pid: int, host: str = "") -> str:
    """A hint: the command that shows where a rank is."""
    return f"`paceline stacks {pid}`{f' on host {host}' if host else ''} shows where rank {rank} is"


def timeout_hint(whom: str = "it") -> str:
    """A hint that names the arguments that set the time-out."""
    return f"`timeout_s` of the wrapper or the group (or `timeout` of init_process_group) gives {whom} longer"


@dataclass(frozen=True)
class LateRanks:
    ranks: tuple[int, ...]
    seen: str
    likely: str
    hint: str


def late_error(
    who: str, late: LateRanks, doing: str, where: str, text: str = "", after: str = ""
) -> DeadlineError:
    """The error that names late ranks."""
    fields: dict[str, Any] = {"late": late.ranks} if late.ranks else {}
    whom = f"for {format_ranks(late.ranks)} " if late.ranks else ""
    return DeadlineError(
        f"{who.capitalize()} gave up waiting {whom}to {doing}{after}.",
        where=where,
        seen="\n".join(filter(None, [late.seen, text])),
        likely=late.likely,
        hint=late.hint,
        **fields,
    )


def late_by_records(records: Sequence[dict[str, Any]]) -> LateRanks:
    return LateRanks(
        ranks_of(records),
        record_rows(records),
        "a rank skipped this backward, is stuck in its data loader, or was stopped",
        f"{stacks_hint(records[0]['rank'], records[0]['pid'])}; {timeout_hint()}",
    )


def late_ranks(seen: Seen, members: Sequence[Member], on_host: Sequence[int]) -> LateRanks | None:
    """The ranks to name after a liveness check; None if nothing is known.

    Ranks that do not answer are named alone: the others that compute may be waiting for them in some way.
    """
    silent = [members[rank] for rank in seen.silent if 0 <= rank < len(members)]
    unreached = [members[rank] for rank in seen.unreached if 0 <= rank < len(members)]
    there = [(members[rank], answer) for rank, answer in seen.answers.items() if 0 <= rank < len(members)]
    busy = [(member, answer) for member, answer in there if not answer.is_waiting]
    rows = [_silent_row(each, is_near=each.rank in on_host) for each in silent]
    rows += [f"{each.describe()} does not answer, and its host acknowledges nothing" for each in unreached]
    rows += [f"{member.describe()} {_words(answer)}" for member, answer in busy]
    if HUB in (*seen.silent, *seen.unreached):
        rows.append("all ranks are asked through rank 0, so what the others do is not known")
    if silent or unreached:
        likely, hint = zip(*filter(None, [_stopped(silent), _cut_off(unreached)]), strict=True)
        ranks = tuple(each.rank for each in (*silent, *unreached))
        return LateRanks(ranks, "\n".join(rows), "; ".join(likely), "; ".join(hint))
    if not there:
        return None
    if not busy:
        return LateRanks(
            (),
            "all others answer, and wait:\n"
            + "\n".join(f"{each.describe()} {_words(answer)}" for each, answer in there),
            "a rank skipped a forward or a backward, or made one too many, and ranks wait in different calls",
            f"make the same calls in the same order on every rank; {timeout_hint('them')}",
        )
    return LateRanks(
        tuple(member.rank for member, _ in busy),
        "\n".join(rows),
        "a rank skipped this backward, is stuck in its data loader, or in another call",
        f"{stacks_hint(busy[0][0].rank, busy[0][0].pid, busy[0][0].host)}; {timeout_hint()}",
    )


def _silent_row(member: Member, *, is_near: bool) -> str:
    if is_near and process_state(member.pid) in STOPPED:
        return f"{member.describe()} is stopped"
    return f"{member.describe()} does not answer on the control channel (asked for {ASK_WITHIN_S:g} s)"


def _stopped(silent: Sequence[Member]) -> tuple[str, str] | None:
    if not silent:
        return None
    return (
        f"the process of {format_ranks([each.rank for each in silent])} is stopped (SIGSTOP, a debugger), or "
        "holds Python's lock in a long call",
        f"look at pid {', '.join(str(each.pid) for each in silent)} on host {_hosts_of(silent)}; "
        f"`kill -CONT {' '.join(str(each.pid) for each in silent)}` there lets a stopped one go on",
    )


def _cut_off(unreached: Sequence[Member]) -> tuple[str, str] | None:
    if not unreached:
        return None
    hosts = _hosts_of(unreached)
    return (
        f"the network to {hosts} was cut, perhaps in one direction only, or is slow and has much to carry; "
        f"or {hosts} was switched off or stopped",
        f"look at the network and at {hosts}; the processes there may be well",
    )


def _hosts_of(members: Sequence[Member]) -> str:
    return ", ".join(sorted({each.host for each in members}))


def _words(answer: Answer) -> str:
    last = f"; last {answer.doing}" if answer.doing else ""
    if answer.is_waiting:
        return f"waits for others{last}"
    return f"answers, and is not in this call{last}" + (
        f"; its main thread: {answer.at}" if answer.at else ""
    )


# --- dead, or left ---


def died_error(ranks: Sequence[int], world_size: int, seen: str) -> PeerLostError:
    return PeerLostError(
        f"{format_ranks(ranks).capitalize()} of {world_size} died.",
        seen=seen,
        likely="it was killed (out of memory?) or crashed; its own output says more",
        hint="`paceline run` shows the signal that ended it; `dmesg` shows an out-of-memory kill",
        lost=tuple(ranks),
    )


def activity_of(error: PacelineError) -> str:
    """What a rank publishes if its call raises before it has reached the others.

    They quote it if they wait for this rank, unless it goes on.
    """
    text = f"{RAISED}{type(error).__name__}: {error.summary} {error.seen}".replace("\n", " ").strip()
    return text.encode("ascii", "replace")[:ACTIVITY_BYTES].decode()


def why_left(seen: str, otherwise: str) -> str:
    """The likely cause why ranks have left."""
    return (
        "the error that it raised; its script has caught that, and ended"
        if f"; {RAISED}" in seen
        else otherwise
    )


def left_error(ranks: Sequence[int], world_size: int, seen: str) -> PeerLostError:
    return PeerLostError(
        f"{format_ranks(ranks).capitalize()} of {world_size} {'has' if len(ranks) == 1 else 'have'} left.",
        seen=seen,
        likely=why_left(seen, "it has come to its end, or called sys.exit(), while others still train"),
        hint="every rank must make the same number of backward passes; or use ddp.finish() "
        "or ddp.iterate(loader)",
        lost=tuple(ranks),
    )


class How(Enum):
    ENDED = "ended"  # the kernel of a process that has died closed it
    SILENT = "silent"  # nothing comes from that host, or nothing reaches it
    RESET = "reset"  # that host, or something between, reset it
    UNREADABLE = "unreadable"  # what came over it cannot be read


@dataclass(frozen=True)
class Loss:
    """What a rank reports about ranks with which the connection is lost.

    Attributes:
        ranks: All of one host.
        how: A value of `How`.
        by: The rank that saw it.
        said: What it saw; "" if `how` says it all.
    """

    ranks: list[int]
    how: str
    by: int
    said: str = ""

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> Loss:
        """Raises MessageError if `raw` is not a loss."""
        loss = cls(**read_object(raw, {"ranks": list, "how": str, "by": int, "said": str}))
        How(loss.how)
        return loss

    def error(self, members: Sequence[Member], own_rank: int, silence_s: float) -> PeerLostError:
        lost, by, said = [members[rank] for rank in self.ranks], self.by, self.said
        who = f"{format_ranks(self.ranks).capitalize()} of {len(members)} on host {lost[0].host}"
        pids = f"pid {', '.join(str(each.pid) for each in lost)}"
        saw = "" if by == own_rank else f", as {members[by].describe()} saw"
        fields: dict[str, Any] = {"lost": tuple(self.ranks), "hosts": (lost[0].host,), "rank": own_rank}
        where = f"{members[own_rank].describe()}, control channel"
        between = f"between {members[by].host} and {lost[0].host}"
        if self.how == How.SILENT.value:
            seen = said or f"no sign of life of that host for {silence_s:g} s"
            if by in self.ranks:
                return PeerLostError(
                    f"{who} cannot reach each other over the network any more.",
                    where=where,
                    seen=f"{pids}: {seen}{saw}",
                    likely=f"the address of {lost[0].host} that these ranks use was removed",
                    hint=f"look at the addresses of {lost[0].host}; the processes there may be well",
                    **fields,
                )
            return PeerLostError(
                f"{who} cannot be reached any more.",
                where=where,
                seen=f"{pids}: {seen}{saw}",
                likely=f"the network {between} was cut, perhaps in one direction only, or one of them was "
                "switched off or stopped",
                hint=f"look at {lost[0].host}; {SILENCE_VARIABLE} allows a longer silence",
                **fields,
            )
        if self.how == How.RESET.value:
            return PeerLostError(
                f"The connection to {who[0].lower()}{who[1:]} was reset.",
                where=where,
                seen=f"{pids}: its end of the connection, or something in between, reset it{saw}",
                likely=f"the network {between} was cut in one direction, and that end gave up; or a firewall "
                "or router reset the connection; or the process ended",
                hint="look at its output: if it still runs, it says what it has seen of this host",
                **fields,
            )
        return PeerLostError(
            f"{who} {'ended its connection' if said else 'died'}.",
            where=where,
            seen=f"{pids}: {said or 'the kernel closed its connection, without a goodbye'}{saw}",
            likely="it was killed (out of memory?) or crashed; its own output says more",
            hint=f"look at its output; `dmesg` on {lost[0].host} shows an out-of-memory kill",
            **fields,
        )


# --- rows of error texts ---


def ranks_of(records: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    return tuple(int(facts["rank"]) for facts in records)


def last_activity(activity: str) -> str:
    if not activity:
        return ""
    return f"; {activity}" if activity.startswith(RAISED) else f"; last {activity}"


def record_rows(ranks: Sequence[dict[str, Any]]) -> str:
    verbs = {"alive": "is alive", "dead": "is dead", "left": "has left"}
    return "\n".join(
        f"rank {facts['rank']} (pid {facts['pid']}) {verbs.get(facts['state'], 'is missing')}"
        + last_activity(facts["activity"])
        for facts in ranks
    )


# --- failures as text ---


def pack_failure(error: BaseException, rank: int) -> str:
    """The report of a failure that all other ranks receive; see `unpack_failure`.

    Returns:
        ASCII, of at most FAILURE_BYTES; long texts are cut.
    """
    kind, fields = type(error).__name__, {}
    if kind in _KINDS and isinstance(error, CollectiveError):
        rows = {row: getattr(error, row) for row in ("summary", "where", "seen", "likely")}
        ranks = {name: error.fields[name] for name in _FIELDS if name in error.fields}
        fields = {name: list(each)[:_FAILURE_RANKS] for name, each in ranks.items()}
    else:
        kind, fields = "PeerLostError", {"lost": [rank]}
        rows = {"summary": f"Rank {rank} raised an exception.", "seen": f"{type(error).__name__}: {error}"}
    while True:
        packed = _PREFIX + json.dumps({"kind": kind, **rows, "fields": fields})
        if len(packed) <= FAILURE_BYTES:
            return packed
        longest = max(rows, key=lambda row: len(rows[row]))
        rows[longest] = f"{rows[longest][: len(rows[longest]) * 3 // 4]} ..."


def is_packed(error: CollectiveError) -> bool:
    """Whether the error carries a report of `pack_failure`, which is not meant to be shown as it is."""
    return error.seen.startswith(_PREFIX)


def unpack_failure(received: CollectiveError, by: str = "") -> CollectiveError:
    """The failure that another rank has reported; an error without a report is returned as it is."""
    if not is_packed(received):
        return received
    try:
        facts = json.loads(received.seen[len(_PREFIX) :])
        kind, its_fields = _KINDS[facts["kind"]], facts["fields"].items()
        summary = facts["summary"]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return received  # text of another program: shown as it is
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in its_fields
        if name in _FIELDS
    }
    return kind(
        summary,
        where=facts.get("where", ""),
        seen="\n".join(filter(None, [facts.get("seen", ""), by])),
        likely=facts.get("likely", ""),
        hint="that rank's traceback says more; this rank only reports it",
        **fields,
    )
