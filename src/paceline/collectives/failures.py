"""Turns the failures that the core reports into errors with messages.

The core reports what it saw as a dict (cpp/bind/failures.cc): the reason, the culprit, how long this rank
waited, what each rank was calling, and whether it is alive.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from paceline import _core
from paceline.collectives.ops import DTYPE_NAMES, ReduceOp
from paceline.errors import (
    CollectiveError,
    ConfigError,
    DeadlineError,
    ForkedError,
    GroupClosedError,
    MismatchError,
    PacelineError,
    PeerLostError,
    RegionError,
    format_ranks,
)
from paceline.health.peer_errors import stacks_hint, timeout_hint, why_left
from paceline.rendezvous.resource_limits import START_OF_THREAD, explain

Facts = Mapping[str, Any]


class Reason(IntEnum):
    DIED = _core.REASONS["died"]
    RAISED = _core.REASONS["raised"]
    LEFT = _core.REASONS["left"]
    DEADLINE = _core.REASONS["deadline"]
    MISMATCH = _core.REASONS["mismatch"]
    CLOSED = _core.REASONS["closed"]
    FORKED = _core.REASONS["forked"]
    INTERRUPTED = _core.REASONS["interrupted"]
    NO_MEMORY = _core.REASONS["no_memory"]
    MISUSE = _core.REASONS["misuse"]
    INJECTED = _core.REASONS["injected"]
    NESTED = _core.REASONS["nested"]
    NO_TURN = _core.REASONS["no_turn"]
    TOO_MANY = _core.REASONS["too_many"]


_KINDS = {number: name for name, number in _core.CALL_KINDS.items()} | {
    _core.CALL_KINDS["none"]: "no call yet"
}
_STATES = {"alive": "is alive", "dead": "is dead", "left": "has left"}
_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


def describe_call(call: Facts) -> str:
    """A call with its arguments and its number, for messages."""
    kind = _KINDS[call["kind"]]
    details = []
    if kind in _REDUCTIONS:
        details.append(f"{DTYPE_NAMES[call['dtype']]} x {call['count']}")
        details.append(ReduceOp(call["op"]).name.lower())
    elif call["count"]:
        details.append(f"{call['count']} bytes")
    if kind in _ROOTED:
        details.append(f"root {call['root']}")
    spelled = f"{kind}({', '.join(details)})" if details else kind
    return f"{spelled}, call #{call['number']}" if call["number"] else spelled


def describe_late(facts: Facts) -> str:
    lines = []
    for rank in facts["late"]:
        seen = facts["ranks"][rank]
        if seen["state"] == "missing":
            lines.append(f"rank {rank} has not joined the group")
            continue
        if rank in facts["waiting"] and seen["waits_in"]:
            lines.append(f"rank {rank} (pid {seen['pid']}) {_describe_wait(seen)}")
            continue
        doing = seen["activity"] or f"last call: {describe_call(seen['call'])}"
        lines.append(f"rank {rank} (pid {seen['pid']}) {_STATES[seen['state']]}; {doing}")
    return "\n".join(lines)


def _describe_wait(seen: Facts) -> str:
    kind = seen["waits_in"]
    place = f"in {describe_call(seen['call'])}" if kind == "call" else _PLACES[kind]
    if kind == "message":
        place += format_ranks(seen["waits_for"])
    return f"waits {place}" + (f"; {seen['activity']}" if seen["activity"] else "")


_PLACES = {
    "forming": "for the others to join the group",
    "backward": "at the end of a backward",
    "host_sums": "for gradients of the ranks of its host",
    "message": "for a message from or to ",
}

_numbers: dict[str, tuple[tuple[int, ...], int]] = {}  # name of a group -> numbers of its ranks, world size


def number_ranks(name: str, ranks: Sequence[int], world_size: int) -> None:
    """Let errors of this group name its ranks by these numbers, for the group of one of several hosts.

    A name must stand for the same ranks in the whole process.
    """
    _numbers[name] = (tuple(ranks), world_size)


def renumbered(facts: Facts) -> Facts:
    ranks, world_size = _numbers.get(facts.get("group", ""), ((), 0))
    if not ranks:
        return facts
    culprit = facts["culprit"]
    return {
        **facts,
        "rank": ranks[facts["rank"]],
        "culprit": ranks[culprit] if culprit >= 0 else culprit,
        "late": [ranks[rank] for rank in facts["late"]],
        "waiting": [ranks[rank] for rank in facts["waiting"]],
        "ranks": _ByNumber({ranks[each["rank"]]: _renumbered_rank(each, ranks) for each in facts["ranks"]}),
        "world_size": world_size,
    }


def _renumbered_rank(each: Facts, ranks: Sequence[int]) -> Facts:
    return {
        **each,
        "rank": ranks[each["rank"]],
        "waits_for": [ranks[rank] for rank in each["waits_for"]],
    }


class _ByNumber(dict[int, Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


def make_error(facts: Facts) -> PacelineError:
    return _MAKERS[Reason(facts["reason"])](renumbered(facts))


def in_words(seconds: float) -> str:
    """A duration in words, rounded for messages."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def describe_activity(facts: Facts) -> str:
    own, call = facts["ranks"][facts["rank"]], describe_call(facts["call"])
    activity = str(own["activity"])
    if not activity:
        return call
    is_earlier = activity.startswith("in backward") and own["waits_in"] != "call"
    if is_earlier or _KINDS[facts["call"]["kind"]] == "allocate":  # as a rule, that of the gradient buffer
        return activity
    return f"{activity}; last call: {call}"


