"""The warning about stragglers: which ranks another one waits for, and when it is repeated."""

from __future__ import annotations

from paceline.collectives.failures import Facts, describe_activity, describe_late, in_words, renumbered
from paceline.errors import format_ranks

DEFAULT_WARN_AFTER_S = 10.0
"""How long a rank waits before its first warning, if warn_after_s is not given."""


def describe_stragglers(facts: Facts) -> str:
    """The text of a warning: the ranks that this rank waits for, until when, and what to check."""
    facts = renumbered(facts)
    lines = [
        f"rank {facts['rank']} of {facts['world_size']} has waited {facts['waited_s']:.1f} s for "
        f"{_awaited(facts)} in group {facts['group']!r}, {describe_activity(facts)}",
        describe_late(facts),
        f"the wait ends with an error in {in_words(facts['left_s'])} (timeout_s)",
    ]
    if facts["late"]:
        pids = [facts["ranks"][rank]["pid"] for rank in facts["late"] if facts["ranks"][rank]["pid"]]
        lines[-1] += ". Most often such a rank has run out of data or took another branch"
        lines[-1] += f"; `paceline stacks {pids[0]}` shows where it is" if pids else ""
    return "\n".join(filter(None, lines))


def describe_unknown_stragglers(who: str, where: str, waited_s: float, left_s: float) -> str:
    """The text of a warning of a rank that waits in a process group, which does not show who is late."""
    return (
        f"{who} has waited {waited_s:.0f} s for some rank: {where}\n"
        f"  the wait ends with an error in {in_words(left_s)} (timeout_s). "
        "Most often a rank has run out of data or took another branch"
    )


def next_warning_s(warn_after_s: float, waited_s: float) -> float:
    """Seconds after the start of a wait at which the next warning is due; as the core's next_warning_ns."""
    unit_s = max(warn_after_s, 1e-3)
    for times in (3, 6, 12):
        if waited_s < times * unit_s:
            return times * unit_s
    return (waited_s // (30 * unit_s) + 1) * 30 * unit_s


def _awaited(facts: Facts) -> str:
    if facts["late"]:
        return format_ranks(facts["late"])
    if facts["ranks"][facts["rank"]]["waits_in"] == "host_sums":
        return "its peers on other hosts"
    return "something of which no rank is known to be late"
