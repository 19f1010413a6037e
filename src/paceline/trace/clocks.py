"""One clock for several hosts, out of what their ranks have recorded.

No rank leaves a backward before every rank has come to its end. So of each backward we know on
which side of the truth a guess is: what host B's last rank did before host A's first rank went on, and the
reverse. Over many backward passes both bounds close in to the time of a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.trace.timeline import BackwardKey, RankTimeline


def on_one_clock(timelines: Sequence[RankTimeline]) -> list[RankTimeline]:
    hosts: dict[str, list[RankTimeline]] = {}
    for each in timelines:
        hosts.setdefault(each.recording.header.boot, []).append(each)
    first = next(iter(hosts.values()), [])
    ahead = {boot: ahead_ns(first, others) if others is not first else 0 for boot, others in hosts.items()}
    return [each.shifted(-ahead[each.recording.header.boot]) for each in timelines]


def ahead_ns(host: Sequence[RankTimeline], other: Sequence[RankTimeline]) -> int:
    """How far the clock of the other host is ahead of this host's.

    Example:
        This host's last rank came to the end of a backward at 100 and its first went on at 160; the other
        host's came at 1150 and went on at 1170. So the other clock is ahead by 990 (1150 - 160) at least and
        by 1070 (1170 - 100) at most: 1030.
    """
    came, left = _bounds(host)
    other_came, other_left = _bounds(other)
    shared = came.keys() & other_came.keys()
    if not shared:
        return _by_real_time(other) - _by_real_time(host)
    least = max(other_came[key] - left[key] for key in shared)
    most = min(other_left[key] - came[key] for key in shared)
    return (least + most) // 2


def _bounds(ranks: Sequence[RankTimeline]) -> tuple[Mapping[BackwardKey, int], Mapping[BackwardKey, int]]:
    """When the last rank of a host came to the end of each good backward, and when its first one went on."""
    failed = set().union(*(each.failed for each in ranks))
    keys = set.intersection(*(each.arrivals.keys() & each.ends.keys() for each in ranks)) - failed
    came = {key: max(each.arrivals[key] for each in ranks) for key in keys}
    left = {key: min(each.ends[key] for each in ranks) for key in keys}
    return came, left


def _by_real_time(ranks: Sequence[RankTimeline]) -> int:
    header = ranks[0].recording.header
    return header.monotonic_ns - header.real_ns