def _where(facts: Facts) -> str:
    if "group" not in facts:
        return ""
    return (
        f"rank {facts['rank']} of {facts['world_size']}, group {facts['group']!r}, {describe_activity(facts)}"
    )


def _who(facts: Facts) -> str:
    lost = facts["late"] or [facts["culprit"]]
    return f"{format_ranks(lost).capitalize()} of {facts['world_size']}"


def _died(facts: Facts) -> PacelineError:
    return PeerLostError(
        f"{_who(facts)} died.",
        where=_where(facts),
        seen=_describe_deaths([facts["ranks"][rank] for rank in facts["late"]]),
        likely="it was killed (out of memory?) or crashed; its own output says more",
        hint="`paceline run` shows the signal that ended it; `dmesg` shows an out-of-memory kill",
        lost=tuple(facts["late"]),
        rank=facts["rank"],
    )


def _describe_deaths(dead: list[Mapping[str, Any]]) -> str:
    lines = [
        f"pid {each['pid']} crashed: {signal.Signals(each['crash_signal']).name}"
        for each in dead
        if each.get("crash_signal")
    ]
    pids = [str(each["pid"]) for each in dead if not each.get("crash_signal")]
    if pids:
        lines.append(f"the kernel reported the end of pid {', '.join(pids)} without a goodbye")
    return "\n".join(lines)


def _raised(facts: Facts) -> PacelineError:
    return PeerLostError(
        f"Rank {facts['culprit']} of {facts['world_size']} raised.",
        where=_where(facts),
        seen=facts["message"],
        likely="the error above is the cause; this rank only reports it",
        hint=f"look at rank {facts['culprit']}'s traceback",
        lost=(facts["culprit"],),
        rank=facts["rank"],
    )


def _left(facts: Facts) -> PacelineError:
    seen = describe_late(facts)
    return PeerLostError(
        f"{_who(facts)} left the group while rank {facts['rank']} waited for it.",
        where=_where(facts),
        seen=seen,
        likely=why_left(
            seen, "it exited or closed the group early: fewer batches, another branch, or sys.exit()"
        ),
        hint="all ranks must make the same calls; give each the same number of batches, or use "
        "ddp.iterate(loader)",
        lost=tuple(facts["late"]),
        rank=facts["rank"],
    )


def _deadline(facts: Facts) -> PacelineError:
    if not facts["late"]:
        return _no_rank_late(facts)
    if set(facts["late"]) <= set(facts["waiting"]):
        return _crossed(facts)
    return DeadlineError(
        f"{_who(facts)} did not arrive within {facts['waited_s']:.1f} s.",
        where=_where(facts),
        seen=describe_late(facts),
        likely="it took another branch, is stuck in its data loader, or was stopped",
        hint=_late_hint(facts, facts["late"]),
        late=tuple(facts["late"]),
        rank=facts["rank"],
    )


def _late_hint(facts: Facts, ranks: Sequence[int]) -> str:
    """A hint: how to look at the first of these ranks that has a process here, and how to wait longer."""
    present = [facts["ranks"][rank] for rank in ranks if facts["ranks"][rank]["state"] == "alive"]
    longer = timeout_hint("it" if len(ranks) == 1 else "them")
    return f"{stacks_hint(present[0]['rank'], present[0]['pid'])}; {longer}" if present else longer


def _no_rank_late(facts: Facts) -> PacelineError:
    """The error if no rank is known to be late.

    A rank that is stopped after its work, but before it has published that, does not appear to be late.
    """
    others = [each["rank"] for each in facts["ranks"] if each["rank"] != facts["rank"]]
    return DeadlineError(
        f"Rank {facts['rank']} of {facts['world_size']} waited {facts['waited_s']:.1f} s in vain; "
        "no rank is known to be late.",
        where=_where(facts),
        seen=describe_late({**facts, "late": [each["rank"] for each in facts["ranks"]]}),
        likely="a rank was stopped at the very end of its work",
        hint=_late_hint(facts, others),
        rank=facts["rank"],
    )


def _crossed(facts: Facts) -> PacelineError:
    """The error if all late ranks wait, too, in other calls: they may be waiting for the rank that raises."""
    odd = _out_of_step(facts)
    rest = sorted(set(facts["waiting"]) - set(odd))
    world_size, waited_s = facts["world_size"], facts["waited_s"]
    if odd:
        others = f"{'the others' if len(rest) > 1 else format_ranks(rest)}"
        summary = (
            f"{format_ranks(odd).capitalize()} of {world_size} did not arrive within {waited_s:.1f} s: "
            f"{'it waits' if len(odd) == 1 else 'they wait'} in another call than {others}."
        )
    else:
        summary = (
            f"{format_ranks(rest).capitalize()} of {world_size} wait for each other in different calls, "
            f"and did not meet within {waited_s:.1f} s."
        )
    return DeadlineError(
        summary,
        where=_where(facts),
        seen=describe_late({**facts, "late": sorted(facts["waiting"])}),
        expected="the same calls in the same order on every rank",
        likely="a rank skipped a forward, a backward or a call that others made, or made one too many",
        hint="look at the code around the two calls for a branch that depends on the rank or on its data",
        late=odd,
        rank=facts["rank"],
    )


def _out_of_step(facts: Facts) -> tuple[int, ...]:
    """If all ranks wait: those that wait in the wrong call; empty if that is unknown.

    A message has two ends, and each names the other rank. In a collective, the call in which most ranks wait
    is right. If no call has a majority, the ranks that have begun more forwards than others since the last
    backward are wrong: they made one too many, or skipped a backward.
    """
    own = facts["ranks"][facts["rank"]]
    if own["waits_in"] == "message":
        return tuple(own["waits_for"])
    waiting = [facts["ranks"][rank] for rank in sorted(facts["waiting"])]
    in_messages = tuple(each["rank"] for each in waiting if each["waits_in"] == "message")
    if in_messages:
        return in_messages
    sides: dict[int, list[Facts]] = {}
    for each in waiting:
        sides.setdefault(each["waits_at"], []).append(each)
    most = max(map(len, sides.values()))
    largest = [side for side in sides.values() if len(side) == most]
    right = largest[0]
    if len(largest) > 1:
        forwards = [max(each["forwards"] for each in side) for side in largest]
        fewest = max(1, min(forwards))  # a rank without more data has begun none
        right = [each for side, number in zip(largest, forwards) if number <= fewest for each in side]
        if len(right) == most * len(largest):
            return ()
    return tuple(each["rank"] for each in waiting if each not in right)


def _mismatch(facts: Facts) -> PacelineError:
    if facts["message"]:  # point to point: only two ranks are involved
        seen = facts["message"]
    else:
        calls: dict[str, list[int]] = {}
        for each in facts["ranks"]:
            calls.setdefault(describe_call(each["same_call"]), []).append(each["rank"])
        seen = "\n".join(f"{format_ranks(ranks)}: {call}" for call, ranks in calls.items())
    return MismatchError(
        f"The ranks of group {facts['group']!r} made different calls.",
        where=_where(facts),
        seen=seen,
        expected="the same collective, with the same type, size, reduction and root, in the same order",
        likely="a branch that depends on the rank or on its data, or one call more on some rank",
        hint="nothing was exchanged and the group stays usable",
        rank=facts["rank"],
    )


def _closed(facts: Facts) -> PacelineError:
    return GroupClosedError(
        "The group is closed.", where=_where(facts), hint="make the call before close(), or form a new group"
    )


def _forked(facts: Facts) -> PacelineError:
    return ForkedError(
        "A group was used in a forked child.",
        seen="this process was forked from the one that joined the group, and does not share its memory",
        likely="a DataLoader worker or a multiprocessing child that touches the group or the wrapped model",
        hint="use the group in the parent only, or start children with the 'spawn' method",
    )


def _interrupted(facts: Facts) -> PacelineError:
    return CollectiveError("The call was interrupted by a signal.", where=_where(facts))


def _nested(facts: Facts) -> PacelineError:
    doing = facts["message"] or describe_call(facts["call"])
    return CollectiveError(
        "A collective was called on a thread that is inside of another one.",
        where=_where(facts),
        seen=f"under way: {doing}",
        likely="a signal handler that interrupted it makes a collective itself (to save a checkpoint, say)",
        hint="let the handler set a flag, and act on the flag after the step; what is under way goes on",
        rank=facts["rank"],
    )


def _no_turn(facts: Facts) -> PacelineError:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    holder = names.get(facts["thread"], str(facts["thread"]))
    return DeadlineError(
        f"Another thread of this process was in a collective for {facts['waited_s']:.1f} s, "
        "so this call could not begin.",
        where=f"rank {facts['rank']} of {facts['world_size']}, group {facts['group']!r}",
        seen=f"thread {holder!r} is in {describe_call(facts['call'])}",
        likely="that call waits for a rank that is late; the collectives of a group take turns",
        hint="`timeout_s` gives it longer; or call again: this call has left no trace, and the group stays "
        "usable. A group for each thread (`group.subgroup`) lets their calls run side by side",
        rank=facts["rank"],
    )


def _no_memory(facts: Facts) -> PacelineError:
    likely, hint = explain(facts["errno"], facts["message"])
    failed = facts["late"]
    if likely and failed and facts["rank"] not in failed:  # a limit of another process
        likely = "a limit of that process, and not of the machine"
        hint = f"what {format_ranks(failed)} raised names the limit, and the cure"
    summary = "Shared memory could not be reserved."
    if facts["message"].startswith(START_OF_THREAD):
        summary = "The core could not start a thread."
    if failed:
        summary = f"{_who(facts)} could not reserve shared memory."
    return RegionError(
        summary,
        where=_where(facts),
        seen=facts["message"],
        likely=likely or "the machine or the container is out of memory",
        hint=hint or "check `free -h` and the container's memory limit; fewer ranks need less",
        errno=facts["errno"],
        ranks=tuple(failed),
    )


def _too_many(facts: Facts) -> PacelineError:
    return RegionError(
        f"{facts['message']} arrays are alive, as many as a group holds.",
        where=_where(facts),
        likely="each small value has an array of its own, or arrays are kept that are not needed any more",
        hint="one array, of which others are views; or drop those that are done with, on every rank",
        rank=facts["rank"],
    )


def _misuse(facts: Facts) -> PacelineError:
    return ConfigError(f"The core refused a call: {facts['message']}.", where=_where(facts))


def _injected(facts: Facts) -> PacelineError:
    return CollectiveError(f"{facts['message']}.", where=_where(facts))


_MAKERS = {
    Reason.DIED: _died,
    Reason.RAISED: _raised,
    Reason.LEFT: _left,
    Reason.DEADLINE: _deadline,
    Reason.MISMATCH: _mismatch,
    Reason.CLOSED: _closed,
    Reason.FORKED: _forked,
    Reason.INTERRUPTED: _interrupted,
    Reason.NO_MEMORY: _no_memory,
    Reason.MISUSE: _misuse,
    Reason.INJECTED: _injected,
    Reason.NESTED: _nested,
    Reason.NO_TURN: _no_turn,
    Reason.TOO_MANY: _too_many,
}

_core.set_failure_factory(make_error)
